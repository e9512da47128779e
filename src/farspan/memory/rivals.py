"""The allocators that serve a trace event by event: two models of PyTorch's, and the native one."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import Protocol

from farspan.memory import native
from farspan.memory.caching import CachingAllocator, OutOfMemory
from farspan.memory.costs import ACCESS, CREATE, MAP, RELEASE, RESERVE, UNMAP, VACATE
from farspan.memory.expandable import ExpandableAllocator
from farspan.memory.settings import MIB, UNLIMITED, Settings

CHUNKS = (2 * MIB, 32 * MIB)  # of stitching: the paper's, and one for long contexts
TAIL = 2 * MIB  # of a block that fills no whole chunk; the default of native.Options

CACHING, EXPANDABLE, STITCHING = "caching allocator", "expandable segments", "stitching"


class Served(Protocol):
    """An allocator as far as a trace is concerned. malloc raises OutOfMemory."""

    @property
    def reserved(self) -> int: ...
    @property
    def reserved_peak(self) -> int: ...
    @property
    def retries(self) -> int: ...
    @property
    def calls(self) -> Mapping[tuple[str, int], int]: ...

    def malloc(self, tensor: int, size: int, stream: int = 0, /) -> None: ...
    def free(self, tensor: int, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Contender:
    """An allocator to be compared; `make` takes the capacity in bytes."""

    name: str
    modelled: bool  # a model of it, not its code
    make: Callable[[int], AbstractContextManager[Served]]


class Stitching:
    """The native allocator over its null backend: all of its code, no memory; under the policy that
    install() gives it."""

    def __init__(self, capacity: int, chunk: int) -> None:
        self._chunk = chunk
        self._allocator = native.Allocator(
            native.Options(capacity=capacity if capacity < UNLIMITED else 0, chunk=chunk)
        )
        self._pointers: dict[int, int] = {}

    def malloc(self, tensor: int, size: int, stream: int = 0) -> None:
        try:
            self._pointers[tensor] = self._allocator.malloc(size, stream)
        except native.OutOfMemory:
            raise OutOfMemory from None

    def free(self, tensor: int) -> None:
        pointer = self._pointers.pop(tensor)
        if pointer:
            self._allocator.free(pointer)

    @property
    def reserved(self) -> int:
        return self._allocator.statistics().reserved

    @property
    def reserved_peak(self) -> int:
        return self._allocator.statistics().reserved_peak

    @property
    def retries(self) -> int:
        return self._allocator.statistics().retries

    @property
    def calls(self) -> Mapping[tuple[str, int], int]:
        found = self._allocator.statistics()
        whole = {
            (RESERVE, 0): found.reserves,
            (VACATE, 0): found.range_frees,
            (CREATE, self._chunk): found.creates - found.tail_creates,
            (MAP, self._chunk): found.maps - found.tail_maps,
            (ACCESS, self._chunk): found.maps - found.tail_maps,
            (UNMAP, self._chunk): found.unmaps,
            (RELEASE, self._chunk): found.destroys - found.tail_destroys,
        }
        if found.tail_creates == 0:
            return whole
        tails = {
            (CREATE, TAIL): found.tail_creates,
            (MAP, TAIL): found.tail_maps,
            (ACCESS, TAIL): found.tail_maps,
            (RELEASE, TAIL): found.tail_destroys,
        }
        return whole | tails

    def close(self) -> None:
        self._allocator.close()


def contenders(
    chunks: Sequence[int] = CHUNKS, settings: Settings | None = None
) -> tuple[Contender, ...]:
    """All that serve a trace event by event; the settings are those of PyTorch's."""

    def stitching(chunk: int) -> Contender:
        name = f"{STITCHING}, {chunk / MIB:g} MiB"
        return Contender(name, False, lambda capacity: closing(Stitching(capacity, chunk)))

    return (
        Contender(CACHING, True, lambda c: nullcontext(CachingAllocator(c, settings))),
        Contender(EXPANDABLE, True, lambda c: nullcontext(ExpandableAllocator(c, settings))),
        *(stitching(chunk) for chunk in chunks),
    )
