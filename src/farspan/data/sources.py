"""Documents from text files, JSON lines, Python's own sources and Hugging Face datasets."""

import glob
import gzip
import json
import sysconfig
import zlib
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from farspan.data.chat import ChatForm, PreferenceForm, PromptForm
from farspan.data.config import DataConfig, Loss, RecordFormat, SourceKind
from farspan.data.formats import (
    CHOSEN,
    INPUT_IDS,
    INSTRUCTION,
    OUTPUT,
    READ,
    REJECTED,
    AlpacaForm,
    TextForm,
    TokensForm,
    is_harmless,
    is_media,
)
from farspan.data.templates import Templates, find_template
from farspan.data.tokenizers import TEXT, Document, Form, HubTokenizer, Source, Tokenizer
from farspan.lazy import load
from farspan.profile.catalog import is_on_hub, refuse_unreachable
from farspan.spec import UnsupportedError

MOST_TEXT = 256 << 20  # bytes of a document: of a text file, of a line
MOST_VALUES = 1 << 24  # of a record, which take 40 to 64 bytes of memory each
MOST_BLANK = 1 << 20  # lines one after the other
MOST_TEMPLATE = 1 << 20  # bytes of a chat template
_UNMARKED = bytes(set(range(256)) - set(b'",[{'))  # in JSON: begins no value and ends no string
_AT_ONCE = 1 << 24  # bytes of which values are counted together
_GZIP = b"\x1f\x8b"  # what such a file begins with
# Test suites hold files that are broken on purpose, and installed packages are not part of Python.
# The rest is generated, not written: a help text of 757 kB, code pages, this build's settings.
_SKIPPED = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "encodings"}
)


def find_files(path: str, field: str) -> tuple[Path, ...]:
    """The files that `path` (a file, a folder or a glob) stands for, sorted.

    Raises UnsupportedError, naming the configuration field `field`, when there are none.
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
        raise UnsupportedError(
            f"{field}: no file matches {path!r}; give a file, a folder or a glob"
        )
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


def read_bytes(path: Path, most: int = MOST_TEXT) -> bytes:
    """All bytes of a file; UnsupportedError with its name when it cannot be read or has more than
    `most`."""
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise UnsupportedError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > most:
        raise UnsupportedError(
            f"{path}: has more than {most >> 20} MiB, which one text may; divide it"
        )
    return data


def decode(data: bytes, path: Path, line: int) -> str:
    """Strict UTF-8. `line` is the number of the first line of `data` in its file, at whose head a
    mark of the encoding (U+FEFF) is no text."""
    if line == 1:
        data = data.removeprefix(BOM_UTF8)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        where = line + data.count(b"\n", 0, error.start)
        raise UnsupportedError(
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
        """Yield a document a line.

        Raises:
            UnsupportedError: some lines cannot be read; it names the first and counts the others.
        """
        first, others = None, 0
        for index, path in enumerate(self.files):
            for line, data in _lines(path):
                try:
                    fields = _record(path, line, data)
                except UnsupportedError as error:
                    first, others = first or error, others + (first is not None)
                    continue
                if first is None:
                    yield Document(index, line, f"{path}: line {line}", fields)
        if first is not None:
            more = f"; {others:,} more of the lines cannot be read" * bool(others)
            raise UnsupportedError(f"{first}{more}") from first


def _record(path: Path, line: int, data: bytes) -> dict[str, Any]:
    if len(data) > MOST_VALUES and _values(data) > MOST_VALUES:
        raise UnsupportedError(
            f"{path}: line {line} has more than {MOST_VALUES:,} values; divide the document"
        )
    try:
        record = json.loads(decode(data, path, line), object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise UnsupportedError(
            f"{path}: line {line} is not valid JSON: {error.msg} at column {error.colno}"
        ) from error
    except UnsupportedError:
        raise
    except (ValueError, RecursionError) as error:  # numbers or nesting beyond Python's limits
        raise UnsupportedError(f"{path}: line {line} cannot be read as JSON: {error}") from error
    if not isinstance(record, dict):
        raise UnsupportedError(
            f"{path}: line {line} holds {type(record).__name__}, expected an object with fields"
        )
    return record


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of its fields. Raises ValueError where one is given twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, times in Counter(n for n, _ in pairs).items() if times > 1)
        raise ValueError(f"field {twice!r} is given twice; give it once")
    return found


def _values(data: bytes) -> int:
    """Of JSON, at most, without making them: what is outside of strings and begins one."""
    marks = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _UNMARKED)
    count, inside = 0, False
    for start in range(0, len(marks), _AT_ONCE):
        part = np.frombuffer(marks[start : start + _AT_ONCE], dtype=np.uint8)
        quotes = part == ord('"')
        within = np.logical_xor.accumulate(quotes) ^ inside
        count += int((~quotes & ~within).sum())
        inside = bool(within[-1])
    return count


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines that are not blank, read one at a time; of a gzip file, of what it holds, no
    more than a line's limit of it at once."""
    blank = 0
    try:
        with path.open("rb") as file:
            unpacked = gzip.open if file.read(2) == _GZIP else open
        with cast(BinaryIO, unpacked(path, "rb")) as file:
            for number, line in enumerate(
                iter(partial(file.readline, MOST_TEXT + 1), b""), start=1
            ):
                if len(line) > MOST_TEXT:
                    raise UnsupportedError(
                        f"{path}: line {number} has more than {MOST_TEXT >> 20} MiB, which one "
                        "document may; divide it"
                    )
                line = line.rstrip(b"\r\n").removeprefix(BOM_UTF8 if number == 1 else b"")
                blank = 0 if line and not line.isspace() else blank + 1
                if blank > MOST_BLANK:
                    raise UnsupportedError(
                        f"{path}: line {number} follows {MOST_BLANK:,} blank ones; leave them out"
                    )
                if not blank:
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:  # the last two of a damaged .gz
        words = getattr(error, "strerror", None) or error
        raise UnsupportedError(f"{path}: cannot be read: {words}") from error


