"""The boundary between the configured text and everything after it."""

from collections.abc import Iterator
from typing import Protocol

from farspan.data.config import DataConfig, SourceKind
from farspan.data.files import Document, JsonLines, TextFiles, find_files, stdlib_files
from farspan.data.hub import open_dataset
from farspan.spec import Refused


class Source(Protocol):
    """Documents in a fixed order, read one at a time."""

    def names(self) -> tuple[str, ...]:
        """Of the files (or the dataset) that documents point to."""

    def listing(self) -> list[list[object]]:
        """JSON values that change whenever the documents may have changed."""

    def documents(self) -> Iterator[Document]: ...


def open_sources(config: DataConfig) -> tuple[Source, Source | None]:
    """The source to train on and, where `held_out_path` is given, the one to evaluate on.

    Raises Refused when a path matches nothing or one file is in both.
    """
    if config.path is None:
        return TextFiles(stdlib_files()), None
    train = _open(config, config.path, config.split, "data.path")
    if not config.held_out_elsewhere():
        return train, None
    path, split = config.held_out_path or config.path, config.held_out_split or config.split
    held_out = _open(config, path, split, "data.held_out_path")
    shared = {str(entry) for entry in train.listing()} & {str(e) for e in held_out.listing()}
    if shared:
        raise Refused(
            f"data.held_out_path: {sorted(shared)[0]} is also trained on; give other documents, "
            "or use held_out to divide these"
        )
    return train, held_out


def _open(config: DataConfig, path: str, split: str, field: str) -> Source:
    if config.source is SourceKind.DATASET:
        return open_dataset(path, config.name, split, config.field)
    files = find_files(path, field)
    if config.source is SourceKind.JSONL:
        return JsonLines(files, config.field)
    return TextFiles(files)
