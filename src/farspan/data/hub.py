"""Documents in a Hugging Face dataset: a folder on disk or a name on the hub.

Its library is loaded when a run asks for one: it takes most of a second and brings pandas and
pyarrow, which no other source needs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farspan.data.documents import Document, Form
from farspan.lazy import load
from farspan.spec import Refused

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
    rows: Any  # datasets.Dataset, of the columns that are read

    def names(self) -> tuple[str, ...]:
        return (self.path,)

    def listing(self) -> list[list[object]]:
        # The library's own digest of the data and of all that was done to it.
        columns = self.rows.column_names
        return [["dataset", *columns, len(self.rows), self.rows._fingerprint]]

    def documents(self) -> Iterator[Document]:
        for number, row in enumerate(self.rows, start=1):
            yield Document(0, number, f"{self.path}: row {number}", _without_none(row))


def open_dataset(path: str, name: str | None, split: str, form: Form) -> DatasetRows:
    """Opens `split` of the dataset at `path`: the columns that `form` reads. Raises Refused without
    the library, or with its own words."""
    place, load_from_disk, load_dataset = Path(path).expanduser(), *_loaders()
    try:
        if any((place / saved).is_file() for saved in _SAVED):
            rows = _saved(load_from_disk(str(place)), path, name, split)
        else:
            local = str(place) if place.exists() else path
            rows = load_dataset(local, name, split=split)
    except Refused:
        raise
    except Exception as error:  # each loader raises its own kinds; their words are kept
        raise Refused(
            f"data.path: cannot load dataset {path!r}, split {split!r}: "
            f"{' '.join(str(error).split())}"
        ) from error
    for column in form.columns:
        if column not in rows.column_names:
            raise Refused(
                f"{form.key(column)}: dataset {path!r} has no column {column!r}; it has: "
                f"{', '.join(rows.column_names)}"
            )
    optional = [column for column in form.optional if column in rows.column_names]
    return DatasetRows(path, rows.select_columns([*form.columns, *optional]))


def _without_none(value: Any) -> Any:
    """Without the keys that a table fills in because other rows have them."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


def _loaders() -> tuple[Any, Any]:
    """The library's functions for a saved folder and for anything else. Raises Refused."""
    try:
        return load("datasets", "load_from_disk"), load("datasets", "load_dataset")
    except ImportError as error:
        raise Refused(MISSING.format(error=error)) from error


def _saved(found: Any, path: str, name: str | None, split: str) -> Any:
    """The rows that are asked for of what `save_to_disk` wrote. Raises Refused."""
    if name is not None:
        raise Refused(
            f"data.name: {path!r} was written by save_to_disk and has no configurations; leave "
            "name out"
        )
    if isinstance(found, load("datasets", "DatasetDict")):
        if split not in found:
            raise Refused(
                f"data.split: {path!r} has no split {split!r}; it has: {', '.join(found)}"
            )
        return found[split]
    # One saved split knows its own name, unless it was made in memory.
    own = DEFAULT_SPLIT if found.split is None else str(found.split)
    if split != own:
        raise Refused(
            f"data.split: {path!r} was written by save_to_disk and holds one split, {own!r}; set "
            f"split to it, got {split!r}"
        )
    return found
