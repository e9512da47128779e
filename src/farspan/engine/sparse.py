"""Page-sparse attention in the engine: pages over a program's buffers, and a cell that uses them.

Legend: B batch, C tokens of the chunk, H query heads, Hk key-value heads, D head dim, M pages of
queries, k chosen pages. Near keys stream in through the prefix as in dense attention, only fewer of
them; chosen pages are gathered where they lie, on the device or across the link from mapped host
memory, in line with the computation (transfer.copies).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod

import torch
from torch import Tensor

from farspan.attention.cell import AttentionCall
from farspan.attention.sparse.cell import (
    Attended,
    SparseCall,
    attend_sparse,
    attend_sparse_backward,
    choose,
    sparse_call,
)
from farspan.attention.sparse.pages import Units, page_means
from farspan.attention.sparse.quality import Mass, sampled, seen_mass
from farspan.attention.sparse.select import (
    Checked,
    Fraction,
    RandomPages,
    Selector,
    TopK,
)
from farspan.engine.kernels import AttentionKernels
from farspan.engine.prefix import Prefix, Slots
from farspan.engine.storage import Storage
from farspan.plan.blocks import Run
from farspan.plan.cell.choosing import SAMPLES, WATCHED_KEYS
from farspan.plan.cell.sparse import SLAB_BYTES, slab_units
from farspan.plan.program import Backward, Forward, Program
from farspan.plan.sizes import CHOICE_BYTES
from farspan.spec import LayerSpec, Refused, Sparse

PageFunction = Callable[[Tensor, range], Tensor]  # votes [B, Hk, M, n] and their pages, to a choice
OWN_SELECTORS = (TopK, Fraction, RandomPages, Checked)


@dataclass(frozen=True, slots=True)
class Seen:
    """The attention mass that sparse attention of one cell sees (1: nothing is lost)."""

    layer: int
    chunk: int
    mass: Mass


def selector_of(given: Selector | PageFunction | None, sparse: Sparse) -> Selector:
    """The selector of a step: by votes (OOMB 4.2), unless the user has another."""
    if given is None:
        return TopK(sparse.budget // sparse.page)
    if isinstance(given, OWN_SELECTORS):
        return given
    if not callable(given):
        raise Refused(f"selector: expected a function from votes to pages, got {given!r}")
    return Checked(given)  # type: ignore[arg-type]


@dataclass(slots=True)
class Means:
    """Mean keys of a layer's pages in their buffer, a cell a chunk; see `storage.Storage.cells`."""

    cells: Tensor  # [chunks, n, B, Hk, D], n pages of a full chunk
    page: int

    def write(self, chunk: int, k: Tensor) -> None:
        """Note the whole pages of a chunk's k [C, B, Hk, D]."""
        found = page_means(k, self.page)
        self.cells[chunk, : len(found)] = found

    def read(self, pages: range) -> Tensor:
        """[B, Hk, len(pages), D], a view where the cells lie side by side."""
        found = self.cells.flatten(0, 1)[pages.start : pages.stop]
        return found.permute(1, 2, 0, 3)


