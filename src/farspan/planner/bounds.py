"""Lower bounds of time and memory for many schedules at once: the search prunes with them.

A `ScheduleGrid` fixes the chunk size and the switches of K schedules that split the layers into
groups differently. Every bound is an array [K splits, F save counts, T tiers]: F choices of how
many chunks save O and LSE and how many save activations (`SaveCounts`), and T = 8 choices of tiers
for x (hidden states between groups), attention and activations (`TIERS`). Other axes: P groups of
all K splits, one split after the other; L layers of the model; a trailing 1 broadcasts over F.

Time is the busiest lane's (queue's) if lanes overlap, else the sum of all lanes: sums over cells,
without a simulation. Memory is the maximum over a few phases of the program, without padding.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise, product
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from farspan.planner.cell_prices import Array, CellPrices
from farspan.planner.evaluate import kinds_of
from farspan.planner.pass_counts import (
    COMPUTES,
    ENTERS,
    IS_GIVEN,
    PROJECTS,
    WRITES_KV,
    Act,
    Acts,
    Boundary,
    GroupSplits,
    Part,
    Role,
    SaveCounts,
    acts,
)
from farspan.planner.request import Question
from farspan.planner.states import input_bytes, update_overlaps
from farspan.program.layout import kept_chunks, streams
from farspan.program.program import Evict, Fetch
from farspan.program.residency import RESIDENCY, CutInto, Kind
from farspan.spec import Cut, LayerSpec, Schedule, Tier

# The schedule's fields of these tiers.
OPEN = tuple(RESIDENCY[kind].tier for kind in (Kind.X, Kind.ATTENTION, Kind.ACTIVATIONS))
TIERS = tuple(product(Tier, repeat=3))  # of x, attention, activations
ATTENTION, ACTIVATIONS = 1, 2  # indices among the three tensors with open tiers
ON_HOST = np.array([[tier is Tier.HOST for tier in tiers] for tiers in TIERS], dtype=np.float64)


def spread(free: Array, counted: Array) -> Array:
    """For each choice of tiers, add up the entries of `free` [..., 3, save counts] (x, attention,
    activations) for which `counted` [tiers, 3] is 1. Return [..., save counts, tiers]."""
    return np.asarray(np.swapaxes(free, -1, -2) @ counted.T)


@dataclass(frozen=True, eq=False)
class ScheduleGrid:
    """Schedules of one kind of rank that differ in the split of the layers into groups, in the
    chunks saved, and in the tiers of x, attention and activations."""

    cell_prices: CellPrices
    schedule: Schedule  # in tokens of the sequence; the open choices are not read
    splits: GroupSplits
    saves: SaveCounts

    @cached_property
    def last_graphs(self) -> NDArray[np.int64]:
        """Number of chunks whose activations the rank's last group saves, [splits, save counts]."""
        return np.where(self.splits.alone, 0, self.saves.graphs)

    @cached_property
    def lanes(self) -> tuple[Array, Array]:
        """Seconds of a step without update, by queue, [splits, 5, save counts]; and of fetching and
        of evicting x, attention, activations that lie on the host, [splits, 2, 3, save counts]."""
        return _lane_seconds(self)

    @cached_property
    def streams(self) -> bool:
        """Return whether each group's weights are fetched from main memory for each pass."""
        return streams(self.schedule, self.cell_prices.question.layout)

    @property
    def cut(self) -> Cut:
        """Return the point of the forward that all chunks must reach before the backward begins."""
        question = self.cell_prices.question
        return question.model.cut(question.loss)

    @property
    def forwards(self) -> int:
        """Return how many forwards each step runs without a backward."""
        return self.cell_prices.question.loss.forwards

    @cached_property
    def gathers(self) -> Array:
        """Seconds per step of FSDP's collectives, in forwards alone as well, [splits, 1]."""
        found, prices = self.splits.gathers(self.cell_prices.prices), self.cell_prices.prices
        if self.forwards and not self.streams:
            found = found + self.forwards * prices.gathered_once([self.splits.kind.layers])
        return found

    @property
    def zero(self) -> Array:
        return np.zeros(len(self.saves.graphs))

    @cached_property
    def cell_inputs(self) -> Array:
        """Bytes of a layer's input in a saved cell, [splits, layers]; 0 if not saved there."""
        saves = np.array(
            [spec.saves_input for spec in self.cell_prices.model.layers], dtype=np.float64
        )
        row = self.cell_prices.x_row() * self.cell_prices.sizes[0]
        return np.asarray(saves * self.splits.inner * self.splits.keeps * row)

    def saved_cell_bytes(self, spec: LayerSpec, role: Role) -> Array:
        """Return the bytes that one cell saves as activations, [save counts]. These include O and
        LSE, unless all chunks that save activations have both in a separate buffer."""
        outside = (self.saves.attention >= self.saves.graphs) & (role is not Role.LAST_TOP)
        wide = self.cell_prices.cell_bytes(spec, with_attention=True)
        narrow = self.cell_prices.cell_bytes(spec, with_attention=False)
        return np.where(outside, narrow, wide).astype(np.float64)


