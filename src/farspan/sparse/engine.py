"""Page-sparse attention in the engine: its state in a cell and in a run, and the transfer of chosen
pages from a program's buffers (OOMB 4.2).

Near keys stream in through the prefix as in dense attention, only fewer. Chosen pages whose K, V
are on the device are read in place, or gathered in line. Those on host come through two slots, each
holding a slab (`sparse.pages`), and each page comes once, while near keys or the previous slab are
attended to; in a backward, sums of their gradients go back behind the computation:

    compute   choose | near keys | slab 0   | slab 1           the first time
    fetch               slab 0     slab 1
    compute   other modules | near keys | slab 0 | slab 1      again, and in the backward
    fetch     slab 0, slab 1                       slab 2
    evict                                          sums of 0

The number of units decides the size of a transfer, so the CPU must know it: it waits for the
number, once a step and cell, after the choice, while near keys are being attended to. Later passes
of the cell know the number, and start the transfer when they begin.

Legend: B batch, C tokens of the chunk, H query heads, Hk key-value heads, P tokens a page, D head
dim, Dv value dim, M pages of queries, k chosen pages, U units.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any, Self

import torch
from torch import Tensor

from farspan.attention.chunk import AttentionCall
from farspan.attention.far import GivenSelector, Mass, Seen
from farspan.engine.attention_op import AttentionContext
from farspan.engine.buffers import KVPrefix, ProgramBuffers
from farspan.profile.far_sizes import SAMPLES, WATCHED_KEYS
from farspan.program import buffer_names as names
from farspan.program.attention_blocks import Block, near_blocks
from farspan.program.dependencies import Hazard, Lane
from farspan.program.far_sizes import Far, far_of, most_units_of, slot_parts
from farspan.program.program import CHOICE_BYTES, Backward, Forward, Program, aligned
from farspan.sparse.attend import (
    Attended,
    FarKernel,
    SparseCall,
    attend_sparse,
    attend_sparse_backward,
    choose,
    sampled,
    seen_mass,
    sparse_call,
)
from farspan.sparse.gathered import select_far
from farspan.sparse.index import LESSONS, Index, LayerIndex, learn, lesson
from farspan.sparse.kernel_calls import TritonFar, supports
from farspan.sparse.pages import (
    Checked,
    Fraction,
    RandomPages,
    Resident,
    Selector,
    Slab,
    TopK,
    Units,
    count_of,
    mean_keys,
    units_of,
)
from farspan.spec import LayerSpec, Schedule, Sparse, Tier, UnsupportedError

ROWS = ("k", "v", "dk", "dv")  # parts of a slot that are rows of keys or values


@dataclass(slots=True)
class Means:
    """Keys that stand for a layer's pages when queries vote: mean keys, or an index's projections,
    in a buffer with a part for each chunk (`engine.buffers.ProgramBuffers.cells`)."""

    cells: Tensor  # [chunks, n * R, B, Hk, D], n pages of a full chunk, R mean keys of each
    tokens: int  # tokens per mean
    each: int  # R
    index: LayerIndex | None = None

    def write(self, chunk: int, k: Tensor) -> None:
        """Store the keys that represent a chunk's pages, made from its keys k [C, B, Hk, D]."""
        representatives = mean_keys(k, self.tokens) if self.index is None else self.index.of_keys(k)
        self.cells[chunk, : len(representatives)] = representatives

    def read(self, pages: range) -> Tensor:
        """Return the keys that represent these pages, [B, KV heads, keys, D]; often a view."""
        representatives = self.cells.flatten(0, 1)[pages.start * self.each : pages.stop * self.each]
        return representatives.permute(1, 2, 0, 3)


@dataclass(slots=True)
class _PageSlot:
    """Device memory for a slab (block of gathered pages), with CUDA events of its present slab."""

    name: str
    arrived: Any = None  # event: the slab has arrived
    read: Any = None  # event: the last use of the slab
    left: Any = None  # event: all its sums have been copied to host


