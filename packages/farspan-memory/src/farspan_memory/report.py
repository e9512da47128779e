"""Report of allocators compared on a trace: tables for a terminal, and a picture in SVG."""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from farspan_memory.compare.allocators import CREATE, FREE, MALLOC, MAP, RELEASE, UNMAP
from farspan_memory.compare.compare import (
    AS_GOOD,
    ASSUMED,
    EXPANDABLE,
    PLAN,
    PUBLISHED,
    STITCHING,
    AllocatorComparison,
    AllocatorResult,
    AllocatorRun,
)
from farspan_memory.formatting import lines_table, write_bytes, write_seconds

MODELLED, REAL, PLANNED, PROVED = "modelled", "real code", "a plan", "proved"
POLICY = (
    "Stitching runs as it is installed: it takes new memory while memory is free, and stitches "
    "only when none is left, so the memory that it reserves without a limit does not show how much "
    "it needs. "
)
# An allocator uses one of each pair: calls for segments, or for chunks.
CALLS = {
    "creates": (MALLOC, CREATE),
    "maps": (MAP,),
    "unmaps": (UNMAP,),
    "releases": (FREE, RELEASE),
}


def compare_view(comparisons: Sequence[AllocatorComparison]) -> RenderableType:
    """Return tables for each trace: memory, driver calls, a remark; then the sources of costs."""
    parts: list[RenderableType] = []
    for comparison in comparisons:
        parts += [subject(comparison), memory_table(comparison), Text()]
        unlimited = [(result.name, result.unlimited) for result in comparison.results]
        parts += [calls_table("driver calls, without a limit on memory", unlimited), Text()]
        smallest = [(result.name, result.smallest) for result in comparison.results]
        parts += [calls_table("driver calls at each allocator's least capacity", smallest), Text()]
        if runs := given_runs(comparison):
            parts += [given_table(comparison), Text(), calls_table("its calls", runs)]
            parts.append(Text())
        if comparison.expandable_as_good() is not None:
            parts.append(Text(f"{remark(comparison)}\n", "bold"))
    return Group(*parts, Text(POLICY + pricing()))


def subject(comparison: AllocatorComparison) -> Text:
    """Return the title of a comparison, with its trace's size."""
    text = Text(comparison.trace or "trace", "bold")
    text.append(f": {comparison.events:,} mallocs and frees, at most ", "not bold")
    text.append(f"{write_bytes(comparison.live_peak)} alive\n", "not bold")
    return text


def memory_table(comparison: AllocatorComparison) -> Table:
    """Return a table of the memory that each allocator reserves, and of the least it needs."""
    title = f"memory; the least capacity is exact to {write_bytes(comparison.step)}"
    table = lines_table(title, *COLUMNS)
    table.collapse_padding = True  # a column of terabytes fits 80 columns
    for row in memory_rows(comparison):
        table.add_row(*row)
    return table


COLUMNS = ("allocator", "known by", "reserved", "unused", "least", "x live", "retries")


def memory_rows(comparison: AllocatorComparison) -> Iterator[tuple[str, ...]]:
    """Yield the memory table's row for each allocator, with the columns `COLUMNS`."""
    for result in comparison.results:
        yield (
            result.name,
            known_by(result),
            write_bytes(result.unlimited.reserved_peak),
            f"{result.fragmentation(comparison.live_peak):.1%}",
            write_bytes(result.smallest.capacity or 0),
            over(result.smallest.capacity or 0, comparison.live_peak),
            f"{result.smallest.retries:,}",
        )


def calls_table(title: str, runs: Sequence[tuple[str, AllocatorRun]]) -> Table:
    """Return a table of the driver calls of each allocator's run, and their cost in seconds."""
    table = lines_table(title, "allocator", *CALLS, "cost")
    for name, run in runs:
        counts = [sum(run.calls.get(call, 0) for call in calls) for calls in CALLS.values()]
        shown = [f"{count:,}" if count else "" for count in counts]
        table.add_row(name, *shown, write_seconds(run.seconds))
    return table


def given_table(comparison: AllocatorComparison) -> Table:
    """Return a table of the runs with the capacity that the user requested."""
    runs = given_runs(comparison)
    title = f"with {write_bytes(runs[0][1].capacity or 0)}"
    table = lines_table(title, "allocator", "completes", "retries", "reserved")
    for name, run in runs:
        answer = "yes" if run.completed else "no"
        table.add_row(name, answer, f"{run.retries:,}", write_bytes(run.reserved_peak))
    return table


