"""Static placement by first fit: an address in one arena for each buffer with a known lifetime.

    address
      ^   +--------+      +-----+        Two buffers whose lifetimes meet must not overlap in
      |   |   b    |      |  d  |        address. Each buffer goes to the lowest gap that is free
      |   +---+----+------+-+---+        for the whole of its lifetime.
      |   | a |      c      |
      +---+---+-------------+----> time

`place` keeps the lower of two orders, largest first and longest lifetime first. A plan places at
most 177 buffers at a time, which takes 20 ms a plan; thousands of tensors and proofs are for the
solver of farspan-memory.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """A buffer to place: its size and lifetime."""

    size: int  # bytes
    born: int
    dies: int  # alive in [born, dies)


@dataclass(frozen=True, slots=True)
class Placement:
    addresses: tuple[int, ...]  # in the order of the requests
    height: int  # bytes of the arena
    lower_bound: int  # most bytes alive at one time: no placement is lower


def live_peak(requests: Sequence[PlacementRequest]) -> int:
    """Return the largest number of bytes alive at one time."""
    changes: dict[int, int] = {}
    for request in requests:
        changes[request.born] = changes.get(request.born, 0) + request.size
        changes[request.dies] = changes.get(request.dies, 0) - request.size
    peak = live = 0
    for time in sorted(changes):
        live += changes[time]
        peak = max(peak, live)
    return peak


def place(requests: Sequence[PlacementRequest]) -> Placement:
    """Place buffers by first fit in two orders, and return the lower placement."""
    return lowest_of(requests, (largest_first, longest_first))


Order = Callable[[PlacementRequest], tuple[int, ...]]  # a key: what sorts first is placed first


def largest_first(request: PlacementRequest) -> tuple[int, ...]:
    return -request.size, request.born


def longest_first(request: PlacementRequest) -> tuple[int, ...]:
    return request.born - request.dies, -request.size


def lowest_of(requests: Sequence[PlacementRequest], orders: Sequence[Order]) -> Placement:
    """Return the lowest first-fit placement among several orders. Later orders are not tried once a
    placement reaches the lower bound."""
    bound = live_peak(requests)
    best = _first_fit(requests, orders[0], bound)
    for key in orders[1:]:
        if best.height == bound:
            break
        found = _first_fit(requests, key, bound)
        if found.height < best.height:
            best = found
    return best


def _first_fit(requests: Sequence[PlacementRequest], key: Order, bound: int) -> Placement:
    addresses = [0] * len(requests)
    placed: list[tuple[int, int, int, int]] = []  # low, high, born, dies, by address
    height = 0
    for index in sorted(range(len(requests)), key=lambda index: key(requests[index])):
        request = requests[index]
        low = _lowest_gap(placed, request)
        high = low + request.size
        addresses[index], height = low, max(height, high)
        insort(placed, (low, high, request.born, request.dies))
    return Placement(tuple(addresses), height, bound)


def _lowest_gap(placed: list[tuple[int, int, int, int]], request: PlacementRequest) -> int:
    size, born, dies = request.size, request.born, request.dies
    address = 0
    for low, high, other_born, other_dies in placed:
        if other_born < dies and born < other_dies:
            if low - address >= size:
                break
            if high > address:
                address = high
    return address