RankGrids = tuple[ScheduleGrid, ...]  # the same schedules on every kind of rank


def grid_of(question: Question, schedule: Schedule, like: CellPrices | None = None) -> ScheduleGrid:
    """Return the grid of a schedule and its variants on other tiers, for the rank with the head.
    `like` is as in `rank_grids`."""
    return rank_grids(question, schedule, like)[-1]


def rank_grids(question: Question, schedule: Schedule, like: CellPrices | None = None) -> RankGrids:
    """Return the grids of a schedule and its variants on other tiers, one for each kind of rank.
    `like`: prices of the same cells, whose seconds are taken over."""
    found = list[ScheduleGrid]()
    for kind in kinds_of(question, schedule):
        like = CellPrices(question, schedule, kind, like)
        chunks, layers = like.chunks, len(like.model.layers)
        counts = [
            np.array([len(kept_chunks(fraction, chunks))])
            for fraction in (schedule.attention_save_fraction, schedule.activation_save_fraction)
        ]
        sizes = (layers,) if kind.is_stage else schedule.group_sizes(layers)
        shares = (schedule.activation_save_layers,)
        splits = GroupSplits(like.question, (sizes,), kind, shares)
        found.append(
            ScheduleGrid(like, schedule, splits, SaveCounts(counts[0], counts[1], len(chunks)))
        )
    return tuple(found)


def tiers_of(schedule: Schedule) -> int:
    """Index in `TIERS` of a schedule's tiers for x, attention and activations."""
    return TIERS.index((schedule.boundary_inputs, schedule.attention, schedule.activations))


COMPUTE, FETCH, EVICT, COLLECTIVE, HOST = range(5)
LANES = 5
LINK = 2  # fetch, evict


def seconds(grid: ScheduleGrid, *, in_line: bool = False, update: bool = True) -> Array:
    """Lower bound of a step's seconds, [splits, save counts, tiers], whether or not it fits in
    memory. `in_line` assumes that nothing overlaps; `update=False` leaves the update out."""
    cell_prices, question = grid.cell_prices, grid.cell_prices.question
    work, copies = grid.lanes
    working = work[:, COMPUTE] + work[:, COLLECTIVE]
    if question.overlap and not in_line:
        # FSDP's gathers overlap with the cells, but not with the cells' own collectives.
        gathers = grid.gathers
        cells = working - gathers
        busy = np.maximum(np.maximum(cells + _waits(grid), gathers), work[:, HOST])
        link = work[:, FETCH : EVICT + 1, :, None] + spread(copies, ON_HOST)
        total = np.maximum(busy[..., None], link.max(axis=1))
        if question.layout.pipeline == 1:
            total = np.maximum(total, _away_and_back(grid)[..., None] * ON_HOST[:, ACTIVATIONS])
    else:
        total = spread(copies.sum(axis=1), ON_HOST)
        total += (working + work[:, HOST] + work[:, FETCH] + work[:, EVICT])[..., None]
    stages, count = question.layout.pipeline, len(cell_prices.chunks)
    total = total * ((count + stages - 1) / count)
    if update_overlaps(question):  # the backward waits for the update
        backward = cell_prices.lanes.backward
        after = sum(backward[spec].compute.sum() for spec in cell_prices.model.layers)
        after += cell_prices.lanes.head.sum()
        return np.asarray(np.maximum(total, (cell_prices.update + after) * update))
    return np.asarray(total + cell_prices.update * update)


def _away_and_back(grid: ScheduleGrid) -> Array:
    """Lower bound of a step's seconds if saved activations lie on the host, [splits, save counts].

    The first that the backward fetches are the last that the forward has evicted. So all evicts,
    the forwards before the last, all fetches, and the backwards from that on take

        forwards | backwards   at least: evicts + backwards, forwards + fetches
        evicts   | fetches
    """
    key = "away", grid.splits
    forwards, backwards = grid.cell_prices.once(key, lambda: _around_the_turn(grid))
    fetched, evicted = grid.lanes[1][:, 0, ACTIVATIONS], grid.lanes[1][:, 1, ACTIVATIONS]
    return np.asarray(np.maximum(evicted + backwards, forwards + fetched) * (evicted > 0))


