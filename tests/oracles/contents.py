"""What is where while the checker replays a program: tags in the place of tensors.

A tag says which tensor it stands for: K, V of (layer, chunk), the input of a layer or its
gradient, O and LSE, dK and dV with the chunks that were added to them, a cell's activations.
"""

from dataclasses import dataclass, field
from math import prod

from farspan.program import buffer_names as names
from farspan.program.program import Buffer, Program
from farspan.program.residency import RESIDENCY, Kind
from farspan.spec import LayerSpec, Tier

SLOT = -1  # the layer of a slot, and the place of what it holds
LINE = 64  # bytes; every tensor of a buffer begins on a multiple of it


class ProgramError(ValueError):
    """A program that must not run. `index` is the instruction, or -1 for the program as a whole."""

    def __init__(self, index: int, message: str) -> None:
        where = "program" if index < 0 else f"instruction {index}"
        super().__init__(f"{where}: {message}")
        self.index = index


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """One write. Two writes of the same tensor are two contents."""

    what: str
    layer: int
    chunk: int
    added: frozenset[int] = frozenset()  # dkv: chunks whose backward has been added

    def __str__(self) -> str:
        return f"{self.what}[{self.layer}][{self.chunk}]"


@dataclass(frozen=True, slots=True)
class Pin:
    """A view: the content that stood at a place when it was taken."""

    buffer: str
    place: int
    content: Content


def _padded(row_bytes: int, tokens: int) -> int:
    return (row_bytes * tokens + LINE - 1) // LINE * LINE


