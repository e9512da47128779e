"""Tiny random-weight models of every family, with everything that is special about it switched on.

Windows are shorter than the sequences of the tests, caps and sinks change the numbers, biases are
not zero and norm weights not one: what is left out shows.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from tests.versions import OWN_ATTENTION

logging.set_verbosity_error()  # tiny vocabularies lack the families' special tokens

VOCAB = 64
WINDOW = 8
LAYERS = 4

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}


@dataclass(frozen=True)
class Family:
    """Configuration fields beside the common ones, and what a probe must find in the layers."""

    fields: dict[str, Any] = field(default_factory=dict)
    windows: tuple[int | None, ...] = (None,) * LAYERS
    softcap: float | None = None
    sinks: bool = False
    kv_heads: int = 2
    kind: str | None = None  # its model_type, if that is not its name here


ALTERNATING = (WINDOW, None, WINDOW, None)
GPT2 = {
    "n_embd": 32,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": 256,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
PHI = {"embd_pdrop": 0.0, "resid_pdrop": 0.0}
GEMMA2 = {
    "sliding_window": WINDOW,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 3.0,
    "query_pre_attn_scalar": 8,
}
GEMMA3 = {
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
QWEN3_MOE = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
GPT_OSS = {
    "sliding_window": WINDOW,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
    "head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
OPT = {"ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.0}
STARCODER2 = {"residual_dropout": 0.0, "embedding_dropout": 0.0, "sliding_window": WINDOW}

FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "qwen3_moe": Family(QWEN3_MOE),
    "mistral": Family({"sliding_window": WINDOW}, windows=(WINDOW,) * LAYERS),
    "mixtral": Family({"num_local_experts": 4}),
    "deepseek_v3": Family(DEEPSEEK, kv_heads=4),
    "gemma": Family(),
    "gemma2": Family(GEMMA2, windows=ALTERNATING, softcap=1.5),
    "gemma3_text": Family(GEMMA3, windows=ALTERNATING),
    "gpt2": Family(GPT2, kv_heads=4),
    "gpt_neox": Family({"hidden_dropout": 0.0}, kv_heads=4),
    "opt": Family(OPT, kv_heads=4),
    "phi": Family(PHI),
    "phi3": Family(PHI),
    "olmo2": Family(),
    "olmo3": Family({"sliding_window": WINDOW}, windows=(*(WINDOW,) * 3, None)),
    "granite": Family({"embedding_multiplier": 3.0, "residual_multiplier": 0.5}),
    "gpt_oss": Family(GPT_OSS, windows=ALTERNATING, sinks=True),
    "starcoder2": Family(STARCODER2, windows=(WINDOW,) * LAYERS),
    "cohere": Family(),
    "cohere2": Family(
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
        windows=ALTERNATING,
    ),
    "stablelm": Family({"hidden_dropout": 0.0, "qk_layernorm": True}),
    "smollm3": Family(),
    "glm4": Family(),
}

SLIDING = {"sliding_window": WINDOW}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SMALL_EXPERTS = {**EXPERTS, "moe_intermediate_size": 16}
ROUTED_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    key: DEEPSEEK[key]
    for key in (
        *("num_key_value_heads", "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim"),
        *("qk_nope_head_dim", "v_head_dim", "head_dim"),
    )
}
GEMMA4 = {
    **SLIDING,
    "global_head_dim": 16,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}
GEMMA4_31B = {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "use_bidirectional_attention": "vision",
}
SHARED_KV = {  # the last two layers attend to keys and values of the first two
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
GEMMA4_E2B = {**GEMMA4, **SHARED_KV, "hidden_size_per_layer_input": 6, "use_double_wide_mlp": True}
GEMMA4_26B = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}

# Families that are held exact by a test each; those above go through all of them.
FURTHER: dict[str, Family] = {
    "afmoe": Family({**SMALL_EXPERTS, **SLIDING}),
    "apertus": Family(),
    "arcee": Family(),
    "aria_text": Family(),
    "biogpt": Family({"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "bert": Family(
        {"is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    ),
    "roberta": Family(  # positions begin after the padding token's id, which no test draws
        {
            "is_decoder": True,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "vocab_size": VOCAB + 1,
            "pad_token_id": VOCAB,
        }
    ),
    "bitnet": Family(),
    "cohere2_moe": Family({**EXPERTS, **SLIDING}),
    "cwm": Family(SLIDING),
    "deepseek_v2": Family({**LATENT, **ROUTED_EXPERTS}),
    "dots1": Family({**ROUTED_EXPERTS, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}),
    "diffllama": Family(),
    "ernie4_5": Family(),
    "ernie4_5_moe": Family({**SMALL_EXPERTS, "moe_num_experts": 4}),
    "exaone4": Family(SLIDING),
    "exaone_moe": Family({**SMALL_EXPERTS, **SLIDING}),
    "flex_olmo": Family(EXPERTS),
    "flint": Family({**SMALL_EXPERTS, **SLIDING, "shared_expert_intermediate_size": 16}),
    "gemma4_unified_text": Family({**GEMMA4, **GEMMA4_31B}),
    "gemma4_text": Family({**GEMMA4, **GEMMA4_31B}),
    "gemma4_moe": Family({**GEMMA4, **GEMMA4_26B, "moe_intermediate_size": 16}, kind="gemma4_text"),
    "gemma4_e2b": Family(GEMMA4_E2B, windows=ALTERNATING, kind="gemma4_text"),
    "gemma4_shared": Family({**GEMMA4, **GEMMA4_31B, **SHARED_KV}, kind="gemma4_unified_text"),
    "gemma3n_text": Family(
        {
            **SLIDING,
            **SHARED_KV,
            "intermediate_size": [48] * LAYERS,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": VOCAB - 8,
            "altup_num_inputs": 3,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.6, 0.0] * 2,
        },
        windows=ALTERNATING,
    ),
    "glm": Family(),
    "glm4_moe": Family(ROUTED_EXPERTS),
    "glm4_moe_lite": Family({**LATENT, **ROUTED_EXPERTS}),
    "gpt_bigcode": Family(GPT2),
    "granite_swa": Family(SLIDING),
    "granitemoe": Family(LOCAL_EXPERTS),
    "granitemoe_swa": Family({**LOCAL_EXPERTS, **SLIDING}),
    "granitemoeshared": Family(LOCAL_EXPERTS),
    "helium": Family(),
    "hunyuan_v1_dense": Family(),
    "hunyuan_v1_moe": Family(EXPERTS),
    "hy_v3": Family({**SMALL_EXPERTS, "num_shared_experts": 1}),
    "hyperclovax": Family(),
    "internlm3": Family(),
    "iquestcoder": Family(),
    "jais2": Family(),
    "jetmoe": Family(LOCAL_EXPERTS),
    "kolibri1": Family(
        {
            **LOCAL_EXPERTS,
            **SLIDING,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        }
    ),
    "llama4_text": Family(
        {
            **LOCAL_EXPERTS,
            "attention_chunk_size": 8,
            "intermediate_size_mlp": 48,
            "floor_scale": 5,
            "attn_scale": 0.3,
            "no_rope_layer_interval": 2,
            "interleave_moe_layer_step": 2,
            "layer_types": ["chunked_attention", "full_attention"] * 2,
        }
    ),
    "laguna": Family({**SMALL_EXPERTS, **SLIDING}),
    "mellum": Family(
        {
            **LOCAL_EXPERTS,
            **SLIDING,
            "moe_intermediate_size": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        }
    ),
    "mimo_v2_flash": Family({**ROUTED_EXPERTS, **SLIDING}),
    "minicpm3": Family(LATENT),
    "minimax_m2": Family(LOCAL_EXPERTS),
    "minimax_m3_vl_text": Family(
        {
            **LOCAL_EXPERTS,
            "dense_intermediate_size": 48,
            "shared_intermediate_size": 16,
            "mlp_layer_types": ["dense", "sparse"] * 2,
        }
    ),
    "ministral": Family(SLIDING),
    "ministral3": Family(SLIDING),
    "modernbert-decoder": Family(SLIDING),
    "nanochat": Family(),
    "nemotron": Family(),
    "olmo": Family(),
    "olmoe": Family(EXPERTS),
    "persimmon": Family(),
    "qwen2_moe": Family(SMALL_EXPERTS),
    "seed_oss": Family({"residual_dropout": 0.0}),
    "solar_open": Family(ROUTED_EXPERTS),
    "vaultgemma": Family(SLIDING),
    "youtu": Family(LATENT),
}
FURTHER |= {  # which nobody has named in a report so far
    "apertus1p5_text": Family(),
    "axk1": Family({**LATENT, **ROUTED_EXPERTS, "n_group": 1, "topk_group": 1}),
    "beam": Family({**SMALL_EXPERTS, "n_group": 1, "topk_group": 1}),
    "dbrx": Family(
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": LAYERS,
            "max_seq_len": 256,
            "ffn_config": {
                **{"ffn_hidden_size": 48, "hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}
            },
            "attn_config": {"kv_n_heads": 2, "attn_pdrop": 0.0, "rope_theta": 1e4, "clip_qkv": 1.0},
        }
    ),
    "exaone": Family({"num_layers": LAYERS, "embed_dropout": 0.0}),
    "fuyu": Family(),
    "moshi": Family(),
    "sarvam_mla": Family({**LATENT, **SMALL_EXPERTS, "n_group": 1, "topk_group": 1}),
    "sarvam_moe": Family(SMALL_EXPERTS),
}
INDEXED = {
    **{**LATENT, **ROUTED_EXPERTS, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    **{"index_topk": 8, "index_head_dim": 16, "index_n_heads": 4},
}
FURTHER |= dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "axk2"), Family(INDEXED))
SLIDING_LATENT = {  # of layers with a window, which have other sizes
    **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 8},
    **{"swa_kv_lora_rank": 8, "swa_head_dim": 12, "swa_qk_nope_head_dim": 4, "swa_v_head_dim": 6},
}
FURTHER |= {  # in two of these, some layers attend to the tokens that an earlier one chose
    "dots3_note_text": Family(
        {
            **{**INDEXED, **SLIDING_LATENT},
            **{"moe_shared_expert_intermediate_size": 16, "sliding_window": 8},
        }
    ),
    "glm_moe_dsa_shared": Family(
        {**INDEXED, "indexer_types": ["full", "shared"] * 2}, kind="glm_moe_dsa"
    ),
    "hy_v4": Family({**INDEXED, "indexer_types": ["full", "full", "shared", "shared"]}),
}
if not OWN_ATTENTION:
    FURTHER |= dict.fromkeys(("codegen", "gptj"), Family({**GPT2, "rotary_dim": 4}, kv_heads=4))

ALTERNATELY = {"layer_types": ["linear_attention", "full_attention"] * 2}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
SHARED_EXPERT = {**SMALL_EXPERTS, "shared_expert_intermediate_size": 16}
SHORT = {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}
SCAN = {"n_groups": 2, "chunk_size": 16}

# Families of which layers hand a state from chunk to chunk.
RECURRENT: dict[str, Family] = {
    "bamba": Family(  # whose layers give tuples
        {
            "attn_layer_indices": [1, 3],
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_n_groups": 2,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
        }
    ),
    "bailing_hybrid": Family(
        {
            **LATENT,
            **ALTERNATELY,
            **SMALL_EXPERTS,
            "num_experts_per_token": 2,
            "num_expert_group": 1,
            "topk_group": 1,
            "linear_num_heads": 4,
            "linear_head_dim": 8,
            "qk_head_dim": 12,
        }
    ),
    "falcon_mamba": Family({"state_size": 8, "time_step_rank": 4}),
    "falcon_h1": Family(  # each layer attends and passes on a state
        {
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_n_groups": 2,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
            "mamba_rms_norm": True,
        }
    ),
    "granitemoehybrid": Family(
        {
            **LOCAL_EXPERTS,
            "layer_types": ["mamba", "attention"] * 2,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_n_groups": 2,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
            "shared_intermediate_size": 16,
        }
    ),
    "jamba": Family(
        {
            **EXPERTS,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "expert_layer_offset": 0,
            "expert_layer_period": 2,
        }
    ),
    "kimi_linear": Family(
        {
            **LATENT,
            **ALTERNATELY,
            **SMALL_EXPERTS,
            "num_experts_per_token": 2,
            "linear_num_heads": 4,
            "linear_head_dim": 8,
            "head_dim": 12,
            "qk_head_dim": 12,
        }
    ),
    "lfm2": Family({**SHORT, "block_auto_adjust_ff_dim": False}),
    "lfm3": Family(
        {
            "conv_L_cache": 3,
            **SLIDING,
            "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
        }
    ),
    "lfm2_moe": Family({**SHORT, **SMALL_EXPERTS, "num_dense_layers": 1}),
    "mamba": Family({"state_size": 8, "time_step_rank": 4}),
    "mamba2": Family({**SCAN, "state_size": 8, "num_heads": 4, "head_dim": 16}),
    "minimax": Family({**LOCAL_EXPERTS, **ALTERNATELY, "block_size": 4}),
    "nemotron_h": Family(
        {
            **SCAN,
            **ROUTED_EXPERTS,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "moe_shared_expert_intermediate_size": 16,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
        }
    ),
    "olmo_hybrid": Family({**ALTERNATELY, **DELTA}),
    "recurrent_gemma": Family(
        {
            "lru_width": 32,
            "attention_window_size": WINDOW,
            "block_types": ["recurrent", "attention"],
        }
    ),
    "qwen3_5_moe_text": Family({**ALTERNATELY, **DELTA, **SHARED_EXPERT}),
    "qwen3_5_text": Family({**ALTERNATELY, **DELTA}),
    "qwen3_next": Family({**ALTERNATELY, **DELTA, **SHARED_EXPERT}),
}
RECURRENT |= {  # whose layers share an attention block, and read the embeddings again
    "zamba": Family(
        {
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "n_mamba_heads": 2,
        }
    ),
    "zamba2": Family(
        {
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "mamba_d_state": 8,
            "mamba_ngroups": 2,
            "n_mamba_heads": 4,
            "chunk_size": 16,
            "adapter_rank": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
        }
    ),
}


def _known(families: dict[str, Family]) -> dict[str, Family]:
    """Those that this transformers has; an older one has fewer."""
    return {name: f for name, f in families.items() if (f.kind or name) in CONFIG_MAPPING}


FURTHER, RECURRENT = _known(FURTHER), _known(RECURRENT)


def make_model(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> PreTrainedModel:
    """A model in training mode; `changes` are configuration fields."""
    family = {**FAMILIES, **FURTHER, **RECURRENT}[name]
    kind = family.kind or name
    config = AutoConfig.for_model(kind, **{**COMMON, **family.fields, **changes})
    config._experts_implementation = "eager"  # torch's grouped product has no float64
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if dtype is torch.float64:  # of which families of transformers 5.24 leave out their routers
        for parameter in model.parameters():
            parameter.data = parameter.data.double()
    scatter_weights(model)
    return model.train()


@cache
def shared_model(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """The same model for every test of a process: for tests that change nothing but `.grad`."""
    return make_model(name, dtype)


@torch.no_grad()
def scatter_weights(model: PreTrainedModel) -> None:
    """Random weights large enough that attention is far from uniform and nothing is zero."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, dtype=torch.float64)
        if parameter.ndim > 1:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5 * (2 if "embed" in name else 1))
        else:
            parameter.add_(0.2 * noise)
