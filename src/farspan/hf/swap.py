"""Put modules, parameters, buffers, forwards and attributes into a user's model, and take them out.

Nothing else in farspan does (tests/hf/test_swap.py reads the sources). `shell_of` leaves the model
alone, `put_in` restores it on return, error and interrupt, and `put` changes it for good: weights
move, or are sharded. Values do not count: weights moved to main memory stay the same parameters.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar

from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)
# A table such as `module._parameters`, or an object with attributes; a key or name in it; its new
# value.
Part = tuple[Any, Any, Any]

_ABSENT = object()


def put(parts: Iterable[Part]) -> None:
    """Put attributes into a model for good."""
    for holder, name, value in parts:
        if isinstance(holder, dict):
            holder[name] = value
        else:
            setattr(holder, name, value)


@contextmanager
def put_in(parts: Iterable[Part]) -> Iterator[None]:
    """Put attributes into a model inside the context, and restore its earlier ones afterwards."""
    parts = list(parts)
    before = [(holder, name, _value(holder, name)) for holder, name, _ in parts]
    before.reverse()  # a part that is put in twice ends as it began
    try:
        put(parts)
        yield
    finally:
        for holder, name, value in before:
            if not isinstance(holder, dict):
                setattr(holder, name, value)
            elif value is _ABSENT:
                holder.pop(name, None)
            else:
                holder[name] = value


def _value(holder: Any, name: str) -> Any:
    return holder.get(name, _ABSENT) if isinstance(holder, dict) else getattr(holder, name)


def shell_of(
    module: Module,
    modules: Mapping[str, nn.Module] | None = None,
    *,
    parameters: Mapping[str, Tensor | None] | None = None,
    buffers: Mapping[str, Tensor | None] | None = None,
    attributes: Mapping[str, Any] | None = None,
    forward: Callable[..., Any] | None = None,
    own_forward: bool = False,
) -> Module:
    """Return a shell of a module: a shallow copy with some new parts, which shares all the rest.

    `forward` is called with the shell and the module's arguments. Without it, the shell has its
    class's forward unless `own_forward`: one set on the module itself (TRL's fused head,
    accelerate's autocast) would run the module's children, not the shell's.
    """
    shell = copy.copy(module)
    own = shell.__dict__
    if not own_forward:
        own.pop("forward", None)
    own["_modules"] = {**own["_modules"], **(modules or {})}
    for table, parts in (("_parameters", parameters), ("_buffers", buffers)):
        if parts is not None:  # else the table is the module's, and follows changes to that
            own[table] = {**own[table], **parts}
    own.update(attributes or {})
    if forward is not None:
        own["forward"] = MethodType(forward, shell)
    return shell


class StandIn(nn.Module):
    """Module that takes another's place and shows its attributes, such as a layer's attention type,
    which families' code reads. The replaced module is not a submodule."""

    def __init__(self, module: nn.Module):
        super().__init__()
        object.__setattr__(self, "_module", module)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_module"), name)


def forwards(by_module: Mapping[Any, Callable[..., Any]]) -> Iterator[Part]:
    """Yield (attributes, "forward", function) per module, for `put_in` to set other forwards."""
    return ((vars(module), "forward", forward) for module, forward in by_module.items())


def replacements(model: nn.Module, others: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[Part]:
    """Yield (module's table, name, new parameter) for `put`, under all names of tied parameters."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter in others:
                yield module._parameters, name, others[parameter]
