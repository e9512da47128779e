"""Tables and bars of one look."""

from collections.abc import Iterable

from rich.table import Table

NAME, VALUE, BAR = 36, 10, 24  # columns of a name, a value and a full bar


def lines_table(title: str, *columns: str) -> Table:
    """Without rules; the first column to the left, the others to the right, none of them cut."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1))
    table.pad_edge = False  # a machine's rates take all of 80 columns
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    return table


def bars_table(title: str, rows: Iterable[tuple[str, str, float]]) -> Table:
    """A name, a value and its share as a bar; bars of several tables begin in one column."""
    table = lines_table(title, "", "", "")
    table.show_header = False
    table.columns[0].min_width = NAME
    table.columns[1].min_width = VALUE
    table.columns[2].justify = "left"
    for name, value, share in rows:
        table.add_row(f"  {name}", value, bar(share))
    return table


def bar(share: float) -> str:
    """A bar as long as the share of a full one, to an eighth of a column."""
    full, rest = divmod(round(8 * BAR * min(1.0, max(0.0, share))), 8)
    return "█" * full + " ▏▎▍▌▋▊▉"[rest].strip()
