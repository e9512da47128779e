"""PyTorch's memory snapshots are read without running anything that they name."""

import json
import os
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan_memory.errors import UnsupportedError
from farspan_memory.trace import FreeEvent, Malloc, Trace, from_snapshot, read_snapshot
from tests.memory.traces import traces


def entry(action: str, addr: int = 0, size: int = 0, stream: int = 0) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": stream, "frames": []}


def snapshot(*entries: dict[str, Any], **more: Any) -> bytes:
    return pickle.dumps({"device_traces": [list(entries)], "segments": [], **more})


def test_requests_for_tensors_are_events_and_the_rest_is_not() -> None:
    found = snapshot(
        entry("segment_alloc", 0x1000, 2 << 20),
        entry("alloc", 0x1000, 512),
        entry("alloc", 0x1200, 100, 94_000_000),
        entry("free_requested", 0x1000, 512),
        entry("free_completed", 0x1000, 512),
        entry("alloc", 0x1000, 256),
        entry("snapshot"),
    )
    assert read_snapshot(found, "s").events == (
        Malloc(0, 512),
        Malloc(1, 100, 1),
        FreeEvent(0),
        Malloc(2, 256),
    )


def test_what_was_there_before_comes_first() -> None:
    """Freed in the recording, or alive at its end: then only the segments know of it."""
    blocks = [
        {"state": "active_allocated", "size": 512, "requested_size": 400},
        {"state": "inactive", "size": 512, "requested_size": 0},
        {"state": "active_allocated", "size": 1024, "requested_size": 1000},
    ]
    segment = {"device": 0, "address": 0x1000, "stream": 0, "blocks": blocks}
    other = {**segment, "device": 1}
    found = snapshot(
        entry("alloc", 0x1400, 1000),
        entry("free_requested", 0x1200, 500),
        segments=[segment, other],
    )
    trace = read_snapshot(found, "s")
    assert trace.events == (Malloc(1, 500), Malloc(2, 400), Malloc(0, 1000), FreeEvent(1))


def test_the_first_device_with_events_is_taken() -> None:
    two = {"device_traces": [[], [entry("alloc", 1, 7)], [entry("alloc", 1, 8)]]}
    assert from_snapshot(two, "s").events == (Malloc(0, 7),)
    assert from_snapshot(two, "s", 2).events == (Malloc(0, 8),)


@given(traces(streams=1, marks=False))
def test_a_recorded_trace_comes_back(trace: Trace) -> None:
    sizes: dict[int, int] = {}
    entries = []
    for event in trace.events:
        if isinstance(event, Malloc):
            sizes[event.tensor] = event.size
            entries.append(entry("alloc", event.tensor, event.size))
        elif isinstance(event, FreeEvent):
            entries.append(entry("free_requested", event.tensor, sizes[event.tensor]))
            entries.append(entry("free_completed", event.tensor, sizes[event.tensor]))
    if entries:
        for content in (snapshot(*entries), json.dumps({"device_traces": [entries]}).encode()):
            assert read_snapshot(content, "s").requests() == trace_requests(trace)


def trace_requests(trace: Trace) -> Any:
    return Trace(tuple(e for e in trace.events if isinstance(e, Malloc | FreeEvent))).requests()


class Attack:
    """Runs a command when it is unpickled by anything that looks up names."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_names_anything_is_refused(tmp_path: Any, protocol: int) -> None:
    witness = tmp_path / "ran"
    content = pickle.dumps({"device_traces": [[Attack(f"touch {witness}")]]}, protocol)
    with pytest.raises(UnsupportedError, match=r"^s: the pickle names \w+\.system"):
        read_snapshot(content, "s")
    assert not witness.exists()
    pickle.loads(content)  # the same content, read without care
    assert witness.exists()


def test_harmless_names_are_refused_too() -> None:
    with pytest.raises(UnsupportedError, match=r"names collections\.OrderedDict"):
        read_snapshot(b"\x80\x02ccollections\nOrderedDict\n.", "s")
    with pytest.raises(UnsupportedError, match="refers to"):
        read_snapshot(b"\x80\x02X\x01\x00\x00\x00aQ.", "s")


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([entry("alloc", 1, 2), entry("alloc", 1, 2)], "entry 1: alloc at an address"),
        (
            [entry("alloc", 1, 2), entry("free_requested", 1, 2), entry("free_requested", 1, 2)],
            "entry 2: free of 0x1 a second time",
        ),
        ([entry("segment_map"), entry("alloc", 1, -2)], "entry 1: size -2"),
        ([{"action": "alloc", "addr": "1", "size": 2}], "entry 0: addr: expected a number"),
        ([{"action": "alloc", "addr": 1}], "entry 0: size: expected a number"),
        ([entry("allocate", 1, 2)], "entry 0: unknown action 'allocate'"),
        ([7], "entry 0: expected an entry"),
        ([], "has no events"),
    ],
)
def test_a_broken_entry_is_named(entries: list[Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        read_snapshot(snapshot(*entries), "s")


HELD = {"state": "active_allocated", "size": 512}


@pytest.mark.parametrize(
    ("segments", "words"),
    [
        ({}, "segments: expected a list, got {}"),
        ([7], "segment 0: expected a segment, got 7"),
        ([{"device": "cuda:0"}], "segment 0: device: expected a number, got 'cuda:0'"),
        ([{"address": "q"}], "segment 0: address: expected a number, got 'q'"),
        ([{"blocks": None}], "segment 0: blocks: expected a list, got None"),
        ([{"blocks": [HELD, {"state": "inactive"}]}], "block 1: size: expected a number, got None"),
        ([{"blocks": [HELD | {"size": -4}]}], "segment 0: block 0: size -4, expected at least 0"),
        ([{"blocks": [HELD | {"requested_size": None}]}], "requested_size: expected a number"),
        (
            [{}, {"blocks": [HELD | {"size": 2**60}]}],
            f"segment 1: block 0: size {2**60}",
        ),
    ],
)
def test_a_broken_segment_is_named(segments: Any, words: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^s: .*{words}"):
        read_snapshot(snapshot(entry("alloc", 2**40, 8), segments=segments), "s")


@given(st.integers(0, 200))
def test_a_snapshot_that_was_cut_off_is_refused(length: int) -> None:
    whole = snapshot(entry("alloc", 0x1000, 512), entry("free_requested", 0x1000, 512))
    with pytest.raises(UnsupportedError, match=r"^s: "):
        read_snapshot(whole[: 2 + length % (len(whole) - 2)], "s")


@pytest.mark.parametrize(
    "content", [b"{", b"[1]", b'{"a": 1}', b"[" * 100_000, b'{"device_traces": 3}', b"\x80\x04N."]
)
def test_what_is_no_snapshot_is_refused(content: bytes) -> None:
    with pytest.raises(UnsupportedError, match=r"^s: "):
        read_snapshot(content, "s")
