"""The native allocator by ctypes: GMLake's stitching, a recorder, and replay of a static plan.

The library is plain C (native/include/farspan_memory.h) and independent of Python. It is built with
the package; without a compiler it is absent, and library() names the remedy.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum, IntFlag
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from farspan_memory.errors import UnsupportedError

LIBRARY = Path(__file__).with_name("libfarspan_memory.so")
ABI = 4
UNPLANNED = 2**64 - 1


class NativeError(UnsupportedError):
    """The native allocator is missing, it refused an argument, or its backend failed."""


class NativeOutOfMemory(NativeError):
    """No memory is left within the capacity, even after every retry: state S5 of GMLake."""


class UnknownPointer(NativeError):
    """A pointer that this allocator did not return, or that is freed already."""


class Broken(NativeError):
    """The allocator's check found a violated invariant."""


class Backend(IntEnum):
    """Sources of the physical memory that an allocator maps."""

    NULL = 0  # none: bookkeeping only, addresses that must not be touched
    POSIX = 1  # one memfd, mapped at several addresses
    CUDA = 2  # virtual memory management of the driver


class Policy(IntFlag):
    """Switches of the stitching allocator; the C header describes each."""

    PAPER = 0
    LAZY = 1
    HALF_STITCH = 2
    STEAL = 4
    MERGE = 8
    SHUFFLE = 16
    QUARANTINE = 32
    DEFAULT = LAZY | STEAL | MERGE


class BackendCall(IntEnum):
    """Calls to the CUDA driver (or to its stand-in) that a test can let fail, by number."""

    RESERVE = 0
    CREATE = 1
    MAP = 2
    ACCESS = 3
    EVENT = 4


class EventKind(IntEnum):
    """Kinds of recorded events."""

    MALLOC = 1
    FREE = 2
    MARK = 3


@dataclass(frozen=True, slots=True)
class AllocatorOptions:
    """Options of a native allocator, sizes in bytes; for 0 the C header names a default."""

    backend: Backend = Backend.NULL
    device: int = 0
    capacity: int = 0
    chunk: int = 2 << 20
    tail: int = 0
    small: int = 0
    fragment_limit: int = 0
    virtual_limit: int = 0
    mapping_limit: int = 0
    policy: Policy = Policy.DEFAULT
    peers: int = 0
    replay_window: int = 0
    replay_misses: int = 0
    seed: int = 0
    library: str | None = None

    def struct(self) -> "COptions":
        """Return the options as a C struct for the library."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "library"}
        for name, value in values.items():
            whole(name, value, bits=31 if name in ("backend", "device") else 64)
        return COptions(**values, library=self.library.encode() if self.library else None)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counters of an allocator. Bytes are current values, peaks count since reset_peaks(), and all
    others since the allocator was made."""

    requested: int
    allocated: int
    reserved: int
    requested_peak: int
    allocated_peak: int
    reserved_peak: int
    held: int
    pinned: int
    mallocs: int
    frees: int
    small_mallocs: int
    s1_primitive: int
    s1_stitched: int
    s2: int
    s3: int
    s4: int
    s5: int
    allocs: int
    splits: int
    stitches: int
    stitch_frees: int
    merges: int
    steals: int
    retries: int
    out_of_memory: int
    pblocks: int
    sblocks: int
    virtual_bytes: int
    mappings: int
    reserves: int
    range_frees: int
    creates: int
    destroys: int
    maps: int
    unmaps: int
    accesses: int
    tail_creates: int
    tail_destroys: int
    tail_maps: int
    event_records: int
    event_queries: int
    event_waits: int
    event_syncs: int
    iterations: int
    replay_hits: int
    replay_misses: int
    replay_overlaps: int
    replay_resyncs: int
    replay_give_ups: int


class NativeEvent(NamedTuple):
    """A recorded event: a malloc, a free (with the malloc's id), or a mark (number `size`)."""

    kind: EventKind
    id: int
    size: int
    stream: int


class PlanRow(NamedTuple):
    """One malloc in a plan: its size, its stream, and its address in the arena or UNPLANNED."""

    size: int
    stream: int
    address: int


class COptions(ctypes.Structure):
    """The C struct farspan_options."""

    _fields_ = (
        ("backend", ctypes.c_int32),
        ("device", ctypes.c_int32),
        *(
            (f.name, ctypes.c_uint64)
            for f in fields(AllocatorOptions)
            if f.name not in ("backend", "device", "library")
        ),
        ("library", ctypes.c_char_p),
    )


