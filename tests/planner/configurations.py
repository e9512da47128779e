"""Tiny configurations of every family that planning knows, and of what their fields can change."""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from tests.zoo import COMMON, FAMILIES, WINDOW

Config = dict[str, Any]

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
QWEN2_MOE = {**EXPERTS, "shared_expert_intermediate_size": 24}
SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW}


def config_of(family: str, **changes: Any) -> Config:
    """The zoo's configuration of a family; a change to `...` takes the field away."""
    fields = FAMILIES[family].fields if family in FAMILIES else QWEN2_MOE
    if family == "mixtral":
        fields = {**fields, "num_experts_per_tok": 2}
    changed = {**COMMON, **fields, "model_type": family, **changes}
    return {name: value for name, value in changed.items() if value is not ...}


CONFIGURATIONS: dict[str, Config] = {
    **{name: config_of(name) for name in ("gemma2", "gpt_neox", "gpt_oss", "phi3")},
    "gpt2 inner": config_of("gpt2", n_inner=40, tie_word_embeddings=False, vocab_size=48),
    "llama biased": config_of("llama", attention_bias=True, mlp_bias=True),
    "llama old": config_of(
        "llama", head_dim=..., num_key_value_heads=..., tie_word_embeddings=True
    ),
    "qwen2 sliding": config_of("qwen2", **SLIDING, max_window_layers=3),
    "qwen2_moe sparse": config_of("qwen2_moe", decoder_sparse_step=2, mlp_only_layers=[3]),
    "qwen3_moe sparse": config_of("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[1]),
}


def real_model(config: Config, device: str = "meta") -> Any:
    """transformers' own model of a configuration, in fp32 on `device`."""
    made = AutoConfig.for_model(**config)
    made._attn_implementation = made._experts_implementation = "eager"
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(made).train()


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Its decoder layers."""
    return max((list(m) for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)


def linears_of(layer: nn.Module) -> list[tuple[int, int]]:
    """(inner, outer) width of every linear module, what PEFT's `all-linear` takes."""
    found = []
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            found.append((module.in_features, module.out_features))
        elif isinstance(module, Conv1D):
            found.append((module.nx, module.nf))
    return found


def elements(module: nn.Module) -> int:
    """Elements of a module's weights, each counted once."""
    return sum(parameter.numel() for parameter in module.parameters())
