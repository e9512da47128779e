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
def place(x, row, sizes):
    """Offsets of rows [n] in a tensor."""
    second, third = size_of(sizes.second), size_of(sizes.third)
    rest = row // third
    first, second = (rest // second).to(tl.int64), (rest % second).to(tl.int64)
    return first * x.first + second * x.second + (row % third).to(tl.int64) * x.third
