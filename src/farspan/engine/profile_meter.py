"""Record a cell's run on the meta device: tensors allocated and freed, products, and bytes moved.

Marks in the record say when attention is called, and when its kernels begin and end.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from farspan.attention.backends import (
    BackwardQueries,
    BlockKernel,
    Chosen,
    CpuFlash,
    Gradients,
    Padded,
)
from farspan.engine.attention_op import AttentionContext, ChunkAttention
from farspan.engine.buffers import KVPrefix
from farspan.engine.gradients import AccumulatingLinears, GradientAccumulator
from farspan.engine.interpreter import Layers
from farspan.engine.kernels import AttentionKernels
from farspan.engine.trace import FreeEvent, Malloc, Mark, Recorder
from farspan.engine.trace_steps import META
from farspan.hf.compiled import UncompiledMode
from farspan.hf.indexer import IndexerCall
from farspan.kernels.launch import Launch
from farspan.profile.model import Line, Peak
from farspan.program.attention_blocks import Block
from farspan.program.program import Forward, Program
from farspan.spec import LayerSpec

aten = torch.ops.aten
ADDED = frozenset((aten.addmm.default, aten.baddbmm.default))
PRODUCTS = ADDED | {aten.mm.default, aten.bmm.default, aten.linear.default}
GROUPED = "_grouped_mm"
LOOKUPS = ("index", "index_select", "gather", "embedding", "scatter", "index_put")
NO_TRAFFIC = (
    *("empty", "empty_like", "new_empty", "empty_strided"),
    *("detach", "set_", "alias", "lift"),
)


@dataclass(slots=True)
class OperationCounts:
    """Matrix products and bytes read and written in one forward or backward, without attention."""

    products: list[tuple[int, int, int]] = field(default_factory=list)  # inner, outer, rows
    before: int = 0  # products before the attention call
    traffic: int = 0


class Meter(Recorder):
    """Recorder of allocations that also counts matrix products and bytes read and written."""

    def __init__(self) -> None:
        super().__init__(META, in_place=False)
        self.counts = OperationCounts()
        self.attending = False

    def hear(self, launch: Launch) -> None:
        """Count the bytes that a launch of farspan's kernels reads and writes: each tensor once."""
        if not self.attending:
            self.counts.traffic += sum(_bytes(x) for x in _tensors(launch.arguments.values()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if not self.attending:
            self._count(func, args, out)
        return out

    def _count(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        name = func.overloadpacket.__name__
        if func in PRODUCTS:
            given = args[1] if func in ADDED else args[0]
            rows = out.numel() // out.shape[-1]
            self.counts.products.append((given.shape[-1], out.shape[-1], rows))
            return
        if name == GROUPED:
            self.counts.products.append((args[0].shape[-1], out.shape[-1], args[0].shape[0]))
            return
        self.counts.traffic += _traffic(name, args, out)


def _traffic(name: str, args: tuple[Any, ...], out: Any) -> int:
    if name in NO_TRAFFIC:
        return 0
    outs, given = list(_tensors([out])), list(_tensors(args))
    known = {x.untyped_storage()._cdata for x in given}
    in_place = name.endswith("_")
    if not in_place and all(x.untyped_storage()._cdata in known for x in outs):
        return 0  # views
    written = sum(map(_bytes, outs))
    if name in LOOKUPS:
        return 2 * written
    return written + sum(map(_bytes, given[1:] if name == "copy_" else given))


def _bytes(x: Tensor) -> int:
    """Return the bytes of a tensor's elements; a dimension of stride 0 counts as one element."""
    elements = prod(n for n, step in zip(x.shape, x.stride(), strict=True) if step)
    return elements * x.element_size()


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


class GroupedProducts(UncompiledMode):
    """Dispatch mode for the matrix products of a mixture of experts on the meta device, in any
    dtype; torch 2.13 has them for bf16 only."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not aten._grouped_mm.default or not args[0].is_meta:
            return func(*args, **(kwargs or {}))
        x, y = args[:2]
        if y.ndim == 3:
            return x.new_empty(x.shape[0], y.shape[2])
        ends = args[2] if len(args) > 2 else (kwargs or {})["offs"]
        return x.new_empty(len(ends), x.shape[0], y.shape[1])


def grouped_products(model: nn.Module) -> AbstractContextManager[object]:
    """Return a `GroupedProducts` mode if the model has experts, else a null context."""
    return GroupedProducts() if any(p.ndim > 2 for p in model.parameters()) else nullcontext()


# -- marks in a cell's run ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MarkedKernel:
    """Aten's flash attention for CPUs, which runs on the meta device and records when it begins."""

    inner: BlockKernel
    meter: Meter
    heads_first: list[bool]  # whether each call's queries have heads before tokens
    softcap: float | None = None

    def split(self, block: Block) -> tuple[Block, ...]:
        return self.inner.split(block)

    def choosing(self, _: Chosen) -> BlockKernel:
        return self

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        self.meter.mark("attends")
        self.heads_first.append(q.stride(1) > q.stride(2))
        return self.inner.forward(q, k, v, block, scale)

    def backward(
        self, queries: BackwardQueries, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> Gradients:
        self.meter.mark("attends")
        self.meter.attending = True
        return self.inner.backward(queries, k, v, block, scale)


@dataclass(frozen=True, slots=True)
class MarkedKernels(AttentionKernels):
    meter: Meter = None  # type: ignore[assignment]
    heads_first: list[bool] = field(default_factory=list)

    def of(self, spec: LayerSpec, _: Program | None = None) -> BlockKernel:
        inner: BlockKernel = CpuFlash()
        if spec.head_dim != spec.value_dim:
            inner = Padded(inner, max(spec.head_dim, spec.value_dim))
        return MarkedKernel(inner, self.meter, self.heads_first, spec.softcap)


class MarkedPrefix(KVPrefix):
    """K, V of earlier chunks, with a mark in the meter's record when attention has ended."""

    __slots__ = ("meter",)
    meter: Meter

    def done(self) -> None:
        self.meter.mark("attended")
        self.meter.attending = False


class MarkedAttention(ChunkAttention):
    """Attention function of a cell that records when the model calls it."""

    __slots__ = ("meter",)
    meter: Meter

    def __call__(self, *arguments: Any, **keywords: Any) -> Tensor:
        self.meter.mark("asked")
        self.meter.counts.before = len(self.meter.counts.products)
        self.meter.attending = True
        out = super().__call__(*arguments, **keywords)
        self.meter.attending = False
        return out

    def choose(self, call: IndexerCall) -> Tensor:
        """Compute index keys alone: scores depend on the prefix, as attention's memory does."""
        call.keys()
        return call.blank(call.sizes.tokens)


@dataclass
class MarkedContext(AttentionContext):
    meter: Meter = field(kw_only=True)

    def begin(self, i: Forward, held: tuple[Tensor, Tensor] | None) -> ChunkAttention:
        cell = super().begin(i, held)
        marked = MarkedAttention(**{f.name: getattr(cell, f.name) for f in fields(cell)})
        marked.meter = self.meter
        return marked

    def _prefix(self, layer: int, chunk: int, name: str, gradients: str | None = None) -> KVPrefix:
        prefix = super()._prefix(layer, chunk, name, gradients)
        marked = MarkedPrefix(**{f.name: getattr(prefix, f.name) for f in fields(prefix)})
        marked.meter = self.meter
        return marked


class NoSums(GradientAccumulator):
    """Gradient accumulator that allocates sums but adds nothing to them."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def add(self, _: Sequence[nn.Parameter], __: Sequence[Tensor | None]) -> None:
        self._meter.mark("returned")

    def add_product(self, parameter: nn.Parameter, _: Tensor, __: Tensor) -> None:
        self._sum(parameter)


@dataclass(frozen=True, slots=True)
class SparedLayers(Layers):
    """Measured layers; if nothing reads their output (`unread`), they skip the last product."""

    linears: AccumulatingLinears
    unread: bool

    def of(self, i: Forward) -> nn.Module:
        self.linears.unread = self.unread
        return self.stages.running[i.layer]


@dataclass(slots=True)
class CellPass:
    """Measurements of a cell's forward or backward, by names of marks in its run: the bytes alive
    at each mark (`marks`), and after each allocation from there to the next mark (`moments`)."""

    moments: dict[str, list[int]]
    marks: dict[str, int]
    counts: OperationCounts


@dataclass(slots=True)
class CellTape:
    """Reader of a meter's record; each `read` returns what was recorded since the last `read`."""

    meter: Meter
    live: int = 0
    sizes: dict[int, int] = field(default_factory=dict)

    def read(self) -> CellPass:
        name, moments, marks = "", dict[str, list[int]](), dict[str, int]()
        events, self.meter.events = self.meter.events, []
        counts, self.meter.counts = self.meter.counts, OperationCounts()
        for event in events:
            match event:
                case Malloc(tensor, size):
                    self.sizes[tensor] = size
                    self.live += size
                    moments.setdefault(name, []).append(self.live)
                case FreeEvent(tensor):
                    self.live -= self.sizes.pop(tensor)
                case Mark(name):
                    marks[name] = self.live
        marks["end"] = self.live
        return CellPass(moments, marks, counts)


# -- lines through runs --------------------------------------------------------------------------

Lengths = Sequence[tuple[int, ...]]


def line_of(lengths: Lengths, sizes: Sequence[float]) -> Line:
    """Fit a linear function to sizes measured at some lengths; return its constant, then its
    slopes. A length is (tokens,) or, for two slopes, (tokens of a chunk, tokens of a piece). Each
    length differs from the one before it in one number."""
    slopes = []
    for place in range(len(lengths) - 1):
        steps = lengths[place + 1][place] - lengths[place][place]
        slope = (sizes[place + 1] - sizes[place]) / steps
        slopes.append(int(slope) if slope == int(slope) else slope)
    constant = sizes[0] - sum(a * b for a, b in zip(slopes, lengths[0], strict=True))
    return constant, *slopes


def peak_of(lengths: Lengths, passes: Sequence[list[int]]) -> Peak:
    """Return functions of length (`line_of`) whose maximum is the peak bytes: one per allocation,
    or a single one of the peaks if runs differ in their number of allocations. Functions that fall
    as pieces grow come from a shorter last piece, and are left out: whole pieces need more."""
    if len({len(moments) for moments in passes}) == 1:
        lines = (line_of(lengths, sizes) for sizes in zip(*passes, strict=True))
        return tuple(line for line in lines if len(line) == 2 or line[2] >= 0)
    return (line_of(lengths, [max(moments, default=0) for moments in passes]),)


def less_of(line: Line, a_token: float) -> Line:
    return (line[0], line[1] - a_token, *line[2:])


def fullest_of(lengths: Lengths | Sequence[int], passes: Sequence[CellPass]) -> Peak:
    of = [length if isinstance(length, tuple) else (length,) for length in lengths]
    return peak_of(of, [one.moments.get("", []) for one in passes])
