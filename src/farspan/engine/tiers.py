"""Allocate the memory of both tiers, device and host, as one arena each, and copy between the two.

Every buffer is a view of an arena at a planned address. `CopyEngine` owns the copies and the
streams they run on. It has three lanes (queues that run in order): one computes, one fetches, one
evicts. Only events tie lanes together, one for each instruction, or staging buffer and generation,
that another lane waits for. The CPU never waits inside a step.

    compute   F(0,0) --o        F(0,1)          o: an event recorded, v: waited for
    evict              v-- kv ----o
    fetch                         v-- kv.block

Note: [Waits]. `farspan.program.dependencies` names the hazards and derives the waits between
instructions; `farspan.engine.buffers` has those of blocks that a cell streams.

Note: [Lanes fork and join at a step's ends]. When a step begins, both copy lanes wait for earlier
computation, and when it ends, computing waits for both. So whatever runs on the computing stream
after a step (the optimizer, the next step, an allocator that reuses a released block) comes after
every copy, and only the CPU has to call `wait` before it touches an arena.

Without overlap all three lanes are the computing stream.

Note: [Memory that is not locked]. If main memory could not be locked (`Arena.is_pageable`), the CPU
waits for each copy on its lane, which is more order than any hazard needs. The CPU then gathers and
adds rows that kernels would read or add to across the link.

Ranks reserve arenas together: all of them or none.
"""

import ctypes
import hashlib
import mmap
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from farspan.distributed.context import ParallelContext
from farspan.distributed.failure import machine_name
from farspan.host import TooLarge, available_host_bytes, refuse_beyond
from farspan.lazy import load
from farspan.program.dependencies import Hazard, Lane, Order, Wait
from farspan.spec import Tier, UnsupportedError

# All ones is NaN in every IEEE format from float64 to bfloat16, so poisoned memory that is read
# before it is written shows up in the loss.
POISON = 0xFF
PAGEABLE = (
    "main memory cannot be locked for copies (cudaHostRegister: {}): the CPU now waits for each "
    "copy between device and main memory, so steps are slower; their results are the same. Raise "
    "the limit (ulimit -l unlimited; docker run --ulimit memlock=-1), give the container the GPU's "
    "driver itself, or choose a schedule that keeps more on the device; farspan calibrate measures "
    "how slow copies are"
)


class Arena:
    """Memory of one tier (device or host), in which one program's buffers are views.

    Invariant: the block never moves while views are alive; `reserve` and `release` may only be
    called between steps.
    """

    def __init__(self, tier: Tier, device: torch.device) -> None:
        self.tier = tier
        self._cuda = device if tier is Tier.HOST and device.type == "cuda" else None  # the device
        self._device = torch.device("cpu") if tier is Tier.HOST else device
        self._block = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._mapped: Tensor | None = None  # its memory as a tensor of the device
        # Views of the present block that their owners keep.
        self.kept = weakref.WeakKeyDictionary[Any, dict[Any, Any]]()
        self._unlock: weakref.finalize[..., Arena] | None = None

    @property
    def nbytes(self) -> int:
        return self._block.numel()

    @property
    def is_pageable(self) -> bool:
        """True if this is main memory for a GPU's copies that could not be locked."""
        return self._cuda is not None and self.nbytes > 0 and self._unlock is None

    def reserve(self, size: int) -> None:
        """Allocate at least `size` bytes, unless the present block is large enough. The content is
        undefined. For a GPU's copies the block is locked: in place, or by torch's allocator if that
        has room; if neither works it is pageable, with a warning."""
        if size > self.nbytes:
            self.release()  # free first: both would not fit
            if self._cuda is None:
                self._block = torch.empty(size, dtype=torch.uint8, device=self._device)
                return
            block, unlock = _locked(size, self._cuda)
            if unlock is not None:
                # A dropped arena is unlocked like a released one: `block` lives until then.
                self._unlock = weakref.finalize(self, unlock)
                self._unlock.atexit = False
            self._block = block[:size]

    def release(self) -> None:
        self._mapped = None
        for views in self.kept.values():
            views.clear()
        self._block = torch.empty(0, dtype=torch.uint8, device=self._device)
        if self._unlock is not None:
            self._unlock()
            self._unlock = None

    def poison(self) -> None:
        """Fill the memory with NaN, to show that a step does not read an earlier step's content."""
        self._block.fill_(POISON)

    def view(
        self, address: int, shape: tuple[int, ...], dtype: torch.dtype, *, mapped: bool = False
    ) -> Tensor:
        """Return a contiguous tensor that begins at byte `address` of the arena.

        Each view has its own version counter: autograd may save a view, and a write to another
        buffer of the same block must not make it look modified.

        Args:
            mapped: Return a host arena's memory as a tensor of the device, whose kernels read and
                write it across the link; a pageable arena returns it as a host tensor.
        """
        size = dtype.itemsize
        assert address % size == 0, f"address {address} is not aligned to {dtype}"
        strides, step = [], 1
        for extent in reversed(shape):
            strides.append(step)
            step *= extent
        assert 0 <= address <= self.nbytes - step * size, "view outside the arena"
        block = self._as_device() if mapped else self._block
        first = (int(block.storage_offset()) + address) // size
        with torch.inference_mode(False):  # a backward could not save an inference tensor
            view = torch.empty(0, dtype=dtype, device=block.device)
            return view.set_(block.untyped_storage(), first, shape, tuple(reversed(strides)))

    def _as_device(self) -> Tensor:
        if self._cuda is None or self.is_pageable:
            return self._block
        if self._mapped is None:
            self._mapped = torch.as_tensor(_Locked(self._block), device=self._cuda)
        return self._mapped


