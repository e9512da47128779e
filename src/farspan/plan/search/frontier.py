"""The open choices of one family of schedules, fastest first.

Bounds know a cell's graphs, not what else it holds for a moment. That depends on the cut and on
which chunks there are (kept or not), so choices that are alike in these share it: a kind. It is
found (quick.transient) when the fastest choice of a kind has its turn, and then counts for all.
What lies outside the layers is the same for all kinds: that is known when a family is opened.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from farspan.plan.question import Question
from farspan.plan.search import quick
from farspan.plan.search.bound import TIERS, Frames
from farspan.plan.search.lanes import seconds
from farspan.plan.search.peaks import momentary
from farspan.plan.search.room import room, taken
from farspan.plan.search.ruler import Array
from farspan.spec import Schedule

Index = NDArray[np.int64]
INFINITE = float("inf")
KINDS = 27  # of choices kept, numbered by Kept.alike, for each cut


@dataclass(slots=True)
class Choices:
    """Open choices, fastest first, and of equally fast ones the smallest; arrays are [N]."""

    index: Index  # in the frames' [K, F, T], flattened
    seconds: Array
    device: Array  # bytes
    host: Array
    kind: Index

    def only(self, which: Index | NDArray[np.bool_] | slice) -> "Choices":
        """Those at these places."""
        return Choices(
            self.index[which],
            self.seconds[which],
            self.device[which],
            self.host[which],
            self.kind[which],
        )


class Frontier:
    """`lowest` is a bound of the seconds of whatever is open, `bound` of the whole family's. Until
    `open` they are all that is there: most families are slower than the best of another, and never
    opened."""

    def __init__(self, question: Question, frames: Frames, schedule: Schedule) -> None:
        self.question = question
        self.frames = frames
        self.schedule = schedule  # what the family has in common, in tokens of the sequence
        self.choices: Choices | None = None
        self.known: set[int] = set()  # kinds whose cells are counted
        found = taken(frames)
        fits = room(question, found.device, found.host) >= 0
        self.bound = float(np.min(seconds(frames), where=fits, initial=INFINITE))
        self.lowest = self.bound

    def open(self, best: float, cells: "Cells") -> None:
        """Write down all choices that may fit and may be faster than `best` seconds."""
        every = self.within(best, cells)
        self._keep(every.only(np.lexsort((every.device + every.host, every.seconds))))

    def within(self, limit: float, cells: "Cells") -> Choices:
        """All choices, in no order, that may fit and may be faster than `limit` seconds; cells of
        no kind are counted."""
        times, found = seconds(self.frames), taken(self.frames)
        found.device += cells.least(self.frames)[..., None]
        fits = (room(self.question, found.device, found.host) >= 0) & (times < limit)
        index = np.flatnonzero(fits)
        cut, choice = np.divmod(index // len(TIERS), len(self.frames.kept.graphs))
        return Choices(
            index,
            times.ravel()[index],
            found.device.ravel()[index],
            found.host.ravel()[index],
            cut * KINDS + self.frames.kept.alike[choice],
        )

    def _keep(self, choices: Choices) -> None:
        self.choices = choices
        self.lowest = float(choices.seconds[0]) if len(choices.index) else INFINITE

    def step(self, cells: "Cells") -> Schedule | None:
        """The fastest choice, which is then no longer open; or None where the cells of its kind
        were not counted yet, and now are."""
        choices = self.choices
        assert choices is not None
        kind = int(choices.kind[0])
        if kind not in self.known:
            self._count(kind, cells)
            return None
        index = int(choices.index[0])
        self._keep(choices.only(slice(1, None)))
        return self.schedule_at(index)

    def _count(self, kind: int, cells: "Cells") -> None:
        choices = self.choices
        assert choices is not None
        self.known.add(kind)
        choices.device[choices.kind == kind] += self.held(kind, cells)
        self._keep(choices.only(room(self.question, choices.device, choices.host) >= 0))

    def held(self, kind: int, cells: "Cells") -> float:
        """Bytes that the cells of a kind hold for a moment beyond what `within` counts."""
        cut, alike = divmod(kind, KINDS)
        least = cells.least(self.frames)[cut, self.frames.kept.alike == alike][0]
        return max(0.0, float(cells.beyond(self.frames, cut, alike) - least))

    def schedule_at(self, index: int) -> Schedule:
        """The schedule of a choice's index."""
        chosen, tiers = divmod(index, len(TIERS))
        cut, choice = divmod(chosen, len(self.frames.kept.graphs))
        x, attention, activations = TIERS[tiers]
        kept, chunks = self.frames.kept, self.frames.ruler.chunks
        return replace(
            self.schedule,
            groups=self.frames.cuts.sizes[cut],
            x=x,
            attention=attention,
            activations=activations,
            attention_kept=quick.latest_fraction(chunks, int(kept.attention[choice])),
            activations_kept=quick.latest_fraction(chunks, int(kept.graphs[choice])),
        )


class Cells:
    """What cells hold for a moment, by kind; families share it."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], int] = {}
        self._outside: dict[int, int] = {}  # by chunk

    def least(self, frames: Frames) -> Array:
        """[K, F]: bytes that every choice takes at least beyond its bounds, by what lies outside
        the layers."""
        chunk = frames.schedule.chunk
        if chunk not in self._outside:
            plain = Schedule(chunk, kv_block=frames.schedule.kv_block, kv_kept=True)
            self._outside[chunk] = quick.outside(frames.ruler, plain)
        return np.asarray(np.maximum(0.0, self._outside[chunk] - momentary(frames)))

    def beyond(self, frames: Frames, cut: int, alike: int) -> float:
        """Bytes that the choices of a kind take at least beyond their bounds."""
        kept, s, sizes = frames.kept, frames.schedule, frames.cuts.sizes[cut]
        of = kept.alike == alike
        # Of all choices of the kind those chunks that have the fewest keys before them.
        most = int(kept.attention[of].max()), int(kept.graphs[of].max())
        telling = quick.latest(kept.chunks, *most)
        key = s.chunk, sizes, s.kv_kept, s.attention_open, s.layer_checkpoint, telling
        if key not in self._known:
            own = replace(s, groups=sizes)
            self._known[key] = quick.transient(frames.ruler, own, telling)
        held = frames.cuts.held[cut]
        gradients = held.gradients + max(0, held.accumulators + self._known[key])
        return float(gradients - momentary(frames)[cut, np.flatnonzero(of)[0]])
