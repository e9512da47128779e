"""Page-sparse attention in the engine: what is sparse of a cell, and of a run.

Legend: B batch, C tokens of the chunk, H query heads, Hk key-value heads, D head dim, M pages of
queries, k chosen pages. Near keys stream in through the prefix as in dense attention, only fewer of
them; chosen pages are gathered (`engine.pages`).
"""

from collections.abc import Callable
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
from farspan.attention.sparse.quality import Mass, sampled, seen_mass
from farspan.attention.sparse.select import (
    Checked,
    Fraction,
    RandomPages,
    Selector,
    TopK,
)
from farspan.engine.kernels import AttentionKernels
from farspan.engine.pages import BufferPages, Means, PageSlots
from farspan.engine.prefix import Prefix, Slots
from farspan.engine.storage import Storage
from farspan.plan.cell.choosing import SAMPLES, WATCHED_KEYS
from farspan.plan.cell.sparse import far_of
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
class SparseCell:
    """The sparse side of one cell's attention, from its forward to its backward."""

    call: Callable[[AttentionCall], SparseCall]
    pages: Callable[[Prefix], BufferPages]
    chunk: int
    means: Means | None = None
    choice: Tensor | None = None  # [B, Hk, M, k] in its buffer; None: there is nothing to choose
    chooses: bool = False  # what is in it is still to be chosen
    watch: Callable[[SparseCall, Tensor, Tensor, Tensor, Tensor | None], None] | None = None
    at_hand: BufferPages | None = None  # from `begin` on

    def begin(self, prefix: Prefix) -> None:
        """The cell will attend, or run backward: pages that are known may be on their way."""
        self.at_hand = self.pages(prefix)
        if self.choice is not None and not self.chooses:
            self.at_hand.begin(self.choice)

    def note(self, k: Tensor) -> None:
        """A chunk's k [C, B, Hk, D] was written."""
        if self.means is not None:
            self.means.write(self.chunk, k)

    def attend(
        self, dense: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As `attention.cell.attend`."""
        call, pages = self.call(dense), self.at_hand
        assert pages is not None
        if self.chooses:
            assert self.choice is not None
            _keep(choose(call, q, pages), self.choice)
            self.chooses = False
        out, lse = attend_sparse(call, q, k, v, self._choice(q, pages), pages, sinks)
        if self.watch is not None:
            pages.prefix.done()
            self.watch(call, q, k, lse, sinks)
        return out, lse

    def attend_backward(
        self,
        dense: AttentionCall,
        dout: Tensor,
        of_keys: tuple[Tensor, Tensor, Tensor],
        attended: tuple[Tensor, Tensor],
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """As `attention.cell.attend_backward`; `of_keys` is q, k and v."""
        call, pages, (q, k, v) = self.call(dense), self.at_hand, of_keys
        assert pages is not None
        given: Attended = (*attended, self._choice(q, pages))
        return attend_sparse_backward(call, dout, q, k, v, given, pages, sinks)

    def _choice(self, q: Tensor, pages: BufferPages) -> Tensor:
        if self.choice is not None:
            return self.choice
        heads = pages.prefix.storage.program.model.layers[pages.prefix.layer].kv_heads
        page_count = -(-q.shape[2] // pages.page)
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
    documents: Callable[[int], Tensor | None]  # of a chunk: see `sparse_call`
    watched: tuple[int, int] | None = None  # the cell whose seen mass is measured
    seen: Callable[[], Seen] | None = None  # the CPU waits where it asks
    page_slots: PageSlots = field(init=False)
    chunk: int = -1  # the one at hand
    calls: dict[tuple[LayerSpec, float], SparseCall] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.page_slots = PageSlots(self.storage)

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
        pages = partial(self._pages, spec, i.chunk, means)
        return SparseCell(call, pages, i.chunk, means, self.choice(i), i.chooses, watch)

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

    def _pages(
        self, spec: LayerSpec, chunk: int, means: Means | None, prefix: Prefix
    ) -> BufferPages:
        program = self.storage.program
        start, stop = program.chunks[chunk]
        run = program.run.batch, program.model.element_bytes
        far = far_of(spec, self.sparse, run, start, stop - start)
        return BufferPages(prefix, self.page_slots, chunk, far, self.sparse.page, means)

    def _call(self, spec: LayerSpec, chunk: int, dense: AttentionCall) -> SparseCall:
        if chunk != self.chunk:
            self.chunk, self.calls = chunk, {}
        key = spec, dense.scale
        if key not in self.calls:
            kernel = self.kernels.far(spec)
            self.calls[key] = sparse_call(
                self.sparse, dense, self.select, kernel, self.documents(chunk)
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
        self.seen = partial(_seen, i, mass)


def _seen(i: Forward, mass: Tensor) -> Seen:
    mean, minimum = mass.tolist()
    return Seen(i.layer, i.chunk, Mass(mean, minimum))


def watched_cell(program: Program, step: int) -> tuple[int, int] | None:
    """The cell that a step measures: of the last chunk, which misses most, and of one layer after
    the other. None where nothing is chosen."""
    chosen = [i for i in program.instructions if isinstance(i, Forward) and i.chooses]
    if not chosen:
        return None
    last = max(i.chunk for i in chosen)
    layers = sorted(i.layer for i in chosen if i.chunk == last)
    return layers[step % len(layers)], last
