"""A profile of a model of which nothing but its description is known: what its layers were seen to
save, and the widths of its products."""

from functools import lru_cache

from farspan.profile.model import CellLines, KindProfile, ModelProfile, OuterProfile, Variant
from farspan.spec import LayerSpec, ModelSpec

INDEX = 8  # bytes of a token's number


@lru_cache(maxsize=64)
def estimated(model: ModelSpec, rank: int | None = None) -> ModelProfile:
    """Of a decoder that is run as PyTorch's operators run it; `rank` as in `Variant`."""
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
    """A cell holds the layer's queries, keys and values when it attends; then three tensors as wide
    as its widest product, or all that its graph does."""
    width, work = model.element_bytes, layer.work
    hidden = model.hidden * width
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
    """Logits of a piece are there in the model's dtype and three times in the accumulate dtype. All
    of the weights count as the head's: how they are divided is not known."""
    width, trained = model.element_bytes, model.outer_trainable()
    hidden = model.hidden * width
    wide = model.accumulate_bytes()
    tables = max((4 * layer.head_dim * width for layer in model.layers), default=0)
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
