"""Decide whether schedules fit, without building their programs.

By their bounds: whether any schedule of a grid fits, and which leaves the most of each tier.

By a close look at one schedule: its arenas are those of its bounds except for padding. The brief
allocations of its cells come from a program of a few chunks: the latest of each stretch of chunks
that save the same tensors, which has the most keys before it. They are cells of the whole program
in its order, so its fullest moment is at least as full.

And as a composed plan: its bytes are those of a program of a few chunks (an outline). Its time is
counted where nothing overlaps, and otherwise that of a program of fewer layers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from farspan.planner.bounds import (
    COLLECTIVE,
    COMPUTE,
    EVICT,
    FETCH,
    HOST,
    TIERS,
    Peaks,
    RankGrids,
    ScheduleGrid,
    differing,
    grid_of,
    least,
    peaks,
    rank_grids,
    seconds,
    tiers_of,
)
from farspan.planner.cell_prices import Array, CellPrices
from farspan.planner.evaluate import (
    RankKind,
    RankWalk,
    Sized,
    composed_seconds,
    evaluate,
    kinds_of,
    on_machines,
    outlined,
    part_of,
    size,
    useful_flop,
    whole_schedule,
)
from farspan.planner.pass_counts import GroupSplits, SaveCounts
from farspan.planner.prices import rates_of
from farspan.planner.request import Plan, Question, Seconds
from farspan.planner.space import Cutting, Space
from farspan.planner.states import states, update_overlaps
from farspan.program.builder import build_program
from farspan.program.program import Close, EmbedBackward, Program
from farspan.spec import Objective, Reference, Schedule, Tier


def space_grids(
    question: Question, space: Space
) -> Iterator[tuple[RankGrids, Schedule, tuple[Cutting, ...]]]:
    """Yield, for each chunk size and set of options in the space: the grids (one per kind of rank),
    a schedule with these choices, and all splits of its layers into groups."""
    splits: dict[tuple[tuple[Cutting, ...], RankKind], GroupSplits] = {}
    known_prices: dict[object, CellPrices] = {}
    saves: dict[int, SaveCounts] = {}
    chunk, like = 0, None
    for schedule, cuttings in space.grids():
        sizes, shares = zip(*cuttings, strict=True)
        if schedule.chunk != chunk:
            chunk, known_prices, saves, like = schedule.chunk, {}, {}, None
        found = list[ScheduleGrid]()
        for kind in kinds_of(question, replace(schedule, groups=sizes[0])):
            key = schedule.kv, kind.rank
            if key not in known_prices:
                known_prices[key] = CellPrices(question, schedule, kind, like)
            like = known_prices[key]
            own = ((len(like.model.layers),),) if kind.is_stage else sizes
            of = tuple(zip(own, shares, strict=False)), kind
            own_splits = splits.get(of) or GroupSplits(like.question, own, kind, shares[: len(own)])
            count = len(like.chunks)
            pairs = saves.get(count) or _save_counts(space, count)
            splits[of], saves[count] = own_splits, pairs
            own_groups = replace(schedule, groups=sizes[0]) if kind.is_stage else schedule
            found.append(ScheduleGrid(like, own_groups, own_splits, pairs))
        yield tuple(found), schedule, cuttings


def _save_counts(space: Space, chunks: int) -> SaveCounts:
    attention = sorted({round(part * chunks) for part in space.attention})
    graphs = sorted({round(part * chunks) for part in space.activations})
    pairs = np.array([(a, b) for a in attention for b in graphs], dtype=np.int64)
    return SaveCounts(pairs[:, 0], pairs[:, 1], chunks)


def taken(grids: RankGrids, bound: Callable[[ScheduleGrid], Peaks] = peaks) -> tuple[Peaks, Array]:
    """Return `Peaks`, and device bytes by kind of rank, [kinds, ...]. The peaks are those of the
    fullest device and of a rank's share of main memory; messages and workspaces count."""
    each = [bound(grid) for grid in grids]
    for found, grid in zip(each, grids, strict=True):
        found.device += grid.cell_prices.passing
    if len(each) == 1:
        return each[0], each[0].device[None]
    devices = np.stack([found.device for found in each])
    hosts = np.stack([found.host for found in each])
    return Peaks(fullest(grids, devices), together(grids, hosts)), devices


