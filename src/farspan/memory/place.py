"""Static placement: an address in one arena for each buffer with a known lifetime (MEMO 4.2).

address
  ^   +--------+      +-----+        Two buffers whose lifetimes meet must not overlap in
  |   |   b    |      |  d  |        address. First fit, largest first: each buffer goes to the
  |   +---+----+------+-+---+        lowest gap that is free for the whole of its lifetime.
  |   | a |      c      |
  +---+---+-------------+----> time
"""

from collections.abc import Sequence
from dataclasses import dataclass


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
    """First fit over two orders (largest first, longest lifetime first); the lower one is kept."""
    bound = live_peak(requests)
    best: Placement | None = None
    orders = (
        lambda i: (-requests[i].size, requests[i].born),
        lambda i: (requests[i].born - requests[i].dies, -requests[i].size),
    )
    for order in orders:
        addresses = _first_fit(requests, sorted(range(len(requests)), key=order))
        tops = [a + r.size for a, r in zip(addresses, requests, strict=True)]
        found = Placement(tuple(addresses), max(tops, default=0), bound)
        if best is None or found.height < best.height:
            best = found
        if best.height == bound:
            break
    assert best is not None
    return best


def _first_fit(requests: Sequence[Request], order: list[int]) -> list[int]:
    addresses = [0] * len(requests)
    placed: list[int] = []
    for index in order:
        wanted = requests[index]
        taken = sorted(
            (addresses[other], addresses[other] + requests[other].size)
            for other in placed
            if requests[other].born < wanted.dies and wanted.born < requests[other].dies
        )
        address = 0
        for low, high in taken:
            if low - address >= wanted.size:
                break
            address = max(address, high)
        addresses[index] = address
        placed.append(index)
    return addresses
