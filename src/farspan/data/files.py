"""Documents in files: text files, JSON lines, and Python's own sources."""

import glob
import gzip
import json
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from farspan.data.documents import TEXT, Document
from farspan.spec import Refused

_GZIP = b"\x1f\x8b"  # what such a file begins with
# Test suites hold files that are broken on purpose, and installed packages are not part of Python.
# The rest is generated, not written: a help text of 757 kB, code pages, this build's settings.
_SKIPPED = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "encodings"}
)


def find_files(path: str, field: str) -> tuple[Path, ...]:
    """The files that `path` (a file, a folder or a glob) stands for, sorted.

    Raises Refused, naming the configuration field `field`, when there are none.
    """
    place = Path(path).expanduser()
    if place.is_file():
        return (place,)
    if place.is_dir():
        found = [p for p in place.rglob("*") if not _hidden(p.relative_to(place))]
    else:
        found = [Path(p) for p in glob.glob(str(place), recursive=True)]
    files = tuple(sorted(p for p in found if p.is_file()))
    if not files:
        raise Refused(f"{field}: no file matches {path!r}; give a file, a folder or a glob")
    return files


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def stdlib_files() -> tuple[Path, ...]:
    """Python's own `.py` sources, sorted, without tests and generated files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(root.rglob("*.py"))
    return tuple(p for p in files if not _skipped(p.relative_to(root)))


def _skipped(path: Path) -> bool:
    return bool(_SKIPPED.intersection(path.parts)) or path.name.startswith("_sysconfigdata")


def read_bytes(path: Path) -> bytes:
    """All bytes of a file; Refused with its name when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise Refused(f"{path}: cannot be read: {error.strerror}") from error


def decode(data: bytes, path: Path, line: int) -> str:
    """Strict UTF-8. `line` is the number of the first line of `data` in its file."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        where = line + data.count(b"\n", 0, error.start)
        raise Refused(
            f"{path}: line {where} is not valid UTF-8 (byte 0x{data[error.start]:02x}); convert "
            "the file to UTF-8 or leave it out"
        ) from error


@dataclass(frozen=True, slots=True)
class TextFiles:
    """Every file is one document."""

    files: tuple[Path, ...]

    def names(self) -> tuple[str, ...]:
        return tuple(str(path) for path in self.files)

    def listing(self) -> list[list[object]]:
        """What changes when the documents change: names, sizes and times of modification."""
        return [["text", *_stamp(path)] for path in self.files]

    def documents(self) -> Iterator[Document]:
        for index, path in enumerate(self.files):
            text = decode(read_bytes(path), path, line=1)
            yield Document(index, 0, str(path), {TEXT: text})


@dataclass(frozen=True, slots=True)
class JsonLines:
    """Every line is one document: the fields of a JSON object."""

    files: tuple[Path, ...]

    def names(self) -> tuple[str, ...]:
        return tuple(str(path) for path in self.files)

    def listing(self) -> list[list[object]]:
        return [["jsonl", *_stamp(path)] for path in self.files]

    def documents(self) -> Iterator[Document]:
        for index, path in enumerate(self.files):
            for line, data in _lines(path):
                yield Document(index, line, f"{path}: line {line}", _record(path, line, data))


def _record(path: Path, line: int, data: bytes) -> dict[str, Any]:
    try:
        record = json.loads(decode(data, path, line))
    except json.JSONDecodeError as error:
        raise Refused(
            f"{path}: line {line} is not valid JSON: {error.msg} at column {error.colno}"
        ) from error
    except Refused:
        raise
    except (ValueError, RecursionError) as error:  # numbers or nesting beyond Python's limits
        raise Refused(f"{path}: line {line} cannot be read as JSON: {error}") from error
    if not isinstance(record, dict):
        raise Refused(
            f"{path}: line {line} holds {type(record).__name__}, expected an object with fields"
        )
    return record


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines that are not blank, read one at a time; of a gzip file, of what it holds."""
    try:
        with path.open("rb") as file:
            unpacked = gzip.open if file.read(2) == _GZIP else open
        with cast(BinaryIO, unpacked(path, "rb")) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line.rstrip(b"\r\n")
    except (OSError, EOFError, zlib.error) as error:  # the last two of a damaged .gz
        words = getattr(error, "strerror", None) or error
        raise Refused(f"{path}: cannot be read: {words}") from error


def _stamp(path: Path) -> tuple[str, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise Refused(f"{path}: cannot be read: {error.strerror}") from error
    return str(path.resolve()), status.st_size, status.st_mtime_ns
