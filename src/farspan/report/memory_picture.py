"""Memory over a trace as a picture: live and reserved bytes of each allocator. SVG by hand.

name, known by, what it needs
|      reserved ________________
|      ________/
|   __/   live, filled
+------------------------------- mallocs and frees
"""

from collections.abc import Sequence
from html import escape
from itertools import groupby

from farspan.memory.compare.compare import AllocatorComparison, AllocatorResult
from farspan.plan.units import write_bytes
from farspan.report.memory import known_by, over, remark

WIDTH, PANEL, GAP = 960, 96, 34  # of the picture, of an allocator's panel and below it
LEFT, RIGHT, HEAD = 84, 16, 40
MARKS = 16  # the most that are drawn; more would be a grey field
INK, GRID, LIVE, RESERVED, LOST = "#1f2933", "#d5dbe1", "#8fb8de", "#b3261e", "#f3d9d7"


def picture(comparisons: Sequence[AllocatorComparison]) -> str:
    """All traces below each other, as one SVG document."""
    parts, top = [], 0
    for number, found in enumerate(comparisons):
        parts.append(f'<g transform="translate(0 {top})">{_trace(found, f"live{number}")}</g>')
        top += HEAD + len(found.results) * (PANEL + GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" '
        f'height="{top}" font-family="sans-serif" font-size="12" fill="{INK}">\n'
        f'<rect width="{WIDTH}" height="{top}" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def page(comparisons: Sequence[AllocatorComparison]) -> str:
    """The picture and its numbers as an HTML document."""
    tables = "\n".join(_table(found) for found in comparisons)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        "<title>Memory over time</title>\n<style>body{font-family:sans-serif;margin:2em auto;"
        f"max-width:{WIDTH}px;color:{INK}}}td,th{{padding:.2em .8em;text-align:right}}"
        "td:first-child,th:first-child{text-align:left}</style></head><body>\n"
        f"{picture(comparisons)}{tables}\n</body></html>\n"
    )


def _trace(found: AllocatorComparison, live: str) -> str:
    """The panels of a trace; its live bytes are drawn once, by the name `live`."""
    most = max([found.live_peak, *(max(shown(r), default=0) for r in found.results)]) or 1
    title = f"{found.trace or 'trace'}: {found.events:,} mallocs and frees"
    parts = [
        f'<text x="{LEFT}" y="18" font-size="15" font-weight="bold">{escape(title)}</text>',
        _legend(),
        f'<defs><g id="{live}">{_area(found.live, len(found.live), most, LIVE)}</g></defs>',
    ]
    for index, result in enumerate(found.results):
        top = HEAD + index * (PANEL + GAP)
        parts.append(f'<g transform="translate(0 {top})">{_panel(found, result, most, live)}</g>')
    return "\n".join(parts)


def _legend() -> str:
    parts = []
    for index, (color, words) in enumerate(((LIVE, "live"), (LOST, "reserved, not live"))):
        x = WIDTH - RIGHT - 220 + 70 * index
        parts.append(f'<rect x="{x}" y="8" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{x + 17}" y="18">{words}</text>')
    return "".join(parts)


def _panel(found: AllocatorComparison, result: AllocatorResult, most: int, live: str) -> str:
    capacity = result.smallest.capacity or 0
    words = (
        f"{result.name} ({known_by(result)}): reserves "
        f"{write_bytes(result.unlimited.reserved_peak)}, completes with {write_bytes(capacity)} "
        f"({over(capacity, found.live_peak)} live)"
    )
    reserved = shown(result)
    samples = len(found.live)
    parts = [
        f'<text x="{LEFT}" y="10">{escape(words)}</text>',
        _area(reserved, samples, most, LOST),
        f'<use href="#{live}"/>',
        *(_tick(share, most) for share in (0.0, 0.5, 1.0)),
        *_marks(found),
        _line(reserved, samples, most),
    ]
    if result.given is not None and not result.given.completed:
        x = _x(len(reserved), samples)
        parts.append(f'<text x="{x + 4:.1f}" y="{16 + PANEL / 2}" fill="{RESERVED}">full</text>')
    return "".join(parts)


def shown(result: AllocatorResult) -> tuple[int, ...]:
    """The curve under the capacity asked about, or else without a limit."""
    return (result.given or result.unlimited).curve


def _x(sample: float, samples: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * sample / max(samples, 1)


def _y(size: float, most: int) -> float:
    return 16 + (PANEL - 16) * (1 - size / most)


def _steps(values: Sequence[int], samples: int, most: int) -> list[str]:
    """Corners of a staircase: each value holds for its sample."""
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


def _marks(found: AllocatorComparison) -> list[str]:
    """Borders of the trace, where they are few: else those of its steps."""
    marks = found.marks
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


def _table(found: AllocatorComparison) -> str:
    head = ("allocator", "known by", "reserved", "fragmentation", "least capacity", "retries")
    rows = [
        (
            result.name,
            known_by(result),
            write_bytes(result.unlimited.reserved_peak),
            f"{result.fragmentation(found.live_peak):.1%}",
            f"{write_bytes(result.smallest.capacity or 0)}",
            f"{result.smallest.retries:,}",
        )
        for result in found.results
    ]
    lines = [_row("th", head), *(_row("td", row) for row in rows)]
    return (
        f"<h2>{escape(found.trace or 'trace')}</h2>\n<table>{''.join(lines)}</table>\n"
        f"<p>{escape(remark(found))}</p>"
    )


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>\n"
