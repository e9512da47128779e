"""A placed trace as a PyTorch memory snapshot, for pytorch.org/memory_viz and similar viewers.

The format is that of `torch.cuda.memory._snapshot()`: dicts, lists, texts and numbers, pickled by a
protocol that the viewer's own reader supports (2 to 4). That reader changes the entries that it
reads: no entry may occur twice.
"""

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farspan_memory.files import write_output
from farspan_memory.placement import Placement
from farspan_memory.trace import FreeEvent, Malloc, Mark, Trace

ARENA = 2**40  # the address at which the arena begins
PROTOCOL = 4

Frames = list[dict[str, Any]]


def write_snapshot(snapshot: Mapping[str, Any], path: Path) -> None:
    """Write a snapshot file. Raises UnsupportedError if it cannot be written."""
    write_output(path, pickle.dumps(snapshot, protocol=PROTOCOL), "snapshot")


def trace_snapshot(trace: Trace, placement: Placement) -> dict[str, Any]:
    """Return a snapshot with a trace's tensors at the addresses of a placement. A tensor's stack
    frame names the mark before its malloc; time counts events."""
    mark, alive = "", dict[int, tuple[int, int, Frames]]()  # tensor: address, size, frames
    entries = [_entry("segment_alloc", ARENA, placement.height, [], 0)]
    addresses = iter(placement.addresses)
    for index, event in enumerate(trace.events):
        match event:
            case Mark(mark):
                pass
            case Malloc(tensor, size, stream):
                where = f"{mark}, stream {stream}" if mark else f"stream {stream}"
                frames = [{"filename": "event", "line": index, "name": where}]
                alive[tensor] = ARENA + next(addresses), size, frames
                if size:
                    entries.append(_entry("alloc", *alive[tensor], index))
            case FreeEvent(tensor):
                gone = alive.pop(tensor)
                if gone[1]:
                    entries.append(_entry("free_requested", *gone, index))
                    entries.append(_entry("free_completed", *gone, index))
    segments = [_segment(placement.height, sorted(alive.values(), key=lambda one: one[0]))]
    about = {"about": "addresses by farspan-memory place", "trace": trace.name}
    return {
        "segments": segments * bool(placement.height),
        "device_traces": [entries],
        "farspan": about,
    }


def _entry(action: str, address: int, size: int, frames: Frames, time: int) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "frames": frames,
        "time_us": time,
    }


def _segment(height: int, left: Sequence[tuple[int, int, Frames]]) -> dict[str, Any]:
    """Return the arena as it is after the last event: a segment with the tensors that remain."""
    blocks, at = list[dict[str, Any]](), ARENA
    for address, size, frames in left:
        if address > at:
            blocks.append(_block(at, address - at, [], "inactive"))
        if size:
            blocks.append(_block(address, size, frames, "active_allocated"))
        at = max(at, address + size)
    if ARENA + height > at:
        blocks.append(_block(at, ARENA + height - at, [], "inactive"))
    used = sum(size for _, size, _ in left)
    return {
        "device": 0,
        "address": ARENA,
        "total_size": height,
        "allocated_size": used,
        "active_size": used,
        "requested_size": used,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


def _block(address: int, size: int, frames: Frames, state: str) -> dict[str, Any]:
    return {
        "address": address,
        "size": size,
        "requested_size": size if state == "active_allocated" else 0,
        "state": state,
        "frames": frames,
    }
