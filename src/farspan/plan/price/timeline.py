"""When everything happens: a program simulated on a machine with lanes that work side by side.

    compute     F(0,0)  F(1,0)  F(0,1)  F(1,1)  B(1,1) ...
    fetch               x.1                 x.0
    evict               kv.0   x.1
    collective  all-gather of layer 1, while layer 0 computes

Instructions are issued in the program's order, each on its lane. One starts when its lane is free,
when what it reads has been written, and when what it overwrites has been read: a slot is free for
the next chunk only then, and a new buffer's addresses only when nobody uses the old one's. A cell
that streams its prefix from host (FPDT 4.2) keeps the links busy while it computes: it begins with
the first block and cannot end before the last has come.

With `overlap=False` there is one lane: that is what a copy on the computing stream does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from farspan.plan.price.seconds import Cost, Prices
from farspan.plan.program import (
    Allocate,
    Backward,
    Buffer,
    Clear,
    Close,
    Evict,
    Fetch,
    Forward,
    Free,
    Instruction,
    Load,
    LoadGradient,
    Store,
    StoreGradient,
)

SLOT = -1  # the one place of a slot
PREFETCHED = 2  # blocks of the prefix that slots can hold ahead of the computation


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds of one step, the optimizer's update left out."""

    total: float
    compute: float
    fetch: float
    evict: float
    collective: float
    host: float


@dataclass(frozen=True, slots=True)
class Span:
    """One instruction's time on one lane."""

    lane: str
    start: float
    end: float
    index: int  # of the instruction


@dataclass(slots=True)
class _Lanes:
    """Until when each lane is taken."""

    compute: float = 0.0
    fetch: float = 0.0
    evict: float = 0.0
    collective: float = 0.0


@dataclass(slots=True)
class _Held:
    """A buffer from its Allocate on."""

    buffer: Buffer
    is_slot: bool
    free: float  # since when its addresses are
    used: float = 0.0  # until when somebody reads or writes it
    whole: float = 0.0  # when any chunk of it was last written
    places: dict[int, "_Place"] = field(default_factory=dict)


@dataclass(slots=True)
class _Place:
    """Where a buffer holds a chunk; a slot is one place, whatever it holds."""

    held: _Held
    written: float = 0.0  # when its content was last written
    read: float = 0.0  # when that was last read

    def write(self, end: float) -> None:
        held = self.held
        self.written = end
        if end > held.whole:
            held.whole = end
        if end > held.used:
            held.used = end

    def keep(self, end: float) -> None:
        """The content is read until then."""
        held = self.held
        if end > self.read:
            self.read = end
        if end > held.used:
            held.used = end


