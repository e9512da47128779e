"""Out of memory: recognized in an exception, cleared away, and a lighter schedule found."""

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from farspan.engine.memory import least_transient
from farspan.engine.tiers import DeviceTooSmall
from farspan.formatting import write_bytes, write_seconds
from farspan.memory.host import TooLarge
from farspan.planner.remedies import part_words, place_words
from farspan.planner.request import Budget, Plan, Question
from farspan.planner.space import SMALLEST_CHUNK
from farspan.program.builder import build_program
from farspan.program.layout import ALONE, COMMAND, Layout, Rank, group_ranges, refuse_together
from farspan.spec import ModelSpec, RunSpec, Schedule, Tier, UnsupportedError

# How torch's allocator of main memory says that it got none.
NO_MAIN_MEMORY = ("DefaultCPUAllocator", "not enough memory", "an't allocate memory")
# CUDA libraries that take device memory for themselves, and an allocator that was installed where
# no compiler could make torch's own exception.
NO_DEVICE_MEMORY = ("CUDA error: out of memory", "ALLOC_FAILED", "CUDA out of memory")


class NoScheduleFits(UnsupportedError):
    """No schedule that was tried fits; the message says which were."""


class OneRankOutOfMemory(NoScheduleFits):
    """One of several ranks ran out while the others went on: they wait for it within the step."""


# What ranks look at together before they take any: all of them are refused, or none.
_TOGETHER = (TooLarge, DeviceTooSmall)


class RankReportedShortage(UnsupportedError):
    """A rank ran out apart from the others, and has told them."""

    def __init__(self, shortage: "Shortage") -> None:
        super().__init__(shortage.message)
        self.shortage = shortage


@dataclass(frozen=True, slots=True)
class Shortage:
    """A tier that ran out. On a CPU both are main memory: it is then the host."""

    tier: Tier
    message: str  # one line
    of_all: bool = True  # the ranks of this run: all of them know, and have left the same work


def find_shortage(error: BaseException) -> Shortage | None:
    """What ran out, if that is why `error`, or what it was raised from, was raised."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RankReportedShortage):
            return cause.shortage
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
        return Tier.HOST if "out of memory" in str(error) else None  # pages that are to be locked
    if not isinstance(error, RuntimeError):
        return None
    if any(sign in str(error) for sign in NO_MAIN_MEMORY):
        return Tier.HOST
    return Tier.DEVICE if any(sign in str(error) for sign in NO_DEVICE_MEMORY) else None


def clear_up(device: torch.device) -> None:
    """Gives back what a failed step has left. Call it outside the handler of its exception, which
    holds the step's frames and they its tensors."""
    gc.collect()
    if device.type != "cuda":
        return
    try:
        # A call of CUDA's that failed, such as locking pages, leaves its error code behind, and
        # the next kernel would report it as its own.
        torch.zeros(1, device=device).add_(1)
        torch.cuda.synchronize(device)
    except RuntimeError:
        pass
    torch.cuda.empty_cache()


Change = Callable[[Schedule, int], Schedule]  # of a schedule for so many layers

LEAST_FRACTION = 0.125  # half of it is too little to be worth its buffers


def lighter_schedule(
    model: ModelSpec,
    run: RunSpec,
    schedule: Schedule,
    tiers: Iterable[Tier],
    share: float,
    layout: Layout = ALONE,
) -> Schedule | None:
    """Takes one step after the other until the tiers need at most `share` of what they did, the
    cheapest in time first; None when no step takes anything away. What it finds the ranks of a
    layout can run as they are: stages keep their layers."""
    tiers = tuple(tiers)
    # The same program, in numbers that can be halved.
    schedule = replace(
        schedule,
        chunk=_whole_pages(schedule, min(schedule.chunk, run.tokens)),
        kv_block=min(schedule.kv_block, run.tokens),
        loss_chunk_size=min(schedule.loss_chunk_size, run.tokens),
    )
    layers = len(model.layers)
    stages = group_ranges(schedule, layers, layout.pipeline)
    before = now = needed(model, run, schedule, tiers, layout)
    for change in _changes(tiers):
        candidate = change(schedule, layers)
        if candidate == schedule:
            continue
        try:
            refuse_together(candidate, layout)
            if layout.pipeline > 1 and group_ranges(candidate, layers, layout.pipeline) != stages:
                continue
            size = needed(model, run, candidate, tiers, layout)
        except UnsupportedError:  # such as groups that the model does not have
            continue
        if size < now:
            schedule, now = candidate, size
        if now <= share * before:
            break
    return schedule if now < before else None


def needed(
    model: ModelSpec,
    run: RunSpec,
    schedule: Schedule,
    tiers: Iterable[Tier],
    layout: Layout = ALONE,
) -> int:
    """Bytes of the tiers that a schedule decides: arenas, and on the device what a cell holds. Of
    a layout's ranks the most of a stage's first, from which its others differ by rows."""
    firsts = Rank(layout).peers("pipeline")
    return max(_needed(model, run, schedule, tiers, Rank(layout, first)) for first in firsts)


def _needed(
    model: ModelSpec, run: RunSpec, schedule: Schedule, tiers: Iterable[Tier], rank: Rank
) -> int:
    program = build_program(model, run, schedule, rank)
    size = sum(program.arena_bytes[tier] for tier in tiers)
    if Tier.DEVICE in tiers:
        rows = run.batch * min(schedule.loss_chunk_size, program.share.tokens.most)
        logits = rows * model.vocab * model.accumulate_bytes()
        size += max(least_transient(program), logits)
    return size


