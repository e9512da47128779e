"""Comparison of allocators on one trace: PyTorch's caching allocator and its expandable segments
(both modelled), the native allocator's stitching, and a static plan. It counts reserved memory, the
least memory that suffices for the trace, and driver calls.

Costs of the driver's calls are published: GMLake's Table 1 gives each in units of one cuMalloc of 2
GiB, for 2 GiB made of handles of 2, 128 and 1,024 MiB. The unit in seconds comes from a run of its
release: a stitch of 256 handles of 2 MiB, mapped and made accessible, took 20.435 ms, and the table
has 0.70 + 96.8 units for 1,024.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Protocol

from farspan_memory import native
from farspan_memory.compare.allocators import (
    ACCESS,
    CREATE,
    FREE,
    MALLOC,
    MAP,
    RELEASE,
    RESERVE,
    UNMAP,
    VACATE,
    CachingAllocator,
    ExpandableAllocator,
    Settings,
    SimulatedOutOfMemory,
)
from farspan_memory.exact import place_exactly
from farspan_memory.formatting import MIB, UNLIMITED
from farspan_memory.placement import sweep_placement
from farspan_memory.replay import rounded
from farspan_memory.trace import FreeEvent, Malloc, Mark, Trace

# -- costs of driver calls --------------------------------------------------------------------

STITCH_SECONDS, STITCHED = 20.435e-3, 256
UNIT = STITCH_SECONDS / STITCHED * 1024 / (0.70 + 96.8)  # seconds of a cuMalloc of 2 GiB: 0.84 ms

TABLE = "GMLake, Table 1"
RUN = "antgroup/glake issue 22"
ASSUMED = "assumed"

Calls = Mapping[tuple[str, int], int]  # call and bytes of its handle, 0 for any: number of calls


@dataclass(frozen=True, slots=True)
class DriverCost:
    """Seconds of one driver call by the size of its handle: a table, interpolated by power laws."""

    points: tuple[tuple[int, float], ...]  # bytes of a handle, ascending, and seconds
    source: str

    def seconds(self, size: int) -> float:
        """Return the seconds of a call for a handle of `size` bytes; constant beyond the table."""
        if size <= self.points[0][0]:
            return self.points[0][1]
        for (low, before), (high, after) in pairwise(self.points):
            if size <= high:
                part = math.log(size / low) / math.log(high / low)
                return before * math.pow(after / before, part)
        return self.points[-1][1]


def _call_seconds(*units: float) -> tuple[tuple[int, float], ...]:
    """Return (bytes of a handle, seconds of one call) for three sizes of handles. Each of `units`
    is the published time of the calls for 2 GiB, in units of one cuMalloc of 2 GiB."""
    sizes = (2 * MIB, 128 * MIB, 1024 * MIB)
    return tuple(
        (size, UNIT * unit * size / (2048 * MIB)) for size, unit in zip(sizes, units, strict=True)
    )


# One cuMemSetAccess may cover many handles; its cost is not published, and a comment in PyTorch
# says that such changes take time in proportion to the handles. So each handle is charged one call.
PUBLISHED: Mapping[str, DriverCost] = {
    MALLOC: DriverCost(((0, UNIT),), f"{TABLE}, for 2 GiB, at any size; the unit from {RUN}"),
    FREE: DriverCost(((0, UNIT),), f"{ASSUMED} as cudaMalloc; it also waits for the device"),
    RESERVE: DriverCost(((0, 0.003 * UNIT),), TABLE),
    CREATE: DriverCost(_call_seconds(18.1, 0.89, 0.79), TABLE),
    MAP: DriverCost(_call_seconds(0.70, 0.01, 0.002), TABLE),
    ACCESS: DriverCost(_call_seconds(96.8, 8.2, 0.7), f"{TABLE}, for each handle"),
    UNMAP: DriverCost(_call_seconds(0.70, 0.01, 0.002), f"{ASSUMED} as cuMemMap"),
    RELEASE: DriverCost(_call_seconds(18.1, 0.89, 0.79), f"{ASSUMED} as cuMemCreate"),
    VACATE: DriverCost(((0, 0.003 * UNIT),), f"{ASSUMED} as cuMemAddressReserve"),
}


def driver_seconds(calls: Calls, costs: Mapping[str, DriverCost] = PUBLISHED) -> float:
    """Return the seconds that driver calls take in total, without waits for the device."""
    return sum(count * costs[call].seconds(size) for (call, size), count in calls.items())


# -- allocators --------------------------------------------------------------------------------

CHUNKS = (2 * MIB, 32 * MIB)  # of stitching: the paper's, and one for long contexts
TAIL = 2 * MIB  # bytes of a block that fills no whole chunk; the default of native.Options

CACHING, EXPANDABLE, STITCHING = "caching allocator", "expandable segments", "stitching"


class Served(Protocol):
    """Interface of an allocator that serves a trace. malloc raises SimulatedOutOfMemory."""

    @property
    def reserved(self) -> int: ...
    @property
    def reserved_peak(self) -> int: ...
    @property
    def retries(self) -> int: ...
    @property
    def calls(self) -> Mapping[tuple[str, int], int]: ...

    def malloc(self, tensor: int, size: int, stream: int = 0, /) -> None: ...
    def free(self, tensor: int, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Contender:
    """An allocator to compare; `make` creates one with a capacity in bytes."""

    name: str
    modelled: bool  # a model, not the allocator's own code
    make: Callable[[int], AbstractContextManager[Served]]


class Stitching:
    """The native allocator with the settings of install() and its null backend, which runs all the
    code but maps no memory."""

    def __init__(self, capacity: int, chunk: int) -> None:
        self._chunk = chunk
        self._allocator = native.Allocator(
            native.AllocatorOptions(capacity=capacity if capacity < UNLIMITED else 0, chunk=chunk)
        )
        self._pointers: dict[int, int] = {}

    def malloc(self, tensor: int, size: int, stream: int = 0) -> None:
        try:
            self._pointers[tensor] = self._allocator.malloc(size, stream)
        except native.NativeOutOfMemory:
            raise SimulatedOutOfMemory from None

    def free(self, tensor: int) -> None:
        pointer = self._pointers.pop(tensor)
        if pointer:
            self._allocator.free(pointer)

    @property
    def reserved(self) -> int:
        return self._allocator.statistics().reserved

    @property
    def reserved_peak(self) -> int:
        return self._allocator.statistics().reserved_peak

    @property
    def retries(self) -> int:
        return self._allocator.statistics().retries

    @property
    def calls(self) -> Mapping[tuple[str, int], int]:
        counters = self._allocator.statistics()
        whole = {
            (RESERVE, 0): counters.reserves,
            (VACATE, 0): counters.range_frees,
            (CREATE, self._chunk): counters.creates - counters.tail_creates,
            (MAP, self._chunk): counters.maps - counters.tail_maps,
            (ACCESS, self._chunk): counters.maps - counters.tail_maps,
            (UNMAP, self._chunk): counters.unmaps,
            (RELEASE, self._chunk): counters.destroys - counters.tail_destroys,
        }
        if counters.tail_creates == 0:
            return whole
        tails = {
            (CREATE, TAIL): counters.tail_creates,
            (MAP, TAIL): counters.tail_maps,
            (ACCESS, TAIL): counters.tail_maps,
            (RELEASE, TAIL): counters.tail_destroys,
        }
        return whole | tails

    def close(self) -> None:
        self._allocator.close()


def contenders(
    chunks: Sequence[int] = CHUNKS, settings: Settings | None = None
) -> tuple[Contender, ...]:
    """Return all allocators that can serve a trace event by event; `settings` are for PyTorch's."""

    def stitching(chunk: int) -> Contender:
        name = f"{STITCHING}, {chunk / MIB:g} MiB"
        return Contender(name, False, lambda capacity: closing(Stitching(capacity, chunk)))

    return (
        Contender(CACHING, True, lambda c: nullcontext(CachingAllocator(c, settings))),
        Contender(EXPANDABLE, True, lambda c: nullcontext(ExpandableAllocator(c, settings))),
        *(stitching(chunk) for chunk in chunks),
    )


