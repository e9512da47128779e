"""The fastest schedule that fits: best first over bounds, each candidate proved by its program.

Every schedule of the space gets a lower bound of its time and memory (bound). The one with the
lowest bound of time is built and simulated; it becomes the best so far if it fits and is faster.
When no bound is left below the best, the best is the optimum of the space. When the budget of
seconds runs out first, the best is at most `gap` slower than the optimum: the lowest bound left
tells.
"""

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from farspan.plan.price.collectives import exchange_bytes
from farspan.plan.price.evaluate import evaluate, size
from farspan.plan.price.local import local_model, local_schedule, refuse_layout
from farspan.plan.price.states import states
from farspan.plan.question import Plan, Question
from farspan.plan.search import quick
from farspan.plan.search.bound import TIERS, Bounds, Frame
from farspan.plan.search.roles import Kept
from farspan.plan.search.ruler import Array, Ruler
from farspan.plan.search.space import Space
from farspan.spec import Schedule

Kind = tuple[object, ...]
Learned = dict[Kind, tuple[float, float]]  # bytes on device and host beyond the bounds
DOUBT = 0.01  # share of a tier by which a quick look may be off
SLACK = 1e-9  # sums of the same numbers in another order


@dataclass(frozen=True, slots=True)
class Outcome:
    """The best of a space."""

    best: Plan | None  # None: nothing fits
    gap: float  # at most this fraction slower than the optimum
    simulated: int  # programs built


@dataclass(slots=True)
class _Frontier:
    """The open choices of one frame, fastest first. Its memory is not looked at before its time
    comes: most frames are slower than the best of another."""

    frame: Frame
    schedule: Schedule  # in tokens of the sequence
    lowest: float  # bound of the fastest choice left, infinite when none is
    learned: Learned
    bounds: Bounds | None = None  # with what was learned
    base: Bounds | None = None
    order: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    place: int = 0

    def open(self, question: Question) -> None:
        """Look at the memory of all choices, and leave those that may fit."""
        bounds = self.frame.bounds()
        self.base = replace(bounds, device=bounds.device + exchanged(self.frame))
        _apply(self)
        assert self.bounds is not None
        self.order = _fitting(question, self.bounds)
        self._advance()

    def keep(self, order: NDArray[np.int64]) -> None:
        """Leave only these choices open."""
        self.order, self.place = order, 0
        self._advance()

    def _advance(self) -> None:
        assert self.bounds is not None
        left = self.place < len(self.order)
        self.lowest = (
            float(self.bounds.seconds.flat[self.order[self.place]]) if left else float("inf")
        )

    def take(self) -> tuple[Schedule, int]:
        """The fastest choice, which is then no longer open."""
        index = int(self.order[self.place])
        self.place += 1
        self._advance()
        choice, tiers = divmod(index, len(TIERS))
        x, attention, activations = TIERS[tiers]
        kept, chunks = self.frame.kept, self.frame.ruler.chunks
        schedule = replace(
            self.schedule,
            x=x,
            attention=attention,
            activations=activations,
            attention_kept=latest_fraction(chunks, int(kept.attention[choice])),
            activations_kept=latest_fraction(chunks, int(kept.graphs[choice])),
        )
        return schedule, index


def latest_fraction(chunks: tuple[tuple[int, int], ...], count: int) -> float:
    """The fraction of the tokens that the latest `count` chunks hold."""
    if count == 0:
        return 0.0
    return (chunks[-1][1] - chunks[-count][0]) / chunks[-1][1]


def search(
    question: Question, space: Space, seconds: float = 8.0, best: Plan | None = None
) -> Outcome:
    """The best schedule of the space by its simulated time, or `best` where none is faster.

    `seconds` are those that this process computes, so that a busy machine finds no less. Raises
    Refused for a layout that the model cannot take.
    """
    refuse_layout(question)
    if states_do_not_fit(question):
        return Outcome(best, 0.0, 0)
    deadline = time.process_time() + seconds
    heap = [(f.lowest, count, f) for count, f in enumerate(_frontiers(question, space))]
    heapq.heapify(heap)
    simulated = 0
    while heap and (best is None or heap[0][0] < best.seconds.total * (1 - SLACK)):
        if time.process_time() > deadline:
            break
        _, count, frontier = heapq.heappop(heap)
        if frontier.bounds is None:
            frontier.open(question)
        else:
            plan = _try(question, frontier)
            simulated += 1
            if plan is not None and (best is None or plan.seconds.total < best.seconds.total):
                best = plan
        if frontier.lowest < float("inf"):
            heapq.heappush(heap, (frontier.lowest, count, frontier))
    gap = 0.0
    if best is not None and heap and heap[0][0] < best.seconds.total * (1 - SLACK):
        gap = best.seconds.total / heap[0][0] - 1
    return Outcome(best, gap, simulated)


