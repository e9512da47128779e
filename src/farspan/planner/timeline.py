"""When everything happens: a program simulated on a machine with lanes that work side by side.

    issue       F(0,0) F(1,0) F(0,1) F(1,1) B(1,1) ...
    compute     F(0,0)  F(1,0)  F(0,1)  F(1,1)  B(1,1) ...
    fetch               x.1                 x.0
    evict               kv.0   x.1
    collective  all-gather of layer 1, while layer 0 computes

Instructions are issued in the program's order, each on its lane. One starts when its lane is free,
when what it reads has been written, when what it overwrites has been read, and when nobody uses the
addresses that a new buffer takes over. That is when everything it waits for in the engine is done
(farspan.program.dependencies, which a test holds this to): here ends are remembered by place
instead of by instruction, since a search asks for the times of programs of 400,000 instructions. A
cell that streams its prefix from host (FPDT 4.2) keeps the links busy while it computes: it begins
with the first block and cannot end before the last has come. Blocks pass through two slots, so that
a block is fetched while the one before is computed with, and none sooner.

The process that issues all this is a lane, too. It runs ahead of the device, up to `AHEAD` cells:
nothing begins before the process comes to it, and no cell ends before its last kernel is issued. So
a cell is late where issuing it takes longer than computing it, and what issuing takes is hidden
elsewhere.

With `overlap=False` there is one lane: that is what a copy on the computing stream does, and what a
CPU is, which issues with the cores that compute."""

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from operator import attrgetter

from farspan.planner.prices import Cost, Prices
from farspan.program.dependencies import (
    COMPUTE,
    EVICT,
    FETCH,
    SLOT,
    Access,
    Lane,
    footprints,
    overlap,
)
from farspan.program.program import (
    Allocate,
    Backward,
    Buffer,
    Close,
    Forward,
    Free,
    Gather,
    Load,
    Release,
)

