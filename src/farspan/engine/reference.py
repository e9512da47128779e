"""Compute a model's exact loss, logits and gradients by plain full-sequence autograd."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from farspan.attention.backends import accumulate_dtype, reference
from farspan.attention.far import GivenSelector
from farspan.engine.loss import IGNORED, StepInputs, make_inputs, shift_labels
from farspan.hf.attention_interface import answering, attended, routed
from farspan.hf.indexer import IndexerCall
from farspan.hf.recurrent import mixers
from farspan.hf.routers import balance_loss, recorded, routers_of
from farspan.hf.stages import CausalLMStages
from farspan.spec import Schedule, Sparse

Attention = Callable[..., Tensor]  # the signature of `reference`


@runtime_checkable
class OfLayers(Protocol):
    """Attention function that differs from layer to layer."""

    def of(self, module: nn.Module) -> Attention:
        """Return the attention function for the layer that contains `module`."""


def reference_loss(
    model: nn.Module,
    input_ids: Tensor,
    labels: Tensor,
    document_ids: Tensor | None = None,
    *,
    attend: Attention = reference,
) -> Tensor:
    """Return the mean loss by plain autograd over the whole sequence, with the router loss that the
    model adds; see `reference_logits`."""
    targets, causal = shift_labels(labels, document_ids), CausalLMStages(model).model
    with recorded(causal) as seen:
        logits = reference_logits(model, input_ids, document_ids, attend=attend)
    total = functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    loss, routers = total / max(int((targets != IGNORED).sum()), 1), routers_of(causal)
    return loss if routers is None else loss + balance_loss(routers, seen)


def reference_logits(
    model: nn.Module,
    input_ids: Tensor,
    document_ids: Tensor | None = None,
    *,
    attend: Attention = reference,
) -> Tensor:
    """Return the logits of all tokens by plain full-sequence attention, [batch, tokens, vocab], in
    fp32, or in fp64 for a float64 model. Attention is dense softmax in the model's dtype: Hugging
    Face's eager attention computes its softmax in float32 and cannot tell 1e-8 from 1e-16. Needs
    memory for N x N scores of N tokens. For a sparse schedule, give its attention function as
    `attend`. A model whose layers ignore documents, such as recurrent ones, runs one document at a
    time."""
    stages = CausalLMStages(model)
    batch = make_inputs(input_ids, input_ids.long(), document_ids, stages.vocab)
    documents, calls = document_ids, 0

    def attention(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, **keywords: Any
    ) -> Tensor:
        nonlocal calls
        calls += 1
        own = attend.of(module) if isinstance(attend, OfLayers) else attend
        return attended(own, q, k, v, scale, keywords, document_ids=documents)

    def choose(call: IndexerCall) -> Tensor:
        positions, tokens = batch.position_ids, call.hidden.shape[1]
        begins = torch.arange(tokens, device=positions.device) - positions
        return call.choose(call.keys(), 0, tokens, None if documents is None else begins)

    def logits_of(ids: Tensor, positions: Tensor) -> Tensor:
        places = positions + stages.first_position
        return stages.model(input_ids=ids, position_ids=places, use_cache=False).logits

    with routed(stages.model), answering(attention, choose):
        logits = logits_of(input_ids, batch.position_ids)
        passes_on = calls < len(stages.layers) or any(map(mixers, stages.layers))
        if batch.documents is not None and (passes_on or any(stages.scales)):
            documents = None
            logits = _one_by_one(batch, batch.documents, logits_of)
    return logits.to(accumulate_dtype(logits.dtype))


def _one_by_one(
    batch: StepInputs,
    documents: tuple[tuple[int, ...], ...],
    logits_of: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    rows = []
    for row, starts in enumerate(documents):
        cuts = pairwise((*starts, batch.input_ids.shape[1]))
        places = [(slice(row, row + 1), slice(start, stop)) for start, stop in cuts]
        rows.append([logits_of(batch.input_ids[p], batch.position_ids[p]) for p in places])
    return torch.cat([torch.cat(row, dim=1) for row in rows])


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradient of every trainable parameter by name, leaving `.grad` unchanged."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(named.items(), found, strict=True)
    }


Gradients = dict[str, Tensor]  # by the name of a parameter
Outcome = tuple[Tensor, Gradients]  # loss and gradients


@dataclass(frozen=True, slots=True)
class Approximation:
    """Relative L2 errors of a sparse step against dense attention."""

    pages: Sparse
    selector: str
    hides: bool  # False: every key is visible at this length, so it is dense attention
    loss_error: float
    gradient_error: float  # of all gradients together
    dense_error: dict[str, dict[str, float]]  # by layer, by the name of a linear module in it


@dataclass(slots=True)
class Function:
    """A step's attention, in a form that plain autograd runs. This class is dense attention; sparse
    attention overrides its methods."""

    schedule: Schedule
    dtype: torch.dtype  # of the step

    def exact(self) -> Attention:
        """Return the float64 reference's attention; `again` may later reuse pages it chooses."""
        return reference

    def again(self) -> Attention:
        """Return attention in the model's dtype for plain autograd, after a call of `exact`."""
        return self.exact()

    def in_double(self) -> Self:
        """Return the same attention for a float64 step."""
        return replace(self, dtype=torch.float64)

    def selector(self, *_: Any, **__: Any) -> GivenSelector | None:
        """Return the function that chooses pages in the compared step; None: dense attention."""
        return None

    def rule(self) -> str:
        """Return what an error limit's explanation says of sparse attention; empty if dense."""
        return ""

    def approximation(self, *_: Any, **__: Any) -> Approximation | None:
        """Return a sparse step's errors against dense attention; None for a dense step."""
        return None
