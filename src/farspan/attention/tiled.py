"""One block of attention in plain PyTorch, tile by tile: for what no vendor kernel does.

Soft caps, values wider or narrower than keys, fp32 on CUDA, any device. Arithmetic is in the
accumulate dtype; memory beyond inputs and outputs is a few tiles of B * H * tile**2 elements.

Shapes: see backends. Inside, the queries of the heads that share a key head are stacked,
q_BKRD with R = H / Hk * tile rows, so that GQA is one matrix product.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from farspan.attention.merge import accumulate_dtype, merge_
from farspan.plan.blocks import Block


def visible(block: Block, device: torch.device) -> Tensor:
    """Which keys each query of the block sees: bool [Sq, Sk]."""
    query = torch.arange(block.q_start, block.q_stop, device=device)
    distance = query[:, None] - torch.arange(block.k_start, block.k_stop, device=device)
    seen = distance >= 0
    return seen if block.window is None else seen & (distance < block.window)


@dataclass(frozen=True, slots=True)
class Tiled:
    """Scores become softcap * tanh(scores / softcap) when there is a cap."""

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
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        block: Block,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = accumulate_dtype(q.dtype)
        kv_heads = k.shape[1]
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
