"""Attention of one cell with K, V of each chunk sharded over ranks: queries travel to the keys, or
keys round a ring.

A rank holds K, V of its part of every chunk (program/attention_blocks.py) and their dK, dV.
`KVShards` gathers queries, and keys never move:

    forward     gather q | attend to own keys | all-to-all of partial O, LSE | merge
    backward    gather q, O, dO, LSE | dQ of all queries, dK, dV of own keys | sum dQ at its owner

Partial O and LSE and sums of dQ are in the accumulate dtype, and are taken in the order of ranks.
The bytes that a rank sends do not grow with the prefix.

In a `Ring` (Liu et al. 2023) queries stay. In step s a rank attends to the rows of the rank s
places before it, while it sends them on to the next rank. In the backward these rows travel once
more, and their dK, dV follow, in the accumulate dtype and summed in the order of the ring, one hop
further, to the rank that holds the rows:

    step        0             1                           2                           home
    compute     own rows      rows of rank - 1            rows of rank - 2            add dK, dV
    K, V        own sent      those sent                  |
    dK, dV      |             | those sent, made in 1     | theirs added and sent     |

The bytes that a rank sends grow with the prefix.

Legend: B batch, C tokens of the chunk, n queries, T rows, H query heads, Hk key-value heads, D head
dim, Dv head dim of values; rows of tokens are [tokens, B, heads, D].
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from farspan.attention.backends import accumulate_dtype, add_sinks, merge_, sink_gradient
from farspan.attention.chunk import (
    AttentionCall,
    KeyValues,
    attend_backward,
    attend_blocks,
    attend_earlier,
    attend_earlier_backward,
)
from farspan.distributed.collectives import Communicator, Counts
from farspan.program.attention_blocks import Block


@runtime_checkable
class WholeRows(KeyValues, Protocol):
    """K, V of earlier chunks (`KeyValues`) for a ring of ranks, which reads all rows of this rank
    at once, and adds the gradients of all these rows at once."""

    def prefix_rows(self) -> tuple[Tensor, Tensor]:
        """Return this rank's K [T, B, Hk, D] and V [T, B, Hk, Dv] of earlier chunks, T rows."""

    def add_rows(self, dk: Tensor, dv: Tensor) -> None:
        """Add dK and dV of the rows that `prefix_rows` returns, in the accumulate dtype. Called
        once per backward, after all calls of `keys` and `add_gradient`."""


