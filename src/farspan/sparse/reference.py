"""Compute what a step with page-sparse attention computes, by plain full-sequence autograd.

The reference is the model itself, whose layers choose pages from their own queries and keys and
mask the rest. No gradient flows through the choice.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from farspan.attention.backends import reference
from farspan.attention.far import GivenSelector
from farspan.engine.reference import Approximation, Attention, Function, Gradients, Outcome
from farspan.hf.describe import describe
from farspan.hf.stages import CausalLMStages
from farspan.program.builder import build_program
from farspan.program.program import Forward
from farspan.sparse.attend import FarCall, compare, seen_mask, sparse_reference
from farspan.sparse.engine import selector_of
from farspan.sparse.gathered import Gathered, PlainPages
from farspan.sparse.index import Index, reading
from farspan.sparse.pages import Candidates, Checked, Selector, mean_keys
from farspan.spec import RunSpec, Sparse


@dataclass(frozen=True, slots=True)
class SparseReference:
    """Sparse attention of whole sequences in plain PyTorch, called like the dense `reference`. The
    selector chooses pages by votes of the whole sequence's queries for its keys."""

    sparse: Sparse
    chunk: int
    select: Selector
    layer: int = 0

    def of(self, module: Any) -> "SparseReference":
        """Return a copy for the decoder layer whose attention module is `module`."""
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
        chunked: bool = False,
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
                chunked=chunked,
            )
        if document_ids is None:
            document_ids = torch.zeros(q.shape[0], q.shape[2], dtype=torch.int64, device=q.device)
        choice = self.choice(q.detach(), k.detach(), scale, document_ids)
        mask = seen_mask(choice, self.sparse, self.chunk, document_ids)
        return sparse_reference(q, k, v, mask, scale, softcap or torch.inf, sinks)

    def choice(self, q: Tensor, k: Tensor, scale: float, document_ids: Tensor) -> Tensor:
        """Return the pages chosen by each page of queries, [B, Hk, M, k], padded by -1."""
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
            first_tokens = starts[:, start:stop]
            chosen = q.new_empty(batch, heads, -(-(stop - start) // sparse.query_tokens), 0).int()
            if sparse.width(start):
                representatives = means[:, :, pages.start * each : pages.stop * each]
                first = first_tokens[:, :: sparse.query_tokens] // sparse.page
                call = FarCall(scale, sparse.page, first_tokens, sparse.query_tokens)
                arguments = q[:, :, start:stop], representatives, Candidates(pages, first)
                chosen = self.select(*compare(Gathered(PlainPages()), call, sparse, *arguments))
            choices.append(functional.pad(chosen, (0, most - chosen.shape[3]), value=-1))
        return torch.cat(choices, 2)


@dataclass(slots=True)
class SparseFunction(Function):
    """Sparse attention as checked by `farspan verify`. In float64 the reference and the step each
    choose pages; in lower precision both use the pages that float64 chose (`exact`)."""

    given: GivenSelector | None
    choices: list[Tensor] | None = None  # by layer, then by chunk

    def exact(self) -> Attention:
        sparse = self.schedule.sparse
        assert sparse is not None
        select = selector_of(self.given, self.schedule)
        if self.dtype is torch.float64:
            return SparseReference(sparse, self.schedule.chunk, select)
        self.choices = made = []

        def record(votes: Tensor, candidates: Candidates) -> Tensor:
            made.append(select(votes, candidates))
            return made[-1]

        return SparseReference(sparse, self.schedule.chunk, reading(select, record))

    def again(self) -> Attention:
        if self.choices is None:
            return self.exact()
        assert self.schedule.sparse is not None
        left = iter(self.choices)
        return SparseReference(self.schedule.sparse, self.schedule.chunk, lambda *_: next(left))

    def selector(self, model: nn.Module, batch: int, tokens: int) -> GivenSelector | None:
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
        if self.choices is None:
            return "; reference: plain autograd of sparse attention; each run chooses its own pages"
        return (
            "; all with sparse attention on the pages that float64 chooses, so a choice that "
            "rounding flips does not count as an error of the step"
        )

    def in_double(self) -> Self:
        return replace(self, dtype=torch.float64, choices=None)

    def approximation(
        self, model: nn.Module, tokens: int, found: Outcome, dense: Outcome
    ) -> Approximation:
        pages, chunk = self.schedule.sparse, self.schedule.chunk
        assert pages is not None
        (loss, gradients), (dense_loss, dense_gradients) = found, dense
        # A custom selector may choose fewer pages than the budget allows.
        counted = pages if self.given is None else replace(pages, budget=0)
        layers = [linear_modules(layer) for layer in CausalLMStages(model).layers]
        names = {id(p): name for name, p in model.named_parameters()}
        return Approximation(
            pages=pages,
            selector=_name(selector_of(self.given, self.schedule)),
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
    """Return a layer's trained matrices by module name, all experts of a kind together. The name is
    the last part of the path, such as q_proj, or the whole path if that part is ambiguous."""
    by_path: dict[str, list[nn.Parameter]] = {}
    for path, parameter in layer.named_parameters():
        parts = [part for part in path.split(".") if part != "weight" and not part.isdigit()]
        if parameter.requires_grad and parameter.ndim > 1 and not parts[-1].endswith("bias"):
            by_path.setdefault(".".join(parts), []).append(parameter)
    last = Counter(path.rsplit(".", 1)[-1] for path in by_path)

    def short(path: str) -> str:
        name = path.rsplit(".", 1)[-1]
        return name if last[name] == 1 else path

    return {short(path): parameters for path, parameters in by_path.items()}


def distance(gradients: Gradients, expected: Gradients, names: Iterable[str]) -> float:
    """Return the relative error |gradients - expected| / |expected| of the named gradients, as one
    vector; |gradients| if `expected` is zero. NaN counts as infinite."""
    off = size = 0.0
    for name in names:
        right = expected[name].double()
        off += float((gradients[name].double() - right).square().sum())
        size += float(right.square().sum())
    error = (off / size if size > 0 else off) ** 0.5
    return error if error == error else float("inf")


def _name(selector: Selector) -> str:
    if isinstance(selector, Checked):
        return getattr(selector.function, "__name__", repr(selector.function))
    return repr(selector)
