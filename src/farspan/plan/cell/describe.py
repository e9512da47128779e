"""From an architecture to a ModelSpec: what `farspan.hf.describe` finds in a real model,
computed from its shapes alone."""

from dataclasses import replace

from farspan.plan.cell.layer import layer_costs
from farspan.plan.model.architecture import Architecture, ArchitectureBlock, Attention, FeedForward
from farspan.spec import LayerSpec, LayerWork, ModelSpec, UnsupportedError

ELEMENT_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
SHORT_NAMES = {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}

Product = tuple[int, int]  # (inner, outer) width


def model_spec(
    architecture: Architecture, dtype: str = "bfloat16", adapter_rank: int = 0
) -> ModelSpec:
    """The model as the planner sees it, in `dtype`, a name of torch's or a short one (bf16).

    With `adapter_rank` R only LoRA adapters are trained: A (inner, R) and B (R, outer) beside
    every linear module of the layers, as PEFT's `all-linear` places them. Experts and routers hold
    bare parameters in transformers 5, not linear modules, and stay frozen. Raises UnsupportedError
    for a dtype or a rank that makes no sense.
    """
    if not isinstance(adapter_rank, int) or isinstance(adapter_rank, bool) or adapter_rank < 0:
        raise UnsupportedError(
            f"adapter_rank: expected a whole number, 0 for no adapters, got {adapter_rank!r}"
        )
    made = replace(architecture, adapter_rank=adapter_rank or architecture.adapter_rank)
    element_bytes = ELEMENT_BYTES[dtype_name(dtype)]
    layers = {block: _layer(made, block, element_bytes) for block in set(made.blocks)}
    outer = _outer_parameters(made)
    specs = tuple(layers[block] for block in made.blocks)
    return ModelSpec(
        name=made.name,
        hidden=made.hidden,
        vocab=made.vocab,
        layers=specs,
        element_bytes=element_bytes,
        parameters=outer + sum(layer.work.parameters for layer in specs),
        trainable=sum(layer.work.trainable for layer in specs)
        + (0 if made.adapter_rank else outer),
    )


def dtype_name(dtype: str) -> str:
    """torch's name of a dtype that a model can be trained in. Raises UnsupportedError for any
    other."""
    name = SHORT_NAMES.get(dtype, dtype)
    if name not in ELEMENT_BYTES:
        raise UnsupportedError(
            f"dtype: expected one of {', '.join((*ELEMENT_BYTES, *SHORT_NAMES))}, got {dtype!r}"
        )
    return name


def _layer(architecture: Architecture, block: ArchitectureBlock, element_bytes: int) -> LayerSpec:
    attention, rank = block.attention, architecture.adapter_rank
    before, after = _projections(architecture, attention), _linears(architecture, block)
    routed = _routed(architecture, block.feed_forward)
    weights = _layer_parameters(architecture, block)
    adapters = rank * sum(sum(linear) for linear in (*before, *after))
    projected = _adapted(before, rank)
    costs = layer_costs(architecture, block, element_bytes)
    return LayerSpec(
        query_heads=attention.query_heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        value_dim=attention.value_dim,
        window=attention.window,
        sinks=attention.sinks,
        softcap=attention.softcap,
        activation_bytes=costs.activation_bytes,
        activation_constant=costs.activation_constant,
        saves_input=costs.saves_input,
        work=LayerWork(
            parameters=weights + adapters,
            trainable=adapters if rank else weights,
            products=(*projected, *_adapted(after, rank), *routed),
            projections=len(projected),
            feed_forward=len(_adapted(after[1:], rank)) + len(routed),
            skippable=block.norms <= 2,
            forward_traffic=costs.forward_traffic,
            backward_traffic=costs.backward_traffic,
        ),
    )


def _adapted(linears: tuple[Product, ...], rank: int) -> tuple[Product, ...]:
    """The products of linear modules, each followed by those of its adapter."""
    if not rank:
        return linears
    return tuple(
        product
        for inner, outer in linears
        for product in ((inner, outer), (inner, rank), (rank, outer))
    )


def _projections(architecture: Architecture, attention: Attention) -> tuple[Product, ...]:
    """Linear modules that make q, k and v."""
    widths = (
        attention.query_heads * attention.head_dim,
        attention.kv_heads * attention.head_dim,
        attention.kv_heads * attention.value_dim,
    )
    outers = (sum(widths),) if attention.fused else widths
    return tuple((architecture.hidden, outer) for outer in outers)


def _linears(architecture: Architecture, block: ArchitectureBlock) -> tuple[Product, ...]:
    """Linear modules after attention, in order."""
    hidden, feed_forward = architecture.hidden, block.feed_forward
    out = (block.attention.query_heads * block.attention.value_dim, hidden)
    if not feed_forward.experts:
        return (out, *_mlp(hidden, feed_forward.width, feed_forward))
    if not feed_forward.shared:
        return (out,)
    shared = replace(feed_forward, fused=False)
    return (out, *_mlp(hidden, feed_forward.shared, shared), (hidden, 1))


def _mlp(hidden: int, width: int, feed_forward: FeedForward) -> tuple[Product, ...]:
    ups = 2 if feed_forward.gated else 1
    if feed_forward.fused:
        return (hidden, ups * width), (width, hidden)
    return (*((hidden, width),) * ups, (width, hidden))


def _routed(architecture: Architecture, feed_forward: FeedForward) -> tuple[Product, ...]:
    """The router, and the experts that one token is sent to."""
    if not feed_forward.experts:
        return ()
    expert = _mlp(architecture.hidden, feed_forward.width, feed_forward)
    return ((architecture.hidden, feed_forward.experts), *expert * feed_forward.active)


def _layer_parameters(architecture: Architecture, block: ArchitectureBlock) -> int:
    """Elements of a layer's weights, adapters aside."""
    hidden, attention, feed_forward = architecture.hidden, block.attention, block.feed_forward
    projections = _projections(architecture, attention)
    out, *rest = _linears(architecture, block)
    total = sum(inner * outer for inner, outer in (*projections, out, *rest))
    total += attention.qkv_bias * sum(outer for _, outer in projections)
    total += attention.output_bias * hidden
    total += attention.qk_norm * 2 * attention.head_dim
    total += attention.sinks * attention.query_heads
    total += block.norms * _norm_parameters(architecture)
    if not feed_forward.experts:
        return total + feed_forward.bias * sum(outer for _, outer in rest)
    router, *expert = _routed(architecture, replace(feed_forward, active=1))
    for (inner, outer), copies in ((router, 1), *((one, feed_forward.experts) for one in expert)):
        total += copies * (inner + feed_forward.bias) * outer
    return total


def _outer_parameters(architecture: Architecture) -> int:
    """Elements of the embeddings, the last norm and the head."""
    tables = architecture.vocab * (1 if architecture.tied else 2) + architecture.positions
    return tables * architecture.hidden + _norm_parameters(architecture)


def _norm_parameters(architecture: Architecture) -> int:
    return architecture.hidden * (2 if architecture.norm == "layer" else 1)
