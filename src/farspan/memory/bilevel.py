"""Bi-level placement (MEMO 4.2): a layer's tensors once, then layers as single requests.

    memory                            First level: what lives and dies within one pass of a layer
      |   +------+  +------+          (a segment) is placed by itself, once for all segments with
      |   | F0   |  | F1   |          the same requests. Second level: each segment is one pseudo
      |   +------+--+------+--        request as high as its plan, beside everything that crosses
      |   | x0      |  x1             a border: the residual stream, its gradient, what backward
      +---+---------+----------> time reads, gathered parameters.

Nothing that crosses a border may share addresses with the pseudo request while it lives, even
where the segment would have room: that is what the flat plan wins.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from farspan.memory.exact import Solution, least_height, place_exactly
from farspan.memory.place import Placement, Request, live_peak, placed_at
from farspan.memory.trace import Malloc, Mark, Trace

LAYER = re.compile(r"layer \d+ (forward|backward)\b")
Solve = Callable[[Sequence[Request], float], Solution]
Signature = tuple[tuple[int, int, int], ...]  # of the local requests: size, birth, death in order


@dataclass(frozen=True, slots=True)
class Segment:
    """One pass of a layer, and the requests that live wholly within it, by position."""

    name: str
    start: int
    stop: int  # events [start, stop)
    local: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bilevel:
    """What the decomposition did."""

    solution: Solution
    segments: int
    distinct: int  # plans of the first level
    second_level: int  # requests of the second level


def segments(trace: Trace) -> tuple[Segment, ...]:
    """Stretches between marks that are named after a layer's forward or backward pass."""
    marks = [(at, e.name) for at, e in enumerate(trace.events) if isinstance(e, Mark)]
    stops = [*(at for at, _ in marks), len(trace.events)][1:]
    requests = trace.requests()
    births = [at for at, event in enumerate(trace.events) if isinstance(event, Malloc)]
    position = {at: index for index, at in enumerate(births)}
    found = []
    for (start, name), stop in zip(marks, stops, strict=True):
        if LAYER.match(name):
            inside = (position[at] for at in range(start, stop) if at in position)
            # A tensor that is never freed has its death at the end of the trace, where the last
            # segment stops: it lives on.
            local = tuple(i for i in inside if requests[i].dies < stop)
            found.append(Segment(name, start, stop, local))
    return tuple(found)


def signature(requests: Sequence[Request], local: Sequence[int]) -> Signature:
    """Sizes and the order of births and deaths: equal for segments that one plan serves."""
    times = sorted({t for i in local for t in (requests[i].born, requests[i].dies)})
    rank = {time: index for index, time in enumerate(times)}
    return tuple((requests[i].size, rank[requests[i].born], rank[requests[i].dies]) for i in local)


def place_bilevel(
    requests: Sequence[Request],
    found: Sequence[Segment],
    seconds: float = 60.0,
    solve: Solve = place_exactly,
) -> Bilevel:
    """The requests placed over two levels; each level is solved by `solve`, which gets half of the
    time for all distinct segments and half for the second level."""
    begin = perf_counter()
    named = [(s, signature(requests, s.local)) for s in found if s.local]
    distinct = dict.fromkeys(sign for _, sign in named)
    share = seconds / 2 / max(1, len(distinct))
    plans = {
        sign: solve([Request(*request) for request in sign], share).placement for sign in distinct
    }
    inside = {i for segment, _ in named for i in segment.local}
    crossing = [i for i in range(len(requests)) if i not in inside]
    upper = [requests[i] for i in crossing]
    upper += [_pseudo(requests, segment, plans[sign]) for segment, sign in named]
    left = max(0.1, seconds - (perf_counter() - begin))
    second = solve(upper, left)
    addresses = [0] * len(requests)
    bases = iter(second.placement.addresses)
    for i in crossing:
        addresses[i] = next(bases)
    for (segment, sign), base in zip(named, bases, strict=True):
        for i, address in zip(segment.local, plans[sign].addresses, strict=True):
            addresses[i] = base + address
    return Bilevel(
        _solution(requests, addresses, perf_counter() - begin),
        len(named),
        len(distinct),
        len(upper),
    )


def _pseudo(requests: Sequence[Request], segment: Segment, plan: Placement) -> Request:
    """The segment as one request, alive while any of its tensors is."""
    lives = [requests[i] for i in segment.local]
    return Request(plan.height, min(r.born for r in lives), max(r.dies for r in lives))


def _solution(requests: Sequence[Request], addresses: list[int], seconds: float) -> Solution:
    """Optimal only where it reaches the bound of all requests: the levels' own optima prove
    nothing about the whole."""
    alive = live_peak(requests)
    placement = placed_at(requests, addresses, alive)
    return Solution(placement, least_height(requests, placement), seconds)
