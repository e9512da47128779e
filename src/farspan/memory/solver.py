"""The native placement solver by ctypes, and first fit in Python where the library is absent.

Requests are columns here: sizes, births and deaths of int64, alive in [born, dies).
"""

import ctypes
from array import array
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

from farspan.memory.library import NativeError, library

# Beyond it sums of sizes could pass 64 bits; Python's own integers take over.
MOST_BYTES = 2**62


class Answer(IntEnum):
    """What became of the question whether requests fit under a height."""

    FITS = 0
    NO_FIT = 1  # proved
    UNKNOWN = 2  # the limit was reached first


BAD_INPUT = 3


@dataclass(frozen=True, slots=True)
class Columns:
    """Requests as the library reads them."""

    size: Sequence[int]
    born: Sequence[int]
    dies: Sequence[int]


@dataclass(frozen=True, slots=True)
class Fit:
    """The answer, addresses where it is FITS, and the nodes of the search."""

    answer: Answer
    addresses: tuple[int, ...]
    nodes: int


def available() -> bool:
    """Is the native solver there?"""
    return _native() is not None


def greedy(columns: Columns, order: Sequence[int], best: bool = False) -> list[int]:
    """Addresses when each request, in this order, goes to the lowest gap that is free for its
    whole lifetime; or to the smallest one (best fit), the lowest of equals."""
    native = _native()
    if native is None or sum(columns.size) >= MOST_BYTES:
        return _greedy(columns, order, best)
    count = len(columns.size)
    found = (ctypes.c_int64 * count)()
    arguments = map(_column, (columns.size, columns.born, columns.dies, order))
    _verify(native.farspan_greedy(count, *arguments, int(best), found))
    return list(found)


def fit(columns: Columns, height: int, seconds: float) -> Fit:
    """Is there a placement of at most `height` bytes? Raises NativeError without the library."""
    native = library()
    _declare(native)
    if sum(columns.size) >= MOST_BYTES:
        return Fit(Answer.UNKNOWN, (), 0)
    count = len(columns.size)
    found, nodes = (ctypes.c_int64 * count)(), ctypes.c_int64()
    arguments = map(_column, (columns.size, columns.born, columns.dies))
    limit = min(height, MOST_BYTES)
    status = native.farspan_fit(count, *arguments, limit, seconds, found, ctypes.byref(nodes))
    _verify(status if status == BAD_INPUT else 0)
    answer = Answer(status)
    return Fit(answer, tuple(found) if answer is Answer.FITS else (), nodes.value)


def _column(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    column = array("q", values)
    return (ctypes.c_int64 * len(column)).from_buffer(column)


def _verify(status: int) -> None:
    if status:
        raise ValueError(
            "placement: a negative size, a lifetime that runs backwards, or an order that is no "
            "permutation"
        )


@cache
def _native() -> ctypes.CDLL | None:
    try:
        found = library()
    except NativeError:
        return None
    _declare(found)
    return found


@cache
def _declare(native: ctypes.CDLL) -> None:
    column = ctypes.POINTER(ctypes.c_int64)
    count = ctypes.c_int64
    native.farspan_greedy.argtypes = (count, *[column] * 4, ctypes.c_int32, column)
    native.farspan_fit.argtypes = (
        *(count, column, column, column, ctypes.c_int64, ctypes.c_double),
        *(column, ctypes.POINTER(ctypes.c_int64)),
    )
    native.farspan_greedy.restype = native.farspan_fit.restype = ctypes.c_int32


def _greedy(columns: Columns, order: Sequence[int], best: bool) -> list[int]:
    addresses = [0] * len(columns.size)
    placed: list[tuple[int, int, int, int]] = []  # low, high, born, dies, by address
    gap = _tightest_gap if best else _lowest_gap
    for index in order:
        size, born, dies = columns.size[index], columns.born[index], columns.dies[index]
        low = gap(placed, size, born, dies)
        addresses[index] = low
        insort(placed, (low, low + size, born, dies))
    return addresses


def _lowest_gap(placed: list[tuple[int, int, int, int]], size: int, born: int, dies: int) -> int:
    address = 0
    for low, high, other_born, other_dies in placed:
        if other_born < dies and born < other_dies:
            if low - address >= size:
                break
            if high > address:
                address = high
    return address


def _tightest_gap(placed: list[tuple[int, int, int, int]], size: int, born: int, dies: int) -> int:
    top, gaps = 0, []
    for low, high, other_born, other_dies in placed:
        if other_born < dies and born < other_dies:
            if low - top >= size:
                gaps.append((low - top, top))
            top = max(top, high)
    return min(gaps)[1] if gaps else top
