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
from farspan.plan.search.bound import TIERS, Family, Frames
from farspan.plan.search.peaks import momentary
from farspan.plan.search.room import fullest, room, slowest, taken
from farspan.plan.search.ruler import Array
from farspan.plan.search.space import Cut
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
    devices: Array  # [S, N]: bytes on the device of each kind of rank

    def only(self, which: Index | NDArray[np.bool_] | slice) -> "Choices":
        """Those at these places."""
        return Choices(
            self.index[which],
            self.seconds[which],
            self.device[which],
            self.host[which],
            self.kind[which],
            self.devices[:, which],
        )


class Frontier:
    """`lowest` is a bound of the seconds of whatever is open, `bound` of the whole family's. Until
    `open` they are all that is there: most families are slower than the best of another, and never
    opened."""

    def __init__(
        self, question: Question, family: Family, schedule: Schedule, cuts: tuple[Cut, ...]
    ) -> None:
        self.question = question
        self.family = family
        self.schedule = schedule  # what the family has in common
        self.cuts = cuts
        self.kept = family[0].kept
        self.choices: Choices | None = None
        self.known: set[int] = set()  # kinds whose cells are counted
        found, _ = taken(family)
        fits = room(question, found.device, found.host) >= 0
        self.bound = float(np.min(slowest(family), where=fits, initial=INFINITE))
        self.lowest = self.bound

    def open(self, best: float, cells: "Cells") -> None:
        """Write down all choices that may fit and may be faster than `best` seconds."""
        every = self.within(best, cells)
        self._keep(every.only(np.lexsort((every.device + every.host, every.seconds))))

    def within(self, limit: float, cells: "Cells") -> Choices:
        """All choices, in no order, that may fit and may be faster than `limit` seconds; cells of
        no kind are counted."""
        times, (found, devices) = slowest(self.family), taken(self.family)
        devices += np.stack([cells.least(frames) for frames in self.family])[..., None]
        device = fullest(self.family, devices)
        fits = (room(self.question, device, found.host) >= 0) & (times < limit)
        index = np.flatnonzero(fits)
        cut, choice = np.divmod(index // len(TIERS), len(self.kept.graphs))
        return Choices(
            index,
            times.ravel()[index],
            device.ravel()[index],
            found.host.ravel()[index],
            cut * KINDS + self.kept.alike[choice],
            devices.reshape(len(devices), -1)[:, index],
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
        of = choices.kind == kind
        choices.devices[:, of] += self.held(kind, cells)
        choices.device[of] = fullest(self.family, choices.devices[:, of])
        self._keep(choices.only(room(self.question, choices.device, choices.host) >= 0))

    def held(self, kind: int, cells: "Cells") -> Array:
        """[S, 1]: bytes that the cells of a kind hold for a moment, on each kind of rank, beyond
        what `within` counts."""
        cut, alike = divmod(kind, KINDS)
        held = []
        for frames in self.family:
            least = cells.least(frames)[cut, self.kept.alike == alike][0]
            held.append([max(0.0, float(cells.beyond(frames, cut, alike) - least))])
        return np.array(held)

    def schedule_at(self, index: int) -> Schedule:
        """The schedule of a choice's index."""
        chosen, tiers = divmod(index, len(TIERS))
        cut, choice = divmod(chosen, len(self.kept.graphs))
        x, attention, activations = TIERS[tiers]
        kept, chunks = self.kept, self.family[0].ruler.chunks
        return replace(
            self.schedule,
            groups=self.cuts[cut],
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
        telling = quick.latest(kept.chunks, *most, first=not frames.ruler.are_equal)
        rank = frames.cuts.kind.rank
        key = s.chunk, sizes, rank, s.kv_kept, s.attention_open, s.layer_checkpoint, telling
        if key not in self._known:
            own = s if frames.cuts.kind.is_stage else replace(s, groups=sizes)
            self._known[key] = quick.transient(frames.ruler, own, telling)
        held = frames.cuts.held[cut]
        gradients = held.gradients + max(0, held.accumulators + self._known[key])
        return float(gradients - momentary(frames)[cut, np.flatnonzero(of)[0]])
