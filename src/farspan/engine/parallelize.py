"""Shard a model over ranks: slice and gather weights, sum gradients, and serve the optimizer."""

import hashlib
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from types import FunctionType, MethodType

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from farspan.attention.backends import accumulate_dtype
from farspan.distributed.agreement import (
    EVERYWHERE,
    OF_STAGE,
    OF_WEIGHTS,
    Agreement,
    Described,
    Fact,
)
from farspan.distributed.context import (
    ParallelContext,
    Rank0Weights,
    is_on_rank0_only,
    run_on_rank0,
    weight_facts,
)
from farspan.distributed.fsdp import (
    ShardedParameters,
    ShardPlacement,
    Stage,
    gradient_dtype,
    local,
    placement_along,
    square_norm,
)
from farspan.distributed.tensor import TensorParallel, check_layers
from farspan.distributed.tensor_plan import ParameterCut, plan_tensor
from farspan.hf.attention_interface import answering, routed
from farspan.hf.describe import describe
from farspan.hf.edits import Look, look
from farspan.hf.fused_layers import fuse
from farspan.hf.probe import TOKENS as PROBED
from farspan.hf.probe import cast_call
from farspan.hf.stages import CausalLMStages, LayerCall, run_layer
from farspan.hf.swap import put, replacements
from farspan.hf.tiled_mlp import Tokenwise, answer_densely, tokenwise
from farspan.hf.unsupported import chooses_by_length, refuse_dropout
from farspan.program.layout import (
    AXES,
    Layout,
    Rank,
    group_ranges,
    local_heads,
    own_groups,
    part,
    refuse_together,
)
from farspan.program.program import Program
from farspan.spec import Kernels, ModelSpec, Schedule, Tier, UnsupportedError


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """Model that `parallelize` has sharded. Between steps its parameters are this rank's shards."""

    ranks: ParallelContext
    spec: ModelSpec  # of the whole model
    dtype: torch.dtype
    sharded: ShardedParameters
    tensor: TensorParallel | None
    tiles: tuple[tuple[Tokenwise, ...], ...]  # of each layer, if the schedule has tiles
    look: Look  # state of the model; only its mode may change afterwards

    @property
    def rank(self) -> Rank:
        """This rank in its programs' layout, which omits FSDP if every rank has whole weights."""
        layout = _layout_of(self.ranks.layout, self.sharded.stage)
        return Rank(layout, self.ranks.rank.number)

    def refuse_elsewhere(self, schedule: Schedule) -> None:
        """Raise UnsupportedError unless the weights are on the schedule's tier."""
        on_host, there = schedule.weights is Tier.HOST, self.sharded.offload
        if on_host != there and (on_host or self.sharded.stage is Stage.ZERO_0):
            place = Tier.HOST if there else Tier.DEVICE
            raise UnsupportedError(
                f"weights: the model was sharded with them on the {place}, not on the "
                f"{schedule.weights}; call parallelize with this schedule"
            )

    def compare(self, same: Agreement, stages: CausalLMStages, *, weights: bool) -> None:
        """Have ranks compare the model's buffers and, with `weights`, its whole weights."""
        left = _BY_LENGTH if chooses_by_length(stages.model.config) else ()
        buffers = stages.model.named_buffers()
        numbers: dict[str, Tensor] = {n: x for n, x in buffers if not n.endswith(left)}
        if weights and self.sharded.stage is Stage.ZERO_0:
            numbers |= self.sharded.parameters()
        inside = {id(buffer) for buffer in stages.layers.buffers()}
        scopes: dict[tuple[str, ...], dict[str, Tensor]] = {}
        for name, tensor in numbers.items():
            is_cut = self.tensor is not None and self.tensor.is_cut(name)
            # Stages read their own copies of weights outside the layers.
            apart = isinstance(tensor, nn.Parameter) or id(tensor) in inside
            scope = OF_WEIGHTS if is_cut else OF_STAGE if apart else EVERYWHERE
            scopes.setdefault(scope, {})[name] = tensor
        for scope, tensors in scopes.items():
            same.add({"numbers": tensors}, scope)

    def gather(self, program: Program, group: int, *, outer: bool) -> None:
        for unit in self._units(program, group, outer):
            self.sharded.gather(unit)

    def release(self, program: Program, group: int, *, outer: bool) -> None:
        for unit in self._units(program, group, outer):
            self.sharded.release(unit)

    def reduce(self, unit: int, totals: MutableMapping[nn.Parameter, Tensor]) -> None:
        """Take the gradient sums of a unit (a layer, or all modules outside) out of `totals`, and
        add them over ranks to `.grad`."""
        if self.tensor is not None:
            self._sum_parts(self.tensor, self.sharded.whole(unit), totals)
        self.sharded.reduce(unit, totals)

    def outer_parameters(self) -> tuple[nn.Parameter, ...]:
        return tuple(p for p in self.sharded.whole(self.sharded.outer).values() if p.requires_grad)

    def _units(self, program: Program, group: int, outer: bool) -> list[int]:
        return [*range(*program.groups[group]), *[self.sharded.outer] * outer]

    def _sum_parts(
        self,
        tensor: TensorParallel,
        parameters: Mapping[str, nn.Parameter],
        totals: MutableMapping[nn.Parameter, Tensor],
    ) -> None:
        """Sum, over tensor-parallel ranks, the gradients of parameters that are not sliced: each
        rank has computed only the part from its own tokens or heads."""
        for name, p in parameters.items():
            if not p.requires_grad or tensor.is_cut(name):
                continue
            if p not in totals:
                totals[p] = torch.zeros_like(p, dtype=accumulate_dtype(p.dtype))
            tensor.peers.sum(totals[p])


