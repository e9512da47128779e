"""A synthetic task that needs far retrieval: pairs of bytes hidden in text, asked for much later.

    text | .. key value .. key value .. | text | .. key [value] .. key [value] ..
    0    8                            1/2    5/8                                 1

Text is the Python standard library's own sources, on every machine that runs this; its bytes are
below 128, keys are 128 to 191, values 192 to 255. A sequence gives each of its keys a value at
random, says each pair once in the first half and asks for it once in the last three eighths. Only
the values of questions are trained and counted: nothing but the pair, at least an eighth of the
sequence back, tells them.
"""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from farspan import Step
from farspan.engine.loss import IGNORED

FIRST_KEY, FIRST_VALUE, CLASSES = 128, 192, 64
FIRST_PAIR = 8  # tokens before the first pair: a sink page shows them to all
ROUNDING = 1e-4  # of a mean of fp32 losses that is summed in another order


@dataclass(frozen=True, slots=True)
class Haystack:
    """Sequences of one length. `classes` is how many keys and how many values are in use."""

    tokens: int
    pairs: int  # in a sequence
    classes: int = CLASSES

    def __post_init__(self) -> None:
        assert self.pairs <= self.classes <= CLASSES, self
        assert self.pairs <= min(len(self.pair_slots), len(self.question_slots)), self

    @property
    def pair_slots(self) -> range:
        """Tokens where a pair may begin."""
        return range(FIRST_PAIR, self.tokens // 2, 2)

    @property
    def question_slots(self) -> range:
        """Tokens where a question may begin."""
        return range(self.tokens * 5 // 8 // 2 * 2, self.tokens - 1, 2)

    def draw(self, generator: Generator) -> "Sequence":
        """One sequence."""
        filler = text()
        start = int(torch.randint(len(filler) - self.tokens, (), generator=generator))
        ids = filler[start : start + self.tokens].long()
        keys = FIRST_KEY + torch.randperm(self.classes, generator=generator)[: self.pairs]
        values = FIRST_VALUE + torch.randint(self.classes, (self.pairs,), generator=generator)
        said = _some(self.pair_slots, self.pairs, generator)
        asked = _some(self.question_slots, self.pairs, generator)
        for places in (said, asked):
            ids[places], ids[places + 1] = keys, values
        labels = torch.full_like(ids, IGNORED)
        labels[asked + 1] = values
        return Sequence(ids, labels, said, asked)

    def batch(self, sequences: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """input_ids and labels, [sequences, tokens] each."""
        drawn = [self.draw(generator) for _ in range(sequences)]
        return torch.stack([s.ids for s in drawn]), torch.stack([s.labels for s in drawn])


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence [tokens], and where its pairs and questions begin [pairs]."""

    ids: Tensor
    labels: Tensor
    said: Tensor
    asked: Tensor


@dataclass(slots=True)
class Caught:
    """While it is entered: the logits that the model's head gives, in the order of tokens."""

    model: nn.Module
    pieces: list[Tensor] = field(default_factory=list)

    def __enter__(self) -> "Caught":
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        self._hook = head.register_forward_hook(lambda _, __, out: self.pieces.append(out.detach()))
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    _hook: torch.utils.hooks.RemovableHandle = field(init=False)


def accuracy(model: nn.Module, step: Step, sequences: Iterator[Sequence]) -> float:
    """Share of questions whose value is the most likely byte, by the attention of `step`."""
    right = asked = 0
    for sequence in sequences:
        ids, labels = sequence.ids[None], sequence.labels[None]
        with Caught(model) as caught:
            loss = float(step.evaluate(ids, labels))
        # Before them came the probes of a step that prepares for a model with the hook.
        logits = torch.cat(caught.pieces, 1)[0, -ids.shape[1] : -1].float()
        # What was caught is what the step computed its loss from.
        again = float(cross_entropy(logits, labels[0, 1:], ignore_index=IGNORED))
        assert abs(again - loss) <= ROUNDING * max(1.0, loss), (again, loss)
        given = logits[sequence.asked].argmax(1)
        right += int((given == sequence.ids[sequence.asked + 1]).sum())
        asked += len(sequence.asked)
    return right / asked


@cache
def text() -> Tensor:
    """Sources of the standard library, without the bytes of keys and values; uint8 [bytes]."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    written = b"".join(path.read_bytes() for path in sources)
    return torch.tensor([byte for byte in written if byte < FIRST_KEY], dtype=torch.uint8)


def _some(slots: range, count: int, generator: Generator) -> Tensor:
    drawn = torch.randperm(len(slots), generator=generator)[:count]
    return slots.start + slots.step * drawn
