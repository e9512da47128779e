"""Streams: documents that do not fit the disk, read, tokenized and packed a window at a time.

    <cache>/stream-<key>/windows.json    start and end of each window that was read, its counts and
                                         the digest of its tokens
                         000007/<key>/   the tokens of a window (`token_cache`)

A window is a run of documents whose text reaches a number of bytes. The first window, which tells
the size of a source, and the latest two are kept; of the others only the facts. So a resumed run
finds its sequence without reading the windows before it.
"""

import hashlib
import json
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from farspan.data.packing import Draw, PackedBatch, Packing, PackingStats, stack
from farspan.data.sources import BEGINNING, Behind, DataFiles, StreamedRows
from farspan.data.token_cache import TokenStore, Useless, Watch, locked
from farspan.data.tokenizers import Document, HowFar, LongText
from farspan.durable import PARTIAL, discard, read_json, write_whole
from farspan.spec import UnsupportedError

Place = list[Any]  # place in a source, as JSON values; ordered by the first two
FACTS = "windows.json"
_LOCKS = 4  # number of locks, more than the windows that ranks are apart
_PATIENCE = 0.2  # seconds between checks of a window that is being read


@dataclass(frozen=True, slots=True)
class WindowFacts:
    """What a stream remembers of a window after deleting its tokens."""

    end: Place | None  # place of its last document; None: end of the stream
    sequences: int
    digest: str  # digest of its tokens


class DocumentReader:
    """Reader of a source's documents from any place on. It continues without a search if the next
    read begins where the last one ended."""

    def __init__(self, source: DataFiles | StreamedRows) -> None:
        self.source = source
        self._kept: list[tuple[Place, Document, Behind]] = []

    def behind(self, place: Place) -> tuple[Document | None, Behind]:
        """Return the first document after a place (None: no more), and a reader of later ones."""
        if self._kept:
            at, document, behind = self._kept.pop()
            if at[:2] <= place[:2]:
                rows: Iterator[Document] = chain([document], behind[0])
                # Other ranks may have read the windows between.
                found = (d for d in rows if [d.file, d.line] > place[:2])
                return next(found, None), behind
            behind[0].close()
        behind = self.source.behind(place)
        return next(behind[0], None), behind

    def keep(self, place: Place, document: Document, behind: Behind) -> None:
        """Keep an open reader for a next read that begins at this place."""
        self._kept[:] = [(place, document, behind)]


@dataclass(slots=True)
class Window:
    """Consecutive documents of a source, from a place on, until their texts reach `size` bytes."""

    reader: DocumentReader
    start: Place
    size: int  # bytes of text
    done: int = 0
    end: Place | None = None  # set when `is_read`
    is_read: bool = False

    @property
    def dropped(self) -> tuple[str, ...]:
        """Columns of the dataset that the user ignores."""
        return getattr(self.reader.source, "dropped", ())

    def names(self) -> tuple[str, ...]:
        return self.reader.source.names()

    def listing(self) -> list[list[object]]:
        return [*self.reader.source.listing(), ["window", self.size, *self.start]]

    def how_far(self) -> HowFar:
        return HowFar(self.done, self.size)

    def documents(self) -> Iterator[Document]:
        document, behind = self.reader.behind(self.start)
        rows, place_of = behind
        end, self.done = self.start, 0
        try:
            while document is not None and self.done < self.size:
                self.done += _text_bytes(document.fields)
                yield document
                if self.done >= self.size:
                    end = place_of(document)  # before the next one is read
                document = next(rows, None)
        except BaseException:
            rows.close()
            raise
        self.end, self.is_read = None if document is None else end, True
        if document is not None:
            self.reader.keep(end, document, behind)


def _text_bytes(value: Any) -> int:
    """Return the bytes of all texts in a JSON value; a number or null counts as 8."""
    match value:
        case str():
            return len(value.encode("utf-8", "surrogatepass"))
        case LongText():
            return sum(len(part.encode()) for part in value.parts())
        case Mapping():
            return sum(map(_text_bytes, value.values()))
        case list():
            return sum(map(_text_bytes, value))
    return 8


Opened = tuple[TokenStore, Packing] | None  # a window; None: nothing in it is trained


