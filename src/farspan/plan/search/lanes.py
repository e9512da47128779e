"""Seconds of many schedules by counting: how often each kind of cell runs, and what is copied."""

import numpy as np

from farspan.plan.search.bound import ON_HOST, Frames, spread
from farspan.plan.search.cuts import Part
from farspan.plan.search.roles import Cells, cells
from farspan.plan.search.ruler import Array
from farspan.spec import Tier

COMPUTE, FETCH, EVICT, COLLECTIVE, HOST = range(5)
LANES = 5
LINK = 2  # fetch, evict


def seconds(frames: Frames) -> Array:
    """[K, F, T]: of a step, its update included; memory is not looked at."""
    ruler, question = frames.ruler, frames.ruler.question
    work, copies = lanes(frames)
    working = work[:, COMPUTE] + work[:, COLLECTIVE]
    if question.overlap:
        # FSDP's gathers go on beside the cells, whose own collectives they wait for.
        gathers = frames.cuts.gathers(ruler.prices)
        busy = np.maximum(np.maximum(working - gathers, gathers), work[:, HOST])
        link = work[:, FETCH : EVICT + 1, :, None] + spread(copies, ON_HOST)
        total = np.maximum(busy[..., None], link.max(axis=1))
    else:
        total = spread(copies.sum(axis=1), ON_HOST)
        total += (working + work[:, HOST] + work[:, FETCH] + work[:, EVICT])[..., None]
    stages, count = question.layout.pipeline, len(ruler.chunks)
    return np.asarray(total * ((count + stages - 1) / count) + ruler.update)


def lanes(frames: Frames) -> tuple[Array, Array]:
    """[K, 5, F]: seconds of every lane, without its update and without [K, 2, 3, F]: seconds that
    fetch and evict take for x, attention and activations, where they are on host."""
    ruler, cuts, kv_kept = frames.ruler, frames.cuts, frames.schedule.kv_kept
    parts, counts = cuts.parts
    each = [_part(frames, part) for part in parts]
    size, choices = len(cuts.sizes), len(frames.kept.graphs)
    work = counts @ np.stack([work for work, _ in each]).reshape(len(parts), -1)
    work = work.reshape(size, LANES, choices)
    work[:, COMPUTE] += ruler.once(("outside", cuts, kv_kept), lambda: _outside(frames))
    work[:, COMPUTE] += ruler.clear
    if frames.schedule.kv is Tier.HOST:
        work[:, EVICT] += ruler.zeros
    work[:, COLLECTIVE] += cuts.gathers(ruler.prices)
    moved = counts @ np.stack([moved for _, moved in each]).reshape(len(parts), -1)
    moved = moved.reshape(size, LINK, 3, choices)
    moved += ruler.once(("x", cuts, kv_kept), lambda: _boundaries(frames))
    rates = np.array([ruler.prices.fetch_rate(), ruler.prices.evict_rate()])
    return work, np.asarray(moved / rates[:, None, None])


def _part(frames: Frames, part: Part) -> tuple[Array, Array]:
    """Lanes [5, F] and bytes [2, 3, F] of one layer in this part, made once for all cuts."""
    s = frames.schedule
    key = part, s.kv_kept, s.kv_home, s.attention_open, s.layer_checkpoint
    known = frames.ruler.known
    if key not in known:
        role, spec, alone = part
        part = role, frames.ruler.held[spec], alone
        found = cells(role, s, frames.kept.without_graphs if alone else frames.kept)
        known[key] = _cells(frames, part, found), _moved(frames, part, found)
    return known[key]


def _cells(frames: Frames, part: Part, found: Cells) -> Array:
    """[5, F]: one layer's cells, and the copies of its K, V."""
    ruler, (role, spec, alone) = frames.ruler, part
    choices = frames.kept.without_graphs if alone else frames.kept
    work = ruler.lanes.forward[spec].total(found.compute, choices)
    work += ruler.lanes.given[spec].total(found.given, choices)
    work += ruler.lanes.project[spec].total(found.project, choices)
    work += ruler.lanes.backward[spec].total(np.ones_like(found.compute), choices)
    sizes, keys = choices.over(ruler.sizes), choices.over(ruler.keys)
    kv, dkv = ruler.kv_row(spec) * keys, ruler.dkv_row(spec) * keys
    # Copies on the device into the program's buffers.
    put_away = found.kv_written @ kv
    put_away += found.attention_out @ keys * ruler.attention_row(spec)
    put_away += found.graph @ sizes * ruler.prices.saved_row(spec)
    work[COMPUTE] += 2 * put_away / ruler.question.machine.memory
    if frames.schedule.kv is Tier.HOST:
        work[FETCH] += (found.graph @ kv + dkv.sum()) / ruler.prices.fetch_rate()
        work[EVICT] += found.kv_written @ kv / ruler.prices.evict_rate()
    if frames.kv_goes_home(role):
        work[FETCH] += kv.sum() / ruler.prices.fetch_rate()
        work[EVICT] += kv.sum() / ruler.prices.evict_rate()
    return work


def _moved(frames: Frames, part: Part, found: Cells) -> Array:
    """[2, 3, F]: bytes of one layer's O, LSE and activations, where they are on host."""
    role, spec, alone = part
    choices = frames.kept.without_graphs if alone else frames.kept
    row = frames.ruler.attention_row(spec) * choices.over(frames.ruler.keys)
    graphs = frames.ruler.cells(choices.graphs)
    cell = graphs * frames.covered(spec, role)
    fetched = np.stack([frames.zero, found.attention_in @ row, cell])
    evicted = np.stack([frames.zero, found.attention_out @ row, cell])
    return np.stack([fetched, evicted])


def _boundaries(frames: Frames) -> Array:
    """[K, 2, 3, F]: bytes of x, its gradient, and the inputs inside kept cells."""
    ruler, groups, kind = frames.ruler, frames.cuts.counts, frames.cuts.kind
    row = ruler.x_row() * ruler.sizes
    graphs = ruler.latest(frames.last_graphs) * ruler.x_row() * kind.is_last
    skipped = row[-1] * (frames.last_graphs == 0) * kind.is_last
    whole = row.sum()
    # The rebuild of a middle group and the first pass of the last begin without the last chunk.
    several = groups > 1
    rebuilt = 0 if frames.schedule.kv_kept else np.maximum(groups - 2, 0)
    fetched = graphs + 3 * (groups - 1) * whole - skipped * several
    fetched = fetched + rebuilt * (whole - row[-1] * (frames.kept.graphs == 0))
    evicted = graphs + 2 * (groups - 1) * whole
    if kind.is_stage and not kind.is_first:  # what a stage received
        fetched, evicted = fetched + whole - skipped, evicted + whole
    cells = ruler.cells(frames.kept.graphs)
    inputs = cells * frames.cell_inputs.sum(axis=1, keepdims=True)
    moved = [np.stack([x, np.zeros_like(x), inputs], axis=1) for x in (fetched, evicted)]
    return np.stack(moved, axis=1)


def _outside(frames: Frames) -> Array:
    """[K, F]: embedding and head, where the rank has them."""
    lanes, several, kind = frames.ruler.lanes, frames.cuts.counts > 1, frames.cuts.kind
    once, last = lanes.embed.sum() * kind.is_first, lanes.embed[-1] * kind.is_first
    passes = 2 * once - last * (frames.last_graphs == 0) * ~several * kind.is_last
    if not frames.schedule.kv_kept:
        passes = passes + (once - last * (frames.kept.graphs == 0)) * several
    head = lanes.head.sum() * kind.is_last
    return np.asarray(passes + head + lanes.embed_backward.sum() * kind.is_first)
