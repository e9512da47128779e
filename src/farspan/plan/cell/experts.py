"""Mixtures of experts on phantoms, as transformers 5.23 runs them by default: rows sorted by their
expert, and one grouped product for all experts of a layer.

S = tokens * active is the number of rows that experts compute, whatever the router decides.
"""

from farspan.plan.cell.modules import Weights, activate, mlp
from farspan.plan.cell.operations import (
    activation,
    add,
    added_in_place,
    as_width,
    clamped,
    divided_in_place,
    gather,
    grouped_product,
    highest,
    linear,
    multiply,
    narrow,
    reshape,
    row_sum,
    scaled,
    shifted,
    split,
    sum_over,
    transpose,
    unsqueeze,
)
from farspan.plan.cell.phantom import Phantom, Shape, pointwise
from farspan.plan.model.architecture import FeedForward

INDEX = 8  # bytes of a row's number
PROBABILITY = 4  # bytes: routers compute in fp32
# Families whose experts interleave gate and up, have biases, and clamp (GPT-OSS), and whose
# routers take the softmax over the chosen experts only.
CLAMPED = ("gpt_oss",)

# Families that divide the chosen probabilities by their sum. Some Qwen-MoE configurations do, too:
# that is 12 bytes a token and chosen expert which nobody counts here.
SUMMED = ("mixtral",)


def expert_weights(family: str, hidden: int, feed_forward: FeedForward) -> dict[str, Shape]:
    """Shapes of the router's and the experts' parameters."""
    count, width, biased = feed_forward.experts, feed_forward.width, feed_forward.bias
    ups = 2 * width if feed_forward.gated else width
    shapes: dict[str, Shape] = {"router.weight": (count, hidden)}
    shapes |= {"router.bias": (count,)} if biased else {}
    across = family in CLAMPED
    shapes["experts.up"] = (count, hidden, ups) if across else (count, ups, hidden)
    shapes |= {"experts.up_bias": (count, ups)} if biased else {}
    shapes["experts.down"] = (count, width, hidden) if across else (count, hidden, width)
    return shapes | ({"experts.down_bias": (count, hidden)} if biased else {})


def experts(family: str, feed_forward: FeedForward, weights: Weights, x: Phantom) -> Phantom:
    """x [B, C, hidden] through the experts that each token is sent to."""
    shape = x.shape
    x = reshape(x, (shape[0] * shape[1], shape[2]))
    if feed_forward.shared:
        return _with_shared(family, feed_forward, weights, x, shape)
    _logits, scores, index = _route(family, feed_forward, weights, x)
    x = _run(family, feed_forward, weights, x, scores, index)
    return reshape(x, shape)


def _with_shared(
    family: str, feed_forward: FeedForward, weights: Weights, x: Phantom, shape: Shape
) -> Phantom:
    beside = mlp(FeedForward(feed_forward.shared), weights, "shared.", x)
    _logits, scores, index = _route(family, feed_forward, weights, x)
    out = _run(family, feed_forward, weights, x, scores, index)
    gate = activation(linear(x, weights["shared_gate.weight"]), saves_output=True)
    beside = multiply(gate, beside)
    out = add(out, beside)
    return reshape(out, shape)


def _route(
    family: str, feed_forward: FeedForward, weights: Weights, x: Phantom
) -> tuple[Phantom, Phantom, Phantom]:
    """Logits, and scores and numbers of the experts [tokens, active] that each token is sent to."""
    logits = linear(x, weights["router.weight"], weights.get("router.bias"))
    if family in CLAMPED:
        values, index = highest(logits, feed_forward.active)
        return logits, activation(values, saves_output=True), index
    chances = activation(as_width(logits, PROBABILITY), saves_output=True)
    values, index = highest(chances, feed_forward.active)
    if family in SUMMED:
        return logits, divided_in_place(values, row_sum(values)), index
    return logits, as_width(values, logits.width), index


def _run(
    family: str,
    feed_forward: FeedForward,
    weights: Weights,
    x: Phantom,
    scores: Phantom,
    index: Phantom,
) -> Phantom:
    memory, (tokens, active) = x.memory, index.shape
    rows, hidden = tokens * active, x.shape[1]
    flat = reshape(scores, (rows,))
    by_expert, order = memory.new((rows,), INDEX), memory.new((rows,), INDEX)
    chosen = gather(x, pointwise(order))
    chosen_scores = gather(flat, order)
    _counted = pointwise(by_expert, width=4)
    ends = memory.new((feed_forward.experts,), 4)
    bias = _bias(weights, "experts.up_bias", by_expert)
    out = _product(chosen, weights["experts.up"], ends, bias)
    out = _gate(family, feed_forward, out)
    bias = _bias(weights, "experts.down_bias", by_expert)
    out = _product(out, weights["experts.down"], ends, bias)
    weighted = multiply(out, unsqueeze(chosen_scores, 1))
    back = pointwise(order)
    weighted = gather(weighted, back)
    total = sum_over(reshape(weighted, (tokens, active, hidden)), 1)
    return as_width(total, x.width)


def _bias(weights: Weights, name: str, by_expert: Phantom) -> Phantom | None:
    return gather(weights[name], by_expert) if name in weights else None


def _product(x: Phantom, weight: Phantom, ends: Phantom, bias: Phantom | None) -> Phantom:
    across = weight if weight.shape[1] == x.shape[1] else transpose(weight, 1, 2)
    out = grouped_product(x, across, ends)
    return out if bias is None else added_in_place(out, bias)


def _gate(family: str, feed_forward: FeedForward, x: Phantom) -> Phantom:
    if family in CLAMPED:
        return _clamped_gate(x)
    gate, up = split(x, 1, 2)
    return multiply(activate(feed_forward.activation, gate), up)


def _clamped_gate(x: Phantom) -> Phantom:
    """(up + 1) * gate * sigmoid(alpha * gate), both clamped."""
    both = x.shape[1]
    gate, up = narrow(x, 1, 0, both, 2), narrow(x, 1, 0, both, 2)
    gate = clamped(gate, sides=1)
    up = clamped(up, sides=2)
    glu = multiply(gate, activation(scaled(gate), saves_output=True))
    gated = multiply(shifted(up), glu)
    return gated
