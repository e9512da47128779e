"""Hooks of the native allocator in PyTorch (2.11 to 2.13): entry points, statistics, errors.

torch.cuda.memory reads its allocator's statistics through names in torch._C, which raise "does not
yet support" for a pluggable allocator. Those names are replaced, so that all functions of torch
built on them (memory_stats, memory_allocated, memory_summary, the peaks, torch.accelerator) work.

`NativeMemory` holds one native allocator a device and is independent of torch: the same object
serves PyTorch's CUDA allocator and, in tests, its CPU allocator. The CUDA driver tells before CUDA
starts whether a device maps virtual memory.

A pluggable allocator that returns no memory gives PyTorch a null pointer, so it has to throw. The
exception that becomes torch.OutOfMemoryError is a type of the user's own c10, which the native
library cannot know: a few lines are compiled once against it, if a compiler is installed.
"""

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from farspan_memory.errors import UnsupportedError
from farspan_memory.files import digest, is_open, private_folder, publish, refuse_foreign
from farspan_memory.native import (
    LIBRARY,
    Allocator,
    AllocatorOptions,
    NativeError,
    Statistics,
    library,
    rows,
    verify,
)
from farspan_memory.replay import ReplayPlan, trace_of
from farspan_memory.trace import Trace

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class EntryPoints:
    """Addresses of the native functions for PyTorch to call, with the expected signatures."""

    allocate: int  # void* (size_t, int device, cudaStream_t)
    free: int  # void (void*, size_t, int device, cudaStream_t)
    hooks: Mapping[str, int]  # by CUDAPluggableAllocator's method that sets it


@dataclass(slots=True)
class Plugged:
    """PyTorch's allocator and functions from before another allocator replaced them.

    Invariant: `kept` holds the replaced functions of torch, by owner and name.
    """

    before: Any  # PyTorch's own allocator
    ours: Any  # PyTorch keeps no reference to the Python object
    kept: list[tuple[Any, str, Any]] = field(default_factory=list)

    def replace(self, owner: Any, name: str, function: Function) -> None:
        """Replace an attribute of torch, if this version of torch has it."""
        if hasattr(owner, name):
            self.kept.append((owner, name, getattr(owner, name)))
            setattr(owner, name, function)

    def restore(self) -> None:
        """Restore PyTorch's allocator and functions. Raises UnsupportedError once CUDA has started,
        because the allocator can then no longer change."""
        if torch.cuda.is_initialized():
            raise UnsupportedError(
                "allocator: CUDA has started, and PyTorch cannot change its allocator after that; "
                "start a new process to run without it"
            )
        torch._C._cuda_changeCurrentAllocator(self.before)
        for owner, name, function in reversed(self.kept):
            setattr(owner, name, function)
        self.kept.clear()


def refuse_unready() -> None:
    """Raise UnsupportedError if PyTorch has no CUDA allocator to replace, or has started CUDA."""
    if not hasattr(torch._C, "_cuda_customAllocator"):
        raise UnsupportedError(
            f"allocator: this PyTorch ({torch.__version__}) is built without CUDA, but "
            "farspan-memory replaces only the CUDA allocator; install a CUDA build of PyTorch"
        )
    if torch.cuda.is_initialized():
        raise UnsupportedError(
            "allocator: CUDA has already started in this process, and PyTorch takes another "
            "allocator only before that; install first, before any tensor or query on the GPU"
        )


def plug_in(entries: EntryPoints) -> Plugged:
    """Make these functions PyTorch's CUDA allocator. Raises UnsupportedError if PyTorch refuses."""
    before = torch._C._cuda_getAllocator()
    ours = torch._C._cuda_customAllocator(entries.allocate, entries.free)
    for setter, address in entries.hooks.items():
        if hasattr(ours, setter):
            getattr(ours, setter)(address)
    try:
        torch._C._cuda_changeCurrentAllocator(ours)
    except RuntimeError as error:
        raise UnsupportedError(f"allocator: PyTorch refused it: {error}") from error
    return Plugged(before, ours)


def lend_statistics(
    plugged: Plugged,
    read: Callable[[int], dict[str, Any]],
    reset_peaks: Callable[[int], None],
    reset_counts: Callable[[int], None],
) -> None:
    """Let torch report the statistics that `read` returns for a device, in torch's nested form."""
    for prefix, names in (
        ("_cuda_", ("memoryStats", "resetPeakMemoryStats", "resetAccumulatedMemoryStats")),
        ("_accelerator_", ("getDeviceStats", "resetPeakStats", "resetAccumulatedStats")),
    ):
        for name, function in zip(names, (read, reset_peaks, reset_counts), strict=True):
            plugged.replace(torch._C, prefix + name, function)


