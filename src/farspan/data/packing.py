"""Documents laid end to end and cut into sequences: a pure function of (seed, index).

    epoch 0                                 epoch 1, shuffled anew
    | doc 7 | doc 2        | doc 9 | doc 4 | doc 2        | doc 7 | ...
    |  sequence 0     |  sequence 1     |  sequence 2     |
                      ^ doc 2 is cut here: its rest is a document of its own in sequence 1

Nothing is read ahead and nothing is remembered but the order of two epochs, so a resumed run
needs the index alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from farspan.data.store import TokenStore

# A stream of random numbers for each purpose, so that none depends on how much another drew.
_SPLIT, _SHUFFLE = 0, 1


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `start` to `stop` of one document, as laid into a sequence."""

    document: int  # in the store
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of one length. Labels are the inputs: whoever uses them shifts once."""

    input_ids: np.ndarray  # [batch, tokens] int64
    document_ids: np.ndarray  # [batch, tokens] int64, rising by one where a document starts
    names: tuple[tuple[str, ...], ...]  # of the documents in each sequence, in order


@dataclass(frozen=True, slots=True)
class Order:
    """One epoch: its documents in shuffled order and where each ends."""

    documents: np.ndarray  # [documents] int64, ids in the store
    ends: np.ndarray  # [documents] int64, tokens from the start of the epoch


class Packing:
    """Sequences of `context` tokens from some documents of a store.

    Invariant: sequence i covers tokens [i * context, (i + 1) * context) of the endless
    concatenation of epochs, each a shuffle of all documents that depends on seed and epoch only.
    """

    def __init__(self, store: TokenStore, documents: np.ndarray, context: int, seed: int) -> None:
        self._store = store
        self._documents = documents
        self._context = context
        self._seed = seed
        lengths = np.diff(store.starts)[documents]
        self.tokens_per_epoch = int(lengths.sum())
        assert self.tokens_per_epoch > 0
        assert context > 0
        # A sequence touches two epochs at most, unless it is longer than one.
        self._order = lru_cache(maxsize=2)(self._shuffle)

    def sequences_per_epoch(self) -> int:
        """Sequences that cover every token once; the last may be short."""
        return -(-self.tokens_per_epoch // self._context)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Sequences by index, `[len(indices), context]`."""
        return self._batch([self._pieces(i * self._context, self._context) for i in indices])

    def once(self, index: int) -> Batch:
        """Sequence `index` of the first epoch alone, `[1, tokens]`: the last one ends with it."""
        start = index * self._context
        length = min(self._context, self.tokens_per_epoch - start)
        assert length > 0, index
        return self._batch([self._pieces(start, length)])

    def _shuffle(self, epoch: int) -> Order:
        order = _generator(self._seed, _SHUFFLE, epoch).permutation(self._documents)
        return Order(order, np.cumsum(np.diff(self._store.starts)[order]))

    def _pieces(self, start: int, length: int) -> list[Piece]:
        """The documents under tokens [start, start + length) of the endless concatenation."""
        pieces: list[Piece] = []
        while length > 0:
            epoch, offset = divmod(start, self.tokens_per_epoch)
            taken = min(length, self.tokens_per_epoch - offset)
            pieces.extend(self._within(self._order(epoch), offset, offset + taken))
            start, length = start + taken, length - taken
        return pieces

    def _within(self, order: Order, start: int, stop: int) -> Iterator[Piece]:
        place = int(np.searchsorted(order.ends, start, side="right"))
        while start < stop:
            document = int(order.documents[place])
            length = int(self._store.starts[document + 1] - self._store.starts[document])
            begin = int(order.ends[place]) - length
            end = min(stop, begin + length)
            yield Piece(document, start - begin, end - begin)
            start, place = end, place + 1

    def _batch(self, rows: list[list[Piece]]) -> Batch:
        return Batch(
            input_ids=np.stack([np.concatenate([self._ids(p) for p in row]) for row in rows]),
            document_ids=np.stack(
                [np.repeat(np.arange(len(row)), [p.stop - p.start for p in row]) for row in rows]
            ),
            names=tuple(tuple(self._store.name(p.document) for p in row) for row in rows),
        )

    def _ids(self, piece: Piece) -> np.ndarray:
        base = int(self._store.starts[piece.document])
        return self._store.tokens[base + piece.start : base + piece.stop].astype(np.int64)


def divide(documents: int, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents to train on and documents held out: disjoint, both sorted, a function of seed.

    `fraction` of them, rounded and at least one, is held out; none when it is zero.
    """
    order = _generator(seed, _SPLIT).permutation(documents)
    count = max(1, round(fraction * documents)) if fraction > 0 else 0
    return np.sort(order[count:]), np.sort(order[:count])


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