def _around_the_turn(grid: ScheduleGrid) -> Array:
    """Seconds of forwards before the last evict of activations, and of backwards after it with the
    forwards that rebuild their graphs, [2, splits, save counts]. Lower bounds: of the last group's
    forward nothing counts."""
    cell_prices, saves = grid.cell_prices, grid.saves
    lanes, layers = cell_prices.lanes, cell_prices.model.layers
    forward, backward = (
        np.array([lane[spec].compute.sum() for spec in layers])
        for lane in (lanes.forward, lanes.backward)
    )
    again = np.stack([lanes.given_attention[spec].compute for spec in layers])  # [layers, chunks]
    first = np.cumsum(np.pad(again, ((0, 0), (1, 0))), axis=1)  # of the first n chunks
    rebuilt = first[:, saves.chunks - saves.graphs]
    found = np.zeros((2, len(grid.splits.sizes), len(saves.graphs)))
    each = zip(grid.splits.bounds, grid.splits.keeping, grid.splits.keeps, strict=True)
    for k, (groups, keeping, keeps) in enumerate(each):
        several = len(groups) - (groups[-1][1] - groups[-1][0] == 1)
        turn = max((groups[group][1] for group in keeping if group < several), default=0)
        found[0, k] = forward[: min(turn, groups[-1][0])].sum()
        every = np.where(keeps[:turn, None] > 0, rebuilt[:turn], first[:turn, -1:])
        found[1, k] = backward[:turn].sum() + every.sum(axis=0)
    return found


# -- waits for weights -----------------------------------------------------------------------------
#
# A layer's weights are gathered once a pass, before its first cell there, while the instruction
# before that cell runs. A group's gradients are summed when its backward has ended, and nothing is
# gathered meanwhile:
#
#     cells        |  layer 0  |    |  layer 1  |        |  layer 0 of the next pass  |
#     collectives  |- weights 1 ----|           |- sums --|- weights 0 -|
#
# So each layer adds what its gather takes beyond the longest instruction that may come before it.


def _waits(grid: ScheduleGrid) -> Array:
    """Lower bound of the seconds that cells wait for FSDP's collectives, [splits, save counts]."""
    cell_prices, splits = grid.cell_prices, grid.splits
    if grid.streams or splits.kind.is_stage or not grid.gathers.any():
        return np.zeros((1, 1))
    key = "waits", splits, grid.saves, grid.schedule.kv_kept
    return cell_prices.once(key, lambda: _exposed_collectives(grid))


def _exposed_collectives(grid: ScheduleGrid) -> Array:
    cell_prices, splits, graphs = grid.cell_prices, grid.splits, grid.saves.graphs
    layers = cell_prices.model.layers
    gather = np.array([cell_prices.prices.gather(layer) for layer in range(len(layers))])
    # The first pass begins with chunk 0; later passes, for K, V or graphs, with any chunk.
    first, later = (
        np.array([_longest(grid, spec, chunk) for spec in layers]) for chunk in (0, None)
    )
    shown = np.maximum(0.0, gather[1:] - first[:-1])
    rebuilt = np.maximum(0.0, gather[1:] - later[:-1])  # of groups that keep no graphs
    again = rebuilt * (graphs == 0)[:, None]
    # If graphs are kept, the backward of a layer follows as dK, dV of the one below are zeroed.
    if grid.schedule.kv_kept:
        beside_clear = np.maximum(0.0, gather[1:] - cell_prices.clear)
        again = np.where((graphs > 0)[:, None], beside_clear, again)
    # Work between a group's end and the next group's first cell, and before the very first cell.
    between = cell_prices.clear + 2 * float(cell_prices.lanes.embed.max())
    found = np.zeros((len(splits.sizes), len(graphs)))
    gathers = splits.gathers(cell_prices.prices)[:, 0]
    for k, groups in enumerate(splits.bounds):
        twice = groups[: len(groups) - (not cell_prices.question.loss.is_cut)]
        sums = gathers[k] - gather.sum() - sum(gather[slice(*group)].sum() for group in twice)
        inner = sum(shown[start : stop - 1].sum() for start, stop in groups)
        entered = gather[0] + sum(
            min(gather[start], gather[stop - 1]) for start, stop in groups[:-1]
        )
        remade = np.zeros(len(graphs))
        for group, (start, stop) in enumerate(groups[:-1]):
            of = again if group in splits.keeping[k] else rebuilt[None]
            remade += of[:, start : stop - 2].sum(axis=1)
        found[k] = np.maximum(0.0, sums + inner + entered + remade - between)
    return found


def _longest(grid: ScheduleGrid, spec: LayerSpec, chunk: int | None) -> float:
    """Return the seconds of the layer's longest forward for a chunk, or for any chunk (None),
    whatever the forward keeps."""
    cell_prices = grid.cell_prices
    lanes = cell_prices.lanes
    modes = (lanes.forward, lanes.given_attention, lanes.project)
    busy = np.max([mode[spec].compute + mode[spec].collective for mode in modes], axis=0)
    kept = cell_prices.prices.saved_row(spec) * cell_prices.sizes
    kept += (
        sum(cell_prices.row(kind, spec) for kind in (Kind.KV, Kind.ATTENTION)) * cell_prices.keys
    )
    seconds_of = busy + 2 * kept / cell_prices.question.machine.memory
    return float(seconds_of.max() if chunk is None else seconds_of[chunk])


