"""Losses of post-training are TRL's, and their gradients go through a step."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from packaging.version import Version
from torch import Tensor
from trl import DPOTrainer, GRPOTrainer, KTOTrainer
from trl.experimental.orpo import ORPOTrainer

from farspan import losses
from farspan.engine.reference import gradients_of
from farspan.engine.step import Step
from farspan.program.strategies import strategy
from tests.engine.checks import draw, errors, gradients
from tests.engine.test_values import expected
from tests.numerics import EXACT, relative_error
from tests.zoo import make_model

pytest.importorskip("trl")


ROWS, TOKENS = 4, 9
# What a trainer's loss reads is its own affair, and was otherwise before.
of_trl = pytest.mark.skipif(
    Version(trl.__version__) < Version("1.16"), reason="TRL's losses read other fields"
)


def tokens(seed: int) -> Tensor:
    """Log-probabilities [ROWS, TOKENS] in float64, 0 beyond each row's end."""
    generator = torch.Generator().manual_seed(seed)
    found = -3 * torch.rand(ROWS, TOKENS, dtype=torch.float64, generator=generator) - 0.01
    return found * mask()


def mask() -> Tensor:
    lengths = torch.tensor([9, 4, 6, 7])
    return (torch.arange(TOKENS) < lengths[:, None]).double()


class Accelerator:
    device = torch.device("cpu")

    def gather_for_metrics(self, found: Tensor, **_: Any) -> Tensor:
        return found

    gather = reduce = gather_for_metrics


def trainer(**fields: Any) -> Any:
    """What a trainer's loss reads of it."""
    common = {
        "accelerator": Accelerator(),
        "aux_loss_enabled": False,
        "model": SimpleNamespace(training=True),
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    return SimpleNamespace(**common | fields)


def outputs(logprobs: Tensor) -> Any:
    told = dict.fromkeys(("entropy", "mean_logits"), torch.zeros_like(logprobs))
    top = torch.zeros_like(logprobs, dtype=torch.bool)
    return lambda **_: SimpleNamespace(log_probs=logprobs, is_top1=top, **told)


def of_dpo(loss_type: str, logprobs: Tensor, reference: Tensor, **fields: Any) -> Tensor:
    """TRL's, of rows [chosen.., rejected..]."""
    chosen, rejected = reference.sum(1).chunk(2)
    whole = torch.cat((torch.zeros(ROWS, 1), mask()), 1)  # with the prompt's last token
    given = {
        "input_ids": torch.zeros(ROWS, TOKENS + 1, dtype=torch.long),
        "attention_mask": torch.ones(ROWS, TOKENS + 1),
        "completion_mask": whole.long(),
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    me = trainer(
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        use_weighting=False,
        **{"beta": 0.3, "label_smoothing": 0.0} | fields,
    )
    model = outputs(logprobs)
    found: Tensor = DPOTrainer._compute_loss(me, model, given, False)
    return found


def pair(rows: Tensor) -> losses.Pair:
    chosen, rejected = rows.chunk(2)
    return chosen, rejected


@of_trl
def test_dpo_is_trl_s() -> None:
    policy, reference = tokens(0), tokens(1)
    found = losses.dpo(pair(losses.sums(policy)), pair(losses.sums(reference)), beta=0.3)
    assert relative_error(found.mean(), of_dpo("sigmoid", policy, reference)) < EXACT
    rows = [pair(losses.means(x, mask())) for x in (policy, reference)]
    found = losses.dpo(rows[0], rows[1], beta=0.3)
    assert relative_error(found.mean(), of_dpo("sigmoid_norm", policy, reference)) < EXACT
    found = losses.ipo(rows[0], rows[1], beta=0.3)
    assert relative_error(found.mean(), of_dpo("ipo", policy, reference)) < EXACT


def test_dpo_of_pairs_that_may_be_swapped() -> None:
    policy, reference = (pair(losses.sums(tokens(n))) for n in (0, 1))
    swapped = losses.dpo(policy[::-1], reference[::-1])
    found = losses.dpo(policy, reference, label_smoothing=0.2)
    assert relative_error(found, 0.8 * losses.dpo(policy, reference) + 0.2 * swapped) < EXACT


@pytest.mark.parametrize("near", [1.0, 1e-3])
def test_orpo_is_trl_s(near: float) -> None:
    """Also of answers that are nearly sure."""
    chosen, rejected = pair((losses.means(tokens(0), mask()) * near).float())
    theirs, *_ = ORPOTrainer.odds_ratio_loss(trainer(beta=0.3), chosen, rejected)
    # TRL gives what is added to the loss of the answer with a minus sign before it.
    found = losses.orpo((chosen, rejected), beta=0.3)
    assert relative_error(found, -theirs) < 4 * torch.finfo(torch.float32).eps


@of_trl
def test_kto_is_trl_s() -> None:
    policy, reference, desirable = tokens(0), tokens(1), torch.tensor([1, 0, 0, 1])
    other, other_reference = tokens(2), tokens(3)
    kl = (other.sum(1) - other_reference.sum(1)).mean().clamp(min=0)
    given = {
        "label": desirable,
        "input_ids": torch.zeros(ROWS, TOKENS + 1, dtype=torch.long),
        "attention_mask": torch.ones(ROWS, TOKENS + 1),
        "completion_mask": torch.ones(ROWS, TOKENS + 1, dtype=torch.long),
        "ref_logps": reference.sum(1),
        "ref_KL_logps": other_reference.sum(1),
    }
    me = trainer(
        _compute_kl_logps=lambda *_: other.sum(1),
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        beta=0.3,
        desirable_weight=1.5,
        undesirable_weight=0.5,
    )
    theirs = KTOTrainer._compute_loss(me, outputs(policy), given, False)
    sums = losses.sums(policy), losses.sums(reference)
    found = losses.kto(*sums, desirable, kl, beta=0.3, weights=(1.5, 0.5))
    assert relative_error(found.mean(), theirs.double()) < EXACT


@of_trl
def test_grpo_is_trl_s() -> None:
    policy, old, reference = tokens(0), tokens(1), tokens(2)
    advantages = torch.tensor([1.0, -0.5, 0.3, -1.2], dtype=torch.float64)
    given = {
        "prompt_ids": torch.zeros(ROWS, 2, dtype=torch.long),
        "prompt_mask": torch.ones(ROWS, 2),
        "completion_ids": torch.zeros(ROWS, TOKENS, dtype=torch.long),
        "completion_mask": mask(),
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
    }
    me = trainer(
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            policy,
            torch.zeros_like(policy),
            None,
        ),
        _entropy_bonus_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.04,
        loss_type="grpo",
        epsilon_low=0.1,
        epsilon_high=0.3,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        current_gradient_accumulation_steps=1,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None),
    )
    me._metrics = defaultdict(lambda: defaultdict(list))
    theirs = GRPOTrainer._compute_loss(me, me.model, given)
    found = losses.grpo(
        policy, old, advantages, mask(), clip=(0.1, 0.3), reference=reference, beta=0.04
    )
    assert relative_error(found, theirs) < EXACT


