"""act(gate) * up and its backward, a block of a row a program.

act is computed in fp32 and rounded to the dtype of gate before the product, as PyTorch does it.
tanh(y) = 2 sigmoid(2 y) - 1 turns the approximate GELU into x sigmoid(2 y): one exponential.

Written for Triton 3.6 to 3.9.
"""

# Triton reads annotations of parameters itself: only tl.constexpr may stand there.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

TWICE_ROOT_2_OVER_PI = tl.constexpr(1.5957691216057308)
CUBIC = tl.constexpr(0.044715)
ROOT_HALF = tl.constexpr(0.7071067811865476)
DENSITY_AT_0 = tl.constexpr(0.3989422804014327)


@triton.jit
def _act(x, act: tl.constexpr):
    """act(x) and its derivative, fp32."""
    if act == "GELU":
        share = 0.5 + 0.5 * tl.erf(x * ROOT_HALF)
        slope = share + x * DENSITY_AT_0 * tl.exp(-0.5 * x * x)
    else:
        if act == "GELU_TANH":
            y = TWICE_ROOT_2_OVER_PI * x * (1.0 + CUBIC * x * x)
            dy = TWICE_ROOT_2_OVER_PI * (1.0 + 3.0 * CUBIC * x * x)
        else:
            y = x
            dy = 1.0
        # sigmoid(y) and sigmoid(-y), each without a difference, which would lose its digits.
        e = tl.exp(-tl.abs(y))
        share = tl.where(y > 0, 1.0, e) / (1.0 + e)
        rest = tl.where(y > 0, e, 1.0) / (1.0 + e)
        slope = share + x * share * rest * dy
    return x * share, slope


@triton.jit
def _load(x, row, column, mask):
    return tl.load(x.base + row * x.row + column, mask=mask, other=0.0)


@triton.jit
def _store(x, row, column, mask, values):
    tl.store(x.base + row * x.row + column, values, mask=mask)


@triton.jit
def _block(width, block: tl.constexpr):
    """Row and columns of a program; both int64: contiguous tensors are one row."""
    blocks = tl.cdiv(width, block)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * block + tl.arange(0, block)
    return row, column, column < width


@triton.jit
def forward_kernel(gate, up, out, width, act: tl.constexpr, block: tl.constexpr):
    row, column, mask = _block(width, block)
    x = _load(gate, row, column, mask)
    value = _act(x.to(tl.float32), act)[0].to(x.dtype).to(tl.float32)
    _store(out, row, column, mask, value * _load(up, row, column, mask).to(tl.float32))


@triton.jit
def again_kernel(dout, gate, up, out, dgate, dup, width, act: tl.constexpr, block: tl.constexpr):
    row, column, mask = _block(width, block)
    x = _load(gate, row, column, mask)
    other = _load(up, row, column, mask).to(tl.float32)
    gradient = _load(dout, row, column, mask).to(tl.float32)
    value, slope = _act(x.to(tl.float32), act)
    rounded = value.to(x.dtype).to(tl.float32)
    _store(out, row, column, mask, rounded * other)
    _store(dgate, row, column, mask, gradient * other * slope)
    _store(dup, row, column, mask, gradient * rounded)


@triton.jit
def backward_kernel(dout, gate, up, dgate, dup, width, act: tl.constexpr, block: tl.constexpr):
    row, column, mask = _block(width, block)
    x = _load(gate, row, column, mask)
    other = _load(up, row, column, mask).to(tl.float32)
    gradient = _load(dout, row, column, mask).to(tl.float32)
    value, slope = _act(x.to(tl.float32), act)
    _store(dgate, row, column, mask, gradient * other * slope)
    _store(dup, row, column, mask, gradient * value.to(x.dtype).to(tl.float32))
