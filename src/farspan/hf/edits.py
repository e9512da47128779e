"""Detect edits of a model by comparing everything that decides how a step runs.

A step is prepared for a model's state: its modules, their effect on tokens, the attention they
request. `look` takes a fingerprint of all that a preparation may read, except the values of
weights, which every update changes: modules and parameters by identity, hooks, forwards set on
instances, classes, attributes, configurations and buffers. Two looks are equal unless the model was
edited in between; `first_edit` then names an edit.

A look holds large objects of the model weakly, so it keeps no replaced layer alive.

`layer_signature` tells which layers are built alike, so that one of each kind is checked.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from inspect import unwrap
from itertools import takewhile
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from farspan.hf.unsupported import LONG_ROPE

NUMBERS = (bool, int, float, complex)
AS_THEY_ARE = {str, bytes, type(None), torch.dtype, torch.Size, range}
FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, type, partial)
# Saving, loading and generating do not affect a step, nor does the origin of a configuration.
# RecurrentGemma's layers store the last states of any forward; a step passes states itself.
IGNORED = {
    *("conv1d_state", "recurrent_states"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks"),
    *("_load_state_dict_post_hooks", "_non_persistent_buffers_set"),
    *("_name_or_path", "_commit_hash", "transformers_version", "warnings_issued"),
    *("architectures", "generation_config", "hf_device_map"),
}
BASES = {nn.Module, PreTrainedModel, PretrainedConfig, object}  # classes that do not affect a step
GLOBAL_HOOKS = (
    *("_global_forward_hooks", "_global_forward_pre_hooks"),
    *("_global_backward_hooks", "_global_backward_pre_hooks"),
)


class Same:
    """Reference to an object. Two are equal if the object and `mark`, its state, are the same. Its
    text has no address, so that processes which have made the same model get the same text."""

    __slots__ = ("_held", "mark", "text")

    def __init__(self, target: object, text: object = "", mark: object = None) -> None:
        try:
            self._held: Any = ref(target)
        except TypeError:  # such as builtin functions
            self._held = partial(_itself, target)
        self.text, self.mark = text, mark

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same) or self.mark != other.mark:
            return False
        mine = self._held()
        return mine is not None and mine is other._held()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return str(self.text)


def _itself(target: object) -> object:
    return target


@dataclass(frozen=True, slots=True)
class Look:
    """Fingerprint of a model: everything that decides how a step runs it, except the values of
    weights. `states` lists the model, each of its modules and their configurations, each by its
    path and attributes. `str(look)` has no addresses and no devices, so it is the same text on all
    ranks that have made the same model."""

    states: list[tuple[str, dict[str, Any]]]

    def __str__(self) -> str:
        return "\n".join(f"{path} {sorted(state.items())}" for path, state in self.states)


def look(model: nn.Module) -> Look:
    """Take a fingerprint of a model, in about 10 microseconds per module.

    Args:
        model: The model between steps, wrappers included.

    Returns:
        A value that equals another look unless the model was edited in between. In-place updates do
        not count as edits of weights, but as edits of buffers.
    """
    return Look(list(_ModelWalk(model).states()))


def has_same_parts(before: Look, now: Look) -> bool:
    """Return whether two fingerprints have the same modules and parameters."""
    parts = "_modules", "_parameters"
    pairs = zip(before.states, now.states, strict=False)
    same = all(a.get(name) == b.get(name) for (_, a), (_, b) in pairs for name in parts)
    return same and len(before.states) == len(now.states)


def first_edit(before: Look, now: Look, ignored: Collection[str] = ()) -> str | None:
    """Name the first edit of a model between two of its fingerprints.

    Args:
        before: The earlier look.
        now: The later look.
        ignored: Names of attributes and objects that may have changed.

    Returns:
        Attribute and module, such as `act_fn of model.layers.0.mlp`; None if nothing else has
        changed.
    """
    old, new = dict(before.states), dict(now.states)
    for path in (p for p in (*new, *old) if p.rpartition(".")[2] not in ignored):
        was, is_now = old.get(path, {}), new.get(path, {})
        for name in (*is_now, *was):
            if name not in ignored and was.get(name, old) != is_now.get(name, old):
                return f"{name.strip('_')} of {path or 'the model'}"
    return None


class _ModelWalk:
    """Traversal of every object of a model that collects the objects' attributes."""

    def __init__(self, model: nn.Module) -> None:
        self._coming: list[tuple[str, Any]] = [("", model)]
        self._seen: set[int] = {id(model)}
        self._path, self._inside = "", True  # of the current object; whether it is a module
        self._classes: dict[type, Any] = {}

    def states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "torch.nn", {n: self._comparable(getattr(torch_module, n), n) for n in GLOBAL_HOOKS}
        called = {"attention": ALL_ATTENTION_FUNCTIONS, "masks": ALL_MASK_ATTENTION_FUNCTIONS}
        yield "transformers", {name: self._comparable(dict(x), name) for name, x in called.items()}
        while self._coming:
            self._path, held = self._coming.pop()
            self._inside = isinstance(held, nn.Module)
            state = {"__class__": self._class_of(type(held))}
            for name, value in vars(held).items():
                if name == "_buffers" and vars(held).get("rope_type") == LONG_ROPE:
                    # Each forward refills this one: a plain call, or another step's probe.
                    value = {key: x for key, x in value.items() if key != "inv_freq"}
                if name not in IGNORED:
                    state[name] = self._comparable(value, name)
            yield self._path, state

    def _comparable(self, value: Any, name: object) -> Any:
        """Return a comparable value for an attribute: equal values have equal effects on a step."""
        kind = type(value)
        if kind in AS_THEY_ARE:
            return value
        if kind in NUMBERS:
            return kind, value
        if isinstance(value, Tensor):
            return _tensor(value)
        if isinstance(value, dict):
            if "_hooks" in str(name):  # hook ids differ between processes
                return [_function(x, number) for number, x in value.items()]
            return [(key, self._comparable(x, f"{name}.{key}")) for key, x in value.items()]
        if isinstance(value, list | tuple):
            return kind, [self._comparable(x, f"{name}.{i}") for i, x in enumerate(value)]
        if isinstance(value, set | frozenset):
            return kind, sorted(str(self._comparable(x, name)) for x in value)
        if isinstance(value, Enum):
            return kind, value.name
        if kind is torch.device:
            return Same(kind, "device", value)
        if callable(value) and not isinstance(value, nn.Module):
            return _function(value)  # also an object that counts its calls
        self._queue(value, name)
        return Same(value, kind.__qualname__)

    def _queue(self, value: Any, name: object) -> None:
        """Queue an object for the traversal if it is a module, a configuration, or an object that a
        module holds. It is named by the attribute that first led to it. Other objects, which
        anything else holds, are compared by identity."""
        if id(value) in self._seen or not hasattr(value, "__dict__"):
            return
        other = self._inside and not type(value).__module__.startswith("torch.")
        if other or isinstance(value, nn.Module | PretrainedConfig):
            self._seen.add(id(value))
            name = str(name).removeprefix("_modules.")
            self._coming.append((f"{self._path}.{name}" if self._path else name, value))

    def _class_of(self, kind: type) -> Any:
        """Return a class with its present methods and plain attributes, and the functions that
        methods call by name, since libraries replace any of these at run time."""
        found = self._classes.get(kind)
        if found is None:
            own = takewhile(lambda one: one not in BASES, kind.__mro__)
            values = [(name, x) for one in own for name, x in vars(one).items()]
            methods = [(name, x) for name, x in values if isinstance(x, FunctionType)]
            plain = [(n, x) for n, x in values if type(x) in NUMBERS and not n.startswith("__")]
            called = [_function(x) for _, method in methods for x in _called_by(method)]
            made = Same(kind, f"{kind.__module__}.{kind.__qualname__}")
            known = [(name, _function(x)) for name, x in methods]
            found = self._classes[kind] = made, known, plain, called
        return found


