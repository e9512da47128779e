"""Predict time and memory of one schedule on one machine, from the programs of its ranks.

We price one rank per distinct kind, the largest of that kind. Ranks that share a sequence run the
same instructions, and the last one has the most rows of every chunk (program.layout). Stages of a
pipeline run alike where their layers are equal, except for the first, which embeds, and the last,
which has the head: three kinds where all layers are equal and stages equally long.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from operator import itemgetter

from farspan.planner.collectives import exchange_bytes
from farspan.planner.prices import Prices, rates_of
from farspan.planner.request import Budget, Plan, Question, Seconds
from farspan.planner.states import (
    gradient_bytes,
    index_bytes,
    input_bytes,
    sharing_of,
    states,
    update_overlaps,
    update_seconds,
)
from farspan.planner.timeline import Timeline, fold, folded_time, run_time
from farspan.planner.walk import Walk, workspace_bytes
from farspan.program.attention_blocks import sequence_pairs
from farspan.program.builder import build_evaluation, build_program, chunks_of
from farspan.program.layout import (
    Layout,
    Range,
    Rank,
    exchanging,
    group_ranges,
    keeping_groups,
    kept_chunks,
    refuse_shared_states,
)
from farspan.program.placement import PlacementRequest, largest_first, lowest_of
from farspan.program.program import (
    Allocate,
    Clear,
    Close,
    Free,
    Gather,
    Program,
    Receive,
    Reduce,
    Release,
    Send,
)
from farspan.program.residency import RESIDENCY, CutInto
from farspan.spec import LayerSpec, ModelSpec, Schedule, Tier, UnsupportedError


@dataclass(frozen=True, slots=True)
class RankKind:
    """Ranks with equal programs: all ranks, or those of pipeline stages with equal layers."""

    rank: Rank  # the rank of this kind that is built
    layers: Range  # layers that the rank runs
    stages: tuple[int, ...]  # of the pipeline
    widest: int  # layers of the largest group of all ranks

    @property
    def is_stage(self) -> bool:
        return self.rank.layout.pipeline > 1

    @property
    def is_first(self) -> bool:
        """Return whether the ranks have the embedding."""
        return self.rank.along["pipeline"] == 0

    @property
    def is_last(self) -> bool:
        """Return whether the ranks have the head."""
        return self.rank.along["pipeline"] == self.rank.layout.pipeline - 1


def kinds_of(question: Question, schedule: Schedule) -> tuple[RankKind, ...]:
    """Return the kinds of rank (ranks with equal programs), in the order of the pipeline. Raises
    UnsupportedError if the groups are impossible."""
    layout, layers = question.layout, question.model.layers
    groups = group_ranges(schedule, len(layers), layout.pipeline)
    widest = max(stop - start for start, stop in groups)
    last = layout.sequence() - 1
    if layout.pipeline == 1:
        return (RankKind(Rank(layout, last), (0, len(layers)), (0,), widest),)
    stride = layout.sequence() * layout.data
    alike: dict[tuple[bool, bool, tuple[LayerSpec, ...]], list[int]] = {}
    for stage, group in enumerate(groups):
        ends = stage == 0, stage == layout.pipeline - 1
        alike.setdefault((*ends, layers[slice(*group)]), []).append(stage)
    return tuple(
        RankKind(Rank(layout, last + stages[0] * stride), groups[stages[0]], tuple(stages), widest)
        for stages in alike.values()
    )


def part_of(question: Question, kind: RankKind) -> Question:
    """Return the question with only the layers of one kind of rank; other modules stay."""
    return replace(question, model=stage_model(question.model, kind.layers))


def stage_model(model: ModelSpec, layers: Range) -> ModelSpec:
    """Return the model with only a range of its layers; the modules outside the layers stay."""
    return with_layers(model, range(*layers))


def with_layers(model: ModelSpec, layers: Sequence[int]) -> ModelSpec:
    """Return the model with these layers, in this order; the modules outside the layers stay."""
    if layers == range(len(model.layers)):
        return model
    own = tuple(model.layers[layer] for layer in layers)
    gone = Counter(model.layers) - Counter(own)
    return replace(
        model,
        layers=own,
        parameters=model.parameters - sum(n * spec.work.parameters for spec, n in gone.items()),
        trainable=model.trainable - sum(n * spec.work.trainable for spec, n in gone.items()),
    )


def most_layers(question: Question) -> int:
    """Return how many layers the fullest rank has when pipeline stages are as equal as possible."""
    layers, stages = len(question.model.layers), question.layout.pipeline
    ranges = group_ranges(Schedule(groups=layers), layers, stages)
    return max(stop - start for start, stop in ranges)


def whole_schedule(question: Question, schedule: Schedule) -> Schedule:
    """Return the schedule with one group per pipeline stage; unchanged without a pipeline."""
    layers, stages = len(question.model.layers), question.layout.pipeline
    if stages == 1:
        return schedule
    ranges = group_ranges(schedule, layers, stages)
    return replace(schedule, groups=tuple(stop - start for start, stop in ranges))


def stage_schedule(question: Question, schedule: Schedule) -> Schedule:
    """Return the schedule of the longest pipeline stage, one group; unchanged without pipeline."""
    if question.layout.pipeline == 1:
        return schedule
    return replace(schedule, groups=(most_layers(question),))


def own_schedule(schedule: Schedule, layout: Layout) -> Schedule:
    """Return the schedule with its chunk and `kv_block` converted to tokens of one device that has
    all heads. Ulysses and tensor parallelism share heads, so they divide `kv_block`: some heads of
    all keys take as many bytes as all heads of some keys."""
    among_heads = layout.ulysses * layout.tensor
    chunk, sparse = -(-schedule.chunk // layout.sequence()), schedule.sparse
    return replace(
        schedule,
        chunk=chunk if sparse is None else sparse.whole_pages(chunk),
        kv_block=-(-schedule.kv_block // among_heads),
    )


def refuse_layout(question: Question) -> None:
    """Raise UnsupportedError if the layout's devices cannot share the model's layers or heads."""
    layout = question.layout
    refuse_shared_states(question.model, layout, question.weights)
    group_ranges(Schedule(), len(question.model.layers), layout.pipeline)
    for layer in question.model.layers:
        heads = layout.ulysses * layout.tensor
        if layer.kv_heads % heads:
            raise UnsupportedError(
                f"ulysses: {layer.kv_heads} K, V heads cannot be shared by {heads} devices; use a "
                f"divisor of {layer.kv_heads}, and shards for the rest"
            )


# -- ranks that share a machine -------------------------------------------------------------------


def on_machines(question: Question, kinds: Sequence[RankKind]) -> list[tuple[int, ...]]:
    """Return the different mixes of ranks on a machine, as numbers of ranks of each kind."""
    layout, near = question.layout, question.near()
    of_stage = {stage: at for at, kind in enumerate(kinds) for stage in kind.stages}
    stride, found = layout.sequence() * layout.data, dict[tuple[int, ...], None]()
    for first in range(0, layout.devices(), near):
        counts = [0] * len(kinds)
        for number in range(first, min(first + near, layout.devices())):
            counts[of_stage[number // stride]] += 1
        found[tuple(counts)] = None
    return list(found)


# -- transient memory of cells ---------------------------------------------------------------------


class RankWalk(Walk):
    """Simulation of one rank's program that counts the bytes its cells allocate.

    A rank's cells take as much as those of one device with the rank's tokens and all heads. A
    pipeline stage receives its input from another stage. Stages add up the gradients of modules
    outside the layers: a stage without a gradient for such a weight contributes zeros.
    """

    def __init__(self, question: Question, program: Program) -> None:
        layout, model = question.layout, program.model
        if layout.ulysses * layout.tensor > 1:
            model = exchanging(question.model, layout)
        own = own_schedule(program.schedule, layout)
        super().__init__(
            replace(program, chunks=program.share.tokens.rows, model=model, schedule=own),
            question.profiled(tiled=own.mlp_chunk_size is not None),
            gradient_bytes=gradient_bytes(question),
            sharing=sharing_of(question),
        )
        self.steps |= {Receive: self._receive, Send: self._send}
        groups = (range(*program.groups[group]) for group in program.own_groups())
        here = {layer for group in groups for layer in group}
        self.weights = [sizes if layer in here else [] for layer, sizes in enumerate(self.weights)]
        if question.accumulates and not self.streams:
            self.replaces = self.sums_apart
            self._begin_with_gradients()

    def _receive(self, i: Receive) -> None:
        model, run = self.program.model, self.program.run
        size = run.batch * self._tokens(i.chunk) * model.passed() * model.element_bytes
        bank = self.gradient if i.gradient else self.hidden
        bank[i.layer] = self._take(size)

    def _send(self, i: Send) -> None:
        self.live -= (self.gradient if i.gradient else self.hidden).pop(i.layer)

    def _close(self, i: Close) -> None:
        if self.program.share.rank.layout.pipeline == 1 or self.streams:
            super()._close(i)
            return
        layers = range(*self.program.groups[i.group])
        for size in (size for layer in layers for size in self.weights[layer]):
            self._settle(size)
        for name, size in self.outer_weights.items():
            if name not in self.outer:
                self._take(self.wide * size)
            self._settle(0, size)


PAGE = 4096  # pinned memory is locked by whole pages
DENSE = Schedule()


@dataclass(frozen=True, slots=True)
class Walked:
    """Program of one kind of rank, with the bytes that its cells allocate briefly."""

    kind: RankKind
    program: Program
    transient: int


def programs(
    question: Question,
    schedule: Schedule,
    walked: Sequence[int] | None = None,
    keeping: frozenset[int] | None = None,
) -> list[tuple[RankKind, Program]]:
    """Build the program of every kind of rank. If `walked` is given, programs contain only these
    chunks; `keeping` is as in `build_program`. Raises UnsupportedError if the groups do not fit the
    model."""
    model, run, cut = question.model, question.run, question.model.cut(question.loss)
    build = partial(build_program, walked=walked, cut=cut, keeping=keeping)
    kinds = kinds_of(question, schedule)
    return [(kind, build(model, run, schedule, kind.rank)) for kind in kinds]


def walk(
    question: Question, schedule: Schedule, walked: Sequence[int] | None = None
) -> tuple[Walked, ...]:
    """Build the program of every kind of rank and count the bytes that cells allocate briefly."""
    return tuple(
        Walked(kind, program, RankWalk(question, program).run().transient)
        for kind, program in programs(question, schedule, walked)
    )


ENDS = 2  # chunks walked at either end of a run of chunks that keep the same: the number of slots


def representative_chunks(question: Question, schedule: Schedule) -> list[int]:
    """Return chunks whose peak is that of all chunks: the first and last two of each stretch of
    chunks that save the same tensors. With sparse attention, too, no chunk of a stretch takes less
    than those before it."""
    chunks = chunks_of(question.model, question.run.tokens, schedule, question.layout)
    fractions = schedule.attention_save_fraction, schedule.activation_save_fraction
    count = len(chunks)
    borders = {0, count, *(count - len(kept_chunks(fraction, chunks)) for fraction in fractions)}
    found: set[int] = set()
    for start, stop in pairwise(sorted(borders)):
        found.update(range(start, min(stop, start + ENDS)), range(max(start, stop - ENDS), stop))
    return sorted(found)


@dataclass(frozen=True, slots=True)
class Sized:
    """Programs of all kinds of rank with the memory that they take. `device` is the budget of the
    fullest device; `host` is one rank's share of the machine whose main memory is the fullest."""

    walked: tuple[Walked, ...]
    device: Budget
    host: Budget

    @property
    def programs(self) -> tuple[Program, ...]:
        return tuple(one.program for one in self.walked)

    @property
    def fits(self) -> bool:
        return min(self.device.left, self.host.left) >= 0


