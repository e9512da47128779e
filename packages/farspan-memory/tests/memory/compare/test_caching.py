"""PyTorch's caching allocator as a model: small programs worked by hand from its rules, and random
ones under the dumb checker."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan_memory.compare.allocators import (
    FREE,
    MALLOC,
    CachingAllocator,
    ExpandableAllocator,
    Settings,
    SimulatedOutOfMemory,
    read_settings,
)
from farspan_memory.errors import UnsupportedError
from tests.memory.check_blocks import check_blocks

KIB, MIB = 2**10, 2**20
SIZES = (0, 1, 512, 700 * KIB, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 25 * MIB, 50 * MIB)

Layout = list[tuple[int, int, str]]  # address and size in KiB, state


def layout(allocator: CachingAllocator) -> Layout:
    """Every block in the order of addresses."""
    rows = sorted(allocator.rows(), key=lambda row: row.address)
    return [(row.address // KIB, row.size // KIB, row.state) for row in rows]


def test_large_blocks_are_cut_only_where_more_than_one_mib_is_left() -> None:
    allocator = CachingAllocator()
    allocator.malloc(0, 12 * MIB)
    allocator.free(0)
    allocator.malloc(1, 11 * MIB)  # 1 MiB left: not more
    assert layout(allocator) == [(0, 12 * KIB, "held")]
    allocator.free(1)
    allocator.malloc(2, 11 * MIB - 512)
    assert [row.state for row in allocator.rows()] == ["held", "free"]


def test_a_full_device_gives_back_whole_segments_and_the_request_is_tried_again() -> None:
    allocator = CachingAllocator(capacity=60 * MIB)
    allocator.malloc(0, 30 * MIB)
    allocator.malloc(1, 30 * MIB)
    allocator.free(0)
    allocator.malloc(2, 20 * MIB)  # cuts the first segment
    allocator.free(1)
    allocator.malloc(3, 30 * MIB)  # fits exactly
    assert allocator.retries == 0
    allocator.free(3)
    with pytest.raises(SimulatedOutOfMemory):  # 10 + 30 MiB are free, 30 of them can be given back
        allocator.malloc(4, 32 * MIB)
    assert (allocator.retries, allocator.calls[FREE, 0]) == (1, 1)
    assert allocator.reserved == 30 * MIB
    allocator.malloc(5, 30 * MIB)
    assert allocator.reserved == allocator.reserved_peak == 60 * MIB
    check_blocks(allocator)


def test_beyond_max_split_size_blocks_are_whole() -> None:
    allocator = CachingAllocator(settings=Settings(max_split=64 * MIB))
    allocator.malloc(0, 100 * MIB)
    allocator.free(0)
    allocator.malloc(1, 30 * MIB)  # below: never takes a block from there
    assert allocator.reserved == 130 * MIB
    allocator.malloc(2, 80 * MIB)  # 20 MiB would be unused: not less than the limit
    assert allocator.reserved == 210 * MIB
    allocator.malloc(3, 81 * MIB)  # takes all 100
    assert allocator.reserved == 210 * MIB
    assert layout(allocator)[0] == (0, 100 * KIB, "held")


def test_with_max_split_size_a_full_device_first_gives_back_a_large_block() -> None:
    allocator = CachingAllocator(capacity=200 * MIB, settings=Settings(max_split=64 * MIB))
    allocator.malloc(0, 100 * MIB)
    allocator.malloc(1, 20 * MIB)
    allocator.malloc(2, 70 * MIB)
    for tensor in range(3):
        allocator.free(tensor)
    allocator.malloc(3, 30 * MIB)  # the smallest of at least 64 MiB goes; the rest is kept
    assert allocator.retries == 0
    assert sorted(allocator.segments.values()) == [20 * MIB, 30 * MIB, 100 * MIB]
    allocator.malloc(4, 115 * MIB)  # 100 of the large ones are too few: all that is unused
    assert allocator.retries == 1
    assert sorted(allocator.segments.values()) == [30 * MIB, 116 * MIB]


def test_a_segment_in_use_at_either_end_is_not_given_back() -> None:
    for used, unused in ((0, 1), (1, 0)):
        allocator = CachingAllocator()
        allocator.malloc(0, 10 * MIB - 512)
        allocator.malloc(1, 9 * MIB)
        allocator.free(unused)
        allocator.empty_cache()
        assert allocator.reserved == 20 * MIB
        allocator.free(used)
        allocator.empty_cache()
        assert allocator.reserved == 0


def test_old_segments_are_collected_before_the_device_is_full() -> None:
    """The threshold is 102 of 204 MiB. When the fourth request finds 152 reserved, block 0 has
    seen two searches since it was freed and block 1 one; the average is 1.5: block 0 goes, and
    with it all that was to go."""
    allocator = CachingAllocator(204 * MIB, Settings(collect_at=0.5))
    allocator.malloc(0, 50 * MIB)
    allocator.malloc(1, 50 * MIB)
    allocator.free(0)
    allocator.malloc(2, 52 * MIB)  # finds 100 MiB, not above the threshold
    allocator.free(1)
    assert allocator.calls[FREE, 0] == 0
    allocator.malloc(3, 10 * MIB, stream=1)
    assert [row[0] for row in layout(allocator)] == [50 * KIB, 100 * KIB, 152 * KIB]
    assert (allocator.calls[FREE, 0], allocator.retries) == (1, 0)
    unlimited = CachingAllocator(settings=Settings(collect_at=0.5))
    for tensor, stream in enumerate((0, 1)):
        unlimited.malloc(tensor, 50 * MIB, stream)
        unlimited.free(tensor)
    assert unlimited.reserved == 100 * MIB


def test_age_is_counted_in_searches_of_large_pools_and_the_average_age_goes_too() -> None:
    """Three blocks of 30 MiB, of ages 3, 2 and 1, and 24 MiB too many: the two of at least average
    age go, though one would do, and however many small requests lie between."""
    allocator = CachingAllocator(200 * MIB, Settings(collect_at=0.5))
    for tensor in range(3):
        allocator.malloc(tensor, 30 * MIB)
    allocator.free(0)
    for tensor in range(100, 140):
        allocator.malloc(tensor, 512)
    allocator.malloc(3, 32 * MIB, stream=1)
    allocator.free(1)
    allocator.free(3)
    allocator.malloc(4, 32 * MIB, stream=1)  # found: nothing is collected
    allocator.free(2)
    assert (allocator.reserved, allocator.calls[FREE, 0]) == (124 * MIB, 0)
    allocator.malloc(5, 12 * MIB, stream=2)
    assert {row.address for row in allocator.rows() if row.size == 30 * MIB} == {60 * MIB}
    assert allocator.calls[FREE, 0] == 2


def test_a_block_that_another_stream_uses_comes_back_late() -> None:
    allocator = CachingAllocator(settings=Settings(event_delay=2))
    allocator.malloc(0, 20 * MIB)
    allocator.record_stream(0, 1)
    allocator.free(0)
    assert layout(allocator) == [(0, 20 * KIB, "waiting")]
    allocator.malloc(1, 20 * MIB)
    assert allocator.reserved == 40 * MIB
    allocator.malloc(2, 20 * MIB)  # the second malloc after the free
    assert allocator.reserved == 40 * MIB
    allocator.free(2)
    assert layout(allocator)[0] == (0, 20 * KIB, "free")  # that use is over


def test_its_own_stream_delays_nothing_and_a_full_device_waits_for_the_others() -> None:
    allocator = CachingAllocator(capacity=20 * MIB, settings=Settings(event_delay=100))
    allocator.malloc(0, 20 * MIB, stream=3)
    allocator.record_stream(0, 3)
    allocator.free(0)
    allocator.malloc(1, 20 * MIB, stream=3)
    assert allocator.retries == 0
    allocator.record_stream(1, 4)
    allocator.free(1)
    allocator.malloc(2, 20 * MIB, stream=3)
    assert (allocator.retries, allocator.calls[MALLOC, 0]) == (1, 2)


def test_nothing_is_given_for_no_bytes() -> None:
    allocator = CachingAllocator()
    allocator.malloc(0, 0)
    allocator.record_stream(0, 1)
    allocator.free(0)
    assert (allocator.reserved, list(allocator.rows())) == (0, [])


@pytest.mark.parametrize(
    ("size", "divisions", "expected"),
    [
        (1, 0, 512),
        (513, 0, 1024),
        (1200, 4, 1536),  # at most 4 x 512 bytes: to 512
        (5000, 4, 5120),  # between 4,096 and 8,192 in steps of 1,024
        (4096, 4, 4096),
    ],
)
def test_sizes_are_rounded_as_the_settings_say(size: int, divisions: int, expected: int) -> None:
    assert Settings(divisions=divisions).rounded(size) == expected


def test_settings_are_read_as_pytorch_writes_them() -> None:
    text = "max_split_size_mb:512, garbage_collection_threshold:0.8,roundup_power2_divisions:8"
    assert read_settings(text) == Settings(max_split=512 * MIB, collect_at=0.8, divisions=8)
    assert read_settings("") == Settings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split:512", "expected max_split_size_mb"),
        ("max_split_size_mb:19", "expected at least 20, got 19"),
        ("roundup_power2_divisions:3", "expected a power of two, got 3"),
        ("garbage_collection_threshold:1.0", "expected 0 up to 1, got 1.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(text: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_settings(text)


Program = Sequence[tuple[str, int, int]]  # what, which size or tensor, stream

# Without a least length most programs have five events, and memory never fills.
PROGRAMS = st.lists(
    st.tuples(
        st.sampled_from(("malloc", "malloc", "free", "record", "empty")),
        st.integers(0, 10**6),
        st.integers(0, 1),
    ),
    min_size=25,
    max_size=75,
)
SETTINGS = st.builds(
    Settings,
    max_split=st.sampled_from((Settings().max_split, 24 * MIB)),
    collect_at=st.sampled_from((0.0, 0.5)),
    divisions=st.sampled_from((0, 4)),
    event_delay=st.sampled_from((0, 3)),
)


def run(allocator: CachingAllocator, program: Program) -> None:
    """The program, with the checker after every event."""
    alive: list[int] = []
    for number, (what, choice, stream) in enumerate(program):
        if what == "malloc":
            try:
                allocator.malloc(number, SIZES[choice % len(SIZES)], stream)
            except SimulatedOutOfMemory:
                assert_nothing_to_give(allocator)
            else:
                alive.append(number)
        elif what == "empty":
            allocator.empty_cache()
            assert_nothing_to_give(allocator)
        elif alive:
            place = choice % len(alive)
            if what == "free":
                allocator.free(alive.pop(place))
            else:
                allocator.record_stream(alive[place], stream)
        check_blocks(allocator)
    for tensor in alive:
        allocator.free(tensor)
    allocator.empty_cache()
    check_blocks(allocator)
    assert (allocator.live, allocator.reserved) == (0, 0)


def assert_nothing_to_give(allocator: CachingAllocator) -> None:
    """Nobody waits, and no free block is a whole segment, or has a whole page."""
    for row in allocator.rows():
        assert row.state != "waiting"
        if row.state != "free":
            continue
        if isinstance(allocator, ExpandableAllocator):
            page = allocator.page(allocator.blocks[row.address].pool)
            start, end = row.address - row.segment, row.address + row.size - row.segment
            assert -(-start // page) >= end // page
        else:
            assert row.size < row.segment_size


@given(st.sampled_from((40 * MIB, 150 * MIB, 2**60)), SETTINGS, PROGRAMS)
def test_random_programs_keep_every_block_in_its_place(
    capacity: int, settings: Settings, program: Program
) -> None:
    for kind in (CachingAllocator, ExpandableAllocator):
        run(kind(capacity, settings), program)