# Endings of the names of rotary attributes that depend on the longest call so far, in families
# whose frequencies do.
_BY_LENGTH = "inv_freq", "max_seq_len_cached", "attention_scaling"


def inside(model: nn.Module) -> Look:
    """Return a model's fingerprint without what trainers and loaders set on the whole model, such
    as a `forward` or device map; but numbers stay, such as a logit scale. Ranks compare it."""

    def kept(name: str, value: object) -> bool:
        is_number = isinstance(value, tuple) and value[:1] in ((int,), (float,))
        return is_number or name in ("__class__", "_modules", "_parameters", "_buffers", "training")

    return Look(
        [
            (path, state if path else {n: x for n, x in state.items() if kept(n, x)})
            for path, state in look(model).states
            if path.partition(".")[0] != "forward"
        ]
    )


def described(now: Look, stages: CausalLMStages | None = None) -> Described:
    """Return a digest of a model and, for errors, texts of its modules, attributes and hooks."""
    left = _BY_LENGTH if stages is not None and chooses_by_length(stages.model.config) else ()

    def words() -> dict[str, str]:
        return {
            f"{path or 'model'}.{name.strip('_')}": _text_of(value)
            for path, state in now.states
            for name, value in sorted(state.items())
            if name not in UNREAD and not name.endswith(left)
        }

    return Described(hashlib.blake2b(repr(words()).encode(), digest_size=8).digest(), words)


