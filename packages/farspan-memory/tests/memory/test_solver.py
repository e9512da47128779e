"""The native solver: greedy as by hand, and answers that brute force agrees with."""

from random import Random
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farspan_memory.errors import UnsupportedError
from farspan_memory.placement import (
    ORDERS,
    Columns,
    Feasibility,
    PlacementRequest,
    fit,
    greedy,
    largest_first,
    live_peak,
    placed_at,
    to_columns,
)
from tests.memory.check_placement import check_placement
from tests.memory.instances import HARD_CAPACITY, hard, least_height, requests, tight

NEVER = 30.0  # seconds; none of these problems needs one


def verify(problem: list[PlacementRequest], height: int, addresses: tuple[int, ...]) -> None:
    """The addresses are a placement within the height."""
    found = placed_at(problem, addresses, live_peak(problem))
    check_placement(problem, found)
    assert found.height <= height


def takes_room(request: PlacementRequest) -> bool:
    return request.size > 0 and request.born < request.dies


def lowest_or_tightest(problem: list[PlacementRequest], order: list[int], best: bool) -> list[int]:
    """Addresses by looking at every gap between those placed that live at the same time. What takes
    no room lies at 0."""
    addresses: dict[int, int] = {}
    for index in order:
        one = problem[index]
        others = [(addresses[i], problem[i]) for i in addresses if takes_room(problem[i])]
        others *= takes_room(one)
        beside = sorted(
            (low, low + r.size) for low, r in others if r.born < one.dies and one.born < r.dies
        )
        gaps, top = [], 0
        for low, high in beside:
            if low - top >= one.size:
                gaps.append((low - top if best else top, top))
            top = max(top, high)
        addresses[index] = min(gaps)[1] if gaps else top
    return [addresses[index] for index in range(len(problem))]


@given(requests(), st.booleans(), st.randoms())
def test_the_library_takes_the_lowest_gap_or_the_tightest(
    problem: list[PlacementRequest], best: bool, random: Random
) -> None:
    order = list(range(len(problem)))
    random.shuffle(order)
    columns = to_columns(problem)
    expected = lowest_or_tightest(problem, order, best)
    assert greedy(columns, order, best) == expected
    height = max(
        (at + r.size for at, r in zip(expected, problem, strict=True) if takes_room(r)), default=0
    )
    assert greedy(columns, order, best, below=height + 1) == expected
    if height:
        assert greedy(columns, order, best, below=height) is None


def long_step(count: int) -> list[PlacementRequest]:
    """A quarter of the requests live to the end, the others for some twenty births."""
    random = Random(7)
    lives = ((t, count if t % 4 == 0 else t + random.randint(1, 40)) for t in range(count))
    return [PlacementRequest(512 * random.randint(1, 4096), t, min(count, e)) for t, e in lives]


@pytest.mark.parametrize("first", range(len(ORDERS)))
def test_a_long_step_has_the_addresses_of_a_scan(first: int) -> None:
    problem = long_step(600)
    order = sorted(range(len(problem)), key=lambda index: ORDERS[first](problem[index]))
    assert greedy(to_columns(problem), order) == lowest_or_tightest(problem, order, best=False)


def test_the_time_limit_ends_an_order() -> None:
    """In no time only the first 256 requests look for gaps; the others stand on what is there."""
    problem = long_step(800)
    columns, order = to_columns(problem), list(range(len(problem)))
    whole, found = greedy(columns, order), greedy(columns, order, seconds=0.0)
    assert whole is not None
    assert found is not None
    verify(problem, sum(r.size for r in problem), tuple(found))
    assert found[:256] == whole[:256]
    assert found != whole
    assert greedy(columns, order, seconds=NEVER) == whole


def test_requests_take_little_more_time_than_their_number() -> None:
    """Twelve times as many, some thirty times the CPU seconds; a scan of all took 130 times."""

    def seconds(count: int) -> float:
        problem = long_step(count)
        columns = to_columns(problem)
        order = sorted(range(count), key=lambda index: largest_first(problem[index]))
        begin = process_time()
        greedy(columns, order)
        return process_time() - begin

    few, many = min(seconds(5_000) for _ in range(3)), min(seconds(60_000) for _ in range(2))
    assert many < 50 * few


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


def test_sizes_beyond_64_bits_are_refused() -> None:
    problem = [PlacementRequest(2**62, 0, 2), PlacementRequest(2**63, 1, 3)]
    with pytest.raises(UnsupportedError, match="placement: expected sizes of less than"):
        greedy(to_columns(problem), [0, 1])
    assert fit(to_columns(problem), 2**70, NEVER).answer is Feasibility.UNKNOWN
