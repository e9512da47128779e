"""Sequences of documents, as arrays: a pure function of (seed, index)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from farspan.data.forms import UNTRAINED
from farspan.data.pieces import Draw, Layout, Piece
from farspan.data.store import TokenStore

# Padding is documents of so many tokens: attention over it costs next to nothing.
_PADDED = 1024


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of one length. Labels are not shifted: whoever uses them does it once."""

    input_ids: np.ndarray  # [batch, tokens] int64
    labels: np.ndarray  # [batch, tokens] int64: the input, or UNTRAINED
    document_ids: np.ndarray  # [batch, tokens] int64, rising by one where a document starts
    names: tuple[tuple[str, ...], ...]  # of the documents in each sequence, in order
    tokens: int  # of documents: padding is not among them


class Packing:
    """Sequences of `context` tokens from the documents that a layout places."""

    def __init__(self, store: TokenStore, layout: Layout, context: int) -> None:
        self._store = store
        self._layout = layout
        self._context = context
        self.kept = layout.kept
        assert self.kept.tokens > 0
        # Positions of padding go no further than those of documents.
        self._padded = min(_PADDED, int(np.diff(store.starts).max()))

    def sequences_per_epoch(self) -> int:
        """Sequences that hold every token once."""
        return self._layout.sequences

    def batch(self, indices: Sequence[int]) -> Batch:
        """Sequences by index, `[len(indices), context]`."""
        return self._batch([self._layout.pieces(i) for i in indices], self._context)

    def once(self, index: int) -> Batch:
        """Sequence `index` of the first epoch alone, `[1, context]`: one length for all has one
        program and one set of kernel plans. Where there is no other it ends with its documents."""
        pieces = self._layout.once(index)
        alone = self._layout.sequences == 1
        length = sum(p.stop - p.start for p in pieces) if alone else self._context
        return self._batch([pieces], length)

    def _batch(self, rows: list[list[Piece]], length: int) -> Batch:
        ids, marks = np.zeros((2, len(rows), length), dtype=np.int64)
        labels = np.full_like(ids, UNTRAINED)
        tokens = 0
        for row, pieces in enumerate(rows):
            end = 0
            for number, piece in enumerate(pieces):
                begin, end = end, end + piece.stop - piece.start
                ids[row, begin:end], labels[row, begin:end] = self._read(piece)
                marks[row, begin:end] = number
            marks[row, end:] = len(pieces) + np.arange(length - end) // self._padded
            tokens += end
        names = tuple(tuple(self._store.name(p.document) for p in row) for row in rows)
        return Batch(ids, labels, marks, names, tokens)

    def _read(self, piece: Piece) -> tuple[np.ndarray, np.ndarray]:
        """Ids and labels, int64."""
        base = int(self._store.starts[piece.document])
        span = slice(base + piece.start, base + piece.stop)
        ids = self._store.tokens[span].astype(np.int64)
        if self._store.trained is None:
            return ids, ids
        return ids, np.where(self._store.trained[span], ids, UNTRAINED)


def divide(documents: int, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents to train on and documents held out: disjoint, both sorted, a function of seed.

    `fraction` of them, rounded and at least one, is held out; none when it is zero.
    """
    order = Draw.SPLIT.generator(seed).permutation(documents)
    count = max(1, round(fraction * documents)) if fraction > 0 else 0
    return np.sort(order[count:]), np.sort(order[:count])
