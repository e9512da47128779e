"""One cell's attention: what happens when a layer, run on a chunk, asks for attention.

Legend: B batch, C tokens of the chunk, H query heads, Hk key-value heads, D head dim. The model
hands over q [B, H, C, D] and k, v [B, Hk, C, D]; buffers hold k, v [C, B, Hk, D], out [B, C, H, Dv]
and lse [B, H, C].

How the cells of a chunk attend: which keys they see, on which rank, by which kernel.

The attention cells of a program: each with its keys, places in buffers and exchanges."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from farspan.attention.chunk import AttentionCall, attend, attend_backward
from farspan.distributed.context import ParallelContext
from farspan.distributed.kv_sharding import KVShards
from farspan.distributed.ring import Ring
from farspan.engine.buffers import KVHeads, KVPrefix, ProgramBuffers, StagingBuffers, streamed_spans
from farspan.engine.kernels import AttentionKernels
from farspan.engine.loss import StepInputs
from farspan.engine.ulysses import (
    ALONE,
    Attended,
    AttentionGradients,
    HeadExchange,
    OfKeys,
    OverlappedUlysses,
    Ulysses,
)
from farspan.plan.blocks import Block, Run, cut_wide, document_runs, most_of, near_blocks
from farspan.plan.exchange_pieces import Piece, pieces_of
from farspan.plan.held_blocks import Held, plan_held_blocks
from farspan.plan.layout import Range, Rank
from farspan.plan.program import AttentionMode, Backward, Forward, Program
from farspan.plan.share import Share, among_heads, share_of
from farspan.plan.traffic import parts_of
from farspan.sparse.engine import SparseCell, SparseRun
from farspan.spec import Refused, Tier

Rows = dict[str, Tensor]


class KVWritten(Exception):
    """K and V are written, and nothing else of this cell is wanted."""


@dataclass(slots=True)
class ChunkAttention:
    """The attention of one (layer, chunk), from its forward to its backward."""

    mode: AttentionMode
    call: Callable[[float], AttentionCall]  # from the scale the model asks for
    key_values: KVPrefix  # of earlier chunks
    write_kv: Rows | None = None
    attention: Rows | None = None  # where O, LSE go (COMPUTE) or are (GIVEN)
    held: tuple[Tensor, Tensor] | None = None  # O, LSE [B, H, C, Dv], [B, H, C]
    kept: bool = False  # the graph outlives the chunk
    own_kv: Rows | None = None  # of a kept graph, at its backward
    own_dkv: Rows | None = None  # complete but for this cell's share, at its backward
    sparse: SparseCell | None = None  # None: dense
    spread: KVShards | Ring | None = None  # where keys are spread over ranks
    exchange: HeadExchange = ALONE  # of tokens for heads, among ranks
    graph: bool = False  # a backward will follow
    at_hand: Rows | None = None  # the chunk's K, V, where its buffer has them on the device
    pieces: tuple[Piece, ...] = ()  # in which heads are exchanged where it attends
    dtype: torch.dtype | None = None  # of K, V, and so of their gradients
    calls: int = 0

    def __call__(
        self, _: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, **keywords: Any
    ) -> Tensor:
        """Answer the model's attention call: [B, C, H, Dv]."""
        self.calls += 1
        if (keywords.get("dropout") or 0.0) > 0:
            raise Refused("model: attention dropout was switched on in the middle of a step")
        if self.mode is AttentionMode.NONE:
            self.write(*self.exchange.to_heads(k, v))
            raise KVWritten
        sinks = keywords.get("s_aux")
        return _Attend.apply(q, k, v, sinks, self, self.call(scale))

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of the heads that attention is of here; K, V go to their buffer."""
        if self.exchange is ALONE:
            self.write(k, v)
            return q, k, v
        if self.mode is not AttentionMode.COMPUTE and not self.graph:
            if self.write_kv is not None:
                self.write(*self.exchange.to_heads(k, v))
            return q, k, v  # nobody reads them
        at_hand = self.kv_at_hand()
        if at_hand is not None:
            (q,) = self.exchange.to_heads(q)
            return q, *at_hand
        q, k, v = self.exchange.to_heads(q, k, v)
        self.write(k, v)
        # All three are of one message, which a graph that saved a view of q would hold.
        return q.contiguous() if self.graph else q, k, v

    def kv_at_hand(self) -> tuple[Tensor, Tensor] | None:
        """The chunk's K, V of this rank's heads, where an earlier pass left them."""
        if self.at_hand is None:
            return None
        return self.at_hand["k"].permute(1, 2, 0, 3), self.at_hand["v"].permute(1, 2, 0, 3)

    def write(self, k: Tensor, v: Tensor) -> None:
        if self.write_kv is None:
            return
        self.write_kv["k"].copy_(k.detach().permute(2, 0, 1, 3))
        self.write_kv["v"].copy_(v.detach().permute(2, 0, 1, 3))
        if self.sparse is not None:
            self.sparse.note(self.write_kv["k"])

    def output(
        self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """O and LSE, computed or at hand."""
        if self.mode is AttentionMode.HELD:
            assert self.held is not None
            return self.held
        if self.mode is AttentionMode.GIVEN:
            assert self.attention is not None
            self.held = _heads_first(self.attention)
            return self.held
        return self.keep(*self.attend(call, (q, k, v), self.key_values, sinks))

    def attend(
        self, call: AttentionCall, of_keys: OfKeys, prefix: KVPrefix | KVHeads, sinks: Tensor | None
    ) -> Attended:
        """O and LSE of these heads, computed."""
        if isinstance(self.spread, Ring):
            return self.spread.attend(call, *of_keys, self.key_values, sinks)
        if self.spread is not None:
            return self.spread.attend(call, *of_keys, prefix, sinks)
        if self.sparse is not None:
            return self.sparse.attend(call, *of_keys, sinks)
        return attend(call, *of_keys, prefix, sinks)

    def keep(self, out: Tensor, lse: Tensor) -> Attended:
        """O and LSE in their buffer, if they have one."""
        self.key_values.done()
        if self.attention is None:
            self.held = out, lse
            return out, lse
        self.attention["out"].copy_(out.transpose(1, 2))
        self.attention["lse"].copy_(lse)
        # From here on the kept copy is the output: a graph that saves it saves a reference.
        self.held = _heads_first(self.attention)
        return self.held

    def attend_backward(
        self,
        call: AttentionCall,
        dout: Tensor,
        of_keys: OfKeys,
        attended: Attended,
        prefix: KVPrefix | KVHeads,
        sinks: Tensor | None,
    ) -> AttentionGradients:
        """dq, dk, dv and d sinks of these heads; those of earlier keys go to their sums."""
        whole = self.key_values
        if isinstance(self.spread, Ring):
            return self.spread.attend_backward(call, dout, of_keys, attended, whole, sinks)
        if self.spread is not None:
            return self.spread.attend_backward(call, dout, of_keys, attended, prefix, sinks)
        if self.sparse is not None:
            return self.sparse.attend_backward(call, dout, of_keys, attended, sinks)
        return attend_backward(call, dout, *of_keys, attended, prefix, sinks, narrow=True)

    def with_later(self, dk: Tensor, dv: Tensor, heads: slice) -> list[Tensor]:
        """dK, dV of the chunk's own keys, of these heads, with what later chunks gave them."""
        assert self.own_dkv is not None
        later = (self.own_dkv[name].permute(1, 2, 0, 3)[:, heads] for name in ("k", "v"))
        return [(own + rest).to(self.dtype) for own, rest in zip((dk, dv), later, strict=True)]

    def in_pieces(self) -> OverlappedUlysses | None:
        """What exchanges its heads while it attends; None: they come and go all at once."""
        if len(self.pieces) < 2:
            return None
        return OverlappedUlysses(self.pieces, self.exchange, self.key_values)