def outlined(question: Question, schedule: Schedule) -> Sized:
    """Return what `size` returns, ten times as fast, from programs of a few chunks (outlines). The
    bytes are the same unless buffers with equally long lifetimes are placed in another order."""
    return _sized(question, walk(question, schedule, representative_chunks(question, schedule)))


def size(question: Question, schedule: Schedule) -> Sized:
    """Return the programs of a schedule with the memory that they take, but not their time."""
    return _sized(question, walk(question, schedule))


def surely_sized(question: Question, schedule: Schedule) -> Sized:
    """Return what `size` returns, from programs of a few chunks if they must take equal bytes."""
    sized = outlined(question, schedule)
    return sized if all(map(_is_packed, sized.programs)) else size(question, schedule)


def _is_packed(program: Program) -> bool:
    """Return whether the program's buffers fill its arenas without a gap, placed largest first."""
    for tier in Tier:
        held = (buffer for buffer in program.buffers.values() if buffer.tier is tier)
        requests = [PlacementRequest(b.bytes, b.born, b.dies) for b in held]
        found = lowest_of(requests, (largest_first,))
        if found.height > found.lower_bound:
            return False
    return True


def _sized(question: Question, walked: tuple[Walked, ...]) -> Sized:
    parts = [rank_parts(question, one) for one in walked]
    devices, hosts = [device for device, _ in parts], [host for _, host in parts]
    kinds = [one.kind for one in walked]
    host, device = _together(question, kinds, hosts), max(devices, key=_total)
    if question.machine.unified:
        device = _together(question, kinds, devices)
    return Sized(walked, *_limited(question, device, host))


