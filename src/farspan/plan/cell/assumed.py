"""A model whose family is not known, as an architecture that holds as much."""

from dataclasses import replace
from functools import lru_cache

from farspan.plan.cell.layer import layer_costs
from farspan.plan.model.architecture import Architecture, ArchitectureBlock, Attention, FeedForward
from farspan.spec import LayerSpec, ModelSpec


@lru_cache(maxsize=8)
def assumed(model: ModelSpec) -> Architecture:
    """The Llama-like architecture whose layers save as much as the model's own were seen to, or a
    little more."""
    made = Architecture(model.name, "llama", model.hidden, model.vocab, ())
    blocks = {layer: _assumed(made, layer, model.element_bytes) for layer in set(model.layers)}
    return replace(made, blocks=tuple(blocks[layer] for layer in model.layers))


def _assumed(architecture: Architecture, layer: LayerSpec, element_bytes: int) -> ArchitectureBlock:
    attention = Attention(
        # What does not attend is as good as an attention of one number.
        max(1, layer.query_heads),
        max(1, layer.kv_heads),
        max(1, layer.head_dim),
        max(1, layer.value_dim),
        window=layer.window,
        sinks=layer.sinks,
        softcap=layer.softcap,
    )

    def saved(width: int) -> int:
        block = ArchitectureBlock(attention, FeedForward(width))
        return layer_costs(architecture, block, element_bytes).activation_bytes

    least, slope = saved(1), saved(2) - saved(1)
    more = max(0, layer.activation_bytes - least)
    return ArchitectureBlock(attention, FeedForward(1 + -(-more // slope)))
