"""Operations on tensors by the fused kernels: norm, gate, rotary embedding, loss, joining.

Each has plain functions (forward, backward); `normed`, `gated` and `rotated` are the first three as
autograd functions. Autograd saves little: for a norm its input and one number for each row, where
PyTorch's operators save the input in fp32 twice and the normed rows; for a gate its two inputs; for
a rotation the tables. All raise UnsupportedError for fp64, and for tensors of different shapes or
devices.
"""

from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from farspan.kernels.launch import (
    DTYPES,
    TILE,
    Launch,
    Rows,
    Sizes,
    check,
    check_inner,
    heads_of,
    padded,
    rows_of,
    warps_of,
)
from farspan.spec import UnsupportedError

# -- RMS norm: of hidden states, and of each head of queries or keys ----------------------------
#
# x, out, dout, dx [.., h] with inner stride 1 and any other strides, weight [h]. Narrow vectors
# (heads of 64 to 256) share a program, wide ones have one each; h is at most 16384.


WIDEST = 16384
ROWS_OF_DWEIGHT = 2  # concurrent sums of dweight on each multiprocessor of the GPU
AHEAD = 32 * 1024  # bytes of shared memory for prefetched tiles in the backward


class Norm(NamedTuple):
    """Settings of an RMS norm: x / sqrt(mean(x**2) + eps) in fp32, times (weight + offset)."""

    eps: float
    offset: float = 0.0  # 1 for Gemma, whose weights are offsets from 1
    # Round x_hat to x's dtype before the weight (Llama, Qwen), or only the product (Gemma).
    cast: bool = True


class NormShape(NamedTuple):
    """Sizes and settings for which the norm kernels are compiled."""

    width: int
    padded: int
    tile: int
    eps: float
    offset: float
    cast: bool
    stages: int


def rms_norm(x: Tensor, weight: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of x, in x's layout, and rstd = 1 / sqrt(mean(x**2) + eps), fp32 [..]
    contiguous.

    out has x's dtype or, with `norm.cast`, the promoted dtype of x and weight. Raises
    UnsupportedError for fp64, and for widths beyond 16384.
    """
    _check_norm(x, weight)
    dtype = torch.promote_types(x.dtype, weight.dtype) if norm.cast else x.dtype
    x = _as_rows(x)
    out = torch.empty_like(x, dtype=dtype)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    norm_launch(x, weight, out, rstd, norm).run(x)
    return out, rstd


def rms_norm_backward(
    dout: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, norm: Norm
) -> tuple[Tensor, Tensor]:
    """Return dx, in x's dtype and layout, and dweight, fp32 [h]; `rstd` is the forward's."""
    _check_norm(x, weight)
    check("dout", dout, x)
    check("rstd", rstd, x[..., 0], (torch.float32,))
    x, dout = _as_rows(x), _as_rows(dout)
    dx = torch.empty_like(x)
    if x.numel() == 0:
        return dx, torch.zeros_like(weight, dtype=torch.float32)
    launch, partial = norm_backward_launch(dout, x, dx, weight, rstd.contiguous(), norm)
    launch.run(x)
    return dx, partial.sum(0)


def norm_launch(x: Tensor, weight: Tensor, out: Tensor, rstd: Tensor, norm: Norm) -> Launch:
    (of_x, of_out), sizes = rows_of(x, out, ordered=False)
    shape = _norm_shape(x, norm)
    arguments = {
        "x": of_x,
        "weight": weight,
        "out": of_out,
        "rstd": rstd,
        "sizes": sizes,
        "shape": shape,
        "num_warps": warps_of(shape.tile * shape.padded, 32),
    }
    return Launch("norm_kernel", (-(-rstd.numel() // shape.tile),), arguments)


def norm_backward_launch(
    dout: Tensor, x: Tensor, dx: Tensor, weight: Tensor, rstd: Tensor, norm: Norm
) -> tuple[Launch, Tensor]:
    """Return the launch of a norm's backward, and the tensor for its sums of dweight, fp32 [Triton
    programs, width]."""
    (of_dout, of_x, of_dx), sizes = rows_of(dout, x, dx, ordered=False)
    shape = _norm_shape(x, norm)
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
    return Launch("norm_backward_kernel", (programs,), arguments), partial


@cache
def _places(device: torch.device) -> int:
    """Return how many Triton programs of a norm's backward run on the device at the same time."""
    if device.type != "cuda":
        return ROWS_OF_DWEIGHT
    return ROWS_OF_DWEIGHT * torch.cuda.get_device_properties(device).multi_processor_count


