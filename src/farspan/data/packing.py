"""Packing of documents into sequences of one length: whole by best fit, or cut end to end."""

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
    """Purposes of random numbers. Each purpose has its own generator."""

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
    """Tokens [start, stop) of one document, which lie in one sequence."""

    document: int  # index in the store
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PackingStats:
    """Counts for an epoch: sequences, documents, tokens; how many are cut, padded or left out."""

    sequences: int
    documents: int
    divided: int  # documents in more than one piece
    tokens: int  # tokens of all pieces
    padding: int  # tokens that fill up sequences and belong to no document
    left_out: int  # tokens in pieces without a trained token


# Padding is divided into documents of this length, so attention over it costs next to nothing.
_PADDED = 1024


@dataclass(frozen=True, slots=True)
class LabelledAnswer:
    """A prompt and its answer in a sequence, as one document of the data."""

    number: int  # in the whole data
    begin: int  # first token of the answer in the sequence
    desirable: bool


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Sequences of one length, with labels that are not shifted: who uses the batch shifts them."""

    input_ids: np.ndarray  # [batch, tokens] int64
    labels: np.ndarray  # [batch, tokens] int64: the input, or UNTRAINED
    document_ids: np.ndarray  # [batch, tokens] int64, rising by one at the start of a document
    names: tuple[tuple[str, ...], ...]  # names of the documents in each sequence, in order
    tokens: int  # tokens of documents, without padding
    # Numbers in the data of the pairs in each sequence, in order; pair p is documents 2 p and 2 p +
    # 1. Empty if documents are not pairs.
    pairs: tuple[tuple[int, ...], ...] = ()
    lengths: tuple[int, ...] = ()  # tokens of documents in each sequence, which padding follows
    answers: tuple[tuple[LabelledAnswer, ...], ...] = ()  # of each sequence, if they have labels

    def numbers(self) -> tuple[int, ...]:
        """Return the number in the data of each pair or labelled answer, row by row."""
        labelled = (answer.number for row in self.answers for answer in row)
        return (*(number for row in self.pairs for number in row), *labelled)


class Packing:
    """Documents packed into sequences of `context` tokens, read by index."""

    def __init__(self, store: TokenStore, layout: "SequenceLayout", context: int) -> None:
        self._store = store
        self._layout = layout
        self._context = context
        self.kept = layout.kept
        assert self.kept.tokens > 0
        # Positions of padding do not exceed those of documents.
        self._padded = min(_PADDED, store.longest())

    def sequences_per_epoch(self) -> int:
        """Return how many sequences contain every token once."""
        return self._layout.sequences

    def batch(self, indices: Sequence[int]) -> PackedBatch:
        return self._batch([self._layout.pieces(i) for i in indices], self._context)

    def once(self, index: int, shorten: bool = True) -> PackedBatch:
        """Return sequence `index` of the first epoch, `[1, context]`. Padding takes the place of
        tokens of the next epoch.

        All sequences have one length, so one program and one set of kernel plans serve them. With
        `shorten`, an only sequence ends with its documents.
        """
        pieces = self._layout.once(index)
        alone = shorten and self._layout.sequences == 1
        length = sum(p.stop - p.start for p in pieces) if alone else self._context
        return self._batch([pieces], length)

    def _batch(self, rows: list[list[DocumentPiece]], length: int) -> PackedBatch:
        ids, marks = np.zeros((2, len(rows), length), dtype=np.int64)
        labels = np.full_like(ids, UNTRAINED)
        lengths = []
        for row, pieces in enumerate(rows):
            end = number = 0
            for piece in pieces:
                begin, end = end, end + piece.stop - piece.start
                ids[row, begin:end], labels[row, begin:end] = self._read(piece)
                for start in self._begins(piece):
                    marks[row, begin + start : end] = number
                    number += 1
            marks[row, end:] = number + np.arange(length - end) // self._padded
            lengths.append(end)
        names = tuple(tuple(name for p in row for name in self._names(p)) for row in rows)
        pairs = tuple(tuple(p.document for p in row) for row in rows)
        paired = self._store.middles is not None
        pairs = pairs if paired else ()
        answers = tuple(map(self._answers, rows)) if self._store.answers is not None else ()
        return PackedBatch(ids, labels, marks, names, sum(lengths), pairs, tuple(lengths), answers)

    def _answers(self, pieces: list[DocumentPiece]) -> tuple[LabelledAnswer, ...]:
        """Return the labelled answers of a sequence, whose pieces are whole documents."""
        assert self._store.answers is not None
        found, begin = [], 0
        for piece in pieces:
            first, desirable = (int(number) for number in self._store.answers[piece.document])
            place = begin + first - int(self._store.starts[piece.document])
            found.append(LabelledAnswer(piece.document, place, bool(desirable)))
            begin += piece.stop - piece.start
        return tuple(found)

    def documents(self) -> int:
        """Return the number of documents, or of pairs of answers."""
        return self._store.documents()

    def _begins(self, piece: DocumentPiece) -> tuple[int, ...]:
        """Return at which tokens of a piece documents begin: 0, and a pair's second answer."""
        if self._store.middles is None:
            return (0,)
        start = self._store.starts[piece.document]
        return 0, int(self._store.middles[piece.document] - start)

    def _names(self, piece: DocumentPiece) -> tuple[str, ...]:
        name = self._store.name(piece.document)
        return (name,) if self._store.middles is None else (f"{name} chosen", f"{name} rejected")

    def _read(self, piece: DocumentPiece) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids and labels of a piece's tokens, int64."""
        base = int(self._store.starts[piece.document])
        tokens, trained = self._store.read(base + piece.start, base + piece.stop)
        ids = tokens.astype(np.int64)
        return ids, ids if trained is None else np.where(trained, ids, UNTRAINED)


