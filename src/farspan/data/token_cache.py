"""Token cache: tokens on disk, written once, then mapped into memory.

    <cache>/<key>/tokens.npy    ids of all documents, one after the other
                  starts.npy    start of each document; starts[documents] is the end
                  origins.npy   (file, line) of each document
                  trained.npy   for each token whether it is trained; missing if all are
                  blocks.npy    digests of the above, one for each block of a file
                  meta.json     names of the files, counts, the digest of the ids, and a seal: the
                                digest of this, of blocks.npy and of the folder's name

A folder is written and synced under another name and then renamed, so a folder with the final name
is complete. It is private to its user. Data are checked by their digests before use: tokens by the
block, when it is first read; all else when the folder is opened."""

import errno
import fcntl
import hashlib
import json
import logging
import os
import resource
import shutil
import signal
import time
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from farspan.data.chat import ChatForm, PreferenceForm, PromptForm, UnpairedForm
from farspan.data.formats import HARMLESS_ENDINGS, HARMLESS_NAMES, READ, Fields, TextForm
from farspan.data.tokenizers import (
    PART,
    TEXT,
    Content,
    Document,
    Encoded,
    Form,
    HowFar,
    LongText,
    Source,
    Tokenizer,
    Written,
)
from farspan.durable import (
    NotPrivate,
    WriteFailed,
    is_open,
    private_folder,
    publish,
    refuse_foreign,
)
from farspan.spec import UnsupportedError

LOG = logging.getLogger(__name__)

# Version 1 could have tokens of no text at all; 2 had no untrained tokens; 3 left out fields that
# say which part is trained.
_FORMAT = 4
_BATCH_SIZE = 1 << 20  # characters for a tokenizer at once: enough to fill its threads
# Bytes of a file for one digest. Short documents lie far apart: a sequence of 1M tokens in
# documents of 500 reads up to 2,000 blocks, 0.5 GB.
_BLOCK = 1 << 18
_DIGEST = 16  # bytes of SHA-256: 400 GB of tokens have 25 MB of digests
_MOST_ENDS = 16  # most ids of ends of turns to keep
_FILES = ("starts", "origins", "answers", "trained", "tokens")  # in the order of their digests

OneContent = Written | LongText | Encoded
Parts = Iterable[Encoded]  # parts of one document
# Called with the documents and tokens written so far, and the progress of reading.
Watch = Callable[[int, int, HowFar], None]


def unwatched(documents: int, tokens: int, read: HowFar) -> None:
    """Do nothing with a progress report: the default of `watch`."""


@dataclass(frozen=True, slots=True)
class Turns:
    """Counts of the ids that end trained turns, and of documents with such an id inside a turn."""

    number: int = 0
    last: tuple[tuple[int, int], ...] = ()  # (id, turns that end in it), the most frequent first
    signed: int = 0


