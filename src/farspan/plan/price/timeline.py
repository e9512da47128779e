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

from dataclasses import dataclass, field

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
    Program,
    Store,
    StoreGradient,
)

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
class _Clock:
    """Walks a program.

    `written` and `read` say when the content of a place, (buffer, chunk) or a slot, was last
    written and last read; `whole` the former for any chunk of a buffer.
    """

    program: Program
    prices: Prices
    lanes: _Lanes = field(default_factory=_Lanes)
    written: dict[tuple[str, int], float] = field(default_factory=dict)
    read: dict[tuple[str, int], float] = field(default_factory=dict)
    whole: dict[str, float] = field(default_factory=dict)
    gathered: tuple[int, ...] = ()
    last_start: float = 0.0
    ready: dict[int, float] = field(default_factory=dict)
    used: dict[str, float] = field(default_factory=dict)  # until when, by buffer
    free: dict[str, float] = field(default_factory=dict)  # since when its addresses are
    freed: list[Buffer] = field(default_factory=list)
    spans: list[Span] | None = None  # filled when somebody wants to look
    index: int = 0

    def run(self) -> float:
        for index, instruction in enumerate(self.program.instructions):
            self.index = index
            match instruction:
                case Allocate(name):
                    self._allocate(self.program.buffers[name])
                case Free(name):
                    self.freed.append(self.program.buffers[name])
                case _:
                    self._issue(instruction, self.prices.of(instruction))
        lanes = self.lanes
        return max(lanes.compute, lanes.fetch, lanes.evict, lanes.collective)

    def _issue(self, i: Instruction, cost: Cost) -> None:
        match i:
            case Fetch(source, target, chunk):
                start = self._copied(self.lanes.fetch, source, target, chunk)
                self.lanes.fetch = self._copy("fetch", start, cost.fetch, i)
            case Evict(source, target, chunk):
                start = self._copied(self.lanes.evict, source, target, chunk)
                self.lanes.evict = self._copy("evict", start, cost.evict, i)
            case Forward():
                names = [i.attention] if i.write_kv is None else [i.attention, i.write_kv]
                self._cell(i, cost, (i.prefix,), [name for name in names if name is not None])
            case Backward():
                names = [i.own_kv, i.own_dkv, i.attention, i.activations]
                self._cell(
                    i, cost, (i.prefix, i.accumulator), [name for name in names if name is not None]
                )
            case Load(_, chunk, buffer) | LoadGradient(_, chunk, buffer):
                self._compute(cost, [(buffer, chunk)], [])
            case Store(_, chunk, buffer) | StoreGradient(_, chunk, buffer):
                self._compute(cost, [], [(buffer, chunk)])
            case Clear(buffer):
                self._compute(cost, [], [], self.free[buffer])
                self._write((buffer, -1), self.lanes.compute)
            case Close(group):
                lane = max(self.lanes.collective, self.lanes.compute)
                self.lanes.collective = lane + self.prices.reduce(group)
            case _:
                self._compute(cost, [], [])

    def _allocate(self, buffer: Buffer) -> None:
        """The buffer's addresses are free when their last owner was used for the last time."""
        self.free[buffer.name] = max(
            (self.used.get(old.name, 0.0) for old in self.freed if _overlap(old, buffer)),
            default=0.0,
        )

    def _copied(self, lane: float, source: str, target: str, chunk: int) -> float:
        """Earliest start of a copy."""
        here, there = self._place(source, chunk), self._place(target, chunk)
        written = max(self.written.get(here, 0.0), self.written.get(there, 0.0))
        return max(lane, written, self.read.get(there, 0.0), self.free[target])

    def _copy(self, lane: str, start: float, seconds: float, i: Fetch | Evict) -> float:
        here, there = self._place(i.source, i.chunk), self._place(i.target, i.chunk)
        end = start + seconds
        self._read(here, end)
        self._write(there, end)
        self._note(lane, start, end)
        return end

    def _note(self, lane: str, start: float, end: float) -> None:
        if self.spans is not None and end > start:
            self.spans.append(Span(lane, start, end, self.index))

    def _cell(
        self, i: Forward | Backward, cost: Cost, prefixes: tuple[str, ...], touched: list[str]
    ) -> None:
        """A cell reads its prefix, and reads or writes its own places."""
        self._gather(i.layer)
        start = max([self.ready.get(i.layer, 0.0), *(self.whole.get(p, 0.0) for p in prefixes)])
        places = [(name, i.chunk) for name in touched]
        if isinstance(i, Forward) and i.activations is not None:
            places.append((i.activations, i.chunk))
        if cost.fetch or cost.evict:
            start = max(start, self._stream(i.chunk, cost, start))
        self._compute(cost, places, places, start)
        for prefix in prefixes:
            self.used[prefix] = max(self.lanes.compute, self.lanes.evict)

    def _stream(self, chunk: int, cost: Cost, earliest: float) -> float:
        """Earliest start of a cell whose prefix crosses the link block by block while it runs."""
        schedule = self.program.schedule
        blocks = max(1, -(-self.program.chunks[chunk][0] // schedule.kv_block))
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

    def _gather(self, layer: int) -> None:
        """The layer's weights, cut over devices, are gathered once for all chunks of its pass."""
        if layer in self.gathered:
            return
        first, stop = next(g for g in self.program.groups if g[0] <= layer < g[1])
        if not any(first <= other < stop for other in self.gathered):
            self.gathered = ()
        self.gathered = (*self.gathered, layer)
        start = max(self.lanes.collective, self.last_start)
        self.lanes.collective = start + self.prices.gather(layer)
        self._note("collective", start, self.lanes.collective)
        self.ready[layer] = self.lanes.collective

    def _compute(
        self,
        cost: Cost,
        reads: list[tuple[str, int]],
        writes: list[tuple[str, int]],
        earliest: float = 0.0,
    ) -> None:
        start = max(self.lanes.compute, earliest)
        for name, chunk in reads:
            start = max(start, self.written.get(self._place(name, chunk), 0.0))
        for name, chunk in writes:
            start = max(start, self.read.get(self._place(name, chunk), 0.0), self.free[name])
        end = start + cost.compute + cost.collective + cost.host
        for name, chunk in reads:
            self._read(self._place(name, chunk), end)
        for name, chunk in writes:
            self._write(self._place(name, chunk), end)
        self.last_start, self.lanes.compute = start, end
        self._note("compute", start, end)

    def _write(self, place: tuple[str, int], end: float) -> None:
        self.written[place] = end
        self.whole[place[0]] = max(end, self.whole.get(place[0], 0.0))
        self.used[place[0]] = max(end, self.used.get(place[0], 0.0))

    def _read(self, place: tuple[str, int], end: float) -> None:
        self.read[place] = max(end, self.read.get(place, 0.0))
        self.used[place[0]] = max(end, self.used.get(place[0], 0.0))

    def _place(self, name: str, chunk: int) -> tuple[str, int]:
        return (name, -1) if self.program.buffers[name].layer < 0 else (name, chunk)


def _overlap(one: Buffer, other: Buffer) -> bool:
    apart = one.address + one.bytes <= other.address or other.address + other.bytes <= one.address
    return one.tier is other.tier and not apart


def run_time(prices: Prices, *, overlap: bool) -> Timeline:
    """Seconds of one step of the program that `prices` prices."""
    program = prices.program
    costs = [prices.of(instruction) for instruction in program.instructions]
    gathers = prices.gathers()
    compute = sum(cost.compute for cost in costs)
    fetch = sum(cost.fetch for cost in costs)
    evict = sum(cost.evict for cost in costs)
    collective = sum(cost.collective for cost in costs) + gathers
    host = sum(cost.host for cost in costs)
    if overlap:
        total = _Clock(program, prices).run()
    else:
        total = compute + fetch + evict + collective + host
    return Timeline(total, compute, fetch, evict, collective, host)


def spans(prices: Prices) -> tuple[Span, ...]:
    """What each lane does when, copies beside the computation."""
    clock = _Clock(prices.program, prices, spans=[])
    clock.run()
    assert clock.spans is not None
    return tuple(clock.spans)
