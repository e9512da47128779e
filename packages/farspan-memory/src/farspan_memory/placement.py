"""Static placement: give each buffer, whose lifetime is known, an address in one arena (MEMO 4.2).

    address
      ^   +--------+      +-----+        Two buffers whose lifetimes meet must not overlap in
      |   |   b    |      |  d  |        address. First fit, largest first: each buffer goes to the
      |   +---+----+------+-+---+        lowest gap that is free for the whole of its lifetime.
      |   | a |      c      |
      +---+---+-------------+----> time

`place_greedily` tries seven orders: none wins everywhere, and `exact` searches the rest of the way
to the lower bound. First fit and the search run in the native library. `sweep_placement` checks a
placement and shares no code with the solvers.
"""

import ctypes
from array import array
from bisect import bisect, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from math import inf
from time import perf_counter

from farspan_memory.errors import UnsupportedError
from farspan_memory.native import library

# Beyond it sums of sizes could pass 64 bits.
MOST_BYTES = 2**62


class Feasibility(IntEnum):
    """Answers to the question whether requests fit below a height."""

    FITS = 0
    NO_FIT = 1  # proved
    UNKNOWN = 2  # the limit was reached first


BAD_INPUT = 3


@dataclass(frozen=True, slots=True)
class Columns:
    """Placement requests as int64 columns for the library; a request lives in [born, dies)."""

    size: Sequence[int]
    born: Sequence[int]
    dies: Sequence[int]


@dataclass(frozen=True, slots=True)
class FitResult:
    """Result of a search for a placement: the answer, addresses if it fits, and visited nodes."""

    answer: Feasibility
    addresses: tuple[int, ...]
    nodes: int


def greedy(
    columns: Columns,
    order: Sequence[int],
    best: bool = False,
    *,
    seconds: float = inf,
    below: int = MOST_BYTES,
) -> list[int] | None:
    """Return the requests' addresses if placed in this order, each in the lowest gap that is free
    for its whole lifetime; if `best`, in the smallest such gap (of equal ones the lowest). Requests
    that take no room are at 0. After `seconds`, first fit no longer looks for gaps.
    Return None if the placement is not lower than `below`. Raises NativeError without the library,
    and UnsupportedError for sizes whose sum overflows."""
    if sum(columns.size) >= MOST_BYTES:
        raise UnsupportedError(
            f"placement: expected sizes of less than {MOST_BYTES:,} bytes in total, got "
            f"{sum(columns.size):,}"
        )
    native = _native()
    count = len(columns.size)
    addresses = (ctypes.c_int64 * count)()
    arguments = map(_column, (columns.size, columns.born, columns.dies, order))
    status = native.farspan_greedy(count, *arguments, int(best), addresses, seconds, below)
    _verify(status if status == BAD_INPUT else 0)
    return None if status == Feasibility.UNKNOWN else list(addresses)


def fit(columns: Columns, height: int, seconds: float) -> FitResult:
    """Search for a placement of at most `height` bytes. Raises NativeError without the library."""
    native = _native()
    if sum(columns.size) >= MOST_BYTES:
        return FitResult(Feasibility.UNKNOWN, (), 0)
    count = len(columns.size)
    found, nodes = (ctypes.c_int64 * count)(), ctypes.c_int64()
    arguments = map(_column, (columns.size, columns.born, columns.dies))
    limit = min(height, MOST_BYTES)
    status = native.farspan_fit(count, *arguments, limit, seconds, found, ctypes.byref(nodes))
    _verify(status if status == BAD_INPUT else 0)
    answer = Feasibility(status)
    return FitResult(answer, tuple(found) if answer is Feasibility.FITS else (), nodes.value)


