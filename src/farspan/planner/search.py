"""The fastest schedule that fits: best first over bounds, each candidate proved by its program.

Every schedule of the space gets a lower bound of its time and memory. The one with the lowest bound
of time among those that may fit is built and simulated; it becomes the best so far if it fits and
is faster. When no bound is left below the best, the best is the optimum of the space. When the
budget of seconds runs out first, the best is at most `gap` slower than the optimum: the lowest
bound left tells.

Kinds. Bounds know a cell's graphs, not what else it holds for a moment. That depends on the cut and
on which chunks are kept, so choices that are alike in these share it: a kind. It is found when the
fastest choice of a kind has its turn, and then counts for all (`CellMoments`). What lies outside
the layers is the same for all kinds: that is known when a family is opened.

Thrift. Main memory that a GPU copies from is locked: its pages have to be taken first (2.3 GB/s on
two cores), and no other program has it then. Many schedules are nearly as fast as the fastest, and
some take tens of GiB less. By their bounds of time some may be near enough; these are simulated in
the order of their bounds of bytes, so that the first that proves near enough takes the least. The
gap counts what was given for it.

Sizes. `loss_chunk_size` and `kv_block` would each double the space, and both are nearly apart from
the rest of a schedule: a larger piece of the head reads and writes the gradient of its weights less
often and holds more logits for a moment, larger blocks of keys are merged less often. So they are
chosen for the schedule that was found: by their prices, and kept if the whole program with them
fits and is faster by a share worth having.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farspan.planner import feasibility as quick
from farspan.planner.bounds import TIERS, Family, Frames, momentary
from farspan.planner.cell_prices import Array, CellPrices
from farspan.planner.evaluate import PAGE, outlined, refuse_layout
from farspan.planner.feasibility import families, fullest, room, slowest, states_do_not_fit, taken
from farspan.planner.request import Plan, Question
from farspan.planner.space import Cut, Space
from farspan.program.program import Program
from farspan.program.strategies import GROUPED
from farspan.spec import Schedule, Tier

Index = NDArray[np.int64]
INFINITE = float("inf")
KINDS = 27  # of choices kept, numbered by Kept.alike, for each cut


@dataclass(slots=True)
class Choices:
    """Open choices, fastest first, and of equally fast ones the smallest; arrays are [N]."""

    index: Index  # in the frames' [K, F, T], flattened
    seconds: Array
    device: Array  # bytes
    host: Array
    kind: Index
    devices: Array  # [S, N]: bytes on the device of each kind of rank

    def only(self, which: Index | NDArray[np.bool_] | slice) -> "Choices":
        """Those at these places."""
        return Choices(
            self.index[which],
            self.seconds[which],
            self.device[which],
            self.host[which],
            self.kind[which],
            self.devices[:, which],
        )


@dataclass(slots=True)
class SearchEffort:
    """How many seconds a search may still compute, by counts of what it did and not by a clock, so
    that a question has the same plan on a slow machine and on a busy one.

    The prices are those of one core of a Xeon server of 2026 (`benchmarks/planning.py`): 5
    microseconds to build an instruction with its bytes, 7 to time it, 0.4 to bound a choice's time
    and memory, 7,000 to walk the cells of a kind."""

    left: float

    def build(self, programs: Iterable[Program]) -> None:
        self.left -= 5e-6 * sum(len(program.instructions) for program in programs)

    def time(self, programs: Iterable[Program]) -> None:
        self.left -= 7e-6 * sum(len(program.instructions) for program in programs)

    def bound(self, frontiers: Iterable["Frontier"]) -> None:
        for frontier in frontiers:
            self.left -= 0.2e-6 * frontier.size

    def walk(self) -> None:
        self.left -= 7e-3

    @property
    def is_spent(self) -> bool:
        return self.left <= 0


class Frontier:
    """`lowest` is a bound of the seconds of whatever is open, `bound` of the whole family's. Most
    families are slower than the best of another even if all of their choices fit; of most others
    those that do are slower (`settle`), so that few are opened."""

    def __init__(
        self,
        question: Question,
        family: Family,
        schedule: Schedule,
        cuts: tuple[Cut, ...],
        effort: SearchEffort,
    ) -> None:
        self.question = question
        self.effort = effort
        self.is_in_line = False
        self.family = family
        self.schedule = schedule  # what the family has in common
        self.cuts = cuts
        self.kept = family[0].kept
        self.choices: Choices | None = None
        self.known: set[int] = set()  # kinds whose cells are counted
        self.size = len(cuts) * len(self.kept.graphs) * len(TIERS)
        self.fits = cache(partial(quick.fitting, family))
        self.is_settled = not quick.any_may_fit(family)
        self._bound(not self.is_settled)

    def _bound(self, fits: NDArray[np.bool_] | bool) -> None:
        self.bound = self.lowest = INFINITE
        if np.any(fits):
            times = slowest(self.family, in_line=self.is_in_line)
            self.bound = self.lowest = float(np.min(times, where=fits, initial=INFINITE))

    def settle(self) -> None:
        """Bound the seconds of what may fit."""
        self.is_settled = True
        self._bound(self.fits())

    def in_line(self) -> "Frontier":
        """The same by seconds as if nothing overlapped."""
        twin = copy(self)
        twin.is_in_line, twin.known = True, set()
        twin._bound(not self.is_settled)
        return twin

    def open(self, best: float, cells: "CellMoments") -> None:
        """Write down all choices that may fit and may be faster than `best` seconds."""
        every = self.within(best, cells)
        self._keep(every.only(np.lexsort((every.device + every.host, every.seconds))))

    def within(self, limit: float, cells: "CellMoments") -> Choices:
        """All choices, in no order, that may fit and may be faster than `limit` seconds; cells of
        no kind are counted."""
        times = slowest(self.family, in_line=self.is_in_line)
        found, devices = taken(self.family)
        devices += np.stack([cells.least(frames) for frames in self.family])[..., None]
        device = fullest(self.family, devices)
        fits = quick.may_fit(self.family, device, found.host) & (times < limit)
        index = np.flatnonzero(fits)
        cut, choice = np.divmod(index // len(TIERS), len(self.kept.graphs))
        return Choices(
            index,
            times.ravel()[index],
            device.ravel()[index],
            found.host.ravel()[index],
            cut * KINDS + self.kept.alike[choice],
            devices.reshape(len(devices), -1)[:, index],
        )

    def _keep(self, choices: Choices) -> None:
        self.choices = choices
        self.lowest = float(choices.seconds[0]) if len(choices.index) else INFINITE

    def step(self, cells: "CellMoments") -> Schedule | None:
        """The fastest choice, which is then no longer open; or None where the cells of its kind
        were not counted yet, and now are."""
        choices = self.choices
        assert choices is not None
        kind = int(choices.kind[0])
        if kind not in self.known:
            self._count(kind, cells)
            return None
        index = int(choices.index[0])
        self._keep(choices.only(slice(1, None)))
        return self.schedule_at(index)

    def _count(self, kind: int, cells: "CellMoments") -> None:
        choices = self.choices
        assert choices is not None
        self.known.add(kind)
        self.effort.walk()
        of = choices.kind == kind
        choices.devices[:, of] += self.held(kind, cells)
        choices.device[of] = fullest(self.family, choices.devices[:, of])
        self._keep(choices.only(room(self.question, choices.device, choices.host) >= 0))

    def held(self, kind: int, cells: "CellMoments") -> Array:
        """[S, 1]: bytes that the cells of a kind hold for a moment, on each kind of rank, beyond
        what `within` counts."""
        cut, alike = divmod(kind, KINDS)
        held = []
        for frames in self.family:
            least = cells.least(frames)[cut, self.kept.alike == alike][0]
            held.append([max(0.0, float(cells.beyond(frames, cut, alike) - least))])
        return np.array(held)

    def schedule_at(self, index: int) -> Schedule:
        """The schedule of a choice's index."""
        chosen, tiers = divmod(index, len(TIERS))
        cut, choice = divmod(chosen, len(self.kept.graphs))
        x, attention, activations = TIERS[tiers]
        kept, chunks = self.kept, self.family[0].cell_prices.chunks
        return replace(
            self.schedule,
            groups=self.cuts[cut],
            boundary_inputs=x,
            attention=attention,
            activations=activations,
            attention_save_fraction=quick.latest_fraction(chunks, int(kept.attention[choice])),
            activation_save_fraction=quick.latest_fraction(chunks, int(kept.graphs[choice])),
        )


