"""Tensors that have a size and no elements, for what attention holds: which blocks of keys there
are is only known when a plan is made, and plans are made without torch.

Such a tensor is a view of a storage, and a storage counts its bytes from its birth to the death of
the last view of it (CPython's reference counts, as for a tensor), so that a peak is read off, not
derived. Shapes are tuples, strides count elements, `width` is the bytes of an element.
"""

from functools import lru_cache
from math import prod

Shape = tuple[int, ...]
Strides = tuple[int, ...]


class Memory:
    """Counts the bytes of storages that are alive."""

    __slots__ = ("live", "peak")

    def __init__(self) -> None:
        self.live = self.peak = 0

    def given(self, shape: Shape, width: int) -> "Outline":
        """A tensor that somebody else counts, such as a view of an arena."""
        return Outline(Storage(self, 0), shape, dense(shape), width)

    def new(self, shape: Shape, width: int, strides: Strides | None = None) -> "Outline":
        """A fresh tensor, contiguous unless strides are given."""
        storage = Storage(self, prod(shape) * width)
        return Outline(storage, shape, dense(shape) if strides is None else strides, width)

    def pass_by(self, size: int) -> None:
        """So many bytes that come and go."""
        self.new((size,), 1)


class Storage:
    """Bytes that are alive as long as something refers to them."""

    __slots__ = ("memory", "size")

    def __init__(self, memory: Memory, size: int) -> None:
        self.memory, self.size = memory, size
        memory.live += size
        memory.peak = max(memory.peak, memory.live)

    def __del__(self) -> None:
        self.memory.live -= self.size


class Outline:
    """A view of a storage."""

    __slots__ = ("shape", "storage", "strides", "width")

    def __init__(self, storage: Storage, shape: Shape, strides: Strides, width: int) -> None:
        self.storage, self.shape, self.strides, self.width = storage, shape, strides, width

    @property
    def memory(self) -> Memory:
        return self.storage.memory

    def contiguous(self) -> bool:
        return self.strides == dense(self.shape) or _contiguous(self.shape, self.strides)


def permute(x: Outline, order: Shape) -> Outline:
    shape, strides = (tuple(of[d] for d in order) for of in (x.shape, x.strides))
    return Outline(x.storage, shape, strides, x.width)


def transpose(x: Outline, first: int, second: int) -> Outline:
    order = list(range(len(x.shape)))
    order[first], order[second] = order[second], order[first]
    return permute(x, tuple(order))


def contiguous(x: Outline) -> Outline:
    """The tensor, or a packed copy of one that is not."""
    return x if x.contiguous() else copied(x)


def as_width(x: Outline, width: int) -> Outline:
    """A cast; nothing happens where it changes nothing."""
    return x if x.width == width else pointwise(x, width=width)


# -- layouts -----------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def dense(shape: Shape) -> Strides:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(1, extent)
    return tuple(reversed(strides))


@lru_cache(maxsize=4096)
def _contiguous(shape: Shape, strides: Strides) -> bool:
    step = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True


@lru_cache(maxsize=4096)
def layout(shape: Shape, inputs: tuple[tuple[Shape, Strides], ...]) -> Strides:
    """Strides that an elementwise operation gives its output: the dimensions in the order that
    its inputs have them in, packed."""
    rows = []
    for extents, strides in inputs:
        lead = len(shape) - len(extents)
        padded = [(1, 0)] * lead + list(zip(extents, strides, strict=True))
        rows.append(
            [
                0 if extent == 1 and full != 1 else stride
                for (extent, stride), full in zip(padded, shape, strict=True)
            ]
        )
    order = list(range(len(shape)))[::-1]  # innermost first
    for start in range(1, len(order)):
        at = start
        for other in range(start - 1, -1, -1):
            swap = _should_swap(shape, rows, order[other], order[at])
            if swap > 0:
                order[other], order[at] = order[at], order[other]
                at = other
            elif swap < 0:
                break
    found, step = [0] * len(shape), 1
    for dim in order:
        found[dim] = step
        step *= shape[dim]
    return tuple(found)


def _should_swap(shape: Shape, rows: list[list[int]], first: int, second: int) -> int:
    for strides in rows:
        if strides[first] == 0 or strides[second] == 0:
            continue
        if strides[first] != strides[second]:
            return 1 if strides[first] > strides[second] else -1
        if shape[first] > shape[second]:
            return 1
    return 0


def broadcast(*shapes: Shape) -> Shape:
    """The shape that these join to."""
    if len(set(shapes)) == 1:
        return shapes[0]
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(max(extents) for extents in zip(*padded, strict=True))


def pointwise(*inputs: Outline, width: int | None = None) -> Outline:
    """A fresh tensor computed element by element; as wide as the widest input."""
    shape = broadcast(*(x.shape for x in inputs))
    strides = layout(shape, tuple((x.shape, x.strides) for x in inputs))
    memory = inputs[0].memory
    return memory.new(shape, width or max(x.width for x in inputs), strides)


def reduced(x: Outline, shape: Shape) -> Outline:
    """A fresh tensor that sums over dimensions of `x`."""
    return x.memory.new(shape, x.width)


def copied(x: Outline) -> Outline:
    """A contiguous copy."""
    return x.memory.new(x.shape, x.width)
