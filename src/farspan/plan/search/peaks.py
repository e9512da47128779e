"""Bytes of many schedules when each tier is fullest: the fullest of a few phases (formulas has them
all), without padding. P phases' groups of all K cuts are looked at together."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from farspan.plan.price.evaluate import INPUT_BYTES
from farspan.plan.residency import Kind
from farspan.plan.search.bound import ON_HOST, Frames, spread
from farspan.plan.search.roles import Cells, Counts, Role, cells
from farspan.plan.search.ruler import Array
from farspan.spec import Tier

ON_DEVICE = 1 - ON_HOST
ATTENTION = 1  # its place among the three that tiers are free for


@dataclass(slots=True)
class Peaks:
    """Bytes on each tier, [K, F, T]."""

    device: Array
    host: Array


def peaks(frames: Frames) -> Peaks:
    """Everything but what cells hold for a moment beyond their graphs."""
    groups = frames.cuts.groups
    once, cuts = frames.ruler.once, frames.cuts
    device = once(("on device", cuts), lambda: spread(_kept(frames), ON_DEVICE))
    host = once(("on host", cuts), lambda: spread(_kept(frames), ON_HOST))
    first, backward = _first(frames), _backward(frames)
    if _is_open(frames):
        size = _open(frames)[..., None]
        device = np.maximum(
            device + first[0], device + backward[0] + size * ON_DEVICE[:, ATTENTION]
        )
        host = np.maximum(host + first[1], host + backward[1] + size * ON_HOST[:, ATTENTION])
    else:
        device = device + np.maximum(first[0], backward[0])
        host = host + np.maximum(first[1], backward[1])
    fullest = np.maximum.reduceat(device, groups.at), np.maximum.reduceat(host, groups.at)
    held = [[[states.optimizer_on_host]] for states in frames.cuts.held]
    return Peaks(fullest[0] + fixed(frames), fullest[1] + np.array(held))


def parts(frames: Frames, tiers: tuple[Tier, ...]) -> dict[Tier, dict[Kind, float]]:
    """Bytes of each kind on each tier, slots left out, in the fullest phase of a single schedule
    with these tiers for x, attention and activations."""
    kept, kv_tier = _kept(frames)[..., 0], frames.schedule.kv
    own, gradients, waiting = (column[:, 0] for column in _kv(frames))
    still = np.zeros_like(own)
    opened = _open(frames)[:, 0] if frames.schedule.attention_open else still
    away = own * frames.kv_goes_home(Role.TOP) * ~frames.cuts.groups.is_last[:, 0]
    home = kv_tier if kv_tier is Tier.HOST else frames.schedule.kv_home
    found = {}
    for tier in Tier:
        at = [of is tier for of in tiers]
        kv = own * (kv_tier is tier) + waiting * (home is tier)
        first = {
            Kind.X: kept[:, 0] * at[0],
            Kind.KV: kv + away * (tier is Tier.HOST),
            Kind.DKV: still,
            Kind.ATTENTION: kept[:, 1] * at[1],
            Kind.ACTIVATIONS: kept[:, 2] * at[2],
        }
        backward = first | {
            Kind.KV: kv,
            Kind.DKV: gradients * (kv_tier is tier),
            Kind.ATTENTION: (kept[:, 1] + opened) * at[1],
        }
        totals = np.stack([sum(first.values(), still), sum(backward.values(), still)])
        phase, group = np.unravel_index(totals.argmax(), totals.shape)
        found[tier] = {kind: float(size[group]) for kind, size in (first, backward)[phase].items()}
    return found


# -- phases ------------------------------------------------------------------------------------


def _first(frames: Frames) -> tuple[Array, Array]:
    """[P, 1, 1] each: K, V on device and host in the groups' first passes."""
    own, _, waiting = _kv(frames)
    goes_home = frames.kv_goes_home(Role.TOP) & ~frames.cuts.groups.is_last
    device, host = _tiers(frames, own, waiting)
    return device[..., None], (host + own * goes_home)[..., None]


def _backward(frames: Frames) -> tuple[Array, Array]:
    """[P, 1, 1] each: K, V, dK, dV on device and host in the groups' backward."""
    own, gradients, waiting = _kv(frames)
    device, host = _tiers(frames, own + gradients, waiting)
    return device[..., None], host[..., None]


