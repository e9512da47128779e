"""People's own loops: optimizers in hooks, hooks on gradients, gradients that are turned off."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farspan.distributed.context import ParallelContext
from farspan.engine.loss import shift_labels
from farspan.engine.parallelize import parallelize
from farspan.engine.reference import reference_loss
from farspan.engine.step import Step
from farspan.hf.load import add_adapters
from farspan.program.layout import Layout
from farspan.spec import Schedule, Tier, UnsupportedError
from tests.engine.checks import draw
from tests.grids import crossed, part_of
from tests.numerics import assert_exact
from tests.ranks import run_ranks
from tests.zoo import make_model

DEVICE = Schedule(chunk=8, groups=2, activation_save_fraction=0.5)
BATCHES = [draw(20, batch=2, documents=2, seed=seed) for seed in range(3)]
Backward = Callable[[nn.Module, Any], None]  # adds the gradients of a batch to `.grad`


def plainly(model: nn.Module, data: Any) -> None:
    reference_loss(model, *data).backward()


def steps(model: nn.Module, weights: Tier, logprobs: bool = False) -> Backward:
    step = Step(model, replace(DEVICE, weights=weights), poison=True)

    def one(_: nn.Module, data: Any) -> None:
        if not logprobs:
            step(*data)
            return
        found = step.logprobs(*data)
        count = int((shift_labels(data.labels, data.document_ids) != -100).sum())
        (-found.sum() / count).backward()

    return one


def same_weights(found: nn.Module, expected: nn.Module) -> None:
    pairs = zip(found.named_parameters(), expected.named_parameters(), strict=True)
    for (_, p), (_, q) in pairs:
        assert_exact(p, q)


def adapted() -> nn.Module:
    model = make_model("llama")
    add_adapters(model, rank=2, alpha=4.0, zero=False)
    return model


def tied() -> nn.Module:
    return make_model("llama", tie_word_embeddings=True)


class InHooks:
    """SGD with momentum in hooks, which forget the gradient."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: dict[nn.Parameter, int] = {}
        for p in model.parameters():
            if p.requires_grad:
                optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
                p.register_post_accumulate_grad_hook(self.hook(optimizer))

    def hook(self, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
        def update(p: Any) -> None:
            self.calls[p] = self.calls.get(p, 0) + 1
            optimizer.step()
            optimizer.zero_grad()

        return update


@pytest.mark.parametrize(
    ("make", "weights", "logprobs"),
    crossed([lambda: make_model("qwen2"), tied, adapted], Tier, [False, True]),
)
def test_an_optimizer_in_hooks_updates_each_weight_once(
    make: Callable[[], nn.Module], weights: Tier, logprobs: bool
) -> None:
    """As with plain autograd, whose weights are used no more when their gradient is complete."""
    plain, ours = make(), make()
    InHooks(plain)
    hooks = InHooks(ours)
    one = steps(ours, weights, logprobs)
    for data in BATCHES:
        plainly(plain, data)
        one(ours, data)
    trained = {p for p in ours.parameters() if p.requires_grad}
    assert hooks.calls == dict.fromkeys(trained, len(BATCHES))
    assert all(p.grad is None for p in trained)
    same_weights(ours, plain)


@pytest.mark.parametrize(("weights", "dtype"), crossed(Tier, [torch.float64, torch.bfloat16]))
def test_a_hook_after_accumulation_sees_what_the_call_leaves(
    weights: Tier, dtype: torch.dtype
) -> None:
    model = make_model("llama", dtype)
    seen: dict[Any, list[Tensor]] = {p: [] for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen[p].append(p.grad.clone()))
    one = steps(model, weights)
    for number, data in enumerate(BATCHES, 1):
        one(model, data)
        for p, gradients in seen.items():
            assert len(gradients) == number
            assert torch.equal(gradients[-1], p.grad)


def test_a_parameter_without_a_gradient_calls_no_hook() -> None:
    model = make_model("qwen3_moe")
    called: list[Tensor] = []
    layer = model.model.layers[0]
    unused = layer.mlp.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
    unused.grad = torch.ones_like(unused)
    unused.register_post_accumulate_grad_hook(called.append)
    steps(model, Tier.DEVICE)(model, BATCHES[0])
    assert not called


@pytest.mark.parametrize(("adds", "weights"), crossed([False, True], Tier))
def test_a_hook_may_replace_a_complete_gradient(adds: bool, weights: Tier) -> None:
    """Clipped by its norm: of each chunk's gradient that would be another."""
    plain, ours = make_model("llama"), make_model("llama")
    for model in (plain, ours):
        for p in model.parameters():
            p.register_hook(lambda g: g * (0.01 / g.norm()).clamp(max=1))
    one = steps(ours, weights)
    for data in BATCHES[: 1 + adds]:
        plainly(plain, data)
        one(ours, data)
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert_exact(p.grad, q.grad)


def test_hooks_may_be_those_of_a_head() -> None:
    model, head = make_model("llama"), nn.Linear(32, 1, dtype=torch.float64)
    called: list[Tensor] = []
    for p in head.parameters():
        p.register_post_accumulate_grad_hook(lambda p: called.append(p.grad.clone()))
    step = Step(model, DEVICE, head=lambda hidden, _: head(hidden))
    step.head = Head(head)
    step.values(BATCHES[0].input_ids).sum().backward()
    assert len(called) == 2
    assert {x.shape for x in called} == {p.shape for p in head.parameters()}
    head.weight.register_hook(lambda g: 2 * g)
    with pytest.raises(UnsupportedError, match=r"gradient of inner.weight \(register_hook\)"):
        step.values(BATCHES[0].input_ids)


class Head(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor, _: Tensor) -> Tensor:
        found: Tensor = self.inner(hidden)
        return found


def test_a_backward_hook_on_a_module_is_refused() -> None:
    model = make_model("llama")
    step = Step(model, DEVICE)
    hook = model.model.layers[1].mlp.register_full_backward_hook(lambda *_: None)
    for refused in (step, Step(model, DEVICE)):
        with pytest.raises(UnsupportedError, match=r"a backward hook on model\.layers\.1\.mlp"):
            refused(*BATCHES[0])
        refused.evaluate(*BATCHES[0])
    hook.remove()
    step(*BATCHES[0])


@pytest.mark.parametrize(
    ("turned_off", "word"),
    [
        (torch.no_grad, "no_grad"),
        (lambda: torch.set_grad_enabled(False), "no_grad"),
        (torch.inference_mode, "inference_mode"),
    ],
)
def test_a_step_without_gradients_is_an_evaluation(
    turned_off: Callable[[], AbstractContextManager[Any]], word: str
) -> None:
    model = make_model("llama")
    step = Step(model, DEVICE)
    with turned_off():
        with pytest.raises(UnsupportedError, match=rf"^{word}: .* call step\.evaluate"):
            step(*BATCHES[0])
        loss = step.evaluate(*BATCHES[0])
    assert all(p.grad is None for p in model.parameters())
    assert_exact(loss, reference_loss(model, *BATCHES[0]))


def on_ranks(dealt: bool) -> None:
    """An optimizer in hooks, and what is refused, on each of two ranks."""
    ranks = ParallelContext(Layout(ulysses=2), torch.device("cpu"))
    plain, model = make_model("llama"), make_model("llama")
    team: Any = parallelize(model, DEVICE, ranks) if dealt else ranks
    step = Step(model, DEVICE, ranks=team)
    for one in (plain, model):
        for p in one.parameters():
            p.register_post_accumulate_grad_hook(updated)
    for data in BATCHES:
        plainly(plain, data)
        step(*data)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        whole: Any = p.detach()
        assert_exact(whole.full_tensor() if dealt else whole, q)
    model.model.norm.weight.register_hook(lambda g: g)
    with pytest.raises(UnsupportedError, match=r"model\.norm\.weight \(register_hook\)"):
        Step(model, DEVICE, ranks=team)(*BATCHES[0])


def updated(p: Any) -> None:
    with torch.no_grad():
        p.sub_(p.grad, alpha=0.1)
    p.grad = None


@pytest.mark.parametrize("dealt", part_of([False, True], True))
def test_hooks_over_ranks(dealt: bool) -> None:
    run_ranks(2, on_ranks, dealt)
