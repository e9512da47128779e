"""How much of dense attention a sparse one sees, measured on a few queries.

A query's dense softmax gives exp(score) / sum of all; what is seen holds exp(lse_seen - lse_all) of
it, one minus the weight that dense attention would put on what sparse attention leaves out. The
LSE of what is seen is at hand, so that only the LSE over all keys is computed, of few queries.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from farspan.attention.cell import KeyValues
from farspan.attention.merge import accumulate_dtype
from farspan.attention.sparse.cell import SparseCall


@dataclass(frozen=True, slots=True)
class Mass:
    """Attention mass that is seen, over sampled queries and all heads; 1 where nothing is lost."""

    mean: float
    minimum: float


def sampled(tokens: int, samples: int) -> range:
    """Evenly spaced tokens of a chunk, its last among them: those see the most."""
    step = max(1, tokens // max(1, samples))
    return range((tokens - 1) % step, tokens, step)


@torch.no_grad()
def seen_mass(
    call: SparseCall,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    key_values: KeyValues,
    tokens: range,
    spans: Iterable[tuple[int, int]],
    sinks: Tensor | None = None,
) -> Tensor:
    """Mass of these tokens of a chunk, whose q [B, H, C, D], own k and lse are given: the mean and
    the minimum, [2] in the accumulate dtype, for which the CPU has not waited.

    `spans` are ranges that cover all earlier keys, in ascending order, as `key_values` serves them.
    It reads all earlier keys once: with K on host it costs as much transfer as dense attention, so
    ask now and then.
    """
    dtype = accumulate_dtype(q.dtype)
    sample = torch.arange(tokens.start, tokens.stop, tokens.step, device=q.device)
    few, position = q[:, :, sample].to(dtype), sample + call.near.q_start
    first = torch.zeros_like(sample)[None]
    if call.far.documents is not None:
        first = call.far.documents[:, sample]
    everything = few.new_full(few.shape[:3], -torch.inf)
    if sinks is not None:
        everything = everything.logaddexp(sinks.to(dtype)[:, None])
    own = call.near.q_start, call.near.q_start + k.shape[2]
    for start, stop in (*spans, own):
        keys = k if start == own[0] else key_values.keys(start, stop)[0]
        # The heads of a group stacked: their keys are read once, not copied for each.
        stacked = few.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
        scores = (stacked @ keys.to(dtype).mT).mul_(call.near.scale).view(*few.shape[:3], -1)
        if call.near.softcap is not None:
            scores = call.near.softcap * torch.tanh(scores / call.near.softcap)
        key = torch.arange(start, stop, device=q.device)
        hidden = (key > position[:, None]) | (key < first[..., None])
        everything = everything.logaddexp(
            scores.masked_fill_(hidden.unsqueeze(1), -torch.inf).logsumexp(3)
        )
    mass = (lse[:, :, sample] - everything).exp()
    return torch.stack([mass.mean(), mass.min()])
