"""Compute a cell's gradients from its autograd graph, and sum weight gradients over chunks.

Weight gradients are accumulated over chunks in fp32 and rounded into `.grad` once. Adding those of
1,024 chunks in bf16 costs 4 to 15% relative error; in fp32 the error is below bf16's resolution
(measured on 64 to 1,024 tiles).

A gradient that autograd returns is written, read and added: 2 + 10 bytes an element in bf16, and a
layer's gradients are alive together (0.5 GB for a 7B model). `AccumulatingLinears` add the product
to the sum directly.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional

from farspan.activations import SavedActivations
from farspan.attention.backends import accumulate_dtype
from farspan.hf.attention_interface import casts
from farspan.hf.fused_layers import Linears
from farspan.hf.swap import Part, put_in
from farspan.kernels.operations import Act, swiglu_again

# Sum a unit's accumulators over ranks, add the sums to `.grad`, and remove them from the dict.
Reduce = Callable[[int, dict[nn.Parameter, Tensor]], None]


@contextmanager
def own_gradients(model: nn.Module) -> Iterator[None]:
    """Run the body with every `.grad` None, and restore the earlier gradients afterwards."""
    before = {p: p.grad for p in model.parameters()}
    model.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        for parameter, gradient in before.items():
            parameter.grad = gradient


def add_product(total: Tensor, dout: Tensor, x: Tensor, *, fresh: bool) -> None:
    """Add dout.T @ x to `total` in one matrix product. The operands have the dtype of `total` or a
    narrower one. With `fresh` the product replaces the content of `total`."""
    beta = 0 if fresh else 1
    if total.dtype == x.dtype:
        torch.addmm(total, dout.t(), x, beta=beta, out=total)
    elif not total.is_meta:  # PyTorch 2.11 has a wrong meta operator; it allocates nothing
        torch.ops.aten.addmm.dtype_out(total, dout.t(), x, total.dtype, beta=beta, out=total)


@contextmanager
def uncast(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Run the body with the parameters' hooks and `grad_dtype` off, so that autograd gives each
    gradient in the parameter's dtype. Hooks run later, on the gradient of all chunks."""
    parameters = list(parameters)
    wide = [p for p in parameters if p.dtype != p.grad_dtype == accumulate_dtype(p.dtype)]
    hooked = [p for p in parameters if p._backward_hooks]
    # Gradients are widened as they are added: a cast before would take 18 bytes per element instead
    # of 10, and hold a layer's gradients in fp32 next to the sums.
    narrow: list[Part] = [(parameter, "grad_dtype", None) for parameter in wide]
    with put_in(narrow + [(parameter, "_backward_hooks", None) for parameter in hooked]):
        yield


def is_hooked(parameter: nn.Parameter) -> bool:
    """Return whether the parameter has hooks that autograd calls with its gradient."""
    return parameter.requires_grad and bool(parameter._backward_hooks)


