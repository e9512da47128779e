"""A pipeline whose stages hold all weights and train their own layers: the norm of the gradient,
and which tensors are whose."""

from collections.abc import Iterator

import torch
from torch import Tensor

from farspan.models.boundary import Boundary
from farspan.plan.grid import group_ranges
from farspan.spec import Schedule
from farspan.train.checkpoint import Live
from farspan.train.setup import Equipment


def norm_of_stages(use: Equipment) -> Tensor:
    """L2 norm of the gradient of all stages, a scalar. What lies outside the layers has the same
    gradient on all of them and counts once."""
    crew = use.crew
    if crew.layout.pipeline == 1 or use.pieces is not None:
        return use.optimizer.gradient_norm()
    assert crew.ranks is not None, "a pipeline has ranks"
    own = use.optimizer.parameters
    if crew.ranks.rank.along["pipeline"] > 0:
        outer = {id(p) for p in Boundary(use.model).outer_parameters()}
        own = {name: p for name, p in own.items() if id(p) not in outer}
    norms = [_norm(p.grad) for p in own.values() if p.grad is not None]
    square = torch.stack(norms).square().sum() if norms else torch.zeros((), device=use.device)
    dtype = torch.float64 if use.model.dtype == torch.float64 else torch.float32
    return crew.sum_stages(square.to(dtype)).sqrt()


def stages(live: Live, use: Equipment, schedule: Schedule, stage: int) -> Iterator[Tensor]:
    """The live tensors of the layers that a stage of the pipeline trains."""
    boundary = Boundary(use.model)
    start, stop = group_ranges(schedule, len(boundary.layers), use.crew.layout.pipeline)[stage]
    own = {id(p) for layer in boundary.layers[start:stop] for p in layer.parameters()}
    names = {name for name, p in use.model.named_parameters() if id(p) in own}
    yield from (tensor for name, tensor in live.model.items() if name in names)
    yield from (t for name, t in live.optimizer.items() if name.split("/", 1)[1] in names)


def _norm(gradient: Tensor) -> Tensor:
    dtype = None if gradient.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(gradient, dtype=dtype)
