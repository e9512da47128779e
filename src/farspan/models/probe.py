"""Prove that a model can be run in chunks, by running it on a handful of tokens with a dense
attention in its place: as itself, stage by stage, and every kind of layer in chunks.

Where two of these differ, something mixes tokens outside of attention, or attention outside of the
interface, and the model is refused. A layer that does not attend is asked for what it hands on, and
run in chunks with that: in their outputs, and in their gradients, which tell whether a recurrence
goes on from what it is given. Stage by stage the operations are the same, so rounding is too;
layers in chunks are compared in float32 or wider, where mixing shows far above rounding.
"""

import copy
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from farspan.attention.reference import reference
from farspan.models.boundary import Boundary, LayerCall
from farspan.models.compiled import uncompiled
from farspan.models.experts import eager_experts
from farspan.models.recurrent import States, run_piece, state_spec, takes_two, with_states
from farspan.models.route import answering, routed, watching_masks
from farspan.parallel.tensor_probe import customised
from farspan.spec import LayerSpec, Refused

TOKENS, CUT = 8, 5  # of the probe; the cut is off centre so that chunks differ
PIECES = (0, 3, 7, 8)  # of a recurrent layer
# Relative error of such pieces. Their own fp32 arithmetic, in another order, stays below 1e-5.
LOST = 1e-3
# Relative errors that chunks of a layer may show in float32 and wider: products of another shape
# round apart by 1e-7, and a float64 model may have routers and norms in float32.
MIXING = {torch.float32: 1e-4, torch.float64: 1e-6}

UNATTENDING = LayerSpec(0, 0, 0, 0, window=1)  # a layer whose tokens see no others by attention

# Keywords of an attention call that change no mathematics, or that farspan honours.
KNOWN = {
    "dropout", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "use_cache",
    "output_attentions", "output_router_logits", "output_hidden_states", "cache_position",
    "past_key_values", "logits_to_keep",
}  # fmt: skip


@dataclass(slots=True)
class _Dense:
    """Answers attention calls densely, over the keys of the chunks seen so far, and notes them."""

    layer: int | None = None  # None: count layers by calls, while the model itself runs
    seen: dict[int, LayerSpec] = field(default_factory=dict)
    calls: int = 0
    past: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, **keywords: Any
    ) -> Tensor:
        _check_keywords(module, keywords)
        layer = self.calls if self.layer is None else self.layer
        self.calls += 1
        window = keywords.get("sliding_window")
        sinks = keywords.get("s_aux")
        softcap = keywords.get("softcap")
        self.seen[layer] = LayerSpec(
            q.shape[1], k.shape[1], q.shape[3], v.shape[3], window, sinks is not None, softcap
        )
        if layer in self.past:
            before = self.past[layer]
            k, v = (torch.cat(pair, dim=2) for pair in zip(before, (k, v), strict=True))
        self.past[layer] = k, v
        earlier = k.shape[2] - q.shape[2]
        # The reference takes whole sequences: rows before the chunk are computed and dropped.
        q = nn.functional.pad(q, (0, 0, earlier, 0))
        out = reference(q, k, v, scale=scale, window=window, softcap=softcap, sinks=sinks)
        return out[:, :, earlier:].transpose(1, 2)


def _check_keywords(module: nn.Module, keywords: dict[str, Any]) -> None:
    name = type(module).__name__
    if keywords.get("is_causal") is False:
        raise Refused(f"model: {name} asks for attention to later tokens (is_causal=False)")
    if (keywords.get("dropout") or 0.0) > 0:
        raise Refused(
            f"model: {name} drops attention weights ({keywords['dropout']}), which cannot be "
            "repeated when a cell is recomputed; set its attention dropout to 0"
        )
    for keyword, value in keywords.items():
        if keyword not in KNOWN and isinstance(value, Tensor | float | int) and value is not False:
            raise Refused(
                f"model: {name} passes {keyword!r} to attention, which farspan does not know how "
                "to honour exactly"
            )


