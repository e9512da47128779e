"""Run the token-wise modules of decoder layers, above all MLPs, on a few tokens at a time.

A module that computes each token's output from that token alone may run on tiles of T tokens. Its
forward then holds the activations of one tile; its backward recomputes a tile, differentiates it,
adds its weight gradients and frees it. Autograd saves only the module's input. If only autograd
needs the module's output, and no gradient depends on its value, the forward skips it: the module
then runs only in the backward of the tiles.

Such modules are found by running them, never by name: while a layer runs on a handful of tokens,
stand-ins observe each of its direct children. A child is worth tiles if autograd saves at least as
many bytes in it, besides its input and weights, as its output has: an MLP, experts, an RMSNorm; not
a linear module, an activation or torch's LayerNorm, which would be recomputed for nothing. If such
a child is not a function of each token alone, tiles are refused.

The model is not changed: a layer runs in a shell (see `stages`), which is dropped after the step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from farspan.activations import SavedActivations
from farspan.attention.backends import reference
from farspan.hf.attention_interface import answering, attended, eager_experts, routed
from farspan.hf.compiled import uncompiled
from farspan.hf.dropout import Adjoint, Draws, TokenRange, still
from farspan.hf.probe import CUT, MIXING, TOKENS, cast_call, distance
from farspan.hf.quantized import copied
from farspan.hf.stages import CausalLMStages, LayerCall, run_layer
from farspan.hf.swap import StandIn, shell_of
from farspan.spec import UnsupportedError

# Adds a tile's weight gradients in the accumulate dtype.
Add = Callable[[Sequence[nn.Parameter], Sequence[Tensor | None]], None]


@dataclass(frozen=True, slots=True)
class Tokenwise:
    """A child of a decoder layer that computes each token on its own."""

    name: str
    outputs: int | None  # length of a returned tuple, of which only the first is used
    needed: bool  # whether some gradient of the layer depends on its output's value


def tiled(
    layer: nn.Module,
    children: Sequence[Tokenwise],
    tokens: int,
    add: Add,
    *,
    value: bool,
    draws: Draws | None = None,
) -> nn.Module:
    """Return a shell of the layer whose token-wise children run on tiles of `tokens` tokens;
    shorter chunks run whole. `value` says whether the layer's output is read; if not, children on
    whose output no gradient depends return NaN, so that any use shows."""
    draws = draws or Draws(0, 0, 0, 0)
    return shell_of(
        layer,
        {
            child.name: _TiledModule(
                layer.get_submodule(child.name), child, tokens, add, value or child.needed, draws
            )
            for child in children
        },
    )


class _TiledModule(StandIn):
    """Stand-in for a token-wise module that runs it tile by tile."""

    def __init__(
        self,
        module: nn.Module,
        child: Tokenwise,
        tokens: int,
        add: Add,
        value: bool,
        draws: Draws,
    ):
        super().__init__(module)
        self._child, self._tokens, self._add, self._value = child, tokens, add, value
        self.draws = draws

    def forward(self, x: Tensor) -> Any:
        if x.shape[1] <= self._tokens:
            return self._module(x)
        out = _Tiled.apply(x, self) if torch.is_grad_enabled() else self.whole(x)
        outputs = self._child.outputs
        return out if outputs is None else (out, *[None] * (outputs - 1))

    def answer(self, x: Tensor) -> Tensor:
        """Return the module's output, or NaN in the shape of x if its value is not needed."""
        return self.whole(x) if self._value else blank(x)

    def whole(self, x: Tensor) -> Tensor:
        """Run the module tile by tile on x, [batch, tokens, hidden], without autograd."""
        out: Tensor | None = None
        for span in self._spans(x, self.draws.place):
            part = self._first(x[:, span].contiguous())
            if out is None:
                out = part.new_empty(*x.shape[:2], *part.shape[2:])
            out[:, span] = part
        assert out is not None
        return out

    def gradient(self, x: Tensor, dout: Tensor, place: TokenRange) -> Tensor:
        """Return the gradient of x, and add up the weights' gradients tile by tile. `place` is x's
        range of tokens in the sequence, so that dropout repeats its random numbers."""
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        dx = torch.empty_like(x)
        for span in self._spans(x, place):
            dx[:, span] = self._differentiate(x, dout, span, parameters)
        return dx

    def _differentiate(
        self, x: Tensor, dout: Tensor, span: slice, parameters: list[nn.Parameter]
    ) -> Tensor:
        # Modules may view rows of several sequences as one, so a tile must be contiguous like a
        # chunk.
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

    def _spans(self, x: Tensor, place: TokenRange) -> Iterator[slice]:
        """Yield the range of x's tokens in each tile, and set dropout's random numbers to those of
        this range. `place` is the range of all of x."""
        tokens = x.shape[1]
        for start in range(0, tokens, self._tokens):
            stop = min(start + self._tokens, tokens)
            self.draws.at(place.part(start, stop))
            yield slice(start, stop)
        self.draws.at(place)


