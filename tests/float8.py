"""torchao's float8 training as its contract says, where it is not installed: dense, on a CPU."""

import sys
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farspan.attention.backends import accumulate_dtype
from farspan.engine.float8 import float8_fault, float8_linears

PACKAGE = "torchao.float8"
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def rounded(x: Tensor, dim: int) -> Tensor:
    """Return x as e4m3 with a scale, a power of two, for each row along `dim`; in float32, or x's
    dtype if that is wider."""
    wide = x.to(accumulate_dtype(x.dtype))
    scale = LARGEST / wide.abs().amax(dim, keepdim=True).clamp(min=1e-12)
    scale = torch.exp2(scale.log2().floor())
    return (wide * scale).to(torch.float8_e4m3fn).to(wide.dtype) / scale


class Rowwise(torch.autograd.Function):
    """x @ w.t() of rounded operands; each product rounds along its own inner dimension."""

    off = 0.0  # by which results are wrong

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = rounded(x, -1) @ rounded(weight, 1).t()
        return (out * (1 + Rowwise.off)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rows, inputs = dout.flatten(0, -2), x.flatten(0, -2)
        dx = (rounded(rows, 1) @ rounded(weight, 0)).view(x.shape).to(x.dtype)
        dweight = rounded(rows, 0).t() @ rounded(inputs, 0)
        return dx, dweight.to(weight.dtype)


@dataclass(frozen=True)
class Config:
    """Of torchao's own, the fields that farspan sets."""

    pad_inner_dim: bool = False
    emulate: bool = False

    @classmethod
    def from_recipe_name(cls, name: str) -> "Config":
        assert name == "rowwise"
        return cls()


class RowwiseLinear(nn.Linear):
    """A linear module in FP8."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Rowwise.apply(x, self.weight)
        return out if self.bias is None else out + self.bias


def convert(module: nn.Linear, *, config: Config) -> RowwiseLinear:
    assert config == Config(pad_inner_dim=True, emulate=True)
    sizes = module.in_features, module.out_features
    made = RowwiseLinear(*sizes, bias=False, device="meta")
    made.weight, made.bias = module.weight, module.bias
    return made


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use torchao if it is installed, else the stand-in above."""
    for known in (float8_linears, float8_fault):
        known.cache_clear()
    if find_spec("torchao") is not None:
        return
    for name in ("torchao", PACKAGE):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    there = sys.modules[PACKAGE]
    vars(there).update(Float8LinearConfig=Config, convert_to_float8_training=partial(convert))
