"""Greedy placement: first fit over several orders, the lowest is kept.

No order wins everywhere: of whole training steps some reach the lower bound by size, some by
lifetime, some by birth, and what is left between them and the bound is for `exact`.
"""

from collections.abc import Sequence
from math import inf
from time import perf_counter

from farspan.memory.place import (
    Order,
    Placement,
    Request,
    largest_first,
    longest_first,
    lowest_of,
)

# Best fit looks at every buffer that stands; beyond this it costs seconds and seldom wins.
BEST_FIT_REQUESTS = 2000


def _area(request: Request) -> tuple[int, ...]:
    return -request.size * (request.dies - request.born), request.born


def _born(request: Request) -> tuple[int, ...]:
    return request.born, -request.size


def _dies(request: Request) -> tuple[int, ...]:
    return -request.dies, -request.size


def _born_longest(request: Request) -> tuple[int, ...]:
    return request.born, request.born - request.dies


def _largest_longest(request: Request) -> tuple[int, ...]:
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


def place_greedily(requests: Sequence[Request], seconds: float = inf) -> Placement:
    """The lowest of first fit over all orders and, for small problems, of best fit. At least one
    order is tried, the others while there is time."""
    begin = perf_counter()
    end = begin + seconds
    found = lowest_of(requests, ORDERS, end=end)
    now = perf_counter()
    late = now + (now - begin) > end
    if found.height == found.lower_bound or len(requests) > BEST_FIT_REQUESTS or late:
        return found
    best = lowest_of(requests, ORDERS, best_fit=True, end=end)
    return min(found, best, key=lambda placement: placement.height)