@dataclass(slots=True)
class BufferPages:
    """Implements `attention.sparse.pages.Pages` over a program's buffers."""

    prefix: Prefix
    page: int
    means: Means | None = None  # None: nothing is chosen here

    def keys(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self.prefix.keys(start, stop)

    def add_gradient(self, start: int, stop: int, rows: slice, dk: Tensor, dv: Tensor) -> None:
        self.prefix.add_gradient(start, stop, rows, dk, dv)

    def representatives(self, pages: range) -> Tensor:
        assert self.means is not None
        return self.means.read(pages)

    def gather(self, units: Units) -> tuple[Tensor, Tensor]:
        copies, home = self.prefix.storage.copies, self.prefix.everything(self.prefix.keys_in)
        on_host = self.prefix.on_host(self.prefix.keys_in)
        places = units.places(self.page, *home["k"].shape[1:3])
        found = []
        for name in ("k", "v"):
            rows = home[name].flatten(0, 2)
            part = copies.gather(rows, places) if on_host else rows.index_select(0, places)
            found.append(part.unflatten(0, (len(units), self.page)))
        return found[0], found[1]

    def add(self, units: Units, dk: Tensor, dv: Tensor) -> None:
        assert self.prefix.gradients_in is not None
        name = self.prefix.gradients_in
        copies, home = self.prefix.storage.copies, self.prefix.everything(name)
        on_host = self.prefix.on_host(name)
        places = units.places(self.page, *home["k"].shape[1:3])
        for part, gradient in (("k", dk), ("v", dv)):
            rows, gradients = home[part].flatten(0, 2), gradient.flatten(0, 1)
            if on_host:
                copies.add_rows(rows, places, gradients)
            else:
                # Units are distinct: nothing is added twice to one place, so no order matters.
                rows.index_add_(0, places, gradients)


@dataclass(slots=True)
class SparseCell:
    """The sparse side of one cell's attention, from its forward to its backward."""

    call: Callable[[AttentionCall], SparseCall]
    sparse: Sparse
    chunk: int
    means: Means | None = None
    choice: Tensor | None = None  # [B, Hk, M, k] in its buffer; None: there is nothing to choose
    chooses: bool = False
    watch: Callable[[SparseCall, Tensor, Tensor, Tensor, Tensor | None], None] | None = None

    def note(self, k: Tensor) -> None:
        """A chunk's k [C, B, Hk, D] was written."""
        if self.means is not None:
            self.means.write(self.chunk, k)

    def attend(
        self,
        dense: AttentionCall,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prefix: Prefix,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """As `attention.cell.attend`."""
        call, pages = self.call(dense), BufferPages(prefix, self.sparse.page, self.means)
        if self.chooses:
            assert self.choice is not None
            _keep(choose(call, q, pages), self.choice)
        out, lse = attend_sparse(call, q, k, v, self._choice(q, pages), pages, sinks)
        if self.watch is not None:
            prefix.done()
            self.watch(call, q, k, lse, sinks)
        return out, lse

    def attend_backward(
        self,
        dense: AttentionCall,
        dout: Tensor,
        of_keys: tuple[Tensor, Tensor, Tensor],
        attended: tuple[Tensor, Tensor],
        prefix: Prefix,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """As `attention.cell.attend_backward`; `of_keys` is q, k and v."""
        call, pages = self.call(dense), BufferPages(prefix, self.sparse.page)
        q, k, v = of_keys
        given: Attended = (*attended, self._choice(q, pages))
        return attend_sparse_backward(call, dout, q, k, v, given, pages, sinks)

    def _choice(self, q: Tensor, pages: BufferPages) -> Tensor:
        if self.choice is not None:
            return self.choice
        heads = pages.prefix.storage.program.model.layers[pages.prefix.layer].kv_heads
        page_count = -(-q.shape[2] // self.sparse.page)
        return torch.empty(q.shape[0], heads, page_count, 0, dtype=torch.int32, device=q.device)


def _keep(found: Tensor, kept: Tensor) -> None:
    """Write a choice [B, Hk, M, k'] into its buffer [B, Hk, M, k]."""
    width, most = found.shape[3], kept.shape[3]
    if width > most and bool((found[..., most:] >= 0).any()):
        raise Refused(
            f"selector: chose {width} pages for a page of queries, where the budget is {most}; "
            "raise sparse.budget, or choose fewer"
        )
    width = min(width, most)
    kept[..., :width] = found[..., :width]
    kept[..., width:] = -1


@dataclass(slots=True)
class SparseRun:
    """The sparse attention of one run of a program. Calls are shared by the layers of a chunk that
    are alike."""

    storage: Storage
    slots: Slots
    sparse: Sparse
    select: Selector
    kernels: AttentionKernels
    runs: Callable[[int], Sequence[tuple[Run, ...]] | None]  # of a chunk's rows; None: one document
    watched: tuple[int, int] | None = None  # the cell whose seen mass is measured
    seen: Seen | None = None
    chunk: int = -1  # the one at hand
    calls: dict[tuple[LayerSpec, float], SparseCall] = field(default_factory=dict)

    def cell(self, i: Forward) -> SparseCell | None:
        """The sparse side of a forward cell; None where the layer has a window: that is exact."""
        program, storage = self.storage.program, self.storage
        spec = program.model.layers[i.layer]
        if spec.window is not None:
            return None
        page, batch = self.sparse.page, program.run.batch
        means = watch = None
        if i.means is not None:
            shape = program.schedule.chunk // page, batch, spec.kv_heads, spec.head_dim
            means = Means(storage.cells(i.means, shape, storage.accumulate_dtype), page)
        if i.chooses and (i.layer, i.chunk) == self.watched:
            watch = partial(self._watch, i)
        call = partial(self._call, spec, i.chunk)
        choice = self.choice(i)
        return SparseCell(call, self.sparse, i.chunk, means, choice, i.chooses, watch)

    def choice(self, i: Forward | Backward) -> Tensor | None:
        """The choice [B, Hk, M, k] of a cell, where it is kept; None: it has none."""
        if i.choice is None:
            return None
        program, spec = self.storage.program, self.storage.program.model.layers[i.layer]
        start, stop = program.chunks[i.chunk]
        pages = -(-(stop - start) // self.sparse.page)
        size = program.run.batch, spec.kv_heads, pages, self.sparse.width(start)
        kept = self.storage.cell(i.choice, i.chunk)
        return kept[: prod(size) * CHOICE_BYTES].view(torch.int32).view(size)

    def _call(self, spec: LayerSpec, chunk: int, dense: AttentionCall) -> SparseCall:
        if chunk != self.chunk:
            self.chunk, self.calls = chunk, {}
        key = spec, dense.scale
        if key not in self.calls:
            kernel, device = self.kernels.far(spec), self.kernels.device
            dims, width = spec.head_dim + spec.value_dim, self.storage.dtype.itemsize
            most = slab_units(SLAB_BYTES, self.sparse.page, dims, width)
            self.calls[key] = sparse_call(
                self.sparse, dense, self.select, kernel, self.runs(chunk), device, most
            )
        return self.calls[key]

    def _watch(
        self, i: Forward, call: SparseCall, q: Tensor, k: Tensor, lse: Tensor, sinks: Tensor | None
    ) -> None:
        """Measure what the cell sees of a few of its queries. It reads all keys before the chunk,
        of one cell a step."""
        start = call.near.q_start
        block = min(self.storage.program.schedule.kv_block, WATCHED_KEYS)
        spans = [(first, min(first + block, start)) for first in range(0, start, block)]
        prefix = Prefix(self.storage, self.slots, i.layer, i.prefix)
        prefix.begin(spans)
        mass = seen_mass(call, q, k, lse, prefix, sampled(q.shape[2], SAMPLES), spans, sinks)
        prefix.done()
        self.seen = Seen(i.layer, i.chunk, mass)


def watched_cell(program: Program, step: int) -> tuple[int, int] | None:
    """The cell that a step measures: of the last chunk, which misses most, and of one layer after
    the other. None where nothing is chosen."""
    chosen = [i for i in program.instructions if isinstance(i, Forward) and i.chooses]
    if not chosen:
        return None
    last = max(i.chunk for i in chosen)
    layers = sorted(i.layer for i in chosen if i.chunk == last)
    return layers[step % len(layers)], last
