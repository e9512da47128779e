"""Memory of attention in one cell, following `engine.attention_op` and `attention.chunk`.

Statements follow those of the two files one by one, so temporaries live as long as theirs. Legend:
B batch, C tokens of the chunk, H query heads, Hk key-value heads, D head dim.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from farspan.profile.attention_kernels import (
    SEEN_TILES,
    FlashSizes,
    Kernel,
    Memory,
    MetaTensor,
    PaddedSizes,
    QueryTensors,
    TiledSizes,
    as_width,
    column,
    merge,
    part,
    pointwise,
    reduced,
    wide,
)
from farspan.profile.far_sizes import far_bytes, fullest_choice_bytes, lesson_bytes, watch_bytes
from farspan.program.attention_blocks import (
    Block,
    cut_wide,
    layer_blocks,
    most_tokens,
    near_blocks,
    overlapping,
)
from farspan.program.far_sizes import Far, far_of, most_units_of
from farspan.spec import LayerSpec, Sparse


@dataclass(slots=True)
class Call:
    """Description of one chunk's attention call, without tensors."""

    kernel: Kernel
    blocks: tuple[Block, ...]
    q_start: int
    far: Far | None = None  # set if attention is sparse and has pages to choose from
    most_units: int = 0  # most units to gather at one time
    in_slots: bool = False  # gather to slots of the program
    sequence: int = 0  # tokens of the whole sequence, whose chunks choose tokens by an indexer


def attention_bytes(
    heads: LayerSpec,
    call: Call,
    run: tuple[int, int],
    tokens: int,
    heads_first: bool,
    chooses: bool,
) -> tuple[int, int]:
    """Return the peak bytes of one chunk's attention, (forward, backward), including results but
    not q, k and v. `run` is (batch, bytes of an element). With `heads_first`, heads precede tokens
    in the memory of q; with `chooses`, the cell also chooses the pages that it attends to."""
    batch, width = run
    memory = Memory()

    def tensor(count: int, dim: int, *, heads_first: bool = True) -> MetaTensor:
        return memory.uncounted((batch, count, tokens, dim), width, heads_first=heads_first)

    q = tensor(heads.query_heads, heads.head_dim, heads_first=heads_first)
    k, v = (tensor(heads.kv_heads, dim) for dim in (heads.head_dim, heads.value_dim))
    sinks = memory.uncounted((heads.query_heads,), width) if heads.sinks else None
    far = call.far if chooses else None
    if far is not None:
        memory.pass_by(fullest_choice_bytes(far))
    memory.pass_by(choice_bytes(heads, call, run, tokens))
    found = attend(call, q, k, v, sinks)
    if far is not None:
        memory.pass_by(watch_bytes(far, call.q_start))
        if far.index_dim:  # whether or not the index learns
            memory.pass_by(lesson_bytes(far))
    del found
    forward, memory.peak = memory.peak, 0
    out, dout = (tensor(heads.query_heads, heads.value_dim, heads_first=False) for _ in range(2))
    lse = memory.uncounted((batch, heads.query_heads, tokens), wide(width))
    dq, dk, dv, dsinks = _attend_backward(call, dout, q, k, v, (out, lse), sinks)
    # Gradients from queries of later chunks are added before autograd gets the sums.
    dk, dv = [as_width(pointwise(own, own), width) for own in (dk, dv)]
    if dsinks is not None:
        dsinks = as_width(dsinks, width)
    _answer = [as_width(dq, width), dsinks]
    return forward, memory.peak


def choice_bytes(heads: LayerSpec, call: Call, run: tuple[int, int], tokens: int) -> int:
    """Return the peak temporary bytes while an indexer chooses tokens for a chunk's queries, as
    `hf.indexer.IndexerCall.choose` and transformers allocate them. The result does not count."""
    index = heads.indexer
    if index is None or not index.dim or not heads.chosen(call.q_start + tokens):
        return 0
    memory, (batch, width) = Memory(), run
    stop, wide_scores = call.q_start + tokens, 4
    key = wide(width) if index.wide else width
    _own = memory.new((batch, tokens, index.dim), key)
    fetched = memory.new((batch, call.q_start * call.in_slots, index.dim), key)
    _keys = memory.new((batch, stop, index.dim), key)
    del fetched
    _places = memory.new((stop,), 8)
    queries, count = min(tokens, index.piece(call.sequence)), index.heads
    _seen = memory.new((queries, stop), 1)
    _projected = memory.new((queries, count, index.dim + index.rotated), width)
    _joined = memory.new((queries, count, index.dim), width)
    _of_keys = memory.new((queries, index.dim + index.rotated), width)
    cast = memory.new((queries, count, index.dim), wide_scores * (width != wide_scores))
    cast_keys = memory.new((stop, index.dim), wide_scores * (key != wide_scores))
    products = memory.new((queries, count, stop), wide_scores)
    del cast, cast_keys
    scores = pointwise(products)
    del products
    scores = pointwise(scores)
    _weights = memory.new((queries, count), width + wide_scores)
    sums = memory.new((queries, stop), wide_scores)
    unseen = memory.new((queries, stop), 1)
    masked = pointwise(sums)
    del sums, unseen
    rows = memory.new((queries, call.sequence), wide_scores)
    found = memory.new((queries, index.tokens), wide_scores + 8)
    del masked, rows, found
    return memory.peak


