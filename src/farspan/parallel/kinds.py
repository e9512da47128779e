"""Which layers are made alike, so that what one of them does need not be asked of another."""

from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

# What families call a layer's place in its model, for its cache: it makes no layer another one.
PLACES = {
    "layer_idx", "layer_id", "layer_num", "layer_number", "layer_index", "block_id", "block_index"
}  # fmt: skip
NO_SETTINGS = PLACES | set(vars(nn.Module()))
PLAIN = bool | int | float | str | FunctionType | BuiltinFunctionType | type | torch.dtype | None


def kind_of(layer: nn.Module, index: int) -> tuple[Any, ...]:
    """Modules, tensors and settings of a layer: SmolLM3's with and without rotation differ by one
    flag. With a hook or a forward of its own a layer is like no other."""
    modules = tuple((type(module), *_settings(module)) for module in layer.modules())
    parameters = tuple((*p.shape, p.requires_grad) for p in layer.parameters())
    buffers = tuple(tuple(b.shape) for b in layer.buffers())
    return modules, parameters, buffers, index if _is_customised(layer) else None


def _settings(module: nn.Module) -> list[tuple[str, Any]]:
    return [(name, _plain(x)) for name, x in vars(module).items() if name not in NO_SETTINGS]


def _plain(value: Any) -> Any:
    """Equal where two settings are: of what cannot be looked into, where they are one object."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, partial):
        return value.func, _plain(value.args), _plain(value.keywords)
    if isinstance(value, MethodType):
        return value.__func__
    if isinstance(value, dict):
        return tuple((_plain(key), _plain(x)) for key, x in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(map(_plain, value))
    return id(value)


def _is_customised(layer: nn.Module) -> bool:
    """Does somebody's hook or replaced forward make this layer one of its own?"""
    return any(
        bool(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m))
        for m in layer.modules()
    )
