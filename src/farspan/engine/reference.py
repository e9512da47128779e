"""Compute exact results by plain full-sequence autograd of the model with dense attention.

The reference of page-sparse attention is the same model, whose layers choose pages from their own
queries and keys and mask the rest. No gradient flows through the choice.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from farspan.attention.backends import accumulate_dtype, reference
from farspan.engine.loss import IGNORED, StepInputs, make_inputs, shift_labels
from farspan.hf.attention_interface import answering, attended, routed
from farspan.hf.describe import describe
from farspan.hf.stages import CausalLMStages
from farspan.program.builder import build_program
from farspan.program.program import Forward
from farspan.sparse.attend import FarCall, compare, seen_mask
from farspan.sparse.attend import sparse_reference as sparse_reference
from farspan.sparse.engine import PageFunction, selector_of
from farspan.sparse.gathered import Gathered, PlainPages
from farspan.sparse.index import Index, reading
from farspan.sparse.pages import Candidates, Checked, Selector, mean_keys
from farspan.spec import RunSpec, Schedule, Sparse

Attention = Callable[..., Tensor]  # the signature of `reference`


def reference_loss(
    model: nn.Module,
    input_ids: Tensor,
    labels: Tensor,
    document_ids: Tensor | None = None,
    *,
    attend: Attention = reference,
) -> Tensor:
    """Return the mean loss over trained tokens, with the autograd graph of the whole sequence;
    arguments as for `reference_logits`."""
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
    """Return logits of all tokens, [batch, tokens, vocab], in fp32, or in fp64 for a float64 model.
    Attention is dense softmax in the model's dtype: Hugging Face's eager attention computes its
    softmax in float32 and cannot tell 1e-8 from 1e-16. Needs memory for N x N scores. For a sparse
    schedule's function pass `attend=SparseReference(...)`. A model with recurrent layers, which
    ignore documents, runs one document at a time."""
    boundary = CausalLMStages(model)
    batch = make_inputs(input_ids, input_ids.long(), document_ids, boundary.vocab)
    documents, calls = document_ids, 0

    def attention(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, **keywords: Any
    ) -> Tensor:
        nonlocal calls
        calls += 1
        own = attend.of(module) if isinstance(attend, SparseReference) else attend
        return attended(own, q, k, v, scale, keywords, document_ids=documents)

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
    rows = []
    for row, starts in enumerate(documents):
        cuts = pairwise((*starts, batch.input_ids.shape[1]))
        places = [(slice(row, row + 1), slice(start, stop)) for start, stop in cuts]
        rows.append([logits_of(batch.input_ids[p], batch.position_ids[p]) for p in places])
    return torch.cat([torch.cat(row, dim=1) for row in rows])


@dataclass(frozen=True, slots=True)
class SparseReference:
    """Attention of a sparse schedule, by its definition; arguments as for `reference`. The selector
    chooses pages by votes over the whole sequence's queries and keys."""

    sparse: Sparse
    chunk: int
    select: Selector
    layer: int = 0

    def of(self, module: Any) -> "SparseReference":
        """Return this reference for the layer that `module` belongs to."""
        return replace(self, layer=module.layer_idx)

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
        """Return the chosen pages [B, Hk, M, k] of a whole sequence, padded by -1."""
        sparse, (batch, heads, tokens, _) = self.sparse, k.shape
        most = max(sparse.width(start) for start in range(0, tokens, self.chunk))
        means = mean_keys(k.permute(2, 0, 1, 3), sparse.mean_tokens).permute(1, 2, 0, 3)
        if isinstance(self.select, Index):
            q, means = self.select.layers[self.layer].compared(q, k)
        each = sparse.page // sparse.mean_tokens
        starts = torch.searchsorted(document_ids.contiguous(), document_ids.contiguous())
        choices = []
        for start in range(0, tokens, self.chunk):
            stop, pages = min(start + self.chunk, tokens), sparse.candidates(start)
            own = starts[:, start:stop]
            chosen = q.new_empty(batch, heads, -(-(stop - start) // sparse.query_tokens), 0).int()
            if sparse.width(start):
                given = means[:, :, pages.start * each : pages.stop * each]
                first = own[:, :: sparse.query_tokens] // sparse.page
                call = FarCall(scale, sparse.page, own, sparse.query_tokens)
                of = q[:, :, start:stop], given, Candidates(pages, first)
                chosen = self.select(*compare(Gathered(PlainPages()), call, sparse, *of))
            choices.append(functional.pad(chosen, (0, most - chosen.shape[3]), value=-1))
        return torch.cat(choices, 2)


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradient of every trainable parameter by name; `.grad` is not changed."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(named.items(), found, strict=True)
    }


# -- distance of sparse attention from dense ------------------------------------------------------


Gradients = dict[str, Tensor]  # by the name of a parameter


@dataclass(frozen=True, slots=True)
class Approximation:
    """Errors of a sparse step against dense attention, relative in the L2 norm."""

    pages: Sparse
    selector: str
    hides: bool  # False: every key is visible at this length, so it is dense attention
    loss_error: float
    gradient_error: float  # of all gradients together
    dense_error: dict[str, dict[str, float]]  # by layer, by the name of a linear module in it


@dataclass(slots=True)
class Function:
    """The function that a step of a schedule computes, for plain autograd and for the step. In
    float64 each chooses its own pages. In lower precision all use the choices of `exact`, which is
    float64 and must be called first."""

    schedule: Schedule
    given: Selector | PageFunction | None
    dtype: torch.dtype  # of the step
    choices: list[Tensor] | None = None  # by layer, then by chunk

    def exact(self) -> Attention:
        """Return the exact attention."""
        sparse = self.schedule.sparse
        if sparse is None:
            return reference
        select = selector_of(self.given, self.schedule)
        if self.dtype is torch.float64:
            return SparseReference(sparse, self.schedule.chunk, select)
        self.choices = made = []

        def record(votes: Tensor, candidates: Candidates) -> Tensor:
            made.append(select(votes, candidates))
            return made[-1]

        return SparseReference(sparse, self.schedule.chunk, reading(select, record))

    def again(self) -> Attention:
        """Return the same attention for the model's own precision."""
        if self.schedule.sparse is None or self.choices is None:
            return self.exact()
        left = iter(self.choices)
        return SparseReference(self.schedule.sparse, self.schedule.chunk, lambda *_: next(left))

    def selector(self, model: nn.Module, batch: int, tokens: int) -> Selector | PageFunction | None:
        if self.choices is None:
            return self.given
        program = build_program(
            describe(CausalLMStages(model)), RunSpec(batch, tokens), self.schedule
        )
        choosing = [
            (i.layer, i.chunk) for i in program.instructions if isinstance(i, Forward) and i.chooses
        ]
        layers, chunks = ({cell[axis] for cell in choosing} for axis in (0, 1))
        cells = product(sorted(layers), sorted(chunks))
        choices = dict(zip(cells, self.choices, strict=True))
        left = iter(choosing)
        return reading(self.given, lambda votes, pages: choices[next(left)])  # noqa: ARG005

    def rule(self) -> str:
        """Describe the comparison, as the end of a limit's rule."""
        if self.schedule.sparse is None:
            return ""
        if self.choices is None:
            return "; all against plain autograd of the sparse function, each choosing for itself"
        return (
            "; all of the sparse function, for the pages that float64 chooses: a choice that "
            "rounding flips is not an error of the step"
        )


def approximation(
    function: Function,
    model: nn.Module,
    tokens: int,
    loss: Tensor,
    gradients: Gradients,
    dense_loss: Tensor,
    dense_gradients: Gradients,
) -> Approximation:
    """Return the errors of a sparse step's loss and gradients against those of dense attention."""
    sparse, chunk = function.schedule.sparse, function.schedule.chunk
    assert sparse is not None
    # A custom selector may choose fewer pages than the budget allows.
    counted = sparse if function.given is None else replace(sparse, budget=0)
    layers = [linear_modules(layer) for layer in CausalLMStages(model).layers]
    names = {id(p): name for name, p in model.named_parameters()}
    return Approximation(
        pages=sparse,
        selector=_name(selector_of(function.given, function.schedule)),
        hides=any(layer.window is None for layer in describe(CausalLMStages(model)).layers)
        and counted.hides(tokens, chunk),
        loss_error=float((loss - dense_loss).abs() / dense_loss.abs()),
        gradient_error=distance(gradients, dense_gradients, dense_gradients),
        dense_error={
            str(index): {
                module: distance(gradients, dense_gradients, [names[id(p)] for p in weights])
                for module, weights in modules.items()
            }
            for index, modules in enumerate(layers)
        },
    )


def linear_modules(layer: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return the trained matrices of a layer by module, all experts of a kind together. A module is
    named by the last part of its path, such as q_proj, or by the whole path if the last part is
    ambiguous."""
    found: dict[str, list[nn.Parameter]] = {}
    for path, parameter in layer.named_parameters():
        parts = [part for part in path.split(".") if part != "weight" and not part.isdigit()]
        if parameter.requires_grad and parameter.ndim > 1 and not parts[-1].endswith("bias"):
            found.setdefault(".".join(parts), []).append(parameter)
    last = Counter(path.rsplit(".", 1)[-1] for path in found)

    def short(path: str) -> str:
        name = path.rsplit(".", 1)[-1]
        return name if last[name] == 1 else path

    return {short(path): parameters for path, parameters in found.items()}


def distance(found: Gradients, expected: Gradients, names: Iterable[str]) -> float:
    """Return |found - expected| / |expected| over these gradients as one vector; |found| if that is
    zero. NaN counts as infinite."""
    off = size = 0.0
    for name in names:
        right = expected[name].double()
        off += float((found[name].double() - right).square().sum())
        size += float(right.square().sum())
    error = (off / size if size > 0 else off) ** 0.5
    return error if error == error else float("inf")


def _name(selector: Selector) -> str:
    if isinstance(selector, Checked):
        return getattr(selector.function, "__name__", repr(selector.function))
    return repr(selector)