def evaluate(
    question: Question, strategy: str, schedule: Schedule, sized: Sized | None = None
) -> Plan:
    """Return the plan of a schedule: bytes on each tier, the slowest rank's seconds, its
    bottleneck.

    A schedule that does not fit cannot run, so its step is not simulated: its time is that of the
    busiest queue where copies overlap with computation. (Eight strategies of Llama-3-70B at 16M
    tokens have a million instructions.)
    """
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
        / (rates_of(question).peak * question.layout.devices() * seconds.total),
    )


def composed_seconds(
    question: Question, schedule: Schedule
) -> tuple[float, float, tuple[Program, ...]]:
    """Return a step's seconds without the update, the seconds that it waits for an overlapping
    update, and the programs timed: the step's, and its reference model's if it has one. Copies
    overlap. Equal layers are timed once (`timeline.fold`). Pipelines are not supported."""
    layers = question.model.layers
    ranges, inside = group_ranges(schedule, len(layers)), schedule.weights is Tier.DEVICE
    keeping = keeping_groups(schedule.activation_save_layers, len(ranges))
    keeps = [
        group in keeping for group, (start, stop) in enumerate(ranges) for _ in range(start, stop)
    ]
    few, counts, sizes = fold(list(zip(layers, keeps, strict=True)), ranges, inside=inside)
    asked = replace(question, model=with_layers(question.model, few))
    firsts = enumerate(accumulate(sizes[:-1], initial=0))
    kept = frozenset(group for group, first in firsts if keeps[few[first]])
    ((_, program),) = programs(asked, replace(schedule, groups=sizes), keeping=kept)
    prices = Prices(asked, program, counts=counts)
    alone, waited = folded_time(prices, beside=update_overlaps(question))
    if not question.loss.forwards:
        return alone, waited, (program,)
    reference = _reference(asked, program)
    more, _ = folded_time(Prices(asked, reference, counts=counts), beside=False)
    return alone + question.loss.forwards * more, waited, (program, reference)


