"""Traces, which list a program's requests to its allocator in order (MEMO 4.3.2), and their files.

    event   0         1         2         3         4
            malloc a  mark m    malloc b  free a    malloc a
    a       |-----------------------------|         |-------> never freed: to the end
    b                           |------------------------->

Time counts events. A tensor's number may be reused after it was freed.

    # trace 7B plain 65536            id,lower,upper,size
    malloc 17 4194304 stream 1        0,0,4,4096
    # mark layer 3 forward            1,2,7,512
    free 17
    # end 3

Text files are in MEMO's format: one line per event; `stream` is omitted for 0; a free may repeat
the size, as MEMO's does; other lines with # are comments. A file that begins with `# trace` ends
with `# end` and the number of its events. MiniMalloc's CSV has one line a tensor, alive in [lower,
upper), and ends with a line break. PyTorch's memory snapshots (`torch.cuda.memory._dump_snapshot`)
are pickles, or the same values as JSON. A pickle may run any code that it names; a snapshot
consists of dicts, lists, texts and numbers alone, so the reader here knows no names and refuses
every one. The content of a file decides its format, not its name.
"""

import csv
import io
import json
import pickle
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from farspan_memory.errors import UnsupportedError
from farspan_memory.files import write_output
from farspan_memory.placement import PlacementRequest, live_peak

LARGEST = 2**50  # bytes of one request; more means a broken trace: no machine has a pebibyte
LAST_STREAM = 2**64 - 1  # a stream is an address to CUDA


@dataclass(frozen=True, slots=True)
class Malloc:
    """A request for memory; its size is not rounded."""

    tensor: int
    size: int  # bytes
    stream: int = 0


@dataclass(frozen=True, slots=True)
class FreeEvent:
    """Release of a tensor's memory."""

    tensor: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A named moment, such as "layer 3 forward" or "step 2". The events from one mark to the next
    are a segment; two-level plans place one segment at a time (MEMO 4.2)."""

    name: str


Event = Malloc | FreeEvent | Mark


@dataclass(frozen=True, slots=True)
class Trace:
    """A valid sequence of mallocs, frees and marks.

    Invariant: a tensor is freed only while it is alive, and asked for only while it is not; each
    size is in [0, LARGEST], each stream in [0, LAST_STREAM]. Raises UnsupportedError with the
    number of the first event that breaks it.
    """

    events: tuple[Event, ...]
    name: str = ""

    def __post_init__(self) -> None:
        for index, words in faults(self.events):
            raise UnsupportedError(f"trace {self.name or 'without a name'}: event {index}: {words}")

    def requests(self) -> tuple[PlacementRequest, ...]:
        """Return a placement request for each malloc, in order; without a free it lasts to the
        end."""
        end = len(self.events)
        deaths: dict[int, int] = {}  # index of a malloc to that of its free
        alive: dict[int, int] = {}  # tensor to index of its malloc
        for index, event in enumerate(self.events):
            if isinstance(event, Malloc):
                alive[event.tensor] = index
            elif isinstance(event, FreeEvent):
                deaths[alive.pop(event.tensor)] = index
        return tuple(
            PlacementRequest(event.size, index, deaths.get(index, end))
            for index, event in enumerate(self.events)
            if isinstance(event, Malloc)
        )

    def live_peak(self) -> int:
        """Return the most bytes alive at the same time; no allocator needs less."""
        return live_peak(self.requests())


def from_events(events: Iterable[Any], name: str) -> Trace:
    """Return a trace of events from another recorder. Their fields decide the kind: a malloc has a
    `tensor`, a `size` and perhaps a `stream`; a free only a `tensor`; a mark a `name`."""
    found: list[Event] = []
    for event in events:
        if hasattr(event, "size"):
            found.append(Malloc(event.tensor, event.size, getattr(event, "stream", 0)))
        else:
            found.append(FreeEvent(event.tensor) if hasattr(event, "tensor") else Mark(event.name))
    return Trace(tuple(found), name)


def faults(events: Iterable[Event]) -> Iterator[tuple[int, str]]:
    """Yield (index, reason) of each event that no allocator can serve; indices count from 0."""
    alive: set[int] = set()
    freed: set[int] = set()
    for index, event in enumerate(events):
        if isinstance(event, Malloc):
            if event.tensor in alive:
                yield index, f"malloc of tensor {event.tensor}, which is still allocated"
            if not 0 <= event.size <= LARGEST:
                yield index, f"size {event.size}, expected 0 to {LARGEST} bytes"
            if not 0 <= event.stream <= LAST_STREAM:
                yield index, f"stream {event.stream}, expected 0 to {LAST_STREAM}"
            alive.add(event.tensor)
        elif isinstance(event, FreeEvent):
            if event.tensor not in alive:
                why = "a second time" if event.tensor in freed else "without a malloc"
                yield index, f"free of tensor {event.tensor} {why}"
            alive.discard(event.tensor)
            freed.add(event.tensor)


# -- PyTorch's memory snapshots -----------------------------------------------------------------


PICKLE = b"\x80"  # the opcode before the protocol's number, in protocols from 2 on
ALLOC, FREED = "alloc", "free_requested"  # `free_completed` comes when other streams are done
OTHERS = {
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "snapshot",
    "oom",
    "user_defined",
}
IN_USE = "active_allocated"  # the state of a block in use
SHOWN = 80  # characters of an invalid entry in messages


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler of plain values, which refuses every name that a pickle would import."""

    def find_class(self, module: str, name: str) -> Any:
        raise UnsupportedError(f"the pickle names {module}.{name}; memory snapshots hold only data")

    def persistent_load(self, pid: Any) -> Any:
        raise UnsupportedError(
            f"the pickle refers to external data {pid!r}; a memory snapshot does not"
        )