@dataclass(slots=True)
class _Ahead:
    """The next window of a stream, opened by a thread while training uses the present one."""

    key: tuple[int, int]
    told: tuple[int, int, HowFar]
    found: "Future[Opened]" = field(default_factory=Future)


# Packs documents of a window's store into sequences, shuffled by a seed.
Pack = Callable[[TokenStore, np.ndarray, int], Packing]


@dataclass(slots=True)
class Stream:
    """Sequences of a source that is too large to tokenize at once. The source is read window by
    window, and from the beginning again after the last window.

    Invariant: sequence i is a pure function of (seed, source, i). Each pass packs and shuffles
    every window anew, within the window; each document is read once a pass.
    """

    reader: DocumentReader
    opens: Callable[..., TokenStore]  # `open_store` with a source, a cache and a watch
    pack: Pack
    choose: Callable[[TokenStore], np.ndarray]  # documents of the first window to train on
    folder: Path
    size: int  # bytes of text in a window
    seed: int
    watch: Watch
    # Refuses a window before its first step; None: windows are not read ahead either.
    check: Callable[[TokenStore], None] | None = None
    first: TokenStore = field(init=False)
    kept: PackingStats = field(init=False)  # counts of the first window
    _facts: list[WindowFacts] = field(default_factory=list)
    _expected: Sequence[str] = ()  # digests of windows that the run has read before
    _opened: dict[tuple[int, int], Packing] = field(default_factory=dict)
    _ahead: _Ahead | None = None

    def __post_init__(self) -> None:
        with locked(self.folder.parent, self.folder.name):  # makes the cache private, too
            opened = self._open(0, 0, self.watch)
        assert opened is not None, "the first window is not useless"
        self.first, self._opened[0, 0] = opened
        self.kept = self._opened[0, 0].kept

    def documents(self) -> int:
        """Return the number of documents in the first window."""
        return self.first.documents()

    def batch(self, indices: Sequence[int]) -> PackedBatch:
        """Return the sequences with these indices, `[len(indices), context]`. Raises
        UnsupportedError if a window cannot be read, or if `check` refuses the window."""
        return stack([self.once(index) for index in indices])

    def once(self, index: int) -> PackedBatch:
        """Return sequence `index`, `[1, context]`; the last one of a window ends with padding."""
        turn, window, number = self._place(index)
        packing = self._packing(turn, window)
        assert packing is not None, "it has this sequence"
        if self.check is not None:
            last = self._facts[window].end is None
            self._read_ahead(turn + last, 0 if last else window + 1)
        return packing.once(number, shorten=False)

    def digests(self) -> list[str]:
        """Return the digests of the windows read so far, in order, for a checkpoint."""
        return [facts.digest for facts in self._facts]

    def expect(self, digests: Sequence[str]) -> None:
        """Set the windows' digests that a checkpoint recorded. Raises UnsupportedError if a window
        known so far has another digest; other windows are compared once they are read."""
        self._expected = digests
        self._load()

    def _place(self, index: int) -> tuple[int, int, int]:
        """Return the epoch and the window with sequence `index`, and its index in this window."""
        turn = window = before = 0
        while True:
            if window >= len(self._facts):
                self._packing(0, window)
            facts = self._facts[window]
            if index < before + facts.sequences:
                return turn, window, index - before
            before, window = before + facts.sequences, window + 1
            if facts.end is None:
                turn, index = divmod(index, before)
                before = window = 0

    def _packing(self, turn: int, window: int) -> Packing | None:
        """Return a window's documents, packed into sequences for pass `turn` over the source; None
        if nothing in the window is trained. One thread at a time reads windows."""
        if (turn, window) in self._opened:
            return self._opened[turn, window]
        ahead, self._ahead = self._ahead, None
        while ahead is not None and wait([ahead.found], _PATIENCE).not_done:
            self.watch(*ahead.told)
        if ahead is not None and ahead.key == (turn, window):
            opened = ahead.found.result()
        else:
            opened = self._open(turn, window, self.watch)
        if opened is None:
            return None
        store, packing = opened
        if self.check is not None:
            self.check(store)
        # A batch may contain the end of one window and the beginning of the next.
        self._opened = dict([*self._opened.items()][-1:]) | {(turn, window): packing}
        return packing

    def _read_ahead(self, turn: int, window: int) -> None:
        if self._ahead is not None or (turn, window) in self._opened:
            return

        def work() -> None:
            try:
                ahead.found.set_result(self._open(turn, window, tell))
            except BaseException as error:
                ahead.found.set_exception(error)

        def tell(*told: Any) -> None:
            ahead.told = told
            if not threading.main_thread().is_alive():  # the process ends and waits for this thread
                raise SystemExit

        ahead = self._ahead = _Ahead((turn, window), (0, 0, HowFar(0, self.size)))
        threading.Thread(target=work).start()

    def _open(self, turn: int, window: int, watch: Watch) -> Opened:
        """Open a window from the cache, or read and tokenize its documents now."""
        self._discard_all_but(window)
        with locked(self.folder, str(window % _LOCKS)):
            if window >= len(self._facts):
                self._load()
            recorded = self._facts[window] if window < len(self._facts) else None
            if recorded is not None and recorded.sequences == 0:
                return None
            start = self._facts[window - 1].end if window else BEGINNING
            assert start is not None, "the window before it is not the last"
            source, opened = Window(self.reader, start, self.size), None
            try:
                store = self.opens(source, cache=self.folder / f"{window:06}", watch=watch)
                documents = np.arange(store.documents()) if window else self.choose(store)
                draw = Draw.WINDOWS.generator(self.seed, turn, window)
                opened = store, self.pack(store, documents, int(draw.integers(1 << 62)))
            except Useless:
                if window == 0:
                    raise
            sequences = 0 if opened is None else opened[1].kept.sequences
            digest = "" if opened is None else opened[0].digest
            if recorded is None:
                self._learn(source, sequences, digest)
            elif recorded.digest != digest:
                raise self._changed(window, f", or delete {self.folder} and")
            return opened

    def _learn(self, window: Window, sequences: int, digest: str) -> None:
        """Record a window's `WindowFacts` after its first reading, in memory and in the cache."""
        if not window.is_read:  # its tokens are cached, but its facts are lost
            deque(window.documents(), maxlen=0)
        facts = WindowFacts(window.end, sequences, digest)
        with locked(self.folder, FACTS):
            self._facts.append(facts)
            self._refuse_changed()
            stored = _read_facts(self.folder)
            if len(stored) < len(self._facts):
                records = [asdict(window_facts) for window_facts in self._facts]
                text = json.dumps({"windows": records, "seal": _seal(records)})
                write_whole(self.folder / FACTS, text.encode())

    def _load(self) -> None:
        """Load `WindowFacts` that other ranks, or an earlier start of the run, recorded."""
        self._facts += _read_facts(self.folder)[len(self._facts) :]
        self._refuse_changed()

    def _refuse_changed(self) -> None:
        pairs = zip(self.digests(), self._expected, strict=False)
        for window, (own, expected) in enumerate(pairs):
            if own != expected:
                raise self._changed(window, ", or")

    def _changed(self, window: int, way: str) -> UnsupportedError:
        return UnsupportedError(
            f"data.path: {self.reader.source.names()[0]}: the documents of window {window} have "
            "changed since the run first read them, and a run reads its stream several times; "
            f"restore the original documents{way} begin again in another run folder"
        )

    def _discard_all_but(self, window: int) -> None:
        """Delete all windows but the first, this one and its neighbours, which ranks may read."""
        if window == 0 or not self.folder.is_dir():
            return
        kept = {0, window - 1, window, window + 1}
        for place in self.folder.iterdir():
            if place.name.startswith(PARTIAL) and place.is_dir():  # left by a killed process
                shutil.rmtree(place, ignore_errors=True)
            elif place.name.isdecimal() and int(place.name) not in kept:
                with locked(self.folder, str(int(place.name) % _LOCKS)):
                    discard(place)


def _read_facts(folder: Path) -> list[WindowFacts]:
    """Return `WindowFacts` from the cache's file; empty if it is missing or damaged."""
    stored = read_json(folder / FACTS) or {}
    known = stored.get("windows", [])
    return [WindowFacts(**own) for own in known] if stored.get("seal") == _seal(known) else []


def _seal(facts: object) -> str:
    """Return a digest of the stored `WindowFacts`; damaged ones would change a run's sequences."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
