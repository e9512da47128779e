"""What each instruction reads and writes, and on which lane: the one table of it.

    compute     cells, head, embedding, loads and stores of x, clearing
    fetch       host to device
    evict       device to host

A cell whose prefix is on host works on all three: while it computes, blocks of K, V and of dK, dV
totals come in through slots, and the totals go back (FPDT 4.2); so do chosen pages. Those slots
are not here: nobody but cells uses them, and who streams through them keeps their order
(engine.prefix, engine.pages).

Views are the trap. A register that was loaded from a slot is a view of it, and so is what a graph
refers to: whoever takes the register, or runs the graph backward, reads the slot.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from farspan.plan.program import (
    AttentionMode,
    Backward,
    Clear,
    EmbedBackward,
    Evict,
    Fetch,
    Forward,
    Head,
    Instruction,
    Load,
    LoadGradient,
    Program,
    Receive,
    Send,
    Store,
    StoreGradient,
)
from farspan.spec import Tier

SLOT = -1  # the one place of a slot, whatever chunk it holds
WHOLE = -2  # all chunks of a buffer; a prefix counts as that, for no later chunk is on its way then


class Lane(IntEnum):
    """Work of one lane happens in the order it is issued; lanes happen side by side."""

    COMPUTE = 0
    FETCH = 1
    EVICT = 2


class Access(NamedTuple):
    """One instruction's use of one place."""

    lane: Lane
    buffer: str
    place: int  # a chunk, SLOT or WHOLE
    writes: bool


Place = tuple[str, int]


@dataclass(slots=True)
class _Walk:
    """The registers while a program is walked: the places that each is a view of."""

    program: Program
    hidden: dict[int, tuple[Place, ...]] = field(default_factory=dict)
    gradient: dict[int, tuple[Place, ...]] = field(default_factory=dict)
    held: dict[int, tuple[Place, ...]] = field(default_factory=dict)
    graphs: dict[tuple[int, int], tuple[Place, ...]] = field(default_factory=dict)

    def of(self, instruction: Instruction) -> list[Access]:
        match instruction:
            case Fetch(source, target, chunk):
                return self._copy(Lane.FETCH, source, target, chunk)
            case Evict(source, target, chunk):
                return self._copy(Lane.EVICT, source, target, chunk)
            case Clear(buffer):
                is_slot = self.program.buffers[buffer].layer < 0
                return _writes((buffer, SLOT if is_slot else WHOLE))
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
            case Forward():
                return self._forward(instruction)
            case Backward():
                return self._backward(instruction)
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
        return name, SLOT if self.program.buffers[name].layer < 0 else chunk

    def _copy(self, lane: Lane, source: str, target: str, chunk: int) -> list[Access]:
        return [
            Access(lane, *self._place(source, chunk), False),
            Access(lane, *self._place(target, chunk), True),
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
        reads = self.program.model.layers[i.layer].state or i.mode is AttentionMode.COMPUTE
        if reads and i.chunk:
            found.append(Access(self._reader(i.prefix), i.prefix, WHOLE, False))
        if i.mode is AttentionMode.NONE:
            return found
        output = self.held.pop(i.layer, ()) if i.mode is AttentionMode.HELD else ()
        if i.attention is not None:
            output = (self._place(i.attention, i.chunk),)
            found += _reads(*output) if i.mode is AttentionMode.GIVEN else _writes(*output)
        if i.activations is not None:
            found += _writes(self._place(i.activations, i.chunk))
        if i.graph:
            # A kept graph refers to nothing: its Backward names what it is given again.
            self.graphs[i.layer, i.chunk] = () if i.kept else (*taken, *output)
        if i.hold:
            self.held[i.layer] = output
        self.hidden[i.layer + 1] = ()
        return found

    def _pages(self, i: Forward) -> list[Access]:
        """What sparse attention notes of keys, and which of them were chosen."""
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
        """A choice says what is attended to, and what is fetched."""
        return [Access(lane, *place, False) for lane in {Lane.COMPUTE, self._reader(prefix)}]

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
            found.append(Access(self._reader(i.prefix), i.prefix, WHOLE, False))
            reader = self._reader(i.accumulator)
            writer = Lane.EVICT if reader is Lane.FETCH else Lane.COMPUTE
            found.append(Access(reader, i.accumulator, WHOLE, False))
            found.append(Access(writer, i.accumulator, WHOLE, True))
        self.gradient[i.layer] = ()
        return found

    def _reader(self, name: str) -> Lane:
        """Who reads a prefix: the cell itself, or the lane that streams it in."""
        on_host = self.program.buffers[name].tier is Tier.HOST
        return Lane.FETCH if on_host else Lane.COMPUTE


def _reads(*places: Place) -> list[Access]:
    return [Access(Lane.COMPUTE, name, place, False) for name, place in places]


def _writes(*places: Place) -> list[Access]:
    return [Access(Lane.COMPUTE, name, place, True) for name, place in places]


def footprints(program: Program) -> Iterator[list[Access]]:
    """The accesses of every instruction, in the program's order."""
    return map(_Walk(program).of, program.instructions)


def lane_of(instruction: Instruction) -> Lane:
    """The lane an instruction's own work is on."""
    if isinstance(instruction, Fetch):
        return Lane.FETCH
    return Lane.EVICT if isinstance(instruction, Evict) else Lane.COMPUTE
