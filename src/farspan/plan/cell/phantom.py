"""Tensors that have a size and no elements: what torch holds, found without torch.

A layer written in phantoms allocates, saves for its backward and frees as the same layer written in
torch does: a phantom is a view of a storage, a storage counts its bytes from its birth to the death
of the last phantom that refers to it (CPython's reference counts, as for a tensor), and operations
record nodes that hold what autograd saves. So the peak of a layer is read off, not derived.

Shapes are tuples, strides count elements, `width` is the bytes of an element.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from math import prod
from sys import getrefcount
from typing import Optional

LINE = 64  # bytes; saved views are stored from one alignment line on

Shape = tuple[int, ...]
Strides = tuple[int, ...]
Found = Sequence[Optional["Phantom"]]
Apply = Callable[[list[Optional["Phantom"]], tuple[Optional["Phantom"], ...]], Found]


class Memory:
    """Counts the bytes of storages that are alive, and what elementwise operations move."""

    __slots__ = (
        *("adds", "fused", "grad", "in_place", "live", "nodes", "peak"),
        *("sum_width", "sums", "traffic"),
    )

    def __init__(
        self, *, in_place: bool = False, fused: bool = False, adds: bool = False, sums: int = 0
    ) -> None:
        """`in_place`: autograd adds a second gradient into the first where nobody else holds it.
        torch does so except while a dispatch mode, such as a meter of memory, looks on. `fused`,
        `adds`: see `Architecture`; `sums` is the width of an element of sums that products begin,
        0 where these exist already."""
        self.live = self.peak = self.traffic = self.nodes = 0
        self.grad = False  # operations record nodes
        self.in_place, self.fused, self.adds = in_place, fused, adds
        self.sum_width = sums
        self.sums: dict[int, Phantom] = {}  # by the weight's storage

    def given(self, shape: Shape, width: int, *, trained: bool = False) -> "Phantom":
        """A tensor that somebody else counts: a parameter, or a view of an arena. Autograd hands
        out a trained one's gradient in elements of the same width."""
        found = Phantom(Storage(self, 0), shape, dense(shape), 0, width)
        if trained:
            found.node = Node(0, None, (), (), width)
        return found

    def new(self, shape: Shape, width: int, strides: Strides | None = None) -> "Phantom":
        """A fresh tensor, contiguous unless strides are given."""
        storage = Storage(self, prod(shape) * width)
        return Phantom(storage, shape, dense(shape) if strides is None else strides, 0, width)


class Storage:
    """Bytes that are alive as long as something refers to them."""

    __slots__ = ("memory", "size")

    def __init__(self, memory: Memory, size: int) -> None:
        self.memory, self.size = memory, size
        memory.live += size
        memory.peak = max(memory.peak, memory.live)

    def __del__(self) -> None:
        self.memory.live -= self.size

    def disown(self) -> int:
        """From here on somebody else counts these bytes."""
        size, self.size = self.size, 0
        self.memory.live -= size
        return size