def is_snapshot(content: bytes) -> bool:
    """Return whether a file looks like a PyTorch memory snapshot, as a pickle or JSON."""
    return content.startswith(PICKLE) or content.lstrip()[:1] in (b"{", b"[")


def read_snapshot(content: bytes, name: str, device: int | None = None) -> Trace:
    """Return the mallocs and frees of one device, by default the first with any, as a trace.

    Memory allocated before the recording began, and freed in it or alive at its end, is requested
    at the beginning. Raises UnsupportedError naming the file and the entry.
    """
    return from_snapshot(_values(content, name), name, device)


def from_snapshot(snapshot: Any, name: str, device: int | None = None) -> Trace:
    """Return the trace of a snapshot that `torch.cuda.memory._snapshot()` returned."""
    traces = snapshot.get("device_traces") if isinstance(snapshot, dict) else snapshot
    if not isinstance(traces, list) or not all(isinstance(trace, list) for trace in traces):
        raise UnsupportedError(
            f"{name}: expected a snapshot with device_traces, one list for each device"
        )
    if device is None:
        device = next((number for number, trace in enumerate(traces) if trace), 0)
    if not 0 <= device < len(traces) or not traces[device]:
        raise UnsupportedError(
            f"{name}: device {device} has no events; record with "
            "torch.cuda.memory._record_memory_history() before the step"
        )
    segments = snapshot.get("segments", []) if isinstance(snapshot, dict) else []
    return _EventReader(name, device).trace(traces[device], segments)


