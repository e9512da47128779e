"""Find the modules of decoder layers that work token by token and are worth running on tiles.

By running them, never by name: every direct child of a layer is watched while the layer runs on a
handful of tokens. A child is worth tiles when autograd saves at least as much of it, besides its
input and weights, as its output has bytes: an MLP, experts, an RMSNorm; not a linear module, an
activation or torch's LayerNorm, which would be recomputed for nothing. Where such a child is not a
function of each token alone, tiles are refused.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from farspan.attention.reference import reference
from farspan.models.boundary import Boundary, LayerCall, copy_module, run_layer
from farspan.models.compiled import uncompiled
from farspan.models.experts import eager_experts
from farspan.models.mixing import CUT, MIXING, TOKENS, cast_call, distance
from farspan.models.route import answering, routed
from farspan.models.tiles import Tokenwise, blank, tiled
from farspan.spec import Refused
from farspan.transfer.saved import SavedCell

TILE = 3  # of the probe: TOKENS are two tiles and a smaller one
OFF = "leave mlp_tokens out"


@dataclass(slots=True)
class _Seen:
    """What a child was seen to do."""

    calls: int = 0
    attends: bool = False
    arguments: tuple[Any, ...] = ()
    out: Any = None
    saved: int = 0  # bytes, besides input and weights


def tokenwise(boundary: Boundary) -> tuple[tuple[Tokenwise, ...], ...]:
    """The children of each layer that may run on tiles. Raises Refused where one that matters may
    not, or a layer has none."""
    known: dict[Any, tuple[Tokenwise, ...]] = {}
    found = []
    with uncompiled(), routed(boundary.model), torch.no_grad():
        for index, kind in enumerate(boundary.kinds()):
            if kind not in known:
                known[kind] = _Probe(boundary, index).run()
            found.append(known[kind])
    return tuple(found)


@dataclass(slots=True)
class _Probe:
    """One layer, on random hidden states."""

    boundary: Boundary
    index: int
    hidden: Tensor = field(init=False)
    call: LayerCall = field(init=False)

    def __post_init__(self) -> None:
        boundary, generator = self.boundary, torch.Generator().manual_seed(0)
        hidden = torch.randn(1, TOKENS, boundary.width, generator=generator)
        self.hidden = hidden.to(boundary.device, boundary.dtype)
        positions = torch.arange(TOKENS, device=boundary.device)[None]
        self.call = boundary.calls(1, positions)[self.index]

    def run(self) -> tuple[Tokenwise, ...]:
        layer, dtype = self.boundary.layers[self.index], self.boundary.dtype
        seen = self._watch(layer)
        worth = {name: child for name, child in seen.items() if _is_worth(child)}
        # Rounding must not hide a dependence, nor a router's choice look like one.
        wide = copy.deepcopy(layer).to(dtype if dtype in MIXING else torch.float32)
        with eager_experts(wide):
            for name, child in worth.items():
                self._refuse(name, _objection(wide.get_submodule(name), child))
            if not worth:
                self._refuse("", "it has no module that works token by token and saves more")
            return self._needs(wide, worth)

    def _refuse(self, name: str, why: str | None) -> None:
        if why is not None:
            what = f".{name}" if name else ""
            kind = type(self.boundary.model).__name__
            raise Refused(
                f"mlp_tokens: layer {self.index}{what} of {kind} cannot run on a few tokens at a "
                f"time: {why}; {OFF}"
            )

    def _watch(self, layer: nn.Module) -> dict[str, _Seen]:
        """Run the layer, and see what its children do."""
        log: dict[str, _Seen] = {}
        inside: list[str] = []
        shell = copy_module(layer)
        for name, child in layer.named_children():
            # A container is no module that runs.
            if type(child).forward is not nn.Module.forward:
                shell._modules[name] = _Watch(name, child, log, inside)

        def attend(*arguments: Any, **keywords: Any) -> Tensor:
            for name in inside:
                log[name].attends = True
            return dense(*arguments, **keywords)

        with torch.enable_grad(), answering(attend):
            run_layer(shell, self.hidden.detach().requires_grad_(), self.call)
        return log

    def _needs(self, wide: nn.Module, worth: dict[str, _Seen]) -> tuple[Tokenwise, ...]:
        """Whose output's value gradients depend on; and that tiles change nothing."""
        with torch.enable_grad():
            plain = self._gradients(wide, wide)
            children = []
            for name, child in worth.items():
                outputs = len(child.out) if isinstance(child.out, tuple) else None
                alike = _first(child.out).shape == child.arguments[0].shape
                alike = alike and _first(child.out).dtype is child.arguments[0].dtype
                with _blanked(wide, name, outputs) as shell:
                    needed = not alike or not self._same(self._gradients(wide, shell), plain)
                children.append(Tokenwise(name, outputs, needed))
            total: dict[nn.Parameter, Tensor] = {}
            shell = tiled(wide, children, TILE, _adder(total), value=False)
            found = self._gradients(wide, shell, total)
        if not self._same(found, plain):
            self._refuse("", "its gradients change")
        return tuple(children)

    def _gradients(
        self,
        layer: nn.Module,
        shell: nn.Module,
        total: dict[nn.Parameter, Tensor] | None = None,
    ) -> list[Tensor | None]:
        """Of the layer's input and weights, run in a shell of it."""
        dtype = next(layer.parameters()).dtype
        hidden = self.hidden.to(dtype).detach().requires_grad_()
        parameters = [p for p in layer.parameters() if p.requires_grad]
        with answering(dense):
            out = run_layer(shell, hidden, cast_call(self.call, dtype))
        towards = torch.sin(torch.arange(out.numel(), device=out.device)).to(out.dtype)
        inputs = [hidden, *parameters]
        found: list[Tensor | None] = list(
            torch.autograd.grad(out, inputs, towards.view(out.shape), allow_unused=True)
        )
        for place, parameter in enumerate(parameters, 1):
            apart = None if total is None else total.get(parameter)
            if apart is not None:
                own = found[place]
                found[place] = apart if own is None else own + apart
        return found

    def _same(self, found: list[Tensor | None], plain: list[Tensor | None]) -> bool:
        limit = MIXING[next(p.dtype for p in plain if p is not None)]
        whole = sum(float(p.double().norm()) ** 2 for p in plain if p is not None) ** 0.5
        for ours, theirs in zip(found, plain, strict=True):
            if ours is None or theirs is None:
                if ours is not theirs:
                    return False
                continue
            # A gradient that is zero but for rounding is compared with all of them.
            error = float((ours.double() - theirs.double()).norm())
            if not error <= limit * max(float(theirs.double().norm()), limit * whole):
                return False
        return True


