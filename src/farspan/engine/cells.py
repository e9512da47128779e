"""The attention cells of a program: each with its keys, places in buffers and exchanges."""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from farspan.engine.attending import Attending
from farspan.engine.cell import Cell, Rows
from farspan.engine.prefix import Prefix, Slots
from farspan.engine.storage import Storage
from farspan.plan.program import AttentionMode, Backward, Forward, Program
from farspan.sparse.engine import SparseRun
from farspan.spec import Tier


@dataclass(frozen=True, slots=True)
class AttentionCells:
    """Makes the cells of one program's run on one batch."""

    program: Program
    storage: Storage
    slots: Slots
    attending: Attending
    sparse: SparseRun | None

    def begin(self, i: Forward, held: tuple[Tensor, Tensor] | None) -> Cell:
        """The cell of a forward, whose keys may be on their way; `held` are O and LSE that an
        earlier pass left."""
        cell = Cell(
            i.mode,
            partial(self.attending.call, i.layer, i.chunk),
            self._prefix(i.layer, i.chunk, i.prefix),
            write_kv=self._rows(i.write_kv, i.chunk, i.layer),
            attention=self._rows(i.attention, i.chunk, i.layer),
            held=held,
            kept=i.kept,
            sparse=None if self.sparse is None else self.sparse.cell(i),
            exchange=self.attending.exchange(i.chunk),
            spread=self.attending.spread(i.layer, i.chunk),
            graph=i.graph,
            at_hand=self._at_hand(i),
            pieces=self.attending.pieces(i.layer),
        )
        if i.mode is AttentionMode.COMPUTE:
            self._fetch(cell, i.layer, i.chunk)
        return cell

    def begin_backward(self, i: Backward, cell: Cell) -> None:
        """Give a cell what its backward reads; keys and the sums of theirs may be on their way."""
        cell.key_values = self._prefix(i.layer, i.chunk, i.prefix, i.accumulator)
        if cell.sparse is not None and self.sparse is not None:
            cell.sparse.choice = self.sparse.choice(i)
        self._fetch(cell, i.layer, i.chunk)
        cell.own_dkv = self._rows(i.own_dkv, i.chunk, i.layer)
        if cell.kept:
            cell.own_kv = self._rows(i.own_kv, i.chunk, i.layer)
            cell.attention = self._rows(i.attention, i.chunk, i.layer)

    def _at_hand(self, i: Forward) -> Rows | None:
        """The chunk's own K, V, where an earlier pass left them on the device."""
        there = i.write_kv is None and self.program.buffers[i.prefix].tier is Tier.DEVICE
        return self._rows(i.prefix, i.chunk, i.layer) if there else None

    def _fetch(self, cell: Cell, layer: int, chunk: int) -> None:
        """Keys of earlier chunks may be on their way before the cell asks for them."""
        cell.key_values.begin(self.attending.streamed(layer, chunk))
        if cell.sparse is not None:
            cell.sparse.begin(cell.key_values)

    def _rows(self, name: str | None, chunk: int, layer: int) -> Rows | None:
        return None if name is None else self.storage.chunk(name, chunk, layer)

    def _prefix(self, layer: int, chunk: int, name: str, gradients: str | None = None) -> Prefix:
        before = self.program.share.keys.rows[chunk][0]
        fused = self.attending.kernels.fused
        return Prefix(self.storage, self.slots, layer, name, gradients, before, fused)