def given_runs(comparison: AllocatorComparison) -> list[tuple[str, AllocatorRun]]:
    """Return (allocator, run) for the runs with the capacity that the user requested, if any."""
    return [(result.name, result.given) for result in comparison.results if result.given]


def known_by(result: AllocatorResult) -> str:
    """Say whether an allocator's numbers come from a model, a plan, or its real code."""
    if result.name == PLAN:
        return PROVED if result.proved else PLANNED
    return MODELLED if result.modelled else REAL


def over(capacity: int, live: int) -> str:
    """Return a capacity as a multiple of the live peak, such as `1.250x`."""
    return f"{capacity / live:.3f}x" if live else "1.000x"


def remark(comparison: AllocatorComparison) -> str:
    """Say which of stitching and expandable segments needs less memory; empty without both."""
    expandable, stitching = comparison.least_of(EXPANDABLE), comparison.least_of(STITCHING)
    if expandable is None or stitching is None:
        return ""
    needs = [f"{r.name}: {_needs(r)}" for r in (expandable, stitching)]
    if comparison.expandable_as_good():
        verdict = (
            f"Expandable segments need as little memory as stitching, within {AS_GOOD:.0%} of the "
            "live peak"
        )
    else:
        verdict = "Stitching needs less memory than expandable segments"
    return f"{verdict}. {'; '.join(needs)}."


def _needs(result: AllocatorResult) -> str:
    run = result.smallest
    retries = "1 retry" if run.retries == 1 else f"{run.retries:,} retries"
    return f"{write_bytes(run.capacity or 0)}, {retries}, calls for {write_seconds(run.seconds)}"


def pricing() -> str:
    """Say where the costs of driver calls come from."""
    assumed = ", ".join(call for call, cost in PUBLISHED.items() if cost.source.startswith(ASSUMED))
    known = "; ".join(
        f"{call}: {cost.source}"
        for call, cost in PUBLISHED.items()
        if not cost.source.startswith(ASSUMED)
    )
    return (
        f"Creates are calls of {MALLOC} or {CREATE}, releases of {FREE} or {RELEASE}. Costs are "
        "modelled: the number of calls times their published costs, without waiting for the "
        f"device. {known}. Assumed to cost as much as the calls that they undo: {assumed}.\n"
    )


WIDTH, PANEL, GAP = 960, 96, 34  # of the picture; of an allocator's panel; below a panel
LEFT, RIGHT, HEAD = 84, 16, 40
MARKS = 16  # most marks that are drawn; more would be a grey field
INK, GRID, LIVE, RESERVED, LOST = "#1f2933", "#d5dbe1", "#8fb8de", "#b3261e", "#f3d9d7"


def picture(comparisons: Sequence[AllocatorComparison]) -> str:
    """Return an SVG document with all traces, one below the other."""
    parts, top = [], 0
    for number, comparison in enumerate(comparisons):
        parts.append(f'<g transform="translate(0 {top})">{_trace(comparison, f"live{number}")}</g>')
        top += HEAD + len(comparison.results) * (PANEL + GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" '
        f'height="{top}" font-family="sans-serif" font-size="12" fill="{INK}">\n'
        f'<rect width="{WIDTH}" height="{top}" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def page(comparisons: Sequence[AllocatorComparison]) -> str:
    """Return an HTML document with the picture and its numbers as tables."""
    tables = "\n".join(_table(comparison) for comparison in comparisons)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        "<title>Memory over time</title>\n<style>body{font-family:sans-serif;margin:2em auto;"
        f"max-width:{WIDTH}px;color:{INK}}}td,th{{padding:.2em .8em;text-align:right}}"
        "td:first-child,th:first-child{text-align:left}</style></head><body>\n"
        f"{picture(comparisons)}{tables}\n</body></html>\n"
    )


def _trace(comparison: AllocatorComparison, live: str) -> str:
    """Return the SVG of a trace: one panel for each allocator, all with the curve of live bytes,
    which is drawn once."""
    most = max([comparison.live_peak, *(max(shown(r), default=0) for r in comparison.results)]) or 1
    title = f"{comparison.trace or 'trace'}: {comparison.events:,} mallocs and frees"
    area = _area(comparison.live, len(comparison.live), most, LIVE)
    parts = [
        f'<text x="{LEFT}" y="18" font-size="15" font-weight="bold">{escape(title)}</text>',
        _legend(),
        f'<defs><g id="{live}">{area}</g></defs>',
    ]
    for index, result in enumerate(comparison.results):
        top = HEAD + index * (PANEL + GAP)
        panel = _panel(comparison, result, most, live)
        parts.append(f'<g transform="translate(0 {top})">{panel}</g>')
    return "\n".join(parts)


