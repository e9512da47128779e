"""Count the work and copies of many schedules at once, for all splits and save counts.

A layer has one of six roles (`Role`): the top layer of its group or a layer below, in the last
group, in an earlier one, or in a pipeline stage that is not the last. The role decides which
instructions its cell of a chunk runs, together with three bits per chunk: its O and LSE are saved
(`kept`), its activations are saved (`graph`), it is the last chunk. The same holds for copies
between groups (`Boundary`). Counts are read off small programs, which the passes write
(program/passes.py): three groups of layers, and two chunks.

Shapes: K splits of the layers into groups, F choices of (attention_save_fraction,
activation_save_fraction), S spans of chunks. All chunks of a span have the same three bits in every
choice, so hundreds of chunks make only a few dozen spans.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
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
from farspan.program.layout import ONLY, Layout, Rank, keeping_groups
from farspan.program.program import AttentionMode, Evict, Fetch, Forward, Load, Program
from farspan.program.residency import Kind
from farspan.spec import HOST, Cut, LayerSpec, ModelSpec, RunSpec, Schedule, Tier

Mask = NDArray[np.bool_]
Counts = NDArray[np.float64]


class Role(IntEnum):
    """Position of a layer in its group, and of the group in the model."""

    INNER = 0
    TOP = 1
    LAST_INNER = 2
    LAST_TOP = 3
    STAGE_INNER = 4
    STAGE_TOP = 5


class Boundary(Enum):
    """Place where hidden states leave a group, named by what reads them (group, stage, head)."""

    EARLIER = "a group that is not the last"
    LAST = "the last group"
    HEAD = "the head"
    STAGE = "a pipeline stage"
    LAST_STAGE = "the last pipeline stage"


@dataclass(frozen=True, eq=False)
class SaveCounts:
    """Choices of how many of the latest chunks save O and LSE, and how many save activations."""

    attention: NDArray[np.int64]  # [F]
    graphs: NDArray[np.int64]  # [F]
    chunks: int

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """First chunk of each span, [spans]. A span is a range of chunks that all save the same
        tensors, under each choice of save counts; the last chunk is always a span by itself."""
        borders = self.chunks - np.concatenate([self.attention, self.graphs, [self.chunks, 1]])
        return np.unique(borders[borders < self.chunks])

    def over(self, values: Counts) -> Counts:
        """Return the sums of `values` [chunks] over the chunks of each span, [spans]."""
        return np.asarray(np.add.reduceat(values, self.starts))

    @cached_property
    def cases(self) -> NDArray[np.int64]:
        """Code of what the chunks of each span save, [save counts, spans]: 4 for O and LSE, plus 2
        for activations, plus 1 for the last chunk."""
        chunk, graphs = self.starts[None], self.graphs[:, None]
        kept = chunk >= self.chunks - self.attention[:, None]
        return np.asarray(
            4 * kept + 2 * (chunk >= self.chunks - graphs) + (chunk == self.chunks - 1)
        )

    @cached_property
    def alike(self) -> NDArray[np.int64]:
        """Class of each choice, [save counts]: whether no, some or all chunks save O and LSE, the
        same for activations, and which more save. A class shares one bound of its cells' bytes."""

        def share(count: NDArray[np.int64]) -> NDArray[np.int64]:
            return np.asarray((count > 0) + (count == self.chunks).astype(np.int64))

        more = 1 + np.sign(self.attention - self.graphs)
        return np.asarray(9 * share(self.attention) + 3 * share(self.graphs) + more)

    @cached_property
    def without_graphs(self) -> "SaveCounts":
        """The same choices without saved activations: a last group of one layer saves none."""
        return SaveCounts(self.attention, np.zeros_like(self.graphs), self.chunks)


# -- instruction counts, read off small programs --------------------------------------------------

# Instructions by purpose: forwards by mode or the buffer that they write to, copies by the
# kind of buffer, loads of a group's input.
Act = tuple[type, str]
COMPUTES: Act = Forward, AttentionMode.COMPUTE
IS_GIVEN: Act = Forward, AttentionMode.GIVEN
PROJECTS: Act = Forward, AttentionMode.NONE
WRITES_KV: Act = Forward, Kind.KV
ENTERS: Act = Load, Kind.X

