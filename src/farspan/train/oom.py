"""Out-of-memory errors: recognize them, free the memory, and find a lighter schedule."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from farspan.engine.tiers import DeviceTooSmall
from farspan.formatting import write_bytes, write_seconds
from farspan.host import TooLarge
from farspan.planner.evaluate import size
from farspan.planner.remedies import part_words, place_words
from farspan.planner.request import Budget, Plan, Question
from farspan.planner.space import SMALLEST_CHUNK
from farspan.program.layout import COMMAND, group_ranges, refuse_together
from farspan.spec import Schedule, Tier, UnsupportedError

# Parts of the messages by which torch reports too little main memory.
NO_MAIN_MEMORY = ("DefaultCPUAllocator", "not enough memory", "an't allocate memory")
# CUDA libraries that allocate device memory themselves, and an allocator that was built without
# torch's own exception, as no compiler was installed.
NO_DEVICE_MEMORY = ("CUDA error: out of memory", "ALLOC_FAILED", "CUDA out of memory")


class NoScheduleFits(UnsupportedError):
    """Error if no schedule that was tried fits; the message names them."""


class OneRankOutOfMemory(NoScheduleFits):
    """One rank ran out of memory while the other ranks wait for it within the step."""


# Errors that all ranks raise together, before any of them allocates.
_TOGETHER = (TooLarge, DeviceTooSmall)


@dataclass(frozen=True, slots=True)
class Shortage:
    """A tier that ran out of memory. On a CPU both tiers are main memory, and `tier` is HOST."""

    tier: Tier
    message: str  # one line
    of_all: bool = True  # all ranks know it and have left the same work


def find_shortage(error: BaseException) -> Shortage | None:
    """Return the out-of-memory condition behind `error`, or None for another error."""
    cause: BaseException | None = error
    while cause is not None:
        tier = _tier(cause)
        if tier is not None:
            text = str(cause).strip().splitlines()[0] if str(cause) else "no memory"
            return Shortage(tier, text, isinstance(cause, _TOGETHER))
        cause = cause.__cause__
    return None


def _tier(error: BaseException) -> Tier | None:
    if isinstance(error, TooLarge | MemoryError):
        return Tier.HOST
    if isinstance(error, torch.OutOfMemoryError | DeviceTooSmall):
        return Tier.DEVICE
    if isinstance(error, torch.cuda.CudaError):
        return Tier.HOST if "out of memory" in str(error) else None  # of page-locked memory
    if not isinstance(error, RuntimeError):
        return None
    if any(sign in str(error) for sign in NO_MAIN_MEMORY):
        return Tier.HOST
    return Tier.DEVICE if any(sign in str(error) for sign in NO_DEVICE_MEMORY) else None


def clear_up(device: torch.device) -> None:
    """Free the memory that a failed step has left. Call this outside the handler of the step's
    exception, which keeps the step's frames and their tensors alive."""
    gc.collect()
    if device.type != "cuda":
        return
    try:
        # A failed CUDA call, such as locking pages, leaves an error code that the next kernel would
        # report as its own.
        torch.zeros(1, device=device).add_(1)
        torch.cuda.synchronize(device)
    except RuntimeError:
        pass
    torch.cuda.empty_cache()


# Share of a failed schedule's bytes that its successor may take: 41% after four tries.
RETRY_SHARE = 0.8
# Parts that no schedule decides. Subtracted before the share: weights may be nearly all there is.
FIXED = (
    *("weights", "reference", "index", "gathered", "gradients"),
    *("accumulators", "optimizer", "inputs", "reserve", "pages"),
)
WORTH = 0.02  # a change that saves a smaller share only costs time
LEAST_FRACTION = 0.125  # half of this fraction is not worth its buffers


def fixed_bytes(budget: Budget) -> int:
    """Return the bytes of a tier's `budget` that are the same under every schedule."""
    return sum(size for part, size in budget.parts.items() if part in FIXED)


def lighter_schedule(
    question: Question, schedule: Schedule, tiers: Sequence[Tier]
) -> Schedule | None:
    """Return a schedule that takes fewer bytes of `tiers` than `schedule`, if possible at most the
    fraction RETRY_SHARE of them. Returns None if no change saves the fraction WORTH of them.

    Fields are changed one after the other, the cheapest in time first. In a pipeline every stage
    keeps its layers, so that its ranks can run the result.
    """
    layers = len(question.model.layers)
    before = now = needed(question, schedule, tiers)
    stages = group_ranges(schedule, layers, question.layout.pipeline)
    for name in _changes(question, schedule):
        while now > RETRY_SHARE * before:
            candidate = replace(schedule, **_changes(question, schedule)[name])
            try:
                refuse_together(candidate, question.layout)
                ranges = group_ranges(candidate, layers, question.layout.pipeline)
                if question.layout.pipeline > 1 and ranges != stages:
                    break
                less = now if candidate == schedule else needed(question, candidate, tiers)
            except UnsupportedError:  # such as groups that the model does not have
                break
            if less > now - WORTH * before:
                break
            schedule, now = candidate, less
    return schedule if now < before else None


def needed(question: Question, schedule: Schedule, tiers: Sequence[Tier]) -> int:
    """Return the bytes of `tiers` that depend on the schedule, on the rank that needs most."""
    sized = size(question, schedule)
    budgets = {Tier.DEVICE: sized.device, Tier.HOST: sized.host}
    return sum(budgets[tier].total - fixed_bytes(budgets[tier]) for tier in tiers)


