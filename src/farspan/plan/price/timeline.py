"""When everything happens: a program simulated on a machine with lanes that work side by side.

    compute     F(0,0)  F(1,0)  F(0,1)  F(1,1)  B(1,1) ...
    fetch               x.1                 x.0
    evict               kv.0   x.1
    collective  all-gather of layer 1, while layer 0 computes

Instructions are issued in the program's order, each on its lane. One starts when its lane is free
and what it waits for is done: the plan's waits, which are the engine's (farspan.plan.waits). A cell
that streams its prefix from host (FPDT 4.2) keeps the links busy while it computes: it begins with
the first block and cannot end before the last has come. Blocks pass through two slots, so that a
block is fetched while the one before is computed with, and none sooner.

With `overlap=False` there is one lane: that is what a copy on the computing stream does.
"""

from dataclasses import dataclass, field
from operator import attrgetter

from farspan.plan.footprints import Lane, lane_of
from farspan.plan.price.seconds import Cost, Prices
from farspan.plan.program import Allocate, Backward, Close, Forward, Free
from farspan.plan.waits import Order, waits

BLOCK_SLOTS = 2  # blocks of the prefix on the device at a time


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
class _Clock:
    """Walks a program, whose instructions have these costs."""

    prices: Prices
    costs: list[Cost]
    free: list[float] = field(default_factory=lambda: [0.0] * len(Lane))  # since when a lane is
    ends: list[dict[int, float]] = field(default_factory=lambda: [{} for _ in Lane])
    collective: float = 0.0  # since when that lane is free
    gathered: tuple[int, ...] = ()
    last_start: float = 0.0
    ready: dict[int, float] = field(default_factory=dict)
    block_slot: float = 0.0  # since when a slot for streamed blocks is free
    spans: list[Span] | None = None  # filled when somebody wants to look
    index: int = 0

    def run(self) -> float:
        program = self.prices.program
        orders = waits(program)
        for index, (i, cost, order) in enumerate(
            zip(program.instructions, self.costs, orders, strict=True)
        ):
            self.index = index
            if isinstance(i, Forward | Backward):
                self._cell(i, cost, order)
            elif isinstance(i, Close):
                self._close(i)
            elif not isinstance(i, Allocate | Free):
                lane = lane_of(i)
                start = self._start(lane, order)
                self._do(lane, start, start + cost.in_line())
        return max(self.collective, *self.free)

    def _start(self, lane: Lane, order: Order) -> float:
        """When the lane is free and what it waits for is done."""
        start = self.free[lane]
        for other, awaited in order.get(lane, ()):
            start = max(start, self.ends[other][awaited])
        return start

    def _do(self, lane: Lane, start: float, end: float) -> None:
        self.free[lane] = self.ends[lane][self.index] = end
        if lane is Lane.COMPUTE:
            self.last_start = start
        self._note(lane.name.lower(), start, end)

    def _note(self, lane: str, start: float, end: float) -> None:
        if self.spans is not None and end > start:
            self.spans.append(Span(lane, start, end, self.index))

    # -- cells ---

    def _cell(self, i: Forward | Backward, cost: Cost, order: Order) -> None:
        self._gather(i.layer)
        start = max(self._start(Lane.COMPUTE, order), self.ready.get(i.layer, 0.0))
        busy = cost.compute + cost.collective + cost.host
        if Lane.FETCH in order:
            self._stream(i.chunk, cost, order, start, busy)
        else:
            self._do(Lane.COMPUTE, start, start + busy)

    def _stream(self, chunk: int, cost: Cost, order: Order, start: float, busy: float) -> None:
        """A cell whose prefix crosses the link block by block while it runs."""
        program = self.prices.program
        blocks = max(1, -(-program.chunks[chunk][0] // program.schedule.kv_block))
        fetch, evict, compute = cost.fetch / blocks, cost.evict / blocks, busy / blocks
        first = max(self._start(Lane.FETCH, order), self.block_slot)
        start = max(start, first + fetch)
        fetched = first + cost.fetch
        if blocks > BLOCK_SLOTS:
            # The last comes when the one that had its slot is done with.
            fetched = max(fetched, start + (blocks - BLOCK_SLOTS) * compute + fetch)
        end = max(start + busy, fetched + compute)
        self._do(Lane.FETCH, fetched - cost.fetch, fetched)
        if cost.evict:
            begin = max(self._start(Lane.EVICT, order), start + compute)
            evicted = max(begin + cost.evict, end + evict)
            end = max(end, evicted - BLOCK_SLOTS * evict)
            self._do(Lane.EVICT, evicted - cost.evict, evicted)
        elif Lane.EVICT in order:
            self.ends[Lane.EVICT][self.index] = self._start(Lane.EVICT, order)
        self._do(Lane.COMPUTE, start, end)
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
        self._note("collective", start, self.collective)
        self.ready[layer] = self.collective

    def _close(self, i: Close) -> None:
        start = max(self.collective, self.free[Lane.COMPUTE])
        self.collective = start + self.prices.reduce(i.group)


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
