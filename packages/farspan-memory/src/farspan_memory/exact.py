"""Placement by search, to a proved optimum or in two levels: layers, then the whole.

`place_exactly`: the least height, and whether it is proved.

    lower bound |-----?-----|------?-------| greedy      "does it fit?" is asked at the bound first,
                 no          asked  yes                  then halfway between the highest "no" and
                                                         the lowest height found

Minimising from above wastes the time: of MiniMalloc's eleven hard instances, asked at the bound,
all are solved in seconds, while a search that lowers a first solution step by step proved none.

`place_bilevel` (MEMO 4.2): a layer's tensors once, then layers as single requests.

    memory                            First level: tensors made and freed in one pass of a layer
      |   +------+  +------+          (a segment) are placed by themselves, once for all segments
      |   | F0   |  | F1   |          with the same requests. Second level: each segment is one
      |   +------+--+------+--        request as high as its plan, among all tensors that cross
      |   | x0      |  x1             a border: the residual stream, its gradient, tensors that
      +---+---------+----------> time backward reads, gathered parameters.

A tensor that crosses a border cannot share addresses with the pseudo request while it lives, even
if the segment has room: the flat plan can save that.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from farspan_memory.placement import (
    Columns,
    Feasibility,
    Placement,
    PlacementRequest,
    fit,
    live_peak,
    place_greedily,
    placed_at,
    to_columns,
)
from farspan_memory.trace import Malloc, Mark, Trace

# Share of the time for greedy orders before the search: 20,000 requests need a few seconds.
GREEDY_SHARE = 0.5
# Share of the remaining time for one height between the bound and the lowest found.
SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Solution:
    """A placement, and a proved lower bound on the height of any placement."""

    placement: Placement
    proved_bound: int  # no placement is lower than this
    seconds: float
    nodes: int = 0  # visited by the search

    @property
    def optimal(self) -> bool:
        """True if the bound proves that no placement is lower."""
        return self.placement.height == self.proved_bound


def place_flat(requests: Sequence[PlacementRequest], seconds: float = math.inf) -> Solution:
    """Place all requests by greedy rules, in one level: layers are not placed first."""
    begin = perf_counter()
    placement = place_greedily(requests, seconds)
    return Solution(placement, least_height(requests, placement), perf_counter() - begin)


def least_height(requests: Sequence[PlacementRequest], placement: Placement) -> int:
    """Return a lower bound on any placement's height: the most bytes alive or, if larger, the
    largest request, since even one with an empty lifetime has an address."""
    return max([placement.lower_bound, *(r.size for r in requests)])


def place_exactly(
    requests: Sequence[PlacementRequest], seconds: float = 60.0, capacity: int | None = None
) -> Solution:
    """Return the lowest placement found by a search of at most `seconds`. With a capacity, spend
    all the time on whether a placement fits into it, and return the first that does.

    Raises NativeError without the native library.
    """
    begin = perf_counter()
    flat = place_flat(requests, seconds * GREEDY_SHARE)
    search = _Search(requests, flat, begin + seconds)
    if capacity is None:
        search.ask(flat.proved_bound, 0.5)
        search.halve()
    elif flat.placement.height > capacity >= flat.proved_bound:
        search.ask(capacity, 1.0)
    best, bound = search.best, search.bound
    return Solution(best, bound, perf_counter() - begin, search.nodes)


class _Search:
    """Search for low placements, one height at a time.

    Invariant: `best` is the lowest placement found, no placement is lower than `bound`, and heights
    below `given_up` were tried and are not tried again.
    """

    def __init__(self, requests: Sequence[PlacementRequest], flat: Solution, end: float) -> None:
        self.requests = requests
        self.columns: Columns = to_columns(requests)
        self.best = flat.placement
        self.bound = self.given_up = flat.proved_bound
        self.end = end
        self.nodes = 0
        # Every possible height of a placement is a sum of sizes.
        self.step = math.gcd(*(r.size for r in requests)) or 1

    def ask(self, height: int, share: float) -> None:
        """Search for a placement of at most this height, for a share of the remaining time."""
        left = self.end - perf_counter()
        if self.best.height <= height or left <= 0:
            return
        result = fit(self.columns, height, left * share)
        self.nodes += result.nodes
        if result.answer is Feasibility.FITS:
            self.best = placed_at(self.requests, result.addresses, self.best.lower_bound)
            return
        self.given_up = max(self.given_up, height + self.step)
        if result.answer is Feasibility.NO_FIT:
            self.bound = max(self.bound, height + 1)
            self.bound += -self.bound % self.step

    def halve(self) -> None:
        """Try the height halfway between bound and best until they meet or time is up."""
        while self.given_up < self.best.height and perf_counter() < self.end:
            steps = (self.best.height - self.given_up) // self.step
            self.ask(self.given_up + (steps - 1) // 2 * self.step, SHARE)


# -- two levels ---------------------------------------------------------------------------------


LAYER = re.compile(r"layer \d+ (forward|backward)\b")
Solve = Callable[[Sequence[PlacementRequest], float], Solution]
Signature = tuple[tuple[int, int, int], ...]  # of the local requests: size, birth, death in order


@dataclass(frozen=True, slots=True)
class Segment:
    """One pass through a layer, with the indices of the requests that live only during the pass."""

    name: str
    start: int
    stop: int  # events [start, stop)
    local: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bilevel:
    """Result of placing in two levels: requests within layers, then layers and other requests."""

    solution: Solution
    segments: int
    distinct: int  # plans of the first level
    second_level: int  # requests of the second level


def segments(trace: Trace) -> tuple[Segment, ...]:
    """Return the segments of a trace: from a mark that names a layer's pass to the next mark."""
    marks = [(at, e.name) for at, e in enumerate(trace.events) if isinstance(e, Mark)]
    stops = [*(at for at, _ in marks), len(trace.events)][1:]
    requests = trace.requests()
    births = [at for at, event in enumerate(trace.events) if isinstance(event, Malloc)]
    position = {at: index for index, at in enumerate(births)}
    layers = []
    for (start, name), stop in zip(marks, stops, strict=True):
        if LAYER.match(name):
            inside = (position[at] for at in range(start, stop) if at in position)
            # A tensor that is never freed dies at the end of the trace, the stop of the last
            # segment: it is not local to that segment.
            local = tuple(i for i in inside if requests[i].dies < stop)
            layers.append(Segment(name, start, stop, local))
    return tuple(layers)


