"""The ledger a program is written into: instructions in order, and the buffers they name."""

from dataclasses import dataclass, field, replace

from farspan.memory.place import Request, place
from farspan.plan.program import (
    Allocate,
    Buffer,
    Clear,
    Free,
    Instruction,
    Kind,
    Program,
)
from farspan.plan.sizes import aligned, regions, regions_bytes
from farspan.spec import ModelSpec, RunSpec, Schedule, Tier


@dataclass(slots=True)
class Ledger:
    """Collects instructions and the lifetimes of buffers.

    Invariant: a buffer is open between its Allocate and its Free, and is allocated once.
    `written` holds (buffer, chunk) pairs whose content stands, so that passes can ask what is
    there instead of repeating the rules by which it came to be there.
    """

    model: ModelSpec
    run: RunSpec
    schedule: Schedule
    chunks: tuple[tuple[int, int], ...]
    groups: tuple[tuple[int, int], ...]
    instructions: list[Instruction] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    written: set[tuple[str, int]] = field(default_factory=set)

    def emit(self, *instructions: Instruction) -> None:
        self.instructions.extend(instructions)

    def allocate(
        self, name: str, kind: Kind, tier: Tier, layer: int, span: tuple[int, int]
    ) -> None:
        """Open a buffer of the layer's tensors for the tokens of `span`."""
        start, stop = span
        size = self._size(kind, min(layer, len(self.model.layers) - 1), stop - start)
        self._open(Buffer(name, kind, layer, tier, start, stop, 0, size, 0, -1, 0))

    def allocate_slot(self, name: str, kind: Kind, tokens: int) -> None:
        """Open a device buffer that can hold `tokens` tokens of any layer."""
        size = max(self._size(kind, layer, tokens) for layer in range(len(self.model.layers)))
        self._open(Buffer(name, kind, -1, Tier.DEVICE, 0, tokens, 0, size, 0, -1, 0))

    def _size(self, kind: Kind, layer: int, tokens: int) -> int:
        found = regions(kind, self.model, self.model.layers[layer], self.run.batch, tokens)
        return regions_bytes(found, tokens)

    def allocate_cells(
        self, name: str, tier: Tier, layer: int, cells: range, cell_bytes: int
    ) -> None:
        """Open a buffer of raw cells of saved activations, for the chunks of `cells`."""
        start = self.chunks[cells[0]][0] if len(cells) else 0
        stop = self.chunks[cells[-1]][1] if len(cells) else 0
        size = aligned(cell_bytes) * len(cells)
        # On the device a kept graph simply keeps its tensors: they are torch's, not the arena's.
        address = -1 if tier is Tier.DEVICE and layer >= 0 else 0
        self._open(
            Buffer(
                name, Kind.ACTIVATIONS, layer, tier, start, stop, cell_bytes, size, 0, -1, address
            )
        )

    def _open(self, buffer: Buffer) -> None:
        assert buffer.name not in self.buffers, buffer.name
        self.buffers[buffer.name] = replace(buffer, born=len(self.instructions))
        self.instructions.append(Allocate(buffer.name))

    def clear(self, name: str) -> None:
        self.instructions.append(Clear(name))

    def free(self, name: str) -> None:
        """Close the buffer if it is open."""
        buffer = self.buffers.get(name)
        if buffer is None or buffer.dies >= 0:
            return
        self.buffers[name] = replace(buffer, dies=len(self.instructions))
        self.instructions.append(Free(name))
        self.written = {(held, chunk) for held, chunk in self.written if held != name}

    def is_open(self, name: str) -> bool:
        buffer = self.buffers.get(name)
        return buffer is not None and buffer.dies < 0

    def finish(self) -> Program:
        """Close what is open, give every buffer its address, and freeze."""
        for name in list(self.buffers):
            self.free(name)
        arena_bytes = {}
        for tier in Tier:
            held = [b for b in self.buffers.values() if b.tier is tier and b.address >= 0]
            found = place([Request(b.bytes, b.born, b.dies) for b in held])
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
        )