def _lane_seconds(grid: ScheduleGrid) -> tuple[Array, Array]:
    cell_prices, splits, kv_kept = grid.cell_prices, grid.splits, grid.schedule.kv_kept
    parts, counts = splits.parts
    each = [_layer_work(grid, part) for part in parts]
    size, choices = len(splits.sizes), len(grid.saves.graphs)
    work = counts @ np.stack([work for work, _ in each]).reshape(len(parts), -1)
    work = work.reshape(size, LANES, choices)
    work[:, COMPUTE] += cell_prices.once(("outside", splits, kv_kept), lambda: _outer_seconds(grid))
    work[:, COMPUTE] += cell_prices.clear
    work[:, COMPUTE] += sum(cell_prices.lanes.votes[spec] for spec in cell_prices.model.layers)
    work[:, COLLECTIVE] += grid.gathers
    if grid.streams:
        work[:, FETCH : EVICT + 1] += splits.streamed(cell_prices.prices)[..., None]
    moved = counts @ np.stack([moved for _, moved in each]).reshape(len(parts), -1)
    moved = moved.reshape(size, LINK, 3, choices)
    moved += cell_prices.once(("x", splits, kv_kept), lambda: _boundary_bytes(grid))
    if forwards := grid.forwards:
        once, x = (
            cell_prices.once(("reference",), lambda: _reference_seconds(grid)),
            _reference_x(grid),
        )
        work, moved = work + forwards * once[:, None], moved + forwards * x[..., None]
    rates = np.array([cell_prices.prices.fetch_rate(), cell_prices.prices.evict_rate()])
    return work, np.asarray(moved / rates[:, None, None])


def _layer_work(grid: ScheduleGrid, part: Part) -> tuple[Array, Array]:
    """Return a layer's seconds per step on the five queues, [5, save counts], and the bytes that it
    fetches and evicts of x, attention (O, LSE) and activations, [2, 3, save counts]. Cached."""
    role, spec, alone = part
    found, known = acts(role, grid.schedule, grid.cut), grid.cell_prices.known
    key = part, found, grid.saves
    if key not in known:
        choices = grid.saves.without_graphs if alone else grid.saves
        layer = _LayerCounts(grid, role, grid.cell_prices.local_layers[spec], found, choices)
        known[key] = layer.work_and_moved()
    return known[key]


@dataclass(frozen=True, slots=True)
class _LayerCounts:
    """Work and traffic per step of one layer, given its position in its group (`Role`)."""

    grid: ScheduleGrid
    role: Role
    spec: LayerSpec
    acts: Acts
    choices: SaveCounts

    def work_and_moved(self) -> tuple[Array, Array]:
        prices, work = self.grid.cell_prices.prices, self._cells()
        moved = np.zeros((LINK, len(OPEN), len(self.grid.zero)))
        rates = prices.fetch_rate(), prices.evict_rate()
        for way, (copy, rate) in enumerate(zip((Fetch, Evict), rates, strict=True)):
            for act in self.acts.of_type(copy):
                kind = cast("Kind", act[1])
                size, tier = self._bytes(act, kind), RESIDENCY[kind].tier
                if tier in OPEN:
                    moved[way, OPEN.index(tier)] += size
                else:
                    work[FETCH + way] += size / rate
        return work, moved

    def _cells(self) -> Array:
        """Return the layer's seconds per step on each queue (compute, fetch, evict, collective,
        host), with copies within the device, [5, save counts]."""
        cell_prices, spec, choices = self.grid.cell_prices, self.spec, self.choices
        lanes, compute = cell_prices.lanes, self.acts.of(COMPUTES, choices)
        work = lanes.forward[spec].total(compute, choices)
        work += lanes.given_attention[spec].total(self.acts.of(IS_GIVEN, choices), choices)
        work += lanes.project[spec].total(self.acts.of(PROJECTS, choices), choices)
        work += lanes.backward[spec].total(np.ones_like(compute), choices)
        if self.grid.schedule.kv is Tier.DEVICE:
            work[FETCH : EVICT + 1] = 0.0  # no prefix is streamed
        put_away = self._bytes(WRITES_KV, Kind.KV)
        put_away += self._bytes((Evict, Kind.ATTENTION), Kind.ATTENTION)
        saved = self.acts.of((Evict, Kind.ACTIVATIONS), choices) @ choices.over(cell_prices.sizes)
        put_away += saved * cell_prices.prices.saved_row(spec)
        again = saved * cell_prices.run.batch * spec.work.remade_traffic
        work[COMPUTE] += (2 * put_away + again) / cell_prices.question.machine.memory
        return work

    def _bytes(self, act: Act, kind: Kind) -> Array:
        """Bytes per step of one kind of tensor in one type of instruction, [save counts]."""
        cell_prices, choices = self.grid.cell_prices, self.choices
        if kind is Kind.ACTIVATIONS:
            cells = cell_prices.cells(choices.graphs)
            return cells * self.grid.saved_cell_bytes(self.spec, self.role)
        by_key = RESIDENCY[kind].rows is CutInto.KEYS
        rows = choices.over(cell_prices.keys if by_key else cell_prices.sizes)
        return np.asarray(self.acts.of(act, choices) @ rows * cell_prices.row(kind, self.spec))


