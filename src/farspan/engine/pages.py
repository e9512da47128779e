"""Chosen pages over a program's buffers (OOMB 4.2), and the slots they come through from host.

K, V on the device are read where they lie, or gathered in line. Those on host come through two
slots, a slab in each (`attention.sparse.pages`), while near keys or the slab before are attended
to; in a backward, sums of their gradients go back behind the computation:

    compute   choose | near keys | slab 0   | slab 1           the first time
    fetch               slab 0     slab 1
    compute   other modules | near keys | slab 0 | slab 1      again, and in the backward
    fetch     slab 0, slab 1                       slab 2
    evict                                          sums of 0

How many units there are decides how much is asked for, so the CPU must know it: it waits for the
number, once a step and cell, behind the choice and not behind near keys, which are under way then.
Cells that ask again know it, and begin when they begin.

Legend: B batch, Hk key-value heads, P tokens a page, D head dim, Dv value dim, M pages of queries,
k chosen pages, U units.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from farspan.attention.sparse.pages import (
    Ends,
    Resident,
    Slab,
    Units,
    ends_of,
    index_of,
    page_means,
    slabs_of,
    units_of,
)
from farspan.engine.prefix import Prefix
from farspan.engine.storage import Storage
from farspan.plan import names
from farspan.plan.cell.sparse import Far, most_units_of, slot_parts
from farspan.plan.footprints import Lane
from farspan.plan.sizes import aligned
from farspan.plan.waits import Hazard

ROWS = ("k", "v", "dk", "dv")  # parts of a slot that are rows of keys or values


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
class _Slot:
    """One slot; its events are of the present generation."""

    name: str
    arrived: Any = None  # its slab
    read: Any = None  # the last use of that
    left: Any = None  # the sums: all of them are at home


@dataclass(slots=True)
class PageSlots:
    """The slots for chosen pages, which the cells of a step take in turn, and where slabs end: the
    second time that a cell asks for its pages, nobody has to wait for the numbers."""

    storage: Storage
    ring: deque[_Slot] = field(default_factory=lambda: deque(map(_Slot, names.PAGES)))
    ends: dict[tuple[int, int], Ends] = field(default_factory=dict)  # by layer and chunk

    def take(self) -> _Slot:
        """The slot whose turn it is; what is fetched from now on comes after its last use."""
        self.ring.rotate(-1)
        slot, copies = self.ring[-1], self.storage.copies
        copies.wait(Lane.FETCH, slot.read, Hazard.STILL_READ)
        copies.wait(Lane.FETCH, slot.left, Hazard.STILL_LEAVING)
        slot.read = slot.left = None
        return slot


@dataclass(frozen=True, slots=True)
class _Coming:
    """A slab on its way through a slot."""

    slot: _Slot
    slab: Slab
    places: Tensor  # [U * P], rows of the layer's buffers
    sums: tuple[Tensor, Tensor] | None  # of a backward


@dataclass(slots=True)
class BufferPages:
    """Implements `attention.sparse.pages.Pages` for one cell."""

    prefix: Prefix
    slots: PageSlots
    chunk: int
    far: Far | None  # None: there is nothing to choose
    page: int
    means: Means | None = None  # None: nothing is chosen here
    choice: Tensor | None = None  # [B, Hk, M, k], from `begin` on
    counted: Callable[[], Tensor] | None = None  # its index, where slabs are still to be cut
    chosen: Any = None  # the event of a choice that is made in this cell
    runs: Iterator[tuple[slice, int]] = field(default_factory=lambda: iter(()))  # still to come
    coming: deque[_Coming] = field(default_factory=deque)
    here: _Coming | None = None  # the slab at hand

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
        """A cell whose choice is known begins before its attention does, and only once."""
        if self.choice is not None:
            return
        self.choice = choice
        if not self._on_host():
            return
        if self._ends() is not None:
            self._start()
            return
        copies = self.prefix.storage.copies
        self.counted = copies.read(index_of(choice))
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
            self._cut(self.counted())
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
                # Units are distinct: nothing is added twice to one place, so no order matters.
                total.index_add_(0, places, gradient)
            return
        copies = self.prefix.storage.copies
        copies.wait(Lane.EVICT, copies.record(Lane.COMPUTE), Hazard.NOT_WRITTEN)
        for total, gradient in zip(totals, gradients, strict=True):
            copies.add_rows(total, self.here.places, gradient)
        self.here.slot.left = copies.record(Lane.EVICT)

    def _cut(self, index: Tensor) -> None:
        assert self.far is not None
        self.slots.ends[self._cell()] = ends_of(index, most_units_of(self.far))
        self.counted = None

    # -- through slots ---------------------------------------------------------------------------

    def _start(self) -> None:
        """Fetch the first slabs, where K, V are on host."""
        ends = self._ends()
        if ends is None or not self._on_host():
            return
        starts = [0, *(stop for stop, _ in ends)]
        runs = (slice(start, stop) for start, (stop, _) in zip(starts, ends, strict=False))
        self.runs = zip(runs, [count for _, count in ends], strict=True)
        self.prefix.storage.copies.wait(Lane.FETCH, self.chosen, Hazard.NOT_WRITTEN)
        for _ in names.PAGES:
            self._fetch_next()

    def _fetch_next(self) -> None:
        found = next(self.runs, None)
        if found is None:
            return
        assert self.choice is not None
        run, count = found
        copies, slot, choice = self.prefix.storage.copies, self.slots.take(), self.choice[:, :, run]
        with copies.on(Lane.FETCH):
            units = units_of(choice, count)
            numbers = {
                "numbers": torch.stack([units.rows, units.heads, units.pages]),
                "index": units.index,
                "places": self._places(units),
            }
        parts = self._parts(slot, count, choice.numel())
        for name, values in numbers.items():
            copies.note(parts[name], values.flatten())
        for name, rows in zip("kv", self._rows(self.prefix.keys_in), strict=True):
            copies.gather(parts[name], rows, parts["places"])
        slot.arrived = copies.record(Lane.FETCH)
        self.coming.append(self._on_its_way(slot, run, choice.shape, parts))

    def _on_its_way(
        self, slot: _Slot, run: slice, shape: torch.Size, parts: dict[str, Tensor]
    ) -> _Coming:
        rows, heads, pages = parts["numbers"].view(3, -1)
        units = Units(rows, heads, pages, parts["index"].view(shape))
        keys, values, *sums = (
            parts[name].unflatten(0, (len(units), self.page)) for name in ROWS if name in parts
        )
        of_backward = (sums[0], sums[1]) if sums else None
        return _Coming(slot, Slab(run, units, keys, values), parts["places"], of_backward)

    def _parts(self, slot: _Slot, units: int, entries: int) -> dict[str, Tensor]:
        """What the slot holds of a slab: numbers flat, of keys and values rows."""
        assert self.far is not None
        storage, far = self.prefix.storage, self.far
        backward = self.prefix.gradients_in is not None
        sizes = slot_parts(far, units, entries, backward=backward)
        starts = accumulate(map(aligned, sizes.values()), initial=0)
        whole, found = storage.cell(slot.name, self.chunk), {}
        # What is too short would be made longer by what writes to it, into what lies behind.
        assert sum(map(aligned, sizes.values())) <= len(whole), f"{slot.name}: {units} units"
        for (name, size), start in zip(sizes.items(), starts, strict=False):
            part = whole[start : start + size]
            if name not in ROWS:
                found[name] = part.view(torch.int64)
                continue
            dtype = storage.accumulate_dtype if name.startswith("d") else storage.dtype
            dim = far.head_dim if name.endswith("k") else far.value_dim
            found[name] = part.view(dtype).view(-1, dim)
        return found

    # -- in line ---------------------------------------------------------------------------------

    def _in_line(self) -> Iterator[Slab]:
        assert self.choice is not None
        if self._ends() is None:
            self._cut(index_of(self.choice).cpu())
        for run, units in slabs_of(self.choice, self._ends() or ()):
            yield Slab(run, units, *self._gathered(units))

    def _gathered(self, units: Units) -> tuple[Tensor, Tensor]:
        """K [U, P, D] and V [U, P, Dv], gathered on the device."""
        places = self._places(units)
        k, v = (
            rows.index_select(0, places).unflatten(0, (len(units), self.page))
            for rows in self._rows(self.prefix.keys_in)
        )
        return k, v

    def _rows(self, name: str) -> tuple[Tensor, Tensor]:
        """K [T * B * Hk, D] and V of one of the layer's buffers, where they lie."""
        home = self.prefix.everything(name)
        return home["k"].flatten(0, 2), home["v"].flatten(0, 2)

    def _places(self, units: Units) -> Tensor:
        assert self.far is not None
        return units.places(self.page, self.far.batch, self.far.kv_heads)

    def _ends(self) -> Ends | None:
        return self.slots.ends.get(self._cell())

    def _cell(self) -> tuple[int, int]:
        return self.prefix.layer, self.chunk

    def _on_host(self) -> bool:
        return self.prefix.on_host(self.prefix.keys_in)
