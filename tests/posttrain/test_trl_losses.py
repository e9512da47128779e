"""TRL's trainers with losses of their own, by farspan's steps: their losses, norms of gradients and
metrics, beside those of the plain trainers."""

import copy
import gc
import runpy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForSequenceClassification
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTTrainer,
)

import farspan
from farspan.hf.probe import Float64Mode
from farspan.posttrain import trainer as hf_trainer
from farspan.spec import Schedule, Tier, UnsupportedError
from tests.data.characters import character_tokenizer
from tests.grids import exhaustive, part_of
from tests.numerics import assert_exact
from tests.posttrain.arguments import quiet
from tests.posttrain.test_trl import TEMPLATE, WORDS, assert_same_logs
from tests.train.tiny import MODEL, load_tiny

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*gradient_checkpointing.*:FutureWarning",
        "ignore:.*label_smoothing:FutureWarning",
        "ignore:.*precompute_ref:UserWarning",
    ),
    pytest.mark.skipif(
        not hasattr(__import__("trl.trainer.dpo_trainer").trainer.dpo_trainer, "add_fused_lm_head"),
        reason="TRL before 1.16 asks its model for logits",
    ),
]
SCHEDULE = Schedule(chunk=8, groups=2)
PAIRS = [
    {"prompt": words[:3], "chosen": words[2:], "rejected": words[::-1][: 4 + i]}
    for i, words in enumerate(WORDS)
]
SINGLES = [
    {"prompt": words[:3], "completion": words[2:], "label": i % 2 == 0}
    for i, words in enumerate(WORDS)
]
PROMPTS = [{"prompt": words[:4]} for words in WORDS]
LORA = LoraConfig(r=4, target_modules="all-linear")
Make = Callable[..., Any]


def reward_length(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 7) for text in completions]


def scorer() -> Any:
    fields: dict[str, Any] = MODEL | {"num_labels": 1, "pad_token_id": 0}
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**fields)).double()


KINDS: dict[Any, tuple[Any, list[dict[str, Any]], dict[str, Any]]] = {
    DPOTrainer: (DPOConfig, PAIRS, {}),
    KTOTrainer: (KTOConfig, SINGLES, {}),
    RewardTrainer: (RewardConfig, PAIRS, {}),
    GRPOTrainer: (GRPOConfig, PROMPTS, {"num_generations": 2, "max_completion_length": 6}),
    RLOOTrainer: (RLOOConfig, PROMPTS, {"num_generations": 2, "max_completion_length": 6}),
}


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setenv("CI", "1")  # TRL's word for: report nothing to anybody

    def trainer(kind: Any, *, is_long: bool, **changes: Any) -> Any:
        config, rows, further = KINDS[kind]
        model = changes.pop("model", None) or (
            scorer()
            if kind is RewardTrainer
            else load_tiny(config=MODEL, dtype=torch.float64, seed=0)
        )
        given: dict[str, Any] = {"peft_config": changes.pop("peft_config", None)}
        if kind in (DPOTrainer, KTOTrainer) and given["peft_config"] is None:
            given["ref_model"] = copy.deepcopy(model)
        if kind in (GRPOTrainer, RLOOTrainer):
            given["reward_funcs"] = reward_length
            typed: Any = model
            typed.save_pretrained(tmp_path / "model")  # from where the reference is read
            typed.config._name_or_path = str(tmp_path / "model")
        if is_long:
            kind = type("Long", (farspan.LongContext, kind), {})
            given["schedule"] = changes.pop("schedule", SCHEDULE)
        changes.pop("schedule", None)
        evaluates = config in (DPOConfig, KTOConfig, RewardConfig)
        values: dict[str, Any] = {
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "eval_strategy": "steps" if evaluates else "no",
            "eval_steps": 2,
            "bf16": False,
        }
        return kind(
            model=model,
            args=config(**quiet(tmp_path, **values | further | changes)),
            train_dataset=Dataset.from_list(rows),
            eval_dataset=Dataset.from_list(rows[:4]) if evaluates else None,
            processing_class=character_tokenizer(TEMPLATE),
            **given,
        )

    return trainer


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "dpo": (DPOTrainer, {}),
    "dpo, accumulated": (DPOTrainer, {"gradient_accumulation_steps": 2}),
    "dpo, adapters": (DPOTrainer, {"peft_config": LORA}),
    "dpo, stored": (DPOTrainer, {"precompute_ref_log_probs": True}),
    "dpo, packed": (DPOTrainer, {"padding_free": True}),
    "dpo, weighted": (DPOTrainer, {"use_weighting": True}),
    "ipo": (DPOTrainer, {"loss_type": ["ipo"]}),
    "apo and sft": (DPOTrainer, {"loss_type": ["apo_zero", "sft"], "loss_weights": [1.0, 0.5]}),
    "kto": (KTOTrainer, {}),
    "kto, adapters": (KTOTrainer, {"peft_config": LORA}),
    "reward": (RewardTrainer, {}),
    "reward, centred": (
        RewardTrainer,
        {"center_rewards_coefficient": 0.1, "gradient_accumulation_steps": 2},
    ),
    "grpo": (GRPOTrainer, {}),
    "grpo, kl": (GRPOTrainer, {"beta": 0.1, "temperature": 0.8, "num_iterations": 2}),
    "grpo, entropy": (GRPOTrainer, {"entropy_coef": 0.1}),
    "grpo, adapters": (GRPOTrainer, {"beta": 0.1, "peft_config": LORA}),
    "rloo": (RLOOTrainer, {}),
}


