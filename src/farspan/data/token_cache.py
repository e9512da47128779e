"""Tokens on disk: written once, then mapped into memory.

    <cache>/<key>/tokens.npy    ids of all documents, one after the other
                  starts.npy    where document d begins; starts[documents] is the end
                  origins.npy   (file, line) of document d
                  trained.npy   of each token whether it is trained, where some are not
                  meta.json     names of the files, counts, and the digest of the ids

A folder is written beside its place and renamed into it, so a name that exists is complete."""

import fcntl
import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from farspan.data.tokenizers import Document, Encoded, Form, Source, Tokenizer, Written
from farspan.spec import Refused

_FORMAT = 3  # the first could hold tokens of no text at all; the second knew no untrained ones
_BATCH_SIZE = 1 << 20  # characters handed to a tokenizer at once: enough to fill its threads

Watch = Callable[[int, int], None]  # documents and tokens written so far


def unwatched(documents: int, tokens: int) -> None:
    """For whoever need not know how far it is."""


@dataclass(frozen=True, slots=True)
class TokenStore:
    """The documents of one source as ids. The arrays are mapped, not read."""

    tokens: np.ndarray  # [tokens] uint16 or uint32
    starts: np.ndarray  # [documents + 1] int64
    origins: np.ndarray  # [documents, 2] int64: file, line
    names: tuple[str, ...]
    largest: int  # of all ids
    digest: str  # of all the above: two stores with one digest hold the same documents
    trained: np.ndarray | None = None  # [tokens] bool; None: all are

    def documents(self) -> int:
        return len(self.starts) - 1

    def trained_tokens(self) -> int:
        """How many tokens are trained."""
        return len(self.tokens) if self.trained is None else int(self.trained.sum())

    def name(self, document: int) -> str:
        """Where a document was read: a file, or a file and its line."""
        file, line = (int(number) for number in self.origins[document])
        return f"{self.names[file]}:{line}" if line else self.names[file]


def open_store(
    source: Source, form: Form, tokenizer: Tokenizer, cache: Path, watch: Watch
) -> TokenStore:
    """The tokens of `source`, read as `form` says, from the cache or written to it now.

    Raises Refused when a document cannot be read, when there is no text at all, or when the
    cache cannot be written.
    """
    listing = [_FORMAT, tokenizer.identity(), form.listing(), source.listing()]
    key = hashlib.sha256(json.dumps(listing).encode("utf-8")).hexdigest()[:32]
    cache = cache.expanduser()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f".{key}.lock").open("w") as lock:
            # Whoever comes second waits here and finds the work done.
            fcntl.flock(lock, fcntl.LOCK_EX)
            store = _read(cache / key)
            if store is None:
                _write(cache / key, source, form, tokenizer, watch)
                store = _read(cache / key)
    except OSError as error:
        raise Refused(
            f"data.cache: cannot write {error.filename or cache}: {error.strerror or error}; "
            "free some space or set data.cache to another folder"
        ) from error
    assert store is not None, cache / key
    return store


def _read(folder: Path) -> TokenStore | None:
    """None when the folder is absent or not whole: it can always be written again."""
    try:
        meta: dict[str, Any] = json.loads((folder / "meta.json").read_text("utf-8"))
        tokens, starts, origins = (
            np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            for name in ("tokens", "starts", "origins")
        )
        documents = len(starts) - 1
        if [len(tokens), documents, len(origins)] != [meta["tokens"], *[meta["documents"]] * 2]:
            return None
        trained = None
        if meta["masked"]:
            trained = np.load(folder / "trained.npy", mmap_mode="r", allow_pickle=False)
            if trained.shape != tokens.shape:
                return None
        names, largest, digest = tuple(meta["names"]), meta["largest"], meta["digest"]
        return TokenStore(tokens, starts, origins, names, largest, digest, trained)
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


