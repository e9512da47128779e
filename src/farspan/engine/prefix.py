"""K, V of earlier chunks for one layer, and the accumulators of their gradients.

Two places: on the device, where a range of keys is a view; or on host, from where blocks are
streamed through two slots (FPDT 4.2). Both are asked the same questions and give the same bits.
"""

from dataclasses import dataclass

from torch import Tensor

from farspan.engine.storage import Storage
from farspan.plan import names
from farspan.spec import Tier


@dataclass(slots=True)
class Prefix:
    """Implements `attention.cell.KeyValues` over a program's buffers."""

    storage: Storage
    layer: int
    keys_in: str
    gradients_in: str | None = None
    turn: int = 0  # which slot the next block goes to

    def keys(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """K [B, Hk, T, D] and V [B, Hk, T, Dv] of tokens [start, stop)."""
        rows = self.storage.rows(self.keys_in, (start, stop), self.layer)
        if self.storage.program.buffers[self.keys_in].tier is Tier.HOST:
            slot = names.KV_BLOCKS[self.turn]
            self.turn = 1 - self.turn
            here = self.storage.rows(slot, (0, stop - start), self.layer, at_start=True)
            for name, tensor in here.items():
                self.storage.copies.fetch(tensor, rows[name])
            rows = here
        return rows["k"].permute(1, 2, 0, 3), rows["v"].permute(1, 2, 0, 3)

    def add_gradient(self, start: int, stop: int, rows: slice, dk: Tensor, dv: Tensor) -> None:
        """Add dK [b, Hk, T, D] and dV of batch `rows` for tokens [start, stop)."""
        assert self.gradients_in is not None
        total = self.storage.rows(self.gradients_in, (start, stop), self.layer)
        on_host = self.storage.program.buffers[self.gradients_in].tier is Tier.HOST
        here = total
        if on_host:
            span = (0, stop - start)
            here = self.storage.rows(names.DKV_BLOCK, span, self.layer, at_start=True)
            for name, tensor in here.items():
                self.storage.copies.fetch(tensor, total[name])
        for name, gradient in (("k", dk), ("v", dv)):
            here[name][:, rows].add_(gradient.permute(2, 0, 1, 3))
        if on_host:
            for name, tensor in here.items():
                self.storage.copies.evict(total[name], tensor)
