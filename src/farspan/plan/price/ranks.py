"""The ranks that a layout is priced by: of those that run alike, the one that takes the most.

Ranks that share a sequence run the same instructions, and the last of them has the most rows of
every chunk (layout.part). Stages of a pipeline run alike where their layers are equal, but for the
first, which embeds, and the last, which has the head: three kinds where all layers are equal and
stages equally long.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from farspan.plan.cell.transient import Walk
from farspan.plan.grid import group_ranges
from farspan.plan.layout import Layout, Range, Rank
from farspan.plan.price.states import gradient_bytes, sharing_of
from farspan.plan.program import Close, Program, Receive, Send
from farspan.plan.question import Question
from farspan.plan.share import exchanging
from farspan.plan.states import refuse_shared_states
from farspan.spec import LayerSpec, ModelSpec, Refused, Schedule


@dataclass(frozen=True, slots=True)
class RankKind:
    """Ranks that run alike."""

    rank: Rank  # the one of them that is built
    layers: Range  # that it runs
    stages: tuple[int, ...]  # of the pipeline
    widest: int  # layers of the largest group of all ranks

    @property
    def is_stage(self) -> bool:
        """Of a pipeline."""
        return self.rank.layout.pipeline > 1

    @property
    def is_first(self) -> bool:
        """Does it embed?"""
        return self.rank.along["pipeline"] == 0

    @property
    def is_last(self) -> bool:
        """Does it have the head?"""
        return self.rank.along["pipeline"] == self.rank.layout.pipeline - 1


def kinds_of(question: Question, schedule: Schedule) -> tuple[RankKind, ...]:
    """The kinds of rank, by their first stage. Raises Refused for groups that do not fit."""
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
        RankKind(Rank(layout, last + of[0] * stride), groups[of[0]], tuple(of), widest)
        for of in alike.values()
    )


def part_of(question: Question, kind: RankKind) -> Question:
    """The question about the layers of one kind of rank, and what lies outside them."""
    return replace(question, model=stage_model(question.model, kind.layers))


def stage_model(model: ModelSpec, layers: Range) -> ModelSpec:
    """The model with these layers alone, and what lies outside them."""
    if layers == (0, len(model.layers)):
        return model
    first, stop = layers
    others = model.layers[:first] + model.layers[stop:]
    return replace(
        model,
        layers=model.layers[first:stop],
        parameters=model.parameters - sum(layer.work.parameters for layer in others),
        trainable=model.trainable - sum(layer.work.trainable for layer in others),
    )


def most_layers(question: Question) -> int:
    """Layers of the rank that has the most, stages being as equal as they can be."""
    layers, stages = len(question.model.layers), question.layout.pipeline
    ranges = group_ranges(Schedule(groups=layers), layers, stages)
    return max(stop - start for start, stop in ranges)


def whole_schedule(question: Question, schedule: Schedule) -> Schedule:
    """The schedule with a group for each stage of the pipeline, where there is one and it has no
    stages of its own."""
    layers, stages = len(question.model.layers), question.layout.pipeline
    if stages == 1:
        return schedule
    ranges = group_ranges(schedule, layers, stages)
    return replace(schedule, groups=tuple(stop - start for start, stop in ranges))


def stage_schedule(question: Question, schedule: Schedule) -> Schedule:
    """The schedule as its longest pipeline stage sees it: all its layers in one group."""
    if question.layout.pipeline == 1:
        return schedule
    return replace(schedule, groups=(most_layers(question),))


def own_schedule(schedule: Schedule, layout: Layout) -> Schedule:
    """The schedule in the tokens of one device, all heads at each. Keys are cut by heads, and a
    part of the heads at every key takes as many bytes as all heads at a part of the keys; what
    shards and rings hold of the keys is asked for in blocks of as many."""
    among_heads = layout.ulysses * layout.tensor
    chunk, sparse = -(-schedule.chunk // layout.sequence()), schedule.sparse
    return replace(
        schedule,
        chunk=chunk if sparse is None else sparse.whole_pages(chunk),
        kv_block=-(-schedule.kv_block // among_heads),
    )


def refuse_layout(question: Question) -> None:
    """Raises Refused when the model's layers or heads cannot be shared as the layout says."""
    layout = question.layout
    refuse_shared_states(question.model, layout)
    group_ranges(Schedule(), len(question.model.layers), layout.pipeline)
    for layer in question.model.layers:
        heads = layout.ulysses * layout.tensor
        if layer.kv_heads % heads:
            raise Refused(
                f"ulysses: {layer.kv_heads} K, V heads cannot be shared by {heads} devices; use a "
                f"divisor of {layer.kv_heads}, and shards for the rest"
            )


# -- ranks that share a machine -------------------------------------------------------------------


def on_machines(question: Question, kinds: Sequence[RankKind]) -> list[tuple[int, ...]]:
    """How many ranks of each kind every machine has, machines that have the same being one."""
    layout, near = question.layout, question.near()
    of_stage = {stage: at for at, kind in enumerate(kinds) for stage in kind.stages}
    stride, found = layout.sequence() * layout.data, dict[tuple[int, ...], None]()
    for first in range(0, layout.devices(), near):
        counts = [0] * len(kinds)
        for number in range(first, min(first + near, layout.devices())):
            counts[of_stage[number // stride]] += 1
        found[tuple(counts)] = None
    return list(found)


# -- what cells hold ------------------------------------------------------------------------------


class RankWalk(Walk):
    """What cells hold for a moment on one rank, whose program it walks through.

    Cells of a rank take what they take of one device that has the rank's tokens and all heads. A
    stage receives what it does not make, and closes what lies outside the layers with all others:
    where it has no gradient of a weight it gives zeros.
    """

    def __init__(self, question: Question, program: Program) -> None:
        layout, model = question.layout, program.model
        if layout.ulysses * layout.tensor > 1:
            model = exchanging(question.model, layout)
        own = own_schedule(program.schedule, layout)
        super().__init__(
            replace(program, chunks=program.share.tokens.rows, model=model, schedule=own),
            question.architecture,
            gradient_bytes=gradient_bytes(question),
            sharing=sharing_of(question),
        )
        self.steps |= {Receive: self._receive, Send: self._send}
        groups = (range(*program.groups[group]) for group in program.own_groups())
        here = {layer for group in groups for layer in group}
        self.weights = [of if layer in here else [] for layer, of in enumerate(self.weights)]
        if question.accumulates:
            self.replaces = self.sums_apart
            self._begin_with_gradients()

    def _receive(self, i: Receive) -> None:
        model, run = self.program.model, self.program.run
        size = run.batch * self._tokens(i.chunk) * model.hidden * model.element_bytes
        bank = self.gradient if i.gradient else self.hidden
        bank[i.layer] = self._take(size)

    def _send(self, i: Send) -> None:
        self.live -= (self.gradient if i.gradient else self.hidden).pop(i.layer)

    def _close(self, i: Close) -> None:
        if self.program.share.rank.layout.pipeline == 1:
            super()._close(i)
            return
        layers = range(*self.program.groups[i.group])
        for size in (size for layer in layers for size in self.weights[layer]):
            self._settle(size)
        for name, size in self.outer_weights.items():
            if name not in self.outer:
                self._take(self.wide * size)
            self._settle(size)

    def _settle(self, size: int) -> None:
        """A sum of so many elements becomes `.grad`."""
        self._take(self._final(size))
        self.live -= self.wide * size + self._final(size) * self.replaces
