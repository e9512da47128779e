"""The operations that decoder layers are made of, on phantoms: what each allocates, saves and, in
its backward, allocates again. All follow torch's own formulas (derivatives of torch 2.13)."""

from collections.abc import Sequence

from farspan.plan.cell.phantom import (
    Found,
    Phantom,
    Shape,
    copied,
    dense,
    pointwise,
    record,
    reduced,
    viewed,
)

Saved = tuple[Phantom | None, ...]
Gradients = list[Phantom | None]


def _one(gradients: Gradients) -> Phantom:
    assert gradients[0] is not None
    return gradients[0]


def _have(saved: Saved, index: int = 0) -> Phantom:
    found = saved[index]
    assert found is not None
    return found


def wants(x: Phantom | None) -> bool:
    """A gradient may come back to it."""
    return x is not None and x.node is not None


# -- views -------------------------------------------------------------------------------------


def _view(x: Phantom, shape: Shape, strides: Shape, offset: int = 0) -> Phantom:
    return Phantom(x.storage, shape, strides, x.offset + offset, x.width)


def reshape(x: Phantom, shape: Shape) -> Phantom:
    """A view where memory allows it, else a copy."""
    strides = viewed(x.shape, x.strides, shape)
    before = x.shape
    if strides is None:
        copy = copied(x)
        copy.node, copy.slot = x.node, x.slot
        x, strides = copy, dense(shape)
    return record(
        _view(x, shape, strides), [x], lambda gradients, _: [reshape(_one(gradients), before)]
    )


def _fresh(x: Phantom, shape: Shape) -> Phantom:
    """A tensor of another shape that is written from x."""
    out = x.memory.new(shape, x.width)
    x.memory.traffic += x.size + out.size
    return out


def transpose(x: Phantom, first: int, second: int) -> Phantom:
    order = list(range(len(x.shape)))
    order[first], order[second] = order[second], order[first]
    return permute(x, tuple(order))


def permute(x: Phantom, order: Shape) -> Phantom:
    back = tuple(order.index(dim) for dim in range(len(order)))
    out = _view(x, tuple(x.shape[d] for d in order), tuple(x.strides[d] for d in order))
    return record(out, [x], lambda gradients, _: [permute(_one(gradients), back)])


def unsqueeze(x: Phantom, dim: int) -> Phantom:
    """A dimension of extent 1 before `dim`."""
    step = x.shape[dim] * x.strides[dim] if dim < len(x.shape) else 1
    shape = (*x.shape[:dim], 1, *x.shape[dim:])
    strides = (*x.strides[:dim], step, *x.strides[dim:])
    before = x.shape
    return record(
        _view(x, shape, strides), [x], lambda gradients, _: [reshape(_one(gradients), before)]
    )


