"""Documents laid into sequences whole: best fit, the longest first, what stays free is padding.

    | doc 2                | doc 9 |.|      . padding
    | doc 7       | doc 4       |....|
    | doc 5, its first `context` tokens |   only what is longer than a sequence is divided
    | the rest of doc 5  | doc 1     |.|

The longest document that is left goes where the least room stays behind it ("Fewer Truncations
Improve Language Modeling", Ding et al., 2024, section 3). Which lengths share a sequence is the
same in every epoch; which document of a length is where, the order within a sequence and the order
of the sequences are drawn anew in each.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from farspan.data.pieces import Draw, Kept, Piece


@dataclass(frozen=True, slots=True)
class Parts:
    """Pieces of at most a sequence, the longest first: arrays with an element each."""

    documents: np.ndarray  # int64, ids in the store
    starts: np.ndarray  # int64, in the document
    lengths: np.ndarray  # int64


@dataclass(frozen=True, slots=True)
class Order:
    """One epoch: which part is in which place, and which sequence comes when."""

    parts: np.ndarray  # [places] int64
    sequences: np.ndarray  # [sequences] int64


class Whole:
    """Sequences of at most `context` tokens, each of documents that are whole or too long.

    `trained` says of each token of the store whether it is; None: all are. Pieces of which none is
    are left out; the first token of a piece has nothing to be predicted from.
    """

    def __init__(
        self,
        starts: np.ndarray,
        documents: np.ndarray,
        context: int,
        seed: int,
        trained: np.ndarray | None = None,
    ) -> None:
        self._seed = seed
        lengths = np.diff(starts)[documents]
        self._parts, left_out = _divide(starts, documents, context, trained)
        place = best_fit(self._parts.lengths, context)
        # Places in the order of their sequences, and where each sequence begins among them.
        self._places = np.argsort(place, kind="stable")
        self._bounds = np.cumsum(np.bincount(place + 1))
        self._order = lru_cache(maxsize=2)(self._shuffle)
        tokens = int(self._parts.lengths.sum())
        self.kept = Kept(
            documents=len(documents),
            divided=int((lengths > context).sum()),
            tokens=tokens,
            padding=self.sequences * context - tokens,
            left_out=left_out,
        )

    @property
    def sequences(self) -> int:
        return len(self._bounds) - 1

    def pieces(self, index: int) -> list[Piece]:
        epoch, place = divmod(index, self.sequences)
        order = self._order(epoch)
        sequence = int(order.sequences[place])
        places = self._places[self._bounds[sequence] : self._bounds[sequence + 1]]
        draw = Draw.PLACES.generator(self._seed, epoch, sequence)
        return [self._piece(part) for part in draw.permutation(order.parts[places])]

    def once(self, index: int) -> list[Piece]:
        assert index < self.sequences, index
        return self.pieces(index)

    def _shuffle(self, epoch: int) -> Order:
        draw = Draw.SHUFFLE.generator(self._seed, epoch)
        parts = draw.permutation(len(self._parts.lengths))
        # Only parts of one length change places.
        parts = parts[np.argsort(-self._parts.lengths[parts], kind="stable")]
        return Order(parts, draw.permutation(self.sequences))

    def _piece(self, part: int) -> Piece:
        start = int(self._parts.starts[part])
        return Piece(
            int(self._parts.documents[part]), start, start + int(self._parts.lengths[part])
        )


def _divide(
    starts: np.ndarray, documents: np.ndarray, context: int, trained: np.ndarray | None
) -> tuple[Parts, int]:
    """Every document, or as many pieces of a sequence as it fills and its rest; and the tokens of
    those that train nothing and are left out."""
    lengths = np.diff(starts)[documents]
    counts = -(-lengths // context)
    of = np.repeat(np.arange(len(documents)), counts)
    number = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = number * context
    sizes = np.minimum(lengths[of] - begins, context)
    useful = sizes > 1
    if trained is not None:
        first = starts[documents[of]] + begins
        spans = zip((first + 1).tolist(), (first + sizes).tolist(), strict=True)
        useful = np.fromiter((trained[i:j].any() for i, j in spans), dtype=bool, count=len(of))
    order = np.argsort(-sizes[useful], kind="stable")
    parts = Parts(*(array[useful][order] for array in (documents[of], begins, sizes)))
    return parts, int(sizes[~useful].sum())


def best_fit(lengths: np.ndarray, room: int) -> np.ndarray:
    """The sequence of each length, `[lengths]` int64 from 0 on.

    `lengths` must not rise and none be above `room`. A length goes where the least room is left
    that takes it, or else begins a sequence. Equal lengths are laid together: once one is in a
    sequence, that is the tightest for the next, so the work is that of sequences and distinct
    lengths and not of documents.
    """
    place = np.empty(len(lengths), dtype=np.int64)
    rooms: list[int] = []  # that are left somewhere, each once, rising
    open_: dict[int, list[int]] = {}  # the sequences with so much of it
    sequences = done = 0
    for length, number in _runs(lengths):
        end = done + number
        while done < end:
            at = bisect_left(rooms, length)
            if at == len(rooms):
                left, sequence, sequences = room, sequences, sequences + 1
            else:
                left = rooms[at]
                sequence = open_[left].pop()
                if not open_[left]:
                    del rooms[at], open_[left]
            taken = min(end - done, left // length)
            place[done : done + taken] = sequence
            done += taken
            left -= taken * length
            if left > 0:
                if left not in open_:
                    insort(rooms, left)
                open_.setdefault(left, []).append(sequence)
    return place


def _runs(lengths: np.ndarray) -> list[tuple[int, int]]:
    """Each length and how many there are of it in a row."""
    begins = np.flatnonzero(np.diff(lengths, prepend=-1))
    counts = np.diff(begins, append=len(lengths))
    return list(zip(lengths[begins].tolist(), counts.tolist(), strict=True))
