"""Prepare a model for steps: derive the modules, kernels and sizes that a step needs.

`prepare` derives all of these for the model's present state; a `PreparedModel` does not change.
`Preparations` prepares the model again when it was edited, and keeps the latest results, since
adapters and train or eval mode are switched back and forth.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from farspan.distributed.agreement import Agreement, Described
from farspan.distributed.context import ParallelContext
from farspan.distributed.fsdp import Stage
from farspan.engine.float8 import float8_linears, refuse_float8
from farspan.engine.gradients import AccumulatingLinears, adds_products
from farspan.engine.kernels import AttentionKernels, attention_kernels
from farspan.engine.parallelize import UNREAD, ShardedModel, described, inside, parallelize
from farspan.engine.streamed_weights import StreamedWeights, computing_device
from farspan.hf.compiled import compile_layers
from farspan.hf.describe import describe
from farspan.hf.edits import Look, first_edit, has_same_parts, look
from farspan.hf.fused_layers import fuse, fuse_layers, spared_layers
from farspan.hf.probe import ask_layers
from farspan.hf.routers import Routers, routers_of
from farspan.hf.stages import CausalLMStages
from farspan.hf.tiled_mlp import Tokenwise, tokenwise
from farspan.hf.unsupported import (
    context_limit,
    refuse_backward_hooks,
    refuse_dropout,
    refuse_model,
    refuse_places,
    refuse_untrained,
)
from farspan.kernels.launch import fused_for
from farspan.program.layout import ALONE, refuse_shared_states, streams
from farspan.spec import Kernels, ModelSpec, Schedule, Tier, UnsupportedError

# Preparations kept for recent states of the same modules: one takes 0.3 s for 30 layers on a CPU,
# and the memory of its programs' objects.
PREPARATIONS_KEPT = 4
# Attributes that may change in a sharded model, which cannot be probed again: modes, the numbers of
# buffers, adapters that are switched off, scales of packed weights (which steps move to the host),
# and fields that do not affect a step. Sharded parameters are checked separately.
_WHILE_SHARDED = (
    *("training", "_buffers", "_parameters", "_disable_adapters", "_adapters_disabled"),
    *("quant_state", "state2"),
    *UNREAD,
)


@dataclass(frozen=True, eq=False)
class PreparedModel:
    """A model in its state at one moment, with everything that steps derive from it."""

    model: nn.Module  # the user's, with its wrappers
    stages: CausalLMStages
    schedule: Schedule | None  # None: not planned yet
    sharded: ShardedModel | None
    weights: StreamedWeights | None  # None: they stay on the device
    spec: ModelSpec
    kernels: AttentionKernels
    settings: Callable[[], AbstractContextManager[Any]]  # of torch, while a program runs
    fused: bool  # modules run on the device's own kernels
    linears: AccumulatingLinears
    spared: frozenset[int]  # layers that can skip their last product
    tiles: tuple[tuple[Tokenwise, ...], ...]  # of each layer, if the schedule has tiles
    outer: tuple[nn.Parameter, ...]  # trained outside the layers, as modules have them in a step
    drops: bool  # a dropout is active
    routers: Routers | None  # whose losses the model adds
    limit: int | None  # the longest sequence
    look: Look
    programs: dict[Any, Any] = field(default_factory=dict)  # built for it so far, by the runner
    _accepted: set[bool] = field(default_factory=set)  # whether it may be trained, and evaluated

    def accept(self, *, trains: bool) -> None:
        """Raise UnsupportedError if the model cannot be trained or, without `trains`, evaluated."""
        if trains in self._accepted:
            return
        model = self.stages.model
        if trains and self.sharded is None:  # a rank may train nothing
            refuse_untrained(model)
        if trains:
            refuse_backward_hooks(model, over_ranks=self.sharded is not None)
        refuse_model(model)
        self._accepted.add(trains)

    def compare(self, same: Agreement) -> None:
        """Have ranks compare the model, its buffers and, unless an optimizer runs, its weights."""
        if self.sharded is not None:
            same.add({"model": self._described})
            idle = self.weights is None or not self.weights.is_updating()
            self.sharded.compare(same, self.stages, weights=idle)

    @cached_property
    def _described(self) -> Described:
        return described(self.look, self.stages)

    def is_current(self) -> bool:
        """Return whether the weights are still in the memory from which steps stream them."""
        return self.weights is None or self.weights.is_of(self.stages)

    def trains(self) -> bool:
        return any(p.requires_grad for p in self.stages.model.parameters())

    def marks(self, head: object, own: list[nn.Parameter]) -> object:
        """Return a value that compares unequal after any change to the model, its weights, the
        trained parameters, or `head` and its parameters `own`."""
        found = [*self.stages.model.parameters()]
        if self.sharded is not None:
            found = [*self.sharded.sharded.parameters().values()]
        found += own
        # A DTensor and its shard have separate version counters.
        shards = [getattr(p, "_local_tensor", p) for p in found]
        versions = [x._version for x in (*found, *shards)]
        # A step may have moved the weights unchanged.
        where = self.weights.has_all() if self.weights else [x.data_ptr() for x in shards]
        return (
            look(self.model),
            look(head) if isinstance(head, nn.Module) else None,
            versions,
            where,
        )


def prepare(
    model: nn.Module,
    schedule: Schedule | None,
    wanted: Kernels,
    *,
    sharded: ShardedModel | None = None,
    device: torch.device | str | None = None,
    weights: StreamedWeights | None = None,
) -> PreparedModel:
    """Prepare a model for steps. Raises UnsupportedError if it or the schedule is not supported.

    Args:
        model: The user's model; if its weights are to be on the host, they move to main memory.
        schedule: None if it is not planned yet.
        wanted: Implementations of kernels that the user asks for.
        sharded: The model as `parallelize` has sharded it.
        device: The device that computes, if weights are in main memory.
        weights: Streamed weights of an earlier preparation, reused if the model still has them.
    """
    on_host = is_on_host(schedule, sharded)
    stages = _stages(model, sharded, device, on_host=on_host)
    _refuse(stages, sharded)
    routers = routers_of(stages.model)
    if wanted.compile:
        compile_layers(stages.layers)
    at, dtype = stages.device, stages.dtype
    fused = wanted.fused and fused_for(at, dtype)
    kernels = attention_kernels(wanted, at, dtype, fused=fused)
    linears = AccumulatingLinears()
    spec = _fused_spec(stages, wanted, linears, sharded)
    streamed = None
    if on_host:
        refuse_shared_states(spec, ALONE, Tier.HOST)
        kept = weights if weights is not None and weights.is_of(stages) else None
        streamed = kept or StreamedWeights(stages)
        spec = streamed.counted(spec)
    kernels.refuse(spec)
    # Skipping a product gives gradients in the model's dtype, so those in FP8 are never skipped.
    may_spare = fused and sharded is None and wanted.products is None
    if schedule is not None:
        schedule.group_sizes(len(spec.layers))
    return PreparedModel(
        model,
        stages,
        schedule,
        sharded,
        streamed,
        spec,
        kernels,
        nullcontext if kernels.is_ready() else kernels.ready,
        fused,
        linears,
        spared_layers(stages) if may_spare else frozenset(),
        _tiles(stages, schedule, sharded),
        _outer(stages, sharded, streamed),
        any(isinstance(m, nn.Dropout) and m.p > 0 and m.training for m in stages.model.modules()),
        routers,
        context_limit(stages.model),
        _look_at(model, stages, sharded),
    )


def _fused_spec(
    stages: CausalLMStages,
    wanted: Kernels,
    linears: AccumulatingLinears,
    sharded: ShardedModel | None,
) -> ModelSpec:
    """Choose the code that modules run, and return the model's sizes. Raises UnsupportedError."""
    at, is_cut = stages.device, sharded is not None and sharded.tensor is not None
    if not is_cut:  # slices of weights have their own shells
        adds = wanted.accumulate and wanted.products is None
        linears.adds = adds and adds_products(at, stages.dtype)
        fuse(stages, wanted, at, *(linears.forward_of,) * linears.adds, linears=linears)
    spec = describe(stages.in_place(), at) if sharded is None else sharded.spec
    if wanted.products is not None:  # after the layers were compared with the model's own
        refuse_float8(stages, at, cut=is_cut)
        in_float8 = float8_linears(at.type).forward_of
        fuse_layers(stages, wanted, at, in_float8, linears=linears)
    return spec


