"""A plan by counting, without its program: enough for a schedule that does not fit.

Its time is that of its program where nothing overlaps; its memory is a bound, short of padding and
of what lies between buffers: it may look as if a little less were missing, never more.
"""

from farspan.plan.price.collectives import exchange_bytes
from farspan.plan.price.evaluate import INPUT_BYTES, evaluate, useful_flop
from farspan.plan.price.ranks import own_schedule
from farspan.plan.price.seconds import rates_of
from farspan.plan.price.workspace import workspace_bytes
from farspan.plan.question import Budget, Plan, Question, Seconds
from farspan.plan.search import quick
from farspan.plan.search.bound import TIERS, Frames, frames_of, tiers_of
from farspan.plan.search.lanes import COLLECTIVE, COMPUTE, EVICT, FETCH, HOST, lanes, seconds
from farspan.plan.search.peaks import device_slots, parts
from farspan.plan.search.room import limits
from farspan.spec import Schedule, Tier


def plan_of(question: Question, strategy: str, schedule: Schedule) -> Plan:
    """`evaluate`, but for what surely does not fit: then by counting, where that gives its time."""
    in_line = not question.overlap and question.layout.pipeline == 1
    if in_line and not quick.fits(question, schedule):
        return estimate(question, strategy, schedule)
    return evaluate(question, strategy, schedule)


def estimate(question: Question, strategy: str, schedule: Schedule) -> Plan:
    """Of one pipeline stage, nothing overlapping."""
    frames, tiers = frames_of(question, schedule), tiers_of(schedule)
    device, host = _budgets(question, frames, tiers)
    took = _seconds(frames, tiers)
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


def _seconds(frames: Frames, tiers: int) -> Seconds:
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
        optimizer=frames.ruler.update,
        bound=max(bounds, key=lambda name: bounds[name]),
        **busy,
    )


def _budgets(question: Question, frames: Frames, tiers: int) -> tuple[Budget, Budget]:
    ruler, held, cells = frames.ruler, frames.cuts.held[0], quick.cells(frames)
    arenas, own = parts(frames, TIERS[tiers]), own_schedule(frames.schedule, question.layout)
    device = {
        "weights": held.weights,
        "gathered": held.gathered,
        "gradients": held.gradients,
        "accumulators": max(0, held.accumulators + min(0, cells)),
        "optimizer": held.optimizer,
        **{str(kind): int(size) for kind, size in arenas[Tier.DEVICE].items()},
        "slots": int(device_slots(frames)[0, 0, tiers]),
        "cells": max(0, cells) + workspace_bytes(ruler.question, own),
        "exchange": exchange_bytes(ruler.question, own.chunk),
        "inputs": INPUT_BYTES * ruler.run.batch * ruler.tokens,
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
