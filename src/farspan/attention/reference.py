"""Attention as the formula says, dense and differentiable: what every fast form is held to."""

import torch
from torch import Tensor


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