def blank(like: Tensor) -> Tensor:
    """Return a tensor of NaN in the shape of another, which takes the memory of one element."""
    return like.new_full((), torch.nan).expand(like.shape)


class _Tiled(torch.autograd.Function):
    """Autograd function of a token-wise module that saves only the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: _TiledModule) -> Tensor:
        ctx.module, ctx.place = module, module.draws.place
        ctx.save_for_backward(x)
        return module.answer(x)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.module.gradient(x, dout, ctx.place), None


# -- modules that may run on tiles --------------------------------------------------------------


TILE = 3  # tokens in the probe: TOKENS are two tiles and a smaller one
OFF = "leave mlp_chunk_size out"


@dataclass(slots=True)
class _ChildUse:
    """Observations of one child of a layer, made while the layer ran on a few tokens."""

    calls: int = 0
    attends: bool = False
    arguments: tuple[Any, ...] = ()
    out: Any = None
    saved: int = 0  # bytes, without input and weights
    read: bool = False  # autograd saves its output within another child


def tokenwise(stages: CausalLMStages) -> tuple[tuple[Tokenwise, ...], ...]:
    """Return, by layer, the children that may run on tiles of tokens. Raises UnsupportedError if a
    child with many activations may not, or if a layer has no such child."""
    with uncompiled(), routed(stages.model), still(stages.model), torch.no_grad():
        return tuple(stages.for_each_kind(lambda index: _Probe(stages, index).run()))


def likely_tokenwise(stages: CausalLMStages) -> tuple[tuple[Tokenwise, ...], ...]:
    """Return, by layer, the children that probably may run on tiles of tokens. A model without
    values allows no proof: a child counts as `needed` if autograd saves its output."""

    def find(index: int) -> tuple[Tokenwise, ...]:
        outputs: dict[str, Tensor] = {}
        saved = SavedActivations((), outputs)
        with saved.hooks(), still(stages.model):
            seen = _Probe(stages, index).watch(stages.layers[index], outputs)
        return tuple(
            Tokenwise(
                name,
                len(child.out) if isinstance(child.out, tuple) else None,
                child.read or name in saved.references,
            )
            for name, child in seen.items()
            if _is_worth(child)
        )

    return tuple(stages.for_each_kind(find))


@dataclass(slots=True)
class _Probe:
    """Check of one layer on random hidden states: which of its children may run on tiles."""

    stages: CausalLMStages
    index: int
    hidden: Tensor = field(init=False)
    call: LayerCall = field(init=False)

    def __post_init__(self) -> None:
        stages, generator = self.stages, torch.Generator().manual_seed(0)
        hidden = torch.randn(1, TOKENS, stages.width, generator=generator)
        self.hidden = hidden.to(stages.device, stages.dtype)
        positions = torch.arange(TOKENS, device=stages.device)[None]
        self.call = stages.calls(1, positions)[self.index]

    def run(self) -> tuple[Tokenwise, ...]:
        layer, dtype = self.stages.layers[self.index], self.stages.dtype
        seen = self.watch(layer, {})
        worth = {name: child for name, child in seen.items() if _is_worth(child)}
        # Rounding must not hide a dependence, nor look like a router's other choice.
        wide = copied(layer, self.stages.device)
        wide = wide.to(dtype if dtype in MIXING else torch.float32)
        with eager_experts(wide):
            for name, child in worth.items():
                self._refuse(name, _why_not_tokenwise(wide.get_submodule(name), child))
            if not worth:
                self._refuse("", "no module in it works token by token and saves enough memory")
            return self._needs(wide, worth)

    def _refuse(self, name: str, why: str | None) -> None:
        if why is not None:
            what = f".{name}" if name else ""
            kind = type(self.stages.model).__name__
            raise UnsupportedError(
                f"mlp_chunk_size: layer {self.index}{what} of {kind} cannot run on a few tokens at "
                f"a time: {why}; {OFF}"
            )

    def watch(self, layer: nn.Module, outputs: dict[str, Tensor]) -> dict[str, _ChildUse]:
        """Run the layer on a few tokens; return, by child, its calls, output and saved bytes. Empty
        if the layer's forward was replaced, since that may bypass stand-ins for children."""
        log: dict[str, _ChildUse] = {}
        if "forward" in layer.__dict__:
            return log
        inside: list[str] = []
        watched = {
            name: _Watch(name, child, log, inside, outputs)
            for name, child in layer.named_children()
            if type(child).forward is not nn.Module.forward  # a container does not run
        }
        shell = shell_of(layer, watched)

        def attend(*arguments: Any, **keywords: Any) -> Tensor:
            for name in inside:
                log[name].attends = True
            return answer_densely(*arguments, **keywords)

        with torch.enable_grad(), answering(attend):
            run_layer(shell, self.hidden.detach().requires_grad_(), self.call)
        return log

    def _needs(self, wide: nn.Module, worth: dict[str, _ChildUse]) -> tuple[Tokenwise, ...]:
        """Return, for each child worth tiling (`worth`), whether some gradient depends on the
        values of its output. Raises UnsupportedError if tiles change a gradient."""
        with torch.enable_grad():
            plain = self._gradients(wide, wide)
            children = []
            for name, child in worth.items():
                outputs = len(child.out) if isinstance(child.out, tuple) else None
                alike = _first_of(child.out).shape == child.arguments[0].shape
                alike = alike and _first_of(child.out).dtype is child.arguments[0].dtype
                shell = shell_of(wide, {name: _BlankOut(wide.get_submodule(name), outputs)})
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
        """Return the gradients of the layer's input and weights. `shell` is what runs: the layer
        itself, or a copy that shares its weights and replaces some children."""
        dtype = next(layer.parameters()).dtype
        hidden = self.hidden.to(dtype).detach().requires_grad_()
        parameters = [p for p in layer.parameters() if p.requires_grad]
        with answering(answer_densely):
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

    def _same(self, actual: list[Tensor | None], plain: list[Tensor | None]) -> bool:
        limit = MIXING[next(p.dtype for p in plain if p is not None)]
        whole = sum(float(p.double().norm()) ** 2 for p in plain if p is not None) ** 0.5
        for ours, theirs in zip(actual, plain, strict=True):
            if ours is None or theirs is None:
                if ours is not theirs:
                    return False
                continue
            # A gradient of rounding noise alone is compared with the norm of all.
            error = float((ours.double() - theirs.double()).norm())
            if not error <= limit * max(float(theirs.double().norm()), limit * whole):
                return False
        return True


