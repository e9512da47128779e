"""Compute the linear products of decoder layers in FP8, by torchao's float8 training.

This approximates: a product's operands are rounded to e4m3, which keeps 3 bits of the mantissa,
with one scale per row, computed from the operand itself. Weights, their gradients and all other
operations keep the model's dtype, bfloat16; so do the head and attention. Activations have one
scale per token, so the forward does not depend on chunks; a weight's gradient has scales over the
tokens of a chunk (of a tile with `mlp_chunk_size`). The same cell has the same scales when
it runs again, so schedules with equal chunks give the same gradients.

On a CPU torchao emulates the products: the same rounding, and no gain in speed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from farspan.hf.indexer import is_indexer
from farspan.hf.probe import distance
from farspan.hf.stages import CausalLMStages
from farspan.hf.swap import shell_of
from farspan.lazy import load
from farspan.spec import UnsupportedError

PACKAGE = "torchao"
ALIGNED = 16  # widths of FP8 products are multiples of this
PROBED = 32  # rows and columns of the probed product
# Relative error of a probe: rounding to e4m3 gives 0.04, a wrong scale or operand 0.5 or more.
TRUE_WITHIN = 0.15
OFF = "leave products out"


@dataclass(frozen=True, slots=True)
class Float8Linears:
    """Forwards of linear modules in FP8 on one kind of device."""

    like: nn.Module  # torchao's module, without values: its class and its settings

    def forward_of(self, module: nn.Module) -> Callable[..., Any] | None:
        """Return a linear module's replacement forward (`hf.fused_layers.Rule`), or None if its
        class overrides nn.Linear.forward."""
        return self.forward if _is_linear(module) else None

    def forward(self, module: nn.Linear, x: Tensor) -> Tensor:
        parameters = {"weight": module.weight, "bias": module.bias}
        out: Tensor = shell_of(self.like, parameters=parameters)(x)
        return out


@cache
def float8_linears(device_type: str) -> Float8Linears:
    """Return the forwards of linear modules in FP8; CPUs emulate them. Raises UnsupportedError if
    torchao is not installed, or its version has no rowwise float8 training."""
    try:
        config = load("torchao.float8", "Float8LinearConfig").from_recipe_name("rowwise")
        # Chunks may have any number of tokens, which are the inner dimension of weights' gradients.
        config = replace(config, pad_inner_dim=True, emulate=device_type == "cpu")
        blank = nn.Linear(ALIGNED, ALIGNED, bias=False, device="meta", dtype=torch.bfloat16)
        convert = load("torchao.float8", "convert_to_float8_training")
        return Float8Linears(convert(blank, config=config))
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"products: fp8 needs {PACKAGE}, which is not installed; pip install "
            f'"farspan[fp8]", or {OFF}'
        ) from error
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UnsupportedError(
            f"products: this version of {PACKAGE} has no rowwise float8 training: {error}; install "
            f"another, or {OFF}"
        ) from error


@cache
def float8_fault(device: torch.device) -> str | None:
    """Return how FP8 products fail on this device, or None if they work. Compares a linear module's
    output and gradients, for a number of tokens that needs padding, with those of plain PyTorch."""
    linears, generator = float8_linears(device.type), torch.Generator(device).manual_seed(0)

    def random(rows: int) -> Tensor:
        x = torch.randn(rows, PROBED, generator=generator, device=device)
        return x.to(torch.bfloat16).requires_grad_()

    x, weight, dout = random(PROBED + 1), random(PROBED), random(PROBED + 1).detach()
    wanted = x @ weight.t()
    module = nn.Linear(PROBED, PROBED, bias=False, device="meta")
    try:
        with torch.enable_grad():
            found = linears.forward(shell_of(module, parameters={"weight": weight}), x)
            ours = found, *torch.autograd.grad(found, (x, weight), dout)
    except (RuntimeError, NotImplementedError, AssertionError, ValueError) as error:
        return str(error).partition("\n")[0]
    plain = wanted, *torch.autograd.grad(wanted, (x, weight), dout)
    errors = [distance(a.detach(), b.detach()) for a, b in zip(ours, plain, strict=True)]
    if not max(errors) <= TRUE_WITHIN:
        return f"the relative error of a product is {max(errors):.2g}"
    return None


def refuse_float8(stages: CausalLMStages, device: torch.device, *, cut: bool) -> None:
    """Raise UnsupportedError if layers cannot compute all their linear products in FP8. `cut` says
    whether ranks have slices of the weights."""
    if cut:
        raise UnsupportedError(
            "products: fp8 does not run with slices of weights (parallel.tensor); use ulysses "
            f"instead, or {OFF}"
        )
    if stages.dtype is not torch.bfloat16:
        raise UnsupportedError(
            f"products: fp8 needs a model in bfloat16, got {stages.dtype}; load the model in "
            f"bfloat16, or {OFF}"
        )
    trains = any(p.requires_grad for p in stages.model.parameters())
    for number, layer in enumerate(stages.layers):
        for name, module in layer.named_modules():
            if (fault := _fault_of(module, trains=trains)) is not None:
                raise UnsupportedError(
                    f"products: fp8 needs layers whose matrices are trained nn.Linear modules, but "
                    f"layer {number}.{name} {fault}; {OFF}"
                )
    if (words := float8_fault(device)) is not None:
        raise UnsupportedError(f"products: fp8 does not work on {device}: {words}; {OFF}")


def _fault_of(module: nn.Module, *, trains: bool) -> str | None:
    """Return why a module's products cannot be in FP8; None if they can, or there are none."""
    if not any(p.ndim > 1 for p in module.parameters(recurse=False)):
        return None
    if not _is_linear(module) or is_parametrized(module) or is_indexer(module):
        return f"is a {type(module).__name__}"
    if "forward" in module.__dict__:
        return "has a forward of its own"
    weight = module.weight
    assert isinstance(weight, Tensor)
    if any(width % ALIGNED for width in weight.shape):
        return f"has widths {tuple(weight.shape)}, which are no multiples of {ALIGNED}"
    return "is frozen" if trains and not weight.requires_grad else None


def _is_linear(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward
