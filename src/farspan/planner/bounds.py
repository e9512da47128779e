"""Lower bounds of time and memory for many schedules at once: the search prunes with them.

`Frames` fix the chunk size and the switches of K schedules that differ in how layers are cut into
groups. F choices of how many chunks keep O, LSE and activations stay open, and T = 8 choices of
tiers for x, attention and activations; every result is [K, F, T]. The time (lanes) is that of the
program when nothing overlaps, or the busiest lane's when everything does; both are sums over cells,
so nothing is simulated. Memory (peaks) is the fullest of a few phases of the program, without
padding. The P groups of all K cuts are computed together.
"""

from dataclasses import dataclass
from functools import cached_property
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
    Cuts,
    Kept,
    Part,
    Role,
    acts,
)
from farspan.planner.request import Question
from farspan.planner.states import input_bytes, update_overlaps
from farspan.program.layout import kept_chunks, streams
from farspan.program.program import Evict, Fetch
from farspan.program.residency import RESIDENCY, CutInto, Kind
from farspan.spec import LayerSpec, Schedule, Tier

# The schedule's fields of these tiers.
OPEN = tuple(RESIDENCY[kind].tier for kind in (Kind.X, Kind.ATTENTION, Kind.ACTIVATIONS))
TIERS = tuple(product(Tier, repeat=3))  # of x, attention, activations
ON_HOST = np.array([[tier is Tier.HOST for tier in tiers] for tiers in TIERS], dtype=np.float64)


def spread(free: Array, counted: Array) -> Array:
    """Return [..., F, T] from [..., 3, F]: per T, the sum over the tensors that it counts."""
    return np.asarray(np.swapaxes(free, -1, -2) @ counted.T)


@dataclass(frozen=True, eq=False)
class Frames:
    """Schedules of one kind of rank that differ in cut, kept fractions and three tiers."""

    cell_prices: CellPrices
    schedule: Schedule  # in tokens of the sequence; the open choices are not read
    cuts: Cuts
    kept: Kept

    @cached_property
    def last_graphs(self) -> NDArray[np.int64]:
        """Chunks whose activations the rank's last group keeps, [K, F]."""
        return np.where(self.cuts.alone, 0, self.kept.graphs)

    @cached_property
    def lanes(self) -> tuple[Array, Array]:
        """Seconds per lane without the update [K, 5, F], and copy seconds (fetch, evict) of x,
        attention and activations if on the host [K, 2, 3, F]."""
        return _lanes(self)

    @cached_property
    def streams(self) -> bool:
        """Return whether whole weights come from main memory."""
        return streams(self.schedule, self.cell_prices.question.layout)

    @property
    def is_cut(self) -> bool:
        """Return whether the backward starts only after the head ran on every chunk."""
        return self.cell_prices.question.loss.is_cut

    @property
    def evaluates(self) -> bool:
        """Return whether each step runs the forward of a reference model."""
        return self.cell_prices.question.loss.evaluates

    @cached_property
    def gathers(self) -> Array:
        """Seconds of FSDP's collectives, including those of a reference, [K, 1]."""
        found, prices = self.cuts.gathers(self.cell_prices.prices), self.cell_prices.prices
        if self.evaluates and not self.streams:
            found = found + prices.gathered_once([self.cuts.kind.layers])
        return found

    @property
    def zero(self) -> Array:
        """Zeros, [F]."""
        return np.zeros(len(self.kept.graphs))

    @cached_property
    def cell_inputs(self) -> Array:
        """Bytes of the layer's input in a kept cell if no boundary has it, [K, L]."""
        saves = np.array(
            [spec.saves_input for spec in self.cell_prices.model.layers], dtype=np.float64
        )
        row = self.cell_prices.x_row() * self.cell_prices.sizes[0]
        return np.asarray(saves * self.cuts.inner * row)

    def covered(self, spec: LayerSpec, role: Role) -> Array:
        """Bytes of a kept cell, [F], with O and LSE unless their own buffer has them all."""
        outside = (self.kept.attention >= self.kept.graphs) & (role is not Role.LAST_TOP)
        wide = self.cell_prices.cell_bytes(spec, with_attention=True)
        narrow = self.cell_prices.cell_bytes(spec, with_attention=False)
        return np.where(outside, narrow, wide).astype(np.float64)


