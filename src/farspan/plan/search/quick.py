"""What a schedule leaves of each tier, without building a program of its length.

Arenas by the bounds of its frame, which are theirs but for padding. What cells hold for a moment
comes from the program of the few chunks that tell: of chunks that are kept alike the latest, which
has the most keys before it. They are cells of the whole program in its order, so its fullest moment
is at least as full.
"""

from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from farspan.plan.build import build_program
from farspan.plan.price.ranks import RankWalk
from farspan.plan.program import Close, EmbedBackward
from farspan.plan.question import Question
from farspan.plan.search.bound import Frames, all_frames, tiers_of
from farspan.plan.search.peaks import momentary
from farspan.plan.search.room import fullest, limits, room, taken
from farspan.plan.search.ruler import Ruler
from farspan.spec import Schedule, Tier

Chunks = tuple[tuple[int, int], ...]
Telling = tuple[tuple[int, bool, bool], ...]  # chunk; are O and LSE kept; are activations


def left(question: Question, schedule: Schedule) -> tuple[int, int]:
    """Bytes to spare on the device and on its share of the host, negative where it is too much."""
    family, tiers = all_frames(question, schedule), tiers_of(schedule)
    found, devices = taken(family)
    host = float(found.host[0, 0, tiers])
    each = [float(size) for size in devices[:, 0, 0, tiers]]
    for place, frames in enumerate(family):
        held = frames.cuts.held[0]
        gradients = held.gradients + max(0, held.accumulators + cells(frames))
        each[place] += gradients - momentary(frames)[0, 0]
    device = float(fullest(family, np.array(each)))
    first, second = limits(question)
    if question.machine.unified:
        return int(first - device - host), int(first - device - host)
    return int(first - device), int(second - host)


def fits(question: Question, schedule: Schedule) -> bool:
    """Does it, by its bounds and then by all that is left?"""
    found, _ = taken(all_frames(question, schedule))
    tiers = tiers_of(schedule)
    free = room(question, found.device[..., tiers], found.host[..., tiers])
    return bool(free.min() >= 0) and min(left(question, schedule)) >= 0


def cells(frames: Frames) -> int:
    """Bytes that cells of a single schedule hold for a moment, as `transient_bytes`."""
    kept = frames.kept
    chosen = int(kept.attention[0]), int(kept.graphs[0])
    telling = latest(kept.chunks, *chosen, first=not frames.ruler.are_equal)
    return transient(frames.ruler, frames.schedule, telling)


def latest(chunks: int, attention: int, graphs: int, *, first: bool = False) -> Telling:
    """The chunks that tell: the latest of those kept alike, and of the earliest kind one more,
    which runs backward when all layers have gradients; where chunks differ the `first` too, which
    is the longest."""
    borders = sorted({0, chunks - attention, chunks - graphs, chunks})
    found: set[int] = {0} if first else set()
    for start, stop in pairwise(borders):
        found.add(stop - 1)
        if start == 0:
            found.add(max(0, stop - 2))
    return tuple((c, c >= chunks - attention, c >= chunks - graphs) for c in sorted(found))


def transient(ruler: Ruler, schedule: Schedule, telling: Telling) -> int:
    """Bytes that cells of the ruler's rank hold for a moment, as `transient_bytes`, in these of its
    chunks."""
    return _walk(ruler, schedule, telling).run().transient


def outside(ruler: Ruler, schedule: Schedule) -> int:
    """Bytes of gradients, their sums and what the last backward of the embedding holds, at least,
    whatever the schedule but for its chunk; 0 of a pipeline's stage. All layers have gradients
    then; of the layers of the first group, of which there is one at least, there are still the
    sums."""
    if ruler.kind.is_stage:
        return 0
    layers, chunks = len(ruler.model.layers), len(ruler.chunks)
    walk = _walk(ruler, replace(schedule, groups=(1,) * layers), latest(chunks, 0, 0))
    for instruction in walk.program.instructions:
        if isinstance(instruction, EmbedBackward):
            walk.peak = 0
        if not isinstance(instruction, Close) or instruction.group > 0:
            walk.issue(instruction)
    return walk.peak


def _walk(ruler: Ruler, schedule: Schedule, telling: Telling) -> RankWalk:
    """Through a program of these chunks alone. Tiers make no difference: what is held is on the
    device."""
    chosen = [chunk for chunk, _, _ in telling]
    chunks = tuple(ruler.chunks[chunk] for chunk in chosen)
    few = tuple(pairwise(accumulate((stop - start for start, stop in chunks), initial=0)))
    short = replace(
        schedule,
        x=Tier.DEVICE,
        kv=Tier.DEVICE,
        kv_home=Tier.DEVICE,
        attention=Tier.DEVICE,
        activations=Tier.DEVICE,
        attention_kept=latest_fraction(few, sum(kept for _, kept, _ in telling)),
        activations_kept=latest_fraction(few, sum(graph for _, _, graph in telling)),
    )
    run = replace(ruler.run, tokens=few[-1][1])
    program = build_program(ruler.whole.model, run, short, ruler.kind.rank, few)
    # At their places in the sequence: what they hold depends on the keys before them.
    rows = tuple(ruler.share.tokens.rows[chunk] for chunk in chosen)
    share = replace(program.share, tokens=replace(program.share.tokens, rows=rows))
    return RankWalk(ruler.whole, replace(program, chunks=chunks, share=share))


def latest_fraction(chunks: Chunks, count: int) -> float:
    """The fraction of the tokens that the latest `count` chunks hold."""
    if count == 0:
        return 0.0
    return (chunks[-1][1] - chunks[-count][0]) / chunks[-1][1]
