"""Describe a model by watching it run on a handful of tokens, and prove that it can be run in
chunks at all.

The probe runs the model three times on the same tokens with a dense attention in its place: as
itself, stage by stage, and stage by stage in two chunks. Where the three differ, something mixes
tokens outside of attention, or attention outside of the interface, and the model is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from farspan.attention.reference import reference
from farspan.models.boundary import Boundary, LayerCall
from farspan.models.refuse import refuse_model
from farspan.models.route import answering, routed, watching_masks
from farspan.spec import LayerSpec, ModelSpec, Refused
from farspan.transfer.saved import SavedCell

TOKENS, CUT = 8, 5  # of the probe; the cut is off centre so that chunks differ

# Keywords of an attention call that change no mathematics, or that farspan honours.
KNOWN = {
    "dropout", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "use_cache",
    "output_attentions", "output_router_logits", "output_hidden_states", "cache_position",
    "past_key_values", "logits_to_keep",
}  # fmt: skip


@dataclass(slots=True)
class _Probe:
    """Answers attention calls densely, over the keys of the chunks seen so far, and notes them."""

    layer: int = 0
    seen: dict[int, LayerSpec] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)
    past: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    in_order: bool = False  # the model itself runs: count layers by calls

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, **keywords: Any
    ) -> Tensor:
        _check_keywords(module, keywords)
        layer = len(self.calls) if self.in_order else self.layer
        self.calls[layer] = self.calls.get(layer, 0) + 1
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
    for name, value in keywords.items():
        if name not in KNOWN and isinstance(value, Tensor | float | int) and value is not False:
            raise Refused(
                f"model: {type(module).__name__} passes {name!r} to attention, which farspan does "
                "not know how to honour exactly"
            )


@torch.no_grad()
def describe(boundary: Boundary) -> ModelSpec:
    """The ModelSpec of a model. Raises Refused when chunks of it cannot be exact."""
    model = boundary.model
    refuse_model(model)
    try:
        layers = _watch(boundary)
    except Refused:
        raise
    except Exception as error:
        raise Refused(
            f"model: {type(model).__name__} cannot be run through the attention interface, stage "
            f"by stage: {type(error).__name__}: {error}"
        ) from error
    parameters = list(model.parameters())
    return ModelSpec(
        name=getattr(model.config, "name_or_path", "") or type(model).__name__,
        hidden=model.config.hidden_size,
        vocab=boundary.vocab,
        layers=tuple(layers),
        element_bytes=boundary.dtype.itemsize,
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
    )


def _watch(boundary: Boundary) -> list[LayerSpec]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, boundary.vocab, (1, TOKENS), generator=generator).to(boundary.device)
    with watching_masks(boundary.model) as windows:
        whole = _run_whole(boundary, ids)
    with routed(boundary.model):
        layers = _run_staged(boundary, ids, whole)
        layers = _with_activations(boundary, layers)
    hidden = windows - {layer.window for layer in layers}
    if hidden:
        raise Refused(
            f"model: {type(boundary.model).__name__} limits attention to {sorted(hidden)} tokens "
            "by its mask alone (a window or chunked attention) and does not tell the attention "
            "interface, so it could not be honoured"
        )
    return layers


def _run_whole(boundary: Boundary, ids: Tensor) -> Tensor:
    probe = _Probe(in_order=True)
    with answering(probe):
        out = boundary.model(input_ids=ids, use_cache=False)
    if not isinstance(getattr(out, "logits", None), Tensor) or out.logits.ndim != 3:
        raise Refused(
            f"model: {type(boundary.model).__name__} gives no logits a token; expected a causal LM"
        )
    if len(probe.calls) != len(boundary.layers):
        raise Refused(
            f"model: {type(boundary.model).__name__} called the attention interface "
            f"{len(probe.calls)} times for {len(boundary.layers)} layers; every layer must attend "
            "through it exactly once (state-space, linear and hybrid layers do not)"
        )
    return out.logits


def _run_staged(boundary: Boundary, ids: Tensor, whole: Tensor) -> list[LayerSpec]:
    name = type(boundary.model).__name__
    for cuts in ([0, TOKENS], [0, CUT, TOKENS]):
        probe = _Probe()
        parts = []
        for start, stop in pairwise(cuts):
            positions = torch.arange(start, stop, device=ids.device)[None]
            hidden, calls = boundary.embed(ids[:, start:stop], positions)
            for probe.layer, call in enumerate(calls):
                with answering(probe):
                    hidden = boundary.run_layer(probe.layer, hidden, call)
            parts.append(boundary.logits(hidden))
        error = _error(torch.cat(parts, dim=1), whole)
        # Half of the dtype's digits: rounding stays far below, another mathematics far above.
        if not error <= torch.finfo(whole.dtype).eps ** 0.5:
            what = "layer by layer" if len(cuts) == 2 else "in chunks"
            raise Refused(
                f"model: {name} run {what} differs from itself by {error:.1e}; something in it "
                "mixes tokens outside of the attention interface"
            )
    return [probe.seen[layer] for layer in range(len(boundary.layers))]


def _error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def _with_activations(boundary: Boundary, layers: list[LayerSpec]) -> list[LayerSpec]:
    """What autograd saves in a cell grows linearly with its tokens: two sizes tell the line."""
    measured: dict[tuple[Any, ...], LayerSpec] = {}
    result = []
    for index, layer in enumerate(layers):
        module = boundary.layers[index]
        shapes = tuple((*p.shape, p.requires_grad) for p in module.parameters())
        key = type(module), shapes, layer
        if key not in measured:
            few, many = (_saved(boundary, index, n * TOKENS) for n in (4, 8))
            slope = -(-(many.bytes - few.bytes) // (4 * TOKENS))
            # Each saved tensor is padded to an alignment line, whatever its size.
            measured[key] = replace(
                layer,
                activation_bytes=slope,
                activation_constant=max(0, few.bytes - slope * 4 * TOKENS) + 64 * few.tensors,
                saves_input=few.saves_input,
            )
        result.append(measured[key])
    return result


@dataclass(frozen=True, slots=True)
class _Saved:
    bytes: int
    tensors: int
    saves_input: bool


def _saved(boundary: Boundary, index: int, tokens: int) -> _Saved:
    width = boundary.model.config.hidden_size
    # Few positions, again and again: the model may know no more than the probe's.
    positions = torch.arange(tokens, device=boundary.device)[None] % TOKENS
    # Tokens must differ, or a router would send all of them one way.
    seeds = torch.arange(tokens, device=boundary.device)[None, :, None]
    hidden = torch.sin(seeds + torch.arange(width, device=boundary.device))
    hidden = hidden.to(boundary.dtype)
    call = boundary.calls(1, positions)[index]
    named = {"x": hidden}

    def attention(_: nn.Module, q: Tensor, k: Tensor, v: Tensor, __: float, **___: Any) -> Tensor:
        named["out"] = _Shape.apply(q, k, v)
        return named["out"].transpose(1, 2)

    return _count(boundary, index, (hidden, call, named, attention))


def _count(
    boundary: Boundary,
    index: int,
    cell: tuple[Tensor, LayerCall, dict[str, Tensor], Callable[..., Tensor]],
) -> _Saved:
    hidden, call, named, attention = cell
    layer = boundary.layers[index]
    saved = SavedCell((*layer.parameters(), *layer.buffers()), named)
    hooks = torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack)
    with torch.enable_grad(), answering(attention), hooks:
        out = boundary.run_layer(index, hidden.requires_grad_(), call)
    # The graph of `out` held the saved tensors while they were counted; nothing outlives this.
    del out
    return _Saved(saved.size(), saved.count(), "x" in saved.references)


class _Shape(torch.autograd.Function):
    """Stands for attention where only what is saved matters: q is, O is somebody else's."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q)
        return q.new_ones(*q.shape[:3], v.shape[3]) + 0 * k.sum()

    @staticmethod
    def backward(_: Any, __: Tensor) -> tuple[None, None, None]:
        raise AssertionError("the probe is never differentiated")