class _Locked:
    """Wrapper by which torch sees locked host pages as a CUDA array, to access in place."""

    def __init__(self, block: Tensor) -> None:
        self.block = block
        self.__cuda_array_interface__ = {
            "data": (block.data_ptr(), False),
            "shape": (block.numel(),),
            "typestr": "|u1",
            "version": 3,
        }


Unlock = Callable[[], None]


def _locked(size: int, device: torch.device) -> tuple[Tensor, Unlock | None]:
    """Allocate `size` bytes of main memory, locked if possible. Return the memory and its unlock
    function, None if it is not locked. Raises MemoryError."""
    block = pages(size)
    _touch(block)
    try:
        _pin(block, device)
    except RuntimeError as error:
        refused = str(error).strip().splitlines()[0]
    else:
        return block, lambda: _unpin(block, device)
    # Some systems lock only memory that the driver itself allocates. torch rounds up to a power of
    # two, which may fit next to these pages or only after they are freed.
    if 1 << (size - 1).bit_length() <= available_host_bytes() + block.numel():
        del block
        try:
            return allocate_pinned(size), _give_back_pinned
        except RuntimeError:
            block = pages(size)
            _touch(block)
    warnings.warn(PAGEABLE.format(refused), stacklevel=2)
    return block, None


def allocate_pinned(size: int) -> Tensor:
    """Allocate bytes by torch's pinned allocator, which rounds up to a power of two and caches
    freed memory. Raises RuntimeError."""
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


def _give_back_pinned() -> None:
    empty: Callable[[], None] | None = getattr(torch._C, "_host_emptyCache", None)
    (empty or torch.accelerator.empty_host_cache)()


def pages(size: int) -> Tensor:
    """Allocate whole pages of main memory for `size` bytes: locking works on pages, so two blocks
    that share one cannot both be locked. The first page begins the storage, as torch tests there
    whether a tensor is locked. Raises MemoryError."""
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        memory = mmap.mmap(-1, whole, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"the system refused {whole:,} bytes of main memory: {error.strerror}"
        ) from error
    return torch.frombuffer(memory, dtype=torch.uint8)


def _touch(block: Tensor) -> None:
    """Write to all pages, so that they exist before they are locked. Locking unwritten memory takes
    page after page of 4 KiB on one thread; here all of torch's threads touch pages, 2 MiB at a time
    where the operating system allows: 2.3 GB/s instead of 0.5 on two cores."""
    with suppress(AttributeError, OSError, TypeError):  # a system without it
        advise = ctypes.CDLL(None).madvise
        advise(*map(ctypes.c_size_t, (block.data_ptr(), block.numel())), mmap.MADV_HUGEPAGE)
    block.fill_(0)


def _pin(block: Tensor, device: torch.device) -> None:
    """Lock a block's pages for copies. torch's pinned allocator would round the size up to a power
    of 2 and cache freed memory: 70 GB would take 128."""
    with torch.cuda.device(device):
        status = torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), 0)
    if int(status) != 0:
        # CUDA reports the error again at the next call, so this kernel takes it.
        with suppress(RuntimeError):
            torch.ones(1, device=device)
    torch.cuda.check_error(status)


def _unpin(block: Tensor, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # copies may still be running
    with torch.cuda.device(device):
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(block.data_ptr()))


NOTHING = nullcontext()
# Programs and bytes per tile of kernels on rows of host memory: 512 KiB in flight keep a link of
# 170 GB/s with a latency of 3 microseconds busy, and leave most multiprocessors free. Not measured.
PROGRAMS, TILE_BYTES = 32, 2**14


