"""The native solver: greedy as in Python, and answers that brute force agrees with."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farspan.memory import placement as solver
from farspan.memory.placement import (
    Columns,
    Feasibility,
    PlacementRequest,
    fit,
    greedy,
    live_peak,
    place,
    placed_at,
    to_columns,
)
from tests.memory.instances import HARD_CAPACITY, hard, least_height, requests, tight
from tests.oracles.check_placement import check_placement

pytestmark = pytest.mark.skipif(not solver.available(), reason="the native library is not built")

NEVER = 30.0  # seconds; none of these problems needs one


def verify(problem: list[PlacementRequest], height: int, addresses: tuple[int, ...]) -> None:
    """The addresses are a placement within the height."""
    found = placed_at(problem, addresses, live_peak(problem))
    check_placement(problem, found)
    assert found.height <= height


@given(requests(), st.booleans(), st.randoms())
def test_python_and_the_library_place_alike(
    problem: list[PlacementRequest], best: bool, random: Random
) -> None:
    order = list(range(len(problem)))
    random.shuffle(order)
    columns = to_columns(problem)
    assert greedy(columns, order, best) == solver._greedy(columns, order, best)


@given(requests(most=6, times=8))
@settings(deadline=None)
def test_it_fits_exactly_where_brute_force_says_so(problem: list[PlacementRequest]) -> None:
    least = least_height(problem)
    columns = to_columns(problem)
    found = fit(columns, least, NEVER)
    assert found.answer is Feasibility.FITS
    verify(problem, least, found.addresses)
    if least:
        assert fit(columns, least - 1, NEVER).answer is Feasibility.NO_FIT


@given(tight())
@settings(deadline=None)
def test_a_rectangle_cut_to_pieces_is_put_together(cut: tuple[list[PlacementRequest], int]) -> None:
    problem, height = cut
    found = fit(to_columns(problem), height, NEVER)
    assert found.answer is Feasibility.FITS
    verify(problem, height, found.addresses)


@pytest.mark.parametrize("letter", "ABCDEFGHIJK")
def test_hard_instances_fit_into_their_capacity(letter: str) -> None:
    problem = hard(letter)
    found = fit(to_columns(problem), HARD_CAPACITY, 60.0)
    assert found.answer is Feasibility.FITS
    verify(problem, HARD_CAPACITY, found.addresses)


def test_an_answer_is_the_same_every_time() -> None:
    columns = to_columns(hard("D"))
    assert fit(columns, HARD_CAPACITY, 60.0) == fit(columns, HARD_CAPACITY, 60.0)


def test_the_time_limit_ends_a_search() -> None:
    """Half of the bytes alive is refuted at once; the bound itself, in no time, is not known."""
    columns = to_columns(hard("D"))
    bound = live_peak(hard("D"))
    assert fit(columns, bound // 2, NEVER).answer is Feasibility.NO_FIT
    assert fit(columns, bound, 0.0).answer is Feasibility.UNKNOWN


@pytest.mark.parametrize(
    ("size", "born", "dies", "order"),
    [([-1], [0], [1], [0]), ([1], [2], [1], [0]), ([1, 1], [0, 0], [1, 1], [0, 0])],
)
def test_what_is_no_problem_is_refused(
    size: list[int], born: list[int], dies: list[int], order: list[int]
) -> None:
    with pytest.raises(ValueError, match="placement: expected sizes of at least 0"):
        greedy(Columns(size, born, dies), order)


def test_sizes_beyond_64_bits_are_left_to_python() -> None:
    problem = [PlacementRequest(2**62, 0, 2), PlacementRequest(2**63, 1, 3)]
    assert place(problem).height == 2**62 + 2**63
    assert fit(to_columns(problem), 2**70, NEVER).answer is Feasibility.UNKNOWN


def test_placing_needs_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = hard("B")
    with_library = place(problem)
    monkeypatch.setattr(solver, "_native", lambda: None)
    assert place(problem) == with_library
