"""Stitching under random programs: bytes through every pointer, all invariants and policies."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farspan_memory.native import Allocator, AllocatorOptions, BackendCall
from tests.native.programs import CAPACITY, CHUNK, OPTIONS, STEPS, Program, Step

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@SLOW
@given(OPTIONS, st.lists(STEPS, max_size=40))
def test_bytes_and_invariants_hold(options: AllocatorOptions, steps: list[Step]) -> None:
    with Allocator(options) as allocator:
        program = Program(allocator)
        program.run(steps)
        program.finish()


@SLOW
@given(
    OPTIONS,
    st.lists(STEPS, min_size=5, max_size=30),
    st.sampled_from(BackendCall),
    st.integers(1, 40),
    st.sampled_from([1, 2, 1000]),
)
def test_a_failing_backend_loses_nothing(
    options: AllocatorOptions, steps: list[Step], call: BackendCall, nth: int, times: int
) -> None:
    with Allocator(options) as allocator:
        program = Program(allocator)
        allocator.fail_at(call, nth, times)
        # Idle memory cannot go back while its streams cannot be waited for.
        program.run([step for step in steps if step[0] != "release"])
        allocator.fail_at(call, 1, 0)
        program.finish()


@SLOW
@given(OPTIONS, st.lists(st.integers(1, 12 * CHUNK), min_size=1, max_size=30))
def test_memory_is_refused_only_when_chunks_are_out(
    options: AllocatorOptions, sizes: list[int]
) -> None:
    """Without fragmentation the count of chunks alone decides (4.2.1 of the paper); the pool for
    small requests has chunks of its own."""
    with Allocator(options) as allocator:
        program = Program(allocator)
        used = 0
        for i, size in enumerate(sizes):
            chunks = -(-size // CHUNK)
            before = program.refused
            program.malloc(chunks * CHUNK)
            assert (program.refused > before) == (used + chunks > CAPACITY // CHUNK)
            used += chunks if program.refused == before else 0
            if i % 3 == 2 and program.live:
                used -= program.live[size % len(program.live)].size // CHUNK
                program.free(size)
