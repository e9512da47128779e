"""RMS norm of rows. A program has a tile of whole rows: one row that is wide, many that are narrow.

    forward   one program a tile
    backward  as many programs as the GPU runs at one time, each over its tiles in turn: dx, and its
              own sum of dweight, which PyTorch adds up; loads of the next tile are under way

Written for Triton 3.6 to 3.9.
"""

# Triton reads annotations of parameters itself: only tl.constexpr may stand there.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from farspan.kernels.triton_rows import place, size_of


@triton.jit
def forward_kernel(x, weight, out, rstd, sizes, shape: tl.constexpr):
    row = tl.program_id(0) * shape.tile + tl.arange(0, shape.tile)
    column = tl.arange(0, shape.padded)[None, :]
    fits = row < size_of(sizes.rows)
    mask = fits[:, None] & (column < shape.width)
    values = tl.load(x.base + place(x, row, sizes)[:, None] + column, mask=mask, other=0.0)
    wide = values.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 1) / shape.width + shape.eps)
    normal = wide * inverse[:, None]
    if shape.cast:
        normal = normal.to(values.dtype).to(tl.float32)
    scale = tl.load(weight + column, mask=column < shape.width, other=0.0).to(tl.float32)
    result = normal * (scale + shape.offset)
    tl.store(out.base + place(out, row, sizes)[:, None] + column, result, mask=mask)
    tl.store(rstd + row, inverse, mask=fits)


@triton.jit
def backward_kernel(dout, x, weight, rstd, dx, partial, sizes, shape: tl.constexpr):
    """Row p of partial [programs, width] is program p's sum of dweight."""
    count = size_of(sizes.rows)
    column = tl.arange(0, shape.padded)[None, :]
    inside = column < shape.width
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + shape.offset
    total = tl.full([shape.tile, shape.padded], 0.0, tl.float32)
    first, step = tl.program_id(0) * shape.tile, tl.num_programs(0) * shape.tile
    for start in tl.range(first, count, step, num_stages=shape.stages):
        row = start + tl.arange(0, shape.tile)
        fits = row < count
        mask = fits[:, None] & inside
        values = tl.load(x.base + place(x, row, sizes)[:, None] + column, mask=mask, other=0.0)
        given = tl.load(dout.base + place(dout, row, sizes)[:, None] + column, mask=mask, other=0.0)
        inverse = tl.load(rstd + row, mask=fits, other=0.0)[:, None]
        gradient = given.to(tl.float32)
        normal = values.to(tl.float32) * inverse
        weighted = gradient * scale
        along = tl.sum(weighted * normal, 1)[:, None] / shape.width
        result = (weighted - normal * along) * inverse
        tl.store(dx.base + place(dx, row, sizes)[:, None] + column, result, mask=mask)
        if shape.cast:
            normal = normal.to(values.dtype).to(tl.float32)
        total += gradient * normal
    at = partial + tl.program_id(0).to(tl.int64) * shape.width + tl.arange(0, shape.padded)
    tl.store(at, tl.sum(total, 0), mask=tl.arange(0, shape.padded) < shape.width)
