"""Launches of Triton kernels: supported devices and dtypes, and tensors as kernel arguments.

Triton expands named tuples into single arguments; strides are in elements.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from farspan.lazy import load
from farspan.spec import UnsupportedError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TILE = 4096  # elements of a program at one time: 32 a thread of 4 warps


class Rows(NamedTuple):
    """Kernel argument: a tensor of vectors with inner stride 1, and the strides of the three
    indices that select a vector."""

    base: Any
    first: int
    second: int
    third: int


class Heads(NamedTuple):
    """Kernel argument: [B, H, T, D] with inner stride 1, or a permuted view [T, B, H, D]."""

    base: Any
    batch: int
    head: int
    token: int


class Sizes(NamedTuple):
    """Kernel argument: the number of vectors, and the sizes of their second and third index. All
    are `veiled`, so that one compiled kernel serves all lengths."""

    rows: int
    second: int
    third: int


class Launch(NamedTuple):
    """A kernel with grid and arguments; `run` launches it."""

    name: str
    programs: tuple[int, ...]
    arguments: dict[str, Any]
    module: str = "farspan.kernels.triton_kernels"

    @property
    def kernel(self) -> Any:
        return load(self.module, self.name)

    def run(self, x: Tensor) -> None:
        """Run the kernel on the device of `x`; on the meta device, only report it to `launched`."""
        if x.is_meta:
            _launched.get()(self)
            return
        if min(self.programs) == 0:
            return
        _check_device(x.device, self.kernel)
        with torch.cuda.device_of(x):
            # Keep the fusion of earlier releases: Triton 3.10 changes the default, and 3.9 warns.
            self.kernel[self.programs](**self.arguments, enable_fp_fusion=True)


# Outside `launched` no launch is observed.
_launched: ContextVar[Callable[[Launch], None]] = ContextVar("launched", default=lambda _: None)


@contextmanager
def launched(hear: Callable[[Launch], None]) -> Iterator[None]:
    """Run the body, and call `hear` with each kernel that would be launched on the meta device."""
    token = _launched.set(hear)
    try:
        yield
    finally:
        _launched.reset(token)


@cache
def fused_for(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the fused kernels support this dtype on this device; if not, PyTorch's
    operators run.

    They need CUDA of compute capability 8.0 or more, and bf16, fp16 or fp32 (fp64 is for checks).
    On the meta device a step allocates as it would with them.
    """
    if device.type == "meta":
        return dtype in DTYPES
    if device.type != "cuda" or dtype not in DTYPES or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _check_device(device: torch.device, kernel: Any) -> None:
    if device.type == "cuda":
        return
    if not isinstance(kernel, load("triton.runtime.interpreter", "InterpretedFunction")):
        raise UnsupportedError(
            f"device: expected CUDA for Triton, got {device}; use the PyTorch path"
        )


def check(name: str, x: Tensor, like: Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    """Raise UnsupportedError unless `x` has the shape and device of `like`, and one of `dtypes`."""
    if x.shape != like.shape or x.device != like.device or x.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise UnsupportedError(
            f"{name}: expected {tuple(like.shape)}, {wanted} on {like.device}, got "
            f"{tuple(x.shape)}, {x.dtype} on {x.device}; use the PyTorch path"
        )


def check_inner(name: str, x: Tensor) -> None:
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        raise UnsupportedError(f"{name}: expected inner stride 1; call .contiguous() on it")


def heads_of(x: Tensor) -> Heads:
    """Return a tensor [B, H, T, D] and its strides as a kernel argument."""
    return Heads(x, *x.stride()[:3])


def veiled(size: int) -> int:
    """Encode an integer as 16 size + 2, which kernels decode. Triton compiles again for integers
    that are 1 and for multiples of 16 (in tuples despite `do_not_specialize`); the code is neither,
    so one compiled kernel serves chunks of all lengths."""
    return 16 * size + 2


def padded(size: int) -> int:
    """Return the next power of two: Triton requires one for each dimension of a tile."""
    return 1 << (size - 1).bit_length()


def warps_of(elements: int, each: int, most: int = 16) -> int:
    """Return the number of warps for a tile of `elements`, with `each` elements per thread."""
    return min(max(elements // (32 * each), 1), most)


def rows_of(*tensors: Tensor, ordered: bool = True) -> tuple[list[Rows], Sizes]:
    """Return tensors with equal leading dimensions as `Rows`, in which the same three indices
    select corresponding vectors, and the sizes of these indices.

    A tensor may lack the last dimension: each of its rows is one number, and its strides, which
    depend on the length of a chunk, are veiled. With `ordered`, neighbours in the first tensor's
    memory are counted one after the other; else rows follow the order of dimensions. Tensors have
    four dimensions and any strides, or more and are contiguous.
    """
    outer = tensors[0].shape[:-1]
    dims = [d for d, size in enumerate(outer) if size != 1]
    if ordered:
        dims.sort(key=tensors[0].stride, reverse=True)
    sizes: list[int] = []
    strides: list[list[int]] = []
    for d in dims:
        here = [x.stride(d) for x in tensors]
        if sizes and strides[-1] == [outer[d] * stride for stride in here]:
            sizes[-1], strides[-1] = sizes[-1] * outer[d], here
        else:
            sizes.append(outer[d])
            strides.append(here)
    assert len(sizes) <= 3, (outer, strides)
    missing = 3 - len(sizes)
    # A stride of 0 keeps the address a multiple of 16 for Triton.
    columns = zip(*([[0] * len(tensors)] * missing + strides), strict=True)
    rows = []
    for x, column in zip(tensors, columns, strict=True):
        numbers = x.ndim == len(outer)
        rows.append(Rows(x, *(veiled(stride) if numbers else stride for stride in column)))
    _, second, third = [1] * missing + sizes
    return rows, Sizes(veiled(outer.numel()), veiled(second), veiled(third))
