"""One schedule on one machine: build its program, walk it, and say what it takes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from farspan.plan.build import build_program
from farspan.plan.layout import Range
from farspan.plan.price.collectives import exchange_bytes
from farspan.plan.price.ranks import (
    RankKind,
    RankWalk,
    kinds_of,
    on_machines,
    own_schedule,
    part_of,
    stage_model,
    whole_schedule,
)
from farspan.plan.price.seconds import Prices, rates_of
from farspan.plan.price.states import states, update_seconds
from farspan.plan.price.timeline import Timeline, run_time
from farspan.plan.price.workspace import workspace_bytes
from farspan.plan.program import Allocate, Clear, Close, Free, Gather, Program, Release
from farspan.plan.question import Budget, Plan, Question, Seconds
from farspan.plan.reach import sequence_pairs
from farspan.plan.residency import RESIDENCY
from farspan.plan.sizes import INDEX_BYTES
from farspan.spec import Schedule, Tier

PAGE = 4096  # pinned memory is locked by whole pages
# A token: its number, which is its label as well, and the target and position made of it.
INPUT_BYTES = 3 * INDEX_BYTES
DENSE = Schedule()


@dataclass(frozen=True, slots=True)
class Walked:
    """A kind of rank, its program, and the bytes that its cells hold for a moment."""

    kind: RankKind
    program: Program
    transient: int


def programs(question: Question, schedule: Schedule) -> list[tuple[RankKind, Program]]:
    """What each kind of rank runs. Raises Refused when the groups do not fit."""
    model, run = question.model, question.run
    kinds = kinds_of(question, schedule)
    return [(kind, build_program(model, run, schedule, kind.rank)) for kind in kinds]


def walk(question: Question, schedule: Schedule) -> tuple[Walked, ...]:
    """The same, with what their cells hold."""
    return tuple(
        Walked(kind, program, RankWalk(question, program).run().transient)
        for kind, program in programs(question, schedule)
    )


@dataclass(frozen=True, slots=True)
class Sized:
    """What the kinds of rank run, and what they take: the fullest device, and of main memory what
    a rank has a share in where the ranks of one machine take the most together."""

    walked: tuple[Walked, ...]
    device: Budget
    host: Budget

    @property
    def programs(self) -> tuple[Program, ...]:
        return tuple(one.program for one in self.walked)

    @property
    def fits(self) -> bool:
        return min(self.device.left, self.host.left) >= 0


def size(question: Question, schedule: Schedule) -> Sized:
    """The programs of a schedule with their bytes, their time not asked for."""
    walked = walk(question, schedule)
    parts = [_parts(question, one) for one in walked]
    devices, hosts = [device for device, _ in parts], [host for _, host in parts]
    kinds = [one.kind for one in walked]
    host, device = _together(question, kinds, hosts), max(devices, key=_total)
    if question.machine.unified:
        device = _together(question, kinds, devices)
    return Sized(walked, *_limited(question, device, host))


def evaluate(
    question: Question, strategy: str, schedule: Schedule, sized: Sized | None = None
) -> Plan:
    """The plan of a schedule: bytes on each tier, seconds of the slowest rank, what bounds them.

    What does not fit cannot run, and its lanes are not simulated: with copies beside the
    computation its time is the busiest lane's. (Eight strategies of Llama-3-70B at 16M tokens have
    a million instructions.)"""
    sized = sized or size(question, schedule)
    seconds = slowest(question, sized)[1]
    return Plan(
        strategy=strategy,
        schedule=whole_schedule(question, schedule),
        question=question,
        device=sized.device,
        host=sized.host,
        seconds=seconds,
        mfu=useful_flop(question, schedule)
        / (rates_of(question).peak * _devices(question) * seconds.total),
    )


def slowest(question: Question, sized: Sized) -> tuple[Program, Seconds]:
    """The kind of rank that a step waits for."""
    found = (
        (one.program, step_seconds(question, one.program, simulated=sized.fits))
        for one in sized.walked
    )
    return max(found, key=lambda pair: pair[1].total)


def _parts(question: Question, walked: Walked) -> tuple[dict[str, int], dict[str, int]]:
    """What lives on the device and on the host when each is fullest, of one kind of rank."""
    program, part = walked.program, part_of(question, walked.kind)
    held = states(part, own_ranges(program))
    own = own_schedule(program.schedule, question.layout)
    device = {
        "weights": held.weights,
        "gathered": held.gathered,
        "gradients": held.gradients,
        "accumulators": held.accumulators,
        "optimizer": held.optimizer,
        **arena_parts(program, Tier.DEVICE),
        "cells": max(0, walked.transient) + workspace_bytes(part, own),
        "exchange": exchange_bytes(part, own.chunk),
        "inputs": INPUT_BYTES * program.run.batch * program.share.tokens.total,
        "reserve": question.machine.reserve,
    }
    if walked.transient < 0:
        # Cells are fullest while some gradients do not exist yet; at the end of a step all do.
        device["accumulators"] = max(0, held.accumulators + walked.transient)
    host = {"optimizer": held.optimizer_on_host, **arena_parts(program, Tier.HOST)}
    host["pages"] = -sum(host.values()) % PAGE
    return device, host


def own_ranges(program: Program) -> tuple[Range, ...]:
    """Layers of the rank's groups, counted from the first that it has."""
    groups = [program.groups[group] for group in program.own_groups()]
    first = groups[0][0]
    return tuple((start - first, stop - first) for start, stop in groups)


