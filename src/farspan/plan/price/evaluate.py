"""One schedule on one machine: build its program, walk it, and say what it takes."""

from dataclasses import dataclass, replace

from farspan.plan.build import build_program
from farspan.plan.cell.transient import transient_bytes
from farspan.plan.price.collectives import Collectives, exchange_bytes
from farspan.plan.price.local import (
    local_chunks,
    local_model,
    local_run,
    local_schedule,
    stage_schedule,
    whole_schedule,
)
from farspan.plan.price.seconds import Prices, rates_of
from farspan.plan.price.states import States, gradient_bytes, sharing_of, states, update_seconds
from farspan.plan.price.timeline import Timeline, run_time
from farspan.plan.price.workspace import workspace_bytes
from farspan.plan.program import Allocate, Clear, Close, Free, Gather, Kind, Program, Release
from farspan.plan.question import Budget, Plan, Question, Seconds
from farspan.plan.reach import sequence_pairs
from farspan.plan.sizes import INDEX_BYTES
from farspan.spec import Schedule, Tier

PAGE = 4096  # pinned memory is locked by whole pages
# A token: its number, which is its label as well, and the target and position made of it.
INPUT_BYTES = 3 * INDEX_BYTES
DENSE = Schedule()


@dataclass(frozen=True, slots=True)
class Walked:
    """A device's program and the bytes that it decides."""

    program: Program
    transient: int


def walk(question: Question, schedule: Schedule) -> Walked:
    """The program that one device would run. Raises Refused when the groups do not fit."""
    part = replace(question, model=local_model(question))
    schedule = stage_schedule(question, schedule)
    run, own = local_run(question, schedule), local_schedule(schedule, part.layout)
    program = build_program(part.model, run, own, chunks=local_chunks(question, schedule))
    held = transient_bytes(
        program,
        part.architecture,
        gradient_bytes=gradient_bytes(part),
        sharing=sharing_of(part),
        accumulates=part.accumulates,
    )
    return Walked(program, held)


@dataclass(frozen=True, slots=True)
class Sized:
    """A program and what it takes of each tier."""

    program: Program
    device: Budget
    host: Budget

    @property
    def fits(self) -> bool:
        return min(self.device.left, self.host.left) >= 0


def size(question: Question, schedule: Schedule) -> Sized:
    """The program of a schedule with its bytes, its time not asked for."""
    part = replace(question, model=local_model(question))
    walked = walk(question, schedule)
    device, host = budgets(part, walked, states(part, walked.program.groups))
    return Sized(walked.program, device, host)


def evaluate(
    question: Question, strategy: str, schedule: Schedule, sized: Sized | None = None
) -> Plan:
    """The plan of a schedule: bytes on each tier, seconds, what bounds them.

    What does not fit cannot run, and its lanes are not simulated: with copies beside the
    computation its time is the busiest lane's. (Eight strategies of Llama-3-70B at 16M tokens have
    a million instructions.)"""
    sized = sized or size(question, schedule)
    part = replace(question, model=local_model(question))
    seconds = step_seconds(part, sized.program, simulated=sized.fits)
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


def budgets(question: Question, walked: Walked, held: States) -> tuple[Budget, Budget]:
    """What lives on the device and on its share of the host when each is fullest."""
    program, machine = walked.program, question.machine
    device = {
        "weights": held.weights,
        "gathered": held.gathered,
        "gradients": held.gradients,
        "accumulators": held.accumulators,
        "optimizer": held.optimizer,
        **arena_parts(program, Tier.DEVICE),
        "cells": max(0, walked.transient) + workspace_bytes(question, program.schedule),
        "exchange": exchange_bytes(question, program.schedule.chunk),
        "inputs": INPUT_BYTES * program.run.batch * program.run.tokens,
        "reserve": machine.reserve,
    }
    if walked.transient < 0:
        # Cells are fullest while some gradients do not exist yet; at the end of a step all do.
        device["accumulators"] = max(0, held.accumulators + walked.transient)
    host = {"optimizer": held.optimizer_on_host, **arena_parts(program, Tier.HOST)}
    parts = device if program.schedule.x is Tier.DEVICE else host
    parts["x"] += _stage_input(question, program)
    host["pages"] = -sum(host.values()) % PAGE
    return _limited(question, device, host)


def _stage_input(question: Question, program: Program) -> int:
    """Bytes of x that a pipeline stage receives: the program, which embeds, makes it anew."""
    if question.layout.pipeline == 1:
        return 0
    model, run = program.model, program.run
    return run.batch * run.tokens * model.hidden * model.element_bytes


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
    parts = {str(kind): fullest.get(str(kind), 0) for kind in Kind}
    parts["slots"] = fullest.get("slots", 0)
    parts["placement"] = program.arena_bytes[tier] - most
    return parts


def step_seconds(question: Question, program: Program, *, simulated: bool = True) -> Seconds:
    """Of one step with its update, copies as the machine's engine issues them; for `simulated` see
    `run_time`."""
    prices = Prices(question, program, together=question.overlap)
    line = run_time(prices, overlap=question.overlap, simulated=simulated)
    update = update_seconds(question)
    collectives = Collectives(question)
    sent = 2 * sum(collectives.boundary(stop - start) for start, stop in program.chunks)
    return Seconds(
        total=line.total * _waiting(question, program) + sent + update,
        compute=line.compute,
        fetch=line.fetch,
        evict=line.evict,
        collective=line.collective + sent,
        optimizer=update,
        host=line.host,
        bound=_bound(line),
    )


def _waiting(question: Question, program: Program) -> float:
    """By how much stages that wait for each other stretch a step. A stage begins when the first
    chunk comes through the stage before, and the slowest chunk sets the pace: passes over chunks
    that take t take sum(t) + (stages - 1) max(t)."""
    stages = question.layout.pipeline
    if stages == 1:
        return 1.0
    prices = Prices(question, program, together=question.overlap)
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
