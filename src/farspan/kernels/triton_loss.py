"""Cross-entropy of rows of logits: one program a row.

First pass: the greatest logit so far, and for each place in a block the sum of exponentials less
it, so that a block needs one reduction. Second pass: the gradient takes the place of the logits.
A row of 152,064 bf16 logits is 0.3 MB: the second read is likely from the L2 cache.

Written for Triton 3.6 to 3.9.
"""

# Triton reads annotations of parameters itself: only tl.constexpr may stand there.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def _tanh(y):
    """By its series below 1/4, where 1 - exp(-2 y) would lose digits; relative error 3e-7."""
    square = y * y
    series = -17.0 / 315 + square * (62.0 / 2835 - square * (1382.0 / 155925))
    series = 1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * series))
    e = tl.exp(-2.0 * tl.abs(y))
    large = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(y) < 0.25, y * series, tl.where(y < 0, -large, large))


@triton.jit
def _logits(place, column, size, cap, shape: tl.constexpr):
    """Logits, -inf beyond the last, and their derivative by what is stored."""
    mask = column < size
    x = tl.load(place + column, mask=mask, other=float("-inf")).to(tl.float32)
    slope = 1.0
    if shape.capped:
        bent = _tanh(x / cap)
        x = tl.where(mask, cap * bent, float("-inf"))
        slope = 1.0 - bent * bent
    return x, slope


@triton.jit
def _softmax(place, size, cap, shape: tl.constexpr):
    """The greatest logit, and the sum of exp(logit - greatest)."""
    most = float("-inf")
    sums = tl.full([shape.block], 0.0, tl.float32)
    for start in tl.range(0, size, shape.block, num_stages=shape.stages):
        x, _ = _logits(place, start + tl.arange(0, shape.block), size, cap, shape)
        new_most = tl.maximum(most, tl.max(x, 0))
        # -inf - -inf is nan: where all are -inf so far, they are compared with 0 instead.
        base = tl.where(new_most == float("-inf"), 0.0, new_most)
        sums = sums * tl.exp(most - base) + tl.exp(x - base)
        most = new_most
    return most, tl.sum(sums, 0)


@triton.jit
def _differentiate(place, size, softmax, target, scale, cap, shape: tl.constexpr):
    """`softmax` is the greatest logit and the inverse of the sum."""
    for start in tl.range(0, size, shape.block, num_stages=shape.stages):
        column = start + tl.arange(0, shape.block)
        x, slope = _logits(place, column, size, cap, shape)
        share = tl.exp(x - softmax[0]) * softmax[1]
        gradient = (share - tl.where(column == target, 1.0, 0.0)) * scale * slope
        tl.store(place + column, gradient, mask=column < size)


@triton.jit
def _clear(place, size, shape: tl.constexpr):
    for start in tl.range(0, size, shape.block):
        column = start + tl.arange(0, shape.block)
        zeros = tl.full([shape.block], 0.0, tl.float32)
        tl.store(place + column, zeros, mask=column < size)


@triton.jit
def loss_kernel(logits, stride, targets, losses, size, scale, cap, shape: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = logits + row * stride
    target = tl.load(targets + row)
    if target == shape.ignored:
        tl.store(losses + row, 0.0)
        if shape.write:
            _clear(place, size, shape)
    else:
        there = (target >= 0) & (target < size)
        x = tl.load(place + target, mask=there, other=float("nan")).to(tl.float32)
        if shape.capped:
            x = cap * _tanh(x / cap)
        most, total = _softmax(place, size, cap, shape)
        # What there is no logit for has a loss of nan: PyTorch's kernel would end the process.
        tl.store(losses + row, (most - x) + tl.log(total))
        if shape.write:
            # The target's logit is read by all before one overwrites it.
            tl.debug_barrier()
            softmax = most, 1.0 / total
            _differentiate(place, size, softmax, target.to(tl.int32), scale, cap, shape)