def _kv(frames: Frames) -> tuple[Array, Array, Array]:
    """[P, 1] each: bytes of a group's K, V, of its dK, dV, of K, V that wait below it."""
    sums, groups = frames.ruler.sums, frames.cuts.groups
    own = sums.kv[groups.stop] - sums.kv[groups.first]
    gradients = sums.dkv[groups.stop] - sums.dkv[groups.first]
    return own, gradients, sums.kv[groups.first] * frames.schedule.kv_kept


def _tiers(frames: Frames, size: Array, waiting: Array) -> tuple[Array, Array]:
    """What the open group and what waits take of device and host."""
    on_host = frames.schedule.kv is Tier.HOST
    if on_host or frames.schedule.kv_home is Tier.HOST:
        return size * (not on_host), waiting + size * on_host
    return size + waiting, np.zeros_like(size)


def _kept(frames: Frames) -> Array:
    """[P, 3, F]: x, attention and activations that a group and those below it keep from first
    pass to backward."""
    ruler, kept, groups = frames.ruler, frames.kept, frames.cuts.groups
    sums, layers, is_last = ruler.sums, len(ruler.model.layers), groups.is_last
    graphs = np.where(is_last, frames.last_graphs[groups.cut], kept.graphs)
    kind = frames.cuts.kind
    # A stage hands on what it made, and keeps what it received.
    left = 0 if kind.is_stage else ruler.tokens
    received = groups.index + (kind.is_stage and not kind.is_first)
    x = np.where(is_last, ruler.latest(graphs), left)
    x = ruler.x_row() * (x + ruler.tokens * received)
    # The last group's only kept O would be the left out chunk's: then there is no buffer.
    written = (kept.attention > 1) | (graphs > 0) | ~is_last
    end = np.where(is_last, layers - 1, groups.stop)
    begun = sums.attention[groups.first]
    rows = begun + (sums.attention[end] - begun) * written
    attention = rows * ruler.latest_keys(kept.attention)
    covered = kept.attention >= kept.graphs
    cells = np.where(covered, sums.narrow[end], sums.wide[end]) * ruler.cells(kept.graphs)
    # The top layer's cell holds its O; in a last group of one layer none is kept.
    cells = cells + (sums.wide[layers] - sums.wide[end]) * ruler.cells(graphs) * is_last
    inputs = np.cumsum(frames.cell_inputs, axis=1)[groups.cut[:, None], groups.stop - 1]
    return np.stack([x, attention, cells + inputs * ruler.cells(kept.graphs)], axis=1)


def _is_open(frames: Frames) -> bool:
    return frames.schedule.attention_open


def _open(frames: Frames) -> Array:
    """[P, F]: O and LSE kept while the group is open."""
    ruler, kept, groups = frames.ruler, frames.kept, frames.cuts.groups
    kind = frames.cuts.kind
    rebuilt = groups.is_last | (not frames.schedule.kv_kept) | kind.is_stage
    rows = ruler.sums.attention[groups.stop - 1] - ruler.sums.attention[groups.first]
    keys = ruler.share.keys.total - ruler.latest_keys(kept.attention)
    # Of the last chunk alone nothing is written, but by a stage that hands it on.
    fewest = 1 if kind.is_last else 0
    return np.asarray(rows * keys * (kept.attention < len(ruler.chunks) - fewest) * rebuilt)


# -- whatever the phase ------------------------------------------------------------------------


def fixed(frames: Frames) -> Array:
    """[K, F, T] on the device: states, slots, graphs of a chunk, inputs, reserve."""
    ruler, cuts = frames.ruler, frames.cuts
    inputs = INPUT_BYTES * ruler.run.batch * ruler.tokens
    fixed = cuts.fixed + inputs + ruler.question.machine.reserve
    switches = frames.schedule.kv_kept, frames.schedule.attention_open
    slots = ruler.once(("slots", cuts, *switches), lambda: device_slots(frames))
    return slots + (fixed + momentary(frames))[..., None]


