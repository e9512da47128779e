"""Sources of documents: files of text and records, Python's own sources, Hugging Face datasets."""

import csv
import glob
import gzip
import io
import json
import re
import shutil
import sysconfig
import tempfile
import zlib
from codecs import BOM_UTF8, getincrementaldecoder
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from farspan.data.config import (
    MOST_QUOTED,
    SUFFIXES,
    SourceKind,
    suffix_of,
)
from farspan.data.formats import (
    is_media,
)
from farspan.data.tokenizers import (
    PART,
    TEXT,
    Document,
    Form,
    HowFar,
    LongText,
)
from farspan.formatting import shortened
from farspan.lazy import load
from farspan.profile.catalog import is_on_hub, refuse_unreachable
from farspan.spec import UnsupportedError

MOST_TEXT = 256 << 20  # most bytes of a document: a text file or a line
MOST_VALUES = 1 << 24  # most values of a record, each 40 to 64 bytes of memory
MOST_BLANK = 1 << 20  # most blank lines in a row
# Bytes of JSON that begin no value and end no string.
_UNMARKED = bytes(set(range(256)) - set(b'",[{'))
_AT_ONCE = 1 << 24  # bytes whose values are counted at once
_BLOCK = 1 << 20  # bytes of an array that are scanned at once
_ROWS = 256  # rows of a table that become records at once
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"  # first bytes of such files
# Test suites contain broken files on purpose, and installed packages are not part of Python. The
# rest is generated: a help text of 757 kB, code pages, the settings of this build.
_SKIPPED = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "encodings"}
)


def find_files(path: str, field: str) -> tuple[Path, ...]:
    """Return the files, sorted, that a path to a file, a folder or a glob matches. Raises
    UnsupportedError, naming the configuration's key `field`, if there are none."""
    place = Path(path).expanduser()
    if place.is_file():
        return (place,)
    if place.is_dir():
        matched = [p for p in place.rglob("*") if not _hidden(p.relative_to(place))]
    else:
        matched = [Path(p) for p in glob.glob(str(place), recursive=True)]
    files = tuple(sorted(p for p in matched if p.is_file()))
    if not files:
        hub = ", or a dataset's name on the hub such as org/name" * (field == "data.path")
        raise UnsupportedError(
            f"{field}: no file matches {path!r}; {_near(place)}give a file, a folder or a glob{hub}"
        )
    return files


def _near(place: Path) -> str:
    """Return a hint that names files similar to a missing one."""
    missing = place
    while not missing.parent.is_dir():
        missing = missing.parent
    there = {p.name.lower(): p for p in missing.parent.iterdir()}
    close = [str(there[name]) for name in get_close_matches(missing.name.lower(), there)]
    if place.exists() or not close:
        return f"there is no folder {missing}; " if missing != place else ""
    return f"did you mean {' or '.join(close)}? If not, "


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def stdlib_files() -> tuple[Path, ...]:
    """Return the standard library's `.py` files, sorted, without tests and generated files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(root.rglob("*.py"))
    return tuple(p for p in files if not _skipped(p.relative_to(root)))


def _skipped(path: Path) -> bool:
    return bool(_SKIPPED.intersection(path.parts)) or path.name.startswith("_sysconfigdata")


def read_bytes(path: Path, most: int = MOST_TEXT) -> bytes:
    """Read a file's bytes. Raises UnsupportedError if it is unreadable or exceeds `most` bytes."""
    with _opened(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise _too_long(path, most)
    return data


def _too_long(path: Path, most: int) -> UnsupportedError:
    return UnsupportedError(
        f"{path}: has more than {most >> 20} MiB, the most for one text; divide it"
    )


def _not_utf8(path: Path, line: int, error: UnicodeDecodeError) -> UnsupportedError:
    where = line + error.object.count(b"\n", 0, error.start)
    return UnsupportedError(
        f"{path}: line {where} is not valid UTF-8 (byte 0x{error.object[error.start]:02x}); "
        "convert the file to UTF-8 or leave it out"
    )


def decode(data: bytes, path: Path, line: int) -> str:
    """Decode bytes as strict UTF-8. `line` is the number of their first line in the file, for
    errors; a byte order mark (U+FEFF) at the beginning of line 1 is removed."""
    if line == 1:
        data = data.removeprefix(BOM_UTF8)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, line, error) from error


