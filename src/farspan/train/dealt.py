"""A run whose model is dealt over its ranks: whether it is, and its weights whole again."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from farspan.distributed.context import broadcast_from_rank0
from farspan.engine.parallelize import ShardedModel, parallelize
from farspan.plan.layout import Layout, Rank
from farspan.spec import Refused
from farspan.train.config import RunConfig, StatesPlace
from farspan.train.crew import Crew
from farspan.train.dealt_weights import first_of_stage, gather_wholes
from farspan.train.parts import Parts


def is_dealt(run: RunConfig, layout: Layout) -> bool:
    """Whether ranks hold parts of the weights, rather than all of them each. Raises Refused."""
    cut = layout.tensor > 1 or layout.pipeline > 1 or layout.fsdp
    if layout.devices() == 1 or not cut:
        return False
    if run.optimizer.states is StatesPlace.EIGHT_BIT:
        raise Refused(
            "optimizer.states: 8bit rounds blocks of 256 neighbours, which depend on how weights "
            "are cut over ranks; use device or host, or parallel.fsdp: false without tensor and "
            "pipeline"
        )
    return True


def deal_model(run: RunConfig, parts: Parts, model: Any, crew: Crew) -> ShardedModel | None:
    """Deals a model that rank 0 has loaded, in place; None where all ranks have it whole then."""
    if crew.ranks is None:
        return None
    if not is_dealt(run, crew.layout):
        broadcast_from_rank0(crew.ranks, model)
        return None
    # Stages and tiles follow from the schedule; of the planner's neither does.
    return parallelize(model, parts.schedule_of(run, model), crew.ranks, kernels=run.kernels)


def whole_weights(dealt: ShardedModel, model: Any) -> dict[str, Tensor] | None:
    """What `model.state_dict()` would be of the whole model, in main memory of rank 0; None on
    others. All ranks call it."""
    found: dict[str, Tensor] = {}

    def keep(name: str, whole: Tensor) -> None:
        found[name] = whole.to("cpu", copy=True)

    gather_wholes(dealt, keep)
    names = model.state_dict(keep_vars=True).keys()
    found |= {
        name: buffer.to("cpu", copy=True)
        for name, buffer in model.named_buffers()
        if name in names and not buffer.is_meta
    }
    if not first_of_stage(dealt):
        return None
    number = dealt.ranks.rank.number
    for stage in Rank(dealt.ranks.layout, 0).peers("pipeline")[1:]:
        if number == 0:
            found |= _receive(stage)
        elif number == stage:
            _send({n: t for n, t in found.items() if n not in _outer(dealt)}, 0)
    return _in_order(model, found) if number == 0 else None


def _in_order(model: Any, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Under every name: tied weights have several, and are one tensor."""
    first = {id(p): name for name, p in model.named_parameters()}
    named = {n: first[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}
    return {name: found[named.get(name, name)] for name in model.state_dict(keep_vars=True)}


def _outer(dealt: ShardedModel) -> set[str]:
    return set(dealt.sharded.whole(dealt.sharded.outer))


def _send(tensors: Mapping[str, Tensor], to: int) -> None:
    forms = [(name, tuple(t.shape), t.dtype) for name, t in tensors.items()]
    dist.send_object_list([forms], dst=to)
    for tensor in tensors.values():
        if tensor.numel():
            # As bytes: every backend knows them, whatever the dtype.
            dist.send(tensor.contiguous().reshape(-1).view(torch.uint8), dst=to)


def _receive(source: int) -> dict[str, Tensor]:
    said: list[Any] = [None]
    dist.recv_object_list(said, src=source)
    found = {}
    for name, shape, dtype in said[0]:
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            dist.recv(tensor.view(-1).view(torch.uint8), src=source)
        found[name] = tensor
    return found