# -- comparison ---------------------------------------------------------------------------------


STEP, LEAST_STEP = 32 * MIB, 2 * MIB  # precision of the least capacity
FINE = 1000  # steps in a small live peak
ARENA_CHUNK = 32 * MIB  # handles of a plan's arena
ALIGNMENT = 512  # of a plan's addresses, as PyTorch's
PLAN_SECONDS = 20.0  # most seconds to search for a plan
SAMPLES = 1000  # points of a curve
AS_GOOD = 0.01  # share of the live peak that counts as equal
FREED = -1  # stands for the size in the step of a free

PLAN = "static plan"

Step = tuple[int, int, int]  # tensor, size or FREED, stream


@dataclass(frozen=True, slots=True)
class AllocatorRun:
    """Result of serving a trace by one allocator with one capacity."""

    capacity: int | None  # bytes; None without a limit
    completed: bool
    reserved_peak: int  # bytes
    retries: int  # times that all unused memory was released, after waiting for the device
    calls: Mapping[str, int]  # of the driver; one cuMemSetAccess for each handle made accessible
    seconds: float  # cost of the calls by PUBLISHED
    curve: tuple[int, ...]  # reserved bytes after each sample of the events


@dataclass(frozen=True, slots=True)
class AllocatorResult:
    """Results of one allocator on a trace, with several capacities."""

    name: str
    modelled: bool
    unlimited: AllocatorRun  # on a device that is never full
    smallest: AllocatorRun  # with the least capacity found
    given: AllocatorRun | None  # with the requested capacity
    proved: bool = False  # whether no allocator needs less, up to rounding

    def fragmentation(self, live: int) -> float:
        """Return 1 - live peak / reserved peak for the run without a limit on memory."""
        reserved = self.unlimited.reserved_peak
        return 1 - live / reserved if reserved else 0.0


