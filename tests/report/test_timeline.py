"""A planned step as a trace: it loads, lanes do not overlap themselves, totals are the plan's."""

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from farspan.planner.evaluate import evaluate
from farspan.planner.request import Optimizer, Plan, Question
from farspan.program.layout import Layout
from farspan.program.strategies import STRATEGIES, strategy
from farspan.report.plan import ROWS, spans_json, step_spans, timeline_json
from farspan.spec import RunSpec, Tier
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


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", STRATEGIES)
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


def test_in_line_nothing_happens_at_the_same_time() -> None:
    _, lanes = loaded(planned("fpdt", overlap=False))
    events = sorted(event for events in lanes.values() for event in events)
    assert all(before[1] <= after[0] for before, after in pairwise(events))
    assert lanes["fetch"]
    assert lanes["evict"]


def test_copies_run_beside_the_computation() -> None:
    _, lanes = loaded(planned("grouped"))
    fetched = [(start, stop) for start, stop, _ in lanes["fetch"]]
    computed = [(start, stop) for start, stop, _ in lanes["compute"]]
    assert any(a < d and c < b for a, b in fetched for c, d in computed)


def test_events_say_what_they_are() -> None:
    trace, lanes = loaded(planned("grouped"))
    names = {name for events in lanes.values() for _, _, name in events}
    assert {"F 0.0", "B 3.4", "Head 0", "optimizer's update"} <= names
    assert trace["otherData"]["about"] == "simulated by farspan plan, not measured"


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
