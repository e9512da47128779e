"""Data for one step, what a step gives, and how two outcomes are compared."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from farspan.engine.reference import gradients_of, reference_loss
from farspan.engine.step import Step
from farspan.spec import Schedule
from tests.numerics import EXACT, relative_error
from tests.zoo import VOCAB

# A key bias without RoPE adds the same to all scores of a query, so its gradient is zero, and what
# is computed is noise: roundings of 1e-16 of gradients that cancel. A share of the whole gradient
# below this is taken for such noise, and its error relative to the whole.
NOISE = 1e-14


@dataclass(frozen=True)
class Data:
    """The arguments of a step."""

    input_ids: Tensor
    labels: Tensor
    document_ids: Tensor | None = None

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter((self.input_ids, self.labels, self.document_ids))


@dataclass(frozen=True)
class Outcome:
    loss: Tensor
    gradients: dict[str, Tensor]


def draw(tokens: int, *, batch: int = 1, documents: int = 0, seed: int = 0) -> Data:
    """Random tokens, some of them not trained, in about `documents` documents a row (0: none)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, tokens)
    ids = torch.randint(0, VOCAB, shape, generator=generator)
    labels = ids.masked_fill(torch.rand(shape, generator=generator) < 0.15, -100)
    if not documents:
        return Data(ids, labels)
    marks = torch.randint(0, documents, shape, generator=generator)
    return Data(ids, labels, marks.sort(dim=1).values)


def run_oracle(model: nn.Module, data: Data) -> Outcome:
    loss = reference_loss(model, *data)
    return Outcome(loss.detach(), gradients_of(model, loss))


def run_step(model: nn.Module, step: Step | Schedule, data: Data) -> Outcome:
    """One step from cleared gradients; memory is poisoned before it."""
    if isinstance(step, Schedule):
        step = Step(model, step, poison=True)
    model.zero_grad(set_to_none=True)
    loss = step(*data)
    return Outcome(loss, gradients(model))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """What `.grad` of every trainable parameter holds; None counts as zero."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative L2 error of every parameter's gradient."""
    assert found.keys() == expected.keys()
    whole = sum(float(g.double().norm()) ** 2 for g in expected.values()) ** 0.5
    least = {name: whole * (float(g.norm()) <= NOISE * whole) for name, g in expected.items()}
    return {name: relative_error(found[name], expected[name], least[name]) for name in expected}


def assert_close(found: Outcome, expected: Outcome) -> None:
    """Loss and every gradient to 1e-12."""
    assert found.loss.shape == ()
    every = errors(found.gradients, expected.gradients)
    every["loss"] = relative_error(found.loss, expected.loss)
    wrong = {name: e for name, e in every.items() if not e <= EXACT}
    assert not wrong, ", ".join(f"{name}: {error:.3g}" for name, error in wrong.items())


def assert_same_bits(found: Outcome, expected: Outcome) -> None:
    """Loss and every gradient, bit by bit."""
    assert torch.equal(found.loss, expected.loss)
    assert found.gradients.keys() == expected.gradients.keys()
    wrong = [
        name
        for name in expected.gradients
        if not torch.equal(found.gradients[name], expected.gradients[name])
    ]
    assert not wrong, wrong