class _Queue:
    """Frontiers, of which that with the lowest bound comes first."""

    def __init__(self, frontiers: Sequence[Frontier]) -> None:
        self._heap = [(f.lowest, at, f) for at, f in enumerate(frontiers) if f.lowest < INFINITE]
        heapq.heapify(self._heap)
        self._settle()

    def _settle(self) -> None:
        """Until the first is so by what may fit."""
        while self._heap and not self._heap[0][2].is_settled:
            _, at, frontier = heapq.heappop(self._heap)
            frontier.settle()
            self._push(at, frontier)

    def _push(self, at: int, frontier: Frontier) -> None:
        if frontier.lowest < INFINITE:
            heapq.heappush(self._heap, (frontier.lowest, at, frontier))

    @property
    def lowest(self) -> float:
        """A bound of the seconds of whatever is open."""
        return self._heap[0][0] if self._heap else INFINITE

    def step(self, best: float, cells: "CellMoments") -> Schedule | None:
        """One look closer at the lowest: the schedule that it comes to, if it does. What cannot
        be faster than `best` seconds is left out."""
        _, at, frontier = heapq.heappop(self._heap)
        schedule = None
        if frontier.choices is None:
            frontier.open(best, cells)
        else:
            schedule = frontier.step(cells)
        self._push(at, frontier)
        self._settle()
        return schedule


