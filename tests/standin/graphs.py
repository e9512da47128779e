"""CUDA graphs on a CPU: operators are recorded with the memory that they use, and run again on it.

As on a GPU, a capture computes nothing (what it wrote is put back, or poisoned), what is computed
may not be read meanwhile, and a replay works at the addresses of the capture. Before each replay
all memory that the capture allocated is poisoned: a graph that relies on what an earlier replay
left there computes NaN.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar
from weakref import WeakSet

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from farspan.engine import graphs
from tests.unread import Unread

ATEN = torch.ops.aten
UPLOADS = {ATEN.lift_fresh}  # of a number in pageable memory: the CPU would wait for the copy
EMPTY = {ATEN.empty, ATEN.empty_like, ATEN.empty_strided, ATEN.new_empty, ATEN.new_empty_strided}


def storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def whole(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's memory."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    made: ClassVar[list["Graph"]] = []  # in this test
    alive: ClassVar[WeakSet["Graph"]] = WeakSet()

    def __init__(self) -> None:
        self.made.append(self)
        self.alive.add(self)
        self.tape: list[tuple[Any, Any, Any, dict[int, Tensor]]] = []
        self.own: dict[int, Tensor] = {}  # allocated by the capture
        self.aliases: list[Tensor] = []  # of other memory that it uses
        self.replays = 0

    def poison(self) -> None:
        for tensor in self.own.values():
            whole(tensor).fill_(0xFF)

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        self.poison()
        for func, args, kwargs, out in self.tape:
            again = tree_leaves(func(*args, **kwargs))
            for number, place in out.items():
                place.copy_(again[number])


class Recorder(Unread):
    """The mode of a capture."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # memory that it found, and its content

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        draws = torch.Tag.nondeterministic_seeded in func.tags and "attention" not in str(func)
        if draws or func.overloadpacket in UPLOADS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for tensor in given if func._schema.is_mutable else ():
            if storage_of(tensor) not in self.graph.own | self.before:
                self.before[storage_of(tensor)] = tensor, whole(tensor).clone()
        out = super().__torch_dispatch__(func, types, args, kwargs)
        known = {storage_of(x) for x in given}
        made = {n: x for n, x in enumerate(tree_leaves(out)) if isinstance(x, Tensor)}
        made = {n: x for n, x in made.items() if storage_of(x) not in known}
        self.graph.own |= {storage_of(x): x for x in made.values()}
        if (made or func._schema.is_mutable) and func.overloadpacket not in EMPTY:
            args, kwargs = tree_map_only(Tensor, self._kept, (args, kwargs))
            self.graph.tape.append((func, args, kwargs, made))
        return out

    def _kept(self, tensor: Tensor) -> Tensor:
        """What the tape holds of an operand: of memory that it found, an alias."""
        if storage_of(tensor) in self.graph.own:
            return tensor
        self.graph.aliases.append(tensor.detach())
        return self.graph.aliases[-1]

    def put_back(self) -> None:
        for tensor, content in self.before.values():
            whole(tensor).copy_(content)
        self.graph.poison()


@contextmanager
def capturing(graph: Graph, *, stream: str, capture_error_mode: str) -> Iterator[None]:
    """Stands in for `torch.cuda.graph`."""
    assert (stream, capture_error_mode) == ("cpu", "thread_local")
    recorder = Recorder(graph)
    try:
        with recorder:
            yield
    finally:
        recorder.put_back()


def uses(count: Callable[[int], int], storage: int) -> int:
    """Of a storage's memory, without those of tapes, which a GPU's graphs do not count."""
    aliases = [x for graph in Graph.made for x in graph.aliases]
    return count(storage) - sum(storage_of(x) == storage for x in aliases)


@contextmanager
def on_cpu() -> Iterator[list[Graph]]:
    """Inside it steps on a CPU may have graphs; yields those that were made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graph, "made", [])
        patch.setattr(graphs, "DEVICE", "cpu")
        patch.setattr(graphs, "stream_of", str)
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "graph", capturing)
        real = torch._C._storage_Use_Count
        patch.setattr(torch._C, "_storage_Use_Count", partial(uses, real))
        yield Graph.made
