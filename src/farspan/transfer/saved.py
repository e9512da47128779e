"""What a kept graph saved, moved out of the graph's way and back (MEMO 4.1).

While a cell runs forward, autograd hands every tensor it saves to `pack`. Tensors that a buffer of
the program holds anyway (the layer's input, the attention output) become references to it, and
parameters stay where they are. The rest is copied into one run of bytes when the cell is sealed,
so that one copy takes a cell to host and one brings it back.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from farspan.plan.sizes import aligned


@dataclass(frozen=True, slots=True)
class _Reference:
    """A view of a tensor that will be at hand again: the same elements, wherever it then is."""

    name: str
    offset: int  # elements from the named tensor's first
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in the cell's bytes, with the strides it had: kernels may choose by strides, and
    the backward must give the same bits as without the detour."""

    offset: int  # bytes
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Handle:
    """What the graph keeps in a tensor's place."""

    def __init__(self, value: Tensor | _Reference | _Stored) -> None:
        self.value = value


class SavedCell:
    """The saved tensors of one cell.

    Invariant: before `seal`, handles hold the tensors themselves, so their memory is not given to
    another tensor and (address, layout) identifies one. After `seal`, handles hold no tensor.
    """

    def __init__(self, parameters: Iterable[Tensor], named: dict[str, Tensor]) -> None:
        self._parameters = {p.untyped_storage().data_ptr() for p in parameters}
        self._named = named
        self._handles: dict[tuple[int, torch.Size, tuple[int, ...], torch.dtype], _Handle] = {}
        self._bytes: Tensor | None = None
        self.references: set[str] = set()  # named tensors the graph saved

    def pack(self, tensor: Tensor) -> Tensor | _Handle:
        if tensor.untyped_storage().data_ptr() in self._parameters:
            return tensor
        for name, base in self._named.items():
            if _within(tensor, base):
                self.references.add(name)
                offset = (tensor.data_ptr() - base.data_ptr()) // tensor.element_size()
                return _Handle(_Reference(name, offset, tensor.shape, tensor.stride()))
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        return self._handles.setdefault(key, _Handle(tensor.detach()))

    def size(self) -> int:
        """Bytes the cell needs when sealed into bytes."""
        return sum(_dense_bytes(handle.value) for handle in self._handles.values())

    def count(self) -> int:
        """Distinct tensors saved."""
        return len(self._handles)

    def seal(self, store: Tensor) -> None:
        """The forward is over: copy what was saved into `store` (uint8)."""
        self._named = {}
        offset = 0
        for handle in self._handles.values():
            offset += _move(handle, store, offset)
        self._handles = {}

    def restore(self, store: Tensor, named: dict[str, Tensor]) -> None:
        """The backward is about to run: the bytes and the named tensors are at hand again."""
        self._bytes, self._named = store, named

    def release(self) -> None:
        self._bytes, self._named = None, {}

    def unpack(self, handle: Tensor | _Handle) -> Tensor:
        if isinstance(handle, Tensor):
            return handle
        value = handle.value
        assert not isinstance(value, Tensor), "unpacked before it was sealed"
        if isinstance(value, _Reference):
            base = self._named[value.name]
            start = base.storage_offset() + value.offset
            return base.as_strided(value.shape, value.stride, start)
        assert self._bytes is not None
        return _typed(self._bytes, value)


def _within(tensor: Tensor, base: Tensor) -> bool:
    if tensor.dtype is not base.dtype or tensor.numel() == 0:
        return False
    low = base.data_ptr()
    span = 1 + sum((n - 1) * s for n, s in zip(base.shape, base.stride(), strict=True))
    return low <= tensor.data_ptr() < low + span * base.element_size()


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a gapless copy that keeps the order of the dimensions."""
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()


def _dense_bytes(tensor: object) -> int:
    assert isinstance(tensor, Tensor)
    return aligned(tensor.numel() * tensor.element_size())


def _typed(store: Tensor, place: _Stored) -> Tensor:
    view = torch.empty(0, dtype=place.dtype, device=store.device)
    start = (store.storage_offset() + place.offset) // view.element_size()
    return view.set_(store.untyped_storage(), start, place.shape, place.stride)


def _move(handle: _Handle, store: Tensor, offset: int) -> int:
    tensor = handle.value
    assert isinstance(tensor, Tensor)
    size = _dense_bytes(tensor)
    if offset + size > store.numel():
        raise RuntimeError(
            f"a cell saved more than the {store.numel():,} bytes planned for it; "
            "this model's activations vary in size, set activations_kept to 0"
        )
    place = _Stored(offset, tensor.shape, _dense_stride(tensor), tensor.dtype)
    _typed(store, place).copy_(tensor)
    handle.value = place
    return size
