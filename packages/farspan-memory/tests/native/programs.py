"""Random programs on the native allocator: every tensor keeps the bytes written through it."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from farspan_memory.native import Allocator, AllocatorOptions, Backend, NativeOutOfMemory, Policy

CHUNK = 64 << 10
CAPACITY = 24 * CHUNK
STREAMS = 3
# Different at each place: a chunk that one tensor has twice, or in another order, shows.
PLACES = (np.arange(CAPACITY) // 64 * 31 + np.arange(CAPACITY) % 7).astype(np.uint8)

Step = tuple[str, int, int]

SIZES = st.one_of(
    st.integers(1, 4000),
    st.sampled_from([CHUNK, 2 * CHUNK, 3 * CHUNK, 5 * CHUNK]),
    st.integers(1, 8 * CHUNK),
)
STEPS = st.one_of(
    st.tuples(st.just("malloc"), SIZES, st.integers(0, STREAMS - 1)),
    st.tuples(st.just("malloc"), SIZES, st.just(0)),
    st.tuples(st.just("free"), st.integers(0, 50), st.just(0)),
    st.tuples(st.just("free"), st.integers(0, 50), st.just(0)),
    st.tuples(st.just("record"), st.integers(0, 50), st.integers(0, STREAMS - 1)),
    st.tuples(st.just("hold"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("release"), st.integers(0, CAPACITY), st.just(0)),
)
POLICIES = st.integers(0, 63).map(Policy)
OPTIONS = st.builds(
    AllocatorOptions,
    backend=st.just(Backend.POSIX),
    capacity=st.just(CAPACITY),
    chunk=st.just(CHUNK),
    tail=st.sampled_from([0, CHUNK // 4]),
    small=st.sampled_from([0, 512, CHUNK // 4]),
    fragment_limit=st.sampled_from([0, 2 * CHUNK]),
    virtual_limit=st.sampled_from([0, 8 * CHUNK, 30 * CHUNK]),
    mapping_limit=st.sampled_from([0, 480]),
    policy=POLICIES,
    seed=st.integers(0, 3),
)


class Corrupted(AssertionError):
    """A tensor lost the bytes that were written to it."""


@dataclass
class Tensor:
    """Memory as its owner sees it."""

    pointer: int
    size: int
    seed: int

    def bytes(self) -> np.ndarray:
        view = (ctypes.c_uint8 * self.size).from_address(self.pointer)
        return np.frombuffer(memoryview(view), dtype=np.uint8)

    def write(self) -> None:
        np.add(PLACES[: self.size], np.uint8(self.seed % 256), out=self.bytes())

    def verify(self) -> None:
        if not np.array_equal(self.bytes() - np.uint8(self.seed % 256), PLACES[: self.size]):
            raise Corrupted(f"{self}")


@dataclass
class Program:
    """The tensors of a program under way. Counts what was refused for want of memory."""

    allocator: Allocator
    live: list[Tensor] = field(default_factory=list)
    refused: int = 0
    made: int = 0

    def malloc(self, size: int, stream: int = 0) -> None:
        self.made += 1
        try:
            tensor = Tensor(self.allocator.malloc(size, stream), size, 37 * self.made)
        except NativeOutOfMemory:
            self.refused += 1
            return
        tensor.write()
        self.live.append(tensor)

    def free(self, index: int) -> None:
        if self.live:
            tensor = self.live.pop(index % len(self.live))
            tensor.verify()
            self.allocator.free(tensor.pointer)

    def step(self, name: str, value: int, stream: int) -> None:
        if name == "malloc":
            self.malloc(value, stream)
        elif name == "free":
            self.free(value)
        elif name == "record" and self.live:
            self.allocator.record_stream(self.live[value % len(self.live)].pointer, stream)
        elif name == "hold":
            self.allocator.hold_events(bool(value))
        elif name == "release":
            self.allocator.release(value)

    def run(self, steps: Sequence[Step], check: bool = True) -> None:
        """Checks every invariant after every step, and all bytes at the end."""
        for step in steps:
            self.step(*step)
            if check:
                self.allocator.check()
        for tensor in self.live:
            tensor.verify()

    def finish(self) -> None:
        """Frees everything: then the whole capacity can be had in one tensor."""
        self.allocator.hold_events(False)
        while self.live:
            self.free(0)
        before = self.refused
        self.malloc(CAPACITY)
        self.allocator.check()
        assert self.refused == before, "memory is lost"
        self.free(0)
        self.allocator.release()
        self.allocator.check()
        now = self.allocator.statistics()
        assert (now.reserved, now.requested, now.held, now.sblocks) == (0, 0, 0, 0)
