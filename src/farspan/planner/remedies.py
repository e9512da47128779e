"""Explain why a plan was chosen, or what runs out if none fits and which changes make one fit.

Kinds of changes are tried in this order, up to a number of tries, and the first that helps of each
kind is named: changes that cost nothing and keep the results, that cost nothing and do not, that
cost money, a shorter context. Two changes at once are tried if no single one keeps the results, or
if adapters alone do not fit; several machines only if nothing else keeps the results.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from farspan.formatting import write_bytes, write_most, write_tokens
from farspan.host import GIB, MIB
from farspan.planner.evaluate import most_layers, stage_schedule
from farspan.planner.machines import machine as find_machine
from farspan.planner.machines import names, read, with_main_memory
from farspan.planner.request import Budget, Optimizer, Plan, Question, Remedy, margin_of
from farspan.program.layout import packed_layout, sequence_layout
from farspan.program.residency import RESIDENCY
from farspan.spec import LossKind, Quantization, Reference, RunSpec, Tier

SMALL = 8 * GIB  # below it, rounding to whole GiB is too coarse
MOST_DEVICES = 64
LEAST_CONTEXT = 1024  # tokens
LORA, RANK = "--lora", 16  # the adapters that are tried
WEIGHTS = f"--weights {Tier.HOST}"
LARGEST_HOST = 6 * 1024 * GIB  # of a node: the most that servers are sold with
LARGER = 1.1  # least ratio of a larger card's memory
TIMED = 3  # changes whose step is planned
TRIES = 250  # changes: 4 seconds at 16 ms each, for Llama-3-70B on eight cards

Fits = Callable[[Question], bool]
Changes = Iterator[tuple[Remedy, Question]]
Kind = Callable[[Question], Changes]


def remedies_of(
    question: Question,
    fits: Fits,
    tries: int = TRIES,
    seconds: Callable[[Question], float] = lambda _: 0.0,
) -> tuple[Remedy, ...]:
    """Return changes to the question that make some plan fit, the cheapest first. Return none if
    the first `tries` changes do not help. The first few also have the seconds of their step."""
    count = 0
    found: list[Remedy] = []

    def first(changes: Changes) -> None:
        nonlocal count
        for remedy, changed in changes:
            count += 1
            if count > tries:
                return
            if fits(changed):
                # A change that helps alone needs no second one.
                if not any(_pairs(remedy) >= _pairs(known) for known in found):
                    takes = seconds(changed) if len(found) < TIMED else 0.0
                    found.append(replace(remedy, seconds=takes))
                return

    first(_on_host(question))
    if not found:  # main memory is too small as well
        first(_on_disk(question))
    near = (
        _stored,
        _batches,
        _adapters,
        _quantized,
        _quantized_on_host,
        _eight_bit,
        _memory,
        _more_on_host,
    )
    for kind in (*near, _devices, _cards, _contexts):
        first(kind(question))
    if not any(remedy.options.startswith(LORA) for remedy in found):
        for kind in (_quantized, _on_host, _quantized_on_host, _memory, _devices, _cards):
            first(_both(_adapters, kind, question))
    exact = (
        *(_both(_on_host, kind, question) for kind in (_devices, _cards)),
        _nodes(question),
        _both(_on_host, _nodes, question),
        _machines(question),
        _both(_on_host, _machines, question),
    )
    for changes in exact:
        if not any(remedy.same for remedy in found):
            first(changes)
    return tuple(found)


def _pairs(remedy: Remedy) -> set[tuple[str, str]]:
    words = remedy.options.split()
    return set(zip(words[::2], words[1::2], strict=True))


def _both(first: Kind, second: Kind, question: Question) -> Changes:
    for one, changed in first(question):
        for other, again in second(changed):
            means = "; ".join(filter(None, (one.means, other.means)))
            yield Remedy(f"{one.options} {other.options}", one.same and other.same, means), again


# -- kinds ----------------------------------------------------------------------------------------


def _on_host(question: Question) -> Changes:
    if question.optimizer is Optimizer.ADAMW and not question.open.states:
        yield _optimizer(question, Optimizer.HOST, same=True)
    is_fixed = question.optimizer is Optimizer.ADAMW8BIT or question.weights is Tier.HOST
    if is_fixed or question.open.weights:
        return
    is_there = question.optimizer is not Optimizer.ADAMW
    optimizer = question.optimizer if is_there else Optimizer.HOST
    options = WEIGHTS if is_there else f"--optimizer {optimizer} {WEIGHTS}"
    moved = replace(question, optimizer=optimizer, weights=Tier.HOST)
    yield Remedy(options, True, "weights and gradients go to main memory"), moved


def _on_disk(question: Question) -> Changes:
    """Yield changes that move AdamW's states from memory to a drive, for one device."""
    exact = question.optimizer in (Optimizer.ADAMW, Optimizer.HOST)
    exact = exact and not (question.open.drive or question.open.apart)
    if not exact or question.layout.devices() > 1 or question.machine.unified:
        return
    means = "states go to a drive"
    remedy, moved = _optimizer(question, Optimizer.DISK, same=True)
    yield replace(remedy, means=means), moved
    if question.weights is Tier.DEVICE and not (question.nf4 or question.open.weights):
        both = Remedy(f"{remedy.options} {WEIGHTS}", True, f"{means}, weights to main memory")
        yield both, replace(moved, weights=Tier.HOST)


