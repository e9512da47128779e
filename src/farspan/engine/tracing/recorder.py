"""Every malloc and free of torch's allocator, from tensors that have no memory.

On the meta device an operation makes its outputs and computes nothing, so a step of any size runs
in seconds. A storage is born with the operation whose output first lies in it, and dies with the
last tensor, view, or autograd node that refers to it: when CPython drops its wrapper, which torch
keeps for as long as the storage lives.

Note: [Autograd adds in place]. When a second gradient comes for a tensor, autograd adds it into the
first if nobody else holds that; but never where a dispatch mode or a meta tensor makes tensors
"subclass like". So the recorder, which is such a mode, puts the addition in place itself: by the
rule of torch's InputBuffer (sole owner, dense, no graph of this sum), told apart from an addition
in somebody's own backward by its references, of which a caller in Python holds one more.

Note: [Order within an operation]. Outputs are born first, in their order, then what the kernel
takes and gives back within itself: see `temporaries`.
"""

import sys
import weakref
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from farspan.engine.tracing.temporaries import NONE, Temporaries
from farspan.memory.trace import Event, FreeEvent, Malloc, Mark, Trace

ADD, ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor


class _Death(weakref.ref[Any]):
    """Fires when a storage dies. `tensor` is None for what was there before the recording."""

    __slots__ = ("key", "tensor")
    key: int
    tensor: int | None


class Recorder(TorchDispatchMode):
    """Records the storages of one device that are born inside the block, and their deaths.

    Invariant: `_alive` has one entry for each storage that was met and still lives.
    """

    def __init__(self, device: torch.device, temporaries: Temporaries = NONE, *, in_place: bool):
        """`in_place`: add gradients as autograd does when nobody looks on; see the Note."""
        super().__init__()
        self.device = device.type
        self.events: list[Event] = []
        self.lasting: set[int] = set()  # tensors that belong to no step: weights, moments
        self._temporaries = temporaries
        self._in_place = in_place
        self._references = _engine_references()
        self._alive: dict[int, _Death] = {}
        self._next = 0
        self._handles: set[bool] = set()  # threads that have their cuBLAS workspace

    def mark(self, name: str) -> None:
        """What follows is called `name`."""
        self.events.append(Mark(name))

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """These are there when the recording begins: born now, of no step."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._alive and storage.nbytes():
                self.lasting.add(self._born(storage))

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """From here on these belong to no step, though one made them."""
        for tensor in tensors:
            death = self._alive.get(tensor.untyped_storage()._cdata)
            if death is not None and death.tensor is not None:
                self.lasting.add(death.tensor)

    def trace(self, name: str, *, lasting: bool = True) -> Trace:
        """What was recorded so far; without what belongs to no step if not `lasting`."""
        left_out: set[int] = set() if lasting else self.lasting
        kept = (e for e in self.events if isinstance(e, Mark) or e.tensor not in left_out)
        return Trace(tuple(kept), name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is ADD and self._in_place and self._accumulates(args):
            func = ADD_IN_PLACE
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self._meet(out, args)
        elif isinstance(out, tuple | list):
            for one in out:
                if isinstance(one, Tensor):
                    self._meet(one, args)
        self._borrow(func, args)
        return out

    def _accumulates(self, args: Sequence[Any]) -> bool:
        """Is this autograd adding up, where it would add in place? See the Note."""
        return (
            not torch.is_grad_enabled()
            and in_backward()
            and sys.getrefcount(args[0]) == self._references
            and isinstance(args[1], Tensor)
            and args[0].shape == args[1].shape
            and _is_sole_dense(args[0])
        )

    def _meet(self, tensor: Tensor, args: Sequence[Any]) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._alive or tensor.device.type != self.device:
            return
        if _is_of(storage._cdata, args):
            self._watch(storage, None)  # a view of what was born outside
        elif storage.nbytes():
            self._born(storage)

    def _born(self, storage: Any) -> int:
        tensor = self._malloc(storage.nbytes())
        self._watch(storage, tensor)
        return tensor

    def _malloc(self, size: int) -> int:
        tensor, self._next = self._next, self._next + 1
        self.events.append(Malloc(tensor, size))
        return tensor

    def _watch(self, storage: Any, tensor: int | None) -> None:
        death = _Death(storage, self._dies)
        death.key, death.tensor = storage._cdata, tensor
        self._alive[death.key] = death

    def _dies(self, death: _Death) -> None:
        del self._alive[death.key]
        if death.tensor is not None:
            self.events.append(FreeEvent(death.tensor))

    def _borrow(self, func: Any, args: Sequence[Any]) -> None:
        """What a kernel takes within itself, and what the first of its kind takes for good."""
        thread = in_backward()  # autograd has a thread, hence handles, of its own
        workspace = self._temporaries.workspace(func)
        if workspace and thread not in self._handles:
            self._handles.add(thread)
            self.lasting.add(self._malloc(workspace))
        taken = [self._malloc(size) for size in self._temporaries.within(func, args)]
        self.events.extend(map(FreeEvent, reversed(taken)))


def in_backward() -> bool:
    """Is autograd at work?"""
    return torch._C._current_graph_task_id() != -1


def _is_of(key: int, args: Sequence[Any]) -> bool:
    """Is this the storage of one of the arguments?"""
    for arg in args:
        if isinstance(arg, Tensor):
            if arg.untyped_storage()._cdata == key:
                return True
        elif isinstance(arg, list | tuple) and _is_of(key, arg):
            return True
    return False


def _is_sole_dense(tensor: Tensor) -> bool:
    """Nobody else has its storage, and its elements fill one range without gaps."""
    key = tensor.untyped_storage()._cdata
    # One reference is the tensor's, one that of the storage's wrapper.
    sole = torch._C._storage_Use_Count(key) == 2
    return sole and bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


class _Count(TorchDispatchMode):
    """Counts the references to the first argument of autograd's additions."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is ADD and in_backward():
            self.found.add(sys.getrefcount(args[0]))
        return func(*args, **(kwargs or {}))


@cache
def _engine_references() -> int:
    """How many references to its first argument autograd's own addition has: counted, since it
    depends on the versions of CPython and torch."""
    x = torch.empty(1, device="meta", requires_grad=True)
    with _Count() as count, torch.enable_grad():
        torch.autograd.grad(x.sin() * x.cos(), x)
    (found,) = count.found
    return found
