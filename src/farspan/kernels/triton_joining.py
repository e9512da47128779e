"""A part joins a softmax, or is added to a sum, in place: a tile of rows a program.

Written for Triton 3.6 to 3.9.
"""

# Triton reads annotations of parameters itself: only tl.constexpr may stand there.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from farspan.kernels.triton_rows import number_place, place, size_of


@triton.jit
def _rows(sizes, shape: tl.constexpr):
    """Rows of a program, its columns, and which of both there are."""
    row = tl.program_id(0) * shape.tile + tl.arange(0, shape.tile)
    column = tl.arange(0, shape.padded)[None, :]
    fits = row < size_of(sizes.rows)
    return row, column, fits, fits[:, None] & (column < shape.width)


@triton.jit
def add_kernel(total, part, next_part, into, sizes, shape: tl.constexpr, two: tl.constexpr):
    row, column, _, mask = _rows(sizes, shape)
    one = _vectors(total, row, column, mask, sizes) + _vectors(part, row, column, mask, sizes)
    if two:
        one += _vectors(next_part, row, column, mask, sizes)
    # Rounded, where `into` is narrower, as it is stored.
    tl.store(into.base + place(into, row, sizes)[:, None] + column, one, mask=mask)


@triton.jit
def _vectors(x, row, column, mask, sizes):
    found = tl.load(x.base + place(x, row, sizes)[:, None] + column, mask=mask, other=0.0)
    return found.to(tl.float32)


@triton.jit
def _numbers(x, row, fits, sizes):
    return tl.load(x.base + number_place(x, row, sizes), mask=fits, other=float("-inf"))


@triton.jit
def _join(old, mine, new, theirs):
    """Both outputs and LSEs as one."""
    # -inf - -inf is nan; a part that saw nothing has weight 0.
    weight = tl.where(theirs == float("-inf"), 0.0, tl.sigmoid(theirs - mine))[:, None]
    # From the nearer end, as torch.lerp does it: weights of 0 and 1 are exact.
    step = new - old
    out = tl.where(weight < 0.5, old + weight * step, new - (1.0 - weight) * step)
    most = tl.maximum(mine, theirs)
    lse = most + tl.log(1.0 + tl.exp(tl.minimum(mine, theirs) - most))
    return out, tl.where(theirs == float("-inf"), mine, lse)


@triton.jit
def merge_kernel(
    out,
    lse,
    part,
    part_lse,
    next_part,
    next_lse,
    into,
    sizes,
    shape: tl.constexpr,
    two: tl.constexpr,
):
    row, column, fits, mask = _rows(sizes, shape)
    mine, theirs = _numbers(lse, row, fits, sizes), _numbers(part_lse, row, fits, sizes)
    old = _vectors(out, row, column, mask, sizes)
    old, mine = _join(old, mine, _vectors(part, row, column, mask, sizes), theirs)
    if two:
        theirs = _numbers(next_lse, row, fits, sizes)
        new = _vectors(next_part, row, column, mask, sizes)
        old, mine = _join(old, mine, new, theirs)
    tl.store(into.base + place(into, row, sizes)[:, None] + column, old, mask=mask)
    # Several warps may have read a row's lse: none overwrites it before all have.
    tl.debug_barrier()
    tl.store(lse.base + number_place(lse, row, sizes), mine, mask=fits)
