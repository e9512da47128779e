"""Overrides of a model's configuration act as in config.json, or are named before it is made."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from farspan.engine.step import Step
from farspan.hf.load import Weights, blank_model, config_for_planning, load_model
from farspan.hf.unsupported import context_limit, refuse_context, refuse_model
from farspan.profile.catalog import find_config
from farspan.spec import Schedule, UnsupportedError
from tests.grids import crossed
from tests.zoo import COMMON, FURTHER, GEMMA3, GPT2, PHI, RECURRENT

POSITIONS = 64
BY_KIND = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
# Families' config.json, as they are published: some with older spellings of RoPE.
FILES: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 5e5, "rope_scaling": None},
    "qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "mistral": {"rope_theta": 1e4, "sliding_window": 8},
    "gpt_neox": {"rotary_emb_base": 1e4, "rotary_pct": 0.5, "hidden_dropout": 0.0},
    "phi3": {**PHI, "rope_theta": 1e4, "original_max_position_embeddings": POSITIONS},
    "gemma3_text": {**GEMMA3, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
    "olmo3": {"sliding_window": 8, "rope_parameters": BY_KIND},
    "modernbert-decoder": {"global_rope_theta": 1e5, "local_rope_theta": 1e4, "local_attention": 8},
    "mixtral": {"rope_theta": 1e6, "num_local_experts": 4},
    "gpt2": {**GPT2, "n_positions": POSITIONS},
}


def fields(family: str, **changed: Any) -> dict[str, Any]:
    common = {k: v for k, v in COMMON.items() if family != "gpt2" or k.endswith("_id")}
    if "max_position_embeddings" in common:
        common["max_position_embeddings"] = POSITIONS
    if family != "gpt2":
        common["head_dim"] = 16
        common["hidden_size"] = 64
    return {**common, "vocab_size": 64, "model_type": family, **FILES[family], **changed}


def written(tmp_path: Path, content: dict[str, Any]) -> str:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(content))
    return str(tmp_path)


def made(path: str, overrides: dict[str, Any]) -> PreTrainedModel:
    return load_model(path=path, dtype=torch.float32, overrides=overrides, weights=Weights.NONE)


def by_transformers(path: str) -> PreTrainedModel:
    """The model that transformers makes of a folder's config.json."""
    with torch.random.fork_rng():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    return model


def frequencies(model: PreTrainedModel) -> dict[str, Any]:
    """Inverse frequencies, and the factors of attention that go with them."""
    found: dict[str, Any] = {n: b for n, b in model.named_buffers() if "inv_freq" in n}
    for name, module in model.named_modules():
        found |= {f"{name}.{n}": v for n, v in vars(module).items() if "attention_scaling" in n}
    return found


def assert_alike(model: PreTrainedModel, other: PreTrainedModel) -> None:
    one, two = frequencies(model), frequencies(other)
    assert one.keys() == two.keys()
    for name, value in one.items():
        same = torch.equal(value, two[name]) if isinstance(value, Tensor) else value == two[name]
        assert same, name


def assert_refused(path: str, overrides: dict[str, Any], *words: str) -> str:
    with pytest.raises(UnsupportedError) as caught:
        made(path, overrides)
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


YARN = {"factor": 4.0, "original_max_position_embeddings": POSITIONS}
SCALED: dict[str, dict[str, Any]] = {
    "yarn": YARN,
    "linear": {"factor": 4.0},
    "llama3": {**YARN, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, **YARN},
}
STRETCHED = {"rope_type": "yarn", **YARN}
FULL = {"full_attention": STRETCHED}
# Files whose RoPE is written flat, as most published ones are: what transformers makes of the same
# file with the override in it.
IN_FILES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_scaling": {"type": "yarn", **YARN}}),
    ("llama", {"rope_theta": 1e4}),  # which is also what transformers takes where nothing is said
    ("llama", {"rope_theta": 1e7, "rope_scaling": STRETCHED}),
    ("llama", {"max_position_embeddings": 256, "rope_scaling": {"type": "yarn", "factor": 4.0}}),
    ("mistral", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "sliding_window": 16}),
    ("gpt_neox", {"rotary_emb_base": 2e4, "rope_scaling": STRETCHED}),
    ("phi3", {"rope_theta": 2e4, "max_position_embeddings": 128}),
    (
        "phi3",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.5] * 8, "long_factor": [2.0] * 8}},
    ),
    ("gemma3_text", {"rope_theta": 2e6}),
    ("gemma3_text", {"rope_local_base_freq": 2e4}),
    ("gemma3_text", {"rope_scaling": STRETCHED}),
    ("gemma3_text", {"rope_parameters": FULL}),
    (
        "gemma3_text",
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
    ),
    ("olmo3", {"rope_scaling": STRETCHED}),
    ("modernbert-decoder", {"global_rope_theta": 2e5}),
    ("modernbert-decoder", {"rope_scaling": STRETCHED}),
]


