"""A published number beside a predicted one, and the rule by which they agree."""

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
KILO = 1024
GIB = 1 << 30


class Kind(StrEnum):
    """What a number is; each kind has its rule."""

    MEMORY = "memory"  # within 5%
    GROWTH = "growth"  # bytes a token, within 5%
    LATENCY = "latency"  # within 15%
    MFU = "mfu"  # within 15%
    LONGEST = "longest"  # within one step of the paper's grid
    BEST = "best"  # the best of a grid of fractions, within one step of it
    FEASIBLE = "feasible"  # the same answer


WITHIN = {Kind.MEMORY: 0.05, Kind.GROWTH: 0.05, Kind.LATENCY: 0.15, Kind.MFU: 0.15}
STEPS = 1


@dataclass(frozen=True, slots=True)
class Cell:
    """One number of one table.

    `published` and `predicted` are in `unit`. For `longest` both are in K tokens and `steps` counts
    the paper's grid between them, as it does for `best`; for `feasible` they are 1 or 0.
    """

    table: str  # as "OOMB 2"
    row: str
    column: str
    kind: Kind
    unit: str
    published: float
    predicted: float
    steps: int = 0
    used: bool = False  # the calibration was read off this number

    @property
    def ratio(self) -> float:
        return self.predicted / self.published if self.published else float(self.predicted == 0)

    @property
    def agrees(self) -> bool:
        if self.kind is Kind.FEASIBLE:
            return self.published == self.predicted
        if self.kind in (Kind.LONGEST, Kind.BEST):
            return abs(self.steps) <= STEPS
        return abs(self.ratio - 1.0) <= WITHIN[self.kind]

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.table, str(self.kind), self.row, self.column


@dataclass(frozen=True, slots=True)
class Miss:
    """Why the cells of some rows and columns do not agree."""

    table: str
    kind: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]  # empty: every column of these rows that misses
    explained: bool  # False: nothing that is known tells why
    why: str

    def covers(self, cell: Cell) -> bool:
        return (
            (self.table, self.kind) == (cell.table, str(cell.kind))
            and cell.row in self.rows
            and (not self.columns or cell.column in self.columns)
        )


def published(paper: str) -> dict[str, Any]:
    """The numbers of a paper, table by table."""
    found: dict[str, Any] = json.loads((DATA / f"{paper}.json").read_text(encoding="utf-8"))
    return found


def misses() -> tuple[Miss, ...]:
    """What is known not to agree, and why."""
    found = json.loads((DATA / "misses.json").read_text(encoding="utf-8"))
    return tuple(
        Miss(m["table"], m["kind"], tuple(m["rows"]), tuple(m["columns"]), m["explained"], m["why"])
        for m in found
    )


def on_grid(grid: list[int], fits: list[bool]) -> int:
    """The longest length of an ascending grid before the first that does not fit; 0 for none."""
    longest = 0
    for length, fit in zip(grid, fits, strict=True):
        if not fit:
            break
        longest = length
    return longest


def steps_between(grid: list[int], first: int, second: int) -> int:
    """Steps of the grid from one of its lengths to another; 0 stands before the first."""
    places = [0, *grid]
    return places.index(second) - places.index(first)