def _column(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    column = array("q", values)
    return (ctypes.c_int64 * len(column)).from_buffer(column)


def _verify(status: int) -> None:
    if status:
        raise ValueError(
            "placement: expected sizes of at least 0, births before deaths, and an order that is "
            "a permutation"
        )


@cache
def _native() -> ctypes.CDLL:
    """Return the library with the placement functions declared. Raises NativeError if it is
    missing."""
    native = library()
    column = ctypes.POINTER(ctypes.c_int64)
    count = ctypes.c_int64
    height, seconds, nodes = ctypes.c_int64, ctypes.c_double, ctypes.POINTER(ctypes.c_int64)
    limits = seconds, height
    native.farspan_greedy.argtypes = (count, *[column] * 4, ctypes.c_int32, column, *limits)
    native.farspan_fit.argtypes = (count, *[column] * 3, height, seconds, column, nodes)
    native.farspan_greedy.restype = native.farspan_fit.restype = ctypes.c_int32
    return native


# -- placements ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A request for a number of bytes during an interval of time."""

    size: int  # bytes
    born: int
    dies: int  # alive in [born, dies)


@dataclass(frozen=True, slots=True)
class Placement:
    addresses: tuple[int, ...]  # in the order of the requests
    height: int  # bytes of the arena
    lower_bound: int  # most bytes alive at one time: no placement is lower


def live_peak(requests: Sequence[PlacementRequest]) -> int:
    """Return the most bytes alive at the same time."""
    changes: dict[int, int] = {}
    for request in requests:
        changes[request.born] = changes.get(request.born, 0) + request.size
        changes[request.dies] = changes.get(request.dies, 0) - request.size
    peak = live = 0
    for time in sorted(changes):
        live += changes[time]
        peak = max(peak, live)
    return peak


Order = Callable[[PlacementRequest], tuple[int, ...]]  # a sort key: the smallest is placed first


def largest_first(request: PlacementRequest) -> tuple[int, ...]:
    return -request.size, request.born


def longest_first(request: PlacementRequest) -> tuple[int, ...]:
    return request.born - request.dies, -request.size


def lowest_of(
    requests: Sequence[PlacementRequest],
    orders: Sequence[Order],
    best_fit: bool = False,
    end: float = inf,
) -> Placement:
    """Return the lowest greedy placement among those by several orders. Stop at the lower bound, or
    when the next order, at the pace of the previous one, would end after `end` (a time of
    perf_counter). The first order, too, looks at the clock. 200,000 requests take 1 to 4 s an
    order, less if one soon proves to be no lower."""
    bound = live_peak(requests)
    best: Placement | None = None
    columns = to_columns(requests)
    for key in orders:
        begin = perf_counter()
        keys = list(map(key, requests))
        order = sorted(range(len(requests)), key=keys.__getitem__)
        below = MOST_BYTES if best is None else best.height
        found = greedy(columns, order, best_fit, seconds=end - perf_counter(), below=below)
        best = best if found is None else placed_at(requests, found, bound)
        assert best is not None, "nothing is lower than the first order"
        now = perf_counter()
        if best.height == bound or now + (now - begin) > end:
            break
    assert best is not None
    return best


def placed_at(
    requests: Sequence[PlacementRequest], addresses: Sequence[int], bound: int
) -> Placement:
    """Return a placement of the requests at these addresses."""
    tops = (a + r.size for a, r in zip(addresses, requests, strict=True))
    return Placement(tuple(addresses), max(tops, default=0), bound)


def to_columns(requests: Sequence[PlacementRequest]) -> Columns:
    """Return the requests as int64 columns for the solver."""
    return Columns(
        [r.size for r in requests], [r.born for r in requests], [r.dies for r in requests]
    )


# Best fit looks at every placed buffer; beyond this it costs seconds and seldom wins.
BEST_FIT_REQUESTS = 2000


def _area(request: PlacementRequest) -> tuple[int, ...]:
    return -request.size * (request.dies - request.born), request.born


def _born(request: PlacementRequest) -> tuple[int, ...]:
    return request.born, -request.size


def _dies(request: PlacementRequest) -> tuple[int, ...]:
    return -request.dies, -request.size


def _born_longest(request: PlacementRequest) -> tuple[int, ...]:
    return request.born, request.born - request.dies


def _largest_longest(request: PlacementRequest) -> tuple[int, ...]:
    return -request.size, request.born - request.dies


ORDERS: tuple[Order, ...] = (
    largest_first,
    longest_first,
    _area,
    _largest_longest,
    _born,
    _born_longest,
    _dies,
)


def place_greedily(requests: Sequence[PlacementRequest], seconds: float = inf) -> Placement:
    """Return the lowest placement by first fit over several orders and, for few requests, by best
    fit. Tries at least one order, then others while there is time."""
    begin = perf_counter()
    end = begin + seconds
    first_fit = lowest_of(requests, ORDERS, end=end)
    now = perf_counter()
    late = now + (now - begin) > end
    if first_fit.height == first_fit.lower_bound or len(requests) > BEST_FIT_REQUESTS or late:
        return first_fit
    best_fit = lowest_of(requests, ORDERS, best_fit=True, end=end)
    return min(first_fit, best_fit, key=lambda placement: placement.height)


# -- the checker --------------------------------------------------------------------------------


class PlacementError(ValueError):
    """An invalid placement; the message names requests by their index."""


def sweep_placement(requests: Sequence[PlacementRequest], placement: Placement) -> None:
    """Raise PlacementError if two requests that live at the same time share an address, if the
    height is not the highest address, or if the lower bound is not the most bytes alive.

    In n log n: a new buffer is compared with its two neighbours among those alive, which do not
    overlap. 20,000 requests take 0.1 s.
    """
    addresses = placement.addresses
    if len(addresses) != len(requests):
        raise PlacementError(f"{len(addresses)} addresses for {len(requests)} requests")
    moments: list[tuple[int, bool, int]] = []  # time, whether a birth, request; deaths come first
    reached = 0
    for index, (request, address) in enumerate(zip(requests, addresses, strict=True)):
        if request.size < 0 or request.dies < request.born or address < 0:
            raise PlacementError(f"{index}: {request} at {address} is not a range")
        reached = max(reached, address + request.size)
        if request.size and request.born < request.dies:
            moments += [(request.born, True, index), (request.dies, False, index)]
    bound = _sweep(sorted(moments), requests, addresses)
    if placement.height != reached:
        raise PlacementError(f"height {placement.height}, but addresses reach {reached}")
    if placement.lower_bound != bound:
        raise PlacementError(f"lower bound {placement.lower_bound}, but {bound} bytes are alive")


def _sweep(
    moments: list[tuple[int, bool, int]],
    requests: Sequence[PlacementRequest],
    addresses: Sequence[int],
) -> int:
    """Return the most bytes alive. Raises PlacementError if live requests share addresses."""
    standing: list[tuple[int, int, int]] = []  # low, high, request; disjoint, so sorted by both
    alive = most = 0
    for _, birth, index in moments:
        low, size = addresses[index], requests[index].size
        entry = (low, low + size, index)
        at = bisect(standing, entry)
        if not birth:
            del standing[at - 1]
            alive -= size
            continue
        for _, high, other in standing[max(0, at - 1) : at]:
            if high > low:
                raise _shared(other, index)
        for above, _, other in standing[at : at + 1]:
            if above < low + size:
                raise _shared(other, index)
        insort(standing, entry)
        alive += size
        most = max(most, alive)
    return most


def _shared(one: int, other: int) -> PlacementError:
    first, second = sorted((one, other))
    return PlacementError(f"{first} and {second} live together and share addresses")
