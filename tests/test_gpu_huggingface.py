"""The baseline is plain training with transformers, whatever it keeps and wherever."""

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.children import Row
from benchmarks.gpu import huggingface
from benchmarks.gpu.huggingface import Baseline, is_attention
from benchmarks.gpu.work import Place, tiny


def settings_at(place: Place, **fields: object) -> Row:
    settings: Row = {"config": tiny().config, "dtype": "float64", "device": "cpu", "tiny": True}
    return {**settings, "place": place, **fields}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def tokens_of(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (1, count), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("place", list(Place))
def test_the_baseline_is_the_model_itself(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "PIECE", 16)
    baseline, ids = Baseline(settings_at(place), 2), tokens_of(50)
    for _ in range(2):  # nothing of the first is left to the second
        baseline.model.zero_grad()
        loss = baseline.step(ids)
    found = gradients(baseline.model)
    baseline.model.zero_grad()
    expected = baseline.model(input_ids=ids, labels=ids, use_cache=False).loss
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)  # logits are fp32 in both
    assert found.keys() == dict(baseline.model.named_parameters()).keys()
    for name, gradient in gradients(baseline.model).items():
        assert (found[name] - gradient).norm() / gradient.norm() < 1e-5, name


def test_attention_that_was_kept_is_not_computed_again() -> None:
    """And what is computed with it has the same bits."""
    ids, counts, found = tokens_of(40), {}, {}
    for at in (Place.DEVICE, Place.KEPT):
        baseline = Baseline(settings_at(at), 3)
        with Counting() as counting:
            baseline.step(ids)
        counts[at], found[at] = counting.calls, gradients(baseline.model)
    assert counts == {Place.DEVICE: 6, Place.KEPT: 3}
    for name, gradient in found[Place.DEVICE].items():
        assert torch.equal(found[Place.KEPT][name], gradient), name


class Counting(TorchDispatchMode):
    """Counts forwards of attention."""

    calls = 0

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        self.calls += is_attention(op)
        return op(*args, **(kwargs or {}))


def test_liger_is_asked_for_all_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, bool]] = []
    made = ModuleType(huggingface.LIGER)
    setattr(made, "apply_liger_kernel_to_qwen2", lambda **given: asked.append(given))  # noqa: B010
    monkeypatch.setitem(sys.modules, huggingface.LIGER, made)
    assert Baseline(settings_at(Place.DEVICE), 1).words()["layers_by"].startswith("transformers (")
    monkeypatch.setattr(huggingface, "has_liger", lambda: True)
    assert Baseline(settings_at(Place.DEVICE), 1).words() == {
        "layers_by": "liger",
        "loss_by": "liger",
    }
    (given,) = asked
    assert given.pop("fused_linear_cross_entropy") is False
    assert given == {"rope": True, "rms_norm": True, "swiglu": True}
