"""Adapters of PEFT that a step is given: exact, or refused."""

import re
import sys
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, PeftConfig, PrefixTuningConfig, get_peft_model
from peft.tuners.lora.config import VeloraConfig

from farspan.engine.step import Step
from farspan.hf.load import Weights, add_adapters, load_model, stacked_experts
from farspan.hf.probe import Float64Mode
from farspan.program.strategies import strategy
from farspan.spec import Schedule, UnsupportedError
from tests.engine.checks import assert_close, draw, run_oracle, run_step
from tests.grids import part_of
from tests.hf.test_refused import SCHEDULE
from tests.numerics import assert_exact
from tests.profiles import spec_of
from tests.zoo import make_model

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing:FutureWarning", "ignore:.*tie:UserWarning"
)
DATA = draw(41, documents=3)


def lora(**given: Any) -> LoraConfig:
    fields: dict[str, Any] = {
        "r": 4,
        "target_modules": ["q_proj", "down_proj"],
        "task_type": "CAUSAL_LM",
    }
    return LoraConfig(**fields | given)


def wrapped(config: PeftConfig, family: str = "llama", **fields: Any) -> Any:
    """A PeftModel whose adapters are not zero."""
    model = get_peft_model(make_model(family, **fields), config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def test_embeddings_that_ask_for_gradients_get_none() -> None:
    """As PEFT's preparation for gradient checkpointing leaves them."""
    model = wrapped(lora())
    expected = run_oracle(model.get_base_model(), DATA)
    model.enable_input_require_grads()
    assert_close(run_step(model.get_base_model(), SCHEDULE, DATA), expected)


@pytest.mark.parametrize(
    ("given", "trained", "tied"),
    [
        ({"use_dora": True, "use_rslora": True}, 24, False),
        ({"target_modules": ["q_proj"], "bias": "all", "lora_bias": True}, 24, True),
        ({"modules_to_save": ["embed_tokens", "lm_head", "norm"]}, 27, True),
        ({"modules_to_save": ["embed_tokens", "lm_head", "norm"]}, 27, False),
        ({"target_modules": ["q_proj", "embed_tokens", "lm_head"]}, 12, True),
        ({"target_modules": ["q_proj", "embed_tokens", "lm_head"]}, 12, False),
        ({"trainable_token_indices": [1, 5]}, 17, True),
    ],
)
def test_what_peft_trains_beside_matrices_is_exact(
    given: dict[str, Any], trained: int, tied: bool
) -> None:
    model = wrapped(lora(**given), "qwen2", tie_word_embeddings=tied)
    expected = run_oracle(model.get_base_model(), DATA)
    assert len(expected.gradients) == trained
    found = run_step(model, SCHEDULE, DATA)
    for name in tuple(found.gradients):
        found.gradients[name.removeprefix("base_model.model.")] = found.gradients.pop(name)
    assert_close(found, expected)


def test_adapters_on_stacked_experts_are_exact() -> None:
    model = wrapped(lora(target_parameters=["mlp.experts.down_proj"]), "mixtral").get_base_model()
    expected = run_oracle(model, DATA)
    assert sum(".experts." in name for name in expected.gradients) == 8
    assert_close(run_step(model, Schedule(chunk=16), DATA), expected)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            lora(lora_dropout=0.1, target_modules=["q_proj", "lm_head"]),
            "dropout 0.1 at lm_head.lora_dropout.default cannot be repeated",
        ),
        (lora(alora_invocation_tokens=[5]), r"LoraConfig \(alora_invocation_tokens\) begins where"),
        (
            lora(velora_config=VeloraConfig(num_groups=4)),
            r"\(velora_config\) approximates gradients",
        ),
        (
            AdaLoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", total_step=9),
            "AdaLoraModel wraps the causal LM in a forward of its own",
        ),
    ],
)
def test_adapters_that_are_more_than_modules_are_refused(config: PeftConfig, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        Step(wrapped(config), SCHEDULE)


def test_prompts_that_are_not_trained_are_refused_too() -> None:
    model = wrapped(PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    model.requires_grad_(False).get_base_model().lm_head.requires_grad_(True)
    with pytest.raises(
        UnsupportedError, match=r"PrefixTuningConfig \(is_prompt_learning\) puts tokens"
    ):
        Step(model, SCHEDULE)


def test_a_step_that_would_train_nothing_is_refused() -> None:
    model = wrapped(lora())
    step = Step(model, SCHEDULE)
    model.merge_adapter()
    before = step.evaluate(*DATA)
    with pytest.raises(
        UnsupportedError, match="q_proj are merged into its weights and would get no"
    ):
        step(*DATA)
    model.unmerge_adapter()
    step(*DATA)
    model.requires_grad_(False)
    with pytest.raises(UnsupportedError, match="no parameter requires a gradient"):
        step(*DATA)
    assert_exact(step.evaluate(*DATA), before)


TOKENS = 41
QWEN = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


def adapted(dtype: torch.dtype = torch.float64, **given: Any) -> Any:
    model = load_model(config=QWEN, dtype=dtype, weights=given.pop("weights", Weights.SAVED))
    add_adapters(model, **{"rank": 4, "alpha": 8.0} | given)
    return model


def trained(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("name", part_of(["grouped", "memo", "fpdt", "oomb"], "memo", "fpdt"))
def test_two_steps_have_the_gradients_of_plain_peft(name: str) -> None:
    ours = adapted(zero=False)
    plain = load_model(config=QWEN, dtype=torch.float64)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs: Any = get_peft_model(plain, config, autocast_adapter_dtype=False)
    inner = theirs.get_base_model()
    assert trained(inner).keys() == trained(ours).keys()
    inner.load_state_dict(ours.state_dict())
    schedule = strategy(name, 2, TOKENS)
    for seed in (0, 1):
        data = draw(TOKENS, seed=seed)
        found, expected = run_step(ours, schedule, data), run_oracle(inner, data)
        assert all(g.any() for g in expected.gradients.values())
        assert_close(found, expected)
        for model, outcome in ((ours, found), (inner, expected)):
            with torch.no_grad():
                for parameter, gradient in zip(
                    trained(model).values(), outcome.gradients.values(), strict=True
                ):
                    parameter.sub_(gradient)
            model.zero_grad()


def test_adapters_follow_from_the_seed_alone() -> None:
    first = trained(adapted(seed=3))
    torch.rand(7)
    before = torch.get_rng_state()
    again, other = trained(adapted(seed=3)), trained(adapted(seed=4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    assert not any(t.any() for name, t in first.items() if "lora_B" in name)
    assert not stacked_experts(adapted())


def test_they_are_those_that_the_planner_counts() -> None:
    counted = spec_of(QWEN, rank=4).trainable
    for weights in (Weights.SAVED, Weights.NONE):
        assert sum(t.numel() for t in trained(adapted(weights=weights)).values()) == counted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"targets": ("q_proj", "lm_head")},
            r"model\.lora\.targets: the layers have no linear module 'lm_head'",
        ),
        ({"targets": "q"}, r"model\.lora\.targets: the layers have no linear module 'q'"),
        ({"rank": 17}, r"model\.lora\.rank: 17 is above 16"),
    ],
)
def test_what_cannot_be_adapted_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        adapted(**given)


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (
            "linear",
            r"mistakes down_proj, gate_proj, up_proj of Deepseek\w+ for its stacked experts.*; "
            r"give kv_a_proj_with_mqa, kv_b_proj, o_proj, q_a_proj, q_b_proj, or some of them",
        ),
        (("shared_experts.down_proj",), r"mistakes down_proj of Deepseek\w+ .*; give others"),
        (("gate_proj",), r"peft does not accept them: Cannot convert PEFT target\(s\) gate_proj"),
    ],
)
def test_names_that_peft_reads_as_experts_are_refused(targets: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"model\.lora\.targets: (?:peft )?{message}"):
        add_adapters(make_model("deepseek_v3"), rank=4, alpha=8.0, targets=targets)


