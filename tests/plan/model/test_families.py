"""Configurations are read as transformers reads them, and nonsense is refused by name."""

import json
from typing import Any

import pytest
from transformers import AutoConfig

from farspan.hf.unsupported import context_limit
from farspan.plan.model.families import FAMILIES, architecture_from
from farspan.spec import UnsupportedError
from tests.planner.configurations import CONFIGURATIONS, SLIDING, Config, config_of, real_model
from tests.zoo import WINDOW

YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 200,
}
LENGTHS: dict[str, Config] = {
    **{family: config_of(family, max_position_embeddings=...) for family in FAMILIES},
    "gpt2 positions": config_of("gpt2", max_position_embeddings=..., n_positions=96),
    "plain": config_of("llama", rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "yarn": config_of("qwen2", rope_scaling={**YARN, "original_max_position_embeddings": 100}),
    "yarn from there": config_of("qwen3", rope_parameters={**YARN, "rope_theta": 1e4}),
    "yarn of old": config_of("llama", rope_scaling={"type": "yarn", "factor": 2.0}),
    "llama3": config_of("llama", rope_scaling=LLAMA3),
    "linear": config_of("llama", rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "gpt_oss unsaid": config_of("gpt_oss", rope_parameters=..., max_position_embeddings=4096),
}


@pytest.mark.parametrize("config", LENGTHS.values(), ids=LENGTHS)
def test_positions_reach_as_far_as_training_allows(config: Config) -> None:
    made = AutoConfig.for_model(**json.loads(json.dumps(config)))
    assert architecture_from(config).longest == context_limit(made)


@pytest.mark.parametrize("config", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_a_configuration_and_its_file_are_one(config: Config) -> None:
    """What transformers makes of the fields, and what it writes, describe the same model."""
    made = AutoConfig.for_model(**config)
    expected = architecture_from(config)
    assert architecture_from(made) == expected
    assert architecture_from(made.to_dict()) == expected
    assert architecture_from(json.loads(made.to_json_string())) == expected


def test_what_sizes_do_not_tell() -> None:
    read = {name: architecture_from(config) for name, config in CONFIGURATIONS.items()}
    acts = {name: read[name].blocks[0].feed_forward.activation for name in FAMILIES}
    assert acts["gpt2"] == "gelu_new"
    assert acts["gpt_neox"] == "gelu"
    assert acts["gemma"] == acts["gemma2"] == "gelu_pytorch_tanh"
    assert acts["llama"] == acts["qwen3_moe"] == "silu"
    changed = architecture_from(config_of("llama", hidden_act="relu"))
    assert changed.blocks[0].feed_forward.activation == "relu"
    old = architecture_from(config_of("gemma", hidden_act="gelu"))
    assert old.blocks[0].feed_forward.activation == "gelu_pytorch_tanh"
    assert [read[name].norm for name in ("gpt2", "gpt_neox", "llama")] == ["layer", "layer", "rms"]
    assert {name for name in FAMILIES if read[name].blocks[0].parallel} == {"gpt_neox"}
    assert not read["gpt_neox sequential"].blocks[0].parallel
    assert {name for name in FAMILIES if read[name].blocks[0].norms == 4} == {"gemma2"}
    assert {name for name in FAMILIES if not read[name].blocks[0].attention.rotary} == {"gpt2"}
    assert read["gpt2"].positions == 256
    assert {name for name in FAMILIES if read[name].positions} == {"gpt2"}


PARTLY = [name for name in CONFIGURATIONS if name.startswith(("gpt_neox", "phi3"))]


@pytest.mark.parametrize("name", PARTLY)
def test_the_rotated_part_of_a_head_is_as_wide_as_the_real_tables(name: str) -> None:
    config = CONFIGURATIONS[name]
    attention = architecture_from(config).blocks[0].attention
    rope = next(module for module in real_model(config).modules() if hasattr(module, "inv_freq"))
    assert 2 * len(rope.inv_freq) == (attention.rotated or attention.head_dim)


def test_names() -> None:
    config = config_of("llama")
    assert architecture_from(config).name == "llama"
    assert architecture_from({**config, "_name_or_path": "a/b"}).name == "a/b"
    assert architecture_from({**config, "_name_or_path": "a/b"}, "c").name == "c"


NONSENSE: dict[str, tuple[Config, str]] = {
    "no type": ({"hidden_size": 8}, "model_type: expected one of gemma, .*got None"),
    "unknown": (config_of("llama", model_type="mamba"), "model_type: .*got 'mamba'"),
    "odd type": (config_of("llama", model_type=["llama"]), "model_type: expected one of"),
    "negative hidden": (config_of("llama", hidden_size=-32), "hidden_size: expected a whole"),
    "zero layers": (config_of("qwen2", num_hidden_layers=0), "num_hidden_layers: expected a whole"),
    "half a layer": (config_of("qwen2", num_hidden_layers=2.5), "num_hidden_layers: expected"),
    "true heads": (config_of("qwen3", num_attention_heads=True), "num_attention_heads: expected"),
    "text": (config_of("llama", vocab_size="64"), "vocab_size: expected a whole .*got '64'"),
    "no vocab": (config_of("llama", vocab_size=...), "vocab_size: missing"),
    "null width": (config_of("llama", intermediate_size=None), "intermediate_size: missing"),
    "no kv heads": (config_of("qwen2", num_key_value_heads=...), "num_key_value_heads: missing"),
    "no own name": (config_of("gpt2", hidden_size=..., n_embd=...), "n_embd: missing"),
    "bad own name": (config_of("gpt2", hidden_size=..., n_embd=-1), "n_embd: expected a whole"),
    "heads": (config_of("qwen2", head_dim=..., num_attention_heads=6), "num_attention_heads: .*32"),
    "llama heads": (config_of("llama", num_attention_heads=6), "num_attention_heads: .*divisor"),
    "gpt2 heads": (config_of("gpt2", num_attention_heads=5), "num_attention_heads: .*divisor"),
    "kv": (config_of("llama", num_key_value_heads=3), "num_key_value_heads: .*divisor of the 4"),
    "more kv": (config_of("llama", num_key_value_heads=8), "num_key_value_heads: .*divisor of"),
    "head_dim": (config_of("qwen3", head_dim=0), "head_dim: expected a whole number of at least 1"),
    "window": (config_of("mistral", sliding_window=-1), "sliding_window: expected a whole"),
    "no window": (config_of("gemma2", sliding_window=None), "sliding_window: layers with sliding"),
    "unused window": (
        config_of("qwen2", layer_types=["sliding_attention"] * 4),
        "sliding_window: layers with sliding",
    ),
    "few types": (config_of("gpt_oss", layer_types=["full_attention"]), "layer_types: .*list of 4"),
    "odd types": (
        config_of("gpt_oss", layer_types=["linear_attention"] * 4),
        "layer_types: .*full",
    ),
    "no list": (config_of("gemma2", layer_types="full_attention"), "layer_types: expected a list"),
    "switch": (config_of("qwen2", use_sliding_window="no"), "use_sliding_window: expected true"),
    "tied": (config_of("llama", tie_word_embeddings=1), "tie_word_embeddings: expected true"),
    "act": (config_of("llama", hidden_act=3), "hidden_act: expected a name"),
    "cap": (config_of("gemma2", attn_logit_softcapping=-50.0), "attn_logit_softcapping: .*above 0"),
    "nan cap": (config_of("gemma2", attn_logit_softcapping=float("nan")), "attn_logit_softcapping"),
    "top": (config_of("mixtral", num_experts_per_tok=5), "num_experts_per_tok: .*at most the 4"),
    "experts": (config_of("mixtral", num_local_experts=0), "num_local_experts: expected a whole"),
    "no experts": (config_of("gpt_oss", num_local_experts=...), "num_local_experts: missing"),
    "dense layers": (config_of("qwen3_moe", mlp_only_layers="0"), "mlp_only_layers: expected a l"),
    "step": (config_of("qwen3_moe", decoder_sparse_step=0), "decoder_sparse_step: expected a wh"),
    "longest": (config_of("llama", max_position_embeddings=0), "max_position_embeddings: expected"),
    "dynamic": (
        config_of("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        "rope_parameters.rope_type: 'dynamic' .* expected one of default, linear, llama3",
    ),
    "phi3 yarn": (config_of("phi3", rope_scaling=YARN), "rope_parameters.rope_type: 'yarn'"),
    "pct": (config_of("gpt_neox", rotary_pct=-1.0), "rotary_pct: expected a number above 0"),
    "all and more": (config_of("gpt_neox", rotary_pct=1.5), "rotary_pct: expected the share of a"),
    "nothing": (config_of("phi3", partial_rotary_factor=0.1), "partial_rotary_factor: .* of 8"),
    "rope": (config_of("llama", rope_scaling=4.0), "rope_parameters: expected a mapping"),
    "two ways": (
        config_of("gemma", use_bidirectional_attention=True),
        "use_bidirectional_attention: expected none, got True",
    ),
    "crossed": (config_of("gpt2", add_cross_attention=True), "add_cross_attention: expected none"),
    "by layer": (
        config_of("llama", per_layer_config={"0": {"intermediate_size": 8}}),
        "per_layer_config: expected none",
    ),
}


@pytest.mark.parametrize(("config", "message"), NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_refused_by_the_field_s_name(config: Config, message: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^{message}"):
        architecture_from(config)


def windows(**changes: Any) -> list[int | None]:
    blocks = architecture_from(config_of("qwen2", **changes)).blocks
    return [block.attention.window for block in blocks]


def test_windows_of_qwen() -> None:
    assert windows(**SLIDING, max_window_layers=2) == [None, None, WINDOW, WINDOW]
    assert windows(**SLIDING, max_window_layers=0) == [WINDOW] * 4
    assert windows(**SLIDING) == [None] * 4
    assert windows(sliding_window=WINDOW, max_window_layers=0) == [None] * 4
