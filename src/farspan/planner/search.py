"""Search for the fastest schedule that fits: lowest bound first, each proved by its program.

Every schedule of the space gets a lower bound of its time and memory. The one with the lowest bound
of time among those that may fit is built and simulated; it becomes the best so far if it fits and
is faster. When no bound is left below the best, the best is the optimum of the space. When the
budget of seconds runs out first, the best is at most `gap` slower than the optimum, by the lowest
bound left.

Kinds. Bounds count a cell's graphs, but not its transient allocations, which depend on the split
and on which chunks are saved. Choices that are alike in both are one kind: their transient bytes
are computed when the fastest choice of the kind has its turn (`TransientCache`). Those of modules
outside the layers are the same for all kinds, and count as soon as a frontier is opened.

Footprint. Main memory that a GPU copies from is locked: its pages have to be taken first (2.3 GB/s
on two cores), and no other program has it then. Many schedules are nearly as fast as the fastest,
and some take tens of GiB less. Candidates that may be near enough by their bounds of time are
simulated in the order of their bounds of bytes, so the first that proves near enough takes the
fewest bytes. The gap includes the time that this costs.

Sizes. `loss_chunk_size` and `kv_block` would each double the space, and both are nearly independent
of the rest of a schedule: a larger piece of the head reads and writes the gradient of its weights
less often and holds more logits for a moment, larger blocks of keys are merged less often. So they
are chosen for the schedule that was found: by their prices, and kept if the whole program with them
fits and is faster by at least `WORTH`.
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
from farspan.planner.bounds import TIERS, RankGrids, ScheduleGrid, momentary
from farspan.planner.cell_prices import Array, CellPrices
from farspan.planner.evaluate import PAGE, outlined, refuse_layout
from farspan.planner.feasibility import (
    fullest,
    room,
    slowest,
    space_grids,
    states_do_not_fit,
    taken,
)
from farspan.planner.request import Plan, Question
from farspan.planner.space import Cutting, Space
from farspan.program.program import Program
from farspan.program.strategies import GROUPED
from farspan.spec import Schedule, Tier

Index = NDArray[np.int64]
INFINITE = float("inf")
EVENLY = 6  # schedules of a chunk size that keep layers evenly, tried before the search
KINDS = 27  # kinds of kept choices for each split, numbered by SaveCounts.alike


@dataclass(slots=True)
class Choices:
    """N schedules of a grid that are not simulated yet, with bounds of their seconds and bytes."""

    index: Index  # into the grid, [K, F, T], flattened
    seconds: Array
    device: Array  # bytes
    host: Array
    kind: Index
    devices: Array  # [S, N]: bytes on the device of each kind of rank

    def only(self, which: Index | NDArray[np.bool_] | slice) -> "Choices":
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
    """Seconds that a search may still compute, from counts of its work and not from a clock, so a
    question has the same plan on slow and busy machines.

    The prices are those of one core of a Xeon server of 2026 (`benchmarks/planning.py`): 5
    microseconds to build an instruction with its bytes, 7 to time it, 0.4 to bound a choice's time
    and memory, 7,000 to walk the cells of a kind.
    """

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
    """Schedules of one grid that are not simulated yet. `bound` is a lower bound of the seconds of
    all schedules, `lowest` of those not simulated. `open` lists the schedules; most grids never
    need it: `settle` drops what cannot fit, and `bound` then exceeds the best plan's seconds."""

    def __init__(
        self,
        question: Question,
        grids: RankGrids,
        schedule: Schedule,
        splits: tuple[Cutting, ...],
        effort: SearchEffort,
    ) -> None:
        self.question = question
        self.effort = effort
        self.is_in_line = False
        self.grids = grids
        self.schedule = schedule  # shared by the grids
        self.splits = splits
        self.saves = grids[0].saves
        self.choices: Choices | None = None
        self.known: set[int] = set()  # kinds whose cells are counted
        self.size = len(splits) * len(self.saves.graphs) * len(TIERS)
        self.fits = cache(partial(quick.fitting, grids))
        self.is_settled = not quick.any_may_fit(grids)
        self._bound(not self.is_settled)

    def _bound(self, fits: NDArray[np.bool_] | bool) -> None:
        self.bound = self.lowest = INFINITE
        if np.any(fits):
            times = slowest(self.grids, in_line=self.is_in_line)
            self.bound = self.lowest = float(np.min(times, where=fits, initial=INFINITE))

    def settle(self) -> None:
        """Raise the lower bound of time: count only schedules that may fit in memory."""
        self.is_settled = True
        self._bound(self.fits())

    def in_line(self) -> "Frontier":
        """Return a copy whose bounds of time assume that nothing overlaps."""
        twin = copy(self)
        twin.is_in_line, twin.known = True, set()
        twin._bound(not self.is_settled)
        return twin

    def open(self, best: float, cells: "TransientCache") -> None:
        """List the schedules that may fit and may take less than `best` seconds, fastest first."""
        every = self.within(best, cells)
        self._keep(every.only(np.lexsort((every.device + every.host, every.seconds))))

    def within(self, limit: float, cells: "TransientCache") -> Choices:
        """Return the schedules that may fit and take less than `limit` seconds, unordered. The
        transient bytes of their cells are not counted yet."""
        times = slowest(self.grids, in_line=self.is_in_line)
        found, devices = taken(self.grids)
        devices += np.stack([cells.least(grid) for grid in self.grids])[..., None]
        device = fullest(self.grids, devices)
        fits = quick.may_fit(self.grids, device, found.host) & (times < limit)
        index = np.flatnonzero(fits)
        split, choice = np.divmod(index // len(TIERS), len(self.saves.graphs))
        return Choices(
            index,
            times.ravel()[index],
            device.ravel()[index],
            found.host.ravel()[index],
            split * KINDS + self.saves.alike[choice],
            devices.reshape(len(devices), -1)[:, index],
        )

    def evenly(self, best: float, cells: "TransientCache") -> Iterator[Schedule]:
        """Yield the few schedules with the lowest bounds below `best` seconds that keep activations
        of layers evenly on the host, and all else on the device."""
        s, tiers = self.schedule, TIERS.index((Tier.DEVICE, Tier.DEVICE, Tier.HOST))
        if (s.kv, s.kv_home, s.kv_kept) != (Tier.DEVICE, Tier.DEVICE, True):
            return
        found = self.within(best, cells)
        split, choice = np.divmod(found.index // len(TIERS), len(self.saves.graphs))
        shares = np.array([share for _, share in self.splits])
        chosen = (shares[split] < 1) & (found.index % len(TIERS) == tiers)
        chosen &= self.saves.graphs[choice] == self.saves.chunks
        found = found.only(chosen)
        for index in found.index[np.argsort(found.seconds, kind="stable")][:EVENLY]:
            yield self.schedule_at(int(index))

    def _keep(self, choices: Choices) -> None:
        self.choices = choices
        self.lowest = float(choices.seconds[0]) if len(choices.index) else INFINITE

    def step(self, cells: "TransientCache") -> Schedule | None:
        """Take the fastest schedule off the list and return it. If the bytes that its cells
        allocate briefly are not counted yet, count them and return None: the schedule may no longer
        fit, so that another is the fastest."""
        choices = self.choices
        assert choices is not None
        kind = int(choices.kind[0])
        if kind not in self.known:
            self._count(kind, cells)
            return None
        index = int(choices.index[0])
        self._keep(choices.only(slice(1, None)))
        return self.schedule_at(index)

    def _count(self, kind: int, cells: "TransientCache") -> None:
        choices = self.choices
        assert choices is not None
        self.known.add(kind)
        self.effort.walk()
        members = choices.kind == kind
        choices.devices[:, members] += self.transients(kind, cells)
        choices.device[members] = fullest(self.grids, choices.devices[:, members])
        self._keep(choices.only(room(self.question, choices.device, choices.host) >= 0))

    def transients(self, kind: int, cells: "TransientCache") -> Array:
        """Return the bytes that cells allocate briefly in one kind of schedules (equal split,
        chunks saved alike), [kinds of rank, 1]. Bytes that `within` counts already are left out."""
        split, alike = divmod(kind, KINDS)
        held = []
        for grid in self.grids:
            least = cells.least(grid)[split, self.saves.alike == alike][0]
            held.append([max(0.0, float(cells.beyond(grid, split, alike) - least))])
        return np.array(held)

    def schedule_at(self, index: int) -> Schedule:
        chosen, tiers = divmod(index, len(TIERS))
        split, choice = divmod(chosen, len(self.saves.graphs))
        x, attention, activations = TIERS[tiers]
        sizes, share = self.splits[split]
        saves, chunks = self.saves, self.grids[0].cell_prices.chunks
        return replace(
            self.schedule,
            groups=sizes,
            activation_save_layers=share,
            boundary_inputs=x,
            attention=attention,
            activations=activations,
            attention_save_fraction=quick.latest_fraction(chunks, int(saves.attention[choice])),
            activation_save_fraction=quick.latest_fraction(chunks, int(saves.graphs[choice])),
        )


class _Queue:
    """Priority queue of grids (`Frontier`) by the lower bound of the seconds of their schedules."""

    def __init__(self, frontiers: Sequence[Frontier]) -> None:
        self._heap = [(f.lowest, at, f) for at, f in enumerate(frontiers) if f.lowest < INFINITE]
        heapq.heapify(self._heap)
        self._settle()

    def _settle(self) -> None:
        while self._heap and not self._heap[0][2].is_settled:
            _, at, frontier = heapq.heappop(self._heap)
            frontier.settle()
            self._push(at, frontier)

    def _push(self, at: int, frontier: Frontier) -> None:
        if frontier.lowest < INFINITE:
            heapq.heappush(self._heap, (frontier.lowest, at, frontier))

    @property
    def lowest(self) -> float:
        """Lower bound of the seconds of every schedule that is not simulated yet."""
        return self._heap[0][0] if self._heap else INFINITE

    def step(self, best: float, cells: "TransientCache") -> Schedule | None:
        """Take one step on the grid with the lowest bound: list its schedules that may take less
        than `best` seconds and return None or, once they are listed, the next (`Frontier.step`)."""
        _, at, frontier = heapq.heappop(self._heap)
        schedule = None
        if frontier.choices is None:
            frontier.open(best, cells)
        else:
            schedule = frontier.step(cells)
        self._push(at, frontier)
        self._settle()
        return schedule


class TransientCache:
    """Cache of briefly allocated bytes of cells, per kind of schedules (equal split and saves)."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], int] = {}
        self._outside: dict[int, int] = {}  # by chunk

    def least(self, grid: ScheduleGrid) -> Array:
        """Bytes of the embedding's last backward above `momentary`, [splits, save counts]."""
        chunk = grid.schedule.chunk
        if chunk not in self._outside:
            given = grid.schedule
            plain = Schedule(chunk, kv_block=given.kv_block, kv_kept=True, weights=given.weights)
            self._outside[chunk] = quick.outside(grid.cell_prices, plain)
        return np.asarray(np.maximum(0.0, self._outside[chunk] - momentary(grid)))

    def beyond(self, grid: ScheduleGrid, split: int, alike: int) -> float:
        """Return the fewest bytes by which cells of one kind of schedules exceed `momentary`."""
        saves, s, sizes = grid.saves, grid.schedule, grid.splits.sizes[split]
        members = saves.alike == alike
        # The chunks with the fewest keys before them, over all choices of the kind.
        most = int(saves.attention[members].max()), int(saves.graphs[members].max())
        walked = quick.latest(saves.chunks, *most, first=not grid.cell_prices.are_equal)
        rank = grid.splits.kind.rank
        keeping = grid.splits.keeping[split]
        key = s.chunk, sizes, keeping, rank, s.kv_kept, s.attention_open, s.layer_checkpoint, *most
        if key not in self._known:
            share = grid.splits.shares[split]
            cut = replace(s, groups=sizes, activation_save_layers=share)
            own = s if grid.splits.kind.is_stage else cut
            self._known[key] = quick.transient(grid.cell_prices, own, *most, walked)
        held = grid.splits.split_states[split]
        gradients = held.gradients + max(0, held.accumulators + self._known[key])
        return float(gradients - momentary(grid)[split, np.flatnonzero(members)[0]])


Footprint = tuple[float, float]  # bytes of the host; ties are broken by bytes of the device
SLACK = 1e-9  # sums of the same numbers in another order differ by less

# Fraction of the fastest schedule's time that may be spent to save bytes: a twentieth of the error
# of predicted steps (0.89 to 1.07 of the measurements, benchmarks/results/agreement.json).
TOLERANCE = 0.005


def footprint(plan: Plan) -> Footprint:
    return plan.host.total, plan.device.total


def lightest(plans: Iterable[Plan], tolerance: float = TOLERANCE) -> Plan:
    """Return the plan with the least footprint (main memory, then device memory) among those that
    take at most a fraction `tolerance` longer than the fastest. Only plans with the best `fit`
    count. Of equal footprints the fastest wins."""
    found = list(plans)
    most = max(plan.fit for plan in found)
    fitting = [plan for plan in found if plan.fit is most]
    limit = min(plan.seconds.total for plan in fitting) * (1 + tolerance)
    near = [plan for plan in fitting if plan.seconds.total <= limit]
    return min(near, key=lambda plan: (footprint(plan), plan.seconds.total))


def chosen(plans: Sequence[Plan]) -> tuple[Plan, tuple[Plan, ...]]:
    """Return the plan to run (the `lightest` if any fits) and all other plans by rank."""
    ranked = sorted(plans, key=Plan.rank)
    best = lightest(ranked) if ranked[0].fits else ranked[0]
    return best, tuple(plan for plan in ranked if plan is not best)


@dataclass(frozen=True, slots=True, order=True)
class _Candidate:
    """A schedule with a lower bound of its footprint (bytes of main memory, then of the device)."""

    footprint: Footprint
    at: int  # index of its frontier
    index: int  # in the frontier's grid
    kind: int
    is_counted: bool = False  # the footprint includes transient bytes of its kind


class FootprintSearch:
    """Search for the least memory among schedules nearly as fast as the fastest."""

    def __init__(
        self, question: Question, frontiers: Sequence[Frontier], cells: TransientCache
    ) -> None:
        self.question = question
        self.frontiers = frontiers
        self.cells = cells
        self.simulated = 0

    def search(self, best: Plan, limit: float, effort: SearchEffort) -> Plan:
        """Return the plan of at most `limit` seconds with the least memory, or `best` if none takes
        less memory than `best`. When the effort is spent, return the best found so far."""
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
        """Yield schedules that by their bounds may be fast enough and smaller than `best`."""
        least = footprint(best)
        for at, frontier in enumerate(self.frontiers):
            if frontier.bound > limit * (1 + SLACK):
                continue
            found = frontier.within(limit * (1 + SLACK), self.cells)
            # Main memory is taken in whole pages; one byte less, since these are sums of floats.
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
        """Return the candidate with the transient bytes of its cells added to its footprint."""
        host, device = candidate.footprint
        # The kind of rank with the least, since any kind may be the fullest.
        device += float(self.frontiers[candidate.at].transients(candidate.kind, self.cells).min())
        return replace(candidate, footprint=(host, device), is_counted=True)

    def _plan(self, candidate: _Candidate, effort: SearchEffort) -> Plan | None:
        schedule = self.frontiers[candidate.at].schedule_at(candidate.index)
        self.simulated += 1
        return simulated(self.question, GROUPED, schedule, effort)


def simulated(
    question: Question, strategy: str, schedule: Schedule, effort: SearchEffort
) -> Plan | None:
    """Return the plan of a schedule by simulation, or None if it does not fit."""
    sized = outlined(question, schedule)
    effort.build(sized.programs)
    if not sized.fits:
        return None
    plan, programs = quick.composed(question, strategy, schedule, sized)
    effort.build(programs)
    effort.time(programs)
    return plan


FOOTPRINT_SHARE = 8  # the search for bytes may take 1 / 8 of the seconds of the search for time,
LEAST_SECONDS = 0.4  # and at least this many seconds, since it saves tens of GiB


@dataclass(frozen=True, slots=True)
class Outcome:
    """Best plan that a search found, and a lower bound of the seconds of all others."""

    best: Plan | None  # None: nothing fits, or nothing that fits was found in time
    fastest: Plan | None  # `best`, or the plan that it replaced because it takes fewer bytes
    lowest: float  # lower bound of the seconds of every plan that fits; may be infinite
    simulated: int  # programs built

    @property
    def gap(self) -> float:
        """Upper bound of the fraction by which the best plan is slower than the optimum."""
        return 0.0 if self.best is None else gap(self.best, self.lowest)


def gap(plan: Plan, lowest: float) -> float:
    """Largest fraction by which a plan is slower than the optimum (at least `lowest` seconds)."""
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
    """Return the fastest schedule of the space by simulation, or `best` if none is faster. Among
    schedules that take at most a fraction `tolerance` longer than the fastest, the one that takes
    the least memory wins (main memory first).

    The search stops when nothing is left that may be faster by a fraction of `near`. `seconds` are
    those of `SearchEffort`, so any machine finds the same schedule; at most an eighth more, or
    `LEAST_SECONDS`, are spent to save memory. Raises UnsupportedError for an impossible layout.
    """
    refuse_layout(question)
    if states_do_not_fit(question):
        return Outcome(best, best, INFINITE, 0)
    effort, cells, count = SearchEffort(seconds), TransientCache(), 0
    frontiers = [Frontier(question, *grids, effort) for grids in space_grids(question, space)]
    known = [] if best is None else [best]
    if question.overlap and (first := _first_in_line(question, frontiers, cells, effort)):
        known.append(first)
        best = min(known, key=_seconds)
        known += _keeping_evenly(question, frontiers, cells, effort, best)
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
    footprints = FootprintSearch(question, frontiers, cells)
    limit = _seconds(best) * (1 + tolerance)
    light = lightest(known, tolerance)
    least = footprints.search(
        light, limit, SearchEffort(max(LEAST_SECONDS, seconds / FOOTPRINT_SHARE))
    )
    return Outcome(least, best, lowest, count + footprints.simulated)


def _first_in_line(
    question: Question, frontiers: Sequence[Frontier], cells: TransientCache, effort: SearchEffort
) -> Plan | None:
    """Return the plan that is fastest if nothing overlaps, among those that fit. If copies overlap,
    many schedules have nearly the same bound; this plan is close to the fastest, and soon found."""
    effort.bound(frontiers)
    queue = _Queue([frontier.in_line() for frontier in frontiers])
    while queue.lowest < INFINITE and not effort.is_spent:
        schedule = queue.step(INFINITE, cells)
        plan = schedule and simulated(question, GROUPED, schedule, effort)
        if plan:
            return plan
    return None


def _keeping_evenly(
    question: Question,
    frontiers: Sequence[Frontier],
    cells: TransientCache,
    effort: SearchEffort,
    best: Plan | None,
) -> list[Plan]:
    """Return plans that fit and keep activations of layers evenly on the host. Bounds of time know
    too little of copies that wait for each other to tell the best of these from hundreds."""
    found = list[Plan]()
    for frontier in frontiers:
        for schedule in frontier.evenly(min(map(_seconds, [best, *found])), cells):
            plan = None if effort.is_spent else simulated(question, GROUPED, schedule, effort)
            found += [] if plan is None else [plan]
    return found


def _seconds(best: Plan | None) -> float:
    return INFINITE if best is None else best.seconds.total


HEADS = (2048, 4096, 8192)  # tokens, after the default
BLOCKS = (2**15, 2**16)  # keys, after the default
# Fraction of a step that the next size has to save: a fifth of what the search spends to save main
# memory.
WORTH = 0.001
MOST_ELEMENTS = 2**31 - 1  # in the K of a call with all heads, which kernels count in 32 bits


def with_pieces(plans: Sequence[Plan], seconds: float) -> list[Plan]:
    """Return the plans with a better `loss_chunk_size`, chosen for the first plan, whose `kv_block`
    is improved too. A plan that does not fit with it keeps its own. Programs are tried for
    `seconds` of `SearchEffort`. Bounds of other schedules fall by the seconds gained."""
    effort = SearchEffort(seconds)
    first = _improved(plans[0], "loss_chunk_size", HEADS, effort)
    first = _improved(first, "kv_block", tuple(_blocks(first)), effort)
    head = first.schedule.loss_chunk_size
    if head == plans[0].schedule.loss_chunk_size:
        return [first, *plans[1:]]
    others = (replace(plan.schedule, loss_chunk_size=head) for plan in plans[1:])
    return [first, *map(partial(_resized, effort=effort), plans[1:], others)]


def _improved(plan: Plan, field: str, sizes: Sequence[int], effort: SearchEffort) -> Plan:
    """Return `plan` with the largest of `sizes` as `field` that fits and saves time, or
    unchanged."""
    for tokens in reversed(_worth_having(plan, field, sizes)):
        if effort.is_spent:
            break
        found = _resized(plan, _with(plan.schedule, field, tokens), effort)
        if found.seconds.total <= plan.seconds.total * (1 - WORTH):
            return found
    return plan


def _worth_having(plan: Plan, field: str, sizes: Sequence[int]) -> list[int]:
    """Return those of `sizes` that by their prices save a fraction `WORTH` of the step or more."""
    found, known = list[int](), _work(plan, plan.schedule)
    for tokens in sizes:
        work = _work(plan, _with(plan.schedule, field, tokens))
        if known - work >= WORTH * plan.seconds.total:
            found.append(tokens)
            known = work
    return found


def _work(plan: Plan, schedule: Schedule) -> float:
    """Seconds of the work that `loss_chunk_size` and `kv_block` change: the head, and each cell's
    forward and backward. With sparse attention `kv_block` is fixed, so only the head counts."""
    cell_prices = CellPrices(plan.question, schedule)
    lanes, loss = cell_prices.lanes, plan.question.loss
    seconds = float(lanes.head.sum())
    if loss.is_cut:
        seconds += (1 + loss.forwards) * float(lanes.values.sum())
    if schedule.sparse is not None:
        return seconds
    for layer in cell_prices.model.layers:
        for lane in (cell_prices.lanes.forward[layer], cell_prices.lanes.backward[layer]):
            seconds += lane.seconds(overlap=plan.question.overlap)
    return seconds


def _resized(plan: Plan, schedule: Schedule, effort: SearchEffort) -> Plan:
    """Return the plan with a schedule that differs only in `loss_chunk_size` or `kv_block`. Return
    `plan` if the new plan fits less well, or takes more memory although `plan` is tight."""
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
    """Yield values of `kv_block` that make attention calls longer; none if K, V lie on the host."""
    question, schedule = plan.question, plan.schedule
    batch, tokens = question.run.batch, question.run.tokens
    if schedule.kv is Tier.HOST or schedule.sparse is not None or question.layout.ring > 1:
        return
    widest = max(layer.query_heads * layer.head_dim for layer in question.model.layers)
    for keys in BLOCKS:
        is_seen = schedule.kv_block < keys < 2 * (tokens - schedule.chunk)
        if is_seen and batch * keys * widest <= MOST_ELEMENTS:
            yield keys
