"""What a step is compared with when it is sparse, and how far sparse is from dense attention.

A step is right when its gradients are those of the function that sparse attention is, chosen pages
and all. How far that function is from dense attention is no error of the step: it is measured and
told (OOMB 5.3, figure 7)."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor, nn

from farspan.attention.backends import reference
from farspan.engine.reference import Attention, SparseReference
from farspan.hf.describe import describe
from farspan.hf.stages import CausalLMStages
from farspan.program.builder import build_program
from farspan.program.program import Forward
from farspan.sparse.engine import PageFunction, selector_of
from farspan.sparse.pages import Candidates, Checked, Selector
from farspan.spec import RunSpec, Schedule, Sparse

Gradients = dict[str, Tensor]  # by the name of a parameter


@dataclass(frozen=True, slots=True)
class Approximation:
    """How far a sparse step is from dense attention; errors are relative, in the L2 norm."""

    pages: Sparse
    selector: str
    hides: bool  # False: a query sees all there is at this length, so that it is dense attention
    loss_error: float
    gradient_error: float  # of all gradients together
    dense_error: dict[str, dict[str, float]]  # by layer, by the name of a linear module in it


@dataclass(slots=True)
class Function:
    """What a step of a schedule computes, for plain autograd and for the step.

    In float64 each chooses pages for itself. In lower precision all have the choices of `exact`,
    which is float64 and is asked for first.
    """

    schedule: Schedule
    given: Selector | PageFunction | None
    dtype: torch.dtype  # of the step
    choices: list[Tensor] | None = None  # layers upwards, in each of them the chunks

    def exact(self) -> Attention:
        """What is right."""
        sparse = self.schedule.sparse
        if sparse is None:
            return reference
        select = selector_of(self.given, sparse)
        if self.dtype is torch.float64:
            return SparseReference(sparse, self.schedule.chunk, select)
        self.choices = made = []

        def record(votes: Tensor, candidates: Candidates) -> Tensor:
            made.append(select(votes, candidates))
            return made[-1]

        return SparseReference(sparse, self.schedule.chunk, record)

    def again(self) -> Attention:
        """The same in the model's own precision."""
        if self.schedule.sparse is None or self.choices is None:
            return self.exact()
        left = iter(self.choices)
        return SparseReference(self.schedule.sparse, self.schedule.chunk, lambda *_: next(left))

    def selector(self, model: nn.Module, batch: int, tokens: int) -> Selector | PageFunction | None:
        """What chooses in the step."""
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
        return lambda votes, pages: choices[next(left)]  # noqa: ARG005

    def rule(self) -> str:
        """What is compared with what, as the end of a rule."""
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
    """How far loss and gradients of a sparse step are from those of dense attention."""
    sparse, chunk = function.schedule.sparse, function.schedule.chunk
    assert sparse is not None
    # A selector of another kind may choose fewer pages than the budget has room for.
    counted = sparse if function.given is None else replace(sparse, budget=0)
    layers = [linear_modules(layer) for layer in CausalLMStages(model).layers]
    names = {id(p): name for name, p in model.named_parameters()}
    return Approximation(
        pages=sparse,
        selector=_name(selector_of(function.given, sparse)),
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
    """The trained matrices of a layer by the module that multiplies by them, experts together: the
    last part of its path, such as q_proj, or the whole path where that leaves doubt."""
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
    """Of these gradients taken as one vector, |found - expected| / |expected|; where that is zero,
    |found|. NaN counts as infinite."""
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
