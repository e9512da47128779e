"""Plans made from recorded iterations: addresses for tensors of later iterations; plan files.

    iteration   begins                                      ends
    transient     |------|   |-----|  |-----------|          |    gets an address in the arena
    kept          |          |-------------------------------|--> expected, and served elsewhere
    older    -----|--------------|                           |    no request of this iteration

A file is JSON, for one program only:

    {"format": "farspan memory plan", "version": 1, "program": "sha256...", "alignment": 512,
     "peak": ..., "lower_bound": ..., "optimal": ..., "method": ..., "tensors": [[size, stream,
     address], ...]}

One entry of `tensors` per malloc, in the order of the program. `program` digests sizes, streams and
the order of births and deaths: a plan is valid for a program with the same requests, whatever the
names of its tensors.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from farspan_memory.errors import UnsupportedError
from farspan_memory.exact import place_exactly
from farspan_memory.files import write_output
from farspan_memory.native import UNPLANNED, EventKind, NativeEvent, PlanRow
from farspan_memory.placement import (
    Placement,
    PlacementError,
    PlacementRequest,
    live_peak,
    sweep_placement,
)
from farspan_memory.trace import LAST_STREAM, FreeEvent, Malloc, Mark, Trace, read_trace
from farspan_memory.trace import Event as TraceEvent

FORMAT, VERSION = "farspan memory plan", 1
MOST = 2**63 - 1  # most bytes that the native allocator can count


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """Content of a plan file: an address for each malloc of a program."""

    program: str  # digest of the trace
    alignment: int  # bytes; addresses and sizes are multiples
    peak: int  # bytes of the arena
    lower_bound: int  # most bytes alive at one time, sizes rounded up
    optimal: bool
    method: str
    tensors: tuple[PlanRow, ...]


def digest(trace: Trace) -> str:
    """Return a digest of a trace's mallocs and frees, which ignores names of tensors and marks."""
    sha = hashlib.sha256()
    numbers: dict[int, int] = {}
    mallocs = 0
    for event in trace.events:
        if isinstance(event, Mark):
            continue
        if isinstance(event, Malloc):
            numbers[event.tensor] = mallocs
            mallocs += 1
            sha.update(b"m%d %d\n" % (event.size, event.stream))
        else:
            sha.update(b"f%d\n" % numbers[event.tensor])
    return sha.hexdigest()


