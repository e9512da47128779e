"""A part joins the softmax over the others, or is added to their sum, in one launch and in place.

`merge_` is `farspan.attention.merge.merge_`, and `add_` is `total.add_(part)`: 10 bytes an element
for a total in fp32 and a part in bf16.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from farspan.kernels.launch import (
    TILE,
    Launch,
    Rows,
    Sizes,
    check,
    check_inner,
    padded,
    rows_of,
    warps_of,
)
from farspan.lazy import load
from farspan.spec import Refused

FP32 = (torch.float32,)


class Shape(NamedTuple):
    """What the code is compiled for."""

    width: int
    padded: int
    tile: int


def merge_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Join a part into `out` [B, H, S, Dv] and `lse` [B, H, S], both fp32.

    `part_out` is bf16, fp16 or fp32 and finite, `part_lse` fp32. Where `part_lse` is -inf, nothing
    changes; where `lse` is, the part takes its place. Any strides, inner stride 1. Raises Refused
    for other dtypes and shapes.
    """
    check("out", out, out, FP32)
    check("part_out", part_out, out)
    check("lse", lse, out[..., 0], FP32)
    check("part_lse", part_lse, lse, FP32)
    merge_launch(out, lse, part_out, part_lse).run(out)


def add_(total: Tensor, part: Tensor) -> None:
    """total += part, of up to 4 dimensions; total is fp32, part bf16, fp16 or fp32.

    Any strides, inner stride 1: [T, B, H, D] takes a transposed [B, H, T, D]. Raises Refused for
    other dtypes and shapes.
    """
    check("total", total, total, FP32)
    check("part", part, total)
    add_launch(total, part).run(total)


def merge_launch(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> Launch:
    rows, sizes = _rows({"out": out, "part_out": part_out}, lse, part_lse)
    names = "out", "part", "lse", "part_lse"
    return _launch("merge_kernel", dict(zip(names, rows, strict=True)), sizes, out)


def add_launch(total: Tensor, part: Tensor) -> Launch:
    rows, sizes = _rows({"total": total, "part": part})
    return _launch("add_kernel", dict(zip(("total", "part"), rows, strict=True)), sizes, total)


def _rows(vectors: dict[str, Tensor], *numbers: Tensor) -> tuple[list[Rows], Sizes]:
    for name, x in vectors.items():
        check_inner(name, x)
        if x.ndim > 4 and not x.is_contiguous():
            raise Refused(f"{name}: expected at most 4 dimensions, got {x.ndim}; flatten it")
    return rows_of(*vectors.values(), *numbers)


def _launch(kernel: str, rows: dict[str, Rows], sizes: Sizes, like: Tensor) -> Launch:
    width = like.shape[-1]
    shape = Shape(width, padded(width), max(1, TILE // padded(width)))
    compiled_for = {"shape": shape, "num_warps": warps_of(shape.tile * shape.padded, 32)}
    count = like.shape[:-1].numel()
    function = load("farspan.kernels.triton_joining", kernel)
    return Launch(function, (-(-count // shape.tile),), rows | {"sizes": sizes} | compiled_for)