class TestRope:
    @pytest.mark.parametrize(
        ("kind", "word", "field"),
        crossed(SCALED, ["type", "rope_type"], ["rope_scaling", "rope_parameters"]),
    )
    def test_spellings_give_the_frequencies_of_config_json(
        self, field: str, word: str, kind: str, tmp_path: Path
    ) -> None:
        content = {k: v for k, v in fields("qwen2").items() if not k.startswith("rope")}
        rope = {word: kind, **SCALED[kind]}
        model = made(written(tmp_path / "a", content), {field: rope})
        expected = by_transformers(written(tmp_path / "b", {**content, field: rope}))
        assert_alike(model, expected)
        assert frequencies(model)
        assert model.config.rope_parameters["rope_type"] == kind
        assert "type" not in model.config.rope_parameters  # nor in what a run saves

    @pytest.mark.parametrize(("family", "overrides"), IN_FILES)
    def test_a_file_s_own_spelling_and_the_override_s(
        self, family: str, overrides: dict[str, Any], tmp_path: Path
    ) -> None:
        path = written(tmp_path / "a", fields(family))
        assert_alike(
            made(path, overrides),
            by_transformers(written(tmp_path / "b", fields(family, **overrides))),
        )
        plain = frequencies(by_transformers(path))
        changed = frequencies(made(path, overrides))
        assert any(
            not torch.equal(v, changed[n]) for n, v in plain.items() if isinstance(v, Tensor)
        ) or any(v != changed[n] for n, v in plain.items() if isinstance(v, float))

    @pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
    def test_a_part_keeps_the_rest(self, field: str, tmp_path: Path) -> None:
        """A new type keeps theta; a new factor keeps the type."""
        rope = {"rope_type": "default", "rope_theta": 5e5}
        path = written(tmp_path, fields("qwen2", rope_parameters=rope))
        assert made(path, {field: {"type": "linear", "factor": 2.0}}).config.rope_parameters == {
            **{"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
        }
        path = written(tmp_path, fields("qwen2", rope_parameters={**rope, **STRETCHED}))
        longer = made(path, {field: {"factor": 8.0}}).config.rope_parameters
        assert (longer["rope_type"], longer["factor"], longer["rope_theta"]) == ("yarn", 8.0, 5e5)
        linear = made(path, {field: {"type": "linear", "factor": 2.0}}).config.rope_parameters
        assert linear["rope_type"] == "linear"
        for nothing in ({field: None}, {field: {"rope_type": "default"}}):
            plain = made(path, nothing).config.rope_parameters
            assert (plain["rope_type"], plain["rope_theta"]) == ("default", 5e5)
            assert "factor" not in plain

    @pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
    def test_an_older_spelling_in_the_file_gives_way(self, field: str, tmp_path: Path) -> None:
        """transformers takes rope_scaling wherever a file has both."""
        older = {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}}
        newer = {"rope_type": "linear", "factor": 8.0}
        path = written(tmp_path / "a", fields("llama", **older, rope_parameters=dict(newer)))
        model = made(path, {field: {"type": "linear", "factor": 4.0}})
        expected = fields("llama", rope_theta=1e6, rope_scaling={"type": "linear", "factor": 4.0})
        assert_alike(model, by_transformers(written(tmp_path / "b", expected)))

    @pytest.mark.parametrize("nested", [False, True])
    def test_of_a_model_that_also_reads_images(self, nested: bool, tmp_path: Path) -> None:
        of_text = {k: v for k, v in fields("gemma3_text").items() if k != "vocab_size"}
        vision = {"hidden_size": 16, "num_hidden_layers": 1, "image_size": 8, "patch_size": 4}
        content: dict[str, Any] = {
            "model_type": "gemma3",
            "text_config": {**of_text, "vocab_size": 300, "model_type": "gemma3_text"},
            "vision_config": {**vision, "num_attention_heads": 2, "intermediate_size": 16},
            **{"image_token_index": 299, "boi_token_index": 298, "eoi_token_index": 297},
        }
        change = {"rope_parameters": FULL, "query_pre_attn_scalar": 4}
        overrides = {"text_config": change} if nested else change
        model = made(written(tmp_path / "a", content), overrides)
        content["text_config"] |= change
        expected = AutoConfig.from_pretrained(written(tmp_path / "b", content)).text_config
        assert model.config.text_config.query_pre_attn_scalar == 4
        found, asked = (c.rope_parameters for c in (model.config.text_config, expected))
        assert found == asked

    @pytest.mark.parametrize("family", ["gemma3_text", "olmo3"])
    def test_flat_parameters_where_each_kind_of_layer_has_its_own(
        self, family: str, tmp_path: Path
    ) -> None:
        path = written(tmp_path, fields(family))
        message = assert_refused(
            path,
            {"rope_parameters": STRETCHED},
            "model.overrides.rope_parameters:",
            "a RoPE for each kind of layer (full_attention, sliding_attention)",
        )
        advised = yaml.safe_load("{" + message.rpartition("give ")[2] + "}")
        rope = made(path, advised).config.rope_parameters
        assert rope["full_attention"]["rope_type"] == "yarn"
        assert rope["sliding_attention"]["rope_type"] == "default"

    def test_kinds_of_layer_that_a_model_has_not(self, tmp_path: Path) -> None:
        words = "has one RoPE for all its layers"
        assert_refused(written(tmp_path, fields("llama")), {"rope_parameters": FULL}, words)
        words = "rope_parameters.linear_attention: Gemma3TextConfig has one for each of full_att"
        path = written(tmp_path, fields("gemma3_text"))
        assert_refused(path, {"rope_parameters": {"linear_attention": STRETCHED}}, words)
        assert_refused(
            path, {"rope_scaling": FULL}, "does not read kinds of layer there; give rope_"
        )

    @pytest.mark.parametrize("family", ["gemma3_text", "olmo3"])
    def test_a_type_that_the_family_does_not_read_by_its_older_name(
        self, family: str, tmp_path: Path
    ) -> None:
        """transformers 5.24 leaves these models' frequencies as they were."""
        older = {"rope_scaling": {"type": "yarn", **YARN}}
        content = fields(family) | {"rope_parameters": None}
        path = written(tmp_path, content | older)
        assert (
            by_transformers(path).config.rope_parameters["full_attention"]["rope_type"] == "default"
        )
        path = written(tmp_path, content)
        message = assert_refused(path, older, "rope_scaling.type: ", "by this older name")
        made(path, yaml.safe_load("{" + message.rpartition("give ")[2] + "}"))

    @pytest.mark.parametrize(
        ("family", "rope", "words"),
        [
            (
                "llama",
                {"rope_scaling": {"factor": 4.0}},
                "factor: 4.0 changes nothing under",
            ),
            ("gemma3_text", {"rope_parameters": STRETCHED}, "a RoPE for each kind of layer"),
            ("gemma3_text", {"rope_scaling": {"type": "yarn", **YARN}}, "by this older name"),
        ],
    )
    def test_of_a_configuration_in_the_run_file(
        self, family: str, rope: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(UnsupportedError, match=words) as caught:
            load_model(config=fields(family, **rope), dtype=torch.float32, weights=Weights.NONE)
        assert str(caught.value).startswith("model.config.rope_")

    def test_two_types(self, tmp_path: Path) -> None:
        both = {"type": "yarn", "rope_type": "linear", "factor": 2.0}
        path = written(tmp_path, fields("llama"))
        assert_refused(path, {"rope_scaling": both}, "overrides.rope_scaling.type: 'yarn' differs")


def tied(model: Any) -> Any:
    return model.model.embed_tokens.weight


# The family, the overrides, and what the error must say.
IDLE: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("llama", {"rope_scaling": {"factor": 4.0}}, ("rope_scaling.factor: 4.0 changes", "default")),
    ("llama", {"rope_parameters": {"original_max_position_embeddings": 64}}, ("RoPE: default",)),
    (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 16}},
        ("overrides.rope_scaling.beta_fast: 16 changes nothing", "a rope_type that reads it"),
    ),
    (
        "phi3",
        {
            "rope_scaling": {
                **{"type": "longrope", "short_factor": [1.5] * 8, "long_factor": [2.0] * 8},
                "original_max_position_embeddings": 16,
            }
        },
        ("reads the field original_max_position_embeddings itself; override that",),
    ),
    (  # which the others cannot do without, although the family takes its own field for it
        "phi3",
        {
            "rope_scaling": {
                **{"type": "su", "short_factor": [1.5] * 8, "long_factor": [2.0] * 8},
                "original_max_position_embeddings": 16,
            }
        },
        ("reads the field original_max_position_embeddings itself; override that",),
    ),
    (
        "qwen2",
        {"sliding_window": 512},
        (
            "sliding_window: 512 changes nothing",
            "has sliding_window: null",
            "use_sliding_window: t",
        ),
    ),
    ("qwen2", {"use_sliding_window": True}, ("use_sliding_window: true changes nothing",)),
    ("llama", {"output_hidden_states": True}, ("output_hidden_states: true changes nothing",)),
    ("llama", {"initializer_range": 0.5}, ("weights are read from model.path, so none are drawn",)),
    ("llama", {"attn_implementation": "eager"}, ("farspan computes attention itself",)),
    ("llama", {"gradient_checkpointing": True}, ("the schedule decides what is recomputed",)),
    ("llama", {"torch_dtype": "bfloat16"}, ("set model.dtype: bfloat16",)),
    ("gpt2", {"rope_scaling": {"type": "linear", "factor": 2.0}}, ("rope_scaling",)),
    ("gpt2", {"rope_theta": 1e5}, ("rope_theta: GPT2Config has no such field",)),
    ("gemma3_text", {"sliding_window_pattern": 3}, ("sliding_window_pattern",)),
    ("mixtral", {"router_aux_loss_coef": 0.5}, ("the run file has loss.router",)),
    (
        "phi3",  # which generation alone reads, without longrope
        {"original_max_position_embeddings": 32},
        ("original_max_position_embeddings: 32 changes nothing",),
    ),
    (
        "llama",
        {"rope_scaling": {"type": "ntk", "factor": 2.0}},
        ("has no RoPE of type 'ntk'; giv",),
    ),
]
# Overrides that act, with what shows it.
ACTING: list[tuple[str, dict[str, Any], Any]] = [
    ("llama", {"rms_norm_eps": 1e-3}, lambda m: m.model.norm.variance_epsilon == 1e-3),
    ("llama", {"num_hidden_layers": 2}, lambda m: len(m.model.layers) == 2),
    ("llama", {"tie_word_embeddings": True}, lambda m: m.lm_head.weight is tied(m)),
    (
        "llama",
        {"attention_bias": True},
        lambda m: m.model.layers[0].self_attn.q_proj.bias is not None,
    ),
    (
        "llama",
        {"attention_dropout": 0.5},
        lambda m: m.model.layers[0].self_attn.attention_dropout == 0.5,
    ),
    ("llama", {"max_position_embeddings": 128}, lambda m: context_limit(m) == 128),
    ("llama", {"use_cache": False}, lambda m: m.config.use_cache is False),
    ("llama", {"torch_dtype": "float32"}, lambda m: m.dtype is torch.float32),
    ("llama", {"attention_dropout": 0.0}, lambda m: not m.config.attention_dropout),  # as it was
    ("qwen2", {"use_sliding_window": False}, lambda m: not m.config.use_sliding_window),
    (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        lambda m: m.config.layer_types == ["full_attention"] + ["sliding_attention"] * 3,
    ),
    ("mistral", {"sliding_window": 16}, lambda m: m.config.sliding_window == 16),
    (
        "gemma3_text",
        {"layer_types": ["full_attention"] * 4},
        lambda m: m.config.layer_types == ["full_attention"] * 4,
    ),
    ("gemma3_text", {"num_hidden_layers": 3}, lambda m: len(m.config.layer_types) == 3),
    (
        "gemma3_text",
        {"query_pre_attn_scalar": 4},
        lambda m: m.model.layers[0].self_attn.scaling == 0.5,
    ),
    ("gpt2", {"n_positions": 128}, lambda m: m.transformer.wpe.num_embeddings == 128),
    ("gpt2", {"max_position_embeddings": 128}, lambda m: m.transformer.wpe.num_embeddings == 128),
    (  # as guides to yarn say, although its frequencies reach that far without the second
        "llama",
        {"rope_scaling": {"type": "yarn", **YARN}, "max_position_embeddings": 256},
        lambda m: m.config.max_position_embeddings == context_limit(m) == 256,
    ),
    (  # which yarn takes where nothing is said
        "llama",
        {"rope_scaling": {"type": "yarn", **YARN, "beta_fast": 32.0, "truncate": True}},
        lambda m: m.config.rope_parameters["beta_fast"] == 32.0,
    ),
    ("mixtral", {"num_experts_per_tok": 1}, lambda m: m.model.layers[0].mlp.gate.top_k == 1),
]


