"""What a step does, counted from its program: floating-point operations, bytes to and from main
memory, and bytes that ranks send.

A program's sum of operations, in which progress is measured, is MFU's `useful_flop` and, beside it,
what is computed twice, and half a forward of attention: its backward makes five matrix products
where MFU counts four.

Bytes that a rank sends in the cells of its program, by axis (FPDT 4.1). P ranks along an axis share
C tokens of a chunk, n of them this rank's and m those of the largest part; rank j of a ring holds
T[j] rows up to the chunk; q, kv and o are bytes a token of this rank's heads, q', kv' and o' those
in the accumulate dtype, o' with LSE:

    ulysses   forward    n (P - 1) (q + kv) + (C - n) o
              backward   n (P - 1) o        + (C - n) (q + kv)
    shards    forward    m (P - 1) q              + (C - n) o'
              backward   m (P - 1) (q + 2 o + lse) + (C - n) q'
    ring      forward    kv of T[j] rows of every rank but the next
              backward   the same, and kv' of T[j] rows of every rank but this

With equal parts, n (P - 1) = C - n = C (P - 1) / P. Only the ring's grow with the prefix. A forward
that does not attend sends less: K, V if they are to be kept, q if a backward follows, and O.

Heads are exchanged in pieces: while those of one are attended to, the next are on their way.

    exchange   q, K, V 0 | q, K, V 1 |            O 0 |            O 1 |
    compute              | attend 0              | attend 1            |

What is not hidden is the first piece in and the last one out. The engine and whoever prices a
program ask here. A piece is of whole K, V heads; where there are fewer of them than pieces, query
heads of one are shared out, and its K, V come with the first piece and leave with the last. Keys on
host are streamed past a cell once, so all its heads are attended to together; a ring and sparse
attention work on all heads too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from farspan.program.attention_blocks import chunk_pairs, earlier_rows, sparse_of
from farspan.program.layout import Layout, Range, Rank, among_heads, part, share_of
from farspan.program.program import (
    AttentionMode,
    Backward,
    Forward,
    Head,
    Instruction,
    Program,
    Send,
    cell_place,
    row_bytes,
)
from farspan.program.residency import RESIDENCY, Kind
from farspan.spec import BACKWARD_PRODUCTS, LayerSpec, ModelSpec, Schedule, Tier


def work_of(program: Program, instruction: Instruction) -> float:
    """FLOP of a cell or a head, counting causal attention only over the keys a query sees."""
    match instruction:
        case Forward(layer, chunk, mode):
            spec = program.model.layers[layer]
            if mode is AttentionMode.NONE:
                return 2.0 * _rows(program, chunk) * _projections(program, spec)
            linear = 2.0 * _rows(program, chunk) * linear_products(program.model, spec)
            compute = mode is AttentionMode.COMPUTE
            return linear + (_attention(program, spec, chunk) if compute else 0.0)
        case Backward(layer, chunk):
            spec = program.model.layers[layer]
            work = spec.work
            trained = work.trainable / work.parameters if work.parameters else 1.0
            linear = 2.0 * _rows(program, chunk) * linear_products(program.model, spec)
            attention = _attention(program, spec, chunk)
            return (1.0 + trained) * linear + BACKWARD_PRODUCTS * attention
        case Head(chunk, gradient):
            model = program.model
            forward = 2.0 * _rows(program, chunk) * model.hidden * model.vocab
            return forward * (2.0 + bool(model.outer_trainable()) if gradient else 1.0)
        case _:
            return 0.0


def _rows(program: Program, chunk: int) -> int:
    start, stop = program.chunks[chunk]
    return program.run.batch * (stop - start)


def _projections(program: Program, spec: LayerSpec) -> int:
    """Multiplications of a token before attention: those that make q, k and v."""
    if spec.work.products:
        projected = spec.work.products[: spec.work.projections]
        return sum(inner * outer for inner, outer in projected)
    return program.model.hidden * (spec.query_heads * spec.head_dim + spec.kv_elements())


def linear_products(model: ModelSpec, spec: LayerSpec) -> int:
    """Multiplications of a token in a layer, attention aside.

    Where nobody counted the layer's weights, an equal share of all but one table: a head of its own
    is then counted with the layers, 8% of a 7B model, which nothing here tells from a tied one.
    """
    if spec.work.products:
        return sum(inner * outer for inner, outer in spec.work.products)
    if spec.work.parameters:
        return spec.work.parameters
    return max(0, model.parameters - model.hidden * model.vocab) // len(model.layers)


def _attention(program: Program, spec: LayerSpec, chunk: int) -> float:
    pairs = chunk_pairs(program, spec, chunk)
    width = spec.query_heads * (spec.head_dim + spec.value_dim)
    return 2.0 * width * program.run.batch * pairs


def copied_bytes(program: Program, source: str, target: str, chunk: int) -> int:
    """Bytes that a fetch or evict of one chunk moves."""
    ends = program.buffers[source], program.buffers[target]
    if RESIDENCY[ends[0].kind].in_cells:
        places = (cell_place(program, end, chunk) for end in ends)
        return min(stop - start for start, stop in places)
    start, stop = program.rows(ends[0].kind, chunk)
    layer = min(max(end.layer for end in ends), len(program.model.layers) - 1)
    return _row_bytes(program, ends[0].kind, program.model.layers[layer]) * (stop - start)


def _row_bytes(program: Program, kind: Kind, layer: LayerSpec) -> int:
    return row_bytes(kind, program.model, layer, program.run.batch)


def streamed_bytes(program: Program, layer: int, chunk: int, name: str) -> int:
    """Bytes of a host buffer that the chunk's queries reach among the earlier rows, each once; 0 on
    the device."""
    buffer, spec = program.buffers[name], program.model.layers[layer]
    if buffer.tier is not Tier.HOST:
        return 0
    return earlier_rows(program, spec, chunk) * _row_bytes(program, buffer.kind, spec)


def sent_bytes(program: Program, i: Instruction) -> dict[str, int]:
    """What the program's rank sends in one instruction along ulysses, shards, ring and pipeline;
    axes along which it sends nothing may be missing."""
    match i:
        case Send(_, chunk):
            start, stop = program.share.tokens.ranges[chunk]
            row = program.run.batch * program.model.hidden * program.model.element_bytes
            return {"pipeline": max(1, stop - start) * row}
        case Forward():
            return _forward(program, i)
        case Backward():
            return _backward(program, i)
        case _:
            return {}


def _forward(program: Program, i: Forward) -> dict[str, int]:
    rows = _Rows(program, program.model.layers[i.layer])
    there = ulysses_forward(program, i)
    sent = {"ulysses": _heads(program, i.chunk, there)}
    if i.mode is not AttentionMode.NONE:
        sent["ulysses"] += _tokens(program, i.chunk, rows.out)
    if i.mode is AttentionMode.COMPUTE:
        sent["shards"] = shards_forward(*_shards(program, i.chunk), rows.query, rows.wide_out)
        sent["ring"] = ring_forward(*_ring(program, i.chunk), rows.kv)
    return sent


def ulysses_forward(program: Program, i: Forward) -> int:
    """Bytes a token that a forward cell sends to where its heads are: of q, K and V, as needed."""
    rows = _Rows(program, program.model.layers[i.layer])
    if i.mode is AttentionMode.NONE:
        return rows.kv
    if i.mode is not AttentionMode.COMPUTE and not i.graph:
        return rows.kv if i.write_kv is not None else 0
    at_hand = i.write_kv is None and program.buffers[i.prefix].tier is Tier.DEVICE
    return rows.query if at_hand else rows.query + rows.kv


def _backward(program: Program, i: Backward) -> dict[str, int]:
    rows = _Rows(program, program.model.layers[i.layer])
    ulysses = _heads(program, i.chunk, rows.out)
    ulysses += _tokens(program, i.chunk, rows.query + rows.kv)
    saved = rows.query + 2 * rows.out + rows.lse
    shards = shards_backward(*_shards(program, i.chunk), saved, rows.wide_query)
    ring = ring_backward(*_ring(program, i.chunk), rows.kv, rows.wide_kv)
    return {"ulysses": ulysses, "shards": shards, "ring": ring}


class _Rows:
    """Bytes a token of one rank's heads, all sequences."""

    def __init__(self, program: Program, layer: LayerSpec) -> None:
        batch, model = program.run.batch, program.model
        narrow, wide = batch * model.element_bytes, batch * model.accumulate_bytes()
        query, out = layer.query_heads * layer.head_dim, layer.output_elements()
        self.query, self.kv, self.out = (n * narrow for n in (query, layer.kv_elements(), out))
        self.lse = layer.query_heads * wide
        self.wide_query, self.wide_kv = query * wide, layer.kv_elements() * wide
        self.wide_out = out * wide + self.lse


