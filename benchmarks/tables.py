"""Tables of results, and their places in the pages of the documentation."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from farspan.formatting import write_seconds

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
OPENING, CLOSING = "<!-- table {} -->", "<!-- end -->"
MEGA = 2**20

Record = dict[str, Any]


def load(name: str) -> Record:
    """A result file."""
    found: Record = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def save(path: Path | None, record: Record) -> None:
    """Write a result file, if there is a path."""
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def filled(text: str, made: Mapping[str, str]) -> str:
    """A page with each of these in its place. Raises ValueError where a mark is missing."""
    for name, table in made.items():
        opening = OPENING.format(name).replace("  ", " ")
        before, mark, rest = text.partition(opening)
        if not mark or CLOSING not in rest:
            raise ValueError(f"the page has no place for {opening}")
        text = f"{before}{opening}\n\n{table}\n\n{rest[rest.index(CLOSING) :]}"
    return text


def write(page: Path, made: Mapping[str, str]) -> None:
    """Put tables into their places of a page."""
    page.write_text(filled(page.read_text(encoding="utf-8"), made), encoding="utf-8")


def grid(head: Sequence[str], rows: Iterable[Sequence[str]], first: str = "---") -> str:
    """A table in Markdown; its first column is aligned as `first` says, the others to the right."""
    lines = [head, [first, *["--:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def reach(cell: Record | None) -> str:
    """A longest context with the time of its step."""
    return f"{short(cell['tokens'])}, {write_seconds(cell['seconds'])}" if cell else "-"


def short(tokens: int) -> str:
    """Three digits at most: contexts are found to within a sixty-fourth."""
    size, unit = (tokens / MEGA, "M") if tokens >= MEGA else (tokens / 1024, "K")
    return f"{size:.0f}{unit}" if size >= 10 else f"{size:.1f}{unit}"