def rounded(requests: Sequence[PlacementRequest], alignment: int) -> tuple[PlacementRequest, ...]:
    """Return requests with sizes rounded up to the alignment, so that gapless plans are aligned."""
    return tuple(replace(r, size=-(-r.size // alignment) * alignment) for r in requests)


def make_plan(
    trace: Trace, placement: Placement, alignment: int, optimal: bool, method: str
) -> PlacementPlan:
    """Return a plan with the addresses that a placement gives the trace's rounded requests."""
    mallocs = [event for event in trace.events if isinstance(event, Malloc)]
    rows = tuple(
        PlanRow(malloc.size, malloc.stream, address)
        for malloc, address in zip(mallocs, placement.addresses, strict=True)
    )
    height, bound = placement.height, placement.lower_bound
    return PlacementPlan(digest(trace), alignment, height, bound, optimal, method, rows)


def write_plan(plan: PlacementPlan, path: Path) -> None:
    """Write a plan file. Raises UnsupportedError if it cannot be written."""
    content = {"format": FORMAT, "version": VERSION} | asdict(plan)
    write_output(path, json.dumps(content) + "\n", "output")


def read_plan(path: Path, trace: Trace) -> PlacementPlan:
    """Read a plan file and check that it fits the trace.

    That a plan above the lower bound is optimal took a search to prove, and is believed unless no
    tensor lies at address 0. Raises UnsupportedError for a file that is not a plan, a plan of
    another version or another program, and an inconsistent one.
    """
    plan = _parse(path)
    if plan.program != digest(trace):
        raise UnsupportedError(
            f"{path}: the plan belongs to another program: it has {len(plan.tensors)} tensors and "
            f"digest {plan.program[:12]}, but the trace {trace.name or 'given'} has "
            f"{len(trace.requests())} and {digest(trace)[:12]}; place the trace again"
        )
    try:
        _check(plan, trace)
    except PlacementError as error:
        raise UnsupportedError(f"{path}: the plan is damaged: {error}") from error
    return plan


def _check(plan: PlacementPlan, trace: Trace) -> None:
    """Raise PlacementError if a plan's rows differ from the trace or are not aligned, if tensors
    overlap, or if the peak or the lower bound is wrong."""
    requests = rounded(trace.requests(), plan.alignment)
    addresses = tuple(row.address for row in plan.tensors)
    sweep_placement(requests, Placement(addresses, plan.peak, plan.lower_bound))
    if plan.optimal and min(addresses, default=0) > 0:
        raise PlacementError(
            f"the plan is marked optimal, but no tensor lies below {min(addresses)}"
        )
    mallocs = (event for event in trace.events if isinstance(event, Malloc))
    for number, (row, malloc) in enumerate(zip(plan.tensors, mallocs, strict=True)):
        if (row.size, row.stream) != (malloc.size, malloc.stream):
            raise PlacementError(
                f"tensor {number} has {row.size} bytes on stream {row.stream}, but the trace has "
                f"{malloc.size} on {malloc.stream}"
            )
        if row.address % plan.alignment:
            raise PlacementError(
                f"tensor {number} is at {row.address}, not a multiple of {plan.alignment}"
            )


def _parse(path: Path) -> PlacementPlan:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnsupportedError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UnsupportedError(f"{path}: not a plan: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UnsupportedError(f"{path}: not a plan: expected the format {FORMAT!r}")
    if content.get("version") != VERSION:
        raise UnsupportedError(
            f"{path}: the plan has version {content.get('version')!r}, expected "
            f"{VERSION}; place the trace again"
        )
    try:
        return _plan_of(content)
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedError(f"{path}: the plan is damaged: {error!r}") from error


def _plan_of(content: dict[str, Any]) -> PlacementPlan:
    rows = tuple(
        PlanRow(_count(size), _count(stream, LAST_STREAM), _count(address))
        for size, stream, address in content["tensors"]
    )
    numbers = (_count(content[name]) for name in ("alignment", "peak", "lower_bound"))
    alignment, peak, lower_bound = numbers
    if alignment < 1:
        raise ValueError(f"alignment {alignment}")
    if not isinstance(content["optimal"], bool):
        raise TypeError(f"optimal {content['optimal']!r}")
    program, method = str(content["program"]), str(content["method"])
    return PlacementPlan(program, alignment, peak, lower_bound, content["optimal"], method, rows)


def _count(value: Any, most: int = MOST) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"expected a count, got {value!r}")
    if value > most:
        raise ValueError(f"expected at most {most}, got {value}")
    return value


# -- replay -------------------------------------------------------------------------------------


UNIT = 512  # bytes; the native allocator rounds requests up to a multiple
BEGIN = "iteration"
# Seconds of a search while a program waits; whole steps of large models take less than one.
SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Plan of one iteration: its mallocs in order, each with an address or UNPLANNED. Mallocs of 0
    bytes are left out, because the allocator never sees them.

    Raises UnsupportedError for a place outside the arena or not aligned.
    """

    rows: tuple[PlanRow, ...]
    arena: int  # bytes
    lower_bound: int  # most bytes of planned tensors alive at one time

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            beyond = row.address + _rounded(row.size) > self.arena
            if row.address != UNPLANNED and (beyond or row.address % UNIT):
                raise UnsupportedError(
                    f"plan: malloc {number}, {row.size:,} bytes at {row.address:,}, lies beyond "
                    f"the arena of {self.arena:,} bytes or not at a multiple of {UNIT}"
                )

    @property
    def planned(self) -> int:
        """Number of mallocs that have an address."""
        return sum(row.address != UNPLANNED for row in self.rows)


def trace_of(events: Iterable[NativeEvent], name: str = "") -> Trace:
    """Return a native recording as a trace, without frees of memory older than the recording."""
    trace_events: list[Malloc | FreeEvent | Mark] = []
    alive: set[int] = set()
    for event in events:
        if event.kind is EventKind.MALLOC:
            alive.add(event.id)
            trace_events.append(Malloc(event.id, event.size, event.stream))
        elif event.kind is EventKind.MARK:
            trace_events.append(Mark(BEGIN if event.size == 0 else f"mark {event.size}"))
        elif event.id in alive:
            alive.remove(event.id)
            trace_events.append(FreeEvent(event.id))
    return Trace(tuple(trace_events), name)


def iteration(trace: Trace, number: int = -1) -> Trace:
    """Return one iteration of a trace, from its mark to the next mark; by default the last one.

    Frees of older tensors are left out. Raises UnsupportedError if the trace has no such iteration.
    """
    first, last = _borders(trace, number)
    alive: set[int] = set()
    events: list[Malloc | FreeEvent | Mark] = []
    for event in trace.events[first + 1 : last]:
        if isinstance(event, Malloc):
            alive.add(event.tensor)
        elif isinstance(event, FreeEvent) and event.tensor not in alive:
            continue
        events.append(event)
    return Trace(tuple(events), trace.name)


def plan_iteration(trace: Trace, smallest: int = 1, seconds: float = SECONDS) -> ReplayPlan:
    """Plan addresses for the tensors of an iteration that live only within it, have at least
    `smallest` bytes, and are on the stream with the most bytes. The search takes at most `seconds`.

    A tensor that outlives the iteration would be in the way of the next one's. Streams that take
    turns on the same bytes would wait for each other.
    """
    mallocs = _mallocs(trace.events)
    asked = Counter[int]()
    for malloc in mallocs:
        asked[malloc.stream] += malloc.size
    busiest = max(asked, key=asked.__getitem__, default=0)
    chosen = {
        number: PlacementRequest(_rounded(request.size), request.born, request.dies)
        for number, request in enumerate(trace.requests())
        if request.size >= max(1, smallest)
        and request.dies < len(trace.events)
        and mallocs[number].stream == busiest
    }
    placement = _place(list(chosen.values()), seconds)
    addresses = dict(zip(chosen, placement.addresses, strict=True))
    rows = tuple(
        PlanRow(malloc.size, malloc.stream, addresses.get(number, UNPLANNED))
        for number, malloc in enumerate(mallocs)
        if malloc.size
    )
    return ReplayPlan(rows, placement.height, placement.lower_bound)


def load_plan(plan: Path, trace: Path) -> ReplayPlan:
    """Load a plan file of `farspan-memory place` for replay. The trace from which it was made tells
    which tensors outlive a step, and whether the plan belongs to this program.

    If the trace has marks of iterations, the rows are those of its last whole one. Raises
    UnsupportedError, also for a plan of another program.
    """
    recorded = read_trace(trace)
    return replay_plan(read_plan(plan, recorded), recorded)


def replay_plan(plan: PlacementPlan, trace: Trace) -> ReplayPlan:
    """Return the plan of the trace's last iteration, or of the whole trace if it has no marks of
    iterations."""
    marked = Mark(BEGIN) in trace.events
    first, last = _borders(trace) if marked else (0, len(trace.events))
    before = len(_mallocs(trace.events[:first]))
    requests = trace.requests()[before : before + len(_mallocs(trace.events[first:last]))]
    pairs = [pair for pair in zip(plan.tensors[before:], requests, strict=False) if pair[0].size]
    rows = [row if r.dies < last else row._replace(address=UNPLANNED) for row, r in pairs]
    return _lowered(rows, [request for _, request in pairs])


def _lowered(rows: Sequence[PlanRow], requests: Sequence[PlacementRequest]) -> ReplayPlan:
    """Return a plan with its rows moved down to address 0, and an arena just large enough."""
    placed = [row for row in rows if row.address != UNPLANNED]
    base = min((row.address for row in placed), default=0)
    lowered = tuple(
        row if row.address == UNPLANNED else row._replace(address=row.address - base)
        for row in rows
    )
    arena = max((row.address + _rounded(row.size) - base for row in placed), default=0)
    alive = [
        PlacementRequest(_rounded(r.size), r.born, r.dies)
        for row, r in zip(rows, requests, strict=True)
        if row.address != UNPLANNED
    ]
    return ReplayPlan(lowered, arena, live_peak(alive))


def _place(requests: Sequence[PlacementRequest], seconds: float) -> Placement:
    if not requests:
        return Placement((), 0, 0)
    return place_exactly(requests, seconds).placement


def _borders(trace: Trace, number: int = -1) -> tuple[int, int]:
    marks = [i for i, event in enumerate(trace.events) if event == Mark(BEGIN)]
    whole = list(pairwise(marks))
    try:
        return whole[number]
    except IndexError as error:
        raise UnsupportedError(
            f"trace {trace.name or 'without a name'}: it has only {len(whole)} whole iterations, "
            f"each from one mark '{BEGIN}' to the next; call begin_iteration() before every step, "
            "and once more after the last"
        ) from error


def _mallocs(events: Iterable[TraceEvent]) -> list[Malloc]:
    return [event for event in events if isinstance(event, Malloc)]


def _rounded(size: int) -> int:
    return -(-size // UNIT) * UNIT
