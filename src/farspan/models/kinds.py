"""Which layers are made alike, so that what one of them does need not be asked of another."""

from typing import Any

from torch import nn

from farspan.parallel.tensor_probe import customised


def kind_of(layer: nn.Module, index: int) -> tuple[Any, ...]:
    """Modules and parameters of a layer; with a hook or a forward of its own it is like no other.
    Numbers that a module is given otherwise, such as a window, are not in it."""
    modules = tuple(type(module) for module in layer.modules())
    parameters = tuple((*p.shape, p.requires_grad) for p in layer.parameters())
    return modules, parameters, index if customised(layer) else None
