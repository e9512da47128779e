"""Runs of transformers' Trainer by farspan's steps are those of the plain one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

import farspan
from farspan.spec import LayerSpec, Schedule, Sparse, Tier, UnsupportedError
from tests.grids import part_of
from tests.numerics import assert_exact
from tests.oracles.masks import add_noise
from tests.posttrain.arguments import quiet
from tests.sparse.test_index import random_index
from tests.train.tiny import MODEL, load_tiny
from tests.zoo import GPT2

pytest.importorskip("accelerate")

SCHEDULE = Schedule(chunk=8, groups=1)
Batch = dict[str, Tensor]
Make = Callable[..., Any]


def rows(lengths: tuple[int, ...] = (20, 13, 17, 9, 24, 11, 5, 16)) -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(0)
    return [
        {"input_ids": torch.randint(256, (n,), generator=draw).tolist(), "half": [n // 2]}
        for n in lengths
    ]


def padded(features: list[dict[str, list[int]]], left: bool = False) -> Batch:
    """A row each; of every second one the first half is a prompt."""
    longest = max(len(f["input_ids"]) for f in features)
    ids, labels = torch.zeros(2, len(features), longest, dtype=torch.long)
    labels.fill_(-100)
    mask = torch.zeros_like(ids)
    for row, feature in enumerate(features):
        own = torch.tensor(feature["input_ids"])
        span = slice(-len(own), None) if left else slice(0, len(own))
        ids[row, span], mask[row, span] = own, 1
        labels[row, span] = own
        if row % 2:
            labels[row, span][: feature["half"][0]] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def flattened(features: list[dict[str, list[int]]]) -> Batch:
    """Documents behind each other, as a padding-free collator has them."""
    ids = torch.cat([torch.tensor(f["input_ids"]) for f in features])[None]
    positions = torch.cat([torch.arange(len(f["input_ids"])) for f in features])[None]
    labels = ids.masked_fill(positions == 0, -100)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def trainer(kind: Any = farspan.Trainer, collate: Any = padded, **changes: Any) -> Any:
        values: dict[str, Any] = {
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 3,
            "gradient_accumulation_steps": 2,
            # AdamW divides a gradient by its size: by default the rounding of a norm moves weights
            # whose gradients are near 1e-8 by a hundredth of a step.
            "adam_epsilon": 1e-5,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "remove_unused_columns": False,
        }
        own = {"schedule": SCHEDULE} if issubclass(kind, farspan.LongContext) else {}
        chosen = ("compute_metrics", "schedule", "selector")
        given = {key: changes.pop(key) for key in chosen if key in changes}
        model = changes.pop("model", None) or load_tiny(config=MODEL, dtype=torch.float64, seed=0)
        return kind(
            model=model,
            args=TrainingArguments(**quiet(tmp_path / kind.__module__, **values | changes)),
            data_collator=collate,
            train_dataset=rows(),
            eval_dataset=rows((7, 19, 12)),
            **own | given,
        )

    return trainer


def logs(trainer: Any, *keys: str) -> Tensor:
    found = [entry[key] for entry in trainer.state.log_history for key in keys if key in entry]
    return torch.tensor(found, dtype=torch.float64)


def padded_left(features: list[dict[str, list[int]]]) -> Batch:
    """The plain Trainer would have padding predict the first token of a row."""
    batch = padded(features, left=True)
    begins = batch["attention_mask"].cumsum(1) == 1
    return batch | {"labels": batch["labels"].masked_fill(begins, -100)}


@pytest.mark.parametrize("collate", part_of([padded, padded_left, flattened], flattened))
def test_a_run_is_the_plain_trainer_s(make: Make, collate: Any) -> None:
    """Losses, norms of gradients and weights. Norms are computed in float32, hence the limits."""
    plain, ours = make(Trainer, collate), make(collate=collate)
    for trainer in (plain, ours):
        trainer.train()
    for key, count in (("loss", 2), ("grad_norm", 2), ("eval_loss", 2)):
        found, expected = logs(ours, key), logs(plain, key)
        assert len(found) == count
        assert_exact(found, expected, limit=1e-6)
    for one, other in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        assert_exact(one.detach(), other.detach(), limit=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("accepts", [True, False])
def test_a_loss_is_divided_by_transformers_count(
    make: Make, smoothing: float, accepts: bool
) -> None:
    """Of GPT-2, whose loss it does not know to shift labels, each row's first one as well."""
    changes = {**GPT2, "model_type": "gpt2", "vocab_size": 256}
    trainers = [
        make(
            kind,
            model=load_tiny(config=changes, dtype=torch.float64, seed=0),
            label_smoothing_factor=smoothing,
        )
        for kind in (Trainer, farspan.Trainer)
    ]
    for trainer in trainers:
        trainer.model_accepts_loss_kwargs = accepts
        trainer.train()
    plain, ours = trainers
    assert not getattr(plain, "_loss_shifts_labels", False)
    for key in ("loss", "grad_norm", "eval_loss"):
        assert_exact(logs(ours, key), logs(plain, key), limit=1e-6)


