"""Measure peak memory: of torch's tensors on a CPU, of the allocator on a GPU."""

import weakref
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from farspan.hf.stages import uncompiled


class LiveStorage(TorchDispatchMode):
    """Counts the bytes of every storage that is born inside the block and still alive.

    Costs about 6 microseconds an operation. Memory that an operator takes and gives back within
    itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # What goes in unseen was born outside: a view of it, such as a weight's transpose, is no
        # new memory.
        self._meet(args, born=False)
        self._meet(kwargs, born=False)
        out = func(*args, **(kwargs or {}))
        self._meet(out, born=True)
        return out

    def _meet(self, value: Any, *, born: bool) -> None:
        """All tensors of an operator's arguments or results. Those are nested in these three types
        only, and `tree_leaves`, which knows every type, took half the time of a metered step."""
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            key = storage._cdata
            if key not in self._known:
                size = storage.nbytes() if born else 0
                self._known[key] = weakref.ref(storage, partial(self._leave, key, size))
                self.live += size
                self.peak = max(self.peak, self.live)
        elif isinstance(value, list | tuple):
            for item in value:
                self._meet(item, born=born)
        elif isinstance(value, dict):
            for item in value.values():
                self._meet(item, born=born)

    def _leave(self, key: int, size: int, _: object) -> None:
        self.live -= size
        self._known.pop(key, None)


class PeakMeter:
    """Peak bytes of new tensors on the device of a model, inside a block.

    On a CPU that is everything torch allocates, both tiers included; on a GPU it is what its
    allocator handed out above what was handed out when the block began.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storage = LiveStorage() if device.type == "cpu" else None
        self._uncompiled = uncompiled()
        self._before = 0
        self.peak = 0

    def __enter__(self) -> Self:
        if self._storage is not None:
            self._uncompiled.__enter__()
            self._storage.__enter__()
        else:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._storage is not None:
            self._storage.__exit__(kind, error, trace)
            self._uncompiled.__exit__(kind, error, trace)
            self.peak = self._storage.peak
        else:
            self.peak = torch.cuda.max_memory_allocated(self._device) - self._before