def _reference(question: Question, program: Program) -> Program:
    arguments = question.model, question.run, program.schedule, program.share.rank
    return build_evaluation(*arguments)


def slowest(question: Question, sized: Sized) -> tuple[Program, Seconds]:
    """Return the program and seconds of the slowest kind of rank; all other ranks wait for it."""
    found = (
        (one.program, step_seconds(question, one.program, simulated=sized.fits))
        for one in sized.walked
    )
    return max(found, key=lambda pair: pair[1].total)


def rank_parts(question: Question, walked: Walked) -> tuple[dict[str, int], dict[str, int]]:
    """Return the peak bytes of one kind of rank on device and host, by cause such as "cells"."""
    program, part = walked.program, part_of(question, walked.kind)
    held = states(part, own_ranges(program))
    own = own_schedule(program.schedule, question.layout)
    device = _joined(
        {
            "weights": held.weights,
            "reference": held.reference,
            "gathered": held.gathered,
            "gradients": held.gradients,
            "accumulators": held.accumulators,
            "optimizer": held.optimizer,
            "index": index_bytes(question.model, own.sparse),
        },
        arena_parts(program, Tier.DEVICE),
        {
            "cells": max(0, walked.transient) + workspace_bytes(part, own),
            "exchange": exchange_bytes(part, own.chunk),
            "inputs": input_bytes(question, program.share.tokens.total),
            "reserve": question.machine.reserve,
        },
    )
    if walked.transient < 0:
        # Cells peak while some gradients do not exist yet; all exist at the end of a step.
        device["accumulators"] = max(0, held.accumulators + walked.transient)
    host = _joined(
        {
            "weights": held.weights_on_host,
            "reference": held.reference_on_host,
            "gradients": held.gradients_on_host,
            "optimizer": held.optimizer_on_host,
        },
        arena_parts(program, Tier.HOST),
    )
    host["pages"] = -sum(host.values()) % PAGE
    return device, host