def _reference_seconds(grid: ScheduleGrid) -> Array:
    """Seconds that the reference model's forward keeps each of five queues busy, [5]. FSDP's
    gathers, and copies of x between groups, are counted elsewhere; K, V lie on tier `kv`."""
    cell_prices, kind, prices = grid.cell_prices, grid.splits.kind, grid.cell_prices.prices
    lanes, on_host = cell_prices.lanes, grid.schedule.kv is Tier.HOST
    work = np.zeros(LANES)
    for spec in cell_prices.model.layers:
        cell, kv = (
            lanes.forward[spec],
            cell_prices.row(Kind.KV, spec) * cell_prices.share.keys.total,
        )
        busy = cell.compute, cell.fetch * on_host, cell.evict, cell.collective, cell.host
        work += [lane.sum() for lane in busy]
        work[COMPUTE] += 2 * kv / cell_prices.question.machine.memory
        work[EVICT] += kv * on_host / prices.evict_rate()
    work[COMPUTE] += lanes.embed.sum() * kind.is_first + lanes.values.sum() * kind.is_last
    work[FETCH] += prices.streamed_once([kind.layers]) * grid.streams
    return work


def _reference_x(grid: ScheduleGrid) -> Array:
    """Return the bytes that the reference model's forward fetches and evicts, [splits, 2, 3]. Of x,
    attention and activations only x is copied, between groups or pipeline stages."""
    cell_prices, kind, counts = grid.cell_prices, grid.splits.kind, grid.splits.counts[:, 0]
    moved = np.zeros((len(counts), LINK, len(Tier) + 1))
    moved[:, :, 0] = (cell_prices.x_row() * cell_prices.tokens * (counts - 1))[:, None]
    received = kind.is_stage and not kind.is_first
    moved[:, 1, 0] += cell_prices.x_row() * cell_prices.tokens * received
    return moved


def _boundary_bytes(grid: ScheduleGrid) -> Array:
    """Return bytes fetched and evicted per step, [splits, 2, 3, save counts]: as x, hidden states
    and gradients at boundaries; as attention, 0; as activations, layer inputs in saved cells."""
    cell_prices, groups, kind = grid.cell_prices, grid.splits.counts, grid.splits.kind
    if kind.is_stage:
        above = Boundary.LAST_STAGE if kind.is_last else Boundary.STAGE
        numbers: dict[Boundary, NDArray[Any]] = {above: groups * (not kind.is_first)}
    else:
        several = groups > 1
        numbers = {Boundary.LAST: several, Boundary.EARLIER: several * (groups - 2)}
    numbers[Boundary.HEAD] = groups**0 * kind.is_last
    row = cell_prices.x_row() * cell_prices.sizes
    cells = cell_prices.cells(grid.saves.graphs)
    inputs = cells * grid.cell_inputs.sum(axis=1, keepdims=True)
    moved = []
    for copy in Fetch, Evict:
        each = (_at_boundary(grid, b, (copy, Kind.X), row) * n for b, n in numbers.items())
        x = sum(each, np.zeros((len(groups), len(grid.zero))))
        moved.append(np.stack([x, np.zeros_like(x), inputs], axis=1))
    return np.stack(moved, axis=1)


def _at_boundary(grid: ScheduleGrid, boundary: Boundary, act: Act, values: Array) -> Array:
    """Return the sum over chunks of value * runs of `act` at a boundary, [splits, save counts]."""
    found = acts(boundary, grid.schedule, grid.cut)

    def total(choices: SaveCounts) -> Array:
        return np.asarray(found.of(act, choices) @ choices.over(values))

    if boundary in (Boundary.EARLIER, Boundary.STAGE):
        return total(grid.saves)[None]
    return np.where(grid.splits.alone, total(grid.saves.without_graphs), total(grid.saves))


def _outer_seconds(grid: ScheduleGrid) -> Array:
    """Seconds of the embedding and the head on this rank, [splits, save counts]."""
    lanes, several, kind = grid.cell_prices.lanes, grid.splits.counts > 1, grid.splits.kind
    earlier, last = Boundary.EARLIER, Boundary.LAST
    if kind.is_stage:
        earlier = last = Boundary.STAGE
    enters = (_at_boundary(grid, above, ENTERS, lanes.embed) for above in (earlier, last))
    passes = np.where(several, *enters) * kind.is_first
    head = lanes.head.sum() * kind.is_last
    if grid.cut is Cut.AFTER_HEAD:
        head += lanes.values.sum() * kind.is_last
    return np.asarray(passes + head + lanes.embed_backward.sum() * kind.is_first)