@dataclass(slots=True)
class Reading:
    """Progress of reading a source's files, in bytes on disk."""

    total: int = 0
    before: int = 0  # bytes of files that were read to their end
    raw: BinaryIO | None = None  # the current file

    def how_far(self) -> HowFar:
        """Return the bytes read so far, those of the current file included, and the total."""
        current = 0 if self.raw is None or self.raw.closed else self.raw.tell()
        return HowFar(self.before + current, self.total)


BEGINNING: list[Any] = [-1, 0]  # of a stream: before all documents
# Documents, and a function that returns the place of a document that was just read.
Behind = tuple[Generator[Document], Callable[[Document], list[Any]]]


@dataclass(frozen=True, slots=True)
class DataFiles:
    """Documents in files, in order: a text file is one document, and so is each record of other
    files. `kind` tells the format of all files or, if `auto`, each file's suffix does."""

    files: tuple[Path, ...]
    kind: SourceKind = SourceKind.AUTO
    reading: Reading = field(default_factory=Reading, compare=False, repr=False)

    def names(self) -> tuple[str, ...]:
        return tuple(str(path) for path in self.files)

    def how_far(self) -> HowFar:
        return self.reading.how_far()

    def listing(self) -> list[list[object]]:
        """Return JSON values for the cache's key: the names, sizes and times of the files."""
        return [[self._holds(path), *_stamp(path)] for path in self.files]

    def _holds(self, path: Path) -> str:
        return SUFFIXES[suffix_of(path)] if self.kind is SourceKind.AUTO else str(self.kind)

    def suffixes(self) -> Counter[str]:
        """Return the number of files with each suffix."""
        return Counter(suffix_of(path) for path in self.files)

    def behind(self, place: list[Any]) -> Behind:
        """Return the documents after one that was read earlier, to resume a stream.

        Args:
            place: place of the document, as JSON values, or BEGINNING.

        Returns:
            The documents after it, and a function that returns the place of the latest. Reading
            raises UnsupportedError at the first document that cannot be read.
        """
        return self._read_on(*place), lambda last: [last.file, last.line]

    def _read_on(self, file: int, line: int) -> Generator[Document]:
        for row in self._rows(file, line):
            if isinstance(row, UnsupportedError):
                raise row
            yield row

    def firsts(self) -> Iterator[Document]:
        """Yield the first record of each file that has records."""
        for path in self.files:
            if self._holds(path) != "text":
                yield from islice(DataFiles((path,), self.kind).documents(), 1)

    def documents(self) -> Iterator[Document]:
        """Yield the documents. Raises UnsupportedError at the end if some cannot be read; the error
        names the first of them and counts the others."""
        first, others = None, 0
        for row in self._rows():
            if isinstance(row, UnsupportedError):
                first, others = first or row, others + (first is not None)
            elif first is None:
                yield row
        if first is not None:
            more = f"; {others:,} more records cannot be read either" * bool(others)
            raise UnsupportedError(f"{first}{more}") from first

    def _rows(self, file: int = -1, line: int = 0) -> Iterator[Document | UnsupportedError]:
        """Yield the documents after line `line` of file number `file`; for an unreadable document,
        the UnsupportedError."""
        sizes = [_stamp(path)[1] for path in self.files]
        self.reading.total, self.reading.before = sum(sizes), sum(sizes[: max(0, file)])
        for index, path in enumerate(self.files):
            if index < file:
                continue
            kind = self._holds(path)
            if kind == "text" and index > file:
                yield Document(index, 0, str(path), {TEXT: _text(path, self.reading)})
            skipped = line if index == file else 0
            for number, place, fields in _READERS[kind](path, self.reading, skipped):
                if isinstance(fields, UnsupportedError):
                    yield fields
                else:
                    yield Document(index, number, place, fields)
            self.reading.before += sizes[index]


