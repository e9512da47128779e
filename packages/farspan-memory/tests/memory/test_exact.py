"""Exact placement: the optimum, and only what is proved is called optimal."""

import pytest
from hypothesis import given, settings

from farspan_memory import exact
from farspan_memory.exact import place_exactly, place_flat
from farspan_memory.placement import (
    Columns,
    Feasibility,
    FitResult,
    Placement,
    PlacementRequest,
    fit,
    place_greedily,
)
from tests.memory.check_placement import check_placement
from tests.memory.instances import HARD_CAPACITY, above_bound, hard, least_height, requests


@given(requests(most=6, times=8))
@settings(deadline=None)
def test_it_is_the_optimum_of_brute_force(problem: list[PlacementRequest]) -> None:
    found = place_exactly(problem)
    check_placement(problem, found.placement)
    assert found.placement.height == least_height(problem) == found.proved_bound
    assert found.optimal


@pytest.mark.parametrize("scale", [1, 512])
def test_a_height_above_the_bound_is_proved_by_search(scale: int) -> None:
    problem = [PlacementRequest(r.size * scale, r.born, r.dies) for r in above_bound()]
    found = place_exactly(problem)
    check_placement(problem, found.placement)
    assert (found.placement.lower_bound, found.placement.height) == (8 * scale, 9 * scale)
    assert found.optimal


def test_a_capacity_is_asked_for_first() -> None:
    """C fits into its capacity but nobody knows whether it fits into its bound."""
    found = place_exactly(hard("C"), 60.0, HARD_CAPACITY)
    assert found.placement.lower_bound < found.placement.height <= HARD_CAPACITY
    assert not found.optimal
    assert place_flat(hard("C")).placement.height > HARD_CAPACITY


def test_a_capacity_below_the_bound_takes_no_search() -> None:
    found = place_exactly(hard("C"), 60.0, 1000)
    assert found.nodes == 0
    assert found.proved_bound > 1000


def test_greedy_orders_leave_time_for_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def orders(problem: list[PlacementRequest], seconds: float) -> Placement:
        given.append(seconds)
        return place_greedily(problem)

    monkeypatch.setattr(exact, "place_greedily", orders)
    place_exactly(above_bound(), 8.0)
    assert given == [4.0]


def test_what_was_not_proved_is_not_called_optimal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that knows nothing leaves the greedy placement, with the bound as the bound."""

    def unknown(columns: Columns, height: int, seconds: float) -> FitResult:  # noqa: ARG001
        return FitResult(Feasibility.UNKNOWN, (), 7)

    monkeypatch.setattr(exact, "fit", unknown)
    found = place_exactly(hard("D"))
    flat = place_flat(hard("D"))
    assert found.placement == flat.placement
    assert found.proved_bound == flat.placement.lower_bound
    assert not found.optimal
    assert found.nodes >= 7


def test_unknown_heights_are_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is not known, what lies above it is found: lower than greedy, not proved."""
    asked = []

    def forgetful(columns: Columns, height: int, seconds: float) -> FitResult:
        asked.append(height)
        if len(asked) == 1:
            return FitResult(Feasibility.UNKNOWN, (), 0)
        return fit(columns, height, min(seconds, 0.3))

    monkeypatch.setattr(exact, "fit", forgetful)
    found = place_exactly(hard("J"), 1.0)
    assert asked[0] == found.placement.lower_bound < asked[1]
    assert found.placement.height < place_flat(hard("J")).placement.height
    assert not found.optimal