@dataclass(frozen=True, slots=True)
class AllocatorComparison:
    """Results of all allocators on one trace."""

    trace: str
    events: int
    live_peak: int  # bytes, before rounding
    live: tuple[int, ...]  # most bytes alive in each sample
    marks: tuple[tuple[float, str], ...]  # position in the trace, 0 to 1, and name
    step: int  # bytes; precision of the least capacity
    results: tuple[AllocatorResult, ...]

    def least_of(self, kind: str) -> AllocatorResult | None:
        """Return the result of the allocator of this kind that needs the least memory."""
        results = [result for result in self.results if result.name.startswith(kind)]
        return min(results, key=lambda result: result.smallest.capacity or 0, default=None)

    def expandable_as_good(self) -> bool | None:
        """Return whether expandable segments need at most AS_GOOD of the live peak more memory than
        stitching; None unless both were compared."""
        expandable, stitching = self.least_of(EXPANDABLE), self.least_of(STITCHING)
        if expandable is None or stitching is None:
            return None
        more = (expandable.smallest.capacity or 0) - (stitching.smallest.capacity or 0)
        return more <= AS_GOOD * self.live_peak

    def to_json(self) -> dict[str, Any]:
        """Return all results as JSON, without the curves."""
        return {
            "trace": self.trace,
            "events": self.events,
            "live_peak": self.live_peak,
            "step": self.step,
            "allocators": [self._result_json(result) for result in self.results],
            "expandable_as_good": self.expandable_as_good(),
        }

    def _result_json(self, result: AllocatorResult) -> dict[str, Any]:
        runs = {
            name: None if run is None else {k: v for k, v in asdict(run).items() if k != "curve"}
            for name, run in (
                ("unlimited", result.unlimited),
                ("smallest", result.smallest),
                ("given", result.given),
            )
        }
        return {
            "name": result.name,
            "modelled": result.modelled,
            "proved": result.proved,
            "reserved_peak": result.unlimited.reserved_peak,
            "fragmentation": result.fragmentation(self.live_peak),
            "smallest_capacity": result.smallest.capacity,
            **runs,
        }


