"""One trace through several allocators: what is counted, and which capacity is the least."""

from contextlib import AbstractContextManager, nullcontext
from random import Random

import pytest

from farspan_memory.compare.allocators import (
    ACCESS,
    CREATE,
    MAP,
    CachingAllocator,
    SimulatedOutOfMemory,
)
from farspan_memory.compare.compare import (
    CACHING,
    EXPANDABLE,
    PLAN,
    PUBLISHED,
    STITCH_SECONDS,
    STITCHING,
    Contender,
    DriverCost,
    Served,
    compare,
    contend,
    contenders,
    driver_seconds,
    least,
    live_curve,
    run,
    steps_of,
)
from farspan_memory.native import Allocator, AllocatorOptions, NativeError
from farspan_memory.placement import live_peak
from farspan_memory.trace import Event, FreeEvent, Malloc, Mark, Trace

MIB = 2**20
MODELS = contenders(())


@pytest.fixture
def native() -> None:
    """Skips where the native library is not built; its own tests fail there."""
    try:
        Allocator(AllocatorOptions()).close()
    except NativeError as error:
        pytest.skip(str(error))


def growing(rounds: int = 6, size: int = 100 * MIB, more: int = 10 * MIB) -> Trace:
    """A tensor that is a little larger each time, beside one that stays: segments of cudaMalloc
    serve none of the later ones, pages all of them."""
    events: list[Event] = [Malloc(0, 30 * MIB)]
    for number in range(1, rounds + 1):
        events += [Mark(f"step {number}"), Malloc(number, size + number * more), FreeEvent(number)]
    return Trace((*events, FreeEvent(0)), "growing")


def test_live_bytes_are_the_traces_own() -> None:
    trace = growing()
    steps = steps_of(trace)
    assert len(steps) == len([event for event in trace.events if not isinstance(event, Mark)])
    assert max(live_curve(steps)) == trace.live_peak() == live_peak(trace.requests())
    assert live_curve([]) == ()


def test_without_a_limit_nothing_is_given_back() -> None:
    found = compare(growing(), MODELS)
    caching, expandable = (found.least_of(kind) for kind in (CACHING, EXPANDABLE))
    assert caching is not None
    assert expandable is not None
    assert caching.unlimited.reserved_peak == (30 + sum(range(110, 161, 10))) * MIB
    assert caching.unlimited.calls == {"cudaMalloc": 7}
    # 30 + 160 MiB in pages of 20: the rest of the second page serves the larger tensor.
    assert expandable.unlimited.reserved_peak == 200 * MIB
    assert expandable.unlimited.calls[MAP] == 10
    assert expandable.unlimited.retries == caching.unlimited.retries == 0
    assert caching.fragmentation(found.live_peak) == 1 - 190 / 840
    assert [result.modelled for result in found.results] == [True, True, False]


def test_the_least_capacity_completes_and_one_step_less_does_not() -> None:
    trace = growing()
    found = compare(trace, MODELS, step=MIB)
    for rival, result in zip(MODELS, found.results, strict=False):
        assert result.smallest.completed
        capacity = result.smallest.capacity
        assert capacity is not None
        assert run(rival, steps_of(trace), capacity) == result.smallest
        assert not run(rival, steps_of(trace), capacity - MIB).completed
    # Each tensor gives its segment back for the next: five retries, and none for the first.
    assert found.results[0].smallest.capacity == 190 * MIB
    assert found.results[0].smallest.retries == 5
    assert found.results[0].smallest.calls == {"cudaMalloc": 7, "cudaFree": 5}
    assert found.results[1].smallest.capacity == 200 * MIB


def test_a_static_plan_needs_what_is_alive_and_searches_nothing() -> None:
    found = compare(growing(), MODELS, capacity=189 * MIB)
    plan = found.results[-1]
    assert (plan.name, plan.smallest.capacity, plan.proved) == (PLAN, 190 * MIB, True)
    assert plan.fragmentation(found.live_peak) == 0.0
    assert plan.smallest.calls[MAP] == 6  # handles of 32 MiB
    assert plan.given is not None
    assert not plan.given.completed


def test_the_capacity_asked_about_is_one_more_run() -> None:
    found = compare(growing(), MODELS, capacity=500 * MIB)
    given = [result.given for result in found.results]
    assert all(run is not None and run.completed for run in given)
    assert [run.retries for run in given if run] == [1, 0, 0]
    too_small = compare(growing(), MODELS, capacity=100 * MIB)
    for result in too_small.results:
        assert result.given is not None
        assert not result.given.completed
        assert result.given.reserved_peak <= 100 * MIB or result.name == PLAN


