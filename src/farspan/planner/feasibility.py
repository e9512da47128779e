"""Whether schedules fit, without building their programs.

By their bounds: whether any of a family fits, and which leaves the most of each tier.

By a close look at one: its arenas are those of its bounds but for padding. What cells hold for a
moment comes from the program of the few chunks that tell: of chunks that are kept alike the latest,
which has the most keys before it. They are cells of the whole program in its order, so its fullest
moment is at least as full.

And as a plan by counting, enough for a schedule that does not fit: its time is that of its program
where nothing overlaps; its memory is a bound, short of padding and of what lies between buffers, so
it may look as if a little less were missing, never more.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from farspan.planner.bounds import (
    COLLECTIVE,
    COMPUTE,
    EVICT,
    FETCH,
    HOST,
    TIERS,
    Family,
    Frames,
    Peaks,
    all_frames,
    device_slots,
    frames_of,
    lanes,
    momentary,
    parts,
    peaks,
    seconds,
    tiers_of,
)
from farspan.planner.cell_prices import Array, CellPrices
from farspan.planner.collectives import exchange_bytes
from farspan.planner.evaluate import (
    INPUT_BYTES,
    RankKind,
    RankWalk,
    evaluate,
    kinds_of,
    on_machines,
    own_schedule,
    part_of,
    useful_flop,
    whole_schedule,
)
from farspan.planner.pass_counts import Cuts, Kept
from farspan.planner.prices import rates_of, workspace_bytes
from farspan.planner.request import Budget, Plan, Question, Seconds
from farspan.planner.space import Cut, Space
from farspan.planner.states import states
from farspan.program.builder import build_program
from farspan.program.program import Close, EmbedBackward
from farspan.spec import Schedule, Tier


def families(
    question: Question, space: Space
) -> Iterator[tuple[Family, Schedule, tuple[Cut, ...]]]:
    """Every family of the space, with what its schedules have in common and their cuts."""
    cuts: dict[tuple[tuple[Cut, ...], RankKind], Cuts] = {}
    known_prices: dict[object, CellPrices] = {}
    kept: dict[int, Kept] = {}
    chunk = 0
    for schedule, sizes in space.families():
        if schedule.chunk != chunk:
            chunk, known_prices, kept = schedule.chunk, {}, {}
        found, like = list[Frames](), None
        for kind in kinds_of(question, replace(schedule, groups=sizes[0])):
            key = schedule.kv, kind.rank
            if key not in known_prices:
                known_prices[key] = CellPrices(question, schedule, kind, like)
            like = known_prices[key]
            own = ((len(like.model.layers),),) if kind.is_stage else sizes
            of = cuts.get((own, kind)) or Cuts(like.question, own, kind)
            count = len(like.chunks)
            pairs = kept.get(count) or _kept_pairs(space, count)
            cuts[own, kind], kept[count] = of, pairs
            own_groups = replace(schedule, groups=sizes[0]) if kind.is_stage else schedule
            found.append(Frames(like, own_groups, of, pairs))
        yield tuple(found), schedule, sizes


def _kept_pairs(space: Space, chunks: int) -> Kept:
    """Every pair of fractions, in whole chunks."""
    attention = sorted({round(part * chunks) for part in space.attention})
    graphs = sorted({round(part * chunks) for part in space.activations})
    pairs = np.array([(a, b) for a in attention for b in graphs], dtype=np.int64)
    return Kept(pairs[:, 0], pairs[:, 1], chunks)


def taken(family: Family) -> tuple[Peaks, Array]:
    """The bytes of a family, with what messages take under way and kernels for themselves: of the
    fullest device and a rank's share of main memory; and of every kind of rank's device."""
    each = [peaks(frames) for frames in family]
    for found, frames in zip(each, family, strict=True):
        question = frames.cell_prices.question
        own = own_schedule(frames.schedule, question.layout)
        found.device += exchange_bytes(question, own.chunk)
        found.device += workspace_bytes(question, own)
    devices = np.stack([found.device for found in each])
    hosts = np.stack([found.host for found in each])
    return Peaks(fullest(family, devices), together(family, hosts)), devices


def fullest(family: Family, devices: Array) -> Array:
    """Of the kinds of rank, which come first; where both tiers are one memory, a rank's share."""
    if family[0].cell_prices.question.machine.unified:
        return together(family, devices)
    return np.asarray(devices.max(axis=0))


def together(family: Family, sizes: Array) -> Array:
    """A rank's share of what ranks of one machine take; kinds of rank come first."""
    if len(family) == 1:
        return np.asarray(sizes[0])
    question, kinds = family[0].cell_prices.question, [frames.cuts.kind for frames in family]
    counts = np.array(on_machines(question, kinds), dtype=np.float64) / question.near()
    return np.asarray(np.tensordot(counts, sizes, axes=1).max(axis=0))


def slowest(family: Family) -> Array:
    """[K, F, T]: seconds of a step at least, of the rank that takes the longest."""
    return np.asarray(np.max([seconds(frames) for frames in family], axis=0))


