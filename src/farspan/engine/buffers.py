"""Tensor views of a program's buffers in the arenas, and streaming of earlier K, V to a cell.

A buffer holds its tensors token first, [T tokens, B rows of the batch, ...]: a chunk, or any range
of keys, is one contiguous piece for every batch size, and one copy moves it. Attention reads K, V
as a permuted view, [B, H, T, D]. x and O, LSE are only read by whole chunks, so within a chunk's
piece they have the model's layout: x [B, C, hidden], O [B, C, H, Dv], LSE [B, H, C].

K, V of earlier chunks, and the sums of their gradients, are on the device, where a range of keys is
a view, or on the host, from which blocks are streamed through two staging buffers (FPDT 4.2). Both
give the same bits.

    fetch     kv 0, dkv 0 | kv 1, dkv 1 |              kv 2, dkv 2 |
    compute                 attend 0, add | attend 1, add            | attend 2, add
    evict                                 | dkv 0         | dkv 1

Blocks 0 and 1 are fetched when the cell begins, block b + 1 as soon as block b - 1 is released; a
block's sums of dK, dV are evicted while the next block is computed. Each use of a staging buffer is
a generation with its own events.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from farspan.attention.backends import accumulate_dtype, add_
from farspan.engine.tiers import Arena, CopyEngine
from farspan.program import buffer_names as names
from farspan.program.attention_blocks import Block, overlapping
from farspan.program.dependencies import Hazard, Lane
from farspan.program.program import Buffer, Program, Region, aligned, cell_place, regions, rows_of
from farspan.program.residency import INDEX, RESIDENCY, Kind
from farspan.spec import Tier

Span = tuple[int, int]
# Views of tensors that a program keeps, 1 KB of objects each: 1 microsecond for one instead of 6.
# Long programs have more, and cells that take milliseconds.
VIEWS_KEPT = 2**13


class ProgramBuffers:
    """Tensor views of one program's buffers, and copies between them."""

    def __init__(
        self, program: Program, arenas: dict[Tier, Arena], dtype: torch.dtype, copies: CopyEngine
    ) -> None:
        self.program = program
        self.arenas = arenas
        self.dtype = dtype
        self.accumulate_dtype = accumulate_dtype(dtype)
        self.copies = copies
        self._rows_of = {kind: rows_of(program.share, kind) for kind in RESIDENCY}
        self._in_cells = {kind for kind, row in RESIDENCY.items() if row.in_cells}
        self._regions: dict[tuple[str, int], list[tuple[Region, int, torch.dtype]]] = {}
        self._views: dict[tuple[Any, ...], dict[str, Tensor]] = {}
        for arena in arenas.values():
            arena.kept[self] = self._views

    def _keep(self, key: tuple[Any, ...], views: dict[str, Tensor]) -> dict[str, Tensor]:
        if len(self._views) == VIEWS_KEPT:
            self._views.clear()
        self._views[key] = views
        return views

    def _regions_of(self, name: str, layer: int) -> list[tuple[Region, int, torch.dtype]]:
        """Return a layer's tensors in a buffer: each one's place, bytes per token and dtype."""
        if (name, layer) not in self._regions:
            buffer, program = self.program.buffers[name], self.program
            spec, held = program.model.layers[layer], buffer.stop - buffer.start
            self._regions[name, layer] = [
                (
                    found,
                    found.row_bytes(),
                    self.accumulate_dtype if found.accumulate else self.dtype,
                )
                for found in regions(buffer.kind, program.model, spec, program.run.batch, held)
            ]
        return self._regions[name, layer]

    def rows(
        self,
        name: str,
        span: tuple[int, int],
        layer: int,
        *,
        at_start: bool = False,
        mapped: bool = False,
    ) -> dict[str, Tensor]:
        """Return views of tokens [start, stop) of the tensors in buffer `name`, each [T, B, ...].
        Pass `at_start` for a buffer that holds one chunk of any layer: its tokens begin at the
        first row. For `mapped` see `Arena.view`. Each call's tensors have their own versions."""
        key = name, span, layer, at_start, mapped
        found = self._views.get(key) or self._keep(key, self._make_rows(*key))
        return {part: view.data for part, view in found.items()}

    def _make_rows(
        self, name: str, span: Span, layer: int, at_start: bool, mapped: bool = False
    ) -> dict[str, Tensor]:
        buffer = self.program.buffers[name]
        arena = self.arenas[buffer.tier]
        start = 0 if at_start else span[0] - buffer.start
        count = span[1] - span[0]
        held = buffer.stop - buffer.start
        assert 0 <= start <= held - count, f"{name} does not hold rows {span}"
        views = {}
        for region, row_bytes, dtype in self._regions_of(name, layer):
            address = buffer.address + region.offset + start * row_bytes
            shape = count, *region.shape
            views[region.name] = arena.view(address, shape, dtype, mapped=mapped)
        return views

    def chunk(self, name: str, chunk: int, layer: int) -> dict[str, Tensor]:
        """Return a chunk's tensors by name. By the buffer's kind they are K, V [C, B, Hk, D]; x [B,
        C, hidden]; or O [B, C, H, Dv] and LSE [B, H, C]."""
        return {part: view.data for part, view in self._chunk(name, chunk, layer).items()}

    def _chunk(self, name: str, chunk: int, layer: int) -> dict[str, Tensor]:
        key = name, chunk, layer
        found = self._views.get(key)
        if found is not None:
            return found
        buffer = self.program.buffers[name]
        span = self._rows_of[buffer.kind][chunk]
        rows = self._make_rows(name, span, layer, is_slot(buffer))
        if buffer.kind not in (Kind.KV, Kind.DKV):
            for part, tensor in rows.items():
                count, batch, *rest = tensor.shape
                shape = (*rest, count) if part == "lse" else (count, *rest)
                rows[part] = tensor.view(batch, *shape)
        return self._keep(key, rows)

    def cell(self, name: str, chunk: int) -> Tensor:
        """Return the saved activations of one chunk, bytes in a buffer, as a uint8 view [bytes]."""
        buffer = self.program.buffers[name]
        start, stop = cell_place(self.program, buffer, chunk)
        return self.arenas[buffer.tier].view(buffer.address + start, (stop - start,), torch.uint8)

    def cells(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """View a buffer whose chunks have equally shaped data as one tensor [chunks, *shape]."""
        buffer = self.program.buffers[name]
        assert not buffer.cell_row, name
        size = aligned(buffer.cell_bytes)
        row = size // dtype.itemsize
        whole = self.arenas[buffer.tier].view(buffer.address, (buffer.bytes // size, row), dtype)
        return whole[:, : buffer.cell_bytes // dtype.itemsize].unflatten(1, shape)

    def copy_chunk(self, source: str, target: str, chunk: int) -> None:
        """Copy a chunk from a buffer on the device to one on the host, or back."""
        ends = [self.program.buffers[name] for name in (source, target)]
        move = self.copies.fetch if ends[0].tier is Tier.HOST else self.copies.evict
        if ends[0].kind in self._in_cells:
            cells = self.cell(target, chunk), self.cell(source, chunk)
            used = min(map(len, cells))
            move(cells[0][:used], cells[1][:used])
            return
        layer = max(end.layer for end in ends if not is_slot(end))
        layer = min(layer, len(self.program.model.layers) - 1)
        there, here = self._chunk(target, chunk, layer), self._chunk(source, chunk, layer)
        for name, rows in there.items():
            move(rows, here[name])

    def clear(self, name: str) -> None:
        """Zero a whole buffer on the device."""
        buffer = self.program.buffers[name]
        assert buffer.tier is Tier.DEVICE, f"{name}: the CPU would not wait for copies"
        self.arenas[buffer.tier].view(buffer.address, (buffer.bytes,), torch.uint8).zero_()


def is_slot(buffer: Buffer) -> bool:
    """Return whether the buffer is a slot, which any layer and chunk may use in turn."""
    return buffer.layer < 0


@dataclass(slots=True)
class StagingBuffer:
    """A device buffer for one streamed block of keys, with events of its latest fetch and use."""

    name: str
    arrived: Any = None  # event of its fetch
    done: Any = None  # event of its last use, after which the slot may be filled again


class StagingBuffers:
    """Device buffers for blocks streamed from the host; the cells of a step use them in turn."""

    def __init__(self, copies: CopyEngine) -> None:
        self.copies = copies
        self._rings: dict[tuple[str, ...], deque[StagingBuffer]] = {
            ring: deque(map(StagingBuffer, ring)) for ring in (names.KV_BLOCKS, names.DKV_BLOCKS)
        }

    def take(self, ring: tuple[str, ...], hazard: Hazard) -> StagingBuffer:
        """Return the staging buffer used longest ago among those for the tensors named in `ring`:
        K, V or dK, dV. Later fetches wait until its last use has ended."""
        slots = self._rings[ring]
        slots.rotate(-1)
        slot = slots[-1]
        self.copies.wait(Lane.FETCH, slot.done, hazard)
        return slot


@dataclass(slots=True)
class _PendingBlock:
    """A block of keys that is being fetched, or that attention reads."""

    span: Span
    keys: StagingBuffer
    totals: StagingBuffer | None  # sums of dK, dV, in a backward


@dataclass(slots=True)
class KVPrefix:
    """K, V of all chunks before a cell's chunk, on the device or streamed from the host. Implements
    `attention.chunk.KeyValues`."""

    storage: ProgramBuffers
    slots: StagingBuffers
    layer: int
    keys_in: str
    gradients_in: str | None = None
    before: int = 0  # rows before the chunk's own
    fused: bool = False  # farspan's own kernel adds gradients, if the device has it
    spans: Iterator[Span] = field(default_factory=lambda: iter(()))  # not fetched yet
    coming: deque[_PendingBlock] = field(default_factory=deque)
    here: _PendingBlock | None = None  # block in use

    def begin(self, spans: Iterable[Span]) -> None:
        """Start fetching the first `spans` (token ranges, in reading order) if K, V are on host."""
        if self.on_host(self.keys_in):
            self.spans = iter(spans)
            for _ in names.KV_BLOCKS:
                self._fetch_next()

    def keys(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return K [B, Hk, T, D] and V [B, Hk, T, Dv] of tokens [start, stop)."""
        rows = self.tensors(start, stop)
        return rows["k"].permute(1, 2, 0, 3), rows["v"].permute(1, 2, 0, 3)

    def tensors(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return the layer's tensors of tokens [start, stop) by name, each [T, B, ...]."""
        if self.on_host(self.keys_in):
            self.done()
            self.here = self.coming.popleft()
            assert self.here.span == (start, stop), (self.here.span, start, stop)
            self.storage.copies.wait(Lane.COMPUTE, self.here.keys.arrived, Hazard.NOT_ARRIVED)
            return self._in_slot(self.here.keys)
        return self.storage.rows(self.keys_in, (start, stop), self.layer)

    def add_gradient(self, start: int, stop: int, rows: slice, dk: Tensor, dv: Tensor) -> None:
        """Add dK [b, Hk, T, D] and dV to their sums, for tokens [start, stop) of b batch rows
        (`rows`)."""
        self._add(start, stop, lambda total: _add(total, rows, dk, dv, self.fused))

    def add(self, start: int, stop: int, gradients: dict[str, Tensor]) -> None:
        """Add each gradient [T, B, ...] of tokens [start, stop) to the sum of the same name."""

        def add_all(total: dict[str, Tensor]) -> None:
            for name, gradient in gradients.items():
                total[name].add_(gradient)

        self._add(start, stop, add_all)

    def _add(self, start: int, stop: int, add: Callable[[dict[str, Tensor]], None]) -> None:
        assert self.gradients_in is not None
        home = self.storage.rows(self.gradients_in, (start, stop), self.layer)
        slot = None if self.here is None else self.here.totals
        if slot is None:
            add(home)
            return
        copies, total = self.storage.copies, self._in_slot(slot)
        copies.wait(Lane.COMPUTE, slot.arrived, Hazard.NOT_ARRIVED)
        add(total)
        copies.wait(Lane.EVICT, copies.record(Lane.COMPUTE), Hazard.NOT_WRITTEN)
        for name, tensor in total.items():
            copies.evict(home[name], tensor)
        slot.done = copies.record(Lane.EVICT)

    def prefix_rows(self) -> tuple[Tensor, Tensor]:
        """Return views of K [T, B, Hk, D] and V [T, B, Hk, Dv] of all T earlier tokens."""
        rows = self.storage.rows(self.keys_in, (0, self.before), self.layer)
        return rows["k"], rows["v"]

    def index_rows(self) -> Tensor:
        """Return the index keys [T, B, D] of all T earlier tokens: a view, or a copy if they are on
        the host."""
        storage, span = self.storage, (0, self.before)
        rows = storage.rows(self.keys_in, span, self.layer)[INDEX]
        if not self.on_host(self.keys_in):
            return rows
        copies = storage.copies
        here = torch.empty(rows.shape, dtype=rows.dtype, device=copies.device)
        copies.wait(Lane.FETCH, copies.record(Lane.COMPUTE), Hazard.STILL_READ)
        copies.fetch(here, rows)
        copies.wait(Lane.COMPUTE, copies.record(Lane.FETCH), Hazard.NOT_ARRIVED)
        return here

    def add_rows(self, dk: Tensor, dv: Tensor) -> None:
        """Add dK [T, B, Hk, D] and dV [T, B, Hk, Dv] of all T earlier tokens to the sums."""
        assert self.gradients_in is not None
        home = self.storage.rows(self.gradients_in, (0, self.before), self.layer)
        home["k"].add_(dk)
        home["v"].add_(dv)

    def done(self) -> None:
        """Release the block that attention has read, and start fetching another."""
        if self.here is not None:
            self.here.keys.done = self.storage.copies.record(Lane.COMPUTE)
            self.here = None
            self._fetch_next()

    def _fetch_next(self) -> None:
        span = next(self.spans, None)
        if span is None:
            return
        keys = self._fetch(span, self.keys_in, names.KV_BLOCKS, Hazard.STILL_READ)
        totals = None
        if self.gradients_in is not None:
            totals = self._fetch(span, self.gradients_in, names.DKV_BLOCKS, Hazard.STILL_LEAVING)
        self.coming.append(_PendingBlock(span, keys, totals))

    def _fetch(self, span: Span, home: str, ring: tuple[str, ...], hazard: Hazard) -> StagingBuffer:
        slot = self.slots.take(ring, hazard)
        rows = self.storage.rows(home, span, self.layer)
        here = self.storage.rows(slot.name, (0, span[1] - span[0]), self.layer, at_start=True)
        for name, tensor in here.items():
            self.storage.copies.fetch(tensor, rows[name])
        slot.arrived = self.storage.copies.record(Lane.FETCH)
        return slot

    def _in_slot(self, slot: StagingBuffer) -> dict[str, Tensor]:
        assert self.here is not None
        start, stop = self.here.span
        return self.storage.rows(slot.name, (0, stop - start), self.layer, at_start=True)

    def everything(self, name: str) -> dict[str, Tensor]:
        """Return views of all tokens in a layer's buffer; on the host they are read in place."""
        buffer = self.storage.program.buffers[name]
        span, mapped = (buffer.start, buffer.stop), self.on_host(name)
        return self.storage.rows(name, span, self.layer, mapped=mapped)

    def on_host(self, name: str) -> bool:
        return self.storage.program.buffers[name].tier is Tier.HOST


@dataclass(frozen=True, slots=True)
class KVHeads:
    """K, V of earlier chunks for a range of heads, on the device."""

    prefix: KVPrefix
    heads: slice

    def keys(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        k, v = self.prefix.keys(start, stop)
        return k[:, self.heads], v[:, self.heads]

    def add_gradient(self, start: int, stop: int, rows: slice, dk: Tensor, dv: Tensor) -> None:
        whole = self.prefix
        assert whole.gradients_in is not None
        assert not whole.on_host(whole.gradients_in)
        home = whole.storage.rows(whole.gradients_in, (start, stop), whole.layer)
        own = {name: x[:, :, self.heads] for name, x in home.items()}
        _add(own, rows, dk, dv, whole.fused)


def _add(total: dict[str, Tensor], rows: slice, dk: Tensor, dv: Tensor, fused: bool) -> None:
    for name, gradient in (("k", dk), ("v", dv)):
        own = total[name] if rows == slice(0, None) else total[name][:, rows]
        add_(own, gradient.permute(2, 0, 1, 3), fused=fused)


def streamed_spans(blocks: tuple[Block, ...], q_start: int) -> list[Span]:
    """Return the ranges of earlier keys to fetch, in the order in which attention reads them.
    Blocks with overlapping keys share one range."""
    visits = overlapping(block for block in blocks if block.k_start < q_start)
    return [(visit[0].k_start, max(block.k_stop for block in visit)) for visit in visits]