def _more_on_host(question: Question) -> Changes:
    return _both(_on_host, _memory, question)


def _eight_bit(question: Question) -> Changes:
    # Several ranks, which share the states, do not support it.
    if question.optimizer is Optimizer.ADAMW and question.layout.devices() == 1:
        yield _optimizer(question, Optimizer.ADAMW8BIT, same=False)


def _optimizer(question: Question, optimizer: Optimizer, *, same: bool) -> tuple[Remedy, Question]:
    means = "" if same else "8-bit moments"
    remedy = Remedy(f"--optimizer {optimizer}", same, means)
    return remedy, replace(question, optimizer=optimizer)


def _stored(question: Question) -> Changes:
    loss = question.loss
    if loss.reference is Reference.FROZEN and loss.kind is not LossKind.DISTILL:
        remedy = Remedy(f"--reference {Reference.STORED}", True, "values stored with the data")
        yield remedy, replace(question, loss=replace(loss, reference=Reference.STORED))


def _batches(question: Question) -> Changes:
    batch = question.run.batch // 2
    while batch:
        smaller = RunSpec(batch, question.run.tokens)
        # The other parts of the batch come before it: their gradients exist.
        changed = replace(question, run=smaller, accumulates=True)
        yield (
            Remedy(f"--batch {batch}", True, "with proportionally more batches per update"),
            changed,
        )
        batch //= 2


def _adapters(question: Question) -> Changes:
    model, profiles = question.model, question.profiles
    if profiles is None or profiles.rank(RANK) is None:
        return  # the memory of adapters is unknown
    if model.trainable < model.parameters or model.hidden <= RANK:
        return
    profile = profiles.of(question.variant(RANK))
    changed = replace(question, model=profile.spec, profile=profile)
    yield Remedy(f"{LORA} {RANK}", False, "adapters are trained, the weights stay"), changed


def _quantized(question: Question) -> Changes:
    """Yield the change to quantized frozen weights, which only models with adapters have."""
    profiles, rank = question.profiles, question.adapter_rank()
    if profiles is None or not rank or question.nf4 or question.dtype == "float64":
        return
    asked = replace(question, nf4=True, layout=packed_layout(None, question.layout))
    profile = profiles.of(asked.variant(rank))
    changed = replace(asked, model=profile.spec, profile=profile)
    options = f"--quantize {Quantization.NF4}"
    yield Remedy(options, False, "the frozen weights are rounded to four bits"), changed


def _quantized_on_host(question: Question) -> Changes:
    return _both(_quantized, _on_host, question)


