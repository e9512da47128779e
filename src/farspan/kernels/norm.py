"""RMS norm by the Triton kernels: of hidden states, and of each head of queries or keys.

Shapes: x, out, dout, dx [.., h] with inner stride 1 and any other strides, weight [h]. Narrow
vectors (heads of 64 to 256) share a program, wide ones have one each; h is at most 16384.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from farspan.kernels.launch import TILE, Launch, check, padded, rows_of, warps_of
from farspan.lazy import load
from farspan.spec import Refused

WIDEST = 16384
ROWS_OF_DWEIGHT = 2  # sums of dweight a multiprocessor of the GPU makes at one time
AHEAD = 32 * 1024  # bytes of shared memory a program of the backward may have for tiles to come


class Norm(NamedTuple):
    """Which norm. x_hat = x / sqrt(mean(x**2) + eps) in fp32, out = x_hat * (weight + offset)."""

    eps: float
    offset: float = 0.0  # Gemma's weights are 0 where others are 1
    # x_hat is rounded to x's dtype before the weight (Llama, Qwen), or only the product (Gemma).
    cast: bool = True


class Shape(NamedTuple):
    """What the code is compiled for."""

    width: int
    padded: int
    tile: int
    eps: float
    offset: float
    cast: bool
    stages: int


def rms_norm(x: Tensor, weight: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """out, in x's layout, and rstd = 1 / sqrt(mean(x**2) + eps), fp32 [..] contiguous.

    out is in x's dtype; where `norm.cast`, in what PyTorch promotes x's and weight's dtypes to.
    Raises Refused for fp64, and for widths beyond 16384.
    """
    _check(x, weight)
    dtype = torch.promote_types(x.dtype, weight.dtype) if norm.cast else x.dtype
    x = _as_rows(x)
    out = torch.empty_like(x, dtype=dtype)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    forward_launch(x, weight, out, rstd, norm).run(x)
    return out, rstd


def rms_norm_backward(
    dout: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, norm: Norm
) -> tuple[Tensor, Tensor]:
    """dx, in x's dtype and layout, and dweight, fp32 [h]; rstd is the forward's."""
    _check(x, weight)
    check("dout", dout, x)
    check("rstd", rstd, x[..., 0], (torch.float32,))
    x, dout = _as_rows(x), _as_rows(dout)
    dx = torch.empty_like(x)
    if x.numel() == 0:
        return dx, torch.zeros_like(weight, dtype=torch.float32)
    launch, partial = backward_launch((dout, x, dx), weight, rstd.contiguous(), norm)
    launch.run(x)
    return dx, partial.sum(0)


def forward_launch(x: Tensor, weight: Tensor, out: Tensor, rstd: Tensor, norm: Norm) -> Launch:
    (of_x, of_out), sizes = rows_of(x, out, ordered=False)
    shape = _shape(x, norm)
    arguments = {
        "x": of_x,
        "weight": weight,
        "out": of_out,
        "rstd": rstd,
        "sizes": sizes,
        "shape": shape,
        "num_warps": warps_of(shape.tile * shape.padded, 32),
    }
    kernel = load("farspan.kernels.triton_norm", "forward_kernel")
    return Launch(kernel, (-(-rstd.numel() // shape.tile),), arguments)


def backward_launch(
    of_rows: tuple[Tensor, Tensor, Tensor], weight: Tensor, rstd: Tensor, norm: Norm
) -> tuple[Launch, Tensor]:
    """`of_rows` is dout, x and dx. Also what the kernel writes its sums of dweight to."""
    (of_dout, of_x, of_dx), sizes = rows_of(*of_rows, ordered=False)
    shape = _shape(of_rows[1], norm)
    programs = min(-(-rstd.numel() // shape.tile), _places(rstd.device))
    partial = torch.empty(programs, shape.width, dtype=torch.float32, device=rstd.device)
    arguments = {
        "dout": of_dout,
        "x": of_x,
        "weight": weight,
        "rstd": rstd,
        "dx": of_dx,
        "partial": partial,
        "sizes": sizes,
        "shape": shape,
        "num_warps": warps_of(shape.tile * shape.padded, 16),
    }
    kernel = load("farspan.kernels.triton_norm", "backward_kernel")
    return Launch(kernel, (programs,), arguments), partial


@cache
def _places(device: torch.device) -> int:
    """Programs that run at one time."""
    if device.type != "cuda":
        return ROWS_OF_DWEIGHT
    return ROWS_OF_DWEIGHT * torch.cuda.get_device_properties(device).multi_processor_count


def _shape(x: Tensor, norm: Norm) -> Shape:
    width = x.shape[-1]
    tile = max(1, TILE // padded(width))
    of_two = 2 * tile * padded(width) * x.element_size()  # x and dout
    stages = 1 + min(2, AHEAD // of_two)
    return Shape(width, padded(width), tile, norm.eps, norm.offset, norm.cast, stages)


def _as_rows(x: Tensor) -> Tensor:
    """x, or a copy where `rows_of` does not take it."""
    return x if x.stride(-1) == 1 and x.ndim <= 4 else x.contiguous()


def _check(x: Tensor, weight: Tensor) -> None:
    check("x", x, x)
    check("weight", weight, weight)
    if weight.shape != x.shape[-1:] or not weight.is_contiguous() or weight.device != x.device:
        raise Refused(
            f"weight: expected contiguous [{x.shape[-1]}] on {x.device}, got "
            f"{tuple(weight.shape)} on {weight.device}; use the PyTorch path"
        )
    if x.shape[-1] > WIDEST:
        raise Refused(
            f"x: expected at most {WIDEST} in the last dimension, got {x.shape[-1]}; use the "
            "PyTorch path"
        )
