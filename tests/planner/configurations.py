"""Tiny configurations of every family that planning knows, and of what their fields can change."""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from tests.zoo import ALTERNATING, COMMON, FAMILIES, WINDOW

Config = dict[str, Any]

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
QWEN2_MOE = {**EXPERTS, "shared_expert_intermediate_size": 24}
SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW}
TYPES = [("full_attention", "sliding_attention")[window is not None] for window in ALTERNATING]


def config_of(family: str, **changes: Any) -> Config:
    """The zoo's configuration of a family; a change to `...` takes the field away."""
    fields = FAMILIES[family].fields if family in FAMILIES else QWEN2_MOE
    if family == "mixtral":
        fields = {**fields, "num_experts_per_tok": 2}
    changed = {**COMMON, **fields, "model_type": family, **changes}
    return {name: value for name, value in changed.items() if value is not ...}


# Phi-3's and Phi-4-mini's way to 128K: factors for each frequency, without one for the whole.
LONG = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}

CONFIGURATIONS: dict[str, Config] = {
    **{
        family: config_of(family)
        for family in (
            *("gemma", "gemma2", "gpt2", "gpt_neox", "gpt_oss", "llama", "mistral", "mixtral"),
            *("phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
        )
    },
    "gemma2 of one kind": config_of("gemma2", layer_types=["full_attention"] * 4),
    "gemma2 without cap": config_of("gemma2", attn_logit_softcapping=None, head_dim=12),
    "gemma2 unsaid": config_of("gemma2", attn_logit_softcapping=..., sliding_window=...),
    "gemma untied": config_of("gemma", tie_word_embeddings=False, attention_bias=True),
    "gpt2 inner": config_of("gpt2", n_inner=40, tie_word_embeddings=False, vocab_size=48),
    "gpt2 common names": config_of("gpt2", n_embd=..., n_layer=..., n_head=..., n_positions=...),
    "gpt_neox sequential": config_of(
        "gpt_neox", use_parallel_residual=False, attention_bias=False, tie_word_embeddings=True
    ),
    "gpt_neox all rotated": config_of("gpt_neox", rotary_pct=1.0),
    "phi3 half rotated": config_of("phi3", partial_rotary_factor=0.5),
    "phi3 long": config_of("phi3", rope_scaling=LONG, original_max_position_embeddings=64),
    "gpt_oss plain": config_of("gpt_oss", attention_bias=False, layer_types=TYPES[::-1]),
    "llama biased": config_of("llama", attention_bias=True, mlp_bias=True),
    "llama wide heads": config_of("llama", head_dim=20, num_key_value_heads=1),
    "llama old": config_of(
        "llama", head_dim=..., num_key_value_heads=..., tie_word_embeddings=True
    ),
    "mistral full": config_of("mistral", sliding_window=None, head_dim=None),
    "mistral unsaid": config_of("mistral", sliding_window=...),
    "mixtral sliding": config_of("mixtral", sliding_window=WINDOW, num_experts_per_tok=3),
    "phi3 sliding": config_of("phi3", sliding_window=WINDOW, num_key_value_heads=None),
    "qwen2 sliding": config_of("qwen2", **SLIDING, max_window_layers=3),
    "qwen2 switched off": config_of("qwen2", sliding_window=WINDOW, max_window_layers=0),
    "qwen2 never": config_of("qwen2", **SLIDING),
    "qwen2 by type": config_of("qwen2", **SLIDING, layer_types=TYPES),
    "qwen3 sliding": config_of("qwen3", **SLIDING, max_window_layers=1, attention_bias=True),
    "qwen3 own heads": config_of("qwen3", head_dim=...),
    "qwen2_moe sliding": config_of("qwen2_moe", **SLIDING, max_window_layers=2, qkv_bias=False),
    "qwen2_moe by type": config_of("qwen2_moe", **SLIDING, layer_types=TYPES[::-1]),
    "qwen2_moe sparse": config_of("qwen2_moe", decoder_sparse_step=2, mlp_only_layers=[3]),
    "qwen3_moe sliding": config_of("qwen3_moe", **SLIDING, attention_bias=True),
    "qwen3_moe sparse": config_of("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[1]),
    "qwen3_moe dense": config_of("qwen3_moe", num_experts=0),
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
