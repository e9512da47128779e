"""The ledger a program is written into: instructions in order, and the buffers they name."""

from bisect import bisect_left
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import get_args

from farspan.memory.placement import PlacementRequest, place
from farspan.program import buffer_names as names
from farspan.program.layout import Range, Share
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
from farspan.spec import ModelSpec, RunSpec, Schedule, Tier


@dataclass(slots=True)
class Ledger:
    """Collects instructions and the lifetimes of buffers.

    Invariant: a buffer is open between its Allocate and its Free, and is allocated once.
    `written` has the buffers that are open, each with the chunks whose content stands in it, so
    that passes can ask what is there instead of repeating the rules by which it came to be there.
    """

    model: ModelSpec
    run: RunSpec
    schedule: Schedule
    chunks: tuple[Range, ...]
    groups: tuple[Range, ...]
    share: Share
    instructions: list[Instruction] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    written: dict[str, set[int]] = field(default_factory=dict)
    covered: dict[str, range] = field(default_factory=dict)  # chunks a buffer has room for
    turns: dict[tuple[str, ...], int] = field(default_factory=dict)  # of rings of slots
    fetched: dict[int, int] = field(default_factory=dict)  # slot of weights: the group in it

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
        """Open a buffer of the layer's tensors for these chunks, or all, where the schedule has
        its kind or on this tier."""
        tier = RESIDENCY[kind].tier_of(self.schedule) if tier is None else tier
        chunks = range(len(self.chunks)) if chunks is None else chunks
        rows = rows_of(self.share, kind)
        start, stop = rows[chunks[0]][0], rows[chunks[-1]][1]
        self.covered[name] = chunks
        size = self._size(kind, min(layer, len(self.model.layers) - 1), stop - start)
        self._open(Buffer(name, kind, layer, tier, start, stop, 0, size, 0, -1, 0))

    def allocate_slot(self, name: str, kind: Kind, tokens: int) -> None:
        """Open a device buffer that can hold `tokens` rows of any layer."""
        size = max(self._size(kind, layer, tokens) for layer in range(len(self.model.layers)))
        self._open(Buffer(name, kind, -1, Tier.DEVICE, 0, tokens, 0, size, 0, -1, 0))

    def _size(self, kind: Kind, layer: int, tokens: int) -> int:
        found = regions(kind, self.model, self.model.layers[layer], self.run.batch, tokens)
        return regions_bytes(found, tokens)

    def allocate_cells(
        self,
        name: str,
        kind: Kind,
        layer: int,
        cells: range,
        cell_bytes: int,
        cell_row: int = 0,
    ) -> None:
        """Open a buffer of raw cells, one for each chunk of `cells`, where the schedule has its
        kind; for `cell_row` see Buffer."""
        tier = RESIDENCY[kind].tier_of(self.schedule)
        rows = rows_of(self.share, kind)[cells.start : cells.stop]
        start, stop = (rows[0][0], rows[-1][1]) if rows else (0, 0)
        size = sum(map(aligned, cell_sizes(rows, cell_bytes, cell_row)))
        self._open(
            Buffer(name, kind, layer, tier, start, stop, cell_bytes, size, 0, -1, 0, cell_row)
        )

    def _open(self, buffer: Buffer) -> None:
        assert buffer.name not in self.buffers, buffer.name
        self.buffers[buffer.name] = replace(buffer, born=len(self.instructions))
        self.written[buffer.name] = set()
        self.instructions.append(Allocate(buffer.name))

    def allocate_cell_slots(self, kind: Kind, cell_bytes: int) -> None:
        """Open device buffers that can hold a cell of any layer."""
        for ring in RESIDENCY[kind].slots:
            for name in ring:
                size = aligned(cell_bytes)
                stop = rows_of(self.share, kind)[0][1]
                tier = Tier.DEVICE
                self._open(Buffer(name, kind, -1, tier, 0, stop, cell_bytes, size, 0, -1, 0))

    def allocate_group_slots(self, kind: Kind) -> None:
        """Open device buffers for the weights, or their gradients, of two groups of layers, those
        of even and those of odd numbers, and of what is outside the layers."""
        ring, (outer,) = RESIDENCY[kind].slots
        gradients = kind is Kind.WEIGHT_GRADIENTS
        for parity, name in enumerate(ring[: len(self.groups)]):
            groups = self.groups[parity::2]
            self._open_bytes(name, kind, max(group_bytes(self.model, g, gradients) for g in groups))
        self._open_bytes(outer, kind, group_bytes(self.model, None, gradients))

    def _open_bytes(self, name: str, kind: Kind, size: int) -> None:
        size = aligned(size)
        self._open(Buffer(name, kind, -1, Tier.DEVICE, 0, 0, size, size, 0, -1, 0))

    def clear(self, name: str) -> None:
        """Zero dK, dV. What is on host gets its zeros from a slot, so that the link's lane orders
        them with all other copies of these bytes."""
        if self.buffers[name].tier is Tier.DEVICE:
            self.emit(Clear(name))
            return
        zeros = self.turn(names.DKV_OWN)
        self.emit(Clear(zeros), *(Evict(zeros, name, c) for c in range(len(self.chunks))))

    def turn(self, ring: tuple[str, ...]) -> str:
        """The slot of a ring whose turn it is."""
        turn = self.turns[ring] = self.turns.get(ring, -1) + 1
        return ring[turn % len(ring)]

    def few(self, ring: tuple[str, ...]) -> tuple[str, ...]:
        """The slots of a ring that a single chunk, or several, need."""
        return ring[: len(self.chunks)]

    def attention_slots(self) -> tuple[str, ...]:
        return names.attention_slots(max(stop - first for first, stop in self.groups))

    def free(self, name: str) -> None:
        """Close the buffer if it is open."""
        if name not in self.written:
            return
        self.buffers[name] = replace(self.buffers[name], dies=len(self.instructions))
        self.instructions.append(Free(name))
        del self.written[name]

    def is_open(self, name: str) -> bool:
        return name in self.written

    def _drop_unused(self) -> None:
        """Slots and buffers are opened by rule; a short or shallow program may need fewer."""
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
        self.buffers = {
            name: replace(
                buffer,
                born=buffer.born - bisect_left(dropped, buffer.born),
                dies=buffer.dies - bisect_left(dropped, buffer.dies),
            )
            for name, buffer in self.buffers.items()
            if name in used
        }

    def _used(self) -> set[str | None]:
        """Buffers that instructions read or write; opening and clearing one is no use of it."""
        kinds: dict[type[Instruction], list[Instruction]] = {}
        for instruction in self.instructions:
            kinds.setdefault(type(instruction), []).append(instruction)
        used: set[str | None] = set()  # None from fields that are empty
        if Gather in kinds and self.schedule.weights is Tier.HOST:
            for held in Kind.WEIGHTS, Kind.WEIGHT_GRADIENTS:
                used.update(*RESIDENCY[held].slots)
        for kind, found in kinds.items():
            for text in _TEXTS.get(kind, ()):
                used.update(map(attrgetter(text), found))
        if self.schedule.kv is Tier.HOST and any(map(_has_prefix, self.instructions)):
            used.update(names.KV_BLOCKS)
            if Backward in kinds:
                used.update(names.DKV_BLOCKS)
            if any(map(_has_choice, self.instructions)):
                used.update(names.PAGES)
        return used

    def finish(self) -> Program:
        """Close what is open, give every buffer its address, and freeze."""
        for name in list(self.buffers):
            self.free(name)
        self._drop_unused()
        arena_bytes = {}
        for tier in Tier:
            held = [b for b in self.buffers.values() if b.tier is tier]
            found = place([PlacementRequest(b.bytes, b.born, b.dies) for b in held])
            for buffer, address in zip(held, found.addresses, strict=True):
                self.buffers[buffer.name] = replace(buffer, address=address)
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
        )


def _has_prefix(instruction: Instruction) -> bool:
    """Does it read the K, V of earlier chunks?"""
    return isinstance(instruction, Forward | Backward) and instruction.chunk > 0


def _has_choice(instruction: Instruction) -> bool:
    """Does it attend to chosen pages?"""
    return isinstance(instruction, Forward | Backward) and instruction.choice is not None


_OPENING = (Allocate, Free, Clear)
# Fields of each other kind of instruction that may name a buffer.
_TEXTS = {
    kind: tuple(field.name for field in fields(kind) if "str" in str(field.type))
    for kind in get_args(Instruction)
    if kind not in _OPENING
}