def test_pages_are_chosen_by_its_index(make: Make) -> None:
    """A step without one is refused and says so; another index gives other losses."""
    sparse = Sparse(page=4, budget=4, recent=4, sinks=0, selector="index", index_dim=3)
    schedule = replace(SCHEDULE, sparse=sparse)
    losses = []
    for seed in (0, 1):
        index = random_index((LayerSpec(2, 1, 8, 8),) * 2, 3, seed)
        trainer = make(schedule=schedule, selector=index, max_steps=1)
        trainer.train()
        losses.append(logs(trainer, "loss", "eval_loss"))
    assert not torch.equal(*losses)
    with pytest.raises(UnsupportedError, match=r"^selector: sparse.selector is index.* give one"):
        make(schedule=schedule).train()


def test_weights_may_stay_in_main_memory(make: Make) -> None:
    """The Trainer leaves them there, and its losses and weights are the same bits."""
    trainers = make(), make(schedule=replace(SCHEDULE, weights=Tier.HOST))
    for trainer in trainers:
        trainer.train()
    resident, streamed = trainers
    for key in ("loss", "grad_norm", "eval_loss"):
        assert torch.equal(logs(streamed, key), logs(resident, key))
    pairs = zip(streamed.model.parameters(), resident.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert not streamed.accelerator.device_placement
    for trainer, device in ((streamed, "cpu"), (resident, "meta")):
        trainer._move_model_to_device(trainer.model, torch.device("meta"))
        assert {p.device.type for p in trainer.model.parameters()} == {device}


class Noisy(Trainer):
    """The plain Trainer, with the noise of farspan's steps."""

    number = 0

    def training_step(self, *given: Any) -> Tensor:
        handle = add_noise(self.model, 40.0, self.args.seed, self.number)
        self.number += 1
        found = super().training_step(*given)
        handle.remove()
        return found


def test_noise_of_embeddings(make: Make) -> None:
    """Of every call another, of evaluations none, whatever the schedule."""
    plain = make(Noisy)
    ours = make(neftune_noise_alpha=40.0, schedule=Schedule(chunk=3, groups=2))
    for trainer in (plain, ours):
        trainer.train()
    found, wanted = (logs(t, "loss", "grad_norm", "eval_loss") for t in (ours, plain))
    assert_exact(found, wanted, limit=1e-6)
    going_on = make(neftune_noise_alpha=40.0)
    going_on.state.global_step, drawn = 2, []
    for _ in range(2):
        going_on._count_draws()
        drawn.append(going_on._farspan().drawn)
    assert drawn == [4, 5]


def test_autocast_is_the_plain_trainer_s(make: Make) -> None:
    """Losses and norms in training and evaluation, within roundings of bfloat16."""
    plain, ours = (
        make(kind, model=load_tiny(config=MODEL, dtype=torch.float32, seed=0), bf16=True)
        for kind in (Trainer, farspan.Trainer)
    )
    for trainer in (plain, ours):
        trainer.train()
    found, wanted = (logs(t, "loss", "grad_norm", "eval_loss") for t in (ours, plain))
    assert_exact(found, wanted, limit=2**-8)
    assert ours._farspan().stages.autocast is torch.bfloat16


def test_autocast_of_a_planned_schedule_is_refused(make: Make) -> None:
    trainer = make(
        model=load_tiny(config=MODEL, dtype=torch.float32, seed=0), bf16=True, schedule="auto"
    )
    with pytest.raises(UnsupportedError, match=r"^bf16: autocast: it needs a written schedule"):
        trainer.train()
    with pytest.raises(UnsupportedError, match=r"^bf16: autocast is for float32 weights, and th"):
        make(bf16=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"fp16": True},
            r"fp16: .* needs False, got True: load the model with dtype=torch\.bfloat16",
        ),
        ({"use_liger_kernel": True}, "use_liger_kernel: .* farspan has its own kernels"),
        (
            {"optim": "galore_adamw_layerwise", "optim_target_modules": ["mlp"]},
            "optim: galore_adamw_layerwise updates weights within the Trainer's own backward",
        ),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(
    make: Make, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        make(**changes)


def test_a_step_puts_the_model_in_its_mode(make: Make) -> None:
    trainer = make(gradient_accumulation_steps=1)
    trainer.train()
    batch = padded(rows()[:2])
    trainer.model.train()
    trainer.prediction_step(trainer.model, batch, prediction_loss_only=True)
    assert not trainer.model.training
    trainer.training_step(trainer.model, batch)
    assert trainer.model.training


def without(key: str, **others: Tensor) -> Any:
    def collate(features: list[dict[str, list[int]]]) -> Batch:
        return {k: v for k, v in padded(features).items() if k != key} | others

    return collate


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (without("labels"), "labels: the batch has none; use a collator that makes them"),
        (without("", pixel_values=torch.zeros(1)), "inputs: a step does not read pixel_values"),
        (without("", attention_mask=torch.ones(2, 1, 4, 4)), "attention_mask: expected"),
        (
            without("attention_mask", position_ids=torch.tensor([[5, 6]])),
            "position_ids: row 0 has 5 at token 0, expected 0: they count from 0 in every document",
        ),
        (
            without("attention_mask", position_ids=torch.zeros(3, 2, 2)),
            r"position_ids: expected \[2, 2\], got \[3, 2, 2\]",
        ),
        (
            without("attention_mask", seq_idx=torch.zeros(2, 2)),
            "seq_idx: farspan tells documents apart by position_ids that restart",
        ),
    ],
)
def test_a_batch_that_means_something_else_is_refused(
    make: Make, collate: Any, message: str
) -> None:
    def short(features: list[dict[str, list[int]]]) -> Batch:
        same = [{"input_ids": f["input_ids"][:2], "half": [1]} for f in features]
        batch: Batch = collate(same)
        return batch

    with pytest.raises(UnsupportedError, match=message):
        make(collate=short).train()