@dataclass(slots=True)
class PageSlots:
    """Device memory for slabs (blocks of gathered pages), in slots that cells use in turn. `counts`
    keeps how many units (K, V of a page) each cell chose: the CPU waits for each number once."""

    storage: ProgramBuffers
    ring: deque[_PageSlot] = field(default_factory=lambda: deque(map(_PageSlot, names.PAGES)))
    counts: dict[tuple[int, int], int] = field(default_factory=dict)  # by layer and chunk

    def take(self) -> _PageSlot:
        """Return the next slot; the fetch lane waits until the slab in it is no longer used."""
        self.ring.rotate(-1)
        slot, copies = self.ring[-1], self.storage.copies
        copies.wait(Lane.FETCH, slot.read, Hazard.STILL_READ)
        copies.wait(Lane.FETCH, slot.left, Hazard.STILL_LEAVING)
        slot.read = slot.left = None
        return slot


@dataclass(frozen=True, slots=True)
class _ComingPages:
    """A slab (a block of gathered pages) on its way from the host to a slot on the device."""

    slot: _PageSlot
    slab: Slab
    places: Tensor  # [U * P], rows of the layer's buffers
    sums: tuple[Tensor, Tensor] | None  # in a backward


@dataclass(slots=True)
class BufferPages:
    """A cell's keys and chosen pages in a program's buffers; implements `sparse.pages.Pages`."""

    prefix: KVPrefix
    slots: PageSlots
    chunk: int
    far: Far | None  # None: no pages to choose from
    sparse: Sparse
    means: Means | None = None  # None: no choice is made here
    choice: Tensor | None = None  # [B, Hk, M, k], from `begin` on
    counted: Callable[[], Tensor] | None = None  # counts its units; None: the count is known
    chosen: Any = None  # event of a choice that this cell makes
    runs: Iterator[Units] = field(default_factory=lambda: iter(()))  # later slabs
    coming: deque[_ComingPages] = field(default_factory=deque)
    here: _ComingPages | None = None  # the present slab

    # -- near keys -------------------------------------------------------------------------------

    def keys(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self.prefix.keys(start, stop)

    def add_gradient(self, start: int, stop: int, rows: slice, dk: Tensor, dv: Tensor) -> None:
        self.prefix.add_gradient(start, stop, rows, dk, dv)

    # -- chosen pages ----------------------------------------------------------------------------

    def representatives(self, pages: range) -> Tensor:
        assert self.means is not None
        return self.means.read(pages)

    def begin(self, choice: Tensor) -> None:
        """Record the cell's chosen pages, once, and begin to fetch them if they are on host."""
        if self.choice is not None:
            return
        self.choice = choice
        if not self._on_host():
            return
        if self._cell() in self.slots.counts:
            self._start()
            return
        copies = self.prefix.storage.copies
        self.counted = copies.read(count_of(choice))
        self.chosen = copies.record(Lane.COMPUTE)

    def resident(self) -> Resident | None:
        if self._on_host():
            return None
        kv, sums = self.prefix.everything(self.prefix.keys_in), self.prefix.gradients_in
        dkv = None if sums is None else self.prefix.everything(sums)
        totals = (None, None) if dkv is None else (dkv["k"], dkv["v"])
        return Resident(kv["k"], kv["v"], *totals)

    def slabs(self) -> Iterator[Slab]:
        if not self._on_host():
            yield from self._in_line()
            return
        if self.counted is not None:
            self.slots.counts[self._cell()] = int(self.counted())
            self.counted = None
            self._start()
        copies = self.prefix.storage.copies
        while self.coming:
            self.here = self.coming.popleft()
            copies.wait(Lane.COMPUTE, self.here.slot.arrived, Hazard.NOT_ARRIVED)
            yield self.here.slab
            self.here.slot.read = copies.record(Lane.COMPUTE)
            self.here = None
            self._fetch_next()

    def sums(self, slab: Slab) -> tuple[Tensor, Tensor]:
        dtype = self.prefix.storage.accumulate_dtype
        if self.here is None:
            dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (slab.keys, slab.values))
            return dk, dv
        assert self.here.slab is slab
        assert self.here.sums is not None
        dk, dv = (x.zero_() for x in self.here.sums)
        return dk, dv

    def add(self, slab: Slab, dk: Tensor, dv: Tensor) -> None:
        assert self.prefix.gradients_in is not None
        totals = self._rows(self.prefix.gradients_in)
        gradients = dk.flatten(0, 1), dv.flatten(0, 1)
        if self.here is None:
            places = self._places(slab.units)
            for total, gradient in zip(totals, gradients, strict=True):
                # Units are distinct: no place gets two additions, so their order does not matter.
                total.index_add_(0, places, gradient)
            return
        copies = self.prefix.storage.copies
        copies.wait(Lane.EVICT, copies.record(Lane.COMPUTE), Hazard.NOT_WRITTEN)
        for total, gradient in zip(totals, gradients, strict=True):
            copies.add_rows(total, self.here.places, gradient)
        self.here.slot.left = copies.record(Lane.EVICT)

    # -- through slots ---------------------------------------------------------------------------

    def _start(self) -> None:
        assert self.choice is not None
        copies = self.prefix.storage.copies
        copies.wait(Lane.FETCH, self.chosen, Hazard.NOT_WRITTEN)
        with copies.on(Lane.FETCH):
            units = units_of(self.choice, self.slots.counts[self._cell()])
        self.runs = units.slabs(self._most_units())
        for _ in names.PAGES:
            self._fetch_next()

    def _fetch_next(self) -> None:
        copies = self.prefix.storage.copies
        with copies.on(Lane.FETCH):
            units = next(self.runs, None)
        if units is None:
            return
        slot = self.slots.take()
        with copies.on(Lane.FETCH):
            numbers = {
                "numbers": torch.stack([units.rows, units.heads, units.pages]),
                "index": units.index,
                "places": self._places(units),
            }
        parts = self._parts(slot, len(units), units.index.numel())
        for name, values in numbers.items():
            copies.note(parts[name], values.flatten())
        for name, rows in zip("kv", self._rows(self.prefix.keys_in), strict=True):
            copies.gather(parts[name], rows, parts["places"])
        slot.arrived = copies.record(Lane.FETCH)
        self.coming.append(self._on_its_way(slot, units.index.shape, parts))

    def _on_its_way(
        self, slot: _PageSlot, shape: torch.Size, parts: dict[str, Tensor]
    ) -> _ComingPages:
        rows, heads, pages = parts["numbers"].view(3, -1)
        units = Units(rows, heads, pages, parts["index"].view(shape))
        keys, values, *sums = (
            parts[name].unflatten(0, (len(units), self.sparse.page))
            for name in ROWS
            if name in parts
        )
        of_backward = (sums[0], sums[1]) if sums else None
        return _ComingPages(slot, Slab(units, keys, values), parts["places"], of_backward)

    def _parts(self, slot: _PageSlot, units: int, entries: int) -> dict[str, Tensor]:
        """Return views that divide a slot's memory for a slab of `units` pages, by name: page
        numbers as int64; keys, values and their gradient sums as rows, one per token."""
        assert self.far is not None
        storage, far = self.prefix.storage, self.far
        backward = self.prefix.gradients_in is not None
        sizes = slot_parts(far, units, entries, backward=backward)
        starts = accumulate(map(aligned, sizes.values()), initial=0)
        whole, parts = storage.cell(slot.name, self.chunk), {}
        # An operation that writes to a view too short would enlarge it, over its neighbours.
        assert sum(map(aligned, sizes.values())) <= len(whole), f"{slot.name}: {units} units"
        for (name, size), start in zip(sizes.items(), starts, strict=False):
            part = whole[start : start + size]
            if name not in ROWS:
                parts[name] = part.view(torch.int64)
                continue
            dtype = storage.accumulate_dtype if name.startswith("d") else storage.dtype
            dim = far.head_dim if name.endswith("k") else far.value_dim
            parts[name] = part.view(dtype).view(-1, dim)
        return parts

    # -- in line ---------------------------------------------------------------------------------

    def _in_line(self) -> Iterator[Slab]:
        assert self.choice is not None
        units = units_of(self.choice, self.slots.counts.get(self._cell()))
        self.slots.counts[self._cell()] = len(units)
        for slab_units in units.slabs(self._most_units()):
            yield Slab(slab_units, *self._gathered(slab_units))

    def _gathered(self, units: Units) -> tuple[Tensor, Tensor]:
        places = self._places(units)
        k, v = (
            rows.index_select(0, places).unflatten(0, (len(units), self.sparse.page))
            for rows in self._rows(self.prefix.keys_in)
        )
        return k, v

    def _rows(self, name: str) -> tuple[Tensor, Tensor]:
        """View the keys and values of a buffer as rows, one per token, sequence and KV head."""
        home = self.prefix.everything(name)
        return home["k"].flatten(0, 2), home["v"].flatten(0, 2)

    def _places(self, units: Units) -> Tensor:
        assert self.far is not None
        return units.places(self.sparse.page, self.far.batch, self.far.kv_heads)

    def _most_units(self) -> int:
        assert self.far is not None
        return most_units_of(self.far)

    def _cell(self) -> tuple[int, int]:
        return self.prefix.layer, self.chunk

    def _on_host(self) -> bool:
        return self.prefix.on_host(self.prefix.keys_in)