def is_on_host(schedule: Schedule | None, sharded: ShardedModel | None) -> bool:
    """Return whether steps stream weights from main memory, where each rank has all weights."""
    layout = ALONE if sharded is None else sharded.rank.layout
    return schedule is not None and streams(schedule, layout)


def _stages(
    model: nn.Module,
    sharded: ShardedModel | None,
    device: torch.device | str | None,
    *,
    on_host: bool,
) -> CausalLMStages:
    stages = CausalLMStages(model, None if sharded is None else sharded.sharded.device)
    if not on_host and device is None:
        return stages
    return CausalLMStages(model, computing_device(stages.device, device, on_host, sharded))


def _refuse(stages: CausalLMStages, sharded: ShardedModel | None) -> None:
    if stages.dtype is torch.float16:
        raise UnsupportedError(
            "model: float16 gradients of a long sequence's mean loss vanish without loss scaling; "
            "load the model in bfloat16 or float32"
        )
    refuse_dropout(stages.model, is_cut=sharded is not None and sharded.tensor is not None)
    if sharded is None:
        refuse_places(stages.model)


def _refuse_autocast(model: PreparedModel) -> None:
    """Raise UnsupportedError unless cells can repeat every operation under autocast, in the memory
    that a plan counts for the dtype of the weights."""
    stages, schedule, spec = model.stages, model.schedule, model.spec
    reason = ""
    if stages.dtype is not torch.float32:
        reason = f"is for float32 weights, and these are {stages.dtype}; leave it out"
    elif model.sharded is not None:
        reason = "is not supported on several ranks; load the model in bfloat16"
    elif spec.is_recurrent():
        reason = "is not supported with recurrent layers; load the model in bfloat16"
    elif stages.carries:
        reason = "is not supported if layers share keys and values; load the model in bfloat16"
    elif any(layer.indexer is not None for layer in spec.layers):
        reason = "is not supported if an indexer chooses tokens; load the model in bfloat16"
    elif schedule is None:
        reason = "needs a written schedule, as the planner plans for one dtype; give one, such as "
        reason += "farspan.Schedule(chunk=4096)"
    elif schedule.activation_save_fraction or schedule.mlp_chunk_size or schedule.sparse:
        reason = "is not supported with activation_save_fraction, mlp_chunk_size and sparse; leave "
        reason += "them out"
    elif model.weights is not None:
        reason = "is not supported with weights in main memory; leave schedule.weights out"
    if reason:
        raise UnsupportedError(f"autocast: it {reason}")


