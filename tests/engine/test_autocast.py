"""Steps under torch.autocast: as near to float64 as plain training, and what refuses it."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from farspan.engine.gradients import AccumulatingLinears
from farspan.engine.step import Step
from farspan.spec import Kernels, Schedule, Tier, UnsupportedError
from tests.grids import part_of
from tests.numerics import relative_error
from tests.zoo import make_model

BF16 = torch.bfloat16
IDS = torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(0))
SCHEDULES = {
    "chunks": Schedule(chunk=7),
    "one": Schedule(chunk=40, groups=2),
    "keys in main memory": Schedule(chunk=7, kv=Tier.HOST, kv_kept=True),
    "attention kept": Schedule(chunk=7, attention_save_fraction=1.0, loss_chunk_size=3),
}
# Soft caps, sinks, experts, convolutions for linear modules, and norms that are no RMSNorm.
FAMILIES = ("llama", "qwen3", "gemma2", "gpt2", "gpt_oss", "mixtral", "cohere2", "deepseek_v2")


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def plain(model: nn.Module, *, casts: bool) -> tuple[Tensor, Tensor]:
    own: Any = copy.deepcopy(model)
    with torch.autocast("cpu", BF16, enabled=casts):
        loss = own(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.detach(), gradients(own)


@pytest.mark.slow
@pytest.mark.parametrize("name", part_of(list(SCHEDULES), "chunks", "keys in main memory"))
@pytest.mark.parametrize("family", part_of(list(FAMILIES), "llama", "gpt_oss"))
def test_gradients_are_as_near_as_plain_ones(family: str, name: str) -> None:
    """And nearer to those of plain autocast than to those of float32, in a second step, too."""
    model = make_model(family, torch.float32)
    exact = plain(copy.deepcopy(model).double(), casts=False)
    theirs = plain(model, casts=True)
    step = Step(model, SCHEDULES[name], poison=True, autocast=BF16)
    for _ in range(2):
        model.zero_grad()
        loss, found = step(IDS, IDS), gradients(model)
        assert relative_error(loss, exact[0]) <= 2**-8
        assert relative_error(found, exact[1]) <= 2 * relative_error(theirs[1], exact[1])
        assert relative_error(found, exact[1]) > 2**-11, "it was cast"
    assert relative_error(step.evaluate(IDS, IDS), loss) <= 2**-20
    logprobs = step.logprobs(IDS)
    assert logprobs.dtype is torch.float32
    assert relative_error(-logprobs.sum() / (2 * 39), loss) <= 2**-20
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


def test_bits_do_not_depend_on_the_groups() -> None:
    """A cell that runs again casts as it did before."""
    found = []
    for groups in 1, 2:
        model = make_model("llama", torch.float32)
        Step(model, Schedule(chunk=7, groups=groups), autocast=BF16)(IDS, IDS)
        found.append(gradients(model))
    assert torch.equal(*found)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"dtype": torch.float64}, "is for float32 weights, and these are torch.float64"),
    ("llama", {"schedule": "auto"}, "needs a written schedule"),
    ("llama", {"schedule": Schedule(activation_save_fraction=0.5)}, "not supported with activ"),
    ("llama", {"schedule": Schedule(mlp_chunk_size=8)}, "not supported with activ"),
    ("llama", {"schedule": Schedule(weights=Tier.HOST)}, "with weights in main memory"),
    ("mamba2", {}, "not supported with recurrent layers"),
    ("gemma3n_text", {}, "not supported if layers share keys and values"),
    ("deepseek_v32", {}, "not supported if an indexer chooses tokens"),
]


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED)
def test_what_cannot_be_repeated_is_refused(
    family: str, changes: dict[str, Any], message: str
) -> None:
    model = make_model(family, changes.get("dtype", torch.float32))
    with pytest.raises(UnsupportedError, match=f"^autocast: it .*{message}"):
        Step(model, changes.get("schedule", SCHEDULES["chunks"]), autocast=BF16)


def test_layers_that_fail_or_change_the_dtype_are_refused_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DBRX's experts add bfloat16 to float32, plainly as in a step."""
    dbrx = make_model("dbrx", torch.float32)
    with pytest.raises(RuntimeError, match="index_add_"):
        plain(dbrx, casts=True)
    with pytest.raises(
        UnsupportedError, match=r"^autocast: .* DbrxBlock itself .*index_add_.* load"
    ):
        Step(dbrx, SCHEDULES["chunks"], autocast=BF16)
    own = LlamaDecoderLayer.forward

    def narrow(*given: Any, **keywords: Any) -> Tensor:
        out = own(*given, **keywords)
        return out.to(BF16) if torch.is_autocast_enabled("cpu") else out

    monkeypatch.setattr(LlamaDecoderLayer, "forward", narrow)
    with pytest.raises(
        UnsupportedError, match=r"^autocast: .* LlamaDecoderLayer .* got torch.bfloat16"
    ):
        Step(make_model("llama", torch.float32), SCHEDULES["chunks"], autocast=BF16)


def test_own_kernels_are_left_out() -> None:
    """They compute in the dtype of the weights, and their backwards run outside of autocast."""
    model = make_model("llama", torch.float32)
    step = Step(model, SCHEDULES["chunks"], kernels=Kernels(fused=True), autocast=BF16)
    assert not step.prepared_model.fused


def test_products_that_add_to_sums_are_left_to_autocast() -> None:
    """Their backward would multiply a bfloat16 gradient by a float32 weight."""
    linear, x = nn.Linear(8, 4), torch.randn(3, 8)
    with torch.autocast("cpu", BF16):
        out, wanted = AccumulatingLinears().forward(linear, x), linear(x)
    assert torch.equal(out, wanted)
    found, expected = (torch.autograd.grad(own.sum(), linear.weight)[0] for own in (out, wanted))
    assert torch.equal(found, expected)