def limits(question: Question) -> tuple[int, int]:
    """Bytes that a device, and its share of main memory, can hold."""
    machine = question.machine
    if machine.unified:
        return machine.host_bytes, machine.host_bytes
    share = machine.host_bytes // min(machine.devices, question.layout.devices())
    return machine.device_bytes, share


def room(question: Question, device: Array, host: Array) -> Array:
    """What is left of the fuller tier, as a share of it."""
    first, second = limits(question)
    if question.machine.unified:
        return np.asarray(1 - (device + host) / first)
    return np.asarray(np.minimum(1 - device / max(1, first), 1 - host / max(1, second)))


def states_do_not_fit(question: Question) -> bool:
    """Are weights, gradients and optimizer states alone too much, whatever the schedule?"""
    device, host = list[int](), list[int]()
    kinds = kinds_of(question, whole_schedule(question, Schedule()))
    for kind in kinds:
        part = part_of(question, kind)
        held = states(part, tuple((i, i + 1) for i in range(len(part.model.layers))))
        size = held.weights + held.gathered + held.gradients + held.optimizer
        device.append(size + question.machine.reserve)
        host.append(held.optimizer_on_host)
    first, second = limits(question)
    if question.machine.unified:
        return min(map(sum, zip(device, host, strict=True))) > first
    return max(device) > first or min(host) > second


def roomiest(question: Question, space: Space, count: int) -> list[Schedule]:
    """The schedules whose fuller tier has the most left by its bounds: of each cut and switches
    the one that has."""
    found = []
    for family, schedule, sizes in families(question, space):
        bytes_, _ = taken(family)
        free = room(question, bytes_.device, bytes_.host)
        free = free.reshape(len(free), -1)
        for k, index in enumerate(free.argmax(axis=1)):
            x, attention, activations = TIERS[index % len(TIERS)]
            tiers = {"boundary_inputs": x, "attention": attention, "activations": activations}
            chosen = replace(schedule, groups=sizes[k], **tiers)
            found.append((float(free[k, index]), chosen))
    found.sort(key=lambda pair: -pair[0])
    return [schedule for _, schedule in found[:count]]


Chunks = tuple[tuple[int, int], ...]
Telling = tuple[tuple[int, bool, bool], ...]  # chunk; are O and LSE kept; are activations


def left(question: Question, schedule: Schedule) -> tuple[int, int]:
    """Bytes to spare on the device and on its share of the host, negative where it is too much."""
    family, tiers = all_frames(question, schedule), tiers_of(schedule)
    found, devices = taken(family)
    host = float(found.host[0, 0, tiers])
    each = [float(size) for size in devices[:, 0, 0, tiers]]
    for place, frames in enumerate(family):
        held = frames.cuts.held[0]
        gradients = held.gradients + max(0, held.accumulators + cell_bytes(frames))
        each[place] += gradients - momentary(frames)[0, 0]
    device = float(fullest(family, np.array(each)))
    first, second = limits(question)
    if question.machine.unified:
        return int(first - device - host), int(first - device - host)
    return int(first - device), int(second - host)


def fits(question: Question, schedule: Schedule) -> bool:
    """Does it, by its bounds and then by all that is left?"""
    found, _ = taken(all_frames(question, schedule))
    tiers = tiers_of(schedule)
    free = room(question, found.device[..., tiers], found.host[..., tiers])
    return bool(free.min() >= 0) and min(left(question, schedule)) >= 0


def cell_bytes(frames: Frames) -> int:
    """Bytes that cells of a single schedule hold for a moment, as `Peak.transient`."""
    kept = frames.kept
    chosen = int(kept.attention[0]), int(kept.graphs[0])
    telling = latest(kept.chunks, *chosen, first=not frames.cell_prices.are_equal)
    return transient(frames.cell_prices, frames.schedule, telling)


def latest(chunks: int, attention: int, graphs: int, *, first: bool = False) -> Telling:
    """The chunks that tell: the latest of those kept alike, and of the earliest kind one more,
    which runs backward when all layers have gradients; where chunks differ the `first` too, which
    is the longest."""
    borders = sorted({0, chunks - attention, chunks - graphs, chunks})
    found: set[int] = {0} if first else set()
    for start, stop in pairwise(borders):
        found.add(stop - 1)
        if start == 0:
            found.add(max(0, stop - 2))
    return tuple((c, c >= chunks - attention, c >= chunks - graphs) for c in sorted(found))


def transient(cell_prices: CellPrices, schedule: Schedule, telling: Telling) -> int:
    """Bytes that cells of the cell_prices's rank hold for a moment, as `Peak.transient`, in these
    of its chunks."""
    return _walk(cell_prices, schedule, telling).run().transient