ON_DEVICE = 1 - ON_HOST


@dataclass(slots=True)
class Peaks:
    """Peak bytes on each tier, [splits, save counts, tiers]."""

    device: Array
    host: Array


def peaks(grid: ScheduleGrid) -> Peaks:
    """Return the peak bytes per tier, [splits, save counts, tiers]. Of the memory inside cells only
    autograd graphs are counted."""
    s, once = grid.schedule, grid.cell_prices.once
    key = "peaks", grid.splits, s.kv_kept, s.kv_home, s.attention_open
    device, host = once(key, lambda: _arena_peaks(grid))
    slots_key = "slots", grid.splits, s.kv_kept, s.attention_open
    slots = once(slots_key, lambda: device_slots(grid))
    return Peaks(device + (slots + fixed(grid)), host + grid.splits.on_host)


def least(grid: ScheduleGrid) -> Peaks:
    """Lower bound of the peak bytes, whatever is saved and on whatever tier: device [splits, save
    counts, 1], host [splits, 1, 1]. Saved tensors and staging slots are not counted."""
    phases = zip(_forward_kv(grid), _backward_kv(grid), strict=True)
    device, host = (_fullest_group(grid, np.maximum(*pair)) for pair in phases)
    return Peaks(device + fixed(grid), host + grid.splits.on_host)


def _fullest_group(grid: ScheduleGrid, sizes: Array) -> Array:
    """Reduce bytes per group, [groups, ...], to the maximum of each split, [splits, ...]."""
    # Six times as fast as `np.maximum.reduceat`.
    ends = pairwise([*grid.splits.groups.at, len(sizes)])
    return np.stack([sizes[slice(*pair)].max(axis=0) for pair in ends])


def _arena_peaks(grid: ScheduleGrid) -> Array:
    """Peak bytes of the device and host arenas, [2, splits, save counts, tiers]."""
    groups = grid.splits.groups
    once, splits = grid.cell_prices.once, grid.splits
    device = once(("on device", splits), lambda: spread(_saved(grid), ON_DEVICE))
    host = once(("on host", splits), lambda: spread(_saved(grid), ON_HOST))
    first, backward = _forward_kv(grid), _backward_kv(grid)
    if grid.streams:
        sums = grid.splits.weight_slots(grid.cell_prices.prices, gradients=True)
        backward = backward[0] + sums[groups.split][..., None], backward[1]
    if grid.schedule.attention_open:
        size = _open_attention(grid)[..., None]
        device = np.maximum(
            device + first[0], device + backward[0] + size * ON_DEVICE[:, ATTENTION]
        )
        host = np.maximum(host + first[1], host + backward[1] + size * ON_HOST[:, ATTENTION])
    else:
        device = device + np.maximum(first[0], backward[0])
        host = host + np.maximum(first[1], backward[1])
    return np.stack([_fullest_group(grid, sizes) for sizes in (device, host)])


# -- phases ------------------------------------------------------------------------------------


def _forward_kv(grid: ScheduleGrid) -> tuple[Array, Array]:
    """Bytes of K, V on device and host while each group runs its forward, [groups, 1, 1] each."""
    own, _, waiting = _kv_bytes(grid)
    s = grid.schedule
    is_copied = s.kv_kept and s.kv is Tier.DEVICE and s.kv_home is Tier.HOST
    goes_home = (is_copied and not grid.splits.kind.is_stage) & ~grid.splits.groups.is_last
    device, host = _by_tier(grid, own, waiting)
    return device[..., None], (host + own * goes_home)[..., None]


def _backward_kv(grid: ScheduleGrid) -> tuple[Array, Array]:
    """Bytes of K, V, dK, dV on device and host while a group runs backward, [groups, 1, 1] each."""
    own, gradients, waiting = _kv_bytes(grid)
    device, host = _by_tier(grid, own + gradients, waiting)
    return device[..., None], host[..., None]


def _kv_bytes(grid: ScheduleGrid) -> tuple[Array, Array, Array]:
    """Bytes of a group's K, V, of its dK, dV, and of lower groups' K, V, [groups, 1] each."""
    sums, groups = grid.cell_prices.sums, grid.splits.groups
    own = sums.kv[groups.stop] - sums.kv[groups.first]
    gradients = sums.dkv[groups.stop] - sums.dkv[groups.first]
    return own, gradients, sums.kv[groups.first] * grid.schedule.kv_kept


def _by_tier(grid: ScheduleGrid, size: Array, waiting: Array) -> tuple[Array, Array]:
    """Return the bytes of K, V on the device and on the host. `size` [groups, 1] are the bytes of
    the running group's K, V; `waiting` [groups, 1] those of groups whose backward comes later."""
    on_host = grid.schedule.kv is Tier.HOST
    if on_host or grid.schedule.kv_home is Tier.HOST:
        return size * (not on_host), waiting + size * on_host
    return size + waiting, np.zeros_like(size)


