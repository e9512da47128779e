"""Plain full-sequence autograd of the same model with a dense attention: what is exact."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from farspan.attention.merge import accumulate_dtype
from farspan.attention.reference import reference
from farspan.engine.batch import IGNORED, make_batch
from farspan.models.boundary import Boundary
from farspan.models.route import answering, routed


def oracle_loss(
    model: nn.Module, input_ids: Tensor, labels: Tensor, document_ids: Tensor | None = None
) -> Tensor:
    """The mean loss over trained tokens, with the autograd graph of the whole sequence.

    Attention is dense softmax in the model's dtype: Hugging Face's eager attention computes its
    softmax in float32 and could not tell 1e-8 from 1e-16. Needs memory for N x N scores.
    """
    boundary = Boundary(model)
    batch = make_batch(input_ids, labels, document_ids, boundary.vocab)

    def attention(
        _: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, **keywords: Any
    ) -> Tensor:
        out = reference(
            q,
            k,
            v,
            scale=scale,
            window=keywords.get("sliding_window"),
            softcap=keywords.get("softcap"),
            sinks=keywords.get("s_aux"),
            document_ids=document_ids,
        )
        return out.transpose(1, 2)

    with routed(boundary.model), answering(attention):
        out = boundary.model(input_ids=input_ids, position_ids=batch.position_ids, use_cache=False)
    logits = out.logits.to(accumulate_dtype(out.logits.dtype))
    total = functional.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total / max(batch.trained, 1)


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of every trainable parameter by name; `.grad` is left as it is."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(named.items(), found, strict=True)
    }