def _tiles(
    stages: CausalLMStages, schedule: Schedule | None, sharded: ShardedModel | None
) -> tuple[tuple[Tokenwise, ...], ...]:
    if schedule is None or schedule.mlp_chunk_size is None:
        return ()
    if sharded is None:
        return tokenwise(stages.in_place())
    if not sharded.tiles:
        raise UnsupportedError(
            "mlp_chunk_size: the model was sharded without mlp_chunk_size; call parallelize again "
            "with this schedule"
        )
    return sharded.tiles


def _outer(
    stages: CausalLMStages, sharded: ShardedModel | None, weights: StreamedWeights | None
) -> tuple[nn.Parameter, ...]:
    if weights is not None:
        return weights.trained_outside()
    if sharded is not None:
        return sharded.outer_parameters()
    return tuple(stages.outer_parameters())


def _look_at(model: nn.Module, stages: CausalLMStages, sharded: ShardedModel | None) -> Look:
    """Return a comparable snapshot of the model, without trainers' attributes if it is sharded."""
    return look(model) if sharded is None else inside(stages.model)


@dataclass
class Preparations:
    """Preparations of a step's model: for its present state, and for recent states."""

    model: nn.Module
    schedule: Schedule | None
    wanted: Kernels
    sharded: ShardedModel | None
    whole_on: ParallelContext | None  # ranks that keep whole weights, which may then move
    device: torch.device | str | None  # that computes, if given
    autocast: torch.dtype | None = None  # in the model's modules
    now: PreparedModel = field(init=False)
    _kept: list[PreparedModel] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.autocast is not None:  # farspan's own functions compute in the weights' dtype
            self.wanted = replace(self.wanted, fused=False, accumulate=False, remake=False)

    def keep_whole(self) -> None:
        """Make the ranks `whole_on`, if given, keep all weights each and sum gradients among
        themselves. All of them call this."""
        if self.whole_on is not None:
            keep = partial(parallelize, stage=Stage.ZERO_0, keep=True, kernels=self.wanted)
            self.sharded = keep(self.model, self.schedule or Schedule(), self.whole_on)

    def begin(self, weights: StreamedWeights | None = None) -> None:
        """Prepare the model in its present state. Raises UnsupportedError."""
        self._prepare(weights)
        if self.sharded is not None:
            self.now = self._kept[-1] = replace(self.now, look=self.sharded.look)

    def follow(self, schedule: Schedule) -> None:
        """Prepare the model for a new schedule; keep the old one if that raises an error."""
        was, before = self.now, self.schedule
        self.schedule = schedule
        self._kept.clear()
        on_host = is_on_host(schedule, self.sharded)
        if on_host and self.sharded is None:
            self.device = was.stages.device
        try:
            if on_host != (was.weights is not None):
                self.keep_whole()
            self.begin(was.weights)
        except BaseException:
            self.schedule, self.now = before, was
            raise

    def accept(self, *, trains: bool) -> PreparedModel:
        """Return the prepared model, prepared again if it has changed. Raises UnsupportedError if
        it cannot be prepared and trained or, without `trains`, evaluated."""
        was = self.now
        seen = _look_at(self.model, was.stages, self.sharded)
        if self.sharded is not None:
            self._refuse_edits(self.sharded, seen)
        if seen != was.look or not was.is_current():
            self._prepare_for(seen)
        self.now.accept(trains=trains)
        return self.now

    def _prepare_for(self, seen: Look) -> None:
        """Use an earlier preparation of the state `seen`, or prepare the model again."""
        known = [one for one in self._kept if has_same_parts(one.look, seen)]
        self._kept = known[-PREPARATIONS_KEPT:]
        found = next((one for one in known if one.look == seen and one.is_current()), None)
        if found is None:
            self._prepare(self.now.weights)
        else:
            self.now = found

    def _prepare(self, weights: StreamedWeights | None) -> None:
        with torch.inference_mode(False):  # cells are probed with a graph
            self.now = prepare(
                self.model,
                self.schedule,
                self.wanted,
                sharded=self.sharded,
                device=self.device,
                weights=weights,
            )
        if self.autocast is not None:
            _refuse_autocast(self.now)
            self.now.stages.autocast = self.autocast
            ask_layers(self.now.stages)
        if self.now.weights is not None:  # their model's device is another from now on
            self.device = self.now.stages.device
        self._kept.append(self.now)

    def _refuse_edits(self, sharded: ShardedModel, seen: Look) -> None:
        """Raise UnsupportedError if a model was edited after it was sharded."""
        sharded.sharded.refuse_replaced(self.now.stages.model)
        edit = first_edit(self.now.look, seen, _WHILE_SHARDED) if seen != self.now.look else None
        if edit is not None:
            raise UnsupportedError(
                f"model: {edit} changed after the model was sharded; change the model before "
                "parallelize, or load and shard it again"
            )
