"""What Trainers evaluate and how they average, beside the plain Trainer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PrefixTuningConfig, PromptTuningConfig, TaskType, get_peft_model
from transformers import Trainer, TrainingArguments

import farspan
from farspan.data.config import DataConfig, SourceKind
from farspan.spec import UnsupportedError
from farspan.train.config import EvaluationConfig
from farspan.train.trainer import train
from tests.grids import crossed
from tests.numerics import assert_exact
from tests.posttrain.test_hugging_face import Batch, Make, logs, make, padded, rows
from tests.train.tiny import MODEL, Quiet, load_tiny, tiny_run

pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
__all__ = ["make"]  # a fixture


def told(features: list[dict[str, list[int]]]) -> Batch:
    """Rows whose first token is even are read alone, and those that begin with 255 by half."""
    batch = padded([{**f, "half": [0]} for f in features])
    for row, feature in enumerate(features):
        if feature["input_ids"][0] % 2 == 0:
            batch["labels"][row] = -100
        elif feature["input_ids"][0] == 255:
            batch["labels"][row, : len(feature["input_ids"]) // 2] = -100
    return batch


def beginning(*firsts: int) -> list[dict[str, list[int]]]:
    lengths = tuple(7 + 3 * place for place in range(len(firsts)))
    given = zip(rows(lengths), firsts, strict=True)
    return [{**row, "input_ids": [first, *row["input_ids"][1:]]} for row, first in given]


@pytest.mark.parametrize(
    ("firsts", "changes"),
    [
        ((1, 2, 255), {"per_device_eval_batch_size": 1}),  # the middle batch trains no token
        ((1, 2, 4, 6, 255), {"per_device_eval_batch_size": 2}),  # and the last has one row
        ((1, 2, 255, 3, 4), {"per_device_eval_batch_size": 3, "eval_accumulation_steps": 1}),
        ((1, 2, 3), {"per_device_eval_batch_size": 1, "logging_nan_inf_filter": False}),
        ((2, 4), {"per_device_eval_batch_size": 1}),
    ],
)
def test_an_evaluation_is_the_plain_trainer_s(
    make: Make, firsts: tuple[int, ...], changes: dict[str, Any]
) -> None:
    losses = []
    for kind in (Trainer, farspan.Trainer):
        trainer = make(kind, told, **changes)
        losses.append(trainer.evaluate(beginning(*firsts))["eval_loss"])
    plain, ours = torch.tensor(losses, dtype=torch.float64)
    assert torch.isnan(plain) == torch.isnan(ours)
    assert_exact(ours.nan_to_num(), plain.nan_to_num(), limit=1e-6)


@pytest.mark.parametrize(("scaled", "accepts"), crossed([None, True, False], [True, False]))
def test_means_are_those_that_the_trainer_asks_for(
    make: Make, scaled: bool | None, accepts: bool
) -> None:
    """`model_accepts_loss_kwargs` False: the mean of each batch, not of all tokens of an update;
    `loss_is_scaled_for_ga` says whether it is divided by their number."""
    both = make(Trainer), make()
    for trainer in both:
        trainer.model_accepts_loss_kwargs = accepts
        trainer.loss_is_scaled_for_ga = scaled
        trainer.train()
    for key in ("loss", "grad_norm", "eval_loss"):
        assert_exact(logs(both[1], key), logs(both[0], key), limit=1e-6)


@pytest.mark.parametrize("accepts", [True, False])
def test_a_short_last_window_of_accumulation_is_the_plain_trainer_s(
    make: Make, accepts: bool
) -> None:
    """Four batches by three: the last update has one, and it trains few tokens. Several sets to
    evaluate on have a loss each."""
    changes = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 3}
    both = make(Trainer, **changes), make(**changes)
    for trainer in both:
        trainer.model_accepts_loss_kwargs = accepts
        trainer.eval_dataset = {"one": beginning(1, 2, 255), "two": beginning(3, 4)}
        trainer.train()
    keys = ("loss", "grad_norm", "eval_one_loss", "eval_two_loss")
    for key in keys:
        plain, ours = logs(both[0], key), logs(both[1], key)
        assert len(plain) > 1
        assert_exact(ours, plain, limit=1e-6)


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
def test_tokens_of_prompt_tuning_are_named_when_a_trainer_is_made(
    tmp_path: Path, kind: Any
) -> None:
    model = get_peft_model(
        load_tiny(config=MODEL, dtype=torch.float32, seed=0),
        kind(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2),
    )
    with pytest.raises(UnsupportedError, match=r"its \w+Config \(is_prompt_learning\) puts tokens"):
        farspan.Trainer(model=model, args=TrainingArguments(str(tmp_path), report_to=[]))


def test_a_run_s_held_out_loss_is_the_mean_over_its_trained_tokens(tmp_path: Path) -> None:
    """That of the plain Trainer on all rows as one batch; a row without trained tokens is nothing,
    and accumulation changes nothing."""
    for name, firsts in (("train", (1, 3, 255, 5)), ("held", (255, 2, 1, 4, 3))):
        batch = told(beginning(*firsts))
        lengths = batch["attention_mask"].sum(1).tolist()
        lines = [
            json.dumps({key: batch[key][row, :n].tolist() for key in ("input_ids", "labels")})
            for row, n in enumerate(lengths)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    data = DataConfig(
        source=SourceKind.JSONL,
        path=str(tmp_path / "train.jsonl"),
        held_out_path=str(tmp_path / "held.jsonl"),
        tokenizer="bytes",
        cache=str(tmp_path / "cache"),
    )
    run = tiny_run(
        tmp_path,
        data=data,
        evaluation=EvaluationConfig(every=1, on_start=True, sequences=9),
        steps=3,
    )
    train(run, reporter=Quiet())
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    found = next(json.loads(line) for line in lines if "heldout_loss" in line)
    plain = Trainer(
        model=load_tiny(config=MODEL, dtype=torch.float32, seed=run.seed),
        args=TrainingArguments(
            str(tmp_path / "plain"),
            per_device_eval_batch_size=5,
            report_to=[],
            use_cpu=True,
            remove_unused_columns=False,
        ),
        data_collator=told,
        eval_dataset=beginning(255, 2, 1, 4, 3),
    )
    wanted = plain.evaluate()["eval_loss"]
    assert_exact(torch.tensor(found["heldout_loss"]), torch.tensor(wanted), limit=1e-6)
    assert found["step"] == 0


@pytest.mark.filterwarnings("ignore:.*label_smoothing:FutureWarning")
@pytest.mark.parametrize("accepts", [True, False])
def test_smoothed_labels_are_the_plain_trainer_s(make: Make, accepts: bool) -> None:
    both = [make(kind, label_smoothing_factor=0.3) for kind in (Trainer, farspan.Trainer)]
    for trainer in both:
        trainer.model_accepts_loss_kwargs = accepts
        trainer.train()
    for key in ("loss", "grad_norm", "eval_loss"):
        assert_exact(logs(both[1], key), logs(both[0], key), limit=1e-6)


def likeliest(logits: Any, labels: Any) -> Any:
    known = labels != -100
    sums = torch.where(known, logits.float().logsumexp(-1), torch.nan)
    return logits.argmax(-1), sums[..., None], logits.argmax(-1) == labels


def metrics_of(prediction: Any) -> dict[str, float]:
    (found, sums, _), labels = prediction.predictions, prediction.label_ids
    right = (found[:, :-1] == labels[:, 1:]) & (labels[:, 1:] != -100)
    return {"accuracy": float(right.mean()), "sums": float(np.nanmean(sums))}


def test_metrics_and_predictions_are_the_plain_trainer_s(make: Make) -> None:
    """Their function gets some tokens at a time, whose results are put together."""
    both = [make(kind, told) for kind in (Trainer, farspan.Trainer)]
    found = []
    for trainer in both:
        trainer.compute_metrics = metrics_of
        trainer.preprocess_logits_for_metrics = likeliest
        trainer.evaluate(beginning(1, 2, 255))
        found.append(trainer.predict(beginning(1, 2, 255, 3)))
        assert trainer.preprocess_logits_for_metrics is likeliest
    plain, ours = found
    for name in ("test_accuracy", "test_sums", "test_loss"):
        assert ours.metrics[name] == pytest.approx(plain.metrics[name], rel=1e-6), name
    for part, other in zip(ours.predictions, plain.predictions, strict=True):
        assert part.dtype == other.dtype
        ours_of, plain_of = (torch.from_numpy(x).double().nan_to_num() for x in (part, other))
        assert_exact(ours_of, plain_of, 1e-6)
    assert (ours.label_ids == plain.label_ids).all()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, _: x.argmax(-1) + x.sum().long(), "a token's result depends on other tokens"),
        (lambda x, _: x[..., 0] - x[..., 0].mean(), "a token's result depends on other tokens"),
        (lambda x, _: x.mean(1), r"expected tensors \[batch, tokens, ...\]"),
        (lambda x, _: 2**25 + x.argmax(-1), "whole numbers above 16,777,216 would be rounded"),
    ],
)
def test_functions_of_logits_that_cannot_run_in_pieces(
    make: Make, function: Any, message: str
) -> None:
    trainer = make()
    trainer.compute_metrics, trainer.preprocess_logits_for_metrics = metrics_of, function
    with pytest.raises(UnsupportedError, match=message):
        trainer.evaluate(beginning(1, 2, 255))


def test_metrics_that_cannot_be_computed_are_named_before_the_first_step(make: Make) -> None:
    with pytest.raises(UnsupportedError, match="preprocess_logits_for_metrics: missing"):
        make(compute_metrics=metrics_of)
    make(compute_metrics=metrics_of, eval_strategy="no")
