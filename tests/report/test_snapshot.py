"""A planned or traced step as a snapshot: PyTorch's own tools read it, and it peaks as planned."""

import json
import pickle
import pickletools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz
from typer.testing import CliRunner

from farspan import cli
from farspan.planner.evaluate import evaluate
from farspan.planner.request import Optimizer, Plan
from farspan.program.layout import Layout
from farspan.program.strategies import STRATEGIES
from farspan.report import snapshot as made
from farspan.report.snapshot import plan_snapshot
from farspan.spec import Tier
from farspan_memory.placement import Placement, PlacementRequest, live_peak, sweep_placement
from farspan_memory.trace import Malloc, from_snapshot, read_snapshot, write_trace
from tests.memory.layers import step
from tests.report.test_timeline import planned

# What the viewer's own reader of pickles knows (torch/utils/viz/MemoryViz.js).
OPCODES = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "NEWFALSE"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE2", "SETITEM", "SETITEMS", "APPEND"),
    *("APPENDS", "BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE"),
}


def peak(snapshot: dict[str, Any], device: int) -> int:
    """As anybody would count it."""
    live = most = 0
    for entry in snapshot["device_traces"][device]:
        live += entry["size"] * (entry["action"] == "alloc")
        live -= entry["size"] * (entry["action"] == "free_completed")
        most = max(most, live)
    return most


def check(snapshot: dict[str, Any]) -> None:
    """Addresses lie in segments and belong to one at a time; segments say what is left."""
    for device, entries in enumerate(snapshot["device_traces"]):
        own = [segment for segment in snapshot["segments"] if segment["device"] == device]
        born: dict[int, tuple[int, int]] = {}
        lives: list[tuple[int, PlacementRequest]] = []
        for time, entry in enumerate(entries):
            if entry["action"] == "alloc":
                assert entry["addr"] not in born
                born[entry["addr"]] = time, entry["size"]
            elif entry["action"] == "free_completed":
                at, size = born.pop(entry["addr"])
                assert size == entry["size"]
                lives.append((entry["addr"], PlacementRequest(size, at, time)))
        left = [
            (block["address"], block["size"])
            for segment in own
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        ]
        assert sorted(left) == sorted((address, size) for address, (_, size) in born.items())
        lives += [(a, PlacementRequest(size, at, len(entries))) for a, (at, size) in born.items()]
        for segment in own:
            first, stop = segment["address"], segment["address"] + segment["total_size"]
            inside = [(a - first, r) for a, r in lives if first <= a and a + r.size <= stop]
            addresses, requests = zip(*inside, strict=True)
            height = max(a + r.size for a, r in inside)
            bound = live_peak(requests)
            sweep_placement(requests, Placement(addresses, height, bound))
            lives = [life for life in lives if life[0] < first or life[0] >= stop]
        assert not lives
        assert [e["time_us"] for e in entries] == sorted(e["time_us"] for e in entries)


def opens(snapshot: dict[str, Any]) -> None:
    """PyTorch's own tools read it, and pytorch.org's viewer its opcodes and categories."""
    content = pickle.dumps(snapshot, protocol=made.PROTOCOL)
    found = [opcode.name for opcode, *_ in pickletools.genops(content)]
    assert OPCODES.issuperset(found), set(found) - OPCODES
    _memory_viz.segsum(snapshot)
    assert "cudaMalloc" in _memory_viz.trace(snapshot)
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)
    assert "Allocator State History" in _memory_viz.segment_plot(snapshot)
    lines: list[str] = []
    _memory_viz.memory(snapshot, format_flamegraph=lines.append)
    assert lines
    for entries in snapshot["device_traces"]:
        assert len({id(entry) for entry in entries}) == len(entries)
        named = {entry["category"] for entry in entries if "category" in entry}
        assert not named or made.UNKNOWN in named


def agrees(plan: Plan) -> dict[str, Any]:
    """The plan's snapshot, which is sound and peaks as the plan says."""
    snapshot, note = plan_snapshot(plan)
    assert not note
    check(snapshot)
    causes = {entry.get("category") for entry in snapshot["device_traces"][0]}
    assert made.CELL in causes
    assert made.KERNELS not in causes  # none was measured of this machine
    assert peak(snapshot, 0) == plan.device.total
    assert [peak(snapshot, device) for device in range(1, len(snapshot["device_traces"]))] == [
        plan.host.total
    ] * bool(plan.host.total)
    return snapshot


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_peaks_as_planned(name: str) -> None:
    snapshot = agrees(planned(name))
    opens(snapshot)
    content = pickle.dumps(snapshot, protocol=made.PROTOCOL)
    assert read_snapshot(content, "step").live_peak() == peak(snapshot, 0)
    for device in range(len(snapshot["device_traces"])):
        assert from_snapshot(snapshot, "step", device).live_peak() == peak(snapshot, device)