def test_a_model_that_is_made_anew_is_the_one_that_is_trained(make: Make) -> None:
    trainer = make()
    trainer.evaluate()
    other = trainer.model_wrapped = trainer.model = load_tiny(
        config=MODEL, dtype=torch.float64, seed=1
    )
    before = [parameter.detach().clone() for parameter in other.parameters()]
    trainer.train()
    assert (logs(trainer, "grad_norm") > 0).all()
    assert not any(torch.equal(*pair) for pair in zip(before, other.parameters(), strict=True))


def test_a_loss_of_its_own_is_refused(make: Make) -> None:
    class Other(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    class Long(farspan.LongContext, Other):
        pass

    class Plain(Long):
        plain_loss = True

    with pytest.raises(UnsupportedError, match="compute_loss: Long overrides it"):
        make(Long)
    make(Plain)


@pytest.mark.parametrize("name", ["training_step", "prediction_step"])
def test_a_step_of_its_own_is_refused(make: Make, name: str) -> None:
    other = type("Other", (Trainer,), {name: getattr(Trainer, name)})
    long = type("Long", (farspan.LongContext, other), {})
    with pytest.raises(
        UnsupportedError, match=f"{name}: Long overrides it, and a farspan step does not"
    ):
        make(long)
    make(type("Plain", (long,), {"plain_loss": True}))
    make(type("Above", (farspan.Trainer,), {name: getattr(farspan.Trainer, name)}))


def test_another_loss_that_is_asked_for_later_is_refused(make: Make) -> None:
    trainer = make()
    trainer.compute_loss_func = lambda *_, **__: torch.zeros(())
    with pytest.raises(UnsupportedError, match="compute_loss_func: steps compute the plain loss"):
        trainer.train()


def packed_and_padded(features: list[dict[str, list[int]]]) -> Batch:
    """Two documents in a row and padding behind them, whose labels and positions mean nothing."""
    batch = flattened(features)
    pad = torch.nn.functional.pad
    mask = torch.ones_like(batch["input_ids"])
    return {
        "input_ids": pad(batch["input_ids"], (0, 5)),
        "labels": pad(batch["labels"], (0, 5), value=7),
        "position_ids": pad(batch["position_ids"], (0, 5)),
        "attention_mask": pad(mask, (0, 5)),
    }


def test_padding_behind_packed_documents_is_nothing(make: Make) -> None:
    padded_too, plain = make(collate=packed_and_padded), make(collate=flattened)
    for trainer in (padded_too, plain):
        trainer.train()
    assert_exact(logs(padded_too, "loss"), logs(plain, "loss"), limit=1e-6)
