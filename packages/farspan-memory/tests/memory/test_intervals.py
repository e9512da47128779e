"""The models of PyTorch's allocators against the same rules written without blocks or lists: the
same bytes reserved after every event, the same blocks in use, and out of memory at the same one."""

from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from farspan_memory.compare.allocators import (
    CachingAllocator,
    ExpandableAllocator,
    SimulatedOutOfMemory,
)
from tests.memory.intervals import MIB, NoAddresses, Pages, Segments

SIZES = (
    *(300, 512 * 1024, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 12 * MIB, 19 * MIB),
    *(25 * MIB, 41 * MIB),
)
EVENTS = st.lists(
    st.tuples(st.booleans(), st.integers(0, 10**6), st.sampled_from((0, 0, 0, 1))),
    min_size=20,
    max_size=60,
)
CAPACITIES = st.sampled_from((45 * MIB, 100 * MIB, 180 * MIB, 2**40))

Events = Sequence[tuple[bool, int, int]]  # malloc or free, which size or tensor, stream


def together(
    fast: CachingAllocator, slow: Segments | Pages, events: Events
) -> list[tuple[int, int]]:
    """Reserved bytes of both after every event; one out of memory is so for both."""
    alive: list[int] = []
    found = []
    for number, (is_malloc, choice, stream) in enumerate(events):
        if is_malloc:
            size = SIZES[choice % len(SIZES)]
            try:
                slow.malloc(number, size, stream)
            except NoAddresses:
                assume(False)
            except SimulatedOutOfMemory:
                with pytest.raises(SimulatedOutOfMemory):
                    fast.malloc(number, size, stream)
            else:
                fast.malloc(number, size, stream)
                alive.append(number)
        elif alive:
            tensor = alive.pop(choice % len(alive))
            fast.free(tensor)
            slow.free(tensor)
        found.append((fast.reserved, slow.reserved()))
    return found


@given(CAPACITIES, EVENTS)
def test_segments_are_those_of_intervals(capacity: int, events: Events) -> None:
    fast, slow = CachingAllocator(capacity), Segments(capacity)
    for left, right in together(fast, slow, events):
        assert left == right
    sizes = sorted(row.size for row in fast.rows() if row.state == "held")
    assert sizes == sorted(end - start for start, end in slow.held.values())


@given(CAPACITIES, EVENTS)
def test_pages_are_those_of_intervals(capacity: int, events: Events) -> None:
    fast, slow = ExpandableAllocator(capacity), Pages(capacity)
    for left, right in together(fast, slow, events):
        assert left == right
    held = sorted(row.address - row.segment for row in fast.rows() if row.state == "held")
    assert held == sorted(start for _, (start, _) in slow.held.values())
