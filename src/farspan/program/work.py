"""Work of a step, counted from its program: floating-point operations, bytes to and from main
memory, and the pieces in which ranks exchange heads.

Progress is measured in a program's operations. Their sum is MFU's `useful_flop` plus everything
that is recomputed, and half a forward of attention: its backward makes five matrix products where
MFU counts four.

Heads are exchanged in pieces: while one piece is in attention, the next is in transit.

    exchange   q, K, V 0 | q, K, V 1 |            O 0 |            O 1 |
    compute              | attend 0              | attend 1            |

Only the first piece in and the last one out are not hidden. The engine and the planner use the same
pieces. A piece has whole K, V heads; if there are fewer than pieces, the query heads of one are
divided, and its K, V come with the first piece and leave with the last. Keys on the host are
streamed past a cell once, so all its heads attend together; a ring and sparse attention use all
heads together, too.
"""

from dataclasses import dataclass
from enum import StrEnum

from farspan.program.attention_blocks import chunk_pairs, earlier_rows, sparse_of
from farspan.program.layout import Layout, Range, Rank, part
from farspan.program.program import (
    AttentionMode,
    Backward,
    Close,
    Embed,
    EmbedBackward,
    Evict,
    Fetch,
    Forward,
    Gather,
    Head,
    Instruction,
    Program,
    Receive,
    Reduce,
    Release,
    Send,
    cell_place,
    row_bytes,
)
from farspan.program.residency import RESIDENCY, Kind
from farspan.spec import BACKWARD_PRODUCTS, HOST, LayerSpec, ModelSpec, Schedule


def work_of(program: Program, instruction: Instruction) -> float:
    """Return the FLOP of a cell or a head; attention counts only the keys that a query sees."""
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


class WorkKind(StrEnum):
    """Purpose of an instruction, in words for reports."""

    FORWARD = "forward"
    AGAIN = "forward, computed again"
    BACKWARD = "backward"
    HEAD = "head and loss"
    EMBEDDING = "embedding"
    COPIES = "copies between host and device"
    WEIGHTS = "weights and their gradients, moved"
    RANKS = "messages between devices"
    OTHER = "inputs and sums on the device"


def work_kinds(program: Program) -> list[WorkKind]:
    """Return the purpose of each instruction. A cell's second forward is recomputation."""
    seen: set[tuple[int, int]] = set()
    found: list[WorkKind] = []
    for instruction in program.instructions:
        kind = _KINDS.get(type(instruction), WorkKind.OTHER)
        if isinstance(instruction, Forward):
            cell = instruction.layer, instruction.chunk
            kind = WorkKind.AGAIN if cell in seen else kind
            seen.add(cell)
        found.append(kind)
    return found


_KINDS: dict[type[Instruction], WorkKind] = {
    Forward: WorkKind.FORWARD,
    Backward: WorkKind.BACKWARD,
    Head: WorkKind.HEAD,
    Embed: WorkKind.EMBEDDING,
    EmbedBackward: WorkKind.EMBEDDING,
    Fetch: WorkKind.COPIES,
    Evict: WorkKind.COPIES,
    Gather: WorkKind.WEIGHTS,
    Release: WorkKind.WEIGHTS,
    Reduce: WorkKind.WEIGHTS,
    Close: WorkKind.WEIGHTS,
    Receive: WorkKind.RANKS,
    Send: WorkKind.RANKS,
}


def _rows(program: Program, chunk: int) -> int:
    start, stop = program.chunks[chunk]
    return program.run.batch * (stop - start)


def _projections(program: Program, spec: LayerSpec) -> int:
    if spec.work.products:
        projected = spec.work.products[: spec.work.projections]
        return sum(inner * outer for inner, outer in projected)
    return program.model.hidden * (spec.query_heads * spec.head_dim + spec.kv_elements())


def linear_products(model: ModelSpec, spec: LayerSpec) -> int:
    """Return the multiplications per token of a layer's linear modules.

    If the layer's weights were not counted, an equal share of the model's weights, without one
    table of embeddings, stands for them. A separate head then counts as part of the layers, 8% of a
    7B model, since nothing here distinguishes it from a tied head.
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
    """Return the bytes that one Fetch or Evict copies."""
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
    """Return the bytes of earlier keys that a chunk reads from a host buffer, each row once."""
    buffer, spec = program.buffers[name], program.model.layers[layer]
    if buffer.tier is not HOST:
        return 0
    return earlier_rows(program, spec, chunk) * _row_bytes(program, buffer.kind, spec)


def parts_of(rank: Rank, chunk: tuple[int, int]) -> list[int]:
    """Return, for each rank along the axis `shards`, how many of a chunk's K, V rows it holds."""
    peers = (Rank(rank.layout, number) for number in rank.peers("shards"))
    ranges = (peer.tokens(chunk, "tensor", "ulysses") for peer in peers)
    return [stop - start for start, stop in ranges]


@dataclass(frozen=True, slots=True)
class Piece:
    """Heads of a rank that are exchanged together and attend together."""

    queries: Range  # query heads
    keys: Range  # the K, V heads that they attend to
    first: bool = True  # the first piece with these K, V heads, which brings K, V
    last: bool = True  # the last such piece, which takes dK, dV


def pieces_of(schedule: Schedule, layout: Layout, spec: LayerSpec) -> tuple[Piece, ...]:
    """Return the pieces in which a layer's heads are exchanged, in order; one piece if no exchange
    can overlap with attention. `spec` has the heads of one rank."""
    together = (
        layout.ulysses == 1
        or layout.ring > 1
        or schedule.kv is HOST
        or sparse_of(schedule, spec) is not None
    )
    return cut_heads(spec, 1 if together else schedule.alltoall_splits)


def exposed(into: float, work: float, out: float, count: int) -> float:
    """Return the seconds by which exchanges of heads lengthen attention that takes `work` seconds.
    The exchange before attention takes `into` seconds, the one after it `out`; all three are cut
    into `count` equal pieces, so one piece is exchanged while another is computed."""
    done, link = 0.0, into
    for place in range(1, count + 1):
        done = max(done, place * into / count) + work / count
        link = max(link, done) + out / count
    return link - work


def cut_heads(layer: LayerSpec, count: int) -> tuple[Piece, ...]:
    """Cut a layer's heads into at most `count` pieces, which are exchanged one after another."""
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