@dataclass(frozen=True, slots=True)
class Ring:
    """Attention of one chunk whose keys travel round a ring of ranks. The `AttentionCall` passed to
    its methods describes this rank's queries and rows of keys; `q_start` is its first token."""

    peers: Communicator
    rows: Sequence[tuple[int, int]]  # of each rank: rows before the chunk, rows of the chunk
    blocks: Callable[[int], tuple[Block, ...]]  # of this rank's queries, in the rows of a peer

    @torch.no_grad()
    def attend(
        self,
        call: AttentionCall,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_values: WholeRows,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse, as `chunk.attend` does, of this rank's queries over the keys of all
        ranks. q [B, H, n, D] and k, v [B, Hk, n, D] are this rank's n tokens of the chunk."""
        out, lse = self.attend_blocks(call, q, k, v, key_values)
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
        return out.to(q.dtype), lse

    @torch.no_grad()
    def attend_blocks(
        self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, key_values: WholeRows
    ) -> tuple[Tensor, Tensor]:
        """Return out and lse as `attend` does, but without sinks and in the accumulate dtype."""
        others = self._others(k, v, key_values)
        out, lse = attend_blocks(call, q, k, v, key_values)
        out = out.to(lse.dtype)
        for source, rows in others:
            out, lse = attend_earlier(self._call(call, source), q, (out, lse), rows)
        return out, lse

    @torch.no_grad()
    def attend_backward(
        self,
        call: AttentionCall,
        dout: Tensor,
        of_keys: tuple[Tensor, Tensor, Tensor],
        attended: tuple[Tensor, Tensor],
        key_values: WholeRows,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return dq, dk, dv of this rank's part of the chunk, summed over ranks, and the sinks'
        gradient from its queries, as `chunk.attend_backward` does. dK, dV of this rank's rows of
        earlier chunks, summed over the queries of all ranks, are added to `key_values`."""
        q, k, v = of_keys
        others = self._others(k, v, key_values)
        dq, dk, dv, _ = attend_backward(call, dout, q, k, v, attended, key_values)
        sums = None
        for source, rows in others:
            dtype = accumulate_dtype(k.dtype)
            rows.gradients = tuple(torch.zeros_like(x, dtype=dtype) for x in (rows.k, rows.v))
            dq += attend_earlier_backward(self._call(call, source), dout, q, attended, rows)
            if sums is not None:
                rows.add(*sums.wait())
            sums = self._pass_gradients(rows, source)
        if sums is not None:
            earlier = self.rows[self.peers.index][0]
            for_earlier, for_own = zip(
                *(x.tensor_split([earlier]) for x in sums.wait()), strict=True
            )
            if earlier:
                key_values.add_rows(*for_earlier)
            dk, dv = (
                x + part.permute(1, 2, 0, 3) for x, part in zip((dk, dv), for_own, strict=True)
            )
        dsinks = None if sinks is None else sink_gradient(dout, *attended, sinks)
        return dq, dk, dv, dsinks

    def _call(self, call: AttentionCall, source: int) -> AttentionCall:
        """Return the call for this rank's queries over peer `source`'s rows, as earlier keys."""
        return replace(call, blocks=self.blocks(source), k_start=sum(self.rows[source]))

    def _others(
        self, k: Tensor, v: Tensor, key_values: WholeRows
    ) -> Iterator[tuple[int, "_PeerRows"]]:
        """Start to send this rank's rows of keys. Return an iterator over the other peers and their
        rows, from the previous peer backwards; the next rows arrive while some are used."""
        if self.peers.size == 1:
            return iter(())
        index = self.peers.index
        own = [x.permute(2, 0, 1, 3).contiguous() for x in (k, v)]
        earlier = [x[:0] for x in own]
        if self.rows[index][0]:
            earlier = [x.contiguous() for x in key_values.prefix_rows()]
        return self._arrivals(self._pass_rows([*earlier, *own], index))

    def _arrivals(self, coming: "_Pass") -> Iterator[tuple[int, "_PeerRows"]]:
        for step in range(1, self.peers.size):
            source = (self.peers.index - step) % self.peers.size
            k, v = coming.wait()
            if step < self.peers.size - 1:
                earlier = self.rows[source][0]
                parts = [x[part] for part in (slice(earlier), slice(earlier, None)) for x in (k, v)]
                coming = self._pass_rows(parts, source)
            yield source, _PeerRows(k, v)

    def _pass_rows(self, parts: list[Tensor], source: int) -> "_Pass":
        """Start to send peer `source`'s rows on, and to receive rows of the peer before that."""
        earlier, own = self.rows[(source - 1) % self.peers.size]
        k, v = (x.new_empty(earlier + own, *x.shape[1:]) for x in parts[:2])
        places = [x[part] for part in (slice(earlier), slice(earlier, None)) for x in (k, v)]
        return _Pass(self.peers.pass_round(parts, places), parts, (k, v))

    def _pass_gradients(self, rows: "_PeerRows", source: int) -> "_Pass":
        """Start to send peer `source`'s dK, dV on, and to receive those of the peer before it."""
        count = sum(self.rows[(source - 1) % self.peers.size])
        dk, dv = (x.new_empty(count, *x.shape[1:]) for x in rows.gradients)
        coming = self.peers.pass_round(rows.gradients, (dk, dv))
        return _Pass(coming, rows.gradients, (dk, dv))


@dataclass(slots=True)
class _PeerRows:
    """K [T, B, Hk, D] and V [T, B, Hk, Dv] from a peer, in T rows, read by `KeyValues`' methods."""

    k: Tensor
    v: Tensor
    gradients: tuple[Tensor, ...] = ()

    def keys(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        k, v = (x[start:stop].permute(1, 2, 0, 3) for x in (self.k, self.v))
        return k, v

    def add_gradient(self, start: int, stop: int, rows: slice, dk: Tensor, dv: Tensor) -> None:
        for total, part in zip(self.gradients, (dk, dv), strict=True):
            total[start:stop, rows] += part.permute(2, 0, 1, 3)

    def add(self, dk: Tensor, dv: Tensor) -> None:
        """Add dK and dV of these rows, as computed by the ranks before this one on the ring."""
        for total, part in zip(self.gradients, (dk, dv), strict=True):
            total += part


@dataclass(slots=True)
class _Pass:
    """Tensors on their way to the next peer, and tensors coming from the previous peer."""

    works: list[dist.Work]
    sent: Sequence[Tensor]
    received: tuple[Tensor, Tensor]

    def wait(self) -> tuple[Tensor, Tensor]:
        for work in self.works:
            work.wait()
        self.sent = ()
        return self.received


# -- queries travel ------------------------------------------------------------------------------


OfKeys = tuple[Tensor, Tensor, Tensor]  # q, k, v
Attended = tuple[Tensor, Tensor]  # out, lse


@dataclass(frozen=True, slots=True)
class KVShards:
    """Attention of one chunk whose queries travel to the ranks that hold the keys. The
    `AttentionCall` passed to its methods describes all queries of the chunk and this rank's rows of
    keys.

    With a `ring`, the queries are those of one rank of the ring, and every shard has a ring.
    """

    peers: Communicator
    counts: Counts  # tokens of the chunk on each rank
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
        """Return out [B, H, n, Dv] and lse, as `chunk.attend` does, of this rank's queries over all
        ranks' keys. q [B, H, n, D] and k, v [B, Hk, t, D]: this rank's n queries and t keys."""
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
        """Return dq of this rank's queries, dk, dv of its keys, summed over ranks, and the sinks'
        gradient from its queries, as `chunk.attend_backward` does. `attended` is (out, lse)."""
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
        """Exchange what each rank computed from its own keys, and merge it: return out and lse of
        this rank's queries over all keys. In memory out is [B, n, H, Dv]."""
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
    """Return [B, H, C, D] or [B, H, C] with tokens as first dimension, as ranks send rows."""
    return (x.permute(2, 0, 1, 3) if x.ndim == 4 else x.permute(2, 0, 1)).contiguous()


def _heads_first(rows: Tensor) -> Tensor:
    return rows.permute(1, 2, 0, 3) if rows.ndim == 4 else rows.permute(1, 2, 0)


def _pack(tensors: list[Tensor]) -> Tensor:
    """Join the rows of several tensors, of any dtypes, into rows of bytes."""
    return torch.cat([_as_bytes(rows) for rows in tensors], 1)


def _as_bytes(rows: Tensor) -> Tensor:
    """View rows [n, ...] as bytes [n, bytes]. Such a view needs a last stride of 1, but in a
    contiguous tensor a dimension of one element may have any stride."""
    flat = rows.flatten(1)
    return flat.as_strided(flat.shape, (flat.shape[1], 1)).view(torch.uint8)


def _unpack(rows: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Split rows of bytes into the tensors that `_pack` joined, shaped and typed as in `like`."""
    sizes = [x.shape[1:].numel() * x.element_size() for x in like]
    return [
        # The copy is aligned for its dtype.
        part.contiguous().view(x.dtype).unflatten(1, x.shape[1:])
        for part, x in zip(rows.split(sizes, 1), like, strict=True)
    ]
