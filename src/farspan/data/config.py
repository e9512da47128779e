"""Configuration of the data: source of the text, tokenization, and the loss on it."""

import math
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from datetime import date
from enum import StrEnum
from pathlib import Path

from farspan.formatting import LEAST_MEMORY, read_bytes
from farspan.profile.catalog import is_on_hub
from farspan.spec import (
    LABELLED,
    PAIRS,
    ROUTER_KEYS,
    LossKeys,
    LossKind,
    Objective,
    Reference,
    UnsupportedError,
)

_SPLIT = "train"
# Suffixes of files and their contents: a text, or records as JSON, in a table or in cells.
SUFFIXES = {
    **dict.fromkeys((".txt", ".md"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".parquet", ".arrow"), "table"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
}
MOST_QUOTED = 60  # characters of a text in an error
_COMPRESSED = (".gz", ".zst")  # may follow each of the above
WINDOW = "256MiB"  # text that a stream reads at a time
_PROMPT = ("prompt", "completion")  # fields of a record in format prompt


class SourceKind(StrEnum):
    """Ways to read documents from a source, such as text files or a dataset."""

    AUTO = "auto"  # files by their suffixes, other paths as data sets of the hub
    STDLIB = "stdlib"  # sources of the running Python, each file a document
    TEXT = "text"  # text files, each a document
    JSONL = "jsonl"  # JSON lines, each a document
    DATASET = "dataset"  # a Hugging Face dataset, each row a document

    @classmethod
    def _missing_(cls, value: object) -> "SourceKind | None":
        """Treat the name of a file format that `auto` detects, such as `parquet`, as `auto`."""
        return cls.AUTO if value in ("parquet", "arrow", "csv", "json") else None


@dataclass(frozen=True, slots=True)
class FormatRow:
    """Properties of one format of records."""

    marks: tuple[str, ...]  # the fields that identify it
    reads: str = ""  # why it takes no data.field; "": it takes one
    templated: bool = False  # a chat template may write it
    answers: str = ""  # why it takes no data.loss; "": it takes one


class RecordFormat(StrEnum):
    """What the fields of a record (JSON line or row of a dataset) mean: text, a chat, a pair..."""

    row: FormatRow

    def __new__(cls, name: str, *row: FormatRow) -> "RecordFormat":
        kind = str.__new__(cls, name)
        kind._value_, (kind.row,) = name, row
        return kind

    # One text, trained as a whole.
    TEXT = "text", FormatRow(("text",), answers="has no answers")
    # Messages, as the tokenizer's chat template writes them.
    CHAT = "chat", FormatRow(("messages",), templated=True)
    # Messages with `from` and `value`.
    SHAREGPT = "sharegpt", FormatRow(("conversations",), templated=True)
    # An instruction, an optional input, and the output.
    ALPACA = (
        "alpaca",
        FormatRow(("instruction", "output"), "instruction, input and output; leave field out"),
    )
    # A prompt and its completion, as texts or as messages.
    PROMPT = (
        "prompt",
        FormatRow(
            _PROMPT, "prompt and completion; set the keys prompt and completion instead", True
        ),
    )
    # Ids, with optional labels, masks and document borders.
    TOKENS = (
        "tokens",
        FormatRow(
            ("input_ids",),
            "input_ids and the fields that describe them; leave field out",
            answers="has no answers",
        ),
    )
    # A prompt, the chosen answer and the rejected one.
    PREFERENCE = (
        PAIRS,
        FormatRow(
            ("chosen", "rejected"),
            "prompt, chosen and rejected; leave field out",
            templated=True,
            answers="trains only answers",
        ),
    )
    # A prompt, one answer, and whether that is desirable.
    UNPAIRED = (
        LABELLED,
        FormatRow(
            (*_PROMPT, "label"),
            "prompt, completion and label; leave field out",
            templated=True,
            answers="trains only answers",
        ),
    )


class Loss(StrEnum):
    """Which tokens to train in chats, and in prompts with completions."""

    ANSWERS = "answers"
    ALL = "all"


class PackingKind(StrEnum):
    """Methods of packing documents into sequences of one length."""

    WHOLE = "whole"  # best fit: divides only documents longer than a sequence; some padding
    CUT = "cut"  # end to end, cut when a sequence is full; no padding


def suffix_of(path: str | Path) -> str:
    """Return the lower-case suffix that tells a file's format: `.jsonl` for `a.JSONL.gz`."""
    name = Path(path).name.lower()
    for end in _COMPRESSED:
        name = name.removesuffix(end)
    return Path(name).suffix


def _is_day(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except (TypeError, ValueError):
        return False


@dataclass(frozen=True, slots=True)
class SourceConfig:
    """Where documents come from, which parts of them to train, and which to hold out.

    `path` is a file, a folder (every file below it whose name does not start with a dot), a glob
    such as `corpus/**/*.txt`, or the name of a data set on the hub. Without one, the documents are
    Python's own sources.
    """

    source: SourceKind = SourceKind.AUTO  # how `path` is read; `auto`: by the suffixes of files
    path: str | None = None  # a file, a folder, a glob such as `books/*.txt`, or a name on the hub
    held_out: float = 0.0  # fraction of the documents that evaluation reads and training does not
    held_out_path: str | None = (
        None  # documents to evaluate on instead of `held_out`, read like `path`
    )
    format: RecordFormat = RecordFormat.TEXT  # form of records; `text`: told by the first's fields
    field: str | None = None  # field of text or chat; null: `text`, `messages`, `conversations`
    prompt: str = _PROMPT[0]  # field with the prompt, in format `prompt`
    completion: str = _PROMPT[1]  # field with the completion, in format `prompt`
    loss: Loss = Loss.ANSWERS  # tokens of a chat or a prompt that are trained
    # A file of Jinja, or one of the tokenizer's templates by name; null: the tokenizer's own.
    chat_template: str | None = None
    name: str | None = None  # the dataset's configuration, if it has several
    split: str = _SPLIT  # the dataset's split
    held_out_split: str | None = None  # split to evaluate on instead of `held_out`
    ignore: tuple[str, ...] | None = None  # fields to drop; `messages.name`: a key of messages
    # Whether it is read a window at a time: not all of its tokens are on the disk at once.
    streaming: bool | None = None
    window: str | int | None = None  # bytes of text in a window; null: 256MiB

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", SourceKind(self.source))
        object.__setattr__(self, "format", RecordFormat(self.format))
        object.__setattr__(self, "loss", Loss(self.loss))
        if self.streaming is False:  # run folders from before this key have null
            object.__setattr__(self, "streaming", None)
        if self.path is not None and self.source is SourceKind.STDLIB:
            raise UnsupportedError(
                "path: source 'stdlib' reads Python's own sources and takes no path; leave out "
                "path or source"
            )
        if self.source is SourceKind.STDLIB:  # the same as no source, so both have one run file
            object.__setattr__(self, "source", SourceKind.AUTO)
        if self.path is None and self.source is not SourceKind.AUTO:
            raise UnsupportedError(
                f"path: source '{self.source}' needs one: a file, a folder or a glob"
            )
        self._check_source()
        self._check_format()
        if not 0.0 <= self.held_out < 1.0:
            raise UnsupportedError(
                f"held_out: expected a fraction from 0 up to 1, got {self.held_out!r}"
            )
        if self.held_out_split is not None and not self._may_have_splits():
            raise UnsupportedError(
                "held_out_split: only source 'dataset' has splits; use held_out_path"
            )
        if self.held_out_path is not None and self.path is None:
            raise UnsupportedError("held_out_path: source 'stdlib' has no other path; use held_out")
        if self.held_out_elsewhere() and self.held_out > 0:
            raise UnsupportedError("held_out: give this fraction or held_out_path/_split, not both")

    def window_bytes(self) -> int:
        """Return how many bytes of text one window of a stream reads."""
        return read_bytes(WINDOW if self.window is None else self.window, "window")

    def _check_source(self) -> None:
        """Raise UnsupportedError for keys that have no effect with this kind of source."""
        if self.window is not None and not self.streaming:
            raise UnsupportedError(
                "window: only a stream is read in windows; set streaming to true, or leave it out"
            )
        size, bare = self.window_bytes(), str(self.window).strip()
        if bare.isdecimal() and size < LEAST_MEMORY:
            raise UnsupportedError(f"window: {bare} has no unit and means bytes; write {bare}MiB")
        if self.name is not None and not self._may_have_splits():
            raise UnsupportedError("name: only source 'dataset' has configurations; leave it out")
        if self.split != _SPLIT and not self._may_have_splits():
            raise UnsupportedError(
                "split: only source 'dataset' has splits; leave it out, or name a path"
            )
        if not self.has_fields() and self.field is not None:
            raise UnsupportedError(
                f"field: {self.origin()} reads files without fields; give a path to records, or "
                "leave field out"
            )
        if not self.has_fields() and self.ignore:
            raise UnsupportedError(
                f"ignore: {self.origin()} reads files without fields; leave ignore out"
            )

    def origin(self) -> str:
        """Return a description of where the documents come from."""
        return f"source '{SourceKind.STDLIB if self.path is None else self.source}'"

    def _may_have_splits(self) -> bool:
        return self.path is not None and self.source in (SourceKind.AUTO, SourceKind.DATASET)

    def has_fields(self) -> bool:
        """Return whether documents may be records with fields, rather than plain text."""
        return self.path is not None and self.source is not SourceKind.TEXT

    def _check_format(self) -> None:
        """Refuse a format that the source cannot have, and keys without effect in the format."""
        kind = self.format
        if kind is not RecordFormat.TEXT and not self.has_fields():
            raise UnsupportedError(
                f"format: {kind} needs records; give a path to a file of records, such as "
                f"data.jsonl, got {self.origin()}"
            )
        if self.field is not None and kind.row.reads:
            raise UnsupportedError(f"field: format {kind} reads {kind.row.reads}")
        if kind is not RecordFormat.PROMPT and (self.prompt, self.completion) != _PROMPT:
            raise UnsupportedError(
                "prompt: only format 'prompt' has prompts and completions; set format: prompt"
            )
        if self.prompt == self.completion:
            raise UnsupportedError(f"completion: {self.prompt!r} is prompt already; name another")
        if not kind.row.templated and self.chat_template is not None:
            chats = [form for form in RecordFormat if form.row.templated]
            raise UnsupportedError(
                f"chat_template: only formats {', '.join(chats[:-1])} and {chats[-1]} have one; "
                "set format, or leave it out"
            )
        if kind.row.answers and self.loss is not Loss.ANSWERS:
            raise UnsupportedError(f"loss: format {kind} {kind.row.answers}; leave loss out")

    def on_hub(self) -> bool:
        """Return whether `path` names a data set on the hub rather than a local path."""
        named = self.path is not None and suffix_of(self.path) not in SUFFIXES
        here = self.path is None or Path(self.path.partition("/")[0]).is_dir()
        rows = self.source is SourceKind.DATASET or (self.source is SourceKind.AUTO and not here)
        return named and rows and is_on_hub(str(self.path))

    def held_out_elsewhere(self) -> bool:
        """Return whether evaluation reads a source of its own, not a share of the training data."""
        return self.held_out_path is not None or self.held_out_split is not None


@dataclass(frozen=True, slots=True)
class WeightedSource(SourceConfig):
    """One of several sources, with its share of the training tokens."""

    weight: float = 1.0  # share of the tokens, relative to the sum of all weights

    def __post_init__(self) -> None:
        SourceConfig.__post_init__(self)
        if not 0.0 < self.weight < float("inf"):
            raise UnsupportedError(f"weight: expected a number above 0, got {self.weight!r}")


@dataclass(frozen=True, slots=True)
class DataConfig(SourceConfig):
    """The data of a run: one or several sources, the tokenizer, and the packing into sequences."""

    packing: PackingKind = PackingKind.WHOLE
    tokenizer: str | None = None  # `bytes`, a folder or a name on the hub; null: the model's own
    cache: str = "~/.cache/farspan"  # tokens are written here once and mapped afterwards
    sources: tuple[WeightedSource, ...] | None = None  # several sources instead of one
    day: str | None = None  # day that chat templates write as today's; null: the run's first

    def __post_init__(self) -> None:
        SourceConfig.__post_init__(self)
        object.__setattr__(self, "packing", PackingKind(self.packing))
        if self.day is not None and not _is_day(self.day):
            raise UnsupportedError(f"day: expected one such as 2026-11-27, got {self.day!r}")
        if self.sources is None:
            return
        if not self.sources:
            raise UnsupportedError(
                "sources: expected one or more, got none; leave it out, or list some"
            )
        for own in fields(SourceConfig):
            if getattr(self, own.name) != own.default:
                raise UnsupportedError(
                    f"{own.name}: applies to one source, and there are several; set it on the "
                    "entries of data.sources that need it"
                )

    def has_records(self) -> bool:
        """Return whether any source may have records, for which a chat template may be needed."""
        return any(source.has_fields() for source, _ in self.each())

    def each(self) -> tuple[tuple["DataConfig", float], ...]:
        """Return, for each source, a configuration with that source alone, and its weight."""
        if self.sources is None:
            return ((self, 1.0),)
        names = [field.name for field in fields(SourceConfig)]
        return tuple(
            (replace(self, sources=None, **{n: getattr(s, n) for n in names}), s.weight)
            for s in self.sources
        )


_COMPARE = {
    PAIRS: "compares pairs of answers; give records with chosen and rejected",
    LABELLED: "compares single answers; give records with prompt, completion and label",
}


def mismatch(kind: LossKind, formats: Collection[RecordFormat]) -> str:
    """Return why a loss cannot train records of these formats, or "" if it can."""
    needed = kind.row.format
    if needed and {*formats} != {needed}:
        return f"data.format: loss.kind {kind} {_COMPARE[needed]}"
    for form in formats:
        if form in _COMPARE and form != needed:
            kinds = [other for other in LossKind if other.row.format == form]
            others = " or ".join(filter(None, [", ".join(kinds[:-1]), kinds[-1]]))
            return (
                f"loss.kind: {kind} does not compare the answers of data.format {form}; set "
                f"loss.kind to {others}"
            )
    return ""


@dataclass(frozen=True, slots=True)
class LossConfig(LossKeys):
    """The loss that a run trains, and the model that it compares with."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", LossKind(self.kind))  # words, from Python
        if self.reference is not None:
            object.__setattr__(self, "reference", Reference(self.reference))
        kind = self.kind
        if kind.row.of_loops:
            raise UnsupportedError(
                f"kind: {kind}: {kind.row.of_loops}; compute this loss in your own loop, with "
                "farspan.losses and farspan.Step.logprobs"
            )
        for f in fields(self):
            known = ("kind", *ROUTER_KEYS, *kind.row.keys)
            if f.name not in known and getattr(self, f.name) != f.default:
                raise UnsupportedError(f"{f.name}: kind {kind} does not use it; leave {f.name} out")
        if not 0.0 < self.beta < float("inf"):
            raise UnsupportedError(f"beta: expected a number above 0, got {self.beta!r}")
        if not 0.0 <= self.label_smoothing < 0.5:
            raise UnsupportedError(
                f"label_smoothing: expected 0 or more and below 0.5, got {self.label_smoothing!r}"
            )
        if self.reference is Reference.NONE:
            raise UnsupportedError(
                f"reference: {kind} needs one; give stored, frozen or adapters-off, or set kind to "
                "orpo, which needs none"
            )
        if kind is LossKind.DISTILL and self.teacher is None:
            raise UnsupportedError("teacher: missing; give the folder or hub name of a model")
        if self.top_k < 1:
            raise UnsupportedError(f"top_k: expected at least 1, got {self.top_k}")
        for f in fields(self):
            if isinstance(f.default, float) and not 0.0 <= (x := getattr(self, f.name)) < math.inf:
                raise UnsupportedError(f"{f.name}: expected a number of at least 0, got {x!r}")

    @property
    def routers(self) -> bool:
        """Return whether routers of a mixture of experts have a loss."""
        return self.router > 0 or self.router_z > 0

    def describe(self) -> str:
        """Return the loss in words, for the first lines of a run's output."""
        other = f", reference {self.compared()}" * (self.compared() is not Reference.NONE)
        if self.teacher is not None:
            other = f" from the {self.top_k} likeliest ids of {self.teacher}"
        routers = f" + {self.router:g} load balancing" * (self.router > 0)
        routers += f" + {self.router_z:g} router z-loss" * (self.router_z > 0)
        return f"{self.kind}{other}{routers}"

    def compared(self) -> Reference:
        """Return where the log-probabilities of the loss's reference model come from."""
        if "reference" not in self.kind.row.keys:
            return Reference.NONE
        return self.reference or self.kind.row.references[0]

    def planned(self) -> Objective:
        """Return the loss for the planner. A teacher counts as a frozen model run in each step."""
        teaches = self.kind is LossKind.DISTILL
        reference = Reference.FROZEN if teaches else self.compared()
        return Objective(self.kind, reference, self.top_k if teaches else 1)
