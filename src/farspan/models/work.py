"""The work of a model's layers, estimated from their weights."""

from dataclasses import replace

from torch import nn

from farspan.models.boundary import Boundary
from farspan.spec import LayerWork, ModelSpec

PROJECTIONS = 3  # q, k and v, where nothing better is known


def with_work(boundary: Boundary, spec: ModelSpec) -> ModelSpec:
    """The description of a model with the work of each of its layers."""
    config = boundary.model.config.get_text_config()
    active = getattr(config, "num_experts_per_tok", None) or 1
    pairs = zip(boundary.layers, spec.layers, strict=True)
    layers = (
        replace(layer, work=_estimate(module, active, layer.activation_bytes))
        for module, layer in pairs
    )
    return replace(spec, layers=tuple(layers))


def _estimate(layer: nn.Module, active: int, saved: int) -> LayerWork:
    """Every matrix is multiplied once a token; of stacked experts, `active` are. Convolutions of a
    few tokens are left out. What autograd
    saves is written once and read once: elementwise work moves at least so much."""
    weights = list(layer.parameters())
    products = [(w.shape[1], w.shape[0]) for w in weights if w.ndim == 2]
    narrow = {id(m.weight) for m in layer.modules() if isinstance(m, nn.Conv1d)}
    stacked = [w for w in weights if w.ndim == 3 and id(w) not in narrow]
    products += [(w.shape[1], w.shape[2]) for w in stacked for _ in range(active)]
    return LayerWork(
        parameters=sum(w.numel() for w in weights),
        trainable=sum(w.numel() for w in weights if w.requires_grad),
        products=tuple(products),
        projections=min(PROJECTIONS, len(products)),
        forward_traffic=saved,
        backward_traffic=saved,
    )
