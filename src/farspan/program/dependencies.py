"""Find the buffers that each instruction of a program reads and writes, and what it must wait for.
Also find layers' outputs that nothing reads, and cells whose token-wise modules run on tiles. The
work of an instruction is spread over three queues, the lanes:

    compute     cells, head, embedding, loads and stores of x, clearing
    fetch       host to device
    evict       device to host

A cell whose prefix is on the host works on all three: while it computes, blocks of K, V and of dK,
dV totals come in through slots, and the totals go back (FPDT 4.2); so do chosen pages. Those slots
are left out here: only cells use them, and the code that streams through them keeps their order
(engine.buffers, sparse.engine).

Views are the trap. A register that was loaded from a slot is a view of the slot, and a graph refers
to such views: an instruction that takes the register, or runs the graph backward, reads the slot.

Waits. Lanes keep their own order, so a lane has to wait only for others: for each instruction, the
latest earlier one of every other lane that it must follow. These are the hazards, each of which a
test provokes (tests/engine/test_overlap.py):

    hazard          what goes wrong without the wait
    NOT_ARRIVED     a cell reads a slot before its fetch has arrived
    STILL_READ      a fetch writes into a slot whose content is still read
    NOT_WRITTEN     an evict copies data that are not yet computed
    STILL_LEAVING   a cell writes into a slot before its evict has left
    NOT_HOME        a fetch takes host bytes before their evict has arrived
    STILL_FETCHED   an evict writes host bytes that are still fetched
    REUSED          a buffer is used while a copy still needs the buffer that had its addresses
    CLEARED         a buffer is cleared while copies of its bytes are under way

Waits that others imply are left out.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple

from farspan.program import buffer_names as names
from farspan.program.program import (
    MODE_COMPUTE,
    MODE_GIVEN,
    MODE_HELD,
    MODE_NONE,
    Allocate,
    Backward,
    Buffer,
    Clear,
    Close,
    Embed,
    EmbedBackward,
    Evict,
    Fetch,
    Forward,
    Free,
    Gather,
    Head,
    Instruction,
    Load,
    LoadGradient,
    Program,
    Receive,
    Reduce,
    Send,
    Store,
    StoreGradient,
)
from farspan.spec import HOST

SLOT = -1  # the one place of a slot, for any chunk
WHOLE = -2  # all chunks of a buffer, or a prefix, since no later chunk is on its way then


class Lane(IntEnum):
    """Queue that runs in parallel with the other lanes, and its instructions in order of issue."""

    COMPUTE = 0
    FETCH = 1
    EVICT = 2


COMPUTE, FETCH, EVICT = Lane  # fast in loops, as spec.HOST


Place = tuple[str, int]  # a buffer, and a chunk, SLOT or WHOLE
Access = tuple[Lane, str, int, bool]  # the lane, buffer and place, and whether it is written


@dataclass(slots=True)
class _RegisterWalk:
    """Pass over a program that tracks the buffers of which each register (hidden[i]) is a view."""

    program: Program
    hidden: dict[int, tuple[Place, ...]] = field(default_factory=dict)
    gradient: dict[int, tuple[Place, ...]] = field(default_factory=dict)
    held: dict[int, tuple[Place, ...]] = field(default_factory=dict)
    graphs: dict[tuple[int, int], tuple[Place, ...]] = field(default_factory=dict)
    streams: bool = field(init=False)  # weights come from main memory, their gradients go there
    slots: frozenset[str] = field(init=False)
    on_host: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        buffers = self.program.buffers.values()
        self.streams = self.program.streams()
        self.slots = frozenset(buffer.name for buffer in buffers if buffer.layer < 0)
        self.on_host = frozenset(buffer.name for buffer in buffers if buffer.tier is HOST)

    def with_weights(self, instruction: Instruction) -> list[Access]:
        return self.accesses(instruction) + self._weights(instruction)

    def _weights(self, instruction: Instruction) -> list[Access]:
        """Return an instruction's reads and writes of streamed weights and their gradients."""
        weights, gradients = names.WEIGHTS, names.WEIGHT_GRADIENTS
        outer, outer_gradients = names.WEIGHTS_OUTER, names.WEIGHT_GRADIENTS_OUTER
        match instruction:
            case Gather(group, with_outer, comes):
                ring, other = (gradients, outer_gradients) if comes else (weights, outer)
                slots = [ring[group % 2], *[other] * with_outer]
                return [(FETCH, name, SLOT, True) for name in slots]
            case Reduce(group) | Close(group):
                adds, with_outer = isinstance(instruction, Reduce), self.program.closes_outer(group)
                slots = [gradients[group % 2], *[outer_gradients] * with_outer]
                found = [(COMPUTE if adds else EVICT, name, SLOT, adds) for name in slots]
                # The device computes their norms before they leave.
                return found if adds else found + _reads(*((name, SLOT) for name in slots))
            case Forward(layer) | Backward(layer):
                place = self._group(layer) % 2
                found = _reads((weights[place], SLOT))
                adds = isinstance(instruction, Backward)
                return found + _writes((gradients[place], SLOT)) if adds else found
            case Embed():
                return _reads((outer, SLOT))
            case Head(_, adds):
                return _reads((outer, SLOT)) + _writes(*[(outer_gradients, SLOT)] * adds)
            case EmbedBackward():
                return _reads((outer, SLOT)) + _writes((outer_gradients, SLOT))
        return []

    def _group(self, layer: int) -> int:
        return next(i for i, (_, stop) in enumerate(self.program.groups) if layer < stop)

    def accesses(self, instruction: Instruction) -> list[Access]:
        match instruction:
            case Fetch(source, target, chunk):
                return self._copy(FETCH, source, target, chunk)
            case Evict(source, target, chunk):
                return self._copy(EVICT, source, target, chunk)
            case Forward():
                return self._forward(instruction)
            case Backward():
                return self._backward(instruction)
            case Clear(buffer):
                return _writes((buffer, SLOT if buffer in self.slots else WHOLE))
            case Load(layer, chunk, buffer):
                return self._load(self.hidden, layer, self._place(buffer, chunk))
            case LoadGradient(layer, chunk, buffer):
                return self._load(self.gradient, layer, self._place(buffer, chunk))
            case Store(layer, chunk, buffer):
                taken = self.hidden.pop(layer, ())
                return _reads(*taken) + _writes(self._place(buffer, chunk))
            case StoreGradient(layer, chunk, buffer):
                taken = self.gradient.pop(layer, ())
                return _reads(*taken) + _writes(self._place(buffer, chunk))
            case Head():
                return _reads(*self.hidden.pop(len(self.program.model.layers), ()))
            case EmbedBackward():
                return _reads(*self.gradient.pop(0, ()))
            case Receive(layer, _, gradient):
                (self.gradient if gradient else self.hidden)[layer] = ()
            case Send(layer, _, gradient):
                return _reads(*(self.gradient if gradient else self.hidden).pop(layer, ()))
        return []

    def _place(self, name: str, chunk: int) -> Place:
        return name, SLOT if name in self.slots else chunk

    def _copy(self, lane: Lane, source: str, target: str, chunk: int) -> list[Access]:
        slots = self.slots
        return [
            (lane, source, SLOT if source in slots else chunk, False),
            (lane, target, SLOT if target in slots else chunk, True),
        ]

    def _load(self, bank: dict[int, tuple[Place, ...]], layer: int, place: Place) -> list[Access]:
        bank[layer] = (place,)
        return _reads(place)

    def _forward(self, i: Forward) -> list[Access]:
        taken = self.hidden.get(i.layer, ()) if i.hold else self.hidden.pop(i.layer, ())
        found = _reads(*taken)
        if i.write_kv is not None:
            found += _writes(self._place(i.write_kv, i.chunk))
        found += self._pages(i)
        reads = self.program.model.layers[i.layer].state or i.mode is MODE_COMPUTE
        if reads and i.chunk:
            found.append((self._reader(i.prefix), i.prefix, WHOLE, False))
        if i.mode is MODE_NONE:
            return found
        output = self.held.pop(i.layer, ()) if i.mode is MODE_HELD else ()
        if i.attention is not None:
            output = (self._place(i.attention, i.chunk),)
            found += _reads(*output) if i.mode is MODE_GIVEN else _writes(*output)
        if i.activations is not None:
            found += _writes(self._place(i.activations, i.chunk))
        if i.graph:
            # A kept graph refers to no place: its Backward names its buffers again.
            self.graphs[i.layer, i.chunk] = () if i.kept else (*taken, *output)
        if i.hold:
            self.held[i.layer] = output
        if not i.drops:
            self.hidden[i.layer + 1] = ()
        return found

    def _pages(self, i: Forward) -> list[Access]:
        """Return a forward cell's reads and writes of page means and chosen pages."""
        found = []
        if i.means is not None and i.write_kv is not None:
            found += _writes(self._place(i.means, i.chunk))
        if i.means is not None and i.chooses:
            found += _reads((i.means, WHOLE))
        if i.choice is not None:
            place = self._place(i.choice, i.chunk)
            found += _writes(place) if i.chooses else self._chosen(i.prefix, place)
        return found

    def _chosen(self, prefix: str, place: Place) -> list[Access]:
        """Return the reads of the buffer of chosen page numbers: by the cell and, if the pages are
        on the host, by the lane that fetches them."""
        return [(lane, *place, False) for lane in {COMPUTE, self._reader(prefix)}]

    def _backward(self, i: Backward) -> list[Access]:
        self.hidden.pop(i.layer + 1, None)
        found = _reads(*self.graphs.pop((i.layer, i.chunk), ()))
        found += _reads(*self.gradient.pop(i.layer + 1, ()))
        given = i.own_kv, i.own_dkv, i.attention, i.activations
        found += _reads(*(self._place(name, i.chunk) for name in given if name is not None))
        if i.choice is not None:
            found += self._chosen(i.prefix, self._place(i.choice, i.chunk))
        if i.activations is not None:
            found += _reads(*self.hidden.pop(i.layer, ()))
        if i.chunk:
            found.append((self._reader(i.prefix), i.prefix, WHOLE, False))
            reader = self._reader(i.accumulator)
            writer = EVICT if reader is FETCH else COMPUTE
            found.append((reader, i.accumulator, WHOLE, False))
            found.append((writer, i.accumulator, WHOLE, True))
        self.gradient[i.layer] = ()
        return found

    def _reader(self, name: str) -> Lane:
        """Return the lane that reads a buffer of earlier keys: FETCH from host, else COMPUTE."""
        return FETCH if name in self.on_host else COMPUTE


