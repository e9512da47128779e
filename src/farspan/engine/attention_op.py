"""Compute attention when a layer that runs on one chunk of tokens calls its attention function.

`AttentionContext` belongs to one run of a program. It makes a `ChunkAttention` for each cell, a
(layer, chunk): the layer's attention function while the cell runs. `_Attend` is its autograd
function; `farspan.attention` has the arithmetic.

Legend: B batch, C tokens of the chunk, H query heads, Hk key-value heads, D head dim. The model
passes q [B, H, C, D] and k, v [B, Hk, C, D]; buffers hold k, v [C, B, Hk, D], out [B, C, H, Dv] and
lse [B, H, C].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from farspan.attention.backends import BlockKernel, ChoosingKernel, Chosen
from farspan.attention.chunk import AttentionCall, attend, attend_backward
from farspan.attention.far import FarAttention, FarRun
from farspan.distributed.context import ParallelContext
from farspan.distributed.kv_sharding import KVShards, Ring
from farspan.engine.buffers import KVHeads, KVPrefix, ProgramBuffers, StagingBuffers, streamed_spans
from farspan.engine.kernels import AttentionKernels
from farspan.engine.loss import StepInputs
from farspan.engine.ulysses import (
    Attended,
    AttentionGradients,
    HeadExchange,
    OfKeys,
    OverlappedUlysses,
    Ulysses,
)
from farspan.hf.indexer import IndexerCall
from farspan.program.attention_blocks import (
    Block,
    Held,
    Run,
    cut_wide,
    document_runs,
    layer_blocks,
    most_of,
)
from farspan.program.layout import Range, Rank, Share, among_heads, share_of
from farspan.program.program import AttentionMode, Backward, Forward, Program
from farspan.program.residency import INDEX
from farspan.program.work import Piece, parts_of, pieces_of
from farspan.spec import LayerSpec, Tier, UnsupportedError

Rows = dict[str, Tensor]

CALLS_KEPT = 256  # 20 KB of objects each at a million tokens
QUERIES = ("tensor", "ulysses", "shards")  # ranks that bring queries to another rank's keys


@dataclass(frozen=True, slots=True)
class IndexKeys:
    """Index keys of a chunk's prefix, and the chunk's place in its sequences."""

    chosen: int  # tokens that a query sees; 0: all
    first: int  # this rank's first token of the chunk
    tokens: int  # of a whole sequence
    begins: Tensor | None  # first token of the document of each of these, [B, C]; None: 0

    def keys(self, prefix: KVPrefix, own: Tensor) -> Tensor:
        """Return the index keys of all earlier tokens and the chunk's own, [B, T, D]."""
        return torch.cat([prefix.index_rows().transpose(0, 1), own], dim=1)


class KVWritten(Exception):
    """Exception that ends a layer's forward after its K, V are written, if no output is needed."""


