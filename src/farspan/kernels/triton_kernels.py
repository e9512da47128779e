"""Triton kernels of `operations` and of copies, loaded by name when one is launched.

    norm     a program has a tile of whole rows: one wide row, or many narrow ones. The backward
             runs as many programs as fit the GPU at one time, each over its tiles in turn. A
             program writes dx and its own sum of dweight; PyTorch adds up the sums
    gate     a program has a block of a row. act is computed in fp32 and rounded to the dtype of
             gate before the product, as in PyTorch
    rotary   a program turns all heads of queries and keys of one token; cos and sin are read once
    loss     a program has a row, in two passes: the greatest logit and the sum of exponentials;
             then the gradient overwrites the logits. A row of 152,064 bf16 logits is 0.3 MB: the
             second read is likely from the L2 cache
    dropping a program has a block of a row, whose mask follows from two words of the row and one
             of each column (`farspan.hf.dropout` has the formula)
    joining  a program has a tile of rows; a part is merged into a softmax, or added to a sum, in
             place
    rows     rows of main memory are taken to the device and added to in place, while other work
             needs the GPU's room for programs. So a few programs take all tiles in turn, each with
             enough transfers under way for its share of the link. One kernel reads sums, adds and
             writes, so rows cross the link both ways at once. All rows are distinct, so atomics
             are not needed; not every link carries them

Offsets are int64, since tensors exceed 2**31 elements. Written for Triton 3.6 to 3.9.
"""

# Triton reads annotations of parameters itself: only tl.constexpr may stand there.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def size_of(veiled):
    """Decode an integer that `launch.veiled` has encoded."""
    return veiled >> 4


@triton.jit
def _indices(row, sizes):
    second, third = size_of(sizes.second), size_of(sizes.third)
    rest = row // third
    return (rest // second).to(tl.int64), (rest % second).to(tl.int64), (row % third).to(tl.int64)


@triton.jit
def row_offsets(x, row, sizes):
    """Return the offsets, in elements, of the vectors with the numbers `row` [n] in tensor `x`."""
    i = _indices(row, sizes)
    return i[0] * x.first + i[1] * x.second + i[2] * x.third


@triton.jit
def number_offsets(x, row, sizes):
    """Return the offsets, in elements, of the entries with the numbers `row` [n] in tensor `x`,
    which has one entry per vector. `launch.veiled` has encoded its strides."""
    i = _indices(row, sizes)
    return i[0] * size_of(x.first) + i[1] * size_of(x.second) + i[2] * size_of(x.third)


# -- norm ---------------------------------------------------------------------------------------


@triton.jit
def norm_kernel(x, weight, out, rstd, sizes, shape: tl.constexpr):
    row = tl.program_id(0) * shape.tile + tl.arange(0, shape.tile)
    column = tl.arange(0, shape.padded)[None, :]
    fits = row < size_of(sizes.rows)
    mask = fits[:, None] & (column < shape.width)
    values = tl.load(x.base + row_offsets(x, row, sizes)[:, None] + column, mask=mask, other=0.0)
    wide = values.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 1) / shape.width + shape.eps)
    normal = wide * inverse[:, None]
    if shape.cast:
        normal = normal.to(values.dtype).to(tl.float32)
    scale = tl.load(weight + column, mask=column < shape.width, other=0.0).to(tl.float32)
    result = normal * (scale + shape.offset)
    tl.store(out.base + row_offsets(out, row, sizes)[:, None] + column, result, mask=mask)
    tl.store(rstd + row, inverse, mask=fits)