class CStatistics(ctypes.Structure):
    """The C struct farspan_statistics."""

    _fields_ = tuple((f.name, ctypes.c_uint64) for f in fields(Statistics))


class CEvent(ctypes.Structure):
    """The C struct farspan_event."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("id", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
    )


class CRow(ctypes.Structure):
    """The C struct farspan_row."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in PlanRow._fields)


ERRORS: dict[int, type[NativeError]] = {
    1: NativeOutOfMemory,
    3: UnknownPointer,
    6: Broken,
}


def _signatures() -> dict[str, tuple[object, ...]]:
    """Return, by name, the argument types of the library's functions that return a status."""
    a, u64, i32 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
    out, rows = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(CRow)
    return {
        "create": (ctypes.POINTER(COptions), out),
        "malloc": (a, u64, u64, out),
        "free": (a, ctypes.c_void_p),
        "record_stream": (a, ctypes.c_void_p, u64),
        "release": (a, u64),
        "set_capacity": (a, u64),
        "check": (a,),
        "set_plan": (a, rows, u64, u64),
        "fail_at": (a, i32, u64, u64),
        "hold_events": (a, i32),
        "set_capturing": (a, u64, i32),
        "torch_configure": (ctypes.POINTER(COptions), i32),
        "torch_set_plan": (i32, rows, u64, u64),
        "torch_allocator": (i32, out),
    }


@cache
def library(path: Path = LIBRARY) -> ctypes.CDLL:
    """Load the library and declare its functions. Raises NativeError if it is missing or belongs to
    another version of the package."""
    build = "install g++ and CMake 3.20 or newer, then reinstall farspan-memory"
    if not path.exists():
        raise NativeError(f"the native allocator is not built: {path} is missing; {build}")
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"the native allocator does not load: {error}; {build}") from error
    found.farspan_abi.restype = ctypes.c_uint32
    if found.farspan_abi() != ABI:
        raise NativeError(
            f"the native allocator has version {found.farspan_abi()}, expected {ABI}; {build}"
        )
    for name, arguments in _signatures().items():
        getattr(found, f"farspan_{name}").argtypes = arguments
    a, u64 = ctypes.c_void_p, ctypes.c_uint64
    found.farspan_error.restype = ctypes.c_char_p
    found.farspan_destroy.argtypes = (a,)
    found.farspan_get_statistics.argtypes = (a, ctypes.POINTER(CStatistics))
    found.farspan_reset_peaks.argtypes = (a,)
    found.farspan_record.argtypes = (a, ctypes.c_int)
    found.farspan_mark.argtypes = (a, u64)
    found.farspan_read_events.argtypes = (a, u64, ctypes.POINTER(CEvent), u64)
    found.farspan_read_events.restype = u64
    found.farspan_begin_iteration.argtypes = (a,)
    for name in ("destroy", "get_statistics", "reset_peaks", "record", "mark", "begin_iteration"):
        getattr(found, f"farspan_{name}").restype = None
    return found


def verify(loaded: ctypes.CDLL, status: int) -> None:
    """Raise the error for a status that a function of the library returned; 0 is none."""
    if status:
        raise ERRORS.get(status, NativeError)(loaded.farspan_error().decode())


def rows(plan: Sequence[PlanRow]) -> ctypes.Array[CRow]:
    """Return a plan's rows as a C array."""
    return (CRow * len(plan))(*(CRow(*row) for row in plan))


def whole(name: str, value: int, bits: int = 64) -> int:
    """Return `value` if it fits into `bits` bits: ctypes would cut it. Raises NativeError."""
    if not 0 <= value < 2**bits:
        raise NativeError(f"{name}: expected 0 to 2**{bits} - 1, got {value}")
    return value


# -- the allocator ------------------------------------------------------------------------------


# Events copied at a time: 8 MiB.
EVENTS = 1 << 18


