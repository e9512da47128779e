"""A plan of a step: what has a place lies beside what lives with it, and what stays has none."""

from operator import attrgetter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan_memory.errors import UnsupportedError
from farspan_memory.native import UNPLANNED, EventKind, NativeEvent, PlanRow
from farspan_memory.placement import place_greedily
from farspan_memory.replay import (
    BEGIN,
    UNIT,
    PlacementPlan,
    ReplayPlan,
    iteration,
    load_plan,
    make_plan,
    plan_iteration,
    replay_plan,
    rounded,
    trace_of,
    write_plan,
)
from farspan_memory.trace import FreeEvent, Malloc, Mark, Trace, write_trace
from tests.memory.traces import traces

START = Mark(BEGIN)
size_of = attrgetter("size")


def test_a_recording_becomes_a_trace() -> None:
    events = (
        NativeEvent(EventKind.FREE, 3, 100, 0),  # made before the recording
        NativeEvent(EventKind.MARK, 0, 0, 0),
        NativeEvent(EventKind.MALLOC, 7, 100, 5),
        NativeEvent(EventKind.MARK, 0, 4, 0),
        NativeEvent(EventKind.FREE, 7, 100, 5),
    )
    assert trace_of(events).events == (START, Malloc(7, 100, 5), Mark("mark 4"), FreeEvent(7))


def test_an_iteration_goes_from_its_mark_to_the_next() -> None:
    first, second = (
        (Malloc(1, 10), Malloc(2, 20), FreeEvent(2)),
        (FreeEvent(1), Malloc(1, 30), FreeEvent(1)),
    )
    trace = Trace((Malloc(9, 5), START, *first, START, *second, START, Malloc(4, 4)))
    assert iteration(trace, 0).events == first
    # Free(1) is of what the first iteration made.
    assert iteration(trace).events == second[1:]


def test_an_iteration_that_did_not_end_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"it has only 0 whole iterations.*begin_iteration"):
        iteration(Trace((START, Malloc(1, 1), FreeEvent(1))))
    with pytest.raises(UnsupportedError, match="it has only 1 whole iterations"):
        iteration(Trace((START, START)), 1)


def test_what_outlives_the_step_or_is_small_has_no_place() -> None:
    trace = Trace((Malloc(1, 4096), Malloc(2, 8192), Malloc(3, 100), FreeEvent(3), FreeEvent(1)))
    assert [row.address for row in plan_iteration(trace).rows] != [UNPLANNED] * 3
    rows = plan_iteration(trace, smallest=1024).rows
    assert [row.address for row in rows] == [0, UNPLANNED, UNPLANNED]
    assert [row.size for row in rows] == [4096, 8192, 100]


def test_what_another_stream_asks_for_has_no_place() -> None:
    """Copies that run beside the computation would wait for it, and it for them."""
    trace = Trace(
        (
            Malloc(1, 4096),
            Malloc(2, 512, 7),
            FreeEvent(1),
            FreeEvent(2),
            Malloc(3, 512),
            FreeEvent(3),
        )
    )
    assert [row.address for row in plan_iteration(trace).rows] == [0, UNPLANNED, 0]


@given(traces(), st.sampled_from([1, 600, 5000]))
def test_planned_tensors_alive_together_lie_apart(trace: Trace, smallest: int) -> None:
    plan = plan_iteration(trace, smallest, seconds=0.01)
    assert all(row.size >= smallest for row in plan.rows if row.address != UNPLANNED)
    lie_apart(trace, plan)


@given(traces())
def test_a_plan_of_a_whole_trace_is_one_for_replay(trace: Trace) -> None:
    lie_apart(trace, replay_plan(placed(trace), trace))


def test_of_a_trace_with_iterations_the_last_is_replayed() -> None:
    """What was made before, or outlives it, is in the plan's way but not in the arena."""
    step = (Malloc(1, 2048), Malloc(2, 1024, 3), FreeEvent(1), Malloc(3, 700), FreeEvent(3))
    trace = Trace(
        (Malloc(9, 4096), START, Malloc(8, 512), FreeEvent(8), START, *step, START, FreeEvent(2))
    )
    plan = replay_plan(placed(trace), trace)
    assert [(row.size, row.stream) for row in plan.rows] == [(2048, 0), (1024, 3), (700, 0)]
    assert plan.rows[1].address == UNPLANNED
    assert plan.arena == plan.lower_bound == 2048
    lie_apart(iteration(trace), plan)


def test_a_plan_of_another_program_is_refused(tmp_path: Path) -> None:
    trace, other = Trace((Malloc(1, 100), FreeEvent(1))), Trace((Malloc(1, 100), Malloc(2, 100)))
    write_plan(placed(trace), tmp_path / "plan")
    write_trace(trace, tmp_path / "trace")
    write_trace(other, tmp_path / "other")
    assert load_plan(tmp_path / "plan", tmp_path / "trace").rows == (PlanRow(100, 0, 0),)
    with pytest.raises(UnsupportedError, match="the plan belongs to another program"):
        load_plan(tmp_path / "plan", tmp_path / "other")


@pytest.mark.parametrize("row", [PlanRow(513, 0, 512), PlanRow(1, 0, 1024), PlanRow(1, 0, 100)])
def test_a_place_that_the_arena_does_not_have_is_refused(row: PlanRow) -> None:
    ReplayPlan((PlanRow(512, 0, 512), PlanRow(9, 0, UNPLANNED)), 1024, 512)
    with pytest.raises(
        UnsupportedError, match=r"malloc 0, .* lies beyond the arena of 1,024 bytes"
    ):
        ReplayPlan((row,), 1024, 512)


def placed(trace: Trace) -> PlacementPlan:
    """As `farspan memory place` does."""
    return make_plan(trace, place_greedily(rounded(trace.requests(), UNIT)), UNIT, False, "flat")


def lie_apart(trace: Trace, plan: ReplayPlan) -> None:
    """The rows are the trace's mallocs, and no two that live together share an address."""
    mallocs = [event for event in trace.events if isinstance(event, Malloc) and event.size]
    assert [(row.size, row.stream) for row in plan.rows] == [(m.size, m.stream) for m in mallocs]
    planned = [
        (row.address, row.address + row.size, request)
        for row, request in zip(plan.rows, filter(size_of, trace.requests()), strict=True)
        if row.address != UNPLANNED
    ]
    assert len(planned) == plan.planned
    for number, (low, high, one) in enumerate(planned):
        assert one.dies < len(trace.events)
        for other_low, other_high, other in planned[:number]:
            together = one.born < other.dies and other.born < one.dies
            assert not (together and low < other_high and other_low < high)
