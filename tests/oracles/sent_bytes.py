"""Bytes that ranks send in each instruction of a program, counted from the program alone: what the
engine's calls are held to.

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

    indexers  forward    n (P - 1) (index key + choice)

With equal parts, n (P - 1) = C - n = C (P - 1) / P. Only the ring's grow with the prefix. A forward
that does not attend sends less: K, V if they are to be kept, q if a backward follows, and O.
"""

from collections.abc import Sequence

from farspan.program.layout import Rank, among_heads, share_of
from farspan.program.program import AttentionMode, Backward, Forward, Instruction, Program, Send
from farspan.program.work import parts_of
from farspan.spec import LayerSpec, Tier


def sent_bytes(program: Program, i: Instruction) -> dict[str, int]:
    """What the program's rank sends in one instruction along ulysses, shards, ring and pipeline;
    axes along which it sends nothing may be missing."""
    match i:
        case Send(_, chunk):
            start, stop = program.share.tokens.ranges[chunk]
            row = program.run.batch * program.model.passed() * program.model.element_bytes
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
    sent["ulysses"] += _heads(program, i.chunk, _indexed(program, i))
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


def _indexed(program: Program, i: Forward) -> int:
    """Bytes a token of index keys and of the tokens that a query chose, as far as they are sent."""
    layer, model = program.model.layers[i.layer], program.model
    indexer, batch = layer.indexer, program.run.batch
    if indexer is None:
        return 0
    attends = i.mode is AttentionMode.COMPUTE or i.graph
    chosen = 4 * batch * layer.chosen(program.chunks[i.chunk][1])
    needs = i.write_kv is not None or (chosen and (attends or indexer.passed))
    at_hand = i.write_kv is None and program.buffers[i.prefix].tier is Tier.DEVICE
    width = model.accumulate_bytes() if indexer.wide else model.element_bytes
    keys = batch * indexer.dim * width * bool(needs and not at_hand)
    return keys + chosen * attends


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


def _ring(program: Program, chunk: int) -> tuple[Sequence[int], int]:
    rank = program.share.rank
    if rank.layout.ring == 1:
        return [0], 0
    peers = (Rank(rank.layout, number) for number in rank.peers("ring"))
    rows = [share_of(program.chunks[: chunk + 1], peer).keys.total for peer in peers]
    return rows, rank.along["ring"]
