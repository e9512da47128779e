"""The schedules that the search chooses from: every split into groups, every option, on a grid.

Groups. For every number of groups G, layers are cut as evenly as possible; where boundaries lie on
the device, also tapered: the backward of an early group runs after the boundaries above it are
freed, so the group may be larger by their bytes. In a tapered split each group is as large as fits
under the lowest level that holds all layers; no other split into G groups has a lower one.

Note: [MEMO's alpha]. MEMO's linear program: which fraction alpha of the tokens keeps its
activations (MEMO 4.1).

The paper maximises alpha under two constraints: a layer's swap hides behind the next layer's
forward, and the swapped bytes fit main memory. Left out there and added here:

- the backward: what comes back must hide behind a layer's backward and its recomputation;
- both directions of the link have rates of their own, measured while both are in use;
- main memory belongs to all devices of a node, and optimizer states may lie in it;
- the rounding buffers take device memory, for every alpha above 0;
- the first layer's input is not swapped, and the last layer's backward follows at once.

With one unknown the program needs no solver: each constraint is an upper bound of alpha. Where
copies run in line with the computation nothing hides; then a token is worth swapping if its two
copies are shorter than its recomputation, whichever token it is.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from farspan.planner.cell_prices import CellPrices
from farspan.planner.evaluate import most_layers, own_schedule
from farspan.planner.request import Question
from farspan.planner.states import states
from farspan.program.builder import chunks_of
from farspan.program.layout import group_ranges
from farspan.program.residency import Kind
from farspan.spec import ModelSpec, Schedule, Tier

Split = tuple[int, ...]  # sizes of the groups, first group first
Cutting = tuple[Split, float]  # and the share of the groups that keep activations, evenly

# A program of this many cells has about 200,000 instructions: three seconds to build and walk.
MOST_CELLS = 24_576
SMALLEST_CHUNK = 1024
MOST_CHUNKS = 512  # more chunks cost more overhead, and save no memory that a chunk still holds
PARTS = 16  # of the sequence: fractions kept are multiples of 1 / PARTS, in whole chunks
PARTS_OF_ACTIVATIONS = 8
# Shares of the layers that keep activations, if each is a group.
SHARES = tuple(sorted({part / 8 for part in range(1, 9)} | {1 / 6, 1 / 3, 2 / 3}))


@dataclass(frozen=True, slots=True)
class Space:
    """Choices that a search combines into schedules: chunk sizes, splits of the layers into groups,
    save fractions, tiers of K, V. Tiers of x, attention and activations are always open."""

    chunks: tuple[int, ...]
    splits: tuple[Split, ...]
    attention: tuple[float, ...]
    activations: tuple[float, ...]
    shares: tuple[float, ...] = (1.0,)  # of the layers that keep activations
    kv: tuple[Tier, ...] = tuple(Tier)
    staged: bool = False  # groups are pipeline stages, whose K, V stay in place
    lean: bool = False  # only switches that keep nothing recomputable
    weights: Tier = Tier.DEVICE

    def schedules(self) -> Iterator[Schedule]:
        """Yield one schedule for each chunk size, split and set of options, without duplicates."""
        for chunk in self.chunks:
            for split in self.splits:
                for base in self._switches(split):
                    for share in self._shares(split):
                        yield replace(base, chunk=chunk, groups=split, activation_save_layers=share)

    def grids(self) -> Iterator[tuple[Schedule, tuple[Cutting, ...]]]:
        """Yield a schedule for each chunk size and set of options, with all its layer splits and
        the shares of their groups that keep activations."""
        found: dict[Schedule, list[Cutting]] = {}
        for schedule in replace(self, chunks=self.chunks[:1]).schedules():
            assert isinstance(schedule.groups, tuple)
            cutting = schedule.groups, schedule.activation_save_layers
            base = replace(schedule, groups=1, activation_save_layers=1.0)
            found.setdefault(base, []).append(cutting)
        for chunk in self.chunks:
            for base, cuttings in found.items():
                yield replace(base, chunk=chunk), tuple(cuttings)

    def _shares(self, split: Split) -> tuple[float, ...]:
        """Return the shares of groups that may keep activations: of groups of one layer, whose
        rebuilt cells need nothing from the others."""
        return self.shares if max(split) == 1 and len(split) > 2 else (1.0,)

    def _switches(self, split: Split) -> Iterator[Schedule]:
        is_deep = max(split) > 1
        opens = (False, True) if is_deep and not self.lean else (False,)
        for kv in self.kv:
            for kept, home in self._homes(split, kv):
                for is_open in opens:
                    for checkpoint in (False, True) if is_deep else (False,):
                        yield Schedule(
                            kv=kv,
                            kv_kept=kept,
                            kv_home=home,
                            attention_open=is_open,
                            layer_checkpoint=checkpoint,
                            weights=self.weights,
                        )

    def _homes(self, split: Split, kv: Tier) -> Iterator[tuple[bool, Tier]]:
        yield False, Tier.HOST
        if len(split) > 1 and not self.lean and not self.staged:
            yield True, Tier.HOST
            if kv is Tier.DEVICE:
                yield True, Tier.DEVICE


def whole_space(question: Question) -> Space:
    """Return all choices that farspan has for this question."""
    layout, model = question.layout, question.model
    stages = group_ranges(Schedule(), len(model.layers), layout.pipeline)
    activations = tuple(part / PARTS_OF_ACTIVATIONS for part in range(PARTS_OF_ACTIVATIONS + 1))
    return Space(
        chunk_sizes(question),
        # The stages of a pipeline are its groups.
        splits(model) if layout.pipeline == 1 else (tuple(stop - start for start, stop in stages),),
        tuple(part / PARTS for part in range(PARTS + 1)),
        # Ranks cannot keep activations with tensor parallelism (layout.refuse_together).
        activations if layout.tensor == 1 else (0.0,),
        SHARES if layout.tensor == layout.pipeline == 1 else (1.0,),
        kv=tuple(Tier) if layout.ring == 1 else (Tier.DEVICE,),
        staged=layout.pipeline > 1,
        weights=question.weights,
    )


def leanest(question: Question) -> Space:
    """Return the part of the space that takes the least memory: nothing is saved that can be
    recomputed, and chunks are short, since a cell's memory grows with its chunk."""
    whole = whole_space(question)
    chunks, none = whole.chunks[:2], (0.0,)
    return replace(whole, chunks=chunks, attention=none, activations=none, shares=(1.0,), lean=True)