def _saved(grid: ScheduleGrid) -> Array:
    """Bytes of x, attention, activations saved until each group ends, [groups, 3, save counts]."""
    cell_prices, saves, groups = grid.cell_prices, grid.saves, grid.splits.groups
    sums, layers, is_last = cell_prices.sums, len(cell_prices.model.layers), groups.is_last
    graphs = np.where(is_last, grid.last_graphs[groups.split], saves.graphs)
    kind = grid.splits.kind
    # A stage sends its output to the next stage and saves its input.
    left = 0 if kind.is_stage else cell_prices.tokens
    received = groups.index + (kind.is_stage and not kind.is_first)
    x = np.where(is_last, cell_prices.latest(graphs), left)
    x = cell_prices.x_row() * (x + cell_prices.tokens * received)
    # The last group would keep only the O of the chunk that is left out: then there is no buffer.
    written = (saves.attention > 1) | (graphs > 0) | ~is_last | (grid.cut > Cut.NONE)
    end = np.where(is_last, layers - 1, groups.stop)
    begun = sums.attention[groups.first]
    rows = begun + (sums.attention[end] - begun) * written
    attention = rows * cell_prices.latest_keys(saves.attention)
    covered, at = saves.attention >= saves.graphs, (groups.split[:, None], end)
    narrow, wide = (_summed(np.diff(of) * grid.splits.keeps)[at] for of in (sums.narrow, sums.wide))
    cells = np.where(covered, narrow, wide) * cell_prices.cells(saves.graphs)
    # The top layer's cell holds its O; a last group of one layer keeps no cell.
    cells = cells + (sums.wide[layers] - sums.wide[end]) * cell_prices.cells(graphs) * is_last
    inputs = np.cumsum(grid.cell_inputs, axis=1)[groups.split[:, None], groups.stop - 1]
    return np.stack([x, attention, cells + inputs * cell_prices.cells(saves.graphs)], axis=1)


def _summed(values: Array) -> Array:
    """Return running sums over layers: [splits, layers] to [splits, layers + 1]."""
    return np.cumsum(np.pad(values, ((0, 0), (1, 0))), axis=1)


def _open_attention(grid: ScheduleGrid) -> Array:
    """Bytes of O and LSE that each group holds until its backward ends, [groups, save counts]."""
    cell_prices, saves, groups = grid.cell_prices, grid.saves, grid.splits.groups
    kind = grid.splits.kind
    rebuilt = groups.is_last | (not grid.schedule.kv_kept) | kind.is_stage
    rows = cell_prices.sums.attention[groups.stop - 1] - cell_prices.sums.attention[groups.first]
    keys = cell_prices.share.keys.total - cell_prices.latest_keys(saves.attention)
    # The last chunk's alone is not written, except by a stage that hands it on.
    fewest = 1 if kind.is_last and not grid.cut else 0
    return np.asarray(rows * keys * (saves.attention < len(cell_prices.chunks) - fewest) * rebuilt)


# -- whatever the phase ------------------------------------------------------------------------


def differing(grid: ScheduleGrid) -> NDArray[np.bool_]:
    """Return a mask of a grid's schedules that leaves out those equal to an earlier one. Schedules
    are equal if they differ only in the tier of a tensor that neither saves."""
    saves, several = grid.saves, grid.splits.counts > 1
    # Stages always save x.
    has_x = several | (grid.last_graphs > 0) | grid.splits.kind.is_stage
    has_attention = (saves.attention > 0) | grid.schedule.attention_open
    has = np.stack(np.broadcast_arrays(has_x, has_attention, saves.graphs > 0), axis=-1)
    once = (saves.graphs > 0) | (grid.splits.keeps.all(axis=1, keepdims=True))
    return np.asarray((has[..., None, :] | (ON_HOST == 0.0)).all(axis=-1) & once[..., None])


def fixed(grid: ScheduleGrid) -> Array:
    """Return the device bytes outside the arenas, [splits, save counts, 1]: states, the batch,
    graphs and gradients at their peak, and the machine's reserve."""
    cell_prices, splits = grid.cell_prices, grid.splits
    inputs = input_bytes(cell_prices.question, cell_prices.tokens)
    fixed = splits.fixed + inputs + cell_prices.question.machine.reserve
    return np.asarray((fixed + momentary(grid))[..., None])


def momentary(grid: ScheduleGrid) -> Array:
    """Return the peak bytes of autograd graphs and gradients, [splits, save counts], cached."""
    key = "momentary", grid.splits, grid.schedule.layer_checkpoint
    return grid.cell_prices.once(key, lambda: _graphs_and_gradients(grid))