# -- one axis each -------------------------------------------------------------------------------


def _heads(program: Program, chunk: int, row: int) -> int:
    """Own tokens' rows for the heads of every other peer."""
    parts, own = _ulysses(program, chunk)
    return (len(parts) - 1) * parts[own] * row


def _tokens(program: Program, chunk: int, row: int) -> int:
    """Own heads' rows for the tokens of every other peer."""
    parts, own = _ulysses(program, chunk)
    return (sum(parts) - parts[own]) * row


def shards_forward(counts: Sequence[int], index: int, query: int, output: int) -> int:
    """What the shard `index` sends to attend, from the bytes of a token's q and of its O and LSE in
    the accumulate dtype, all batch rows and heads; `counts` are tokens of each."""
    return _gathered(counts, query) + (sum(counts) - counts[index]) * output


def shards_backward(counts: Sequence[int], index: int, saved: int, gradient: int) -> int:
    """What it sends in the backward, from the bytes of a token's q, O, dO and LSE as they are, and
    of its dQ in the accumulate dtype."""
    return _gathered(counts, saved) + (sum(counts) - counts[index]) * gradient


def _gathered(counts: Sequence[int], row: int) -> int:
    """A gather pads to the largest part."""
    return (len(counts) - 1) * max(counts) * row


def ring_forward(rows: Sequence[int], index: int, row: int) -> int:
    """What the ring's rank `index` sends to attend, from the rows that each holds, the chunk's own
    with them, and the bytes of K and V of one."""
    return 0 if len(rows) == 1 else (sum(rows) - rows[(index + 1) % len(rows)]) * row


