"""One slab of memory a tier; every buffer is a view of it at a planned address."""

import ctypes
import mmap
import weakref
from contextlib import suppress

import torch
from torch import Tensor

from farspan.spec import Tier

# All ones is NaN in every IEEE format from float64 to bfloat16, so poisoned memory that is read
# before it is written shows up in the loss.
POISON = 0xFF


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

    def reserve(self, size: int) -> None:
        """Hold at least `size` bytes; a slab that is large enough stays. Its content is gone."""
        if size > self.nbytes:
            self.release()  # give back first: both would not fit
            if self._cuda is None:
                self._slab = torch.empty(size, dtype=torch.uint8, device=self._device)
                return
            slab = _pages(size)
            _touch(slab)
            _pin(slab, self._cuda)  # may fail: what was never locked is not to be unlocked
            # An arena that is dropped ends like one that is released: `slab` lives until then.
            self._unlock = weakref.finalize(self, _unpin, slab, self._cuda)
            self._unlock.atexit = False
            self._slab = slab[:size]

    def release(self) -> None:
        """Give the memory back."""
        self._mapped = None
        if self._unlock is not None:
            self._unlock()
            self._unlock = None
        self._slab = torch.empty(0, dtype=torch.uint8, device=self._device)

    def poison(self) -> None:
        """Fill with NaN: nothing may depend on what an earlier step left behind."""
        self._slab.fill_(POISON)

    def view(
        self, address: int, shape: tuple[int, ...], dtype: torch.dtype, *, mapped: bool = False
    ) -> Tensor:
        """A contiguous tensor at `address` bytes; `mapped`: of a host arena, as a tensor of the
        device, whose kernels read and write it across the link.

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
        if self._cuda is None:
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