Family = tuple[Frames, ...]  # the same schedules on every kind of rank


def frames_of(question: Question, schedule: Schedule) -> Frames:
    """Return the frames of a single schedule, with all its tiers, on the rank that has the head."""
    return all_frames(question, schedule)[-1]


def all_frames(question: Question, schedule: Schedule) -> Family:
    """Return the frames of a single schedule on every kind of rank."""
    found, like = list[Frames](), None
    for kind in kinds_of(question, schedule):
        like = CellPrices(question, schedule, kind, like)
        chunks, layers = like.chunks, len(like.model.layers)
        counts = [
            np.array([len(kept_chunks(fraction, chunks))])
            for fraction in (schedule.attention_save_fraction, schedule.activation_save_fraction)
        ]
        sizes = (layers,) if kind.is_stage else schedule.group_sizes(layers)
        cuts = Cuts(like.question, (sizes,), kind)
        found.append(Frames(like, schedule, cuts, Kept(counts[0], counts[1], len(chunks))))
    return tuple(found)


def tiers_of(schedule: Schedule) -> int:
    """Return the index of a schedule's tiers in `TIERS`."""
    return TIERS.index((schedule.boundary_inputs, schedule.attention, schedule.activations))


COMPUTE, FETCH, EVICT, COLLECTIVE, HOST = range(5)
LANES = 5
LINK = 2  # fetch, evict


def seconds(frames: Frames, *, in_line: bool = False, update: bool = True) -> Array:
    """Return the seconds of a step, [K, F, T], whether or not it fits in memory. `in_line` assumes
    that nothing overlaps; `update=False` leaves the update out."""
    cell_prices, question = frames.cell_prices, frames.cell_prices.question
    work, copies = frames.lanes
    working = work[:, COMPUTE] + work[:, COLLECTIVE]
    if question.overlap and not in_line:
        # FSDP's gathers overlap with the cells, but not with the cells' own collectives.
        gathers = frames.gathers
        busy = np.maximum(np.maximum(working - gathers, gathers), work[:, HOST])
        link = work[:, FETCH : EVICT + 1, :, None] + spread(copies, ON_HOST)
        total = np.maximum(busy[..., None], link.max(axis=1))
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


def _lanes(frames: Frames) -> tuple[Array, Array]:
    cell_prices, cuts, kv_kept = frames.cell_prices, frames.cuts, frames.schedule.kv_kept
    parts, counts = cuts.parts
    each = [_part(frames, part) for part in parts]
    size, choices = len(cuts.sizes), len(frames.kept.graphs)
    work = counts @ np.stack([work for work, _ in each]).reshape(len(parts), -1)
    work = work.reshape(size, LANES, choices)
    work[:, COMPUTE] += cell_prices.once(("outside", cuts, kv_kept), lambda: _outside(frames))
    work[:, COMPUTE] += cell_prices.clear
    work[:, COLLECTIVE] += frames.gathers
    if frames.streams:
        work[:, FETCH : EVICT + 1] += cuts.streamed(cell_prices.prices)[..., None]
    moved = counts @ np.stack([moved for _, moved in each]).reshape(len(parts), -1)
    moved = moved.reshape(size, LINK, 3, choices)
    moved += cell_prices.once(("x", cuts, kv_kept), lambda: _boundaries(frames))
    if frames.evaluates:
        once, x = cell_prices.once(("reference",), lambda: _reference(frames)), _handed_on(frames)
        work, moved = work + once[:, None], moved + x[..., None]
    rates = np.array([cell_prices.prices.fetch_rate(), cell_prices.prices.evict_rate()])
    return work, np.asarray(moved / rates[:, None, None])


