"""Pass the cache states of Hugging Face's recurrent layers from chunk to chunk in training.

A recurrent layer (linear attention, a state-space or short convolution) reads and writes a cache: a
convolution's last inputs, a recurrence's state. `RecurrentStates` replaces that cache for one layer
and one piece of a sequence. No tensor changes in place, so gradients flow from the states after a
piece back to the states before it. Families of transformers 5.17 call the cache's layers, those of
5.23 the cache; both interfaces exist here.

Some families' code takes no state for several tokens, or keeps states in its modules. `continued`
gives those modules other forwards for a piece.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from farspan.hf.stages import LayerCall, run_layer
from farspan.hf.swap import Part, forwards, put_in, shell_of
from farspan.spec import StateTensor, UnsupportedError

CONV, RECURRENT = "conv", "recurrent"


class _Known(Exception):
    """Exception that stops a layer once all wanted states are stored: no output is needed."""


@dataclass(slots=True)
class RecurrentStates:
    """Cache of a recurrent layer's states, by kind and index: `conv.0`, `recurrent.0`."""

    before: Mapping[str, Tensor] = field(default_factory=dict)  # empty: a sequence begins
    wanted: frozenset[str] = frozenset()  # names after which to stop; empty: run to the end
    attends: bool = False  # the layer also calls transformers' attention interface
    after: dict[str, Tensor] = field(default_factory=dict)

    def until_known(self, wanted: frozenset[str], run: Callable[[], Tensor]) -> None:
        """Run the layer by `run`, and stop it as soon as it has stored all `wanted` states."""
        self.wanted = wanted
        with suppress(_Known):
            run()

    # -- the interface of transformers.Cache -----------------------------------------------------

    def get_conv_state(self, _: int, state_idx: int = 0) -> Tensor | None:
        return self.before.get(f"{CONV}.{state_idx}")

    def get_recurrent_state(self, _: int, state_idx: int = 0) -> Tensor | None:
        return self.before.get(f"{RECURRENT}.{state_idx}")

    def has_previous_state(self, *_: int, **__: int) -> bool:
        return bool(self.before)

    def is_recording_past(self, _: int) -> bool:
        return False

    def get_seq_length(self, *_: int) -> int:
        return 0

    @property
    def layers(self) -> Any:
        return _Layers(self)

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,  # noqa: ARG002 - families pass it by name
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> Tensor:
        """Return a convolution's inputs, [batch, channels, T], preceded by those that were kept
        from earlier tokens, and store its state: the last inputs."""
        earlier = self.before.get(f"{CONV}.{state_idx}")
        size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        if earlier is not None:
            size = earlier.shape[-1]
            whole = torch.cat([earlier.to(conv_states.dtype), conv_states], dim=-1)
        else:
            missing = max(0, size - conv_states.shape[-1])
            whole = nn.functional.pad(conv_states, (missing, 0))
        self._know(f"{CONV}.{state_idx}", whole[..., -size:])
        return whole

    def update_recurrent_state(
        self,
        recurrent_states: Tensor,
        layer_idx: int,  # noqa: ARG002 - families pass it by name
        state_idx: int = 0,
    ) -> Tensor:
        """Store the state that a recurrence leaves after its last token."""
        self._know(f"{RECURRENT}.{state_idx}", recurrent_states)
        return recurrent_states

    def get_linear_cache(self, _: int) -> None:
        """Return None to MiniMax's linear attention, which would run token by token otherwise."""

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.update_recurrent_state(linear_cache, layer_idx)

    def update(self, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self.attends:
            return k, v
        raise UnsupportedError(
            "model: one of its layers caches K and V, but computes attention in code of its own; "
            "expected layers that call transformers' attention interface"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedError(
            f"model: one of its layers asks its cache for {name!r}; expected only the states of "
            "convolutions and recurrences"
        )

    def _know(self, name: str, state: Tensor) -> None:
        self.after[name] = state
        if self.wanted and self.wanted <= self.after.keys():
            raise _Known


@dataclass(frozen=True, slots=True)
class _Layers:
    """Layers of a cache, for families that index it; every index gives the same states."""

    states: RecurrentStates

    def __getitem__(self, _: int) -> Any:
        before = self.states.before

        def of(kind: str) -> dict[int, Tensor]:
            return {int(name.split(".")[1]): x for name, x in before.items() if kind in name}

        return SimpleNamespace(
            conv_states=of(CONV), recurrent_states=of(RECURRENT), record_past=False
        )


def with_states(call: LayerCall, states: RecurrentStates) -> LayerCall:
    """Return a layer's call with `states` as its cache."""
    return replace(call, keywords={**call.keywords, **dict.fromkeys(call.caches, states)})


def run_piece(layer: nn.Module, hidden: Tensor, call: LayerCall, states: RecurrentStates) -> Tensor:
    """Run a recurrent layer on some tokens of a sequence, [batch, tokens, hidden]. Model families
    treat a single token after others as generation, with code that changes states in place and
    rounds differently. So such a token runs as two, with a copy after it: the states after it are
    not valid, and `call` must be for 2 tokens (see `takes_two`)."""
    with put_in(continued(layer, states)):
        if not takes_two(hidden.shape[1], states.before):
            return run_layer(layer, hidden, with_states(call, states))
        return run_layer(layer, hidden.expand(-1, 2, -1), with_states(call, states))[:, :1]


def mixers(layer: nn.Module) -> list[nn.Module]:
    """Return the modules of a layer that leave a state in its cache, by the names in their code."""
    return [m for m in layer.modules() if "update_recurrent_state" in _names(_forward(m))]


def run_mixer(
    mixer: nn.Module,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    rows: slice,
    tokens: slice,
    states: RecurrentStates,
) -> Tensor:
    """Run a mixer of a layer that also attends on a part of its tokens; a single token after others
    runs as two (see `run_piece`). `given` are the arguments for all tokens, [B, C, ...], with the
    layer's cache among them."""
    two = takes_two(tokens.stop - tokens.start, states.before)

    def part(x: Any) -> Any:
        if isinstance(x, RecurrentStates):
            return states
        if not isinstance(x, Tensor):
            return x
        x = x[rows, tokens]
        return x.expand(-1, 2, *x.shape[2:]) if two else x

    arguments, keywords = tree_map(part, given)
    # The mixer's own attribute, set by who calls this, would call this again.
    others = [forward for _, _, forward in continued(mixer, states)]
    forward = others[0] if others else MethodType(type(mixer).forward, mixer)
    out: Tensor = forward(*arguments, **keywords)
    return out[:, :1] if two else out


def takes_two(tokens: int, before: Mapping[str, Tensor]) -> bool:
    """Return whether the tokens are a single one after others, to be run as two."""
    return tokens == 1 and bool(before)


def state_spec(states: Mapping[str, Tensor]) -> tuple[StateTensor, ...]:
    """Return a description of the states that a layer passes on, ordered by name."""
    return tuple(
        StateTensor(name, tuple(states[name].shape[1:]), states[name].element_size())
        for name in sorted(states)
    )


def state_dtype(state: StateTensor, model: torch.dtype) -> torch.dtype:
    widths = {4: torch.float32, 8: torch.float64}
    return model if state.element_bytes == model.itemsize else widths[state.element_bytes]


def zero_states(
    spec: tuple[StateTensor, ...], batch: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Return states of zeros, with which a layer runs as if after an earlier chunk."""
    return {
        s.name: torch.zeros(batch, *s.shape, dtype=state_dtype(s, dtype), device=device)
        for s in spec
    }


# -- modules that take no state through a cache -------------------------------------------------

SCAN = "mamba_selective_scan"  # in transformers 5.16 to 5.24; Mamba 2's has another signature


def continued(layer: nn.Module, states: RecurrentStates) -> Iterator[Part]:
    """Yield forwards, for `put_in`, that begin with `states`, of modules that take none from a
    cache."""
    state = states.before.get(f"{RECURRENT}.0")
    for module in layer.modules():
        forward = _forward(module)
        names = _names(forward)
        if "rg_lru" in names:
            yield from _griffin(module, states)
        elif state is not None and SCAN in names:
            scan = forward.__globals__[SCAN]
            # Zamba scans its heads one after another, [B, heads, channels, N]; others have one.
            heads = state.unbind(1) if state.ndim == 4 else (state,)
            yield _with_globals(module, forward, {SCAN: _continued_scan(scan, iter(heads))})
        elif state is not None and "get_linear_cache" in names:
            yield _with_globals(module, forward, {"torch": _BeginningWith(state)})


def _forward(module: nn.Module) -> Any:
    """Return the forward of a module's class, without decorators."""
    return inspect.unwrap(type(module).forward)


def _names(function: Any) -> tuple[str, ...]:
    """Return the names of globals and attributes in a function's code."""
    return getattr(getattr(function, "__code__", None), "co_names", ())


def _with_globals(module: nn.Module, forward: Any, names: dict[str, Any]) -> Part:
    """Return a module's own forward with some of its global names replaced."""
    own = FunctionType(
        forward.__code__,
        {**forward.__globals__, **names},
        argdefs=forward.__defaults__,
        closure=forward.__closure__,
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    return next(forwards({module: MethodType(own, module)}))


@dataclass(frozen=True, slots=True)
class _BeginningWith:
    """Stand-in for `torch` in MiniMax's linear attention, in which `zeros` gives a saved state."""

    state: Tensor

    def zeros(self, *_: Any, **__: Any) -> Tensor:
        return self.state

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _griffin(block: Any, states: RecurrentStates) -> Iterator[Part]:
    """Yield forwards for the convolution and the recurrence of a RecurrentGemma block, which keeps
    their states as attributes, and reads them for a single token only."""
    convolve, recur = block.conv_1d, block.rg_lru

    def convolution(x: Tensor) -> Tensor:
        whole = states.update_conv_state(x, 0, conv_kernel_size=block.conv1d_width - 1)
        return type(convolve).forward(convolve, whole)[..., whole.shape[-1] - x.shape[-1] :]

    def recurrence(x: Tensor, position_ids: Tensor) -> Tensor:
        shell = shell_of(recur, attributes={"recurrent_states": states.get_recurrent_state(0)})
        out: Tensor = shell(x, position_ids)
        states.update_recurrent_state(shell.recurrent_states, 0)
        return out

    return forwards({convolve: convolution, recur: recurrence})


def _continued_scan(scan: Callable[..., Any], states: Iterator[Tensor]) -> Callable[..., Any]:
    """Return a Mamba 1 scan of which each call begins with the next of `states`, [B, channels, N].
    `scan` begins with zeros, and its results are linear in the state, whose part is added."""

    def run(
        x: Tensor,
        step: Tensor,
        rate: Tensor,
        inwards: Tensor,
        outwards: Tensor,
        *,
        delta_bias: Tensor,
        z: Tensor,
        **keywords: Any,
    ) -> tuple[Tensor, Tensor]:
        """Scan x and its step sizes, [B, channels, T], with the rates [channels, N] and the
        projections to and from the state, [B, N, T]."""
        out, last = scan(x, step, rate, inwards, outwards, delta_bias=delta_bias, z=z, **keywords)
        passed = nn.functional.softplus(step + delta_bias[:, None]).cumsum(dim=-1)
        state = next(states).to(passed.dtype)
        remembered = _Remembered.apply(passed, rate, state, outwards.to(passed.dtype))
        out = (out + remembered * nn.functional.silu(z)).to(out.dtype)
        return out, last + (rate * passed[..., -1:]).exp() * state

    return run


class _Remembered(torch.autograd.Function):
    """Part of a Mamba 1 scan's output that stems from the state it begins with, [B, channels, T].

    Of the decayed states, [B, channels, T, N], one of N parts exists at a time.
    """

    @staticmethod
    def forward(ctx: Any, passed: Tensor, rate: Tensor, state: Tensor, outwards: Tensor) -> Tensor:
        """Compute sum_n exp(rate[:, n] passed) state[:, :, n] outwards[:, n]."""
        ctx.save_for_backward(passed, rate, state, outwards)
        out = torch.zeros_like(passed)
        for n in range(rate.shape[1]):
            decay = (rate[:, n, None] * passed).exp_()
            out += decay.mul_(state[:, :, n, None]).mul_(outwards[:, n, None])
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        passed, rate, state, outwards = ctx.saved_tensors
        of_passed, of_rate = torch.zeros_like(passed), torch.zeros_like(rate)
        of_state, of_outwards = torch.zeros_like(state), torch.zeros_like(outwards)
        for n in range(rate.shape[1]):
            given = (rate[:, n, None] * passed).exp_().mul_(gradient)
            of_outwards[:, n] = (given * state[:, :, n, None]).sum(1)
            given.mul_(outwards[:, n, None])
            of_state[:, :, n] = given.sum(-1)
            given.mul_(state[:, :, n, None])
            of_rate[:, n] = (given * passed).sum((0, 2))
            of_passed += given.mul_(rate[:, n, None])
        return of_passed, of_rate, of_state, of_outwards