def limit_free_memory(plugged: Plugged, headroom: Callable[[int], int | None]) -> None:
    """Let torch.cuda.mem_get_info report at most `headroom(device)` free bytes, which the allocator
    may still reserve; None: no limit."""
    ask = torch.cuda.memory.mem_get_info

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        free, total = ask(device)
        left = headroom(torch.cuda._utils._get_device_index(device, optional=True))
        return (free if left is None else min(free, left)), total

    plugged.replace(torch.cuda.memory, "mem_get_info", mem_get_info)
    plugged.replace(torch.cuda, "mem_get_info", mem_get_info)


MODES = {"record": 0, "stitch": 1, "replay": 2}  # farspan_mode
HOOKS = {
    "set_record_stream_fn": "record_stream",
    "set_reset_fn": "reset",
    "set_memory_fraction_fn": "memory_fraction",
    # Entry points for the begin, the end and the release of a CUDA graph's capture.
    "set_begin_allocate_to_pool": "begin_pool",
    "set_end_allocate_to_pool_fn": "end_pool",
    "set_release_pool": "release_pool",
}
# Counters of torch.cuda.memory_stats with a native equivalent.
COUNTERS = {
    "num_alloc_retries": "retries",
    "num_ooms": "out_of_memory",
    "num_sync_all_streams": "event_syncs",
    "num_device_alloc": "creates",
    "num_device_free": "destroys",
}
# torch's name, and the native counters: current, peak, total and freed.
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
    """The native allocators of all devices, with equal options.

    Invariant: an allocator is made at a device's first use and lives as long as the process.
    """

    def __init__(self, mode: str, options: AllocatorOptions, path: Path = LIBRARY) -> None:
        """Set the options. Raises NativeError if the library is missing or refuses them."""
        if mode not in MODES:
            raise NativeError(f"mode: expected {', '.join(MODES)}, got {mode!r}")
        self.mode = mode
        self.options = options
        self._path = path
        self._library = library(path)
        self._made_by = options.struct()  # the library keeps its pointer to a driver's name
        verify(self._library, self._library.farspan_torch_configure(self._made_by, MODES[mode]))
        self._counted: dict[int, Statistics] = {}  # by device, at the last reset of its counts

    def entries(self) -> EntryPoints:
        """Return the addresses of the functions for PyTorch to call."""
        return EntryPoints(
            self._address("alloc"),
            self._address("free"),
            {setter: self._address(name) for setter, name in HOOKS.items()},
        )

    def raise_out_of_memory_by(self, function: int) -> None:
        """Set the C function that throws on out-of-memory (default: std::runtime_error)."""
        self._library.farspan_torch_set_oom(ctypes.c_void_p(function))

    def of(self, device: int) -> Allocator:
        """Return a device's allocator, which is created on first use. Raises NativeError."""
        made = ctypes.c_void_p()
        status = self._library.farspan_torch_allocator(device, ctypes.byref(made))
        verify(self._library, status)
        if made.value is None:
            raise NativeError(f"device {device}: there is no allocator for it")
        return Allocator.borrowed(made.value, self.options, self._path)

    def follow(self, device: int, plan: ReplayPlan) -> None:
        """Let a device follow a plan from its next iteration on. Raises NativeError."""
        status = self._library.farspan_torch_set_plan(
            device, rows(plan.rows), len(plan.rows), plan.arena
        )
        verify(self._library, status)

    def recorded(self, device: int, name: str = "") -> Trace:
        """Return a device's recording as a trace."""
        return trace_of(self.of(device).events(), name)

    def begin_iteration(self, device: int) -> None:
        """Begin an iteration on a device: its plan starts again, and its recording gets a mark."""
        self.of(device).begin_iteration()

    def statistics(self, device: int) -> Statistics:
        """Return a device's present bytes, their peaks, and counts of events."""
        return self.of(device).statistics()

    def headroom(self, device: int) -> int | None:
        """Return the bytes that a device may still reserve, or None without a capacity."""
        if not self.options.capacity:
            return None
        return max(0, self.options.capacity - self.statistics(device).reserved)

    def torch_statistics(self, device: int) -> dict[str, Any]:
        """Return a device's statistics in the form of torch.cuda.memory_stats_as_nested_dict. Its
        one pool counts as torch's large pool; counters without an equivalent are zero."""
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
        """Restart a device's peaks from its present values."""
        self.of(device).reset_peaks()

    def reset_counts(self, device: int) -> None:
        """Restart the counts of torch_statistics() at zero, but not those of statistics()."""
        self._counted[device] = self.statistics(device)

    def _address(self, name: str) -> int:
        function = getattr(self._library, f"farspan_torch_{name}")
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None, name
        return address


def _zeros(values: Iterable[str]) -> dict[str, int]:
    return dict.fromkeys(values, 0)


DRIVER = "libcuda.so.1"
VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED


def refuse_without_virtual_memory(library: str = DRIVER) -> None:
    """Raise UnsupportedError if a visible device cannot map virtual memory. This starts the CUDA
    driver, but no device."""
    try:
        driver = ctypes.CDLL(library)
    except OSError as error:
        raise UnsupportedError(
            f"allocator: the CUDA driver does not load ({error}); install the GPU's driver"
        ) from error
    _ask(driver, "cuInit", ctypes.c_uint(0))
    count = ctypes.c_int()
    _ask(driver, "cuDeviceGetCount", ctypes.byref(count))
    if not count.value:
        raise UnsupportedError(
            "allocator: the CUDA driver shows no device; check CUDA_VISIBLE_DEVICES"
        )
    for ordinal in range(count.value):
        device, able = ctypes.c_int(), ctypes.c_int()
        _ask(driver, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        _ask(driver, "cuDeviceGetAttribute", ctypes.byref(able), VIRTUAL_MEMORY, device)
        if not able.value:
            raise UnsupportedError(
                f"allocator: device {ordinal} has no virtual memory management (attribute "
                f"{VIRTUAL_MEMORY}), which stitching needs; keep PyTorch's own allocator there"
            )


def _ask(driver: ctypes.CDLL, name: str, *arguments: object) -> None:
    try:
        status = getattr(driver, name)(*arguments)
    except AttributeError as error:
        raise UnsupportedError(
            f"allocator: the CUDA driver has no {name}; it is too old: update the driver"
        ) from error
    if status:
        raise UnsupportedError(f"allocator: the CUDA driver's {name} failed with error {status}")


CACHE = Path("~/.cache/farspan-memory")
COMPILERS = ("g++", "clang++", "c++")
SECONDS = 120.0  # compiling takes 2 s on an idle machine

SYMBOL = "farspan_raise_out_of_memory"
SOURCE = f"""\
#include <c10/util/Exception.h>

extern "C" __attribute__((visibility("default"))) void {SYMBOL}(const char* text) {{
  TORCH_CHECK_WITH(OutOfMemoryError, false, text);
}}
"""


@dataclass(frozen=True, slots=True)
class Raiser:
    """C function that throws torch's out-of-memory error; if there is none, the reason why."""

    address: int | None  # of void (*)(const char*)
    reason: str = ""


def out_of_memory_raiser(cache: Path = CACHE, compilers: tuple[str, ...] = COMPILERS) -> Raiser:
    """Return a function that throws torch's out-of-memory error, compiled or from `cache`."""
    root = Path(torch.__file__).parent
    if not (root / "include/c10/util/Exception.h").is_file():
        return Raiser(None, f"{root} has no headers")
    compiler = next((path for path in map(shutil.which, compilers) if path), None)
    if compiler is None:
        return Raiser(None, f"no C++ compiler ({', '.join(compilers)}) is on PATH")
    try:
        library = _compiled(compiler, root, cache.expanduser())
        function = getattr(ctypes.CDLL(str(library)), SYMBOL)
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        return Raiser(None, f"{compiler}: {_last_words(error)}")
    return Raiser(ctypes.cast(function, ctypes.c_void_p).value)


def _compiled(compiler: str, root: Path, cache: Path) -> Path:
    """Return the library for this torch (each has its own c10), compiling it if necessary. Its
    file's name contains its content's digest; if that differs, or others could have written the
    file, it is compiled anew. Raises NotPrivate if another user owns the file or its folder."""
    identity = "\n".join((SOURCE, torch.__version__, str(root), compiler))
    key = hashlib.sha256(identity.encode()).hexdigest()[:20]
    private_folder(cache)
    for existing in cache.glob(f"{key}-*.so"):
        refuse_foreign(existing)
        if existing.is_file() and not is_open(existing) and existing.name == _named(key, existing):
            return existing
        existing.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        source, compiled = Path(folder) / "error.cpp", Path(folder) / "error.so"
        source.write_text(SOURCE, "utf-8")
        subprocess.run(
            [compiler, *flags(root), str(source), "-o", str(compiled), *links(root)],
            check=True,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        compiled.chmod(0o700)
        built = cache / _named(key, compiled)
        publish(compiled, built)  # whole or not at all: several processes may start at once
    return built


def _named(key: str, library: Path) -> str:
    return f"{key}-{digest(library)[:20]}.so"


def flags(root: Path) -> list[str]:
    """Return the compiler flags for a library that includes torch's headers."""
    abi = int(torch.compiled_with_cxx11_abi())
    visible = ["-shared", "-fPIC", "-fvisibility=hidden", "-O1"]
    return ["-std=c++20", *visible, f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-I{root / 'include'}"]


def links(root: Path) -> list[str]:
    """Return the linker flags for torch's own c10 library."""
    return [f"-L{root / 'lib'}", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]


def _last_words(error: Exception) -> str:
    output = getattr(error, "stderr", None)
    lines = [line for line in str(output or error).splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[-1] if lines else "failed")
