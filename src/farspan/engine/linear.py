"""Linear modules whose backward adds a weight's gradient inside the product.

A gradient that autograd hands over is written, read, and added: 2 + 10 bytes an element in bf16,
and a layer's are alive together (0.5 GB of a 7B model). Here the product adds to the sum itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

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
    """Where the products of a step go: what linear modules and the step share."""

    gradients: Gradients | None = None  # of the step that runs

    def forward_of(self, module: nn.Module) -> Callable[..., Any] | None:
        """The forward of a linear module's shell (`models.fused.Rule`). A frozen one, and one whose
        class has a forward of its own, has none."""
        if type(module).forward is not nn.Linear.forward:
            return None
        return self.forward

    def forward(self, module: nn.Linear, x: Tensor) -> Tensor:
        weight = module.weight
        if not (torch.is_grad_enabled() and weight.requires_grad and x.dtype is weight.dtype):
            return functional.linear(x, weight, module.bias)
        out: Tensor = _Linear.apply(x, weight, module.bias, self)
        return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, adding: Adding
    ) -> Tensor:
        ctx.weight, ctx.adding = weight, adding  # a parameter: nothing moves it out of the graph
        ctx.save_for_backward(x)
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        dout = dout.contiguous()
        rows = dout.view(-1, dout.shape[-1])
        dx = (rows @ ctx.weight).view(x.shape) if ctx.needs_input_grad[0] else None
        assert ctx.adding.gradients is not None, "no step runs"
        ctx.adding.gradients.add_product(ctx.weight, rows, x.reshape(-1, x.shape[-1]))
        dbias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return dx, None, dbias, None