@dataclass(slots=True)
class _Clock:
    """Walks a program, whose instructions have these costs."""

    prices: Prices
    costs: list[Cost]
    lanes: _Lanes = field(default_factory=_Lanes)
    held: dict[str, _Held] = field(default_factory=dict)
    freed: list[_Held] = field(default_factory=list)
    gathered: tuple[int, ...] = ()
    last_start: float = 0.0
    ready: dict[int, float] = field(default_factory=dict)
    spans: list[Span] | None = None  # filled when somebody wants to look
    index: int = 0

    def run(self) -> float:
        steps: dict[type[Instruction], Callable[[Any, Cost], None]] = {
            Allocate: self._allocate,
            Free: self._free,
            Clear: self._clear,
            Fetch: self._fetch,
            Evict: self._evict,
            Load: self._load,
            LoadGradient: self._load,
            Store: self._store,
            StoreGradient: self._store,
            Forward: self._forward,
            Backward: self._backward,
            Close: self._close,
        }
        instructions = self.prices.program.instructions
        for index, (i, cost) in enumerate(zip(instructions, self.costs, strict=True)):
            self.index = index
            steps.get(type(i), self._stage)(i, cost)
        lanes = self.lanes
        return max(lanes.compute, lanes.fetch, lanes.evict, lanes.collective)

    # -- buffers and copies ---

    def _allocate(self, i: Allocate, _: Cost) -> None:
        """The buffer's addresses are free when their last owner was used for the last time."""
        buffer = self.prices.program.buffers[i.buffer]
        owners = (old.used for old in self.freed if _overlap(old.buffer, buffer))
        self.held[i.buffer] = _Held(buffer, buffer.layer < 0, max(owners, default=0.0))

    def _free(self, i: Free, _: Cost) -> None:
        self.freed.append(self.held[i.buffer])

    def _clear(self, i: Clear, cost: Cost) -> None:
        self._compute(cost, (), (), self.held[i.buffer].free)
        self._place(i.buffer, SLOT).write(self.lanes.compute)

    def _fetch(self, i: Fetch, cost: Cost) -> None:
        self.lanes.fetch = self._copy("fetch", self.lanes.fetch, cost.fetch, i)

    def _evict(self, i: Evict, cost: Cost) -> None:
        self.lanes.evict = self._copy("evict", self.lanes.evict, cost.evict, i)

    def _copy(self, lane: str, free: float, seconds: float, i: Fetch | Evict) -> float:
        """When the copy ends; its lane is free from `free` on."""
        here, there = self._place(i.source, i.chunk), self._place(i.target, i.chunk)
        start = max(free, here.written, there.written, there.read, there.held.free)
        end = start + seconds
        here.keep(end)
        there.write(end)
        self._note(lane, start, end)
        return end

    def _place(self, name: str, chunk: int) -> _Place:
        held = self.held[name]
        where = SLOT if held.is_slot else chunk
        place = held.places.get(where)
        if place is None:
            place = held.places[where] = _Place(held)
        return place

    def _note(self, lane: str, start: float, end: float) -> None:
        if self.spans is not None and end > start:
            self.spans.append(Span(lane, start, end, self.index))

    # -- cells ---

    def _forward(self, i: Forward, cost: Cost) -> None:
        self._cell(i, cost, (i.prefix,), (i.write_kv, i.attention, i.activations))

    def _backward(self, i: Backward, cost: Cost) -> None:
        touched = i.own_kv, i.own_dkv, i.attention, i.activations
        self._cell(i, cost, (i.prefix, i.accumulator), touched)

    def _cell(
        self,
        i: Forward | Backward,
        cost: Cost,
        names: tuple[str, ...],
        touched: tuple[str | None, ...],
    ) -> None:
        """A cell reads its prefixes of these names, and reads or writes its own places."""
        self._gather(i.layer)
        prefixes = [self.held[name] for name in names]
        start = max(self.ready.get(i.layer, 0.0), *[prefix.whole for prefix in prefixes])
        places = [self._place(name, i.chunk) for name in touched if name is not None]
        if cost.fetch or cost.evict:
            start = max(start, self._stream(i.chunk, cost, start))
        self._compute(cost, places, places, start)
        for prefix in prefixes:
            prefix.used = max(self.lanes.compute, self.lanes.evict)

    def _stream(self, chunk: int, cost: Cost, earliest: float) -> float:
        """Earliest start of a cell whose prefix crosses the link block by block while it runs."""
        program = self.prices.program
        blocks = max(1, -(-program.chunks[chunk][0] // program.schedule.kv_block))
        one = cost.fetch / blocks
        lanes = self.lanes
        begin = max(lanes.fetch, earliest, lanes.compute - PREFETCHED * one)
        lanes.fetch = begin + cost.fetch
        self._note("fetch", begin, lanes.fetch)
        last_needed = lanes.fetch + cost.compute / blocks
        evicting = max(lanes.evict, begin + one)
        written = lanes.evict = evicting + cost.evict
        self._note("evict", evicting, written)
        return max(begin + one, last_needed - cost.compute, written - cost.compute)

    # -- collectives of a group ---

    def _gather(self, layer: int) -> None:
        """The layer's weights, cut over devices, are gathered once for all chunks of its pass."""
        if layer in self.gathered:
            return
        groups = self.prices.program.groups
        first, stop = next(g for g in groups if g[0] <= layer < g[1])
        if not any(first <= other < stop for other in self.gathered):
            self.gathered = ()
        self.gathered = (*self.gathered, layer)
        start = max(self.lanes.collective, self.last_start)
        self.lanes.collective = start + self.prices.gather(layer)
        self._note("collective", start, self.lanes.collective)
        self.ready[layer] = self.lanes.collective

    def _close(self, i: Close, _: Cost) -> None:
        start = max(self.lanes.collective, self.lanes.compute)
        self.lanes.collective = start + self.prices.reduce(i.group)

    # -- the computing lane ---

    def _load(self, i: Load | LoadGradient, cost: Cost) -> None:
        self._compute(cost, (self._place(i.buffer, i.chunk),), ())

    def _store(self, i: Store | StoreGradient, cost: Cost) -> None:
        self._compute(cost, (), (self._place(i.buffer, i.chunk),))

    def _stage(self, _: Instruction, cost: Cost) -> None:
        self._compute(cost, (), ())

    def _compute(
        self,
        cost: Cost,
        reads: Sequence[_Place],
        writes: Sequence[_Place],
        earliest: float = 0.0,
    ) -> None:
        start = max(self.lanes.compute, earliest)
        for place in reads:
            if place.written > start:
                start = place.written
        for place in writes:
            start = max(start, place.read, place.held.free)
        end = start + cost.compute + cost.collective + cost.host
        for place in reads:
            place.keep(end)
        for place in writes:
            place.write(end)
        self.last_start, self.lanes.compute = start, end
        self._note("compute", start, end)


def _overlap(one: Buffer, other: Buffer) -> bool:
    apart = one.address + one.bytes <= other.address or other.address + other.bytes <= one.address
    return one.tier is other.tier and not apart


def run_time(prices: Prices, *, overlap: bool) -> Timeline:
    """Seconds of one step of the program that `prices` prices."""
    costs = _costs(prices)
    gathers = prices.gathers()
    compute = sum(map(attrgetter("compute"), costs))
    fetch = sum(map(attrgetter("fetch"), costs))
    evict = sum(map(attrgetter("evict"), costs))
    collective = sum(map(attrgetter("collective"), costs)) + gathers
    host = sum(map(attrgetter("host"), costs))
    in_line = compute + fetch + evict + collective + host
    total = _Clock(prices, costs).run() if overlap else in_line
    return Timeline(total, compute, fetch, evict, collective, host)


def spans(prices: Prices) -> tuple[Span, ...]:
    """What each lane does when, copies beside the computation."""
    clock = _Clock(prices, _costs(prices), spans=[])
    clock.run()
    assert clock.spans is not None
    return tuple(clock.spans)


def _costs(prices: Prices) -> list[Cost]:
    return [prices.of(instruction) for instruction in prices.program.instructions]