def test_distillation_is_the_divergence() -> None:
    """Of all ids the whole KL; of ids that the teacher has not, nothing."""
    student, teacher = (torch.randn(2, 3, 7, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    found = losses.distillation(student, teacher)
    whole = torch.nn.functional.kl_div(student, teacher, log_target=True, reduction="none").sum(-1)
    assert relative_error(found, whole) < EXACT
    teacher[..., 2] = -torch.inf
    student[..., 2] = -40.0
    kept = [0, 1, 3, 4, 5, 6]
    found = losses.distillation(student, teacher, torch.tensor([[1, 0, 1], [1, 1, 0]]))
    parts = losses.distillation(student[..., kept], teacher[..., kept])
    assert torch.equal(found == 0, torch.tensor([[0, 1, 0], [0, 0, 1]]).bool())
    assert relative_error(found.sum(), (parts * (found != 0)).sum()) < EXACT


def test_dpo_through_a_step() -> None:
    """At any length: the gradients of plain autograd."""
    model, data = make_model("qwen2"), draw(45, batch=4, documents=3)
    reference = pair(torch.zeros(4, dtype=torch.float64))
    wanted = losses.dpo(pair(losses.sums(expected(model, data)[0])), reference).mean()
    wanted_gradients = gradients_of(model, wanted)
    step = Step(model, strategy("grouped", 4, 45), poison=True)
    found = losses.dpo(pair(losses.sums(step.logprobs(*data))), reference).mean()
    found.backward()
    assert relative_error(found, wanted) < EXACT
    assert max(errors(gradients(model), wanted_gradients).values()) < EXACT