class CopyEngine:
    """Copier of tensors between device and host, which counts the bytes of each direction."""

    def __init__(self, device: torch.device, *, overlap: bool = False) -> None:
        """With `overlap`, copies run on their own streams. Raises UnsupportedError without CUDA."""
        if overlap and device.type != "cuda":
            raise UnsupportedError(
                f"overlap: copies can overlap only on CUDA, not on {device}; leave overlap unset"
            )
        self.device = device
        self.overlap = overlap
        self.fetched = 0  # bytes host to device
        self.evicted = 0  # bytes device to host
        # The lane of each copy on a separate stream, and events around it; None: not timed.
        self.timed: list[tuple[Lane, Any, Any]] | None = None
        self._streams: dict[Lane, torch.cuda.Stream] = {}
        if overlap:
            # Of higher priority: their few programs (PROGRAMS) start before waiting blocks of a
            # long kernel.
            self._streams = {
                lane: torch.cuda.Stream(device, priority=-1) for lane in (Lane.FETCH, Lane.EVICT)
            }

    # -- copies ----------------------------------------------------------------------------------

    def fetch(self, target: Tensor, source: Tensor) -> None:
        """Copy a tensor from host to device on the fetch stream."""
        with self.on(Lane.FETCH):
            target.copy_(source, non_blocking=self._is_locked(source))
        self.fetched += source.nbytes

    def evict(self, target: Tensor, source: Tensor) -> None:
        """Copy a tensor from device to host on the evict stream."""
        with self.on(Lane.EVICT):
            target.copy_(source, non_blocking=self._is_locked(target))
        self.evicted += source.nbytes

    def _is_locked(self, host: Tensor) -> bool:
        return self.device.type == "cuda" and host.is_pinned()

    # -- rows of host memory that the device reads and writes in place ---------------------------

    def gather(self, target: Tensor, source: Tensor, rows: Tensor) -> None:
        """Copy rows of a host tensor (`Arena.view`, mapped) to the device, [n, D], contiguous."""
        with self.on(Lane.FETCH):
            wide, source = _wide(target, source)
            if source.device != wide.device:
                wide.copy_(source[rows.cpu()])
            elif wide.device.type == "cuda":
                launch_rows(load("farspan.kernels.triton_kernels", "take_rows"), wide, source, rows)
            else:
                torch.index_select(source, 0, rows, out=wide)
        self.fetched += target.nbytes

    def add_rows(self, total: Tensor, rows: Tensor, values: Tensor) -> None:
        """Add device values [n, D] to n distinct rows of a host tensor (`Arena.view`, mapped)."""
        with self.on(Lane.EVICT):
            if total.device != values.device:
                total.index_add_(0, rows.cpu(), values.cpu())
            elif total.device.type == "cuda":
                launch_rows(load("farspan.kernels.triton_kernels", "add_rows"), total, values, rows)
            else:
                total.index_add_(0, rows, values)
        self.fetched += values.nbytes
        self.evicted += values.nbytes

    def note(self, target: Tensor, source: Tensor) -> None:
        """Copy a tensor within the device, on the fetch stream: after the fetches issued so far."""
        with self.on(Lane.FETCH):
            target.copy_(source)

    def read(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start copying a small tensor to the CPU; return a function that waits and returns it."""
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
        """Run the body's operations on the stream of a lane: compute, fetch or evict."""
        stream = self._streams.get(lane) if self._streams else None
        if stream is None:
            return NOTHING
        return torch.cuda.stream(stream) if self.timed is None else self._timing(lane, stream)

    @contextmanager
    def _timing(self, lane: Lane, stream: torch.cuda.Stream) -> Iterator[None]:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            began.record(stream)
            yield
            ended.record(stream)
        if self.timed is not None:
            self.timed.append((lane, began, ended))

    # -- order -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Make the copy streams wait for all work issued so far on the caller's stream."""
        computed = self.record(Lane.COMPUTE)
        for lane in self._streams:
            self.wait(lane, computed)

    def end(self) -> None:
        """Make the caller's stream wait for all copies issued so far."""
        for lane in self._streams:
            self.wait(Lane.COMPUTE, self.record(lane))

    def record(self, lane: Lane) -> Any:
        """Return an event that follows all work issued on a lane so far; None without overlap."""
        if not self.overlap:
            return None
        event = torch.cuda.Event()
        event.record(self._stream(lane))
        return event

    def wait(self, lane: Lane, event: Any, _hazard: Hazard | None = None) -> None:
        """Make later work on a lane wait for an event, if any. `_hazard` (why) is for tests."""
        if self.overlap and event is not None:
            self._stream(lane).wait_event(event)

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        return self._streams.get(lane) or torch.cuda.current_stream(self.device)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def _wide(*tensors: Tensor) -> list[Tensor]:
    """View rows [n, D] as rows of larger elements, up to 8 bytes, if sizes and strides allow."""
    # A thread that reads elements of 2 bytes asks the link for 64 bytes at a time, and Triton joins
    # loads only if it knows that rows are aligned.
    for dtype in (torch.int64, torch.int32):
        if all(_divides(dtype.itemsize // x.element_size(), x) for x in tensors):
            return [x.view(dtype) for x in tensors]
    return list(tensors)


def _divides(whole: int, rows: Tensor) -> bool:
    """Return whether each `whole` adjacent elements of a row can be viewed as a larger one."""
    places = (rows.shape[-1], rows.storage_offset(), *rows.stride()[:-1])
    return whole > 0 and rows.stride(-1) == 1 and not any(place % whole for place in places)


def launch_rows(kernel: Any, target: Tensor, source: Tensor, rows: Tensor) -> None:
    """Launch kernel `take_rows` or `add_rows`; `rows` has each row's index in the larger tensor."""
    width = target.shape[1]
    padded = 1 << (width - 1).bit_length()
    tile = max(1, TILE_BYTES // (padded * target.element_size()))
    programs = min(PROGRAMS, -(-len(rows) // tile))
    if programs:
        with torch.cuda.device_of(target):
            kernel[(programs,)](target, source, rows, len(rows), width, padded, tile, num_warps=8)


class StreamOrder:
    """Order in which a program's instructions run on a copy engine's streams, kept by events.
    Invariant: an event exists from its instruction to the last instruction that waits for it."""

    def __init__(self, copies: CopyEngine, orders: tuple[Order, ...]) -> None:
        self.copies = copies
        self.orders = orders
        self.to_come = Counter(
            wait for order in orders for after in order.values() for wait in after
        )
        self.events: dict[Wait, Any] = {}

    def before(self, index: int) -> None:
        """Make the stream of instruction `index` wait for the instructions that it must follow."""
        for lane, after in self.orders[index].items():
            for wait in after:
                self.copies.wait(lane, self.events[wait])
                self.to_come[wait] -= 1
                if not self.to_come[wait]:
                    del self.events[wait]

    def after(self, index: int) -> None:
        """Record an event for instruction `index`, just issued, if a later one waits for it."""
        for lane in self.orders[index]:
            wait = Wait(lane, index)
            if self.to_come[wait]:
                self.events[wait] = self.copies.record(lane)


class DeviceTooSmall(UnsupportedError):
    """Error that a GPU has not enough free memory."""


def reserve_together(
    ranks: ParallelContext | None,
    arenas: Mapping[Tier, Arena],
    sizes: Mapping[Tier, int],
    advice: str,
) -> None:
    """Reserve memory of each tier on all ranks, or raise the same error on all. A machine may
    refuse one rank memory that forecasts allow, such as pages to lock: then all raise TooLarge or
    DeviceTooSmall before they have computed anything. A single rank raises the original error."""
    alone = ranks is None or ranks.layout.devices() == 1
    tiers, refused, size, cause = list(Tier), -1, 0, None
    for number, tier in enumerate(tiers):
        try:
            arenas[tier].reserve(sizes[tier])
        except (RuntimeError, MemoryError) as error:
            if alone:
                raise
            refused, size, cause = number, sizes[tier], error
            break
    if ranks is None or alone:
        return
    if cause is not None:
        for arena in arenas.values():
            arena.release()  # collectives need memory, too
    for rank, (number, asked) in enumerate(ranks.figures([refused, size])):
        if number >= 0:
            on_host = tiers[number] is Tier.HOST or ranks.device.type == "cpu"
            kind, place = (TooLarge, "host") if on_host else (DeviceTooSmall, "device")
            raise kind(
                f"{place} memory of rank {rank}: an arena of {asked:,} bytes was refused; {advice}"
            ) from cause


def refuse_beyond_together(
    ranks: ParallelContext | None, needed: int, what: str, advice: str, allowed: int | None = None
) -> None:
    """Raise TooLarge on all ranks if ranks that share a machine need, in total, more main memory
    than it has, or than the sum of their `allowed`. All ranks call it with the bytes that each
    needs; all or none give a limit. `ranks` None is a single process."""
    if ranks is None or ranks.layout.devices() == 1:
        if needed > 0:
            refuse_beyond(needed, what, advice, allowed=allowed)
        return
    machine = hashlib.blake2b(machine_name().encode(), digest_size=7).digest()
    mine = [int.from_bytes(machine), needed, available_host_bytes(), allowed or 0]
    found = ranks.figures(mine)
    for name in dict.fromkeys(row[0] for row in found):
        near = [row for row in found if row[0] == name]
        said = f"{what}, on {len(near)} ranks of a machine," if len(near) > 1 else what
        # All have measured before any rank allocates.
        room = None if allowed is None else sum(row[3] for row in near)
        least = min(row[2] for row in near)
        refuse_beyond(sum(row[1] for row in near), said, advice, least, room)