WITHIN = BETWEEN = 1  # that stand for themselves, on either side of what is counted
LONGEST_PERIOD = 12  # of layers, and of groups, that repeat
BLOCK_SLOTS = 2  # blocks of the prefix on the device at a time
# Cells that are issued and not done: CUDA queues some 1,024 launches, a cell is 50 to 170.
AHEAD = 8
IDLE = -1.0  # ready for an instruction that has no part for this lane


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds of one step, the optimizer's update left out, but in `waited` for it."""

    total: float
    compute: float
    fetch: float
    evict: float
    collective: float
    host: float
    waited: float = 0.0

    def before(self, other: "Timeline") -> "Timeline":
        """Both, one after the other."""
        return Timeline(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Span:
    """One instruction's time on one lane."""

    lane: str
    start: float
    end: float
    index: int  # of the instruction


@dataclass(slots=True)
class _Use:
    """Until when a place is written, and used at all: from then on it may be read, and written."""

    written: float
    used: float


@dataclass(slots=True)
class _Held:
    """A buffer from its Allocate on."""

    buffer: Buffer
    every: _Use  # any place, so that of a slot as well
    whole: _Use  # all places at once
    places: defaultdict[int, _Use]


@dataclass(slots=True)
class _Clock:
    """Walks a program, whose instructions have these costs."""

    prices: Prices
    costs: list[Cost]
    held: dict[str, _Held] = field(default_factory=dict)
    freed: list[_Held] = field(default_factory=list)
    free: list[float] = field(default_factory=lambda: [0.0] * len(Lane))  # since when a lane is
    ready: list[float] = field(default_factory=lambda: [IDLE] * len(Lane))  # for this instruction
    ends: list[float] = field(default_factory=lambda: [0.0] * len(Lane))  # of this instruction
    collective: float = 0.0  # since when that lane is free
    gathered: tuple[int, ...] = ()
    last_start: float = 0.0
    weights: dict[int, float] = field(default_factory=dict)  # since when a layer's are gathered
    block_slot: float = 0.0  # since when a slot for streamed blocks is free
    issued: float = 0.0  # since when the process is done with what it issued
    queued: deque[float] = field(default_factory=lambda: deque(maxlen=AHEAD))  # ends of cells
    spans: list[Span] | None = None  # filled when somebody wants to look
    index: int = 0
    count: int = 1  # of the last cell's
    more: float = 0.0  # seconds that computing takes in the groups that are not there
    updated: tuple[float, ...] = ()  # by group: since when weights are new, if they are made so

    def run(self) -> float:
        program = self.prices.program
        steps = zip(program.instructions, footprints(program), self.costs, strict=True)
        for self.index, (i, accesses, cost) in enumerate(steps):
            if accesses or not isinstance(i, Allocate | Free | Close):
                self._look(accesses)
                if isinstance(i, (Forward, Backward)):
                    self._cell(i, cost)
                else:
                    if isinstance(i, Load) and i.layer < len(self.prices.counts):
                        self.count = self.prices.counts[i.layer]  # whose group it waits for
                    if isinstance(i, Release):
                        self.gathered = ()
                    elif self.updated and isinstance(i, Gather):
                        self.issued = max(self.issued, self.updated[i.group])
                    lane = accesses[0][0] if accesses else COMPUTE
                    start = self._start(lane)
                    self._do(lane, start, start + cost.in_line())
                self._note_uses(accesses)
            elif isinstance(i, Allocate):
                self._allocate(i.buffer)
            elif isinstance(i, Free):
                self.freed.append(self.held.pop(i.buffer))
            else:
                self._close(i)
        return max(self.collective, *self.free) + self.more

    # -- places ---

    def _allocate(self, name: str) -> None:
        buffer = self.prices.program.buffers[name]
        old = (held for held in self.freed if overlap(held.buffer, buffer))
        owned = max((held.every.used for held in old), default=0.0)
        unused = partial(_Use, owned, owned)
        self.held[name] = _Held(buffer, unused(), unused(), defaultdict(unused))

    def _look(self, accesses: list[Access]) -> None:
        """From when on each lane may do its part of the instruction."""
        ready, held = self.ready, self.held
        ready[:] = IDLE, IDLE, IDLE
        for lane, name, place, writes in accesses:
            of = held[name]
            for use in (of.every,) if place < 0 else (of.places[place], of.whole):
                end = use.used if writes else use.written
                if end > ready[lane]:
                    ready[lane] = end

    def _note_uses(self, accesses: list[Access]) -> None:
        """The places are used until then."""
        held, ends = self.held, self.ends
        for lane, name, place, writes in accesses:
            of, end = held[name], ends[lane]
            own = of.whole if place < 0 else of.places[place]
            for use in (of.every,) if place == SLOT else (own, of.every):
                if end > use.used:
                    use.used = end
                if writes and end > use.written:
                    use.written = end

    # -- lanes ---

    def _start(self, lane: Lane) -> float:
        """When the lane is free, what it needs is there and the process has come to it."""
        return max(self.free[lane], self.ready[lane], self.issued)

    def _do(self, lane: Lane, start: float, end: float) -> None:
        if lane is COMPUTE:
            self.last_start = start
            self.more += (self.count - 1) * (end - self.free[lane])
        self.free[lane] = self.ends[lane] = end
        if self.spans is not None:
            self._span(lane.name.lower(), start, end)

    def _span(self, lane: str, start: float, end: float) -> None:
        if self.spans is not None and end > start:
            self.spans.append(Span(lane, start, end, self.index))

    # -- cells ---

    def _cell(self, i: Forward | Backward, cost: Cost) -> None:
        if len(self.queued) == AHEAD:
            self.issued = max(self.issued, self.queued[0])
        if self.prices.counts:
            self.count = self.prices.counts[i.layer]
        self._gather(i.layer)
        start = max(self._start(COMPUTE), self.weights.get(i.layer, 0.0))
        busy = cost.compute + cost.collective
        if self.ready[FETCH] > IDLE:
            self._stream(i.chunk, cost, start, busy)
        else:
            self._do(COMPUTE, start, max(start + busy, self.issued + cost.host))
        self.issued += cost.host
        self.queued.append(self.free[COMPUTE])

    def _stream(self, chunk: int, cost: Cost, start: float, busy: float) -> None:
        """A cell whose prefix crosses the link block by block while it runs."""
        program = self.prices.program
        blocks = max(1, -(-program.share.keys.rows[chunk][0] // program.schedule.kv_block))
        fetch, evict, compute = cost.fetch / blocks, cost.evict / blocks, busy / blocks
        first = max(self._start(FETCH), self.block_slot)
        start = max(start, first + fetch)
        fetched = first + cost.fetch
        if blocks > BLOCK_SLOTS:
            # The last comes when the one that had its slot is done with.
            fetched = max(fetched, start + (blocks - BLOCK_SLOTS) * compute + fetch)
        end = max(start + busy, fetched + compute)
        self._do(FETCH, fetched - cost.fetch, fetched)
        self.ends[EVICT] = self._start(EVICT)
        if cost.evict:
            begin = max(self.ends[EVICT], start + compute)
            evicted = max(begin + cost.evict, end + evict)
            end = max(end, evicted - BLOCK_SLOTS * evict)
            self._do(EVICT, evicted - cost.evict, evicted)
        end = max(end, self.issued + cost.host)
        self._do(COMPUTE, start, end)
        self.block_slot = end - compute

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
        start = max(self.collective, self.last_start)
        self.collective = start + self.prices.gather(layer)
        self._span("collective", start, self.collective)
        self.weights[layer] = self.collective

    def _close(self, i: Close) -> None:
        start = max(self.collective, self.free[COMPUTE])
        self.collective = start + self.prices.reduce(i.group)


def fold(
    layers: Sequence[Hashable], groups: Sequence[tuple[int, int]], *, inside: bool = True
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Fewer layers that stand for all of these groups, equal ones being the same; for how many each
    stands, and the sizes of the groups that are left. Not `inside` groups where something happens
    beside a whole one: its layers have to take as long as they do."""
    kinds = [tuple(layers[first:stop]) for first, stop in groups]
    found, sizes = list[tuple[int, int]](), list[int]()
    for group, count in _folded(kinds, once=BETWEEN):
        first, stop = groups[group]
        every = [(layer, 1) for layer in range(stop - first)]
        few = _folded(layers[first:stop], once=WITHIN) if inside else every
        found += [(first + layer, times * count) for layer, times in few]
        sizes.append(len(few))
    of, counts = zip(*found, strict=True)
    return of, counts, tuple(sizes)


def _folded(kinds: Sequence[Hashable], once: int) -> list[tuple[int, int]]:
    """Places that are left of a row, and how many each stands for: its ends, and in between of what
    repeats a period, between so many on either side that stand for themselves."""
    found, place, end = [(0, 1)], 1, len(kinds) - 1
    while place < end:
        period, repeats = max(
            ((p, _repeats(kinds, place, end, p)) for p in range(1, LONGEST_PERIOD + 1)),
            key=lambda pair: (pair[1] - 1 - 2 * once) * pair[0],
        )
        if repeats <= 2 * once + 1:
            found.append((place, 1))
            place += 1
            continue
        for turn in range(2 * once + 1):
            stands = repeats - 2 * once if turn == once else 1
            found += [(place + turn * period + at, stands) for at in range(period)]
        place += repeats * period
    return found + [(end, 1)] * (end > 0)


def _repeats(kinds: Sequence[Hashable], start: int, end: int, period: int) -> int:
    """How often the period at `start` comes before `end`, itself counted."""
    stop = start + period
    while stop < end and kinds[stop] == kinds[stop - period]:
        stop += 1
    return (stop - start) // period if stop <= end else 1


def folded_time(prices: Prices, *, beside: bool) -> tuple[float, float]:
    """Seconds of a step, the update left out, whose program has the layers of a `fold`: those of
    one period count for all of them, which is exact where lanes have come into step by then; and
    how much longer it takes with the update `beside` it."""
    costs = _costs(prices)
    alone = _Clock(prices, costs).run()
    return alone, _waited(prices, costs, alone) if beside else 0.0


def _waited(prices: Prices, costs: list[Cost], alone: float) -> float:
    """By how much a step takes longer than `alone` where weights are updated as it begins."""
    return max(0.0, _Clock(prices, costs, updated=prices.updated()).run() - alone)


def run_time(
    prices: Prices, *, overlap: bool, simulated: bool = True, beside: bool = False
) -> Timeline:
    """Seconds of one step of the program that `prices` prices. Where lanes overlap and they are not
    to be `simulated`, the total is the busiest lane's, which is a lower bound. With the update
    `beside` it the step also waits for that."""
    costs = _costs(prices)
    gathers = prices.gathers()
    compute = sum(map(attrgetter("compute"), costs))
    fetch = sum(map(attrgetter("fetch"), costs))
    evict = sum(map(attrgetter("evict"), costs))
    inside = sum(map(attrgetter("collective"), costs))  # of cells
    host = sum(map(attrgetter("host"), costs))
    waited = 0.0
    if not overlap:
        total = compute + fetch + evict + inside + gathers + host
    elif simulated:
        total = _Clock(prices, costs).run()
        waited = _waited(prices, costs, total) if beside else 0.0
    else:
        total = max(compute + inside, host, fetch, evict, gathers)
        waited = max(0.0, prices.updated()[-1] - total) if beside else 0.0
    return Timeline(total, compute, fetch, evict, inside + gathers, host, waited)


def spans(prices: Prices, *, beside: bool = False) -> tuple[Span, ...]:
    """What each lane does when, copies beside the computation; see `run_time`."""
    updated = prices.updated() if beside else ()
    clock = _Clock(prices, _costs(prices), spans=[], updated=updated)
    clock.run()
    assert clock.spans is not None
    return tuple(clock.spans)


def _costs(prices: Prices) -> list[Cost]:
    return [prices.of(instruction) for instruction in prices.program.instructions]