def _part(frames: Frames, part: Part) -> tuple[Array, Array]:
    """Return the lanes [5, F] of one layer in this part, and the bytes [2, 3, F] of its O, LSE and
    activations that are fetched and evicted, cached for all cuts."""
    role, spec, alone = part
    found, known = acts(role, frames.schedule, is_cut=frames.is_cut), frames.cell_prices.known
    if (part, found) not in known:
        choices = frames.kept.without_graphs if alone else frames.kept
        layer = _LayerCounts(frames, role, frames.cell_prices.held[spec], found, choices)
        known[part, found] = layer.work_and_moved()
    return known[part, found]


@dataclass(frozen=True, slots=True)
class _LayerCounts:
    """One layer in its role."""

    frames: Frames
    role: Role
    spec: LayerSpec
    acts: Acts
    choices: Kept

    def work_and_moved(self) -> tuple[Array, Array]:
        prices, work = self.frames.cell_prices.prices, self._cells()
        moved = np.zeros((LINK, len(OPEN), len(self.frames.zero)))
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
        """Return the seconds of the cells, and of copies on the device, [5, F]."""
        cell_prices, spec, choices = self.frames.cell_prices, self.spec, self.choices
        lanes, compute = cell_prices.lanes, self.acts.of(COMPUTES, choices)
        work = lanes.forward[spec].total(compute, choices)
        work += lanes.given[spec].total(self.acts.of(IS_GIVEN, choices), choices)
        work += lanes.project[spec].total(self.acts.of(PROJECTS, choices), choices)
        work += lanes.backward[spec].total(np.ones_like(compute), choices)
        if self.frames.schedule.kv is Tier.DEVICE:
            work[FETCH : EVICT + 1] = 0.0  # no prefix is streamed
        put_away = self._bytes(WRITES_KV, Kind.KV)
        put_away += self._bytes((Evict, Kind.ATTENTION), Kind.ATTENTION)
        saved = self.acts.of((Evict, Kind.ACTIVATIONS), choices) @ choices.over(cell_prices.sizes)
        put_away += saved * cell_prices.prices.saved_row(spec)
        work[COMPUTE] += 2 * put_away / cell_prices.question.machine.memory
        return work

    def _bytes(self, act: Act, kind: Kind) -> Array:
        """Return the bytes of a kind of tensor that instructions move, [F]."""
        cell_prices, choices = self.frames.cell_prices, self.choices
        if kind is Kind.ACTIVATIONS:
            cells = cell_prices.cells(choices.graphs)
            return cells * self.frames.covered(self.spec, self.role)
        by_key = RESIDENCY[kind].rows is CutInto.KEYS
        rows = choices.over(cell_prices.keys if by_key else cell_prices.sizes)
        return np.asarray(self.acts.of(act, choices) @ rows * cell_prices.row(kind, self.spec))


def _reference(frames: Frames) -> Array:
    """Return the seconds of the reference's forward, [5]. FSDP's gathers and the x that groups hand
    on are left out; K, V lie where the open group's do."""
    cell_prices, kind, prices = frames.cell_prices, frames.cuts.kind, frames.cell_prices.prices
    lanes, on_host = cell_prices.lanes, frames.schedule.kv is Tier.HOST
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
    work[FETCH] += prices.streamed_once([kind.layers]) * frames.streams
    return work


def _handed_on(frames: Frames) -> Array:
    """Bytes of x that groups or a stage hand on in the reference's forward, [K, 2, 3]."""
    cell_prices, kind, counts = frames.cell_prices, frames.cuts.kind, frames.cuts.counts[:, 0]
    moved = np.zeros((len(counts), LINK, len(Tier) + 1))
    moved[:, :, 0] = (cell_prices.x_row() * cell_prices.tokens * (counts - 1))[:, None]
    received = kind.is_stage and not kind.is_first
    moved[:, 1, 0] += cell_prices.x_row() * cell_prices.tokens * received
    return moved


