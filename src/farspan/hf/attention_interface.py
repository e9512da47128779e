"""Route Hugging Face attention calls to the function that runs a cell.

transformers looks up the name in `config._attn_implementation` in its AttentionInterface at every
call. A name without a mask function gets `attention_mask=None`, so nothing of size N x N is built.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PretrainedConfig,
    PreTrainedModel,
)

from farspan.hf.indexer import Choose, IndexerCall, choose_whole, choosing, is_blank
from farspan.hf.routers import ADDED, hooks, routers_of
from farspan.hf.swap import put_in
from farspan.spec import UnsupportedError

F32 = torch.float32
NAME = "farspan"
PROBE = "farspan_probe"  # the same, with masks requested and their windows recorded

# (module, query [B, H, C, D], key [B, Hk, C, D], value [B, Hk, C, Dv], scale, **the model's own
# keywords such as sliding_window, softcap, s_aux) -> out [B, C, H, Dv]
Attention = Callable[..., Tensor]

_active: ContextVar[Attention | None] = ContextVar("farspan_attention", default=None)
_chooser: ContextVar[Choose] = ContextVar("farspan_chooser", default=choose_whole)


def _outside_layers(module: nn.Module, *_: Any, **__: Any) -> Tensor:
    """Raise UnsupportedError for an attention call by a layer that others had replaced."""
    raise UnsupportedError(
        f"model: {type(module).__name__} attended although other modules had replaced its layers, "
        "so something outside the decoder's list of layers still holds them, such as a wrapper "
        "around a method; remove the wrapper, so that the model's own forward calls that list"
    )


_local_sizes: ContextVar[set[int] | None] = ContextVar("farspan_local_sizes", default=None)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    active = _active.get()
    if active is None:
        raise RuntimeError(
            "the model's attention is set to 'farspan' outside a farspan step, but works only "
            "inside one; set another with model.set_attn_implementation('sdpa')"
        )
    if attention_mask is not None and not is_blank(attention_mask):
        raise RuntimeError("the model built its own attention mask, which farspan cannot use")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    keywords |= _chunked(module)
    if (positions := _first_positions.get()) is not None:
        _first_positions.set(None)
        query = positions.scaled(query)
    if casts(query.device.type):
        active = partial(_rounded, active)
    if (whole := _whole_values.get()) is not None:
        out = whole.attended(
            value, lambda part: active(module, query, key, part, scale, **keywords)
        )
    else:
        out = active(module, query, key, value, scale, **keywords)
    return out.contiguous(), None  # like transformers' own: AFMoE and JetMoE call view on it


def _rounded(
    attend: Attention,
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    **keywords: Any,
) -> Tensor:
    """Call attention under autocast: round its inputs and result to autocast's dtype, as
    scaled_dot_product_attention does. Rounded inputs keep the wider dtype of the buffers."""
    kind = q.device.type
    narrow, wide = torch.get_autocast_dtype(kind), torch.promote_types(q.dtype, F32)
    q, k, v = (part.to(narrow).to(wide) for part in (q, k, v))
    return attend(module, q, k, v, scale, **keywords).to(narrow)


def casts(kind: str) -> bool:
    """Return whether autocast is on for a type of devices; False for "meta", about which torch
    raises an error."""
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def _chunked(module: nn.Module) -> dict[str, Any]:
    """Return the keywords of chunked attention for a layer that has it: the configuration names
    these layers and their chunk's length, which transformers itself passes on in the mask alone."""
    config: Any = getattr(module, "config", None)
    index, kinds = getattr(module, "layer_idx", None), getattr(config, "layer_types", None)
    if not kinds or index is None or kinds[index] != "chunked_attention":
        return {}
    return {"sliding_window": config.attention_chunk_size, "chunked": True}


