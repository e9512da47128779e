"""Where the text comes from and how it becomes tokens."""

from dataclasses import dataclass
from enum import StrEnum

from farspan.spec import Refused


class SourceKind(StrEnum):
    """The forms in which text is read."""

    STDLIB = "stdlib"  # the sources of the Python that is running, a file a document
    TEXT = "text"  # text files, a file a document
    JSONL = "jsonl"  # one JSON object a line, a line a document
    DATASET = "dataset"  # a Hugging Face dataset, a row a document


@dataclass(frozen=True, slots=True)
class DataConfig:
    """The documents, their tokenizer and what is held out of training.

    `path` is a file, a folder (every file below it whose name does not start with a dot) or a
    glob such as `corpus/**/*.txt`; for a dataset, a folder or the name on the hub.
    """

    source: SourceKind = SourceKind.STDLIB
    path: str | None = None
    held_out: float = 0.0  # fraction of the documents kept out of training, for evaluation
    held_out_path: str | None = None  # or: evaluate on these documents, read like `path`
    field: str = "text"  # of a JSON line or a dataset row
    name: str | None = None  # the dataset's configuration, where it has several
    split: str = "train"  # the dataset's split
    held_out_split: str | None = None  # or: evaluate on this split of the dataset
    tokenizer: str | None = None  # 'bytes', a folder or a hub name; None: the model's own
    cache: str = "~/.cache/farspan"  # tokens are written here once and mapped afterwards

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", SourceKind(self.source))
        if (self.path is None) != (self.source is SourceKind.STDLIB):
            raise Refused(
                "path: source 'stdlib' reads Python's own sources and takes no path; set source"
                " to text, jsonl or dataset"
                if self.path is not None
                else f"path: source '{self.source}' needs one: a file, a folder or a glob"
            )
        if not 0.0 <= self.held_out < 1.0:
            raise Refused(f"held_out: expected a fraction from 0 up to 1, got {self.held_out!r}")
        if self.held_out_split is not None and self.source is not SourceKind.DATASET:
            raise Refused("held_out_split: only source 'dataset' has splits; use held_out_path")
        if self.held_out_path is not None and self.source is SourceKind.STDLIB:
            raise Refused("held_out_path: source 'stdlib' has no other path; use held_out")
        if self.held_out_elsewhere() and self.held_out > 0:
            raise Refused("held_out: give this fraction or other documents, not both")

    def held_out_elsewhere(self) -> bool:
        """Whether evaluation reads documents of its own."""
        return self.held_out_path is not None or self.held_out_split is not None
