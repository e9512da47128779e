"""A copy engine for tests: copies happen in any order that the events allow.

The computing lane is the test itself: it runs as the engine issues it. On a GPU it may lag behind
by as much as the events allow, so a copy may happen long before instructions that were issued
before it. To do the same, a step is run twice. `Recorder` copies in line and writes down what each
lane was told; `Replay` knows it from the start, and copies when its manner says so:

    early   as soon as the events allow, which is often before the copy is issued
    late    when the computation waits for it
    torn    from as soon to as late as that: its target is NaN in between, and so it stays when its
            source was written meanwhile
    random  some time in between
"""

from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any

import torch
from torch import Tensor

from farspan.engine.tiers import CopyEngine
from farspan.program.dependencies import Hazard, Lane

COPY_LANES = (Lane.FETCH, Lane.EVICT)


class Manner(StrEnum):
    EARLY = "early"
    LATE = "late"
    TORN = "torn"
    RANDOM = "random"


@dataclass(frozen=True)
class Waits:
    event: int


@dataclass(frozen=True)
class Records:
    event: int


@dataclass(frozen=True, eq=False)
class Copies:
    target: Tensor
    source: Tensor

    def reads(self) -> list[Tensor]:
        return [self.source]

    def spoil(self) -> None:
        spoil(self.target)

    def happen(self) -> None:
        self.target.copy_(self.source)


@dataclass(frozen=True, eq=False)
class Gathers:
    """Rows of a tensor. Numbers of rows that are not there yet, or no longer, spoil the target."""

    target: Tensor
    source: Tensor
    rows: Tensor

    def reads(self) -> list[Tensor]:
        rows = [self.source[self.rows]] if _are_rows(self.rows, self.source) else []
        return [self.rows, *rows]

    def spoil(self) -> None:
        spoil(self.target)

    def happen(self) -> None:
        if _are_rows(self.rows, self.source):
            self.target.copy_(self.source[self.rows])
        else:
            self.spoil()


@dataclass(frozen=True, eq=False)
class Adds:
    """To rows of a tensor, which are read and written when it happens."""

    total: Tensor
    rows: Tensor
    values: Tensor

    def reads(self) -> list[Tensor]:
        return [self.rows, self.values]

    def spoil(self) -> None:
        if _are_rows(self.rows, self.total):
            self.total[self.rows] = torch.nan

    def happen(self) -> None:
        if _are_rows(self.rows, self.total):
            self.total[self.rows] += self.values


def _are_rows(rows: Tensor, of: Tensor) -> bool:
    return bool(((rows >= 0) & (rows < len(of))).all())


Work = Copies | Gathers | Adds
Told = dict[Lane, list[Waits | Records | Work]]


class Deadlock(Exception):
    """The computation waits for a copy that waits for the computation to come."""