def _write(folder: Path, source: Source, form: Form, tokenizer: Tokenizer, watch: Watch) -> None:
    partial = folder.with_name(f".{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir()
    try:
        _fill(partial, source, form, tokenizer, watch)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fill(folder: Path, source: Source, form: Form, tokenizer: Tokenizer, watch: Watch) -> None:
    narrow = tokenizer.size() <= 1 << 16 and not form.any_ids
    starts, origins = array("q", [0]), array("q")
    digest, largest, any_trained = hashlib.sha256(), 0, False
    signs, read, understood = list(tokenizer.signs()), False, form.any_ids
    with ExitStack() as stack:
        tokens = stack.enter_context(_Column(folder / "tokens.npy", "<u2" if narrow else "<u4"))
        masks = None
        if form.masked:
            masks = stack.enter_context(_Column(folder / "trained.npy", "|b1"))
        for batch in _batches(source.documents(), form):
            read = True
            for document, encoded in zip(batch.documents, batch.encode(tokenizer), strict=True):
                ids = encoded.ids
                if len(ids) == 0:
                    continue
                understood = understood or not np.isin(ids, signs).all()
                any_trained = any_trained or bool(encoded.trained.any())
                digest.update(tokens.append(ids))
                if masks is not None:
                    digest.update(masks.append(encoded.trained))
                largest = max(largest, int(ids.max()))
                starts.append(starts[-1] + len(ids))
                origins.extend((document.file, document.line))
            watch(len(starts) - 1, starts[-1])
    _refuse_useless(source, read, understood, any_trained)
    digest.update(starts.tobytes())
    np.save(folder / "starts.npy", np.frombuffer(starts, dtype=np.int64))
    np.save(folder / "origins.npy", np.frombuffer(origins, dtype=np.int64).reshape(-1, 2))
    meta = {
        "tokens": starts[-1],
        "documents": len(starts) - 1,
        "largest": largest,
        "digest": digest.hexdigest(),
        "masked": form.masked,
        "names": source.names(),
    }
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


def _refuse_useless(source: Source, read: bool, understood: bool, any_trained: bool) -> None:
    if not read:
        raise Refused(f"data.path: {_few(source.names())}: it has no text; give data with text")
    if not understood:
        # A model would learn to repeat the one sign, and its loss be 0.
        raise Refused(
            f"data.tokenizer: it produced no ordinary tokens for {_few(source.names())}; give "
            "'bytes', or the folder or hub name of a tokenizer "
            "for this text"
        )
    if not any_trained:
        raise Refused(
            f"data.path: {_few(source.names())}: none of its tokens is trained; give chats with "
            "turns "
            "of the assistant, completions with text, or labels that are not all -100"
        )


class _Column:
    """A one-dimensional .npy file that grows."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._file = path.open("wb")
        self._dtype = np.dtype(dtype)
        self._length = 0
        self._header()

    def __enter__(self) -> "_Column":
        return self

    def append(self, values: np.ndarray) -> bytes:
        """The bytes that were written."""
        data = values.astype(self._dtype).tobytes()
        self._file.write(data)
        self._length += len(values)
        return data

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._file.seek(0)
            self._header()

    def _header(self) -> None:
        """numpy pads it so that a longer length fits in the same bytes."""
        descr = np.lib.format.dtype_to_descr(self._dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (self._length,)}
        np.lib.format.write_array_header_1_0(self._file, header)
        assert self._file.tell() == 128, self._file.tell()


@dataclass(frozen=True, slots=True)
class _Batch:
    """Documents that are turned into ids together."""

    documents: list[Document]
    contents: list[Written | Encoded]
    masked: bool

    def encode(self, tokenizer: Tokenizer) -> list[Encoded]:
        written = [c for c in self.contents if isinstance(c, Written)]
        if not written:
            return [c for c in self.contents if isinstance(c, Encoded)]
        assert len(written) == len(self.contents)
        if self.masked or written[0].bare:
            return tokenizer.mark(written)
        rows = tokenizer.encode([w.text for w in written])
        return [Encoded(ids, np.ones(len(ids), dtype=bool)) for ids in rows]


def _batches(documents: Iterator[Document], form: Form) -> Iterator[_Batch]:
    """Documents with something in them, gathered into about a million characters."""
    batch, size = _Batch([], [], form.masked), 0
    for document in documents:
        content = form.read(document)
        if content is None:
            continue
        batch.documents.append(document)
        batch.contents.append(content)
        size += content.size()
        if size >= _BATCH_SIZE:
            yield batch
            batch, size = _Batch([], [], form.masked), 0
    if batch.documents:
        yield batch


def _few(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