class _NoChance(TorchDispatchMode):
    """Refuses whatever draws random numbers: a recomputed cell would draw others. One number
    against a LayerDrop of zero decides nothing; before transformers 5.23 OPT draws it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.drops_no_layer = getattr(config, "layerdrop", None) == 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        one = func is torch.ops.aten.rand.default and args == ([],)
        against_nothing = one and self.drops_no_layer
        if torch.Tag.nondeterministic_seeded in func.tags and not against_nothing:
            raise Refused(
                f"model: its forward draws random numbers ({func}), which cannot be repeated when "
                "a cell is recomputed; set its dropout and jitter options to 0 (in a run file: "
                "model.overrides) or call model.eval()"
            )
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def probe_layers(boundary: Boundary) -> list[LayerSpec]:
    """What attention each layer asks for. Raises Refused when chunks could not be exact."""
    _refuse_lost_gradients(boundary)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, boundary.vocab, (1, TOKENS), generator=generator).to(boundary.device)
    hidden = torch.randn(1, TOKENS, boundary.width, generator=generator).to(boundary.device)
    with uncompiled(), _NoChance(boundary.model.config):
        with watching_masks(boundary.model) as windows:
            whole, calls = _run_whole(boundary, ids)
        with routed(boundary.model):
            try:
                seen = _run_staged(boundary, ids, whole)
            except Exception as error:
                if isinstance(error, Refused) or calls:
                    raise
                raise Refused(_attends_elsewhere(boundary, 0, 0)) from error
            _refuse_other_calls(boundary, calls, seen)
            _run_layers_in_chunks(boundary, hidden, seen)
    # Qwen2-MoE asks for a mask of 0 tokens where windows are off, and no layer is handed it.
    unheard = windows - {layer.window for layer in seen} - {0}
    if unheard:
        raise Refused(
            f"model: {type(boundary.model).__name__} limits attention to {sorted(unheard)} tokens "
            "by its mask alone (a window or chunked attention) and does not tell the attention "
            "interface, so it could not be honoured"
        )
    return seen


@torch.no_grad()
def ask_layers(boundary: Boundary) -> list[LayerSpec]:
    """What attention each layer asks for, and nothing proven."""
    dense = _Dense()
    with routed(boundary.model), uncompiled(), _NoChance(boundary.model.config):
        positions = torch.zeros(1, 1, dtype=torch.long, device=boundary.device)
        hidden = torch.ones(1, 1, boundary.width, dtype=boundary.dtype, device=boundary.device)
        for dense.layer, call in enumerate(boundary.calls(1, positions)):
            with answering(dense):
                boundary.run_layer(dense.layer, hidden, call)
            if dense.layer not in dense.seen:
                dense.seen[dense.layer] = found = _unattending(boundary, hidden, dense.layer, call)
                _refuse_hidden_state(boundary, dense.layer, found)
    seen = [dense.seen[layer] for layer in range(len(boundary.layers))]
    _refuse_other_calls(boundary, dense.calls, seen)
    return seen


def _unattending(boundary: Boundary, hidden: Tensor, index: int, call: LayerCall) -> LayerSpec:
    """A layer that does not attend, with what it hands on."""
    states = States()
    boundary.run_layer(index, hidden, with_states(call, states))
    return replace(UNATTENDING, state=state_spec(states.after))


def _refuse_hidden_state(boundary: Boundary, index: int, spec: LayerSpec) -> None:
    """Raises Refused for a layer that must mix tokens and hands nothing on."""
    mixes = any(isinstance(module, nn.Conv1d) for module in boundary.layers[index].modules())
    if mixes and not spec.state:
        raise Refused(
            f"model: layer {index} of {type(boundary.model).__name__} has a convolution over "
            "tokens and hands no state on through the cache"
        )


def _refuse_lost_gradients(boundary: Boundary) -> None:
    tied = boundary.tied_across()
    if tied is not None:
        raise Refused(
            f"model: {tied} is shared between a layer and the outside of the layers, where its "
            "gradients would not meet; untie it"
        )
    with torch.enable_grad(), routed(boundary.model):
        calls = boundary.calls(1, torch.arange(2, device=boundary.device)[None])
    for call in calls:
        leaves = tree_leaves((call.arguments, call.keywords))
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
            raise Refused(
                f"model: {type(boundary.model).__name__} hands its layers a trained tensor beside "
                "the hidden state, whose gradient would be lost; freeze what makes it"
            )


def _run_whole(boundary: Boundary, ids: Tensor) -> tuple[Tensor, int]:
    """Its logits, and how often it attended."""
    dense = _Dense()
    with answering(dense):
        out = boundary.model(input_ids=ids, use_cache=False)
    name = type(boundary.model).__name__
    if not isinstance(getattr(out, "logits", None), Tensor) or out.logits.ndim != 3:
        raise Refused(f"model: {name} gives no logits a token; expected a causal LM")
    return out.logits, dense.calls


def _refuse_other_calls(boundary: Boundary, calls: int, seen: list[LayerSpec]) -> None:
    attending = sum(layer.attends() for layer in seen)
    if calls != attending or not any(layer.attends() or layer.state for layer in seen):
        raise Refused(_attends_elsewhere(boundary, calls, attending))


def _attends_elsewhere(boundary: Boundary, calls: int, attending: int) -> str:
    return (
        f"model: {type(boundary.model).__name__} called the attention interface {calls} times for "
        f"{len(boundary.layers)} layers, {attending} of which attend; every layer must attend "
        "through it exactly once, or hand its state on through the cache"
    )


def _run_staged(boundary: Boundary, ids: Tensor, whole: Tensor) -> list[LayerSpec]:
    dense = _Dense()
    positions = torch.arange(TOKENS, device=ids.device)[None]
    hidden, calls = boundary.embed(ids, positions)
    _refuse_mixing(boundary, "embedded", *_embedded_in_chunks(boundary, ids, hidden))
    for dense.layer, call in enumerate(calls):
        before = hidden
        with answering(dense):
            hidden = boundary.run_layer(dense.layer, before, call)
        if dense.layer not in dense.seen:
            dense.seen[dense.layer] = _unattending(boundary, before, dense.layer, call)
    _refuse_mixing(boundary, "run layer by layer", boundary.logits(hidden), whole)
    pieces = [boundary.logits(hidden[:, start:stop]) for start, stop in pairwise((0, CUT, TOKENS))]
    _refuse_mixing(boundary, "given its head in pieces", torch.cat(pieces, dim=1), whole)
    return [dense.seen[layer] for layer in range(len(boundary.layers))]


def _embedded_in_chunks(boundary: Boundary, ids: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    parts = []
    for start, stop in pairwise((0, CUT, TOKENS)):
        positions = torch.arange(start, stop, device=ids.device)[None]
        parts.append(boundary.embed(ids[:, start:stop], positions)[0])
    return torch.cat(parts, dim=1), whole


def _run_layers_in_chunks(boundary: Boundary, hidden: Tensor, seen: list[LayerSpec]) -> None:
    """Every kind of layer on random hidden states, whole and cut in two."""
    dtype = boundary.dtype if boundary.dtype in MIXING else torch.float32
    cuts = ((0, TOKENS), (0, CUT), (CUT, TOKENS))
    known = set()
    for index, layer in enumerate(boundary.layers):
        shapes = tuple(tuple(p.shape) for p in layer.parameters())
        kind = type(layer), seen[index], shapes, index if customised(layer) else None
        if kind in known:
            continue
        known.add(kind)
        wide = layer if dtype is boundary.dtype else copy.deepcopy(layer).to(dtype)
        if seen[index].state:
            _refuse_other_gradients(boundary, index, wide, hidden.to(dtype))
            continue
        outs = []
        with eager_experts(wide):
            for dense, (start, stop) in zip(_pair(), cuts, strict=True):
                positions = torch.arange(start, stop, device=hidden.device)[None]
                call = cast_call(boundary.calls(1, positions)[index], dtype)
                with answering(dense):
                    out = wide(hidden[:, start:stop].to(dtype), *call.arguments, **call.keywords)
                outs.append(out[0] if isinstance(out, tuple) else out)
        error = distance(torch.cat(outs[1:], dim=1), outs[0])
        if not error <= MIXING[dtype]:
            raise Refused(_differs(boundary, index, error, "the attention interface"))


def _differs(boundary: Boundary, index: int, error: float, where: str) -> str:
    return (
        f"model: layer {index} of {type(boundary.model).__name__} run in chunks differs from "
        f"itself by {error:.1e}; something in it mixes tokens outside of {where}"
    )


def _refuse_other_gradients(
    boundary: Boundary, index: int, layer: nn.Module, hidden: Tensor
) -> None:
    """Raises Refused where a recurrent layer is another one in pieces, the last of them one token,
    or does not go on from what it is given: Jamba's scans do not, which shows by 3e-7 in outputs of
    a model whose weights are fresh, and by more in gradients."""
    shapes = [(0, TOKENS)], list(pairwise(PIECES))
    whole, pieces = (_with_gradient(boundary, index, layer, hidden, cuts) for cuts in shapes)
    error = max(distance(x, y) for x, y in zip(pieces, whole, strict=True))
    if not error <= LOST:
        raise Refused(_differs(boundary, index, error, "the states it hands on"))


@torch.enable_grad()
def _with_gradient(
    boundary: Boundary,
    index: int,
    layer: nn.Module,
    hidden: Tensor,
    cuts: list[tuple[int, int]],
) -> tuple[Tensor, Tensor]:
    """The output of a recurrent layer on these pieces, and the gradient of its input."""
    leaf, outs, states = hidden.detach().requires_grad_(), [], States()
    given: dict[str, Tensor] = {}
    with eager_experts(layer):
        for start, stop in cuts:
            # Tensors of their own: the piece that left a state may read it for its output too.
            states = States({name: x.view_as(x) for name, x in states.after.items()})
            given |= {f"{name} at {start}": state for name, state in states.before.items()}
            more = takes_two(stop - start, states.before)
            positions = torch.arange(start, stop + more)
            call = boundary.calls(1, positions[None].to(hidden.device))[index]
            piece = leaf[:, start:stop]
            outs.append(run_piece(layer, piece, cast_call(call, hidden.dtype), states))
    out = torch.cat(outs, dim=1)
    towards = torch.sin(torch.arange(out.numel(), device=out.device)).view(out.shape)
    gradient, *others = torch.autograd.grad(
        out, [leaf, *given.values()], towards.to(out.dtype), allow_unused=True
    )
    for name, found in zip(given, others, strict=True):
        if found is None:
            raise Refused(
                f"model: layer {index} of {type(boundary.model).__name__} does not go on from the "
                f"state {name.partition(' ')[0]} that it hands on"
            )
    return out.detach(), gradient


def _pair() -> tuple[_Dense, _Dense, _Dense]:
    """One for the whole, and one that remembers its first chunk in its second."""
    remembers = _Dense(layer=0)
    return _Dense(layer=0), remembers, remembers


def cast_call(call: LayerCall, dtype: torch.dtype) -> LayerCall:
    """The call with its floating-point tensors in another dtype."""

    def widen(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return LayerCall(tree_map(widen, call.arguments), tree_map(widen, call.keywords))


def _refuse_mixing(boundary: Boundary, how: str, found: Tensor, whole: Tensor) -> None:
    error = distance(found, whole)
    # Half of the dtype's digits, or of float32's where a model rounds to it inside.
    limit = max(torch.finfo(whole.dtype).eps ** 0.5, MIXING[torch.float64])
    if not error <= limit:
        raise Refused(
            f"model: {type(boundary.model).__name__} {how} differs from itself by {error:.1e}; "
            "something in it mixes tokens outside of the attention interface"
        )


def distance(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|."""
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))