class Sequences(Protocol):
    """Interface of packings and streams, whose sequences a `Mixture` combines."""

    @property
    def kept(self) -> PackingStats:
        """Counts of packed documents and tokens, per epoch or, for a stream, its first window."""

    def batch(self, indices: Sequence[int]) -> PackedBatch:
        """Return the sequences with these indices, `[len(indices), context]`."""

    def once(self, index: int) -> PackedBatch:
        """Return sequence `index` of the first epoch, `[1, context]`."""

    def documents(self) -> int:
        """Return the number of documents known so far."""


class Mixture:
    """Sequences of several packings, mixed so that each packing's weight is its share of the
    tokens.

    Each sequence is from one packing. The k-th sequence of packing p is due at (k + 1/2) / rate(p),
    where a rate is proportional to the weight over the mean tokens of a sequence. Invariant:
    sequence i is the i-th that is due, a pure function of i; after n sequences a packing has had
    its rate times n, give or take one.
    """

    def __init__(self, packings: Sequence[Sequences], weights: Sequence[float]) -> None:
        self._packings = packings
        parts = [
            Fraction(weight) * packing.kept.sequences / packing.kept.tokens
            for packing, weight in zip(packings, weights, strict=True)
        ]
        self._rates = [part / sum(parts) for part in parts]  # exact, so rounding moves no sequence
        kept = [packing.kept for packing in packings]
        names = [own.name for own in fields(PackingStats)]
        self.kept = PackingStats(**{n: sum(getattr(k, n) for k in kept) for n in names})

    def sequences_per_epoch(self) -> int:
        """Return how many sequences of the mixture read every document at least once."""
        last = [Fraction(2 * p.kept.sequences - 1, 2) for p in self._packings]
        due = max(number / rate for number, rate in zip(last, self._rates, strict=True))
        return sum(self._due(due))

    def epochs(self) -> list[float]:
        """Return, for each packing, how many of its own epochs an epoch of the mixture reads."""
        counts = [p.kept.sequences for p in self._packings]
        total = self.sequences_per_epoch()
        return [float(total * r / n) for r, n in zip(self._rates, counts, strict=True)]

    def batch(self, indices: Sequence[int]) -> PackedBatch:
        places = [self._place(index) for index in indices]
        batches = [(p, self._packings[p].batch([number])) for p, number in places]
        return stack([self._numbered(p, batch) for p, batch in batches])

    def documents(self) -> int:
        """Return the number of documents in all packings."""
        return sum(packing.documents() for packing in self._packings)

    def _numbered(self, packing: int, batch: PackedBatch) -> PackedBatch:
        """Return a batch of packing `packing` with its pairs and labelled answers numbered as in
        the whole mixture."""
        before = sum(p.documents() for p in self._packings[:packing])
        pairs = tuple(tuple(before + number for number in row) for row in batch.pairs)
        answers = tuple(
            tuple(replace(answer, number=before + answer.number) for answer in row)
            for row in batch.answers
        )
        return replace(batch, pairs=pairs, answers=answers)

    def once(self, index: int) -> PackedBatch:
        """Return sequence `index` of the mixture, as its packing's `once` gives it."""
        packing, number = self._place(index)
        return self._numbered(packing, self._packings[packing].once(number))

    def _due(self, time: Fraction) -> list[int]:
        """Return how many of the mixture's first `time` sequences each packing gives."""
        return [math.floor(time * rate + Fraction(1, 2)) for rate in self._rates]

    def _place(self, index: int) -> tuple[int, int]:
        """Return which packing has sequence `index` of the mixture, and its index there."""
        # Up to `time`, the packings together have `time` sequences due, within half a sequence
        # each.
        counts = self._due(Fraction(max(0, index - len(self._rates))))
        while True:
            due = [(2 * c + 1) / r for c, r in zip(counts, self._rates, strict=True)]
            first = due.index(min(due))
            if sum(counts) == index:
                return first, counts[first]
            counts[first] += 1