@triton.jit
def norm_backward_kernel(dout, x, weight, rstd, dx, partial, sizes, shape: tl.constexpr):
    """Compute dx, and each program's sum of dweight as a row of `partial` [programs, width]."""
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
        values = tl.load(
            x.base + row_offsets(x, row, sizes)[:, None] + column, mask=mask, other=0.0
        )
        given = tl.load(
            dout.base + row_offsets(dout, row, sizes)[:, None] + column, mask=mask, other=0.0
        )
        inverse = tl.load(rstd + row, mask=fits, other=0.0)[:, None]
        gradient = given.to(tl.float32)
        normal = values.to(tl.float32) * inverse
        weighted = gradient * scale
        along = tl.sum(weighted * normal, 1)[:, None] / shape.width
        result = (weighted - normal * along) * inverse
        tl.store(dx.base + row_offsets(dx, row, sizes)[:, None] + column, result, mask=mask)
        if shape.cast:
            normal = normal.to(values.dtype).to(tl.float32)
        total += gradient * normal
    at = partial + tl.program_id(0).to(tl.int64) * shape.width + tl.arange(0, shape.padded)
    tl.store(at, tl.sum(total, 0), mask=tl.arange(0, shape.padded) < shape.width)


# -- gate ---------------------------------------------------------------------------------------
#
# tanh(y) = 2 sigmoid(2 y) - 1 makes the approximate GELU x sigmoid(2 y): one exponential.


TWICE_ROOT_2_OVER_PI = tl.constexpr(1.5957691216057308)
CUBIC = tl.constexpr(0.044715)
ROOT_HALF = tl.constexpr(0.7071067811865476)
DENSITY_AT_0 = tl.constexpr(0.3989422804014327)


@triton.jit
def _act(x, act: tl.constexpr):
    """Return act(x) and its derivative at x, both fp32."""
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
        # sigmoid(y) and sigmoid(-y) are computed without a difference, which would lose digits.
        e = tl.exp(-tl.abs(y))
        share = tl.where(y > 0, 1.0, e) / (1.0 + e)
        rest = tl.where(y > 0, e, 1.0) / (1.0 + e)
        slope = share + x * share * rest * dy
    return x * share, slope


@triton.jit
def _load_block(x, row, column, mask):
    return tl.load(x.base + row * x.row + column, mask=mask, other=0.0)


@triton.jit
def _store_block(x, row, column, mask, values):
    tl.store(x.base + row * x.row + column, values, mask=mask)


@triton.jit
def _block(width, block: tl.constexpr):
    """Return the row, columns (int64) and mask of the elements that a Triton program computes; a
    contiguous tensor is one row."""
    blocks = tl.cdiv(width, block)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * block + tl.arange(0, block)
    return row, column, column < width


@triton.jit
def gate_kernel(gate, up, out, width, act: tl.constexpr, block: tl.constexpr):
    row, column, mask = _block(width, block)
    x = _load_block(gate, row, column, mask)
    value = _act(x.to(tl.float32), act)[0].to(x.dtype).to(tl.float32)
    _store_block(out, row, column, mask, value * _load_block(up, row, column, mask).to(tl.float32))


@triton.jit
def gate_again_kernel(
    dout, gate, up, out, dgate, dup, width, act: tl.constexpr, block: tl.constexpr
):
    row, column, mask = _block(width, block)
    x = _load_block(gate, row, column, mask)
    other = _load_block(up, row, column, mask).to(tl.float32)
    gradient = _load_block(dout, row, column, mask).to(tl.float32)
    value, slope = _act(x.to(tl.float32), act)
    rounded = value.to(x.dtype).to(tl.float32)
    _store_block(out, row, column, mask, rounded * other)
    _store_block(dgate, row, column, mask, gradient * other * slope)
    _store_block(dup, row, column, mask, gradient * rounded)


@triton.jit
def gate_backward_kernel(dout, gate, up, dgate, dup, width, act: tl.constexpr, block: tl.constexpr):
    row, column, mask = _block(width, block)
    x = _load_block(gate, row, column, mask)
    other = _load_block(up, row, column, mask).to(tl.float32)
    gradient = _load_block(dout, row, column, mask).to(tl.float32)
    value, slope = _act(x.to(tl.float32), act)
    _store_block(dgate, row, column, mask, gradient * other * slope)
    _store_block(dup, row, column, mask, gradient * value.to(x.dtype).to(tl.float32))