def fullest(grids: RankGrids, devices: Array) -> Array:
    """Return the device bytes of the fullest kind of rank; `devices` [kinds, ...] has those of
    each. Ranks share unified memory: there, return a rank's mean on the fullest machine."""
    if grids[0].cell_prices.question.machine.unified:
        return together(grids, devices)
    return np.asarray(devices.max(axis=0))


def together(grids: RankGrids, sizes: Array) -> Array:
    """Return a rank's mean memory on the machine whose memory is the fullest; `sizes` [kinds, ...]
    are the bytes of one rank of each kind."""
    if len(grids) == 1:
        return np.asarray(sizes[0])
    question, kinds = grids[0].cell_prices.question, [grid.splits.kind for grid in grids]
    counts = np.array(on_machines(question, kinds), dtype=np.float64) / question.near()
    return np.asarray(np.tensordot(counts, sizes, axes=1).max(axis=0))


def slowest(grids: RankGrids, *, in_line: bool = False) -> Array:
    """Lower bound of the slowest rank's seconds per step, [splits, save counts, tiers]."""
    return np.asarray(np.max([seconds(grid, in_line=in_line) for grid in grids], axis=0))


def limits(question: Question) -> tuple[int, int]:
    """Return the bytes that one device can hold, and those of its share of main memory."""
    machine = question.machine
    if machine.unified:
        return machine.host_bytes, machine.host_bytes
    return machine.device_bytes, question.host_share()


def room(question: Question, device: Array, host: Array) -> Array:
    """Return the free fraction of the fuller tier; negative if a tier overflows."""
    first, second = limits(question)
    if question.machine.unified:
        return np.asarray(1 - (device + host) / first)
    return np.asarray(np.minimum(1 - device / max(1, first), 1 - host / max(1, second)))


def may_fit(grids: RankGrids, device: Array, host: Array) -> NDArray[np.bool_]:
    """Return which schedules fit, given the bytes of each; a repeated schedule counts as unfit."""
    fits = room(grids[0].cell_prices.whole, device, host) >= 0
    return np.asarray(fits & differing(grids[-1]) if fits.any() else fits)


def any_may_fit(grids: RankGrids) -> bool:
    """Return whether any schedule of the grids may fit, by a lower bound of its bytes (`least`)."""
    found, _ = taken(grids, least)
    return bool((room(grids[0].cell_prices.whole, found.device, found.host) >= 0).any())


def fitting(grids: RankGrids) -> NDArray[np.bool_]:
    """Return which schedules of a grid fit by their bounds, [splits, save counts, tiers]."""
    found, _ = taken(grids)
    return may_fit(grids, found.device, found.host)


def states_do_not_fit(question: Question) -> bool:
    """Return whether weights, gradients and optimizer states alone exceed the memory."""
    device, host = list[int](), list[int]()
    kinds = kinds_of(question, whole_schedule(question, Schedule()))
    for kind in kinds:
        part = part_of(question, kind)
        held = states(part, tuple((i, i + 1) for i in range(len(part.model.layers))))
        device.append(held.on_device + held.gradients + question.machine.reserve)
        host.append(held.on_host)
    first, second = limits(question)
    if question.machine.unified:
        return min(map(sum, zip(device, host, strict=True))) > first
    return max(device) > first or min(host) > second


