"""What devices that share a model change of what each of them holds."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sharing:
    """How many devices have parts of what.

    With tensor parallelism a device has 1 / T of a chunk's tokens between a layer's blocks,
    attention and MLP, and gathers those of all T into each block: what is multiplied there, and so
    saved for the backward, are all tokens.
    """

    ranks: int = 1  # that share what is in `.grad`, by rows
    tensor: int = 1  # that share the weights of layers, by heads and features
    apart: bool = False  # sums are added over devices, so they are not `.grad`, however wide it is

    def slice(self, size: int) -> int:
        """Of a layer's weights."""
        return -(-size // self.tensor)

    def gathered(self, hidden_bytes: int) -> int:
        """Bytes that a layer's graph holds of other devices' tokens, where a chunk's hidden state
        of its own takes so many."""
        return BLOCKS * (self.tensor - 1) * hidden_bytes


BLOCKS = 2  # attention and MLP, each with tokens gathered once
ALONE = Sharing()
