"""Documents packed into sequences of one length: whole by best fit, or end to end and cut."""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from fractions import Fraction
from functools import lru_cache
from typing import Protocol

import numpy as np

from farspan.data.formats import UNTRAINED
from farspan.data.token_cache import TokenStore


class Draw(IntEnum):
    """A stream of random numbers for each purpose: none depends on how much another drew."""

    SPLIT = 0
    SHUFFLE = 1
    PLACES = 2
    SOURCES = 3
    WINDOWS = 4

    def generator(self, seed: int, *key: int) -> np.random.Generator:
        sequence = np.random.SeedSequence((seed, self.value, *key))
        return np.random.Generator(np.random.PCG64(sequence))


@dataclass(frozen=True, slots=True)
class DocumentPiece:
    """Tokens `start` to `stop` of one document, as laid into a sequence."""

    document: int  # in the store
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PackingStats:
    """What an epoch keeps of the documents, and what the layout costs."""

    sequences: int
    documents: int
    divided: int  # of them, those in more than one piece
    tokens: int  # of all pieces
    padding: int  # tokens that fill sequences up, and belong to no document
    left_out: int  # tokens in pieces of which none is trained


# Padding is documents of so many tokens: attention over it costs next to nothing.
_PADDED = 1024


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Sequences of one length. Labels are not shifted: whoever uses them does it once."""

    input_ids: np.ndarray  # [batch, tokens] int64
    labels: np.ndarray  # [batch, tokens] int64: the input, or UNTRAINED
    document_ids: np.ndarray  # [batch, tokens] int64, rising by one where a document starts
    names: tuple[tuple[str, ...], ...]  # of the documents in each sequence, in order
    tokens: int  # of documents: padding is not among them
    # Of the pairs in each sequence, in order, their numbers in the data; pair p is documents 2 p
    # and 2 p + 1. Empty where documents are no pairs.
    pairs: tuple[tuple[int, ...], ...] = ()


class Packing:
    """Sequences of `context` tokens from the documents that a layout places."""

    def __init__(self, store: TokenStore, layout: "SequenceLayout", context: int) -> None:
        self._store = store
        self._layout = layout
        self._context = context
        self.kept = layout.kept
        assert self.kept.tokens > 0
        # Positions of padding go no further than those of documents.
        self._padded = min(_PADDED, store.longest())

    def sequences_per_epoch(self) -> int:
        """Sequences that hold every token once."""
        return self._layout.sequences

    def batch(self, indices: Sequence[int]) -> PackedBatch:
        """Sequences by index, `[len(indices), context]`."""
        return self._batch([self._layout.pieces(i) for i in indices], self._context)

    def once(self, index: int, shorten: bool = True) -> PackedBatch:
        """Sequence `index` of the first epoch alone, `[1, context]`: one length for all has one
        program and one set of kernel plans. Where there is no other it ends with its documents,
        unless it is not to `shorten`."""
        pieces = self._layout.once(index)
        alone = shorten and self._layout.sequences == 1
        length = sum(p.stop - p.start for p in pieces) if alone else self._context
        return self._batch([pieces], length)

    def _batch(self, rows: list[list[DocumentPiece]], length: int) -> PackedBatch:
        ids, marks = np.zeros((2, len(rows), length), dtype=np.int64)
        labels = np.full_like(ids, UNTRAINED)
        tokens = 0
        for row, pieces in enumerate(rows):
            end = number = 0
            for piece in pieces:
                begin, end = end, end + piece.stop - piece.start
                ids[row, begin:end], labels[row, begin:end] = self._read(piece)
                for start in self._begins(piece):
                    marks[row, begin + start : end] = number
                    number += 1
            marks[row, end:] = number + np.arange(length - end) // self._padded
            tokens += end
        names = tuple(tuple(name for p in row for name in self._names(p)) for row in rows)
        pairs = tuple(tuple(p.document for p in row) for row in rows)
        paired = self._store.middles is not None
        return PackedBatch(ids, labels, marks, names, tokens, pairs if paired else ())

    def documents(self) -> int:
        """Of the data; pairs, where they are that."""
        return self._store.documents()

    def _begins(self, piece: DocumentPiece) -> tuple[int, ...]:
        """Where documents begin in a piece."""
        if self._store.middles is None:
            return (0,)
        start = self._store.starts[piece.document]
        return 0, int(self._store.middles[piece.document] - start)

    def _names(self, piece: DocumentPiece) -> tuple[str, ...]:
        name = self._store.name(piece.document)
        return (name,) if self._store.middles is None else (f"{name} chosen", f"{name} rejected")

    def _read(self, piece: DocumentPiece) -> tuple[np.ndarray, np.ndarray]:
        """Ids and labels, int64."""
        base = int(self._store.starts[piece.document])
        tokens, trained = self._store.read(base + piece.start, base + piece.stop)
        ids = tokens.astype(np.int64)
        return ids, ids if trained is None else np.where(trained, ids, UNTRAINED)


class Sequences(Protocol):
    """What a mixture is made from: packings, and streams."""

    @property
    def kept(self) -> PackingStats:
        """Of an epoch, or of a stream's first window."""

    def batch(self, indices: Sequence[int]) -> PackedBatch:
        """Sequences by index, `[len(indices), context]`."""

    def once(self, index: int) -> PackedBatch:
        """Sequence `index`, of the first epoch alone."""

    def documents(self) -> int:
        """Of the data, as far as they are known."""