def _graphs_and_gradients(grid: ScheduleGrid) -> Array:
    """Peak bytes of autograd graphs and gradients, outside the arenas, [splits, save counts]. The
    peak is early in the backward, with graphs of the largest group and only gradients of earlier
    batches; or in the first group's last chunk, when all layers have gradients."""
    cell_prices = grid.cell_prices
    gradients = np.array([[float(states.gradients)] for states in grid.splits.split_states])
    there = grid.splits.gradients
    saved = np.array([spec.activation_bytes for spec in cell_prices.model.layers], dtype=np.float64)
    saved *= cell_prices.run.batch * cell_prices.sizes[0]
    graphs = partial(grid.splits.graphs, one_layer=grid.schedule.layer_checkpoint)
    every = graphs(saved * np.ones_like(grid.splits.keeps))
    # Choices that keep every chunk's graphs rebuild those of groups that keep none.
    none = graphs(saved * (1 - grid.splits.keeps))
    some = grid.saves.graphs < len(cell_prices.chunks)
    widest, first = (np.where(some, *pair) for pair in zip(every, none, strict=True))
    several = len(cell_prices.chunks) > 1
    before = gradients * cell_prices.question.accumulates
    found = np.maximum(before + widest, there + first * several)
    return np.asarray(np.maximum(found, gradients))


def device_slots(grid: ScheduleGrid) -> Array:
    """Bytes of the device's staging slots for tensors on the host, [splits, save counts, tiers]."""
    cell_prices, chunk, kind = grid.cell_prices, grid.cell_prices.keys[0], grid.splits.kind
    layers, many = cell_prices.model.layers, grid.splits.counts > 1
    pair = min(2, len(cell_prices.chunks))
    passed = kind.is_stage and not kind.is_first
    ends = pair * ((grid.last_graphs > 0) & grid.splits.has_head)
    x = np.where(many, 2 * pair, ends + pair * passed) * cell_prices.x_row() * cell_prices.sizes[0]
    row = max(cell_prices.row(Kind.ATTENTION, spec) for spec in layers)
    attention = _attention_slots(grid) * row * chunk
    free = np.stack([x, attention, _cell_slots(grid)], axis=1)
    size = spread(free, ON_HOST)
    if grid.schedule.kv is Tier.HOST:
        block = min(grid.schedule.kv_block, cell_prices.share.keys.total) * (
            len(cell_prices.chunks) > 1
        )
        kv, dkv = (max(cell_prices.row(k, spec) for spec in layers) for k in (Kind.KV, Kind.DKV))
        own = np.minimum(2, _copies(grid, Kind.KV))
        size = size + ((own * chunk + 2 * block) * kv + 2 * (chunk + block) * dkv)[..., None]
    if grid.streams:
        size = size + grid.splits.weight_slots(cell_prices.prices, gradients=False)[..., None]
    return np.asarray(size)


def _cell_slots(grid: ScheduleGrid) -> Array:
    """Return the bytes of the two staging slots for saved activations, [splits, save counts].
    Layers use the slots in turn, so each is as large as the largest saved cell."""
    saves, sums = grid.saves, grid.cell_prices.sums
    narrow, wide = np.diff(sums.narrow), np.diff(sums.wide)
    if grid.splits.has_head:
        narrow[-1] = wide[-1]  # the top layer's O is in its cell
    keeps = grid.splits.keeps
    cells = (cell * keeps + grid.cell_inputs for cell in (narrow, wide))
    largest = [cell.max(axis=1, keepdims=True) for cell in cells]
    none = keeps[:, -1:] * grid.splits.last * (grid.last_graphs == 0) * grid.splits.has_head
    slots = 2 * (keeps.sum(axis=1, keepdims=True) > none) * (saves.graphs > 0)
    return np.asarray(slots * np.where(saves.attention >= saves.graphs, *largest))


def _attention_slots(grid: ScheduleGrid) -> Array:
    """Return the number of staging slots for O and LSE, [splits, save counts]: the layers of the
    largest group plus one, but at most one for each copy of a step."""
    widest = np.maximum(grid.splits.last, grid.splits.widest_earlier)
    if grid.splits.kind.is_stage:
        widest = np.full_like(widest, grid.splits.kind.widest)
    crossings = _copies(grid, Kind.ATTENTION)
    return np.asarray(np.minimum(widest + 1, crossings), dtype=np.float64)


def _copies(grid: ScheduleGrid, kind: Kind) -> Array:
    """Number of device-host copies per step of one kind of tensor, [splits, save counts]."""
    parts, counts = grid.splits.parts
    each = np.ones(len(grid.cell_prices.chunks))
    found = []
    for role, _, alone in parts:
        choices = grid.saves.without_graphs if alone else grid.saves
        place = acts(role, grid.schedule, grid.cut)
        copies = place.of((Fetch, kind), choices) + place.of((Evict, kind), choices)
        found.append(copies @ choices.over(each))
    return np.asarray(counts @ np.stack(found))