@dataclass(slots=True)
class Contents:
    """Invariant: `content[name]` exists from the buffer's Allocate to its Free. Every method
    raises ProgramError, with the index at hand, where a program asks for what is not there."""

    program: Program
    index: int = -1
    content: dict[str, dict[int, Content]] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)  # allocated, ever
    used: set[str] = field(default_factory=set)

    def need(self, true: bool, message: str) -> None:
        if not true:
            raise ProgramError(self.index, message)

    def allocate(self, name: str) -> None:
        self.need(name in self.program.buffers, f"{name} is not a buffer")
        self.need(name not in self.seen, f"{name} is allocated twice")
        buffer = self.program.buffers[name]
        self.need(buffer.name == name, f"{name} is called {buffer.name}")
        if buffer.layer != SLOT:
            self._layer_of(buffer)
        self.need(buffer.born == self.index, f"{name} is born elsewhere")
        self.need(buffer.bytes >= self._payload(buffer), f"{name} is too small for its tensors")
        self._check_address(buffer)
        self.seen.add(name)
        self.content[name] = {}

    def free(self, name: str) -> None:
        self.need(self.alive(name).dies == self.index, f"{name} dies elsewhere")
        del self.content[name]

    def alive(self, name: str) -> Buffer:
        self.need(name in self.content, f"{name} is not allocated")
        return self.program.buffers[name]

    def read(self, name: str, what: str, layer: int, chunk: int) -> Pin:
        """The content of a place, which must be this tensor."""
        place = self._place(name, chunk)
        content = self.content[name].get(place)
        found = content is not None and (content.what, content.layer, content.chunk)
        self.need(
            found == (what, layer, chunk),
            f"{name} holds {content}, not {what}[{layer}][{chunk}] as expected",
        )
        assert content is not None
        return Pin(name, place, content)

    def write(self, name: str, content: Content) -> Pin:
        """Put a tensor in its place."""
        place = self._place(name, content.chunk)
        buffer = self.program.buffers[name]
        fits = content.what in RESIDENCY[buffer.kind].contents
        fits = fits and (buffer.layer == SLOT or self._layer_of(buffer) == content.layer)
        self.need(fits, f"{name} is not for {content}")
        self.content[name][place] = content
        return Pin(name, place, content)

    def standing(self, pins: tuple[Pin, ...], reader: str) -> None:
        """The writes that these views saw are still there."""
        for pin in pins:
            stands = self.content.get(pin.buffer, {}).get(pin.place) is pin.content
            self.need(stands, f"{reader} refers to {pin.content} in {pin.buffer}: overwritten")

    def clear(self, name: str) -> None:
        """Zero an accumulator, or a slot that zeros are then copied from."""
        buffer = self.alive(name)
        self.need(buffer.kind is Kind.DKV, f"{name} is no accumulator")
        if buffer.layer == SLOT:
            self.content[name][SLOT] = Content("dkv", SLOT, SLOT)
            return
        for chunk in self._chunks_of(buffer):
            self.content[name][chunk] = Content("dkv", buffer.layer, chunk)

    def copy(self, source: str, target: str, chunk: int, tier: Tier) -> None:
        """Copy a chunk from a buffer of `tier` to one of the other."""
        place, _ = self._place(source, chunk), self._place(target, chunk)
        low, high = self.program.buffers[source], self.program.buffers[target]
        self.need(low.tier is tier and high.tier is not tier, f"{source} to {target}: wrong tiers")
        self.need(low.kind is high.kind, f"{source} and {target} hold different things")
        slot, home = (low, high) if low.layer == SLOT else (high, low)
        self.need(home.layer != SLOT, f"{source} and {target} are both slots")
        self.need(slot.cell_bytes >= home.cell_bytes, f"{slot.name} truncates {home.name}")
        content = self.content[source].get(place)
        self.need(
            content is not None and content.chunk in (chunk, SLOT),
            f"{source} holds {content}, not chunk {chunk}",
        )
        assert content is not None
        layer = home.layer if content.chunk == SLOT else content.layer  # zeros are of any
        self.write(target, Content(content.what, layer, chunk, content.added))

    def stream(self, blocks: tuple[str, ...], kind: Kind) -> None:
        """Slots that an instruction streams host blocks through."""
        wanted = min(self.program.schedule.kv_block, self.program.share.keys.total)
        for name in blocks:
            buffer = self.alive(name)
            fits = buffer.kind is kind and buffer.stop - buffer.start >= wanted
            self.need(fits and buffer.tier is Tier.DEVICE, f"{name} cannot take a block")
            self.used.add(name)

    def stream_pages(self, prefix: str, layer: int, chunk: int, *, backward: bool) -> None:
        """Slots that an instruction gathers chosen pages from host in: there is room for those of
        one page of queries at least, and for their gradients."""
        program, sparse = self.program, self.program.schedule.sparse
        if sparse is None or self.alive(prefix).tier is Tier.DEVICE:
            return
        spec, model = program.model.layers[layer], program.model
        row = spec.kv_heads * (spec.head_dim + spec.value_dim) * program.run.batch
        width = model.element_bytes + backward * model.accumulate_bytes()
        wanted = sparse.width(program.chunks[chunk][0]) * sparse.page * row * width
        for name in names.PAGES:
            buffer = self.alive(name)
            fits = buffer.kind is Kind.SLABS and buffer.bytes >= wanted
            self.need(fits and buffer.tier is Tier.DEVICE, f"{name} cannot take chosen pages")
            self.used.add(name)

    def finish(self) -> None:
        """All is freed, and nothing was there in vain."""
        self.need(not self.content, f"never freed: {sorted(self.content)}")
        unborn = self.program.buffers.keys() - self.seen
        self.need(not unborn, f"never allocated: {sorted(unborn)}")
        self.need(self.used == self.seen, f"never used: {sorted(self.seen - self.used)}")

    def _check_address(self, buffer: Buffer) -> None:
        on_line = buffer.address >= 0 and buffer.address % LINE == 0
        self.need(on_line, f"{buffer.name} is not aligned")
        top = buffer.address + buffer.bytes
        self.need(top <= self.program.arena_bytes[buffer.tier], f"{buffer.name} leaves its arena")
        for name in self.content:
            other = self.program.buffers[name]
            if other.tier is buffer.tier:
                low = max(other.address, buffer.address)
                apart = low >= min(other.address + other.bytes, top)
                self.need(apart, f"{buffer.name} overlaps {name}")

    def _payload(self, buffer: Buffer) -> int:
        """Bytes that the tensors of a buffer take; of the greediest layer, for a slot."""
        if RESIDENCY[buffer.kind].in_cells:
            if buffer.layer == SLOT:
                return _padded(buffer.cell_bytes, 1)
            ranges = [self.program.rows(buffer.kind, c) for c in self._chunks_of(buffer)]
            lengths = [stop - start for start, stop in ranges]
            spared = [buffer.cell_row * (lengths[0] - length) for length in lengths]
            return sum(_padded(buffer.cell_bytes - less, 1) for less in spared)
        layers = self.program.model.layers
        if buffer.layer != SLOT and buffer.kind is not Kind.X:
            layers = (layers[buffer.layer],)
        tokens = buffer.stop - buffer.start
        return max(self._tensors_bytes(buffer.kind, layer, tokens) for layer in layers)

    def _tensors_bytes(self, kind: Kind, layer: LayerSpec, tokens: int) -> int:
        model, batch = self.program.model, self.program.run.batch
        widths = model.element_bytes, model.accumulate_bytes()
        found = RESIDENCY[kind].tensors(model, layer, batch)
        return sum(_padded(prod(one.shape) * widths[one.wide], tokens) for one in found)

    def _chunks_of(self, buffer: Buffer) -> list[int]:
        return [chunk for chunk in range(len(self.program.chunks)) if self._holds(buffer, chunk)]

    def _place(self, name: str, chunk: int) -> int:
        """Where in an allocated buffer a chunk is; using it is a use of the buffer."""
        buffer = self.alive(name)
        self.need(0 <= chunk < len(self.program.chunks), f"there is no chunk {chunk}")
        self.used.add(name)
        start, stop = self.program.rows(buffer.kind, chunk)
        if buffer.layer == SLOT:
            in_cells = RESIDENCY[buffer.kind].in_cells
            fits = in_cells or stop - start <= buffer.stop - buffer.start
        else:
            fits = self._holds(buffer, chunk)
        self.need(fits, f"{name} has no place for chunk {chunk}")
        return SLOT if buffer.layer == SLOT else chunk

    def _holds(self, buffer: Buffer, chunk: int) -> bool:
        start, stop = self.program.rows(buffer.kind, chunk)
        return buffer.start <= start and stop <= buffer.stop

    def _layer_of(self, buffer: Buffer) -> int:
        """The layer whose tensor a buffer holds; boundary b is the input of group b."""
        layers = len(self.program.model.layers)
        bounds = [first for first, _ in self.program.groups] + [layers]
        places = bounds if buffer.kind is Kind.X else range(layers)
        self.need(0 <= buffer.layer < len(places), f"{buffer.name} is of no layer")
        return places[buffer.layer]
