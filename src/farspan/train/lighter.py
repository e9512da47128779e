"""A schedule that needs less memory than another and gives the same gradients, unless attention is
sparse: then a smaller chunk sees less."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from farspan.engine.memory import least_transient
from farspan.plan.build import build_program
from farspan.plan.grid import group_ranges
from farspan.plan.layout import ALONE, Layout, Rank, refuse_together
from farspan.plan.search.space import SMALLEST_CHUNK
from farspan.spec import ModelSpec, Refused, RunSpec, Schedule, Tier

Change = Callable[[Schedule, int], Schedule]  # of a schedule for so many layers

LEAST_FRACTION = 0.125  # half of it is too little to be worth its buffers


def lighter(
    model: ModelSpec,
    run: RunSpec,
    schedule: Schedule,
    tiers: Iterable[Tier],
    share: float,
    layout: Layout = ALONE,
) -> Schedule | None:
    """Takes one step after the other until the tiers need at most `share` of what they did, the
    cheapest in time first; None when no step takes anything away. What it finds the ranks of a
    layout can run as they are: stages keep their layers."""
    tiers = tuple(tiers)
    # The same program, in numbers that can be halved.
    schedule = replace(
        schedule,
        chunk=_whole_pages(schedule, min(schedule.chunk, run.tokens)),
        kv_block=min(schedule.kv_block, run.tokens),
        head_tokens=min(schedule.head_tokens, run.tokens),
    )
    layers = len(model.layers)
    stages = group_ranges(schedule, layers, layout.pipeline)
    before = now = needed(model, run, schedule, tiers, layout)
    for change in _changes(tiers):
        candidate = change(schedule, layers)
        if candidate == schedule:
            continue
        try:
            refuse_together(candidate, layout)
            if layout.pipeline > 1 and group_ranges(candidate, layers, layout.pipeline) != stages:
                continue
            size = needed(model, run, candidate, tiers, layout)
        except Refused:  # such as groups that the model does not have
            continue
        if size < now:
            schedule, now = candidate, size
        if now <= share * before:
            break
    return schedule if now < before else None


def needed(
    model: ModelSpec,
    run: RunSpec,
    schedule: Schedule,
    tiers: Iterable[Tier],
    layout: Layout = ALONE,
) -> int:
    """Bytes of the tiers that a schedule decides: arenas, and on the device what a cell holds. Of
    a layout's ranks the most of a stage's first, from which its others differ by rows."""
    firsts = Rank(layout).peers("pipeline")
    return max(_needed(model, run, schedule, tiers, Rank(layout, first)) for first in firsts)


def _needed(
    model: ModelSpec, run: RunSpec, schedule: Schedule, tiers: Iterable[Tier], rank: Rank
) -> int:
    program = build_program(model, run, schedule, rank)
    size = sum(program.arena_bytes[tier] for tier in tiers)
    if Tier.DEVICE in tiers:
        rows = run.batch * min(schedule.head_tokens, program.share.tokens.most)
        logits = rows * model.vocab * model.accumulate_bytes()
        size += max(least_transient(program), logits)
    return size


def _changes(tiers: tuple[Tier, ...]) -> list[Change]:
    found: list[Change] = []
    if Tier.DEVICE in tiers:
        found += [_efficient_chunk, _efficient_chunk, _fewer_logits]
    if Tier.HOST not in tiers:
        found += [_on_host, _smaller_groups, _streamed, _smaller_blocks]
    else:
        found += [_fewer_activations, _no_keys_kept, _less_attention]
        found += [_smaller_groups, _larger_groups]
    if Tier.DEVICE in tiers:
        found += [_layer_by_layer, _smaller_chunk, _smaller_chunk]
    return found


def _efficient_chunk(schedule: Schedule, layers: int) -> Schedule:
    """Half, unless cells become so short that everything else is tried first."""
    halved = _smaller_chunk(schedule, layers)
    return halved if halved.chunk >= SMALLEST_CHUNK else schedule


def _smaller_chunk(schedule: Schedule, _: int) -> Schedule:
    half = max(1, schedule.chunk // 2)
    if schedule.sparse is not None:
        page = schedule.sparse.page
        half = max(page, half // page * page)
    return replace(schedule, chunk=half)


def _smaller_blocks(schedule: Schedule, _: int) -> Schedule:
    return replace(schedule, kv_block=max(1, schedule.kv_block // 2))


def _fewer_logits(schedule: Schedule, _: int) -> Schedule:
    return replace(schedule, head_tokens=max(1, schedule.head_tokens // 2))


def _on_host(schedule: Schedule, _: int) -> Schedule:
    host = Tier.HOST
    return replace(schedule, x=host, attention=host, activations=host, kv_home=host)


def _streamed(schedule: Schedule, _: int) -> Schedule:
    return replace(schedule, kv=Tier.HOST, kv_block=min(schedule.kv_block, schedule.chunk))


def _fewer_activations(schedule: Schedule, _: int) -> Schedule:
    return replace(schedule, activations_kept=_half(schedule.activations_kept))


def _no_keys_kept(schedule: Schedule, _: int) -> Schedule:
    return replace(schedule, kv_kept=False)


def _less_attention(schedule: Schedule, _: int) -> Schedule:
    return replace(schedule, attention_kept=_half(schedule.attention_kept))


def _smaller_groups(schedule: Schedule, layers: int) -> Schedule:
    sizes = schedule.group_sizes(layers)
    return replace(schedule, groups=max(1, max(sizes) // 2))


def _larger_groups(schedule: Schedule, layers: int) -> Schedule:
    return replace(schedule, groups=min(layers, 2 * max(schedule.group_sizes(layers))))


def _layer_by_layer(schedule: Schedule, _: int) -> Schedule:
    return replace(schedule, layer_checkpoint=True)


def _whole_pages(schedule: Schedule, tokens: int) -> int:
    """So many tokens, or as many more as sparse attention needs of a chunk."""
    return tokens if schedule.sparse is None else schedule.sparse.whole_pages(tokens)


def _half(fraction: float) -> float:
    return fraction / 2 if fraction / 2 >= LEAST_FRACTION else 0.0
