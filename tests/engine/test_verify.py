"""`verify` passes what is exact and fails what is not."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from farspan.engine.buffers import KVPrefix, ProgramBuffers
from farspan.engine.gradients import GradientAccumulator
from farspan.engine.loss import LossHead
from farspan.engine.verify import Verification, VerificationRun, verify
from farspan.spec import Schedule, Tier, UnsupportedError
from tests.grids import crossed, part_of
from tests.zoo import make_model, shared_model

SCHEDULE = Schedule(
    chunk=16, groups=2, attention_save_fraction=0.4, activation_save_fraction=0.3, kv_block=24
)
RUN = VerificationRun(batch=2, tokens=45, documents=3)


@pytest.mark.parametrize(
    "name", part_of(["qwen2", "gpt2", "gemma2", "gpt_oss", "deepseek_v3"], "gpt2", "gpt_oss")
)
def test_exact_in_float64(name: str) -> None:
    model = shared_model(name)
    found = verify(model, SCHEDULE, RUN)
    assert found.passed, found
    assert found.dtype == "float64"
    assert found.checked_parameters == len(list(model.parameters()))
    assert found.loss_error <= 1e-12
    assert found.max_relative_error <= 1e-12


def test_experts_as_they_come() -> None:
    """Torch's grouped product, which is the default, has no float64."""
    model = make_model("mixtral")
    model.config._experts_implementation = "grouped_mm"
    assert verify(model, SCHEDULE, RUN).passed
    assert model.config._experts_implementation == "grouped_mm"


def test_a_gradient_that_is_zero_in_exact_arithmetic() -> None:
    found = verify(shared_model("opt"), SCHEDULE, RUN)
    assert found.passed, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_good_as_plain_autograd_in_lower_precision(dtype: torch.dtype) -> None:
    found = verify(shared_model("qwen2", dtype), SCHEDULE, RUN)
    assert found.passed, found
    assert found.max_relative_error > 1e-12
    assert found.dtype == str(dtype).removeprefix("torch.")
    assert "plain autograd" in found.rule


def test_a_router_that_rounding_tips_is_no_failure() -> None:
    """In bf16 chunks round apart from the whole, and a token may choose another expert."""
    model = shared_model("mixtral", torch.bfloat16)
    found = verify(model, Schedule(chunk=7, groups=(1, 3)), RUN)
    assert found.passed, found
    assert "chooses experts" in found.rule


def test_decays_of_which_plain_autograd_was_lucky() -> None:
    """Four numbers a layer: one run is off by 2.4 times what one of plain autograd is."""
    found = verify(make_model("bamba", torch.bfloat16), SCHEDULE, VerificationRun(tokens=61))
    assert found.passed, found
    assert "over 2 runs that round differently" in found.rule


@pytest.mark.parametrize("dtype", part_of([torch.float64, torch.bfloat16], torch.bfloat16))
def test_weights_in_main_memory(dtype: torch.dtype) -> None:
    schedule = replace(SCHEDULE, weights=Tier.HOST)
    assert verify(make_model("qwen2", dtype), schedule, RUN).passed


def test_leaves_the_model_alone() -> None:
    model = make_model("qwen2", torch.bfloat16)
    state = copy.deepcopy(model.state_dict())
    mark = torch.ones_like(model.lm_head.weight)
    model.lm_head.weight.grad = mark
    own = model.config._attn_implementation
    verify(model, SCHEDULE, RUN)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert model.lm_head.weight.grad is mark
    others = [p for p in model.parameters() if p is not model.lm_head.weight]
    assert all(p.grad is None for p in others)
    assert model.config._attn_implementation == own


def test_only_trained_parameters_are_checked() -> None:
    model = make_model("qwen2")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    found = verify(model, SCHEDULE, RUN)
    assert found.passed
    assert found.checked_parameters == 9


def test_refuses_a_context_before_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents restart positions, so several may be together what one may not."""
    model = make_model("llama", max_position_embeddings=44)
    assert verify(model, SCHEDULE, RUN).passed
    monkeypatch.setattr(
        "farspan.engine.verify.reference_loss", lambda *_, **__: pytest.fail("late")
    )
    with pytest.raises(UnsupportedError, match="a document of 45 tokens"):
        verify(model, SCHEDULE, replace(RUN, documents=1))


Break = Callable[[pytest.MonkeyPatch], None]


def drop_a_block(patch: pytest.MonkeyPatch) -> None:
    """dK, dV of the first keys are lost."""
    own = KVPrefix.add_gradient

    def add(self: KVPrefix, start: int, stop: int, rows: slice, dk: Tensor, dv: Tensor) -> None:
        if start > 0:
            own(self, start, stop, rows, dk, dv)

    patch.setattr(KVPrefix, "add_gradient", add)


def skip_clearing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ProgramBuffers, "clear", lambda *_: None)


def lose_a_norm(patch: pytest.MonkeyPatch) -> None:
    own = GradientAccumulator._add

    def add(self: GradientAccumulator, parameter: nn.Parameter, gradient: Tensor) -> None:
        if parameter.shape != (32,):
            own(self, parameter, gradient)

    patch.setattr(GradientAccumulator, "_add", add)


def normalise_by_the_chunk(patch: pytest.MonkeyPatch) -> None:
    own = LossHead._loss

    def loss(self: LossHead, hidden: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        return (
            own(self, hidden, targets, weights) * self.count / max(int((targets != -100).sum()), 1)
        )

    patch.setattr(LossHead, "_loss", loss)


BREAKS = (
    drop_a_block,
    skip_clearing,
    lose_a_norm,
    normalise_by_the_chunk,
)


@pytest.mark.parametrize(("broken", "tier"), crossed(BREAKS, Tier))
def test_fails_what_is_broken(broken: Break, tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    found = verify(shared_model("qwen2"), Schedule(chunk=16, groups=2, kv=tier), RUN)
    assert_failed(found)


def assert_failed(found: Verification) -> None:
    assert found.passed is False
    worst = found.worst[0]
    assert worst.error > worst.limit
    assert found.max_relative_error >= worst.error