def _changes(question: Question, schedule: Schedule) -> dict[str, dict[str, Any]]:
    """Return the changes to try, by name: new values of schedule fields, the cheapest in time
    first. Chunks so short that cells take longer come last."""
    layers, tokens, host = len(question.model.layers), question.run.tokens, Tier.HOST
    largest, chunk = max(schedule.group_sizes(layers)), _half(min(schedule.chunk, tokens))
    if schedule.sparse is not None:
        page = schedule.sparse.page
        chunk = max(page, chunk // page * page)
    on_host = {"boundary_inputs": host, "attention": host, "activations": host, "kv_home": host}
    return {
        "efficient chunk": {"chunk": chunk if chunk >= SMALLEST_CHUNK else schedule.chunk},
        "logits": {"loss_chunk_size": _half(min(schedule.loss_chunk_size, tokens))},
        "tiers": on_host,
        "activations": {"activation_save_fraction": _less_kept(schedule.activation_save_fraction)},
        "keys kept": {"kv_kept": False},
        "attention": {"attention_save_fraction": _less_kept(schedule.attention_save_fraction)},
        "smaller groups": {"groups": _half(largest)},
        "larger groups": {"groups": min(layers, 2 * largest)},
        "streamed keys": {"kv": host, "kv_block": min(schedule.kv_block, schedule.chunk)},
        "blocks of keys": {"kv_block": _half(min(schedule.kv_block, tokens))},
        "backward": {"layer_checkpoint": True},
        "chunk": {"chunk": chunk},
    }


def _half(size: int) -> int:
    return max(1, size // 2)


def _less_kept(fraction: float) -> float:
    return fraction / 2 if fraction / 2 >= LEAST_FRACTION else 0.0


USUAL = "shorten the context, use a smaller batch or start more ranks, on more machines"


def explain_none_fits(plan: Plan) -> str:
    """Return the error for a plan without a fitting schedule: the available memory, the schedule
    that comes closest, and a change to make."""
    where = "" if plan.unmoved is None else f"with {place_words(plan.question)}, "
    return f"schedule: none fits {_room(plan)}: {where}{_miss(plan)}; {advice(plan)}"


def explain_moved(plan: Plan) -> str:
    """Return a line that says why weights go to main memory, and how long a step then takes."""
    seconds, first = plan.seconds, plan.unmoved
    assert first is not None, "something was moved"
    why = f"a step would take {write_seconds(first.seconds.total)}" if first.fits else _miss(first)
    return (
        "weights: farspan moves them to main memory, with gradients and optimizer states; with all "
        f"on the device, {why}; a step now takes {write_seconds(seconds.total)} by the plan, "
        f"{write_seconds(seconds.compute)} of it computation"
    )


def advice(plan: Plan) -> str:
    """Return a change of the run file that saves memory: the planner's first remedy that keeps the
    results, else its first."""
    same = next((remedy for remedy in plan.remedies if remedy.same), None)
    words = (plan.remedy if same is None else same.options).split()
    changes = (_advice(plan.question, *pair) for pair in zip(words[::2], words[1::2], strict=True))
    return " and ".join(changes) or "shorten the context"


def _advice(question: Question, flag: str, value: str) -> str:
    match flag:
        case "--optimizer" if value == "host":
            # States take as much main memory either way.
            return USUAL if question.machine.unified else "set optimizer.states: host"
        case "--optimizer" if value == "disk":
            return "set optimizer.states: disk"
        case "--optimizer":
            alone = question.layout.devices() == 1  # sharded runs refuse 8-bit states
            return f"set optimizer.states: 8bit, which is not AdamW, or {USUAL}" if alone else USUAL
        case "--lora":
            return f"set model.lora.rank: {value}, which trains adapters, or {USUAL}"
        case "--quantize":
            return f"set model.quantize: {value}, which rounds the frozen weights"
        case "--weights":
            return f"set schedule.weights: {value}"
        case "--host-memory":
            return f"use a machine with {value} of main memory (and raise host_memory, if set)"
        case "--batch":
            return f"set batch: {value}, and raise accumulate by the same factor"
        case "--gpus":
            machines = -(-int(value) // question.machine.devices)
            start = COMMAND.format(value) if machines == 1 else f"on {machines} machines"
            return f"start {value} ranks, with parallel: auto: {start}"
        case "--machine":
            return f"use another card, such as {value}"
        case "--context":
            return f"set context: {value}"
        case "without":
            return "set sparse: null"
        case _:
            return USUAL


def _room(plan: Plan) -> str:
    machine, near = plan.question.machine, plan.question.near()
    together = f" for the {near} ranks of a machine" if near > 1 else ""
    if machine.unified:
        return f"{write_bytes(machine.host_bytes)} of main memory{together}"
    each = "each" if near > 1 else "the"
    host = f"{write_bytes(machine.host_bytes)} on the host{together}"
    return f"{write_bytes(machine.device_bytes)} on {each} device and {host}"


def _miss(plan: Plan) -> str:
    """Return text: the bytes that a plan needs and those available, in the scarcest memory."""
    question = plan.question
    if question.machine.unified:  # one memory: a tier's limit excludes the other tier
        tiers = (plan.device.parts, plan.host.parts)
        parts = {n: sum(t.get(n, 0) for t in tiers) for n in {**tiers[0], **tiers[1]}}
        budget, where = Budget(parts, question.host_share()), "main memory"
    elif plan.device.left < plan.host.left:
        budget, where = plan.device, "device memory"
    else:
        budget, where = plan.host, "main memory"
    who = "a rank" if question.layout.devices() > 1 else "it"
    most = sorted(filter(budget.parts.get, budget.parts), key=lambda name: -budget.parts[name])
    fills = " and ".join(
        f"{write_bytes(budget.parts[name])} of {part_words(name)}" for name in most[:2]
    )
    return (
        f"{plan.strategy} comes closest: {who} needs {write_bytes(budget.total)} of {where}, but "
        f"has {write_bytes(max(0, budget.limit))}; the largest parts are {fills}"
    )