def _memory(question: Question) -> Changes:
    machine = question.machine
    if machine.unified and not machine.on_cpu:
        return  # it is soldered to the device
    whole = machine.host_bytes + machine.host_reserve
    for times in (2, 4, 8):
        text, size = _at_least(times * whole)
        if size > LARGEST_HOST:
            return
        larger = with_main_memory(machine, size)
        yield Remedy(f"--host-memory {text}", True), replace(question, machine=larger)


def _at_least(size: int) -> tuple[str, int]:
    """Return a size rounded up: as text for an option, and as bytes."""
    unit, name = (MIB, "MiB") if size < SMALL else (GIB, "GiB")
    count = -(-size // unit)
    return f"{count}{name}", count * unit


def _devices(question: Question) -> Changes:
    yield from _sharing(question, question.machine.devices)


def _machines(question: Question) -> Changes:
    for remedy, changed in _sharing(question, MOST_DEVICES):
        if changed.layout.devices() > question.machine.devices:
            yield remedy, changed


def _sharing(question: Question, most: int) -> Changes:
    if question.sparse is not None:  # planned for one device so far
        return
    model, each = question.model, question.machine.devices
    devices = 2 * question.layout.devices()
    while devices <= min(most, len(model.layers) if model.is_recurrent() else most):
        means = f"of the {each} in a machine"
        if devices > each:
            means = f"{-(-devices // each)} machines of {each}"
        layout = sequence_layout(model, devices)
        if question.nf4:
            layout = packed_layout(None, layout)
        yield Remedy(f"--gpus {devices}", True, means), replace(question, layout=layout)
        devices *= 2


def _cards(question: Question) -> Changes:
    """Yield machines with more GPU memory, smallest first, each at least 10% above the last."""
    here = question.machine
    usual = find_machine(here.name) if here.name in names() else None
    if here.unified or (usual is not None and usual.device_bytes != here.device_bytes):
        return  # memory given by the user would be given for the other card too
    known = here.device_bytes
    cards = [read(name) for name in names()]
    offered = (card.spec for card in cards if not card.note and not card.spec.unified)
    for other in sorted(offered, key=lambda spec: spec.device_bytes):
        if other.device_bytes < LARGER * known:
            continue
        known = other.device_bytes
        if usual is None or usual.host_bytes != here.host_bytes:  # the same holds for main memory
            host = min(other.host_bytes, here.host_bytes)
            other = replace(other, host_bytes=host, host_reserve=here.host_reserve)
        margin = question.margin
        margin = margin_of(None, other) if margin == margin_of(None, here) else margin
        changed = replace(question, machine=other, margin=margin)
        whole, mine = (spec.host_bytes + spec.host_reserve for spec in (other, here))
        means = "another card" + f", with {write_bytes(whole)} of main memory" * (whole > mine)
        yield Remedy(f"--machine {other.name}", True, means), changed


def _nodes(question: Question) -> Changes:
    yield from _both(_cards, _devices, question)


def _contexts(question: Question) -> Changes:
    tokens = question.run.tokens // 2
    while tokens >= LEAST_CONTEXT:
        shorter = replace(question, run=RunSpec(question.run.batch, tokens))
        yield Remedy(f"--context {write_tokens(tokens)}", False, "shorter sequences"), shorter
        tokens //= 2


# -- in words --------------------------------------------------------------------------------------

# Parts that are missing here are called by their own name.
PARTS = {
    "weights": "weights",
    "reference": "weights of the reference",
    "gathered": "weights of the open group, gathered",
    "gradients": "gradients",
    "accumulators": "sums of weight gradients",
    "optimizer": "optimizer states",
    "index": "maps of an index",
    **{kind.value: row.words for kind, row in RESIDENCY.items()},
    "slots": "slots of streamed K, V",
    "placement": "gaps between addresses",
    "cells": "transients of a cell",
    "exchange": "messages to and from other devices",
    "inputs": "tokens and labels",
    "reserve": "reserve",
    "pages": "rounding to pages",
}


def place_words(question: Question) -> str:
    """Return words for the tiers of optimizer states, weights and gradients, for a report."""
    on_host, states = question.weights is Tier.HOST, STATES[question.optimizer]
    if question.machine.unified:
        return "all in main memory"
    if on_host and question.optimizer is Optimizer.HOST:
        return "weights, gradients and states in main memory"
    return ", ".join(filter(None, ("weights and gradients in main memory" * on_host, states)))


STATES = {
    Optimizer.ADAMW: "weights, gradients and states on the device",
    Optimizer.ADAMW8BIT: "weights, gradients and 8-bit states on the device",
    Optimizer.HOST: "states in main memory",
    Optimizer.DISK: "states on a drive",
    Optimizer.NONE: "no optimizer",
}


def part_words(part: str) -> str:
    return PARTS.get(part, part)


def reason_of(plan: Plan, others: Sequence[Plan]) -> str:
    """Return words that say why the plan was chosen."""
    parts = [_choices(plan), *_dearer(plan, others)]
    if plan.tight:
        parts.append("no plan leaves the margin free")
    slower = [o for o in others if o.fit is plan.fit and o.strategy != plan.strategy]
    if slower:
        ratio = slower[0].seconds.total / plan.seconds.total
        how = f"takes {ratio:.2f} times as long" if ratio >= 1.005 else "takes as long"
        parts.append(f"{slower[0].strategy}, the next that fits, {how}")
    if others and not slower:
        with_room = " and leaves the margin free" if any(other.tight for other in others) else ""
        parts.append(f"no other strategy fits{with_room}")
    return "; ".join(parts)


def _dearer(plan: Plan, others: Sequence[Plan]) -> Iterator[str]:
    """Yield words for the extra memory of the fastest plan, if a slower plan was preferred."""
    like = (other for other in others if other.fit is plan.fit)
    fastest = min(like, key=Plan.rank, default=plan)
    ratio = fastest.seconds.total / plan.seconds.total
    if ratio < 1:
        host, device = fastest.host.total - plan.host.total, fastest.device.total
        more = f"{write_bytes(host)} more main memory"
        if host <= 0:
            more = f"{write_bytes(device - plan.device.total)} more device memory"
        yield f"the fastest plan takes {more} to save at most {write_most(1 - ratio)} of the time"


def breaks_first(plan: Plan) -> str:
    """Return a sentence on the tier that is too small: by how much, and its largest tensors."""
    tier, budget = fuller(plan)
    largest = sorted(filter(budget.parts.get, budget.parts), key=lambda part: -budget.parts[part])
    fills = " and ".join(
        f"{write_bytes(budget.parts[part])} of {part_words(part)}" for part in largest[:2]
    )
    where = "device memory" if tier is Tier.DEVICE else "host memory"
    if plan.question.machine.unified:
        where = "memory"
    return (
        f"{where} runs out first: {plan.strategy} needs {write_bytes(budget.total)}, but has "
        f"{write_bytes(budget.limit)}, {write_bytes(-budget.left)} too little; the largest parts "
        f"are {fills}"
    )


def fuller(plan: Plan) -> tuple[Tier, Budget]:
    """Return the tier that is too small, the fuller if both are; if the plan fits, the device."""
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
    ):  # a kept cell holds its O
        attention = (
            f"all activations of the latest {schedule.activation_save_fraction:.0%} of tokens kept"
        )
    elif schedule.activation_save_fraction and schedule.activation_save_layers < 1:
        attention += f", other activations of {schedule.activation_save_layers:.0%} of layers kept"
    elif schedule.activation_save_fraction:
        attention += f", other activations of {schedule.activation_save_fraction:.0%} kept"
    fullest = max(("device", plan.device), ("host", plan.host), key=lambda t: _share(t[1]))
    return (
        f"{cut} in chunks of {schedule.chunk:,}, {attention}; "
        f"{fullest[0]} memory is {_share(fullest[1]):.0%} full"
    )


def _share(budget: Budget) -> float:
    return budget.total / max(1, budget.limit)