def ring_backward(rows: Sequence[int], index: int, row: int, gradient: int) -> int:
    """What it sends in the backward; `gradient` are the bytes of dK and dV of a row in the
    accumulate dtype."""
    return ring_forward(rows, index, row) + (sum(rows) - rows[index]) * gradient


def _ulysses(program: Program, chunk: int) -> tuple[Sequence[int], int]:
    rank = program.share.rank
    return among_heads(rank, program.chunks[chunk]), rank.along["ulysses"]


def _shards(program: Program, chunk: int) -> tuple[Sequence[int], int]:
    rank = program.share.rank
    return parts_of(rank, program.chunks[chunk]), rank.along["shards"]


def parts_of(rank: Rank, chunk: tuple[int, int]) -> list[int]:
    """How many of a chunk's tokens each of the rank's shards holds K, V of."""
    peers = (Rank(rank.layout, number) for number in rank.peers("shards"))
    ranges = (peer.tokens(chunk, "tensor", "ulysses") for peer in peers)
    return [stop - start for start, stop in ranges]


def _ring(program: Program, chunk: int) -> tuple[Sequence[int], int]:
    rank = program.share.rank
    if rank.layout.ring == 1:
        return [0], 0
    peers = (Rank(rank.layout, number) for number in rank.peers("ring"))
    rows = [share_of(program.chunks[: chunk + 1], peer).keys.total for peer in peers]
    return rows, rank.along["ring"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of a rank's heads."""

    queries: Range  # query heads
    keys: Range  # the K, V heads that they attend to
    first: bool = True  # of these K, V heads: K, V come with it
    last: bool = True  # dK, dV leave with it


def pieces_of(schedule: Schedule, layout: Layout, spec: LayerSpec) -> tuple[Piece, ...]:
    """The pieces of a layer's cells that attend, in order; one where nothing is exchanged. `spec`
    has the heads of one rank."""
    together = (
        layout.ulysses == 1
        or layout.ring > 1
        or schedule.kv is Tier.HOST
        or sparse_of(schedule, spec) is not None
    )
    return cut_heads(spec, 1 if together else schedule.alltoall_splits)


def exposed(into: float, work: float, out: float, count: int) -> float:
    """Seconds that an exchange of `into` before and `out` after takes beyond the `work` that it
    goes on beside, in `count` equal pieces: what comes first goes first."""
    done, link = 0.0, into
    for place in range(1, count + 1):
        done = max(done, place * into / count) + work / count
        link = max(link, done) + out / count
    return link - work


def cut_heads(layer: LayerSpec, count: int) -> tuple[Piece, ...]:
    """At most `count` pieces of a layer's heads."""
    if not layer.attends():
        return (Piece((0, 0), (0, 0)),)
    ratio = layer.query_heads // layer.kv_heads
    if layer.kv_heads > 1 or count == 1:
        count = min(count, layer.kv_heads)
        keys = [part((0, layer.kv_heads), i, count) for i in range(count)]
        return tuple(Piece((start * ratio, stop * ratio), (start, stop)) for start, stop in keys)
    count = min(count, ratio)
    return tuple(
        Piece(part((0, ratio), i, count), (0, 1), i == 0, i == count - 1) for i in range(count)
    )