class TestActing:
    @pytest.mark.parametrize(("family", "overrides", "words"), IDLE)
    def test_an_override_that_changes_nothing_is_named(
        self, family: str, overrides: dict[str, Any], words: tuple[str, ...], tmp_path: Path
    ) -> None:
        path = written(tmp_path, fields(family))
        assert_refused(path, overrides, "model.overrides.", *words)

    @pytest.mark.parametrize(("family", "overrides", "shows"), ACTING)
    def test_an_override_that_acts_is_taken(
        self, family: str, overrides: dict[str, Any], shows: Any, tmp_path: Path
    ) -> None:
        assert shows(made(written(tmp_path, fields(family)), overrides))

    def test_planning_looks_as_well(self, tmp_path: Path) -> None:
        path = written(tmp_path, fields("qwen2"))
        with pytest.raises(UnsupportedError, match="sliding_window: 8 changes nothing"):
            config_for_planning(path=path, config=None, overrides={"sliding_window": 8})

    def test_a_growing_rope_is_refused_as_such(self, tmp_path: Path) -> None:
        """Its frequencies are those of default until a longer sequence comes."""
        path = written(tmp_path, fields("llama"))
        model = made(path, {"rope_scaling": {"type": "dynamic", "factor": 2.0}})
        with pytest.raises(UnsupportedError, match="'dynamic' depends on the longest position"):
            refuse_model(model)

    def test_layers_that_differ_in_a_field(self, tmp_path: Path) -> None:
        """Gemma4's full layers have a head_dim of their own; the file's is that of the others."""
        content = {**COMMON, **FURTHER["gemma4_text"].fields, "model_type": "gemma4_text"}
        path = written(tmp_path / "a", content)
        model: Any = made(path, {"head_dim": 32})
        expected = by_transformers(written(tmp_path / "b", {**content, "head_dim": 32}))
        assert model.model.layers[0].self_attn.head_dim == 32
        assert_alike(model, expected)
        assert made(path, {"head_dim": 8}).dtype is torch.float32  # as it was
        model = made(path, {"global_head_dim": 32})  # kept by no field of the configuration
        assert model.model.layers[3].self_attn.head_dim == 32

    def test_a_field_that_only_reading_a_file_asks_for(self, tmp_path: Path) -> None:
        """Of these transformers makes the kinds of layers, and keeps no such field."""
        content = {k: v for k, v in fields("gemma3_text").items() if k != "layer_types"}
        model = made(written(tmp_path / "a", content), {"sliding_window_pattern": 2})
        assert model.config.layer_types == ["sliding_attention", "full_attention"] * 2
        content = {**COMMON, **RECURRENT["qwen3_next"].fields, "model_type": "qwen3_next"}
        del content["layer_types"]
        model = made(written(tmp_path / "b", content), {"full_attention_interval": 2})
        assert model.config.layer_types == ["linear_attention", "full_attention"] * 2

    def test_experts_larger_than_memory(self) -> None:
        """A layer's experts of DeepSeek-V3 are one weight, of 30 GB in float32."""
        config = {**find_config("deepseek-ai/DeepSeek-V3"), "num_hidden_layers": 4}
        given = {"rope_scaling": {"factor": 80.0}}
        found = config_for_planning(path=None, config=config, overrides=given)
        assert found.rope_parameters["factor"] == 80.0
        model = blank_model(found, torch.float32)
        assert all(parameter.is_meta for parameter in model.parameters())
        assert not any(buffer.is_meta for buffer in model.buffers())

    def test_values_that_transformers_does_not_take(self, tmp_path: Path) -> None:
        path = written(tmp_path, fields("llama"))
        words = "model.overrides.rms_norm_eps: LlamaConfig does not accept this value: Field 'rms_"
        assert "Error" not in assert_refused(path, {"rms_norm_eps": "1e-5"}, words)
        words = "rope_scaling.type: LlamaConfig does not accept this value: Missing required keys"
        assert "Error" not in assert_refused(path, {"rope_scaling": {"type": "linear"}}, words)

    def test_weights_that_are_drawn_are_drawn_as_asked(self) -> None:
        given = {"initializer_range": 0.5}
        model: Any = load_model(config=fields("llama"), dtype=torch.float32, overrides=given)
        assert 0.45 < float(model.lm_head.weight.detach().std()) < 0.55

    def test_what_is_saved_says_what_is_trained(self, tmp_path: Path) -> None:
        path = written(tmp_path / "a", fields("llama"))
        model = load_model(
            path=path,
            dtype=torch.float32,
            overrides={"rope_scaling": STRETCHED},
            weights=Weights.RANDOM,
        )
        model.save_pretrained(tmp_path / "b")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
        assert_alike(again, model)
        assert again.config.rope_parameters["rope_type"] == "yarn"


