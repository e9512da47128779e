"""The binding: its errors, its recordings, and that it matches the header."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from farspan_memory.native import (
    Allocator,
    AllocatorOptions,
    Backend,
    COptions,
    CStatistics,
    EventKind,
    NativeError,
    NativeEvent,
    NativeOutOfMemory,
    PlanRow,
    Statistics,
    UnknownPointer,
    library,
)

HEADER = Path(__file__).resolve().parents[2] / "native/include/farspan_memory.h"
CHUNK = 64 << 10


def make(capacity: int = 8 * CHUNK) -> Allocator:
    return Allocator(AllocatorOptions(capacity=capacity, chunk=CHUNK))


def c_fields(struct: str) -> list[str]:
    """Names of the members of a struct of the header, in order."""
    body = re.search(rf"typedef struct {struct} {{(.*?)}} {struct};", HEADER.read_text(), re.S)
    assert body
    code = re.sub(r"//.*", "", body[1])
    return [name for line in code.split(";") for name in re.findall(r"(\w+)\s*(?:,|$)", line)]


def test_structures_are_those_of_the_header() -> None:
    assert c_fields("farspan_statistics") == [f.name for f in fields(Statistics)]
    assert c_fields("farspan_statistics") == [name for name, *_ in CStatistics._fields_]
    assert c_fields("farspan_options") == [name for name, *_ in COptions._fields_]


def test_a_missing_library_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(NativeError, match=r"is missing; install g[+][+] and CMake"):
        library(tmp_path / "libfarspan_memory.so")
    (tmp_path / "garbage.so").write_text("not a library")
    with pytest.raises(NativeError, match="does not load"):
        library(tmp_path / "garbage.so")


def test_errors_have_types_and_words() -> None:
    with make() as allocator:
        with pytest.raises(NativeOutOfMemory, match=r"Tried to allocate 1\.00 MiB"):
            allocator.malloc(16 * CHUNK)
        pointer = allocator.malloc(100)
        allocator.free(pointer)
        with pytest.raises(UnknownPointer, match="not live"):
            allocator.free(pointer)
        with pytest.raises(NativeError, match="size: expected"):
            allocator.malloc(-1)
        with pytest.raises(NativeOutOfMemory, match=r"Tried to allocate 1\.00 EiB"):
            allocator.malloc(2**60)
        with pytest.raises(NativeOutOfMemory, match=r"Tried to allocate 4\.00 KiB"):
            Allocator(AllocatorOptions(capacity=1, chunk=4096)).malloc(512)
        allocator.set_capturing(3)
        with pytest.raises(
            NativeOutOfMemory, match="synchronize and empty the cache before the capture"
        ):
            allocator.malloc(16 * CHUNK, stream=3)
        with pytest.raises(NativeError, match="an arena of"):
            allocator.plan([PlanRow(512, 0, 0)], 2**64 - 1)
    with pytest.raises(NativeError, match="closed"):
        allocator.malloc(1)


def test_bad_options_are_named() -> None:
    with pytest.raises(NativeError, match="chunk"):
        Allocator(AllocatorOptions(chunk=1000))
    with pytest.raises(NativeError, match="small"):
        Allocator(AllocatorOptions(chunk=CHUNK, small=2 * CHUNK))
    with pytest.raises(NativeError, match="capacity: expected"):
        Allocator(AllocatorOptions(capacity=-1))
    with pytest.raises(NativeError, match="chunk: a power of two, or a multiple of 2 MiB"):
        Allocator(AllocatorOptions(chunk=3 << 20))
    # ctypes would take the low bits of these, which are fine.
    for name, options in (
        ("device", AllocatorOptions(device=2**32 + 1)),
        ("chunk", AllocatorOptions(chunk=2**64 + 4096)),
        ("capacity", AllocatorOptions(capacity=2**64 + 5)),
    ):
        with pytest.raises(NativeError, match=rf"^{name}: expected 0 to 2\*\*"):
            Allocator(options)
    with pytest.raises(NativeError, match="no CUDA driver"):
        Allocator(AllocatorOptions(backend=Backend.CUDA, library="/nowhere/libcuda.so.1"))


def test_a_recording_has_every_request() -> None:
    with make() as allocator:
        before = allocator.malloc(10)
        allocator.record()
        allocator.mark(7)
        first = allocator.malloc(1000, stream=2)
        second = allocator.malloc(3 * CHUNK)
        allocator.free(first)
        allocator.begin_iteration()
        allocator.free(before)
        assert list(allocator.events()) == [
            NativeEvent(EventKind.MARK, 0, 7, 0),
            NativeEvent(EventKind.MALLOC, 1, 1000, 2),
            NativeEvent(EventKind.MALLOC, 2, 3 * CHUNK, 0),
            NativeEvent(EventKind.FREE, 1, 1000, 2),
            NativeEvent(EventKind.MARK, 0, 0, 0),
            NativeEvent(EventKind.FREE, 0, 10, 0),
        ]
        allocator.record()
        assert list(allocator.events()) == []
        allocator.record(False)
        allocator.free(second)
        assert list(allocator.events()) == []


def test_statistics_count_bytes_as_asked_and_as_given() -> None:
    with make() as allocator:
        pointer = allocator.malloc(CHUNK + 1)
        small = allocator.malloc(1)
        now = allocator.statistics()
        assert (now.requested, now.allocated, now.reserved) == (
            CHUNK + 2,
            2 * CHUNK + 512,
            3 * CHUNK,
        )
        allocator.free(pointer)
        allocator.free(small)
        now = allocator.statistics()
        assert (now.requested, now.requested_peak, now.reserved_peak) == (0, CHUNK + 2, 3 * CHUNK)
        allocator.release()
        allocator.reset_peaks()
        now = allocator.statistics()
        assert (now.requested_peak, now.allocated_peak, now.reserved_peak) == (0, 0, 0)


def test_a_row_beyond_the_arena_is_refused() -> None:
    with make() as allocator:
        with pytest.raises(NativeError, match="row 0"):
            allocator.plan([PlanRow(1024, 0, 512)], 1024)
        allocator.check()