class CellMoments:
    """What cells hold for a moment, by kind; families share it."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], int] = {}
        self._outside: dict[int, int] = {}  # by chunk

    def least(self, frames: Frames) -> Array:
        """[K, F]: bytes that every choice takes at least beyond its bounds, by what lies outside
        the layers."""
        chunk = frames.schedule.chunk
        if chunk not in self._outside:
            given = frames.schedule
            plain = Schedule(chunk, kv_block=given.kv_block, kv_kept=True, weights=given.weights)
            self._outside[chunk] = quick.outside(frames.cell_prices, plain)
        return np.asarray(np.maximum(0.0, self._outside[chunk] - momentary(frames)))

    def beyond(self, frames: Frames, cut: int, alike: int) -> float:
        """Bytes that the choices of a kind take at least beyond their bounds."""
        kept, s, sizes = frames.kept, frames.schedule, frames.cuts.sizes[cut]
        of = kept.alike == alike
        # Of all choices of the kind those chunks that have the fewest keys before them.
        most = int(kept.attention[of].max()), int(kept.graphs[of].max())
        walked = quick.latest(kept.chunks, *most, first=not frames.cell_prices.are_equal)
        rank = frames.cuts.kind.rank
        key = s.chunk, sizes, rank, s.kv_kept, s.attention_open, s.layer_checkpoint, *most
        if key not in self._known:
            own = s if frames.cuts.kind.is_stage else replace(s, groups=sizes)
            self._known[key] = quick.transient(frames.cell_prices, own, *most, walked)
        held = frames.cuts.held[cut]
        gradients = held.gradients + max(0, held.accumulators + self._known[key])
        return float(gradients - momentary(frames)[cut, np.flatnonzero(of)[0]])


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

    def __init__(
        self, question: Question, frontiers: Sequence[Frontier], cells: CellMoments
    ) -> None:
        self.question = question
        self.frontiers = frontiers
        self.cells = cells
        self.simulated = 0

    def search(self, best: Plan, limit: float, effort: SearchEffort) -> Plan:
        """The plan of the least footprint of those that take at most `limit` seconds, or `best`
        where none takes less than it; when the effort is spent, the best that was found."""
        heap = list(self._near(best, limit))
        heapq.heapify(heap)
        while heap and heap[0].footprint < footprint(best):
            if effort.is_spent:
                break
            candidate = heapq.heappop(heap)
            if not candidate.is_counted:
                effort.walk()
                heapq.heappush(heap, self._counted(candidate))
                continue
            plan = self._plan(candidate, effort)
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

    def _plan(self, candidate: _Candidate, effort: SearchEffort) -> Plan | None:
        schedule = self.frontiers[candidate.at].schedule_at(candidate.index)
        self.simulated += 1
        return simulated(self.question, GROUPED, schedule, effort)


def simulated(
    question: Question, strategy: str, schedule: Schedule, effort: SearchEffort
) -> Plan | None:
    """The plan of a schedule as `feasibility.composed` has it, or None where it does not fit."""
    sized = outlined(question, schedule)
    effort.build(sized.programs)
    if not sized.fits:
        return None
    plan, programs = quick.composed(question, strategy, schedule, sized)
    effort.build(programs)
    effort.time(programs)
    return plan


THRIFT = 8  # the search for bytes may take a part of the seconds that the search for time may,
LEAST_THRIFT = 0.4  # and so many seconds whatever is left: what it spares are tens of GiB


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
    near: float = SLACK,
) -> Outcome:
    """The best schedule of the space by its simulated time, or `best` where none is faster; of
    those that take at most a fraction of `tolerance` longer, the one with the least footprint that
    was found.

    No more is looked at when nothing is left that may be faster by a fraction of `near`.
    `seconds` are those of `SearchEffort`, so that any machine finds the same; an eighth more at
    most go to the footprint, or `LEAST_THRIFT`. Raises UnsupportedError for a layout that
    the model cannot take.
    """
    refuse_layout(question)
    if states_do_not_fit(question):
        return Outcome(best, best, INFINITE, 0)
    effort, cells, count = SearchEffort(seconds), CellMoments(), 0
    frontiers = [Frontier(question, *family, effort) for family in families(question, space)]
    known = [] if best is None else [best]
    if question.overlap and (first := _first_in_line(question, frontiers, cells, effort)):
        known.append(first)
        best = min(known, key=_seconds)
    effort.bound(frontiers)
    queue = _Queue(frontiers)
    while queue.lowest < _seconds(best) * (1 - near) and not effort.is_spent:
        schedule = queue.step(_seconds(best) * (1 - SLACK), cells)
        if schedule is None:
            continue
        count += 1
        plan = simulated(question, GROUPED, schedule, effort)
        if plan is not None:
            known.append(plan)
            best = plan if plan.seconds.total < _seconds(best) else best
    lowest = min(queue.lowest, _seconds(best))
    if best is None or tolerance == 0.0:
        return Outcome(best, best, lowest, count)
    thrift = Thrift(question, frontiers, cells)
    limit = _seconds(best) * (1 + tolerance)
    light = lightest(known, tolerance)
    least = thrift.search(light, limit, SearchEffort(max(LEAST_THRIFT, seconds / THRIFT)))
    return Outcome(least, best, lowest, count + thrift.simulated)


def _first_in_line(
    question: Question, frontiers: Sequence[Frontier], cells: CellMoments, effort: SearchEffort
) -> Plan | None:
    """The plan of what fits and is fastest if nothing overlaps. Where copies run beside the
    computation many schedules have nearly one bound; this is close to the fastest, and soon found.
    """
    effort.bound(frontiers)
    queue = _Queue([frontier.in_line() for frontier in frontiers])
    while queue.lowest < INFINITE and not effort.is_spent:
        schedule = queue.step(INFINITE, cells)
        plan = schedule and simulated(question, GROUPED, schedule, effort)
        if plan:
            return plan
    return None


def _seconds(best: Plan | None) -> float:
    return INFINITE if best is None else best.seconds.total


HEADS = (2048, 4096, 8192)  # tokens, after the default
BLOCKS = (2**15, 2**16)  # keys, after the default
# Of a step, what the next size has to save: a fifth of what the search gives for main memory.
WORTH = 0.001
MOST_ELEMENTS = 2**31 - 1  # of the K of a call with all heads, which kernels count in 32 bits


def with_pieces(plans: Sequence[Plan], seconds: float) -> list[Plan]:
    """The plans with the sizes of pieces that are best for the first; one that they do not fit is
    left as it is. After `seconds` of `SearchEffort` no other program is looked at.

    Their gaps count on what was saved being saved by any schedule."""
    effort = SearchEffort(seconds)
    first = _improved(plans[0], "loss_chunk_size", HEADS, effort)
    first = _improved(first, "kv_block", tuple(_blocks(first)), effort)
    head = first.schedule.loss_chunk_size
    if head == plans[0].schedule.loss_chunk_size:
        return [first, *plans[1:]]
    others = (replace(plan.schedule, loss_chunk_size=head) for plan in plans[1:])
    return [first, *map(partial(_resized, effort=effort), plans[1:], others)]


def _improved(plan: Plan, field: str, sizes: Sequence[int], effort: SearchEffort) -> Plan:
    """The plan with the largest of the sizes that pays by its price, fits and saves."""
    for tokens in reversed(_worth_having(plan, field, sizes)):
        if effort.is_spent:
            break
        found = _resized(plan, _with(plan.schedule, field, tokens), effort)
        if found.seconds.total <= plan.seconds.total * (1 - WORTH):
            return found
    return plan


def _worth_having(plan: Plan, field: str, sizes: Sequence[int]) -> list[int]:
    """Sizes that by their prices save enough over the one before; dear ones are passed over."""
    found, known = list[int](), _work(plan, plan.schedule)
    for tokens in sizes:
        work = _work(plan, _with(plan.schedule, field, tokens))
        if known - work >= WORTH * plan.seconds.total:
            found.append(tokens)
            known = work
    return found


def _work(plan: Plan, schedule: Schedule) -> float:
    """Seconds that the head computes, and once forward and backward every cell, which are as many
    for any size; where attention is sparse the head alone, whose size is then the only choice."""
    cell_prices = CellPrices(plan.question, schedule)
    lanes, loss = cell_prices.lanes, plan.question.loss
    seconds = float(lanes.head.sum())
    if loss.is_cut:
        seconds += (1 + loss.evaluates) * float(lanes.values.sum())
    if schedule.sparse is not None:
        return seconds
    for layer in cell_prices.model.layers:
        for lane in (cell_prices.lanes.forward[layer], cell_prices.lanes.backward[layer]):
            seconds += lane.seconds(overlap=plan.question.overlap)
    return seconds


def _resized(plan: Plan, schedule: Schedule, effort: SearchEffort) -> Plan:
    """The plan of a schedule that differs in its pieces; the plan where that fits less well, or
    takes still more where the plan is tight."""
    found = simulated(plan.question, plan.strategy, schedule, effort)
    if found is None:
        return plan
    takes_more = found.device.total > plan.device.total
    if found.fit < plan.fit or (plan.tight and takes_more):
        return plan
    lowest = plan.seconds.total / (1 + plan.gap) - (plan.seconds.total - found.seconds.total)
    return replace(found, gap=gap(found, lowest))


def _with(schedule: Schedule, field: str, size: int) -> Schedule:
    changed: dict[str, Any] = {field: size}
    return replace(schedule, **changed)


def _blocks(plan: Plan) -> Iterator[int]:
    """Those that may be looked at: where K, V lie on the device, and calls on earlier keys exist
    that could see more."""
    question, schedule = plan.question, plan.schedule
    batch, tokens = question.run.batch, question.run.tokens
    if schedule.kv is Tier.HOST or schedule.sparse is not None or question.layout.ring > 1:
        return
    widest = max(layer.query_heads * layer.head_dim for layer in question.model.layers)
    for keys in BLOCKS:
        is_seen = schedule.kv_block < keys < 2 * (tokens - schedule.chunk)
        if is_seen and batch * keys * widest <= MOST_ELEMENTS:
            yield keys