def momentary(frames: Frames) -> Array:
    """[K, F]: all that is counted beside arenas, weights and optimizer. Graphs of the first chunk
    that runs backward, when no layer may have gradients yet, but of earlier batches; or those of
    the last, in the first group, when all layers have some. Of a single chunk the second is only
    the end of the step."""
    ruler = frames.ruler
    gradients = np.array([[float(states.gradients)] for states in frames.cuts.held])
    there = frames.cuts.gradients
    saved = np.array([spec.activation_bytes for spec in ruler.model.layers], dtype=np.float64)
    saved *= ruler.run.batch * ruler.sizes[0]
    widest, first = frames.cuts.graphs(saved, one_layer=frames.schedule.layer_checkpoint)
    # Where every chunk's graphs are kept there are none.
    some = frames.kept.graphs < len(ruler.chunks)
    several = len(ruler.chunks) > 1
    before = gradients * ruler.question.accumulates
    found = np.maximum(before + widest * some, there + first * several * some)
    return np.asarray(np.maximum(found, gradients))


def device_slots(frames: Frames) -> Array:
    """[K, F, T]: device buffers that serve any layer, for what is on host."""
    ruler, chunk, kind = frames.ruler, frames.ruler.keys[0], frames.cuts.kind
    layers, many = ruler.model.layers, frames.cuts.counts > 1
    pair = min(2, len(ruler.chunks))
    passed = kind.is_stage and not kind.is_first
    ends = pair * ((frames.last_graphs > 0) & frames.cuts.has_head)
    x = np.where(many, 2 * pair, ends + pair * passed) * ruler.x_row() * ruler.sizes[0]
    row = max(ruler.attention_row(spec) for spec in layers)
    attention = _attention_slots(frames) * row * chunk
    free = np.stack([x, attention, _cell_slots(frames)], axis=1)
    size = spread(free, ON_HOST)
    if frames.schedule.kv is Tier.HOST:
        block = min(frames.schedule.kv_block, ruler.share.keys.total) * (len(ruler.chunks) > 1)
        kv, dkv = max(map(ruler.kv_row, layers)), max(map(ruler.dkv_row, layers))
        own = np.minimum(2, _crossings(frames, lambda found: found.kv_written + found.graph))
        size = size + ((own * chunk + 2 * block) * kv + 2 * (chunk + block) * dkv)[..., None]
    return np.asarray(size)


def _cell_slots(frames: Frames) -> Array:
    """[K, F]: two, taken in turn by the layers that keep cells, each for the greediest of all."""
    kept, sums, layers = frames.kept, frames.ruler.sums, len(frames.ruler.model.layers)
    narrow, wide = np.diff(sums.narrow), np.diff(sums.wide)
    if frames.cuts.has_head:
        narrow[-1] = wide[-1]  # the top layer's O is in its cell
    largest = [(cell + frames.cell_inputs).max(axis=1, keepdims=True) for cell in (narrow, wide)]
    keeping = layers - frames.cuts.last * (frames.last_graphs == 0) * frames.cuts.has_head
    slots = 2 * (keeping > 0) * (kept.graphs > 0)
    return np.asarray(slots * np.where(kept.attention >= kept.graphs, *largest))


def _attention_slots(frames: Frames) -> Array:
    """[K, F]: one more than the layers of the widest group, unless O and LSE cross less often."""
    widest = np.maximum(frames.cuts.last, frames.cuts.widest_earlier)
    if frames.cuts.kind.is_stage:
        widest = np.full_like(widest, frames.cuts.kind.widest)
    crossings = _crossings(frames, lambda found: found.attention_out + found.attention_in)
    return np.asarray(np.minimum(widest + 1, crossings), dtype=np.float64)


def _crossings(frames: Frames, of: Callable[[Cells], Counts]) -> Array:
    """[K, F]: how many of these copies a step makes."""
    parts, counts = frames.cuts.parts
    each = np.ones(len(frames.ruler.chunks))
    found = []
    for role, _, alone in parts:
        choices = frames.kept.without_graphs if alone else frames.kept
        found.append(of(cells(role, frames.schedule, choices)) @ choices.over(each))
    return np.asarray(counts @ np.stack(found))
