"""Exact placement: the least height, and whether it is proved.

    lower bound |-----?-----|------?-------| greedy      "does it fit?" is asked at the bound first,
                 no          asked  yes                  then halfway between what does not fit and
                                                         the lowest that was found

Minimising from above wastes the time: of MiniMalloc's eleven hard instances, asked at the bound,
all are solved in seconds where a search that lowers a first solution step by step proved none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from farspan.memory.greedy import place_greedily
from farspan.memory.place import Placement, Request, placed_at, to_columns
from farspan.memory.solver import Answer, Columns, fit

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


def place_flat(requests: Sequence[Request], seconds: float = math.inf) -> Solution:
    """All requests at once, greedily."""
    begin = perf_counter()
    found = place_greedily(requests, seconds)
    return Solution(found, least_height(requests, found), perf_counter() - begin)


def least_height(requests: Sequence[Request], found: Placement) -> int:
    """What no placement is below: the most bytes alive, and any request by itself, since one that
    lives for no time has an address too."""
    return max([found.lower_bound, *(r.size for r in requests)])


def place_exactly(
    requests: Sequence[Request], seconds: float = 60.0, capacity: int | None = None
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

    def __init__(self, requests: Sequence[Request], flat: Solution, end: float) -> None:
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
        if found.answer is Answer.FITS:
            self.best = placed_at(self.requests, found.addresses, self.best.lower_bound)
            return
        self.given_up = max(self.given_up, height + self.step)
        if found.answer is Answer.NO_FIT:
            self.bound = max(self.bound, height + 1)
            self.bound += -self.bound % self.step

    def halve(self) -> None:
        """Ask halfway, until nothing is left between or time is up."""
        while self.given_up < self.best.height and perf_counter() < self.end:
            steps = (self.best.height - self.given_up) // self.step
            self.ask(self.given_up + (steps - 1) // 2 * self.step, SHARE)