# -- rotary -------------------------------------------------------------------------------------
#
# The two halves of a rotated vector are two tiles, [heads, half]; the rest is copied.


@triton.jit
def _angles(x, shape: tl.constexpr):
    """Load cos or sin of a program's token, for the first and the second half of a vector, fp32."""
    column = tl.arange(0, shape.padded_half)[None, :]
    row = tl.program_id(1).to(tl.int64) * x.batch + tl.program_id(0).to(tl.int64) * x.token
    mask = column < shape.half
    first = tl.load(x.base + row + column, mask=mask, other=0.0)
    second = tl.load(x.base + row + shape.half + column, mask=mask, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _places(x, heads: tl.constexpr):
    """Return the address of each head's vector for a program's token, [heads, 1]."""
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


# -- loss ---------------------------------------------------------------------------------------
#
# The first pass keeps the greatest logit so far and, for each column of a block, the sum of
# exponentials relative to it, so that a block needs one reduction.


@triton.jit
def _tanh(y):
    """Return tanh(y): a series below 1/4, where 1 - exp(-2 y) loses digits. Relative error 3e-7."""
    square = y * y
    series = -17.0 / 315 + square * (62.0 / 2835 - square * (1382.0 / 155925))
    series = 1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * series))
    e = tl.exp(-2.0 * tl.abs(y))
    large = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(y) < 0.25, y * series, tl.where(y < 0, -large, large))


@triton.jit
def _logits(place, column, size, cap, shape: tl.constexpr):
    """Return a block's logits in fp32 after soft-capping (-inf beyond the last logit), and their
    derivative by the stored logits (1 without a cap)."""
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
    """Return a row's largest logit, and the sum of exp(logit - largest)."""
    most = float("-inf")
    sums = tl.full([shape.block], 0.0, tl.float32)
    for start in tl.range(0, size, shape.block, num_stages=shape.stages):
        x, _ = _logits(place, start + tl.arange(0, shape.block), size, cap, shape)
        new_most = tl.maximum(most, tl.max(x, 0))
        # -inf - -inf is nan: while all logits are -inf, they are compared with 0 instead.
        base = tl.where(new_most == float("-inf"), 0.0, new_most)
        sums = sums * tl.exp(most - base) + tl.exp(x - base)
        most = new_most
    return most, tl.sum(sums, 0)


@triton.jit
def _differentiate(place, size, softmax, target, scale, cap, shape: tl.constexpr):
    """Overwrite a row's logits with the loss's gradient; `softmax` is (largest logit, 1 / sum)."""
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
        # A target without a logit has a loss of nan; PyTorch's kernel would end the process.
        tl.store(losses + row, (most - x) + tl.log(total))
        if shape.write:
            # All threads must read the target's logit before one overwrites it.
            tl.debug_barrier()
            softmax = most, 1.0 / total
            _differentiate(place, size, softmax, target.to(tl.int32), scale, cap, shape)


# -- joining ------------------------------------------------------------------------------------


@triton.jit
def _tile_rows(sizes, shape: tl.constexpr):
    """Return a program's row numbers and columns, and the masks of rows and of elements."""
    row = tl.program_id(0) * shape.tile + tl.arange(0, shape.tile)
    column = tl.arange(0, shape.padded)[None, :]
    fits = row < size_of(sizes.rows)
    return row, column, fits, fits[:, None] & (column < shape.width)


@triton.jit
def add_kernel(total, part, next_part, into, sizes, shape: tl.constexpr, two: tl.constexpr):
    row, column, _, mask = _tile_rows(sizes, shape)
    result = _vectors(total, row, column, mask, sizes) + _vectors(part, row, column, mask, sizes)
    if two:
        result += _vectors(next_part, row, column, mask, sizes)
    # The store rounds if `into` is narrower.
    tl.store(into.base + row_offsets(into, row, sizes)[:, None] + column, result, mask=mask)


