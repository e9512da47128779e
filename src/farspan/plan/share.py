"""What one rank has of every chunk: tokens outside attention, and keys inside.

Two sets of rows. A rank's tokens are its part of each chunk: x, activations and the loss are of
them. Its keys are the tokens whose K, V, dK, dV, O and LSE it keeps, for its part of the heads: all
of a chunk's with Ulysses alone, a shard's or a ring member's part of each chunk otherwise. Buffers
hold the rows of all chunks one after the other, so a row is not a position in the sequence.

Every rank of a sequence runs the same instructions; only the rows differ. Parts may be empty.
"""

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from farspan.plan.layout import ONLY, SEQUENCE, Layout, Range, Rank
from farspan.plan.states import refuse_shared_states
from farspan.spec import LayerSpec, ModelSpec, Refused

LINE = 64  # bytes to which each saved tensor is padded


@dataclass(frozen=True, slots=True)
class Spans:
    """A part of every chunk."""

    ranges: tuple[Range, ...]  # positions in the sequence
    rows: tuple[Range, ...]  # where they stand in a buffer that holds all of them

    @property
    def total(self) -> int:
        """Rows of a buffer that holds every chunk's part."""
        return self.rows[-1][1]

    @property
    def most(self) -> int:
        """Rows of the longest part."""
        return max(stop - start for start, stop in self.rows)


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's tokens and keys."""

    rank: Rank
    tokens: Spans
    keys: Spans
    cells: tuple[Range, ...]  # rows that each chunk's kept activations have room for


def share_of(chunks: tuple[Range, ...], rank: Rank = ONLY) -> Share:
    """The share of one rank."""
    if rank.layout.sequence() == 1:
        whole = Spans(chunks, chunks)
        return Share(rank, whole, whole, chunks)
    return Share(
        rank,
        _spans(chunks, rank),
        _spans(chunks, rank, *AMONG_HEADS),
        cells_of(chunks, rank.layout),
    )


def own_groups(rank: Rank, groups: int) -> range:
    """The groups of layers that a rank runs. Those of a pipeline are its stages."""
    if rank.layout.pipeline == 1:
        return range(groups)
    stage = rank.along["pipeline"]
    return range(stage, stage + 1)


AMONG_HEADS = SEQUENCE[:2]  # these share heads; the other axes of a sequence share keys


def _spans(chunks: tuple[Range, ...], rank: Rank, *axes: str) -> Spans:
    ranges = tuple(rank.tokens(chunk, *axes) for chunk in chunks)
    sizes = (stop - start for start, stop in ranges)
    return Spans(ranges, tuple(pairwise(accumulate(sizes, initial=0))))


def cells_of(chunks: tuple[Range, ...], layout: Layout) -> tuple[Range, ...]:
    """An equal part of every chunk, rounded up: a rank saves rows of its tokens, and of its heads
    for others' tokens, no more of either than that of all heads."""
    sizes = (-(-(stop - start) // layout.sequence()) for start, stop in chunks)
    return tuple(pairwise(accumulate(sizes, initial=0)))


def among_heads(rank: Rank, chunk: Range) -> tuple[int, ...]:
    """How many of a chunk's tokens each of the rank's Ulysses peers brings, with those of their
    tensor peers."""
    held = [Rank(rank.layout, n).tokens(chunk, "tensor") for n in rank.peers("ulysses")]
    return tuple(stop - start for start, stop in held)


def local_heads(model: ModelSpec, layout: Layout) -> ModelSpec:
    """The model as attention on one rank sees it. Raises Refused where heads cannot be shared as
    the layout says."""
    refuse_shared_states(model, layout)
    if layout.ulysses * layout.tensor == 1:
        return model
    layers = (local_layer(layer, layout) for layer in exchanging(model, layout).layers)
    return replace(model, layers=tuple(layers))


def exchanging(model: ModelSpec, layout: Layout) -> ModelSpec:
    """The model with what a cell saves besides where ranks exchange heads: the output projection
    reads attention's output by tokens, another tensor than the one by heads that is kept."""
    if layout.ulysses == 1:
        return model
    layers = (
        replace(
            layer,
            activation_bytes=layer.activation_bytes + layer.output_elements() * model.element_bytes,
            # Queries are saved in pieces, each padded.
            activation_constant=layer.activation_constant + LINE * (1 + layer.kv_heads),
        )
        for layer in model.layers
    )
    return replace(model, layers=tuple(layers))


def local_layer(layer: LayerSpec, layout: Layout) -> LayerSpec:
    """A layer with the heads of one rank."""
    ranks = layout.ulysses * layout.tensor
    if layer.kv_heads % ranks:
        raise Refused(
            f"ulysses: {layer.kv_heads} K, V heads cannot be shared by {ranks} devices; use a "
            f"divisor of {layer.kv_heads}, and shards for the rest"
        )
    return replace(layer, kv_heads=layer.kv_heads // ranks, query_heads=layer.query_heads // ranks)
