"""From what a step asked for to where its tensors go the next time.

iteration   begins                                      ends
transient     |------|   |-----|  |-----------|          |    gets an address in the arena
kept          |          |-------------------------------|--> expected, and served elsewhere
older    -----|--------------|                           |    no request of this iteration
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from farspan.memory.exact import place_exactly, place_flat
from farspan.memory.formats import read_trace
from farspan.memory.library import UNPLANNED, Event, Kind, Row
from farspan.memory.place import Placement, Request, live_peak
from farspan.memory.plan_file import Plan, read_plan
from farspan.memory.solver import available
from farspan.memory.trace import Event as TraceEvent
from farspan.memory.trace import Free, Malloc, Mark, Trace
from farspan.spec import Refused

UNIT = 512  # bytes; the native allocator rounds requests up to a multiple
BEGIN = "iteration"
# Of a search while a program waits; whole steps of large models take less than one.
SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """One iteration's mallocs in order, each with its place or without one; those of no bytes,
    which no allocator is asked for, left out.

    Raises Refused for a place that the arena does not have or that is not aligned.
    """

    rows: tuple[Row, ...]
    arena: int  # bytes
    lower_bound: int  # most bytes of planned tensors alive at one time

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            beyond = row.address + _rounded(row.size) > self.arena
            if row.address != UNPLANNED and (beyond or row.address % UNIT):
                raise Refused(
                    f"plan: malloc {number}, {row.size:,} bytes at {row.address:,}, lies beyond "
                    f"the arena of {self.arena:,} bytes or not at a multiple of {UNIT}"
                )

    @property
    def planned(self) -> int:
        """Mallocs that have a place."""
        return sum(row.address != UNPLANNED for row in self.rows)


def trace_of(events: Iterable[Event], name: str = "") -> Trace:
    """A native recording as a trace. Frees of what was there before it are left out."""
    found: list[Malloc | Free | Mark] = []
    alive: set[int] = set()
    for event in events:
        if event.kind is Kind.MALLOC:
            alive.add(event.id)
            found.append(Malloc(event.id, event.size, event.stream))
        elif event.kind is Kind.MARK:
            found.append(Mark(BEGIN if event.size == 0 else f"mark {event.size}"))
        elif event.id in alive:
            alive.remove(event.id)
            found.append(Free(event.id))
    return Trace(tuple(found), name)


def iteration(trace: Trace, number: int = -1) -> Trace:
    """One whole iteration of several, from behind its mark to the next one; by default the last.

    Frees of older tensors are left out. Raises Refused when the trace has no such iteration.
    """
    first, last = _borders(trace, number)
    alive: set[int] = set()
    kept: list[Malloc | Free | Mark] = []
    for event in trace.events[first + 1 : last]:
        if isinstance(event, Malloc):
            alive.add(event.tensor)
        elif isinstance(event, Free) and event.tensor not in alive:
            continue
        kept.append(event)
    return Trace(tuple(kept), trace.name)


def plan_iteration(trace: Trace, smallest: int = 1, seconds: float = SECONDS) -> ReplayPlan:
    """Places what an iteration both makes and frees, from `smallest` bytes on, as low as a search
    of so many seconds finds; on the stream that asks for the most.

    A tensor that outlives the iteration would be in the way of the next one's. Streams that had the
    same bytes by turns would wait for each other.
    """
    mallocs = _mallocs(trace.events)
    asked = Counter[int]()
    for malloc in mallocs:
        asked[malloc.stream] += malloc.size
    busiest = max(asked, key=asked.__getitem__, default=0)
    chosen = {
        number: Request(_rounded(request.size), request.born, request.dies)
        for number, request in enumerate(trace.requests())
        if request.size >= max(1, smallest)
        and request.dies < len(trace.events)
        and mallocs[number].stream == busiest
    }
    placement = _place(list(chosen.values()), seconds)
    addresses = dict(zip(chosen, placement.addresses, strict=True))
    rows = tuple(
        Row(malloc.size, malloc.stream, addresses.get(number, UNPLANNED))
        for number, malloc in enumerate(mallocs)
        if malloc.size
    )
    return ReplayPlan(rows, placement.height, placement.lower_bound)


def load_plan(plan: Path, trace: Path) -> ReplayPlan:
    """A file of `farspan memory place` for replay, with the trace that it was made of: that says
    which tensors outlive a step, and whether the plan is of this program at all.

    Where the trace has marks of iterations, the rows are those of its last whole one. Raises
    Refused, also for a plan of another program.
    """
    of = read_trace(trace)
    return replay_plan(read_plan(plan, of), of)


def replay_plan(plan: Plan, trace: Trace) -> ReplayPlan:
    """The last iteration of a plan for the whole trace; the whole when it has no marks of any."""
    marked = Mark(BEGIN) in trace.events
    first, last = _borders(trace) if marked else (0, len(trace.events))
    before = len(_mallocs(trace.events[:first]))
    requests = trace.requests()[before : before + len(_mallocs(trace.events[first:last]))]
    pairs = [pair for pair in zip(plan.tensors[before:], requests, strict=False) if pair[0].size]
    rows = [row if r.dies < last else row._replace(address=UNPLANNED) for row, r in pairs]
    return _lowered(rows, [request for _, request in pairs])


def _lowered(rows: Sequence[Row], requests: Sequence[Request]) -> ReplayPlan:
    """The rows in an arena no larger than they need."""
    placed = [row for row in rows if row.address != UNPLANNED]
    base = min((row.address for row in placed), default=0)
    lowered = tuple(
        row if row.address == UNPLANNED else row._replace(address=row.address - base)
        for row in rows
    )
    arena = max((row.address + _rounded(row.size) - base for row in placed), default=0)
    alive = [
        Request(_rounded(r.size), r.born, r.dies)
        for row, r in zip(rows, requests, strict=True)
        if row.address != UNPLANNED
    ]
    return ReplayPlan(lowered, arena, live_peak(alive))


def _place(requests: Sequence[Request], seconds: float) -> Placement:
    if not requests:
        return Placement((), 0, 0)
    placer = place_exactly if available() else place_flat
    return placer(requests, seconds).placement


def _borders(trace: Trace, number: int = -1) -> tuple[int, int]:
    marks = [i for i, event in enumerate(trace.events) if event == Mark(BEGIN)]
    whole = list(pairwise(marks))
    try:
        return whole[number]
    except IndexError as error:
        raise Refused(
            f"trace {trace.name or 'without a name'}: it has {len(whole)} whole iterations, each "
            f"from one mark '{BEGIN}' to the next; call begin_iteration() before every step, and "
            "once more after the last"
        ) from error


def _mallocs(events: Iterable[TraceEvent]) -> list[Malloc]:
    return [event for event in events if isinstance(event, Malloc)]


def _rounded(size: int) -> int:
    return -(-size // UNIT) * UNIT
