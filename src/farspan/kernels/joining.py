"""A part joins the softmax over the others, or is added to their sum, in one launch and in place.

`merge_` is `attention.backends.merge_`, and `add_` is `total.add_(part)`: 10 bytes an element for a
total in fp32 and a part in bf16, 12 for two parts at once, 2 less where the total is narrow before
or after.
"""

from typing import NamedTuple

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
    padded,
    rows_of,
    warps_of,
)
from farspan.spec import UnsupportedError

FP32 = (torch.float32,)


class JoinShape(NamedTuple):
    """What the code is compiled for."""

    width: int
    padded: int
    tile: int


Part = tuple[Tensor, Tensor]  # out, lse


def merge_(out: Tensor, lse: Tensor, *parts: Part, into: Tensor | None = None) -> None:
    """Join one or two parts, in this order, into out [B, H, S, Dv] and lse [B, H, S], both fp32.

    A part's out is bf16, fp16 or fp32 and finite, its lse fp32. Where that is -inf, nothing
    changes; where `lse` is, the part takes its place. With `into` the output goes there, and both
    that and `out`, which stays as it is, may be narrow: the first of several parts needs no wider
    copy before it, the last none after it. Any strides, inner stride 1. Raises UnsupportedError for
    other dtypes and shapes.
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
    """total += one or two parts, of up to 4 dimensions; total is fp32, parts bf16, fp16 or fp32.

    With `into` the sum goes there, and both that and `total`, which stays as it is, may be narrow.
    Any strides, inner stride 1: [T, B, H, D] takes a transposed [B, H, T, D]. Raises
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
    rows, sizes = _rows(vectors, lse, first_lse, second_lse)
    names = "out", "part", "next_part", "into", "lse", "part_lse", "next_lse"
    return _launch("merge_kernel", dict(zip(names, rows, strict=True)), sizes, out, len(parts))


def add_launch(total: Tensor, parts: tuple[Tensor, ...], into: Tensor) -> Launch:
    vectors = {"total": total, "part": parts[0], "next_part": parts[-1], "into": into}
    rows, sizes = _rows(vectors)
    names = "total", "part", "next_part", "into"
    return _launch("add_kernel", dict(zip(names, rows, strict=True)), sizes, total, len(parts))


def _rows(vectors: dict[str, Tensor], *numbers: Tensor) -> tuple[list[Rows], Sizes]:
    for name, x in vectors.items():
        check_inner(name, x)
        if x.ndim > 4 and not x.is_contiguous():
            raise UnsupportedError(
                f"{name}: expected at most 4 dimensions, got {x.ndim}; flatten it"
            )
    return rows_of(*vectors.values(), *numbers)


def _launch(kernel: str, rows: dict[str, Rows], sizes: Sizes, like: Tensor, parts: int) -> Launch:
    width = like.shape[-1]
    shape = JoinShape(width, padded(width), max(1, TILE // padded(width)))
    compiled_for = {
        "shape": shape,
        "two": parts == 2,
        "num_warps": warps_of(shape.tile * shape.padded, 32),
    }
    count = like.shape[:-1].numel()
    return Launch(kernel, (-(-count // shape.tile),), rows | {"sizes": sizes} | compiled_for)
