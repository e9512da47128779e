"""K, V of earlier chunks for one layer, and the accumulators of their gradients.

Two places: on the device, where a range of keys is a view; or on host, from where blocks are
streamed through two slots (FPDT 4.2). Both are asked the same questions and give the same bits.

    fetch     kv 0, dkv 0 | kv 1, dkv 1 |              kv 2, dkv 2 |
    compute                 attend 0, add | attend 1, add            | attend 2, add
    evict                                 | dkv 0         | dkv 1

Blocks 0 and 1 are fetched when the cell begins, before it asks; block b + 1 as soon as block b - 1
is done with; a block's totals of dK, dV go back behind the computation. A slot is taken again and
again: each taking is a generation, with its own events.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from farspan.attention.softmax import add_
from farspan.engine.storage import Storage
from farspan.plan import names
from farspan.plan.blocks import Block
from farspan.plan.footprints import Lane
from farspan.plan.waits import Hazard
from farspan.spec import Tier
from farspan.transfer.copies import CopyEngine

Span = tuple[int, int]


@dataclass(slots=True)
class _Slot:
    """One slot; its events are of the present generation."""

    name: str
    arrived: Any = None  # its fetch
    done: Any = None  # the last use of what was fetched: the next generation may be


class Slots:
    """The slots for blocks, which the cells of a step take in turn."""

    def __init__(self, copies: CopyEngine) -> None:
        self.copies = copies
        self._rings: dict[tuple[str, ...], deque[_Slot]] = {
            ring: deque(map(_Slot, ring)) for ring in (names.KV_BLOCKS, names.DKV_BLOCKS)
        }

    def take(self, ring: tuple[str, ...], hazard: Hazard) -> _Slot:
        """The slot whose turn it is; what is fetched from now on comes after its last use."""
        slots = self._rings[ring]
        slots.rotate(-1)
        slot = slots[-1]
        self.copies.wait(Lane.FETCH, slot.done, hazard)
        return slot


@dataclass(slots=True)
class _Coming:
    """A block on its way to the device."""

    span: Span
    keys: _Slot
    totals: _Slot | None  # of dK, dV, in a backward


@dataclass(slots=True)
class Prefix:
    """Implements `attention.chunk.KeyValues` over a program's buffers."""

    storage: Storage
    slots: Slots
    layer: int
    keys_in: str
    gradients_in: str | None = None
    before: int = 0  # rows before the chunk's own
    fused: bool = False  # gradients are added by farspan's own kernel, where the device has it
    spans: Iterator[Span] = field(default_factory=lambda: iter(()))  # still to be fetched
    coming: deque[_Coming] = field(default_factory=deque)
    here: _Coming | None = None  # the block at hand

    def begin(self, spans: Iterable[Span]) -> None:
        """The cell will ask for these blocks in this order: fetch the first of them."""
        if self.on_host(self.keys_in):
            self.spans = iter(spans)
            for _ in names.KV_BLOCKS:
                self._fetch_next()

    def keys(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """K [B, Hk, T, D] and V [B, Hk, T, Dv] of tokens [start, stop)."""
        rows = self.tensors(start, stop)
        return rows["k"].permute(1, 2, 0, 3), rows["v"].permute(1, 2, 0, 3)

    def tensors(self, start: int, stop: int) -> dict[str, Tensor]:
        """All that the layer has of tokens [start, stop), each [T, B, ...]."""
        if self.on_host(self.keys_in):
            self.done()
            self.here = self.coming.popleft()
            assert self.here.span == (start, stop), (self.here.span, start, stop)
            self.storage.copies.wait(Lane.COMPUTE, self.here.keys.arrived, Hazard.NOT_ARRIVED)
            return self._in_slot(self.here.keys)
        return self.storage.rows(self.keys_in, (start, stop), self.layer)

    def add_gradient(self, start: int, stop: int, rows: slice, dk: Tensor, dv: Tensor) -> None:
        """Add dK [b, Hk, T, D] and dV of batch `rows` for tokens [start, stop)."""
        self._add(start, stop, lambda total: _add(total, rows, dk, dv, self.fused))

    def add(self, start: int, stop: int, gradients: dict[str, Tensor]) -> None:
        """Add to the gradients of tensors of tokens [start, stop), each [T, B, ...]."""

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
        """K [T, B, Hk, D] and V [T, B, Hk, Dv] of all rows before the chunk's own, where they
        lie."""
        rows = self.storage.rows(self.keys_in, (0, self.before), self.layer)
        return rows["k"], rows["v"]

    def add_rows(self, dk: Tensor, dv: Tensor) -> None:
        """Add to dK, dV of the same rows."""
        assert self.gradients_in is not None
        home = self.storage.rows(self.gradients_in, (0, self.before), self.layer)
        home["k"].add_(dk)
        home["v"].add_(dv)

    def done(self) -> None:
        """The block at hand is no longer needed: another one may come."""
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
        self.coming.append(_Coming(span, keys, totals))

    def _fetch(self, span: Span, home: str, ring: tuple[str, ...], hazard: Hazard) -> _Slot:
        slot = self.slots.take(ring, hazard)
        rows = self.storage.rows(home, span, self.layer)
        here = self.storage.rows(slot.name, (0, span[1] - span[0]), self.layer, at_start=True)
        for name, tensor in here.items():
            self.storage.copies.fetch(tensor, rows[name])
        slot.arrived = self.storage.copies.record(Lane.FETCH)
        return slot

    def _in_slot(self, slot: _Slot) -> dict[str, Tensor]:
        assert self.here is not None
        start, stop = self.here.span
        return self.storage.rows(slot.name, (0, stop - start), self.layer, at_start=True)

    def everything(self, name: str) -> dict[str, Tensor]:
        """All rows of one of the layer's buffers, where they lie, as tensors of the device."""
        buffer = self.storage.program.buffers[name]
        span, mapped = (buffer.start, buffer.stop), self.on_host(name)
        return self.storage.rows(name, span, self.layer, mapped=mapped)

    def on_host(self, name: str) -> bool:
        """Is this buffer on host?"""
        return self.storage.program.buffers[name].tier is Tier.HOST


@dataclass(frozen=True, slots=True)
class HeadsOf:
    """Some K, V heads of a prefix on the device."""

    prefix: Prefix
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
        add_(total[name][:, rows], gradient.permute(2, 0, 1, 3), fused=fused)


def streamed_spans(blocks: tuple[Block, ...], q_start: int) -> list[Span]:
    """Ranges of earlier keys in the order in which attention asks for them: blocks that overlap are
    asked for together."""
    spans: list[Span] = []
    for block in sorted(blocks, key=lambda block: (block.k_start, block.k_stop)):
        if block.k_start >= q_start:
            continue
        if spans and block.k_start < spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], block.k_stop)
        else:
            spans.append((block.k_start, block.k_stop))
    return spans