_GROUP = 3
_GROUPS = (_GROUP,) * 3
_MODEL = ModelSpec("outline", 1, 1, (LayerSpec(1, 1, 1, 1),) * sum(_GROUPS), 2)
_CHUNKS = (0, 1), (1, 2)
# For each role or boundary: the pipeline stage, if any, and its layers or boundary in `_MODEL`.
_AT: dict[Role | Boundary, tuple[int | None, tuple[int, ...]]] = {
    Role.INNER: (None, (3, 4)),
    Role.TOP: (None, (5,)),
    Role.LAST_INNER: (None, (6, 7)),
    Role.LAST_TOP: (None, (8,)),
    Role.STAGE_INNER: (1, (3, 4)),
    Role.STAGE_TOP: (1, (5,)),
    Boundary.EARLIER: (None, (1,)),
    Boundary.LAST: (None, (2,)),
    Boundary.HEAD: (None, (3,)),
    Boundary.STAGE: (1, (1,)),
    Boundary.LAST_STAGE: (2, (2,)),
}
# Fields of a schedule that decide what cells run and copy.
_SWITCHES = "kv", "kv_home", "kv_kept", "attention_open", "layer_checkpoint"


@dataclass(frozen=True, slots=True, eq=False)
class Acts:
    """Number of instructions of each type per chunk, in a layer of one role or at a boundary
    between groups. Each array [8] has one number for each code of `SaveCounts.cases`."""

    counts: dict[Act, Counts]

    def of(self, act: Act, choices: SaveCounts) -> Counts:
        """Return how many instructions of one type run per chunk, [save counts, chunk spans]."""
        return np.asarray(self.counts.get(act, np.zeros(8)).take(choices.cases))

    def of_type(self, instruction: type) -> list[Act]:
        return [act for act in self.counts if act[0] is instruction]


def acts(place: Role | Boundary, schedule: Schedule, cut: Cut = Cut.NONE) -> Acts:
    """Return how often each instruction runs per chunk, in a layer of one role or at one boundary,
    if all saved tensors lie on the host. If layers of a role differ, the smallest number counts.
    `cut` says what runs before the backward begins."""
    return _acts(place, tuple(getattr(schedule, name) for name in _SWITCHES), cut)


@lru_cache(maxsize=1024)
def _acts(place: Role | Boundary, switches: tuple[Tier | bool, ...], cut: Cut) -> Acts:
    (stage, numbers), found = _AT[place], dict[Act, Counts]()
    for kept, graph in product((0, 1), repeat=2):
        counted = _counted(switches, stage, (kept, graph), cut)
        for act, chunk in {(act, chunk) for _, act, chunk in counted}:
            each = [counted[(type(place), number), act, chunk] for number in numbers]
            found.setdefault(act, np.zeros(8))[4 * kept + 2 * graph + chunk] = min(each)
    return _shared(tuple((act, tuple(found[act])) for act in sorted(found, key=str)))


@lru_cache(maxsize=1024)
def _shared(rows: tuple[tuple[Act, tuple[float, ...]], ...]) -> Acts:
    return Acts({act: np.array(row) for act, row in rows if any(row)})


Place = tuple[type[Role | Boundary], int]


@lru_cache(maxsize=1024)
def _counted(
    switches: tuple[Tier | bool, ...], stage: int | None, keep: tuple[int, int], cut: Cut
) -> Counter[tuple[Place, Act, int]]:
    """Build a tiny program and count its instructions by (layer or boundary, type, chunk)."""
    schedule = Schedule(
        chunk=1,
        groups=_GROUPS,
        boundary_inputs=HOST,
        attention_save_fraction=float(keep[0]),
        attention=HOST,
        activation_save_fraction=float(keep[1]),
        activations=HOST,
        **dict(zip(_SWITCHES, switches, strict=True)),  # type: ignore[arg-type]
    )
    rank = ONLY if stage is None else Rank(Layout(pipeline=len(_GROUPS), fsdp=False), stage)
    program = build_program(_MODEL, RunSpec(1, 2), schedule, rank, _CHUNKS, cut=cut)
    return Counter(_places(program))


