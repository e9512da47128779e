"""Tensors that autograd saves for one cell's backward, stored together as contiguous bytes.

During the forward of a cell, autograd passes every tensor that it saves to `pack`. Tensors that a
buffer of the program has anyway (the layer's input, the attention output) become references to the
buffer, and parameters stay in place. The rest is copied to contiguous bytes when the cell is
sealed, so one copy takes a cell to the host and one brings it back (MEMO 4.1).

The copy is of memory, not of tensors: once for each storage, the span that saved views cover. So
the halves of a fused projection are stored together, and a view comes back with its strides and
alignment. Kernels choose by these, and the backward must give the same bits.

Two kinds of tensors are not stored, as no matrix product makes them: outputs passed to `remade`,
such as a norm's, and intermediate results of code run by `rerun`. The backward computes them again,
by the same kernels from inputs of the same layout, so to the same bits.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(slots=True)
class _Remade:
    """A function's output, of which only the inputs are stored; the backward computes it again."""

    out: Tensor | None  # keeps the memory alive, so that its storage identifies it, until `seal`
    version: int  # of `out`: its content is the function's while this is the same
    make: Callable[..., Tensor]
    inputs: tuple[Any, ...]  # tensors; packed once `packed`
    packed: bool = False


@dataclass(slots=True)
class _Rerun:
    """Code whose saved tensors, apart from its inputs, are computed again when they are needed."""

    run: Callable[..., Tensor]
    inputs: tuple[Any, ...]  # as of `_Remade`
    needs_grad: tuple[bool, ...]
    packed: bool = False
    count: int = 0  # of tensors that it saves
    again: dict[int, Tensor] = field(default_factory=dict)  # computed again, not yet taken


@dataclass(frozen=True, slots=True)
class _Between:
    """Reference to a tensor that rerun code saves: its number among those that the code saves."""

    of: _Rerun
    number: int


Packed = Tensor | _View | _Sparse | _Between


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
        self._remade: dict[int, _Remade] = {}  # by storage
        self._bytes: Tensor | None = None
        self.references: set[str] = set()  # named tensors that the graph saved

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Record what autograd saves while the body runs the cell's forward."""
        token = _recording.set(self)
        try:
            with self._hooks(self.pack):
                yield
        finally:
            _recording.reset(token)

    def _hooks(self, pack: Callable[[Tensor], Any]) -> saved_tensors_hooks:
        unpack = self.unpack
        # Compiled modules save in frames that the compiler watches; it must not trace these hooks.
        if "torch._dynamo" in sys.modules:
            pack, unpack = torch.compiler.disable(pack), torch.compiler.disable(unpack)
        return saved_tensors_hooks(pack, unpack)

    # -- tensors that are computed again ---------------------------------------------------------

    def note(self, out: Tensor, make: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
        """Save `inputs` in place of `out`, the result of `make(*inputs)`. Save `out` itself if it
        does not fill a storage of its own, or changes later."""
        whole = _start(out) == 0 and _reach(out) == out.untyped_storage().nbytes()
        if whole and out.numel() and _storage(out) not in map(_storage, inputs):
            held = tuple(x.detach() for x in inputs)
            self._remade[_storage(out)] = _Remade(out.detach(), out._version, make, held)

    def rerun(self, run: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        """Return `run(*inputs)`, and save its inputs alone."""
        held = tuple(x.detach() for x in inputs)
        of = _Rerun(run, held, tuple(x.requires_grad for x in inputs))
        own = {_storage(x) for x in inputs}

        def pack(tensor: Tensor) -> Packed:
            if not self._is_between(tensor, own):
                return self.pack(tensor)
            if not of.packed:
                of.inputs, of.packed = tuple(map(self._pack, of.inputs)), True
            of.count += 1
            return _Between(of, of.count - 1)

        with self._hooks(pack):
            out = run(*inputs)
        self.note(out, run, inputs)
        return out

    def _is_between(self, tensor: Tensor, inputs: set[int]) -> bool:
        known = tensor.layout is not torch.strided or _storage(tensor) in inputs
        return not known and not self._is_of_parameter(tensor)

    def _take(self, packed: _Between) -> Tensor:
        """Return a tensor that rerun code saves, from the code's last run or from a new one."""
        of = packed.of
        if packed.number in of.again:
            return of.again.pop(packed.number)
        pairs = zip(map(self.unpack, of.inputs), of.needs_grad, strict=True)
        leaves = [x.detach().requires_grad_(needs) for x, needs in pairs]
        own, found = {_storage(x) for x in leaves}, list[Tensor]()

        def collect(tensor: Tensor) -> Any:
            if self._is_between(tensor, own):
                found.append(tensor.detach())

        with torch.enable_grad(), saved_tensors_hooks(collect, lambda nothing: nothing):
            of.run(*leaves)
        assert len(found) == of.count, "code saved other tensors when it ran again"
        of.again = dict(enumerate(found))
        return of.again.pop(packed.number)

    def _make(self, of: _Remade) -> Tensor:
        with torch.no_grad():
            return of.make(*map(self.unpack, of.inputs))

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
        remade = self._remade.get(address)
        if remade is not None and tensor._version == remade.version:
            if not remade.packed:
                remade.inputs, remade.packed = tuple(map(self._pack, remade.inputs)), True
            return _View(address, offset, tensor.shape, tensor.stride(), tensor.dtype)
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
        self._remade = {address: of for address, of in self._remade.items() if of.packed}
        for of in self._remade.values():
            of.out = None

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
        if isinstance(packed, _Between):
            return self._take(packed)
        if isinstance(packed.source, str):
            base = self._named[packed.source]
            start = int(base.storage_offset()) * base.element_size() + packed.offset
        elif packed.source in self._remade:
            base, start = self._make(self._remade[packed.source]), packed.offset
        elif packed.source in self._beyond:
            low, base = self._beyond[packed.source]
            start = packed.offset - low
        else:
            assert self._bytes is not None, "unpacked before it was sealed and restored"
            low, place = self._places[packed.source]
            base = self._bytes
            start = int(base.storage_offset()) + place + packed.offset - low
        return _typed(base, start, packed.shape, packed.stride, packed.dtype)


_recording: ContextVar[SavedActivations | None] = ContextVar("recording", default=None)


def is_recording() -> bool:
    """Return whether a cell's forward is running whose saved tensors are stored."""
    return _recording.get() is not None


def remade(out: Tensor, make: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return `out`, and have the cell store the inputs in its place.

    Args:
        out: A new tensor, the result of `make(*inputs)`.
        make: Gives the same bits whenever it runs, without autograd.
        inputs: Tensors that autograd saves anyway, or parameters.
    """
    saved = _recording.get()
    if saved is not None:
        saved.note(out, make, inputs)
    return out


def rerun(run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return `run(*inputs)`, and have the cell store the inputs alone: it runs the code again for
    the output and for all that autograd saves inside. The code must draw no random numbers and keep
    no state."""
    saved = _recording.get()
    return run(*inputs) if saved is None else saved.rerun(run, inputs)


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