# -- cells and runs -----------------------------------------------------------------------------


OWN_SELECTORS = (TopK, Fraction, RandomPages, Checked)


@dataclass(slots=True)
class SparseStep:
    """Sparse attention of a step, through all its program runs; implements `engine.far.FarStep`."""

    sparse: Sparse
    select: Selector
    watched: int = 0  # runs that watched a cell

    @classmethod
    def of(cls, schedule: Schedule, custom: GivenSelector | None) -> Self:
        """Return a step's sparse attention for a schedule and the user's selector, if any."""
        assert schedule.sparse is not None, "attention is sparse"
        return cls(schedule.sparse, selector_of(custom, schedule))

    def run(self, context: AttentionContext, *, watches: bool) -> "SparseRun":
        cell = watched_cell(context.program, self.watched) if watches else None
        self.watched += watches
        return SparseRun(context, self.sparse, self.select, cell)

    def held_bytes(self, device: torch.device, dtype: torch.dtype) -> int:
        """Return the bytes that an index takes on the device in this dtype; 0 without an index."""
        if not isinstance(self.select, Index):
            return 0
        self.select.at(device, dtype)
        return self.select.nbytes(dtype)


def selector_of(custom: GivenSelector | None, schedule: Schedule) -> Selector:
    """Return the user's selector, or `TopK` with the schedule's budget. Raises UnsupportedError for
    an index that is missing or not in the schedule, or that cannot learn from keys on host."""
    sparse = schedule.sparse
    assert sparse is not None, "attention is sparse"
    if sparse.indexed != isinstance(custom, Index):
        raise UnsupportedError(
            "selector: sparse.selector is index, which needs an index; give one as selector, such "
            "as `Index.load(folder)`"
            if sparse.indexed
            else f"selector: an index chooses pages, but sparse.selector is {sparse.selector}; set "
            "it to index"
        )
    if isinstance(custom, Index):
        if custom.learns():
            refuse_keys_on_host(schedule)
        return replace(custom, select=_reads_votes(custom.select, sparse))
    return _reads_votes(custom, sparse)


