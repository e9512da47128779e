"""Tensors that autograd saves for one cell's backward, stored together as contiguous bytes.

During the forward of a cell, autograd passes every tensor that it saves to `pack`. Tensors that a
buffer of the program has anyway (the layer's input, the attention output) become references to the
buffer, and parameters stay in place. The rest is copied to contiguous bytes when the cell is
sealed, so one copy takes a cell to the host and one brings it back (MEMO 4.1).

The copy is of memory, not of tensors: once for each storage, the span that saved views cover. So
the halves of a fused projection are stored together, and a view comes back with its strides and
alignment. Kernels choose by these, and the backward must give the same bits.
"""

import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from farspan.program.layout import ALIGNMENT
from farspan.program.program import aligned

MORE = (
    "a cell saved more than planned (perhaps a router chose more experts); the excess stays on the "
    "device, beyond the plan; set activation_save_fraction: 0 to keep to the plan"
)


@dataclass(frozen=True, slots=True)
class _View:
    """A saved tensor, described as a view of a tensor in a program's buffer or of saved memory."""

    source: str | int  # name, or address of the storage
    offset: int  # bytes from the named tensor's first element, or from the storage's
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Sparse:
    """A saved sparse tensor, stored as its indices and values."""

    indices: "Tensor | _View"
    values: "Tensor | _View"
    shape: torch.Size
    coalesced: bool


Packed = Tensor | _View | _Sparse


@dataclass(slots=True)
class _Span:
    """Range of a storage that saved tensors cover, copied as contiguous bytes."""

    tensor: Tensor  # keeps the memory alive until it is copied
    low: int  # bytes from the start of the storage, aligned
    high: int
    place: int = 0  # byte offset in the cell

    @property
    def size(self) -> int:
        return aligned(self.high - self.low)


class SavedActivations:
    """The tensors that autograd saves for one cell's backward, copied to contiguous bytes.

    Invariant: before `seal`, every storage with a saved view stays alive, so its address identifies
    it. After `seal` no tensor is kept, except copies beyond the planned bytes.
    """

    def __init__(self, parameters: Iterable[Tensor], named: dict[str, Tensor]) -> None:
        self._parameters = [(_storage(p), _start(p), _start(p) + _reach(p)) for p in parameters]
        self._named = named
        self._spans: dict[int, _Span] = {}
        self._places: dict[int, tuple[int, int]] = {}  # storage: low, place
        self._beyond: dict[int, tuple[int, Tensor]] = {}  # storage: low, the span's bytes
        self._bytes: Tensor | None = None
        self.references: set[str] = set()  # named tensors that the graph saved

    def hooks(self) -> saved_tensors_hooks:
        """Return saved-tensor hooks, under which the cell's forward records what autograd saves."""
        pack, unpack = self.pack, self.unpack
        # Compiled modules save in frames that the compiler watches; it must not trace these hooks.
        if "torch._dynamo" in sys.modules:
            pack, unpack = torch.compiler.disable(pack), torch.compiler.disable(unpack)
        return saved_tensors_hooks(pack, unpack)

    def pack(self, tensor: Tensor) -> Packed:
        if tensor.layout is torch.sparse_coo:  # adapters of PEFT's SHiRA and FRoD
            parts = self._pack(tensor._indices()), self._pack(tensor._values())
            return _Sparse(*parts, tensor.shape, tensor.is_coalesced())
        return self._pack(tensor)

    def _pack(self, tensor: Tensor) -> Tensor | _View:
        if self._is_of_parameter(tensor):
            return tensor
        for name, base in self._named.items():
            if _within(tensor, base):
                self.references.add(name)
                offset = _start(tensor) - _start(base)
                return _View(name, offset, tensor.shape, tensor.stride(), tensor.dtype)
        address, offset = _storage(tensor), _start(tensor)
        low, high = offset // ALIGNMENT * ALIGNMENT, offset + _reach(tensor)
        span = self._spans.setdefault(address, _Span(tensor.detach(), low, high))
        span.low, span.high = min(span.low, low), max(span.high, high)
        return _View(address, offset, tensor.shape, tensor.stride(), tensor.dtype)

    def _is_of_parameter(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter or a view of one. Their addresses are compared,
        since a parameter's storage may hold other tensors, too."""
        storage, start = _storage(tensor), _start(tensor)
        return any(storage == s and low <= start < high for s, low, high in self._parameters)

    def size(self) -> int:
        """Return the bytes of saved memory that `seal` will copy."""
        return sum(span.size for span in self._spans.values())

    def count(self) -> int:
        """Return how many spans of memory `seal` will copy."""
        return len(self._spans)

    def seal(self, store: Tensor) -> None:
        """Copy the saved memory into `store` (uint8) after the cell's forward."""
        if self.size() > store.numel():
            warnings.warn(MORE, stacklevel=2)
        place = 0
        for address, span in self._spans.items():
            length = span.high - span.low
            source = _typed(span.tensor, span.low, torch.Size([length]), (1,), torch.uint8)
            if place + length > store.numel():
                self._beyond[address] = span.low, source.clone()
                continue
            store[place : place + length].copy_(source)
            self._places[address] = span.low, place
            place += span.size
        self.forget()

    def forget(self) -> None:
        """Drop all saved tensors. Else none would be freed: a named tensor refers to its graph, the
        graph by its hooks to this object, and the garbage collector does not see such a cycle."""
        self._spans, self._named = {}, {}

    def restore(self, store: Tensor, named: dict[str, Tensor]) -> None:
        """Give the backward the sealed bytes and, by name, tensors that are in buffers."""
        self._bytes, self._named = store, named

    def unpack(self, packed: Packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed, _Sparse):
            indices, values = self.unpack(packed.indices), self.unpack(packed.values)
            return torch.sparse_coo_tensor(
                indices, values, packed.shape, is_coalesced=packed.coalesced, check_invariants=False
            )
        if isinstance(packed.source, str):
            base = self._named[packed.source]
            start = int(base.storage_offset()) * base.element_size() + packed.offset
        elif packed.source in self._beyond:
            low, base = self._beyond[packed.source]
            start = packed.offset - low
        else:
            assert self._bytes is not None, "unpacked before it was sealed and restored"
            low, place = self._places[packed.source]
            base = self._bytes
            start = int(base.storage_offset()) + place + packed.offset - low
        return _typed(base, start, packed.shape, packed.stride, packed.dtype)


def _within(tensor: Tensor, base: Tensor) -> bool:
    if tensor.dtype is not base.dtype or tensor.numel() == 0:
        return False
    low, high = _start(base), _start(base) + _reach(base)
    start = _start(tensor)
    same = _storage(tensor) == _storage(base)
    return same and low <= start and start + _reach(tensor) <= high


def _storage(tensor: Tensor) -> int:
    """Return an identifier of a tensor's storage, whose address is always 0 on the meta device."""
    return int(tensor.untyped_storage()._cdata)


def _start(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _reach(tensor: Tensor) -> int:
    """Return the bytes from the start of a tensor's first element to the end of its last."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((extent - 1) * stride for extent, stride in steps)) * tensor.element_size()


def _typed(
    memory: Tensor, start: int, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Return a tensor over `memory`'s storage from byte `start`, with its own version counter: to
    autograd, writes through other tensors do not change it."""
    view = torch.empty(0, dtype=dtype, device=memory.device)
    return view.set_(memory.untyped_storage(), start // view.element_size(), shape, stride)