def _reads(*places: Place) -> list[Access]:
    return [(COMPUTE, name, place, False) for name, place in places]


def _writes(*places: Place) -> list[Access]:
    return [(COMPUTE, name, place, True) for name, place in places]


def footprints(program: Program) -> Iterator[list[Access]]:
    """Yield each instruction's reads and writes of buffers, in the program's order."""
    walk = _RegisterWalk(program)
    return map(walk.with_weights if walk.streams else walk.accesses, program.instructions)


def lane_of(instruction: Instruction) -> Lane:
    """Return the lane on which an instruction runs."""
    if isinstance(instruction, Fetch):
        return FETCH
    return EVICT if isinstance(instruction, Evict) else COMPUTE


class Hazard(StrEnum):
    """Reason for a lane to wait for another one; this file's docstring explains each."""

    NOT_ARRIVED = "not arrived"
    STILL_READ = "still read"
    NOT_WRITTEN = "not written"
    STILL_LEAVING = "still leaving"
    NOT_HOME = "not home"
    STILL_FETCHED = "still fetched"
    REUSED = "reused"
    CLEARED = "cleared"


EVERY = frozenset(Hazard)
# By the waiting lane.
_READING = {
    COMPUTE: Hazard.NOT_ARRIVED,
    FETCH: Hazard.NOT_HOME,
    EVICT: Hazard.NOT_WRITTEN,
}
_WRITING = {
    COMPUTE: Hazard.STILL_LEAVING,
    FETCH: Hazard.STILL_READ,
    EVICT: Hazard.STILL_FETCHED,
}


