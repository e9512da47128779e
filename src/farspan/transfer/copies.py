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
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from farspan.plan.footprints import Lane
from farspan.plan.waits import Hazard, Order, Wait
from farspan.spec import Refused


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
            self._streams = {lane: torch.cuda.Stream(device) for lane in (Lane.FETCH, Lane.EVICT)}

    # -- copies ----------------------------------------------------------------------------------

    def fetch(self, target: Tensor, source: Tensor) -> None:
        """Host to device."""
        with self._on(Lane.FETCH):
            target.copy_(source, non_blocking=True)
        self.fetched += source.nbytes

    def evict(self, target: Tensor, source: Tensor) -> None:
        """Device to host."""
        with self._on(Lane.EVICT):
            target.copy_(source, non_blocking=True)
        self.evicted += source.nbytes

    # -- rows of host memory that the device reads and writes where they lie ---------------------

    def gather(self, source: Tensor, rows: Tensor) -> Tensor:
        """Rows [n] of a mapped host tensor (`Arena.view`), on the device."""
        with self._computing_as_fetch():
            found = _wide(source).index_select(0, rows).view(source.dtype)
        self.fetched += found.nbytes
        return found

    def add_rows(self, total: Tensor, rows: Tensor, values: Tensor) -> None:
        """Add values of the device to rows [n], each another one, of a mapped host tensor."""
        with self._computing_as_fetch():
            # Read, added to and written: stores cross the link, atomic additions would not all.
            wide = _wide(total)
            sums = wide.index_select(0, rows).view(total.dtype).add_(values)
            wide.index_copy_(0, rows, sums.view(wide.dtype))
        self.fetched += values.nbytes
        self.evicted += values.nbytes

    @contextmanager
    def _computing_as_fetch(self) -> Iterator[None]:
        """What is computed inside has the place of a fetch: after what was issued on that lane, so
        after the evicts that it waited for, and before what will be."""
        self.wait(Lane.COMPUTE, self.record(Lane.FETCH))
        yield
        self.wait(Lane.FETCH, self.record(Lane.COMPUTE))

    def _on(self, lane: Lane) -> AbstractContextManager[Any]:
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


def _wide(rows: Tensor) -> Tensor:
    """The same memory in the widest elements, 8 bytes at most, that rows [n, D] begin and end at.
    A lane of a kernel reads one element: 2 bytes a lane ask the link for 64 bytes at a time."""
    for dtype in (torch.int64, torch.int32):
        whole = dtype.itemsize // rows.element_size()
        places = (rows.shape[-1], rows.storage_offset(), *rows.stride()[:-1])
        if whole and rows.stride(-1) == 1 and not any(place % whole for place in places):
            return rows.view(dtype)
    return rows


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
