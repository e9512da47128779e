"""Tokens on disk: written once, then mapped into memory.

    <cache>/<key>/tokens.npy    ids of all documents, one after the other
                  starts.npy    where document d begins; starts[documents] is the end
                  origins.npy   (file, line) of document d
                  meta.json     names of the files, counts, and the digest of the ids

A folder is written beside its place and renamed into it, so a name that exists is complete.
"""

import fcntl
import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from farspan.data.files import Document
from farspan.data.sources import Source
from farspan.data.tokenizers import Tokenizer
from farspan.spec import Refused

_FORMAT = 2  # of the first, tokens could be of no text at all
_BATCH_CHARACTERS = 1 << 20  # text handed to a tokenizer at once: enough to fill its threads

Watch = Callable[[int, int], None]  # documents and tokens written so far


@dataclass(frozen=True, slots=True)
class TokenStore:
    """The documents of one source as ids. `tokens` and `starts` are mapped, not read."""

    tokens: np.ndarray  # [tokens] uint16 or uint32
    starts: np.ndarray  # [documents + 1] int64
    origins: np.ndarray  # [documents, 2] int64: file, line
    names: tuple[str, ...]
    largest: int  # of all ids
    digest: str  # of ids and starts: two stores with one digest hold the same documents

    def documents(self) -> int:
        return len(self.starts) - 1

    def name(self, document: int) -> str:
        """Where a document was read: a file, or a file and its line."""
        file, line = (int(number) for number in self.origins[document])
        return f"{self.names[file]}:{line}" if line else self.names[file]


def open_store(source: Source, tokenizer: Tokenizer, cache: Path, watch: Watch) -> TokenStore:
    """The tokens of `source`, from the cache or written to it now.

    Raises Refused when a document cannot be read, when there is no text at all, or when the
    cache cannot be written.
    """
    listing = [_FORMAT, tokenizer.identity(), source.listing()]
    key = hashlib.sha256(json.dumps(listing).encode("utf-8")).hexdigest()[:32]
    cache = cache.expanduser()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f".{key}.lock").open("w") as lock:
            # Whoever comes second waits here and finds the work done.
            fcntl.flock(lock, fcntl.LOCK_EX)
            store = _read(cache / key)
            if store is None:
                _write(cache / key, source, tokenizer, watch)
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
        names = tuple(meta["names"])
        return TokenStore(tokens, starts, origins, names, meta["largest"], meta["digest"])
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None


def _write(folder: Path, source: Source, tokenizer: Tokenizer, watch: Watch) -> None:
    partial = folder.with_name(f".{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir()
    try:
        _fill(partial, source, tokenizer, watch)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fill(folder: Path, source: Source, tokenizer: Tokenizer, watch: Watch) -> None:
    starts, origins = array("q", [0]), array("q")
    dtype = np.dtype(np.uint16 if tokenizer.size() <= 1 << 16 else np.uint32)
    digest, largest = hashlib.sha256(), 0
    signs, read, understood = list(tokenizer.signs()), False, False
    with (folder / "tokens.npy").open("wb") as file:
        _header(file, dtype, 0)
        for batch in _batches(source.documents()):
            read = True
            for document, ids in zip(batch, tokenizer.encode([d.text for d in batch]), strict=True):
                if len(ids) == 0:
                    continue
                understood = understood or not np.isin(ids, signs).all()
                data = ids.astype(dtype).tobytes()
                file.write(data)
                digest.update(data)
                largest = max(largest, int(ids.max()))
                starts.append(starts[-1] + len(ids))
                origins.extend((document.file, document.line))
            watch(len(starts) - 1, starts[-1])
        file.seek(0)
        _header(file, dtype, starts[-1])
    if not read:
        raise Refused(f"data.path: {_few(source.names())}: no text in it; give data with text")
    if not understood:
        # A model would learn to repeat the one sign, and its loss be 0.
        raise Refused(
            f"data.tokenizer: it knows nothing of the text in {_few(source.names())}: it gives no "
            "tokens, or special ones only; give 'bytes', or the folder or hub name of a tokenizer "
            "for this text"
        )
    digest.update(starts.tobytes())
    np.save(folder / "starts.npy", np.frombuffer(starts, dtype=np.int64))
    np.save(folder / "origins.npy", np.frombuffer(origins, dtype=np.int64).reshape(-1, 2))
    meta = {
        "tokens": starts[-1],
        "documents": len(starts) - 1,
        "largest": largest,
        "digest": digest.hexdigest(),
        "names": source.names(),
    }
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


def _header(file: BinaryIO, dtype: np.dtype, length: int) -> None:
    """The .npy header; numpy pads it so that a longer length fits in the same bytes."""
    descr = np.lib.format.dtype_to_descr(dtype)
    header = {"descr": descr, "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(file, header)
    assert file.tell() == 128, file.tell()


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents with some text, gathered into about a megabyte. A blank one is left out."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        if not document.text.strip():
            continue
        batch.append(document)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _few(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
