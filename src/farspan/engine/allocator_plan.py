"""From what a step asked for to where its tensors go the next time.

iteration   begins                                      ends
transient     |------|   |-----|  |-----------|          |    gets an address in the arena
kept          |          |-------------------------------|--> expected, and served elsewhere
older    -----|--------------|                           |    no request of this iteration
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from farspan.memory.library import UNPLANNED, Event, Kind, Row
from farspan.memory.place import Request, place
from farspan.memory.trace import Free, Malloc, Mark, Trace
from farspan.spec import Refused

UNIT = 512  # bytes; the native allocator rounds requests up to a multiple
BEGIN = "iteration"


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """One iteration's mallocs in order, each with its place or without one.

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
    """One whole iteration of several, from its mark up to the next one's; by default the last.

    Frees of older tensors are left out. Raises Refused when the trace has no such iteration.
    """
    marks = [i for i, event in enumerate(trace.events) if event == Mark(BEGIN)]
    whole = list(pairwise(marks))
    try:
        first, last = whole[number]
    except IndexError as error:
        raise Refused(
            f"trace {trace.name or 'without a name'}: it has {len(whole)} whole iterations, each "
            f"from one mark '{BEGIN}' to the next; call begin_iteration() before every step, and "
            "once more after the last"
        ) from error
    alive: set[int] = set()
    kept: list[Malloc | Free | Mark] = []
    for event in trace.events[first:last]:
        if isinstance(event, Malloc):
            alive.add(event.tensor)
        elif isinstance(event, Free) and event.tensor not in alive:
            continue
        kept.append(event)
    return Trace(tuple(kept), trace.name)


def plan_iteration(trace: Trace, smallest: int = 1) -> ReplayPlan:
    """Places what an iteration both makes and frees, from `smallest` bytes on.

    A tensor that outlives the iteration would be in the way of the next one's.
    """
    end = len(trace.events)
    mallocs = [event for event in trace.events if isinstance(event, Malloc)]
    requests = [Request(_rounded(r.size), r.born, r.dies) for r in trace.requests()]
    chosen = [
        place_of
        for place_of, (malloc, request) in enumerate(zip(mallocs, requests, strict=True))
        if malloc.size >= max(1, smallest) and request.dies < end
    ]
    return _rows(mallocs, [requests[i] for i in chosen], chosen)


def _rows(mallocs: Sequence[Malloc], requests: Sequence[Request], chosen: list[int]) -> ReplayPlan:
    placement = place(requests)
    addresses = dict(zip(chosen, placement.addresses, strict=True))
    made = tuple(
        Row(malloc.size, malloc.stream, addresses.get(i, UNPLANNED))
        for i, malloc in enumerate(mallocs)
    )
    return ReplayPlan(made, placement.height, placement.lower_bound)


def _rounded(size: int) -> int:
    return -(-size // UNIT) * UNIT
