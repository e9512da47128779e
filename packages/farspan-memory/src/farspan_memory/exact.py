"""Placement by search: to a proved optimum, over two levels, or by a mixed-integer program.

`place_exactly`: the least height, and whether it is proved.

    lower bound |-----?-----|------?-------| greedy      "does it fit?" is asked at the bound first,
                 no          asked  yes                  then halfway between what does not fit and
                                                         the lowest that was found

Minimising from above wastes the time: of MiniMalloc's eleven hard instances, asked at the bound,
all are solved in seconds where a search that lowers a first solution step by step proved none.

`place_bilevel` (MEMO 4.2): a layer's tensors once, then layers as single requests.

    memory                            First level: what lives and dies within one pass of a layer
      |   +------+  +------+          (a segment) is placed by itself, once for all segments with
      |   | F0   |  | F1   |          the same requests. Second level: each segment is one pseudo
      |   +------+--+------+--        request as high as its plan, beside everything that crosses
      |   | x0      |  x1             a border: the residual stream, its gradient, what backward
      +---+---------+----------> time reads, gathered parameters.

Nothing that crosses a border may share addresses with the pseudo request while it lives, even
where the segment would have room: that is what the flat plan wins.

`place_by_mip`: the program of MEMO 4.2 as it is written, by an open solver (HiGHS in scipy).

    min M   with   A_i + S_i <= M                                   for each i
                   A_i + S_i <= A_j + z_ij M_cap                    for each pair (i, j) in E
                   A_j + S_j <= A_i + (1 - z_ij) M_cap              for each pair (i, j) in E
                   0 <= M <= M_cap,  A_i >= 0,  z_ij in {0, 1}

E are the pairs that live at one time. (The paper prints A_j in the first line; nothing else there
has a j, so A_i is meant.) M_cap switches a row off, and what it leaves of the bound is nothing
until z is decided: the program certifies small cases, some 40 requests, and is there for that.
Sizes are whole numbers, in units of their greatest common divisor, so that heights differ by a unit
at least. The solver's numbers are right up to a tolerance; what it says of the optimum counts where
the tolerance is below a unit, which is for arenas of less than a million units.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from time import perf_counter
from typing import Any

from farspan_memory.errors import UnsupportedError
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

# Of the time, what greedy orders may take before the search: 20,000 requests need a few seconds.
GREEDY_SHARE = 0.5
# Of the time left, what one height between the bound and the lowest found may take.
SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Solution:
    """A placement, and what is known of it."""

    placement: Placement
    proved_bound: int  # no placement is lower than this
    seconds: float
    nodes: int = 0  # of the search

    @property
    def optimal(self) -> bool:
        """Is it proved that no placement is lower?"""
        return self.placement.height == self.proved_bound


def place_flat(requests: Sequence[PlacementRequest], seconds: float = math.inf) -> Solution:
    """All requests at once, greedily."""
    begin = perf_counter()
    found = place_greedily(requests, seconds)
    return Solution(found, least_height(requests, found), perf_counter() - begin)


def least_height(requests: Sequence[PlacementRequest], found: Placement) -> int:
    """What no placement is below: the most bytes alive, and any request by itself, since one that
    lives for no time has an address too."""
    return max([found.lower_bound, *(r.size for r in requests)])


def place_exactly(
    requests: Sequence[PlacementRequest], seconds: float = 60.0, capacity: int | None = None
) -> Solution:
    """The lowest placement found in `seconds`. With a capacity, the first that fits into it: asked
    before anything else, so that all the time is for this question.

    Raises NativeError where the native library is absent."""
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
    """Heights tried so far.

    Invariant: `best` is the lowest placement found, nothing is lower than `bound`, and heights
    below `given_up` were asked for and are not tried again.
    """

    def __init__(self, requests: Sequence[PlacementRequest], flat: Solution, end: float) -> None:
        self.requests = requests
        self.columns: Columns = to_columns(requests)
        self.best = flat.placement
        self.bound = self.given_up = flat.proved_bound
        self.end = end
        self.nodes = 0
        # Every height that a placement can have is a sum of sizes.
        self.step = math.gcd(*(r.size for r in requests)) or 1

    def ask(self, height: int, share: float) -> None:
        """Search at this height for a share of the time that is left."""
        left = self.end - perf_counter()
        if self.best.height <= height or left <= 0:
            return
        found = fit(self.columns, height, left * share)
        self.nodes += found.nodes
        if found.answer is Feasibility.FITS:
            self.best = placed_at(self.requests, found.addresses, self.best.lower_bound)
            return
        self.given_up = max(self.given_up, height + self.step)
        if found.answer is Feasibility.NO_FIT:
            self.bound = max(self.bound, height + 1)
            self.bound += -self.bound % self.step

    def halve(self) -> None:
        """Ask halfway, until nothing is left between or time is up."""
        while self.given_up < self.best.height and perf_counter() < self.end:
            steps = (self.best.height - self.given_up) // self.step
            self.ask(self.given_up + (steps - 1) // 2 * self.step, SHARE)


# -- two levels ---------------------------------------------------------------------------------


LAYER = re.compile(r"layer \d+ (forward|backward)\b")
Solve = Callable[[Sequence[PlacementRequest], float], Solution]
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


def signature(requests: Sequence[PlacementRequest], local: Sequence[int]) -> Signature:
    """Sizes and the order of births and deaths: equal for segments that one plan serves."""
    times = sorted({t for i in local for t in (requests[i].born, requests[i].dies)})
    rank = {time: index for index, time in enumerate(times)}
    return tuple((requests[i].size, rank[requests[i].born], rank[requests[i].dies]) for i in local)


def place_bilevel(
    requests: Sequence[PlacementRequest],
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
        sign: solve([PlacementRequest(*request) for request in sign], share).placement
        for sign in distinct
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


def _pseudo(
    requests: Sequence[PlacementRequest], segment: Segment, plan: Placement
) -> PlacementRequest:
    """The segment as one request, alive while any of its tensors is."""
    lives = [requests[i] for i in segment.local]
    return PlacementRequest(plan.height, min(r.born for r in lives), max(r.dies for r in lives))


def _solution(
    requests: Sequence[PlacementRequest], addresses: list[int], seconds: float
) -> Solution:
    """Optimal only where it reaches the bound of all requests: the levels' own optima prove
    nothing about the whole."""
    alive = live_peak(requests)
    placement = placed_at(requests, addresses, alive)
    return Solution(placement, least_height(requests, placement), seconds)


# -- the mixed-integer program ------------------------------------------------------------------


Pairs = list[tuple[int, int]]
# More makes rows by the million, of which no solver makes anything in a useful time.
MOST_PAIRS = 50_000
# HiGHS takes a z for whole and a row for kept that are off by so much, and stops that close to the
# optimum (primal_feasibility_tolerance, mip_feasibility_tolerance, mip_abs_gap).
TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class MixedIntegerProgram:
    """min cost x subject to rows x <= limits; x is A_1 ... A_n, M, then z in the order of pairs."""

    pairs: Pairs
    rows: list[tuple[int, int, float]]  # row, column, coefficient
    limits: list[float]
    variables: int
    cap: int  # M_cap


def overlapping(requests: Sequence[PlacementRequest]) -> Pairs:
    """E: the pairs that live at one time."""
    return [
        (i, j)
        for j, b in enumerate(requests)
        for i, a in enumerate(requests[:j])
        if max(a.born, b.born) < min(a.dies, b.dies)
    ]


def count_overlapping(requests: Sequence[PlacementRequest]) -> int:
    """How many pairs E has, in n log n: all but those where one dies before the other is born."""
    alive = [r for r in requests if r.born < r.dies]
    deaths = sorted(r.dies for r in alive)
    apart = sum(bisect_right(deaths, r.born) for r in alive)
    return len(alive) * (len(alive) - 1) // 2 - apart


def write_program(
    requests: Sequence[PlacementRequest], unit: int, capacity: int
) -> MixedIntegerProgram:
    """The rows of the program; sizes and M_cap in units of `unit` bytes, of which every size is a
    multiple."""
    count, pairs = len(requests), overlapping(requests)
    sizes = [r.size // unit for r in requests]
    cap = capacity // unit
    rows: list[tuple[int, int, float]] = []
    limits: list[float] = []
    for i, size in enumerate(sizes):
        rows += [(len(limits), i, 1.0), (len(limits), count, -1.0)]
        limits.append(-size)
    for z, (i, j) in enumerate(pairs, count + 1):
        rows += [(len(limits), i, 1.0), (len(limits), j, -1.0), (len(limits), z, -cap)]
        limits.append(-sizes[i])
        rows += [(len(limits), j, 1.0), (len(limits), i, -1.0), (len(limits), z, cap)]
        limits.append(cap - sizes[j])
    return MixedIntegerProgram(pairs, rows, limits, count + 1 + len(pairs), cap)


def place_by_mip(
    requests: Sequence[PlacementRequest], seconds: float = 60.0, capacity: int | None = None
) -> Solution:
    """The program's solution, or the greedy one where that is lower or the only one in time; it is
    proved only where the solver's bound reaches it beyond its tolerance, or the most bytes alive
    do. M_cap is what greedy placement needs, which is tighter than any device, or the capacity.

    Raises UnsupportedError without scipy, for too many pairs, and when no placement within the
    capacity was found, which does not say that there is none."""
    begin = perf_counter()
    pairs = count_overlapping(requests)
    if pairs > MOST_PAIRS:
        raise UnsupportedError(
            f"mip: {pairs} pairs of tensors live together, but the solver takes at most "
            f"{MOST_PAIRS}; use another method"
        )
    greedy = place_greedily(requests, seconds * GREEDY_SHARE)
    if not requests or greedy.height == 0:
        return Solution(greedy, greedy.height, perf_counter() - begin)
    unit = math.gcd(*(r.size for r in requests))
    cap = greedy.height if capacity is None else min(capacity, greedy.height)
    program = write_program(requests, unit, cap)
    left = max(0.0, seconds - (perf_counter() - begin))
    answer = _solve_mip(program, len(requests), left)
    found = None if answer.x is None else _exact_addresses(requests, program, answer.x)
    kept = [p for p in (greedy, found) if p and (capacity is None or p.height <= capacity)]
    if not kept:
        raise UnsupportedError(
            f"mip: the solver found no placement within {cap:,} bytes in {seconds:g} s, which "
            f"does not prove that there is none: {answer.message}"
        )
    best = min(kept, key=lambda placement: placement.height)
    bound = _proved(answer.mip_dual_bound, program.cap) * unit
    least = least_height(requests, greedy)
    proved = best.height if bound == best.height else least
    return Solution(best, proved, perf_counter() - begin)


def _proved(bound: float | None, cap: int) -> int:
    """Units that every placement needs after the solver's bound: no less of it than its rows and
    its z, which count M_cap times, may be off."""
    if bound is None or not math.isfinite(bound):
        return 0
    return math.ceil(bound - TOLERANCE * (2 + cap))


def _solve_mip(program: MixedIntegerProgram, count: int, seconds: float) -> Any:
    """Runs HiGHS. x is continuous for A and M, binary for z."""
    try:
        optimize, matrix = import_module("scipy.optimize"), import_module("scipy.sparse").csr_array
    except ImportError as error:
        raise UnsupportedError(
            "mip: needs scipy; install it with `pip install 'farspan-memory[mip]'`"
        ) from error
    rows, columns, values = zip(*program.rows, strict=True)
    whole = [0] * (count + 1) + [1] * len(program.pairs)
    upper = [float("inf")] * count + [float(program.cap)] + [1.0] * len(program.pairs)
    shape = (len(program.limits), program.variables)
    return optimize.milp(
        [0.0] * count + [1.0] + [0.0] * len(program.pairs),
        integrality=whole,
        bounds=optimize.Bounds([0.0] * program.variables, upper),
        constraints=optimize.LinearConstraint(
            matrix((values, (rows, columns)), shape=shape), ub=program.limits
        ),
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )


def _exact_addresses(
    requests: Sequence[PlacementRequest], program: MixedIntegerProgram, x: Sequence[float]
) -> Placement | None:
    """Whole bytes: the order that z decides, each buffer as low as what lies below it allows;
    nothing where that is no order, since sizes below the tolerance decide none. The solver's own
    addresses are right up to a millionth of M_cap only."""
    below: dict[int, list[int]] = {i: [] for i in range(len(requests))}
    for z, (i, j) in enumerate(program.pairs, len(requests) + 1):
        low, high = (i, j) if x[z] < 0.5 else (j, i)
        below[high].append(low)
    addresses = [0] * len(requests)
    try:
        for i in TopologicalSorter(below).static_order():
            addresses[i] = max((addresses[j] + requests[j].size for j in below[i]), default=0)
    except CycleError:
        return None
    return placed_at(requests, addresses, live_peak(requests))
