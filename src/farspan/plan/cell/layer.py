"""A decoder layer on phantoms: what autograd saves of it, and the bytes its elementwise work moves.

Everything follows the layers of transformers 5.23 in eager mode, statement by statement.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from farspan.plan.cell.experts import expert_weights, experts
from farspan.plan.cell.modules import Tables, Weights, mlp, norm, project, rotate
from farspan.plan.cell.operations import (
    Gradients,
    Saved,
    add,
    contiguous,
    narrow,
    reshape,
    split,
    transpose,
    unsqueeze,
)
from farspan.plan.cell.phantom import (
    Found,
    Memory,
    Phantom,
    Shape,
    differentiate,
    record,
)
from farspan.plan.cell.tiles import Module, whole
from farspan.plan.model.architecture import Architecture, ArchitectureBlock, Attention, FeedForward

Run = Callable[[Module, Phantom, bool], Phantom]  # a token-wise module: see `tiles`
Attend = Callable[[Phantom, Phantom, Phantom, Phantom | None], Phantom]

HALF_TABLES = ("gpt_oss",)  # families whose rotary tables are half a head wide
FEW, MANY = 32, 64  # tokens: two sizes tell what grows


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """What one layer holds and moves; bytes a token unless a name says otherwise."""

    activation_bytes: int  # saved by autograd besides x, K, V, O and LSE
    activation_constant: int  # a cell
    saves_input: bool  # autograd saves the layer's input itself
    forward_traffic: int  # that operations other than products and attention read and write
    backward_traffic: int


# -- weights -----------------------------------------------------------------------------------


def layer_weights(architecture: Architecture, block: ArchitectureBlock) -> dict[str, Shape]:
    """Shapes of a layer's parameters, in the order the module has them."""
    attention, hidden = block.attention, architecture.hidden
    shapes: dict[str, Shape] = {}
    for name, outer, bias in _projections(attention):
        shapes |= _linear(name, hidden, outer, bias)
    out = attention.query_heads * attention.value_dim
    shapes |= _linear("out", out, hidden, attention.output_bias)
    if attention.qk_norm:
        shapes |= {"q_norm.weight": (attention.head_dim,), "k_norm.weight": (attention.head_dim,)}
    if attention.sinks:
        shapes["sinks"] = (attention.query_heads,)
    if block.feed_forward.experts:
        shapes |= expert_weights(architecture.family, hidden, block.feed_forward)
    else:
        shapes |= _mlp_weights("mlp.", hidden, block.feed_forward, block.feed_forward.width)
    if block.feed_forward.shared:
        shapes |= _mlp_weights("shared.", hidden, FeedForward(1), block.feed_forward.shared)
        shapes |= _linear("shared_gate", hidden, 1, bias=False)
    for index in range(block.norms):
        shapes[f"norm{index}.weight"] = (hidden,)
        if architecture.norm == "layer":
            shapes[f"norm{index}.bias"] = (hidden,)
    return shapes | _adapters(architecture.adapter_rank, shapes)


def _projections(attention: Attention) -> list[tuple[str, int, bool]]:
    widths = {
        "q": attention.query_heads * attention.head_dim,
        "k": attention.kv_heads * attention.head_dim,
        "v": attention.kv_heads * attention.value_dim,
    }
    if attention.fused:
        widths = {"qkv": sum(widths.values())}
    return [(name, width, attention.qkv_bias) for name, width in widths.items()]


def _linear(name: str, inner: int, outer: int, bias: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (outer, inner)}
    return shapes | ({f"{name}.bias": (outer,)} if bias else {})


def _mlp_weights(
    prefix: str, hidden: int, feed_forward: FeedForward, width: int
) -> dict[str, Shape]:
    bias = feed_forward.bias
    shapes: dict[str, Shape] = {}
    if feed_forward.gated and feed_forward.fused:
        shapes |= _linear(f"{prefix}gate_up", hidden, 2 * width, bias)
    elif feed_forward.gated:
        shapes |= _linear(f"{prefix}gate", hidden, width, bias)
        shapes |= _linear(f"{prefix}up", hidden, width, bias)
    else:
        shapes |= _linear(f"{prefix}up", hidden, width, bias)
    return shapes | _linear(f"{prefix}down", width, hidden, bias)


def _adapters(rank: int, shapes: dict[str, Shape]) -> dict[str, Shape]:
    """A [rank, inner] and B [outer, rank] beside every linear module; routers and experts hold bare
    parameters."""
    found: dict[str, Shape] = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if rank and len(shape) == 2 and module != name and not module.startswith("router"):
            found |= {f"{module}.a": (rank, shape[1]), f"{module}.b": (shape[0], rank)}
    return found


