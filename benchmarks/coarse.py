"""Part of farspan's schedules: enough to be near its best, few enough for hundreds of plans."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from farspan.planner.space import Space, even
from farspan.spec import Schedule, Tier


@dataclass(frozen=True, slots=True)
class Coarse(Space):
    """Kept K, V wait on host, and O of an open group is kept only with that of all others."""

    def schedules(self) -> Iterator[Schedule]:
        for chunk, cut, kv in product(self.chunks, self.cuts, Tier):
            for kept in (False, True)[: 1 if self.staged else len(cut)]:
                for checkpoint in (True, False)[: max(cut)]:
                    yield Schedule(chunk, cut, kv=kv, kv_kept=kept, layer_checkpoint=checkpoint)


def even_cuts(layers: int, counts: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Even cuts into so many groups, as far as there are layers."""
    found = dict.fromkeys(even(layers, count) for count in counts if count <= layers)
    return tuple(found)
