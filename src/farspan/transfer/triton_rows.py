"""Sums of gradients on host, made by one kernel: rows cross the link in both directions at once.

Read, added to and written where they lie. Every row is another one, so there are no atomics, which
would not all cross the link.
"""

# Triton reads annotations of parameters itself: only tl.constexpr may stand there.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def add_rows(total, rows, values, width, padded: tl.constexpr):
    """Add row i of values [n, width] to row rows[i] of total [T, width]; one program a row."""
    i = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, padded)
    mask = column < width
    place = total + tl.load(rows + i) * width + column
    value = tl.load(values + i * width + column, mask=mask)
    tl.store(place, tl.load(place, mask=mask) + value, mask=mask)
