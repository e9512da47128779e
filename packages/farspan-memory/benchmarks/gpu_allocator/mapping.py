"""A child: what the calls of the driver cost by the size of a chunk.

    python -m benchmarks.gpu_allocator.mapping SETTINGS

Each call by itself, timed at the driver with the arguments that the native allocator gives it; and
what the allocator makes of them: fresh memory, memory stitched of single chunks, memory given back.
"""

import ctypes
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.children import Row, add_row, settings_of, words_of
from farspan_memory.formatting import MIB
from farspan_memory.native import Allocator, AllocatorOptions, Backend
from farspan_memory.pytorch import DRIVER

CHUNKS = (2 * MIB, 8 * MIB, 32 * MIB, 128 * MIB, 512 * MIB)
ROUNDS = 3
GIB = 2**30
U64, INT, SIZE, POINTER = ctypes.c_uint64, ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p


class Location(ctypes.Structure):
    """CUmemLocation: of type device."""

    _fields_ = (("type", INT), ("id", INT))


class Properties(ctypes.Structure):
    """CUmemAllocationProp, as native/src/backend_cuda.cpp fills it."""

    _fields_ = (
        ("type", INT),
        ("handles", INT),
        ("location", Location),
        ("win32", POINTER),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc: the device reads and writes."""

    _fields_ = (("location", Location), ("flags", INT))


SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuMemAddressReserve": (POINTER, SIZE, SIZE, U64, ctypes.c_ulonglong),
    "cuMemAddressFree": (U64, SIZE),
    "cuMemCreate": (POINTER, SIZE, POINTER, ctypes.c_ulonglong),
    "cuMemRelease": (U64,),
    "cuMemMap": (U64, SIZE, SIZE, U64, ctypes.c_ulonglong),
    "cuMemUnmap": (U64, SIZE),
    "cuMemSetAccess": (U64, SIZE, POINTER, SIZE),
}
ON_DEVICE, PINNED, READ_WRITE, RDMA = 1, 1, 3, 110


class Driver:
    """The driver's calls on its first device. Raises RuntimeError naming a call that fails."""

    def __init__(self, library: str) -> None:
        self._driver = ctypes.CDLL(library)
        for name, arguments in SIGNATURES.items():
            getattr(self._driver, name).argtypes = arguments
        device, context, rdma = INT(), POINTER(), INT()
        self.call("cuInit", ctypes.c_uint(0))
        self.call("cuDeviceGet", ctypes.byref(device), INT(0))
        self.call("cuDeviceGetAttribute", ctypes.byref(rdma), RDMA, device)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxPushCurrent_v2", context)
        where = Location(ON_DEVICE, device.value)
        self.properties = Properties(type=PINNED, location=where, rdma=int(rdma.value != 0))
        self.access = Access(where, READ_WRITE)

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status:
            raise RuntimeError(f"{name}: error {status}")


def timed(work: Callable[[], None]) -> float:
    """Seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def driver_round(driver: Driver, chunk: int, count: int) -> dict[str, float]:
    """Seconds of each kind of call over `count` chunks; access by chunk and by the whole range."""
    base, handles = U64(), [U64() for _ in range(count)]
    total, call = count * chunk, driver.call
    properties, access = ctypes.byref(driver.properties), ctypes.byref(driver.access)
    call("cuMemAddressReserve", ctypes.byref(base), total, chunk, 0, 0)
    places = range(base.value, base.value + total, chunk)

    def create() -> None:
        for handle in handles:
            call("cuMemCreate", ctypes.byref(handle), chunk, properties, 0)

    def release() -> None:
        for handle in handles:
            call("cuMemRelease", handle)

    def map_each() -> None:
        for place, handle in zip(places, handles, strict=True):
            call("cuMemMap", place, chunk, 0, handle, 0)

    def unmap_each() -> None:
        for place in places:
            call("cuMemUnmap", place, chunk)

    def access_each() -> None:
        for place in places:
            call("cuMemSetAccess", place, chunk, access, 1)

    found = {
        "cuMemCreate": timed(create),
        "cuMemMap": timed(map_each),
        "cuMemSetAccess, a chunk a call": timed(access_each),
        "cuMemUnmap": timed(unmap_each),
    }
    map_each()
    whole = timed(lambda: call("cuMemSetAccess", base, total, access, 1))
    found["cuMemSetAccess, all in one call"] = whole
    unmap_each()
    found["cuMemRelease"] = timed(release)
    call("cuMemAddressFree", base, total)
    return found


def allocator_round(options: AllocatorOptions, count: int) -> dict[str, float]:
    """Seconds of the native allocator for `count` chunks: fresh, given back, and stitched."""
    chunk = options.chunk
    found = {}
    with Allocator(options) as made:
        kept = []
        found["fresh"] = timed(lambda: kept.append(made.malloc(count * chunk)))
        made.free(kept.pop())
        found["given back"] = timed(made.release)
    with Allocator(options) as made:
        pieces = [made.malloc(chunk) for _ in range(count)]
        for piece in pieces:
            made.free(piece)
        before = made.statistics()
        found["stitched"] = timed(lambda: made.free(made.malloc(count * chunk)))
        after = made.statistics()
        assert after.stitches == before.stitches + 1, "it was not stitched"
        assert after.maps - before.maps == count or options.backend is not Backend.CUDA
    return found


def costs(rounds: list[dict[str, float]], chunk: int, count: int) -> dict[str, Row]:
    """The median round, and what that is a chunk and a second."""
    found: dict[str, Row] = {}
    for name in rounds[0]:
        seconds = median(each[name] for each in rounds)
        found[name] = {
            "seconds": seconds,
            "microseconds_a_chunk": 1e6 * seconds / count,
            "gib_a_second": count * chunk / GIB / max(seconds, 1e-12),
        }
    return found


def measure(options: AllocatorOptions, total: int, driver: Driver | None) -> Row:
    """All of one size of chunk; what the driver takes only where there is one."""
    chunk, count = options.chunk, total // options.chunk
    row: Row = {"chunk": chunk, "chunks": count, "bytes": total}
    if driver is not None:
        calls = [driver_round(driver, chunk, count) for _ in range(ROUNDS)]
        row["driver"] = costs(calls, chunk, count)
    through = [allocator_round(options, count) for _ in range(ROUNDS)]
    return {**row, "allocator": costs(through, chunk, count), "ended": "completed"}


def main() -> None:
    settings = settings_of(sys.argv)
    total, library = settings["total"], settings.get("driver")
    cuda = library is not None or settings["device"] == "cuda"
    driver = Driver(library or DRIVER) if cuda else None
    for chunk in CHUNKS:
        backend = Backend.CUDA if cuda else Backend.POSIX
        options = AllocatorOptions(backend, chunk=chunk, capacity=total, library=library)
        try:
            row = measure(options, total, driver)
        except Exception as error:
            row = {"chunk": chunk, "ended": "failed", "words": words_of(error)}
        add_row(settings, row)


if __name__ == "__main__":
    main()
