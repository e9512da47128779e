"""Seconds of many schedules by counting: how often each kind of cell runs, and what is copied."""

import numpy as np

from farspan.plan.search.bound import ON_HOST, Frames, spread
from farspan.plan.search.cuts import Part
from farspan.plan.search.roles import Cells, cells
from farspan.plan.search.ruler import Array
from farspan.spec import Tier

LANES = 3  # compute, fetch, evict
LINK = 2  # fetch, evict


def seconds(frames: Frames) -> Array:
    """[K, F, T]: of a step, its update included; memory is not looked at."""
    ruler, question, cuts = frames.ruler, frames.ruler.question, frames.cuts
    parts, counts = cuts.parts
    each = [_part(frames, part) for part in parts]
    size, choices = len(cuts.sizes), len(frames.kept.graphs)
    lanes = counts @ np.stack([lanes for lanes, _ in each]).reshape(len(parts), -1)
    lanes = lanes.reshape(size, LANES, choices)
    moved = counts @ np.stack([moved for _, moved in each]).reshape(len(parts), -1)
    moved = moved.reshape(size, LINK, 3, choices) + ruler.once(
        ("x", cuts, frames.schedule.kv_kept), lambda: _boundaries(frames)
    )
    compute = lanes[:, 0] + ruler.once(
        ("outside", cuts, frames.schedule.kv_kept), lambda: _outside(frames)
    )
    rates = np.array([ruler.prices.fetch_rate(), ruler.prices.evict_rate()])
    moved /= rates[:, None, None]
    gathers = cuts.gathers(ruler.prices)
    if question.overlap:
        copies = lanes[:, 1:, :, None] + spread(moved, ON_HOST)
        busy = np.maximum(compute, gathers)
        total = np.maximum(busy[..., None], copies.max(axis=1))
    else:
        total = spread(moved.sum(axis=1), ON_HOST)
        total += (compute + lanes[:, 1] + lanes[:, 2] + gathers)[..., None]
    stages, count = question.layout.pipeline, len(ruler.chunks)
    return np.asarray(total * ((count + stages - 1) / count) + ruler.update)


def _part(frames: Frames, part: Part) -> tuple[Array, Array]:
    """Lanes [3, F] and bytes [2, 3, F] of one layer in this part, made once for all cuts."""
    s = frames.schedule
    key = part, s.kv_kept, s.kv_home, s.attention_open, s.layer_checkpoint
    known = frames.ruler.known
    if key not in known:
        role, _, alone = part
        found = cells(role, s, frames.kept.without_graphs if alone else frames.kept)
        known[key] = _cells(frames, part, found), _moved(frames, part, found)
    return known[key]


def _cells(frames: Frames, part: Part, found: Cells) -> Array:
    """[3, F]: one layer's cells, and the copies of its K, V."""
    ruler, (role, spec, alone) = frames.ruler, part
    choices = frames.kept.without_graphs if alone else frames.kept
    lanes = ruler.forward[spec].total(found.compute, choices)
    lanes += ruler.given[spec].total(found.given, choices)
    lanes += ruler.project[spec].total(found.project, choices)
    lanes += ruler.backward[spec].total(np.ones_like(found.compute), choices)
    sizes = choices.over(ruler.sizes)
    kv, dkv = ruler.kv_row(spec) * sizes, ruler.dkv_row(spec) * sizes
    # Copies on the device into the program's buffers.
    put_away = found.kv_written @ kv
    put_away += found.attention_out @ sizes * ruler.attention_row(spec)
    put_away += found.graph @ sizes * ruler.prices.saved_row(spec)
    lanes[0] += 2 * put_away / ruler.question.machine.memory
    if frames.schedule.kv is Tier.HOST:
        lanes[1] += (found.graph @ kv + dkv.sum()) / ruler.prices.fetch_rate()
        lanes[2] += found.kv_written @ kv / ruler.prices.evict_rate()
    if frames.kv_goes_home(role):
        lanes[1] += kv.sum() / ruler.prices.fetch_rate()
        lanes[2] += kv.sum() / ruler.prices.evict_rate()
    return lanes


def _moved(frames: Frames, part: Part, found: Cells) -> Array:
    """[2, 3, F]: bytes of one layer's O, LSE and activations, where they are on host."""
    role, spec, alone = part
    choices = frames.kept.without_graphs if alone else frames.kept
    row = frames.ruler.attention_row(spec) * choices.over(frames.ruler.sizes)
    cell = (0 if alone else frames.kept.graphs) * frames.covered(spec, role)
    fetched = np.stack([frames.zero, found.attention_in @ row, cell])
    evicted = np.stack([frames.zero, found.attention_out @ row, cell])
    return np.stack([fetched, evicted])


def _boundaries(frames: Frames) -> Array:
    """[K, 2, 3, F]: bytes of x, its gradient, and the inputs inside kept cells."""
    ruler, groups = frames.ruler, frames.cuts.counts
    row = ruler.x_row() * ruler.sizes
    graphs = ruler.latest(frames.last_graphs) * ruler.x_row()
    skipped = row[-1] * (frames.last_graphs == 0)
    whole = row.sum()
    # The rebuild of a middle group and the first pass of the last begin without the last chunk.
    several = groups > 1
    rebuilt = 0 if frames.schedule.kv_kept else np.maximum(groups - 2, 0)
    fetched = graphs + 3 * (groups - 1) * whole - skipped * several
    fetched = fetched + rebuilt * (whole - row[-1] * (frames.kept.graphs == 0))
    evicted = graphs + 2 * (groups - 1) * whole
    saves = np.array([spec.saves_input for spec in ruler.model.layers], dtype=np.float64)
    inside, _ = frames.cuts.inside(saves)
    inputs = frames.kept.graphs * row[0] * inside
    moved = [np.stack([x, np.zeros_like(x), inputs], axis=1) for x in (fetched, evicted)]
    return np.stack(moved, axis=1)


def _outside(frames: Frames) -> Array:
    """[K, F]: embedding, head, zeroing dK, dV."""
    ruler, several = frames.ruler, frames.cuts.counts > 1
    once, last = ruler.embed.sum(), ruler.embed[-1]
    passes = 2 * once - last * (frames.last_graphs == 0) * ~several
    if not frames.schedule.kv_kept:
        passes = passes + (once - last * (frames.kept.graphs == 0)) * several
    fixed = ruler.head.sum() + ruler.embed_backward.sum() + ruler.clear
    return np.asarray(passes + fixed)
