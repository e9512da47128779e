"""The one owner of copies between the tiers, and of the streams they run on.

Three lanes: the stream that computes, one that fetches, one that evicts. Work of a lane happens in
the order it is issued; lanes are held together by events alone, one for each instruction, or slot
and generation, that another lane waits for. The CPU never waits inside a step.

    compute   F(0,0) --o        F(0,1)          o: an event recorded, v: waited for
    evict              v-- kv ----o
    fetch                         v-- kv.block

Note: [Who waits for what]. The hazards and their names are in `farspan.plan.waits`. Waits between
instructions are derived there; those of blocks that a cell streams are in `farspan.engine.prefix`.

Note: [Lanes fork and join at a step's ends]. When a step begins, both copy lanes wait for what was
computed before, and when it ends, computing waits for both. So whoever works on the computing
stream after a step (the optimizer, the next step, an allocator that hands out a released slab)
comes after every copy, and only the CPU, should it touch an arena, has to call `wait`.

In line, when copies do not run beside the computation, all three lanes are the computing stream.

Note: [Memory that is not locked]. Of main memory that could not be locked (`Arena.is_pageable`) the
CPU waits for each copy on its lane, so that whatever it issues or does afterwards comes after it:
that is more order than any hazard asks for. Rows that kernels would take from there, or add to, are
taken and added by the CPU.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from farspan.lazy import load
from farspan.plan.footprints import Lane
from farspan.plan.waits import Hazard, Order, Wait
from farspan.spec import Refused

# Of kernels on rows of host memory: 512 KiB under way keep a link of 170 GB/s busy whose answers
# take 3 microseconds, and most multiprocessors have no program of theirs. Not measured.
PROGRAMS, TILE_BYTES = 32, 2**14


class CopyEngine:
    """Moves tensors between device and host, and counts the bytes of each direction."""

    def __init__(self, device: torch.device, *, overlap: bool = False) -> None:
        """With `overlap` copies run on streams of their own. Raises Refused but on CUDA."""
        if overlap and device.type != "cuda":
            raise Refused(f"overlap: copies run beside the computation on CUDA, not on {device}")
        self.device = device
        self.overlap = overlap
        self.fetched = 0  # bytes host to device
        self.evicted = 0  # bytes device to host
        self._streams: dict[Lane, torch.cuda.Stream] = {}
        if overlap:
            # Of higher priority: their few programs (PROGRAMS) start while those of a long kernel
            # still wait for a place, not behind them.
            self._streams = {
                lane: torch.cuda.Stream(device, priority=-1) for lane in (Lane.FETCH, Lane.EVICT)
            }

    # -- copies ----------------------------------------------------------------------------------

    def fetch(self, target: Tensor, source: Tensor) -> None:
        """Host to device."""
        with self.on(Lane.FETCH):
            target.copy_(source, non_blocking=self._is_locked(source))
        self.fetched += source.nbytes

    def evict(self, target: Tensor, source: Tensor) -> None:
        """Device to host."""
        with self.on(Lane.EVICT):
            target.copy_(source, non_blocking=self._is_locked(target))
        self.evicted += source.nbytes

    def _is_locked(self, host: Tensor) -> bool:
        return self.device.type == "cuda" and host.is_pinned()

    # -- rows of host memory that the device reads and writes where they lie ---------------------

    def gather(self, target: Tensor, source: Tensor, rows: Tensor) -> None:
        """Rows [n] of a mapped host tensor (`Arena.view`) to the device, [n, D], contiguous."""
        with self.on(Lane.FETCH):
            wide, source = _wide(target, source)
            if source.device != wide.device:
                wide.copy_(source[rows.cpu()])
            elif wide.device.type == "cuda":
                launch_rows(load("farspan.transfer.triton_rows", "take_rows"), wide, source, rows)
            else:
                torch.index_select(source, 0, rows, out=wide)
        self.fetched += target.nbytes

    def add_rows(self, total: Tensor, rows: Tensor, values: Tensor) -> None:
        """Add values [n, D] of the device to rows [n], each another one, of a mapped host
        tensor."""
        with self.on(Lane.EVICT):
            if total.device != values.device:
                total.index_add_(0, rows.cpu(), values.cpu())
            elif total.device.type == "cuda":
                launch_rows(load("farspan.transfer.triton_rows", "add_rows"), total, values, rows)
            else:
                total.index_add_(0, rows, values)
        self.fetched += values.nbytes
        self.evicted += values.nbytes

    def note(self, target: Tensor, source: Tensor) -> None:
        """Within the device, on the lane that fetches: what it goes by is there when it is."""
        with self.on(Lane.FETCH):
            target.copy_(source)

    def read(self, tensor: Tensor) -> Callable[[], Tensor]:
        """A small tensor for the CPU, which waits where it asks for it, and for nothing that is
        computed from now on."""
        if tensor.device.type == "cpu":
            return lambda: tensor
        try:
            here = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        except RuntimeError:  # main memory cannot be locked
            there = tensor.cpu()
            return lambda: there
        here.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))

        def arrived() -> Tensor:
            event.synchronize()
            return here

        return arrived

    def on(self, lane: Lane) -> AbstractContextManager[Any]:
        """What is computed inside is computed on the lane."""
        stream = self._streams.get(lane)
        return nullcontext() if stream is None else torch.cuda.stream(stream)

    # -- order -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins. See Note: [Lanes fork and join at a step's ends]."""
        computed = self.record(Lane.COMPUTE)
        for lane in self._streams:
            self.wait(lane, computed)

    def end(self) -> None:
        """A step is issued."""
        for lane in self._streams:
            self.wait(Lane.COMPUTE, self.record(lane))

    def record(self, lane: Lane) -> Any:
        """The event of all that was issued on a lane so far."""
        if not self.overlap:
            return None
        event = torch.cuda.Event()
        event.record(self._stream(lane))
        return event

    def wait(self, lane: Lane, event: Any, _hazard: Hazard | None = None) -> None:
        """What is issued on the lane from now on comes after the event, or there would be the
        hazard. An event of None is of what nobody ever used."""
        if self.overlap and event is not None:
            self._stream(lane).wait_event(event)

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        return self._streams.get(lane) or torch.cuda.current_stream(self.device)

    def synchronize(self) -> None:
        """The CPU waits until every copy of the steps so far has happened."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def _wide(*tensors: Tensor) -> list[Tensor]:
    """The same memory in the widest elements, 8 bytes at most, that rows [n, D] of all begin and
    end at: a lane that reads single ones of 2 bytes asks the link for 64 bytes at a time, and
    Triton joins them only where it knows that rows are aligned."""
    for dtype in (torch.int64, torch.int32):
        if all(_divides(dtype.itemsize // x.element_size(), x) for x in tensors):
            return [x.view(dtype) for x in tensors]
    return list(tensors)


def _divides(whole: int, rows: Tensor) -> bool:
    """Do so many elements divide where rows begin and end?"""
    places = (rows.shape[-1], rows.storage_offset(), *rows.stride()[:-1])
    return whole > 0 and rows.stride(-1) == 1 and not any(place % whole for place in places)


def launch_rows(kernel: Any, one: Tensor, other: Tensor, rows: Tensor) -> None:
    """By one of `triton_rows`; all contiguous. `rows` are of the longer tensor."""
    width = one.shape[1]
    padded = 1 << (width - 1).bit_length()
    tile = max(1, TILE_BYTES // (padded * one.element_size()))
    programs = min(PROGRAMS, -(-len(rows) // tile))
    if programs:
        with torch.cuda.device_of(one):
            kernel[(programs,)](one, other, rows, len(rows), width, padded, tile, num_warps=8)


class Followed:
    """A program's order on the lanes of a copy engine.

    Invariant: an event is held from its instruction to the last that waits for it.
    """

    def __init__(self, copies: CopyEngine, orders: tuple[Order, ...]) -> None:
        self.copies = copies
        self.orders = orders
        self.to_come = Counter(
            wait for order in orders for after in order.values() for wait in after
        )
        self.events: dict[Wait, Any] = {}

    def before(self, index: int) -> None:
        """Its lanes wait for what instruction `index` must follow."""
        for lane, after in self.orders[index].items():
            for wait in after:
                self.copies.wait(lane, self.events[wait])
                self.to_come[wait] -= 1
                if not self.to_come[wait]:
                    del self.events[wait]

    def after(self, index: int) -> None:
        """Instruction `index` was issued."""
        for lane in self.orders[index]:
            wait = Wait(lane, index)
            if self.to_come[wait]:
                self.events[wait] = self.copies.record(lane)
