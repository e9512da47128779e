"""Count the work and traffic of many schedules at once: arrays of cuts into groups and of
fractions.

A layer plays one of six roles: top of a group or below it, in the last group, in an earlier one, or
in a pipeline stage that is not the last. Its cell of chunk c follows from its role and from whether
the chunk's O and LSE are kept (`kept`), its activations are (`graph`), and it is the last chunk:
see program/passes.py. The counts follow from the rules, not from walking a program; tests check
that their sums equal those of the program.

Shapes: F choices of (attention_save_fraction, activation_save_fraction), S spans of chunks. All
chunks of a span are alike in every choice, so hundreds of chunks make only a few dozen spans.
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
    """Role of a layer in its group."""

    INNER = 0
    TOP = 1
    LAST_INNER = 2
    LAST_TOP = 3
    STAGE_INNER = 4
    STAGE_TOP = 5


@dataclass(frozen=True, eq=False)
class Kept:
    """Number of the latest chunks that keep O and LSE, and activations, for F choices."""

    attention: NDArray[np.int64]  # [F]
    graphs: NDArray[np.int64]  # [F]
    chunks: int

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """First chunks of the spans, [S]; the last chunk is a span of its own."""
        borders = self.chunks - np.concatenate([self.attention, self.graphs, [self.chunks, 1]])
        return np.unique(borders[borders < self.chunks])

    def over(self, values: Counts) -> Counts:
        """Return the sums over the chunks of each span, [S]; `values` are [chunks]."""
        return np.asarray(np.add.reduceat(values, self.starts))

    def masks(self) -> tuple[Mask, Mask]:
        """Return masks of the spans that keep O and LSE, and a graph, [F, S] each."""
        chunk = self.starts[None]
        kept = chunk >= self.chunks - self.attention[:, None]
        return kept, chunk >= self.chunks - self.graphs[:, None]

    @cached_property
    def alike(self) -> NDArray[np.int64]:
        """Equal numbers, [F], for choices with the same kinds of chunks: both keep nothing,
        something or everything of each tensor, and keep more chunks of the same tensor."""

        def share(count: NDArray[np.int64]) -> NDArray[np.int64]:
            return np.asarray((count > 0) + (count == self.chunks).astype(np.int64))

        more = 1 + np.sign(self.attention - self.graphs)
        return np.asarray(9 * share(self.attention) + 3 * share(self.graphs) + more)

    @cached_property
    def without_graphs(self) -> "Kept":
        """The same choices in a last group of one layer, which keeps no graphs."""
        return Kept(self.attention, np.zeros_like(self.graphs), self.chunks)


@dataclass(frozen=True, slots=True)
class CellCounts:
    """Times that the cell of each chunk of a span runs and its tensors move, [F, S] each."""

    compute: Counts  # forward cells with attention
    given: Counts  # forward cells with O and LSE already there
    project: Counts  # cells that stop at K, V
    attention_out: Counts  # O and LSE copied to their home
    attention_in: Counts
    graph: Counts  # kept cells, copied there and back once each
    kv_written: Counts  # the chunk's own K, V copied into their buffer


def _counts(*masks: Mask) -> Counts:
    """Return the number of masks that are true, elementwise."""
    return np.asarray(sum(masks, np.zeros(masks[0].shape)))


def switches(role: Role, schedule: Schedule) -> tuple[bool, ...]:
    """Return the switches that decide about the cells of a layer in this role."""
    kept = (schedule.kv_kept,) * (role in (Role.INNER, Role.TOP))
    if role in (Role.TOP, Role.LAST_TOP, Role.STAGE_TOP):
        return kept
    return *kept, schedule.attention_open, schedule.layer_checkpoint


def cells(role: Role, schedule: Schedule, choices: Kept, *, is_cut: bool = False) -> CellCounts:
    """Return the counts of one layer in this role. With `is_cut`, where the backward waits for all
    of the head, the last group's first pass leaves nothing out."""
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
        # It runs so that the stage above reads it, and its backward runs it again at once.
        plain = replace(schedule, attention_open=False, layer_checkpoint=False)
        found = _last_inner(plain, kept, graph, np.zeros_like(graph))
    else:
        found = _last_top(graph, skipped, is_cut)
    return found


def _earlier(top: bool, schedule: Schedule, kept: Mask, graph: Mask, skipped: Mask) -> CellCounts:
    """Counts in a group that is not the last: first pass, rebuild unless K, V stay, backward."""
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
        # O kept only while the group was open is not fetched for a graph of the first pass.
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
    """Return the counts of the top layer, which keeps no O: its backward follows its only
    computation, or the second one if the step is cut."""
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
Part = tuple[Role, LayerSpec, bool]  # role, layer; True: the last group of its cut is one layer
EVERY = 8  # up to this many groups, the memory of each is computed