@torch.no_grad()
def accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Add the gradient of a whole call to `.grad` as autograd does: the parameter's hooks run first
    and may replace the gradient."""
    for hook in (parameter._backward_hooks or {}).values():
        given = hook(gradient)
        gradient = gradient if given is None else given
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


@torch.no_grad()
def call_accumulated(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
            hook(parameter)


class GradientAccumulator:
    """Sums of weight gradients over chunks, which are added to `.grad` as by `loss.backward()`. A
    parameter whose gradient dtype (`grad_dtype`, or the parameter's) is fp32 or wider has its sum
    in `.grad` itself; any other has an fp32 sum until its group of layers is finished. With
    `reduce`, which adds sums over ranks, no sum is in `.grad`. Parameters with hooks (`hooked`) get
    their gradient at the end of the call."""

    def __init__(self, reduce: Reduce | None = None, hooked: Iterable[nn.Parameter] = ()) -> None:
        self.received: dict[nn.Parameter, None] = {}  # parameters with a gradient, in order
        self.in_place = False  # a `.grad` keeps its memory, whose address a CUDA graph has
        self._hooked = set(hooked)
        self._open: dict[nn.Parameter, Tensor] = {}
        self._places: dict[nn.Parameter, Tensor] = {}
        self._reduce = reduce

    def place(self, parameter: nn.Parameter, total: Tensor, *, fresh: bool) -> None:
        """Use `total` as the sum of a parameter's gradients, without its content if `fresh`."""
        (self._places if fresh else self._open)[parameter] = total

    def take(self, parameter: nn.Parameter) -> Tensor | None:
        """Remove and return the sum of a parameter's gradients, or None if there is no sum yet."""
        self._places.pop(parameter, None)
        return self._open.pop(parameter, None)

    def add(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                self._add(parameter, gradient)

    def _add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        total, fresh = self._sum(parameter)
        if fresh:
            # Copy, since autograd's tensor may be shared or have another layout.
            total.copy_(gradient)
        else:
            total.add_(gradient)

    def add_product(self, parameter: nn.Parameter, dout: Tensor, x: Tensor) -> None:
        """Add dout.T @ x, the gradient of a linear module's weight [out, in], to its sum. `dout`
        [rows, out] and `x` [rows, in] have the weight's dtype."""
        total, fresh = self._sum(parameter)
        add_product(total, dout, x, fresh=fresh)

    def _sum(self, parameter: nn.Parameter) -> tuple[Tensor, bool]:
        """Return the sum of a parameter's gradients, and whether it is still empty."""
        # Empty tables are not asked: a tensor's hash is a call of Python's.
        if self._places and parameter in self._places:
            self._open[parameter] = self._places.pop(parameter)
            return self._open[parameter], True
        if self._open and parameter in self._open:
            return self._open[parameter], False
        wide = accumulate_dtype(parameter.dtype)
        apart = self._reduce is not None or (bool(self._hooked) and parameter in self._hooked)
        self.received[parameter] = None
        # A parameter without a fixed gradient dtype takes the sums in theirs.
        if parameter.grad_dtype in (None, wide) and not apart:
            found = parameter.grad
            if found is None:
                parameter.grad = torch.empty_like(parameter, dtype=wide)
                return parameter.grad, True
            return found, False
        self._open[parameter] = torch.empty_like(parameter, dtype=wide)
        return self._open[parameter], True

    def close(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add the sums of these parameters to `.grad`, rounded once."""
        for parameter in parameters:
            total = None if parameter in self._hooked else self._open.pop(parameter, None)
            if total is None:
                continue
            if parameter.grad is not None:
                total.add_(parameter.grad)
            if parameter.grad is not None and self.in_place:
                parameter.grad.copy_(total)
            else:
                parameter.grad = total.to(parameter.grad_dtype or total.dtype)

    def finish(self) -> None:
        """Give each parameter with hooks its whole gradient, so that each hook is called once."""
        for parameter in self._hooked:
            total = self._open.pop(parameter, None)
            if total is not None:
                accumulate(parameter, total.to(parameter.grad_dtype or total.dtype))

    def reduce(self, unit: int) -> None:
        """Sum gradients of a unit (a layer, or all modules outside) over ranks into `.grad`."""
        assert self._reduce is not None
        self._reduce(unit, self._open)


RunChunk = Callable[[Tensor], Tensor]  # a layer on its chunk


class GraphEntry(torch.autograd.Function):
    """Autograd identity at the start of a cell's graph; its backward appends the gradient of the
    input to `sink`. The graph keeps no reference to the input, which may leave the device."""

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
class GraphInput:
    """Reference to a tensor that enters a cell's graph, and where its gradient arrives."""

    anchor: Tensor
    sink: list[Tensor]  # empty before the backward, and after it if nothing depends on the tensor


def enter(tensor: Tensor) -> tuple[Tensor, GraphInput]:
    """Return a tensor as the input of a new graph, and its `GraphInput`. Autograd must be on."""
    graph_input = GraphInput(tensor.new_zeros(0, requires_grad=True), [])
    return GraphEntry.apply(graph_input.anchor, tensor, graph_input.sink), graph_input


@dataclass(frozen=True, slots=True)
class Graph:
    """Autograd graph of a cell, from its forward to its backward."""

    out: GradientEdge
    graph_input: GraphInput  # of the layer's input
    saved: SavedActivations | None = None  # of a kept graph


def build_graph(
    run: RunChunk, hidden: Tensor, saved: SavedActivations | None = None
) -> tuple[Graph, Tensor]:
    """Run a layer and return its graph and output; `saved` (or None) takes what autograd saves."""
    with torch.enable_grad():
        entered, graph_input = enter(hidden)
        with nullcontext() if saved is None else saved.hooks():
            out = run(entered)
    return Graph(get_gradient_edge(out), graph_input, saved), out.detach()


def differentiate(
    graph: Graph,
    parameters: Sequence[Tensor],
    out_gradients: list[Tensor],
    *,
    left: Sequence[GradientEdge] = (),
    graph_inputs: Iterable[GraphInput] = (),
) -> tuple[tuple[Tensor | None, ...], Tensor]:
    """Return the gradients of a cell's weights and of its input. `out_gradients` has the gradients
    of the output and of the state tensors `left` for the next chunk; the list is emptied, so that
    autograd can free each tensor. Gradients of other inputs arrive in `graph_inputs`."""
    gradients = torch.autograd.grad(
        [graph.out, *left],
        [
            *parameters,
            graph.graph_input.anchor,
            *(graph_input.anchor for graph_input in graph_inputs),
        ],
        [out_gradients.pop(0) for _ in range(len(out_gradients))],
        allow_unused=True,
    )
    (gradient,) = graph.graph_input.sink
    return gradients[: len(parameters)], gradient


PROBE_ROWS = 16  # rows and columns of the probed product


@cache
def adds_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the device can add a product of this dtype to a wider sum in one kernel, found
    by trying one: cuBLAS can since PyTorch 2.11. False on CPUs."""
    if device.type != "cuda":
        return False  # plans count autograd's gradients there
    x = (
        torch.arange(PROBE_ROWS * PROBE_ROWS, device=device)
        .view(PROBE_ROWS, PROBE_ROWS)
        .to(dtype)
        .div_(PROBE_ROWS)
    )
    total = torch.ones(PROBE_ROWS, PROBE_ROWS, dtype=accumulate_dtype(dtype), device=device)
    expected = total + x.to(total.dtype).t() @ x.to(total.dtype)
    try:
        add_product(total, x, x, fresh=False)
    except (NotImplementedError, RuntimeError):
        return False
    # Operands up to 16 are exact in bf16; sums of 16 products may differ in order.
    eps = torch.finfo(torch.float32).eps
    return bool(((total - expected).abs() <= PROBE_ROWS * eps * expected).all())


@dataclass(slots=True)
class AccumulatingLinears(Linears):
    """Forwards of linear modules; their backwards add weight gradients directly to the sums."""

    adds: bool = True  # products add to sums; False: autograd returns the gradients
    gradients: GradientAccumulator | None = None  # of the running step
    unread: bool = False  # nothing reads the output of the running layer

    def forward_of(self, module: nn.Module) -> Callable[..., Any] | None:
        """Return a linear module's replacement forward (`hf.fused_layers.Rule`), or None if its
        class overrides nn.Linear.forward."""
        return self.forward if self.adds and _is_linear(module) else None

    def forward(self, module: nn.Linear, x: Tensor) -> Tensor:
        if not _is_trained(module, x):
            return functional.linear(x, module.weight, module.bias)
        out: Tensor = _Linear.apply(x, module.weight, module.bias, self)
        return out

    def pair(self, gate: nn.Module, up: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run the linear modules gate and up on x. Their backward adds both gradients of x in one
        tensor; autograd would write two, and their sum to a third."""
        both = (gate, up)
        if not all(self.adds and self._may_replace(m, x) and m.bias is None for m in both):
            return gate(x), up(x)
        out: tuple[Tensor, Tensor] = _Pair.apply(x, gate.weight, up.weight, self)
        return out

    def last(self, down: nn.Module, gate: Tensor, up: Tensor, act: Act) -> Any:
        """Run the MLP's last linear module. If no instruction reads the layer's output, as when the
        layer runs again only for its backward, skip the product and return NaN."""
        if not (self.unread and self._may_replace(down, gate)):
            return Linears.last(self, down, gate, up, act)
        # 29% fewer products in a 7B layer; the backward of the gate computes act(gate) * up.
        return _Unread.apply(gate, up, down.weight, down.bias, act, self)

    def _may_replace(self, module: nn.Module, x: Tensor) -> bool:
        """Return whether a module's forward may be replaced: it has no hooks, and its forward is
        that of nn.Linear or the replacement here."""
        forward = module.__dict__.get("forward")
        ours = forward is None or getattr(forward, "__func__", None) == self.forward
        hooks = (*_HOOKS, "_forward_hooks_always_called")
        bare = not any(module.__dict__.get(name) for name in hooks)
        return ours and bare and _is_linear(module) and _is_trained(module, x)

    def add(self, weight: nn.Parameter, dout: Tensor, x: Tensor) -> Tensor | None:
        """Add dout.T @ x to a weight's gradient sum or, without `adds`, return it to autograd."""
        if not self.adds:
            return dout.t() @ x
        assert self.gradients is not None, "no step runs"
        self.gradients.add_product(weight, dout, x)
        return None


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _is_linear(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward


def _is_trained(module: nn.Module, x: Tensor) -> bool:
    """Return whether the weight is a trained parameter without hooks, in the input's dtype, in
    which the product is computed."""
    weight = module._parameters.get("weight")
    if weight is None or not weight.requires_grad or weight._backward_hooks:
        return False
    return torch.is_grad_enabled() and x.dtype is weight.dtype and not casts(x.device.type)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, how: AccumulatingLinears
    ) -> Tensor:
        ctx.weight, ctx.how = weight, how  # not saved: saved tensors may be moved
        ctx.save_for_backward(x)
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        rows = _rows(dout)
        dx = (rows @ ctx.weight).view(x.shape) if ctx.needs_input_grad[0] else None
        dweight = ctx.how.add(ctx.weight, rows, _rows(x))
        return dx, dweight, rows.sum(0) if ctx.needs_input_grad[2] else None, None


class _Pair(torch.autograd.Function):
    """Autograd function of an MLP's gate and up: two linear modules without bias on one input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, first: nn.Parameter, second: nn.Parameter, how: AccumulatingLinears
    ) -> tuple[Tensor, Tensor]:
        ctx.weights, ctx.how = (first, second), how
        ctx.save_for_backward(x)
        return functional.linear(x, first), functional.linear(x, second)

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        (first, second), (one, other) = ctx.weights, map(_rows, douts)
        dweights = [ctx.how.add(w, rows, _rows(x)) for w, rows in ((first, one), (second, other))]
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (one @ first).addmm_(other, second).view(x.shape)
        return dx, *dweights, None


class _Unread(torch.autograd.Function):
    """Autograd function of an MLP's last linear module that leaves its unread output uncomputed."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        act: Act,
        how: AccumulatingLinears,
    ) -> Tensor:
        del bias
        ctx.weight, ctx.act, ctx.how = weight, act, how
        ctx.save_for_backward(gate, up)
        return gate.new_full((), torch.nan).expand(*gate.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        rows = _rows(dout)
        dx = (rows @ ctx.weight).view(gate.shape)
        x, dgate, dup = swiglu_again(dx, gate, up, ctx.act)
        del dx
        dweight = ctx.how.add(ctx.weight, rows, _rows(x))
        dbias = rows.sum(0) if ctx.needs_input_grad[3] else None
        return dgate, dup, dweight, dbias, None, None
