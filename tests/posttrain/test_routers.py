"""Losses of routers in trainers: those of transformers' Trainer and of TRL's."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from transformers import Trainer
from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RLOOTrainer

import farspan
from farspan.hf.attention_interface import eager_experts
from tests.grids import exhaustive
from tests.numerics import assert_exact
from tests.posttrain.test_hugging_face import Make, logs, make
from tests.posttrain.test_trl import assert_same_logs, experts
from tests.posttrain.test_trl_losses import make as make_trl

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing.*:FutureWarning",
    "ignore:.*label_smoothing:FutureWarning",
    "ignore:.*precompute_ref:UserWarning",
)
__all__ = ["make", "make_trl"]  # fixtures


def with_loss() -> Any:
    model = experts()
    model.config.output_router_logits, model.router_aux_loss_coef = True, 0.3
    return model


def in_double(trainer: Any) -> ExitStack:
    """Experts that run one by one, as torch's grouped product has no float64."""
    stack = ExitStack()
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is not None:
            stack.enter_context(eager_experts(model))
    return stack


@pytest.mark.parametrize("accepts", [True, False])
def test_a_trainer_adds_the_loss_of_its_model(make: Make, accepts: bool) -> None:
    """By batch or over the batches of an update, without padding, also in evaluation."""
    both = [make(kind, model=with_loss()) for kind in (Trainer, farspan.Trainer)]
    for trainer in both:
        trainer.model_accepts_loss_kwargs = accepts
        with in_double(trainer):
            trainer.train()
    for key in ("loss", "grad_norm", "eval_loss"):
        assert_exact(logs(both[1], key), logs(both[0], key), limit=1e-6)
    with in_double(both[1]):
        step = both[1]._farspan()
        ids = torch.arange(1, 9)[None]
        step.evaluate(ids, ids)
        assert 1.9 < float(step.aux_loss) < 3


@pytest.mark.parametrize(
    "kind", [DPOTrainer, exhaustive(KTOTrainer), GRPOTrainer, exhaustive(RLOOTrainer)]
)
def test_trainers_of_trl_get_the_loss(make_trl: Any, kind: Any) -> None:
    runs = []
    for is_long in (True, False):
        torch.manual_seed(0)  # of generation
        trainer = make_trl(kind, is_long=is_long, model=experts(), router_aux_loss_coef=0.3)
        torch.manual_seed(1)
        with in_double(trainer):
            trainer.train()
        runs.append(trainer)
    assert 1.9 < runs[0].state.log_history[0]["aux_loss"] < 3
    assert_same_logs(*runs)
    asking = [trainer.model.config.output_router_logits for trainer in runs]
    assert asking[0] == asking[1]


def test_a_trainer_that_smooths_labels_adds_no_loss_of_routers(make: Make) -> None:
    """As transformers, which takes the labels from the model then."""
    both = [
        make(kind, model=with_loss(), label_smoothing_factor=0.2)
        for kind in (Trainer, farspan.Trainer)
    ]
    for trainer in both:
        with in_double(trainer):
            trainer.train()
    for key in ("loss", "grad_norm", "eval_loss"):
        assert_exact(logs(both[1], key), logs(both[0], key), limit=1e-6)
