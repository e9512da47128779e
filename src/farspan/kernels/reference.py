"""Reference formulas of the kernels in plain PyTorch, which tests compare the kernels with.

In fp64 they are exact; in a lower dtype they round as models do. Gradients come from autograd. The
references of joining are `farspan.attention.backends.merge_` and `Tensor.add_`.
"""

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, cast: bool) -> Tensor:
    """Return the RMS norm of x [.., h] with weight [h]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if cast:
        return (weight + offset) * normal.to(x.dtype)
    return (normal * (weight.to(wide.dtype) + offset)).to(x.dtype)


def gated(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """Return act(gate) * up for gate, up [.., I]; `act` as in Hugging Face's configurations."""
    if act == "silu":
        return functional.silu(gate) * up
    return functional.gelu(gate, approximate="tanh" if act != "gelu" else "none") * up


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to x [B, H, T, D] by tables cos and sin [1 | B, T, R]."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    half = torch.cat((-second, first), -1)
    return torch.cat((turned * cos[:, None] + half * sin[:, None], rest), -1)


def losses(logits: Tensor, targets: Tensor, ignored: int, softcap: float | None) -> Tensor:
    """Return the cross-entropy of logits [N, V] for targets [N], per row; in fp32 or fp64."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        wide = softcap * torch.tanh(wide / softcap)
    return functional.cross_entropy(wide, targets, ignore_index=ignored, reduction="none")