@dataclass(frozen=True, slots=True)
class FirstPositions:
    """Stand-in for the cache of a layer that scales its queries by their positions (Llama 4).

    The layer takes its first token's position from the length of its cache. A chunk begins later,
    and packed documents begin anew. So each token is told the position -1, whose scale is exactly
    1, and the attention call scales by the positions given here.
    """

    positions: Tensor  # of the chunk's tokens in their documents, [1 or B, C]
    tokens: float  # of which each scales alike (`floor_scale`)
    strength: float  # `attn_scale`

    def get_seq_length(self, _: int = 0) -> Tensor:
        return -1 - torch.arange(self.positions.shape[1], device=self.positions.device)

    def update(self, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return k and v unchanged, and have the attention call that follows scale its queries."""
        _first_positions.set(self)
        return k, v

    def scaled(self, q: Tensor) -> Tensor:
        """Return queries [B, H, C, D], scaled by their positions."""
        floors = torch.floor((self.positions.to(q.device).float() + 1.0) / self.tokens)
        scales = torch.log1p(floors) * self.strength + 1.0
        return (q * scales[:, None, :, None]).to(q.dtype)


_first_positions: ContextVar[FirstPositions | None] = ContextVar("farspan_positions", default=None)


@dataclass(slots=True)
class WholeValues:
    """Stand-in for the cache of a layer that attends twice, with the same queries and keys: to the
    first half of its value heads, then to the second (DiffLlama).

    The layer hands all its values to the cache before. So the first call attends to both halves as
    one value of twice the width, and the second call gets its half of the result.
    """

    values: Tensor | None = None  # [B, Hk, C, D]
    second: Tensor | None = None  # result of the second call, [B, C, H, D]

    def get_seq_length(self, _: int = 0) -> int:
        return 0

    def update(self, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Return k and v unchanged, and compute the two attention calls that follow as one."""
        self.values, self.second = v, None
        _whole_values.set(self)
        return k, v

    def attended(self, value: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the output of the layer's first or second attention call, whose values are
        `value`, [B, C, H, D]; the first computes both outputs."""
        _whole_values.set(None)
        (whole, self.values), (known, self.second) = (self.values, None), (self.second, None)
        if known is not None:
            return known
        assert whole is not None, "the layer has updated its cache"
        later = whole.chunk(2, 1)[1].repeat(1, 2, 1, 1)
        out, self.second = attend(torch.cat([value, later], -1)).chunk(2, -1)
        _whole_values.set(self)
        return out


_whole_values: ContextVar[WholeValues | None] = ContextVar("farspan_whole_values", default=None)


def attends_twice(layer: nn.Module) -> bool:
    """Return whether a layer attends twice, as `WholeValues` says."""
    return any(hasattr(module, "lambda_q1") for module in layer.modules())


def position_scale(layer: nn.Module) -> tuple[float, float] | None:
    """Return how a layer scales its queries by their positions, (tokens, strength), or None."""
    module: Any
    for module in layer.modules():
        if getattr(module, "attn_temperature_tuning", None) and not module.use_rope:
            return float(module.floor_scale), float(module.attn_scale)
    return None


def _mask(*_: Any, local_size: int | None = None, **__: Any) -> None:
    """Note the window or chunk size of a requested mask for `watching_masks`; build no mask."""
    noted = _local_sizes.get()
    if noted is not None and local_size is not None:
        noted.add(int(local_size))


AttentionInterface.register(NAME, _attention)
AttentionInterface.register(PROBE, _attention)
AttentionMaskInterface.register(PROBE, _mask)


def attended(
    attend: Attention, q: Tensor, k: Tensor, v: Tensor, scale: float, keywords: Any, **further: Any
) -> Tensor:
    """Return the result [B, C, H, Dv] of a model's attention call, computed by `attend`, such as
    `attention.backends.reference`. `keywords` are the call's own, such as sliding_window."""
    window, softcap, sinks = map(keywords.get, ("sliding_window", "softcap", "s_aux"))
    if keywords.get("chunked"):
        further = {**further, "chunked": True}
    if keywords.get("indices") is not None:
        further = {**further, "chosen": keywords["indices"]}
    out = attend(q, k, v, scale=scale, window=window, softcap=softcap, sinks=sinks, **further)
    return out.transpose(1, 2)


@contextmanager
def answering(attention: Attention, choose: Choose = choose_whole) -> Iterator[None]:
    """Inside the context, compute attention by `attention` in all models that `routed` has sent to
    farspan, and the choices of their indexers by `choose`."""
    tokens = _active.set(attention), _chooser.set(choose)
    try:
        yield
    finally:
        _active.reset(tokens[0])
        _chooser.reset(tokens[1])


def _choose(call: IndexerCall) -> Tensor:
    return _chooser.get()(call)


@contextmanager
def watching_masks(model: PreTrainedModel) -> Iterator[set[int]]:
    """Route the model's attention calls as `routed` does, and yield a set that collects the window
    sizes of the masks that the model requests."""
    noted: set[int] = set()
    token = _local_sizes.set(noted)
    try:
        with (
            config_field(model, "_attn_implementation_internal", PROBE),
            put_in(choosing(model, _choose)),
            without_router_loss(model),
        ):
            yield noted
    finally:
        _local_sizes.reset(token)


@contextmanager
def routed(model: PreTrainedModel) -> Iterator[None]:
    """Route the model's attention calls to farspan inside the context, and restore the model's
    attention afterwards. Generation and evaluation outside the context do not change."""
    with (
        answering(_active.get() or _outside_layers),
        config_field(model, "_attn_implementation_internal", NAME),
        put_in((*hooks(model), *choosing(model, _choose))),
        without_router_loss(model),
    ):
        yield


@contextmanager
def config_field(model: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Inside the context, set a field in every configuration that the model's modules hold."""
    found = (getattr(module, "config", None) for module in model.modules())
    configs = {id(config): config for config in found if isinstance(config, PretrainedConfig)}
    with put_in((vars(config), name, value) for config in configs.values()):
        yield


@contextmanager
def without_router_loss(model: PreTrainedModel) -> Iterator[None]:
    """Keep the model's own forward from adding router losses inside the context, since its stages
    record no router logits. `routers_of` still finds the model's routers."""
    added = vars(model), ADDED, routers_of(model) is not None
    with config_field(model, "output_router_logits", False), put_in([added]):
        yield


@contextmanager
def eager_experts(model: nn.Module) -> Iterator[None]:
    """Run experts one after another inside the context. By default torch's grouped product runs
    them, which has no float64 and rounds differently, so gradients would not be comparable."""
    with config_field(model, "_experts_implementation_internal", "eager"):
        yield
