"""Count the work and traffic of many schedules at once: arrays of cuts into groups and of
fractions.

A layer plays one of six roles: top of a group or below it, in the last group, in an earlier one, or
in a pipeline stage that is not the last. What its cell of chunk c does follows from its role and
from whether the chunk's O and LSE are kept (`kept`), its activations are (`graph`), and it is the
last chunk. The same holds for what crosses a boundary between groups. All of it is read off small
programs, which the passes write (program/passes.py): six layers in three groups, two chunks.

Shapes: F choices of (attention_save_fraction, activation_save_fraction), S spans of chunks. All
chunks of a span are alike in every choice, so hundreds of chunks make only a few dozen spans.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from functools import cached_property, lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from farspan.planner.evaluate import RankKind
from farspan.planner.prices import Prices
from farspan.planner.request import Question
from farspan.planner.states import States, gradient_bytes, sharing_of, states
from farspan.program.builder import build_program
from farspan.program.layout import ONLY, Layout, Rank
from farspan.program.program import AttentionMode, Evict, Fetch, Forward, Load, Program
from farspan.program.residency import Kind
from farspan.spec import HOST, LayerSpec, ModelSpec, RunSpec, Schedule, Tier

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


class Boundary(Enum):
    """What lies above a boundary."""

    EARLIER = "a group that is not the last"
    LAST = "the last group"
    HEAD = "the head"
    STAGE = "a pipeline stage"
    LAST_STAGE = "the last pipeline stage"


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

    @cached_property
    def cases(self) -> tuple[NDArray[np.int64], ...]:
        """Whether the spans keep O and LSE, keep a graph, and are last, [F, S] or [1, S]: 0, 1."""
        chunk, graphs = self.starts[None], self.graphs[:, None]
        kept = chunk >= self.chunks - self.attention[:, None]
        masks = kept, chunk >= self.chunks - graphs, chunk == self.chunks - 1
        return tuple(mask.astype(np.int64) for mask in masks)

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


# -- what passes do, read off small programs ------------------------------------------------------

# Instructions by what they are about: forwards by mode or the buffer they write to, copies by the
# kind of buffer, loads of a group's input.
Act = tuple[type, AttentionMode | Kind]
COMPUTES: Act = Forward, AttentionMode.COMPUTE
IS_GIVEN: Act = Forward, AttentionMode.GIVEN
PROJECTS: Act = Forward, AttentionMode.NONE
WRITES_KV: Act = Forward, Kind.KV
ENTERS: Act = Load, Kind.X
COPIES = Fetch, Evict

_LAYERS, _GROUPS = 6, (2, 2, 2)
_MODEL = ModelSpec("outline", 1, 1, (LayerSpec(1, 1, 1, 1),) * _LAYERS, 2)
_CHUNKS = (0, 1), (1, 2)
# The stage that runs it, if any, and its layer or boundary.
_AT: dict[Role | Boundary, tuple[int | None, int]] = {
    Role.INNER: (None, 2),
    Role.TOP: (None, 3),
    Role.LAST_INNER: (None, 4),
    Role.LAST_TOP: (None, 5),
    Role.STAGE_INNER: (1, 2),
    Role.STAGE_TOP: (1, 3),
    Boundary.EARLIER: (None, 1),
    Boundary.LAST: (None, 2),
    Boundary.HEAD: (None, 3),
    Boundary.STAGE: (1, 1),
    Boundary.LAST_STAGE: (2, 2),
}


@dataclass(frozen=True, slots=True, eq=False)
class Acts:
    """How often a place has an instruction for a chunk, [2, 2, 2] each: by `Kept.cases`. Places
    with the same numbers share one object."""

    counts: dict[Act, Counts]

    def of(self, act: Act, choices: Kept) -> Counts:
        """Return the number for each chunk of a span, [F, S]."""
        kept, graph, last = choices.cases
        if act not in self.counts:
            return np.zeros(kept.shape)
        return np.asarray(self.counts[act][kept, graph, last])

    def copies(self, copy: type) -> Iterator[tuple[Kind, Act]]:
        """Yield the kinds of tensors that cross the link at this place."""
        for act in self.counts:
            if act[0] is copy and isinstance(act[1], Kind):
                yield act[1], act


def acts(place: Role | Boundary, schedule: Schedule, *, is_cut: bool = False) -> Acts:
    """Return what passes do at a place, with x, attention and activations on the host. With
    `is_cut`, the backward waits for all of the head."""
    s = schedule
    return _acts(place, s.kv, s.kv_home, s.kv_kept, s.attention_open, s.layer_checkpoint, is_cut)


@lru_cache(maxsize=1024)
def _acts(
    place: Role | Boundary,
    kv: Tier,
    kv_home: Tier,
    kv_kept: bool,
    attention_open: bool,
    layer_checkpoint: bool,
    is_cut: bool,
) -> Acts:
    switches = Schedule(
        chunk=1,
        groups=_GROUPS,
        boundary_inputs=HOST,
        kv=kv,
        kv_home=kv_home,
        kv_kept=kv_kept,
        attention=HOST,
        attention_open=attention_open,
        activations=HOST,
        layer_checkpoint=layer_checkpoint,
    )
    stage, number = _AT[place]
    found: dict[Act, Counts] = {}
    for kept, graph in product((0, 1), repeat=2):
        for (act, chunk), count in _counted(switches, stage, kept, graph, is_cut)[
            isinstance(place, Role), number
        ].items():
            found.setdefault(act, np.zeros((2, 2, 2)))[kept, graph, chunk] = count
    return _shared(tuple((act, tuple(counts.ravel())) for act, counts in sorted_acts(found)))


def sorted_acts(found: dict[Act, Counts]) -> list[tuple[Act, Counts]]:
    return sorted(found.items(), key=lambda item: (item[0][0].__name__, item[0][1]))


@lru_cache(maxsize=1024)
def _shared(rows: tuple[tuple[Act, tuple[float, ...]], ...]) -> Acts:
    return Acts({act: np.array(counts).reshape(2, 2, 2) for act, counts in rows})


Place = tuple[bool, int]  # whether a layer, else a boundary; its number


@lru_cache(maxsize=1024)
def _counted(
    switches: Schedule, stage: int | None, kept: int, graph: int, is_cut: bool
) -> dict[Place, Counter[tuple[Act, int]]]:
    """Return how often each instruction occurs, by place and chunk."""
    schedule = replace(
        switches, attention_save_fraction=float(kept), activation_save_fraction=float(graph)
    )
    rank = ONLY if stage is None else Rank(Layout(pipeline=len(_GROUPS), fsdp=False), stage)
    program = build_program(_MODEL, RunSpec(1, 2), schedule, rank, _CHUNKS, is_cut=is_cut)
    found: dict[Place, Counter[tuple[Act, int]]] = {
        (is_layer, number): Counter() for is_layer in (False, True) for number in range(_LAYERS + 1)
    }
    for place, act, chunk in _places(program):
        found[place][act, chunk] += 1
    return found


def _places(program: Program) -> Iterator[tuple[Place, Act, int]]:
    for i in program.instructions:
        match i:
            case Forward():
                given = i.mode is AttentionMode.HELD
                yield (True, i.layer), (Forward, AttentionMode.GIVEN if given else i.mode), i.chunk
                if i.write_kv is not None:
                    yield (True, i.layer), WRITES_KV, i.chunk
            case Load():
                yield (False, i.layer // _GROUPS[0]), ENTERS, i.chunk
            case Fetch() | Evict():
                home = program.buffers[i.source if isinstance(i, Fetch) else i.target]
                yield (home.kind is not Kind.X, home.layer), (type(i), home.kind), i.chunk


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