def _norm_shape(x: Tensor, norm: Norm) -> NormShape:
    width = x.shape[-1]
    tile = max(1, TILE // padded(width))
    pair = 2 * tile * padded(width) * x.element_size()  # x and dout
    stages = 1 + min(2, AHEAD // pair)
    return NormShape(width, padded(width), tile, norm.eps, norm.offset, norm.cast, stages)


def _as_rows(x: Tensor) -> Tensor:
    """Return x if `rows_of` can index its vectors, else a contiguous copy."""
    return x if x.stride(-1) == 1 and x.ndim <= 4 else x.contiguous()


def _check_norm(x: Tensor, weight: Tensor) -> None:
    check("x", x, x)
    check("weight", weight, weight)
    if weight.shape != x.shape[-1:] or not weight.is_contiguous() or weight.device != x.device:
        raise UnsupportedError(
            f"weight: expected contiguous [{x.shape[-1]}] on {x.device}, got "
            f"{tuple(weight.shape)} on {weight.device}; use the PyTorch path"
        )
    if x.shape[-1] > WIDEST:
        raise UnsupportedError(
            f"x: expected at most {WIDEST} in the last dimension, got {x.shape[-1]}; use the "
            "PyTorch path"
        )


# -- act(gate) * up: the middle of a gated MLP --------------------------------------------------
#
# gate, up, out and their gradients [.., I] have one dtype. Halves of one product (views of [.., 2
# I]) are read without a copy.


GATE_BLOCK = 2048  # elements of a program: 16 a thread of 4 warps


class Act(StrEnum):
    """Activations of a gated MLP, by their names in Hugging Face's configurations."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_pytorch_tanh"


class Lines(NamedTuple):
    """Kernel argument: vectors with inner stride 1 and one stride (elements) between them."""

    base: Any
    row: int


def swiglu(gate: Tensor, up: Tensor, act: Act = Act.SILU) -> Tensor:
    """Return act(gate) * up, contiguous; act(gate) is rounded to the dtype before the product.

    Raises UnsupportedError for fp64 and for tensors that do not fit each other.
    """
    check("gate", gate, gate)
    check("up", up, gate, (gate.dtype,))
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    gate_launch("gate_kernel", {"gate": gate, "up": up, "out": out}, act).run(gate)
    return out


def swiglu_backward(
    dout: Tensor, gate: Tensor, up: Tensor, act: Act = Act.SILU
) -> tuple[Tensor, Tensor]:
    """Return dgate and dup, contiguous, in gate's dtype. Of the values between, only act(gate) is
    rounded to that dtype."""
    check("gate", gate, gate)
    check("up", up, gate, (gate.dtype,))
    check("dout", dout, gate)
    dgate, dup = (torch.empty_like(gate, memory_format=torch.contiguous_format) for _ in range(2))
    tensors = {"dout": dout, "gate": gate, "up": up, "dgate": dgate, "dup": dup}
    gate_launch("gate_backward_kernel", tensors, act).run(gate)
    return dgate, dup


def swiglu_again(
    dout: Tensor, gate: Tensor, up: Tensor, act: Act = Act.SILU
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `swiglu`'s result and the gradients of gate and up, all contiguous. It is for a
    backward that needs the result again, and writes one tensor more than `swiglu_backward`."""
    check("gate", gate, gate)
    check("up", up, gate, (gate.dtype,))
    check("dout", dout, gate)
    out, dgate, dup = (
        torch.empty_like(gate, memory_format=torch.contiguous_format) for _ in range(3)
    )
    tensors = {"dout": dout, "gate": gate, "up": up, "out": out, "dgate": dgate, "dup": dup}
    gate_launch("gate_again_kernel", tensors, act).run(gate)
    return out, dgate, dup


def gate_launch(kernel: str, tensors: dict[str, Tensor], act: Act) -> Launch:
    """Return the launch of a gate kernel; contiguous tensors are passed as one row."""
    dense = all(x.is_contiguous() for x in tensors.values())
    shape = next(iter(tensors.values())).shape
    width = shape.numel() if dense else shape[-1]
    lines = {name: _lines(x, dense) for name, x in tensors.items()}
    blocks = -(-width // GATE_BLOCK) * (shape.numel() // max(width, 1))
    sizes = {"width": width, "act": act.name, "block": GATE_BLOCK, "num_warps": 4}
    return Launch(kernel, (blocks,), lines | sizes)


def _lines(x: Tensor, dense: bool) -> Lines:
    if dense:
        return Lines(x, 0)
    x = x if x.stride(-1) == 1 else x.contiguous()
    x = x.reshape(-1, x.shape[-1])
    return Lines(x, x.stride(0))


# -- rotary position embedding ------------------------------------------------------------------
#
# q [B, H, T, D], k [B, Hk, T, D], cos and sin [1 | B, T, R] with R <= D even: the first R of each
# vector are rotated, one half against the other (`rotate_half`), the rest is copied. Inner stride
# 1, any other strides.


class Angles(NamedTuple):
    """Kernel argument: a table of cos or sin, [1 or B, T, R], for R elements of each head."""

    base: Any
    batch: int
    token: int


class RotaryShape(NamedTuple):
    """Sizes and settings that the rotary kernel is compiled for."""

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
    """Apply rotary embedding, x * cos + rotate_half(x) * sin, to q and k, in fp32 and rounded once
    to their dtype.

    Each result has the layout of its input. `inverse` multiplies by the transposed matrix: from
    gradients of results to gradients of q and k, exactly, for any cos and sin. Raises
    UnsupportedError for fp64 and for tensors that do not fit each other.
    """
    _check_rotation(q, k, cos, sin)
    results = torch.empty_like(q), torch.empty_like(k)
    rotate_launch(q, k, *results, cos, sin, inverse).run(q)
    return results


def rotate_launch(
    q: Tensor,
    k: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    cos: Tensor,
    sin: Tensor,
    inverse: bool,
) -> Launch:
    heads, kv_heads, half = q.shape[1], k.shape[1], cos.shape[-1] // 2
    rest = q.shape[3] - 2 * half
    shape = RotaryShape(
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
        "q": heads_of(q),
        "k": heads_of(k),
        "q_out": heads_of(q_out),
        "k_out": heads_of(k_out),
        "cos": _angles(cos),
        "sin": _angles(sin),
        "shape": shape,
        "num_warps": warps_of(padded(heads) * padded(q.shape[3]), 32),
    }
    # The second number of a grid is at most 65535, the first 2**31 - 1.
    return Launch("rotate_kernel", (q.shape[2], q.shape[0]), arguments)


def _angles(x: Tensor) -> Angles:
    return Angles(x, 0 if x.shape[0] == 1 else x.stride(0), x.stride(1))


def _check_rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    check("q", q, q)
    check("k", k, q[:, :1].expand(-1, k.shape[1], -1, -1), (q.dtype,))
    rows, width = cos.shape[0], cos.shape[-1]
    fits = cos.ndim == 3 and rows in (1, q.shape[0]) and cos.shape[1] == q.shape[2]
    if not fits or width % 2 or not 2 <= width <= q.shape[3] or cos.dtype not in DTYPES:
        raise UnsupportedError(
            f"cos: expected [1 or {q.shape[0]}, {q.shape[2]}, even, at most {q.shape[3]}], "
            f"bfloat16, float16 or float32, got {tuple(cos.shape)}, {cos.dtype}; use the PyTorch "
            "path"
        )
    check("sin", sin, cos)
    for name, x in (("q", q), ("k", k), ("cos", cos), ("sin", sin)):
        check_inner(name, x)


# -- cross-entropy ------------------------------------------------------------------------------
#
# logits [N, V] with inner stride 1 and any distance of rows, targets [N] int64, losses [N] fp32.


LOSS_BLOCK = 8192  # logits of a program at one time: 16 a thread of 16 warps
STAGES = 3


class LossShape(NamedTuple):
    """Sizes and settings that the loss kernel is compiled for."""

    block: int
    ignored: int
    write: bool
    capped: bool
    stages: int


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    scale: float | None = None,
    *,
    ignored: int = -100,
    softcap: float | None = None,
) -> Tensor:
    """Return each row's loss, -log softmax(logits)[target], or 0 if its target is `ignored`. With
    `scale`, overwrite `logits` with the gradient of scale * the sum of losses.

    With `softcap`, logits are first softcap * tanh(logits / softcap). A target that is neither
    ignored nor in [0, V) has a loss of nan. Raises UnsupportedError for fp64 and tensors that do
    not fit.
    """
    check("logits", logits, logits)
    check_inner("logits", logits)
    if logits.ndim != 2 or targets.shape != logits.shape[:1] or targets.dtype != torch.int64:
        raise UnsupportedError(
            f"targets: expected [N], int64 for logits [N, V], got {tuple(targets.shape)}, "
            f"{targets.dtype} for {tuple(logits.shape)}; flatten both"
        )
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    loss_launch(logits, targets.contiguous(), losses, scale, ignored, softcap).run(logits)
    return losses


def loss_launch(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    scale: float | None,
    ignored: int = -100,
    softcap: float | None = None,
) -> Launch:
    """Return the launch of the loss kernel, which writes no gradient if `scale` is None."""
    size = logits.shape[1]
    block = min(LOSS_BLOCK, max(padded(size), 16))
    arguments = {
        "logits": logits,
        "stride": logits.stride(0),
        "targets": targets,
        "losses": losses,
        "size": size,
        "scale": 0.0 if scale is None else scale,
        "cap": 1.0 if softcap is None else softcap,
        "shape": LossShape(block, ignored, scale is not None, softcap is not None, STAGES),
        "num_warps": max(block // 512, 1),
    }
    return Launch("loss_kernel", (len(logits),), arguments)


# -- joining: a part joins the softmax over the others, or is added to their sum, in place ---------
#
# `merge_` is `attention.backends.merge_`, and `add_` is `total.add_(part)`: 10 bytes an element for
# a total in fp32 and a part in bf16, 12 for two parts at once, 2 less where the total is narrow
# before or after.


FP32 = (torch.float32,)


class JoinShape(NamedTuple):
    """Sizes for which the kernels of `merge_` and `add_` are compiled."""

    width: int
    padded: int
    tile: int


Part = tuple[Tensor, Tensor]  # out, lse


def merge_(out: Tensor, lse: Tensor, *parts: Part, into: Tensor | None = None) -> None:
    """Merge one or two partial results of a softmax, in order, into out [B, H, S, Dv] and lse [B,
    H, S], both fp32.

    A part's out is bf16, fp16 or fp32 and finite, its lse fp32. A part with lse -inf changes
    nothing; any part replaces out and lse where `lse` is -inf. With `into`, the output goes there
    and `out` stays as it is; both may then have a narrower dtype, so the first of several parts
    needs no wider copy before it, and the last none after it. Inner stride 1, any other strides.
    Raises UnsupportedError for other dtypes and shapes.
    """
    check("out", out, out, FP32 if into is None else DTYPES)
    check("lse", lse, out[..., 0], FP32)
    for part_out, part_lse in parts:
        check("part_out", part_out, out)
        check("part_lse", part_lse, lse, FP32)
    into = out if into is None else into
    check("into", into, out)
    merge_launch(out, lse, parts, into).run(out)


def add_(total: Tensor, *parts: Tensor, into: Tensor | None = None) -> None:
    """Add one or two tensors (bf16, fp16 or fp32) of up to 4 dimensions to `total` (fp32).

    With `into`, the sum goes there and `total` stays as it is; both may then have a narrower dtype.
    Inner stride 1, any other strides: [T, B, H, D] takes a transposed [B, H, T, D]. Raises
    UnsupportedError for other dtypes and shapes.
    """
    check("total", total, total, FP32 if into is None else DTYPES)
    for part in parts:
        check("part", part, total)
    into = total if into is None else into
    check("into", into, total)
    add_launch(total, parts, into).run(total)


def merge_launch(out: Tensor, lse: Tensor, parts: tuple[Part, ...], into: Tensor) -> Launch:
    (first, first_lse), (second, second_lse) = parts[0], parts[-1]
    vectors = {"out": out, "part_out": first, "next_part": second, "into": into}
    rows, sizes = _joined_rows(vectors, lse, first_lse, second_lse)
    names = "out", "part", "next_part", "into", "lse", "part_lse", "next_lse"
    return _join_launch("merge_kernel", dict(zip(names, rows, strict=True)), sizes, out, len(parts))


def add_launch(total: Tensor, parts: tuple[Tensor, ...], into: Tensor) -> Launch:
    vectors = {"total": total, "part": parts[0], "next_part": parts[-1], "into": into}
    rows, sizes = _joined_rows(vectors)
    names = "total", "part", "next_part", "into"
    return _join_launch("add_kernel", dict(zip(names, rows, strict=True)), sizes, total, len(parts))


def _joined_rows(vectors: dict[str, Tensor], *numbers: Tensor) -> tuple[list[Rows], Sizes]:
    for name, x in vectors.items():
        check_inner(name, x)
        if x.ndim > 4 and not x.is_contiguous():
            raise UnsupportedError(
                f"{name}: expected at most 4 dimensions, got {x.ndim}; flatten it"
            )
    return rows_of(*vectors.values(), *numbers)


def _join_launch(
    kernel: str, rows: dict[str, Rows], sizes: Sizes, like: Tensor, parts: int
) -> Launch:
    width = like.shape[-1]
    shape = JoinShape(width, padded(width), max(1, TILE // padded(width)))
    compiled_for = {
        "shape": shape,
        "two": parts == 2,
        "num_warps": warps_of(shape.tile * shape.padded, 32),
    }
    count = like.shape[:-1].numel()
    return Launch(kernel, (-(-count // shape.tile),), rows | {"sizes": sizes} | compiled_for)


# -- as operations that autograd knows ----------------------------------------------------------


def normed(x: Tensor, weight: Tensor, norm: Norm) -> Tensor:
    """Apply an RMS norm to each vector of x; autograd uses the fused backward."""
    out: Tensor = _Normed.apply(x, weight, norm)
    return out


def gated(gate: Tensor, up: Tensor, act: Act) -> Tensor:
    """Return act(gate) * up of a gated MLP; autograd uses the fused backward."""
    out: Tensor = _Gated.apply(gate, up, act)
    return out


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Apply rotary embedding to q and k; tables of cos and sin get no gradient."""
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
        # A gradient that autograd has expanded has inner stride 0.
        dq, dk = (x if x.stride(-1) == 1 else x.contiguous() for x in (dq, dk))
        cos, sin = ctx.saved_tensors
        return *rotate(dq, dk, cos, sin, inverse=True), None, None