class Recorder(CopyEngine):
    """Copies in line, and writes down what each copy lane was told in the latest step. Waits of
    blocks against the hazard `dropped` are left out."""

    def __init__(self, dropped: Hazard | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self.overlap = True
        self._streams = dict.fromkeys(COPY_LANES)  # type: ignore[assignment]
        self.dropped = dropped
        self.told: Told = {}
        self.events = 0

    def begin(self) -> None:
        self.told, self.events = {lane: [] for lane in COPY_LANES}, 0
        super().begin()

    def fetch(self, target: Tensor, source: Tensor) -> None:
        self.told[Lane.FETCH].append(Copies(target, source))
        super().fetch(target, source)

    def evict(self, target: Tensor, source: Tensor) -> None:
        self.told[Lane.EVICT].append(Copies(target, source))
        super().evict(target, source)

    def gather(self, target: Tensor, source: Tensor, rows: Tensor) -> None:
        self.told[Lane.FETCH].append(Gathers(target, source, rows))
        super().gather(target, source, rows)

    def add_rows(self, total: Tensor, rows: Tensor, values: Tensor) -> None:
        self.told[Lane.EVICT].append(Adds(total, rows, values))
        super().add_rows(total, rows, values)

    def note(self, target: Tensor, source: Tensor) -> None:
        self.told[Lane.FETCH].append(Copies(target, source))
        super().note(target, source)

    def record(self, lane: Lane) -> int:
        self.events += 1
        if lane in COPY_LANES:
            self.told[lane].append(Records(self.events))
        return self.events

    def wait(self, lane: Lane, event: Any, hazard: Hazard | None = None) -> None:
        is_dropped = hazard is not None and hazard is self.dropped
        if lane in COPY_LANES and event is not None and not is_dropped:
            self.told[lane].append(Waits(event))


@dataclass
class _Lane:
    told: list[Waits | Records | Work]
    place: int = 0
    started: list[Tensor] | None = None  # what the copy at hand reads, as it was when it began


class Replay(CopyEngine):
    """Does what a recorded step was told, in another order."""

    def __init__(
        self, told: Told, manner: Manner, seed: int = 0, dropped: Hazard | None = None
    ) -> None:
        super().__init__(torch.device("cpu"))
        self.overlap = True
        self._streams = dict.fromkeys(COPY_LANES)  # type: ignore[assignment]
        self.dropped, self.manner, self.random = dropped, manner, Random(seed)
        self.told = told
        self.recorded_on = {
            step.event: lane for lane in told for step in told[lane] if isinstance(step, Records)
        }

    def begin(self) -> None:
        self.lanes = {lane: _Lane(told) for lane, told in self.told.items()}
        self.happened: set[int] = set()
        self.events = 0
        super().begin()

    def end(self) -> None:
        super().end()
        left = [lane.told[lane.place :] for lane in self.lanes.values()]
        assert not any(left), "the step issued less than the one that was recorded"

    def fetch(self, target: Tensor, source: Tensor) -> None:
        pass

    def evict(self, target: Tensor, source: Tensor) -> None:
        pass

    def gather(self, target: Tensor, source: Tensor, rows: Tensor) -> None:
        pass

    def add_rows(self, total: Tensor, rows: Tensor, values: Tensor) -> None:
        pass

    def note(self, target: Tensor, source: Tensor) -> None:
        pass

    def record(self, lane: Lane) -> int:
        self.events += 1
        if lane is Lane.COMPUTE:
            self.happened.add(self.events)
            self._go_on()
        return self.events

    def wait(self, lane: Lane, event: Any, hazard: Hazard | None = None) -> None:
        is_dropped = hazard is not None and hazard is self.dropped
        if lane is Lane.COMPUTE and event is not None and not is_dropped:
            self._reach(event)
            self._go_on()

    # -- lanes -----------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Copy what may be copied and the manner wants copied now."""
        moved = self.manner is not Manner.LATE
        while moved:
            moves = [self._step(lane) for lane in self.lanes.values()]
            moved = any(moves)
            moved = moved and (self.manner is not Manner.RANDOM or self.random.random() < 0.7)

    def _step(self, lane: _Lane) -> bool:
        """Take the lane's next step if that may be; False if it stays where it is."""
        if lane.place == len(lane.told):
            return False
        match lane.told[lane.place]:
            case Waits(event) if event not in self.happened:
                return False
            case Records(event):
                self.happened.add(event)
            case Copies() | Gathers() | Adds() as copy if self.manner is Manner.TORN:
                self._start(lane, copy)
                return False
            case Copies() | Gathers() | Adds() as copy:
                if self.manner is Manner.RANDOM and self.random.random() < 0.5:
                    return False
                self._finish(lane, copy)
        lane.place += 1
        return True

    def _start(self, lane: _Lane, copy: Work) -> None:
        if lane.started is not None:
            return
        lane.started = [x.clone() for x in copy.reads()]
        if not isinstance(copy, Adds):  # it needs what its target was
            copy.spoil()

    def _finish(self, lane: _Lane, copy: Work) -> None:
        before, lane.started = lane.started, None
        reads = copy.reads()
        if before is None or (len(before) == len(reads) and all(map(_same, before, reads))):
            copy.happen()
        else:
            copy.spoil()

    def _reach(self, event: int) -> None:
        """Let everything happen that an event stands for."""
        if event in self.happened:
            return
        if event not in self.recorded_on:
            raise Deadlock(event)
        lane = self.lanes[self.recorded_on[event]]
        while event not in self.happened:
            match lane.told[lane.place]:
                case Waits(other):
                    self._reach(other)
                case Records(other):
                    self.happened.add(other)
                case Copies() | Gathers() | Adds() as copy:
                    self._finish(lane, copy)
            lane.place += 1


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: NaN equals NaN."""
    return tensor.contiguous().view(torch.uint8)


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(raw(one), raw(other))


def spoil(tensor: Tensor) -> None:
    tensor.view(torch.uint8).fill_(0xFF)