def _boundaries(frames: Frames) -> Array:
    """Return the bytes copied for x and its gradient between groups, and for the inputs inside kept
    cells, [K, 2, 3, F]: fetched and evicted; by x, attention and activations."""
    cell_prices, groups, kind = frames.cell_prices, frames.cuts.counts, frames.cuts.kind
    if kind.is_stage:
        above = Boundary.LAST_STAGE if kind.is_last else Boundary.STAGE
        numbers: dict[Boundary, NDArray[Any]] = {above: groups * (not kind.is_first)}
    else:
        several = groups > 1
        numbers = {Boundary.LAST: several, Boundary.EARLIER: several * (groups - 2)}
    numbers[Boundary.HEAD] = groups**0 * kind.is_last
    row = cell_prices.x_row() * cell_prices.sizes
    cells = cell_prices.cells(frames.kept.graphs)
    inputs = cells * frames.cell_inputs.sum(axis=1, keepdims=True)
    moved = []
    for copy in Fetch, Evict:
        each = (_at(frames, b, (copy, Kind.X), row) * n for b, n in numbers.items())
        x = sum(each, np.zeros((len(groups), len(frames.zero))))
        moved.append(np.stack([x, np.zeros_like(x), inputs], axis=1))
    return np.stack(moved, axis=1)


def _at(frames: Frames, boundary: Boundary, act: Act, values: Array) -> Array:
    """Return the sum over all chunks of what is done at a boundary, [K, F]; `values` are those of
    a chunk, [chunks]."""
    found = acts(boundary, frames.schedule, is_cut=frames.is_cut)

    def total(choices: Kept) -> Array:
        return np.asarray(found.of(act, choices) @ choices.over(values))

    if boundary in (Boundary.EARLIER, Boundary.STAGE):
        return total(frames.kept)[None]
    return np.where(frames.cuts.alone, total(frames.kept.without_graphs), total(frames.kept))


def _outside(frames: Frames) -> Array:
    """Return the seconds of embedding and head, where the rank has them, [K, F]."""
    lanes, several, kind = frames.cell_prices.lanes, frames.cuts.counts > 1, frames.cuts.kind
    earlier, last = Boundary.EARLIER, Boundary.LAST
    if kind.is_stage:
        earlier = last = Boundary.STAGE
    enters = (_at(frames, above, ENTERS, lanes.embed) for above in (earlier, last))
    passes = np.where(several, *enters) * kind.is_first
    head = lanes.head.sum() * kind.is_last
    if frames.is_cut:
        head += lanes.values.sum() * kind.is_last
    return np.asarray(passes + head + lanes.embed_backward.sum() * kind.is_first)


ON_DEVICE = 1 - ON_HOST
ATTENTION = 1  # index of attention among the three tensors with open tiers


@dataclass(slots=True)
class Peaks:
    """Bytes on each tier, [K, F, T]."""

    device: Array
    host: Array


def peaks(frames: Frames) -> Peaks:
    """Return the peak bytes without what cells allocate briefly beyond their graphs."""
    s, once = frames.schedule, frames.cell_prices.once
    key = "peaks", frames.cuts, s.kv_kept, s.kv_home, s.attention_open
    device, host = once(key, lambda: _fullest(frames))
    slots_key = "slots", frames.cuts, s.kv_kept, s.attention_open
    slots = once(slots_key, lambda: device_slots(frames))
    return Peaks(device + (slots + fixed(frames)), host + frames.cuts.on_host)


def least(frames: Frames) -> Peaks:
    """Return the bytes that any choice of tiers takes: device [K, F, 1], host [K, 1, 1]. Slots and
    the tensors kept from first pass to backward are left out."""
    phases = zip(_first(frames), _backward(frames), strict=True)
    device, host = (_of_cuts(frames, np.maximum(*pair)) for pair in phases)
    return Peaks(device + fixed(frames), host + frames.cuts.on_host)


