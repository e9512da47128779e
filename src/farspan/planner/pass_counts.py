"""Work and traffic of many schedules by counting: many cuts into groups, as arrays, and many
fractions kept at once.

A layer plays one of six roles: top of a group or below it, in the last group, an earlier one, or a
pipeline's stage that is not the last. What it does with chunk c follows from its role and from
whether the chunk's O and LSE are kept (`kept`), its activations are (`graph`), and it is the last
chunk: see program/passes.py. Written from the rules, not by walking a program; the sums are equal
to those of the program, which tests hold.

Shapes: F choices of (attention_save_fraction, activation_save_fraction), S spans of chunks. All
chunks of a span are alike in every choice, so that of hundreds of chunks a few dozen spans are
counted.
"""

from collections import Counter
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from farspan.planner.evaluate import RankKind
from farspan.planner.prices import Prices
from farspan.planner.request import Question
from farspan.planner.states import States, gradient_bytes, sharing_of, states
from farspan.spec import LayerSpec, Schedule

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
class CellCounts:
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


def switches(role: Role, schedule: Schedule) -> tuple[bool, ...]:
    """What decides about the cells of a layer in this role."""
    kept = (schedule.kv_kept,) * (role in (Role.INNER, Role.TOP))
    if role in (Role.TOP, Role.LAST_TOP, Role.STAGE_TOP):
        return kept
    return *kept, schedule.attention_open, schedule.layer_checkpoint


def cells(role: Role, schedule: Schedule, choices: Kept, *, is_cut: bool = False) -> CellCounts:
    """Counts of one layer in this role; of a step that `is_cut` behind the head the last group's
    first pass leaves nothing out."""
    kept, graph = choices.masks()
    last_chunk = choices.starts[None] == choices.chunks - 1
    skipped = last_chunk & ~graph
    if is_cut and role in (Role.LAST_INNER, Role.LAST_TOP):
        skipped = np.zeros_like(graph)
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
        found = _last_top(graph, skipped, is_cut)
    return found


def _earlier(top: bool, schedule: Schedule, kept: Mask, graph: Mask, skipped: Mask) -> CellCounts:
    """A group that is not the last: first pass, rebuild unless K, V are kept, backward."""
    rebuilt = ~skipped & (not schedule.kv_kept)
    again = ~graph
    opened = rebuilt & schedule.attention_open & (not top)
    have = kept | opened
    rebuild_compute = rebuilt & ~kept & (not top)
    rebuild_given = rebuilt & kept & (not top)
    held = again & schedule.layer_checkpoint & (not top)
    always, never = np.ones_like(kept), np.zeros_like(kept)
    return CellCounts(
        compute=_counts(always, rebuild_compute, again & ~have),
        given=_counts(rebuild_given, again & have, held),
        project=_counts(rebuilt & top),
        attention_out=_counts(kept, opened & ~kept),
        # What was kept only while the group was open is not fetched for a graph of the first pass.
        attention_in=_counts(rebuild_given, again & have, graph & kept),
        graph=_counts(graph),
        kv_written=_counts(always, never if schedule.kv_kept else rebuilt | again),
    )


def _last_inner(schedule: Schedule, kept: Mask, graph: Mask, skipped: Mask) -> CellCounts:
    again = ~graph
    have = (kept | schedule.attention_open) & ~skipped
    held = again & schedule.layer_checkpoint
    return CellCounts(
        compute=_counts(~skipped, again & ~have),
        given=_counts(again & have, held),
        project=np.zeros(kept.shape),
        attention_out=_counts(have),
        attention_in=_counts(again & have, graph & have),
        graph=_counts(graph),
        kv_written=np.ones(kept.shape),
    )


def _last_top(graph: Mask, skipped: Mask, is_cut: bool) -> CellCounts:
    """The top layer keeps no O: its backward follows the one time that it is computed, or where
    the step is cut the second."""
    none = np.zeros(graph.shape)
    again = _counts(~graph & ~skipped)
    return CellCounts(
        compute=1 + again * is_cut,
        given=none,
        project=again * (not is_cut),
        attention_out=none,
        attention_in=none,
        graph=_counts(graph),
        kv_written=np.ones(graph.shape),
    )


Array = NDArray[np.float64]
Index = NDArray[np.int64]
Part = tuple[Role, LayerSpec, bool]  # what a layer is; True: its cut's last group is one layer
EVERY = 8  # groups up to which the memory of each is looked at


