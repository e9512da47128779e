"""The fastest schedule that fits: best first over bounds, each candidate proved by its program.

Every schedule of the space gets a lower bound of its time (lanes) and memory (peaks). The one with
the lowest bound of time among those that may fit is built and simulated; it becomes the best so far
if it fits and is faster. When no bound is left below the best, the best is the optimum of the
space. When the budget of seconds runs out first, the best is at most `gap` slower than the optimum:
the lowest bound left tells. What is as fast as that but for a tolerance, and takes less, may be
preferred (thrift): the gap counts what was given for it.
"""

import heapq
import time
from dataclasses import dataclass

from farspan.plan.price.evaluate import evaluate, size
from farspan.plan.price.ranks import refuse_layout
from farspan.plan.question import Plan, Question
from farspan.plan.search.frontier import INFINITE, Cells, Frontier
from farspan.plan.search.room import families, room, states_do_not_fit, taken
from farspan.plan.search.space import Space
from farspan.plan.search.thrift import SLACK, Thrift, lightest
from farspan.plan.strategies import GROUPED

THRIFT = 8  # the search for bytes may take a part of the seconds that the search for time may,
LEAST_THRIFT = 2.0  # and so many seconds whatever is left: what it spares are tens of GiB


@dataclass(frozen=True, slots=True)
class Outcome:
    """The best of a space."""

    best: Plan | None  # None: nothing fits, or nothing that does was found in time
    fastest: Plan | None  # that, or what it was preferred to for the bytes that it takes
    lowest: float  # seconds: whatever fits takes at least so long; or infinite
    simulated: int  # programs built

    @property
    def gap(self) -> float:
        """At most this fraction slower than the optimum is the best."""
        return 0.0 if self.best is None else gap(self.best, self.lowest)


def gap(plan: Plan, lowest: float) -> float:
    """At most this fraction slower than the optimum is a plan, if no other takes less than
    `lowest` seconds."""
    if lowest >= plan.seconds.total * (1 - SLACK):
        return 0.0
    return plan.seconds.total / lowest - 1


def search(
    question: Question,
    space: Space,
    seconds: float = 8.0,
    best: Plan | None = None,
    tolerance: float = 0.0,
) -> Outcome:
    """The best schedule of the space by its simulated time, or `best` where none is faster; of
    those that take at most a fraction of `tolerance` longer, the one with the least footprint that
    was found.

    `seconds` are those that this process computes, so that a busy machine finds no less; an eighth
    more at most go to the footprint, or `LEAST_THRIFT`. Raises Refused for a layout that the model
    cannot take.
    """
    refuse_layout(question)
    if states_do_not_fit(question):
        return Outcome(best, best, INFINITE, 0)
    deadline = time.process_time() + seconds
    frontiers = [Frontier(question, *family) for family in families(question, space)]
    heap = [(f.lowest, count, f) for count, f in enumerate(frontiers) if f.lowest < INFINITE]
    heapq.heapify(heap)
    cells, simulated = Cells(), 0
    known = [] if best is None else [best]
    while heap and heap[0][0] < _to_beat(best):
        if time.process_time() > deadline:
            break
        _, count, frontier = heapq.heappop(heap)
        if frontier.choices is None:
            frontier.open(_to_beat(best), cells)
        else:
            schedule = frontier.step(cells)
            if schedule is not None:
                simulated += 1
                sized = size(question, schedule)
                if sized.fits:
                    plan = evaluate(question, GROUPED, schedule, sized)
                    known.append(plan)
                    best = plan if plan.seconds.total < _seconds(best) else best
        if frontier.lowest < INFINITE:
            heapq.heappush(heap, (frontier.lowest, count, frontier))
    lowest = min(heap[0][0] if heap else INFINITE, _seconds(best))
    if best is None or tolerance == 0.0:
        return Outcome(best, best, lowest, simulated)
    thrift = Thrift(question, frontiers, cells)
    limit = _seconds(best) * (1 + tolerance)
    near = lightest(known, tolerance)
    least = thrift.search(near, limit, time.process_time() + max(LEAST_THRIFT, seconds / THRIFT))
    return Outcome(least, best, lowest, simulated + thrift.simulated)


def something_fits(question: Question, space: Space) -> bool:
    """Do the bounds leave any schedule of the space?"""
    if states_do_not_fit(question):
        return False
    for family, _, _ in families(question, space):
        bytes_, _ = taken(family)
        if (room(question, bytes_.device, bytes_.host) >= 0).any():
            return True
    return False


def _seconds(best: Plan | None) -> float:
    return INFINITE if best is None else best.seconds.total


def _to_beat(best: Plan | None) -> float:
    return _seconds(best) * (1 - SLACK)
