"""A decoder layer of a family, how it is called, and torch's attention for it."""

from typing import Any

import torch
from torch import Tensor, nn

from farspan.hf.attention_interface import answering, routed
from farspan.hf.probe import cast_call
from farspan.hf.stages import CausalLMStages, LayerCall, run_layer
from tests.zoo import make_model

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}  # enough for four ranks


def make_stages(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> CausalLMStages:
    layers = {"num_hidden_layers": 2, **HEADS, **changes}
    if family in ("gemma3_text", "cohere2"):
        layers["layer_types"] = ["sliding_attention", "full_attention"]
    return CausalLMStages(make_model(family, dtype, **layers))


def attention(_: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, **__: Any) -> Tensor:
    """Causal, and different for every head. The families' windows and caps are not its matter."""
    out = nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def call_of(stages: CausalLMStages, index: int, batch: int, tokens: int) -> LayerCall:
    with routed(stages.model):
        return stages.calls(batch, torch.arange(tokens)[None])[index]


def run(stages: CausalLMStages, layer: nn.Module, hidden: Tensor, call: LayerCall) -> Tensor:
    """The layer, or a shell of it, as the model's own attention would run it."""
    with routed(stages.model), answering(attention):
        return run_layer(layer, hidden, call)


def random_run(stages: CausalLMStages) -> Any:
    """Runs a layer on random tokens, for a probe."""

    def run_one(index: int, layer: nn.Module) -> Tensor:
        dtype = next(layer.parameters()).dtype
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(2, 5, stages.width, generator=generator, dtype=dtype)
        return run(stages, layer, hidden, cast_call(call_of(stages, index, 2, 5), dtype))

    return run_one