class Stubborn(CachingAllocator):
    """Completes only from a capacity on that has nothing to do with what it reserves."""

    def __init__(self, capacity: int, needs: int) -> None:
        super().__init__()
        self.enough = capacity >= needs

    def malloc(self, tensor: int, size: int, stream: int = 0) -> None:
        if not self.enough:
            raise SimulatedOutOfMemory
        super().malloc(tensor, size, stream)


@pytest.mark.parametrize("needs", [1, 5, 6, 7, 8, 9, 100])
def test_the_search_goes_beyond_where_it_was_told_to_end(needs: int) -> None:
    made: list[int] = []

    def make(capacity: int) -> AbstractContextManager[Served]:
        made.append(capacity)
        return nullcontext(Stubborn(capacity, needs * MIB))

    found = least(Contender("stubborn", True, make), [(0, 1, 0)], 5, 8, MIB)
    assert found.capacity == max(5, needs) * MIB
    assert len(made) == len(set(made))


@pytest.mark.usefixtures("native")
def test_stitching_is_the_native_code_and_fills_its_memory() -> None:
    """The least capacity is the live peak in whole chunks."""
    found = compare(growing(), contenders((2 * MIB, 8 * MIB)), step=2 * MIB)
    names = [result.name for result in found.results]
    assert names == [
        CACHING,
        EXPANDABLE,
        f"{STITCHING}, 2 MiB",
        f"{STITCHING}, 8 MiB",
        PLAN,
    ]
    fine, coarse = found.results[2:4]
    assert (fine.modelled, fine.smallest.capacity) == (False, 190 * MIB)
    assert fine.smallest.reserved_peak == 190 * MIB
    # As it is installed: without a limit each tensor has new memory, and nothing is stitched.
    assert fine.unlimited.reserved_peak == (30 + sum(range(110, 161, 10))) * MIB
    assert fine.unlimited.calls[CREATE] == fine.unlimited.calls[MAP] == 420
    assert fine.smallest.calls[MAP] == fine.smallest.calls[ACCESS]
    assert coarse.smallest.capacity is not None
    assert coarse.smallest.capacity <= (32 + 160) * MIB
    assert found.expandable_as_good() is False  # 200 MiB against 190


def uneven(rounds: int = 400) -> Trace:
    """Tensors of farspan's own cells, 49 to 259 MiB, which chunks of 32 MiB fill badly: rounded up
    to whole ones they take 1.18 of what is alive."""
    random = Random(1)
    alive: list[tuple[int, int]] = []
    events: list[Event] = []
    for number in range(rounds):
        size = random.choice((259 * MIB, 49 * MIB, 129 * MIB + MIB // 2))
        while sum(other for _, other in alive) + size > 8192 * MIB:
            tensor, _ = alive.pop(random.randrange(len(alive)))
            events.append(FreeEvent(tensor))
        events.append(Malloc(number, size))
        alive.append((number, size))
    return Trace(tuple(events), "uneven")


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(("chunk", "most"), [(2 * MIB, 1.01), (32 * MIB, 1.04)])
def test_stitching_needs_little_more_than_what_is_alive(chunk: int, most: float) -> None:
    (rival,) = contenders((chunk,))[2:]
    steps = steps_of(uneven())
    peak = max(live_curve(steps))
    found = contend(rival, steps, peak, None, step=2 * MIB)
    assert found.smallest.capacity is not None
    assert found.smallest.capacity <= most * peak
    assert found.smallest.reserved_peak <= most * peak


def test_costs_are_those_of_the_table_and_of_the_run() -> None:
    """256 handles of 2 MiB mapped and made accessible take what they took."""
    size = 2 * MIB
    taken = driver_seconds({(MAP, size): 256, (ACCESS, size): 256})
    assert abs(taken - STITCH_SECONDS) < 1e-12
    # 2 GiB of handles of 128 MiB: 8.2 units for access against 96.8.
    fine, coarse = (PUBLISHED[ACCESS].seconds(bytes_) for bytes_ in (size, 128 * MIB))
    assert abs(16 * coarse / (1024 * fine) - 8.2 / 96.8) < 1e-12


def test_between_two_measured_sizes_a_cost_is_a_power_of_the_size() -> None:
    cost = DriverCost(((2, 1.0), (32, 4.0)), "")
    assert [cost.seconds(size) for size in (1, 2, 8, 32, 99)] == [1.0, 1.0, 2.0, 4.0, 4.0]