def states_do_not_fit(question: Question) -> bool:
    """Are weights, gradients and optimizer states alone too much, whatever the schedule?"""
    part = replace(question, model=local_model(question))
    held = states(part, tuple((i, i + 1) for i in range(len(part.model.layers))))
    machine = question.machine
    device = held.weights + held.gathered + held.gradients + held.optimizer + machine.reserve
    if machine.unified:
        return device + held.optimizer_on_host > machine.host_bytes
    share = machine.host_bytes // min(machine.devices, question.layout.devices())
    return device > machine.device_bytes or held.optimizer_on_host > share


def something_fits(question: Question, space: Space) -> bool:
    """Do the bounds leave any schedule of the space?"""
    if states_do_not_fit(question):
        return False
    return any(room >= 0 for room, _ in _rooms(question, space))


def roomiest(question: Question, space: Space, count: int) -> list[Schedule]:
    """The schedules whose fuller tier has the most left by its bounds, as a share of the tier."""
    found = sorted(_rooms(question, space), key=lambda found: -found[0])
    return [schedule for _, schedule in found[:count]]


def exchanged(frame: Frame) -> int:
    """Bytes of messages under way on a device of this frame's layout."""
    return exchange_bytes(frame.ruler.question, frame.schedule.chunk)


def _rooms(question: Question, space: Space) -> Iterator[tuple[float, Schedule]]:
    """Of every frame, what the best of its choices leaves."""
    for frame, schedule in _frames(question, space):
        device, host = frame.memory()
        device = device + exchanged(frame)
        room = _room(question, device, host)
        index = int(room.argmax())
        x, attention, activations = TIERS[index % len(TIERS)]
        chosen = replace(schedule, x=x, attention=attention, activations=activations)
        yield float(room.flat[index]), chosen


