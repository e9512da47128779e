"""What waits for what when copies run beside the computation.

Lanes keep their own order, so a lane need only be told of others: for each instruction, the latest
earlier one of every other lane that it must follow. These are the hazards, each of which a test
lets happen (tests/engine/test_overlap.py):

    hazard          what goes wrong without the wait
    NOT_ARRIVED     a cell reads a slot before its fetch has arrived
    STILL_READ      a fetch writes into a slot whose content is still read
    NOT_WRITTEN     an evict takes what is not yet computed
    STILL_LEAVING   a cell writes into a slot before its evict has left
    NOT_HOME        a fetch takes host bytes before their evict has arrived
    STILL_FETCHED   an evict writes host bytes that are still fetched
    REUSED          a buffer is used while a copy still needs the buffer that had its addresses
    CLEARED         a buffer is cleared while copies of its bytes are under way

Waits that others imply are left out.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from farspan.plan.footprints import WHOLE, Access, Lane, footprints, lane_of
from farspan.plan.program import Allocate, Buffer, Clear, Free, Instruction, Program


class Hazard(StrEnum):
    """A class of waits; see the head of this file."""

    NOT_ARRIVED = "not arrived"
    STILL_READ = "still read"
    NOT_WRITTEN = "not written"
    STILL_LEAVING = "still leaving"
    NOT_HOME = "not home"
    STILL_FETCHED = "still fetched"
    REUSED = "reused"
    CLEARED = "cleared"


EVERY = frozenset(Hazard)
# By the lane that must wait.
_READING = {
    Lane.COMPUTE: Hazard.NOT_ARRIVED,
    Lane.FETCH: Hazard.NOT_HOME,
    Lane.EVICT: Hazard.NOT_WRITTEN,
}
_WRITING = {
    Lane.COMPUTE: Hazard.STILL_LEAVING,
    Lane.FETCH: Hazard.STILL_READ,
    Lane.EVICT: Hazard.STILL_FETCHED,
}


class Wait(NamedTuple):
    """Until this lane has done its part of an instruction."""

    lane: Lane
    instruction: int


# Waits of one instruction by the lane that waits, of every lane it works on.
Order = dict[Lane, tuple[Wait, ...]]

NEVER = -1
# Programs have up to 300,000 instructions, and a search derives the waits of several: an enum's own
# iterator and length, asked for each of them, were a third of the time.
_LANES = tuple(Lane)


def _never() -> list[int]:
    """By lane: nothing so far."""
    return [NEVER] * len(_LANES)


def waits(program: Program, hazards: Collection[Hazard] = EVERY) -> tuple[Order, ...]:
    """The order of every instruction. `hazards` other than all of them are for tests."""
    derivation = _Derivation(program, frozenset(hazards))
    return tuple(
        derivation.order(index, i, accesses)
        for index, (i, accesses) in enumerate(
            zip(program.instructions, footprints(program), strict=True)
        )
    )


@dataclass(slots=True)
class _Last:
    """The latest instruction of each lane that wrote a place, and that read it."""

    written: list[int] = field(default_factory=_never)
    read: list[int] = field(default_factory=_never)

    def note(self, access: Access, index: int) -> None:
        (self.written if access.writes else self.read)[access.lane] = index


@dataclass(slots=True)
class _Held:
    """A buffer from its Allocate on."""

    buffer: Buffer
    owners: list[int]  # by lane: the last use of its addresses before
    every: _Last = field(default_factory=_Last)  # of any place
    whole: _Last = field(default_factory=_Last)  # of all places at once
    places: dict[int, _Last] = field(default_factory=dict)

    def place(self, place: int) -> _Last:
        if place == WHOLE:
            return self.whole
        found = self.places.get(place)
        if found is None:
            found = self.places[place] = _Last()
        return found

    def used(self, lane: int) -> int:
        return max(self.owners[lane], self.every.written[lane], self.every.read[lane])


@dataclass(slots=True)
class _Derivation:
    """Invariant: `known[x][y]` is the latest instruction of lane y that lane x has followed, and
    `then[x][i]` what that was when x had done its part of instruction i."""

    program: Program
    hazards: frozenset[Hazard]
    held: dict[str, _Held] = field(default_factory=dict)
    freed: list[_Held] = field(default_factory=list)
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
            after = needed.get(access.lane)
            if after is None:
                after = needed[access.lane] = _never()
            self._require(access, after, clears=clears)
        for access in accesses:
            held = self.held[access.buffer]
            held.place(access.place).note(access, index)
            held.every.note(access, index)
        return {lane: self._follow(lane, index, after) for lane, after in needed.items()}

    def _allocate(self, name: str) -> None:
        buffer = self.program.buffers[name]
        old = [held for held in self.freed if overlap(held.buffer, buffer)]
        owners = [max((held.used(lane) for held in old), default=NEVER) for lane in _LANES]
        self.held[name] = _Held(buffer, owners)

    def _require(self, access: Access, after: list[int], *, clears: bool) -> None:
        """Raise `after` to what the access must follow."""
        held = self.held[access.buffer]
        hazard = (_WRITING if access.writes else _READING)[access.lane]
        reused = Hazard.REUSED
        if clears:
            hazard = reused = Hazard.CLEARED
        if reused in self.hazards:
            _raise(after, held.owners)
        if hazard not in self.hazards:
            return
        is_whole = access.place == WHOLE
        for last in (held.every,) if is_whole else (held.place(access.place), held.whole):
            _raise(after, last.written)
            if access.writes:
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
        """Has another lane that is waited for followed this one far enough?"""
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


def overlap(one: Buffer, other: Buffer) -> bool:
    """Do two buffers share bytes of an arena?"""
    apart = one.address + one.bytes <= other.address or other.address + other.bytes <= one.address
    return one.tier is other.tier and not apart
