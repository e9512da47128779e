"""Bytes and seconds as text, and tables in one style.

K, M, G and T are powers of 1024 in KiB to TiB and alone; KB to TB are powers of 1000.
"""

import re
from fractions import Fraction
from io import StringIO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from farspan_memory.errors import UnsupportedError

MIB, GIB = 2**20, 2**30
UNLIMITED = 2**60  # bytes: more than any machine has
UNITS = {"": 1, "b": 1} | {
    f"{prefix}{base}": factor**power
    for power, prefix in enumerate("kmgt", 1)
    for base, factor in (("", 1024), ("ib", 1024), ("b", 1000))
}
WIDE = 10_000  # columns of output that is not a terminal: no line is wrapped
_WRITTEN = re.compile(r"(\d[\d_,]*(?:\.\d+)?(?:e\+?\d{1,2})?)\s*([a-z]*?)(?:\s*bytes)?")


def read_bytes(value: str, name: str) -> int:
    """Parse bytes such as 80GB, 128GiB or 128G. Raises UnsupportedError naming the option
    `name`."""
    match = _WRITTEN.fullmatch(value.strip().lower())
    if match is not None and match[2] in UNITS:
        amount = Fraction(re.sub("[_,]", "", match[1])) * UNITS[match[2]]
        if amount >= 1:
            return int(amount)
    raise UnsupportedError(
        f"{name}: expected bytes such as 128GiB (2**30) or 80GB (10**9), at least 1, got {value!r}"
    )


def write_bytes(size: float) -> str:
    """Format bytes with about three digits, in the largest unit that is not above the size."""
    amount, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:,.0f} {unit}" if unit == "B" else f"{amount:,.1f} {unit}"


def write_seconds(seconds: float) -> str:
    """Format seconds; long times in minutes or hours."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:,.1f} h"


def lines_table(title: str, *columns: str) -> Table:
    """Return a table without rules, whose text is never shortened. The first column is
    left-aligned, the others right-aligned."""
    heading = Text(title, "bold", no_wrap=True, overflow="ignore")  # however narrow the columns
    table = Table(title=heading, title_justify="left", box=None, padding=(0, 1), pad_edge=False)
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    return table


def show(view: RenderableType) -> None:
    """Print a view for a terminal; for a file or pipe, as lines without padding or wrapping."""
    console = Console()
    if console.is_terminal:
        console.print(view)
        return
    plain = Console(file=StringIO(), color_system=None, width=WIDE)
    with plain.capture() as shown:
        plain.print(view)
    print(*(line.rstrip() for line in shown.get().splitlines()), sep="\n", flush=True)