def outside(cell_prices: CellPrices, schedule: Schedule) -> int:
    """Bytes of gradients, their sums and what the last backward of the embedding holds, at least,
    whatever the schedule but for its chunk; 0 of a pipeline's stage. All layers have gradients
    then; of the layers of the first group, of which there is one at least, there are still the
    sums."""
    if cell_prices.kind.is_stage:
        return 0
    layers, chunks = len(cell_prices.model.layers), len(cell_prices.chunks)
    walk = _walk(cell_prices, replace(schedule, groups=(1,) * layers), latest(chunks, 0, 0))
    for instruction in walk.program.instructions:
        if isinstance(instruction, EmbedBackward):
            walk.peak = 0
        if not isinstance(instruction, Close) or instruction.group > 0:
            walk.issue(instruction)
    return walk.peak


def _walk(cell_prices: CellPrices, schedule: Schedule, telling: Telling) -> RankWalk:
    """Through a program of these chunks alone. Tiers make no difference: what is held is on the
    device."""
    chosen = [chunk for chunk, _, _ in telling]
    chunks = tuple(cell_prices.chunks[chunk] for chunk in chosen)
    few = tuple(pairwise(accumulate((stop - start for start, stop in chunks), initial=0)))
    short = replace(
        schedule,
        boundary_inputs=Tier.DEVICE,
        kv=Tier.DEVICE,
        kv_home=Tier.DEVICE,
        attention=Tier.DEVICE,
        activations=Tier.DEVICE,
        attention_save_fraction=latest_fraction(few, sum(kept for _, kept, _ in telling)),
        activation_save_fraction=latest_fraction(few, sum(graph for _, _, graph in telling)),
    )
    run = replace(cell_prices.run, tokens=few[-1][1])
    program = build_program(cell_prices.whole.model, run, short, cell_prices.kind.rank, few)
    # At their places in the sequence: what they hold depends on the keys before them.
    rows = tuple(cell_prices.share.tokens.rows[chunk] for chunk in chosen)
    share = replace(program.share, tokens=replace(program.share.tokens, rows=rows))
    return RankWalk(cell_prices.whole, replace(program, chunks=chunks, share=share))


def latest_fraction(chunks: Chunks, count: int) -> float:
    """The fraction of the tokens that the latest `count` chunks hold."""
    if count == 0:
        return 0.0
    return (chunks[-1][1] - chunks[-count][0]) / chunks[-1][1]


def plan_of(question: Question, strategy: str, schedule: Schedule) -> Plan:
    """`evaluate`, but for what surely does not fit: then by counting, where that gives its time."""
    in_line = not question.overlap and question.layout.pipeline == 1
    if in_line and not fits(question, schedule):
        return estimate(question, strategy, schedule)
    return evaluate(question, strategy, schedule)


def estimate(question: Question, strategy: str, schedule: Schedule) -> Plan:
    """Of one pipeline stage, nothing overlapping."""
    frames, tiers = frames_of(question, schedule), tiers_of(schedule)
    device, host = _budgets(question, frames, tiers)
    took = _estimated_seconds(frames, tiers)
    devices = question.layout.devices()
    return Plan(
        strategy=strategy,
        schedule=schedule,
        question=question,
        device=device,
        host=host,
        seconds=took,
        mfu=useful_flop(question) / (rates_of(question).peak * devices * took.total),
    )


def _estimated_seconds(frames: Frames, tiers: int) -> Seconds:
    work, copies = lanes(frames)
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
    return Seconds(
        total=float(seconds(frames)[0, 0, tiers]),
        optimizer=frames.cell_prices.update,
        bound=max(bounds, key=lambda name: bounds[name]),
        **busy,
    )


def _budgets(question: Question, frames: Frames, tiers: int) -> tuple[Budget, Budget]:
    cell_prices, held, cells = frames.cell_prices, frames.cuts.held[0], cell_bytes(frames)
    arenas, own = parts(frames, TIERS[tiers]), own_schedule(frames.schedule, question.layout)
    device = {
        "weights": held.weights,
        "gathered": held.gathered,
        "gradients": held.gradients,
        "accumulators": max(0, held.accumulators + min(0, cells)),
        "optimizer": held.optimizer,
        **{str(kind): int(size) for kind, size in arenas[Tier.DEVICE].items()},
        "slots": int(device_slots(frames)[0, 0, tiers]),
        "cells": max(0, cells) + workspace_bytes(cell_prices.question, own),
        "exchange": exchange_bytes(cell_prices.question, own.chunk),
        "inputs": INPUT_BYTES * cell_prices.run.batch * cell_prices.tokens,
        "reserve": question.machine.reserve,
    }
    host = {
        "optimizer": held.optimizer_on_host,
        **{str(kind): int(size) for kind, size in arenas[Tier.HOST].items()},
    }
    device, host = ({k: v for k, v in of.items() if v} for of in (device, host))
    first, second = limits(question)
    if question.machine.unified:
        # One memory: what one tier takes the other cannot have.
        return Budget(device, first - sum(host.values())), Budget(
            host, first - sum(device.values())
        )
    return Budget(device, first), Budget(host, second)