@pytest.mark.parametrize("family", part_of(["mixtral", "gpt_oss"], "mixtral"))
def test_adapters_beside_experts_have_the_gradients_of_autograd(family: str) -> None:
    model = make_model(family)
    add_adapters(model, rank=4, alpha=8.0, targets=("o_proj",), zero=False)
    assert stacked_experts(model)
    assert len(trained(model)) == 8
    data = draw(TOKENS)
    expected = run_oracle(model, data)
    assert_close(run_step(model, strategy("grouped", 4, TOKENS), data), expected)


def assert_trained(model: Any) -> None:
    data = draw(TOKENS)
    with Float64Mode():
        expected = run_oracle(model, data)
        assert all(gradient.any() for gradient in expected.gradients.values())
        assert_close(run_step(model, Schedule(chunk=9, groups=2), data), expected)


@pytest.mark.parametrize("family", ["llama4_text", "jamba", "axk2"])
def test_adapters_are_only_where_they_have_gradients(family: str) -> None:
    """Routers return tuples, a state's rates read a weight alone, and indexers have no gradient."""
    model = make_model(family)
    add_adapters(model, rank=4, alpha=8.0, zero=False)
    assert_trained(model)


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        *((family, "linear") for family in ("deepseek_v32", "mamba", "falcon_h1")),
        *(("deepseek_v32", ("wk",)), ("llama4_text", ("router",)), ("mamba", ("dt_proj",))),
    ],
)
def test_targets_that_are_recommended_are_trained(family: str, targets: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"^model\.lora\.targets: ") as told:
        add_adapters(make_model(family), rank=4, alpha=8.0, targets=targets)
    said = re.search(r"(?:; give|or a list of) (.*?)(?:, or some of them)?$", str(told.value))
    assert said is not None
    given = said[1].split(", ")
    if family == "deepseek_v32":  # that peft accepts
        given = [name for name in given if name not in ("down_proj", "gate_proj", "up_proj")]
    if targets == ("dt_proj",):
        given.remove("out_proj")
    model = make_model(family)
    add_adapters(model, rank=4, alpha=8.0, targets=given, zero=False)
    assert_trained(model)


def test_without_peft_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UnsupportedError, match=r'pip install "farspan\[lora\]"'):
        adapted()
