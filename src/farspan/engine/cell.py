"""One cell's attention: what happens when a layer, run on a chunk, asks for attention.

Legend: B batch, C tokens of the chunk, H query heads, Hk key-value heads, D head dim. The model
hands over q [B, H, C, D] and k, v [B, Hk, C, D]; buffers hold k, v [C, B, Hk, D], out [B, C, H, Dv]
and lse [B, H, C].
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from farspan.attention.chunk import AttentionCall, attend, attend_backward
from farspan.engine.exchange import ALONE, Exchange
from farspan.engine.in_pieces import Attended, Gradients, InPieces, OfKeys
from farspan.engine.prefix import HeadsOf, Prefix
from farspan.parallel.ring import Ring
from farspan.parallel.shards import Shards
from farspan.plan.exchange_pieces import Piece
from farspan.plan.program import AttentionMode
from farspan.sparse.engine import SparseCell
from farspan.spec import Refused

Rows = dict[str, Tensor]


class CellDone(Exception):
    """K and V are written, and nothing else of this cell is wanted."""


@dataclass(slots=True)
class Cell:
    """The attention of one (layer, chunk), from its forward to its backward."""

    mode: AttentionMode
    call: Callable[[float], AttentionCall]  # from the scale the model asks for
    key_values: Prefix  # of earlier chunks
    write_kv: Rows | None = None
    attention: Rows | None = None  # where O, LSE go (COMPUTE) or are (GIVEN)
    held: tuple[Tensor, Tensor] | None = None  # O, LSE [B, H, C, Dv], [B, H, C]
    kept: bool = False  # the graph outlives the chunk
    own_kv: Rows | None = None  # of a kept graph, at its backward
    own_dkv: Rows | None = None  # complete but for this cell's share, at its backward
    sparse: SparseCell | None = None  # None: dense
    spread: Shards | Ring | None = None  # where keys are spread over ranks
    exchange: Exchange = ALONE  # of tokens for heads, among ranks
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
            raise CellDone
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
        self, call: AttentionCall, of_keys: OfKeys, prefix: Prefix | HeadsOf, sinks: Tensor | None
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
        prefix: Prefix | HeadsOf,
        sinks: Tensor | None,
    ) -> Gradients:
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

    def in_pieces(self) -> InPieces | None:
        """What exchanges its heads while it attends; None: they come and go all at once."""
        if len(self.pieces) < 2:
            return None
        return InPieces(self.pieces, self.exchange, self.key_values)


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
        cell: Cell,
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

            def attend(of_keys: OfKeys, keys: HeadsOf, heads: slice) -> Attended:
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
        cell: Cell = ctx.cell
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
                dout: Tensor, of_keys: OfKeys, attended: Attended, keys: HeadsOf, heads: slice
            ) -> Gradients:
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