def _of_cuts(frames: Frames, sizes: Array) -> Array:
    """Return the largest of each cut's groups, [K, ...], from the sizes [P, ...]."""
    # Six times as fast as `np.maximum.reduceat`.
    ends = pairwise([*frames.cuts.groups.at, len(sizes)])
    return np.stack([sizes[slice(*pair)].max(axis=0) for pair in ends])


def _fullest(frames: Frames) -> Array:
    """Return the peak bytes of the arenas on device and host, [2, K, F, T]."""
    groups = frames.cuts.groups
    once, cuts = frames.cell_prices.once, frames.cuts
    device = once(("on device", cuts), lambda: spread(_kept(frames), ON_DEVICE))
    host = once(("on host", cuts), lambda: spread(_kept(frames), ON_HOST))
    first, backward = _first(frames), _backward(frames)
    if frames.streams:
        sums = frames.cuts.weight_slots(frames.cell_prices.prices, gradients=True)
        backward = backward[0] + sums[groups.cut][..., None], backward[1]
    if frames.schedule.attention_open:
        size = _open(frames)[..., None]
        device = np.maximum(
            device + first[0], device + backward[0] + size * ON_DEVICE[:, ATTENTION]
        )
        host = np.maximum(host + first[1], host + backward[1] + size * ON_HOST[:, ATTENTION])
    else:
        device = device + np.maximum(first[0], backward[0])
        host = host + np.maximum(first[1], backward[1])
    return np.stack([_of_cuts(frames, sizes) for sizes in (device, host)])


# -- phases ------------------------------------------------------------------------------------


def _first(frames: Frames) -> tuple[Array, Array]:
    """Return the bytes of K, V on device and host in the groups' first passes, [P, 1, 1] each."""
    own, _, waiting = _kv(frames)
    s = frames.schedule
    is_copied = s.kv_kept and s.kv is Tier.DEVICE and s.kv_home is Tier.HOST
    goes_home = (is_copied and not frames.cuts.kind.is_stage) & ~frames.cuts.groups.is_last
    device, host = _tiers(frames, own, waiting)
    return device[..., None], (host + own * goes_home)[..., None]


def _backward(frames: Frames) -> tuple[Array, Array]:
    """Bytes of K, V, dK, dV on device and host in the groups' backward, [P, 1, 1] each."""
    own, gradients, waiting = _kv(frames)
    device, host = _tiers(frames, own + gradients, waiting)
    return device[..., None], host[..., None]


def _kv(frames: Frames) -> tuple[Array, Array, Array]:
    """Return the bytes of a group's K, V, of its dK, dV, and of the K, V below it, [P, 1] each."""
    sums, groups = frames.cell_prices.sums, frames.cuts.groups
    own = sums.kv[groups.stop] - sums.kv[groups.first]
    gradients = sums.dkv[groups.stop] - sums.dkv[groups.first]
    return own, gradients, sums.kv[groups.first] * frames.schedule.kv_kept


def _tiers(frames: Frames, size: Array, waiting: Array) -> tuple[Array, Array]:
    """Return the bytes on device and host of the open group and of the groups that wait."""
    on_host = frames.schedule.kv is Tier.HOST
    if on_host or frames.schedule.kv_home is Tier.HOST:
        return size * (not on_host), waiting + size * on_host
    return size + waiting, np.zeros_like(size)


