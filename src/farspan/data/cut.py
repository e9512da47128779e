"""Documents laid end to end and cut into sequences: no padding, whatever their lengths.

    epoch 0                                 epoch 1, shuffled anew
    | doc 7 | doc 2        | doc 9 | doc 4 | doc 2        | doc 7 | ...
    |  sequence 0     |  sequence 1     |  sequence 2     |
                      ^ doc 2 is cut here: its rest is a document of its own in sequence 1

Nothing is read ahead and nothing is remembered but the order of two epochs, so a resumed run
needs the index alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from farspan.data.pieces import Draw, Kept, Piece


@dataclass(frozen=True, slots=True)
class Order:
    """One epoch: its documents in shuffled order and where each ends."""

    documents: np.ndarray  # [documents] int64, ids in the store
    ends: np.ndarray  # [documents] int64, tokens from the start of the epoch


class Cut:
    """Sequences of `context` tokens of the endless concatenation of epochs.

    Invariant: sequence i covers tokens [i * context, (i + 1) * context) of it; each epoch is a
    shuffle of all documents that depends on seed and epoch only.
    """

    def __init__(self, lengths: np.ndarray, documents: np.ndarray, context: int, seed: int) -> None:
        self._lengths = lengths
        self._documents = documents
        self._context = context
        self._seed = seed
        self._tokens = int(lengths[documents].sum())
        # A sequence touches two epochs at most, unless it is longer than one.
        self._order = lru_cache(maxsize=2)(self._shuffle)

    @property
    def sequences(self) -> int:
        """That cover every token once; the last may be short."""
        return -(-self._tokens // self._context)

    @property
    def kept(self) -> Kept:
        """Of the first epoch: in another order others are divided."""
        ends = self._order(0).ends
        begins = np.concatenate([[0], ends[:-1]])
        divided = int((begins // self._context != (ends - 1) // self._context).sum())
        return Kept(len(ends), divided, self._tokens, padding=0, left_out=0)

    def pieces(self, index: int) -> list[Piece]:
        return self._pieces(index * self._context, self._context)

    def once(self, index: int) -> list[Piece]:
        start = index * self._context
        length = min(self._context, self._tokens - start)
        assert length > 0, index
        return self._pieces(start, length)

    def _shuffle(self, epoch: int) -> Order:
        order = Draw.SHUFFLE.generator(self._seed, epoch).permutation(self._documents)
        return Order(order, np.cumsum(self._lengths[order]))

    def _pieces(self, start: int, length: int) -> list[Piece]:
        """The documents under tokens [start, start + length) of the endless concatenation."""
        pieces: list[Piece] = []
        while length > 0:
            epoch, offset = divmod(start, self._tokens)
            taken = min(length, self._tokens - offset)
            pieces.extend(self._within(self._order(epoch), offset, offset + taken))
            start, length = start + taken, length - taken
        return pieces

    def _within(self, order: Order, start: int, stop: int) -> Iterator[Piece]:
        place = int(np.searchsorted(order.ends, start, side="right"))
        while start < stop:
            document = int(order.documents[place])
            length = int(self._lengths[document])
            begin = int(order.ends[place]) - length
            end = min(stop, begin + length)
            yield Piece(document, start - begin, end - begin)
            start, place = end, place + 1
