"""Memory of one attention call on a block, for each kernel of `attention.backends`.

Tensors here have a shape but no data (`MetaTensor`), since plans are made without torch. They are
views of a storage, and a storage counts its bytes from its creation to the death of its last view
(CPython's reference counts, as for a tensor). So a peak is read off, not derived. Of the memory
layout only the order of heads and tokens matters. `width` is the bytes of an element.

q [B, H, Sq, D], k [B, Hk, Sk, D], v [B, Hk, Sk, Dv]; out [B, H, Sq, Dv], lse [B, H, Sq].
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from farspan.program.attention_blocks import Block, key_tiles, tile_window

TILE = 512  # tile of attention.backends.Tiled
SEEN_TILES = 2  # this many equal tiles in a row reach the peak

Shape = tuple[int, ...]


class Memory:
    """Counter of the bytes of live storages, and of their peak."""

    __slots__ = ("live", "peak")

    def __init__(self) -> None:
        self.live = self.peak = 0

    def uncounted(self, shape: Shape, width: int, *, heads_first: bool = True) -> "MetaTensor":
        """Return a tensor whose bytes do not count here, such as a view of an arena."""
        return MetaTensor(Storage(self, 0), shape, width, heads_first)

    def new(self, shape: Shape, width: int, *, heads_first: bool = True) -> "MetaTensor":
        """Return a new tensor [batch, heads, tokens, ...], tokens first unless `heads_first`."""
        return MetaTensor(Storage(self, prod(shape) * width), shape, width, heads_first)

    def pass_by(self, size: int) -> None:
        """Allocate bytes and free them at once, which only raises the peak."""
        self.new((size,), 1)


class Storage:
    """Bytes that stay allocated as long as a tensor refers to them."""

    __slots__ = ("memory", "size")

    def __init__(self, memory: Memory, size: int) -> None:
        self.memory, self.size = memory, size
        memory.live += size
        memory.peak = max(memory.peak, memory.live)

    def __del__(self) -> None:
        self.memory.live -= self.size


class MetaTensor:
    """View of a storage, without data; `whole` if it has all tokens and elements of a head."""

    __slots__ = ("heads_first", "shape", "storage", "whole", "width")

    def __init__(
        self, storage: Storage, shape: Shape, width: int, heads_first: bool, whole: bool = True
    ) -> None:
        self.storage, self.shape, self.width = storage, shape, width
        self.heads_first, self.whole = heads_first, whole

    @property
    def memory(self) -> Memory:
        return self.storage.memory

    def with_heads_first(self) -> bool:
        """Return whether heads precede tokens in memory; False for one head or one token."""
        return self.heads_first and min(self.shape[1:3]) > 1


def as_width(x: MetaTensor, width: int) -> MetaTensor:
    """Cast to elements of `width` bytes; return the tensor itself if it has that width."""
    return x if x.width == width else pointwise(x, width=width)


def broadcast(*shapes: Shape) -> Shape:
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(map(max, zip(*padded, strict=True)))


def pointwise(*inputs: MetaTensor, width: int | None = None) -> MetaTensor:
    """Return the new tensor of an element-wise operation, in the memory order of the first input.
    Its elements are as wide as those of the widest input unless `width` is given."""
    shape, first = broadcast(*(x.shape for x in inputs)), inputs[0]
    width = width or max(x.width for x in inputs)
    return first.memory.new(shape, width, heads_first=first.heads_first)


def reduced(x: MetaTensor, shape: Shape) -> MetaTensor:
    return x.memory.new(shape, x.width)


# -- kernels -------------------------------------------------------------------------------------


def wide(width: int) -> int:
    """Return the bytes of an element in sums over key blocks: 4, or 8 for float64."""
    return max(4, width)


def part(x: MetaTensor, tokens: int) -> MetaTensor:
    """Return a view of `tokens` consecutive tokens of a tensor [batch, heads, tokens, ...]."""
    shape = (*x.shape[:2], tokens, *x.shape[3:])
    return MetaTensor(x.storage, shape, x.width, x.heads_first, x.whole and tokens == x.shape[2])


def column(x: MetaTensor) -> MetaTensor:
    return MetaTensor(x.storage, (*x.shape, 1), x.width, x.heads_first, x.whole)


def merge(out: MetaTensor, lse: MetaTensor, part_out: MetaTensor, part_lse: MetaTensor) -> None:
    difference = pointwise(part_lse, lse)
    weight = pointwise(difference)
    del difference
    unseen = pointwise(part_lse, width=1)
    weight = pointwise(weight, unseen)
    del unseen
    same = as_width(part_out, out.width)
    del same
    pointwise(lse, part_lse)


class QueryTensors(NamedTuple):
    """Inputs of a backward that have a row per query: `attention.backends.BackwardQueries`."""

    dout: MetaTensor
    q: MetaTensor
    out: MetaTensor
    lse: MetaTensor


Gradients = tuple[MetaTensor, MetaTensor, MetaTensor]


class FlashSizes:
    """Memory of aten's flash attention: outputs, and a float mask if a window hides keys. On CUDA
    outputs have the same sizes, and no mask is built."""

    def split(self, block: Block) -> tuple[Block, ...]:
        return tile_window(block)

    def forward(
        self, q: MetaTensor, _: MetaTensor, __: MetaTensor, block: Block
    ) -> tuple[MetaTensor, MetaTensor]:
        mask = self._mask(q, block)
        out = q.memory.new(q.shape, q.width, heads_first=q.heads_first)
        lse = q.memory.new(q.shape[:3], wide(q.width))
        del mask
        return out, lse

    def backward(
        self, queries: QueryTensors, k: MetaTensor, v: MetaTensor, block: Block
    ) -> Gradients:
        mask = self._mask(queries.q, block)
        parts = [x.memory.new(x.shape, x.width, heads_first=False) for x in (queries.q, k, v)]
        del mask
        return parts[0], parts[1], parts[2]

    def _mask(self, like: MetaTensor, block: Block) -> MetaTensor | None:
        if block.window is None:
            return None
        hidden = pointwise(visible(like.memory, block))
        return like.memory.new(hidden.shape, like.width)


@dataclass(frozen=True, slots=True)
class PaddedSizes:
    """Memory of the kernel `inner` on heads padded to `width`; copies live as long as the call."""

    inner: FlashSizes
    width: int

    def split(self, block: Block) -> tuple[Block, ...]:
        return self.inner.split(block)

    def forward(
        self, q: MetaTensor, k: MetaTensor, v: MetaTensor, block: Block
    ) -> tuple[MetaTensor, MetaTensor]:
        q, k, wide_v = map(self._wide, (q, k, v))
        out, lse = self.inner.forward(q, k, wide_v, block)
        return _cut(out, v.shape[3]), lse

    def backward(
        self, queries: QueryTensors, k: MetaTensor, v: MetaTensor, block: Block
    ) -> Gradients:
        dout, q, out, wide_k, wide_v = map(self._wide, (queries.dout, queries.q, queries.out, k, v))
        padded = QueryTensors(dout, q, out, queries.lse)
        dq, dk, dv = self.inner.backward(padded, wide_k, wide_v, block)
        return _cut(dq, queries.q.shape[3]), _cut(dk, k.shape[3]), _cut(dv, v.shape[3])

    def _wide(self, x: MetaTensor) -> MetaTensor:
        if x.shape[3] == self.width:
            return x
        return x.memory.new((*x.shape[:3], self.width), x.width, heads_first=False)


def _cut(x: MetaTensor, elements: int) -> MetaTensor:
    """Return a view of the first `elements` elements of every head."""
    whole = x.whole and elements == x.shape[3]
    return MetaTensor(x.storage, (*x.shape[:3], elements), x.width, x.heads_first, whole)


def visible(memory: Memory, block: Block) -> MetaTensor:
    """Return a bool mask [queries, keys] of keys that each query sees, from int64 distances."""
    _positions, keys = memory.new((block.queries,), 8), memory.new((block.keys,), 8)
    distance = memory.new((block.queries, block.keys), 8)
    del keys
    seen = pointwise(distance, width=1)
    if block.window is None:
        return seen
    inside = pointwise(distance, width=1)
    return pointwise(seen, inside)


@dataclass(frozen=True, slots=True)
class TiledSizes:
    """Memory of plain attention, computed tile by tile in the accumulate dtype."""

    capped: bool = True  # scores have a soft cap
    chosen: int = 0  # tokens that an indexer chooses for each query; 0: it sees all

    def split(self, block: Block) -> tuple[Block, ...]:
        return (block,)

    def forward(
        self, q: MetaTensor, k: MetaTensor, v: MetaTensor, block: Block
    ) -> tuple[MetaTensor, MetaTensor]:
        width = wide(q.width)
        batch, heads, queries, _ = q.shape
        out = q.memory.new((batch, heads, queries, v.shape[3]), q.width, heads_first=False)
        lse = q.memory.new((batch, heads, queries), width)
        for rows, tiles in row_tiles(block):
            sum_out = q.memory.new((batch, heads, rows, v.shape[3]), width)
            sum_lse = q.memory.new((batch, heads, rows), width)
            for tile in tiles:
                scores, _ = self._scores(part(q, rows), part(k, tile.keys), tile)
                part_lse = reduced(scores, scores.shape[:3])
                unseen = pointwise(part_lse, width=1)
                safe = pointwise(part_lse, unseen)
                del unseen
                weighted = self._weighted(scores, safe, part(v, tile.keys))
                merge(sum_out, sum_lse, weighted, _flat(part_lse, sum_lse.shape))
        return out, lse

    def _weighted(self, scores: MetaTensor, lse: MetaTensor, v: MetaTensor) -> MetaTensor:
        weights = pointwise(pointwise(scores, column(lse)))
        values = as_width(v, scores.width)
        return scores.memory.new((*weights.shape[:3], values.shape[3]), scores.width)

    def backward(
        self, queries: QueryTensors, k: MetaTensor, v: MetaTensor, block: Block
    ) -> Gradients:
        dout, q, out, lse = queries
        width, kv_heads = wide(q.width), k.shape[1]
        dq, dk, dv = (pointwise(x, width=width) for x in (q, k, v))
        for rows, tiles in row_tiles(block):
            stacked_dout = _stack(as_width(part(dout, rows), width), kv_heads)
            stacked_q = _stack(as_width(part(q, rows), width), kv_heads)
            stacked_out = _stack(as_width(part(out, rows), width), kv_heads)
            _lse = _stack(column(part(lse, rows)), kv_heads)
            products = pointwise(stacked_dout, stacked_out)
            delta = reduced(products, (*products.shape[:3], 1))
            del products
            for tile in tiles:
                keys, values = (as_width(part(x, tile.keys), width) for x in (k, v))
                scores, slope = self._scores(part(q, rows), keys, tile)
                weights = pointwise(pointwise(scores))
                added = pointwise(values)
                del added
                _dscores = self._score_gradient(weights, delta, slope)
                added = pointwise(keys)
                del added
                added = pointwise(stacked_q)
                del added
        return dq, dk, dv

    def _score_gradient(
        self, weights: MetaTensor, delta: MetaTensor, slope: MetaTensor | None
    ) -> MetaTensor:
        upstream = pointwise(weights)
        centred = pointwise(upstream, delta)
        del upstream
        product = pointwise(weights, centred)
        del centred
        return pointwise(product, *([] if slope is None else [pointwise(slope)]))

    def _scores(
        self, q: MetaTensor, k: MetaTensor, tile: Block
    ) -> tuple[MetaTensor, MetaTensor | None]:
        memory, slope = q.memory, None
        scores = self._products(q, k, wide(q.width))
        if self.capped:
            bounded = pointwise(pointwise(scores))
            scores, slope = pointwise(bounded), pointwise(pointwise(bounded))
        if tile.causal or tile.window is not None:
            _hidden = pointwise(visible(memory, tile))
            tall = memory.new(scores.shape[2:], 1)
            scores = pointwise(scores, tall)
        if self.chosen:
            hidden = self._hidden(memory, q.shape[0], tile)
            tall = memory.new((q.shape[0], *scores.shape[2:]), 1)
            del hidden
            scores = pointwise(scores, tall)
        return scores, slope

    def _hidden(self, memory: Memory, batch: int, tile: Block) -> MetaTensor:
        """Return a bool mask of keys that are not chosen, from int64 places of those that are."""
        place = memory.new((batch, tile.queries, self.chosen), 8)
        place = pointwise(place)
        after = pointwise(place, width=1)
        beyond = pointwise(place, width=1)
        outside = pointwise(after, beyond)
        del after, beyond, outside
        return memory.new((batch, tile.queries, tile.keys + 1), 1)

    def _products(self, q: MetaTensor, k: MetaTensor, width: int) -> MetaTensor:
        stacked = _stack(as_width(q, width), k.shape[1])
        keys = as_width(k, width)
        shape = (*stacked.shape[:3], keys.shape[2])
        return pointwise(q.memory.new(shape, width))


Kernel = FlashSizes | PaddedSizes | TiledSizes


def _stack(x: MetaTensor, kv_heads: int) -> MetaTensor:
    """Stack the query heads that share a KV head, [B, H, S, D] to [B, Hk, H / Hk * S, D] (batch,
    heads, queries, dims). Copies if tokens precede heads in memory."""
    batch, heads, tokens, width = x.shape
    shape = (batch, kv_heads, heads // kv_heads * tokens, width)
    if heads == kv_heads or tokens == 1 or (x.heads_first and x.whole):
        return MetaTensor(x.storage, shape, x.width, heads_first=True)
    return x.memory.new(shape, x.width)


def _flat(x: MetaTensor, shape: tuple[int, ...]) -> MetaTensor:
    return MetaTensor(x.storage, shape, x.width, heads_first=True)


def row_tiles(block: Block) -> Iterator[tuple[int, list[Block]]]:
    """Yield (number of queries, tiles of keys) for the few tiles of queries that reach the peak
    memory: the largest ones, each with the first and last tiles of keys that it sees."""
    starts = list(range(block.q_start, block.q_stop, TILE))
    for q_start in starts[-SEEN_TILES:] if block.causal else starts[:SEEN_TILES]:
        tiles = key_tiles(block, q_start, TILE)
        rows = min(TILE, block.q_stop - q_start)
        yield rows, tiles[:SEEN_TILES] + tiles[SEEN_TILES:][-SEEN_TILES:]