@dataclass(frozen=True, slots=True)
class TokenStore:
    """The tokenized documents of one source, in arrays that are mapped from the cache."""

    tokens: np.ndarray  # [tokens] uint16 or uint32
    starts: np.ndarray  # [documents + 1] int64
    origins: np.ndarray  # [documents, 2] int64: file, line
    names: tuple[str, ...]
    largest: int  # largest id
    digest: str  # digest of the above: stores with the same digest have the same documents
    trained: np.ndarray | None = None  # [tokens] bool; None: all are trained
    # [documents] int64: start of each document's second part; None: each has one part. A pair is
    # one document: the chosen answer, then the rejected one.
    middles: np.ndarray | None = None
    # [documents, 2] int64, if documents are single answers with a label: the answer's first token
    # in the store, and 1 if the answer is desirable.
    answers: np.ndarray | None = None
    ignored: tuple[str, ...] = ()  # fields of records that the user drops
    harmless: tuple[str, ...] = ()  # fields that do not affect training
    turns: "Turns" = field(default_factory=lambda: Turns())
    # Checks tokens [start, stop) before they are read; returns a store to read instead if they are
    # damaged.
    check: Callable[[int, int], "TokenStore | None"] = lambda *_: None

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return tokens [start, stop), and which of them are trained (None: all). Raises
        UnsupportedError if their file is damaged and cannot be rebuilt."""
        whole = self.check(start, stop) or self
        span = slice(start, stop)
        return whole.tokens[span], None if whole.trained is None else whole.trained[span]

    def documents(self) -> int:
        return len(self.starts) - 1

    def longest(self) -> int:
        """Return the number of tokens of the longest document or, in pairs, the longest answer. Any
        labelled answer may follow any prompt (`packing.mismatched`)."""
        if self.answers is not None:
            begins = self.answers[:, 0]
            return int((begins - self.starts[:-1]).max() + (self.starts[1:] - begins).max())
        if self.middles is None:
            return int(np.diff(self.starts).max())
        firsts, seconds = self.middles - self.starts[:-1], self.starts[1:] - self.middles
        return int(max(firsts.max(), seconds.max()))

    def trained_tokens(self) -> int:
        return len(self.tokens) if self.trained is None else int(self.trained.sum())

    def place_of(self, token: int) -> str:
        """Return the file (and line) of the document to which a token of the store belongs."""
        return self.name(int(np.searchsorted(self.starts, token, side="right")) - 1)

    def name(self, document: int) -> str:
        """Return the file (and line) of a document, given its number in the store."""
        file, line = (int(number) for number in self.origins[document])
        return f"{self.names[file]}:{line}" if line else self.names[file]


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A memory-mapped file, and the digests of its blocks: each is checked at its first reading."""

    data: np.ndarray  # [bytes] uint8, mapped
    digests: np.ndarray  # [blocks, _DIGEST] uint8
    seen: set[int] = field(default_factory=set)

    def refuse_damage(self, start: int = 0, stop: int | None = None) -> None:
        """Check the blocks of bytes [start, stop), by default all. Raises _Damaged."""
        last = len(self.digests) if stop is None else -(-stop // _BLOCK)
        for block in range(start // _BLOCK, last):
            if block in self.seen:
                continue
            if not np.array_equal(_digest(self.data, block), self.digests[block]):
                raise _Damaged(f"block {block} of {len(self.digests)} has changed since written")
            self.seen.add(block)


class Useless(UnsupportedError):
    """No document has a token to train: an error, except in later windows of a stream."""


class _Damaged(Exception):
    """A folder of the cache is damaged; the message says how."""


def open_store(
    source: Source,
    form: Form,
    tokenizer: Tokenizer,
    cache: Path,
    watch: Watch,
    ignore: Collection[str] = (),
) -> TokenStore:
    """Return the tokenized documents of `source`: from the cache, or tokenized now and written to
    the cache. `form` reads the records, without the fields `ignore`. A damaged folder is written
    anew, with a warning in the log.

    Raises UnsupportedError if a document cannot be read, if there is no text at all, if the cache
    cannot be written, or if another user owns it or may write there.
    """

    def folder() -> Path:
        return cache.expanduser() / store_key(source, form, tokenizer, ignore)

    place = folder()
    write = partial(_write, place, source, form, tokenizer, ignore)
    store, blocks = _open(place, partial(write, watch), whole=False)
    better: TokenStore | None = None

    def check(start: int, stop: int) -> TokenStore | None:
        nonlocal better
        before, size = len(blocks.data) - store.tokens.nbytes, store.tokens.itemsize
        try:
            if better is None:
                blocks.refuse_damage(before + start * size, before + stop * size)
        except _Damaged as error:
            try:
                if folder() != place:
                    raise UnsupportedError("the data have changed since it was written") from error
                better, _ = _open(place, partial(write, unwatched), whole=True)
                if better.digest != store.digest:
                    raise UnsupportedError("the same data now give different tokens") from error
            except UnsupportedError as why:
                raise UnsupportedError(
                    f"data.cache: {place}: {error}, and farspan cannot rebuild it: {why}; run the "
                    "same command again with the data that the run began with"
                ) from why
        return better

    return replace(store, check=check)


def store_key(source: Source, form: Form, tokenizer: Tokenizer, ignore: Collection[str]) -> str:
    """Return the name of a store's folder: a digest of all that decides which tokens it has."""
    table = [[*map(list, READ.values())], sorted(HARMLESS_NAMES), HARMLESS_ENDINGS]
    fields = [form.listing(), sorted(ignore), table]
    listing = [_FORMAT, tokenizer.identity(), fields, source.listing()]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:32]


def _open(folder: Path, write: Callable[[], None], whole: bool) -> tuple[TokenStore, _Blocks]:
    """Read a token store from its folder; `write` makes it first if missing or damaged. `whole`:
    check all tokens now. Raises UnsupportedError if writing fails, or the result is damaged."""
    if folder.is_dir() and not os.access(folder.parent, os.W_OK):  # a read-only disk
        with suppress(_Damaged):
            return _read(folder, whole)
    # Other processes wait here, and then find the work done.
    with locked(folder.parent, folder.name):
        try:
            return _read(folder, whole)
        except FileNotFoundError:
            pass
        except _Damaged as error:
            LOG.warning("data.cache: %s: %s; farspan rebuilds it", folder, error)
        write()
        try:
            return _read(folder, whole)
        except _Damaged as error:
            raise UnsupportedError(
                f"data.cache: {folder} cannot be read back: {error}; the drive may be failing: set "
                "data.cache to a folder on another drive"
            ) from error


@contextmanager
def locked(folder: Path, name: str) -> Iterator[None]:
    """Hold a lock on `name` in a cache folder during the block, against other processes. The folder
    is made private to this user. Raises UnsupportedError if it cannot be written."""
    try:
        private_folder(folder)
        # Open neither a link to another file nor a pipe without a reader.
        how = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(folder / f".{name}.lock", how, 0o600), "w") as lock_file:
            fcntl.flock(lock_file, fcntl.LOCK_EX)
            yield
    except (NotPrivate, WriteFailed) as error:
        raise UnsupportedError(f"data.cache: {error}") from error
    except OSError as error:
        raise UnsupportedError(
            f"data.cache: cannot write {error.filename or folder}: "
            f"{error.strerror or error}; free some space or set data.cache to another folder"
        ) from error


