"""Estimated profiles, for which no cell was run.

A model that is only described is estimated from the bytes that its layers are known to save and the
widths of their products. A model whose linear modules have 4-bit weights is derived from the plain
model's profile: bitsandbytes stores such weights in blocks with a scale each, and the scales in
blocks too. A module's weight is unpacked for each product, and then freed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from farspan.profile.model import (
    CellLines,
    KindProfile,
    ModelProfile,
    OuterProfile,
    Peak,
    Variant,
)
from farspan.spec import LayerSpec, ModelSpec

INDEX = 8  # bytes of a token id
BLOCK = 64  # elements that share a one-byte scale
SCALES = 256  # scales that share a four-byte scale
TABLES = 4 * (16 + 256) + 4  # bytes a module: both code tables, and the mean of scales

Widths = Sequence[tuple[int, int]]  # inner and outer width of each linear module of a layer


@lru_cache(maxsize=64)
def estimated(model: ModelSpec, rank: int | None = None) -> ModelProfile:
    """Return an estimated profile of a model known only by its shapes; `rank` as in `Variant`."""
    layers = list(dict.fromkeys(model.layers))
    names = {2: "bfloat16", 4: "float32", 8: "float64"}
    return ModelProfile(
        spec=model,
        kinds=tuple(_kind(model, layer) for layer in layers),
        kind_of=tuple(map(layers.index, model.layers)),
        outer=_outer(model),
        variant=Variant(names[model.element_bytes], rank),
    )


def _kind(model: ModelSpec, layer: LayerSpec) -> KindProfile:
    """Estimate the memory of one kind of layer. During attention its cell has q, k and v; later it
    has three tensors as wide as its widest product or, if larger, its whole graph."""
    width, work = model.element_bytes, layer.work
    hidden = model.passed() * width
    heads = layer.query_heads * layer.head_dim
    keys = layer.kv_heads * (layer.head_dim + layer.value_dim)
    asked, kept = (heads + keys) * width, keys * width
    saved = layer.activation_bytes + kept
    outers = [outer for _, outer in work.products[work.projections :]]
    wide = max(outers, default=layer.activation_bytes // (4 * width)) * width
    constant, trained = layer.activation_constant, work.trainable * width

    def lines(graph: int) -> CellLines:
        return CellLines(
            asked=((0, 2 * hidden + 2 * asked),),
            before=((0, 2 * hidden + 2 * asked),),
            at=(0, hidden + asked),
            after=((constant * (graph > 0), max(2 * hidden + 3 * wide, graph + hidden + wide)),),
            graph=(constant * (graph > 0), graph),
            saves_input=layer.saves_input,
            backward_before=((constant + trained, graph + hidden + 2 * wide),),
            backward_at=(constant + trained, 2 * hidden + 2 * asked),
            backward_after=((trained, 3 * hidden + 2 * asked),),
            weight_gradients=trained,
        )

    cells = {"plain": lines(0), "graph": lines(saved), "kept": lines(saved)}
    return KindProfile((work.trainable,), False, cells)


def _outer(model: ModelSpec) -> OuterProfile:
    """Estimate the modules outside the layers. Logits of one loss piece exist once in the model's
    dtype and three times in the accumulate dtype. All weights count as used by the head."""
    width, trained = model.element_bytes, model.outer_trainable()
    hidden = model.passed() * width
    wide = model.accumulate_bytes()
    tables = max((4 * layer.head_dim * width for layer in model.layers), default=0)
    tables += model.embeds * width
    logits = model.vocab * (width + 3 * wide) + 4 * hidden
    fresh = trained * (width + wide)
    once = hidden + logits
    return OuterProfile(
        weights=(trained,),
        by_head=(True,),
        embed=((0, 2 * hidden + INDEX),),
        tables=(0, tables),
        tables_peak=((0, 2 * tables),),
        head=((trained * width, hidden, logits),),
        head_fresh=((fresh, hidden, logits),),
        head_once=((trained * width, once),),
        head_once_fresh=((fresh, once),),
        evaluation=((0, 0, logits),),
        embed_backward=((trained * width, hidden),),
        embed_backward_fresh=((fresh, hidden),),
    )


# -- weights of four bits -------------------------------------------------------------------------


def packed_bytes(inner: int, outer: int) -> int:
    """Return the bytes of one 4-bit weight with its scales."""
    scales = _scales(inner, outer)
    return -(-inner * outer // 2) + scales + 4 * -(-scales // SCALES) + TABLES


def unpacked_bytes(inner: int, outer: int, width: int) -> int:
    """Bytes of a 4-bit weight unpacked to elements of `width` bytes for a product, with scales."""
    return inner * outer * width + 4 * _scales(inner, outer)


def adapted(layer: LayerSpec, rank: int) -> Widths:
    """Return the (input, output) widths of a layer's linear modules that have adapters of this
    rank. Such a module has three consecutive `products`: its own and the two of its adapter."""
    products = layer.work.products
    return tuple(
        (inner, outer)
        for (inner, outer), down, up in zip(products, products[1:], products[2:], strict=False)
        if (down, up) == ((inner, rank), (rank, outer))
    )


def packed(profile: ModelProfile, linears: Mapping[int, Widths]) -> ModelProfile:
    """Return the profile with the weights of these linear modules in 4 bits; `linears` has their
    widths by kind of layer. Throughout a cell the largest weight counts as unpacked."""
    width = profile.spec.element_bytes
    spared = {
        kind: sum(inner * outer * width - packed_bytes(inner, outer) for inner, outer in of)
        for kind, of in linears.items()
    }
    layers = tuple(
        replace(layer, work=replace(layer.work, packed=spared[kind]))
        for layer, kind in zip(profile.spec.layers, profile.kind_of, strict=True)
    )
    kinds = (
        _unpacking(kind, max((unpacked_bytes(*one, width) for one in linears[place]), default=0))
        for place, kind in enumerate(profile.kinds)
    )
    return replace(
        profile,
        spec=replace(profile.spec, layers=layers),
        kinds=tuple(kinds),
        variant=replace(profile.variant, nf4=True),
    )


def _unpacking(kind: KindProfile, more: int) -> KindProfile:
    """Return a layer kind's profile with `more` bytes in its cells, except during attention."""
    cells = {name: _raised(lines, more) for name, lines in kind.cells.items()}
    return replace(kind, cells=cells)


def _raised(lines: CellLines, more: int) -> CellLines:
    return replace(
        lines,
        asked=_higher(lines.asked, more),
        before=_higher(lines.before, more),
        after=_higher(lines.after, more),
        backward_before=_higher(lines.backward_before, more),
        backward_after=_higher(lines.backward_after, more),
    )


def _higher(peak: Peak, more: int) -> Peak:
    return tuple((constant + more, *slopes) for constant, *slopes in peak)


def _scales(inner: int, outer: int) -> int:
    return -(-inner * outer // BLOCK)
