"""Simulate a program's instructions on a machine whose lanes (queues) work in parallel.

    issue       F(0,0) F(1,0) F(0,1) F(1,1) B(1,1) ...
    compute     F(0,0)  F(1,0)  F(0,1)  F(1,1)  B(1,1) ...
    fetch               x.1                 x.0
    evict               kv.0   x.1
    collective  all-gather of layer 1, while layer 0 computes

Instructions are issued in the program's order, each on its lane. One starts when its lane is free,
its inputs are written, the old contents of its outputs are read, and the addresses that a new
buffer takes over are unused. The engine waits for the same (farspan.program.dependencies; a test
compares them): here ends are stored by place instead of by instruction, since a search asks for the
times of programs of 400,000 instructions. A cell that streams its prefix from the host (FPDT 4.2)
keeps the links busy while it computes: it begins with the first block and cannot end before the
last has arrived. Blocks pass through two slots, so each is fetched while the one before is in use.

The process that issues instructions is a lane, too. It runs ahead of the device, up to `AHEAD`
cells: nothing begins before the process issues it, and no cell ends before its last kernel is
issued. So a cell is late if issuing it takes longer than computing it.

With `overlap=False` there is one lane, as for copies on the computing stream, and as on a CPU,
which issues with the cores that compute.
"""

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