# Attributes that do not affect a step, and differ between ranks if one of them has loaded, saved or
# generated with the model.
UNREAD = (
    *("_is_hf_initialized", "architectures", "dtype", "use_cache"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+|, index=\d+")  # also removes indexes of devices


def _text_of(value: object) -> str:
    """Return a module's attribute as text without memory addresses, equal on all ranks."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], type):
        value = value[1]  # a look keeps a number with its type
    return _ADDRESS.sub("", repr(value))


def facts_of(
    name: str, value: object, model: nn.Module | None = None, depth: int = 4
) -> dict[str, Fact]:
    """Return, by names that begin with `name`, texts and tensors by which ranks compare a function
    and the values that it refers to, except weights of `model`."""
    if isinstance(value, Tensor):
        return {name: {name: value}}
    if isinstance(value, nn.Module):
        known = {id(p) for p in (() if model is None else model.parameters())}
        own = (*value.named_parameters(), *value.named_buffers())
        numbers = {f"{name}.{path}": x for path, x in own if id(x) not in known}
        return {name: described(look(value)), f"numbers of {name}": numbers}
    if value is None or isinstance(value, bool | int | float | str):
        return {name: repr(value)}
    held: dict[str, object] = {}
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        held = dict(zip(value.__code__.co_freevars, cells, strict=True))
        held |= {f"default {i}": x for i, x in enumerate(value.__defaults__ or ())}
    elif isinstance(value, MethodType):
        held = {"self": value.__self__, "function": value.__func__}
    elif isinstance(value, partial):
        held = {"function": value.func, **value.keywords}
        held |= {str(i): x for i, x in enumerate(value.args)}
    elif isinstance(value, list | tuple):
        held = {str(i): x for i, x in enumerate(value)}
    elif is_dataclass(value):
        held = {f.name: getattr(value, f.name) for f in fields(value)}
    found: dict[str, Fact] = {name: getattr(value, "__qualname__", type(value).__qualname__)}
    for key, x in held.items() if depth else ():
        found |= facts_of(f"{name}.{key}", x, model, depth - 1)
    return found


def parallelize(
    model: nn.Module,
    schedule: Schedule,
    ranks: ParallelContext,
    *,
    stage: Stage | None = None,
    offload: bool = False,
    keep: bool = False,
    kernels: Kernels | None = None,
) -> ShardedModel:
    """Shard a causal LM over ranks, in place; return the model to give to `Step(ranks=...)`.

    All ranks have loaded the whole model, or rank 0 alone, on any device, and other ranks on the
    meta device: then no device ever has more than its shards and one weight. Make the optimizer
    from the parameters afterwards. Steps may use another schedule with the same pipeline stages.

    Args:
        schedule: With `schedule.weights` HOST the shards stay in main memory.
        ranks: Tensor parallelism slices layers' weights; the rest is sharded as by FSDP2 if `fsdp`.
        stage: The ZeRO stage, if not the layout's.
        offload: Keep sharded weights, their gradients and so optimizer states in main memory.
        keep: Keep layers of other pipeline stages, which otherwise move to the meta device.
        kernels: The kernels of the steps; give steps the same.

    Raises:
        UnsupportedError: Ranks' models or weights differ, or cannot be sharded exactly.
    """
    several = ranks.layout.devices() > 1  # programs of a single rank gather nothing
    with ranks.agreement("parallelize") as same:
        stages = CausalLMStages(model)
        refuse_dropout(stages.model, is_cut=ranks.layout.tensor > 1)
        if stage is None:
            stage = Stage.ZERO_3 if ranks.layout.fsdp and several else Stage.ZERO_0
        same.add({"stage": stage, "offload": str(offload), "keep": str(keep)})
        same.add({"kernels": repr(kernels)})
        refuse_schedule(same, schedule, ranks.layout, stage)
    on_rank0, on_host = is_on_rank0_only(ranks, stages.model), schedule.weights is Tier.HOST
    device = ranks.device if on_rank0 or on_host else stages.device
    inspect = partial(_inspect, stages, schedule, ranks.layout, device, kernels or Kernels())
    inspected = run_on_rank0(inspect) if on_rank0 else _inspected(ranks, stages, inspect)
    weights = Rank0Weights.of(ranks, stages.model) if on_rank0 else None
    peers = ranks.among(*OF_WEIGHTS, alone=False)
    outer = ranks.among(*OF_WEIGHTS, "pipeline", alone=False)
    with ranks.agreement("parallelize: sharding the model"):
        layers, tensor = list(stages.layers), _cut_layers(stages, ranks)
        here = range(len(layers)) if keep else _drop_other_stages(stages, schedule, ranks)
        sharded = ShardedParameters(
            stages.model,
            layers,
            peers,
            device,
            stage=stage,
            offload=offload or on_host,
            outer=outer,
            here=here,
        )
    if weights is not None:
        weights.give(lambda n, x: sharded.fill(n, x if tensor is None else tensor.cut(n, x)))
    spec, tiles, now = inspected.spec, inspected.tiles, inside(stages.model)
    return ShardedModel(ranks, spec, stages.dtype, sharded, tensor, tiles, now)


def refuse_schedule(same: Agreement, schedule: Schedule, layout: Layout, stage: Stage) -> None:
    """Raise UnsupportedError if the layout cannot run the schedule, if ranks have different
    schedules, or if the ZeRO stage shards weights although the layout has fsdp=False."""
    same.add({"schedule": repr(schedule)})
    if not layout.fsdp and stage is not Stage.ZERO_0:
        raise UnsupportedError(
            f"stage: {stage} shards the weights, and the layout says fsdp=False; leave fsdp out of "
            "the layout, or leave stage out"
        )
    refuse_together(schedule, _layout_of(layout, stage))


def _layout_of(layout: Layout, stage: Stage) -> Layout:
    return replace(layout, fsdp=layout.fsdp and stage is not Stage.ZERO_0)


@dataclass(frozen=True, slots=True)
class _Inspected:
    """A model's sizes, and its modules that run on tiles of tokens."""

    spec: ModelSpec
    tiles: tuple[tuple[Tokenwise, ...], ...]


def _inspect(
    stages: CausalLMStages,
    schedule: Schedule,
    layout: Layout,
    device: torch.device,
    kernels: Kernels,
) -> _Inspected:
    """Return the sizes and tiled modules of a model on `device`. Raises UnsupportedError if the
    model cannot be sharded."""
    if layout.tensor == 1:
        fuse(stages, kernels, device)
    spec = describe(stages, device)
    local_heads(spec, layout)
    tiles = () if schedule.mlp_chunk_size is None else tokenwise(stages)
    if layout.tensor > 1:
        plan = plan_tensor(stages.model, stages.layers, layout.tensor)
        check_layers(plan, stages.layers, partial(_run, stages))
    return _Inspected(spec, tiles)


def _inspected(
    ranks: ParallelContext, stages: CausalLMStages, inspect: Callable[[], _Inspected]
) -> _Inspected:
    """Have ranks compare their models, then run `inspect`. Raises UnsupportedError."""
    with ranks.agreement("parallelize: comparing the models") as same:
        same.add({"model": described(inside(stages.model), stages)})
        same.add(weight_facts(stages.model))
        same.add({"numbers": dict(stages.model.named_buffers())})
    with ranks.agreement("parallelize: running the layers"):
        return inspect()


def _cut_layers(stages: CausalLMStages, ranks: ParallelContext) -> TensorParallel | None:
    if ranks.layout.tensor == 1:
        return None
    plan = plan_tensor(stages.model, stages.layers, ranks.layout.tensor)
    tensor = TensorParallel(plan, ranks.among("tensor"))
    tensor.cut_layers(stages.layers)
    return tensor


def _run(stages: CausalLMStages, index: int, layer: nn.Module) -> Tensor:
    dtype = next(layer.parameters()).dtype
    generator = torch.Generator(stages.device).manual_seed(index)
    shape = 2, PROBED, stages.width
    hidden = torch.randn(shape, generator=generator, dtype=dtype, device=stages.device)
    positions = torch.arange(PROBED, device=stages.device)[None]
    with routed(stages.model), answering(answer_densely):
        call: LayerCall = stages.calls(2, positions)[index]
        return run_layer(layer, hidden, cast_call(call, dtype))


def _drop_other_stages(
    stages: CausalLMStages, schedule: Schedule, ranks: ParallelContext
) -> list[int]:
    """Move other pipeline stages' layers to the meta device; return the indices of this stage's."""
    pipeline_stages = ranks.layout.pipeline
    groups = group_ranges(schedule, len(stages.layers), pipeline_stages)
    own: Sequence[int] = own_groups(ranks.rank, len(groups))
    here: list[int] = []
    for group, (start, stop) in enumerate(groups):
        if group in own:
            here += range(start, stop)
        else:
            for layer in stages.layers[start:stop]:
                # `layer.to("meta")` has no form for quantised parameters.
                blank = {
                    p: nn.Parameter(torch.empty_like(p.data, device="meta"), p.requires_grad)
                    for p in layer.parameters()
                }
                put(replacements(layer, blank))
                buffers = (
                    (m._buffers, n, b) for m in layer.modules() for n, b in m._buffers.items()
                )
                put((of, n, b if b is None else b.to("meta")) for of, n, b in list(buffers))
    return here


# -- the optimizer's view ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShardedUpdate:
    """Slices of a sharded model's weights, as an optimizer updates them. AdamW is element-wise:
    updates of all ranks' slices equal an update of the whole. Invariant: a slice's `.grad`, if set,
    is its part of the weight's `.grad`."""

    sharded_model: ShardedModel
    trained: Mapping[str, nn.Parameter]  # by name; without those of other pipeline stages
    pieces: Mapping[str, nn.Parameter]  # frozen ones included
    places: dict[str, ShardPlacement]  # of the pieces, in the whole weight
    counted: frozenset[str]  # names that this rank counts in the norm: one rank each

    def take(self) -> None:
        """Set each slice's `.grad` to its part of the weight's gradient."""
        for name, own in self.sharded_model.sharded.parameters().items():
            piece = self.pieces[name]
            if piece is not own:
                piece.grad = None if own.grad is None else local(own.grad)

    def clear(self) -> None:
        for name, own in self.sharded_model.sharded.parameters().items():
            own.grad = self.pieces[name].grad = None

    def widen(self) -> None:
        """Give each weight the gradient dtype of its slice."""
        for name, own in self.sharded_model.sharded.parameters().items():
            wanted = gradient_dtype(self.pieces[name])
            if wanted != gradient_dtype(own):
                own.grad_dtype = wanted

    def norm(self) -> Tensor:
        """Return the L2 norm of the model's gradient, in fp32 or float64, equal on all ranks."""
        ranks = self.sharded_model.ranks
        gradients = [p.grad for n, p in self.trained.items() if n in self.counted]
        square = square_norm((g for g in gradients if g is not None), ranks.device)
        peers = ranks.among(*AXES)
        total = peers.gather(square[None], [1] * peers.size).sum()  # in the order of ranks
        wide = torch.float64 if self.sharded_model.dtype == torch.float64 else torch.float32
        return total.sqrt().to(wide)

    def held_bytes(self) -> int:
        """Return the bytes of weights on this rank between steps."""
        return sum(piece.nbytes for piece in self.pieces.values())


def sharded_parameters(sharded_model: ShardedModel) -> ShardedUpdate:
    sharded = sharded_model.sharded
    pieces = {
        name: nn.Parameter(local(own), own.requires_grad) if isinstance(own, DTensor) else own
        for name, own in sharded.parameters().items()
    }
    trained = {name: piece for name, piece in pieces.items() if piece.requires_grad}
    outer = sharded.whole(sharded.outer).keys()
    counted = frozenset(
        name for name in trained if _counts(sharded_model, name, outer=name in outer)
    )
    return ShardedUpdate(
        sharded_model, trained, pieces, sharded.places(_slices(sharded_model)), counted
    )


def _counts(sharded_model: ShardedModel, name: str, *, outer: bool) -> bool:
    tensor = sharded_model.tensor
    if tensor is not None and not tensor.is_cut(name) and tensor.peers.index > 0:
        return False
    holders = sharded_model.ranks.among(*OF_WEIGHTS, *("pipeline",) * outer)
    return sharded_model.sharded.stage is not Stage.ZERO_0 or holders.index == 0


def _slices(sharded_model: ShardedModel) -> dict[str, ShardPlacement]:
    """Return the placement of this rank's slice in each weight that tensor parallelism slices."""
    tensor = sharded_model.tensor
    if tensor is None:
        return {}

    def place(sliced: ParameterCut) -> ShardPlacement:
        ranges, start = [], 0
        for size in sliced.parts:
            ranges.append(part((start, start + size), tensor.peers.index, tensor.peers.size))
            start += size
        return placement_along(sliced.shape, sliced.dim, ranges)

    return {name: place(cut) for name, cut in tensor.plan.cuts.items()}
