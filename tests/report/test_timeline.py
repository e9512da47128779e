"""A planned step as a trace: it loads, lanes do not overlap themselves, totals are the plan's."""

import json
import pickle
import pickletools
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz
from typer.testing import CliRunner

from farspan import cli
from farspan.planner.evaluate import evaluate
from farspan.planner.request import Optimizer, Plan, Question
from farspan.program.layout import Layout
from farspan.program.strategies import STRATEGIES, strategy
from farspan.report import snapshot as made
from farspan.report.plan import ROWS, spans_json, step_spans, timeline_json
from farspan.report.snapshot import plan_snapshot
from farspan.spec import RunSpec, Tier
from farspan_memory.placement import Placement, PlacementRequest, live_peak, sweep_placement
from farspan_memory.trace import Malloc, from_snapshot, read_snapshot, write_trace
from tests.grids import crossed
from tests.memory.layers import step
from tests.planner.machines import slow_machine
from tests.planner.test_bound import with_work
from tests.program.cases import model_of

LAYERS, TOKENS = 4, 70
NANOSECONDS = 1000  # of a microsecond, in which the trace counts


def planned(name: str, *, overlap: bool = True, layout: Layout | None = None) -> Plan:
    question = Question(
        with_work(model_of(LAYERS)),
        RunSpec(2, TOKENS),
        slow_machine(),
        layout=layout or Layout(),
        optimizer=Optimizer.ADAMW,
        dtype="float32",
        overlap=overlap,
    )
    schedule = replace(strategy(name, LAYERS, TOKENS), chunk=16, kv_block=16)
    return evaluate(question, name, schedule)


def loaded(plan: Plan) -> tuple[dict[str, Any], dict[str, list[tuple[int, int, str]]]]:
    """The trace after a trip through text, and its events by lane: start, end (ns), name."""
    trace = json.loads(json.dumps(timeline_json(plan)))
    rows = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    words = {words: lane for lane, words in ROWS.items()}
    lanes = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            start, size = (round(event[key] * NANOSECONDS) for key in ("ts", "dur"))
            lanes[words[rows[event["tid"]]]].append((start, start + size, event["name"]))
    return trace, lanes


@pytest.mark.parametrize(("name", "overlap"), crossed(STRATEGIES, [True, False]))
def test_lanes_do_not_overlap_themselves_and_end_with_the_prediction(
    name: str, overlap: bool
) -> None:
    plan = planned(name, overlap=overlap)
    _, lanes = loaded(plan)
    for events in lanes.values():
        for before, after in pairwise(sorted(events)):
            assert before[1] <= after[0], (before, after)
    end = max(end for events in lanes.values() for _, end, _ in events)
    assert abs(end - plan.seconds.total * 1e9) <= 1  # the nanosecond of its rounding
    seconds = plan.seconds
    for lane, expected in (("fetch", seconds.fetch), ("evict", seconds.evict)):
        events = lanes[lane]
        busy = sum(stop - start for start, stop, _ in events)
        assert abs(busy - expected * 1e9) <= len(events) + 1
    computed = sum(stop - start for start, stop, _ in lanes["compute"])
    expected = (seconds.compute + seconds.optimizer) * 1e9
    if overlap:  # a cell is drawn with its waits: for blocks of its prefix, or until it is issued
        assert computed >= expected - len(lanes["compute"])
    else:
        assert abs(computed - expected - seconds.host * 1e9) <= len(lanes["compute"]) + 1


def test_an_update_beside_the_next_step_has_a_lane() -> None:
    plan = planned("grouped")
    question = replace(plan.question, optimizer=Optimizer.HOST, weights=Tier.HOST)
    plan = evaluate(question, "grouped", replace(plan.schedule, weights=Tier.HOST))
    _, lanes = loaded(plan)
    ((start, end, words),) = lanes["update"]
    assert (start, words) == (0, "optimizer's update")
    assert abs(end - (plan.seconds.optimizer + plan.seconds.beside) * 1e9) <= 1
    last = max(end for events in lanes.values() for _, end, _ in events)
    assert abs(last - plan.seconds.total * 1e9) <= 1


@pytest.mark.parametrize("name", ["grouped", "fpdt"])
def test_devices_that_talk_have_a_lane_of_their_own(name: str) -> None:
    plan = planned(name, overlap=False, layout=Layout(shards=2))
    _, lanes = loaded(plan)
    busy = sum(stop - start for start, stop, _ in lanes["collective"])
    # What is sent at the borders of the layers is in the plan, and in no instruction.
    assert 0 < busy <= plan.seconds.collective * 1e9 + len(lanes["collective"])


def test_a_trace_begins_at_0_where_copies_began_before_the_step() -> None:
    program, spans = step_spans(planned("grouped"))
    early = [replace(span, start=span.start - 0.5, end=span.end - 0.5) for span in spans]
    found = [spans_json(((program, span) for span in some), {}) for some in (spans, early)]
    assert found[0] == found[1]
    assert min(e["ts"] for e in found[0]["traceEvents"] if e["ph"] == "X") == 0


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


def test_so_do_streamed_weights_and_a_second_batch() -> None:
    plan = planned("grouped")
    question = replace(plan.question, optimizer=Optimizer.HOST, weights=Tier.HOST)
    agrees(evaluate(question, "grouped", replace(plan.schedule, weights=Tier.HOST)))
    agrees(evaluate(replace(plan.question, accumulates=True), "grouped", plan.schedule))


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
