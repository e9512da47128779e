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
        self.events: list[Event] = []
        self.next = 0

    def trace(self, entries: list[Any], segments: Any) -> Trace:
        places = [self._read(number, entry) for number, entry in enumerate(entries)]
        self._add_older(segments)
        events = (*self.before, *self.events)
        entry_of = [0] * len(self.before) + [n for n, read in enumerate(places) if read]
        for index, words in faults(events):
            raise Refused(f"{self._where(entry_of[index])}: {words}")
        return Trace(events, self.name)

    def _add_older(self, segments: Any) -> None:
        """What was there before the first entry and still is: only the segments know of it."""
        for segment in segments if isinstance(segments, list) else ():
            if not isinstance(segment, dict) or segment.get("device", 0) != self.device:
                continue
            address = segment.get("address", 0)
            for block in segment.get("blocks", ()):
                if block.get("state") == IN_USE and address not in self.tensors:
                    size = block.get("requested_size", block["size"])
                    self.before.append(self._malloc(address, size, segment.get("stream", 0)))
                address += block["size"]

    def _where(self, number: int) -> str:
        return f"{self.name}: device {self.device}: entry {number}"

    def _read(self, number: int, entry: Any) -> bool:
        """Whether the entry is an event."""
        if not isinstance(entry, dict) or not isinstance(entry.get("action"), str):
            shown = repr(entry)[:SHOWN]
            raise Refused(f"{self._where(number)}: expected an entry with an action, got {shown}")
        action = entry["action"]
        if action in OTHERS:
            return False
        if action not in (ALLOC, FREED):
            raise Refused(f"{self._where(number)}: the action {action[:SHOWN]!r} is not known")
        address, size, stream = (
            self._number(number, entry, field) for field in ("addr", "size", "stream")
        )
        if action == ALLOC:
            if address in self.tensors:
                raise Refused(f"{self._where(number)}: alloc at an address that was not freed")
            self.freed.discard(address)
            self.events.append(self._malloc(address, size, stream))
            return True
        if address in self.freed:
            raise Refused(f"{self._where(number)}: free of {address:#x} a second time")
        if address not in self.tensors:
            self.before.append(self._malloc(address, size, stream))
        self.freed.add(address)
        self.events.append(Free(self.tensors.pop(address)))
        return True

    def _malloc(self, address: int, size: int, stream: int) -> Malloc:
        tensor, self.next = self.next, self.next + 1
        self.tensors[address] = tensor
        return Malloc(tensor, size, self.streams.setdefault(stream, len(self.streams)))

    def _number(self, number: int, entry: dict[str, Any], field: str) -> int:
        value = entry.get(field, 0 if field == "stream" else None)
        if not isinstance(value, int) or isinstance(value, bool):
            raise Refused(f"{self._where(number)}: {field}: expected a number, got {value!r}")
        return value


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