class _Watch(nn.Module):
    """Stands in a child's place, and writes down how it is called and what autograd saves."""

    def __init__(self, name: str, child: nn.Module, log: dict[str, _Seen], inside: list[str]):
        super().__init__()
        object.__setattr__(self, "_child", child)
        self._name, self._log, self._inside = name, log, inside

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_child"), name)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        child: nn.Module = self._child
        seen = self._log.setdefault(self._name, _Seen())
        given = [x for x in (*arguments, *keywords.values()) if isinstance(x, Tensor)]
        named = {str(number): x for number, x in enumerate(given)}
        saved = SavedCell((*child.parameters(), *child.buffers()), named)
        self._inside.append(self._name)
        with saved.hooks():
            out = child(*arguments, **keywords)
        self._inside.pop()
        seen.calls += 1
        seen.arguments, seen.out = (*arguments, *keywords.values()), out
        seen.saved += saved.size()
        return out


def _is_worth(child: _Seen) -> bool:
    out = _first(child.out)
    return not child.attends and isinstance(out, Tensor) and child.saved >= out.nbytes


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


def _objection(module: nn.Module, seen: _Seen) -> str | None:
    """Why a child is no function of each token alone."""
    if seen.calls != 1:
        return f"it is called {seen.calls} times"
    if len(seen.arguments) != 1 or not isinstance(seen.arguments[0], Tensor):
        return "it is given more than the tokens"
    x = seen.arguments[0].detach()
    if x.ndim < 3 or _first(seen.out).shape[:2] != x.shape[:2]:
        return "what it gives is not [batch, tokens, ...]"
    x = x.to(next((p.dtype for p in module.parameters()), x.dtype))
    state = {name: value.clone() for name, value in module.state_dict().items()}
    whole, again = _first(module(x)), _first(module(x))
    pieces = [_first(module(x[:, start:stop])) for start, stop in pairwise((0, CUT, TOKENS))]
    turned = _first(module(x.flip(1))).flip(1)
    limit = MIXING.get(x.dtype, MIXING[torch.float32])
    if not distance(again, whole) <= limit or any(
        not torch.equal(value, state[name]) for name, value in module.state_dict().items()
    ):
        return "it has a state that changes as it runs"
    if not all(distance(x, whole) <= limit for x in (torch.cat(pieces, 1), turned)):
        return "it mixes tokens"
    return None


@contextmanager
def _blanked(layer: nn.Module, name: str, outputs: int | None) -> Iterator[nn.Module]:
    """A shell of the layer in which the value of a child's output is NaN."""
    shell = copy_module(layer)
    shell._modules[name] = _BlankOut(layer.get_submodule(name), outputs)
    yield shell


class _BlankOut(nn.Module):
    def __init__(self, module: nn.Module, outputs: int | None):
        super().__init__()
        object.__setattr__(self, "_module", module)
        self._outputs = outputs

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_module"), name)

    def forward(self, x: Tensor) -> Any:
        out = _Blank.apply(_first(self._module(x)))
        return out if self._outputs is None else (out, *[None] * (self._outputs - 1))


class _Blank(torch.autograd.Function):
    """Forgets a value and lets its gradient through."""

    @staticmethod
    def forward(_: Any, out: Tensor) -> Tensor:
        return blank(out)

    @staticmethod
    def backward(_: Any, dout: Tensor) -> Tensor:
        return dout


def _adder(total: dict[nn.Parameter, Tensor]) -> Any:
    def add(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                before = total.get(parameter)
                total[parameter] = gradient.clone() if before is None else before + gradient

    return add


def dense(_: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, **keywords: Any) -> Tensor:
    """Answers an attention call over the keys that come with it."""
    out = reference(
        *(q, k, v),
        scale=scale,
        window=keywords.get("sliding_window"),
        softcap=keywords.get("softcap"),
        sinks=keywords.get("s_aux"),
    )
    return out.transpose(1, 2)