class _EventReader:
    """Converter of a snapshot's entries for one device to events. Each address in use stands for
    one tensor."""

    def __init__(self, name: str, device: int) -> None:
        self.name, self.device = name, device
        self.tensors: dict[int, int] = {}  # address to tensor
        self.freed: set[int] = set()  # addresses whose last tensor was freed
        self.streams: dict[int, int] = {0: 0}  # the allocator's number of a stream to the trace's
        self.before: list[Event] = []
        self.told: list[str] = []  # location of each event
        self.events: list[Event] = []
        self.next = 0

    def trace(self, entries: list[Any], segments: Any) -> Trace:
        places = [self._read(number, entry) for number, entry in enumerate(entries)]
        if not isinstance(segments, list):
            raise UnsupportedError(
                f"{self.name}: segments: expected a list, got {_shown(segments)}"
            )
        for number, segment in enumerate(segments):
            self._add_older(f"{self.name}: segment {number}", segment)
        events = (*self.before, *self.events)
        where = self.told + [self._where(n) for n, read in enumerate(places) if read]
        for index, words in faults(events):
            raise UnsupportedError(f"{where[index]}: {words}")
        return Trace(events, self.name)

    def _add_older(self, where: str, segment: Any) -> None:
        """Add mallocs of memory that is older than the first entry and still in use. Only the
        snapshot's segments list it."""
        if not isinstance(segment, dict):
            raise UnsupportedError(f"{where}: expected a segment, got {_shown(segment)}")
        if _number(segment, "device", where, 0) != self.device:
            return
        address, stream = (_number(segment, field, where, 0) for field in ("address", "stream"))
        blocks = segment.get("blocks", [])
        if not isinstance(blocks, list):
            raise UnsupportedError(f"{where}: blocks: expected a list, got {_shown(blocks)}")
        for number, block in enumerate(blocks):
            within = f"{where}: block {number}"
            if not isinstance(block, dict):
                raise UnsupportedError(f"{within}: expected a block, got {_shown(block)}")
            size = _number(block, "size", within)
            if size < 0:
                raise UnsupportedError(f"{within}: size {size}, expected at least 0 bytes")
            if block.get("state") == IN_USE and address not in self.tensors:
                asked = _number(block, "requested_size", within, size)
                self._add_before(within, address, asked, stream)
            address += size

    def _add_before(self, where: str, address: int, size: int, stream: int) -> None:
        self.before.append(self._malloc(address, size, stream))
        self.told.append(where)

    def _where(self, number: int) -> str:
        return f"{self.name}: device {self.device}: entry {number}"

    def _read(self, number: int, entry: Any) -> bool:
        """Convert an entry of the snapshot. Return whether the entry is a malloc or a free."""
        if not isinstance(entry, dict) or not isinstance(entry.get("action"), str):
            raise UnsupportedError(
                f"{self._where(number)}: expected an entry with an action, got {_shown(entry)}"
            )
        action = entry["action"]
        if action in OTHERS:
            return False
        if action not in (ALLOC, FREED):
            raise UnsupportedError(f"{self._where(number)}: unknown action {action[:SHOWN]!r}")
        where = self._where(number)
        address, size = (_number(entry, field, where) for field in ("addr", "size"))
        stream = _number(entry, "stream", where, 0)
        if action == ALLOC:
            if address in self.tensors:
                raise UnsupportedError(
                    f"{self._where(number)}: alloc at an address that was not freed"
                )
            self.freed.discard(address)
            self.events.append(self._malloc(address, size, stream))
            return True
        if address in self.freed:
            raise UnsupportedError(f"{self._where(number)}: free of {address:#x} a second time")
        if address not in self.tensors:
            self._add_before(where, address, size, stream)
        self.freed.add(address)
        self.events.append(FreeEvent(self.tensors.pop(address)))
        return True

    def _malloc(self, address: int, size: int, stream: int) -> Malloc:
        tensor, self.next = self.next, self.next + 1
        self.tensors[address] = tensor
        return Malloc(tensor, size, self.streams.setdefault(stream, len(self.streams)))