def _text(path: Path, reading: Reading) -> str | LongText:
    """Return a file's text; if it is long, an object that reads its parts when needed."""
    parts = _parts(path, reading)
    first = next(parts, "")
    return first if next(parts, None) is None else LongText(partial(_parts, path, reading))


def _parts(path: Path, reading: Reading) -> Iterator[str]:
    """Yield a long text file's text in parts, decoded as by `decode`."""
    decoder, line, size = getincrementaldecoder("utf-8")(), 1, 0
    with _opened(path, reading) as file:
        while True:
            block = file.read(PART)
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise _not_utf8(path, line, error) from error
            size += len(block)
            if size > MOST_TEXT:
                raise _too_long(path, MOST_TEXT)
            if line == 1 and size == len(block):
                text = text.removeprefix("\ufeff")
            line += text.count("\n")
            if text:
                yield text
            if not block:
                return


# The number of a record in its file, its place in words, and its fields or the error.
Row = tuple[int, str, dict[str, Any] | UnsupportedError]


def _json_rows(path: Path, reading: Reading, skipped: int) -> Iterator[Row]:
    """Yield a JSON file's objects: one per line, elements of one array, or one in several lines."""
    with _opened(path) as file:
        head = file.read(1 << 12).removeprefix(BOM_UTF8).lstrip()
    many = head.startswith(b"[")
    first, goes_on, _ = head.partition(b"\n")
    if goes_on and first.startswith(b"{") and _ends(first, -1, False)[3] is None:
        with suppress(UnsupportedError), _opened(path, reading) as file:
            data = file.read(MOST_TEXT).removeprefix(BOM_UTF8)
            row = 1, str(path), _record(str(path), data)
            yield from () if skipped else (row,)
            return
    for number, data in (_elements if many else _lines)(path, reading):
        if number <= skipped:
            continue
        place = f"{path}: {'row' if many else 'line'} {number}"
        try:
            yield number, place, _record(place, data)
        except UnsupportedError as error:
            yield number, place, error


def _record(place: str, data: bytes) -> dict[str, Any]:
    if len(data) > MOST_VALUES and _values(data) > MOST_VALUES:
        raise UnsupportedError(f"{place} has more than {MOST_VALUES:,} values; divide the document")
    try:
        record = json.loads(data.decode("utf-8"), object_pairs_hook=_unrepeated)
    except UnicodeDecodeError as error:
        raise UnsupportedError(
            f"{place} is not valid UTF-8 (byte 0x{data[error.start]:02x}); convert the file to "
            "UTF-8 or leave it out"
        ) from error
    except json.JSONDecodeError as error:
        ends = data.rstrip().endswith((b"{", b"[", b","))
        raise UnsupportedError(
            f"{place} is not valid JSON: {error.msg} at column {error.colno}"
            + "; write one object per line, or one array of objects" * ends
        ) from error
    except (ValueError, RecursionError) as error:  # numbers or nesting beyond Python's limits
        raise UnsupportedError(f"{place} cannot be read as JSON: {error}") from error
    if not isinstance(record, dict):
        raise UnsupportedError(
            f"{place} holds {type(record).__name__}, expected an object with fields"
        )
    return record


def _elements(path: Path, reading: Reading) -> Iterator[tuple[int, bytes]]:
    """Yield the number and text of each element of a file's JSON array, at most two in memory."""
    depth, inside, number, parts = 0, False, 1, list[bytes]()
    with _opened(path, reading) as file:
        while (byte := file.read(1)) != b"[":
            assert byte, "it begins with a bracket"
        while block := file.read(_BLOCK):
            while block.endswith(b"\\") and (byte := file.read(1)):
                block += byte
            ends, depth, inside, closed = _ends(block, depth, inside)
            begin = 0
            for end in ends:
                element = b"".join((*parts, block[begin:end])).strip()
                parts, begin = [], end + 1
                if element or number > 1 or end != closed:
                    yield number, element
                number += 1
            parts.append(block[begin:])
            if closed is not None:
                break
            if sum(map(len, parts)) > MOST_TEXT:
                raise UnsupportedError(
                    f"{path}: row {number} has more than {MOST_TEXT >> 20} MiB, the most for one "
                    "document; divide it"
                )
        else:
            raise UnsupportedError(
                f"{path}: its array is not closed: the file is cut off, or brackets do not match"
            )
        if parts[0].strip() or file.read(1 << 12).strip():
            raise UnsupportedError(f"{path}: more text follows the end of the array; remove it")


