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

from farspan.attention.softmax import accumulate_dtype
from farspan.engine.gradients import Gradients, add_product
from farspan.hf.fused_layers import Linears
from farspan.kernels.operations import Act, swiglu_again

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
class Adding(Linears):
    """How the linear modules of a step run: what they and the step share."""

    adds: bool = True  # products add to sums; else autograd has the gradients
    gradients: Gradients | None = None  # of the step that runs
    unread: bool = False  # nobody reads what the layer at hand gives

    def forward_of(self, module: nn.Module) -> Callable[..., Any] | None:
        """The forward of a linear module's shell (`hf.fused_layers.Rule`). One whose class has a
        forward of its own has none."""
        return self.forward if self.adds and _is_linear(module) else None

    def forward(self, module: nn.Linear, x: Tensor) -> Tensor:
        if not _is_trained(module, x):
            return functional.linear(x, module.weight, module.bias)
        out: Tensor = _Linear.apply(x, module.weight, module.bias, self)
        return out

    def pair(self, gate: nn.Module, up: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """The second adds its gradient of x to the first's in its product, where autograd would
        read both and write a third."""
        both = (gate, up)
        if not all(self.adds and self._may(m, x) and m.bias is None for m in both):
            return gate(x), up(x)
        out: tuple[Tensor, Tensor] = _Pair.apply(x, gate.weight, up.weight, self)
        return out

    def last(self, down: nn.Module, gate: Tensor, up: Tensor, act: Act) -> Any:
        """The value is only added to what the layer gives: it is left out where nobody reads that,
        29% of the products of a 7B layer that runs again for its backward, and act(gate) * up is
        made in the backward of the gate. What reads the value all the same finds NaN."""
        if not (self.unread and self._may(down, gate)):
            return Linears.last(self, down, gate, up, act)
        return _Unread.apply(gate, up, down.weight, down.bias, act, self)

    def _may(self, module: nn.Module, x: Tensor) -> bool:
        """Whether all that calling a module would do is known here: no hooks, and no forward but
        that of a linear module's class or of its shell."""
        forward = module.__dict__.get("forward")
        ours = forward is None or getattr(forward, "__func__", None) == self.forward
        hooks = (*_HOOKS, "_forward_hooks_always_called")
        bare = not any(module.__dict__.get(name) for name in hooks)
        return ours and bare and _is_linear(module) and _is_trained(module, x)

    def add(self, weight: nn.Parameter, dout: Tensor, x: Tensor) -> Tensor | None:
        """The gradient of a weight, for autograd; None where its product adds to the sum."""
        if not self.adds:
            return dout.t() @ x
        assert self.gradients is not None, "no step runs"
        self.gradients.add_product(weight, dout, x)
        return None


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _is_linear(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward


def _is_trained(module: nn.Module, x: Tensor) -> bool:
    """Whether autograd would give its weight a gradient that nobody but the sum is to have: a hook
    of the weight's own is called with it, and what is computed is no parameter."""
    weight = module._parameters.get("weight")
    if weight is None or not weight.requires_grad or weight._backward_hooks:
        return False
    return torch.is_grad_enabled() and x.dtype is weight.dtype


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, how: Adding
    ) -> Tensor:
        ctx.weight, ctx.how = weight, how  # a parameter: nothing moves it out of the graph
        ctx.save_for_backward(x)
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        rows = _rows(dout)
        dx = (rows @ ctx.weight).view(x.shape) if ctx.needs_input_grad[0] else None
        dweight = ctx.how.add(ctx.weight, rows, _rows(x))
        return dx, dweight, rows.sum(0) if ctx.needs_input_grad[2] else None, None


class _Pair(torch.autograd.Function):
    """Two linear modules without bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, first: nn.Parameter, second: nn.Parameter, how: Adding
    ) -> tuple[Tensor, Tensor]:
        ctx.weights, ctx.how = (first, second), how
        ctx.save_for_backward(x)
        return functional.linear(x, first), functional.linear(x, second)

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        (first, second), (one, other) = ctx.weights, map(_rows, douts)
        dweights = [ctx.how.add(w, rows, _rows(x)) for w, rows in ((first, one), (second, other))]
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (one @ first).addmm_(other, second).view(x.shape)
        return dx, *dweights, None


class _Unread(torch.autograd.Function):
    """A linear module on act(gate) * up, without its value."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        act: Act,
        how: Adding,
    ) -> Tensor:
        del bias
        ctx.weight, ctx.act, ctx.how = weight, act, how
        ctx.save_for_backward(gate, up)
        return gate.new_full((), torch.nan).expand(*gate.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        rows = _rows(dout)
        dx = (rows @ ctx.weight).view(gate.shape)
        x, dgate, dup = swiglu_again(dx, gate, up, ctx.act)
        del dx
        dweight = ctx.how.add(ctx.weight, rows, _rows(x))
        dbias = rows.sum(0) if ctx.needs_input_grad[3] else None
        return dgate, dup, dweight, dbias, None, None