# All the losses that TRL names, and what else its own tests vary.
CASES |= {
    f"dpo, {loss}": (DPOTrainer, {"loss_type": [loss]})
    for loss in (
        *("hinge", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot"),
        *("aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
    )
}
CASES["dpo, exo_pair"][1]["label_smoothing"] = 1e-3
CASES["dpo, robust"][1]["label_smoothing"] = 0.1
CASES |= {
    f"dpo, {divergence}": (DPOTrainer, {"f_divergence_type": divergence})
    for divergence in ("forward_kl", "js_divergence")
}
CASES |= {
    "dpo, short answers": (DPOTrainer, {"ld_alpha": 0.5}),
    "dpo, moving reference": (DPOTrainer, {"sync_ref_model": True, "ref_model_sync_steps": 1}),
    "dpo, cut": (DPOTrainer, {"max_length": 8, "pad_to_multiple_of": 16}),
    "kto, apo": (KTOTrainer, {"loss_type": "apo_zero_unpaired"}),
    "kto, weights": (KTOTrainer, {"desirable_weight": 0.5, "undesirable_weight": 2.0}),
    "kto, stored": (KTOTrainer, {"precompute_ref_log_probs": True}),
    "reward, adapters": (
        RewardTrainer,
        {"peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS")},
    ),
}
CASES |= {
    f"grpo, {loss}": (GRPOTrainer, {"loss_type": loss, "num_iterations": 2})
    for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo")
}
CASES |= {
    "grpo, sequences": (
        GRPOTrainer,
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "num_iterations": 2},
    ),
    "grpo, high entropy": (GRPOTrainer, {"top_entropy_quantile": 0.5}),
    "grpo, clipped higher": (GRPOTrainer, {"epsilon_high": 0.3, "num_iterations": 2}),
    "rloo, kl": (RLOOTrainer, {"beta": 0.1, "num_iterations": 2}),
}


@pytest.mark.parametrize(
    "case",
    part_of(list(CASES), "dpo, accumulated", "kto", "grpo, kl"),
)
def test_a_run_is_trl_s_own(make: Make, case: str) -> None:
    """All that is logged; TRL computes log-probabilities in float32."""
    kind, changes = CASES[case]
    runs = []
    for is_long in (False, True):
        torch.manual_seed(0)
        trainer = make(kind, is_long=is_long, **changes)
        torch.manual_seed(1)
        trainer.train()
        runs.append(trainer)
    assert_same_logs(runs[1], runs[0])