class Wait(NamedTuple):
    """A lane to wait for, and the latest of its instructions that must have finished."""

    lane: Lane
    instruction: int


# The waits of one instruction, for every lane that it works on.
Order = dict[Lane, tuple[Wait, ...]]

NEVER = -1
# Programs have up to 300,000 instructions, and a search derives the waits of several: the enum's
# own iterator and length took a third of the time.
_LANES = tuple(Lane)


def _never() -> list[int]:
    return [NEVER] * len(_LANES)


def waits(program: Program, hazards: Collection[Hazard] = EVERY) -> tuple[Order, ...]:
    """Return each instruction's waits for other lanes, or only those for the reasons `hazards`."""
    derivation = _Derivation(program, frozenset(hazards))
    return tuple(
        derivation.order(index, i, accesses)
        for index, (i, accesses) in enumerate(
            zip(program.instructions, footprints(program), strict=True)
        )
    )


@dataclass(slots=True)
class _LatestAccess:
    """Latest instructions, by lane, that wrote to and that read from a chunk of a buffer."""

    written: list[int] = field(default_factory=_never)
    read: list[int] = field(default_factory=_never)

    def note(self, access: Access, index: int) -> None:
        lane, _, _, writes = access
        (self.written if writes else self.read)[lane] = index


@dataclass(slots=True)
class _Tracked:
    """A buffer between its Allocate and its Free, with its latest accesses."""

    buffer: Buffer
    owners: list[int]  # by lane: the last earlier use of its addresses
    every: _LatestAccess = field(default_factory=_LatestAccess)  # of any place
    whole: _LatestAccess = field(default_factory=_LatestAccess)  # of all places at once
    places: dict[int, _LatestAccess] = field(default_factory=dict)

    def place(self, place: int) -> _LatestAccess:
        if place == WHOLE:
            return self.whole
        found = self.places.get(place)
        if found is None:
            found = self.places[place] = _LatestAccess()
        return found

    def used(self, lane: int) -> int:
        return max(self.owners[lane], self.every.written[lane], self.every.read[lane])


