"""Plain full-sequence autograd of the same model with a dense attention: what is exact.

Page-sparse attention has a reference too: the same model, whose layers choose pages from their own
queries and keys and hide all that was not chosen. No gradient flows through the choice."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from farspan.attention.backends import accumulate_dtype, reference
from farspan.engine.loss import IGNORED, StepInputs, make_inputs, shift_labels
from farspan.hf.attention_interface import answering, routed
from farspan.hf.stages import CausalLMStages
from farspan.sparse.attend import seen_mask
from farspan.sparse.attend import sparse_reference as sparse_reference
from farspan.sparse.pages import Candidates, Selector, page_means, vote
from farspan.spec import Sparse

Attention = Callable[..., Tensor]  # what `reference` takes and gives


def reference_loss(
    model: nn.Module,
    input_ids: Tensor,
    labels: Tensor,
    document_ids: Tensor | None = None,
    *,
    attend: Attention = reference,
) -> Tensor:
    """The mean loss over trained tokens, with the autograd graph of the whole sequence; the rest
    as `reference_logits`."""
    targets = shift_labels(labels, document_ids)
    logits = reference_logits(model, input_ids, document_ids, attend=attend)
    total = functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total / max(int((targets != IGNORED).sum()), 1)


def reference_logits(
    model: nn.Module,
    input_ids: Tensor,
    document_ids: Tensor | None = None,
    *,
    attend: Attention = reference,
) -> Tensor:
    """Logits of all tokens, [batch, tokens, vocab], in fp32, or in fp64 of a float64 model.

    Attention is dense softmax in the model's dtype: Hugging Face's eager attention computes its
    softmax in float32 and could not tell 1e-8 from 1e-16. Needs memory for N x N scores. For a
    sparse schedule's function give `attend=SparseReference(...)`. A model with recurrent layers,
    which know no documents, sees one at a time.
    """
    boundary = CausalLMStages(model)
    batch = make_inputs(input_ids, input_ids.long(), document_ids, boundary.vocab)
    documents, calls = document_ids, 0

    def attention(
        _: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, **keywords: Any
    ) -> Tensor:
        nonlocal calls
        calls += 1
        out = attend(
            q,
            k,
            v,
            scale=scale,
            window=keywords.get("sliding_window"),
            softcap=keywords.get("softcap"),
            sinks=keywords.get("s_aux"),
            document_ids=documents,
        )
        return out.transpose(1, 2)

    def logits_of(ids: Tensor, positions: Tensor) -> Tensor:
        return boundary.model(input_ids=ids, position_ids=positions, use_cache=False).logits

    with routed(boundary.model), answering(attention):
        logits = logits_of(input_ids, batch.position_ids)
        if batch.documents is not None and calls < len(boundary.layers):
            documents = None
            logits = _one_by_one(batch, batch.documents, logits_of)
    return logits.to(accumulate_dtype(logits.dtype))


def _one_by_one(
    batch: StepInputs,
    documents: tuple[tuple[int, ...], ...],
    logits_of: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Logits of every document, run alone."""
    rows = []
    for row, starts in enumerate(documents):
        cuts = pairwise((*starts, batch.input_ids.shape[1]))
        places = [(slice(row, row + 1), slice(start, stop)) for start, stop in cuts]
        rows.append([logits_of(batch.input_ids[p], batch.position_ids[p]) for p in places])
    return torch.cat([torch.cat(row, dim=1) for row in rows])


@dataclass(frozen=True, slots=True)
class SparseReference:
    """Attention of a sparse schedule, as its definition says; see `reference` for the arguments.

    The choice is made by the selector from votes over the whole sequence's queries and keys.
    """

    sparse: Sparse
    chunk: int
    select: Selector

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        document_ids: Tensor | None = None,
        scale: float,
    ) -> Tensor:
        if window is not None:
            return reference(
                q,
                k,
                v,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
                document_ids=document_ids,
            )
        if document_ids is None:
            document_ids = torch.zeros(q.shape[0], q.shape[2], dtype=torch.int64, device=q.device)
        choice = self.choice(q.detach(), k.detach(), scale, document_ids)
        mask = seen_mask(choice, self.sparse, self.chunk, document_ids)
        return sparse_reference(q, k, v, mask, scale, softcap or torch.inf, sinks)

    def choice(self, q: Tensor, k: Tensor, scale: float, document_ids: Tensor) -> Tensor:
        """The choice [B, Hk, M, k] of a whole sequence, -1 where a page of queries has fewer."""
        sparse, (batch, heads, tokens, _) = self.sparse, k.shape
        most = max(sparse.width(start) for start in range(0, tokens, self.chunk))
        means = page_means(k.permute(2, 0, 1, 3), sparse.page).permute(1, 2, 0, 3)
        starts = torch.searchsorted(document_ids.contiguous(), document_ids.contiguous())
        choices = []
        for start in range(0, tokens, self.chunk):
            stop, pages = min(start + self.chunk, tokens), sparse.candidates(start)
            own = starts[:, start:stop]
            chosen = q.new_empty(batch, heads, -(-(stop - start) // sparse.page), 0).int()
            if sparse.width(start):
                given = means[:, :, pages.start : pages.stop]
                votes = vote(q[:, :, start:stop], given, sparse.page, scale, own, pages.start)
                first = own[:, :: sparse.page] // sparse.page
                chosen = self.select(votes, Candidates(pages, first))
            choices.append(functional.pad(chosen, (0, most - chosen.shape[3]), value=-1))
        return torch.cat(choices, 2)


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of every trainable parameter by name; `.grad` is left as it is."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(named.items(), found, strict=True)
    }
