"""Work and traffic of a schedule by counting, for many fractions kept at once: what the search
bounds with.

A layer plays one of six roles: top of a group or below it, in the last group, an earlier one, or a
pipeline's stage that is not the last.
What it does with chunk c follows from its role and from whether the chunk's O and LSE are kept
(`kept`), its activations are (`graph`), and it is the last chunk: see passes. Written from the
rules, not by walking a program; the sums are equal to those of the program, which tests hold.

Shapes: F choices of (attention_kept, activations_kept), S spans of chunks. All chunks of a span are
alike in every choice, so that of hundreds of chunks a few dozen spans are counted.
"""

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from farspan.spec import Schedule

Mask = NDArray[np.bool_]
Counts = NDArray[np.float64]


class Role(IntEnum):
    """What a layer is in its group."""

    INNER = 0
    TOP = 1
    LAST_INNER = 2
    LAST_TOP = 3
    STAGE_INNER = 4
    STAGE_TOP = 5


@dataclass(frozen=True, eq=False)
class Kept:
    """Chunks kept for F choices: how many of the latest keep O and LSE, and activations."""

    attention: NDArray[np.int64]  # [F]
    graphs: NDArray[np.int64]  # [F]
    chunks: int

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """[S]: first chunks of the spans; the last chunk is one of its own."""
        borders = self.chunks - np.concatenate([self.attention, self.graphs, [self.chunks, 1]])
        return np.unique(borders[borders < self.chunks])

    def over(self, values: Counts) -> Counts:
        """[S]: sums over the chunks of each span; `values` are [chunks]."""
        return np.asarray(np.add.reduceat(values, self.starts))

    def masks(self) -> tuple[Mask, Mask]:
        """[F, S]: O and LSE kept; graph kept."""
        chunk = self.starts[None]
        kept = chunk >= self.chunks - self.attention[:, None]
        return kept, chunk >= self.chunks - self.graphs[:, None]

    @cached_property
    def alike(self) -> NDArray[np.int64]:
        """[F]: equal where nothing, something or everything is kept of both, and where the same of
        them is kept for more chunks: then the same kinds of chunks are there."""

        def share(count: NDArray[np.int64]) -> NDArray[np.int64]:
            return np.asarray((count > 0) + (count == self.chunks).astype(np.int64))

        more = 1 + np.sign(self.attention - self.graphs)
        return np.asarray(9 * share(self.attention) + 3 * share(self.graphs) + more)

    @cached_property
    def without_graphs(self) -> "Kept":
        """The same in a last group of one layer, which keeps none."""
        return Kept(self.attention, np.zeros_like(self.graphs), self.chunks)


@dataclass(frozen=True, slots=True)
class Cells:
    """Times that the cell of each chunk of a span runs and its tensors move, [F, S] each."""

    compute: Counts  # forward cells with attention
    given: Counts  # forward cells without: O and LSE are there
    project: Counts  # cells that stop at K, V
    attention_out: Counts  # O and LSE to their home
    attention_in: Counts
    graph: Counts  # kept cells: there and back once each
    kv_written: Counts  # the chunk's own K, V into their buffer


def _counts(*masks: Mask) -> Counts:
    """How many of the masks hold."""
    return np.asarray(sum(masks, np.zeros(masks[0].shape)))


def cells(role: Role, schedule: Schedule, choices: Kept) -> Cells:
    """Counts of one layer in this role."""
    kept, graph = choices.masks()
    last_chunk = choices.starts[None] == choices.chunks - 1
    skipped = last_chunk & ~graph
    if role in (Role.INNER, Role.TOP):
        found = _earlier(role is Role.TOP, schedule, kept, graph, skipped)
    elif role is Role.LAST_INNER:
        found = _last_inner(schedule, kept, graph, skipped)
    elif role is Role.STAGE_INNER:
        found = _last_inner(schedule, kept, graph, np.zeros_like(graph))
    elif role is Role.STAGE_TOP:
        # It is run to be read above, and its backward runs it again at once.
        plain = replace(schedule, attention_open=False, layer_checkpoint=False)
        found = _last_inner(plain, kept, graph, np.zeros_like(graph))
    else:
        found = _last_top(graph, skipped)
    return found


def _earlier(top: bool, schedule: Schedule, kept: Mask, graph: Mask, skipped: Mask) -> Cells:
    """A group that is not the last: first pass, rebuild unless K, V are kept, backward."""
    rebuilt = ~skipped & (not schedule.kv_kept)
    again = ~graph
    opened = rebuilt & schedule.attention_open & (not top)
    have = kept | opened
    rebuild_compute = rebuilt & ~kept & (not top)
    rebuild_given = rebuilt & kept & (not top)
    held = again & schedule.layer_checkpoint & (not top)
    always, never = np.ones_like(kept), np.zeros_like(kept)
    return Cells(
        compute=_counts(always, rebuild_compute, again & ~have),
        given=_counts(rebuild_given, again & have, held),
        project=_counts(rebuilt & top),
        attention_out=_counts(kept, opened & ~kept),
        # What was kept only while the group was open is not fetched for a graph of the first pass.
        attention_in=_counts(rebuild_given, again & have, graph & kept),
        graph=_counts(graph),
        kv_written=_counts(always, never if schedule.kv_kept else rebuilt | again),
    )


def _last_inner(schedule: Schedule, kept: Mask, graph: Mask, skipped: Mask) -> Cells:
    again = ~graph
    have = (kept | schedule.attention_open) & ~skipped
    held = again & schedule.layer_checkpoint
    return Cells(
        compute=_counts(~skipped, again & ~have),
        given=_counts(again & have, held),
        project=np.zeros(kept.shape),
        attention_out=_counts(have),
        attention_in=_counts(again & have, graph & have),
        graph=_counts(graph),
        kv_written=np.ones(kept.shape),
    )


def _last_top(graph: Mask, skipped: Mask) -> Cells:
    """The top layer keeps no O: its backward follows the one time that it is computed."""
    none = np.zeros(graph.shape)
    return Cells(
        compute=np.ones(graph.shape),
        given=none,
        project=_counts(~graph & ~skipped),
        attention_out=none,
        attention_in=none,
        graph=_counts(graph),
        kv_written=np.ones(graph.shape),
    )
