"""A trace is what an allocator can serve; its requests say how long each tensor lives."""

import pytest
from hypothesis import given

from farspan_memory.errors import UnsupportedError
from farspan_memory.placement import PlacementRequest
from farspan_memory.trace import LARGEST, Event, FreeEvent, Malloc, Mark, Trace
from tests.memory.traces import traces


def test_requests_are_one_for_each_malloc_in_order() -> None:
    trace = Trace(
        (Malloc(1, 10), Mark("m"), Malloc(2, 5), FreeEvent(1), Malloc(1, 7), FreeEvent(2))
    )
    assert trace.requests() == (
        PlacementRequest(10, 0, 3),
        PlacementRequest(5, 2, 5),
        PlacementRequest(7, 4, 6),
    )
    assert trace.live_peak() == 15


@given(traces())
def test_the_peak_is_that_of_counting_along(trace: Trace) -> None:
    sizes: dict[int, int] = {}
    peak = 0
    for event in trace.events:
        if isinstance(event, Malloc):
            sizes[event.tensor] = event.size
        elif isinstance(event, FreeEvent):
            del sizes[event.tensor]
        peak = max(peak, sum(sizes.values()))
    assert trace.live_peak() == peak


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ((FreeEvent(3),), "event 0: free of tensor 3 without a malloc"),
        (
            (Malloc(3, 1), FreeEvent(3), Mark("m"), FreeEvent(3)),
            "event 3: free of tensor 3 a second time",
        ),
        ((Malloc(3, 1), Malloc(3, 1)), "event 1: malloc of tensor 3, which is still allocated"),
        ((Malloc(3, -1),), "event 0: size -1"),
        ((Malloc(3, LARGEST + 1),), f"event 0: size {LARGEST + 1}"),
        ((Malloc(3, 1, -1),), "event 0: stream -1"),
        ((Malloc(3, 1, 2**64),), f"event 0: stream {2**64}"),
    ],
)
def test_what_no_allocator_can_serve_is_refused(events: tuple[Event, ...], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        Trace(events, "t")
