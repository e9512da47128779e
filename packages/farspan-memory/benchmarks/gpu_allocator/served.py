"""What a trace is served by: PyTorch's allocator, or the native one behind PyTorch's entry points.

On a machine without CUDA the native allocator is asked directly, over memory of the machine or
over a driver that is a fake, and PyTorch's two are models of their rules.
"""

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

import farspan_memory as memory
from farspan_memory import native
from farspan_memory.compare import allocators
from farspan_memory.compare.allocators import ExpandableAllocator
from farspan_memory.formatting import MIB, UNLIMITED
from farspan_memory.native import LIBRARY, AllocatorOptions, PlanRow, library, verify

DEVICE = 0
MARGIN = 1 << 30  # bytes of the device left to the driver
SLACK = 4096  # bytes: a share of the device is a float, and a limit must not lose its last chunk


@dataclass(frozen=True, slots=True)
class Contender:
    """An allocator as it is chosen at the start of a process."""

    name: str
    configuration: str = ""  # of PyTorch's
    mode: str = ""  # of farspan_memory.install; "" for PyTorch's own
    chunk: int = 0  # bytes
    weight: float = 1.0  # of the time that all contenders share

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "mode": self.mode, "chunk": self.chunk}


CONTENDERS = (
    Contender("caching allocator"),
    Contender("expandable segments", "expandable_segments:True", weight=1.5),
    # 16 times the calls of the driver.
    Contender("stitching, 2 MiB", mode="stitch", chunk=2 * MIB, weight=3.0),
    Contender("stitching, 32 MiB", mode="stitch", chunk=32 * MIB),
    Contender("static plan, replayed", mode="replay", chunk=32 * MIB),
)


class Served(Protocol):
    """An allocator that serves a trace. `alloc` raises what out_of_memory() knows."""

    modelled: bool  # a model of it, not its code

    @property
    def capacity(self) -> int: ...  # bytes that it may be given at most
    @property
    def alloc(self) -> Callable[[int], int]: ...  # bytes to an address
    @property
    def free(self) -> Callable[[int], None]: ...
    def limit(self, capacity: int) -> None: ...  # bytes reserved at most, when nothing is alive
    def clear(self) -> None: ...  # what is idle goes back
    def reset(self) -> None: ...  # peaks start from now
    def counts(self) -> Mapping[str, int]: ...


def out_of_memory(error: Exception) -> bool:
    """Whether that is what an exception says."""
    kinds = (torch.OutOfMemoryError, native.NativeOutOfMemory, allocators.SimulatedOutOfMemory)
    return isinstance(error, kinds) or "out of memory" in str(error)


def limit_pytorch(capacity: int) -> None:
    """PyTorch's own allocator reserves so many bytes at most; it takes them as a share of what the
    device's properties have, which the driver may count otherwise than its free memory."""
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (capacity + SLACK) / total))


class OfTorch:
    """Whatever allocator this process's PyTorch has on its GPU."""

    modelled = False

    def __init__(self) -> None:
        torch.cuda.init()
        torch.cuda.set_device(DEVICE)
        self.capacity = torch.cuda.mem_get_info()[0] - MARGIN
        core: Any = torch._C
        alloc: Callable[[int, int], int] = core._cuda_cudaCachingAllocator_raw_alloc
        self.alloc: Callable[[int], int] = lambda size: alloc(size, 0)
        self.free: Callable[[int], None] = core._cuda_cudaCachingAllocator_raw_delete

    def limit(self, capacity: int) -> None:
        limit_pytorch(capacity)

    def clear(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def counts(self) -> Mapping[str, int]:
        found = torch.cuda.memory_stats()
        return {
            "reserved_peak": found["reserved_bytes.all.peak"],
            "retries": found["num_alloc_retries"],
            "out_of_memory": found["num_ooms"],
            "device_allocs": found.get("num_device_alloc", 0),
            "device_frees": found.get("num_device_free", 0),
        }


class OfLibrary:
    """The native allocator as it is, and its own counts."""

    modelled = False

    def __init__(self, allocator: native.Allocator, capacity: int) -> None:
        self.allocator = allocator
        self.capacity = capacity
        self.alloc: Callable[[int], int] = allocator.malloc
        self.free: Callable[[int], None] = allocator.free

    def limit(self, capacity: int) -> None:
        self.allocator.set_capacity(capacity)

    def clear(self) -> None:
        self.allocator.release()

    def reset(self) -> None:
        self.allocator.reset_peaks()

    def counts(self) -> Mapping[str, int]:
        found = self.allocator.statistics()
        names = (
            *("reserved_peak", "retries", "out_of_memory", "creates", "destroys", "maps", "unmaps"),
            *("accesses", "stitches", "stitch_frees", "splits", "steals", "event_syncs"),
            *("replay_hits", "replay_misses", "replay_overlaps"),
        )
        return {name: getattr(found, name) for name in names}


class OfBoth(OfLibrary):
    """The native allocator installed in PyTorch: requests go through PyTorch, the rest does not."""

    def __init__(self, contender: Contender) -> None:
        memory.install(contender.mode, chunk=contender.chunk)
        asked = OfTorch()
        super().__init__(torch_allocator(contender.chunk), asked.capacity)
        self.alloc, self.free = asked.alloc, asked.free

    def clear(self) -> None:
        torch.cuda.synchronize()
        super().clear()


class Modelled:
    """A model of PyTorch's, on a device that is never full until it is limited."""

    modelled = True

    def __init__(self, kind: type[allocators.CachingAllocator], capacity: int) -> None:
        self._kind = kind
        self.capacity = capacity
        self._limit, self._next = UNLIMITED, 0
        self._made = kind(UNLIMITED)

    def alloc(self, size: int) -> int:
        self._next += 1
        self._made.malloc(self._next, size)
        return self._next

    def free(self, pointer: int) -> None:
        self._made.free(pointer)

    def limit(self, capacity: int) -> None:
        self._limit = capacity
        self.clear()

    def clear(self) -> None:
        self._made = self._kind(self._limit)

    def reset(self) -> None:
        pass

    def counts(self) -> Mapping[str, int]:
        return {"reserved_peak": self._made.reserved_peak, "retries": self._made.retries}


def torch_allocator(chunk: int) -> native.Allocator:
    """The allocator behind PyTorch's entry points, once it is installed."""
    found, made = library(LIBRARY), ctypes.c_void_p()
    verify(found, found.farspan_torch_allocator(DEVICE, ctypes.byref(made)))
    assert made.value is not None
    return native.Allocator.borrowed(made.value, AllocatorOptions(chunk=chunk))


def serving(contender: Contender, device: str, options: AllocatorOptions, capacity: int) -> Served:
    """The contender on the device. `options` and `capacity` (bytes) are for a CPU. Raises
    UnsupportedError where the native allocator cannot be."""
    if device == "cuda":
        return OfBoth(contender) if contender.mode else OfTorch()
    if contender.mode:
        made = native.Allocator(replace(options, chunk=contender.chunk))
        return OfLibrary(made, capacity)
    kind = ExpandableAllocator if contender.configuration else allocators.CachingAllocator
    return Modelled(kind, capacity)


def rows_of(sizes: list[int], addresses: list[int]) -> list[PlanRow]:
    """A plan as the native allocator takes it."""
    return [PlanRow(size, 0, address) for size, address in zip(sizes, addresses, strict=True)]