class TestLength:
    """A document may be as long as the frequencies of layers that see all of it reach."""

    @pytest.mark.parametrize(
        ("family", "changed", "limit"),
        [
            ("llama", {}, 64),
            ("llama", {"rope_scaling": STRETCHED}, 256),
            ("llama", {"rope_scaling": {"type": "default", **YARN}}, 64),
            ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}, 64),
            ("gpt2", {}, 64),
            ("gemma3_text", {"rope_scaling": STRETCHED}, 256),
            ("gemma3_text", {"rope_parameters": {"sliding_attention": STRETCHED}}, 64),
            ("modernbert-decoder", {"rope_scaling": STRETCHED}, 256),
        ],
    )
    def test_a_factor_counts_where_it_stretches(
        self, family: str, changed: dict[str, Any], limit: int, tmp_path: Path
    ) -> None:
        model = by_transformers(written(tmp_path, fields(family, **changed)))
        assert context_limit(model) == context_limit(model.config) == limit

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_configuration_changed_afterwards_stretches_nothing(
        self, dtype: torch.dtype, tmp_path: Path
    ) -> None:
        model: Any = by_transformers(written(tmp_path, fields("llama")))
        model = model.to(dtype)
        model.config.rope_parameters |= {"rope_type": "yarn", **YARN}
        assert context_limit(model) == 64
        step = Step(model, Schedule(chunk=32))
        ids = torch.zeros(1, 65, dtype=torch.long)
        with pytest.raises(UnsupportedError, match="was changed after the model was made"):
            step(ids, ids)
        model.config.save_pretrained(tmp_path)
        again: Any = by_transformers(str(tmp_path))
        assert context_limit(again.to(dtype)) == 256

    @pytest.mark.parametrize(
        ("family", "scaled"), crossed(FILES, [None, "yarn", "linear", "llama3", "longrope"])
    )
    def test_the_advice_holds(self, family: str, scaled: str | None, tmp_path: Path) -> None:
        """As it is printed: in a run file, and in a program."""
        content = fields(family)
        if scaled and (family == "phi3") != (scaled == "longrope"):
            return
        if scaled and family != "gpt2":
            content["rope_scaling"] = {"rope_type": scaled, **SCALED[scaled]}
            if family == "olmo3":
                content.pop("rope_parameters")
        path = written(tmp_path, content)
        config = AutoConfig.from_pretrained(path)
        tokens = 1000
        with pytest.raises(UnsupportedError) as caught:
            refuse_context(config, tokens)
        message = str(caught.value)
        if family == "gpt2":
            assert "no RoPE to extend; set context to at most 64" in message
            return
        line, _, rest = message.partition("model.overrides: ")[2].partition("; in a program")
        model = made(path, yaml.safe_load(line))
        refuse_context(model, tokens)
        code = rest.partition(": ")[2].rpartition(" (changing the")[0]
        code = code.replace("AutoModelForCausalLM.from_pretrained(path, config=config)", "config")
        names: dict[str, Any] = {"AutoConfig": AutoConfig, "path": path}
        exec(code, names)
        other = AutoModelForCausalLM.from_config(names["model"])
        refuse_context(other, tokens)
        assert_alike(other, model)
