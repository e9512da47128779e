"""Rotary position embedding of queries and keys in one launch, and its transpose.

Shapes: q [B, H, T, D], k [B, Hk, T, D], cos and sin [1 | B, T, R] with R <= D even: the first R of
each vector are rotated, halves against each other (`rotate_half`), the rest passes through. Inner
stride 1, other strides as they are.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from farspan.kernels.launch import DTYPES, Launch, check, check_inner, padded, warps_of
from farspan.lazy import load
from farspan.spec import Refused


class Heads(NamedTuple):
    """[B, H, T, D] as the kernel addresses it."""

    base: Any
    batch: int
    head: int
    token: int


class Angles(NamedTuple):
    """[1 | B, T, R] as the kernel addresses it."""

    base: Any
    batch: int
    token: int


class Shape(NamedTuple):
    """What the code is compiled for."""

    heads: int
    padded_heads: int
    kv_heads: int
    padded_kv_heads: int
    half: int
    padded_half: int
    rest: int
    padded_rest: int
    inverse: bool


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    """q * cos + rotate_half(q) * sin, and so for k, in fp32 and rounded once to the dtype of q.

    Each result has the layout of its input. `inverse` multiplies by the transposed matrix: from
    gradients of results to gradients of q and k, exactly, whatever cos and sin are. Raises Refused
    for fp64 and for tensors that do not fit each other.
    """
    _check(q, k, cos, sin)
    results = torch.empty_like(q), torch.empty_like(k)
    rotate_launch((q, k), results, cos, sin, inverse).run(q)
    return results


def rotate_launch(
    given: tuple[Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    inverse: bool,
) -> Launch:
    q, k = given
    heads, kv_heads, half = q.shape[1], k.shape[1], cos.shape[-1] // 2
    rest = q.shape[3] - 2 * half
    shape = Shape(
        heads=heads,
        padded_heads=padded(heads),
        kv_heads=kv_heads,
        padded_kv_heads=padded(kv_heads),
        half=half,
        padded_half=padded(half),
        rest=rest,
        padded_rest=padded(max(rest, 1)),
        inverse=inverse,
    )
    arguments = {
        "q": _heads(q),
        "k": _heads(k),
        "q_out": _heads(results[0]),
        "k_out": _heads(results[1]),
        "cos": _angles(cos),
        "sin": _angles(sin),
        "shape": shape,
        "num_warps": warps_of(padded(heads) * padded(q.shape[3]), 32),
    }
    kernel = load("farspan.kernels.triton_rotary", "rotate_kernel")
    # The second of a grid's numbers is at most 65535, the first 2**31 - 1.
    return Launch(kernel, (q.shape[2], q.shape[0]), arguments)


def _heads(x: Tensor) -> Heads:
    return Heads(x, *x.stride()[:3])


def _angles(x: Tensor) -> Angles:
    return Angles(x, 0 if x.shape[0] == 1 else x.stride(0), x.stride(1))


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    check("q", q, q)
    check("k", k, q[:, :1].expand(-1, k.shape[1], -1, -1), (q.dtype,))
    rows, width = cos.shape[0], cos.shape[-1]
    fits = cos.ndim == 3 and rows in (1, q.shape[0]) and cos.shape[1] == q.shape[2]
    if not fits or width % 2 or not 2 <= width <= q.shape[3] or cos.dtype not in DTYPES:
        raise Refused(
            f"cos: expected [1 or {q.shape[0]}, {q.shape[2]}, even, at most {q.shape[3]}], "
            f"bfloat16, float16 or float32, got {tuple(cos.shape)}, {cos.dtype}; use the PyTorch "
            "path"
        )
    check("sin", sin, cos)
    for name, x in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        check_inner(name, x)