def _ends(block: bytes, depth: int, inside: bool) -> tuple[list[int], int, bool, int | None]:
    """Find where the elements of a JSON array end within a block of its text, and whether the array
    ends there.

    Args:
        block: JSON from within the array, with no escape cut.
        depth: open brackets before the block, without the array's own.
        inside: whether the block begins in a string.

    Returns:
        Offsets of commas between elements and of the array's own bracket; `depth` and `inside`
        after the block; the offset of the array's bracket, None if it is not there.
    """
    plain = block.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    data = np.frombuffer(plain, dtype=np.uint8)
    quoted = np.logical_xor.accumulate(data == ord('"')) ^ inside
    opens, closes = (np.isin(data, list(signs)) & ~quoted for signs in (b"[{", b"]}"))
    level = depth + np.cumsum(opens.astype(np.int32) - closes)
    commas = (data == ord(",")) & ~quoted & (level == 0)
    last = np.flatnonzero(level < 0)[:1].tolist()
    ends = np.flatnonzero(commas).tolist()
    closed = last[0] if last else None
    if closed is not None:
        ends = [end for end in ends if end < closed] + last
    return ends, int(level[-1]), bool(quoted[-1]), closed


def quoted(text: str) -> str:
    """Return a text in quotes and on one line, for an error."""
    return f"{shortened(' '.join(text.split()), MOST_QUOTED)!r}"


def separator_of(path: Path) -> str:
    """Return a CSV file's column separator: the most frequent candidate in its header."""
    usual = "\t" if suffix_of(path) == ".tsv" else ","
    with _opened(path) as file:
        line = file.readline(_BLOCK).decode("utf-8", "replace")
    bare = re.sub(r'"[^"]*"', "", line)
    return max((usual, ",", ";", "\t", "|"), key=bare.count)


def _csv_rows(path: Path, reading: Reading, skipped: int) -> Iterator[Row]:
    """Yield the rows of a CSV file as texts by column; empty cells are empty texts."""
    csv.field_size_limit(MOST_TEXT)
    sign = separator_of(path)
    with _opened(path, reading) as file:
        texts = (decode(line, path, number) for number, line in enumerate(_bounded(path, file), 1))
        rows = csv.reader(texts, strict=True, delimiter=sign)
        try:
            # pandas writes row numbers in a column without a name, which other files call this.
            names = [name or "__index_level_0__" for name in next(rows, [])]
            long = [name for name in names if len(name) > MOST_QUOTED or "\n" in name]
            if long:
                raise UnsupportedError(
                    f"{path}: its first line, {quoted(long[0])}, does not name columns; begin the "
                    "file with a line of column names, such as text"
                )
            twice = [name for name, times in Counter(names).items() if times > 1]
            if twice:
                raise UnsupportedError(
                    f"{path}: column {quoted(twice[0])} is given twice; leave one out"
                )
            numbered = enumerate(filter(None, rows), start=1)
            for number, cells in islice(numbered, skipped, None):
                place = f"{path}: row {number}"
                fields: dict[str, Any] | UnsupportedError = dict(zip(names, cells, strict=False))
                if len(cells) != len(names):
                    fields = UnsupportedError(
                        f"{place} has {len(cells)} cells for {len(names)} columns; put quotes "
                        f"around a cell that holds the separator, {sign!r}"
                    )
                yield number, place, fields
        except csv.Error as error:
            raise UnsupportedError(
                f"{path}: line {rows.line_num} is not valid CSV with {sign!r} between cells: "
                f"{error}"
            ) from error


