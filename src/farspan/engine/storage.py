"""Tensors of a program's buffers: names and chunks in, views of the arenas out.

Shapes. A buffer holds its tensors token first, [T, B, ...]: the rows of a chunk, or of any range of
keys, are one contiguous piece for every batch size, and a copy across the link is one copy. What
attention reads of K, V is a permuted view, [B, H, T, D]. x and O, LSE are only ever read by whole
chunks, so within a chunk's piece they are laid out as the model wants them: x [B, C, hidden],
O [B, C, H, Dv], LSE [B, H, C].
"""

import torch
from torch import Tensor

from farspan.attention.softmax import accumulate_dtype
from farspan.plan.program import Buffer, Kind, Program
from farspan.plan.sizes import aligned, cell_place, regions
from farspan.spec import Tier
from farspan.transfer.arena import Arena
from farspan.transfer.copies import CopyEngine


class Storage:
    """The memory of one program's run."""

    def __init__(
        self, program: Program, arenas: dict[Tier, Arena], dtype: torch.dtype, copies: CopyEngine
    ) -> None:
        self.program = program
        self.arenas = arenas
        self.dtype = dtype
        self.accumulate_dtype = accumulate_dtype(dtype)
        self.copies = copies

    def rows(
        self,
        name: str,
        span: tuple[int, int],
        layer: int,
        *,
        at_start: bool = False,
        mapped: bool = False,
    ) -> dict[str, Tensor]:
        """The tensors of `buffer` for these rows (plan.share), each [T, B, ...].

        A slot holds whatever chunk was put there last, from its first row on: `at_start`. For
        `mapped` see `Arena.view`.
        """
        buffer = self.program.buffers[name]
        arena = self.arenas[buffer.tier]
        start = 0 if at_start else span[0] - buffer.start
        count = span[1] - span[0]
        held = buffer.stop - buffer.start
        assert 0 <= start <= held - count, f"{name} does not hold rows {span}"
        spec = self.program.model.layers[layer]
        views = {}
        run = self.program.run
        for region in regions(buffer.kind, self.program.model, spec, run.batch, held):
            dtype = self.accumulate_dtype if region.accumulate else self.dtype
            address = buffer.address + region.offset + start * region.row_bytes()
            shape = count, *region.shape
            views[region.name] = arena.view(address, shape, dtype, mapped=mapped)
        return views

    def chunk(self, name: str, chunk: int, layer: int) -> dict[str, Tensor]:
        """The tensors of a chunk in a buffer or a slot: K, V [C, B, Hk, D], others as above."""
        buffer = self.program.buffers[name]
        span = self.program.rows(buffer.kind, chunk)
        rows = self.rows(name, span, layer, at_start=is_slot(buffer))
        if buffer.kind in (Kind.KV, Kind.DKV):
            return rows
        return {part: _chunk_view(part, tensor) for part, tensor in rows.items()}

    def cell(self, name: str, chunk: int) -> Tensor:
        """The raw bytes of a chunk's cell."""
        buffer = self.program.buffers[name]
        start, stop = cell_place(self.program, buffer, chunk)
        return self.arenas[buffer.tier].view(buffer.address + start, (stop - start,), torch.uint8)

    def cells(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """All cells of a buffer, which are alike, each a tensor of this shape: [cells, *shape]."""
        buffer = self.program.buffers[name]
        assert not buffer.cell_row, name
        size = aligned(buffer.cell_bytes)
        row = size // dtype.itemsize
        whole = self.arenas[buffer.tier].view(buffer.address, (buffer.bytes // size, row), dtype)
        return whole[:, : buffer.cell_bytes // dtype.itemsize].unflatten(1, shape)

    def copy_chunk(self, source: str, target: str, chunk: int) -> None:
        """Copy a chunk between two buffers of different tiers."""
        ends = [self.program.buffers[name] for name in (source, target)]
        move = self.copies.fetch if ends[0].tier is Tier.HOST else self.copies.evict
        if ends[0].kind is Kind.ACTIVATIONS:
            cells = self.cell(target, chunk), self.cell(source, chunk)
            used = min(map(len, cells))
            move(cells[0][:used], cells[1][:used])
            return
        layer = max(end.layer for end in ends if not is_slot(end))
        layer = min(layer, len(self.program.model.layers) - 1)
        there, here = self.chunk(target, chunk, layer), self.chunk(source, chunk, layer)
        for name, rows in there.items():
            move(rows, here[name])

    def clear(self, name: str) -> None:
        """Zero a whole buffer of the device."""
        buffer = self.program.buffers[name]
        assert buffer.tier is Tier.DEVICE, f"{name}: the CPU would not wait for copies"
        self.arenas[buffer.tier].view(buffer.address, (buffer.bytes,), torch.uint8).zero_()


def _chunk_view(part: str, rows: Tensor) -> Tensor:
    count, batch, *rest = rows.shape
    if part == "lse":
        return rows.view(batch, *rest, count)
    return rows.view(batch, count, *rest)


def is_slot(buffer: Buffer) -> bool:
    """A slot serves any layer and chunk."""
    return buffer.layer < 0