def roomiest(question: Question, space: Space, count: int) -> list[Schedule]:
    """Return the `count` schedules of the space with the most free memory by their bounds. Of
    schedules that differ only in what they save and on which tier, the roomiest is returned."""
    found = []
    for grids, schedule, cuttings in space_grids(question, space):
        bytes_, _ = taken(grids)
        free = room(question, bytes_.device, bytes_.host)
        free = free.reshape(len(free), -1)
        for k, index in enumerate(free.argmax(axis=1)):
            x, attention, activations = TIERS[index % len(TIERS)]
            tiers = {"boundary_inputs": x, "attention": attention, "activations": activations}
            split, share = cuttings[k]
            cut = replace(schedule, groups=split, activation_save_layers=share)
            chosen = replace(cut, **tiers)
            found.append((float(free[k, index]), chosen))
    found.sort(key=lambda pair: -pair[0])
    return [schedule for _, schedule in found[:count]]


Chunks = tuple[tuple[int, int], ...]


def left(question: Question, schedule: Schedule) -> tuple[int, int]:
    """Bytes left on a device and in its share of host memory; negative if the schedule is too
    big."""
    sized = outlined(question, schedule)
    return sized.device.left, sized.host.left


def fits(question: Question, schedule: Schedule) -> bool:
    """Return whether the schedule fits, by its bounds and by its program of a few chunks."""
    found, _ = taken(rank_grids(question, schedule))
    tiers = tiers_of(schedule)
    free = room(question, found.device[..., tiers], found.host[..., tiers])
    return bool(free.min() >= 0) and min(left(question, schedule)) >= 0


def latest(chunks: int, attention: int, graphs: int, *, first: bool = False) -> list[int]:
    """Return a few chunks whose peak is that of all: the last of each run of chunks that save the
    same tensors, and the last but one of the first run. With `first` add chunk 0, the longest if
    chunks differ."""
    borders = sorted({0, chunks - attention, chunks - graphs, chunks})
    found = {0} if first else set[int]()
    found.update(stop - 1 for stop in borders[1:])
    # In the backward of the first stretch's last but one, all layers have gradients.
    return sorted(found | {max(0, borders[1] - 2)})


def transient(
    cell_prices: CellPrices, schedule: Schedule, attention: int, graphs: int, walked: Sequence[int]
) -> int:
    """Return the most bytes that cells of the `walked` chunks allocate briefly (`Peak.transient`).
    The last `attention` chunks save O and LSE, the last `graphs` chunks save activations."""
    chosen = replace(
        schedule,
        attention_save_fraction=latest_fraction(cell_prices.chunks, attention),
        activation_save_fraction=latest_fraction(cell_prices.chunks, graphs),
    )
    return _walk(cell_prices, chosen, walked).run().transient


def outside(cell_prices: CellPrices, schedule: Schedule) -> int:
    """Return the bytes of weight gradients and their fp32 sums in the embedding's last backward: a
    lower bound for all schedules of a chunk size. 0 for a pipeline stage."""
    if cell_prices.kind.is_stage:
        return 0
    # All layers have gradients then; the first group, of one layer or more, still has its sums.
    layers, chunks = len(cell_prices.model.layers), len(cell_prices.chunks)
    walk = _walk(cell_prices, replace(schedule, groups=(1,) * layers), latest(chunks, 0, 0))
    for instruction in walk.program.instructions:
        if isinstance(instruction, EmbedBackward):
            walk.peak = 0
        if not isinstance(instruction, Close) or instruction.group > 0:
            walk.issue(instruction)
    return walk.peak


def _walk(cell_prices: CellPrices, schedule: Schedule, walked: Sequence[int]) -> RankWalk:
    """Return a memory simulation of a program that contains only the `walked` chunks."""
    whole, rank = cell_prices.whole, cell_prices.kind.rank
    arguments, cut = (whole.model, whole.run, schedule, rank), whole.model.cut(whole.loss)
    program = build_program(*arguments, walked=walked, cut=cut)
    return RankWalk(whole, program)