WITHIN = BETWEEN = 1  # layers or groups at either end of a folded run that are not folded
LONGEST_PERIOD = 12  # layers, or groups, of a repeating period
BLOCK_SLOTS = 2  # blocks of the prefix on the device at a time
# Cells issued but not finished: CUDA queues about 1,024 launches, and a cell has 50 to 170.
AHEAD = 8
IDLE = -1.0  # ready time of a lane that has no part in the instruction


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds of one step without the optimizer's update: in total, and for each queue the seconds
    that it is busy. `waited` are the seconds of waiting for an overlapping update."""

    total: float
    compute: float
    fetch: float
    evict: float
    collective: float
    host: float
    waited: float = 0.0

    def before(self, other: "Timeline") -> "Timeline":
        """Return the timeline of two programs run one after the other; their seconds add up."""
        return Timeline(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Span:
    """Time that one instruction takes on one queue (compute, fetch, evict, collective)."""

    lane: str
    start: float
    end: float
    index: int  # of the instruction


@dataclass(slots=True)
class _LastUses:
    """Times of the last write and of the last use of one chunk of a buffer."""

    written: float
    used: float


@dataclass(slots=True)
class _LiveBuffer:
    """A buffer between its Allocate and its Free instructions, with the last uses of its chunks."""

    buffer: Buffer
    every: _LastUses  # any place, including the slot's
    whole: _LastUses  # all places at once
    places: defaultdict[int, _LastUses]


@dataclass(slots=True)
class _Clock:
    """Simulation of one program's time, instruction by instruction."""

    prices: Prices
    costs: list[Cost]
    held: dict[str, _LiveBuffer] = field(default_factory=dict)
    freed: list[_LiveBuffer] = field(default_factory=list)
    free: list[float] = field(default_factory=lambda: [0.0] * len(Lane))  # from when a lane is free
    ready: list[float] = field(default_factory=lambda: [IDLE] * len(Lane))  # for this instruction
    ends: list[float] = field(default_factory=lambda: [0.0] * len(Lane))  # of this instruction
    collective: float = 0.0  # time from which that lane is free
    gathered: tuple[int, ...] = ()
    last_start: float = 0.0
    weights: dict[int, float] = field(default_factory=dict)  # from when a layer's are gathered
    block_slot: float = 0.0  # time from which a slot for streamed blocks is free
    issued: float = 0.0  # time at which the process has issued everything so far
    queued: deque[float] = field(default_factory=lambda: deque(maxlen=AHEAD))  # ends of cells
    spans: list[Span] | None = None  # collected on request
    index: int = 0
    count: int = 1  # of the last cell
    more: float = 0.0  # seconds of computation in the groups that were folded away
    updated: tuple[float, ...] = ()  # by group: from when updated weights are there

    def run(self) -> float:
        program = self.prices.program
        steps = zip(program.instructions, footprints(program), self.costs, strict=True)
        for self.index, (i, accesses, cost) in enumerate(steps):
            if accesses or not isinstance(i, Allocate | Free | Close):
                self._set_ready(accesses)
                if isinstance(i, (Forward, Backward)):
                    self._cell(i, cost)
                else:
                    if isinstance(i, Load) and i.layer < len(self.prices.counts):
                        self.count = self.prices.counts[i.layer]  # the group that it waits for
                    if isinstance(i, Release):
                        self.gathered = ()
                    elif self.updated and isinstance(i, Gather):
                        self.issued = max(self.issued, self.updated[i.group])
                    lane = accesses[0][0] if accesses else COMPUTE
                    start = self._start(lane)
                    self._occupy(lane, start, start + cost.in_line())
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
        unused = partial(_LastUses, owned, owned)
        self.held[name] = _LiveBuffer(buffer, unused(), unused(), defaultdict(unused))

    def _set_ready(self, accesses: list[Access]) -> None:
        """Set the time from which each lane (queue) may run its part of the instruction."""
        ready, held = self.ready, self.held
        ready[:] = IDLE, IDLE, IDLE
        for lane, name, place, writes in accesses:
            known = held[name]
            for use in (known.every,) if place < 0 else (known.places[place], known.whole):
                end = use.used if writes else use.written
                if end > ready[lane]:
                    ready[lane] = end

    def _note_uses(self, accesses: list[Access]) -> None:
        """Record the end of the instruction as the last use of its buffers."""
        held, ends = self.held, self.ends
        for lane, name, place, writes in accesses:
            known, end = held[name], ends[lane]
            own = known.whole if place < 0 else known.places[place]
            for use in (known.every,) if place == SLOT else (own, known.every):
                if end > use.used:
                    use.used = end
                if writes and end > use.written:
                    use.written = end

    # -- lanes ---

    def _start(self, lane: Lane) -> float:
        """Return when the lane (queue) is free, its inputs are ready and the launch is done."""
        return max(self.free[lane], self.ready[lane], self.issued)

    def _occupy(self, lane: Lane, start: float, end: float) -> None:
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
            self._occupy(COMPUTE, start, max(start + busy, self.issued + cost.host))
        self.issued += cost.host
        self.queued.append(self.free[COMPUTE])

    def _stream(self, chunk: int, cost: Cost, start: float, busy: float) -> None:
        """Simulate a cell whose earlier keys are fetched block by block while it runs."""
        program = self.prices.program
        blocks = max(1, -(-program.share.keys.rows[chunk][0] // program.schedule.kv_block))
        fetch, evict, compute = cost.fetch / blocks, cost.evict / blocks, busy / blocks
        first = max(self._start(FETCH), self.block_slot)
        start = max(start, first + fetch)
        fetched = first + cost.fetch
        if blocks > BLOCK_SLOTS:
            # The last block is fetched when the block before in its slot is no longer in use.
            fetched = max(fetched, start + (blocks - BLOCK_SLOTS) * compute + fetch)
        end = max(start + busy, fetched + compute)
        self._occupy(FETCH, fetched - cost.fetch, fetched)
        self.ends[EVICT] = self._start(EVICT)
        if cost.evict:
            begin = max(self.ends[EVICT], start + compute)
            evicted = max(begin + cost.evict, end + evict)
            end = max(end, evicted - BLOCK_SLOTS * evict)
            self._occupy(EVICT, evicted - cost.evict, evicted)
        end = max(end, self.issued + cost.host)
        self._occupy(COMPUTE, start, end)
        self.block_slot = end - compute

    # -- collectives of a group ---

    def _gather(self, layer: int) -> None:
        """Simulate the all-gather of a layer's sharded weights, once per pass of its group."""
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
    """Return a few layers that stand for all layers of a program, how many layers each stands for,
    and the sizes of their groups. Entries of `layers` are equal if the layers are. `inside` also
    folds layers of a group; set it to false if weights are copied by whole groups, since the layers
    then have to take their full time."""
    kinds = [tuple(layers[first:stop]) for first, stop in groups]
    found, sizes = list[tuple[int, int]](), list[int]()
    for group, count in _folded(kinds, once=BETWEEN):
        first, stop = groups[group]
        every = [(layer, 1) for layer in range(stop - first)]
        few = _folded(layers[first:stop], once=WITHIN) if inside else every
        found += [(first + layer, times * count) for layer, times in few]
        sizes.append(len(few))
    kept, counts = zip(*found, strict=True)
    return kept, counts, tuple(sizes)


def _folded(kinds: Sequence[Hashable], once: int) -> list[tuple[int, int]]:
    """Return (index, count) pairs: entries that stand for all, each for `count` of them. The first
    and the last entry stay. Where a sequence repeats between them, its first `once` and last `once`
    copies stay, and one more copy stands for the rest."""
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
    """Return how often the period that begins at `start` occurs in a row before `end`."""
    stop = start + period
    while stop < end and kinds[stop] == kinds[stop - period]:
        stop += 1
    return (stop - start) // period if stop <= end else 1


def folded_time(prices: Prices, *, beside: bool) -> tuple[float, float]:
    """Return a step's seconds without the update, and the seconds that an update `beside` it adds.
    The program has the layers of a `fold`: each is timed once and multiplied by the layers it
    stands for, which is exact if these keep the queues busy in the same way."""
    costs = _costs(prices)
    alone = _Clock(prices, costs).run()
    return alone, _waited(prices, costs, alone) if beside else 0.0


def _waited(prices: Prices, costs: list[Cost], alone: float) -> float:
    """Return the seconds that waiting for the update of weights adds to a step."""
    return max(0.0, _Clock(prices, costs, updated=prices.updated()).run() - alone)


def run_time(
    prices: Prices, *, overlap: bool, simulated: bool = True, beside: bool = False
) -> Timeline:
    """Return the seconds of one step of the program in `prices`. If queues overlap but are not
    `simulated`, the total is that of the busiest queue, a lower bound. With an overlapping update
    (`beside`) the step also waits for its weights."""
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
    """Return the start and end of each instruction on its queues; see `run_time`."""
    updated = prices.updated() if beside else ()
    clock = _Clock(prices, _costs(prices), spans=[], updated=updated)
    clock.run()
    assert clock.spans is not None
    return tuple(clock.spans)


def _costs(prices: Prices) -> list[Cost]:
    return [prices.of(instruction) for instruction in prices.program.instructions]
