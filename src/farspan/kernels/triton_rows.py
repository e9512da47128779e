"""Where rows lie, for the kernels: offsets are int64, since tensors go beyond 2**31 elements."""

# Triton reads annotations of parameters itself: only tl.constexpr may stand there.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def size_of(veiled):
    """An integer of `Sizes`."""
    return veiled >> 4


@triton.jit
def _indices(row, sizes):
    second, third = size_of(sizes.second), size_of(sizes.third)
    rest = row // third
    return (rest // second).to(tl.int64), (rest % second).to(tl.int64), (row % third).to(tl.int64)


@triton.jit
def place(x, row, sizes):
    """Offsets of rows [n] in a tensor of vectors."""
    i = _indices(row, sizes)
    return i[0] * x.first + i[1] * x.second + i[2] * x.third


@triton.jit
def number_place(x, row, sizes):
    """Offsets of rows [n] in a tensor of one number a row, whose strides are `veiled`."""
    i = _indices(row, sizes)
    return i[0] * size_of(x.first) + i[1] * size_of(x.second) + i[2] * size_of(x.third)
