"""Placements pass their checker, and are tight where lifetimes nest."""

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from farspan.program.placement import (
    Order,
    PlacementRequest,
    largest_first,
    live_peak,
    longest_first,
    lowest_of,
    place,
)
from farspan_memory import placement as solver
from farspan_memory.native import LIBRARY
from tests.memory.check_placement import check_placement, most_alive

REQUESTS = st.lists(
    st.builds(
        lambda size, born, length: PlacementRequest(size, born, born + length),
        st.integers(0, 12) | st.integers(0, 10**12),
        st.integers(0, 20),
        st.integers(0, 12),
    ),
    max_size=25,
)


@given(REQUESTS)
def test_every_placement_passes(requests: list[PlacementRequest]) -> None:
    found = place(requests)
    check_placement(requests, found)
    assert found.height >= found.lower_bound
    if requests:
        tight = found.height == found.lower_bound
        event("at the lower bound" if tight else "above the lower bound")


@given(REQUESTS)
def test_the_bound_is_the_most_bytes_alive(requests: list[PlacementRequest]) -> None:
    assert live_peak(requests) == most_alive(requests)
    times = range(33)
    alive = (sum(r.size for r in requests if r.born <= t < r.dies) for t in times)
    assert live_peak(requests) == max(alive)


@given(REQUESTS)
def test_the_allocator_places_alike(requests: list[PlacementRequest]) -> None:
    """Its package shares no code with this, sweeps every placement, and tries the same orders."""
    if not LIBRARY.exists():
        pytest.skip("the native allocator was not built here")
    requests = [r for r in requests if r.born < r.dies]  # others may lie anywhere
    found = place(requests)
    native = [solver.PlacementRequest(r.size, r.born, r.dies) for r in requests]
    same = solver.Placement(found.addresses, found.height, found.lower_bound)
    solver.sweep_placement(native, same)
    assert solver.lowest_of(native, solver.ORDERS[:2]) == same


@pytest.mark.parametrize(
    ("lower", "higher", "sizes"),
    [
        (largest_first, longest_first, [(4, 2, 4), (3, 3, 6), (1, 4, 8)]),
        (longest_first, largest_first, [(2, 2, 4), (6, 4, 5), (3, 1, 5), (5, 1, 4)]),
    ],
)
def test_the_lower_of_two_orders_is_kept(
    lower: Order, higher: Order, sizes: list[tuple[int, int, int]]
) -> None:
    requests = [PlacementRequest(*one) for one in sizes]
    assert place(requests) == lowest_of(requests, [lower])
    assert place(requests).height < lowest_of(requests, [higher]).height


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_nested_lifetimes_are_placed_without_a_gap(depth: int) -> None:
    """The shape of forward and backward: what comes first goes last."""
    requests = [
        PlacementRequest(10 * level + 3, level, 2 * depth - level) for level in range(depth)
    ]
    found = place(requests)
    assert found.height == found.lower_bound == sum(r.size for r in requests)
