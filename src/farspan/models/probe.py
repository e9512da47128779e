"""Prove that a model can be run in chunks, by running it on a handful of tokens with a dense
attention in its place: as itself, stage by stage, and every kind of layer for itself (mixing).

Where two of these differ, something mixes tokens outside of attention, or attention outside of the
interface, and the model is refused. A layer that does not attend is asked for what it hands on.
Stage by stage the operations are the same, so rounding is too.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from farspan.models.boundary import Boundary, LayerCall
from farspan.models.compiled import uncompiled
from farspan.models.dense import Dense
from farspan.models.mixing import CUT, MIXING, TOKENS, distance, refuse_forgetting, refuse_mixing
from farspan.models.recurrent import States, state_spec, with_states
from farspan.models.route import answering, routed, watching_masks
from farspan.spec import LayerSpec, Refused

UNATTENDING = LayerSpec(0, 0, 0, 0, window=1)  # a layer whose tokens see no others by attention


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
    boundary.settle(TOKENS)
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
            refuse_mixing(boundary, hidden, seen)
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
    """What attention each layer asks for, and nothing proven that takes numbers."""
    asked: dict[Any, tuple[LayerSpec, int]] = {}
    with routed(boundary.model), uncompiled(), _NoChance(boundary.model.config):
        positions = torch.zeros(1, 1, dtype=torch.long, device=boundary.device)
        kinds = boundary.kinds()
        # A scan of a single token takes as long as one of hundreds: one layer answers for its kind.
        for index, call in enumerate(boundary.calls(1, positions)):
            if kinds[index] not in asked:
                asked[kinds[index]] = _ask(boundary, index, call)
        seen = [asked[kind][0] for kind in kinds]
        _refuse_other_calls(boundary, sum(asked[kind][1] for kind in kinds), seen)
        refuse_forgetting(boundary, seen)
    return seen


def _ask(boundary: Boundary, index: int, call: LayerCall) -> tuple[LayerSpec, int]:
    """A layer, and its calls of attention."""
    dense = Dense(layer=index)
    hidden = torch.ones(1, 1, boundary.width, dtype=boundary.dtype, device=boundary.device)
    with answering(dense):
        boundary.run_layer(index, hidden, call)
    spec = dense.seen.get(index) or _unattending(boundary, hidden, index, call)
    _refuse_hidden_state(boundary, index, spec)
    return spec, dense.calls


def _unattending(boundary: Boundary, hidden: Tensor, index: int, call: LayerCall) -> LayerSpec:
    """A layer that does not attend, with what it hands on."""
    states = States()
    boundary.run_layer(index, hidden, with_states(call, states))
    return replace(UNATTENDING, state=state_spec(states.after))


def _refuse_hidden_state(boundary: Boundary, index: int, spec: LayerSpec) -> None:
    """Raises Refused for a layer that must mix tokens in a way that `spec` does not have."""
    mixes = any(isinstance(module, nn.Conv1d) for module in boundary.layers[index].modules())
    if mixes and not spec.state:
        attends = "attends; expected one or the other in a layer"
        hides = "hands no state on through the cache"
        raise Refused(
            f"model: layer {index} of {type(boundary.model).__name__} has a convolution over "
            f"tokens and {attends if spec.attends() else hides}"
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
    dense = Dense()
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
    dense = Dense()
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


def _refuse_mixing(boundary: Boundary, how: str, found: Tensor, whole: Tensor) -> None:
    error = distance(found, whole)
    # Half of the dtype's digits, or of float32's where a model rounds to it inside.
    limit = max(torch.finfo(whole.dtype).eps ** 0.5, MIXING[torch.float64])
    if not error <= limit:
        raise Refused(
            f"model: {type(boundary.model).__name__} {how} differs from itself by {error:.1e}; "
            "something in it mixes tokens outside of the attention interface"
        )
