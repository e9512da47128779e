"""The grid of (layer, chunk) cells: where it is cut."""

from farspan.spec import Refused, Schedule


def chunk_ranges(tokens: int, chunk: int) -> tuple[tuple[int, int], ...]:
    """Token ranges of the chunks; the last may be ragged."""
    return tuple((start, min(start + chunk, tokens)) for start in range(0, tokens, chunk))


def are_equal(chunks: tuple[tuple[int, int], ...]) -> bool:
    """Are chunks as `chunk_ranges` cuts them?"""
    return chunks == chunk_ranges(chunks[-1][1], chunks[0][1])


def group_ranges(schedule: Schedule, layers: int, stages: int = 1) -> tuple[tuple[int, int], ...]:
    """Layer ranges of the groups, first group first. The stages of a pipeline are its groups."""
    ranges, start = [], 0
    sizes = schedule.group_sizes(layers) if stages == 1 else _stage_sizes(schedule, layers, stages)
    for size in sizes:
        ranges.append((start, start + size))
        start += size
    return tuple(ranges)


def _stage_sizes(schedule: Schedule, layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage: as the schedule says where it has one group for each, or equal."""
    if stages > layers:
        raise Refused(f"pipeline: {stages} stages for {layers} layers; use at most one a layer")
    if isinstance(schedule.groups, tuple):
        if len(schedule.groups) != stages:
            raise Refused(
                f"groups: a pipeline of {stages} stages has one group each, got "
                f"{list(schedule.groups)}; give {stages} sizes, or one number to share equally"
            )
        return schedule.group_sizes(layers)
    return tuple(layers * (i + 1) // stages - layers * i // stages for i in range(stages))


def kept_chunks(fraction: float, chunks: tuple[tuple[int, int], ...]) -> range:
    """Chunks that hold the latest `fraction` of the tokens, rounded to whole chunks.

    Latest first: the attention recomputed for a token costs in proportion to its position, so
    keeping the last 30% removes 51% of that work.
    """
    wanted = fraction * chunks[-1][1]
    first = len(chunks)
    kept = 0
    while first > 0:
        start, stop = chunks[first - 1]
        if kept + (stop - start) / 2 > wanted:
            break
        kept += stop - start
        first -= 1
    return range(first, len(chunks))