@triton.jit
def _vectors(x, row, column, mask, sizes):
    values = tl.load(x.base + row_offsets(x, row, sizes)[:, None] + column, mask=mask, other=0.0)
    return values.to(tl.float32)


@triton.jit
def _numbers(x, row, fits, sizes):
    return tl.load(x.base + number_offsets(x, row, sizes), mask=fits, other=float("-inf"))


@triton.jit
def _join(old, mine, new, theirs):
    """Return out and lse of two partial softmax results, merged."""
    # -inf - -inf is nan; a part that saw no key has weight 0.
    weight = tl.where(theirs == float("-inf"), 0.0, tl.sigmoid(theirs - mine))[:, None]
    # Interpolate from the nearer end, as torch.lerp does: weights of 0 and 1 are exact.
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
    row, column, fits, mask = _tile_rows(sizes, shape)
    mine, theirs = _numbers(lse, row, fits, sizes), _numbers(part_lse, row, fits, sizes)
    old = _vectors(out, row, column, mask, sizes)
    old, mine = _join(old, mine, _vectors(part, row, column, mask, sizes), theirs)
    if two:
        theirs = _numbers(next_lse, row, fits, sizes)
        new = _vectors(next_part, row, column, mask, sizes)
        old, mine = _join(old, mine, new, theirs)
    tl.store(into.base + row_offsets(into, row, sizes)[:, None] + column, old, mask=mask)
    # Several warps may read a row's lse: all must have read it before one overwrites it.
    tl.debug_barrier()
    tl.store(lse.base + number_offsets(lse, row, sizes), mine, mask=fits)


# -- rows of main memory, during the computation -------------------------------------------------


@triton.jit(do_not_specialize=["count"])
def take_rows(target, source, rows, count, width, padded: tl.constexpr, tile: tl.constexpr):
    """Copy rows of `source` [T, width], by indices `rows` [count], to `target` [count, width]."""
    column = tl.arange(0, padded)[None, :]
    for first in range(tl.program_id(0) * tile, count, tl.num_programs(0) * tile):
        i = tl.arange(0, tile).to(tl.int64) + first
        mask = (i < count)[:, None] & (column < width)
        row = tl.load(rows + i, mask=i < count, other=0)
        value = tl.load(source + row[:, None] * width + column, mask=mask)
        tl.store(target + i[:, None] * width + column, value, mask=mask)


@triton.jit(do_not_specialize=["count"])
def add_rows(total, values, rows, count, width, padded: tl.constexpr, tile: tl.constexpr):
    """Add `values` [count, width] to rows of `total` [T, width], by indices `rows` [count]."""
    column = tl.arange(0, padded)[None, :]
    for first in range(tl.program_id(0) * tile, count, tl.num_programs(0) * tile):
        i = tl.arange(0, tile).to(tl.int64) + first
        mask = (i < count)[:, None] & (column < width)
        row = tl.load(rows + i, mask=i < count, other=0)
        place = total + row[:, None] * width + column
        value = tl.load(values + i[:, None] * width + column, mask=mask)
        tl.store(place, tl.load(place, mask=mask) + value, mask=mask)


# -- dropping ------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["below"])
def drop_kernel(x, out, words, features, below, scale, width: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    mask = column < width
    first = tl.load(words + 2 * row).to(tl.uint32, bitcast=True)
    second = tl.load(words + 2 * row + 1).to(tl.uint32, bitcast=True)
    number = first + tl.load(features + column, mask=mask, other=0).to(tl.uint32, bitcast=True)
    number = (number ^ (number >> 16)) * 0x7FEB352D
    number = (number ^ (number >> 15) ^ second) * 0x846CA68B
    number = (number ^ (number >> 16)) * 0x9E3779B1
    value = tl.load(x + row * width + column, mask=mask, other=0.0).to(tl.float32) * scale
    kept = tl.where(number.to(tl.int32, bitcast=True) < below, 0.0, value)
    tl.store(out + row * width + column, kept.to(out.dtype.element_ty), mask=mask)