def trained(architecture: Architecture, name: str) -> bool:
    """Whether a parameter of a layer receives a gradient."""
    return not architecture.adapter_rank or name.endswith((".a", ".b"))


def given_weights(
    memory: Memory,
    architecture: Architecture,
    block: ArchitectureBlock,
    element_bytes: int,
) -> Weights:
    """A layer's parameters, whose bytes are counted elsewhere."""
    return {
        name: memory.given(shape, element_bytes, trained=trained(architecture, name))
        for name, shape in layer_weights(architecture, block).items()
    }


def given_tables(
    memory: Memory, architecture: Architecture, attention: Attention, tokens: int, width: int
) -> Tables | None:
    """cos and sin of a chunk, whose bytes are counted elsewhere."""
    if not attention.rotary:
        return None
    shape = (1, tokens, table_width(architecture, attention))
    return memory.given(shape, width), memory.given(shape, width)


def table_width(architecture: Architecture, attention: Attention) -> int:
    head = attention.head_dim
    return head // 2 if architecture.family in HALF_TABLES else head


# -- the layer ---------------------------------------------------------------------------------


def run_layer(
    architecture: Architecture,
    block: ArchitectureBlock,
    weights: Weights,
    x: Phantom,
    tables: Tables | None,
    attend: Attend,
    run: Run = whole,
) -> Phantom:
    """x [B, C, hidden] through the layer; `attend` answers its attention, `run` runs norms and
    the feed-forward."""
    if block.parallel:
        return _parallel(architecture, block, weights, x, tables, attend, run)
    if architecture.norm == "layer":
        return _with_layer_norms(architecture, block, weights, x, tables, attend, run)
    norms = [partial(norm, architecture.family, weights, f"norm{i}") for i in range(block.norms)]
    forward = partial(_feed_forward, architecture, block.feed_forward, weights)
    sandwich = block.norms > 2
    residual = x
    x = run(norms[0], x, True)
    x = _attention(architecture, block.attention, weights, x, tables, attend)
    if sandwich:
        x = run(norms[1], x, True)
    x = add(residual, x)
    residual = x
    x = run(norms[block.norms // 2], x, True)
    x = run(forward, x, sandwich)
    if sandwich:
        x = run(norms[3], x, False)
    return add(residual, x)


def _with_layer_norms(
    architecture: Architecture,
    block: ArchitectureBlock,
    weights: Weights,
    x: Phantom,
    tables: Tables | None,
    attend: Attend,
    run: Run,
) -> Phantom:
    """GPT-2, which keeps attention's output to the end."""
    residual = x
    feed = partial(_feed_forward, architecture, block.feed_forward, weights)
    x = norm(architecture.family, weights, "norm0", x)
    attended = _attention(architecture, block.attention, weights, x, tables, attend)
    x = add(attended, residual)
    residual = x
    x = norm(architecture.family, weights, "norm1", x)
    forward = run(feed, x, False)
    return add(residual, forward)


def _parallel(
    architecture: Architecture,
    block: ArchitectureBlock,
    weights: Weights,
    x: Phantom,
    tables: Tables | None,
    attend: Attend,
    run: Run,
) -> Phantom:
    """GPT-NeoX: x + attention(norm(x)) + mlp(norm(x))."""
    feed = partial(_feed_forward, architecture, block.feed_forward, weights)
    attended = _attention(
        architecture,
        block.attention,
        weights,
        norm(architecture.family, weights, "norm0", x),
        tables,
        attend,
    )
    forward = run(feed, norm(architecture.family, weights, "norm1", x), False)
    return add(add(forward, attended), x)


def _attention(
    architecture: Architecture,
    attention: Attention,
    weights: Weights,
    x: Phantom,
    tables: Tables | None,
    attend: Attend,
) -> Phantom:
    q, k, v = _queries_keys_values(architecture, attention, weights, x)
    if tables is not None:
        tables = unsqueeze(tables[0], 1), unsqueeze(tables[1], 1)
        q, k = rotate(q, tables), rotate(k, tables)
    out = attend(q, k, v, weights.get("sinks"))
    out = contiguous(reshape(out, (*out.shape[:2], out.shape[2] * out.shape[3])))
    out = project(weights, "out", out)
    return out


def _queries_keys_values(
    architecture: Architecture, attention: Attention, weights: Weights, x: Phantom
) -> tuple[Phantom, Phantom, Phantom]:
    if attention.fused:
        parts = _parts(attention, project(weights, "qkv", x))
        widths = attention.head_dim, attention.head_dim, attention.value_dim
        q, k, v = (_heads(part, width) for part, width in zip(parts, widths, strict=True))
        return q, k, v
    q = _heads(project(weights, "q", x), attention.head_dim, architecture, weights, "q_norm")
    k = _heads(project(weights, "k", x), attention.head_dim, architecture, weights, "k_norm")
    return q, k, _heads(project(weights, "v", x), attention.value_dim)


def _parts(attention: Attention, x: Phantom) -> list[Phantom]:
    """q, k and v of one product: equal parts are split, others sliced."""
    if attention.kv_heads == attention.query_heads:
        return split(x, 2, 3)
    q = attention.query_heads * attention.head_dim
    k = q + attention.kv_heads * attention.head_dim
    return [narrow(x, 2, *span) for span in ((0, q), (q, k), (k, x.shape[2]))]


def _heads(
    x: Phantom,
    width: int,
    architecture: Architecture | None = None,
    weights: Weights | None = None,
    name: str = "",
) -> Phantom:
    """[B, H, C, D] from [B, C, H * D], normed over D where the layer has such a norm."""
    x = reshape(x, (*x.shape[:2], x.shape[2] // width, width))
    if architecture is not None and weights is not None and f"{name}.weight" in weights:
        x = norm(architecture.family, weights, name, x)
    return transpose(x, 1, 2)


def _feed_forward(
    architecture: Architecture, feed_forward: FeedForward, weights: Weights, x: Phantom
) -> Phantom:
    if feed_forward.experts:
        return experts(architecture.family, feed_forward, weights, x)
    return mlp(feed_forward, weights, "mlp.", x)


# -- what it costs -----------------------------------------------------------------------------


def layer_costs(
    architecture: Architecture, block: ArchitectureBlock, element_bytes: int
) -> LayerCosts:
    """What one layer of a model in `element_bytes` an element saves and moves."""
    few, many = (_saved(architecture, block, element_bytes, tokens) for tokens in (FEW, MANY))
    slope = -(-(many.bytes - few.bytes) // (MANY - FEW))
    return LayerCosts(
        activation_bytes=slope,
        # Each saved storage is padded to an alignment line, whatever its size.
        activation_constant=max(0, few.bytes - slope * FEW) + 64 * few.storages,
        saves_input=few.saves_input,
        forward_traffic=(many.forward - few.forward) // (MANY - FEW),
        backward_traffic=(many.backward - few.backward) // (MANY - FEW),
    )


@dataclass(frozen=True, slots=True)
class _Saved:
    bytes: int
    storages: int
    saves_input: bool
    forward: int  # bytes moved
    backward: int


def _saved(architecture: Architecture, block: ArchitectureBlock, width: int, tokens: int) -> _Saved:
    memory = Memory(fused=architecture.fused, adds=architecture.adds)
    memory.grad = True
    weights = given_weights(memory, architecture, block, width)
    tables = given_tables(memory, architecture, block.attention, tokens, width)
    x = memory.given((1, tokens, architecture.hidden), width, trained=True)
    answer = _Answer()
    out = run_layer(architecture, block, weights, x, tables, answer)
    forward, node = memory.traffic, out.node
    assert node is not None
    assert answer.out is not None
    ours = {id(weight.storage) for weight in weights.values()} | {id(answer.out.storage)}
    held = node.holds()
    spans = [_span(views) for storage, views in held.items() if storage not in ours]
    saves_input = id(x.storage) in held
    if saves_input:
        spans.remove(_span(held[id(x.storage)]))
    differentiate(node, memory.new(out.shape, width))
    return _Saved(sum(spans), len(spans), saves_input, forward, memory.traffic - forward)


def _span(views: list[Phantom]) -> int:
    """Bytes of a storage that views cover, in whole lines."""
    reaches = [view.reach() for view in views]
    return -(-(max(high for _, high in reaches) - min(low for low, _ in reaches)) // 64) * 64


@dataclass(slots=True)
class _Answer:
    """Stands for attention where only what is saved matters: q is, O is somebody else's."""

    out: Phantom | None = None

    def __call__(self, q: Phantom, k: Phantom, v: Phantom, sinks: Phantom | None) -> Phantom:
        batch, heads, tokens, _ = q.shape
        self.out = q.memory.given((batch, tokens, heads, v.shape[3]), q.width)
        inputs = [q, k, v, sinks]
        memory = q.memory
        sizes = [(x.shape, x.width) if x is not None else None for x in inputs]

        def backward(_: Gradients, __: Saved) -> Found:
            return [memory.new(*size) if size is not None else None for size in sizes]

        return record(self.out, inputs, backward, [q])
