"""Bi-level placement: a layer once, then layers; correct whatever crosses their borders."""

from hypothesis import given, settings
from hypothesis import strategies as st

from farspan_memory.exact import (
    Solution,
    place_bilevel,
    place_exactly,
    place_flat,
    segments,
)
from farspan_memory.trace import FreeEvent, Malloc, Mark, Trace
from tests.memory.check_placement import check_placement
from tests.memory.layers import step
from tests.memory.traces import traces


def quick(requests: object, seconds: float) -> Solution:
    """Greedy on both levels."""
    assert seconds > 0
    return place_flat(requests)  # type: ignore[arg-type]


def test_segments_are_the_layers_and_hold_what_lives_within() -> None:
    found = segments(step(3))
    assert [s.name.split()[1:] for s in found] == [
        *([str(layer), "forward"] for layer in range(3)),
        *([str(layer), "backward"] for layer in (2, 1, 0)),
    ]
    requests = step(3).requests()
    assert [[requests[i].size for i in s.local] for s in found] == [[96, 32, 16]] * 3 + [
        [128, 64, 48]
    ] * 3


def test_equal_layers_are_placed_once() -> None:
    trace = step(8)
    found = place_bilevel(trace.requests(), segments(trace))
    assert (found.segments, found.distinct) == (16, 2)
    assert found.second_level == len(trace.requests()) - 16 * 3 + 16
    check_placement(trace.requests(), found.solution.placement)
    bases = [[found.solution.placement.addresses[i] for i in s.local] for s in segments(trace)[:8]]
    assert {tuple(a - b[0] for a in b) for b in bases} == {tuple(a - bases[0][0] for a in bases[0])}


def test_a_layer_that_differs_gets_a_plan_of_its_own() -> None:
    trace = step(8, odd=3)
    found = place_bilevel(trace.requests(), segments(trace))
    assert (found.segments, found.distinct) == (16, 3)
    check_placement(trace.requests(), found.solution.placement)


def test_what_crosses_a_border_is_not_local() -> None:
    """Born before, freed after, or never freed at all."""
    trace = Trace(
        (
            *(Malloc(1, 8), Mark("layer 0 forward"), FreeEvent(1), Malloc(2, 8), Malloc(3, 8)),
            *(
                FreeEvent(3),
                Mark("layer 1 forward"),
                FreeEvent(2),
                Malloc(4, 8),
                Malloc(5, 8),
                FreeEvent(5),
            ),
        )
    )
    assert [s.local for s in segments(trace)] == [(2,), (4,)]


@given(traces(marks=False), st.data())
@settings(deadline=None)
def test_segments_anywhere_give_placements(trace: Trace, data: st.DataObject) -> None:
    """Marks of layers put in at random: what they cut is placed without overlaps."""
    events = list(trace.events)
    for layer in range(data.draw(st.integers(0, 5))):
        at = data.draw(st.integers(0, len(events)))
        events.insert(at, Mark(f"layer {layer} forward"))
    marked = Trace(tuple(events))
    found = place_bilevel(marked.requests(), segments(marked), 10.0, quick)
    check_placement(marked.requests(), found.solution.placement)
    # Optimal is said of the whole only.
    assert found.solution.optimal == (
        found.solution.placement.height == found.solution.proved_bound
    )


def test_the_pseudo_request_may_cost_room() -> None:
    """A tensor born late in the segment fits into what its locals leave, but not beside them."""
    trace = Trace(
        (
            *(Mark("layer 0 forward"), Malloc(1, 10), FreeEvent(1), Malloc(2, 2), Malloc(3, 8)),
            *(FreeEvent(2), Mark("head"), FreeEvent(3)),
        )
    )
    flat = place_exactly(trace.requests())
    found = place_bilevel(trace.requests(), segments(trace)).solution
    check_placement(trace.requests(), found.placement)
    assert (flat.placement.height, found.placement.height) == (10, 18)
    assert flat.optimal
    assert not found.optimal
