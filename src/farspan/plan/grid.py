"""The grid of (layer, chunk) cells: where it is cut."""

from farspan.spec import Schedule


def chunk_ranges(tokens: int, chunk: int) -> tuple[tuple[int, int], ...]:
    """Token ranges of the chunks; the last may be ragged."""
    return tuple((start, min(start + chunk, tokens)) for start in range(0, tokens, chunk))


def group_ranges(schedule: Schedule, layers: int) -> tuple[tuple[int, int], ...]:
    """Layer ranges of the groups, first group first."""
    ranges, start = [], 0
    for size in schedule.group_sizes(layers):
        ranges.append((start, start + size))
        start += size
    return tuple(ranges)


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