@pytest.mark.parametrize(
    "layout", [Layout(shards=2), Layout(ulysses=2), Layout(pipeline=2), Layout(data=2)], ids=str
)
def test_so_does_the_fullest_of_several_ranks(layout: Layout) -> None:
    plan = planned("grouped", layout=layout)
    snapshot, _ = plan_snapshot(plan)
    check(snapshot)
    assert peak(snapshot, 0) == plan.device.total


def test_slices_of_weights_are_rounded_up_one_by_one() -> None:
    plan = planned("grouped", layout=Layout(tensor=2))
    snapshot, _ = plan_snapshot(plan)
    check(snapshot)
    weights = 4 * len(plan.question.model.layers)  # at most, of four bytes an element
    assert 0 <= peak(snapshot, 0) - plan.device.total <= 4 * weights


def test_so_do_streamed_weights_and_a_second_batch() -> None:
    plan = planned("grouped")
    question = replace(plan.question, optimizer=Optimizer.HOST, weights=Tier.HOST)
    agrees(evaluate(question, "grouped", replace(plan.schedule, weights=Tier.HOST)))
    agrees(evaluate(replace(plan.question, accumulates=True), "grouped", plan.schedule))


def test_blocks_say_what_they_are() -> None:
    snapshot = agrees(planned("grouped"))
    shown = {
        f"{frame['filename']}:{frame['line']}:{frame['name']}"
        for entry in snapshot["device_traces"][0]
        for frame in entry["frames"]
    }
    assert "weights:0:all step long" in shown
    assert "transients of a cell:3:layer 3, chunk 4" in shown
    assert any(words.startswith("K, V:2:kv.2, rows 0 to ") for words in shown)
    assert any(words.endswith(":B 3.4") for words in shown)


def test_many_instructions_are_fewer_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("grouped")
    whole, _ = plan_snapshot(plan)
    monkeypatch.setattr(made, "MOST_MOMENTS", 7)
    few, note = plan_snapshot(plan)
    check(few)
    assert peak(few, 0) == plan.device.total
    assert len(few["device_traces"][0]) < len(whole["device_traces"][0]) / 2
    assert few["farspan"]["instructions_a_moment"] > 1
    assert note.startswith("the snapshot shows 7 moments of ")


def test_the_command_writes_the_planned_step(tmp_path: Path) -> None:
    file = tmp_path / "step.pickle"
    asked = ("--model", "Qwen2.5-0.5B", "--machine", "h200", "--strategy", "fpdt")
    done = CliRunner().invoke(
        cli.app, ("plan", *asked, "--context", "64K", "--json", "--snapshot", str(file))
    )
    assert done.exit_code == 0, done.output
    trace = read_snapshot(file.read_bytes(), file.name)
    assert trace.live_peak() == json.loads(done.output)["device_bytes"]["total"]
    nowhere = tmp_path / "nowhere" / "step.pickle"
    done = CliRunner().invoke(
        cli.app, ("plan", *asked, "--context", "8K", "--snapshot", str(nowhere))
    )
    assert done.exit_code != 0
    assert "snapshot: " in str(done.exception)


def test_a_traced_step_comes_back_from_its_placement(tmp_path: Path) -> None:
    trace = step(4)
    text, file = tmp_path / "step.txt", tmp_path / "step.pickle"
    write_trace(trace, text)
    done = CliRunner().invoke(
        cli.app, ("memory", "place", str(text), "--method", "flat", "--snapshot", str(file))
    )
    assert done.exit_code == 0, done.output
    snapshot = pickle.loads(file.read_bytes())
    check(snapshot)
    opens(snapshot)
    assert peak(snapshot, 0) == trace.live_peak()
    again = read_snapshot(file.read_bytes(), file.name)
    sizes = [[e.size for e in of.events if isinstance(e, Malloc)] for of in (trace, again)]
    assert sizes[0] == sizes[1]
    marks = {frame["name"] for e in snapshot["device_traces"][0] for frame in e["frames"]}
    assert "layer 3 forward, stream 0" in marks