def _total(parts: dict[str, int]) -> int:
    return sum(parts.values())


def _together(
    question: Question, kinds: Sequence[RankKind], parts: Sequence[dict[str, int]]
) -> dict[str, int]:
    """A rank's share of what the ranks of a machine take, where they take the most."""
    near = question.near()

    def shares(counts: tuple[int, ...]) -> dict[str, int]:
        sums = Counter[str]()
        for count, of in zip(counts, parts, strict=True):
            sums.update({name: count * size for name, size in of.items()})
        return {name: -(-size // near) for name, size in sums.items()}

    return max(map(shares, on_machines(question, kinds)), key=_total)


def _limited(
    question: Question, device: dict[str, int], host: dict[str, int]
) -> tuple[Budget, Budget]:
    machine, share = question.machine, question.host_share()
    device, host = ({k: v for k, v in parts.items() if v} for parts in (device, host))
    if machine.unified:
        # One memory: what one tier takes the other cannot have.
        return Budget(device, share - sum(host.values())), Budget(
            host, share - sum(device.values())
        )
    return Budget(device, machine.device_bytes), Budget(host, share)


def arena_parts(program: Program, tier: Tier) -> dict[str, int]:
    """Bytes of each kind of buffer at the tier's fullest moment; slots, which serve any layer,
    and what the addresses leave unused, are parts of their own."""
    live: dict[str, int] = {}
    total = most = 0
    fullest: dict[str, int] = {}
    for instruction in program.instructions:
        if not isinstance(instruction, Allocate | Free):
            continue
        buffer = program.buffers[instruction.buffer]
        if buffer.tier is not tier:
            continue
        size = buffer.bytes if isinstance(instruction, Allocate) else -buffer.bytes
        part = "slots" if buffer.layer < 0 else str(buffer.kind)
        live[part] = live.get(part, 0) + size
        total += size
        if total > most:
            most, fullest = total, dict(live)
    parts = {str(kind): fullest.get(str(kind), 0) for kind in RESIDENCY}
    parts["slots"] = fullest.get("slots", 0)
    parts["placement"] = program.arena_bytes[tier] - most
    return parts


def step_seconds(question: Question, program: Program, *, simulated: bool = True) -> Seconds:
    """Of one step with its update on the rank whose program it is, copies as the machine's engine
    issues them; for `simulated` see `run_time`."""
    prices = Prices(question, program, together=question.overlap)
    line = run_time(prices, overlap=question.overlap, simulated=simulated)
    groups = [program.groups[group] for group in program.own_groups()]
    layers = groups[0][0], groups[-1][1]
    update = update_seconds(replace(question, model=stage_model(question.model, layers)))
    tokens = (stop - start for start, stop in program.share.tokens.rows)
    sent = 2 * sum(map(prices.collectives.boundary, tokens))
    return Seconds(
        total=line.total * _waiting(question, prices) + sent + update,
        compute=line.compute,
        fetch=line.fetch,
        evict=line.evict,
        collective=line.collective + sent,
        optimizer=update,
        host=line.host,
        bound=_bound(line),
    )


def _waiting(question: Question, prices: Prices) -> float:
    """By how much stages that wait for each other stretch a step. A stage begins when the first
    chunk comes through the stage before, and the slowest chunk sets the pace: passes over chunks
    that take t take sum(t) + (stages - 1) max(t)."""
    stages, program = question.layout.pipeline, prices.program
    if stages == 1:
        return 1.0
    busy = [0.0] * len(program.chunks)
    for instruction in program.instructions:
        if not isinstance(instruction, Allocate | Free | Clear | Close | Gather | Release):
            busy[instruction.chunk] += prices.of(instruction).in_line()
    return 1.0 + (stages - 1) * max(busy) / sum(busy)


def _bound(line: Timeline) -> str:
    lanes = {
        "compute": line.compute,
        "link": max(line.fetch, line.evict),
        "network": line.collective,
        "host": line.host,
    }
    return max(lanes, key=lambda lane: lanes[lane])


def useful_flop(question: Question, schedule: Schedule = DENSE) -> float:
    """FLOP of a step that MFU counts: three times a forward, recompute left out, and twice where
    weights are frozen and have no gradient; attention over the keys a query sees (causal halves are
    no work); embeddings are looked up, not multiplied."""
    model, run = question.model, question.run
    tokens = run.batch * run.tokens
    head = 3.0 if model.outer_trainable() else 2.0
    flop = head * 2.0 * tokens * model.hidden * model.vocab
    for layer in model.layers:
        work = layer.work
        passes = 2.0 + (work.trainable / work.parameters if work.parameters else 1.0)
        flop += passes * 2.0 * tokens * sum(inner * outer for inner, outer in work.products)
        pairs = run.batch * sequence_pairs(run.tokens, layer, schedule)
        flop += 3.0 * 2.0 * pairs * layer.query_heads * (layer.head_dim + layer.value_dim)
    return flop * question.layout.data


def _devices(question: Question) -> int:
    return question.layout.devices()