class Phantom:
    """A view of a storage, and the node that computed it if a gradient may come back."""

    __slots__ = ("node", "offset", "shape", "slot", "storage", "strides", "width")

    def __init__(
        self, storage: Storage, shape: Shape, strides: Strides, offset: int, width: int
    ) -> None:
        self.storage, self.shape, self.strides = storage, shape, strides
        self.offset, self.width = offset, width  # offset in elements
        self.node: Node | None = None
        self.slot = 0  # which output of the node this is

    @property
    def memory(self) -> Memory:
        return self.storage.memory

    @property
    def size(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.width

    def bare(self) -> "Phantom":
        """The same memory without a node."""
        return Phantom(self.storage, self.shape, self.strides, self.offset, self.width)

    def contiguous(self) -> bool:
        return self.strides == dense(self.shape) or _contiguous(self.shape, self.strides)

    def reach(self) -> tuple[int, int]:
        """Bytes of the storage from its first element's line to the end of its last."""
        start = self.offset * self.width
        steps = zip(self.shape, self.strides, strict=True)
        length = (1 + sum((extent - 1) * stride for extent, stride in steps)) * self.width
        return start // LINE * LINE, start + length


Edge = tuple["Node", int, Shape, int]  # below, its slot, shape and width of the gradient there


class Node:
    """One operation's backward. A node without `apply` is a leaf: its gradient is wanted, in
    elements of `width` bytes."""

    __slots__ = ("apply", "edges", "order", "saved", "width")

    def __init__(
        self,
        order: int,
        apply: Apply | None,
        saved: tuple[Phantom | None, ...],
        edges: tuple["Edge | None", ...],
        width: int,
    ) -> None:
        self.order, self.apply, self.saved, self.edges = order, apply, saved, edges
        self.width = width

    def nodes(self) -> set["Node"]:
        """This node and all that gradients reach from it."""
        found, ahead = {self}, [self]
        while ahead:
            for edge in ahead.pop().edges:
                if edge is not None and edge[0] not in found:
                    found.add(edge[0])
                    ahead.append(edge[0])
        return found

    def holds(self) -> dict[int, list[Phantom]]:
        """What this node and those below it save, by storage."""
        found: dict[int, list[Phantom]] = {}
        for node in self.nodes():
            for saved in node.saved:
                if saved is not None:
                    found.setdefault(id(saved.storage), []).append(saved)
        return found


def record(
    out: Phantom, inputs: Sequence[Phantom | None], apply: Apply, saved: Found = ()
) -> Phantom:
    """Note how the gradient of `out` becomes those of `inputs`, if any of them wants one."""
    memory = out.memory
    if memory.grad and any(x is not None and x.node is not None for x in inputs):
        memory.nodes += 1
        edges = tuple(
            (x.node, x.slot, x.shape, x.node.width) if x is not None and x.node else None
            for x in inputs
        )
        kept = tuple(x.bare() if x is not None else None for x in saved)
        out.node = Node(memory.nodes, apply, kept, edges, out.width)
    return out


def differentiate(root: Node, gradient: Phantom) -> dict[Node, Phantom]:
    """Gradients of the leaves below `root`, in the order and with the lifetimes of autograd: the
    latest node first, its inputs and what it saved freed before its outputs are passed on."""
    waiting: dict[Node, int] = {}
    for node in root.nodes():
        for edge in node.edges:
            if edge is not None:
                waiting[edge[0]] = waiting.get(edge[0], 0) + 1
    held: dict[Node, list[Phantom | None]] = {root: [gradient]}
    ready: list[tuple[int, Node]] = [(-root.order, root)]
    found: dict[Node, Phantom] = {}
    while ready:
        node = heappop(ready)[1]
        assert node.apply is not None
        results = _results(node, node.apply, held.pop(node))
        node.saved = ()
        for index, edge in enumerate(node.edges):
            if edge is None:
                continue
            below, slot, *_ = edge
            _hand_over(held.setdefault(below, []), slot, results, index)
            waiting[below] -= 1
            if waiting[below]:
                continue
            if below.apply is not None:
                heappush(ready, (-below.order, below))
            else:
                total = held.pop(below)[0]
                assert total is not None
                found[below] = total
                del total
    return found


def _results(node: Node, apply: Apply, gradients: list[Phantom | None]) -> list[Phantom | None]:
    """What a node computes, cut to the shape of what its inputs were and to the width that is
    wanted there."""
    results = list(apply(gradients, node.saved))
    for index, edge in enumerate(node.edges):
        found = results[index]
        if edge is None or found is None:
            continue
        if found.shape != edge[2]:
            found = reduced(found, edge[2])
        results[index] = found if found.width == edge[3] else pointwise(found, width=edge[3])
    return results


def _hand_over(
    held: list[Phantom | None], slot: int, results: list[Phantom | None], index: int
) -> None:
    """Add a result to the gradient that a node waits for."""
    held.extend([None] * (slot + 1 - len(held)))
    new, results[index] = results[index], None
    old = held[slot]
    if old is None or new is None:
        held[slot] = new if old is None else old
    elif not (new.memory.in_place and _sole(old)):
        held[slot] = pointwise(old, new)


def _sole(x: Phantom) -> bool:
    """Nobody holds this tensor but the list it is in and the two callers here."""
    return getrefcount(x) <= 4 and getrefcount(x.storage) <= 2


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
def viewed(old: Shape, strides: Strides, new: Shape) -> Strides | None:
    """Strides of the same memory under another shape; None where it must be copied."""
    found: list[int] = []
    place = len(new) - 1
    base, have, want = strides[-1], 1, 1
    for dim in range(len(old) - 1, -1, -1):
        have *= old[dim]
        ends = dim == 0 or (old[dim - 1] != 1 and strides[dim - 1] != have * base)
        if not ends:
            continue
        while place >= 0 and (want < have or new[place] == 1):
            found.append(want * base)
            want *= new[place]
            place -= 1
        if want != have:
            return None
        if dim > 0:
            base, have, want = strides[dim - 1], 1, 1
    return tuple(reversed(found)) if place < 0 else None


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


def pointwise(*inputs: Phantom, width: int | None = None) -> Phantom:
    """A fresh tensor computed element by element; as wide as the widest input."""
    shape = broadcast(*(x.shape for x in inputs))
    strides = layout(shape, tuple((x.shape, x.strides) for x in inputs))
    memory = inputs[0].memory
    out = memory.new(shape, width or max(x.width for x in inputs), strides)
    memory.traffic += out.size + sum(x.size for x in inputs)
    return out


def reduced(x: Phantom, shape: Shape) -> Phantom:
    """A fresh tensor that sums over dimensions of `x`."""
    out = x.memory.new(shape, x.width)
    x.memory.traffic += out.size + x.size
    return out


def copied(x: Phantom, width: int | None = None) -> Phantom:
    """A contiguous copy, without a node."""
    out = x.memory.new(x.shape, width or x.width)
    x.memory.traffic += out.size + x.size
    return out