def sparse_call(
    call: Call,
    heads: LayerSpec,
    sparse: Sparse,
    run: tuple[int, int],
    tokens: int,
    in_slots: bool,
) -> Call:
    """Return the call with its keys restricted to near keys and chosen pages."""
    far = far_of(heads, sparse, run, call.q_start, tokens)
    units = 0 if far is None else most_units_of(far)
    blocks = near_blocks(call.blocks, sparse, call.q_start)
    return replace(call, blocks=blocks, far=far, most_units=units, in_slots=in_slots)


def chunk_call(attention: LayerSpec, batch: int, start: int, stop: int, kv_block: int) -> Call:
    """Return the dense attention call of tokens [start, stop) in `batch` sequences."""
    row = batch * attention.query_heads * max(attention.head_dim, attention.value_dim)
    blocks = layer_blocks(attention, (start, stop), kv_block, batch)
    narrow = tuple(piece for block in blocks for piece in cut_wide(block, most_tokens(row)))
    return Call(kernel_of(attention), narrow, start)


def kernel_of(attention: LayerSpec) -> Kernel:
    """Return the memory model of the kernel that `engine.kernels.select_kernel` takes on a CPU."""
    if attention.indexer is not None:
        return TiledSizes(attention.softcap is not None, attention.indexer.tokens)
    if attention.softcap is not None:
        return TiledSizes()
    if attention.head_dim == attention.value_dim:
        return FlashSizes()
    return PaddedSizes(FlashSizes(), max(attention.head_dim, attention.value_dim))


# -- a chunk over its blocks -------------------------------------------------------------------


def attend(
    call: Call, q: MetaTensor, k: MetaTensor, v: MetaTensor, sinks: MetaTensor | None
) -> tuple[MetaTensor, MetaTensor]:
    out, lse = _attend_own(call, q, k, v)
    for visit in visits(call):
        out = as_width(out, lse.width)
        keys, values = _stored(k, visit), _stored(v, visit)
        for block in visit:
            result = call.kernel.forward(_queries(q, block), keys, values, block)
            merge(_queries(out, block), _queries(lse, block), *result)
            del result
    if call.far is not None:
        out = as_width(out, lse.width)
        q.memory.pass_by(_far_bytes(call, backward=False))
    if sinks is not None:
        out, lse = _add_sinks(out, lse)
    return as_width(out, q.width), lse


def _far_bytes(call: Call, *, backward: bool) -> int:
    assert call.far is not None
    return far_bytes(call.far, call.most_units, backward=backward, in_slots=call.in_slots)


def _attend_own(
    call: Call, q: MetaTensor, k: MetaTensor, v: MetaTensor
) -> tuple[MetaTensor, MetaTensor]:
    blocks = own_blocks(call)
    if len(blocks) == 1:
        out, lse = call.kernel.forward(q, k, v, blocks[0])
        packed = out.whole and not out.with_heads_first()
        return out if packed else out.memory.new(out.shape, out.width, heads_first=False), lse
    out = q.memory.new((*q.shape[:3], v.shape[3]), q.width, heads_first=False)
    lse = q.memory.new(q.shape[:3], wide(q.width))
    for block in blocks:
        keys, values = _keys(k, block), _keys(v, block)
        # As in `attention.chunk`, a part lives until its name is assigned again.
        part_of = call.kernel.forward(_queries(q, block), keys, values, block)
        if not block.causal:
            out = as_width(out, lse.width)
            merge(_queries(out, block), _queries(lse, block), *part_of)
    return out, lse


def _add_sinks(out: MetaTensor, lse: MetaTensor) -> tuple[MetaTensor, MetaTensor]:
    with_sink = pointwise(lse)
    shrunk = as_width(out, lse.width), column(pointwise(pointwise(lse)))
    return pointwise(*shrunk), with_sink


