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
def add_kernel(total, part, sizes, shape: tl.constexpr):
    row, column, _, mask = _rows(sizes, shape)
    target = total.base + place(total, row, sizes)[:, None] + column
    other = tl.load(part.base + place(part, row, sizes)[:, None] + column, mask=mask, other=0.0)
    tl.store(target, tl.load(target, mask=mask, other=0.0) + other.to(tl.float32), mask=mask)


@triton.jit
def merge_kernel(out, lse, part, part_lse, sizes, shape: tl.constexpr):
    row, column, fits, mask = _rows(sizes, shape)
    at_lse = lse.base + number_place(lse, row, sizes)
    mine = tl.load(at_lse, mask=fits, other=float("-inf"))
    at_theirs = part_lse.base + number_place(part_lse, row, sizes)
    theirs = tl.load(at_theirs, mask=fits, other=float("-inf"))
    # -inf - -inf is nan; a part that saw nothing has weight 0.
    weight = tl.where(theirs == float("-inf"), 0.0, tl.sigmoid(theirs - mine))[:, None]
    target = out.base + place(out, row, sizes)[:, None] + column
    old = tl.load(target, mask=mask, other=0.0)
    new = tl.load(part.base + place(part, row, sizes)[:, None] + column, mask=mask, other=0.0)
    new = new.to(tl.float32)
    # From the nearer end, as torch.lerp does it: weights of 0 and 1 are exact.
    step = new - old
    tl.store(
        target, tl.where(weight < 0.5, old + weight * step, new - (1.0 - weight) * step), mask=mask
    )
    most = tl.maximum(mine, theirs)
    joined = most + tl.log(1.0 + tl.exp(tl.minimum(mine, theirs) - most))
    # Several warps may have read a row's lse: none overwrites it before all have.
    tl.debug_barrier()
    tl.store(at_lse, tl.where(theirs == float("-inf"), mine, joined), mask=fits)
