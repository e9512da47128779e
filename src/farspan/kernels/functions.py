"""The kernels as operations that autograd knows; shapes are those of `norm`, `gate`, `rotary`.

What autograd saves: of a norm its input and a number a row, where PyTorch's operators save the
input in fp32 twice and the normed rows; of a gate its two inputs; of a rotation the tables.
"""

from typing import Any

import torch
from torch import Tensor

from farspan.kernels.gate import Act, swiglu, swiglu_backward
from farspan.kernels.norm import Norm, rms_norm, rms_norm_backward
from farspan.kernels.rotary import rotate


def normed(x: Tensor, weight: Tensor, norm: Norm) -> Tensor:
    """The norm of each vector of x."""
    out: Tensor = _Normed.apply(x, weight, norm)
    return out


def gated(gate: Tensor, up: Tensor, act: Act) -> Tensor:
    """act(gate) * up."""
    out: Tensor = _Gated.apply(gate, up, act)
    return out


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys at their positions; no gradient reaches the tables."""
    out: tuple[Tensor, Tensor] = _Rotated.apply(q, k, cos, sin)
    return out


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, norm: Norm) -> Tensor:
        out, rstd = rms_norm(x, weight, norm)
        ctx.norm = norm
        ctx.save_for_backward(x, weight, rstd)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = rms_norm_backward(dout, x, weight, rstd, ctx.norm)
        return dx, dweight.to(weight.dtype), None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: Act) -> Tensor:
        ctx.act = act
        ctx.save_for_backward(gate, up)
        return swiglu(gate, up, act)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return *swiglu_backward(dout, gate, up, ctx.act), None


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return rotate(q, k, cos, sin)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        # A gradient that autograd expanded has inner stride 0.
        dq, dk = (x if x.stride(-1) == 1 else x.contiguous() for x in (dq, dk))
        cos, sin = ctx.saved_tensors
        return *rotate(dq, dk, cos, sin, inverse=True), None, None
