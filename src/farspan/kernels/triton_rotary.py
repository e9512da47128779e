"""Rotary position embedding: a program turns all heads of queries and keys of one token.

cos and sin are read once a token. The first half of a rotated vector and the second are two tiles,
[heads, half]; what is not rotated is copied.

Written for Triton 3.6 to 3.9.
"""

# Triton reads annotations of parameters itself: only tl.constexpr may stand there.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def _angles(x, shape: tl.constexpr):
    """Of this program's token: those of the first half and of the second, fp32."""
    column = tl.arange(0, shape.padded_half)[None, :]
    row = tl.program_id(1).to(tl.int64) * x.batch + tl.program_id(0).to(tl.int64) * x.token
    mask = column < shape.half
    first = tl.load(x.base + row + column, mask=mask, other=0.0)
    second = tl.load(x.base + row + shape.half + column, mask=mask, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _places(x, heads: tl.constexpr):
    """Where each head of this program's token lies, [heads, 1]."""
    token = tl.program_id(1).to(tl.int64) * x.batch + tl.program_id(0).to(tl.int64) * x.token
    return x.base + token + tl.arange(0, heads).to(tl.int64)[:, None] * x.head


@triton.jit
def _turn(x, out, cos, sin, heads: tl.constexpr, padded: tl.constexpr, shape: tl.constexpr):
    there = tl.arange(0, padded)[:, None] < heads
    source, target = _places(x, padded), _places(out, padded)
    column = tl.arange(0, shape.padded_half)[None, :]
    mask = there & (column < shape.half)
    first = tl.load(source + column, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + shape.half + column, mask=mask, other=0.0).to(tl.float32)
    if shape.inverse:
        new_first = first * cos[0] + second * sin[1]
        new_second = second * cos[1] - first * sin[0]
    else:
        new_first = first * cos[0] - second * sin[0]
        new_second = second * cos[1] + first * sin[1]
    tl.store(target + column, new_first, mask=mask)
    tl.store(target + shape.half + column, new_second, mask=mask)
    if shape.rest > 0:
        column = 2 * shape.half + tl.arange(0, shape.padded_rest)[None, :]
        mask = there & (column < 2 * shape.half + shape.rest)
        tl.store(target + column, tl.load(source + column, mask=mask), mask=mask)


@triton.jit
def rotate_kernel(q, k, q_out, k_out, cos, sin, shape: tl.constexpr):
    of_cos, of_sin = _angles(cos, shape), _angles(sin, shape)
    _turn(q, q_out, of_cos, of_sin, shape.heads, shape.padded_heads, shape)
    _turn(k, k_out, of_cos, of_sin, shape.kv_heads, shape.padded_kv_heads, shape)
