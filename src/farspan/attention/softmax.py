"""Attention in plain PyTorch: the formula, tiles of a block, and softmaxes joined from their parts.

With lse = log sum exp of the scores, two parts of the same row join exactly:
lse = logaddexp(lse_a, lse_b), out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b.
A sink is one more logit whose value is zero: it only shrinks the output.

Shapes: q [B, H, Sq, D], k [B, Hk, Sk, D], v [B, Hk, Sk, Dv], out [B, H, Sq, Dv], lse [B, H, Sq]
(natural logarithm), sinks [H]. "Accumulate dtype" is fp32, or fp64 for fp64.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from farspan.kernels import joining
from farspan.kernels.launch import fused_for
from farspan.program.attention_blocks import Block


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for 16 and 32 bit, fp64 for fp64: what is summed over blocks, and every LSE."""
    return torch.promote_types(dtype, torch.float32)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> Tensor:
    """q [B, H, S, D], k [B, Hk, S, D], v [B, Hk, S, Dv], sinks [H], ids [B, S] -> [B, H, S, Dv]."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = scale * q @ k.mT
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    tokens = q.shape[2]
    visible = q.new_ones(tokens, tokens).tril().triu(1 - (window or tokens)).bool()
    if document_ids is not None:
        visible = visible & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., :tokens] @ v


# -- softmaxes joined from their parts ----------------------------------------------------------


def merged(out: Tensor, lse: Tensor, parts: Sequence[joining.Part], dtype: torch.dtype) -> Tensor:
    """One or two parts joined by one kernel; `lse` changes in place. Where out has the dtype that
    is wanted, it does, too, and is what is given; else a fresh tensor is, laid out as it."""
    into = out if out.dtype is dtype else torch.empty_like(out, dtype=dtype)
    joining.merge_(out, lse, *parts, into=into)
    return into


def added(total: Tensor, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """One or two parts added by one kernel, and what is given, in the same way."""
    into = total if total.dtype is dtype else torch.empty_like(total, dtype=dtype)
    joining.add_(total, *parts, into=into)
    return into


def merge_(
    out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, *, fused: bool = False
) -> None:
    """Join a part into `out` and `lse`, both in the accumulate dtype, in place.

    A part whose row saw no key has lse = -inf and weight 0, whatever finite `part_out` is;
    a row that no part has seen stays at lse = -inf. `fused`: by one kernel where there is one.
    """
    if fused and fused_for(out.device, out.dtype):
        joining.merge_(out, lse, (part_out, part_lse))
        return
    weight = torch.sigmoid(part_lse - lse)
    # -inf - -inf is nan; a comparison is cheaper than nan_to_num, which would also hide real nans.
    weight = weight.masked_fill(part_lse == -torch.inf, 0.0)
    out.lerp_(part_out.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, part_lse))


def add_(total: Tensor, part: Tensor, *, fused: bool = False) -> None:
    """total += part, of the accumulate dtype and of that or a narrower one. `fused`: by a kernel
    that reads and writes 16 bytes at a time, as PyTorch's does not where dtypes differ."""
    if fused and fused_for(total.device, total.dtype):
        joining.add_(total, part)
    else:
        total.add_(part)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output and LSE in the accumulate dtype once each head's sink has joined its softmax."""
    dtype = accumulate_dtype(out.dtype)
    with_sink = torch.logaddexp(lse, sinks.to(dtype)[:, None])
    return out.to(dtype) * (lse - with_sink).exp().unsqueeze(-1), with_sink


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """d loss / d sinks [H] of these rows, in the accumulate dtype.

    `out` and `lse` are those of `add_sinks`. The sink has weight exp(sink - lse) and value zero,
    so its score gradient is weight * (0 - rowsum(dout * out)).
    """
    dtype = accumulate_dtype(out.dtype)
    weight = (sinks.to(dtype)[:, None] - lse).exp()
    return -(weight * (dout.to(dtype) * out.to(dtype)).sum(-1)).sum((0, 2))


# -- one block, tile by tile --------------------------------------------------------------------


def visible(block: Block, device: torch.device) -> Tensor:
    """Which keys each query of the block sees: bool [Sq, Sk]."""
    query = torch.arange(block.q_start, block.q_stop, device=device)
    distance = query[:, None] - torch.arange(block.k_start, block.k_stop, device=device)
    seen = distance >= 0
    return seen if block.window is None else seen & (distance < block.window)


class BackwardQueries(NamedTuple):
    """The queries' side of a backward, [B, H, Sq, ..]: out and lse are those of the whole softmax,
    over all blocks and sinks."""

    dout: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor


@dataclass(frozen=True, slots=True)
class Tiled:
    """A kernel for what no vendor's does: soft caps, values wider or narrower than keys, fp32 on
    CUDA, any device. Scores become softcap * tanh(scores / softcap) when there is a cap.

    Arithmetic is in the accumulate dtype; memory beyond inputs and outputs is a few tiles of
    B * H * tile**2 elements. The queries of the heads that share a key head are stacked, q_BKRD
    with R = H / Hk * tile rows, so that GQA is one matrix product.
    """

    softcap: float | None = None
    tile: int = 512

    def split(self, block: Block) -> tuple[Block, ...]:
        return (block,)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        dtype = accumulate_dtype(q.dtype)
        batch, heads, queries, _ = q.shape
        out = q.new_empty(batch, queries, heads, v.shape[-1]).transpose(1, 2)
        lse = q.new_empty(batch, heads, queries, dtype=dtype)
        for rows, tiles in row_tiles(block, self.tile):
            sum_out = out.new_zeros(*out[:, :, rows].shape, dtype=dtype)
            sum_lse = lse.new_full(lse[:, :, rows].shape, -torch.inf)
            for keys, tile in tiles:
                scores, _ = self._scores(q[:, :, rows], k[:, :, keys], tile, scale)
                part_lse = scores.logsumexp(-1)
                # A row that sees no key of this tile: exp(-inf - 0) = 0 instead of nan.
                safe = part_lse.masked_fill(part_lse == -torch.inf, 0.0)
                part = (scores - safe.unsqueeze(-1)).exp() @ v[:, :, keys].to(dtype)
                shape = sum_lse.shape
                merge_(sum_out, sum_lse, part.view(*shape, -1), part_lse.view(shape))
            out[:, :, rows], lse[:, :, rows] = sum_out, sum_lse
        return out, lse

    def backward(
        self, queries: BackwardQueries, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, out, lse = queries
        dtype, kv_heads = accumulate_dtype(q.dtype), k.shape[1]
        dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
        for rows, tiles in row_tiles(block, self.tile):
            dout_BKRD = _stack(dout[:, :, rows].to(dtype), kv_heads)
            q_BKRD = _stack(q[:, :, rows].to(dtype), kv_heads)
            out_BKRD = _stack(out[:, :, rows].to(dtype), kv_heads)
            lse_BKR1 = _stack(lse[:, :, rows].unsqueeze(-1), kv_heads)
            delta = (dout_BKRD * out_BKRD).sum(-1, keepdim=True)
            for keys, tile in tiles:
                key, value = (x[:, :, keys].to(dtype) for x in (k, v))
                scores, slope = self._scores(q[:, :, rows], key, tile, scale)
                weights = (scores - lse_BKR1).exp()
                dv[:, :, keys] += weights.mT @ dout_BKRD
                dscores = weights * (dout_BKRD @ value.mT - delta) * (slope * scale)
                dk[:, :, keys] += dscores.mT @ q_BKRD
                dq[:, :, rows] += (dscores @ key).view_as(dq[:, :, rows])
        return dq, dk, dv

    def _scores(
        self, q: Tensor, k: Tensor, tile: Block, scale: float
    ) -> tuple[Tensor, Tensor | float]:
        """Capped and masked scores [B, Hk, R, Sk], and d capped / d uncapped before the mask."""
        dtype = accumulate_dtype(q.dtype)
        scores = _stack(q.to(dtype), k.shape[1]) @ k.to(dtype).mT * scale
        slope: Tensor | float = 1.0
        if self.softcap is not None:
            bounded = torch.tanh(scores / self.softcap)
            scores, slope = bounded * self.softcap, 1 - bounded.square()
        if tile.causal or tile.window is not None:
            hidden = ~visible(tile, q.device)
            groups = q.shape[1] // k.shape[1]
            scores = scores.masked_fill(hidden.repeat(groups, 1), -torch.inf)
        return scores, slope


def _stack(x: Tensor, kv_heads: int) -> Tensor:
    """[B, H, S, D] -> [B, Hk, H / Hk * S, D]"""
    return x.reshape(x.shape[0], kv_heads, -1, x.shape[-1])


def row_tiles(block: Block, size: int) -> Iterator[tuple[slice, list[tuple[slice, Block]]]]:
    """Tiles of queries, each with the tiles of keys that it sees; slices count from the block's
    first query and key. A tile is causal or windowed only where that hides something."""
    for q_start in range(block.q_start, block.q_stop, size):
        q_stop = min(q_start + size, block.q_stop)
        low = block.k_start
        if block.window is not None:
            low = max(low, q_start - block.window + 1)
        high = q_stop if block.causal else block.k_stop
        tiles = []
        for k_start in range(low, high, size):
            k_stop = min(k_start + size, high)
            hides = block.window is not None and q_stop - block.window > k_start
            tile = replace(
                block,
                q_start=q_start,
                q_stop=q_stop,
                k_start=k_start,
                k_stop=k_stop,
                causal=k_stop - 1 > q_start,
                window=block.window if hides else None,
            )
            tiles.append((slice(k_start - block.k_start, k_stop - block.k_start), tile))
        yield slice(q_start - block.q_start, q_stop - block.q_start), tiles
