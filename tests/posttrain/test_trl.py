"""TRL's SFTTrainer by farspan's steps gives its own losses and norms of gradients, and what it
would compute otherwise is refused."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from trl import DistillationTrainer, SFTConfig, SFTTrainer

import farspan
from farspan.hf.attention_interface import eager_experts
from farspan.spec import Schedule, UnsupportedError
from tests.data.characters import character_tokenizer
from tests.grids import part_of
from tests.numerics import assert_exact
from tests.posttrain.arguments import quiet
from tests.train.tiny import MODEL, load_tiny

# TRL calls what transformers 5.23 has given other names.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing.*:FutureWarning", "ignore:.*label_smoothing:FutureWarning"
)
SCHEDULE = Schedule(chunk=8, groups=1)
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<{{ m['content'] }}>{% else %}"
    "{% generation %}{{ m['content'] }}${% endgeneration %}{% endif %}{% endfor %}"
)
WORDS = ("the quick brown", "fox jumps over the lazy dog", "abc", "hello there", "x y z", "so on")
TEXT = [{"text": words} for words in WORDS]
PROMPTS = [{"prompt": words[:3], "completion": words[2:]} for words in WORDS]
CHAT = [
    {
        "messages": [
            {"role": ("user", "assistant")[turn % 2], "content": words[: 3 + 2 * turn]}
            for turn in range(4)
        ]
    }
    for words in WORDS
]
TIMES = ("step_time", "runtime", "per_second", "epoch", "total_flos")
OF_TRAINERS = {"peft_config", "compute_loss_func"}  # not of their arguments
Make = Callable[..., Any]


class Long(farspan.LongContext, SFTTrainer):
    """As docs/how-to/trl.md has it."""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setenv("CI", "1")  # TRL's word for: report nothing to anybody

    def trainer(kind: Any, rows: Any = TEXT, model: Any = None, **changes: Any) -> Any:
        given = {key: changes.pop(key) for key in OF_TRAINERS & changes.keys()}
        values: dict[str, Any] = {
            "max_steps": 3,
            "per_device_train_batch_size": 2,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "bf16": False,
        }
        if issubclass(kind, farspan.LongContext):
            given["schedule"] = SCHEDULE
        return kind(
            model=model or load_tiny(config=MODEL, dtype=torch.float64, seed=0),
            args=SFTConfig(**quiet(tmp_path, **values | changes)),
            train_dataset=Dataset.from_list(rows),
            eval_dataset=Dataset.from_list(rows[:3]),
            processing_class=character_tokenizer(TEMPLATE),
            **given,
        )

    return trainer


def logs(trainer: Any) -> dict[str, Tensor]:
    """All that was logged, by name, but for times."""
    found: dict[str, list[float]] = {}
    for entry in trainer.state.log_history:
        for name, value in entry.items():
            if not any(part in name for part in TIMES):
                found.setdefault(name, []).append(value)
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}


def assert_same_logs(found: Any, expected: Any, limit: float = 1e-5) -> None:
    found, expected = logs(found), logs(expected)
    assert found.keys() == expected.keys()
    one = torch.ones(1, dtype=torch.float64)  # a ratio of a first update is 0, or nearly
    for name, values in expected.items():
        assert_exact(torch.cat((found[name], one)), torch.cat((values, one)), limit)


CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "assistant": {"rows": CHAT, "assistant_only_loss": True},
    "completion": {"rows": PROMPTS},
    "whole prompt": {"rows": PROMPTS, "completion_only_loss": False},
    "packed": {"packing": True, "max_length": 40},
    "packed, split": {"packing": True, "max_length": 24, "packing_strategy": "bfd_split"},
    "packed, cut": {"packing": True, "max_length": 24, "packing_strategy": "wrapped"},
    "packed chat": {"rows": CHAT, "packing": True, "max_length": 50, "assistant_only_loss": True},
    "flat": {"padding_free": True, "max_length": None},
    "padded": {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "pad_to_multiple_of": 16,
    },
    "another loss": {"loss_type": "dft"},
    "adapters": {"peft_config": LoraConfig(r=4, target_modules="all-linear")},
}


@pytest.mark.parametrize(
    "case",
    part_of(list(CASES), "assistant", "packed chat", "padded", "adapters"),
)
def test_a_run_is_trl_s_own(make: Make, case: str) -> None:
    """Losses, held-out losses, norms of gradients and metrics; TRL has a head in float32."""
    plain, ours = make(SFTTrainer, **CASES[case]), make(Long, **CASES[case])
    for trainer in (plain, ours):
        trainer.train()
    assert {"loss", "grad_norm", "eval_loss", "entropy", "mean_token_accuracy"} <= logs(ours).keys()
    assert_same_logs(ours, plain)
    assert plain.args.gradient_checkpointing
    modules = list(ours.model.modules())
    assert not any(getattr(module, "gradient_checkpointing", False) for module in modules)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_defaults_train(
    make: Make, caplog: pytest.LogCaptureFixture, dtype: torch.dtype
) -> None:
    """Of float32 weights under autocast, as TRL does; those of bfloat16 compute in it anyway."""
    args = SFTConfig("unused", use_cpu=True)
    assert args.bf16
    assert args.gradient_checkpointing
    runs = []
    for kind in SFTTrainer, Long:
        model = load_tiny(config=MODEL, dtype=dtype, seed=0)
        trainer = make(kind, model=model, bf16=None, max_steps=1, eval_strategy="no")
        with caplog.at_level(logging.WARNING, "farspan"):
            trainer.train()
        runs.append(trainer)
    assert_same_logs(runs[1], runs[0], 2**-8)
    assert runs[1].model.forward.step.stages.autocast is (
        torch.bfloat16 if dtype is torch.float32 else None
    )
    said = [record.message for record in caplog.records if record.name.startswith("farspan")]
    assert said[0] == "gradient_checkpointing: turned off; the schedule decides what is recomputed"
    words = ["bf16: no autocast; steps compute in the weights' dtype, bfloat16"]
    assert said[1:] == words * (dtype is torch.bfloat16)


def test_a_default_that_cannot_be_met_is_said(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL turns autocast on by itself; who asks for it in plain arguments is told."""
    monkeypatch.setattr("tests.posttrain.test_trl.SCHEDULE", "auto")
    runs = []
    for kind, bf16 in ((SFTTrainer, False), (Long, None)):
        model = load_tiny(config=MODEL, dtype=torch.float32, seed=0)
        trainer = make(kind, model=model, bf16=bf16, max_steps=1, eval_strategy="no")
        with caplog.at_level(logging.WARNING, "farspan"):
            trainer.train()
        runs.append(trainer)
    assert_same_logs(runs[1], runs[0], 6e-6)  # sums of a hundred roundings of 6e-8
    said = [record.message for record in caplog.records if record.name.startswith("farspan")]
    assert any("bf16: no autocast: it needs a written schedule" in words for words in said)