def _table_rows(path: Path, reading: Reading, skipped: int) -> Iterator[Row]:
    """Yield the rows of a parquet or Arrow file, if possible without an unpacked copy on disk."""
    number = skipped
    try:
        with _opened(path, reading) as packed, tempfile.TemporaryFile() as room:
            file: BinaryIO = packed
            if isinstance(packed, gzip.GzipFile) or not packed.seekable():
                shutil.copyfileobj(packed, cast(BinaryIO, room))
                file = cast(BinaryIO, room)
            rows = _dicts(file, suffix_of(path), skipped)
            for number, fields in enumerate(rows, start=skipped + 1):
                yield number, f"{path}: row {number}", _of_row(fields)
    except (ImportError, UnsupportedError):
        raise
    except Exception as error:  # the library raises errors of its own types
        words = " ".join(str(error).split())
        raise UnsupportedError(
            f"{path}: cannot be read as {suffix_of(path)} after row {number}: {words}"
        ) from error


def _dicts(file: BinaryIO, suffix: str, skipped: int) -> Iterator[dict[str, Any]]:
    for batch in _batches(file, suffix):
        for start in range(skipped, len(batch), _ROWS):
            yield from batch.slice(start, _ROWS).to_pylist()
        skipped = max(0, skipped - len(batch))


def _batches(file: BinaryIO, suffix: str) -> Iterator[Any]:
    """Yield the rows of a file as tables of limited size."""
    file.seek(0)
    if suffix == ".parquet":
        yield from load("pyarrow.parquet", "ParquetFile")(file).iter_batches(batch_size=_ROWS)
        return
    several = file.read(6) == b"ARROW1"  # a file with an index at its end; otherwise a stream
    file.seek(0)
    if not several:
        yield from load("pyarrow.ipc", "open_stream")(file)
        return
    opened = load("pyarrow.ipc", "open_file")(file)
    for number in range(opened.num_record_batches):
        yield opened.get_batch(number)


_READERS: Mapping[str, Callable[[Path, Reading, int], Iterator[Row]]] = {
    "text": lambda *_: iter(()),
    "jsonl": _json_rows,
    "table": _table_rows,
    "csv": _csv_rows,
}


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of a JSON object's fields. Raises ValueError if a field occurs twice."""
    record = dict(pairs)
    if len(record) < len(pairs):
        twice = next(name for name, times in Counter(n for n, _ in pairs).items() if times > 1)
        raise ValueError(f"field {twice!r} is given twice; give it once")
    return record


def _values(data: bytes) -> int:
    """Return an upper bound on a JSON text's values: how many `,`, `[`, `{` are outside strings."""
    marks = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _UNMARKED)
    count, inside = 0, False
    for start in range(0, len(marks), _AT_ONCE):
        part = np.frombuffer(marks[start : start + _AT_ONCE], dtype=np.uint8)
        quotes = part == ord('"')
        within = np.logical_xor.accumulate(quotes) ^ inside
        count += int((~quotes & ~within).sum())
        inside = bool(within[-1])
    return count


@contextmanager
def _opened(path: Path, reading: Reading | None = None) -> Iterator[BinaryIO]:
    """Open a file for reading, decompressed if it is compressed."""
    reading = reading or Reading()
    try:
        with path.open("rb") as raw:
            reading.raw = raw
            head = raw.read(4)
            raw.seek(0)
            file: Any = raw
            if head.startswith(_GZIP):
                file = gzip.GzipFile(fileobj=raw)
            elif head == _ZSTD:
                file = io.BufferedReader(load("pyarrow", "input_stream")(raw, compression="zstd"))
            yield file
            reading.raw = None
    except (OSError, EOFError, zlib.error) as error:  # a damaged .gz raises the last two
        words = getattr(error, "strerror", None) or error
        raise UnsupportedError(f"{path}: cannot be read: {words}") from error


