"""A model as the planner sees it, looked at while its weights are whole."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from farspan.engine.gradients import adds_products
from farspan.hf.describe import describe, with_work
from farspan.hf.fused_layers import fuse
from farspan.hf.stages import CausalLMStages
from farspan.kernels.launch import fused_for
from farspan.plan.cell.describe import model_spec
from farspan.plan.model.architecture import Architecture
from farspan.plan.model.families import architecture_from
from farspan.spec import Kernels, ModelSpec, Refused


@dataclass(frozen=True, slots=True)
class Looked:
    """What was found. A family that is not known has no architecture."""

    model: ModelSpec
    architecture: Architecture | None


def look(
    model: nn.Module,
    dtype: str,
    device: torch.device,
    rank: int = 0,
    kernels: Kernels | None = None,
) -> Looked:
    """The model as it is, with the work of its layers: as its family is known to do it, otherwise
    estimated from its weights. `device` is where its cells will run, and `rank` that
    of adapters on every linear module of the layers, 0 where there are others or none. `kernels`
    are those of the run."""
    boundary, kernels = CausalLMStages(model), kernels or Kernels()
    fuse(boundary, kernels, device)
    fused = kernels.fused and fused_for(device, boundary.dtype)
    adds = kernels.accumulate and adds_products(device, boundary.dtype)
    spec = with_work(boundary, describe(boundary, device))
    try:
        architecture = architecture_from(boundary.model.config)
        architecture = replace(architecture, adapter_rank=rank, fused=fused, adds=adds)
        known = [layer.work for layer in model_spec(architecture, dtype).layers]
    except Refused:
        architecture, known = None, []
    layers, as_known = [], True
    for index, layer in enumerate(spec.layers):
        guess = layer.work
        work = known[index] if len(known) == len(spec.layers) else guess
        if work.parameters != guess.parameters:  # such as adapters, or a family of its own making
            work = guess
        as_known = as_known and work.trainable == guess.trainable and work is not guess
        layers.append(replace(layer, work=replace(work, trainable=guess.trainable)))
    # What an architecture's cells hold is that of a model that is trained as a whole, or whose
    # adapters are where it has them.
    return Looked(replace(spec, layers=tuple(layers)), architecture if as_known else None)
