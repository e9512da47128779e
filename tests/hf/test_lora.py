"""Adapters on a model's layers: those of peft, trained exactly, drawn from the seed."""

import sys
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from farspan.hf.load import Weights, add_adapters, load_model, stacked_experts
from farspan.program.strategies import strategy
from farspan.spec import UnsupportedError
from tests.engine.checks import assert_close, draw, gradients, run_oracle, run_step
from tests.grids import part_of
from tests.profiles import spec_of
from tests.zoo import make_model

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


def test_bfloat16_adapters_have_the_dtype_of_the_weights() -> None:
    model = adapted(torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    run_step(model, strategy("grouped", 2, TOKENS), draw(TOKENS))
    assert any(g.any() for g in gradients(model).values())


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


def test_named_modules_alone_are_adapted() -> None:
    names = {name.split(".lora_")[0] for name in trained(adapted(targets=("q_proj", "up_proj")))}
    assert {name.rpartition(".")[2] for name in names} == {"q_proj", "up_proj"}
    assert len(names) == 4


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


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_adapters_beside_experts_have_the_gradients_of_autograd(family: str) -> None:
    model = make_model(family)
    add_adapters(model, rank=4, alpha=8.0, targets=("o_proj",), zero=False)
    assert stacked_experts(model)
    assert len(trained(model)) == 8
    data = draw(TOKENS)
    expected = run_oracle(model, data)
    assert_close(run_step(model, strategy("grouped", 4, TOKENS), data), expected)


def test_without_peft_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UnsupportedError, match=r'pip install "farspan\[lora\]"'):
        adapted()
