"""Page-sparse attention as its definition says, dense and differentiable, for a given choice."""

import torch
from torch import Tensor

from farspan.spec import Sparse


def seen(choice: Tensor, sparse: Sparse, chunk: int, ids: Tensor) -> Tensor:
    """choice [B, Hk, M, k] of a whole sequence, document ids [B, S] -> bool [B, Hk, S, S]."""
    tokens, page = ids.shape[1], sparse.page
    pages = -(-tokens // page)
    marks = torch.zeros(*choice.shape[:3], pages + 1, dtype=torch.bool, device=choice.device)
    marks = marks.scatter(3, choice.long().masked_fill(choice < 0, pages), True)[..., :pages]
    chosen = marks.repeat_interleave(page, 2).repeat_interleave(page, 3)[:, :, :tokens, :tokens]
    key = torch.arange(tokens, device=ids.device)
    near = (key // chunk * chunk - sparse.recent).clamp(min=0) // page * page
    always = (key >= near[:, None]) | (key < sparse.sink_pages * page)
    visible = (ids[:, None, :, None] == ids[:, None, None, :]) & (key <= key[:, None])
    return (chosen | always) & visible


def reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float, sinks: Tensor | None
) -> Tensor:
    """q [B, H, S, D], k [B, Hk, S, D], v [B, Hk, S, Dv], mask from `seen`, cap inf if there is none
    -> [B, H, S, Dv]."""
    k, v, mask = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v, mask))
    scores = scale * q @ k.mT
    scores = scores if cap == torch.inf else cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[2]] @ v