def _kept(frames: Frames) -> Array:
    """Return the bytes of x, attention and activations that a group and those below it keep from
    first pass to backward, [P, 3, F]."""
    cell_prices, kept, groups = frames.cell_prices, frames.kept, frames.cuts.groups
    sums, layers, is_last = cell_prices.sums, len(cell_prices.model.layers), groups.is_last
    graphs = np.where(is_last, frames.last_graphs[groups.cut], kept.graphs)
    kind = frames.cuts.kind
    # A stage hands on its output and keeps its input.
    left = 0 if kind.is_stage else cell_prices.tokens
    received = groups.index + (kind.is_stage and not kind.is_first)
    x = np.where(is_last, cell_prices.latest(graphs), left)
    x = cell_prices.x_row() * (x + cell_prices.tokens * received)
    # The last group would keep only the O of the chunk that is left out: then there is no buffer.
    written = (kept.attention > 1) | (graphs > 0) | ~is_last | frames.is_cut
    end = np.where(is_last, layers - 1, groups.stop)
    begun = sums.attention[groups.first]
    rows = begun + (sums.attention[end] - begun) * written
    attention = rows * cell_prices.latest_keys(kept.attention)
    covered = kept.attention >= kept.graphs
    cells = np.where(covered, sums.narrow[end], sums.wide[end]) * cell_prices.cells(kept.graphs)
    # The top layer's cell holds its O; a last group of one layer keeps no cell.
    cells = cells + (sums.wide[layers] - sums.wide[end]) * cell_prices.cells(graphs) * is_last
    inputs = np.cumsum(frames.cell_inputs, axis=1)[groups.cut[:, None], groups.stop - 1]
    return np.stack([x, attention, cells + inputs * cell_prices.cells(kept.graphs)], axis=1)


def _open(frames: Frames) -> Array:
    """Return the bytes of O and LSE that are kept while the group is open, [P, F]."""
    cell_prices, kept, groups = frames.cell_prices, frames.kept, frames.cuts.groups
    kind = frames.cuts.kind
    rebuilt = groups.is_last | (not frames.schedule.kv_kept) | kind.is_stage
    rows = cell_prices.sums.attention[groups.stop - 1] - cell_prices.sums.attention[groups.first]
    keys = cell_prices.share.keys.total - cell_prices.latest_keys(kept.attention)
    # The last chunk's alone is not written, except by a stage that hands it on.
    fewest = 1 if kind.is_last and not frames.is_cut else 0
    return np.asarray(rows * keys * (kept.attention < len(cell_prices.chunks) - fewest) * rebuilt)


# -- whatever the phase ------------------------------------------------------------------------


def differing(frames: Frames) -> NDArray[np.bool_]:
    """Return which choices differ from all earlier ones, [K, F, T]. A choice repeats another if
    only the tier of a tensor differs that it never keeps. Pipeline stages hand on all tensors."""
    kept, several = frames.kept, frames.cuts.counts > 1
    has_x = several | (frames.last_graphs > 0) | frames.cuts.kind.is_stage
    has_attention = (kept.attention > 0) | frames.schedule.attention_open
    has = np.stack(np.broadcast_arrays(has_x, has_attention, kept.graphs > 0), axis=-1)
    return np.asarray((has[..., None, :] | (ON_HOST == 0.0)).all(axis=-1))


def fixed(frames: Frames) -> Array:
    """Return the device bytes of states, a chunk's graphs, inputs and reserve, [K, F, 1]."""
    cell_prices, cuts = frames.cell_prices, frames.cuts
    inputs = input_bytes(cell_prices.question, cell_prices.tokens)
    fixed = cuts.fixed + inputs + cell_prices.question.machine.reserve
    return np.asarray((fixed + momentary(frames))[..., None])


def momentary(frames: Frames) -> Array:
    """Return the cached result of `_momentary`, [K, F]."""
    key = "momentary", frames.cuts, frames.schedule.layer_checkpoint
    return frames.cell_prices.once(key, lambda: _momentary(frames))


def _momentary(frames: Frames) -> Array:
    """Return the bytes of graphs and gradients, [K, F], which are outside the arenas: those of the
    fuller of two moments. When the first chunk runs backward, gradients come from earlier batches
    only, and the graphs are the largest of any group; when the last one does, in the first group,
    all layers have gradients. With one chunk the second is the end of the step."""
    cell_prices = frames.cell_prices
    gradients = np.array([[float(states.gradients)] for states in frames.cuts.held])
    there = frames.cuts.gradients
    saved = np.array([spec.activation_bytes for spec in cell_prices.model.layers], dtype=np.float64)
    saved *= cell_prices.run.batch * cell_prices.sizes[0]
    widest, first = frames.cuts.graphs(saved, one_layer=frames.schedule.layer_checkpoint)
    # Choices that keep every chunk's graphs rebuild none.
    some = frames.kept.graphs < len(cell_prices.chunks)
    several = len(cell_prices.chunks) > 1
    before = gradients * cell_prices.question.accumulates
    found = np.maximum(before + widest * some, there + first * several * some)
    return np.asarray(np.maximum(found, gradients))


