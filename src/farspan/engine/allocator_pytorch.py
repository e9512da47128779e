"""Where PyTorch takes an allocator of one's own, and what PyTorch then lacks (torch 2.11 to 2.13).

torch.cuda.memory speaks to its allocator through names in torch._C. A pluggable allocator has no
statistics there: each of those names raises "does not yet support". So the names are replaced, and
all that torch builds on them (memory_stats, memory_allocated, memory_summary, the peaks, and the
same of torch.accelerator) goes on as it is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from farspan.spec import Refused

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class EntryPoints:
    """Addresses of native functions with the signatures that PyTorch asks for."""

    allocate: int  # void* (size_t, int device, cudaStream_t)
    free: int  # void (void*, size_t, int device, cudaStream_t)
    hooks: Mapping[str, int]  # by CUDAPluggableAllocator's method that sets it


@dataclass(slots=True)
class Plugged:
    """PyTorch with another allocator.

    Invariant: `kept` holds what was replaced in torch, under the owner and name it had.
    """

    before: Any  # PyTorch's own allocator
    ours: Any  # PyTorch keeps no reference of its own to what Python made
    kept: list[tuple[Any, str, Any]] = field(default_factory=list)

    def replace(self, owner: Any, name: str, function: Function) -> None:
        """Puts `function` in the place of a name that this torch has."""
        if hasattr(owner, name):
            self.kept.append((owner, name, getattr(owner, name)))
            setattr(owner, name, function)

    def restore(self) -> None:
        """PyTorch as it was. Raises Refused once CUDA has started: it never changes it then."""
        if torch.cuda.is_initialized():
            raise Refused(
                "allocator: CUDA has started, and PyTorch cannot change its allocator after that; "
                "start a new process to be without it"
            )
        torch._C._cuda_changeCurrentAllocator(self.before)
        for owner, name, function in reversed(self.kept):
            setattr(owner, name, function)
        self.kept.clear()


def refuse_unready() -> None:
    """Raises Refused where PyTorch cannot take an allocator, or cannot any more."""
    if not hasattr(torch._C, "_cuda_customAllocator"):
        raise Refused(
            f"allocator: this PyTorch ({torch.__version__}) is built without CUDA, and only "
            "CUDA's memory can have another allocator; install a CUDA build of PyTorch"
        )
    if torch.cuda.is_initialized():
        raise Refused(
            "allocator: CUDA has already started in this process, and PyTorch takes another "
            "allocator only before that; install first, before any tensor or query on the GPU"
        )


def plug_in(entries: EntryPoints) -> Plugged:
    """Makes the functions PyTorch's CUDA allocator. Raises Refused when PyTorch will not."""
    before = torch._C._cuda_getAllocator()
    ours = torch._C._cuda_customAllocator(entries.allocate, entries.free)
    for setter, address in entries.hooks.items():
        if hasattr(ours, setter):
            getattr(ours, setter)(address)
    try:
        torch._C._cuda_changeCurrentAllocator(ours)
    except RuntimeError as error:
        raise Refused(f"allocator: PyTorch refuses another one: {error}") from error
    return Plugged(before, ours)


def lend_statistics(
    plugged: Plugged,
    read: Callable[[int], dict[str, Any]],
    reset_peaks: Callable[[int], None],
    reset_counts: Callable[[int], None],
) -> None:
    """torch's statistics of a device come from `read`, nested as torch has them."""
    for prefix, names in (
        ("_cuda_", ("memoryStats", "resetPeakMemoryStats", "resetAccumulatedMemoryStats")),
        ("_accelerator_", ("getDeviceStats", "resetPeakStats", "resetAccumulatedStats")),
    ):
        for name, function in zip(names, (read, reset_peaks, reset_counts), strict=True):
            plugged.replace(torch._C, prefix + name, function)


def limit_free_memory(plugged: Plugged, headroom: Callable[[int], int | None]) -> None:
    """torch.cuda.mem_get_info tells no more memory free than the allocator may still take:
    `headroom(device)`, None where only the device is the limit."""
    ask = torch.cuda.memory.mem_get_info

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        free, total = ask(device)
        left = headroom(torch.cuda._utils._get_device_index(device, optional=True))
        return (free if left is None else min(free, left)), total

    plugged.replace(torch.cuda.memory, "mem_get_info", mem_get_info)
    plugged.replace(torch.cuda, "mem_get_info", mem_get_info)
