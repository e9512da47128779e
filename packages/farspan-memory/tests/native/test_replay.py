"""Replay of a plan made from a recording: exact where the program is, safe where it is not."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from farspan_memory.native import (
    Allocator,
    AllocatorOptions,
    Backend,
    EventKind,
    NativeEvent,
    PlanRow,
)
from farspan_memory.placement import PlacementRequest, place_greedily
from tests.native.programs import CHUNK, Program

OPTIONS = AllocatorOptions(backend=Backend.POSIX, capacity=64 * CHUNK, chunk=CHUNK)
# A request, and after how many further requests it is freed.
PROGRAMS = st.lists(
    st.tuples(st.integers(1, 2 * CHUNK), st.integers(0, 9), st.integers(0, 1)),
    min_size=4,
    max_size=40,
)

Requests = list[tuple[int, int, int]]


def iterate(program: Program, requests: Requests, check: bool = True) -> None:
    """One iteration: it frees all that it makes."""
    ends: dict[int, list[int]] = {}
    for i, (size, life, stream) in enumerate(requests):
        program.malloc(size, stream)
        assert program.refused == 0
        ends.setdefault(i + life, []).append(program.live[-1].pointer)
        for pointer in ends.pop(i, []):
            program.free([t.pointer for t in program.live].index(pointer))
        if check:
            program.allocator.check()
    while program.live:
        program.free(0)


def planned(events: list[NativeEvent]) -> tuple[list[PlanRow], int]:
    """First fit over the recording; streams share bytes, in order."""
    born = {e.id: (t, e) for t, e in enumerate(events) if e.kind is EventKind.MALLOC}
    dies = {e.id: t for t, e in enumerate(events) if e.kind is EventKind.FREE}
    requests = [
        PlacementRequest(-(-e.size // 512) * 512, t, dies[id]) for id, (t, e) in born.items()
    ]
    placement = place_greedily(requests)
    rows = zip((e for _, e in born.values()), placement.addresses, strict=True)
    return [PlanRow(e.size, e.stream, address) for e, address in rows], placement.height


def recorded(requests: Requests) -> tuple[list[PlanRow], int]:
    with Allocator(OPTIONS) as allocator:
        allocator.record()
        iterate(Program(allocator), requests, check=False)
        return planned(list(allocator.events()))


@settings(deadline=None)
@given(PROGRAMS)
def test_the_same_program_is_served_whole(requests: Requests) -> None:
    rows, arena = recorded(requests)
    with Allocator(OPTIONS) as allocator:
        allocator.plan(rows, arena)
        program = Program(allocator)
        for _ in range(3):
            allocator.begin_iteration()
            iterate(program, requests)
        now = allocator.statistics()
        assert (now.replay_hits, now.replay_misses) == (3 * len(requests), 0)
        assert now.reserved == -(-arena // CHUNK) * CHUNK


@settings(deadline=None)
@given(PROGRAMS, st.randoms(use_true_random=False), st.integers(1, 30))
def test_a_program_that_deviates_keeps_its_bytes(
    requests: Requests, chance: random.Random, misses: int
) -> None:
    rows, arena = recorded(requests)
    options = AllocatorOptions(
        backend=Backend.POSIX, capacity=64 * CHUNK, chunk=CHUNK, replay_misses=misses
    )
    with Allocator(options) as allocator:
        allocator.plan(rows, arena)
        program = Program(allocator)
        for _ in range(3):
            allocator.begin_iteration()
            other: Requests = []
            for size, life, stream in requests:
                what = chance.random()
                if what < 0.1:
                    other.append((chance.randrange(1, CHUNK), life, stream))
                if what < 0.2:
                    other.append((size, life + chance.randrange(9), stream))
                elif what < 0.9:
                    other.append((size, life, stream))
            iterate(program, other)
        now = allocator.statistics()
        assert now.replay_hits + now.replay_misses <= now.mallocs
        # The iteration after is in step again.
        allocator.begin_iteration()
        iterate(program, requests)
        assert allocator.statistics().replay_hits == now.replay_hits + len(requests)
