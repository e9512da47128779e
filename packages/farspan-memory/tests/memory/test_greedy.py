"""Greedy placements are placements, and more orders never make them higher."""

from collections.abc import Sequence

import pytest
from hypothesis import given

from farspan_memory import placement
from farspan_memory.placement import (
    ORDERS,
    Columns,
    PlacementRequest,
    lowest_of,
    place_greedily,
)
from tests.memory.check_placement import check_placement
from tests.memory.instances import hard, requests


@given(requests())
def test_every_placement_passes(problem: list[PlacementRequest]) -> None:
    found = place_greedily(problem)
    check_placement(problem, found)
    assert found.height <= min(lowest_of(problem, (order,)).height for order in ORDERS)


def test_best_fit_is_lower_where_first_fit_splits_the_larger_gap() -> None:
    """A gap of 3 at 0 and one of 2 above it: a 2 in the first leaves the 3 nowhere to go."""
    # Walls at [3, 4) and [6, 7); at time 1 the gaps open, and 2 comes before 3.
    problem = [
        PlacementRequest(3, 0, 1),
        PlacementRequest(1, 0, 9),
        PlacementRequest(2, 0, 1),
        PlacementRequest(1, 0, 8),
        PlacementRequest(2, 1, 9),
        PlacementRequest(3, 1, 9),
    ]
    order = (lambda request: (problem.index(request),),)
    first, best = lowest_of(problem, order), lowest_of(problem, order, best_fit=True)
    check_placement(problem, best)
    assert (first.height, best.height) == (10, 7)


def test_time_ends_the_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each order takes 4 s of a clock: of 10 s two are taken, of none one all the same."""
    now = [0.0]
    tried, left = list[bool](), list[float]()
    first_fit = placement.greedy

    def slow(
        columns: Columns, order: Sequence[int], best: bool = False, *, seconds: float, below: int
    ) -> list[int] | None:
        left.append(seconds)
        now[0] += 4.0
        tried.append(best)
        return first_fit(columns, order, best, below=below)

    monkeypatch.setattr(placement, "perf_counter", lambda: now[0])
    monkeypatch.setattr(placement, "greedy", slow)
    for seconds, orders in ((10.0, 2), (0.0, 1), (1e9, 2 * len(ORDERS))):
        tried.clear()
        found = place_greedily(hard("K"), seconds)
        check_placement(hard("K"), found)
        assert len(tried) == orders
        assert left.pop(0) == seconds
        assert all(later < seconds for later in left)
        left.clear()
    assert found == place_greedily(hard("K"))