@dataclass(slots=True)
class ChunkAttention:
    """Attention function of one cell (layer, chunk), and its data from forward to backward."""

    mode: AttentionMode
    call: Callable[[float], AttentionCall]  # takes the model's softmax scale
    key_values: KVPrefix  # of earlier chunks
    write_kv: Rows | None = None
    attention: Rows | None = None  # holds O, LSE: written (COMPUTE) or read (GIVEN)
    held: tuple[Tensor, Tensor] | None = None  # O, LSE [B, H, C, Dv], [B, H, C]
    kept: bool = False  # the graph outlives the chunk
    own_kv: Rows | None = None  # of a kept graph, set for its backward
    own_dkv: Rows | None = None  # sums from later chunks, set for the backward
    far: FarAttention[KVPrefix] | None = None  # None: queries see every key
    spread: KVShards | Ring | None = None  # for keys spread over ranks
    exchange: HeadExchange | None = None  # tokens for heads; None: this rank has all heads
    graph: bool = False  # a backward will follow
    at_hand: Rows | None = None  # the chunk's K, V if their buffer is on the device
    pieces: tuple[Piece, ...] = ()  # pieces in which heads are exchanged during attention
    index: IndexKeys | None = None  # of a layer whose queries choose the tokens that they see
    dtype: torch.dtype | None = None  # of K, V and of their gradients
    # Whether the layer's state, which may need attention's output, is still missing.
    goes_on: Callable[[], bool] = lambda: False

    def __call__(
        self, _: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, **keywords: Any
    ) -> Tensor:
        """Compute the model's attention call; return [B, C, H, Dv]."""
        if (keywords.get("dropout") or 0.0) > 0:
            raise UnsupportedError(
                "model: attention dropout was switched on during a step; set it before the step"
            )
        if self.mode is AttentionMode.NONE:
            self.write(*((k, v) if self.exchange is None else self.exchange.to_heads(k, v)))
            if not self.goes_on():
                raise KVWritten
        chosen, sinks = self._chosen(keywords.get("indices")), keywords.get("s_aux")
        return _Attend.apply(q, k, v, sinks, chosen, self, self.call(scale))

    def choose(self, call: IndexerCall) -> Tensor:
        """Return the tokens that this rank's queries attend to, [B, C, topk]; 0 columns: all."""
        assert self.index is not None, "the layer has no indexer"
        passes = call.sizes.passed and self.mode is not AttentionMode.NONE
        chooses = bool(self.index.chosen) and (self._attends() or passes)
        if self.write_kv is None and not chooses:
            return call.blank(0)
        own = self._index_keys(call)
        if self.write_kv is not None:
            self.write_kv[INDEX].copy_(own.transpose(0, 1))
        if not chooses:
            return call.blank(0)
        keys = self.index.keys(self.key_values, own)
        return call.choose(keys, self.index.first, self.index.tokens, self.index.begins)

    def _index_keys(self, call: IndexerCall) -> Tensor:
        """Return the index keys of all of the chunk's tokens, [B, C, D]."""
        if self.at_hand is not None:
            return self.at_hand[INDEX].transpose(0, 1)
        own = call.keys()
        return own if self.exchange is None else self.exchange.of_all_tokens(own)

    def _attends(self) -> bool:
        """Return whether the cell, or its backward, computes attention."""
        return self.mode is AttentionMode.COMPUTE or self.graph

    def _chosen(self, indices: Tensor | None) -> Tensor | None:
        """Return the tokens chosen for all of the chunk's queries; None if these see all tokens."""
        if self.index is None or not self.index.chosen or indices is None or not self._attends():
            return None
        return indices if self.exchange is None else self.exchange.of_all_tokens(indices)

    def to_heads(
        self, exchange: HeadExchange, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange q, k, v of this rank's tokens (all heads) for those of this rank's heads (all
        tokens); also write these K, V to the chunk's buffer."""
        if self.mode is not AttentionMode.COMPUTE and not self.graph:
            if self.write_kv is not None:
                self.write(*exchange.to_heads(k, v))
            return q, k, v  # attention is not computed, so no heads are exchanged
        at_hand = self.kv_at_hand()
        if at_hand is not None:
            (q,) = exchange.to_heads(q)
            return q, *at_hand
        q, k, v = exchange.to_heads(q, k, v)
        self.write(k, v)
        # All three are views of one message; a graph that saved the view q would hold all of it.
        return q.contiguous() if self.graph else q, k, v

    def kv_at_hand(self) -> tuple[Tensor, Tensor] | None:
        """Return the chunk's K, V if its first forward left them in a device buffer, or None."""
        if self.at_hand is None:
            return None
        return self.at_hand["k"].permute(1, 2, 0, 3), self.at_hand["v"].permute(1, 2, 0, 3)

    def write(self, k: Tensor, v: Tensor) -> None:
        if self.write_kv is None:
            return
        self.write_kv["k"].copy_(k.detach().permute(2, 0, 1, 3))
        self.write_kv["v"].copy_(v.detach().permute(2, 0, 1, 3))
        if self.far is not None:
            self.far.note(self.write_kv["k"])

    def attend(
        self, call: AttentionCall, of_keys: OfKeys, prefix: KVPrefix | KVHeads, sinks: Tensor | None
    ) -> Attended:
        """Return the attention's output and LSE for q, k, v of all or some of this rank's heads."""
        if isinstance(self.spread, Ring):
            return self.spread.attend(call, *of_keys, self.key_values, sinks)
        if self.spread is not None:
            return self.spread.attend(call, *of_keys, prefix, sinks)
        if self.far is not None:
            return self.far.attend(call, *of_keys, sinks)
        return attend(call, *of_keys, prefix, sinks)

    def keep(self, out: Tensor, lse: Tensor) -> Attended:
        """Copy O, LSE to this cell's buffer and return the copies; without a buffer, keep them."""
        self.key_values.done()
        if self.attention is None:
            self.held = out, lse
            return out, lse
        self.attention["out"].copy_(out.transpose(1, 2))
        self.attention["lse"].copy_(lse)
        # From here on the copy is the output: a graph that saves it saves a reference.
        return self.given()

    def given(self) -> Attended:
        """Return the O and LSE that an earlier pass over the chunk wrote to a buffer."""
        assert self.attention is not None
        self.held = self.attention["out"].transpose(1, 2), self.attention["lse"]
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
        """Return dq, dk, dv, dsinks for these q, k, v; add dK, dV of earlier keys to sums."""
        whole = self.key_values
        if isinstance(self.spread, Ring):
            return self.spread.attend_backward(call, dout, of_keys, attended, whole, sinks)
        if self.spread is not None:
            return self.spread.attend_backward(call, dout, of_keys, attended, prefix, sinks)
        if self.far is not None:
            return self.far.attend_backward(call, dout, of_keys, attended, sinks)
        return attend_backward(call, dout, *of_keys, attended, prefix, sinks, narrow=True)

    def with_later(self, dk: Tensor, dv: Tensor, heads: slice) -> list[Tensor]:
        """Return the chunk's whole dK, dV: `dk`, `dv` plus the sums from later chunks' queries."""
        assert self.own_dkv is not None
        later = [self.own_dkv[name].permute(1, 2, 0, 3) for name in ("k", "v")]
        if heads != slice(None):
            later = [rest[:, heads] for rest in later]
        return [(own + rest).to(self.dtype) for own, rest in zip((dk, dv), later, strict=True)]

    def overlapped(self) -> OverlappedUlysses | None:
        """Return an exchange of heads that overlaps attention; None if all heads go at once."""
        if self.exchange is None or len(self.pieces) < 2:
            return None
        return OverlappedUlysses(self.pieces, self.exchange, self.key_values)


class _Attend(torch.autograd.Function):
    """Autograd function of a chunk's attention; its backward adds earlier keys' dK, dV to sums."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        chosen: Tensor | None,
        cell: ChunkAttention,
        call: AttentionCall,
    ) -> Tensor:
        cell.dtype, ctx.call = k.dtype, call
        call = _choosing(call, chosen)
        pieces = cell.overlapped() if cell.mode is AttentionMode.COMPUTE else None
        own_sinks = _own_sinks(cell, sinks)
        if pieces is not None:

            def attend_heads(of_keys: OfKeys, keys: KVHeads, heads: slice) -> Attended:
                return cell.attend(call, of_keys, keys, _of(own_sinks, heads))

            (q, k, v), attended, own = pieces.forward(attend_heads, (q, k, v), cell.kv_at_hand())
            cell.write(k, v)
            out, lse = cell.keep(*attended)
        else:
            if cell.exchange is None:
                cell.write(k, v)
            else:
                q, k, v = cell.to_heads(cell.exchange, q, k, v)
            # A kept graph reads K, V from their buffer: kernels round differently on another
            # layout.
            k, v = k.contiguous(), v.contiguous()
            if cell.mode is AttentionMode.HELD:
                assert cell.held is not None
                out, lse = cell.held
            elif cell.mode is AttentionMode.GIVEN:
                out, lse = cell.given()
            elif cell.spread is None and cell.far is None:  # all keys are here, and all are read
                out, lse = cell.keep(*attend(call, q, k, v, cell.key_values, own_sinks))
            else:
                out, lse = cell.keep(*cell.attend(call, (q, k, v), cell.key_values, own_sinks))
            own = out if cell.exchange is None else cell.exchange.to_tokens(out)[0]
        ctx.cell = cell
        # A kept graph does not save tensors that buffers hold: K, V always, O and LSE if kept.
        keys = (None, None) if cell.kept else (k, v)
        output = (None, None) if cell.kept and cell.attention is not None else (out, lse)
        ctx.save_for_backward(q, sinks, chosen, *keys, *output)
        return own.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, sinks, chosen, k, v, out, lse = ctx.saved_tensors
        cell: ChunkAttention = ctx.cell
        call = _choosing(ctx.call, chosen)
        if k is None:
            assert cell.own_kv is not None
            k, v = (cell.own_kv[name].permute(1, 2, 0, 3).contiguous() for name in ("k", "v"))
        if out is None:
            out, lse = cell.given()
        own_sinks, exchange = _own_sinks(cell, sinks), cell.exchange
        dout, of_keys, pieces = dout.transpose(1, 2), (q, k, v), cell.overlapped()
        if pieces is not None:

            def attend_heads_backward(
                dout: Tensor, of_keys: OfKeys, attended: Attended, keys: KVHeads, heads: slice
            ) -> AttentionGradients:
                own = _of(own_sinks, heads)
                return cell.attend_backward(call, dout, of_keys, attended, keys, own)

            dq, dk, dv, dsinks = pieces.backward(
                attend_heads_backward, dout, of_keys, (out, lse), cell.with_later
            )
        else:
            if exchange is not None:
                (dout,) = exchange.to_heads(dout)
            dq, dk, dv, dsinks = cell.attend_backward(
                call, dout, of_keys, (out, lse), cell.key_values, own_sinks
            )
            dk, dv = cell.with_later(dk, dv, slice(None))
            dq = dq.to(q.dtype)
            if exchange is not None:
                dq, dk, dv = exchange.to_tokens(dq, dk, dv)
        cell.key_values.done()
        if dsinks is not None and sinks is not None:
            dsinks = dsinks.to(sinks.dtype)
            dsinks = dsinks if exchange is None else exchange.of_all_heads(dsinks, sinks)
        return dq, dk, dv, dsinks, None, None, None


def _choosing(call: AttentionCall, chosen: Tensor | None) -> AttentionCall:
    if chosen is None:
        return call
    assert isinstance(call.kernel, ChoosingKernel), call.kernel
    return replace(call, kernel=call.kernel.choosing(Chosen(chosen, call.q_start)))


def _own_sinks(cell: ChunkAttention, sinks: Tensor | None) -> Tensor | None:
    return sinks if sinks is None or cell.exchange is None else cell.exchange.heads_of(sinks)


def _of(sinks: Tensor | None, heads: slice) -> Tensor | None:
    return None if sinks is None else sinks[heads]


@dataclass(slots=True)
class AttentionContext:
    """Keys, ranks, kernels and buffers for all attention calls in one run of a program. The latest
    chunks' calls, and the blocks of keys that these read, are kept for their other layers."""

    program: Program
    inputs: StepInputs
    kernels: AttentionKernels
    ranks: ParallelContext | None
    storage: ProgramBuffers
    slots: StagingBuffers
    kernel_of: dict[LayerSpec, BlockKernel] = field(default_factory=dict)
    far: FarRun[KVPrefix] | None = None  # None: queries see every key
    calls: dict[tuple[int, LayerSpec, float], AttentionCall] = field(default_factory=dict)
    blocks: dict[tuple[int | None, ...], tuple[Block, ...]] = field(default_factory=dict)
    shares: bool = field(init=False)  # other ranks have tokens of the same sequence

    def __post_init__(self) -> None:
        self.shares = self.ranks is not None and self.ranks.layout.sequence() > 1

    # -- cells -----------------------------------------------------------------------------------

    def begin(self, i: Forward, held: tuple[Tensor, Tensor] | None) -> ChunkAttention:
        """Make a forward cell's attention function, and start fetching the cell's keys. `held` has
        the chunk's O and LSE if an earlier pass has computed them."""
        cell = ChunkAttention(
            i.mode,
            partial(self.call, i.layer, i.chunk),
            self._prefix(i.layer, i.chunk, i.prefix),
            write_kv=self._rows(i.write_kv, i.chunk, i.layer),
            attention=self._rows(i.attention, i.chunk, i.layer),
            held=held,
            kept=i.kept,
            far=None if self.far is None else self.far.cell(i),
            graph=i.graph,
        )
        if self.program.model.layers[i.layer].indexer is not None:
            cell.index = self._index(i.layer, i.chunk)
        if self.shares:
            program, rank = self.program, self.program.share.rank
            cell.exchange = self._exchange(rank, i.chunk)
            cell.spread = self._spread(rank, i.layer, i.chunk)
            cell.pieces = pieces_of(program.schedule, rank.layout, program.model.layers[i.layer])
            if i.write_kv is None and program.buffers[i.prefix].tier is Tier.DEVICE:
                cell.at_hand = self._rows(i.prefix, i.chunk, i.layer)
        if i.mode is AttentionMode.COMPUTE:
            self.fetch(cell, i.layer, i.chunk)
            if cell.far is not None:
                cell.far.begin(cell.key_values)
        return cell

    def begin_backward(self, i: Backward, cell: ChunkAttention) -> None:
        """Give a cell its backward's buffers; start fetching earlier K, V and gradient sums."""
        cell.key_values = self._prefix(i.layer, i.chunk, i.prefix, i.accumulator)
        self.fetch(cell, i.layer, i.chunk)
        if cell.far is not None:
            cell.far.begin_backward(i, cell.key_values)
        cell.own_dkv = self._rows(i.own_dkv, i.chunk, i.layer)
        if cell.kept:
            cell.own_kv = self._rows(i.own_kv, i.chunk, i.layer)
            cell.attention = self._rows(i.attention, i.chunk, i.layer)

    def again(self, i: Backward, cell: ChunkAttention) -> None:
        """Prepare a cell whose forward runs again for its backward."""
        cell.attention = self._rows(i.attention, i.chunk, i.layer)
        cell.mode = AttentionMode.COMPUTE if cell.attention is None else AttentionMode.GIVEN
        cell.key_values = self._prefix(i.layer, i.chunk, i.prefix)
        cell.kept, cell.graph = False, True
        if cell.mode is AttentionMode.COMPUTE:
            self.fetch(cell, i.layer, i.chunk)

    def fetch(self, cell: ChunkAttention, layer: int, chunk: int) -> None:
        """Start fetching the keys of earlier chunks, if these are on the host."""
        if cell.key_values.on_host(cell.key_values.keys_in):
            blocks = self.blocks_of(layer, chunk, self._ring_index())
            cell.key_values.begin(streamed_spans(blocks, self._own_row(chunk)))

    def _rows(self, name: str | None, chunk: int, layer: int) -> Rows | None:
        return None if name is None else self.storage.chunk(name, chunk, layer)

    def _prefix(self, layer: int, chunk: int, name: str, gradients: str | None = None) -> KVPrefix:
        before, fused = self._own_row(chunk), self.kernels.fused
        return KVPrefix(self.storage, self.slots, layer, name, gradients, before, fused)

    # -- keys and queries of a cell ----------------------------------------------------------------

    def call(self, layer: int, chunk: int, scale: float) -> AttentionCall:
        """Return the settings of a cell's attention on this rank: blocks, kernel and scale."""
        spec = self.program.model.layers[layer]
        found = self.calls.get((chunk, spec, scale))
        if found is not None:
            return found
        if spec not in self.kernel_of:
            self.kernel_of[spec] = self.kernels.of(spec, self.program)
        if len(self.calls) == CALLS_KEPT:
            self.calls.clear()
        found = self.calls[chunk, spec, scale] = AttentionCall(
            scale,
            spec.softcap,
            self.blocks_of(layer, chunk, self._ring_index()),
            self.queries(chunk)[0],
            self.kernel_of[spec],
            self._own_row(chunk),
            self.kernels.fused,
        )
        return found

    def queries(self, chunk: int) -> Range:
        """Return the token range of the chunk's queries that attend to keys on this rank."""
        whole = self.program.chunks[chunk]
        return self.program.share.rank.tokens(whole, *QUERIES) if self.shares else whole

    def blocks_of(self, layer: int, chunk: int, ring: int) -> tuple[Block, ...]:
        """Return the blocks of attention to the keys of rank `ring`, for ring attention."""
        program = self.program
        spec = program.model.layers[layer]
        most = most_of(spec, program.run)
        key = chunk, spec.window, spec.chunked, most, ring
        if key not in self.blocks:
            if len(self.blocks) == CALLS_KEPT:
                self.blocks.clear()
            queries, runs, held = self.queries(chunk), self.runs(chunk), self._held(ring)
            block, batch = program.schedule.kv_block, program.run.batch
            blocks = layer_blocks(spec, queries, block, batch, runs, held)
            if self.far is not None:
                blocks = self.far.near(spec, blocks, queries[0])
            self.blocks[key] = tuple(piece for block in blocks for piece in cut_wide(block, most))
        return self.blocks[key]

    def runs(self, chunk: int) -> Sequence[tuple[Run, ...]] | None:
        """Return, per row, ranges of queries of one document; None if each row is one document."""
        rows, (start, stop) = self.inputs.documents, self.queries(chunk)
        if rows is None or start == stop:
            return None
        return [document_runs(row, start, stop) for row in rows]

    def _index(self, layer: int, chunk: int) -> IndexKeys:
        """Return the positions by which an indexer chooses for this rank's tokens of a chunk."""
        program, (_, stop) = self.program, self.program.chunks[chunk]
        start, end = program.share.tokens.ranges[chunk]
        begins = self.documents_of(start, end)
        # A rank without a token of the chunk runs one for padding.
        start = min(start, stop - 1)
        chosen = program.model.layers[layer].chosen(stop)
        return IndexKeys(chosen, start, program.run.tokens, begins)

    def documents(self, chunk: int) -> Tensor | None:
        """Return the index of the first token of each query's document, [B, C] int64, on the
        inputs' device; None if each row is one document."""
        return self.documents_of(*self.queries(chunk))

    def documents_of(self, start: int, stop: int) -> Tensor | None:
        """Return `documents` for the queries [start, stop)."""
        if self.inputs.documents is None or start == stop:
            return None
        # Computed from a tensor on the device: a copy would make the CPU wait in every cell.
        positions = self.inputs.position_ids[:, start:stop]
        return torch.arange(start, stop, device=positions.device) - positions

    def _own_row(self, chunk: int) -> int:
        return self.program.share.keys.rows[chunk][0]

    # -- among ranks -----------------------------------------------------------------------------

    def is_padding(self, chunk: int) -> bool:
        """Return whether this rank and its tensor-parallel peers have no token of the chunk.
        Modules cannot run on zero tokens, so they run on one padding token, which attention and
        buffers leave out; its gradient is zero."""
        if not self.shares:
            return False
        start, stop = self.program.share.rank.tokens(self.program.chunks[chunk], "tensor")
        return start == stop

    def _exchange(self, rank: Rank, chunk: int) -> HeadExchange:
        """Return the object that exchanges q, k, v of this rank's tokens (all heads) for those of
        its heads (all tokens)."""
        assert self.ranks is not None
        ulysses = None
        if rank.layout.ulysses > 1:
            parts = among_heads(rank, self.program.chunks[chunk])
            ulysses = Ulysses(self.ranks.among("ulysses"), parts)
        return HeadExchange(ulysses, rank.layout.tensor * self.is_padding(chunk))

    def _spread(self, rank: Rank, layer: int, chunk: int) -> KVShards | Ring | None:
        """Return the object that attends to keys of several ranks; None if this rank has all."""
        assert self.ranks is not None
        ring = None
        if rank.layout.ring > 1:
            peers = [self._share(index).keys.rows[chunk] for index in range(rank.layout.ring)]
            rows = [(start, stop - start) for start, stop in peers]
            ring = Ring(self.ranks.among("ring"), rows, partial(self.blocks_of, layer, chunk))
        if rank.layout.shards == 1:
            return ring
        counts = parts_of(rank, self.program.chunks[chunk])
        return KVShards(self.ranks.among("shards"), counts, ring)

    def _ring_index(self) -> int:
        return self.program.share.rank.along["ring"] if self.shares else 0

    def _held(self, ring: int) -> Held | None:
        layout = self.program.share.rank.layout
        if layout.ring * layout.shards == 1:
            return None
        return Held(self._share(ring).keys.ranges)

    def _share(self, ring: int) -> Share:
        """Return the tokens and keys of the rank with index `ring` in ring attention."""
        rank = self.program.share.rank
        return share_of(self.program.chunks, Rank(rank.layout, rank.peers("ring")[ring]))