@pytest.mark.parametrize("kind", [Long, type("Said", (Long,), {"plain_loss": True})])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor: .* needs 0.0, got 0.1"),
        ({"optim": "adalomo"}, "optim: adalomo updates weights within the Trainer's own backward"),
        ({"bf16_full_eval": True}, "bf16_full_eval: .* in the dtype of the weights"),
    ],
)
def test_another_loss_is_refused_by_name(
    make: Make, kind: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        make(kind, **changes)


def test_offloading_is_refused(tmp_path: Path) -> None:
    args = SFTConfig(str(tmp_path), activation_offloading=True, use_cpu=True)
    model = load_tiny(config=MODEL, dtype=torch.float32, seed=0)
    with pytest.raises(UnsupportedError, match=r"activation_offloading: .* the schedule decides"):
        farspan.Trainer(model=model, args=args, schedule=SCHEDULE)  # TRL's own needs a GPU for it


@pytest.mark.filterwarnings("ignore:`compute_loss_func` is deprecated:FutureWarning")
def test_a_loss_function_is_refused(make: Make) -> None:
    with pytest.raises(UnsupportedError, match="compute_loss_func: steps compute the plain loss"):
        make(Long, compute_loss_func=lambda *_, **__: torch.zeros(()))


def experts() -> Any:
    fields = {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    changed = MODEL | fields | {"model_type": "qwen2_moe", "num_experts_per_tok": 2}
    return load_tiny(config=changed, dtype=torch.float64, seed=0)


@pytest.mark.parametrize("coefficient", [None, 0.3, 0.0])
def test_the_routers_loss_is_that_of_trl(make: Make, coefficient: float | None) -> None:
    runs = [
        make(kind, model=experts(), router_aux_loss_coef=coefficient) for kind in (Long, SFTTrainer)
    ]
    for trainer in runs:
        with eager_experts(trainer.model):
            trainer.train()
    assert ("aux_loss" in runs[0].state.log_history[0]) == (coefficient != 0.0)
    assert_same_logs(*runs)


@pytest.mark.parametrize("said", [False, True])
def test_other_trainers_of_trl_are_refused(said: bool) -> None:
    other = type("Other", (farspan.LongContext, DistillationTrainer), {"plain_loss": said})
    with pytest.raises(
        UnsupportedError, match="compute_loss: TRL's DistillationTrainer computes its own loss"
    ):
        other(schedule=SCHEDULE)