def _attend_backward(
    call: Call,
    dout: MetaTensor,
    q: MetaTensor,
    k: MetaTensor,
    v: MetaTensor,
    attended: tuple[MetaTensor, MetaTensor],
    sinks: MetaTensor | None,
) -> tuple[MetaTensor, MetaTensor, MetaTensor, MetaTensor | None]:
    width = wide(q.width)
    query_tensors = QueryTensors(dout, q, *attended)
    dq = _Sum(q.shape, width)
    dk, dv = _gradients(call, query_tensors, k, v, own_blocks(call), dq)
    for visit in visits(call):
        keys, values = _stored(k, visit), _stored(v, visit)
        _gradients(call, query_tensors, keys, values, visit, dq)
    dsinks = None
    if sinks is not None:
        dsinks = _sink_gradient(dout, attended[0], attended[1], sinks)
    whole = as_width(dq.total(), width)
    dk, dv = as_width(dk, width), as_width(dv, width)
    if call.far is not None:
        q.memory.pass_by(_far_bytes(call, backward=True))
    return whole, dk, dv, dsinks


def _sink_gradient(
    dout: MetaTensor, out: MetaTensor, lse: MetaTensor, sinks: MetaTensor
) -> MetaTensor:
    width = lse.width
    difference = pointwise(lse)
    weight = pointwise(difference)
    del difference
    products = pointwise(as_width(dout, width), as_width(out, width))
    rows = reduced(products, products.shape[:3])
    del products
    weighted = pointwise(weight, rows)
    return pointwise(reduced(weighted, sinks.shape))


class _Sum:
    """Sum of partial results; the first becomes the sum, uncopied, if it has the full shape."""

    def __init__(self, shape: tuple[int, ...], width: int) -> None:
        self.shape, self.width = shape, width
        self.sum: MetaTensor | None = None

    def add(self, part: MetaTensor) -> None:
        if self.sum is None and part.shape == self.shape:
            self.sum = part
            return
        if self.sum is None:
            self.sum = part.memory.new(self.shape, self.width)
        self.sum = as_width(self.sum, self.width)

    def total(self) -> MetaTensor:
        assert self.sum is not None
        return self.sum


def _gradients(
    call: Call,
    query_tensors: QueryTensors,
    keys: MetaTensor,
    values: MetaTensor,
    visit: tuple[Block, ...],
    dq: _Sum,
) -> tuple[MetaTensor, MetaTensor]:
    dk, dv = _Sum(keys.shape, dq.width), _Sum(values.shape, dq.width)
    for block in visit:
        queries = QueryTensors(*(_queries(x, block) for x in query_tensors))
        k, v = _keys(keys, block), _keys(values, block)
        parts = call.kernel.backward(queries, k, v, block)
        dq.add(parts[0])
        dk.add(parts[1])
        dv.add(parts[2])
        del parts
    return dk.total(), dv.total()


def own_blocks(call: Call) -> tuple[Block, ...]:
    blocks = (block for block in call.blocks if block.k_start >= call.q_start)
    return _few(tile for block in blocks for tile in call.kernel.split(block))


def visits(call: Call) -> Iterator[tuple[Block, ...]]:
    """Yield blocks of earlier keys in ascending order, one tuple per set of overlapping blocks."""
    for together in overlapping(b for b in call.blocks if b.k_start < call.q_start):
        yield _few(tile for one in together for tile in call.kernel.split(one))


def _few(blocks: Iterator[Block]) -> tuple[Block, ...]:
    """Leave out most blocks of long stretches of equal blocks, which do not raise the peak."""
    kept: list[Block] = []
    repeats = 0
    for block in blocks:
        same = kept and _extent(block) == _extent(kept[-1])
        repeats = repeats + 1 if same else 0
        if repeats < SEEN_TILES:
            kept.append(block)
    return tuple(kept)


def _extent(block: Block) -> tuple[int, int, bool, bool]:
    return block.queries, block.keys, block.causal, block.window is not None


def _stored(like: MetaTensor, visit: tuple[Block, ...]) -> MetaTensor:
    """Return the keys or values of several blocks as the arena stores them: tokens before heads."""
    tokens = max(b.k_stop for b in visit) - min(b.k_start for b in visit)
    batch, heads, _, width = like.shape
    return like.memory.uncounted((batch, heads, tokens, width), like.width, heads_first=False)


def _queries(x: MetaTensor, block: Block) -> MetaTensor:
    return part(x, block.queries)


def _keys(x: MetaTensor, block: Block) -> MetaTensor:
    return part(x, block.keys)