def stack(rows: Sequence[PackedBatch]) -> PackedBatch:
    """Concatenate batches of sequences into one batch."""
    ids, labels, marks = (
        np.concatenate([getattr(row, name) for row in rows])
        for name in ("input_ids", "labels", "document_ids")
    )
    names = tuple(name for row in rows for name in row.names)
    pairs = tuple(pair for row in rows for pair in row.pairs)
    lengths = tuple(length for row in rows for length in row.lengths)
    answers = tuple(answer for row in rows for answer in row.answers)
    return PackedBatch(ids, labels, marks, names, sum(lengths), pairs, lengths, answers)


def mismatched(batch: PackedBatch, before: Sequence[PackedBatch]) -> PackedBatch:
    """Return a batch with prompts and labelled answers mismatched: every document has its own
    prompt, and the answer of the document before it.

    The first document of sequence r gets the answer of the last document in `before[r]`, a batch of
    one sequence, cut where the sequence would become longer than it is.
    """
    return stack([_mismatched(batch, row, one) for row, one in enumerate(before)])


def _mismatched(batch: PackedBatch, row: int, before: PackedBatch) -> PackedBatch:
    length, answers = batch.input_ids.shape[1], batch.answers[row]
    ends = np.flatnonzero(np.diff(batch.document_ids[row, : batch.lengths[row]])) + 1
    starts = [0, *ends.tolist(), batch.lengths[row]]
    own = [slice(one.begin, stop) for one, stop in zip(answers, starts[1:], strict=True)]
    both = np.stack([batch.input_ids[row], batch.labels[row]])
    theirs = np.stack([before.input_ids[0], before.labels[0]])
    first = theirs[:, before.answers[0][-1].begin : before.lengths[0]]
    room = length - batch.lengths[row] + own[-1].stop - own[-1].start
    said = [first[:, :room], *(both[:, span] for span in own[:-1])]
    asked = [both[:, start : one.begin] for start, one in zip(starts, answers, strict=False)]
    documents = [np.concatenate(pair, 1) for pair in zip(asked, said, strict=True)]
    sizes = [document.shape[1] for document in documents]
    rest = length - sum(sizes)
    filled = np.stack([np.zeros(rest, np.int64), np.full(rest, UNTRAINED)])
    ids, labels = np.concatenate([*documents, filled], 1)
    marks = np.repeat(np.arange(len(sizes)), sizes)
    marks = np.append(marks, len(sizes) + np.arange(rest) // min(_PADDED, max(sizes)))
    begins = np.cumsum([0, *sizes[:-1]]) + [part.shape[1] for part in asked]
    moved = tuple(replace(a, begin=int(b)) for a, b in zip(answers, begins, strict=True))
    own_names = (batch.names[row],)
    return PackedBatch(
        ids[None], labels[None], marks[None], own_names, sum(sizes), (), (sum(sizes),), (moved,)
    )


def seed_of_source(seed: int, number: int) -> int:
    """Return the random seed of source `number`: for the first the run's, so that its order stays
    if others are added; others get their own, as equally large sources must be shuffled
    differently."""
    if number == 0:
        return seed
    return int(Draw.SOURCES.generator(seed, number).integers(1 << 62))


def split_held_out(documents: int, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide documents at random, by `seed`, into those to train on and those to hold out, both
    sorted. `fraction` of them, rounded and at least one, is held out; none if it is zero."""
    order = Draw.SPLIT.generator(seed).permutation(documents)
    count = max(1, round(fraction * documents)) if fraction > 0 else 0
    return np.sort(order[count:]), np.sort(order[:count])


@dataclass(frozen=True, slots=True)
class PieceArrays:
    """Pieces of documents, none longer than a sequence, longest first: an array for each field."""

    documents: np.ndarray  # int64, index in the store
    starts: np.ndarray  # int64, token in the document
    lengths: np.ndarray  # int64


@dataclass(frozen=True, slots=True)
class BestFitOrder:
    """Shuffle of one epoch: the piece in each place of the layout, and the order of sequences."""

    parts: np.ndarray  # [places] int64
    sequences: np.ndarray  # [sequences] int64


class BestFitLayout:
    """Plan of sequences of at most `context` tokens from documents; only documents longer than a
    sequence are cut.

    `trained`, one flag per token of the store, tells which tokens are trained; None: all are.
    Pieces without a trained token are left out; a piece's first token has nothing to be predicted
    from.
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
        # Places in the order of their sequences, and the first place of each sequence.
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
        return len(self._bounds) - 1

    def pieces(self, index: int) -> list[DocumentPiece]:
        """Return the pieces in sequence `index`, which counts through all epochs."""
        epoch, place = divmod(index, self.sequences)
        order = self._order(epoch)
        sequence = int(order.sequences[place])
        places = self._places[self._bounds[sequence] : self._bounds[sequence + 1]]
        draw = Draw.PLACES.generator(self._seed, epoch, sequence)
        return [self._piece(part) for part in draw.permutation(order.parts[places])]

    def once(self, index: int) -> list[DocumentPiece]:
        """Return the pieces in sequence `index` of the first epoch; sequences never span epochs."""
        assert index < self.sequences, index
        return self.pieces(index)

    def _shuffle(self, epoch: int) -> BestFitOrder:
        draw = Draw.SHUFFLE.generator(self._seed, epoch)
        parts = draw.permutation(len(self._parts.lengths))
        # Only parts of equal length change places.
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
    """Cut each document into pieces as long as a sequence and a rest. Return the pieces, and the
    number of tokens in pieces that are left out because they have no trained token."""
    lengths = np.diff(starts)[documents]
    counts = -(-lengths // context)
    owner = np.repeat(np.arange(len(documents)), counts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = number * context
    sizes = np.minimum(lengths[owner] - begins, context)
    useful = sizes > 1
    if trained is not None:
        first = starts[documents[owner]] + begins
        spans = zip((first + 1).tolist(), (first + sizes).tolist(), strict=True)
        useful = np.fromiter((trained[i:j].any() for i, j in spans), dtype=bool, count=len(owner))
    order = np.argsort(-sizes[useful], kind="stable")
    parts = PieceArrays(*(array[useful][order] for array in (documents[owner], begins, sizes)))
    return parts, int(sizes[~useful].sum())


def best_fit(lengths: np.ndarray, room: int) -> np.ndarray:
    """Assign each length to a sequence of `room` tokens, by best fit: return the sequences'
    numbers, `[lengths]` int64.

    `lengths` must not rise, and none may exceed `room`. A length goes into the sequence with the
    least room that is enough, or else begins a new one. Equal lengths are placed together: once one
    is in a sequence, that is the tightest for the next. So the work grows with sequences and
    distinct lengths, not with documents.
    """
    place = np.empty(len(lengths), dtype=np.int64)
    rooms: list[int] = []  # distinct rooms left in sequences, rising
    open_: dict[int, list[int]] = {}  # room left to the sequences that have it
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
    """Return (length, count) for each stretch of equal lengths."""
    begins = np.flatnonzero(np.diff(lengths, prepend=-1))
    counts = np.diff(begins, append=len(lengths))
    return list(zip(lengths[begins].tolist(), counts.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class ConcatOrder:
    """Shuffle of one epoch: its documents in order, and the token at which each ends."""

    documents: np.ndarray  # [documents] int64, index in the store
    ends: np.ndarray  # [documents] int64, tokens from the start of the epoch


class ConcatLayout:
    """Plan of sequences of `context` tokens, cut from the endless concatenation of shuffled epochs.

    Invariant: sequence i covers tokens [i * context, (i + 1) * context) of the concatenation; each
    epoch is a shuffle of all documents that depends on seed and epoch only.
    """

    def __init__(self, lengths: np.ndarray, documents: np.ndarray, context: int, seed: int) -> None:
        self._lengths = lengths
        self._documents = documents
        self._context = context
        self._seed = seed
        self._tokens = int(lengths[documents].sum())
        # A sequence touches at most two epochs, unless it is longer than an epoch.
        self._order = lru_cache(maxsize=2)(self._shuffle)

    @property
    def sequences(self) -> int:
        """Number of sequences that contain every token once; the last of them may be shorter."""
        return -(-self._tokens // self._context)

    @property
    def kept(self) -> PackingStats:
        """Counts of what the first epoch packs; later epochs cut different documents."""
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
        """Return the pieces in tokens [start, start + length) of the concatenated documents."""
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


# A layout is a pure function of (seed, i) for sequence i of endless epochs.
SequenceLayout = BestFitLayout | ConcatLayout