def _places(program: Program) -> Iterator[tuple[Place, Act, int]]:
    for i in program.instructions:
        match i:
            case Forward():
                given = i.mode is AttentionMode.HELD
                yield (Role, i.layer), IS_GIVEN if given else (Forward, i.mode), i.chunk
                if i.write_kv is not None:
                    yield (Role, i.layer), WRITES_KV, i.chunk
            case Load() if program.buffers[i.buffer].kind is Kind.X:
                yield (Boundary, i.layer // _GROUP), ENTERS, i.chunk
            case Fetch() | Evict():
                home = program.buffers[i.source if isinstance(i, Fetch) else i.target]
                place = Boundary if home.kind is Kind.X else Role
                yield (place, home.layer), (type(i), home.kind), i.chunk


Array = NDArray[np.float64]
Index = NDArray[np.int64]
Part = tuple[Role, LayerSpec, bool]  # role, layer; True: its group keeps no activations
EVERY = 8  # up to this many groups, the memory of each is computed


@dataclass(frozen=True)
class Groups:
    """The P groups of all K splits of the layers, in a row. Arrays are [P, 1] unless noted."""

    split: Index  # [P], index of the split
    at: Index  # [K], first group of the split
    index: Index  # of the group in its split
    first: Index  # layer
    stop: Index
    is_last: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class GroupSplits:
    """K ways to split a rank's layers into groups (consecutive layers that run together)."""

    question: Question  # about the rank's layers (evaluate.part_of)
    sizes: tuple[tuple[int, ...], ...]
    kind: RankKind
    shares: tuple[float, ...] = ()  # of the groups that keep activations, by split; empty: all do

    @cached_property
    def bounds(self) -> list[tuple[tuple[int, int], ...]]:
        """For each split of the layers into groups, the layer ranges of its groups."""
        stops = [np.cumsum(sizes) for sizes in self.sizes]
        return [
            tuple((int(stop) - size, int(stop)) for stop, size in zip(ends, sizes, strict=True))
            for ends, sizes in zip(stops, self.sizes, strict=True)
        ]

    @cached_property
    def counts(self) -> Array:
        """Number of groups in each split, [splits, 1]."""
        return np.array([[len(sizes)] for sizes in self.sizes], dtype=np.float64)

    @property
    def has_head(self) -> bool:
        """Return whether the rank's last group is the last of the model, which runs the head."""
        return self.kind.is_last

    @cached_property
    def keeping(self) -> list[frozenset[int]]:
        """For each split of the layers: its groups that may keep activations."""
        shares = self.shares or (1.0,) * len(self.sizes)
        counts = map(len, self.sizes)
        if self.kind.is_stage:  # one of all stages, which keep alike
            return [frozenset(range(count)) for count in counts]
        return list(map(keeping_groups, shares, counts))

    @cached_property
    def keeps(self) -> Array:
        """Mask [splits, layers]: 1 for the layers of groups that may keep activations."""
        found = np.zeros((len(self.sizes), len(self.question.model.layers)))
        for row, groups, keeping in zip(found, self.bounds, self.keeping, strict=True):
            for group in keeping:
                row[slice(*groups[group])] = 1.0
        return found

    @cached_property
    def alone(self) -> NDArray[np.bool_]:
        """Whether a split's last group saves no activations, [splits, 1]: it has one layer and the
        head, or is not among those that keep them."""
        is_one = [sizes[-1] == 1 and self.has_head for sizes in self.sizes]
        return np.asarray(np.array([[one] for one in is_one]) | (self.keeps[:, -1:] == 0))

    @cached_property
    def last(self) -> Array:
        """Number of layers in the rank's last group, [splits, 1]."""
        return np.array([[sizes[-1]] for sizes in self.sizes], dtype=np.float64)

    @cached_property
    def widest_earlier(self) -> Array:
        """Number of layers in the largest group before the last, or 0, [splits, 1]."""
        return np.array([[max(sizes[:-1], default=0)] for sizes in self.sizes], dtype=np.float64)

    @cached_property
    def parts(self) -> tuple[list[Part], Array]:
        """Distinct `Part`s (role, kind of layer), and how many layers each has, [splits, parts]."""
        found: dict[Part, Array] = {}
        for k, groups in enumerate(self.bounds):
            tops = {stop - 1 for _, stop in groups}
            first, stop = groups[-1]
            roles = Counter(
                (self._role(is_last=layer >= first, is_top=layer in tops), spec, keeps == 0)
                for layer, (spec, keeps) in enumerate(
                    zip(self.question.model.layers, self.keeps[k], strict=True)
                )
            )
            for (role, spec, none), count in roles.items():
                part = role, spec, none or (role is Role.LAST_TOP and stop - first == 1)
                found.setdefault(part, np.zeros(len(self.sizes)))[k] = count
        return list(found), np.stack(list(found.values()), axis=1)

    def _role(self, *, is_last: bool, is_top: bool) -> Role:
        if is_last and not self.has_head:
            return Role.STAGE_TOP if is_top else Role.STAGE_INNER
        return Role(2 * is_last + is_top)

    @cached_property
    def inner(self) -> Array:
        """Mask [splits, layers]: 0 for a group's first layer, whose input is saved anyway."""
        inner = np.ones((len(self.sizes), len(self.question.model.layers)))
        for k, firsts in enumerate(self.firsts):
            inner[k, firsts] = 0.0
        return inner

    @cached_property
    def groups(self) -> Groups:
        """Groups whose memory is computed: all of a split of up to `EVERY`, else the first two,
        middle and last two. If groups are even or shrink, one of these needs the most."""
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

    # -- states, and gathering or streaming of weights -------------------------------------------

    @cached_property
    def split_states(self) -> list[States]:
        return [states(self.question, groups) for groups in self.bounds]

    @cached_property
    def gradients(self) -> Array:
        """Bytes of weight gradients once every layer has one, [splits, 1]. Modules outside the
        layers count, except in a pipeline stage, which may lack them."""
        sizes = [[float(held.gradients)] for held in self.split_states]
        if self.kind.is_stage:
            model, width = self.question.model, gradient_bytes(self.question)
            outer = sharing_of(self.question).own(0, model.outer_trainable()) * width
            sizes = [[max(0.0, size - outer)] for (size,) in sizes]
        return np.array(sizes)

    @cached_property
    def fixed(self) -> Array:
        """Bytes of weights, gathered weights and optimizer states on the device, [splits, 1]."""
        sizes = [[held.on_device] for held in self.split_states]
        return np.array(sizes, dtype=np.float64)

    @cached_property
    def on_host(self) -> Array:
        """Bytes of weights, gradients and optimizer states on the host, [splits, 1, 1]."""
        return np.array([[[held.on_host]] for held in self.split_states], dtype=np.float64)

    @cached_property
    def ranges(self) -> list[list[tuple[int, int]]]:
        """For each split of the layers: the layer ranges of its groups, numbered in the model."""
        first = self.kind.layers[0]
        return [[(start + first, stop + first) for start, stop in groups] for groups in self.bounds]

    def gathers(self, prices: Prices) -> Array:
        """Return the seconds per step of FSDP's collectives, [splits, 1]."""
        if "_gathers" not in self.__dict__:
            self.__dict__["_gathers"] = np.array(
                [[prices.gathers_of(split)] for split in self.ranges]
            )
        return np.asarray(self.__dict__["_gathers"])

    def streamed(self, prices: Prices) -> Array:
        """Seconds per step of fetching weights and of evicting their gradients, [splits, 2]."""
        return np.array([prices.streamed(split) for split in self.ranges])

    def weight_slots(self, prices: Prices, *, gradients: bool) -> Array:
        """Bytes of device slots through which weights or gradients are copied, [splits, 1]."""
        return np.array(
            [[prices.weight_slots(split, gradients)] for split in self.ranges], dtype=float
        )

    @cached_property
    def firsts(self) -> list[Index]:
        return [np.array([first for first, _ in groups]) for groups in self.bounds]

    def graphs(self, saved: Array, *, one_layer: bool) -> tuple[Array, Array]:
        """Return the bytes of a group's autograd graphs, [splits, 1] each: of the group that has
        the most, and of the first group. `saved` [splits, layers] are each layer's bytes; with
        `one_layer` only a group's largest layer counts."""
        gather = np.maximum if one_layer else np.add
        each = [
            gather.reduceat(row, firsts) for row, firsts in zip(saved, self.firsts, strict=True)
        ]
        return np.array([[found.max()] for found in each]), np.array([[found[0]] for found in each])