def _function(value: Any, mark: object = None) -> Same:
    if isinstance(value, MethodType):  # a new object at each access
        return Same(value.__func__, value.__qualname__, (mark, Same(value.__self__)))
    return Same(value, getattr(value, "__qualname__", type(value).__qualname__), mark)


def _called_by(method: FunctionType) -> list[Any]:
    """Return the functions that a method calls by a global name; decorators are unwrapped."""
    inner = unwrap(method)
    if not isinstance(inner, FunctionType):
        return []
    known = map(inner.__globals__.get, inner.__code__.co_names)
    return [x for x in known if isinstance(x, FUNCTIONS)]


def _tensor(x: Tensor) -> Same:
    """Return a reference to a tensor, unequal once the tensor is edited. Writing in place (a new
    version) edits a buffer, but not a parameter, to which every update writes."""
    text = x.dtype, tuple(x.shape), x.requires_grad
    if not isinstance(x, nn.Parameter):
        version = None if x.is_inference() else x._version
        return Same(x, text, (text, x.device, version))
    return Same(x, text, (text, x.device, *(x._backward_hooks or {}).items()))


# -- layers that are built alike -------------------------------------------------------------------

# Names that model families give to a layer's index in its model, for its cache; layers that differ
# in these alone are alike.
INDEX_NAMES = {
    "layer_idx", "layer_id", "layer_num", "layer_number", "layer_index", "block_id", "block_index",
    "target_name",  # set by peft 0.21 on adapters
}  # fmt: skip
NO_SETTINGS = INDEX_NAMES | set(vars(nn.Module()))
PLAIN_SETTINGS = (
    bool | int | float | str | None | FunctionType | BuiltinFunctionType | type
    | torch.dtype | torch.device
)  # fmt: skip


def layer_signature(layer: nn.Module, index: int) -> tuple[Any, ...]:
    """Return a layer's modules, tensors and settings, equal for layers that compute the same.
    (SmolLM3's layers with and without rotation differ by one flag.) A layer with a hook or a
    replaced forward equals no other layer."""
    modules = tuple((type(module), *_settings(module)) for module in layer.modules())
    parameters = tuple((*p.shape, p.requires_grad) for p in layer.parameters())
    buffers = tuple(tuple(b.shape) for b in layer.buffers())
    return modules, parameters, buffers, index if _is_customised(layer) else None


def _settings(module: nn.Module) -> list[tuple[str, Any]]:
    return [(name, _plain(x)) for name, x in vars(module).items() if name not in NO_SETTINGS]


def _plain(value: Any) -> Any:
    """Return a value that is equal for equal settings; an unknown object equals only itself."""
    if isinstance(value, PLAIN_SETTINGS):
        return value
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, partial):
        return value.func, _plain(value.args), _plain(value.keywords)
    if isinstance(value, MethodType):
        return value.__func__
    if isinstance(value, dict):
        items = ((key, x) for key, x in value.items() if key not in INDEX_NAMES)
        return tuple((_plain(key), _plain(x)) for key, x in items)
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(map(_plain, value))
    return id(value)


def _is_customised(layer: nn.Module) -> bool:
    return any(
        bool(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m))
        for m in layer.modules()
    )
