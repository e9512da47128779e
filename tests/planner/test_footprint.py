"""The search for the least bytes, where what is simulated is not what its bounds say."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from farspan.planner import search as planner_search
from farspan.planner.evaluate import PAGE, evaluate
from farspan.planner.request import Budget, Plan
from farspan.planner.search import Choices, FootprintSearch, SearchEffort
from farspan.spec import Schedule
from tests.planner.test_best_first import question

LIMIT = 1.0


@dataclass(frozen=True)
class Found:
    """A schedule: main memory by its bound and simulated, in pages, and simulated seconds."""

    bound: int
    host: int
    seconds: float


@dataclass(frozen=True)
class Open:
    """In the place of a frontier: all of these may be fast enough."""

    found: list[Found]
    bound: float = 0.5

    def within(self, *_: object) -> Choices:
        count = len(self.found)
        nothing = np.zeros(count, dtype=np.int64)
        host = np.array([float(one.bound * PAGE) for one in self.found])
        index, seconds, none = np.arange(count), np.full(count, 0.5), np.zeros(count)
        return Choices(index, seconds, none, host, nothing, none[None])

    def transients(self, *_: object) -> NDArray[np.float64]:
        return np.zeros((1, 1))

    def schedule_at(self, index: int) -> Any:
        return self.found[index]


def search(monkeypatch: pytest.MonkeyPatch, *found: Found) -> tuple[Plan, Plan, int]:
    """What is known before and chosen then, and how many were simulated; that before takes ten
    pages."""
    asked = question(2**40, 2**40)
    known = evaluate(asked, "grouped", Schedule(chunk=32))
    known = replace(known, host=Budget({"x": 10 * PAGE}, 2**40))

    def simulated(_: object, name: str, schedule: Any, __: object) -> Plan:
        seconds = replace(known.seconds, total=schedule.seconds)
        host = Budget({"x": schedule.host * PAGE}, 2**40)
        return replace(known, strategy=name, host=host, seconds=seconds)

    monkeypatch.setattr(planner_search, "simulated", simulated)
    frontiers: Any = [Open(list(found))]
    searched = FootprintSearch(asked, frontiers, Any)  # type: ignore[arg-type]
    best = searched.search(known, LIMIT, SearchEffort(float("inf")))
    return known, best, searched.simulated


def test_a_bound_that_is_fast_enough_is_no_simulation_that_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known, best, simulated = search(monkeypatch, Found(2, 2, 1.1), Found(3, 3, 0.9))
    assert (best.host.total, simulated) == (3 * PAGE, 2)
    known, best, simulated = search(monkeypatch, Found(2, 2, 1.1))
    assert best is known
    assert simulated == 1


def test_a_schedule_may_take_more_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    known, best, _ = search(monkeypatch, Found(2, 11, 0.9))
    assert best is known
    _, best, simulated = search(monkeypatch, Found(2, 8, 0.9), Found(3, 9, 0.9), Found(9, 9, 0.9))
    assert (best.host.total, simulated) == (8 * PAGE, 2)