def latest_fraction(chunks: Chunks, count: int) -> float:
    """Return the fraction of the sequence's tokens that lie in the latest `count` chunks."""
    if count == 0:
        return 0.0
    return (chunks[-1][1] - chunks[-count][0]) / chunks[-1][1]


def plan_of(question: Question, strategy: str, schedule: Schedule) -> Plan:
    """Return the plan that `evaluate` returns, in a fraction of the time (see `composed`)."""
    return composed(question, strategy, schedule, outlined(question, schedule))[0]


def loss_seconds(plan: Plan) -> tuple[float, float, float]:
    """Return the seconds of a step with the plan's schedule for three losses: mean cross-entropy,
    the plan's loss with stored log-probabilities of the reference model, and the plan's loss."""
    question = plan.question
    stored = replace(question.loss, reference=Reference.STORED)
    losses = Objective(), stored if question.loss.evaluates else question.loss, question.loss
    one, alone, whole = (
        plan_of(replace(question, loss=loss), plan.strategy, plan.schedule).seconds.total
        for loss in losses
    )
    return one, alone, whole


def composed(
    question: Question,
    strategy: str,
    schedule: Schedule,
    sized: Sized,
    like: CellPrices | None = None,
) -> tuple[Plan, tuple[Program, ...]]:
    """Return the plan of `evaluate`, from a program of a few chunks, and the programs built to time
    it. If copies overlap and the plan fits, a program of fewer layers is simulated; else the
    seconds of each queue are added up. Pipelines are left to `evaluate`. `like` is as in
    `rank_grids`."""
    if question.layout.pipeline > 1:
        whole = size(question, schedule)
        return evaluate(question, strategy, schedule, whole), whole.programs
    took, built = _counted_seconds(question, schedule, like), tuple[Program, ...]()
    if question.overlap and sized.fits:
        alone, waited, built = composed_seconds(question, schedule)
        # Fewer layers hide more of what the CPU issues than all of them can.
        alone = max(alone, took.compute, took.fetch, took.evict, took.host)
        update = took.optimizer + took.beside
        exposed = min(waited, update) if update_overlaps(question) else update
        took = replace(took, total=alone + exposed, optimizer=exposed, beside=update - exposed)
    peak = rates_of(question).peak * question.layout.devices()
    plan = Plan(
        strategy=strategy,
        schedule=schedule,
        question=question,
        device=sized.device,
        host=sized.host,
        seconds=took,
        mfu=useful_flop(question, schedule) / (peak * took.total),
    )
    return plan, built


def _counted_seconds(question: Question, schedule: Schedule, like: CellPrices | None) -> Seconds:
    """Seconds of a step on one stage: the busiest queue's, or all queues' if nothing overlaps."""
    grid, tiers = grid_of(question, schedule, like), tiers_of(schedule)
    work, copies = grid.lanes
    on_host = [tier is Tier.HOST for tier in TIERS[tiers]]
    fetched, evicted = (float(copies[0, way, :, 0] @ on_host) for way in range(2))
    busy = {
        "compute": float(work[0, COMPUTE, 0]),
        "fetch": float(work[0, FETCH, 0]) + fetched,
        "evict": float(work[0, EVICT, 0]) + evicted,
        "collective": float(work[0, COLLECTIVE, 0]),
        "host": float(work[0, HOST, 0]),
    }
    names = {"compute": "compute", "collective": "network", "host": "host"}
    bounds = {name: busy[lane] for lane, name in names.items()}
    bounds["link"] = max(busy["fetch"], busy["evict"])
    total, alone = (
        float(price(grid)[0, 0, tiers]) for price in (seconds, partial(seconds, update=False))
    )
    beside, update = update_overlaps(question), grid.cell_prices.update
    return Seconds(
        total=total,
        optimizer=total - alone if beside else update,
        bound=max(bounds, key=lambda name: bounds[name]),
        beside=update - (total - alone) if beside else 0.0,
        **busy,
    )