def narrow(x: Phantom, dim: int, start: int, stop: int, step: int = 1) -> Phantom:
    """Every `step`th index of [start, stop) along a dimension; its gradient is as large as x."""
    count = -(-(stop - start) // step)
    shape = (*x.shape[:dim], count, *x.shape[dim + 1 :])
    strides = (*x.strides[:dim], x.strides[dim] * step, *x.strides[dim + 1 :])
    before = x.shape

    def backward(gradients: Gradients, _: Saved) -> Found:
        return [_fresh(_one(gradients), before)]

    return record(_view(x, shape, strides, start * x.strides[dim]), [x], backward)


def split(x: Phantom, dim: int, count: int) -> list[Phantom]:
    """Equal parts along a dimension, whose gradients come back as one tensor."""
    part = x.shape[dim] // count
    before = x.shape

    def backward(gradients: Gradients, _: Saved) -> Found:
        known = next(gradient for gradient in gradients if gradient is not None)
        # Parts that no gradient reached count as zeros.
        missing = [
            known.memory.new(known.shape, known.width) for gradient in gradients if gradient is None
        ]
        whole = _fresh(known, before)
        whole.memory.traffic += whole.size - known.size
        del missing
        return [whole]

    whole = record(_view(x, x.shape, x.strides), [x], backward)
    shape = (*x.shape[:dim], part, *x.shape[dim + 1 :])
    parts = [_view(x, shape, x.strides, i * part * x.strides[dim]) for i in range(count)]
    for slot, piece in enumerate(parts):
        piece.node, piece.slot = whole.node, slot
    return parts


def contiguous(x: Phantom) -> Phantom:
    if x.contiguous():
        return x
    return record(copied(x), [x], lambda gradients, _: [_one(gradients)])


def as_width(x: Phantom, width: int) -> Phantom:
    """A cast; nothing happens where it changes nothing."""
    if x.width == width:
        return x
    before = x.width
    out = pointwise(x, width=width)
    return record(out, [x], lambda gradients, _: [as_width(_one(gradients), before)])


def concatenate(parts: Sequence[Phantom], dim: int) -> Phantom:
    total = sum(part.shape[dim] for part in parts)
    shape = (*parts[0].shape[:dim], total, *parts[0].shape[dim + 1 :])
    out = parts[0].memory.new(shape, parts[0].width)
    out.memory.traffic += 2 * out.size
    extents = [part.shape[dim] for part in parts]

    def backward(gradients: Gradients, _: Saved) -> Found:
        starts = [sum(extents[:i]) for i in range(len(extents))]
        return [
            narrow(_one(gradients), dim, start, start + extent)
            for start, extent in zip(starts, extents, strict=True)
        ]

    return record(out, parts, backward)


# -- elementwise -------------------------------------------------------------------------------


def add(a: Phantom, b: Phantom) -> Phantom:
    return record(pointwise(a, b), [a, b], lambda gradients, _: [_one(gradients), _one(gradients)])


def multiply(a: Phantom, b: Phantom) -> Phantom:
    needs = wants(a), wants(b)

    def backward(gradients: Gradients, saved: Saved) -> Found:
        second = pointwise(_one(gradients), _have(saved, 0)) if needs[1] else None
        first = pointwise(_one(gradients), _have(saved, 1)) if needs[0] else None
        return [first, second]

    saved = [a if needs[1] else None, b if needs[0] else None]
    return record(pointwise(a, b), [a, b], backward, saved)


def scaled(x: Phantom) -> Phantom:
    """Times a number, or plus or minus one, or negated: nothing is saved."""
    return record(pointwise(x), [x], lambda gradients, _: [pointwise(_one(gradients))])


def shifted(x: Phantom) -> Phantom:
    """Plus a number: the gradient passes."""
    return record(pointwise(x), [x], lambda gradients, _: [_one(gradients)])


def power(x: Phantom) -> Phantom:
    def backward(gradients: Gradients, saved: Saved) -> Found:
        lower = pointwise(_have(saved))
        slope = pointwise(lower)
        return [pointwise(_one(gradients), slope)]

    return record(pointwise(x), [x], backward, [x])


def mean_of_rows(x: Phantom) -> Phantom:
    before = x.shape

    def backward(gradients: Gradients, _: Saved) -> Found:
        return [_fresh(_one(gradients), before)]

    return record(reduced(x, (*x.shape[:-1], 1)), [x], backward)


def reciprocal_root(x: Phantom) -> Phantom:
    out = pointwise(x)

    def backward(gradients: Gradients, saved: Saved) -> Found:
        cube = pointwise(_have(saved))
        half = pointwise(_one(gradients))
        return [pointwise(half, cube)]

    return record(out, [x], backward, [out])


def activation(x: Phantom, *, saves_output: bool = False) -> Phantom:
    """A function whose backward is one operation on what it saved."""
    out = pointwise(x)

    def backward(gradients: Gradients, saved: Saved) -> Found:
        return [pointwise(_one(gradients), _have(saved))]

    return record(out, [x], backward, [out if saves_output else x])


# -- products ----------------------------------------------------------------------------------


def product(x: Phantom, weight: Phantom, bias: Phantom | None = None) -> Phantom:
    """x [rows, in] by a weight [in, out]: [rows, out]."""
    outer = weight.shape[1]
    shape, needs = weight.shape, (wants(x), wants(weight), wants(bias))
    rows, inner = x.shape

    def backward(gradients: Gradients, _: Saved) -> Found:
        gradient, width = _one(gradients), _one(gradients).width
        new = gradient.memory.new
        dweight = new(shape, width) if needs[1] else None
        dx = new((rows, inner), width) if needs[0] else None
        return [dx, dweight, gradient if needs[2] else None]

    out = x.memory.new((rows, outer), x.width)
    saved = [x if needs[1] else None, weight if needs[0] else None]
    return record(out, [x, weight, bias], backward, saved)


def adding_product(x: Phantom, weight: Phantom, bias: Phantom | None) -> Phantom:
    """x [rows, in] by a weight [out, in] whose gradient its backward adds to a sum
    (`engine.gradients`)."""
    (rows, inner), needs = x.shape, (wants(x), wants(bias))
    number, shape = id(weight.storage), weight.shape

    def backward(gradients: Gradients, _: Saved) -> Found:
        gradient, memory = _one(gradients), _one(gradients).memory
        dx = memory.new((rows, inner), gradient.width) if needs[0] else None
        if memory.sum_width and number not in memory.sums:
            memory.sums[number] = memory.new(shape, memory.sum_width)
        return [dx, gradient if needs[1] else None]

    return record(x.memory.new((rows, shape[0]), x.width), [x, bias], backward, [x])


def linear(x: Phantom, weight: Phantom, bias: Phantom | None = None) -> Phantom:
    """x [..., in] to [..., out]."""
    rows = 1
    for extent in x.shape[:-1]:
        rows *= extent
    if x.memory.adds and wants(weight):
        out = adding_product(reshape(x, (rows, x.shape[-1])), weight, bias)
        return reshape(out, (*x.shape[:-1], out.shape[-1]))
    # Turned first: its gradient leaves autograd, in the width of `.grad`, after that of x.
    turned = transpose(weight, 0, 1)
    flat = reshape(x, (rows, x.shape[-1]))
    out = product(flat, turned, bias)
    return reshape(out, (*x.shape[:-1], out.shape[-1]))


# -- farspan's own kernels ---------------------------------------------------------------------


def fused_norm(x: Phantom, weight: Phantom, width: int) -> Phantom:
    """`kernels.operations.normed`: the input and a number of `width` a row are saved."""
    out = pointwise(x)
    rstd = x.memory.new(x.shape[:-1], width)
    shape, trained = weight.shape, wants(weight)

    def backward(gradients: Gradients, saved: Saved) -> Found:
        dx = pointwise(_one(gradients), _have(saved))
        return [dx, dx.memory.new(shape, dx.width) if trained else None]

    return record(out, [x, weight], backward, [x, weight, rstd])


def fused_gate(gate: Phantom, up: Phantom) -> Phantom:
    """`kernels.operations.gated`: both inputs are saved."""

    def backward(gradients: Gradients, saved: Saved) -> Found:
        dgate = pointwise(_one(gradients), _have(saved, 0), _have(saved, 1))
        dup = dgate.memory.new(dgate.shape, dgate.width)
        dgate.memory.traffic += dup.size
        return [dgate, dup]

    return record(pointwise(gate, up), [gate, up], backward, [gate, up])


def fused_rotation(x: Phantom, tables: Sequence[Phantom]) -> Phantom:
    """`kernels.operations.rotated`, of queries or of keys; the given tables are saved."""
    out = pointwise(x)
    return record(out, [x], lambda gradients, _: [pointwise(_one(gradients))], tables)


def fused_loss(logits: Phantom, *, copied_first: bool) -> Phantom:
    """`kernels.operations.cross_entropy_`: the gradient is in the logits' place or a copy."""
    memory = logits.memory
    rows = copied(logits) if copied_first else logits.bare()
    losses = memory.new(logits.shape[:-1], 4)
    memory.traffic += 3 * logits.size  # read twice, written once
    return record(losses, [logits], lambda _, saved: [_have(saved)], [rows])


# -- norms -------------------------------------------------------------------------------------


def layer_norm(x: Phantom, weight: Phantom, bias: Phantom) -> Phantom:
    """torch's own: the mean and the reciprocal deviation of each row are saved, on a CPU as wide as
    the input (on CUDA in fp32, 4 bytes a token more in bf16)."""
    out = pointwise(x)
    rows = (*x.shape[:-1], 1)
    mean, deviation = x.memory.new(rows, x.width), x.memory.new(rows, x.width)
    shape, trained = weight.shape, wants(weight)

    def backward(gradients: Gradients, saved: Saved) -> Found:
        dx = pointwise(_one(gradients), _have(saved))
        if not trained:
            return [dx, None, None]
        return [dx, dx.memory.new(shape, dx.width), dx.memory.new(shape, dx.width)]

    return record(out, [x, weight, bias], backward, [x, mean, deviation, weight])


# -- routing -----------------------------------------------------------------------------------


def gather(x: Phantom, index: Phantom) -> Phantom:
    """Rows of x by number; their gradients are added up into zeros as large as x."""
    rows = index.shape[0]
    out = x.memory.new((rows, *x.shape[1:]), x.width)
    x.memory.traffic += 2 * out.size
    before = x.shape

    def backward(gradients: Gradients, _: Saved) -> Found:
        return [scattered(_one(gradients), before)]

    return record(out, [x], backward, [index])


def scattered(gradient: Phantom, shape: Shape) -> Phantom:
    """Zeros of a shape, with a gradient put into some of their rows."""
    memory = gradient.memory
    zeros = memory.new(shape, gradient.width)
    memory.traffic += 2 * gradient.size + zeros.size
    return zeros if memory.in_place else memory.new(zeros.shape, zeros.width)


def highest(x: Phantom, count: int) -> tuple[Phantom, Phantom]:
    """The largest values of each row, and where they are, in int64."""
    rows = x.shape[0]
    values, index = x.memory.new((rows, count), x.width), x.memory.new((rows, count), 8)
    before = x.shape

    def backward(gradients: Gradients, _: Saved) -> Found:
        return [scattered(_one(gradients), before)]

    return record(values, [x], backward, [index]), index


def row_sum(x: Phantom) -> Phantom:
    """The sum over the last dimension, which stays; its gradient is a view."""
    before = x.shape
    out = reduced(x, (*before[:-1], 1))
    return record(out, [x], lambda gradients, _: [_spread(gradients, before)])


def _spread(gradients: Gradients, shape: Shape) -> Phantom:
    x = _one(gradients)
    lead = (1,) * (len(shape) - len(x.shape))
    strides = tuple(
        0 if old == 1 and new != 1 else stride
        for old, new, stride in zip((*lead, *x.shape), shape, (*lead, *x.strides), strict=True)
    )
    return _view(x, shape, strides)


def sum_over(x: Phantom, dim: int) -> Phantom:
    """The sum over a dimension, which goes; its gradient is a view of the one that comes."""
    before = x.shape
    out = reduced(x, (*x.shape[:dim], *x.shape[dim + 1 :]))

    def backward(gradients: Gradients, _: Saved) -> Found:
        return [_spread([unsqueeze(_one(gradients), dim)], before)]

    return record(out, [x], backward)


def divided_in_place(x: Phantom, by: Phantom) -> Phantom:
    """x /= by: the graph keeps what x was."""
    keeps = x.memory.grad and (wants(x) or wants(by))
    before = copied(x) if keeps else None
    out = _view(x, x.shape, x.strides)

    def backward(gradients: Gradients, saved: Saved) -> Found:
        gradient = _one(gradients)
        first = pointwise(gradient)
        ratio = pointwise(pointwise(_have(saved)))
        return [first, pointwise(gradient, ratio)]

    return record(out, [x, by], backward, [before, by])


def clamped(x: Phantom, *, sides: int) -> Phantom:
    """Between two bounds, or below one."""

    def backward(gradients: Gradients, saved: Saved) -> Found:
        masks = [pointwise(_have(saved), width=1) for _ in range(sides)]
        return [pointwise(_one(gradients), masks[0])]

    return record(pointwise(x), [x], backward, [x])


def grouped_product(x: Phantom, weight: Phantom, ends: Phantom) -> Phantom:
    """Rows x [S, in], each by the weight of its expert, [E, in, out]: [S, out]. `ends` [E] tells
    where each expert's rows end."""
    needs, shape, before = (wants(x), wants(weight)), weight.shape, x.shape

    def backward(gradients: Gradients, _: Saved) -> Found:
        gradient = _one(gradients)
        new, width = gradient.memory.new, gradient.width
        dweight = new(shape, width) if needs[1] else None
        return [new(before, width) if needs[0] else None, dweight]

    out = x.memory.new((x.shape[0], shape[2]), x.width)
    saved = [x if needs[1] else None, weight if needs[0] else None, ends]
    return record(out, [x, weight], backward, saved)


def added_in_place(x: Phantom, y: Phantom) -> Phantom:
    """x += y."""
    x.memory.traffic += 2 * x.size + y.size
    out = _view(x, x.shape, x.strides)
    return record(out, [x, y], lambda gradients, _: [_one(gradients), _one(gradients)])
