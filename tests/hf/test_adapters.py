"""Adapters of PEFT that a step is given: exact, or refused."""

from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, PeftConfig, PrefixTuningConfig, get_peft_model
from peft.tuners.lora.config import VeloraConfig

from farspan.engine.step import Step
from farspan.spec import Schedule, UnsupportedError
from tests.engine.checks import assert_close, draw, run_oracle, run_step
from tests.hf.test_refused import SCHEDULE
from tests.numerics import assert_exact
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
    ("given", "trained"),
    [
        ({"use_dora": True, "use_rslora": True}, 24),
        ({"target_modules": ["q_proj"], "bias": "all", "lora_bias": True}, 24),
        ({"modules_to_save": ["embed_tokens", "lm_head", "norm"]}, 27),
        ({"target_modules": ["q_proj", "embed_tokens", "lm_head"]}, 12),
        ({"trainable_token_indices": [1, 5]}, 17),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
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