def momentary(question: Question, program: Program) -> int:
    """Return the device bytes that a rank allocates briefly outside its program's buffers.

    Cells and their workspace, messages, and the gathered weights of one group count. The result is
    negative if cells peak before all gradients exist.
    """
    stage = program.share.rank.along["pipeline"]
    kinds = kinds_of(question, program.schedule)
    kind = next(kind for kind in kinds if stage in kind.stages)
    part, own = part_of(question, kind), own_schedule(program.schedule, question.layout)
    gathered = 0 if program.streams() else states(part, own_ranges(program)).gathered
    transient = RankWalk(question, program).run().transient
    return transient + workspace_bytes(part, own) + exchange_bytes(part, own.chunk) + gathered


def _joined(*parts: dict[str, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in parts:
        assert not found.keys() & part.keys(), found.keys() & part.keys()
        found |= part
    return found


def own_ranges(program: Program) -> tuple[Range, ...]:
    """Return the layer ranges of the rank's groups, numbered from the rank's first layer."""
    groups = [program.groups[group] for group in program.own_groups()]
    return tuple((start - groups[0][0], stop - groups[0][0]) for start, stop in groups)


def _total(parts: dict[str, int]) -> int:
    return sum(parts.values())


def _together(
    question: Question, kinds: Sequence[RankKind], parts: Sequence[dict[str, int]]
) -> dict[str, int]:
    """Return one rank's share of the memory in use on the fullest machine, by cause."""
    near = question.near()

    def shares(counts: tuple[int, ...]) -> dict[str, int]:
        sums = Counter[str]()
        for count, part in zip(counts, parts, strict=True):
            sums.update({name: count * size for name, size in part.items()})
        return {name: -(-size // near) for name, size in sums.items()}

    return max(map(shares, on_machines(question, kinds)), key=_total)


def _limited(
    question: Question, device: dict[str, int], host: dict[str, int]
) -> tuple[Budget, Budget]:
    machine, share = question.machine, question.host_share()
    device, host = ({k: v for k, v in parts.items() if v} for parts in (device, host))
    if machine.unified:
        # One memory: the bytes of one tier are lost to the other.
        return Budget(device, share - sum(host.values())), Budget(
            host, share - sum(device.values())
        )
    return Budget(device, machine.device_bytes), Budget(host, share)


def arena_parts(program: Program, tier: Tier) -> dict[str, int]:
    """Return the bytes of each kind of buffer on a tier at the moment when the tier is fullest.
    Staging slots, and bytes lost between buffers, are parts of their own."""
    live: dict[str, int] = {}
    total = most = 0
    fullest: dict[str, int] = {}
    held = [buffer for buffer in program.buffers.values() if buffer.tier is tier]
    ends = [(b.born, b, b.bytes) for b in held] + [(b.dies, b, -b.bytes) for b in held]
    for _, buffer, size in sorted(ends, key=itemgetter(0)):
        is_slot = buffer.layer < 0 and RESIDENCY[buffer.kind].rows is not CutInto.GROUPS
        part = "slots" if is_slot else str(buffer.kind)
        live[part] = live.get(part, 0) + size
        total += size
        if total > most:
            most, fullest = total, dict(live)
    parts = {str(kind): fullest.get(str(kind), 0) for kind in RESIDENCY}
    parts["slots"] = fullest.get("slots", 0)
    parts["placement"] = program.arena_bytes[tier] - most
    return parts


def step_seconds(question: Question, program: Program, *, simulated: bool = True) -> Seconds:
    """Return the seconds of one step with its update on the program's rank. Copies overlap with
    computation if `Question.overlap` says so; for `simulated` see `run_time`."""
    beside = update_overlaps(question)
    line, sent = _timeline(question, program, beside=beside, simulated=simulated)
    groups = [program.groups[group] for group in program.own_groups()]
    layers = groups[0][0], groups[-1][1]
    update = update_seconds(replace(question, model=stage_model(question.model, layers)))
    if question.loss.forwards:
        reference = _reference(question, program)
        forward, more = _timeline(question, reference, beside=False, simulated=simulated)
        for _ in range(question.loss.forwards):
            line, sent = line.before(forward), sent + more
    exposed = min(line.waited, update) if beside else update
    return Seconds(
        total=line.total + sent + exposed,
        compute=line.compute,
        fetch=line.fetch,
        evict=line.evict,
        collective=line.collective + sent,
        optimizer=exposed,
        host=line.host,
        bound=_bound(line),
        beside=update - exposed,
    )


def _timeline(
    question: Question, program: Program, *, beside: bool, simulated: bool
) -> tuple[Timeline, float]:
    """Return a program's timeline, with waits between pipeline stages, and seconds of messages."""
    prices = Prices(question, program, together=question.overlap)
    line = run_time(prices, overlap=question.overlap, simulated=simulated, beside=beside)
    tokens = (stop - start for start, stop in program.share.tokens.rows)
    sent = (1 + program.trains()) * sum(map(prices.collectives.boundary, tokens))
    return replace(line, total=line.total * _waiting(question, prices)), sent


_OF_NO_CHUNK = (Allocate, Free, Clear, Close, Gather, Reduce, Release)


def _waiting(question: Question, prices: Prices) -> float:
    """Return the factor by which waits between pipeline stages stretch a step. A stage begins when
    the stage before has finished its first chunk, and the slowest chunk sets the pace."""
    stages, program = question.layout.pipeline, prices.program
    if stages == 1:
        return 1.0
    busy = [0.0] * len(program.chunks)
    for instruction in program.instructions:
        if not isinstance(instruction, _OF_NO_CHUNK):
            busy[instruction.chunk] += prices.of(instruction).in_line()
    # The passes over all chunks take sum(busy) + (stages - 1) max(busy).
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
    """Return the FLOP of a step that MFU counts: three forwards, or two for frozen weights; no
    recomputation, no embeddings. Attention counts only keys that a query sees (half if causal)."""
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
