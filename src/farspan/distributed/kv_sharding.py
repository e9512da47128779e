"""Attention of one cell with K, V of each chunk sharded over ranks: queries travel, keys stay.

A shard holds K, V of its part of every chunk (program/attention_blocks.py) and dK, dV of them,
which never move.

    forward     gather q | attend to own keys | all-to-all of partial O, LSE | merge
    backward    gather q, O, dO, LSE | dQ of all queries, dK, dV of own keys | sum dQ at its owner

Partial O and LSE and sums of dQ are in the accumulate dtype, and are taken in the order of ranks.
What a rank sends does not grow with the prefix (program/work.py).

Legend: B batch, C tokens of the chunk, H query heads, Hk key-value heads, D head dim; rows of
tokens are [tokens, B, heads, D]."""

from dataclasses import dataclass

import torch
from torch import Tensor

from farspan.attention.backends import add_sinks, merge_, sink_gradient
from farspan.attention.chunk import AttentionCall, KeyValues, attend_backward, attend_blocks
from farspan.distributed.collectives import Communicator, Counts
from farspan.distributed.ring import Ring, WholeRows

OfKeys = tuple[Tensor, Tensor, Tensor]  # q, k, v
Attended = tuple[Tensor, Tensor]  # out, lse


@dataclass(frozen=True, slots=True)
class KVShards:
    """Attention of one chunk among the shards. Calls hold the blocks of all the chunk's queries
    against the keys that this rank holds, in its rows; their q_start is that of the chunk.

    With a `ring` the shards' queries are those of one of its ranks, and each shard has a ring.
    """

    peers: Communicator
    counts: Counts  # tokens of the chunk that each of them has
    ring: Ring | None = None

    @torch.no_grad()
    def attend(
        self,
        call: AttentionCall,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_values: KeyValues,
        sinks: Tensor | None = None,
    ) -> Attended:
        """As `chunk.attend`, for the queries q [B, H, n, D] of this rank's part and its
        keys k, v [B, Hk, t, D] of the chunk: out [B, H, n, Dv] and lse over the keys of all."""
        of_all = _heads_first(self.peers.gather(_token_first(q), self.counts))
        if self.ring is None:
            out, lse = attend_blocks(call, of_all, k, v, key_values)
        else:
            out, lse = self.ring.attend_blocks(call, of_all, k, v, _whole(key_values))
        out, lse = self._merged(out, lse)
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
        return out.to(q.dtype), lse

    @torch.no_grad()
    def attend_backward(
        self,
        call: AttentionCall,
        dout: Tensor,
        of_keys: OfKeys,
        attended: Attended,
        key_values: KeyValues,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """As `chunk.attend_backward`: dq of own queries, dk, dv of own keys, complete, and
        what own queries give to d sinks. `attended` is what `attend` returned."""
        q, k, v = of_keys
        of_queries = [_token_first(x) for x in (q, attended[0], dout, attended[1])]
        gathered = _unpack(self.peers.gather(_pack(of_queries), self.counts), of_queries)
        all_q, all_out, all_dout, all_lse = (_heads_first(x) for x in gathered)
        whole = all_out, all_lse
        if self.ring is None:
            dq, dk, dv, _ = attend_backward(call, all_dout, all_q, k, v, whole, key_values)
        else:
            keys = _whole(key_values)
            dq, dk, dv, _ = self.ring.attend_backward(call, all_dout, (all_q, k, v), whole, keys)
        dq = _heads_first(self.peers.scatter_sum(_token_first(dq), self.counts))
        dsinks = None if sinks is None else sink_gradient(dout, *attended, sinks)
        return dq, dk, dv, dsinks

    def _merged(self, out: Tensor, lse: Tensor) -> Attended:
        """Of this rank's queries over the keys of all, from partial results of all queries over the
        keys of one; out is [B, n, H, Dv] in memory."""
        both = torch.cat([out.to(lse.dtype), lse.unsqueeze(-1)], -1)
        own, size = self.counts[self.peers.index], self.peers.size
        rows = self.peers.exchange(_token_first(both), self.counts, [own] * size)
        parts = [
            (_heads_first(part[..., :-1]), _heads_first(part[..., -1]))
            for part in rows.unflatten(0, (size, own))
        ]
        out, lse = parts[0][0].transpose(1, 2).contiguous().transpose(1, 2), parts[0][1].clone()
        for part in parts[1:]:
            merge_(out, lse, *part)
        return out, lse


def _whole(key_values: KeyValues) -> WholeRows:
    assert isinstance(key_values, WholeRows), key_values
    return key_values


def _token_first(x: Tensor) -> Tensor:
    """[B, H, C, D] or [B, H, C] as rows of tokens."""
    return (x.permute(2, 0, 1, 3) if x.ndim == 4 else x.permute(2, 0, 1)).contiguous()


def _heads_first(rows: Tensor) -> Tensor:
    return rows.permute(1, 2, 0, 3) if rows.ndim == 4 else rows.permute(1, 2, 0)


def _pack(tensors: list[Tensor]) -> Tensor:
    """Rows of several tensors, of any dtypes, as rows of bytes."""
    return torch.cat([_as_bytes(rows) for rows in tensors], 1)


def _as_bytes(rows: Tensor) -> Tensor:
    """[n, ...] as [n, bytes]. Dimensions of one element may have any stride in what is contiguous,
    and a view as bytes wants a last one of 1."""
    flat = rows.flatten(1)
    return flat.as_strided(flat.shape, (flat.shape[1], 1)).view(torch.uint8)


def _unpack(rows: Tensor, like: list[Tensor]) -> list[Tensor]:
    """The inverse; `like` has the dtypes and the shapes of rows."""
    sizes = [x.shape[1:].numel() * x.element_size() for x in like]
    return [
        # A copy of its own is where its dtype may begin.
        part.contiguous().view(x.dtype).unflatten(1, x.shape[1:])
        for part, x in zip(rows.split(sizes, 1), like, strict=True)
    ]