class Allocator:
    """Native allocator of one device. Any thread may call it.

    Invariant: `_handle` is a live farspan_allocator until close(), and None after it.
    """

    def __init__(self, options: AllocatorOptions, path: Path = LIBRARY) -> None:
        """Create an allocator. Raises NativeError if the library or the backend is missing."""
        self._library = library(path)
        made = ctypes.c_void_p()
        self.options = options
        self._handle: int | None = None
        self._owned = True
        verify(self._library, self._library.farspan_create(options.struct(), ctypes.byref(made)))
        self._handle = made.value

    @classmethod
    def borrowed(cls, handle: int, options: AllocatorOptions, path: Path = LIBRARY) -> Self:
        """Return an Allocator for a handle that its owner will destroy, such as the handle of
        farspan_torch_allocator."""
        self = cls.__new__(cls)
        self._library, self._handle, self.options = library(path), handle, options
        self._owned = False
        return self

    def malloc(self, size: int, stream: int = 0) -> int:
        """Return the address of `size` bytes for a stream's work; 0 for size 0. Raises
        NativeOutOfMemory."""
        made = ctypes.c_void_p()
        size, stream = whole("size", size), whole("stream", stream)
        self._call("malloc", size, stream, ctypes.byref(made))
        return made.value or 0

    def free(self, pointer: int) -> None:
        """Free memory. Raises UnknownPointer for a pointer that is not allocated here."""
        self._call("free", pointer)

    def record_stream(self, pointer: int, stream: int) -> None:
        """Delay reuse of this memory until the work that is on the stream at its free is done."""
        self._call("record_stream", pointer, whole("stream", stream))

    def release(self, keep: int = 0) -> None:
        """Return unused memory to the backend until at most `keep` bytes are reserved."""
        self._call("release", whole("keep", keep))

    def set_capacity(self, capacity: int) -> None:
        """Limit the physical bytes. Memory reserved beyond the limit stays until it is released."""
        self._call("set_capacity", whole("capacity", capacity))

    def statistics(self) -> Statistics:
        found = CStatistics()
        self._library.farspan_get_statistics(self._live(), ctypes.byref(found))
        return Statistics(**{f.name: getattr(found, f.name) for f in fields(Statistics)})

    def reset_peaks(self) -> None:
        self._library.farspan_reset_peaks(self._live())

    def check(self) -> None:
        """Check all invariants, which is slow. Raises Broken, naming a violated one."""
        self._call("check")

    def record(self, on: bool = True) -> None:
        """Start a recording, which discards the previous one, or stop the recording."""
        self._library.farspan_record(self._live(), on)

    def mark(self, number: int) -> None:
        """Add a mark to the recording."""
        self._library.farspan_mark(self._live(), whole("number", number))

    def events(self) -> Iterator[NativeEvent]:
        """Yield the events recorded so far."""
        block = (CEvent * EVENTS)()
        start = 0
        while n := self._library.farspan_read_events(self._live(), start, block, EVENTS):
            yield from (NativeEvent(EventKind(e.kind), e.id, e.size, e.stream) for e in block[:n])
            start += n

    def plan(self, plan: Sequence[PlanRow], arena: int) -> None:
        """Follow these rows of a plan (none: no plan) from the next iteration on. Raises
        NativeError for a row beyond the arena, NativeOutOfMemory for an arena beyond the
        capacity."""
        self._call("set_plan", rows(plan), len(plan), whole("arena", arena))

    def begin_iteration(self) -> None:
        """Begin an iteration: the plan starts again with its first malloc."""
        self._library.farspan_begin_iteration(self._live())

    def fail_at(self, call: BackendCall, nth: int, times: int = 1) -> None:
        """Make `times` backend calls of a kind fail, beginning with the nth from now; for tests."""
        self._call("fail_at", call, whole("nth", nth), whole("times", times))

    def hold_events(self, on: bool = True) -> None:
        """Keep stream events pending as if work went on, or stop that; for tests without CUDA."""
        self._call("hold_events", on)

    def set_capturing(self, stream: int, on: bool = True) -> None:
        """Treat the stream as capturing a CUDA graph; for tests without CUDA."""
        self._call("set_capturing", whole("stream", stream), on)

    def close(self) -> None:
        """Destroy the allocator and return all its memory, even if pointers are still in use."""
        if self._handle is not None and self._owned:
            self._library.farspan_destroy(self._handle)
        self._handle = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _live(self) -> int:
        if self._handle is None:
            raise NativeError("the allocator is closed")
        return self._handle

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, f"farspan_{name}")(self._live(), *arguments)
        verify(self._library, status)