def _room(question: Question, device: Array, host: Array) -> Array:
    """What is left of the fuller tier, as a share of it."""
    machine, devices = question.machine, question.layout.devices()
    if machine.unified:
        return np.asarray(1 - (device + host) / machine.host_bytes)
    share = max(1, machine.host_bytes // min(machine.devices, devices))
    return np.asarray(np.minimum(1 - device / max(1, machine.device_bytes), 1 - host / share))


def _try(question: Question, frontier: _Frontier) -> Plan | None:
    """Simulate the frontier's fastest choice; None if it does not fit."""
    schedule, index = frontier.take()
    # A quick look spares most programs that do not fit: they take seconds to build. It is right to
    # within a hundredth, so only what is further off is left alone.
    device, host = quick.left(question, schedule)
    limits = _limits(question)
    # Where both tiers are one memory, what is left does not say how much either takes.
    apart = not question.machine.unified
    if apart and (device < -DOUBT * limits[0] or host < -DOUBT * limits[1]):
        _learn(question, frontier, (limits[0] - device, limits[1] - host), index)
        return None
    sized = size(question, schedule)
    if sized.fits:
        return evaluate(question, "grouped", schedule, sized)
    _learn(question, frontier, (sized.device.total, sized.host.total), index)
    return None


def _limits(question: Question) -> tuple[int, int]:
    """Bytes that a device, and its share of main memory, can hold."""
    machine = question.machine
    if machine.unified:
        return machine.host_bytes, machine.host_bytes
    share = machine.host_bytes // min(machine.devices, question.layout.devices())
    return machine.device_bytes, share


def _frontiers(question: Question, space: Space) -> Iterator[_Frontier]:
    """Every frame of the space."""
    learned: Learned = {}
    for frame, schedule in _frames(question, space):
        yield _Frontier(frame, schedule, float(frame.seconds().min()), learned)


def _frames(question: Question, space: Space) -> Iterator[tuple[Frame, Schedule]]:
    """With the schedule in tokens of the sequence."""
    rulers: dict[tuple[object, ...], tuple[Ruler, Kept]] = {}
    for schedule in space.schedules():
        own = local_schedule(schedule, question.layout)
        key = schedule.chunk, schedule.kv
        if key not in rulers:
            ruler = Ruler(question, schedule)
            rulers[key] = ruler, _kept(space, ruler)
        yield Frame(rulers[key][0], own, rulers[key][1]), schedule


def _kept(space: Space, ruler: Ruler) -> Kept:
    """Every pair of fractions, in whole chunks."""
    count = len(ruler.chunks)
    attention = sorted({round(part * count) for part in space.attention})
    graphs = sorted({round(part * count) for part in space.activations})
    pairs = np.array([(a, b) for a in attention for b in graphs], dtype=np.int64)
    return Kept(pairs[:, 0], pairs[:, 1], count)


def _fitting(question: Question, bounds: Bounds) -> NDArray[np.int64]:
    """Flat indices of what may fit, fastest first; of equally fast ones the smallest first."""
    found = np.flatnonzero(_room(question, bounds.device, bounds.host) >= 0)
    size = (bounds.device + bounds.host).ravel()[found]
    return np.asarray(found[np.lexsort((size, bounds.seconds.ravel()[found]))])


def _learn(question: Question, frontier: _Frontier, taken: tuple[int, int], index: int) -> None:
    """What a choice took beyond its bounds: what a cell holds for a moment, of which the bounds
    have the graphs only. It depends on the chunk, the widest group and which tensors exist, not on
    how many chunks are kept: so all others that are alike in these take that much more as well.
    The least that was seen counts, since alike is not the same."""
    base, frame = frontier.base, frontier.frame
    assert base is not None
    choice, tiers = divmod(index, len(TIERS))
    device = taken[0] - float(base.device.flat[index])
    host = taken[1] - float(base.host.flat[index])
    key = _kind(frontier.schedule, frame, tiers, int(_switches(frame)[choice]))
    known = frontier.learned.get(key, (device, host))
    frontier.learned[key] = min(known[0], device), min(known[1], host)
    _apply(frontier)
    assert frontier.bounds is not None
    beyond = _room(question, frontier.bounds.device, frontier.bounds.host) < 0
    rest = frontier.order[frontier.place :]
    frontier.keep(rest[~beyond.ravel()[rest]])


def _apply(frontier: _Frontier) -> None:
    """The bounds with what frames of the same kind taught."""
    base = frontier.base
    assert base is not None
    switches = _switches(frontier.frame)
    device, host = base.device.copy(), base.host.copy()
    for switch in np.unique(switches):
        for tiers in range(len(TIERS)):
            key = _kind(frontier.schedule, frontier.frame, tiers, int(switch))
            over = frontier.learned.get(key, (0.0, 0.0))
            device[switches == switch, tiers] += over[0]
            host[switches == switch, tiers] += over[1]
    frontier.bounds = Bounds(base.seconds, device, host)


def _kind(schedule: Schedule, frame: Frame, tiers: int, switch: int) -> Kind:
    """What decides how much more than its bounds a choice takes."""
    cut = frame.groups
    widest = max(stop - first for first, stop in cut)
    alone = cut[-1][1] - cut[-1][0] == 1
    flags = schedule.kv, schedule.kv_kept, schedule.kv_home, schedule.attention_open
    return (schedule.chunk, widest, alone, schedule.layer_checkpoint, *flags, tiers, switch)


def _switches(frame: Frame) -> NDArray[np.int64]:
    """[F]: equal where the same tensors exist: nothing, something or everything kept."""
    chunks, kept = len(frame.ruler.chunks), frame.kept

    def share(count: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.asarray((count > 0) + (count == chunks).astype(np.int64))

    both = share(kept.attention) * 9 + share(kept.graphs) * 3
    return np.asarray(both + (kept.attention >= kept.graphs))
