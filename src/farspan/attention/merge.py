"""Softmax over a set of keys from the softmaxes over its parts, and over one more logit.

With lse = log sum exp of the scores, two parts of the same row join exactly:
lse = logaddexp(lse_a, lse_b), out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b.
A sink is one more logit whose value is zero: it only shrinks the output.
Shapes: out [B, H, Sq, Dv], lse [B, H, Sq] (natural logarithm), sinks [H].
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from farspan.kernels import joining
from farspan.kernels.launch import fused_for


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for 16 and 32 bit, fp64 for fp64: what is summed over blocks, and every LSE."""
    return torch.promote_types(dtype, torch.float32)


def merged(out: Tensor, lse: Tensor, parts: Sequence[joining.Part], dtype: torch.dtype) -> Tensor:
    """One or two parts joined by one kernel; `lse` changes in place. Where out has the dtype that
    is wanted, it does, too, and is what is given; else a fresh tensor is, laid out as it."""
    into = out if out.dtype is dtype else torch.empty_like(out, dtype=dtype)
    joining.merge_(out, lse, *parts, into=into)
    return into


def added(total: Tensor, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """One or two parts added by one kernel, and what is given, in the same way."""
    into = total if total.dtype is dtype else torch.empty_like(total, dtype=dtype)
    joining.add_(total, *parts, into=into)
    return into


def merge_(
    out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, *, fused: bool = False
) -> None:
    """Join a part into `out` and `lse`, both in the accumulate dtype, in place.

    A part whose row saw no key has lse = -inf and weight 0, whatever finite `part_out` is;
    a row that no part has seen stays at lse = -inf. `fused`: by one kernel where there is one.
    """
    if fused and fused_for(out.device, out.dtype):
        joining.merge_(out, lse, (part_out, part_lse))
        return
    weight = torch.sigmoid(part_lse - lse)
    # -inf - -inf is nan; a comparison is cheaper than nan_to_num, which would also hide real nans.
    weight = weight.masked_fill(part_lse == -torch.inf, 0.0)
    out.lerp_(part_out.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, part_lse))


def add_(total: Tensor, part: Tensor, *, fused: bool = False) -> None:
    """total += part, of the accumulate dtype and of that or a narrower one. `fused`: by a kernel
    that reads and writes 16 bytes at a time, as PyTorch's does not where dtypes differ."""
    if fused and fused_for(total.device, total.dtype):
        joining.add_(total, part)
    else:
        total.add_(part)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output and LSE in the accumulate dtype once each head's sink has joined its softmax."""
    dtype = accumulate_dtype(out.dtype)
    with_sink = torch.logaddexp(lse, sinks.to(dtype)[:, None])
    return out.to(dtype) * (lse - with_sink).exp().unsqueeze(-1), with_sink


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """d loss / d sinks [H] of these rows, in the accumulate dtype.

    `out` and `lse` are those of `add_sinks`. The sink has weight exp(sink - lse) and value zero,
    so its score gradient is weight * (0 - rowsum(dout * out)).
    """
    dtype = accumulate_dtype(out.dtype)
    weight = (sinks.to(dtype)[:, None] - lse).exp()
    return -(weight * (dout.to(dtype) * out.to(dtype)).sum(-1)).sum((0, 2))