def _legend() -> str:
    parts = []
    for index, (color, words) in enumerate(((LIVE, "live"), (LOST, "reserved, not live"))):
        x = WIDTH - RIGHT - 220 + 70 * index
        parts.append(f'<rect x="{x}" y="8" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{x + 17}" y="18">{words}</text>')
    return "".join(parts)


def _panel(comparison: AllocatorComparison, result: AllocatorResult, most: int, live: str) -> str:
    capacity = result.smallest.capacity or 0
    words = (
        f"{result.name} ({known_by(result)}): reserves "
        f"{write_bytes(result.unlimited.reserved_peak)}, completes with {write_bytes(capacity)} "
        f"({over(capacity, comparison.live_peak)} live)"
    )
    reserved = shown(result)
    samples = len(comparison.live)
    parts = [
        f'<text x="{LEFT}" y="10">{escape(words)}</text>',
        _area(reserved, samples, most, LOST),
        f'<use href="#{live}"/>',
        *(_tick(share, most) for share in (0.0, 0.5, 1.0)),
        *_marks(comparison),
        _line(reserved, samples, most),
    ]
    if result.given is not None and not result.given.completed:
        x = _x(len(reserved), samples)
        parts.append(f'<text x="{x + 4:.1f}" y="{16 + PANEL / 2}" fill="{RESERVED}">full</text>')
    return "".join(parts)


def shown(result: AllocatorResult) -> tuple[int, ...]:
    """Return the curve to draw: of the run with the requested capacity, or else without a limit."""
    return (result.given or result.unlimited).curve


def _x(sample: float, samples: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * sample / max(samples, 1)


def _y(size: float, most: int) -> float:
    return 16 + (PANEL - 16) * (1 - size / most)


def _steps(values: Sequence[int], samples: int, most: int) -> list[str]:
    """Return the corners of a staircase curve, which is constant within each sample."""
    corners, start = [], 0
    for value, same in groupby(values):
        end, y = start + len(list(same)), _y(value, most)
        corners += [f"{_x(start, samples):.1f},{y:.1f}", f"{_x(end, samples):.1f},{y:.1f}"]
        start = end
    return corners


def _area(values: Sequence[int], samples: int, most: int, color: str) -> str:
    base = _y(0, most)
    ends = [f"{_x(len(values), samples):.1f},{base:.1f}", f"{_x(0, samples):.1f},{base:.1f}"]
    corners = " ".join([*_steps(values, samples, most), *ends])
    return f'<polygon points="{corners}" fill="{color}"/>'


def _line(values: Sequence[int], samples: int, most: int) -> str:
    corners = " ".join(_steps(values, samples, most))
    return f'<polyline points="{corners}" fill="none" stroke="{RESERVED}" stroke-width="1.2"/>'


def _tick(share: float, most: int) -> str:
    y = _y(share * most, most)
    return (
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>'
        f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{write_bytes(share * most)}</text>'
    )


def _marks(comparison: AllocatorComparison) -> list[str]:
    """Return a panel's lines at the trace's marks, or only at its steps if marks are many."""
    marks = comparison.marks
    if len(marks) > MARKS:
        marks = tuple(mark for mark in marks if mark[1].startswith("step"))
    if len(marks) > MARKS:
        return []
    return [
        f'<line x1="{_x(share, 1):.1f}" x2="{_x(share, 1):.1f}" y1="16" y2="{PANEL}" '
        f'stroke="{INK}" stroke-opacity="0.4" stroke-dasharray="3 3">'
        f"<title>{escape(name)}</title></line>"
        for share, name in marks
    ]


def _table(comparison: AllocatorComparison) -> str:
    lines = [_row("th", COLUMNS), *(_row("td", row) for row in memory_rows(comparison))]
    return (
        f"<h2>{escape(comparison.trace or 'trace')}</h2>\n<table>{''.join(lines)}</table>\n"
        f"<p>{escape(remark(comparison))}</p>"
    )


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>\n"