def _heads_first(rows: Rows) -> tuple[Tensor, Tensor]:
    return rows["out"].transpose(1, 2), rows["lse"]


class _Attend(torch.autograd.Function):
    """Attention over the prefix, with dK and dV of earlier chunks added to their buffer."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        cell: ChunkAttention,
        call: AttentionCall,
    ) -> Tensor:
        cell.dtype = k.dtype
        pieces = cell.in_pieces() if cell.mode is AttentionMode.COMPUTE else None
        own_sinks = None if sinks is None else cell.exchange.heads_of(sinks)
        if pieces is None:
            q, k, v = cell.to_heads(q, k, v)
            # A kept graph reads K, V from their buffer: one layout for both, or kernels round
            # apart.
            k, v = k.contiguous(), v.contiguous()
            out, lse = cell.output(call, q, k, v, own_sinks)
            (own,) = cell.exchange.to_tokens(out)
        else:

            def attend(of_keys: OfKeys, keys: KVHeads, heads: slice) -> Attended:
                return cell.attend(call, of_keys, keys, _of(own_sinks, heads))

            (q, k, v), attended, own = pieces.forward(attend, (q, k, v), cell.kv_at_hand())
            cell.write(k, v)
            out, lse = cell.keep(*attended)
        ctx.cell, ctx.call = cell, call
        # A kept graph leaves what buffers hold to them: K, V always, O and LSE when they are kept.
        keys = (None, None) if cell.kept else (k, v)
        output = (None, None) if cell.kept and cell.attention is not None else (out, lse)
        ctx.save_for_backward(q, sinks, *keys, *output)
        return own.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, sinks, k, v, out, lse = ctx.saved_tensors
        cell: ChunkAttention = ctx.cell
        if k is None:
            assert cell.own_kv is not None
            k, v = (cell.own_kv[name].permute(1, 2, 0, 3).contiguous() for name in ("k", "v"))
        if out is None:
            assert cell.attention is not None
            out, lse = _heads_first(cell.attention)
        own_sinks = None if sinks is None else cell.exchange.heads_of(sinks)
        dout, of_keys, pieces = dout.transpose(1, 2), (q, k, v), cell.in_pieces()
        if pieces is None:
            (dout,) = cell.exchange.to_heads(dout)
            dq, dk, dv, dsinks = cell.attend_backward(
                ctx.call, dout, of_keys, (out, lse), cell.key_values, own_sinks
            )
            own = dq.to(q.dtype), *cell.with_later(dk, dv, slice(None))
            dq, dk, dv = cell.exchange.to_tokens(*own)
        else:

            def attend_backward(
                dout: Tensor, of_keys: OfKeys, attended: Attended, keys: KVHeads, heads: slice
            ) -> AttentionGradients:
                own = _of(own_sinks, heads)
                return cell.attend_backward(ctx.call, dout, of_keys, attended, keys, own)

            dq, dk, dv, dsinks = pieces.backward(
                attend_backward, dout, of_keys, (out, lse), cell.with_later
            )
        cell.key_values.done()
        if dsinks is not None and sinks is not None:
            dsinks = cell.exchange.of_all_heads(dsinks.to(sinks.dtype), sinks)
        return dq, dk, dv, dsinks, None, None


def _of(sinks: Tensor | None, heads: slice) -> Tensor | None:
    return None if sinks is None else sinks[heads]


QUERIES = ("tensor", "ulysses", "shards")  # ranks that bring queries to the keys of one


@dataclass(slots=True)
class AttentionContext:
    """The attention of one program on one batch. Blocks of one chunk are remembered."""

    program: Program
    batch: StepInputs
    kernels: AttentionKernels
    ranks: ParallelContext | None
    chunk: int = -1
    blocks: dict[tuple[int | None, int, int], tuple[Block, ...]] = field(default_factory=dict)

    @property
    def rank(self) -> Rank:
        return self.program.share.rank

    def call(self, layer: int, chunk: int, scale: float) -> AttentionCall:
        """Attention of this rank's queries against the keys that it holds itself."""
        spec = self.program.model.layers[layer]
        blocks = self.blocks_of(layer, chunk, self.rank.along["ring"])
        kernel, first = self.kernels.of(spec, self.program), self._own_row(chunk)
        start, fused = self.queries(chunk)[0], self.kernels.fused
        return AttentionCall(scale, spec.softcap, blocks, start, kernel, first, fused)

    def streamed(self, layer: int, chunk: int) -> list[Range]:
        """Ranges of earlier keys in the order in which they will be asked for."""
        own = self.rank.along["ring"]
        return streamed_spans(self.blocks_of(layer, chunk, own), self._own_row(chunk))

    def queries(self, chunk: int) -> Range:
        """Positions of the queries that meet this rank's keys."""
        return self.rank.tokens(self.program.chunks[chunk], *QUERIES)

    def exchange(self, chunk: int) -> HeadExchange:
        """What turns the chunk's tokens into this rank's heads."""
        if self.ranks is None or self.rank.layout.sequence() == 1:
            return ALONE
        ulysses = None
        if self.rank.layout.ulysses > 1:
            parts = among_heads(self.rank, self.program.chunks[chunk])
            ulysses = Ulysses(self.ranks.among("ulysses"), parts)
        return HeadExchange(ulysses, self.rank.layout.tensor * self.is_filler(chunk))

    def pieces(self, layer: int) -> tuple[Piece, ...]:
        """In which a layer's heads are exchanged."""
        program = self.program
        return pieces_of(program.schedule, self.rank.layout, program.model.layers[layer])

    def spread(self, layer: int, chunk: int) -> KVShards | Ring | None:
        """What attends where keys are spread over ranks; None: this rank has all of its heads'."""
        if self.ranks is None:
            return None
        layout, ring = self.rank.layout, None
        if layout.ring > 1:
            peers = [self._share(index).keys.rows[chunk] for index in range(layout.ring)]
            rows = [(start, stop - start) for start, stop in peers]
            ring = Ring(self.ranks.among("ring"), rows, partial(self.blocks_of, layer, chunk))
        if layout.shards == 1:
            return ring
        counts = parts_of(self.rank, self.program.chunks[chunk])
        return KVShards(self.ranks.among("shards"), counts, ring)

    def is_filler(self, chunk: int) -> bool:
        """Has it, with its tensor peers, no token of the chunk? Modules cannot run on none, so it
        runs one of no effect: attention and buffers leave it out, and its gradient is zero."""
        start, stop = self.rank.tokens(self.program.chunks[chunk], "tensor")
        return start == stop

    def blocks_of(self, layer: int, chunk: int, ring: int) -> tuple[Block, ...]:
        """Blocks of the queries against the keys of the rank at this place of the ring."""
        program = self.program
        spec, sparse = program.model.layers[layer], program.schedule.sparse
        if chunk != self.chunk:
            self.chunk, self.blocks = chunk, {}
        most = most_of(spec, program.run)
        key = spec.window, most, ring
        if key not in self.blocks:
            start, stop = self.queries(chunk)
            block, held = program.schedule.kv_block, self._held(ring)
            runs = self.runs(chunk)
            blocks = plan_held_blocks(start, stop, block, spec.window, runs, held)
            if sparse is not None and spec.window is None:
                blocks = near_blocks(blocks, sparse, start)
            self.blocks[key] = tuple(piece for block in blocks for piece in cut_wide(block, most))
        return self.blocks[key]

    def runs(self, chunk: int) -> Sequence[tuple[Run, ...]] | None:
        """The documents of the queries' rows; None: each row is one."""
        rows, (start, stop) = self.batch.documents, self.queries(chunk)
        if rows is None or start == stop:
            return None
        return [document_runs(row, start, stop) for row in rows]

    def documents(self, chunk: int) -> Tensor | None:
        """The first token of each query's document [B, C], int64, on the batch's device; None: each
        row is one."""
        start, stop = self.queries(chunk)
        if self.batch.documents is None or start == stop:
            return None
        # From what is on the device: copying it there would have the CPU wait in every cell.
        positions = self.batch.position_ids[:, start:stop]
        return torch.arange(start, stop, device=positions.device) - positions

    def _own_row(self, chunk: int) -> int:
        return self.program.share.keys.rows[chunk][0]

    def _held(self, ring: int) -> Held | None:
        layout = self.rank.layout
        if layout.ring * layout.shards == 1:
            return None
        return Held(self._share(ring).keys.ranges)

    def _share(self, ring: int) -> Share:
        """Of the rank at this place of the ring."""
        number = self.rank.peers("ring")[ring]
        return share_of(self.program.chunks, Rank(self.rank.layout, number))


