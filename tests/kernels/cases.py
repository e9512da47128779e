"""The kernels, run in Triton's interpreter or on a GPU, and how their results are judged.

What runs in the interpreter's process is in this file, which imports no test and no Triton.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farspan.hf.dropout import Numbers, dropped
from farspan.kernels.operations import add_, cross_entropy, merge_
from farspan.lazy import load
from tests.numerics import relative_error

# Calls a function with tensors where kernels run.
Run = Callable[..., Any]
HALF, SINGLE, BRAIN = torch.float16, torch.float32, torch.bfloat16
INTERPRETED = (SINGLE, BRAIN)


def round_bfloat16() -> None:
    """In the interpreter, as a GPU rounds: it cuts off the bits that bf16 has no place for."""
    builder = load("triton.runtime.interpreter", "InterpreterBuilder")
    handle = load("triton.runtime.interpreter", "TensorHandle")
    wide, brain = (load("triton.language", name) for name in ("float32", "bfloat16"))
    cast = builder.cast_impl

    def rounded(self: Any, source: Any, target: Any) -> Any:
        dtypes = source.dtype.scalar, target.scalar
        if dtypes == (wide, brain):
            bits = torch.tensor(source.data).bfloat16().view(torch.int16).numpy().view(np.uint16)
        elif dtypes == (brain, wide):
            bits = (source.data.astype(np.uint32) << 16).view(np.float32)
        else:
            return cast(self, source, target)
        return handle(bits, target.scalar)

    builder.cast_impl = rounded


def place_of(run: Run) -> str:
    """Where PyTorch computes what is compared with: some of a GPU's functions are approximate."""
    return "cuda" if run is on_gpu else "cpu"


def on_gpu(function: Run, *arguments: Any) -> Any:
    """What `Run` is on a GPU."""
    there = [x.to("cuda") if isinstance(x, Tensor) else x for x in arguments]
    results = function(*there)
    return results.cpu() if isinstance(results, Tensor) else tuple(x.cpu() for x in results)


def dropped_by_kernel(x: Tensor, p: float, row: int, first: int) -> Tensor:
    return dropped(x, p, Numbers((2**63 + 11, 77), row, first, fused=True))


def merged(out: Tensor, lse: Tensor, *part: Tensor) -> tuple[Tensor, Tensor]:
    merge_(out, lse, (part[0], part[1]))
    return out, lse


def added(total: Tensor, *parts: Tensor) -> Tensor:
    add_(total, *parts)
    return total


def differentiated(
    logits: Tensor, targets: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    return cross_entropy(logits, targets, scale, softcap=softcap), logits


def assert_no_less_accurate(found: Tensor, exact: Tensor, plain: Tensor) -> None:
    """At most twice the error of PyTorch in the same dtype, against fp64.

    What PyTorch rounds to the right bits by luck is granted the rounding of the result.
    """
    assert found.dtype == plain.dtype
    limit = max(2 * relative_error(plain, exact), torch.finfo(plain.dtype).eps / 2)
    error = relative_error(found, exact)
    assert error <= limit, f"{error:.3g} > {limit:.3g}"


def gradients(
    function: Callable[..., Tensor], dout: Tensor, *inputs: Tensor, place: str = "cpu"
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The function's result and autograd's gradients, in the dtype of the inputs."""
    leaves = [x.detach().to(place).requires_grad_() for x in inputs]
    out = function(*leaves)
    found = torch.autograd.grad(out, leaves, dout.to(out))
    return out.detach().cpu(), tuple(x.cpu() for x in found)


def spread(x: Tensor) -> Tensor:
    """The same along the first dimension so far apart that the last begins beyond 2**31 elements.
    Memory between is never touched, hence never given."""
    apart = 2**31 // (len(x) - 1) + 16
    storage = torch.UntypedStorage((len(x) - 1) * apart * x.itemsize + x.nbytes)
    far = x.new_empty(0).set_(storage, 0, x.shape, (apart, *x.stride()[1:]))
    return far.copy_(x)