def signature(requests: Sequence[PlacementRequest], local: Sequence[int]) -> Signature:
    """Return the sizes of a layer pass's tensors and the order of their mallocs and frees. Passes
    with equal signatures share one placement."""
    times = sorted({t for i in local for t in (requests[i].born, requests[i].dies)})
    rank = {time: index for index, time in enumerate(times)}
    return tuple((requests[i].size, rank[requests[i].born], rank[requests[i].dies]) for i in local)


def place_bilevel(
    requests: Sequence[PlacementRequest],
    layers: Sequence[Segment],
    seconds: float = 60.0,
    solve: Solve = place_exactly,
) -> Bilevel:
    """Place the requests in two levels. `solve` first places those within each different segment
    (pass through a layer), in half of the time, then the segments among the other requests."""
    begin = perf_counter()
    named = [(s, signature(requests, s.local)) for s in layers if s.local]
    distinct = dict.fromkeys(sign for _, sign in named)
    share = seconds / 2 / max(1, len(distinct))
    plans = {
        sign: solve([PlacementRequest(*request) for request in sign], share).placement
        for sign in distinct
    }
    inside = {i for segment, _ in named for i in segment.local}
    crossing = [i for i in range(len(requests)) if i not in inside]
    upper = [requests[i] for i in crossing]
    upper += [_segment_request(requests, segment, plans[sign]) for segment, sign in named]
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


def _segment_request(
    requests: Sequence[PlacementRequest], segment: Segment, plan: Placement
) -> PlacementRequest:
    """Return a placed segment as one request, which lives while any of its tensors lives."""
    lives = [requests[i] for i in segment.local]
    return PlacementRequest(plan.height, min(r.born for r in lives), max(r.dies for r in lives))


def _solution(
    requests: Sequence[PlacementRequest], addresses: list[int], seconds: float
) -> Solution:
    """Return the placement as a solution, with the lower bound for all requests together: optimal
    placements of each level do not prove the whole optimal."""
    alive = live_peak(requests)
    placement = placed_at(requests, addresses, alive)
    return Solution(placement, least_height(requests, placement), seconds)
