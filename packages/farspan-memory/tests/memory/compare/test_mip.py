"""MEMO's program, as an open solver answers it, certifies the search on small cases."""

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farspan_memory.compare import mip
from farspan_memory.compare.mip import count_overlapping, overlapping, place_by_mip
from farspan_memory.errors import UnsupportedError
from farspan_memory.placement import PlacementRequest, live_peak
from tests.grids import examples
from tests.memory.check_placement import check_placement
from tests.memory.instances import above_bound, least_height, requests

pytest.importorskip("scipy")


@given(requests(most=6, sizes=9, times=8))
@settings(max_examples=examples(40))
def test_its_optimum_is_that_of_brute_force(problem: list[PlacementRequest]) -> None:
    problem = [r for r in problem if r.size < 10**12]
    found = place_by_mip(problem)
    check_placement(problem, found.placement)
    assert found.optimal
    assert found.placement.height == least_height(problem)


@st.composite
def one_huge(draw: st.DrawFn, most: int = 40) -> list[PlacementRequest]:
    """A few bytes beside one request of up to 2^most."""
    problem = [r for r in draw(requests(most=5, sizes=9, times=8)) if r.size < 10**12]
    huge = PlacementRequest(2 ** draw(st.integers(10, most)) + draw(st.integers(-1, 1)), 0, 9)
    return [*problem, huge]


@given(one_huge())
@settings(max_examples=examples(60))
def test_beside_a_huge_request_no_proof_is_wrong(problem: list[PlacementRequest]) -> None:
    """HiGHS is right to a millionth of the arena: below that it decides nothing."""
    found = place_by_mip(problem)
    check_placement(problem, found.placement)
    least = least_height(problem)
    assert found.proved_bound <= least
    assert not found.optimal or found.placement.height == least


@given(one_huge(most=15), st.sampled_from([1, 512, 2**30]))
@settings(max_examples=examples(20))
def test_what_is_far_above_its_tolerance_is_proved(
    problem: list[PlacementRequest], unit: int
) -> None:
    problem = [PlacementRequest(r.size * unit, r.born, r.dies) for r in problem]
    found = place_by_mip(problem)
    assert found.optimal
    assert found.placement.height == least_height(problem)


def test_a_million_bytes_beside_one() -> None:
    """The bound is reached by greedy placement; HiGHS ends one byte above it, at its tolerance."""
    lives = [(1, 1, 3), (8, 0, 4), (10**6, 3, 4), (1, 0, 4), (8, 2, 4), (7, 0, 2)]
    problem = [PlacementRequest(*life) for life in lives]
    assert place_by_mip(problem).placement.height == 1_000_017 == live_peak(problem)


def test_a_solver_that_ends_wrongly_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says infeasible of what the greedy orders place, or optimal of a height that is not."""

    class Wrong:
        x, message, mip_dual_bound = None, "The problem is infeasible.", None

    monkeypatch.setattr(mip, "_solve_mip", lambda *_: Wrong)
    found = place_by_mip(above_bound())
    check_placement(above_bound(), found.placement)
    assert found.proved_bound == 8
    with pytest.raises(UnsupportedError, match=r"no placement within .* The problem is infeasible"):
        place_by_mip(above_bound(), capacity=8)


@given(requests(times=6))
def test_pairs_are_counted_before_they_are_written(problem: list[PlacementRequest]) -> None:
    assert count_overlapping(problem) == len(overlapping(problem))


def test_a_capacity_below_the_optimum_has_no_solution() -> None:
    with pytest.raises(UnsupportedError, match="mip: the solver found no placement"):
        place_by_mip(above_bound(), 60.0, 8)


def test_too_many_pairs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mip, "MOST_PAIRS", 3)
    with pytest.raises(
        UnsupportedError, match="pairs of tensors live together, but the solver takes at most 3"
    ):
        place_by_mip(above_bound())


def test_without_scipy_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'farspan-memory\[mip\]'"):
        place_by_mip(above_bound())
