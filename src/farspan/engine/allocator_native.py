"""The native allocators behind the entry points that PyTorch calls: one a device.

Nothing here knows torch: the same object serves PyTorch's CUDA allocator and, in tests, its CPU
allocator.
"""

import ctypes
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from farspan.engine.allocator_pytorch import EntryPoints
from farspan.memory.native import (
    LIBRARY,
    Allocator,
    AllocatorOptions,
    NativeError,
    Statistics,
    library,
    rows,
    verify,
)
from farspan.memory.replay import ReplayPlan, trace_of
from farspan.memory.trace import Trace

MODES = {"record": 0, "stitch": 1, "replay": 2}  # farspan_mode
HOOKS = {
    "set_record_stream_fn": "record_stream",
    "set_reset_fn": "reset",
    "set_memory_fraction_fn": "memory_fraction",
    # Which capture of a CUDA graph begins, ends and is over.
    "set_begin_allocate_to_pool": "begin_pool",
    "set_end_allocate_to_pool_fn": "end_pool",
    "set_release_pool": "release_pool",
}
# Counters of torch.cuda.memory_stats with a meaning here, and ours.
COUNTERS = {
    "num_alloc_retries": "retries",
    "num_ooms": "out_of_memory",
    "num_sync_all_streams": "event_syncs",
    "num_device_alloc": "creates",
    "num_device_free": "destroys",
}
# Of torch's, and what is counted here: now and at its peak, since the beginning and given back.
STATS = {
    "allocation": (None, None, "mallocs", "frees"),
    "segment": (None, None, "creates", "destroys"),
    "active": (None, None, "mallocs", "frees"),
    "allocated_bytes": ("allocated", "allocated_peak", None, None),
    "active_bytes": ("allocated", "allocated_peak", None, None),
    "requested_bytes": ("requested", "requested_peak", None, None),
    "reserved_bytes": ("reserved", "reserved_peak", None, None),
    "inactive_split": (None, None, None, None),
    "inactive_split_bytes": (None, None, None, None),
}
OVERSIZE = ("oversize_allocations", "oversize_segments")
NO_SPLIT_LIMIT = -1


class NativeMemory:
    """The library, told once how its allocators are made.

    Invariant: an allocator is made at a device's first use and lives as long as the process.
    """

    def __init__(self, mode: str, options: AllocatorOptions, path: Path = LIBRARY) -> None:
        """Raises NativeError when the library is absent or refuses the options."""
        if mode not in MODES:
            raise NativeError(f"mode: expected {', '.join(MODES)}, got {mode!r}")
        self.mode = mode
        self.options = options
        self._path = path
        self._library = library(path)
        self._made_by = options.struct()  # the library keeps its pointer to a driver's name
        verify(self._library, self._library.farspan_torch_configure(self._made_by, MODES[mode]))
        self._counted: dict[int, Statistics] = {}  # by device, when its counts were reset

    def entries(self) -> EntryPoints:
        """What PyTorch is to call."""
        return EntryPoints(
            self._address("alloc"),
            self._address("free"),
            {setter: self._address(name) for setter, name in HOOKS.items()},
        )

    def raise_out_of_memory_by(self, function: int) -> None:
        """`function(const char*)` throws in place of the library's std::runtime_error."""
        self._library.farspan_torch_set_oom(ctypes.c_void_p(function))

    def of(self, device: int) -> Allocator:
        """The allocator of a device, made now if it is not yet. Raises NativeError."""
        made = ctypes.c_void_p()
        status = self._library.farspan_torch_allocator(device, ctypes.byref(made))
        verify(self._library, status)
        if made.value is None:
            raise NativeError(f"device {device}: there is no allocator for it")
        return Allocator.borrowed(made.value, self.options, self._path)

    def follow(self, device: int, plan: ReplayPlan) -> None:
        """Serves the device by the plan from its next iteration on. Raises NativeError."""
        status = self._library.farspan_torch_set_plan(
            device, rows(plan.rows), len(plan.rows), plan.arena
        )
        verify(self._library, status)

    def recorded(self, device: int, name: str = "") -> Trace:
        """What the device was asked for since its recording began."""
        return trace_of(self.of(device).events(), name)

    def begin_iteration(self, device: int) -> None:
        """A step begins: a plan starts over, and a recording gets a mark."""
        self.of(device).begin_iteration()

    def statistics(self, device: int) -> Statistics:
        """Bytes now and at their peaks, and counts."""
        return self.of(device).statistics()

    def headroom(self, device: int) -> int | None:
        """Bytes that may still be reserved; None where only the device is the limit."""
        if not self.options.capacity:
            return None
        return max(0, self.options.capacity - self.statistics(device).reserved)

    def torch_statistics(self, device: int) -> dict[str, Any]:
        """As torch.cuda.memory_stats_as_nested_dict has them. There is one pool here, told as
        the large one; what is not counted is zero."""
        now, then = self.statistics(device), self._counted.get(device)

        def since(name: str) -> int:
            return int(getattr(now, name)) - (int(getattr(then, name)) if then else 0)

        found: dict[str, Any] = {ours: since(name) for ours, name in COUNTERS.items()}
        for stat, (current, peak, made, gone) in STATS.items():
            values = {
                "current": getattr(now, current) if current else 0,
                "peak": getattr(now, peak) if peak else 0,
                "allocated": since(made) if made else 0,
                "freed": since(gone) if gone else 0,
            }
            if made and gone:
                values["current"] = getattr(now, made) - getattr(now, gone)
            found[stat] = {"all": values, "large_pool": dict(values), "small_pool": _zeros(values)}
        found |= {name: dict.fromkeys(values, 0) for name in OVERSIZE}
        return found | {"max_split_size": NO_SPLIT_LIMIT, "num_oom_rejections": 0}

    def reset_peaks(self, device: int) -> None:
        """Peaks start from now."""
        self.of(device).reset_peaks()

    def reset_counts(self, device: int) -> None:
        """torch's counts start from now; statistics() goes on from the beginning."""
        self._counted[device] = self.statistics(device)

    def _address(self, name: str) -> int:
        function = getattr(self._library, f"farspan_torch_{name}")
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None, name
        return address


def _zeros(values: Iterable[str]) -> dict[str, int]:
    return dict.fromkeys(values, 0)
