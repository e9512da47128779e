"""Lower bounds of time and memory of many schedules at once: what the search prunes with.

`Frames` fix the chunk and the switches of K schedules that differ in their cut into groups. Left
open are F choices of how many chunks keep O, LSE and activations, and T = 8 choices of tiers for x,
attention and activations; every result is [K, F, T]. The time (lanes) is that of the program when
nothing overlaps, and the busiest lane's when everything does; both are sums over cells, so nothing
is simulated. Memory (peaks) is the fullest of a few phases of the program, without padding.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from farspan.plan.grid import kept_chunks
from farspan.plan.price.ranks import kinds_of
from farspan.plan.question import Question
from farspan.plan.search.cuts import Cuts
from farspan.plan.search.roles import Kept, Role
from farspan.plan.search.ruler import Array, Ruler
from farspan.spec import LayerSpec, Schedule, Tier

TIERS = tuple(product(Tier, repeat=3))  # of x, attention, activations
ON_HOST = np.array([[tier is Tier.HOST for tier in tiers] for tiers in TIERS], dtype=np.float64)


def spread(free: Array, counted: Array) -> Array:
    """[..., F, T] from [..., 3, F]: the sum over those of the three that T's tiers count."""
    return np.asarray(np.swapaxes(free, -1, -2) @ counted.T)


@dataclass(frozen=True, eq=False)
class Frames:
    """Schedules that differ in their cut, fractions and three tiers, as one kind of rank runs
    them."""

    ruler: Ruler
    schedule: Schedule  # in tokens of the sequence; what differs is left open
    cuts: Cuts
    kept: Kept

    @cached_property
    def last_graphs(self) -> NDArray[np.int64]:
        """[K, F]: chunks whose activations the rank's last group keeps."""
        return np.where(self.cuts.alone, 0, self.kept.graphs)

    @property
    def zero(self) -> Array:
        """[F]"""
        return np.zeros(len(self.kept.graphs))

    @cached_property
    def cell_inputs(self) -> Array:
        """[K, L]: bytes of the layer's input in a kept cell, where autograd saves it and no
        boundary does."""
        saves = np.array([spec.saves_input for spec in self.ruler.model.layers], dtype=np.float64)
        row = self.ruler.x_row() * self.ruler.sizes[0]
        return np.asarray(saves * self.cuts.inner * row)

    def kv_goes_home(self, role: Role) -> bool:
        """Do kept K, V of a layer in this role cross the link to wait on host?"""
        schedule = self.schedule
        waits = schedule.kv_kept and role in (Role.INNER, Role.TOP)
        waits = waits and not self.cuts.kind.is_stage
        return waits and schedule.kv is Tier.DEVICE and schedule.kv_home is Tier.HOST

    def covered(self, spec: LayerSpec, role: Role) -> Array:
        """[F]: bytes of a kept cell: O and LSE are in it unless their own buffer holds them for
        all its chunks."""
        outside = (self.kept.attention >= self.kept.graphs) & (role is not Role.LAST_TOP)
        wide = self.ruler.cell_bytes(spec, with_attention=True)
        narrow = self.ruler.cell_bytes(spec, with_attention=False)
        return np.where(outside, narrow, wide).astype(np.float64)


Family = tuple[Frames, ...]  # the same schedules on every kind of rank


def frames_of(question: Question, schedule: Schedule) -> Frames:
    """Those of a single schedule, with all its tiers, on the rank that has the head."""
    return all_frames(question, schedule)[-1]


def all_frames(question: Question, schedule: Schedule) -> Family:
    """Those of a single schedule on every kind of rank."""
    found, like = list[Frames](), None
    for kind in kinds_of(question, schedule):
        like = Ruler(question, schedule, kind, like)
        chunks, layers = like.chunks, len(like.model.layers)
        counts = [
            np.array([len(kept_chunks(fraction, chunks))])
            for fraction in (schedule.attention_kept, schedule.activations_kept)
        ]
        sizes = (layers,) if kind.is_stage else schedule.group_sizes(layers)
        cuts = Cuts(like.question, (sizes,), kind)
        found.append(Frames(like, schedule, cuts, Kept(counts[0], counts[1], len(chunks))))
    return tuple(found)


def tiers_of(schedule: Schedule) -> int:
    """The place of a schedule's tiers among T."""
    return TIERS.index((schedule.x, schedule.attention, schedule.activations))