@dataclass(frozen=True)
class Groups:
    """P groups of K cuts, one after the other, whose memory is computed. Arrays are [P, 1]."""

    cut: Index  # [P], index of the cut
    at: Index  # [K], first group of the cut
    index: Index  # of the group in its cut
    first: Index  # layer
    stop: Index
    is_last: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Cuts:
    """K cuts of a question's layers; sizes of the groups, first group first."""

    question: Question  # about the rank's layers (evaluate.part_of)
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
        """Number of groups of each cut, [K, 1]."""
        return np.array([[len(sizes)] for sizes in self.sizes], dtype=np.float64)

    @property
    def has_head(self) -> bool:
        """Return whether the rank's last group is the last of the model."""
        return self.kind.is_last

    @cached_property
    def alone(self) -> NDArray[np.bool_]:
        """True where the model's last group is one layer, which keeps no activations, [K, 1]."""
        return np.array([[sizes[-1] == 1 and self.has_head] for sizes in self.sizes])

    @cached_property
    def last(self) -> Array:
        """Layers of the rank's last group, [K, 1]."""
        return np.array([[sizes[-1]] for sizes in self.sizes], dtype=np.float64)

    @cached_property
    def widest_earlier(self) -> Array:
        """Layers of the widest group except the last, or 0, [K, 1]."""
        return np.array([[max(sizes[:-1], default=0)] for sizes in self.sizes], dtype=np.float64)

    @cached_property
    def parts(self) -> tuple[list[Part], Array]:
        """Parts that layers play, and the number of layers that play each in each cut, [K, R]."""
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
        """0 for the first layers of groups, whose input is at the boundary, else 1, [K, L]."""
        inner = np.ones((len(self.sizes), len(self.question.model.layers)))
        for k, firsts in enumerate(self.firsts):
            inner[k, firsts] = 0.0
        return inner

    @cached_property
    def groups(self) -> Groups:
        """Groups whose memory is computed: if many, those where even and tapered cuts peak."""
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
        """Bytes of weight gradients once the first layers have theirs, [K, 1]: of all layers and
        the modules outside them; in a stage, which may lack those, of its layers."""
        sizes = [[float(held.gradients)] for held in self.held]
        if self.kind.is_stage:
            model, width = self.question.model, gradient_bytes(self.question)
            outer = sharing_of(self.question).own(0, model.outer_trainable()) * width
            sizes = [[max(0.0, size - outer)] for (size,) in sizes]
        return np.array(sizes)

    @cached_property
    def fixed(self) -> Array:
        """Bytes of weights, gathered weights and optimizer states on the device, [K, 1]."""
        sizes = [[held.on_device] for held in self.held]
        return np.array(sizes, dtype=np.float64)

    @cached_property
    def on_host(self) -> Array:
        """Bytes of weights, gradients and optimizer states on the host, [K, 1, 1]."""
        return np.array([[[held.on_host]] for held in self.held], dtype=np.float64)

    @cached_property
    def own(self) -> list[list[tuple[int, int]]]:
        """The groups of each cut as layer ranges of the whole model."""
        first = self.kind.layers[0]
        return [[(start + first, stop + first) for start, stop in groups] for groups in self.bounds]

    def gathers(self, prices: Prices) -> Array:
        """Return the seconds of FSDP's collectives, [K, 1]."""
        if "_gathers" not in self.__dict__:
            self.__dict__["_gathers"] = np.array([[prices.gathers_of(cut)] for cut in self.own])
        return np.asarray(self.__dict__["_gathers"])

    def streamed(self, prices: Prices) -> Array:
        """Seconds of fetching weights from main memory and evicting their gradients, [K, 2]."""
        return np.array([prices.streamed(cut) for cut in self.own])

    def weight_slots(self, prices: Prices, *, gradients: bool) -> Array:
        """Return the bytes of the slots of groups' weights, or of their gradients, [K, 1]."""
        return np.array([[prices.weight_slots(cut, gradients)] for cut in self.own], dtype=float)

    @cached_property
    def firsts(self) -> list[Index]:
        """First layers of each cut's groups."""
        return [np.array([first for first, _ in groups]) for groups in self.bounds]

    def graphs(self, saved: Array, *, one_layer: bool) -> tuple[Array, Array]:
        """Bytes per token that the layers of a group save, [K, 1] each: in the group that saves the
        most and in the first. `one_layer` counts one layer at a time; `saved` is [L]."""
        gather = np.maximum if one_layer else np.add
        each = [gather.reduceat(saved, firsts) for firsts in self.firsts]
        return np.array([[found.max()] for found in each]), np.array([[found[0]] for found in each])
