"""Compile modules of layers by torch.compile, and run compiled modules uncompiled."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled modules uncompiled inside the context. Otherwise torch would leave a module that
    is first called under a dispatch mode uncompiled for good."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


class UncompiledMode(TorchDispatchMode):
    """Dispatch mode whose handler torch calls directly. Torch 2.13 wraps other modes' handlers in a
    function that turns the compiler off, which costs as much as a small operation each time."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def compile_layers(layers: nn.ModuleList) -> None:
    """Compile modules of the layers in place: parameters and names do not change, and the model can
    be called, saved and loaded. Lengths are dynamic, so chunks and tiles of other lengths compile
    nothing again; layers of one kind share compiled code."""
    for layer in layers:
        for module in _fusible(layer):
            if module._compiled_call_impl is None:
                module.compile(dynamic=True)


def is_compiled(layer: nn.Module) -> bool:
    return any(module._compiled_call_impl is not None for module in layer.modules())


def _fusible(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield a layer's children that are worth compiling: norms (modules with only vectors) and
    dense MLPs (matrices and an activation), but not attention, nor experts, which have tensors of
    three dimensions or lists."""
    for child in layer.children():
        if any(isinstance(m, nn.Dropout) and m.p > 0 for m in child.modules()):
            continue  # has another forward during a step
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
