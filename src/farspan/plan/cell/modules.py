"""The modules of decoder layers on phantoms, as transformers 5.23 runs them in eager mode.

A name that a function keeps to its end is kept to its end there too: it decides what is alive at
the peak. Shapes: x [B, C, hidden]; q [B, H, C, D]; k, v [B, Hk, C, D].
"""

from farspan.plan.cell.operations import (
    activation,
    add,
    as_width,
    concatenate,
    fused_gate,
    fused_norm,
    fused_rotation,
    layer_norm,
    linear,
    mean_of_rows,
    multiply,
    narrow,
    power,
    reciprocal_root,
    scaled,
    shifted,
    split,
)
from farspan.plan.cell.phantom import Memory, Phantom, pointwise
from farspan.plan.model.architecture import FeedForward

Weights = dict[str, Phantom]
Tables = tuple[Phantom, Phantom]

STATISTICS = 4  # bytes: RMSNorm and rotary tables are computed in fp32 whatever the model is in
FLOAT_NORMS = ("gemma", "gemma2")  # the weight is applied in fp32, as 1 + weight
GATES = ("silu", "gelu", "gelu_pytorch_tanh")  # `kernels.operations.Act`
LATE_CASTS = ("gpt_oss",)  # the weight is applied in fp32


# -- norms -------------------------------------------------------------------------------------


def norm(family: str, weights: Weights, name: str, x: Phantom) -> Phantom:
    """The family's norm over the last dimension."""
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    if bias is not None:
        return layer_norm(x, weight, bias)
    if x.memory.fused:
        return fused_norm(x, weight, STATISTICS)
    if family in FLOAT_NORMS:
        return _float_norm(x, weight)
    return _row_norm(x, weight, late=family in LATE_CASTS)


def _row_norm(x: Phantom, weight: Phantom, *, late: bool) -> Phantom:
    width = x.width
    x = as_width(x, STATISTICS)
    variance = mean_of_rows(power(x))
    x = multiply(x, reciprocal_root(shifted(variance)))
    if late:
        return as_width(multiply(weight, x), width)
    return multiply(weight, as_width(x, width))


def _float_norm(x: Phantom, weight: Phantom) -> Phantom:
    out = _normed(as_width(x, STATISTICS))
    out = multiply(out, shifted(as_width(weight, STATISTICS)))
    return as_width(out, x.width)


def _normed(x: Phantom) -> Phantom:
    return multiply(x, reciprocal_root(shifted(mean_of_rows(power(x)))))


# -- positions ---------------------------------------------------------------------------------


def rotary_tables(memory: Memory, tokens: int, table: int, head: int, width: int) -> Tables:
    """cos and sin [1, C, table] for heads of `head` elements: tables are as wide as the head where
    its halves are stored twice."""
    positions = memory.new((1, tokens, 1), STATISTICS)
    half = memory.new((1, tokens, head // 2), STATISTICS)
    del positions
    angles = memory.new((1, tokens, table), STATISTICS) if table == head else half
    cos = pointwise(pointwise(angles))
    sin = pointwise(pointwise(angles))
    return as_width(cos, width), as_width(sin, width)


def rotate(x: Phantom, tables: Tables) -> Phantom:
    """x [B, H, C, D] by tables [1, 1, C, D], or [1, 1, C, D / 2]."""
    cos, sin = tables
    if cos.shape[-1] == x.shape[-1] and x.memory.fused:
        return fused_rotation(x, tables)
    if cos.shape[-1] == x.shape[-1]:
        return add(multiply(x, cos), multiply(_turned(x), sin))
    first, second = split(x, 3, 2)
    low = _combined(multiply(first, cos), multiply(second, sin))
    high = _combined(multiply(second, cos), multiply(first, sin))
    return concatenate((low, high), 3)


def _combined(a: Phantom, b: Phantom) -> Phantom:
    return add(a, b)


def _turned(x: Phantom) -> Phantom:
    half = x.shape[-1] // 2
    first, second = narrow(x, 3, 0, half), narrow(x, 3, half, 2 * half)
    return concatenate((scaled(second), first), 3)


# -- products ----------------------------------------------------------------------------------


def project(weights: Weights, name: str, x: Phantom) -> Phantom:
    """A linear module, with its adapter where it has one.

    An adapter adds scale * B(A(x)) to what the frozen module gives; it is taken to be in the
    model's dtype.
    """
    out = linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))
    if f"{name}.a" not in weights:
        return out
    low = linear(linear(x, weights[f"{name}.a"]), weights[f"{name}.b"])
    return add(out, scaled(low))


# -- activations -------------------------------------------------------------------------------


def activate(name: str, x: Phantom) -> Phantom:
    """An activation by its Hugging Face name: one operation, or the formula written out."""
    if name == "gelu_new":
        return multiply(scaled(x), shifted(_inner(x)))
    return activation(x, saves_output=name in ("relu", "tanh", "sigmoid"))


def _inner(x: Phantom) -> Phantom:
    return activation(scaled(add(x, scaled(power(x)))), saves_output=True)


# -- MLP ---------------------------------------------------------------------------------------


def mlp(feed_forward: FeedForward, weights: Weights, prefix: str, x: Phantom) -> Phantom:
    act = feed_forward.activation
    if not feed_forward.gated:
        x = project(weights, f"{prefix}up", x)
        x = activate(act, x)
        x = project(weights, f"{prefix}down", x)
        return x
    if feed_forward.fused:
        up = project(weights, f"{prefix}gate_up", x)
        gate, up = split(up, 2, 2)
        if x.memory.fused and act in GATES:
            return project(weights, f"{prefix}down", fused_gate(gate, up))
        up = multiply(up, activate(act, gate))
        return project(weights, f"{prefix}down", up)
    return project(weights, f"{prefix}down", _gated(act, weights, prefix, x))


def _gated(act: str, weights: Weights, prefix: str, x: Phantom) -> Phantom:
    if x.memory.fused and act in GATES:
        gate = project(weights, f"{prefix}gate", x)
        return fused_gate(gate, project(weights, f"{prefix}up", x))
    return multiply(
        activate(act, project(weights, f"{prefix}gate", x)), project(weights, f"{prefix}up", x)
    )