@dataclass(slots=True)
class _Derivation:
    """Derivation of each instruction's waits, without those that other waits imply. `known[x][y]`
    is the latest instruction of lane y that lane x has waited for, directly or through other lanes.
    `then[x][i]` is `known[x]` at the time when lane x had finished its part of instruction i."""

    program: Program
    hazards: frozenset[Hazard]
    held: dict[str, _Tracked] = field(default_factory=dict)
    freed: list[_Tracked] = field(default_factory=list)
    known: list[list[int]] = field(default_factory=lambda: [_never() for _ in _LANES])
    then: list[dict[int, list[int]]] = field(default_factory=lambda: [{} for _ in _LANES])

    def order(self, index: int, i: Instruction, accesses: list[Access]) -> Order:
        if isinstance(i, Allocate):
            self._allocate(i.buffer)
            return {}
        if isinstance(i, Free):
            self.freed.append(self.held.pop(i.buffer))
            return {}
        needed: dict[Lane, list[int]] = {lane_of(i): _never()}
        clears = isinstance(i, Clear)
        for access in accesses:
            after = needed.get(access[0])
            if after is None:
                after = needed[access[0]] = _never()
            self._require(access, after, clears=clears)
        for access in accesses:
            _, name, place, _ = access
            held = self.held[name]
            held.place(place).note(access, index)
            held.every.note(access, index)
        return {lane: self._follow(lane, index, after) for lane, after in needed.items()}

    def _allocate(self, name: str) -> None:
        buffer = self.program.buffers[name]
        old = [held for held in self.freed if overlap(held.buffer, buffer)]
        owners = [max((held.used(lane) for held in old), default=NEVER) for lane in _LANES]
        self.held[name] = _Tracked(buffer, owners)

    def _require(self, access: Access, after: list[int], *, clears: bool) -> None:
        """Advance `after` (by lane) to the latest instructions that this access must wait for."""
        lane, name, place, writes = access
        held = self.held[name]
        hazard = (_WRITING if writes else _READING)[lane]
        reused = Hazard.REUSED
        if clears:
            hazard = reused = Hazard.CLEARED
        if reused in self.hazards:
            _raise(after, held.owners)
        if hazard not in self.hazards:
            return
        for last in (held.every,) if place == WHOLE else (held.place(place), held.whole):
            _raise(after, last.written)
            if writes:
                _raise(after, last.read)

    def _follow(self, lane: Lane, index: int, after: list[int]) -> tuple[Wait, ...]:
        known = self.known[lane]
        new = [other for other in _LANES if after[other] > known[other] and other is not lane]
        found = [Wait(other, after[other]) for other in new if not self._implied(other, after, new)]
        for other in new:
            _raise(known, self.then[other][after[other]])
        known[lane] = index
        self.then[lane][index] = known.copy()
        return tuple(found)

    def _implied(self, other: Lane, after: list[int], new: list[Lane]) -> bool:
        """Return whether waits for the other lanes in `new` imply the wait for lane `other`."""
        return any(
            self.then[third][after[third]][other] >= after[other]
            for third in new
            if third is not other
        )


