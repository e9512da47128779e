"""Describe a model as the planner sees it: attention and what a cell saves, layer by layer."""

import copy
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from farspan.models.boundary import Boundary, LayerCall, run_layer
from farspan.models.compiled import is_compiled, uncompiled
from farspan.models.mixing import TOKENS
from farspan.models.probe import ask_layers, probe_layers
from farspan.models.recurrent import States, with_states, zero_states
from farspan.models.refuse import refuse_model
from farspan.models.route import answering, routed
from farspan.plan.sizes import ALIGNMENT
from farspan.spec import LayerSpec, ModelSpec, Refused
from farspan.transfer.saved import SavedCell

SIZES = 4 * TOKENS, 8 * TOKENS  # of cells whose saved tensors are counted
# Scans round their tokens up to 64, or 256 at the most: a token more than a multiple of these is
# the most that a size can take.
SCANNED = 257, 513
BATCHES = 1, 2  # sequences that a scan is measured with


@torch.no_grad()
def describe(boundary: Boundary, device: torch.device | None = None) -> ModelSpec:
    """The ModelSpec of a model. Raises Refused when chunks of it cannot be exact. `device` is where
    its cells will run, if that is not where its weights are: what autograd saves differs."""
    return _described(boundary, probe_layers, device)


@torch.no_grad()
def describe_unproven(boundary: Boundary) -> ModelSpec:
    """The same of a model whose weights have the right shapes and no meaning: that chunks of it are
    exact takes numbers, and is not looked at."""
    return _described(boundary, ask_layers, None)


def _described(
    boundary: Boundary,
    attention: Callable[[Boundary], list[LayerSpec]],
    device: torch.device | None,
) -> ModelSpec:
    model = boundary.model
    # With its number, as parameters have it.
    device = boundary.device if device is None else torch.empty(0, device=device).device
    refuse_model(model)
    try:
        layers = attention(boundary)
        with routed(model):
            layers = _with_activations(boundary, layers, device)
    except Refused:
        raise
    except Exception as error:
        raise Refused(
            f"model: {type(model).__name__} cannot be run through the attention interface, stage "
            f"by stage: {_place(model, error)}{type(error).__name__}: {error}"
        ) from error
    parameters = list(model.parameters())
    return ModelSpec(
        name=getattr(model.config, "name_or_path", "") or type(model).__name__,
        hidden=boundary.width,
        vocab=boundary.vocab,
        layers=tuple(layers),
        element_bytes=boundary.dtype.itemsize,
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
    )


def _place(model: nn.Module, error: Exception) -> str:
    """Where in the family's own code, if it came so far."""
    own = getattr(sys.modules[type(model).__module__], "__file__", None)
    frames = traceback.walk_tb(error.__traceback__)
    inside = [f.f_code.co_qualname for f, _ in frames if f.f_code.co_filename == own]
    return f"in its {inside[-1]}, " if inside else ""


def _with_activations(
    boundary: Boundary, layers: list[LayerSpec], device: torch.device
) -> list[LayerSpec]:
    """What autograd saves in a cell grows linearly with its tokens: two sizes tell the line."""
    measured: dict[tuple[Any, ...], LayerSpec] = {}
    result = []
    for index, kind in enumerate(zip(boundary.kinds(), layers, strict=True)):
        if kind not in measured:
            measured[kind] = _with_line(_Measured(boundary, index, layers[index], device))
        result.append(measured[kind])
    return result


@dataclass(frozen=True, slots=True)
class _Measured:
    """A layer, and where its cells will run."""

    boundary: Boundary
    index: int
    spec: LayerSpec
    device: torch.device


def _with_line(layer: _Measured) -> LayerSpec:
    """Scans turn their tensors round, which copies them where there are several sequences."""
    batches = BATCHES if layer.spec.state else (1,)
    found = [_line(layer, batch) for batch in batches]
    return replace(
        layer.spec,
        activation_bytes=max(slope for slope, _, _ in found),
        activation_constant=max(constant for _, constant, _ in found),
        saves_input=any(saves_input for _, _, saves_input in found),
    )


def _line(layer: _Measured, batch: int) -> tuple[int, int, bool]:
    """Bytes a token and beside, of each of so many sequences; and whether the input is saved."""
    low, high = SCANNED if layer.spec.state else SIZES
    few, many = (_saved(layer, batch, tokens) for tokens in (low, high))
    slope = -(-(many.bytes - few.bytes) // (batch * (high - low)))
    # Each saved tensor is padded to an alignment line, whatever its size.
    tensors = max(few.tensors, many.tensors)
    constant = max(0, -(-few.bytes // batch) - slope * low) + ALIGNMENT * tensors
    return slope, constant, few.saves_input


@dataclass(frozen=True, slots=True)
class _Saved:
    bytes: int
    tensors: int
    saves_input: bool


def _saved(measured: _Measured, batch: int, tokens: int) -> _Saved:
    boundary, device = measured.boundary, measured.device
    width = boundary.width
    # Few positions, again and again: the model may know no more than the probe's.
    positions = torch.arange(tokens, device=boundary.device)[None] % TOKENS
    # Tokens must differ in every direction, or a router would send them to few of its experts.
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(batch, tokens, width, generator=generator)
    hidden = hidden.to(boundary.device, boundary.dtype)
    call = boundary.calls(batch, positions)[measured.index]
    layer = boundary.running[measured.index]
    if device != boundary.device:
        hidden, call = hidden.to(device), call.to(device)
        layer = copy.deepcopy(layer).to(device)
    named = {"x": hidden}

    def attention(_: nn.Module, q: Tensor, k: Tensor, v: Tensor, __: float, **___: Any) -> Tensor:
        named["out"] = _Shape.apply(q, k, v)
        return named["out"].transpose(1, 2)

    if measured.spec.state:
        states = zero_states(measured.spec.state, batch, boundary.dtype, device)
        call = with_states(call, States({n: x.requires_grad_() for n, x in states.items()}))
    cell = hidden, call, named, attention
    found = _count(layer, cell)
    if is_compiled(layer):
        # A step that is measured runs its modules as they are written, which may save more.
        with uncompiled():
            found = max(found, _count(layer, cell), key=lambda saved: saved.bytes)
    return found


def _count(
    layer: nn.Module,
    cell: tuple[Tensor, LayerCall, dict[str, Tensor], Callable[..., Tensor]],
) -> _Saved:
    hidden, call, named, attention = cell
    saved = SavedCell((*layer.parameters(), *layer.buffers()), named)
    with torch.enable_grad(), answering(attention), saved.hooks():
        out = run_layer(layer, hidden.requires_grad_(), call)
    # The graph of `out` held the saved tensors while they were counted; nothing outlives this.
    del out
    return _Saved(saved.size(), saved.count(), "x" in saved.references)


class _Shape(torch.autograd.Function):
    """Stands for attention where only what is saved matters: q is, O is somebody else's."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q)
        batch, heads, tokens, _ = q.shape
        # In memory as a cell's: some families view what attention gives.
        return (q.new_ones(batch, tokens, heads, v.shape[3]) + 0 * k.sum()).transpose(1, 2)

    @staticmethod
    def backward(_: Any, __: Tensor) -> tuple[None, None, None]:
        raise AssertionError("the probe is never differentiated")
