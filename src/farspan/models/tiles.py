"""Decoder layers whose token-wise modules run on a few tokens at a time.

A module that gives each token's output from that token alone may run on tiles of T tokens. Its
forward then holds the activations of one tile; its backward recomputes a tile, differentiates it,
hands over its weight gradients and frees it. What autograd saves of the module is its input.

Where nothing reads the module's output but autograd, and no gradient depends on its value, it is
not computed: the tiles' backward is then the only time the module runs, and costs what a forward
and a backward over the whole chunk did.

Nothing of the model is changed. A layer runs in a shell, a shallow copy with stand-ins for these
modules (see `boundary`), which is thrown away with the step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from farspan.models.boundary import copy_module

# Takes weight gradients of a tile: adds them in the accumulate dtype.
Add = Callable[[Sequence[nn.Parameter], Sequence[Tensor | None]], None]


@dataclass(frozen=True, slots=True)
class Tokenwise:
    """A direct child of a decoder layer that works token by token."""

    name: str
    outputs: int | None  # of a module that returns a tuple; of it only the first is used
    needed: bool  # some gradient of the layer depends on the value of its output


def tiled(
    layer: nn.Module, children: Sequence[Tokenwise], tokens: int, add: Add, *, value: bool
) -> nn.Module:
    """The layer's shell for cells of more than `tokens` tokens; smaller ones run as they are.

    `value`: the layer's output is read, not only differentiated. Otherwise what no gradient needs
    is NaN, so that whoever reads it is found out.
    """
    shell = copy_module(layer)
    for child in children:
        module = layer.get_submodule(child.name)
        computed = value or child.needed
        shell._modules[child.name] = _StandIn(module, child, tokens, add, computed)
    return shell


class _StandIn(nn.Module):
    """Stands in a token-wise module's place in a shell."""

    def __init__(self, module: nn.Module, child: Tokenwise, tokens: int, add: Add, value: bool):
        super().__init__()
        object.__setattr__(self, "_module", module)
        self._child, self._tokens, self._add, self._value = child, tokens, add, value

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_module"), name)

    def forward(self, x: Tensor) -> Any:
        if x.shape[1] <= self._tokens:
            return self._module(x)
        out = _Tiled.apply(x, self) if torch.is_grad_enabled() else self.whole(x)
        outputs = self._child.outputs
        return out if outputs is None else (out, *[None] * (outputs - 1))

    def answer(self, x: Tensor) -> Tensor:
        """What the graph of a cell is given."""
        return self.whole(x) if self._value else blank(x)

    def whole(self, x: Tensor) -> Tensor:
        """[B, C, h], tile by tile."""
        out: Tensor | None = None
        for span in self._spans(x):
            part = self._first(x[:, span].contiguous())
            if out is None:
                out = part.new_empty(*x.shape[:2], *part.shape[2:])
            out[:, span] = part
        assert out is not None
        return out

    def gradient(self, x: Tensor, dout: Tensor) -> Tensor:
        """The gradient of x; those of the weights are handed over tile by tile."""
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        dx = torch.empty_like(x)
        for span in self._spans(x):
            dx[:, span] = self._differentiate(x, dout, span, parameters)
        return dx

    def _differentiate(
        self, x: Tensor, dout: Tensor, span: slice, parameters: list[nn.Parameter]
    ) -> Tensor:
        # Modules may view rows of several sequences as one: what a whole chunk is, a tile must be.
        tile = x[:, span].contiguous().detach().requires_grad_()
        with torch.enable_grad():
            out = self._first(tile)
        wanted = [tile, *parameters]
        towards = dout[:, span].contiguous()
        dx, *found = torch.autograd.grad(out, wanted, towards, allow_unused=True)
        self._add(parameters, found)
        return dx

    def _first(self, x: Tensor) -> Tensor:
        out = self._module(x)
        return out if self._child.outputs is None else out[0]

    def _spans(self, x: Tensor) -> list[slice]:
        tokens = x.shape[1]
        return [slice(s, min(s + self._tokens, tokens)) for s in range(0, tokens, self._tokens)]


def blank(like: Tensor) -> Tensor:
    """One NaN, as large as another tensor."""
    return like.new_full((), torch.nan).expand(like.shape)


class _Tiled(torch.autograd.Function):
    """A token-wise module of which autograd keeps the input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: _StandIn) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return module.answer(x)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.module.gradient(x, dout), None
