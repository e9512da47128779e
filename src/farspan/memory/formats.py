"""Traces as files: MEMO's text, MiniMalloc's CSV, PyTorch's memory snapshots.

    # trace 7B plain 65536            id,lower,upper,size
    malloc 17 4194304 stream 1        0,0,4,4096
    # mark layer 3 forward            1,2,7,512
    free 17
    # end 3

Text (MEMO 4.3.2) is what farspan writes: a line an event; `stream` is left out where it is 0; a
free may name the size again, as MEMO's does; other lines with # are comments. What begins with
`# trace` ends with `# end` and the number of its events. A CSV has one line a tensor, alive in
[lower, upper), and ends with a line break. Snapshots: see `snapshot`. Which of these a file is, its
content says, not its name.
"""

import csv
import io
import re
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

from farspan.memory.snapshot import is_snapshot, read_snapshot
from farspan.memory.trace import Event, Free, Malloc, Mark, Trace, faults
from farspan.spec import Refused

CSV_COLUMNS = ("id", "lower", "upper", "size")
MARK, NAME, END = "# mark ", "# trace ", "# end "
_MALLOC = re.compile(r"malloc\s+(\d{1,30})\s+(-?\d{1,30})(?:\s+stream\s+(\d{1,30}))?", re.ASCII)
_FREE = re.compile(r"free\s+(\d{1,30})(?:\s+\d{1,30})?", re.ASCII)


class Format(Enum):
    """What a file with a trace is."""

    TEXT = "MEMO's text"
    CSV = "MiniMalloc's CSV"
    SNAPSHOT = "PyTorch's memory snapshot"


def read_trace(path: str | Path) -> Trace:
    """The trace in a file of any of the formats. Raises Refused naming the file and the line."""
    return read_format(path)[0]


def read_format(path: str | Path) -> tuple[Trace, Format]:
    """The same, and which format it is in."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Refused(f"trace: {path} cannot be read: {error}") from error
    if is_snapshot(content):
        return read_snapshot(content, path.name), Format.SNAPSHOT
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(
            f"{path}: neither text nor a memory snapshot of PyTorch: byte {error.start} is not "
            "UTF-8"
        ) from error
    if not text.strip("\ufeff \t\r\n"):
        raise Refused(f"{path}: is empty; a trace has at least one line, such as `malloc 0 512`")
    if _is_csv(text):
        return from_csv(text, path.name), Format.CSV
    return from_text(text, path.name), Format.TEXT


def write_trace(trace: Trace, path: str | Path) -> None:
    """As text. Raises Refused where the file cannot be written."""
    try:
        Path(path).write_text(to_text(trace), encoding="utf-8", newline="\n")
    except OSError as error:
        raise Refused(f"trace: {path} cannot be written: {error}") from error


def _is_csv(text: str) -> bool:
    first = next((line for line in text.splitlines() if line.strip("\ufeff \t")), "")
    return "," in first and not first.startswith("#")


# -- MEMO's text -------------------------------------------------------------------------------


def to_text(trace: Trace) -> str:
    """The trace in MEMO's format. Raises Refused for a name that is no single line."""
    named = _line(trace.name or "without a name")
    lines = [NAME + named, *map(_event_line, trace.events), f"{END}{len(trace.events)}"]
    return "".join(f"{line}\n" for line in lines)


def _event_line(event: Event) -> str:
    match event:
        case Malloc(tensor, size, 0):
            return f"malloc {tensor} {size}"
        case Malloc(tensor, size, stream):
            return f"malloc {tensor} {size} stream {stream}"
        case Free(tensor):
            return f"free {tensor}"
        case Mark(name):
            return MARK + _line(name)


def _line(name: str) -> str:
    if not name.isprintable() or name != name.strip() or not name:
        raise Refused(f"trace: the name {name!r} cannot stand in a line of its own")
    return name


