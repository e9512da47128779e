"""Of schedules that are as fast as makes no difference, the one that takes the least.

Main memory that a GPU copies from is locked: its pages have to be taken first (2.3 GB/s on two
cores, engine/tiers.py), and no other program has it then. Many schedules are nearly as fast as
the fastest, and some take tens of GiB less. By their bounds of time some may be near enough; these
are simulated in the order of their bounds of bytes, so that the first that proves near enough takes
the least.
"""

import heapq
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from farspan.plan.price.evaluate import PAGE, evaluate, size
from farspan.plan.question import Plan, Question
from farspan.plan.search.frontier import Cells, Frontier
from farspan.plan.strategies import GROUPED

Footprint = tuple[float, float]  # bytes of the host; where they are equal, of the device
SLACK = 1e-9  # sums of the same numbers in another order

# Of the fastest schedule's time, what is given for bytes: a twentieth of what predictions of a step
# are off by (0.89 to 1.07 of what was measured, benchmarks/results/agreement.json).
TOLERANCE = 0.005


def footprint(plan: Plan) -> Footprint:
    return plan.host.total, plan.device.total


def lightest(plans: Iterable[Plan], tolerance: float = TOLERANCE) -> Plan:
    """Of the plans that fit as well as any, and take at most `tolerance` longer than the fastest of
    them, that with the least footprint, and of equal ones the fastest."""
    found = list(plans)
    most = max(plan.fit for plan in found)
    fitting = [plan for plan in found if plan.fit is most]
    limit = min(plan.seconds.total for plan in fitting) * (1 + tolerance)
    near = [plan for plan in fitting if plan.seconds.total <= limit]
    return min(near, key=lambda plan: (footprint(plan), plan.seconds.total))


def chosen(plans: Sequence[Plan]) -> tuple[Plan, tuple[Plan, ...]]:
    """The plan to run, which is the lightest where any fits, and the others by their rank."""
    ranked = sorted(plans, key=Plan.rank)
    best = lightest(ranked) if ranked[0].fits else ranked[0]
    return best, tuple(plan for plan in ranked if plan is not best)


@dataclass(frozen=True, slots=True, order=True)
class _Candidate:
    """A schedule by its bounds."""

    footprint: Footprint
    at: int  # the place of its frontier
    index: int  # in the frontier's frames
    kind: int
    is_counted: bool = False  # is what the cells of its kind hold in the footprint?


class Thrift:
    """The search for the least footprint, through what the search for the least time looked at."""

    def __init__(self, question: Question, frontiers: Sequence[Frontier], cells: Cells) -> None:
        self.question = question
        self.frontiers = frontiers
        self.cells = cells
        self.simulated = 0

    def search(self, best: Plan, limit: float, deadline: float) -> Plan:
        """The plan of the least footprint of those that take at most `limit` seconds, or `best`
        where none takes less than it; when this process has computed until `deadline`, the best
        that was found."""
        heap = list(self._near(best, limit))
        heapq.heapify(heap)
        while heap and heap[0].footprint < footprint(best):
            if time.process_time() > deadline:
                break
            candidate = heapq.heappop(heap)
            if not candidate.is_counted:
                heapq.heappush(heap, self._counted(candidate))
                continue
            plan = self._plan(candidate)
            if plan is not None and plan.seconds.total <= limit:
                best = min(best, plan, key=footprint)
        return best

    def _near(self, best: Plan, limit: float) -> Iterator[_Candidate]:
        """Those that by their bounds are fast enough and take less than `best`."""
        least = footprint(best)
        for at, frontier in enumerate(self.frontiers):
            if frontier.bound > limit * (1 + SLACK):
                continue
            found = frontier.within(limit * (1 + SLACK), self.cells)
            # Main memory is taken by whole pages; a byte less, since these are sums of floats.
            host = np.ceil((found.host - 1) / PAGE) * PAGE
            less = (host < least[0]) | ((host == least[0]) & (found.device < least[1]))
            for place in np.flatnonzero(less):
                yield _Candidate(
                    (float(host[place]), float(found.device[place])),
                    at,
                    int(found.index[place]),
                    int(found.kind[place]),
                )

    def _counted(self, candidate: _Candidate) -> _Candidate:
        """With what the cells of its kind hold."""
        host, device = candidate.footprint
        # Whichever kind of rank is the fullest.
        device += float(self.frontiers[candidate.at].held(candidate.kind, self.cells).min())
        return replace(candidate, footprint=(host, device), is_counted=True)

    def _plan(self, candidate: _Candidate) -> Plan | None:
        schedule = self.frontiers[candidate.at].schedule_at(candidate.index)
        self.simulated += 1
        sized = size(self.question, schedule)
        return evaluate(self.question, GROUPED, schedule, sized) if sized.fits else None
