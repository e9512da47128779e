"""What sequences are made of, and the random numbers that order it."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np


class Draw(IntEnum):
    """A stream of random numbers for each purpose: none depends on how much another drew."""

    SPLIT = 0
    SHUFFLE = 1
    PLACES = 2

    def generator(self, seed: int, *key: int) -> np.random.Generator:
        sequence = np.random.SeedSequence((seed, self.value, *key))
        return np.random.Generator(np.random.PCG64(sequence))


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `start` to `stop` of one document, as laid into a sequence."""

    document: int  # in the store
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Kept:
    """What an epoch keeps of the documents, and what the layout costs."""

    documents: int
    divided: int  # of them, those in more than one piece
    tokens: int  # of all pieces
    padding: int  # tokens that fill sequences up, and belong to no document
    left_out: int  # tokens in pieces of which none is trained


class Layout(Protocol):
    """Which pieces make sequence i of endless epochs: a pure function of (seed, i)."""

    @property
    def sequences(self) -> int:
        """Of an epoch; the last may be short."""

    @property
    def kept(self) -> Kept: ...

    def pieces(self, index: int) -> list[Piece]:
        """Of sequence `index`, counted through all epochs."""

    def once(self, index: int) -> list[Piece]:
        """Of sequence `index` of the first epoch, which no other epoch reaches into."""
