"""Autograd graphs of cells, from a forward to the backward of the same cell."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from farspan.transfer.saved import SavedCell

Run = Callable[[Tensor], Tensor]  # a layer on its chunk


class Entry(torch.autograd.Function):
    """The way into a cell's graph. The graph holds no tensor for it, so that the layer's input may
    leave the device while the graph waits; the gradient is handed to `sink`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor, sink: list[Tensor]) -> Tensor:
        ctx.sink = sink
        ctx.shape = anchor.shape
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.sink.append(gradient)
        return gradient.new_zeros(ctx.shape), None, None


@dataclass(frozen=True, slots=True)
class Inlet:
    """Where a tensor entered a graph, and its gradient comes out."""

    anchor: Tensor
    sink: list[Tensor]  # empty until the backward, and after it where nothing depends on the tensor


def enter(tensor: Tensor) -> tuple[Tensor, Inlet]:
    """The tensor as a graph reads it; autograd must be on."""
    inlet = Inlet(tensor.new_zeros(0, requires_grad=True), [])
    return Entry.apply(inlet.anchor, tensor, inlet.sink), inlet


@dataclass(frozen=True, slots=True)
class Graph:
    """A cell's graph, waiting for its backward."""

    out: GradientEdge
    inlet: Inlet  # of the layer's input
    saved: SavedCell | None = None  # of a kept graph


def build(run: Run, hidden: Tensor, saved: SavedCell | None = None) -> tuple[Graph, Tensor]:
    """Run a layer with its graph; what autograd saves goes to `saved` if there is one."""
    with torch.enable_grad():
        entered, inlet = enter(hidden)
        with nullcontext() if saved is None else saved.hooks():
            out = run(entered)
    return Graph(get_gradient_edge(out), inlet, saved), out.detach()


def differentiate(
    graph: Graph,
    parameters: Sequence[Tensor],
    given: list[Tensor],
    *,
    left: Sequence[GradientEdge] = (),
    inlets: Iterable[Inlet] = (),
) -> tuple[tuple[Tensor | None, ...], Tensor]:
    """Gradients of a cell's weights, and that of its input. `given` are those of its output and of
    what else it `left`; it is emptied, since autograd frees a gradient that nobody holds. Those of
    what else came in are in their inlets."""
    found = torch.autograd.grad(
        [graph.out, *left],
        [*parameters, graph.inlet.anchor, *(inlet.anchor for inlet in inlets)],
        [given.pop(0) for _ in range(len(given))],
        allow_unused=True,
    )
    (gradient,) = graph.inlet.sink
    return found[: len(parameters)], gradient