@dataclass(frozen=True)
class Groups:
    """P groups of K cuts, one after the other, whose memory is looked at. Arrays are [P, 1]."""

    cut: Index  # [P], which of the K
    at: Index  # [K], where the cut's groups begin
    index: Index  # of the group in its cut
    first: Index  # layer
    stop: Index
    is_last: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Cuts:
    """K cuts of a question's layers; sizes of the groups, first group first."""

    question: Question  # about the rank's layers (ranks.part_of)
    sizes: tuple[tuple[int, ...], ...]
    kind: RankKind

    @cached_property
    def bounds(self) -> list[tuple[tuple[int, int], ...]]:
        """Layer ranges of each cut's groups."""
        stops = [np.cumsum(sizes) for sizes in self.sizes]
        return [
            tuple((int(stop) - size, int(stop)) for stop, size in zip(ends, sizes, strict=True))
            for ends, sizes in zip(stops, self.sizes, strict=True)
        ]

    @cached_property
    def counts(self) -> Array:
        """[K, 1]: groups."""
        return np.array([[len(sizes)] for sizes in self.sizes], dtype=np.float64)

    @property
    def has_head(self) -> bool:
        """Is the rank's last group the last of all?"""
        return self.kind.is_last

    @cached_property
    def alone(self) -> NDArray[np.bool_]:
        """[K, 1]: is the last group of all a single layer, which keeps no activations?"""
        return np.array([[sizes[-1] == 1 and self.has_head] for sizes in self.sizes])

    @cached_property
    def last(self) -> Array:
        """[K, 1]: layers of the rank's last group."""
        return np.array([[sizes[-1]] for sizes in self.sizes], dtype=np.float64)

    @cached_property
    def widest_earlier(self) -> Array:
        """[K, 1]: layers of the widest group but the last, 0 where there is none."""
        return np.array([[max(sizes[:-1], default=0)] for sizes in self.sizes], dtype=np.float64)

    @cached_property
    def parts(self) -> tuple[list[Part], Array]:
        """The parts that layers play, and [K, R] how many layers play each in each cut."""
        found: dict[Part, Array] = {}
        for k, groups in enumerate(self.bounds):
            tops = {stop - 1 for _, stop in groups}
            first, stop = groups[-1]
            roles = Counter(
                (self._role(is_last=layer >= first, is_top=layer in tops), spec)
                for layer, spec in enumerate(self.question.model.layers)
            )
            for (role, spec), count in roles.items():
                part = role, spec, role is Role.LAST_TOP and stop - first == 1
                found.setdefault(part, np.zeros(len(self.sizes)))[k] = count
        return list(found), np.stack(list(found.values()), axis=1)

    def _role(self, *, is_last: bool, is_top: bool) -> Role:
        if is_last and not self.has_head:
            return Role.STAGE_TOP if is_top else Role.STAGE_INNER
        return Role(2 * is_last + is_top)

    @cached_property
    def inner(self) -> Array:
        """[K, L]: 0 for the first layers of groups, whose input is at the boundary; else 1."""
        inner = np.ones((len(self.sizes), len(self.question.model.layers)))
        for k, firsts in enumerate(self.firsts):
            inner[k, firsts] = 0.0
        return inner

    @cached_property
    def groups(self) -> Groups:
        """Of many groups, those where even and tapered cuts are fullest."""
        rows: list[tuple[int, int, int, int, bool]] = []
        at: list[int] = []
        for k, groups in enumerate(self.bounds):
            last = len(groups) - 1
            few = {0, 1, last // 2, last - 1, last} & set(range(last + 1))
            at.append(len(rows))
            looked_at = range(last + 1) if last < EVERY else sorted(few)
            rows += [
                (k, group, *groups[group], group == last and self.has_head) for group in looked_at
            ]
        table = np.array(rows, dtype=np.int64)
        index, first, stop, is_last = (table[:, [column]] for column in range(1, 5))
        return Groups(table[:, 0], np.array(at), index, first, stop, is_last.astype(bool))

    # -- states and what gathering them takes ----------------------------------------------------

    @cached_property
    def held(self) -> list[States]:
        """Weights, gradients and optimizer states of one device, for each cut."""
        return [states(self.question, groups) for groups in self.bounds]

    @cached_property
    def gradients(self) -> Array:
        """[K, 1]: bytes of those that are there when the first layers' are: of all layers, and of
        what lies outside them, of which a stage may have none."""
        sizes = [[float(held.gradients)] for held in self.held]
        if self.kind.is_stage:
            model, width = self.question.model, gradient_bytes(self.question)
            outer = sharing_of(self.question).own(0, model.outer_trainable()) * width
            sizes = [[max(0.0, size - outer)] for (size,) in sizes]
        return np.array(sizes)

    @cached_property
    def fixed(self) -> Array:
        """[K, 1]: bytes of weights, gathered weights and optimizer states on the device."""
        sizes = [[held.on_device] for held in self.held]
        return np.array(sizes, dtype=np.float64)

    @cached_property
    def on_host(self) -> Array:
        """[K, 1, 1]: bytes of weights, gradients and optimizer states on the host."""
        return np.array([[[held.on_host]] for held in self.held], dtype=np.float64)

    @cached_property
    def own(self) -> list[list[tuple[int, int]]]:
        """The groups of each cut in the layers of the whole model."""
        first = self.kind.layers[0]
        return [[(start + first, stop + first) for start, stop in of] for of in self.bounds]

    def gathers(self, prices: Prices) -> Array:
        """[K, 1]: seconds of FSDP's collectives."""
        if "_gathers" not in self.__dict__:
            self.__dict__["_gathers"] = np.array([[prices.gathers_of(cut)] for cut in self.own])
        return np.asarray(self.__dict__["_gathers"])

    def streamed(self, prices: Prices) -> Array:
        """[K, 2]: seconds of fetching weights from main memory and evicting their gradients."""
        return np.array([prices.streamed(cut) for cut in self.own])

    def weight_slots(self, prices: Prices, *, gradients: bool) -> Array:
        """[K, 1]: bytes of the slots of groups' weights, or of their gradients."""
        return np.array([[prices.weight_slots(cut, gradients)] for cut in self.own], dtype=float)

    @cached_property
    def firsts(self) -> list[Index]:
        """First layers of each cut's groups."""
        return [np.array([first for first, _ in groups]) for groups in self.bounds]

    def graphs(self, saved: Array, *, one_layer: bool) -> tuple[Array, Array]:
        """[K, 1] each: what the layers of a group save a token, in the group that saves the most
        and in the first; of `one_layer` at a time or of all. `saved` is [L]."""
        gather = np.maximum if one_layer else np.add
        each = [gather.reduceat(saved, firsts) for firsts in self.firsts]
        return np.array([[found.max()] for found in each]), np.array([[found[0]] for found in each])
