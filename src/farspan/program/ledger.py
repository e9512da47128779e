"""A program under construction: its instructions in order, and the buffers that these name."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, get_args

from farspan.program import buffer_names as names
from farspan.program.layout import Range, Share, own_groups, streams
from farspan.program.placement import PlacementRequest, place
from farspan.program.program import (
    Allocate,
    Backward,
    Buffer,
    Clear,
    Evict,
    Forward,
    Free,
    Gather,
    Instruction,
    Program,
    aligned,
    cell_sizes,
    group_bytes,
    regions,
    regions_bytes,
    rows_of,
)
from farspan.program.residency import RESIDENCY, Kind
from farspan.spec import DEVICE, HOST, Cut, ModelSpec, RunSpec, Schedule, Tier


@dataclass(slots=True)
class Ledger:
    """Instructions of a program under construction, with the lifetimes of its buffers.

    Invariant: a buffer is open between its Allocate and its Free, and is allocated once. `written`
    maps each open buffer to the chunks whose content is in it, so that passes look the content up
    instead of repeating the rules that put it there.
    """

    model: ModelSpec
    run: RunSpec
    schedule: Schedule
    chunks: tuple[Range, ...]
    groups: tuple[Range, ...]
    share: Share
    walked: Sequence[int]  # chunks that passes go through: all, or a few in an outline
    cut_after: Cut = Cut.NONE  # what is complete before the backward begins
    cut: int = 0  # index of the backward's first instruction
    instructions: list[Instruction] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    born: dict[str, int] = field(default_factory=dict)  # index of a buffer's Allocate
    dies: dict[str, int] = field(default_factory=dict)  # and of its Free
    written: dict[str, set[int]] = field(default_factory=dict)
    covered: dict[str, range] = field(default_factory=dict)  # chunks that a buffer has room for
    turns: dict[tuple[str, ...], int] = field(default_factory=dict)  # of rings of slots
    fetched: dict[int, int] = field(default_factory=dict)  # slot of weights: the group in it
    sizes: dict[tuple[Kind, int, int], int] = field(default_factory=dict)  # sizes computed so far
    alike: list[int] = field(init=False)  # by layer, the first layer that is equal
    keeping: frozenset[int] = frozenset()  # groups that may keep activations
    attention_slots: tuple[str, ...] = field(init=False)
    choosing: range = field(init=False)  # chunks that choose pages, in layers without a window

    def __post_init__(self) -> None:
        self.alike = list(map(self.model.layers.index, self.model.layers))
        widest = max(stop - first for first, stop in self.groups)
        self.attention_slots = names.attention_slots(widest)
        sparse = self.schedule.sparse
        self.choosing = range(0) if sparse is None else sparse.choosing(self.chunks)

    def emit(self, *instructions: Instruction) -> None:
        self.instructions.extend(instructions)

    def allocate(
        self,
        name: str,
        kind: Kind,
        layer: int,
        chunks: range | None = None,
        tier: Tier | None = None,
    ) -> None:
        """Open a buffer for a layer's tensors; by default of all chunks, on the schedule's tier."""
        tier = RESIDENCY[kind].tier_of(self.schedule) if tier is None else tier
        chunks = range(len(self.chunks)) if chunks is None else chunks
        rows = rows_of(self.share, kind)
        start, stop = rows[chunks[0]][0], rows[chunks[-1]][1]
        self.covered[name] = chunks
        alike = self.alike[min(layer, len(self.alike) - 1)]
        self._open(name, kind, layer, tier, (start, stop), self._size(kind, alike, stop - start))

    def allocate_slot(self, name: str, kind: Kind, tokens: int) -> None:
        """Open a device buffer that any layer may use, with room for `tokens` rows."""
        size = max(self._size(kind, layer, tokens) for layer in set(self.alike))
        self._open(name, kind, -1, DEVICE, (0, tokens), size)

    def _size(self, kind: Kind, layer: int, tokens: int) -> int:
        key = kind, layer, tokens
        if key not in self.sizes:
            found = regions(kind, self.model, self.model.layers[layer], self.run.batch, tokens)
            self.sizes[key] = regions_bytes(found, tokens)
        return self.sizes[key]

    def allocate_cells(
        self,
        name: str,
        kind: Kind,
        layer: int,
        cells: range,
        cell_bytes: int,
        cell_row: int = 0,
    ) -> None:
        """Open a buffer of raw bytes for what the layer's cells save for the chunks `cells`. It is
        on the schedule's tier for this kind of tensor. `Buffer` explains `cell_row`."""
        tier = RESIDENCY[kind].tier_of(self.schedule)
        rows = rows_of(self.share, kind)[cells.start : cells.stop]
        start, stop = (rows[0][0], rows[-1][1]) if rows else (0, 0)
        size = sum(map(aligned, cell_sizes(rows, cell_bytes, cell_row)))
        self._open(name, kind, layer, tier, (start, stop), size, cell_bytes, cell_row)

    def _open(
        self,
        name: str,
        kind: Kind,
        layer: int,
        tier: Tier,
        rows: Range,
        size: int,
        cell_bytes: int = 0,
        cell_row: int = 0,
    ) -> None:
        assert name not in self.buffers, name
        self.buffers[name] = Buffer(
            name, kind, layer, tier, *rows, cell_bytes, size, 0, 0, 0, cell_row
        )
        self.born[name] = len(self.instructions)
        self.written[name] = set()
        self.instructions.append(Allocate(name))

    def allocate_cell_slots(self, kind: Kind, cell_bytes: int) -> None:
        """Open device buffers that any layer may use, each with room for what one cell saves."""
        for ring in RESIDENCY[kind].slots:
            for name in ring:
                size = aligned(cell_bytes)
                stop = rows_of(self.share, kind)[0][1]
                self._open(name, kind, -1, DEVICE, (0, stop), size, cell_bytes)

    def allocate_group_slots(self, kind: Kind) -> None:
        """Open three device buffers for weights in main memory, or their gradients: for even groups
        of layers, for odd groups, and for the modules outside the layers."""
        ring, (outer,) = RESIDENCY[kind].slots
        gradients = kind is Kind.WEIGHT_GRADIENTS
        for parity, name in enumerate(ring):
            own = own_groups(self.share.rank, len(self.groups))
            groups = [self.groups[index] for index in own if index % 2 == parity]
            sizes = [group_bytes(self.model, group, gradients) for group in groups]
            if sizes:
                self._open_bytes(name, kind, max(sizes))
        self._open_bytes(outer, kind, group_bytes(self.model, None, gradients))

    def _open_bytes(self, name: str, kind: Kind, size: int) -> None:
        size = aligned(size)
        self._open(name, kind, -1, DEVICE, (0, 0), size, size)

    def clear(self, name: str) -> None:
        """Zero a buffer of dK, dV. A host buffer is zeroed by copies from a zeroed device buffer,
        not by the CPU: the copy stream then orders them with all other copies of these bytes."""
        if self.buffers[name].tier is DEVICE:
            self.emit(Clear(name))
            return
        zeros = self.turn(names.DKV_OWN)
        self.emit(Clear(zeros), *(Evict(zeros, name, c) for c in self.walked))

    def turn(self, ring: tuple[str, ...]) -> str:
        turn = self.turns[ring] = self.turns.get(ring, -1) + 1
        return ring[turn % len(ring)]

    def few(self, ring: tuple[str, ...]) -> tuple[str, ...]:
        """Return the first buffers of a ring (used in turn): no more than there are chunks."""
        return ring[: len(self.chunks)]

    def free(self, name: str) -> None:
        if name not in self.written:
            return
        self.dies[name] = len(self.instructions)
        self.instructions.append(Free(name))
        del self.written[name]

    def is_open(self, name: str) -> bool:
        return name in self.written

    def _drop_unused(self) -> None:
        """Remove buffers that no instruction uses, since a short program may need fewer."""
        used = self._used()
        if used >= self.buffers.keys():
            return
        dropped = [
            index
            for index, i in enumerate(self.instructions)
            if isinstance(i, _OPENING) and i.buffer not in used
        ]
        for index in reversed(dropped):
            del self.instructions[index]
        self.buffers = {name: held for name, held in self.buffers.items() if name in used}
        self.cut -= bisect_left(dropped, self.cut)
        for ends in self.born, self.dies:
            ends.update({name: end - bisect_left(dropped, end) for name, end in ends.items()})

    def _used(self) -> set[str | None]:
        """Return the names of buffers in instructions other than Allocate, Free and Clear."""
        kinds: dict[type[Instruction], list[Any]] = {}
        for instruction in self.instructions:
            kinds.setdefault(type(instruction), []).append(instruction)
        used: set[str | None] = set()  # None comes from empty fields
        if Gather in kinds and streams(self.schedule, self.share.rank.layout):
            for held in Kind.WEIGHTS, Kind.WEIGHT_GRADIENTS:
                used.update(*RESIDENCY[held].slots)
        for kind, found in kinds.items():
            for text in _TEXTS.get(kind, ()):
                used.update(map(attrgetter(text), found))
        cells = [i for of in (Forward, Backward) for i in kinds.get(of, ())]
        if self.schedule.kv is HOST and any(cell.chunk for cell in cells):
            used.update(names.KV_BLOCKS)
            if Backward in kinds:
                used.update(names.DKV_BLOCKS)
            if self.schedule.sparse and any(cell.choice is not None for cell in cells):
                used.update(names.PAGES)
        return used

    def finish(self) -> Program:
        """Free all open buffers, give each buffer an address, and return the program."""
        for name in list(self.buffers):
            self.free(name)
        self._drop_unused()
        arena_bytes = {}
        for tier in Tier:
            held = [b for b in self.buffers.values() if b.tier is tier]
            lives = [(self.born[b.name], self.dies[b.name]) for b in held]
            found = place(
                [PlacementRequest(b.bytes, *ends) for b, ends in zip(held, lives, strict=True)]
            )
            for b, (born, dies), address in zip(held, lives, found.addresses, strict=True):
                found_for = (b.name, b.kind, b.layer, tier, b.start, b.stop, b.cell_bytes, b.bytes)
                self.buffers[b.name] = Buffer(*found_for, born, dies, address, b.cell_row)
            arena_bytes[tier] = found.height
        return Program(
            self.model,
            self.run,
            self.schedule,
            self.chunks,
            self.groups,
            tuple(self.instructions),
            dict(self.buffers),
            arena_bytes,
            self.share,
            self.cut,
            self.cut_after,
        )


_OPENING = (Allocate, Free, Clear)
# Fields of the other kinds of instructions that may name a buffer.
_TEXTS = {
    kind: tuple(field.name for field in fields(kind) if "str" in str(field.type))
    for kind in get_args(Instruction)
    if kind not in _OPENING
}
