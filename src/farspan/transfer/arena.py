"""One slab of memory a tier; every buffer is a view of it at a planned address."""

import ctypes
import mmap
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from farspan.memory.host import available_host_bytes
from farspan.spec import Tier

# All ones is NaN in every IEEE format from float64 to bfloat16, so poisoned memory that is read
# before it is written shows up in the loss.
POISON = 0xFF
PAGEABLE = (
    "main memory cannot be locked for copies here (cudaHostRegister: {}): the CPU now waits for "
    "each copy between the device and main memory, so that a step computes nothing meanwhile and "
    "takes longer; its results are the same. Raise the limit (ulimit -l unlimited; docker run "
    "--ulimit memlock=-1), give the container the GPU's driver itself, or choose a schedule that "
    "keeps more on the device; farspan calibrate measures how slow copies are"
)


class Arena:
    """The memory of one tier for one program.

    Invariant: the slab never moves while views of it are alive; `reserve` and `release` may only
    be called between steps.
    """

    def __init__(self, tier: Tier, device: torch.device) -> None:
        self.tier = tier
        self._cuda = device if tier is Tier.HOST and device.type == "cuda" else None  # copies to it
        self._device = torch.device("cpu") if tier is Tier.HOST else device
        self._slab = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._mapped: Tensor | None = None  # the slab as the device sees it
        self._unlock: weakref.finalize[..., Arena] | None = None

    @property
    def nbytes(self) -> int:
        return self._slab.numel()

    @property
    def is_pageable(self) -> bool:
        """Does it hold main memory that a GPU copies to and from, and that could not be locked?"""
        return self._cuda is not None and self.nbytes > 0 and self._unlock is None

    def reserve(self, size: int) -> None:
        """Hold at least `size` bytes; a slab that is large enough stays. Its content is gone. For
        copies of a GPU it is locked: in place, or by torch's allocator where that has room; where
        neither can, it is not, with a warning."""
        if size > self.nbytes:
            self.release()  # give back first: both would not fit
            if self._cuda is None:
                self._slab = torch.empty(size, dtype=torch.uint8, device=self._device)
                return
            slab, unlock = _locked(size, self._cuda)
            if unlock is not None:
                # An arena that is dropped ends like one that is released: `slab` lives until then.
                self._unlock = weakref.finalize(self, unlock)
                self._unlock.atexit = False
            self._slab = slab[:size]

    def release(self) -> None:
        """Give the memory back."""
        self._mapped = None
        self._slab = torch.empty(0, dtype=torch.uint8, device=self._device)
        if self._unlock is not None:
            self._unlock()
            self._unlock = None

    def poison(self) -> None:
        """Fill with NaN: nothing may depend on what an earlier step left behind."""
        self._slab.fill_(POISON)

    def view(
        self, address: int, shape: tuple[int, ...], dtype: torch.dtype, *, mapped: bool = False
    ) -> Tensor:
        """A contiguous tensor at `address` bytes; `mapped`: of a host arena, as a tensor of the
        device, whose kernels read and write it across the link; of one that is pageable, as it is.

        Each view has a version counter of its own: autograd may save a view, and writing another
        buffer of the same slab must not make it look modified.
        """
        size = torch.empty(0, dtype=dtype, device="meta").element_size()
        assert address % size == 0, f"address {address} is not aligned to {dtype}"
        strides, step = [], 1
        for extent in reversed(shape):
            strides.append(step)
            step *= extent
        assert 0 <= address <= self.nbytes - step * size, "view outside the arena"
        slab = self._as_device() if mapped else self._slab
        view = torch.empty(0, dtype=dtype, device=slab.device)
        first = (int(slab.storage_offset()) + address) // size
        return view.set_(slab.untyped_storage(), first, shape, tuple(reversed(strides)))

    def _as_device(self) -> Tensor:
        if self._cuda is None or self.is_pageable:
            return self._slab
        if self._mapped is None:
            self._mapped = torch.as_tensor(_Locked(self._slab), device=self._cuda)
        return self._mapped


class _Locked:
    """Locked pages as a CUDA array: addresses are unified, and a device reaches them where they
    lie."""

    def __init__(self, slab: Tensor) -> None:
        self.slab = slab
        self.__cuda_array_interface__ = {
            "data": (slab.data_ptr(), False),
            "shape": (slab.numel(),),
            "typestr": "|u1",
            "version": 3,
        }


Unlock = Callable[[], None]


def _locked(size: int, device: torch.device) -> tuple[Tensor, Unlock | None]:
    """So much main memory and what unlocks it, or None, not locked. Raises MemoryError."""
    slab = _pages(size)
    _touch(slab)
    try:
        _pin(slab, device)
    except RuntimeError as error:
        refused = str(error).strip().splitlines()[0]
    else:
        return slab, lambda: _unpin(slab, device)
    # Some systems lock what the driver itself has allocated and nothing else. torch asks for a
    # power of two, beside these pages or in their place.
    if 1 << (size - 1).bit_length() <= available_host_bytes() + slab.numel():
        del slab
        try:
            return allocate_pinned(size), _give_back_pinned
        except RuntimeError:
            slab = _pages(size)
            _touch(slab)
    warnings.warn(PAGEABLE.format(refused), stacklevel=2)
    return slab, None


def allocate_pinned(size: int) -> Tensor:
    """Bytes that torch's own allocator locks: rounded up to a power of two, and kept when they are
    freed. Raises RuntimeError."""
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


def _give_back_pinned() -> None:
    """What is free of it; torch would keep it for whoever asks next."""
    empty: Callable[[], None] | None = getattr(torch._C, "_host_emptyCache", None)
    (empty or torch.accelerator.empty_host_cache)()


def _pages(size: int) -> Tensor:
    """Whole pages of main memory for so many bytes. Pages are what is locked, and two slabs that
    share one cannot both be. The storage begins with the first page: that is where torch looks
    for whether a tensor is locked. Raises MemoryError."""
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        memory = mmap.mmap(-1, whole, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system gave no {whole:,} bytes: {error.strerror}") from error
    return torch.frombuffer(memory, dtype=torch.uint8)


def _touch(slab: Tensor) -> None:
    """Make all pages be there. Locking what was never written takes page after page of 4 KiB on one
    thread; all of torch's threads take them here, and 2 MiB at a time where the kernel gives that:
    2.3 GB/s in place of 0.5 on two cores."""
    with suppress(AttributeError, OSError, TypeError):  # a system without it
        advise = ctypes.CDLL(None).madvise
        advise(*map(ctypes.c_size_t, (slab.data_ptr(), slab.numel())), mmap.MADV_HUGEPAGE)
    slab.fill_(0)


def _pin(slab: Tensor, device: torch.device) -> None:
    """Lock pages for copies. torch's own pinned allocator would round the slab up to a power of two
    and keep it when it is freed: 70 GB would take 128."""
    with torch.cuda.device(device):
        status = torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.numel(), 0)
    if int(status) != 0:
        # CUDA keeps the error for whoever asks next, which would be the next kernel.
        with suppress(RuntimeError):
            torch.ones(1, device=device)
    torch.cuda.check_error(status)


def _unpin(slab: Tensor, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # copies from or to it may still be under way
    with torch.cuda.device(device):
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(slab.data_ptr()))
