"""Attention of a cell whose heads come from other ranks in pieces, and leave in pieces: while one
is attended to the next is on its way (plan/exchange_pieces.py).

Legend: q [B, H, n, D] and k, v [B, Hk, n, D] of own tokens and all heads; "local" tensors are of
all tokens and this rank's heads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farspan.engine.exchange import Exchange
from farspan.engine.prefix import HeadsOf, Prefix
from farspan.parallel.ulysses import Coming
from farspan.plan.exchange_pieces import Piece

OfKeys = tuple[Tensor, Tensor, Tensor]  # q, k, v
Attended = tuple[Tensor, Tensor]  # out, lse
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]  # dq, dk, dv, d sinks


@dataclass(frozen=True, slots=True)
class InPieces:
    """The pieces of one cell, and what carries them."""

    pieces: tuple[Piece, ...]
    exchange: Exchange
    prefix: Prefix

    def forward(
        self,
        attend: Callable[[OfKeys, HeadsOf, slice], Attended],
        of_keys: OfKeys,
        at_hand: tuple[Tensor, Tensor] | None,
    ) -> tuple[OfKeys, Attended, Tensor]:
        """Local q, k, v, local out and lse, and out of own tokens. `at_hand` are local k, v, where
        they need not travel; `attend` is given a piece's tensors, keys and query heads."""
        q, k, v = of_keys
        travel = (k, v) if at_hand is None else ()
        coming = [self._to_heads(piece, q, *travel) for piece in self.pieces]
        queries, keys, outs, leaving = [], [], [], []
        for piece, arrived in zip(self.pieces, coming, strict=True):
            own, *come = arrived()
            if at_hand is not None and piece.first:
                come = [x[:, slice(*piece.keys)] for x in at_hand]
            if come:
                keys.append([x.contiguous() for x in come])
            queries.append(own)
            heads = HeadsOf(self.prefix, slice(*piece.keys))
            outs.append(attend((own, keys[-1][0], keys[-1][1]), heads, slice(*piece.queries)))
            leaving.append(self.exchange.begin_tokens(outs[-1][0]))
        local_k, local_v = (torch.cat(x, 1) for x in zip(*keys, strict=True))
        out, lse = (torch.cat(x, 1) for x in zip(*outs, strict=True))
        whole = self.exchange.of_all_ranks([gone()[0] for gone in leaving])
        return (torch.cat(queries, 1), local_k, local_v), (out, lse), whole

    def backward(
        self,
        attend_backward: Callable[[Tensor, OfKeys, Attended, HeadsOf, slice], Gradients],
        dout: Tensor,
        of_keys: OfKeys,
        attended: Attended,
        finish: Callable[[Tensor, Tensor, slice], Sequence[Tensor]],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """dq, dk, dv of own tokens and all heads, and d sinks of this rank's heads. `finish` makes
        what leaves of the dk, dv of some K, V heads that every piece has added to."""
        coming = [self._to_heads(piece, dout) for piece in self.pieces]
        leaving: list[Coming] = []
        sums = dout, dout  # of nothing yet: the first piece begins them
        dsinks: list[Tensor] = []
        for piece, arrived in zip(self.pieces, coming, strict=True):
            heads, keys = slice(*piece.queries), slice(*piece.keys)
            local = of_keys[0][:, heads], of_keys[1][:, keys], of_keys[2][:, keys]
            out, lse = (x[:, heads] for x in attended)
            (mine,) = arrived()
            of_heads = HeadsOf(self.prefix, keys)
            dq, dk, dv, ds = attend_backward(mine, local, (out, lse), of_heads, heads)
            sums = (dk, dv) if piece.first else (sums[0] + dk, sums[1] + dv)
            gone = finish(*sums, keys) if piece.last else ()
            leaving.append(self.exchange.begin_tokens(dq.to(dout.dtype), *gone))
            if ds is not None:
                dsinks.append(ds)
        back = [gone() for gone in leaving]
        dq = self.exchange.of_all_ranks([found[0] for found in back])
        dkv_pieces = zip(*(found[1:] for found in back if len(found) > 1), strict=True)
        dk, dv = (self.exchange.of_all_ranks(found) for found in dkv_pieces)
        return dq, dk, dv, torch.cat(dsinks) if dsinks else None

    def _to_heads(self, piece: Piece, q: Tensor, *keys: Tensor) -> Coming:
        with_keys = keys if piece.first else ()
        return self.exchange.begin_heads(
            [(q, piece.queries), *((x, piece.keys) for x in with_keys)]
        )