@dataclass(frozen=True, slots=True)
class AttentionCells:
    """Makes the cells of one program's run on one batch."""

    program: Program
    storage: ProgramBuffers
    slots: StagingBuffers
    attending: AttentionContext
    sparse: SparseRun | None

    def begin(self, i: Forward, held: tuple[Tensor, Tensor] | None) -> ChunkAttention:
        """The cell of a forward, whose keys may be on their way; `held` are O and LSE that an
        earlier pass left."""
        cell = ChunkAttention(
            i.mode,
            partial(self.attending.call, i.layer, i.chunk),
            self._prefix(i.layer, i.chunk, i.prefix),
            write_kv=self._rows(i.write_kv, i.chunk, i.layer),
            attention=self._rows(i.attention, i.chunk, i.layer),
            held=held,
            kept=i.kept,
            sparse=None if self.sparse is None else self.sparse.cell(i),
            exchange=self.attending.exchange(i.chunk),
            spread=self.attending.spread(i.layer, i.chunk),
            graph=i.graph,
            at_hand=self._at_hand(i),
            pieces=self.attending.pieces(i.layer),
        )
        if i.mode is AttentionMode.COMPUTE:
            self._fetch(cell, i.layer, i.chunk)
        return cell

    def begin_backward(self, i: Backward, cell: ChunkAttention) -> None:
        """Give a cell what its backward reads; keys and the sums of theirs may be on their way."""
        cell.key_values = self._prefix(i.layer, i.chunk, i.prefix, i.accumulator)
        if cell.sparse is not None and self.sparse is not None:
            cell.sparse.choice = self.sparse.choice(i)
        self._fetch(cell, i.layer, i.chunk)
        cell.own_dkv = self._rows(i.own_dkv, i.chunk, i.layer)
        if cell.kept:
            cell.own_kv = self._rows(i.own_kv, i.chunk, i.layer)
            cell.attention = self._rows(i.attention, i.chunk, i.layer)

    def _at_hand(self, i: Forward) -> Rows | None:
        """The chunk's own K, V, where an earlier pass left them on the device."""
        there = i.write_kv is None and self.program.buffers[i.prefix].tier is Tier.DEVICE
        return self._rows(i.prefix, i.chunk, i.layer) if there else None

    def _fetch(self, cell: ChunkAttention, layer: int, chunk: int) -> None:
        """Keys of earlier chunks may be on their way before the cell asks for them."""
        cell.key_values.begin(self.attending.streamed(layer, chunk))
        if cell.sparse is not None:
            cell.sparse.begin(cell.key_values)

    def _rows(self, name: str | None, chunk: int, layer: int) -> Rows | None:
        return None if name is None else self.storage.chunk(name, chunk, layer)

    def _prefix(self, layer: int, chunk: int, name: str, gradients: str | None = None) -> KVPrefix:
        before = self.program.share.keys.rows[chunk][0]
        fused = self.attending.kernels.fused
        return KVPrefix(self.storage, self.slots, layer, name, gradients, before, fused)