def _stamp(path: Path) -> tuple[str, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise UnsupportedError(f"{path}: cannot be read: {error.strerror}") from error
    return str(path.resolve()), status.st_size, status.st_mtime_ns


DEFAULT_SPLIT = "train"
# What `save_to_disk` leaves in a folder; any other folder holds data files.
_SAVED = ("state.json", "dataset_dict.json")
MISSING = (
    "data.source: dataset needs the package datasets, which cannot be imported here ({error}); "
    "pip install datasets, or set source to text or jsonl"
)


@dataclass(frozen=True, slots=True)
class DatasetRows:
    """Every row is one document."""

    path: str
    rows: Any  # datasets.Dataset
    dropped: tuple[str, ...] = ()  # columns that the user ignores

    def names(self) -> tuple[str, ...]:
        return (self.path,)

    def listing(self) -> list[list[object]]:
        # The library's own digest of the data and of all that was done to it.
        columns = self.rows.column_names
        return [["dataset", *columns, len(self.rows), self.rows._fingerprint]]

    def documents(self) -> Iterator[Document]:
        for number, row in enumerate(self.rows, start=1):
            fields = {name: _without_none(value) for name, value in row.items()}
            yield Document(0, number, f"{self.path}: row {number}", fields)

    def without(self, ignore: Collection[str]) -> "DatasetRows":
        """The same rows without the columns that the user ignores.

        Raises:
            UnsupportedError: a column that is left has images, audio or video: none is decoded.
        """
        dropped = tuple(name for name in self.rows.column_names if name in ignore)
        for name, feature in self.rows.features.items():
            kind = type(getattr(feature, "feature", feature)).__name__  # of a list's items
            if name not in dropped and is_media(kind):
                raise UnsupportedError(
                    f"data.path: column {name!r} of dataset {self.path!r} holds {kind}, and a run "
                    "trains on text alone; leave it out, or, if it does not say what is trained, "
                    f"set data.ignore: [{name}]"
                )
        rows = self.rows.remove_columns(list(dropped)) if dropped else self.rows
        return DatasetRows(self.path, rows, dropped)

    def refuse_missing(self, form: Form) -> None:
        """Raises UnsupportedError where a column is missing that `form` needs."""
        there = self.rows.column_names
        for column in form.columns:
            if column not in there:
                raise UnsupportedError(
                    f"{form.key(column)}: dataset {self.path!r} has no column {column!r}; it has: "
                    f"{', '.join(there)}"
                )


def open_dataset(path: str, name: str | None, split: str) -> DatasetRows:
    """Opens `split` of the dataset at `path`. Raises UnsupportedError without the library, or with
    its own words."""
    place, load_from_disk, load_dataset = Path(path).expanduser(), *_loaders()
    try:
        if any((place / saved).is_file() for saved in _SAVED):
            rows = _saved(load_from_disk(str(place)), path, name, split)
        else:
            if not place.exists() and is_on_hub(path):
                refuse_unreachable("data.path", path)
            local = str(place) if place.exists() else path
            rows = load_dataset(local, name, split=split)
    except UnsupportedError:
        raise
    except Exception as error:  # each loader raises its own kinds; their words are kept
        raise UnsupportedError(
            f"data.path: cannot load dataset {path!r}, split {split!r}: "
            f"{' '.join(str(error).split())}"
        ) from error
    return DatasetRows(path, rows)


def _without_none(value: Any) -> Any:
    """Without the keys that a table fills in because other rows have them."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


def _loaders() -> tuple[Any, Any]:
    """The library's functions for a saved folder and for anything else. Raises UnsupportedError."""
    try:
        return load("datasets", "load_from_disk"), load("datasets", "load_dataset")
    except ImportError as error:
        raise UnsupportedError(MISSING.format(error=error)) from error


def _saved(found: Any, path: str, name: str | None, split: str) -> Any:
    """The rows that are asked for of what `save_to_disk` wrote. Raises UnsupportedError."""
    if name is not None:
        raise UnsupportedError(
            f"data.name: {path!r} was written by save_to_disk and has no configurations; leave "
            "name out"
        )
    if isinstance(found, load("datasets", "DatasetDict")):
        if split not in found:
            raise UnsupportedError(
                f"data.split: {path!r} has no split {split!r}; it has: {', '.join(found)}"
            )
        return found[split]
    # One saved split knows its own name, unless it was made in memory.
    own = DEFAULT_SPLIT if found.split is None else str(found.split)
    if split != own:
        raise UnsupportedError(
            f"data.split: {path!r} was written by save_to_disk and holds one split, {own!r}; set "
            f"split to it, got {split!r}"
        )
    return found


# The fields that tell a form from the others.
_MARKS = {
    RecordFormat.TEXT: (TEXT,),
    RecordFormat.CHAT: ("messages",),
    RecordFormat.SHAREGPT: ("conversations",),
    RecordFormat.ALPACA: (INSTRUCTION, OUTPUT),
    RecordFormat.PROMPT: ("prompt", "completion"),
    RecordFormat.TOKENS: (INPUT_IDS,),
    RecordFormat.PREFERENCE: (CHOSEN, REJECTED),
}


def recognise(config: DataConfig, document: Document) -> DataConfig:
    """With the form of this document, the first there is, where the run file names none.

    Raises:
        UnsupportedError: its fields say none, or several.
    """
    if config.format is not RecordFormat.TEXT or config.field is not None:
        return config
    fields = {name: value for name, value in document.fields.items() if value is not None}
    # Without those that the user ignores, unless these are needed, which is refused later.
    ignored = config.ignore or ()
    left = fields.keys() - {*ignored}
    found = _forms_with(left) or _forms_with(fields.keys())
    if not found and TEXT in document.fields:
        return config  # null, which the form says
    if not found:
        forms = ", ".join(f"{kind} ({' and '.join(names)})" for kind, names in _MARKS.items())
        raise UnsupportedError(
            f"{document.place} has no field 'text' (it has: {', '.join(fields)}), and none of the "
            f"forms that are known by their fields: {forms}; set data.field to the field of its "
            "text, or data.format: prompt with data.prompt and data.completion to the fields of a "
            "prompt and its answer, or data.format and data.field to those of another form"
        )
    if len(found) > 1:
        ways = (
            f"data.ignore: [{', '.join([*ignored, *_others(kind, fields)])}] for {kind}"
            for kind in found
        )
        raise UnsupportedError(
            f"{document.place} has the fields of several forms: {', '.join(found)}; set "
            f"{', or '.join(ways)}"
        )
    kind, field = found[0], None
    if kind is RecordFormat.SHAREGPT and _has_roles(fields["conversations"]):
        kind, field = RecordFormat.CHAT, "conversations"
    return replace(config, format=kind, field=field)


def _forms_with(names: Collection[str]) -> list[RecordFormat]:
    return [kind for kind, needed in _MARKS.items() if all(name in names for name in needed)]


def _others(kind: RecordFormat, fields: Mapping[str, Any]) -> list[str]:
    """List the fields that this form does not read and that may say what is trained."""
    return [
        name
        for name, value in fields.items()
        if name not in READ[kind] and not is_harmless(name, value)
    ]


def _has_roles(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and isinstance(messages[0], Mapping)
        and "role" in messages[0]
    )


def open_form(config: DataConfig, tokenizer: Tokenizer) -> Form:
    """How records are read. Raises UnsupportedError where the tokenizer cannot do that."""
    everything = config.loss is Loss.ALL
    has_template = config.chat_template is not None or (
        isinstance(tokenizer, HubTokenizer) and bool(tokenizer.inner.chat_template)
    )
    match config.format:
        case RecordFormat.CHAT | RecordFormat.SHAREGPT:
            return _chat(config, tokenizer, everything)
        case RecordFormat.ALPACA:
            form: Form = AlpacaForm(everything)
        case RecordFormat.PROMPT:
            chat = _chat(config, tokenizer, everything) if has_template else None
            form = PromptForm(config.prompt, config.completion, everything, chat)
        case RecordFormat.TOKENS:
            form = TokensForm()
        case RecordFormat.PREFERENCE:
            form = PreferenceForm(_chat(config, tokenizer, False) if has_template else None)
        case RecordFormat.TEXT:
            in_files = config.source in (SourceKind.STDLIB, SourceKind.TEXT)
            form = TextForm(TEXT if in_files else config.field or TEXT)
    if not isinstance(form, TokensForm) and form.masked:
        _refuse_slow(tokenizer)
    return form


def _chat(config: DataConfig, tokenizer: Tokenizer, everything: bool) -> ChatForm:
    if not isinstance(tokenizer, HubTokenizer):
        raise UnsupportedError(
            f"data.format: {config.format} needs a tokenizer with a chat template, "
            f"{config.tokenizer!r} has none; give the folder or hub name of one"
        )
    inner, name = tokenizer.inner, str(config.tokenizer)
    own, tool_use = find_template(inner, config.chat_template, name, _read_template)
    day = date.today() if config.day is None else date.fromisoformat(config.day)
    templates = Templates(inner, own, tool_use, day)
    if not everything:
        _refuse_slow(tokenizer)
    sharegpt = config.format is RecordFormat.SHAREGPT
    field = config.field or _MARKS[config.format][0]  # of prompts, set by their form
    stops, marks = tokenizer.stops(), tokenizer.marks()
    return ChatForm(field, everything, templates, stops, marks, sharegpt)


def _read_template(path: Path) -> str:
    return decode(read_bytes(path, MOST_TEMPLATE), path, line=1)


def _refuse_slow(tokenizer: Tokenizer) -> None:
    if isinstance(tokenizer, HubTokenizer) and not tokenizer.inner.is_fast:
        raise UnsupportedError(
            f"data.tokenizer: {type(tokenizer.inner).__name__} does not map tokens to "
            "characters, so the trained ones cannot be found; use a fast tokenizer, or set "
            "data.loss to all"
        )


@dataclass(frozen=True, slots=True)
class OpenedSource:
    """Documents to train on, where there are others to evaluate on those, and how both are read."""

    config: DataConfig  # with the form that was recognised
    form: Form
    train: Source
    held_out: Source | None = None


def open_source(config: DataConfig, tokenizer: Tokenizer) -> OpenedSource:
    """Raises UnsupportedError when a path matches nothing, one file is in both, or the form of
    records is not known."""
    if config.path is None:
        return OpenedSource(config, open_form(config, tokenizer), TextFiles(stdlib_files()))
    train = _open(config, config.path, config.split)
    if config.format is RecordFormat.TEXT and isinstance(train, JsonLines | DatasetRows):
        first = next(train.documents(), None)
        config = config if first is None else recognise(config, first)
    form = open_form(config, tokenizer)
    needed = [name for name in form.columns if name in (config.ignore or ())]
    if needed:
        raise UnsupportedError(
            f"data.ignore: format {config.format} needs field {needed[0]!r}; leave it out of the "
            "list"
        )
    if isinstance(train, DatasetRows):
        train.refuse_missing(form)
    if not config.held_out_elsewhere():
        return OpenedSource(config, form, train)
    path, split = config.held_out_path or config.path, config.held_out_split or config.split
    assert path is not None, "a corpus has a path"
    held_out = _open(config, path, split, "data.held_out_path")
    if isinstance(held_out, DatasetRows):
        held_out.refuse_missing(form)
    refuse_shared(train, held_out)
    return OpenedSource(config, form, train, held_out)


def refuse_shared(train: Source, held_out: Source) -> None:
    """Raises UnsupportedError where documents are in both."""
    there = train.listing()
    shared = sorted(str(entry[1]) for entry in held_out.listing() if entry in there)
    if shared:
        what = shared[0] if not isinstance(train, DatasetRows) else "the same split"
        raise UnsupportedError(
            f"data.held_out_path: {what} is also trained on; give other documents, or use held_out "
            "(a share, such as 0.05) to divide these"
        )


def _open(
    config: DataConfig, path: str, split: str, field: str = "data.path"
) -> TextFiles | JsonLines | DatasetRows:
    if config.source is SourceKind.DATASET:
        return open_dataset(path, config.name, split).without(config.ignore or ())
    files = find_files(path, field)
    return JsonLines(files) if config.source is SourceKind.JSONL else TextFiles(files)