def _bounded(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Yield a file's lines. Raises UnsupportedError for a line of more than MOST_TEXT bytes."""
    for number, line in enumerate(iter(partial(file.readline, MOST_TEXT + 1), b""), start=1):
        if len(line) > MOST_TEXT:
            raise UnsupportedError(
                f"{path}: line {number} has more than {MOST_TEXT >> 20} MiB, the most for one "
                "document; divide it"
            )
        yield line


def _lines(path: Path, reading: Reading) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the bytes of each line that is not blank."""
    blank = 0
    with _opened(path, reading) as file:
        for number, line in enumerate(_bounded(path, file), start=1):
            line = line.rstrip(b"\r\n").removeprefix(BOM_UTF8 if number == 1 else b"")
            blank = 0 if line and not line.isspace() else blank + 1
            if blank > MOST_BLANK:
                raise UnsupportedError(
                    f"{path}: line {number} follows {MOST_BLANK:,} blank lines; remove these"
                )
            if not blank:
                yield number, line


def _stamp(path: Path) -> tuple[str, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise UnsupportedError(f"{path}: cannot be read: {error.strerror}") from error
    return str(path.resolve()), status.st_size, status.st_mtime_ns


DEFAULT_SPLIT = "train"
# Files that `save_to_disk` writes into a folder; any other folder has data files.
SAVED = ("state.json", "dataset_dict.json")
MISSING = (
    "data.source: dataset needs the package datasets, which cannot be imported here ({error}); "
    "pip install datasets"
)


@dataclass(frozen=True, slots=True)
class DatasetRows:
    """Rows of a Hugging Face dataset as documents."""

    path: str
    rows: Any  # datasets.Dataset
    dropped: tuple[str, ...] = ()  # columns that the user ignores
    _read: list[int] = field(default_factory=lambda: [0], compare=False, repr=False)

    def how_far(self) -> HowFar:
        return HowFar(self._read[0], len(self.rows), rows=True)

    def names(self) -> tuple[str, ...]:
        return (self.path,)

    def listing(self) -> list[list[object]]:
        # The library's own digest of the data and of every operation on it.
        columns = self.rows.column_names
        return [["dataset", *columns, len(self.rows), self.rows._fingerprint]]

    def documents(self) -> Iterator[Document]:
        for number, row in enumerate(self.rows, start=1):
            self._read[0] = number
            yield Document(0, number, f"{self.path}: row {number}", _of_row(row))

    def without(self, ignore: Collection[str]) -> "DatasetRows":
        """Return the rows without the columns that the user ignores. Raises UnsupportedError if
        another column has images, audio or video, which are not decoded."""
        dropped = tuple(name for name in self.rows.column_names if name in ignore)
        for name, feature in self.rows.features.items():
            kind = type(getattr(feature, "feature", feature)).__name__  # for lists, of items
            if name not in dropped and is_media(kind):
                raise UnsupportedError(
                    f"data.path: column {name!r} of dataset {self.path!r} holds {kind}, and a run "
                    "trains on text alone; leave it out, or, if training does not need it, "
                    f"set data.ignore: [{name}]"
                )
        rows = self.rows.remove_columns(list(dropped)) if dropped else self.rows
        return replace(self, rows=rows, dropped=dropped)

    def refuse_missing(self, form: Form) -> None:
        """Raise UnsupportedError if the dataset lacks a column that the record reader needs."""
        there = self.rows.column_names
        for column in form.columns:
            if column not in there:
                raise UnsupportedError(
                    f"{form.key(column)}: dataset {self.path!r} has no column {column!r}; it has: "
                    f"{', '.join(there)}"
                )


@dataclass(frozen=True, slots=True)
class StreamedRows(DatasetRows):
    """Rows of a dataset, read from where it is stored instead of a full local copy."""

    version: str = ""  # changes with the data
    reopen: Callable[[], Any] = list  # a datasets.IterableDataset of all rows

    def how_far(self) -> HowFar:
        return HowFar(self._read[0], self._read[0], rows=True)  # the total is not known

    def listing(self) -> list[list[object]]:
        return [["stream", self.path, *self.rows.column_names, self.version]]

    def documents(self) -> Iterator[Document]:
        return self.behind(BEGINNING)[0]

    def behind(self, place: list[Any]) -> Behind:
        """Return the documents after one that was read earlier, as `DataFiles.behind` does. The
        place of a document is [0, its number, the state of the library's dataset]."""
        rows = self.reopen()
        rows = rows.remove_columns(list(self.dropped)) if self.dropped else rows
        if len(place) > len(BEGINNING):
            rows.load_state_dict(place[-1])
        return self._read_on(rows, place[1]), lambda last: [0, last.line, rows.state_dict()]

    def _read_on(self, rows: Any, before: int) -> Generator[Document]:
        number = before
        try:
            for number, row in enumerate(rows, start=before + 1):
                self._read[0] = number
                yield Document(0, number, f"{self.path}: row {number}", _of_row(row))
        except Exception as error:  # networks and file formats raise errors of any type
            raise UnsupportedError(
                f"data.path: cannot read dataset {self.path!r} after row {number}: "
                f"{' '.join(str(error).split())}"
            ) from error


def _stream(path: str, name: str | None, split: str) -> StreamedRows:
    builder = load("datasets", "load_dataset_builder")(path, name)
    rows = builder.as_streaming_dataset(split=split)
    rows = rows if rows.features else rows._resolve_features()
    reopen = partial(builder.as_streaming_dataset, split=split)
    return StreamedRows(
        path, rows, version=f"{builder.config_id} {builder.hash} {split}", reopen=reopen
    )


def open_dataset(
    path: str, name: str | None, split: str, streaming: bool | None = None
) -> DatasetRows:
    """Open `split` of a Hugging Face dataset. Raises UnsupportedError if the library `datasets` is
    missing or fails, with its message."""
    place = Path(path).expanduser()
    if not place.exists() and is_on_hub(path):  # asked first: the library then has the answer
        if find_spec("datasets") is None:
            raise UnsupportedError(MISSING.format(error="No module named 'datasets'"))
        refuse_unreachable("data.path", path)
    load_from_disk, load_dataset = _loaders()
    try:
        if any((place / saved).is_file() for saved in SAVED):
            rows = _saved(load_from_disk(str(place)), path, name, split)
            if streaming:
                iterable, version = rows.to_iterable_dataset(), rows._fingerprint
                reopen = rows.to_iterable_dataset
                return StreamedRows(path, iterable, version=version, reopen=reopen)
        else:
            local = str(place) if place.exists() else path
            if streaming:
                return replace(_stream(local, name, split), path=path)
            rows = load_dataset(local, name, split=split)
    except UnsupportedError:
        raise
    except Exception as error:  # loaders raise errors of their own types
        raise UnsupportedError(
            f"data.path: cannot load dataset {path!r}, split {split!r}: "
            f"{' '.join(str(error).split())}"
        ) from error
    return DatasetRows(path, rows)


def _of_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _without_none(value) for name, value in row.items()}


def _without_none(value: Any) -> Any:
    """Return a row without keys that are None: a table adds these if another row has the key."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


def _loaders() -> tuple[Any, Any]:
    """Import `load_from_disk` and `load_dataset` of the library. Raises UnsupportedError."""
    try:
        return load("datasets", "load_from_disk"), load("datasets", "load_dataset")
    except ImportError as error:
        raise UnsupportedError(MISSING.format(error=error)) from error


def _saved(dataset: Any, path: str, name: str | None, split: str) -> Any:
    """Return the requested split of a folder that `save_to_disk` wrote. Raises UnsupportedError."""
    if name is not None:
        raise UnsupportedError(
            f"data.name: {path!r} was written by save_to_disk and has no configurations; leave "
            "name out"
        )
    if isinstance(dataset, load("datasets", "DatasetDict")):
        if split not in dataset:
            raise UnsupportedError(
                f"data.split: {path!r} has no split {split!r}; it has: {', '.join(dataset)}"
            )
        return dataset[split]
    # A saved split knows its name, unless it was made in memory.
    saved = DEFAULT_SPLIT if dataset.split is None else str(dataset.split)
    if split != saved:
        raise UnsupportedError(
            f"data.split: {path!r} was written by save_to_disk and holds only the split {saved!r}, "
            f"got {split!r}; set data.split to {saved!r}"
        )
    return dataset