def refuse_keys_on_host(schedule: Schedule) -> None:
    """Raise UnsupportedError if the schedule keeps keys on host: no index can learn from them."""
    if schedule.kv is Tier.HOST:
        raise UnsupportedError(
            "index: learns from keys on the device, but the keys are on host; set schedule.kv to "
            "device, or train the index beforehand"
        )


def _reads_votes(selector: GivenSelector | None, sparse: Sparse) -> Selector:
    if selector is None:
        return TopK(sparse.budget // sparse.page)
    if isinstance(selector, OWN_SELECTORS):
        return selector
    if not callable(selector):
        raise UnsupportedError(
            f"selector: expected a function from votes to pages, got {selector!r}"
        )
    return Checked(selector)


@dataclass(slots=True)
class SparseCell:
    """Sparse attention of one cell, from forward to backward; implements
    `attention.far.FarAttention`."""

    run: "SparseRun"
    i: Forward
    choice: Tensor | None  # [B, Hk, M, k] in its buffer; None: no pages to choose from
    means: Means | None = None
    index: LayerIndex | None = None  # compares pages; None: their means do
    learner: LayerIndex | None = None  # the index if it learns
    chooses: bool = False  # the choice is still to be made
    at_hand: BufferPages | None = None  # from `begin` on

    def begin(self, keys: KVPrefix) -> None:
        """Prepare for attention or its backward: fetch the cell's pages if already chosen."""
        self.at_hand = self.run.pages(self.i, self.means, keys)
        if self.choice is not None and not self.chooses:
            self.at_hand.begin(self.choice)

    def begin_backward(self, i: Backward, keys: KVPrefix) -> None:
        self.choice = self.run.choice(i)
        self.begin(keys)

    def note(self, k: Tensor) -> None:
        if self.means is not None:
            self.means.write(self.i.chunk, k)

    def attend(
        self, dense: AttentionCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Choose the cell's pages, at the first call, and return out and lse of attention to them,
        as `attention.chunk.attend` does."""
        call, pages = self.run.call(self.i, dense), self.at_hand
        assert pages is not None
        chose = self.chooses
        if chose:
            assert self.choice is not None
            voting = q if self.index is None else self.index.of_queries(q)
            _store_choice(choose(call, voting, pages), self.choice)
            del voting
            self.chooses = False
        out, lse = attend_sparse(call, q, k, v, self._choice(q, pages), pages, sinks)
        if chose and self.learner is not None:
            self._learn(self.learner, call, q, lse, pages)
        if chose and (self.i.layer, self.i.chunk) == self.run.watched:
            pages.prefix.done()
            self.run.watch(self.i, call, q, k, lse, sinks)
        return out, lse

    def _learn(
        self, learner: LayerIndex, call: SparseCall, q: Tensor, lse: Tensor, pages: BufferPages
    ) -> None:
        resident, choice = pages.resident(), self._choice(q, pages)
        assert resident is not None, "keys on host are refused earlier"
        for number in sampled(choice.shape[2], LESSONS):
            learn(learner, lesson(call, q, lse, choice, number, resident.k))

    def attend_backward(
        self,
        dense: AttentionCall,
        dout: Tensor,
        of_keys: tuple[Tensor, Tensor, Tensor],
        attended: tuple[Tensor, Tensor],
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return gradients as `attention.chunk.attend_backward` does; `of_keys` are q, k and v."""
        call, pages, (q, k, v) = self.run.call(self.i, dense), self.at_hand, of_keys
        assert pages is not None
        results: Attended = (*attended, self._choice(q, pages))
        return attend_sparse_backward(call, dout, q, k, v, results, pages, sinks)

    def _choice(self, q: Tensor, pages: BufferPages) -> Tensor:
        if self.choice is not None:
            return self.choice
        heads = pages.prefix.storage.program.model.layers[pages.prefix.layer].kv_heads
        page_count = -(-q.shape[2] // pages.sparse.query_tokens)
        return torch.empty(q.shape[0], heads, page_count, 0, dtype=torch.int32, device=q.device)


def _store_choice(choice: Tensor, buffer: Tensor) -> None:
    """Store the chosen pages of each query page in a buffer [B, KV heads, query pages, k], padded
    by -1. Raises UnsupportedError if a query page chose more than k pages."""
    width, most = choice.shape[3], buffer.shape[3]
    if width > most and bool((choice[..., most:] >= 0).any()):
        raise UnsupportedError(
            f"selector: chose {width} pages for a page of queries, more than the budget of "
            f"{most}; raise sparse.budget, or choose fewer"
        )
    width = min(width, most)
    buffer[..., :width] = choice[..., :width]
    buffer[..., width:] = -1


@dataclass(slots=True)
class SparseRun:
    """Sparse attention of one run of a program; implements `attention.far.FarRun`. In a chunk,
    layers with equal specs share one SparseCall."""

    context: AttentionContext
    sparse: Sparse
    select: Selector
    watched: tuple[int, int] | None = None  # the cell whose seen mass is measured
    seen: Callable[[], Seen] | None = None  # makes the CPU wait
    storage: ProgramBuffers = field(init=False)
    page_slots: PageSlots = field(init=False)
    index: Mapping[int, LayerIndex] | None = field(init=False, default=None)  # as cells use it
    learner: Index | None = field(init=False, default=None)  # the index if it learns
    chunk: int = -1  # the present chunk
    calls: dict[tuple[LayerSpec, float], SparseCall] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.storage = self.context.storage
        self.page_slots = PageSlots(self.storage)
        if isinstance(self.select, Index):
            program, rank = self.storage.program, self.storage.program.share.rank
            heads = rank.layout.tensor * rank.layout.ulysses
            self.select.refuse_misfit(program.model.layers, self.sparse.index_dim, heads)
            whole = self.select.at(self.context.kernels.device, self.storage.dtype)
            self.index = {number: layer.of_rank(rank) for number, layer in whole.items()}
            learns = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            if learns and self.select.learns():
                refuse_keys_on_host(self.storage.program.schedule)
                self.learner = self.select
        if self.learner and self.storage.program.share.rank.layout.devices() > 1:
            raise UnsupportedError(
                "index: each rank would learn from its own attention alone, without summing "
                "gradients over ranks; train the index beforehand, in one process"
            )

    def cell(self, i: Forward) -> SparseCell | None:
        """Return the sparse attention of a forward cell; None if the cell's layer has a window."""
        program, storage = self.storage.program, self.storage
        spec = program.model.layers[i.layer]
        if spec.window is not None:
            return None
        tokens, batch = self.sparse.mean_tokens, program.run.batch
        index = None if self.index is None else self.index[i.layer]
        learner = None if self.learner is None else self.learner.layers[i.layer]
        means = None
        if i.means is not None:
            dim = self.sparse.key_dim(spec)
            shape = program.schedule.chunk // tokens, batch, spec.kv_heads, dim
            each = self.sparse.page // tokens
            means = Means(storage.cells(i.means, shape, storage.dtype), tokens, each, index)
        return SparseCell(self, i, self.choice(i), means, index, learner, i.chooses)

    def near(self, spec: LayerSpec, blocks: tuple[Block, ...], start: int) -> tuple[Block, ...]:
        return near_blocks(blocks, self.sparse, start) if spec.window is None else blocks

    def choice(self, i: Forward | Backward) -> Tensor | None:
        """Return the buffer of a cell's chosen pages, [B, Hk, M, k] int32; None without any."""
        if i.choice is None:
            return None
        program, spec = self.storage.program, self.storage.program.model.layers[i.layer]
        start, stop = program.chunks[i.chunk]
        pages = -(-(stop - start) // self.sparse.query_tokens)
        size = program.run.batch, spec.kv_heads, pages, self.sparse.width(start)
        memory = self.storage.cell(i.choice, i.chunk)
        return memory[: prod(size) * CHOICE_BYTES].view(torch.int32).view(size)

    def pages(self, i: Forward, means: Means | None, prefix: KVPrefix) -> BufferPages:
        """Return the object by which a cell's attention reads its keys and chosen pages."""
        program = self.storage.program
        start, stop = program.chunks[i.chunk]
        run = program.run.batch, program.model.element_bytes
        far = far_of(program.model.layers[i.layer], self.sparse, run, start, stop - start)
        return BufferPages(prefix, self.page_slots, i.chunk, far, self.sparse, means)

    def call(self, i: Forward, dense: AttentionCall) -> SparseCall:
        """Return the settings of a cell's sparse attention, given those of dense attention."""
        if i.chunk != self.chunk:
            self.chunk, self.calls = i.chunk, {}
        spec = self.storage.program.model.layers[i.layer]
        key = spec, dense.scale
        if key not in self.calls:
            kernels, documents = self.context.kernels, self.context.documents(i.chunk)
            kernel = far_kernel(kernels.device, kernels.dtype, spec)
            self.calls[key] = sparse_call(self.sparse, dense, self.select, kernel, documents)
        return self.calls[key]

    def watch(
        self, i: Forward, call: SparseCall, q: Tensor, k: Tensor, lse: Tensor, sinks: Tensor | None
    ) -> None:
        """Measure which share of dense attention's mass a few of the cell's queries see; `seen`
        then returns it. Reads all keys before the chunk, so it is called for one cell per step."""
        start = call.near.q_start
        block = min(self.storage.program.schedule.kv_block, WATCHED_KEYS)
        spans = [(first, min(first + block, start)) for first in range(0, start, block)]
        prefix = KVPrefix(self.storage, self.context.slots, i.layer, i.prefix)
        prefix.begin(spans)
        mass = seen_mass(call, q, k, lse, prefix, sampled(q.shape[2], SAMPLES), spans, sinks)
        prefix.done()
        self.seen = partial(_seen, i, mass)


def far_kernel(device: torch.device, dtype: torch.dtype, spec: LayerSpec) -> FarKernel:
    """Return the kernel for a layer's attention to chosen pages: in Triton if possible."""
    heads = spec.head_dim, spec.value_dim, spec.softcap
    return TritonFar() if supports(device, dtype, *heads) else select_far(device.type, *heads)


def _seen(i: Forward, mass: Tensor) -> Seen:
    mean, minimum = mass.tolist()
    return Seen(i.layer, i.chunk, Mass(mean, minimum))


def watched_cell(program: Program, step: int) -> tuple[int, int] | None:
    """Return the (layer, chunk) in which step number `step` measures the share of attention seen:
    each layer in turn, in the last chunk, which misses most. None if no cell chooses pages."""
    chosen = [i for i in program.instructions if isinstance(i, Forward) and i.chooses]
    if not chosen:
        return None
    last = max(i.chunk for i in chosen)
    layers = sorted(i.layer for i in chosen if i.chunk == last)
    return layers[step % len(layers)], last