class Mixture:
    """Sequences of several packings, each of one alone, such that of the tokens of documents each
    packing has its weight's share.

    The k-th sequence of packing p is due at (k + 1/2) / rate(p), where a rate is proportional to
    the weight over the mean tokens of a sequence. Invariant: sequence i is the i-th that is due,
    a pure function of i; after n sequences a packing has had its rate times n, give or take one.
    """

    def __init__(self, packings: Sequence[Sequences], weights: Sequence[float]) -> None:
        self._packings = packings
        parts = [
            Fraction(weight) * packing.kept.sequences / packing.kept.tokens
            for packing, weight in zip(packings, weights, strict=True)
        ]
        self._rates = [part / sum(parts) for part in parts]  # exact: no rounding moves a sequence
        kept = [packing.kept for packing in packings]
        names = [own.name for own in fields(PackingStats)]
        self.kept = PackingStats(**{n: sum(getattr(k, n) for k in kept) for n in names})

    def sequences_per_epoch(self) -> int:
        """After so many every document has been read."""
        last = [Fraction(2 * p.kept.sequences - 1, 2) for p in self._packings]
        due = max(number / rate for number, rate in zip(last, self._rates, strict=True))
        return sum(self._due(due))

    def epochs(self) -> list[float]:
        """How often each packing has been read by then."""
        counts = [p.kept.sequences for p in self._packings]
        total = self.sequences_per_epoch()
        return [float(total * r / n) for r, n in zip(self._rates, counts, strict=True)]

    def batch(self, indices: Sequence[int]) -> PackedBatch:
        """Sequences by index, `[len(indices), context]`."""
        places = [self._place(index) for index in indices]
        found = [(p, self._packings[p].batch([number])) for p, number in places]
        return stack([self._numbered(p, batch) for p, batch in found])

    def documents(self) -> int:
        """Of all packings."""
        return sum(packing.documents() for packing in self._packings)

    def _numbered(self, packing: int, batch: PackedBatch) -> PackedBatch:
        """With pairs numbered through all packings."""
        before = sum(p.documents() for p in self._packings[:packing])
        pairs = tuple(tuple(before + number for number in row) for row in batch.pairs)
        return replace(batch, pairs=pairs)

    def once(self, index: int) -> PackedBatch:
        """The sequence at `index`, as the packing that it is of has it `once`."""
        packing, number = self._place(index)
        return self._numbered(packing, self._packings[packing].once(number))

    def _due(self, time: Fraction) -> list[int]:
        """How many of each packing are due up to `time`."""
        return [math.floor(time * rate + Fraction(1, 2)) for rate in self._rates]

    def _place(self, index: int) -> tuple[int, int]:
        """The packing that sequence `index` is of, and its number there."""
        # Of all packings together, within half a sequence of each, `time` sequences are due.
        counts = self._due(Fraction(max(0, index - len(self._rates))))
        while True:
            due = [(2 * c + 1) / r for c, r in zip(counts, self._rates, strict=True)]
            first = due.index(min(due))
            if sum(counts) == index:
                return first, counts[first]
            counts[first] += 1


def stack(rows: Sequence[PackedBatch]) -> PackedBatch:
    """One batch of them."""
    ids, labels, marks = (
        np.concatenate([getattr(row, name) for row in rows])
        for name in ("input_ids", "labels", "document_ids")
    )
    names = tuple(name for row in rows for name in row.names)
    pairs = tuple(pair for row in rows for pair in row.pairs)
    return PackedBatch(ids, labels, marks, names, sum(row.tokens for row in rows), pairs)


def seed_of_source(seed: int, number: int) -> int:
    """Of the source at `number`: of the first the run's, so that one alone is as it was without
    others; sources of one size are not shuffled alike."""
    if number == 0:
        return seed
    return int(Draw.SOURCES.generator(seed, number).integers(1 << 62))