def from_text(text: str, name: str) -> Trace:
    """The trace of MEMO's format. Raises Refused naming `name` and the line."""
    events: list[Event] = []
    places: list[int] = []  # of each event, its line
    called, end = "", 0
    lines = text.removeprefix("\ufeff").split("\n")
    for number, line in enumerate(map(str.strip, lines), 1):
        where = f"{name}:{number}"
        if end and line:
            raise Refused(f"{where}: the trace ended in line {end}, and more comes after it")
        if line.startswith(NAME):
            called = line.removeprefix(NAME)
        elif line.startswith(END):
            _check_end(line, len(events), where)
            end = number
        elif line and (line[0] != "#" or line.startswith(MARK)):
            events.append(_event(line, where))
            places.append(number)
    if (called and not end) or len(lines) in (end, *places[-1:]):
        raise Refused(
            f"{name}:{len(lines)}: the trace is cut off: a last line ends with a line break, and "
            f"what begins with `{NAME.strip()}` ends with `{END.strip()}`"
        )
    return _checked(events, places, name, called or name)


def _check_end(line: str, count: int, where: str) -> None:
    if line.removeprefix(END) != str(count):
        raise Refused(f"{where}: {count} events came before {line[:60]!r}: some are missing")


def _event(line: str, where: str) -> Event:
    if line.startswith(MARK):
        return Mark(line.removeprefix(MARK).strip())
    found = _MALLOC.fullmatch(line)
    if found is not None:
        tensor, size, stream = found.groups(default="0")
        return Malloc(int(tensor), int(size), int(stream))
    found = _FREE.fullmatch(line)
    if found is not None:
        return Free(int(found[1]))
    raise Refused(
        f"{where}: expected `malloc ID SIZE [stream S]`, `free ID` or `# mark NAME`, got "
        f"{line[:60]!r}"
    )


def _checked(events: Iterable[Event], places: list[int], name: str, called: str) -> Trace:
    """The trace, or what is wrong in terms of the file's lines."""
    events = tuple(events)
    for index, words in faults(events):
        raise Refused(f"{name}:{places[index]}: {words}")
    return Trace(events, called)


# -- MiniMalloc's CSV --------------------------------------------------------------------------


def to_csv(trace: Trace) -> str:
    """One line a malloc, numbered in order; times count mallocs and frees. Marks and streams are
    left out: the format has no place for them."""
    events = tuple(event for event in trace.events if not isinstance(event, Mark))
    rows = (
        f"{number},{r.born},{r.dies},{r.size}\n"
        for number, r in enumerate(Trace(events, trace.name).requests())
    )
    return ",".join(CSV_COLUMNS) + "\n" + "".join(rows)


def from_csv(text: str, name: str) -> Trace:
    """The trace of MiniMalloc's format; further columns are ignored. What dies at a time is freed
    before what is born then is asked for. Raises Refused naming `name` and the line."""
    rows = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""))
    try:
        head = [field.strip() for field in next(rows)]
        if any(column not in head for column in CSV_COLUMNS):
            raise Refused(f"{name}:1: expected the columns {','.join(CSV_COLUMNS)}, got {head}")
        places = [head.index(column) for column in CSV_COLUMNS]
        found = [
            (rows.line_num, _row(row, places, len(head), f"{name}:{rows.line_num}"))
            for row in rows
            if row
        ]
    except csv.Error as error:
        raise Refused(f"{name}:{rows.line_num}: {error}") from error
    if not text.endswith(("\n", "\r")):  # of the last number some digits may be missing
        raise Refused(f"{name}:{rows.line_num}: cut off: a last line ends with a line break")
    changes: list[tuple[int, int, int, int, Event]] = []
    known: set[int] = set()
    for order, (number, (tensor, lower, upper, size)) in enumerate(found):
        if tensor in known:
            raise Refused(f"{name}:{number}: id {tensor} was given before")
        known.add(tensor)
        changes.append((lower, 1, order, number, Malloc(tensor, size)))
        changes.append((upper, 0, order, number, Free(tensor)))
    changes.sort(key=lambda change: change[:3])
    return _checked([c[4] for c in changes], [c[3] for c in changes], name, name)


def _row(row: list[str], places: list[int], width: int, where: str) -> tuple[int, int, int, int]:
    if len(row) != width:
        raise Refused(f"{where}: expected {width} fields, got {len(row)}")
    try:
        tensor, lower, upper, size = (int(row[place]) for place in places)
    except ValueError as error:
        raise Refused(f"{where}: expected whole numbers, got {','.join(row)[:60]!r}") from error
    if lower >= upper:
        raise Refused(f"{where}: alive in [{lower}, {upper}), which is no time at all")
    return tensor, lower, upper, size
