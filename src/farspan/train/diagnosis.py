"""What is known about a loss or gradient that is NaN or infinite."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Diverged(RuntimeError):
    """Training met a loss or gradient that is not finite, and `nonfinite: stop` is set."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The first parameters, in the order of the model, that are not finite."""

    kind: str  # what is not finite: 'loss' or 'gradient'
    weight: str | None  # bad before the step: the trouble is older than this batch
    gradient: str | None

    def describe(self) -> str:
        if self.weight is not None:
            return f"parameter {self.weight} was already not finite before this step"
        if self.gradient is not None:
            return f"the first parameter whose gradient is not finite is {self.gradient}"
        return "no parameter and no gradient is bad, only their norm or the loss"


def find_nonfinite(loss: float, parameters: Mapping[str, Tensor]) -> Finding:
    """Looks at the loss, then at every weight and its gradient."""
    finite_loss = abs(loss) < float("inf")  # false for NaN too
    return Finding(
        kind="gradient" if finite_loss else "loss",
        weight=_first_bad((name, p.detach()) for name, p in parameters.items()),
        gradient=_first_bad((name, p.grad) for name, p in parameters.items()),
    )


def as_json(value: float) -> float | str:
    """JSON knows no NaN and no infinity: these become text."""
    return value if abs(value) < float("inf") else str(value)


def report(
    finding: Finding,
    *,
    step: int,
    loss: float,
    norm: float | None = None,
    heldout: bool = False,
) -> dict[str, Any]:
    """The content of diagnosis.json, beside the batches."""
    return {
        "step": step,
        "not_finite": "held-out loss" if heldout else finding.kind,
        "loss": as_json(loss),
        "grad_norm": None if norm is None else as_json(norm),
        "first_bad_parameter": finding.weight,
        "first_bad_gradient": finding.gradient,
    }


def _first_bad(tensors: Iterable[tuple[str, Tensor | None]]) -> str | None:
    return next((n for n, t in tensors if t is not None and not torch.isfinite(t).all()), None)