class _Watch(StandIn):
    """Stand-in for a child that records the child's call and the tensors that autograd saves."""

    def __init__(
        self,
        name: str,
        child: nn.Module,
        log: dict[str, _ChildUse],
        inside: list[str],
        outputs: dict[str, Tensor],
    ):
        super().__init__(child)
        self._name, self._log, self._inside, self._outputs = name, log, inside, outputs

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        child: nn.Module = self._module
        seen = self._log.setdefault(self._name, _ChildUse())
        given = [x for x in (*arguments, *keywords.values()) if isinstance(x, Tensor)]
        named = self._outputs | {str(number): x for number, x in enumerate(given)}
        saved = SavedActivations((*child.parameters(), *child.buffers()), named)
        self._inside.append(self._name)
        with saved.hooks():
            out = child(*arguments, **keywords)
        self._inside.pop()
        for name in saved.references & self._outputs.keys():
            self._log[name].read = True
        seen.calls += 1
        seen.arguments, seen.out = (*arguments, *keywords.values()), out
        seen.saved += saved.size()
        if isinstance(_first_of(out), Tensor):
            self._outputs[self._name] = _first_of(out)
        return out


def _is_worth(child: _ChildUse) -> bool:
    out = _first_of(child.out)
    return not child.attends and isinstance(out, Tensor) and child.saved >= out.nbytes


def _first_of(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


def _why_not_tokenwise(module: nn.Module, seen: _ChildUse) -> str | None:
    """Return why a child does not compute each token on its own; None if it does."""
    if seen.calls != 1:
        return f"it is called {seen.calls} times"
    if len(seen.arguments) != 1 or not isinstance(seen.arguments[0], Tensor):
        return "it has inputs other than the hidden states"
    x = seen.arguments[0].detach()
    if x.ndim < 3 or _first_of(seen.out).shape[:2] != x.shape[:2]:
        return "its output is not [batch, tokens, ...]"
    x = x.to(next((p.dtype for p in module.parameters()), x.dtype))
    state = {name: value.clone() for name, value in module.state_dict().items()}
    whole, again = _first_of(module(x)), _first_of(module(x))
    pieces = [_first_of(module(x[:, start:stop])) for start, stop in pairwise((0, CUT, TOKENS))]
    turned = _first_of(module(x.flip(1))).flip(1)
    limit = MIXING.get(x.dtype, MIXING[torch.float32])
    if not distance(again, whole) <= limit or any(
        not torch.equal(value, state[name]) for name, value in module.state_dict().items()
    ):
        return "it has a state that changes as it runs"
    if not all(distance(x, whole) <= limit for x in (torch.cat(pieces, 1), turned)):
        return "it mixes tokens"
    return None


class _BlankOut(StandIn):
    """Stand-in for a child that returns NaN for its output."""

    def __init__(self, module: nn.Module, outputs: int | None):
        super().__init__(module)
        self._outputs = outputs

    def forward(self, x: Tensor) -> Any:
        out = Adjoint.apply(_first_of(self._module(x)), blank, lambda dout: dout)
        return out if self._outputs is None else (out, *[None] * (self._outputs - 1))


def _adder(total: dict[nn.Parameter, Tensor]) -> Any:
    def add(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                before = total.get(parameter)
                total[parameter] = gradient.clone() if before is None else before + gradient

    return add


def answer_densely(
    _: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, **keywords: Any
) -> Tensor:
    return attended(reference, q, k, v, scale, keywords)
