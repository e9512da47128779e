"""What is trained, and on what lengths."""

from dataclasses import dataclass
from random import Random

WARM = 2  # steps before the speed is measured: kernels load, optimizer states appear


@dataclass(frozen=True, slots=True)
class Work:
    """A model of random weights, and the lengths it is trained on."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocabulary: int
    shortest: int  # tokens
    longest: int
    steps: int

    def lengths(self) -> list[int]:
        """Of each step: drawn, and the longest once before the speed is measured."""
        random = Random(5)
        drawn = [random.randint(self.shortest, self.longest) for _ in range(self.steps)]
        drawn[WARM - 1] = self.longest
        return drawn


# 0.96 billion parameters, 8 GiB with gradients and states; some 10^14.6 operations a step: about a
# second on an H200.
FULL = Work(2048, 5632, 16, 16, 32768, shortest=16384, longest=32768, steps=12)
TINY = Work(32, 64, 2, 2, 128, shortest=24, longest=64, steps=4)
