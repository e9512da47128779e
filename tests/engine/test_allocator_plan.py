"""A plan of a step: what has a place lies beside what lives with it, and what stays has none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.engine.allocator_plan import BEGIN, UNIT, iteration, plan_iteration, trace_of
from farspan.memory.library import UNPLANNED, Event, Kind
from farspan.memory.trace import Free, Malloc, Mark, Trace
from farspan.spec import Refused
from tests.memory.traces import traces

START = Mark(BEGIN)


def test_a_recording_becomes_a_trace() -> None:
    events = (
        Event(Kind.FREE, 3, 100, 0),  # made before the recording
        Event(Kind.MARK, 0, 0, 0),
        Event(Kind.MALLOC, 7, 100, 5),
        Event(Kind.MARK, 0, 4, 0),
        Event(Kind.FREE, 7, 100, 5),
    )
    assert trace_of(events).events == (START, Malloc(7, 100, 5), Mark("mark 4"), Free(7))


def test_an_iteration_goes_from_its_mark_to_the_next() -> None:
    first, second = (Malloc(1, 10), Malloc(2, 20), Free(2)), (Free(1), Malloc(1, 30), Free(1))
    trace = Trace((Malloc(9, 5), START, *first, START, *second, START, Malloc(4, 4)))
    assert iteration(trace, 0).events == (START, *first)
    # Free(1) is of what the first iteration made.
    assert iteration(trace).events == (START, *second[1:])


def test_an_iteration_that_did_not_end_is_refused() -> None:
    with pytest.raises(Refused, match=r"it has 0 whole iterations.*begin_iteration"):
        iteration(Trace((START, Malloc(1, 1), Free(1))))
    with pytest.raises(Refused, match="it has 1 whole iterations"):
        iteration(Trace((START, START)), 1)


def test_what_outlives_the_step_or_is_small_has_no_place() -> None:
    trace = Trace((Malloc(1, 4096), Malloc(2, 8192), Malloc(3, 100), Free(3), Free(1)))
    assert [row.address for row in plan_iteration(trace).rows] != [UNPLANNED] * 3
    rows = plan_iteration(trace, smallest=1024).rows
    assert [row.address for row in rows] == [0, UNPLANNED, UNPLANNED]
    assert [row.size for row in rows] == [4096, 8192, 100]


@given(traces(), st.sampled_from([1, 600, 5000]))
def test_planned_tensors_alive_together_lie_apart(trace: Trace, smallest: int) -> None:
    plan = plan_iteration(trace, smallest)
    mallocs = [event for event in trace.events if isinstance(event, Malloc)]
    assert [(row.size, row.stream) for row in plan.rows] == [(m.size, m.stream) for m in mallocs]
    planned = [
        (row.address, row.address + row.size, request)
        for row, request in zip(plan.rows, trace.requests(), strict=True)
        if row.address != UNPLANNED
    ]
    assert len(planned) == plan.planned
    for place, (low, high, one) in enumerate(planned):
        assert low % UNIT == 0
        assert high <= plan.arena
        for other_low, other_high, other in planned[:place]:
            together = one.born < other.dies and other.born < one.dies
            assert not (together and low < other_high and other_low < high)
