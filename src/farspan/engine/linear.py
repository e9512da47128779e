"""Linear modules whose backward adds a weight's gradient inside the product.

A gradient that autograd hands over is written, read, and added: 2 + 10 bytes an element in bf16,
and a layer's are alive together (0.5 GB of a 7B model). Here the product adds to the sum itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from farspan.attention.merge import accumulate_dtype
from farspan.engine.gradients import Gradients, add_product

PROBE = 16  # rows and columns of the product that is tried


@cache
def adds_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device adds products of this dtype to wider sums, seen once: cuBLAS does since
    PyTorch 2.11. On a CPU it is left out: plans count what autograd holds there."""
    if device.type != "cuda":
        return False
    x = torch.arange(PROBE * PROBE, device=device).view(PROBE, PROBE).to(dtype).div_(PROBE)
    total = torch.ones(PROBE, PROBE, dtype=accumulate_dtype(dtype), device=device)
    expected = total + x.to(total.dtype).t() @ x.to(total.dtype)
    try:
        add_product(total, x, x, fresh=False)
    except (NotImplementedError, RuntimeError):
        return False
    # Of numbers up to 16, exact in bf16; sums of 16 products in another order.
    eps = torch.finfo(torch.float32).eps
    return bool(((total - expected).abs() <= PROBE * eps * expected).all())


@dataclass(slots=True)
class Adding:
    """How the linear modules of a step run: what they and the step share."""

    adds: bool = True  # products add to sums; else autograd has the gradients
    gradients: Gradients | None = None  # of the step that runs
    unread: bool = False  # nobody reads what the layer at hand gives

    def forward_of(self, module: nn.Module) -> Callable[..., Any] | None:
        """The forward of a linear module's shell (`models.fused.Rule`). One whose class has a
        forward of its own has none."""
        return self.forward if self.adds and _is_plain(module) else None

    def forward(self, module: nn.Linear, x: Tensor) -> Tensor:
        if not _is_trained(module, x):
            return functional.linear(x, module.weight, module.bias)
        return self._run(module, x, value=True)

    def last(self, module: nn.Module, x: Tensor) -> Any:
        """The last module of an MLP (`models.fused.Last`), whose value is only added to what the
        layer gives: it is left out where nobody reads that, 29% of the products of a 7B layer that
        runs again for its backward. What reads it all the same finds NaN."""
        if self.unread and _is_plain(module) and _is_trained(module, x):
            return self._run(cast(nn.Linear, module), x, value=False)
        return module(x)

    def _run(self, module: nn.Linear, x: Tensor, *, value: bool) -> Tensor:
        out: Tensor = _Linear.apply(x, module.weight, module.bias, self, value)
        return out


def _is_plain(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward


def _is_trained(module: nn.Module, x: Tensor) -> bool:
    weight = cast(Tensor, module.weight)
    return torch.is_grad_enabled() and weight.requires_grad and x.dtype is weight.dtype


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, how: Adding, value: bool
    ) -> Tensor:
        ctx.weight, ctx.how = weight, how  # a parameter: nothing moves it out of the graph
        ctx.save_for_backward(x)
        if not value:
            return x.new_full((), torch.nan).expand(*x.shape[:-1], weight.shape[0])
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight, how = ctx.weight, ctx.how
        rows, inputs = dout.reshape(-1, dout.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = (rows @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        dweight = None
        if how.adds:
            assert how.gradients is not None, "no step runs"
            how.gradients.add_product(weight, rows, inputs)
        else:
            dweight = rows.t() @ inputs
        dbias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None, None