def _raise(after: list[int], to: list[int]) -> None:
    computed, fetched, evicted = to
    if computed > after[0]:
        after[0] = computed
    if fetched > after[1]:
        after[1] = fetched
    if evicted > after[2]:
        after[2] = evicted


def overlap(first: Buffer, second: Buffer) -> bool:
    """Return whether two buffers have bytes of an arena in common."""
    apart = (
        first.address + first.bytes <= second.address
        or second.address + second.bytes <= first.address
    )
    return first.tier is second.tier and not apart


Cell = tuple[int, int]  # layer, chunk


def unread_outputs(program: Program) -> frozenset[Cell]:
    """Return the forward cells that build a graph for the backward and whose output no later
    instruction reads.

    Registers are named by layer, and a new value replaces the old one: an output that is still in
    its register when the next value comes was not read.
    """
    found: set[Cell] = set()
    written: dict[int, Cell] = {}  # the cell whose output is in hidden[layer]

    def read(layer: int) -> None:
        if layer in written:
            found.discard(written[layer])

    for i in program.instructions:
        match i:
            case Fetch() | Evict():  # most of a program
                pass
            case Embed():
                written.pop(0, None)
            case Load(layer) | Receive(layer, gradient=False):
                written.pop(layer, None)
            case Store(layer) | Send(layer, gradient=False):
                read(layer)
            case Head():
                read(len(program.model.layers))
            case Backward(layer):
                written.pop(layer + 1, None)
            case Forward():
                read(i.layer)
                written.pop(i.layer + 1, None)
                if i.graph and not i.kept:
                    written[i.layer + 1] = i.layer, i.chunk
                    found.add((i.layer, i.chunk))
            case _:
                pass
    return frozenset(found)


@dataclass(slots=True)
class TiledCells:
    """Cells of a program whose token-wise modules run on tiles of tokens (see `hf.tiled_mlp`)."""

    program: Program
    tile: int | None = field(init=False)  # tokens
    unread: frozenset[Cell] = field(init=False)

    def __post_init__(self) -> None:
        self.tile = self.program.schedule.mlp_chunk_size
        self.unread = frozenset() if self.tile is None else unread_outputs(self.program)

    def sizes(self, i: Forward | Backward) -> tuple[int, ...]:
        """Return the number of tokens in each tile of a cell; an untiled cell is one tile."""
        tokens = self._tokens(i)
        if not self.has_tiles(i):
            return (tokens,)
        assert self.tile is not None
        full, rest = divmod(tokens, self.tile)
        return (self.tile,) * full + (rest,) * bool(rest)

    def has_tiles(self, i: Forward | Backward) -> bool:
        """Return whether a cell runs on tiles: it has more tokens than a tile and saves no
        graph."""
        if self.tile is None or self._tokens(i) <= self.tile:
            return False
        return not (i.kept if isinstance(i, Forward) else i.activations is not None)

    def _tokens(self, i: Forward | Backward) -> int:
        start, stop = self.program.share.tokens.rows[i.chunk]
        return stop - start

    def skips(self, i: Forward) -> bool:
        """Return whether a forward cell skips the last product of its MLP, because no instruction
        reads the cell's output."""
        if not self.has_tiles(i) or not i.graph or (i.layer, i.chunk) not in self.unread:
            return False
        return self.program.model.layers[i.layer].work.skippable
