"""Which keys the queries of a chunk see, and which rows they need: counts, for one document a row.

Dense layers see all keys before a query, layers with a window the latest, and sparse ones what
their choice leaves. How many different pages a chunk's queries choose is only known when they have:
the most that can be is counted.
"""

from farspan.plan.grid import chunk_ranges
from farspan.plan.layout import Range
from farspan.plan.program import Program
from farspan.spec import LayerSpec, Schedule, Sparse


def seen_pairs(stop: int, window: int | None) -> int:
    """Query-key pairs of the queries [0, stop): query i sees min(i + 1, window) keys."""
    ramp = stop if window is None else min(stop, window)
    return ramp * (ramp + 1) // 2 + (stop - ramp) * (window or 0)


def sparse_of(schedule: Schedule, layer: LayerSpec) -> Sparse | None:
    """How a layer's attention is sparse; None: it is exact, as every one with a window is."""
    return schedule.sparse if layer.window is None else None


def chunk_pairs(program: Program, layer: LayerSpec, chunk: int) -> int:
    """Query-key pairs of one chunk's queries, one head."""
    start, stop = program.chunks[chunk]
    sparse = sparse_of(program.schedule, layer)
    if sparse is None:
        return seen_pairs(stop, layer.window) - seen_pairs(start, layer.window)
    return seen_pairs(stop - start, None) + (stop - start) * sparse.reach(start)


def earlier_rows(program: Program, layer: LayerSpec, chunk: int) -> int:
    """Rows before a chunk that its queries need, each once: of a recurrent layer those of the chunk
    before, where its state lies. With a window, the few that two blocks share at its edge are
    counted once though they are read twice."""
    start, stop = program.chunks[chunk]
    if layer.state:
        return start - program.chunks[chunk - 1][0] if chunk else 0
    sparse = sparse_of(program.schedule, layer)
    if sparse is None:
        if layer.window is None:
            return program.share.keys.rows[chunk][0]
        first = max(0, start - layer.window + 1)
        held = program.share.keys.ranges[:chunk]
        return sum(_within(span, (first, start)) for span in held if span[1] > first)
    return sparse.near(start) + chosen_pages(sparse, start, stop) * sparse.page


def _within(span: Range, other: Range) -> int:
    return max(0, min(span[1], other[1]) - max(span[0], other[0]))


def sequence_pairs(tokens: int, layer: LayerSpec, schedule: Schedule) -> int:
    """Query-key pairs of a whole sequence, one head."""
    sparse = sparse_of(schedule, layer)
    if sparse is None:
        return seen_pairs(tokens, layer.window)
    return sum(
        seen_pairs(stop - start, None) + (stop - start) * sparse.reach(start)
        for start, stop in chunk_ranges(tokens, schedule.chunk)
    )


def chosen_pages(sparse: Sparse, start: int, stop: int) -> int:
    """The most different pages that the queries of [start, stop) can have chosen, one head."""
    page_count = -(-(stop - start) // sparse.page)
    return min(len(sparse.candidates(start)), page_count * sparse.width(start))
