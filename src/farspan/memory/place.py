"""Static placement: an address in one arena for each buffer with a known lifetime (MEMO 4.2).

address
  ^   +--------+      +-----+        Two buffers whose lifetimes meet must not overlap in
  |   |   b    |      |  d  |        address. First fit, largest first: each buffer goes to the
  |   +---+----+------+-+---+        lowest gap that is free for the whole of its lifetime.
  |   | a |      c      |
  +---+---+-------------+----> time
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from time import perf_counter

from farspan.memory.solver import Columns, greedy


@dataclass(frozen=True, slots=True)
class Request:
    """Memory wanted for a while."""

    size: int  # bytes
    born: int
    dies: int  # alive in [born, dies)


@dataclass(frozen=True, slots=True)
class Placement:
    addresses: tuple[int, ...]  # in the order of the requests
    height: int  # bytes of the arena
    lower_bound: int  # most bytes alive at one time: no placement is lower


def live_peak(requests: Sequence[Request]) -> int:
    """The most bytes alive at one time."""
    changes: dict[int, int] = {}
    for request in requests:
        changes[request.born] = changes.get(request.born, 0) + request.size
        changes[request.dies] = changes.get(request.dies, 0) - request.size
    peak = live = 0
    for time in sorted(changes):
        live += changes[time]
        peak = max(peak, live)
    return peak


def place(requests: Sequence[Request]) -> Placement:
    """First fit over two orders (largest first, longest lifetime first); the lower one is kept.
    What searches longer for less height is in `greedy` and `exact`."""
    return lowest_of(requests, (largest_first, longest_first))


Order = Callable[[Request], tuple[int, ...]]  # a key: what sorts first is placed first


def largest_first(request: Request) -> tuple[int, ...]:
    return -request.size, request.born


def longest_first(request: Request) -> tuple[int, ...]:
    return request.born - request.dies, -request.size


def lowest_of(
    requests: Sequence[Request],
    orders: Sequence[Order],
    best_fit: bool = False,
    end: float = inf,
) -> Placement:
    """The lowest greedy placement over the orders, the first of equals; no order is tried after
    one that reaches the lower bound, nor, but the first, when the next one would pass `end` of
    perf_counter if it took as long as the one before. 50,000 requests take 5 s an order."""
    bound = live_peak(requests)
    best: Placement | None = None
    columns = to_columns(requests)
    for key in orders:
        begin = perf_counter()
        keys = list(map(key, requests))
        order = sorted(range(len(requests)), key=keys.__getitem__)
        found = placed_at(requests, greedy(columns, order, best_fit), bound)
        if best is None or found.height < best.height:
            best = found
        now = perf_counter()
        if best.height == bound or now + (now - begin) > end:
            break
    assert best is not None
    return best


def placed_at(requests: Sequence[Request], addresses: Sequence[int], bound: int) -> Placement:
    """The placement with these addresses."""
    tops = (a + r.size for a, r in zip(addresses, requests, strict=True))
    return Placement(tuple(addresses), max(tops, default=0), bound)


def to_columns(requests: Sequence[Request]) -> Columns:
    """The requests as the solver reads them."""
    return Columns(
        [r.size for r in requests], [r.born for r in requests], [r.dies for r in requests]
    )
