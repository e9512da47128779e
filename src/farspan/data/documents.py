"""A document on its way from a source to tokens."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

TEXT = "text"  # the field of a document that is nothing but text


@dataclass(frozen=True, slots=True)
class Document:
    """The fields of one record and where it was read. `line` counts from 1; 0 stands for the whole
    file."""

    file: int  # index into the source's `names`
    line: int
    place: str  # of it, in words
    fields: Mapping[str, Any]


class Source(Protocol):
    """Documents in a fixed order, read one at a time."""

    def names(self) -> tuple[str, ...]:
        """Of the files (or the dataset) that documents point to."""

    def listing(self) -> list[list[object]]:
        """JSON values that change whenever the documents may have changed."""

    def documents(self) -> Iterator[Document]: ...


@dataclass(frozen=True, slots=True)
class Written:
    """A document as text: `trained` are spans of its characters, None: all of it is."""

    text: str
    trained: tuple[tuple[int, int], ...] | None = None
    bare: bool = False  # as it stands: no special tokens of the tokenizer's own, no end

    def size(self) -> int:
        return len(self.text)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A document as token ids [tokens] int64, and which of them are trained [tokens] bool."""

    ids: np.ndarray
    trained: np.ndarray

    def size(self) -> int:
        return len(self.ids)


class Form(Protocol):
    """What a record has to hold, and how it is read as a document."""

    @property
    def columns(self) -> tuple[str, ...]:
        """That each record has."""

    @property
    def optional(self) -> tuple[str, ...]:
        """That are read where they are."""

    @property
    def masked(self) -> bool:
        """Whether some tokens may be untrained."""

    @property
    def any_ids(self) -> bool:
        """Whether ids may be others than the tokenizer's."""

    def key(self, column: str) -> str:
        """Of the run file: what says another column in place of this one."""

    def listing(self) -> list[object]:
        """JSON values that change whenever the reading does."""

    def read(self, document: Document) -> Written | Encoded | None:
        """None: it is blank. Raises Refused with the document's place and the field."""
