"""A model dealt over ranks: which weights each has, which of them are whole when, and how gradients
are summed."""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from farspan.attention.merge import accumulate_dtype
from farspan.models.boundary import Boundary, LayerCall, run_layer
from farspan.models.describe import describe
from farspan.models.probe import TOKENS as PROBED
from farspan.models.probe import cast_call
from farspan.models.refuse import refuse_dropout
from farspan.models.route import answering, routed
from farspan.models.tiles import Tokenwise
from farspan.models.tokenwise import dense, tokenwise
from farspan.parallel.fsdp import Sharded, Stage
from farspan.parallel.ranks import Ranks, refuse_unlike_models
from farspan.parallel.tensor import TensorParallel
from farspan.parallel.tensor_plan import plan_tensor
from farspan.parallel.tensor_probe import check_layers
from farspan.plan.grid import group_ranges
from farspan.plan.layout import AXES, refuse_together
from farspan.plan.program import Program
from farspan.plan.share import local_heads, own_groups
from farspan.spec import ModelSpec, Schedule

WHOLE = ("ulysses", "shards", "ring", "data")  # ranks with the same weights, but for cuts by fsdp


@dataclass(frozen=True, slots=True)
class Dealt:
    """What `deal` made of a model. Between steps its parameters are this rank's parts."""

    ranks: Ranks
    spec: ModelSpec  # of the whole model
    dtype: torch.dtype
    sharded: Sharded
    tensor: TensorParallel | None
    tiles: tuple[tuple[Tokenwise, ...], ...]  # of each layer, where the schedule has tiles

    def gather(self, program: Program, group: int, *, outer: bool) -> None:
        for unit in self._units(program, group, outer):
            self.sharded.gather(unit)

    def release(self, program: Program, group: int, *, outer: bool) -> None:
        for unit in self._units(program, group, outer):
            self.sharded.release(unit)

    def reduce(self, unit: int, totals: MutableMapping[nn.Parameter, Tensor]) -> None:
        """Adds to `.grad` of a unit's parameters the sums over ranks of its totals, and takes these
        out."""
        if self.tensor is not None:
            self._sum_parts(self.tensor, self.sharded.whole(unit), totals)
        self.sharded.reduce(unit, totals)

    def outer_parameters(self) -> tuple[nn.Parameter, ...]:
        """Whole trainable parameters outside the layers."""
        return tuple(p for p in self.sharded.whole(self.sharded.outer).values() if p.requires_grad)

    def _units(self, program: Program, group: int, outer: bool) -> list[int]:
        return [*range(*program.groups[group]), *[self.sharded.outer] * outer]

    def _sum_parts(
        self,
        tensor: TensorParallel,
        parameters: Mapping[str, nn.Parameter],
        totals: MutableMapping[nn.Parameter, Tensor],
    ) -> None:
        """A whole parameter's gradient is of the rank's own tokens or heads alone."""
        for name, p in parameters.items():
            if not p.requires_grad or tensor.is_cut(name):
                continue
            if p not in totals:
                totals[p] = torch.zeros_like(p, dtype=accumulate_dtype(p.dtype))
            tensor.peers.sum(totals[p])


def deal(
    model: nn.Module,
    schedule: Schedule,
    ranks: Ranks,
    *,
    stage: Stage | None = None,
    offload: bool = False,
    keep: bool = False,
) -> Dealt:
    """Deals a model, which all ranks have loaded whole, over them, in place; steps with another
    schedule may follow, if a pipeline has the same stages.

    With tensor parallelism the weights of layers become slices. Layers of other pipeline stages
    leave for the meta device, unless `keep`. The rest is cut as FSDP2 cuts it if the layout says
    `fsdp`; `stage` names another of ZeRO's. With `offload` the cut weights, their gradients and so
    optimizer states live in main memory. Give an optimizer the parameters afterwards.

    Raises Refused where the model or its weights are not the same on all ranks, and for what cannot
    be dealt exactly.
    """
    boundary = Boundary(model)
    refuse_dropout(boundary.model)
    refuse_unlike_models(ranks, boundary.model)
    spec = describe(boundary)
    local_heads(spec, ranks.layout)
    refuse_schedule(schedule, ranks)
    tiles = () if schedule.mlp_tokens is None else tokenwise(boundary)
    dtype, device = boundary.dtype, boundary.device
    tensor = None
    if ranks.layout.tensor > 1:
        tensor = _cut_layers(boundary, ranks)
    if not keep:
        _leave(boundary, schedule, ranks)
    if stage is None:
        several = ranks.layout.devices() > 1  # programs of one rank gather nothing
        stage = Stage.ZERO_3 if ranks.layout.fsdp and several else Stage.ZERO_0
    sharded = Sharded(
        boundary.model,
        list(boundary.layers),
        ranks.among(*WHOLE, alone=False),
        device,
        stage=stage,
        offload=offload,
        outer=ranks.among(*WHOLE, "pipeline", alone=False),
    )
    return Dealt(ranks, spec, dtype, sharded, tensor, tiles)


def refuse_schedule(schedule: Schedule, ranks: Ranks) -> None:
    """Raises Refused for a schedule that a layout cannot run, and one that is not the same on all
    ranks."""
    ranks.refuse_unlike("schedule", repr(schedule), *AXES)
    refuse_together(schedule, ranks.layout)


def _cut_layers(boundary: Boundary, ranks: Ranks) -> TensorParallel:
    plan = plan_tensor(boundary.model, boundary.layers, ranks.layout.tensor)

    def run(index: int, layer: nn.Module) -> Tensor:
        dtype = next(layer.parameters()).dtype
        generator = torch.Generator(boundary.device).manual_seed(index)
        shape = 2, PROBED, boundary.width
        hidden = torch.randn(shape, generator=generator, dtype=dtype, device=boundary.device)
        positions = torch.arange(PROBED, device=boundary.device)[None]
        with routed(boundary.model), answering(dense):
            call: LayerCall = boundary.calls(2, positions)[index]
            return run_layer(layer, hidden, cast_call(call, dtype))

    check_layers(plan, boundary.layers, run)
    tensor = TensorParallel(plan, ranks.among("tensor"))
    tensor.cut_layers(boundary.layers)
    return tensor


def _leave(boundary: Boundary, schedule: Schedule, ranks: Ranks) -> None:
    """Layers that other pipeline stages run keep no memory here."""
    stages = ranks.layout.pipeline
    groups = group_ranges(schedule, len(boundary.layers), stages)
    own: Sequence[int] = own_groups(ranks.rank, len(groups))
    for group, (start, stop) in enumerate(groups):
        if group not in own:
            for layer in boundary.layers[start:stop]:
                layer.to("meta")