def chunk_sizes(question: Question) -> tuple[int, ...]:
    """Return chunk sizes in tokens of the sequence: powers of two, and the whole sequence."""
    tokens, layers = question.run.tokens, most_layers(question)
    smallest = max(SMALLEST_CHUNK * question.layout.sequence(), layers * tokens // MOST_CELLS)
    smallest = max(smallest, tokens // MOST_CHUNKS)
    sizes = [tokens]
    size = 1
    while size < tokens:
        if size >= smallest:
            sizes.append(size)
        size *= 2
    return tuple(sorted(sizes))


def splits(model: ModelSpec) -> tuple[Split, ...]:
    """Return an even and a tapered split of the layers for every useful number of groups."""
    layers = len(model.layers)
    found: dict[Split, None] = {}
    for size in range(1, layers + 1):
        count = -(-layers // size)
        found[even(layers, count)] = None
        found[tapered(model, count)] = None
    return tuple(found)


def even(layers: int, groups: int) -> tuple[int, ...]:
    """Return group sizes that differ by at most one; larger groups come last and recompute less."""
    size, more = divmod(layers, groups)
    return (size,) * (groups - more) + (size + 1,) * more


def tapered(model: ModelSpec, groups: int) -> tuple[int, ...]:
    """Return the group sizes, largest first, that take the fewest bytes per token while the fullest
    group runs backward: its K, V, dK, dV; hidden states between the groups below; and its output's
    gradient, unless the head makes it."""
    layers, sizes = len(model.layers), [layer.kv_elements() for layer in model.layers]
    boundary = model.passed() * model.element_bytes
    # Recurrent layers have no K, V; those that attend are dealt evenly among them.
    elements = sizes[0] or max(1, sum(sizes) // layers)
    own = elements * (model.element_bytes + model.accumulate_bytes())
    below = [(i + (i < groups - 1)) * boundary for i in range(groups)]

    def fitting(level: int) -> list[int]:
        """Return the largest group sizes, from 1 layer, that take up to `level` bytes each."""
        return [min(layers, max(1, (level - size) // own)) for size in below]

    levels = sorted({size + count * own for size in below for count in range(1, layers + 1)})
    lowest = bisect_left(levels, True, key=lambda level: sum(fitting(level)) >= layers)
    sizes = fitting(levels[lowest])
    surplus = sum(sizes) - layers
    # The last groups recompute the most: they give back the surplus.
    for index in reversed(range(groups)):
        less = min(surplus, sizes[index] - 1)
        sizes[index] -= less
        surplus -= less
    return tuple(sizes)


# -- MEMO's alpha, see the Note -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Alpha:
    """Upper bounds of MEMO's alpha, the fraction of tokens whose activations are saved."""

    limits: dict[str, float]  # by constraint, each between 0 and 1

    @property
    def value(self) -> float:
        return min(self.limits.values())


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's bytes and seconds over the device's whole share of the sequence."""

    always: float  # bytes swapped for any alpha: x, O and LSE
    others: float  # additional bytes swapped with alpha = 1
    forward: float
    again: float  # the forward without attention, which rebuilds activations that were not kept
    backward: float


def solve_alpha(question: Question, schedule: Schedule) -> Alpha:
    """Return MEMO's alpha for a schedule that runs layer by layer and has x, O, LSE on the host."""
    cell_prices = CellPrices(question, schedule)
    layer = _widest(cell_prices)
    prices = cell_prices.prices
    fetch, evict = prices.fetch_rate(), prices.evict_rate()
    limits = {
        "host memory": _host(cell_prices, layer),
        "rounding buffers": _buffers(cell_prices, own_schedule(schedule, question.layout)),
    }
    if question.overlap:
        limits["forward"] = _part(layer.forward * evict - layer.always, layer.others)
        # (always + a others) / fetch <= backward + (1 - a) again
        room = (layer.backward + layer.again) * fetch - layer.always
        limits["backward"] = _part(room, layer.others + layer.again * fetch)
    else:
        copies = layer.others / fetch + layer.others / evict
        limits["copies in line"] = 1.0 if copies < layer.again else 0.0
    return Alpha(limits)


def with_alpha(question: Question, schedule: Schedule) -> Schedule:
    """Return the schedule that saves the activations of a fraction of the tokens, MEMO's alpha,
    rounded down to whole chunks."""
    layout, alpha = question.layout, solve_alpha(question, schedule).value
    chunks = chunks_of(question.model, question.run.tokens, schedule, layout)
    tokens = chunks[-1][1]
    kept = (tokens - start for start, _ in chunks)
    whole = next((size for size in kept if size <= alpha * tokens), 0)
    return replace(schedule, activation_save_fraction=whole / tokens)


def _part(room: float, size: float) -> float:
    return 1.0 if size <= 0 else min(1.0, max(0.0, room / size))


def _widest(cell_prices: CellPrices) -> _Layer:
    """Return the layer whose saved activations are the most bytes to copy to the host and back."""
    keys, count = cell_prices.share.keys.total, cell_prices.cells(np.array(len(cell_prices.chunks)))
    beside, found = cell_prices.question.overlap, []
    for spec in cell_prices.classes:
        cell = cell_prices.cell_bytes(spec, with_attention=False) * count
        found.append(
            _Layer(
                always=float(
                    cell_prices.x_row() * cell_prices.tokens
                    + cell_prices.row(Kind.ATTENTION, spec) * keys
                ),
                others=float(cell),
                forward=cell_prices.lanes.forward[spec].seconds(overlap=beside),
                again=cell_prices.lanes.given_attention[spec].seconds(overlap=beside),
                backward=cell_prices.lanes.backward[spec].seconds(overlap=beside),
            )
        )
    return max(found, key=lambda layer: layer.others)


def _host(cell_prices: CellPrices, layer: _Layer) -> float:
    question = cell_prices.question
    held = states(question, tuple((i, i + 1) for i in range(len(cell_prices.model.layers))))
    swapped = len(cell_prices.model.layers) - 1
    room = question.host_share() - held.on_host - swapped * layer.always
    if question.machine.unified:
        # The other bytes of a device lie in the same memory.
        room -= held.on_device + held.gradients + held.accumulators
        kv = max(
            cell_prices.row(Kind.KV, spec) + cell_prices.row(Kind.DKV, spec)
            for spec in cell_prices.classes
        )
        room -= kv * cell_prices.share.keys.total + 2 * layer.others / len(cell_prices.chunks)
    return _part(room, swapped * layer.others)


def _buffers(cell_prices: CellPrices, schedule: Schedule) -> float:
    """Bound alpha by device memory: 1 if MEMO's two rounding buffers, a cell each, fit, else 0."""
    question = cell_prices.question
    if question.machine.unified:
        return 1.0
    held = states(question, tuple((i, i + 1) for i in range(len(cell_prices.model.layers))))
    cell = max(cell_prices.cell_bytes(spec, with_attention=False) for spec in cell_prices.classes)
    kv = max(
        cell_prices.row(Kind.KV, spec) + cell_prices.row(Kind.DKV, spec)
        for spec in cell_prices.classes
    )
    taken = held.on_device + held.gradients + held.accumulators
    taken += question.machine.reserve + kv * cell_prices.share.keys.total
    taken += 4 * cell_prices.x_row() * schedule.chunk
    return 1.0 if taken + 2 * cell <= question.machine.device_bytes else 0.0