def _number(values: dict[Any, Any], field: str, where: str, default: int | None = None) -> int:
    value = values.get(field, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UnsupportedError(f"{where}: {field}: expected a number, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    return repr(value)[:SHOWN]


def _values(content: bytes, name: str) -> Any:
    """Return the plain values of a JSON text, or of a pickle that does not import anything."""
    if not content.startswith(PICKLE):
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise UnsupportedError(f"{name}: the JSON cannot be read: {error}") from error
    try:
        return _PlainUnpickler(io.BytesIO(content)).load()
    except UnsupportedError as error:
        raise UnsupportedError(f"{name}: {error}") from None
    except Exception as error:  # a broken pickle may raise anything
        raise UnsupportedError(
            f"{name}: the pickle cannot be read, or was cut off: {type(error).__name__}: {error}"
        ) from error


# -- files --------------------------------------------------------------------------------------


CSV_COLUMNS = ("id", "lower", "upper", "size")
MARK, NAME, END = "# mark ", "# trace ", "# end "
_MALLOC = re.compile(r"malloc\s+(\d{1,30})\s+(-?\d{1,30})(?:\s+stream\s+(\d{1,30}))?", re.ASCII)
_FREE = re.compile(r"free\s+(\d{1,30})(?:\s+\d{1,30})?", re.ASCII)


class TraceFormat(Enum):
    """Formats of trace files."""

    TEXT = "MEMO's text"
    CSV = "MiniMalloc's CSV"
    SNAPSHOT = "PyTorch's memory snapshot"


def read_trace(path: str | Path) -> Trace:
    """Read a trace from a file in any of the formats. Raises UnsupportedError naming the file and
    the line."""
    return read_format(path)[0]


def read_format(path: str | Path) -> tuple[Trace, TraceFormat]:
    """Read a trace from a file, and return the trace and the file's format."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UnsupportedError(f"trace: {path} cannot be read: {error}") from error
    if is_snapshot(content):
        return read_snapshot(content, path.name), TraceFormat.SNAPSHOT
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnsupportedError(
            f"{path}: neither text nor a PyTorch memory snapshot: byte {error.start} is not UTF-8"
        ) from error
    if not text.strip("\ufeff \t\r\n"):
        raise UnsupportedError(
            f"{path}: the file is empty; a trace has at least one line, such as `malloc 0 512`"
        )
    if _is_csv(text):
        return from_csv(text, path.name), TraceFormat.CSV
    return from_text(text, path.name), TraceFormat.TEXT


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write a trace in MEMO's format. Raises UnsupportedError if the file cannot be written."""
    write_output(Path(path), to_text(trace), "trace")


def _is_csv(text: str) -> bool:
    first = next((line for line in text.splitlines() if line.strip("\ufeff \t")), "")
    return "," in first and not first.startswith("#")


# -- MEMO's text -------------------------------------------------------------------------------


def to_text(trace: Trace) -> str:
    """Return the trace in MEMO's text format. Raises UnsupportedError for a name that does not fit
    on one line."""
    named = _line(trace.name or "without a name")
    lines = [NAME + named, *map(_event_line, trace.events), f"{END}{len(trace.events)}"]
    return "".join(f"{line}\n" for line in lines)


def _event_line(event: Event) -> str:
    match event:
        case Malloc(tensor, size, 0):
            return f"malloc {tensor} {size}"
        case Malloc(tensor, size, stream):
            return f"malloc {tensor} {size} stream {stream}"
        case FreeEvent(tensor):
            return f"free {tensor}"
        case Mark(name):
            return MARK + _line(name)


def _line(name: str) -> str:
    if not name.isprintable() or name != name.strip() or not name:
        raise UnsupportedError(f"trace: expected a printable name on one line, got {name!r}")
    return name


def from_text(text: str, name: str) -> Trace:
    """Parse a trace in MEMO's text format. Raises UnsupportedError naming `name` and the line."""
    events: list[Event] = []
    places: list[int] = []  # line of each event
    called, end = "", 0
    lines = text.removeprefix("\ufeff").split("\n")
    for number, line in enumerate(map(str.strip, lines), 1):
        where = f"{name}:{number}"
        if end and line:
            raise UnsupportedError(f"{where}: the trace ended in line {end}, but more lines follow")
        if line.startswith(NAME):
            called = line.removeprefix(NAME)
        elif line.startswith(END):
            _check_end(line, len(events), where)
            end = number
        elif line and (line[0] != "#" or line.startswith(MARK)):
            events.append(_event(line, where))
            places.append(number)
    if (called and not end) or len(lines) in (end, *places[-1:]):
        raise UnsupportedError(
            f"{name}:{len(lines)}: the trace is cut off: its last line must end with a line "
            f"break, and a trace that begins with `{NAME.strip()}` must end with `{END.strip()}`"
        )
    return _checked(events, places, name, called or name)


def _check_end(line: str, count: int, where: str) -> None:
    if line.removeprefix(END) != str(count):
        raise UnsupportedError(
            f"{where}: {count} events came before {line[:60]!r}: some are missing"
        )


def _event(line: str, where: str) -> Event:
    if line.startswith(MARK):
        return Mark(line.removeprefix(MARK).strip())
    found = _MALLOC.fullmatch(line)
    if found is not None:
        tensor, size, stream = found.groups(default="0")
        return Malloc(int(tensor), int(size), int(stream))
    found = _FREE.fullmatch(line)
    if found is not None:
        return FreeEvent(int(found[1]))
    raise UnsupportedError(
        f"{where}: expected `malloc ID SIZE [stream S]`, `free ID` or `# mark NAME`, got "
        f"{line[:60]!r}"
    )


def _checked(events: Iterable[Event], places: list[int], name: str, called: str) -> Trace:
    """Return the events as a trace. Raises UnsupportedError naming the line of an invalid event."""
    events = tuple(events)
    for index, words in faults(events):
        raise UnsupportedError(f"{name}:{places[index]}: {words}")
    return Trace(events, called)


# -- MiniMalloc's CSV --------------------------------------------------------------------------


def to_csv(trace: Trace) -> str:
    """Return a trace in MiniMalloc's CSV format: a numbered line for each malloc, with times that
    count mallocs and frees. The format lacks marks and streams, which are left out."""
    events = tuple(event for event in trace.events if not isinstance(event, Mark))
    rows = (
        f"{number},{r.born},{r.dies},{r.size}\n"
        for number, r in enumerate(Trace(events, trace.name).requests())
    )
    return ",".join(CSV_COLUMNS) + "\n" + "".join(rows)


def from_csv(text: str, name: str) -> Trace:
    """Parse a trace in MiniMalloc's CSV format, ignoring other columns. At equal times, frees come
    before mallocs. Raises UnsupportedError naming `name` and the line."""
    rows = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""))
    try:
        head = [field.strip() for field in next(rows)]
        if any(column not in head for column in CSV_COLUMNS):
            raise UnsupportedError(
                f"{name}:1: expected the columns {','.join(CSV_COLUMNS)}, got {head}"
            )
        places = [head.index(column) for column in CSV_COLUMNS]
        found = [
            (rows.line_num, _row(row, places, len(head), f"{name}:{rows.line_num}"))
            for row in rows
            if row
        ]
    except csv.Error as error:
        raise UnsupportedError(f"{name}:{rows.line_num}: {error}") from error
    if not text.endswith(("\n", "\r")):  # digits of the last number may be missing
        raise UnsupportedError(
            f"{name}:{rows.line_num}: the file is cut off: its last line must end with a line break"
        )
    changes: list[tuple[int, int, int, int, Event]] = []
    known: set[int] = set()
    for order, (number, (tensor, lower, upper, size)) in enumerate(found):
        if tensor in known:
            raise UnsupportedError(f"{name}:{number}: id {tensor} occurs twice")
        known.add(tensor)
        changes.append((lower, 1, order, number, Malloc(tensor, size)))
        changes.append((upper, 0, order, number, FreeEvent(tensor)))
    changes.sort(key=lambda change: change[:3])
    return _checked([c[4] for c in changes], [c[3] for c in changes], name, name)


def _row(row: list[str], places: list[int], width: int, where: str) -> tuple[int, int, int, int]:
    if len(row) != width:
        raise UnsupportedError(f"{where}: expected {width} fields, got {len(row)}")
    try:
        tensor, lower, upper, size = (int(row[place]) for place in places)
    except ValueError as error:
        raise UnsupportedError(
            f"{where}: expected whole numbers, got {','.join(row)[:60]!r}"
        ) from error
    if lower >= upper:
        raise UnsupportedError(
            f"{where}: the tensor lives in [{lower}, {upper}), which is empty; expected "
            "lower < upper"
        )
    return tensor, lower, upper, size