def test_rloo_has_the_gradients_of_its_formula(make: Make) -> None:
    """In float64: the clipped ratio of whole answers, by the model's own logits and autograd."""
    trainer = make(RLOOTrainer, is_long=True)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 200, (4, 14), generator=draw)
    masks = torch.ones(4, 5), torch.tensor([[1.0] * n + [0.0] * (9 - n) for n in (9, 4, 7, 1)])
    plain: Any = load_tiny(config=MODEL, dtype=torch.float64, seed=0)
    plain.set_attn_implementation("eager")
    read = torch.cat(masks, 1)
    with Float64Mode():
        logits = plain(input_ids=ids, attention_mask=read).logits[:, 4:-1] / trainer.temperature
    logps = logits.log_softmax(-1).gather(2, ids[:, 5:, None])[..., 0]
    sums = (logps * masks[1]).sum(1)
    # Within the clipped range, above it and below it, and above it with a falling answer.
    old = sums.detach() - torch.tensor([0.1, 0.5, -0.4, 0.6], dtype=torch.float64)
    advantages = torch.tensor([0.7, 1.3, -0.9, -1.1], dtype=torch.float64)
    ratio = (sums - old).exp()
    expected = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    with Float64Mode():
        expected.backward()
    given = {"prompt_ids": ids[:, :5], "completion_ids": ids[:, 5:], "old_logps": old}
    given |= {"prompt_mask": masks[0].long(), "completion_mask": masks[1].long()}
    with Float64Mode():
        found = trainer._compute_loss(trainer.model, {**given, "advantages": advantages})
        found.backward()
    assert_exact(found.detach(), expected.detach())
    for one, other in zip(trainer.model.parameters(), plain.parameters(), strict=True):
        assert_exact(one.grad, other.grad)


@pytest.mark.parametrize(
    "schedule", [exhaustive("auto"), Schedule(chunk=8, groups=1, weights=Tier.HOST)]
)
def test_schedules_of_two_models(make: Make, schedule: Any) -> None:
    """The reference runs by the same schedule, or by one of its own that was planned."""
    runs = [make(DPOTrainer, is_long=is_long, schedule=schedule) for is_long in (False, True)]
    for trainer in runs:
        torch.manual_seed(1)
        trainer.train()
    assert_same_logs(runs[1], runs[0])


def test_trainers_derived_from_one_that_is_known_are_refused() -> None:
    """TRL derives GKDTrainer from SFTTrainer; its loss needs logits."""
    derived = type("GKDTrainer", (SFTTrainer,), {"compute_loss": None, "__module__": "trl.gkd"})
    with pytest.raises(
        UnsupportedError, match="compute_loss: TRL's GKDTrainer computes its own loss"
    ):
        type("Long", (farspan.LongContext, derived), {})(schedule=SCHEDULE)