def _changes(tiers: tuple[Tier, ...]) -> list[Change]:
    found: list[Change] = []
    if Tier.DEVICE in tiers:
        found += [_efficient_chunk, _efficient_chunk, _fewer_logits]
    if Tier.HOST not in tiers:
        found += [_on_host, _smaller_groups, _streamed, _smaller_blocks]
    else:
        found += [_fewer_activations, _no_keys_kept, _less_attention]
        found += [_smaller_groups, _larger_groups]
    if Tier.DEVICE in tiers:
        found += [_layer_by_layer, _smaller_chunk, _smaller_chunk]
    return found


def _efficient_chunk(schedule: Schedule, layers: int) -> Schedule:
    """Half, unless cells become so short that everything else is tried first."""
    halved = _smaller_chunk(schedule, layers)
    return halved if halved.chunk >= SMALLEST_CHUNK else schedule


def _smaller_chunk(schedule: Schedule, _: int) -> Schedule:
    half = max(1, schedule.chunk // 2)
    if schedule.sparse is not None:
        page = schedule.sparse.page
        half = max(page, half // page * page)
    return replace(schedule, chunk=half)


def _smaller_blocks(schedule: Schedule, _: int) -> Schedule:
    return replace(schedule, kv_block=max(1, schedule.kv_block // 2))


def _fewer_logits(schedule: Schedule, _: int) -> Schedule:
    return replace(schedule, loss_chunk_size=max(1, schedule.loss_chunk_size // 2))


def _on_host(schedule: Schedule, _: int) -> Schedule:
    host = Tier.HOST
    return replace(schedule, boundary_inputs=host, attention=host, activations=host, kv_home=host)


def _streamed(schedule: Schedule, _: int) -> Schedule:
    return replace(schedule, kv=Tier.HOST, kv_block=min(schedule.kv_block, schedule.chunk))


def _fewer_activations(schedule: Schedule, _: int) -> Schedule:
    return replace(schedule, activation_save_fraction=_half(schedule.activation_save_fraction))


def _no_keys_kept(schedule: Schedule, _: int) -> Schedule:
    return replace(schedule, kv_kept=False)


def _less_attention(schedule: Schedule, _: int) -> Schedule:
    return replace(schedule, attention_save_fraction=_half(schedule.attention_save_fraction))


def _smaller_groups(schedule: Schedule, layers: int) -> Schedule:
    sizes = schedule.group_sizes(layers)
    return replace(schedule, groups=max(1, max(sizes) // 2))


def _larger_groups(schedule: Schedule, layers: int) -> Schedule:
    return replace(schedule, groups=min(layers, 2 * max(schedule.group_sizes(layers))))


def _layer_by_layer(schedule: Schedule, _: int) -> Schedule:
    return replace(schedule, layer_checkpoint=True)


def _whole_pages(schedule: Schedule, tokens: int) -> int:
    """So many tokens, or as many more as sparse attention needs of a chunk."""
    return tokens if schedule.sparse is None else schedule.sparse.whole_pages(tokens)


def _half(fraction: float) -> float:
    return fraction / 2 if fraction / 2 >= LEAST_FRACTION else 0.0


USUAL = "shorten the context, use a smaller batch or start more ranks, on more machines"


def explain_none_fits(plan: Plan) -> str:
    """The room there is, what the plan that misses by the least would take of it, and what to
    change."""
    where = "" if plan.unmoved is None else f"with {place_words(plan.question)}, "
    return f"schedule: none fits {_room(plan)}: {where}{_miss(plan)}; {advice(plan)}"


def explain_moved(plan: Plan) -> str:
    """Why weights go to main memory, and how long a step is for it; on one line."""
    seconds, first = plan.seconds, plan.unmoved
    assert first is not None, "something was moved"
    why = f"a step took {write_seconds(first.seconds.total)}" if first.fits else _miss(first)
    return (
        "weights: go to main memory, with gradients and optimizer states; with them on the device, "
        f"{why}; a step now takes {write_seconds(seconds.total)} by the plan, of which "
        f"{write_seconds(seconds.compute)} compute"
    )


def advice(plan: Plan) -> str:
    """The planner's first remedy that keeps the results, else its first, as a change of the run
    file."""
    same = next((remedy for remedy in plan.remedies if remedy.same), None)
    words = (plan.remedy if same is None else same.options).split()
    changes = (_advice(plan.question, *pair) for pair in zip(words[::2], words[1::2], strict=True))
    return " and ".join(changes) or "shorten the context"


def _advice(question: Question, flag: str, value: str) -> str:
    match flag:
        case "--optimizer" if value == "host":
            # Where both tiers are main memory, states take as much of it either way.
            return USUAL if question.machine.unified else "set optimizer.states: host"
        case "--optimizer" if value == "disk":
            return "set optimizer.states: disk"
        case "--optimizer":
            alone = question.layout.devices() == 1  # sharded over ranks they are refused
            return f"set optimizer.states: 8bit, which is not AdamW, or {USUAL}" if alone else USUAL
        case "--lora":
            return f"set model.lora.rank: {value}, which trains adapters, or {USUAL}"
        case "--quantize":
            return f"set model.quantize: {value}, which rounds the frozen weights"
        case "--weights":
            return f"set schedule.weights: {value}"
        case "--host-memory":
            return f"use a machine with {value} of main memory (and so much host_memory, if set)"
        case "--batch":
            return f"set batch: {value}, and accumulate as much higher"
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
    """What one rank needs and has, of what it lacks most."""
    question = plan.question
    if question.machine.unified:  # one memory, whose limits are less by what the other tier takes
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
        f"{plan.strategy} misses by the least: {who} needs {write_bytes(budget.total)} of {where} "
        f"and has {write_bytes(max(0, budget.limit))}; most of it is {fills}"
    )
