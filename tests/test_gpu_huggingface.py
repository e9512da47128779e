"""The baseline is plain training with transformers, whatever it keeps and wherever."""

import sys
from collections import Counter
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.children import Row
from benchmarks.gpu import huggingface
from benchmarks.gpu.huggingface import FITS, TIME, Baseline, longest, loss_of
from benchmarks.gpu.kept import Held, Kept, Layer, is_attention
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


@pytest.mark.parametrize("place", [Place.KEPT, Place.HOST])
def test_attention_that_was_kept_is_not_computed_again(place: Place) -> None:
    """And what is computed with it has the same bits."""
    ids, counts, found = tokens_of(40), {}, {}
    for at in (Place.DEVICE, place):
        baseline = Baseline(settings_at(at), 3)
        with Counting() as counting:
            baseline.step(ids)
        counts[at], found[at] = counting.calls, gradients(baseline.model)
    assert counts == {Place.DEVICE: 6, place: 3}
    for name, gradient in found[Place.DEVICE].items():
        assert torch.equal(found[place][name], gradient), name


class Counting(TorchDispatchMode):
    """Counts forwards of attention."""

    calls = 0

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        self.calls += is_attention(op)
        return op(*args, **(kwargs or {}))


def test_layers_come_back_before_they_are_needed() -> None:
    """With a layer's first tensor come all of its own and those of the layer below, no others."""
    kept = Kept("cpu", on_host=True)
    layers = [kept.contexts()[0].layer for _ in range(3)]
    held = [
        [kept.hold(layer, torch.full((2,), float(n))) for _ in range(2)]
        for n, layer in enumerate(layers)
    ]
    fetched: list[object] = []
    kept._fetch = fetched.append  # type: ignore[method-assign, assignment]
    assert torch.equal(kept.take(layers[2], held[2][1]), torch.full((2,), 2.0))
    assert fetched == [*held[2], *held[1]]
    kept.take(layers[2], held[2][0])
    assert len(fetched) == 4
    kept.take(layers[1], held[1][1])
    assert fetched[4:] == held[0]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo's own doing
def test_norms_and_mlps_are_compiled_where_that_is_asked_for() -> None:
    baseline, ids = Baseline(settings_at(Place.DEVICE, compiled=True), 2), tokens_of(30)
    assert baseline.words()["layers_by"] == "torch.compile"
    loss = baseline.step(ids)
    plain = Baseline(settings_at(Place.DEVICE), 2)
    assert loss == pytest.approx(plain.step(ids), rel=1e-12)
    compiled = [m for m in baseline.model.modules() if m._compiled_call_impl is not None]
    assert Counter(type(m).__name__ for m in compiled) == {"Qwen2RMSNorm": 4, "Qwen2MLP": 2}


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
    Baseline(settings_at(Place.DEVICE, compiled=True), 1)  # compiled layers are not also fused
    (given,) = asked
    assert given.pop("fused_linear_cross_entropy") is False
    assert given == {"rope": True, "rms_norm": True, "swiglu": True}


def test_transformers_own_offload_is_taken_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    baseline = Baseline(settings_at(Place.OFFLOAD), 1)
    asked: list[dict[str, object]] = []

    def enable(how: dict[str, object], offload: bool = False) -> None:
        asked.append({**how, "offload": offload})

    monkeypatch.setattr(baseline.model, "activation_checkpointing_enable", enable, raising=False)
    assert baseline._checkpoint()  # of a CPU, whose copies are ours
    baseline.on_cuda = True
    assert not baseline._checkpoint()
    assert [one["offload"] for one in asked] == [False, True]


def test_the_baseline_offloads_every_layers_input(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[tuple[int, ...]] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        packed.append(tuple(x.shape))
        return x

    def save_on_cpu(**_: bool) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)

    monkeypatch.setattr(huggingface, "save_on_cpu", save_on_cpu)
    baseline = Baseline(settings_at(Place.OFFLOAD), 3)
    baseline.step(torch.zeros(1, 40, dtype=torch.long))
    assert packed.count((1, 40, 32)) >= 3  # inputs of layers
    assert not any(64 in shape for shape in packed)  # nothing of the MLP
    assert not any(256 in shape for shape in packed)  # no logits, nor the head


def test_what_a_warm_up_locks_is_what_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By PyTorch's rule: a piece of a power of two is kept when it is freed, and taken again."""
    taken: Counter[int] = Counter()
    hold = Kept.hold

    def counted(kept: Kept, layer: Layer, x: torch.Tensor) -> Held:
        taken[1 << (x.nbytes - 1).bit_length()] += 1
        return hold(kept, layer, x)

    monkeypatch.setattr(Kept, "hold", counted)
    settings = settings_at(Place.HOST, dtype="bfloat16", tokens=64, layers=4)
    baseline = Baseline(settings, 4)
    ids = torch.zeros(1, 64, dtype=torch.long)
    assert baseline.warm_up(ids) == {"warm_layers": 1}
    pieces, size = huggingface.locked_bytes(settings)
    assert huggingface.lock(settings)["locked_bytes"] == pieces * size
    kept = Counter(taken) | Counter({size: pieces})
    taken.clear()
    baseline.step(ids)  # all layers are there again
    assert taken[size] >= 8
    assert taken <= kept
    assert huggingface.locked_bytes(settings | {"place": Place.OFFLOAD})[0] == 5
    assert huggingface.locked_bytes(settings | {"place": Place.KEPT})[0] == 0


@pytest.mark.parametrize(("most", "found", "fails"), [(700, 640, 704), (64, 64, 72), (63, 0, 64)])
def test_the_longest_context_is_found(most: int, found: int, fails: int) -> None:
    asked: list[int] = []

    def attempt(tokens: int) -> str:
        asked.append(tokens)
        return FITS if tokens <= most else "device memory"

    assert longest(attempt, 64, 3) == (found, fails, "device memory")
    assert len(asked) == len(set(asked))


def test_a_search_without_time_says_what_it_has() -> None:
    left = iter([FITS, FITS, TIME])
    assert longest(lambda _: next(left), 64, 3) == (128, None, TIME)


def test_a_loss_in_pieces_is_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "PIECE", 7)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 30, 8, generator=generator)
    weight = torch.randn(20, 8, generator=generator)
    targets = torch.randint(0, 20, (1, 30), generator=generator)
    targets[0, -1] = huggingface.IGNORED
    expected = functional.cross_entropy((hidden @ weight.T)[0], targets[0])
    assert float(loss_of(hidden, weight, targets)) == pytest.approx(float(expected), rel=1e-6)
