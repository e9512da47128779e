"""Placement by a mixed-integer program (MIP), a reference for the placement search.

The program of MEMO 4.2 as published, by an open solver (HiGHS in scipy).

    min M   with   A_i + S_i <= M                                   for each i
                   A_i + S_i <= A_j + z_ij M_cap                    for each pair (i, j) in E
                   A_j + S_j <= A_i + (1 - z_ij) M_cap              for each pair (i, j) in E
                   0 <= M <= M_cap,  A_i >= 0,  z_ij in {0, 1}

E are the pairs that live at one time. (The paper prints A_j in the first line; no other symbol
there has a j, so A_i is meant.) M_cap switches a row off, so the relaxed program has no useful
bound until z is decided: it certifies small cases, of some 40 requests, which is its purpose. Sizes
are whole numbers, in units of their greatest common divisor, so that heights differ by a unit at
least. The solver's numbers are right up to a tolerance; its optimum counts if the tolerance is
below a unit, which holds for arenas of less than a million units.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from time import perf_counter
from typing import Any

from farspan_memory.errors import UnsupportedError
from farspan_memory.exact import GREEDY_SHARE, Solution, least_height
from farspan_memory.placement import (
    Placement,
    PlacementRequest,
    live_peak,
    place_greedily,
    placed_at,
)

Pairs = list[tuple[int, int]]
# More pairs make millions of rows, which no solver handles in a useful time.
MOST_PAIRS = 50_000
# HiGHS accepts a z as whole and a row as satisfied within this tolerance, and stops that close to
# the optimum (primal_feasibility_tolerance, mip_feasibility_tolerance, mip_abs_gap).
TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class MixedIntegerProgram:
    """The program: minimize the height M in x, subject to rows x <= limits. x is [addresses A_1 ...
    A_n, M, z by pair], where the binary z is 0 if the pair's first tensor lies below the second."""

    pairs: Pairs
    rows: list[tuple[int, int, float]]  # row, column, coefficient
    limits: list[float]
    variables: int
    cap: int  # M_cap


def overlapping(requests: Sequence[PlacementRequest]) -> Pairs:
    """Return the pairs (i, j) of requests whose lifetimes overlap."""
    return [
        (i, j)
        for j, b in enumerate(requests)
        for i, a in enumerate(requests[:j])
        if max(a.born, b.born) < min(a.dies, b.dies)
    ]


def count_overlapping(requests: Sequence[PlacementRequest]) -> int:
    """Return how many pairs of requests have overlapping lifetimes, in O(n log n) time: all pairs
    but those in which one dies before the other is born."""
    alive = [r for r in requests if r.born < r.dies]
    deaths = sorted(r.dies for r in alive)
    apart = sum(bisect_right(deaths, r.born) for r in alive)
    return len(alive) * (len(alive) - 1) // 2 - apart


def write_program(
    requests: Sequence[PlacementRequest], unit: int, capacity: int
) -> MixedIntegerProgram:
    """Return the mixed-integer program for these requests. Sizes and the capacity M_cap are in
    units of `unit` bytes, which divides every size."""
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
    """Return the placement by mixed-integer programming, or the greedy one if that is lower.

    It is proved only if the solver's bound reaches its height beyond the tolerance, or the most
    bytes alive do. M_cap is the height of greedy placement, which is tighter than any device, or
    the capacity. Raises UnsupportedError without scipy, for too many pairs, and if no placement
    within the capacity was found, which does not prove that none exists.
    """
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
    solved = None if answer.x is None else _exact_addresses(requests, program, answer.x)
    fitting = [p for p in (greedy, solved) if p and (capacity is None or p.height <= capacity)]
    if not fitting:
        raise UnsupportedError(
            f"mip: the solver found no placement within {cap:,} bytes in {seconds:g} s, which "
            f"does not prove that there is none: {answer.message}"
        )
    best = min(fitting, key=lambda placement: placement.height)
    bound = _proved_units(answer.mip_dual_bound, program.cap) * unit
    least = least_height(requests, greedy)
    proved = best.height if bound == best.height else least
    return Solution(best, proved, perf_counter() - begin)


def _proved_units(bound: float | None, cap: int) -> int:
    """Return a lower bound on the height, in units: the solver's bound less the error that its
    tolerance allows, in rows (constraints) and, M_cap times as much, in binary variables."""
    if bound is None or not math.isfinite(bound):
        return 0
    return math.ceil(bound - TOLERANCE * (2 + cap))


def _solve_mip(program: MixedIntegerProgram, count: int, seconds: float) -> Any:
    """Solve the program with HiGHS. Addresses and height are continuous, orders of pairs binary."""
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
    """Return addresses in whole bytes: each tensor as low as the tensors below it in the solution
    allow. (The solver's own addresses have errors of up to a millionth of M_cap.) Return None if
    the solution's order has a cycle, as for sizes below the tolerance."""
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
