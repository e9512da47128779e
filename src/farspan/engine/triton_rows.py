"""Rows of main memory, taken to the device and added to where they lie, beside the computation.

What is computed at the same time needs the GPU's places for programs. So a few programs take all
tiles of rows in turn, each with enough under way for its share of the link: one program a row, or
as many as fit, would leave the others nothing until the link is done.

Sums are read, added to and written by one kernel, so that rows cross the link in both directions
at once. Every row is another one: there are no atomics, which would not all cross the link."""

import triton
import triton.language as tl

# Triton reads annotations of parameters itself: only tl.constexpr may stand there.
# mypy: disable-error-code="no-untyped-def"


@triton.jit(do_not_specialize=["count"])
def take_rows(target, source, rows, count, width, padded: tl.constexpr, tile: tl.constexpr):
    """Row i of target [count, width] becomes row rows[i] of source [T, width]."""
    column = tl.arange(0, padded)[None, :]
    for first in range(tl.program_id(0) * tile, count, tl.num_programs(0) * tile):
        i = tl.arange(0, tile).to(tl.int64) + first
        mask = (i < count)[:, None] & (column < width)
        row = tl.load(rows + i, mask=i < count, other=0)
        value = tl.load(source + row[:, None] * width + column, mask=mask)
        tl.store(target + i[:, None] * width + column, value, mask=mask)


@triton.jit(do_not_specialize=["count"])
def add_rows(total, values, rows, count, width, padded: tl.constexpr, tile: tl.constexpr):
    """Add row i of values [count, width] to row rows[i] of total [T, width]."""
    column = tl.arange(0, padded)[None, :]
    for first in range(tl.program_id(0) * tile, count, tl.num_programs(0) * tile):
        i = tl.arange(0, tile).to(tl.int64) + first
        mask = (i < count)[:, None] & (column < width)
        row = tl.load(rows + i, mask=i < count, other=0)
        place = total + row[:, None] * width + column
        value = tl.load(values + i[:, None] * width + column, mask=mask)
        tl.store(place, tl.load(place, mask=mask) + value, mask=mask)