def device_slots(frames: Frames) -> Array:
    """Bytes of the device buffers that serve any layer, for tensors on the host, [K, F, T]."""
    cell_prices, chunk, kind = frames.cell_prices, frames.cell_prices.keys[0], frames.cuts.kind
    layers, many = cell_prices.model.layers, frames.cuts.counts > 1
    pair = min(2, len(cell_prices.chunks))
    passed = kind.is_stage and not kind.is_first
    ends = pair * ((frames.last_graphs > 0) & frames.cuts.has_head)
    x = np.where(many, 2 * pair, ends + pair * passed) * cell_prices.x_row() * cell_prices.sizes[0]
    row = max(cell_prices.row(Kind.ATTENTION, spec) for spec in layers)
    attention = _attention_slots(frames) * row * chunk
    free = np.stack([x, attention, _cell_slots(frames)], axis=1)
    size = spread(free, ON_HOST)
    if frames.schedule.kv is Tier.HOST:
        block = min(frames.schedule.kv_block, cell_prices.share.keys.total) * (
            len(cell_prices.chunks) > 1
        )
        kv, dkv = (max(cell_prices.row(k, spec) for spec in layers) for k in (Kind.KV, Kind.DKV))
        own = np.minimum(2, _crossings(frames, Kind.KV))
        size = size + ((own * chunk + 2 * block) * kv + 2 * (chunk + block) * dkv)[..., None]
    if frames.streams:
        size = size + frames.cuts.weight_slots(cell_prices.prices, gradients=False)[..., None]
    return np.asarray(size)


def _cell_slots(frames: Frames) -> Array:
    """Return the bytes of the two staging slots of saved activations, [K, F]. Layers that keep
    cells use them in turn; each slot is as large as the largest cell."""
    kept, sums, layers = frames.kept, frames.cell_prices.sums, len(frames.cell_prices.model.layers)
    narrow, wide = np.diff(sums.narrow), np.diff(sums.wide)
    if frames.cuts.has_head:
        narrow[-1] = wide[-1]  # the top layer's O is in its cell
    largest = [(cell + frames.cell_inputs).max(axis=1, keepdims=True) for cell in (narrow, wide)]
    keeping = layers - frames.cuts.last * (frames.last_graphs == 0) * frames.cuts.has_head
    slots = 2 * (keeping > 0) * (kept.graphs > 0)
    return np.asarray(slots * np.where(kept.attention >= kept.graphs, *largest))


def _attention_slots(frames: Frames) -> Array:
    """Return the number of slots for O and LSE, [K, F]. It is one more than the layers of the
    widest group, or the number of copies if that is less."""
    widest = np.maximum(frames.cuts.last, frames.cuts.widest_earlier)
    if frames.cuts.kind.is_stage:
        widest = np.full_like(widest, frames.cuts.kind.widest)
    crossings = _crossings(frames, Kind.ATTENTION)
    return np.asarray(np.minimum(widest + 1, crossings), dtype=np.float64)


def _crossings(frames: Frames, kind: Kind) -> Array:
    """Return the number of copies of a kind of tensor in a step, [K, F]."""
    parts, counts = frames.cuts.parts
    each = np.ones(len(frames.cell_prices.chunks))
    found = []
    for role, _, alone in parts:
        choices = frames.kept.without_graphs if alone else frames.kept
        place = acts(role, frames.schedule, is_cut=frames.is_cut)
        copies = place.of((Fetch, kind), choices) + place.of((Evict, kind), choices)
        found.append(copies @ choices.over(each))
    return np.asarray(counts @ np.stack(found))
