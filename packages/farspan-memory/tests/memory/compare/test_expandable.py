"""PyTorch's expandable segments as a model: small programs worked by hand from its rules. Random
ones, under the dumb checker, are with the caching allocator's."""

import pytest

from farspan_memory.compare.allocators import (
    ACCESS,
    CREATE,
    MAP,
    RELEASE,
    RESERVE,
    UNMAP,
    CachingAllocator,
    Settings,
    SimulatedOutOfMemory,
)
from farspan_memory.compare.allocators import ExpandableAllocator as Expandable
from tests.memory.check_blocks import check_blocks
from tests.memory.compare.test_caching import KIB, MIB, layout

PAGE = 20 * MIB


def mapped(allocator: CachingAllocator) -> list[tuple[int, int, str]]:
    """The blocks that have memory, addresses and sizes in KiB."""
    return [row for row in layout(allocator) if row[2] != "unmapped"]


def test_a_segment_grows_by_pages_behind_what_is_mapped() -> None:
    allocator = Expandable()
    allocator.malloc(0, 25 * MIB)
    assert allocator.reserved == 2 * PAGE
    allocator.malloc(1, 30 * MIB)  # 15 MiB are free before the border: one page more
    assert allocator.reserved == 3 * PAGE
    assert mapped(allocator) == [
        (0, 25 * KIB, "held"),
        (25 * KIB, 30 * KIB, "held"),
        (55 * KIB, 5 * KIB, "free"),
    ]
    calls = {(RESERVE, 0): 1, (CREATE, PAGE): 3, (MAP, PAGE): 3, (ACCESS, PAGE): 3}
    assert dict(allocator.calls) == calls


def test_the_block_at_the_border_counts_as_large_as_it_can_grow() -> None:
    """10 MiB are free at the border and 15 before: the smaller one could grow, and is kept."""
    allocator = Expandable()
    allocator.malloc(0, 15 * MIB)
    allocator.malloc(1, 15 * MIB)
    allocator.free(0)
    allocator.malloc(2, 8 * MIB)
    assert mapped(allocator) == [
        (0, 8 * KIB, "held"),
        (8 * KIB, 7 * KIB, "free"),
        (15 * KIB, 15 * KIB, "held"),
        (30 * KIB, 10 * KIB, "free"),
    ]


def test_a_full_device_unmaps_the_pages_that_are_free_as_a_whole() -> None:
    """Of 50 free MiB only two pages lie between borders; the request of 45 takes them, and the 5
    MiB before, at the lowest address with room."""
    allocator = Expandable(capacity=5 * PAGE)
    allocator.malloc(0, 15 * MIB)
    allocator.malloc(1, 50 * MIB)
    allocator.malloc(2, 35 * MIB)
    allocator.free(1)  # 15 up to 65: pages 20 to 40 and 40 to 60
    assert allocator.reserved == 5 * PAGE
    allocator.malloc(3, 40 * MIB, stream=1)
    assert (allocator.retries, allocator.reserved) == (1, 5 * PAGE)
    assert allocator.calls[UNMAP, PAGE] == allocator.calls[RELEASE, PAGE] == 2
    assert mapped(allocator)[:4] == [
        (0, 15 * KIB, "held"),
        (15 * KIB, 5 * KIB, "free"),
        (60 * KIB, 5 * KIB, "free"),
        (65 * KIB, 35 * KIB, "held"),
    ]
    check_blocks(allocator)
    allocator.free(3)
    allocator.malloc(4, 45 * MIB)  # 5 free, 40 unmapped: mapped where they were
    assert (allocator.retries, allocator.reserved) == (2, 5 * PAGE)
    assert (15 * KIB, 45 * KIB, "held") in mapped(allocator)
    check_blocks(allocator)


def test_pages_that_could_be_made_go_back_when_one_could_not() -> None:
    allocator = Expandable(capacity=2 * PAGE)
    with pytest.raises(SimulatedOutOfMemory):
        allocator.malloc(0, 3 * PAGE)
    assert allocator.calls[CREATE, PAGE] == allocator.calls[RELEASE, PAGE] == 4  # tried twice
    assert (allocator.calls[MAP, PAGE], allocator.reserved) == (0, 0)
    check_blocks(allocator)


def test_a_page_is_as_large_as_the_settings_say() -> None:
    allocator = Expandable(settings=Settings(large_segment=32 * MIB))
    allocator.malloc(0, 100 * MIB)
    assert allocator.reserved == 128 * MIB


def test_max_split_size_limits_reuse_and_not_splitting() -> None:
    """get_free_block refuses after it has looked at expandable sizes; should_split asks nothing.
    60 free MiB behind which something lies serve 50 MiB, and are cut, but neither 10, below the
    limit, nor 40, which would leave 20 unused: those get pages at the border."""
    settings = Settings(max_split=40 * MIB)
    for size, refused in ((10, True), (39, True), (40, True), (41, False), (50, False)):
        allocator = Expandable(settings=settings)
        allocator.malloc(0, 60 * MIB)
        allocator.malloc(1, 20 * MIB)
        allocator.free(0)
        allocator.malloc(2, size * MIB)
        held = (80 * KIB if refused else 0, size * KIB, "held")
        assert held in mapped(allocator)
        assert (allocator.reserved > 4 * PAGE) is refused
        check_blocks(allocator)


def test_a_refused_block_at_the_border_is_grown_all_the_same() -> None:
    """find_expandable_block begins with the free block before what is not mapped, and asks for no
    limit: what best fit refused serves the request, and is cut."""
    allocator = Expandable(settings=Settings(max_split=200 * MIB))
    allocator.malloc(0, 400 * MIB)
    allocator.free(0)
    allocator.malloc(1, 100 * MIB)
    assert allocator.reserved == 400 * MIB
    assert mapped(allocator) == [(0, 100 * KIB, "held"), (100 * KIB, 300 * KIB, "free")]


def test_a_full_device_gives_back_no_large_block_first() -> None:
    """release_available_cached_blocks passes expandable blocks over: all free pages go at once."""
    allocator = Expandable(capacity=10 * PAGE, settings=Settings(max_split=40 * MIB))
    for tensor, (size, stream) in enumerate(((100, 0), (20, 0), (60, 1))):
        allocator.malloc(tensor, size * MIB, stream)
    allocator.free(0)
    allocator.malloc(3, 30 * MIB)  # the 100 are refused, and of two pages one is left
    assert (allocator.retries, allocator.reserved) == (1, 6 * PAGE)
    assert mapped(allocator)[0] == (0, 30 * KIB, "held")
    check_blocks(allocator)


def test_addresses_end_at_nine_eighths_of_the_device() -> None:
    """Of 120 MiB of addresses 80 have memory: the 8 free MiB at their end can grow to 48, and are
    taken before the 53 at the beginning. On an endless device they could grow further."""
    for capacity, taken in ((100 * MIB, 72 * MIB), (2**40, 0)):
        allocator = Expandable(capacity)
        allocator.malloc(0, 12 * MIB)
        allocator.malloc(1, 41 * MIB)
        allocator.free(0)
        allocator.malloc(2, 19 * MIB)
        allocator.free(1)
        allocator.malloc(3, 3 * MIB)
        assert {row.address for row in allocator.rows() if row.size == 3 * MIB} == {taken}