def split_held_out(documents: int, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents to train on and documents held out: disjoint, both sorted, a function of seed.

    `fraction` of them, rounded and at least one, is held out; none when it is zero.
    """
    order = Draw.SPLIT.generator(seed).permutation(documents)
    count = max(1, round(fraction * documents)) if fraction > 0 else 0
    return np.sort(order[count:]), np.sort(order[:count])


@dataclass(frozen=True, slots=True)
class PieceArrays:
    """Pieces of at most a sequence, the longest first: arrays with an element each."""

    documents: np.ndarray  # int64, ids in the store
    starts: np.ndarray  # int64, in the document
    lengths: np.ndarray  # int64


@dataclass(frozen=True, slots=True)
class BestFitOrder:
    """One epoch: which part is in which place, and which sequence comes when."""

    parts: np.ndarray  # [places] int64
    sequences: np.ndarray  # [sequences] int64


class BestFitLayout:
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
        self._parts, left_out = _cut_long(starts, documents, context, trained)
        place = best_fit(self._parts.lengths, context)
        # Places in the order of their sequences, and where each sequence begins among them.
        self._places = np.argsort(place, kind="stable")
        self._bounds = np.cumsum(np.bincount(place + 1))
        self._order = lru_cache(maxsize=2)(self._shuffle)
        tokens = int(self._parts.lengths.sum())
        self.kept = PackingStats(
            sequences=self.sequences,
            documents=len(documents),
            divided=int((lengths > context).sum()),
            tokens=tokens,
            padding=self.sequences * context - tokens,
            left_out=left_out,
        )

    @property
    def sequences(self) -> int:
        """Of an epoch."""
        return len(self._bounds) - 1

    def pieces(self, index: int) -> list[DocumentPiece]:
        """Of sequence `index`, counted through all epochs."""
        epoch, place = divmod(index, self.sequences)
        order = self._order(epoch)
        sequence = int(order.sequences[place])
        places = self._places[self._bounds[sequence] : self._bounds[sequence + 1]]
        draw = Draw.PLACES.generator(self._seed, epoch, sequence)
        return [self._piece(part) for part in draw.permutation(order.parts[places])]

    def once(self, index: int) -> list[DocumentPiece]:
        """Of sequence `index` of the first epoch, which no other epoch reaches into."""
        assert index < self.sequences, index
        return self.pieces(index)

    def _shuffle(self, epoch: int) -> BestFitOrder:
        draw = Draw.SHUFFLE.generator(self._seed, epoch)
        parts = draw.permutation(len(self._parts.lengths))
        # Only parts of one length change places.
        parts = parts[np.argsort(-self._parts.lengths[parts], kind="stable")]
        return BestFitOrder(parts, draw.permutation(self.sequences))

    def _piece(self, part: int) -> DocumentPiece:
        start = int(self._parts.starts[part])
        return DocumentPiece(
            int(self._parts.documents[part]), start, start + int(self._parts.lengths[part])
        )


def _cut_long(
    starts: np.ndarray, documents: np.ndarray, context: int, trained: np.ndarray | None
) -> tuple[PieceArrays, int]:
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
    parts = PieceArrays(*(array[useful][order] for array in (documents[of], begins, sizes)))
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


@dataclass(frozen=True, slots=True)
class ConcatOrder:
    """One epoch: its documents in shuffled order and where each ends."""

    documents: np.ndarray  # [documents] int64, ids in the store
    ends: np.ndarray  # [documents] int64, tokens from the start of the epoch


class ConcatLayout:
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
    def kept(self) -> PackingStats:
        """Of the first epoch: in another order others are divided."""
        ends = self._order(0).ends
        begins = np.concatenate([[0], ends[:-1]])
        divided = int((begins // self._context != (ends - 1) // self._context).sum())
        return PackingStats(self.sequences, len(ends), divided, self._tokens, padding=0, left_out=0)

    def pieces(self, index: int) -> list[DocumentPiece]:
        return self._pieces(index * self._context, self._context)

    def once(self, index: int) -> list[DocumentPiece]:
        start = index * self._context
        length = min(self._context, self._tokens - start)
        assert length > 0, index
        return self._pieces(start, length)

    def _shuffle(self, epoch: int) -> ConcatOrder:
        order = Draw.SHUFFLE.generator(self._seed, epoch).permutation(self._documents)
        return ConcatOrder(order, np.cumsum(self._lengths[order]))

    def _pieces(self, start: int, length: int) -> list[DocumentPiece]:
        """The documents under tokens [start, start + length) of the endless concatenation."""
        pieces: list[DocumentPiece] = []
        while length > 0:
            epoch, offset = divmod(start, self._tokens)
            taken = min(length, self._tokens - offset)
            pieces.extend(self._within(self._order(epoch), offset, offset + taken))
            start, length = start + taken, length - taken
        return pieces

    def _within(self, order: ConcatOrder, start: int, stop: int) -> Iterator[DocumentPiece]:
        place = int(np.searchsorted(order.ends, start, side="right"))
        while start < stop:
            document = int(order.documents[place])
            length = int(self._lengths[document])
            begin = int(order.ends[place]) - length
            end = min(stop, begin + length)
            yield DocumentPiece(document, start - begin, end - begin)
            start, place = end, place + 1


# Which pieces make sequence i of endless epochs: a pure function of (seed, i).
SequenceLayout = BestFitLayout | ConcatLayout
