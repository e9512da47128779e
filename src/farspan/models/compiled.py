"""Norms and dense MLPs of the layers through torch.compile, which fuses their elementwise work."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from farspan.models.boundary import Boundary


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside it compiled modules run as they are written. A module that is first called while a
    dispatch mode looks on would stay uncompiled for good: the compiler gives such code up."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def compile_layers(boundary: Boundary) -> None:
    """Compile in place: parameters, their names and the modules stay what they are, and the model
    is called, saved and loaded as ever. Lengths are dynamic, so that ragged chunks and tiles
    compile nothing anew; layers of one kind share what is compiled."""
    for layer in boundary.layers:
        for module in _fusible(layer):
            if module._compiled_call_impl is None:
                module.compile(dynamic=True)


def is_compiled(layer: nn.Module) -> bool:
    """Some module of it goes through the compiler."""
    return any(module._compiled_call_impl is not None for module in layer.modules())


def _fusible(layer: nn.Module) -> Iterator[nn.Module]:
    """Children without attention or routing: of norms, vectors; of dense MLPs, matrices beside an
    activation. Experts hold tensors of three dimensions, or lists of modules."""
    for child in layer.children():
        leaves = [module for module in child.modules() if not list(module.children())]
        lists = any(isinstance(module, nn.ModuleList) for module in child.modules())
        parameters = list(child.parameters())
        if not parameters or lists or any(p.ndim > 2 for p in parameters):
            continue
        is_norm = len(leaves) == 1 and all(p.ndim == 1 for p in parameters)
        bare = any(not list(leaf.parameters()) for leaf in leaves)  # an activation
        asks = any(hasattr(module, "is_causal") for module in child.modules())
        if is_norm or (bare and not asks):
            yield child