def compare(
    trace: Trace,
    rivals: Sequence[Contender],
    capacity: int | None = None,
    step: int | None = None,
) -> AllocatorComparison:
    """Serve the trace by each allocator and by a static plan: without a limit, with the least
    capacity (to within `step` bytes), and with `capacity` if given."""
    steps = steps_of(trace)
    live = live_curve(steps)
    peak = max(live, default=0)
    step = step or min(STEP, max(LEAST_STEP, peak // FINE // LEAST_STEP * LEAST_STEP))
    results = [contend(rival, steps, peak, capacity, step) for rival in rivals]
    events = len(steps)
    return AllocatorComparison(
        trace=trace.name,
        events=events,
        live_peak=peak,
        live=live,
        marks=marks_of(trace, events),
        step=step,
        results=(*results, planned(trace, len(live), capacity)),
    )


def steps_of(trace: Trace) -> list[Step]:
    """Return the mallocs and frees of a trace as tuples, for fast replay."""
    steps: list[Step] = []
    for event in trace.events:
        if isinstance(event, Malloc):
            steps.append((event.tensor, event.size, event.stream))
        elif isinstance(event, FreeEvent):
            steps.append((event.tensor, FREED, 0))
    return steps


def marks_of(trace: Trace, events: int) -> tuple[tuple[float, str], ...]:
    """Return a trace's marks as (position, name); a position is the share of events before it."""
    positions, before = [], 0
    for event in trace.events:
        if isinstance(event, Mark):
            positions.append((before / max(1, events), event.name))
        else:
            before += 1
    return tuple(positions)


def stride(steps: Sequence[Step]) -> int:
    """Return the number of events per sample of a curve."""
    return max(1, -(-len(steps) // SAMPLES))


def live_curve(steps: Sequence[Step]) -> tuple[int, ...]:
    """Return the most live bytes within each sample (group of consecutive events)."""
    sizes: dict[int, int] = {}
    live, every, curve = 0, stride(steps), []
    for start in range(0, len(steps), every):
        most = live
        for tensor, size, _ in steps[start : start + every]:
            if size == FREED:
                live -= sizes.pop(tensor)
            else:
                sizes[tensor] = size
                live += size
                most = max(most, live)
        curve.append(most)
    return tuple(curve)


def contend(
    rival: Contender, steps: Sequence[Step], peak: int, capacity: int | None, step: int
) -> AllocatorResult:
    """Serve a trace without a limit, with the least capacity, and with `capacity` unless None."""
    unlimited = run(rival, steps, None)
    low = -(-peak // step)
    high = max(low, -(-unlimited.reserved_peak // step))
    smallest = least(rival, steps, low, high, step)
    given = None if capacity is None else run(rival, steps, capacity)
    return AllocatorResult(rival.name, rival.modelled, unlimited, smallest, given)


def run(rival: Contender, steps: Sequence[Step], capacity: int | None) -> AllocatorRun:
    """Serve the trace by one allocator with one capacity, to the end or until memory runs out."""
    with rival.make(UNLIMITED if capacity is None else capacity) as served:
        curve, completed = serve(served, steps)
        calls = {key: count for key, count in served.calls.items() if count}
        by_name: Counter[str] = Counter()
        for (call, _), count in calls.items():
            by_name[call] += count
        return AllocatorRun(
            capacity=capacity,
            completed=completed,
            reserved_peak=served.reserved_peak,
            retries=served.retries,
            calls=dict(by_name),
            seconds=driver_seconds(calls),
            curve=tuple(curve),
        )


def serve(served: Served, steps: Sequence[Step]) -> tuple[list[int], bool]:
    """Serve the events. Return the reserved bytes after each sample, and whether all succeeded."""
    malloc, free, every = served.malloc, served.free, stride(steps)
    curve: list[int] = []
    try:
        for start in range(0, len(steps), every):
            for tensor, size, stream in steps[start : start + every]:
                if size == FREED:
                    free(tensor)
                else:
                    malloc(tensor, size, stream)
            curve.append(served.reserved)
    except SimulatedOutOfMemory:
        return curve, False
    return curve, True


def least(rival: Contender, steps: Sequence[Step], low: int, high: int, step: int) -> AllocatorRun:
    """Return a run that completes while one with `step` bytes less does not. The search goes from
    `low` to `high` steps of capacity, and beyond if necessary. An even smaller capacity might
    complete, because allocators release memory when it runs out."""
    best = run(rival, steps, high * step)
    while not best.completed:
        low, high = high + 1, 2 * high
        best = run(rival, steps, high * step)
    while low < high:
        middle = (low + high) // 2
        tried = run(rival, steps, middle * step)
        if tried.completed:
            best, high = tried, middle
        else:
            low = middle + 1
    return best


def planned(trace: Trace, samples: int, capacity: int | None) -> AllocatorResult:
    """Return the result of a static plan: one arena, mapped once, without a search for blocks."""
    requests = rounded(trace.requests(), ALIGNMENT)
    solution = place_exactly(requests, PLAN_SECONDS)
    sweep_placement(requests, solution.placement)
    height = solution.placement.height
    handles = -(-height // ARENA_CHUNK)
    calls = {(RESERVE, 0): 1} | {(call, ARENA_CHUNK): handles for call in (CREATE, MAP, ACCESS)}
    by_name = {call: count for (call, _), count in calls.items()}

    def arena(limit: int | None) -> AllocatorRun:
        fits = limit is None or height <= limit
        return AllocatorRun(
            limit, fits, height, 0, by_name, driver_seconds(calls), (height,) * samples
        )

    given = None if capacity is None else arena(capacity)
    return AllocatorResult(PLAN, False, arena(None), arena(height), given, solution.optimal)
