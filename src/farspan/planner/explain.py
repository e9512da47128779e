"""Why a plan was chosen, what breaks when none fits, and what would help."""

from collections.abc import Iterator, Sequence

from farspan.formatting import write_bytes, write_most
from farspan.planner.evaluate import most_layers, stage_schedule
from farspan.planner.request import Budget, Plan
from farspan.program.residency import RESIDENCY
from farspan.spec import Tier

# A part that is not named here is called by its own name.
PARTS = {
    "weights": "weights",
    "reference": "weights of the reference",
    "gathered": "weights of the open group, gathered",
    "gradients": "gradients",
    "accumulators": "sums of weight gradients",
    "optimizer": "optimizer states",
    **{kind.value: row.words for kind, row in RESIDENCY.items()},
    "slots": "slots of streamed K, V",
    "placement": "gaps between addresses",
    "cells": "transients of a cell",
    "exchange": "messages to and from other devices",
    "inputs": "tokens and labels",
    "reserve": "reserve",
    "pages": "rounding to pages",
}


def part_words(part: str) -> str:
    """The words for a part of a budget."""
    return PARTS.get(part, part)


def reason_of(plan: Plan, others: Sequence[Plan]) -> str:
    """One or two sentences on what was chosen."""
    parts = [_choices(plan), *_given(plan, others)]
    if plan.tight:
        parts.append("nothing leaves the margin free")
    slower = [o for o in others if o.fit is plan.fit and o.strategy != plan.strategy]
    if slower:
        ratio = slower[0].seconds.total / plan.seconds.total
        parts.append(f"{slower[0].strategy}, the next that fits, takes {ratio:.2f} times as long")
    if others and not slower:
        with_room = " and leaves the margin" if any(other.tight for other in others) else ""
        parts.append(f"no other strategy fits{with_room}")
    return "; ".join(parts)


def _given(plan: Plan, others: Sequence[Plan]) -> Iterator[str]:
    """What the fastest would take, where another is preferred."""
    like = (other for other in others if other.fit is plan.fit)
    fastest = min(like, key=Plan.rank, default=plan)
    ratio = fastest.seconds.total / plan.seconds.total
    if ratio < 1:
        host, device = fastest.host.total - plan.host.total, fastest.device.total
        more = f"{write_bytes(host)} more of main memory"
        if host <= 0:
            more = f"{write_bytes(device - plan.device.total)} more of device memory"
        yield f"the fastest takes {more} for at most {write_most(1 - ratio)} less time"


def breaks_first(plan: Plan) -> str:
    """Which tier is too small, by how much, and what fills it."""
    tier, budget = _fuller(plan)
    largest = sorted(filter(budget.parts.get, budget.parts), key=lambda part: -budget.parts[part])
    fills = " and ".join(
        f"{write_bytes(budget.parts[part])} of {part_words(part)}" for part in largest[:2]
    )
    where = "device memory" if tier is Tier.DEVICE else "host memory"
    if plan.question.machine.unified:
        where = "memory"
    return (
        f"{where} breaks first: {plan.strategy} needs {write_bytes(budget.total)} and "
        f"{write_bytes(budget.limit)} are there, {write_bytes(-budget.left)} too few; "
        f"most of it is {fills}"
    )


def _fuller(plan: Plan) -> tuple[Tier, Budget]:
    device_share = plan.device.total / max(1, plan.device.limit)
    host_share = plan.host.total / max(1, plan.host.limit)
    if plan.host.left >= 0 or (plan.device.left < 0 and device_share >= host_share):
        return Tier.DEVICE, plan.device
    return Tier.HOST, plan.host


def _choices(plan: Plan) -> str:
    schedule = stage_schedule(plan.question, plan.schedule)
    sizes = schedule.group_sizes(most_layers(plan.question))
    cut = "layer by layer" if max(sizes) == 1 else f"groups of up to {max(sizes)} layers"
    if len(sizes) == 1:
        stages = plan.question.layout.pipeline
        cut = "all layers in one group" if stages == 1 else f"{stages} stages, each a group,"
    attention = f"O and LSE of the latest {schedule.attention_save_fraction:.0%} of tokens kept"
    if schedule.attention_save_fraction == 0:
        attention = "attention recomputed"
    elif schedule.attention_save_fraction == 1:
        attention = "no attention recomputed"
    if (
        schedule.activation_save_fraction > schedule.attention_save_fraction
    ):  # what is kept of a cell holds its O
        attention = (
            f"all activations of the latest {schedule.activation_save_fraction:.0%} of tokens kept"
        )
    elif schedule.activation_save_fraction:
        attention += f", other activations of {schedule.activation_save_fraction:.0%} kept"
    fullest = max(("device", plan.device), ("host", plan.host), key=lambda t: _share(t[1]))
    return (
        f"{cut} in chunks of {schedule.chunk:,}, {attention}; "
        f"{fullest[0]} memory is {_share(fullest[1]):.0%} full"
    )


def _share(budget: Budget) -> float:
    return budget.total / max(1, budget.limit)
