"""act(gate) * up by the Triton kernels: the middle of a gated MLP.

Shapes: gate, up, out and their gradients [.., I], of one dtype. Halves of one product (views of
[.., 2 I]) are read where they lie.
"""

from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from farspan.kernels.launch import Launch, check
from farspan.lazy import load

BLOCK = 2048  # elements a program: 16 a thread of 4 warps


class Act(StrEnum):
    """Activations, by their names in Hugging Face's configurations."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_pytorch_tanh"


class Lines(NamedTuple):
    """A tensor of vectors with inner stride 1, all the same distance apart, in elements."""

    base: Any
    row: int


def swiglu(gate: Tensor, up: Tensor, act: Act = Act.SILU) -> Tensor:
    """act(gate) * up, contiguous; act is rounded to the dtype before the product.

    Raises Refused for fp64 and for tensors that do not fit each other.
    """
    check("gate", gate, gate)
    check("up", up, gate, (gate.dtype,))
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    launch("forward_kernel", {"gate": gate, "up": up, "out": out}, act).run(gate)
    return out


def swiglu_backward(
    dout: Tensor, gate: Tensor, up: Tensor, act: Act = Act.SILU
) -> tuple[Tensor, Tensor]:
    """dgate and dup, contiguous, in gate's dtype; nothing is rounded on the way but act(gate)."""
    check("gate", gate, gate)
    check("up", up, gate, (gate.dtype,))
    check("dout", dout, gate)
    dgate, dup = (torch.empty_like(gate, memory_format=torch.contiguous_format) for _ in range(2))
    tensors = {"dout": dout, "gate": gate, "up": up, "dgate": dgate, "dup": dup}
    launch("backward_kernel", tensors, act).run(gate)
    return dgate, dup


def swiglu_again(
    dout: Tensor, gate: Tensor, up: Tensor, act: Act = Act.SILU
) -> tuple[Tensor, Tensor, Tensor]:
    """What `swiglu` gives, dgate and dup, contiguous: a forward that only the backward needs costs
    one write beside it."""
    check("gate", gate, gate)
    check("up", up, gate, (gate.dtype,))
    check("dout", dout, gate)
    out, dgate, dup = (
        torch.empty_like(gate, memory_format=torch.contiguous_format) for _ in range(3)
    )
    tensors = {"dout": dout, "gate": gate, "up": up, "out": out, "dgate": dgate, "dup": dup}
    launch("again_kernel", tensors, act).run(gate)
    return out, dgate, dup


def launch(kernel: str, tensors: dict[str, Tensor], act: Act) -> Launch:
    """Contiguous tensors are one line; else each row is."""
    dense = all(x.is_contiguous() for x in tensors.values())
    shape = next(iter(tensors.values())).shape
    width = shape.numel() if dense else shape[-1]
    lines = {name: _lines(x, dense) for name, x in tensors.items()}
    blocks = -(-width // BLOCK) * (shape.numel() // max(width, 1))
    sizes = {"width": width, "act": act.name, "block": BLOCK, "num_warps": 4}
    function = load("farspan.kernels.triton_gate", kernel)
    return Launch(function, (blocks,), lines | sizes)


def _lines(x: Tensor, dense: bool) -> Lines:
    if dense:
        return Lines(x, 0)
    x = x if x.stride(-1) == 1 else x.contiguous()
    x = x.reshape(-1, x.shape[-1])
    return Lines(x, x.stride(0))