def count_values(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every forward of a step to come whether it has a backward."""
    asked: list[bool] = []
    values = farspan.Step.values

    def counted(self: farspan.Step, *given: Any, **further: Any) -> Any:
        asked.append(torch.is_grad_enabled())
        return values(self, *given, **further)

    monkeypatch.setattr(farspan.Step, "values", counted)
    return asked


@pytest.mark.parametrize("case", ["dpo", "kto, adapters"])
def test_no_forward_runs_again(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """The reference is asked first, and the model's forward stands until its backward."""
    asked = count_values(monkeypatch)
    kind, changes = CASES[case]
    trainer = make(kind, is_long=True, max_steps=1, eval_strategy="no", **changes)
    with caplog.at_level("INFO", "farspan"):
        trainer.train()
    # KTO asks for the divergence first, of both.
    assert asked == ([False, True] if kind is DPOTrainer else [False, False, False, True])
    assert "runs again" not in caplog.text


def test_stored_references_are_a_step_s(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL computes them while the trainer is made."""
    asked = count_values(monkeypatch)
    make(DPOTrainer, is_long=True, precompute_ref_log_probs=True, eval_strategy="no")
    assert len(asked) == 3 + 2  # batches of two, of six pairs and of four held out


def test_generation_is_the_model_s_own(make: Make) -> None:
    trainer = make(GRPOTrainer, is_long=True)
    ids = torch.tensor([[5, 6, 7]])
    found = trainer.model.generate(ids, max_new_tokens=4, do_sample=False)
    plain: Any = load_tiny(config=MODEL, dtype=torch.float64, seed=0)
    assert torch.equal(found, plain.generate(ids, max_new_tokens=4, do_sample=False))


def test_a_copy_of_the_model_is_a_plain_one(make: Make) -> None:
    """A reference is often a copy of what was trained before."""
    trainer = make(DPOTrainer, is_long=True)
    copied = copy.deepcopy(trainer.model)
    plain: Any = load_tiny(config=MODEL, dtype=torch.float64, seed=1)
    copied.load_state_dict(plain.state_dict())
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(copied(input_ids=ids).logits, plain(input_ids=ids).logits)
    make(DPOTrainer, is_long=True, model=trainer.model).train()


@pytest.mark.parametrize("kind", [DPOTrainer, RewardTrainer])
def test_a_model_outlives_its_trainer(make: Make, kind: Any) -> None:
    """The optimizer's states and a step's memory go with the trainer."""
    trainer = make(kind, is_long=True, max_steps=1, eval_strategy="no")
    trainer.train()
    model, gone = trainer.model, weakref.ref(trainer)
    forward = model.forward
    assert forward.step is not None
    del trainer
    gc.collect()
    assert gone() is None
    assert forward.step is None
    model(input_ids=torch.tensor([[5, 6, 7]]))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (DPOTrainer, {"label_smoothing_factor": 0.1}, "label_smoothing_factor: .* needs 0.0"),
        (GRPOTrainer, {"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32: .* needs False"),
    ],
)
def test_what_a_step_does_not_compute_is_refused(
    make: Make, kind: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        make(kind, is_long=True, **changes)


def test_predictions_are_refused_but_for_rewards(make: Make) -> None:
    for kind in DPOTrainer, RewardTrainer:
        trainer = make(kind, is_long=True)
        rows = trainer.get_eval_dataloader()
        if kind is DPOTrainer:
            with pytest.raises(UnsupportedError, match="outputs: evaluation of TRL's trainers"):
                trainer.prediction_step(trainer.model, next(iter(rows)), prediction_loss_only=False)
        else:
            plain = make(kind, is_long=False)
            assert_exact(
                trainer.prediction_step(trainer.model, next(iter(rows)), False)[1],
                plain.prediction_step(plain.model, next(iter(rows)), False)[1],
            )


def test_left_padding_of_learned_positions_is_refused() -> None:
    """Every generation pads left; GPT-2's positions count the padding."""
    fields: dict[str, Any] = {"model_type": "gpt2", "vocab_size": 264, "n_positions": 64}
    fields |= {"n_embd": 16, "n_layer": 2, "n_head": 2}
    model: Any = load_tiny(config=fields, dtype=torch.float64, seed=0)
    ids = torch.arange(8).reshape(2, 4)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    batch = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    with pytest.raises(UnsupportedError, match=r"attention_mask: gpt2 has no RoPE"):
        hf_trainer._batch(batch, model.config)
    hf_trainer._batch(batch | {"attention_mask": mask.flip(1)}, model.config)


@pytest.mark.parametrize("loss", part_of(["sft", "dpo", "kto", "reward", "grpo"], "dpo", "grpo"))
def test_the_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str) -> None:
    monkeypatch.setenv("CI", "1")
    path = Path(__file__).resolve().parents[2] / "examples" / "trl" / "train.py"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main = runpy.run_path(str(path))["main"]
    trainer = main([loss, "--steps", "1", "--chunk", "64", "--folder", str(tmp_path)])
    assert trainer.state.global_step == 1
    assert next(iter(trainer._forwards)).step is not None
