"""Exchange tokens of all heads for heads of all tokens inside a cell, and back: Ulysses (FPDT 4.1).

    tokens of rank 0 | tokens of rank 1          heads of rank 0, all tokens
    all heads        | all heads          <->    heads of rank 1, all tokens

One all-to-all carries q, k and v together. A rank sends all heads but its own of each of its own
tokens, whatever the length of the prefix. With `OverlappedUlysses` they go in pieces of heads, and
one piece travels during the attention of another (program/work.py).

Legend: q [B, H, n, D] and k, v [B, Hk, n, D] of a rank's n tokens and all heads; "local" tensors
have all tokens and this rank's heads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farspan.distributed.collectives import Communicator, Counts
from farspan.engine.buffers import KVHeads, KVPrefix
from farspan.program.layout import Range
from farspan.program.work import Piece

Coming = Callable[[], list[Tensor]]  # waits for tensors in transit


@dataclass(frozen=True, slots=True)
class Ulysses:
    """Exchange of heads between P ranks for one chunk, of which rank i has `parts[i]` tokens."""

    peers: Communicator
    parts: Counts

    def to_heads(self, tensors: Sequence[Tensor]) -> Coming:
        """Start exchanging tensors [B, H, this rank's tokens, D] for [B, H / P, all tokens, D]."""
        own, ranks = self.parts[self.peers.index], self.peers.size
        rows = [
            x.unflatten(1, (ranks, x.shape[1] // ranks))
            .permute(1, 3, 0, 2, 4)
            .reshape(ranks * own, x.shape[0] * x.shape[1] // ranks * x.shape[3])
            for x in tensors
        ]
        coming = self.peers.begin_exchange(torch.cat(rows, 1), [own] * ranks, self.parts)
        shapes = [(x.shape[0], x.shape[1] // ranks, x.shape[3]) for x in tensors]

        def arrived() -> list[Tensor]:
            pieces = coming.wait().split([part.shape[1] for part in rows], 1)
            return [
                piece.reshape(len(piece), *shape).permute(1, 2, 0, 3)
                for piece, shape in zip(pieces, shapes, strict=True)
            ]

        return arrived

    def to_tokens(self, tensors: Sequence[Tensor]) -> Coming:
        """Start exchanging tensors [B, H / P, all tokens, D] for [B, H, this rank's tokens, D]."""
        own, ranks = self.parts[self.peers.index], self.peers.size
        rows = [
            x.permute(2, 0, 1, 3).reshape(x.shape[2], x.shape[0] * x.shape[1] * x.shape[3])
            for x in tensors
        ]
        coming = self.peers.begin_exchange(torch.cat(rows, 1), self.parts, [own] * ranks)
        shapes = [(x.shape[0], x.shape[1], x.shape[3]) for x in tensors]

        def arrived() -> list[Tensor]:
            pieces = coming.wait().split([part.shape[1] for part in rows], 1)
            return [
                piece.reshape(ranks, own, *shape).permute(2, 0, 3, 1, 4).flatten(1, 2)
                for piece, shape in zip(pieces, shapes, strict=True)
            ]

        return arrived

    def heads_of(self, values: Tensor) -> Tensor:
        """Return the values of this rank's heads from a tensor with one value per head, [H]."""
        return values.chunk(self.peers.size)[self.peers.index]


@dataclass(frozen=True, slots=True)
class HeadExchange:
    """Exchange of a cell's tensors [B, H, tokens, D] for those of this rank's heads, and back;
    without Ulysses, the tensors are returned unchanged."""

    ulysses: Ulysses | None = None
    padding: int = 0  # tokens that the cell runs without effect, none of the chunk's

    def to_heads(self, *tensors: Tensor) -> Sequence[Tensor]:
        return self.begin_heads([(x, None) for x in tensors])()

    def to_tokens(self, *tensors: Tensor) -> Sequence[Tensor]:
        return self.begin_tokens(*tensors)()

    def of_all_tokens(self, x: Tensor) -> Tensor:
        """Gather a tensor [B, tokens, D] of this rank's tokens for all tokens of the chunk."""
        ranks = 1 if self.ulysses is None else self.ulysses.peers.size
        (whole,) = self.to_heads(x[:, None].expand(-1, ranks, -1, -1))
        return whole[:, 0]

    def begin_heads(self, parts: Sequence[tuple[Tensor, Range | None]]) -> Coming:
        """Start the all-to-all that gives this rank all tokens of its heads; return a function that
        waits for the tensors. `parts` are pairs of a tensor and the range of heads to send, counted
        within each rank's heads; None: all."""
        tensors = [self._some(x, heads) for x, heads in parts]
        if self.padding:
            tensors = [x[:, :, :0] for x in tensors]
        return (lambda: tensors) if self.ulysses is None else self.ulysses.to_heads(tensors)

    def begin_tokens(self, *tensors: Tensor) -> Coming:
        """Start the exchange from this rank's heads, or some of these, back to its tokens."""
        if self.ulysses is None:
            return lambda: [self._filled(x) for x in tensors]
        coming = self.ulysses.to_tokens(tensors)
        return lambda: [self._filled(x) for x in coming()]

    def of_all_ranks(self, pieces: Sequence[Tensor]) -> Tensor:
        """Join tensors that have some heads of every rank to one tensor with all heads in order."""
        ranks = 1 if self.ulysses is None else self.ulysses.peers.size
        apart = [x.unflatten(1, (ranks, x.shape[1] // ranks)) for x in pieces]
        return torch.cat(apart, 2).flatten(1, 2)

    def heads_of(self, values: Tensor) -> Tensor:
        return values if self.ulysses is None else self.ulysses.heads_of(values)

    def of_all_heads(self, values: Tensor, like: Tensor) -> Tensor:
        """Return values of all heads, [H]: this rank's values, and zeros for other heads."""
        if self.ulysses is None:
            return values
        whole = like.new_zeros(like.shape)
        self.ulysses.heads_of(whole).copy_(values)
        return whole

    def _some(self, x: Tensor, heads: Range | None) -> Tensor:
        if heads is None or self.ulysses is None:
            return x
        ranks = self.ulysses.peers.size
        return x.unflatten(1, (ranks, x.shape[1] // ranks))[:, :, slice(*heads)].flatten(1, 2)

    def _filled(self, x: Tensor) -> Tensor:
        batch, heads, _, width = x.shape
        return x.new_zeros(batch, heads, self.padding, width) if self.padding else x


OfKeys = tuple[Tensor, Tensor, Tensor]  # q, k, v
Attended = tuple[Tensor, Tensor]  # out, lse
AttentionGradients = tuple[Tensor, Tensor, Tensor, Tensor | None]  # dq, dk, dv, dsinks


@dataclass(frozen=True, slots=True)
class OverlappedUlysses:
    """Exchange of a cell's heads in pieces: attention runs on one piece while the next travels."""

    pieces: tuple[Piece, ...]
    exchange: HeadExchange
    prefix: KVPrefix

    def forward(
        self,
        attend: Callable[[OfKeys, KVHeads, slice], Attended],
        of_keys: OfKeys,
        at_hand: tuple[Tensor, Tensor] | None,
    ) -> tuple[OfKeys, Attended, Tensor]:
        """Attend to this rank's heads piece by piece while other pieces travel. Return (q, k, v)
        and (out, lse) of this rank's heads, and out of all heads for this rank's tokens. `at_hand`
        has k, v of this rank's heads if they need no exchange. `attend` gets (q, k, v) of a piece,
        the earlier keys of its heads, and its range of query heads."""
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
            heads = KVHeads(self.prefix, slice(*piece.keys))
            outs.append(attend((own, keys[-1][0], keys[-1][1]), heads, slice(*piece.queries)))
            leaving.append(self.exchange.begin_tokens(outs[-1][0]))
        local_k, local_v = (torch.cat(x, 1) for x in zip(*keys, strict=True))
        out, lse = (torch.cat(x, 1) for x in zip(*outs, strict=True))
        whole = self.exchange.of_all_ranks([gone()[0] for gone in leaving])
        return (torch.cat(queries, 1), local_k, local_v), (out, lse), whole

    def backward(
        self,
        attend_backward: Callable[[Tensor, OfKeys, Attended, KVHeads, slice], AttentionGradients],
        dout: Tensor,
        of_keys: OfKeys,
        attended: Attended,
        finish: Callable[[Tensor, Tensor, slice], Sequence[Tensor]],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return dq, dk, dv of all heads for this rank's tokens, and dsinks of this rank's heads.
        `finish` adds later chunks' parts to dk, dv of a range of heads before these are sent."""
        coming = [self._to_heads(piece, dout) for piece in self.pieces]
        leaving: list[Coming] = []
        sums = dout, dout  # placeholders: the first piece sets them
        dsinks: list[Tensor] = []
        for piece, arrived in zip(self.pieces, coming, strict=True):
            heads, keys = slice(*piece.queries), slice(*piece.keys)
            local = of_keys[0][:, heads], of_keys[1][:, keys], of_keys[2][:, keys]
            out, lse = (x[:, heads] for x in attended)
            (mine,) = arrived()
            of_heads = KVHeads(self.prefix, keys)
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