def _read(folder: Path, whole: bool) -> tuple[TokenStore, _Blocks]:
    """Read a store from its folder. Raises FileNotFoundError if it is missing, NotPrivate if
    another user owns it, and _Damaged."""
    for path in (folder, *folder.glob("*")):
        refuse_foreign(path)
        if is_open(path):
            raise _Damaged(f"other users may write {path.name}")
        if path != folder and not path.is_file():
            raise _Damaged(f"{path.name} is not a file")
    try:
        meta: dict[str, Any] = json.loads((folder / "meta.json").read_text("utf-8"))
        if isinstance(meta, dict) and "seal" not in meta:
            raise _Damaged("an earlier version of farspan wrote it, without checksums")
        digests = np.load(folder / "blocks.npy", allow_pickle=False)
        if meta.pop("seal") != _seal(folder, meta, digests):
            raise _Damaged("meta.json or blocks.npy has changed since it was written")
        arrays, blocks = {}, None
        for name, size in meta["bytes"].items():
            array = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            own, digests = np.split(digests, [-(-size // _BLOCK)])
            blocks = _Blocks(np.memmap(folder / f"{name}.npy", np.uint8, "r"), own)
            if len(blocks.data) != size:
                raise _Damaged(f"{name}.npy has {len(blocks.data):,} bytes, expected {size:,}")
            # The first block of tokens has the header, which tells how to read the others.
            blocks.refuse_damage(0, 1 if name == "tokens" and not whole else None)
            arrays[name] = array
    except OSError as error:
        if error.errno in (errno.ENOMEM, errno.EMFILE, errno.ENFILE):
            raise UnsupportedError(
                f"data.cache: {folder} cannot be mapped: {error.strerror}; raise this process's "
                "limits of memory (ulimit -v) and of open files (ulimit -n)"
            ) from error
        raise _Damaged(" ".join(str(error).split())) from error
    except Exception as error:  # damaged data may raise any error
        raise _Damaged(" ".join(str(error).split())) from error
    assert blocks is not None
    names, largest, digest = tuple(meta["names"]), meta["largest"], meta["digest"]
    ignored, harmless = tuple(meta["ignored"]), tuple(meta["harmless"])
    turns = Turns(*meta.get("turns", ()))
    store = TokenStore(
        names=names,
        largest=largest,
        digest=digest,
        ignored=ignored,
        harmless=harmless,
        turns=turns,
        **arrays,
    )
    if meta.get("paired"):
        starts = store.starts
        store = replace(store, starts=starts[::2], middles=starts[1::2], origins=store.origins[::2])
    return store, blocks


def _write(
    folder: Path,
    source: Source,
    form: Form,
    tokenizer: Tokenizer,
    ignore: Collection[str],
    watch: Watch,
) -> None:
    fresh = folder.with_name(f".{folder.name}")
    shutil.rmtree(fresh, ignore_errors=True)  # left by a killed process
    fresh.mkdir(mode=0o700)
    try:
        fields = Fields(form, ignore, getattr(source, "dropped", ()))
        meta = _fill(fresh, source, fields, tokenizer, watch)
        files = {name: fresh / f"{name}.npy" for name in _FILES}
        data = {name: path for name, path in files.items() if path.exists()}
        meta["bytes"] = {name: path.stat().st_size for name, path in data.items()}
        rows = [row for path in data.values() for row in _digests(path)]
        np.save(fresh / "blocks.npy", np.stack(rows))
        meta["seal"] = _seal(folder, meta, np.stack(rows))
        (fresh / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        for path in fresh.iterdir():
            path.chmod(0o600)
        publish(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _digests(path: Path) -> Iterator[np.ndarray]:
    # The file is read, not mapped: mapped pages would stay in memory.
    with path.open("rb") as file:
        for block in iter(partial(file.read, _BLOCK), b""):
            yield _digest(np.frombuffer(block, np.uint8), 0)


def _digest(data: np.ndarray, block: int) -> np.ndarray:
    digest = hashlib.sha256(data[block * _BLOCK : (block + 1) * _BLOCK].data).digest()
    return np.frombuffer(digest[:_DIGEST], dtype=np.uint8)


def _seal(folder: Path, meta: dict[str, Any], digests: np.ndarray) -> str:
    seal = hashlib.sha256(json.dumps([folder.name, meta], sort_keys=True).encode())
    seal.update(digests.tobytes())
    return seal.hexdigest()


def _fill(
    folder: Path, source: Source, fields: Fields, tokenizer: Tokenizer, watch: Watch
) -> dict[str, Any]:
    """Tokenize the documents, write the store's arrays, and return the content of meta.json."""
    form, read = fields.form, False
    narrow = tokenizer.size() <= 1 << 16 and not form.any_ids
    paired, began = isinstance(form, PreferenceForm), time.monotonic()
    compared = paired or isinstance(form, UnpairedForm)

    def tell(count: int) -> None:
        read = replace(source.how_far(), seconds=time.monotonic() - began)
        watch(len(table.starts) - 1, count, read)

    with ExitStack() as stack:
        tokens = stack.enter_context(_Column(folder / "tokens.npy", "<u2" if narrow else "<u4"))
        masks = None
        if form.masked:
            masks = stack.enter_context(_Column(folder / "trained.npy", "|b1"))
        turns = _TurnCounter(list(tokenizer.ends()), not isinstance(form, TextForm))
        table = _Table(tokens, masks, turns, list(tokenizer.signs()), compared, form.any_ids)
        for batch in _batches(fields.documents(source.documents()), form):
            read = True
            rows = zip(batch.documents, batch.contents, batch.encode(tokenizer), strict=True)
            for document, content, parts in rows:
                for count in table.add(document, content, parts):
                    tell(count)
            tell(table.starts[-1])
    _refuse_useless(source, read, table.understood, table.any_trained)
    starts, origins = (np.frombuffer(own, np.int64) for own in (table.starts, table.origins))
    table.digest.update(starts.tobytes())
    np.save(folder / "starts.npy", starts)
    np.save(folder / "origins.npy", origins.reshape(-1, 2))
    if isinstance(form, UnpairedForm):
        answers = np.frombuffer(table.answers, np.int64)
        table.digest.update(answers.tobytes())
        np.save(folder / "answers.npy", answers.reshape(-1, 2))
    return {
        "tokens": int(starts[-1]),
        "documents": len(starts) - 1,
        "largest": table.largest,
        "digest": table.digest.hexdigest(),
        "masked": form.masked,
        "ignored": sorted(fields.ignored),
        "harmless": sorted(fields.harmless),
        "turns": turns.to_json(),
        **({"paired": True} if paired else {}),
        "names": list(source.names()),
    }


@dataclass(slots=True)
class _Table:
    """Files of a store that is being written, and what meta.json will say of its tokens."""

    tokens: "_Column"
    masks: "_Column | None"
    turns: "_TurnCounter"
    signs: list[int]
    compared: bool  # documents are answers that a loss compares
    understood: bool
    starts: "array[int]" = field(default_factory=lambda: array("q", [0]))
    origins: "array[int]" = field(default_factory=lambda: array("q"))
    answers: "array[int]" = field(default_factory=lambda: array("q"))  # of labelled answers
    digest: Any = field(default_factory=hashlib.sha256)
    largest: int = 0
    any_trained: bool = False

    def add(self, document: Document, content: OneContent, parts: Parts) -> Iterator[int]:
        """Append a document. Between parts of a long text, yield the number of tokens so far."""
        size = 0
        for encoded in parts:
            if self.compared and not encoded.trained[1:].any():
                raise UnsupportedError(
                    f"{document.place}: an answer has no token to train; leave the record out"
                )
            if len(encoded.ids) == 0:
                continue
            self._write(encoded)
            if isinstance(content, Written) and content.desirable is not None:
                begin = self.starts[-1] + int(encoded.trained.argmax())
                self.answers.extend((begin, content.desirable))
            self.turns.add(content, encoded, first=size == 0)
            if size:
                yield self.starts[-1] + size
            size += len(encoded.ids)
        if size:
            self.starts.append(self.starts[-1] + size)
            self.origins.extend((document.file, document.line))

    def _write(self, encoded: Encoded) -> None:
        self.understood = self.understood or not np.isin(encoded.ids, self.signs).all()
        self.any_trained = self.any_trained or bool(encoded.trained.any())
        self.digest.update(self.tokens.append(encoded.ids))
        if self.masks is not None:
            self.digest.update(self.masks.append(encoded.trained))
        self.largest = max(self.largest, int(encoded.ids.max()))


@dataclass(slots=True)
class _TurnCounter:
    """Counter of the ids that end trained turns, and of documents with such an id inside a turn."""

    ends: list[int]  # ids that stop generation
    has_turns: bool
    last: Counter[int] = field(default_factory=Counter)
    signed: int = 0
    _within: bool = False  # the current document has such a sign
    _closed: bool = False  # its latest id stops generation

    def add(self, content: "OneContent", encoded: Encoded, first: bool) -> None:
        """Count a document or its first part; if not `first`, a later part of the same document."""
        if isinstance(content, Encoded):
            return
        ends = np.isin(encoded.ids, self.ends)
        before = self._within and not first
        within = not content.bare and bool(ends[:-1].any() or (self._closed and not first))
        self._within, self._closed = before or within or content.holds_sign, bool(ends[-1])
        self.signed += self._within and not before
        if self.has_turns:
            until = encoded.trained & ~np.append(encoded.trained[1:], False)
            self.last.update(encoded.ids[until].tolist())

    def to_json(self) -> list[object]:
        return [self.last.total(), self.last.most_common(_MOST_ENDS), self.signed]


def _refuse_useless(source: Source, read: bool, understood: bool, any_trained: bool) -> None:
    if not read:
        raise Useless(f"data.path: {_few(source.names())} holds no text; give documents with text")
    if not understood:
        # A model would learn to repeat the single sign, and its loss would be 0.
        raise Useless(
            f"data.tokenizer: it produced no ordinary tokens for {_few(source.names())}; give "
            "'bytes', or the folder or hub name of a tokenizer "
            "for this text"
        )
    if not any_trained:
        raise Useless(
            f"data.path: {_few(source.names())}: none of its tokens is trained; give chats with "
            "turns of the assistant, completions with text, or labels that are not all -100"
        )


class _Column:
    """A one-dimensional .npy file that grows by appended values."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._file = path.open("wb")
        self._dtype = np.dtype(dtype)
        self._length = 0
        self._header()

    def __enter__(self) -> "_Column":
        return self

    def append(self, values: np.ndarray) -> bytes:
        """Append values to the file, and return them as bytes, for a digest."""
        data = values.astype(self._dtype).tobytes()
        self._file.write(data)
        self._length += len(values)
        return data

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._file.seek(0)
            self._header()

    def _header(self) -> None:
        """Write the .npy header, which numpy pads so that a larger length needs no more bytes."""
        descr = np.lib.format.dtype_to_descr(self._dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (self._length,)}
        np.lib.format.write_array_header_1_0(self._file, header)
        assert self._file.tell() == 128, self._file.tell()


@dataclass(frozen=True, slots=True)
class _Batch:
    """Documents that the tokenizer takes in one call."""

    documents: list[Document]
    contents: list[OneContent]
    masked: bool

    def is_unlike(self, content: OneContent) -> bool:
        """Return whether a document must be tokenized in another call than this batch."""
        first = self.contents[0] if self.contents else content
        long = isinstance(first, LongText) or isinstance(content, LongText)
        alike = getattr(first, "bare", None) == getattr(content, "bare", None)
        return bool(self.contents) and (long or not alike)

    def encode(self, tokenizer: Tokenizer) -> list[Parts]:
        """Return the token ids of each document, in parts: one part, unless the text is long."""
        if isinstance(self.contents[0], LongText):
            rows = tokenizer.encode_parts(self.contents[0].parts())
            return [(Encoded(ids, np.ones(len(ids), dtype=bool)) for ids in rows)]
        return [(encoded,) for encoded in self._encode(tokenizer)]

    def _encode(self, tokenizer: Tokenizer) -> list[Encoded]:
        written = [c for c in self.contents if isinstance(c, Written)]
        if not written:
            return [c for c in self.contents if isinstance(c, Encoded)]
        assert len(written) == len(self.contents)
        if self.masked or written[0].bare:
            return tokenizer.mark(written)
        rows = tokenizer.encode([w.text for w in written])
        return [Encoded(ids, np.ones(len(ids), dtype=bool)) for ids in rows]


def _batches(documents: Iterator[Document], form: Form) -> Iterator[_Batch]:
    """Yield batches of about a million characters of documents, without the empty ones."""
    batch, size = _Batch([], [], form.masked), 0
    with reading(form) as read:
        for document in documents:
            content = read(document) if document.line else _read_text(document, form)
            if isinstance(content, Written) and isinstance(form, TextForm):
                content = _divide(content)
            if content is None or content == ():
                continue
            parts = content if isinstance(content, tuple) else (content,)
            if size >= _BATCH_SIZE or batch.is_unlike(parts[0]):
                yield batch
                batch, size = _Batch([], [], form.masked), 0
            batch.documents.extend(document for _ in parts)
            batch.contents.extend(parts)
            size += sum(part.size() for part in parts)
    if batch.documents:
        yield batch


def _read_text(document: Document, form: Form) -> Written | LongText | None:
    """Return the document of a plain text file; None if it is blank. Raises UnsupportedError if
    `form` reads answers that a loss compares."""
    if isinstance(form, PreferenceForm | UnpairedForm):
        raise UnsupportedError(
            f"data.path: {document.place} is plain text, without answers to compare; give a "
            "glob that matches only the files with records"
        )
    text = document.fields[TEXT]
    if not isinstance(text, LongText):
        return TextForm(TEXT).read(document)
    return text if any(not part.isspace() for part in text.parts()) else None


def _divide(content: Written) -> Written | LongText:
    """Divide a long text into parts of at most `PART` characters."""
    text = content.text
    if len(text) <= 2 * PART:
        return content
    return LongText(lambda: (text[i : i + PART] for i in range(0, len(text), PART)))


def _few(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


# A chat template is a program that comes with a tokenizer. It may never end, or write more than
# memory holds, and Jinja's sandbox limits neither. So a child, forked once for all records of a
# source, runs it under limits of the kernel, which hold even within a single operation. A record
# that exceeds them ends the child, and an error names the record.

CPU_SECONDS = 1.5  # for a record; usual ones take a thousandth
MEMORY = 512 << 20  # bytes in addition to those of the process at the fork
_PATIENCE = 300.0  # seconds to wait for a child that uses no CPU

Read = Callable[[Document], Content]


@contextmanager
def reading(form: Form) -> Iterator[Read]:
    """Yield a function that reads records by `form`. If `form` renders a template, a child process
    reads, and a record that takes more than CPU_SECONDS or MEMORY there raises UnsupportedError."""
    chat = form.chat if isinstance(form, PromptForm | PreferenceForm) else form
    if not isinstance(chat, ChatForm):
        yield form.read
        return
    ours, theirs = Pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of locks that other threads may have; the child takes none of their
        # locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            ours.close()
            _serve(form.read, theirs)
        finally:
            os._exit(1)
    theirs.close()
    try:
        ask = partial(_ask, child, ours)
        if isinstance(form, ChatForm):
            yield ask
            return
        first = form.columns[0]  # texts need no template
        yield lambda d: (form.read if isinstance(d.fields.get(first), str) else ask)(d)
    finally:
        ours.close()
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _ask(child: int, pipe: Connection, document: Document) -> Content:
    try:
        pipe.send(document)
        if not pipe.poll(_PATIENCE):
            os.kill(child, signal.SIGKILL)
        answer: Content | Exception = pipe.recv()
    except (EOFError, OSError):
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        how = f"crashed the process that renders it (status {status})"
        if status == -signal.SIGPROF:
            how = f"takes more than {CPU_SECONDS} s of CPU"
        answer = UnsupportedError(
            f"{document.place}: the chat template {how}; leave this record out, or give another "
            "data.chat_template"
        )
    if isinstance(answer, Exception):
        raise answer
    return answer


def _serve(read: Read, pipe: Connection) -> None:
    """Read records for the parent process until the parent closes its end of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the parent
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)  # SIGPROF then ends the process
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + MEMORY
    if most == resource.RLIM_INFINITY or limit < most:
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    place = "a record"
    while True:
        try:
            document = pipe.recv()
            place = document.place
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            answer: Content | Exception = read(document)
        except EOFError:
            return
        except MemoryError:
            answer = UnsupportedError(
                f"{place}: the chat template needs more than {MEMORY >> 20} MiB; leave this record "
                "out, or give another data.chat_template"
            )
        except Exception as error:
            answer = error
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send(answer)
