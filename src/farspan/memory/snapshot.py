"""Traces of what PyTorch's CUDA allocator recorded: `torch.cuda.memory._dump_snapshot`, or the same
values as JSON.

Such a file is a pickle, and a pickle may run any code that it names. A snapshot consists of dicts,
lists, texts and numbers alone, so the reader here knows no names at all, and refuses every one.
"""

import io
import json
import pickle
from typing import Any

from farspan.memory.trace import Event, Free, Malloc, Trace, faults
from farspan.spec import Refused

PICKLE = b"\x80"  # the opcode that says which protocol follows; of protocols from 2 on
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
IN_USE = "active_allocated"  # the state of a block that somebody has
SHOWN = 80  # characters of an entry that is not one


class _NoNames(pickle.Unpickler):
    """Reads values and nothing that would have to be looked up."""

    def find_class(self, module: str, name: str) -> Any:
        raise Refused(f"the pickle names {module}.{name}; a memory snapshot names nothing")

    def persistent_load(self, pid: Any) -> Any:
        raise Refused(f"the pickle refers to {pid!r} outside of it; a memory snapshot does not")


def is_snapshot(content: bytes) -> bool:
    """Does it look like a snapshot, pickled or as JSON?"""
    return content.startswith(PICKLE) or content.lstrip()[:1] in (b"{", b"[")


def read_snapshot(content: bytes, name: str, device: int | None = None) -> Trace:
    """The mallocs and frees of one device; the first with any, if none is given.

    What was allocated before the recording began, and is freed in it or is alive at its end, is
    asked for at the beginning. Raises Refused naming the file and the entry.
    """
    return from_snapshot(_values(content, name), name, device)


def from_snapshot(found: Any, name: str, device: int | None = None) -> Trace:
    """The same of a snapshot in memory (`torch.cuda.memory._snapshot()`)."""
    traces = found.get("device_traces") if isinstance(found, dict) else found
    if not isinstance(traces, list) or not all(isinstance(trace, list) for trace in traces):
        raise Refused(f"{name}: expected a snapshot with device_traces, a list for each device")
    if device is None:
        device = next((number for number, trace in enumerate(traces) if trace), 0)
    if not 0 <= device < len(traces) or not traces[device]:
        raise Refused(
            f"{name}: device {device} has no events; record with "
            "torch.cuda.memory._record_memory_history() before the step"
        )
    segments = found.get("segments", []) if isinstance(found, dict) else []
    return _Reading(name, device).trace(traces[device], segments)


class _Reading:
    """Turns the entries of one device into events; a tensor is an address while it lives."""

    def __init__(self, name: str, device: int) -> None:
        self.name, self.device = name, device
        self.tensors: dict[int, int] = {}  # address to tensor
        self.freed: set[int] = set()  # addresses whose last tensor was freed
        self.streams: dict[int, int] = {0: 0}  # the allocator's number of a stream to ours
        self.before: list[Event] = []
        self.told: list[str] = []  # of each of these, where
        self.events: list[Event] = []
        self.next = 0

    def trace(self, entries: list[Any], segments: Any) -> Trace:
        places = [self._read(number, entry) for number, entry in enumerate(entries)]
        if not isinstance(segments, list):
            raise Refused(f"{self.name}: segments: expected a list, got {_shown(segments)}")
        for number, segment in enumerate(segments):
            self._add_older(f"{self.name}: segment {number}", segment)
        events = (*self.before, *self.events)
        where = self.told + [self._where(n) for n, read in enumerate(places) if read]
        for index, words in faults(events):
            raise Refused(f"{where[index]}: {words}")
        return Trace(events, self.name)

    def _add_older(self, where: str, segment: Any) -> None:
        """What was there before the first entry and still is: only the segments know of it."""
        if not isinstance(segment, dict):
            raise Refused(f"{where}: expected a segment, got {_shown(segment)}")
        if _number(segment, "device", where, 0) != self.device:
            return
        address, stream = (_number(segment, field, where, 0) for field in ("address", "stream"))
        blocks = segment.get("blocks", [])
        if not isinstance(blocks, list):
            raise Refused(f"{where}: blocks: expected a list, got {_shown(blocks)}")
        for number, block in enumerate(blocks):
            within = f"{where}: block {number}"
            if not isinstance(block, dict):
                raise Refused(f"{within}: expected a block, got {_shown(block)}")
            size = _number(block, "size", within)
            if size < 0:
                raise Refused(f"{within}: size {size}, expected at least 0 bytes")
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
        """Whether the entry is an event."""
        if not isinstance(entry, dict) or not isinstance(entry.get("action"), str):
            raise Refused(
                f"{self._where(number)}: expected an entry with an action, got {_shown(entry)}"
            )
        action = entry["action"]
        if action in OTHERS:
            return False
        if action not in (ALLOC, FREED):
            raise Refused(f"{self._where(number)}: the action {action[:SHOWN]!r} is not known")
        where = self._where(number)
        address, size = (_number(entry, field, where) for field in ("addr", "size"))
        stream = _number(entry, "stream", where, 0)
        if action == ALLOC:
            if address in self.tensors:
                raise Refused(f"{self._where(number)}: alloc at an address that was not freed")
            self.freed.discard(address)
            self.events.append(self._malloc(address, size, stream))
            return True
        if address in self.freed:
            raise Refused(f"{self._where(number)}: free of {address:#x} a second time")
        if address not in self.tensors:
            self._add_before(where, address, size, stream)
        self.freed.add(address)
        self.events.append(Free(self.tensors.pop(address)))
        return True

    def _malloc(self, address: int, size: int, stream: int) -> Malloc:
        tensor, self.next = self.next, self.next + 1
        self.tensors[address] = tensor
        return Malloc(tensor, size, self.streams.setdefault(stream, len(self.streams)))


def _number(values: dict[Any, Any], field: str, where: str, default: int | None = None) -> int:
    value = values.get(field, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise Refused(f"{where}: {field}: expected a number, got {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    return repr(value)[:SHOWN]


def _values(content: bytes, name: str) -> Any:
    """The values of a pickle that names nothing, or of JSON."""
    if not content.startswith(PICKLE):
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise Refused(f"{name}: no JSON that can be read: {error}") from error
    try:
        return _NoNames(io.BytesIO(content)).load()
    except Refused as error:
        raise Refused(f"{name}: {error}") from None
    except Exception as error:  # whatever a broken pickle makes of the stack and the memo
        raise Refused(
            f"{name}: no pickle that can be read, or one that was cut off: "
            f"{type(error).__name__}: {error}"
        ) from error
