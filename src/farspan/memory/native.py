"""The native allocator by ctypes: GMLake's stitching, a recorder, and replay of a static plan."""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Self

from farspan.memory.library import (
    LIBRARY,
    UNPLANNED,
    Backend,
    Broken,
    Call,
    CEvent,
    CStatistics,
    Event,
    Kind,
    NativeError,
    Options,
    OutOfMemory,
    Policy,
    Row,
    Statistics,
    UnknownPointer,
    library,
    rows,
    verify,
    whole,
)

__all__ = [
    "UNPLANNED",
    "Allocator",
    "Backend",
    "Broken",
    "Call",
    "Event",
    "Kind",
    "NativeError",
    "Options",
    "OutOfMemory",
    "Policy",
    "Row",
    "Statistics",
    "UnknownPointer",
]

# Events copied at a time: 8 MiB of them.
EVENTS = 1 << 18


class Allocator:
    """One device's allocator. Calls may come from any thread.

    Invariant: `_handle` is a live farspan_allocator until close(), and None after it.
    """

    def __init__(self, options: Options, path: Path = LIBRARY) -> None:
        """Raises NativeError when the library or the backend is absent."""
        self._library = library(path)
        made = ctypes.c_void_p()
        self.options = options
        self._handle: int | None = None
        self._owned = True
        verify(self._library, self._library.farspan_create(options.struct(), ctypes.byref(made)))
        self._handle = made.value

    @classmethod
    def borrowed(cls, handle: int, options: Options, path: Path = LIBRARY) -> Self:
        """An allocator that somebody else destroys, such as that of farspan_torch_allocator."""
        self = cls.__new__(cls)
        self._library, self._handle, self.options = library(path), handle, options
        self._owned = False
        return self

    def malloc(self, size: int, stream: int = 0) -> int:
        """The address of `size` bytes for work on the stream; 0 for size 0. Raises OutOfMemory."""
        made = ctypes.c_void_p()
        size, stream = whole("size", size), whole("stream", stream)
        self._call("malloc", size, stream, ctypes.byref(made))
        return made.value or 0

    def free(self, pointer: int) -> None:
        """Raises UnknownPointer for what is not live here."""
        self._call("free", pointer)

    def record_stream(self, pointer: int, stream: int) -> None:
        """The memory is not reused before the stream's work at the time of its free is done."""
        self._call("record_stream", pointer, whole("stream", stream))

    def release(self, keep: int = 0) -> None:
        """Idle chunks go back to the backend until `keep` bytes are reserved."""
        self._call("release", whole("keep", keep))

    def set_capacity(self, capacity: int) -> None:
        """Physical bytes at most; what is reserved beyond stays until released."""
        self._call("set_capacity", whole("capacity", capacity))

    def statistics(self) -> Statistics:
        found = CStatistics()
        self._library.farspan_get_statistics(self._live(), ctypes.byref(found))
        return Statistics(**{f.name: getattr(found, f.name) for f in fields(Statistics)})

    def reset_peaks(self) -> None:
        self._library.farspan_reset_peaks(self._live())

    def check(self) -> None:
        """Raises Broken, naming the invariant that does not hold. Slow."""
        self._call("check")

    def record(self, on: bool = True) -> None:
        """Starts a recording, forgetting the one before, or stops it."""
        self._library.farspan_record(self._live(), on)

    def mark(self, number: int) -> None:
        """Puts a mark into the recording."""
        self._library.farspan_mark(self._live(), whole("number", number))

    def events(self) -> Iterator[Event]:
        """The recording so far."""
        block = (CEvent * EVENTS)()
        start = 0
        while n := self._library.farspan_read_events(self._live(), start, block, EVENTS):
            yield from (Event(Kind(e.kind), e.id, e.size, e.stream) for e in block[:n])
            start += n

    def plan(self, plan: Sequence[Row], arena: int) -> None:
        """Follows the rows from the next iteration on; () for none. Raises NativeError for a row
        beyond the arena, OutOfMemory when the capacity has no room for it."""
        self._call("set_plan", rows(plan), len(plan), whole("arena", arena))

    def begin_iteration(self) -> None:
        """The plan starts over."""
        self._library.farspan_begin_iteration(self._live())

    def fail_at(self, call: Call, nth: int, times: int = 1) -> None:
        """For tests: the nth next call of that kind fails, and `times - 1` after it."""
        self._call("fail_at", call, whole("nth", nth), whole("times", times))

    def hold_events(self, on: bool = True) -> None:
        """For tests without CUDA: no event completes by itself."""
        self._call("hold_events", on)

    def set_capturing(self, stream: int, on: bool = True) -> None:
        """For tests without CUDA: the stream captures a graph."""
        self._call("set_capturing", whole("stream", stream), on)

    def close(self) -> None:
        """Everything goes back, live pointers too."""
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
