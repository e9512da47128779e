"""The checker of placements catches what makes one wrong."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from farspan_memory.placement import (
    Placement,
    PlacementError,
    PlacementRequest,
    live_peak,
    placed_at,
    sweep_placement,
)
from tests.memory.check_placement import check_placement
from tests.memory.instances import requests

#   24 +----+
#   16 |  b +----+     b and c meet in time only where nothing of c is below 16
#    8 +----+-c--+
#    0 | a       |
Check = Callable[[Sequence[PlacementRequest], Placement], None]
CHECKERS = pytest.mark.parametrize("check", [check_placement, sweep_placement])
REQUESTS = (PlacementRequest(8, 0, 4), PlacementRequest(16, 0, 2), PlacementRequest(16, 2, 4))
RIGHT = Placement((0, 8, 8), 24, 24)


@CHECKERS
def test_a_right_placement_passes(check: Check) -> None:
    check(REQUESTS, RIGHT)
    check([], Placement((), 0, 0))


@CHECKERS
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"addresses": (0, 7, 8)}, "0 and 1 live together"),
        ({"addresses": (1, 8, 8)}, "0 and 1 live together"),
        ({"addresses": (0, 8, 0)}, "0 and 2 live together"),
        ({"addresses": (0, 8)}, "2 addresses for 3 requests"),
        ({"addresses": (-8, 8, 8)}, "0: .* is not a range"),
        ({"addresses": (0, 8, 9)}, "height 24, but addresses reach 25"),
        ({"height": 25}, "height 25, but addresses reach 24"),
        ({"height": 23}, "height 23, but addresses reach 24"),
        ({"lower_bound": 23}, "lower bound 23, but 24 bytes"),
        ({"lower_bound": 25}, "lower bound 25, but 24 bytes"),
    ],
)
def test_a_wrong_placement_is_caught(check: Check, change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        check(REQUESTS, replace(RIGHT, **change))


@CHECKERS
def test_lifetimes_that_run_backwards_are_caught(check: Check) -> None:
    with pytest.raises(PlacementError, match="is not a range"):
        check([PlacementRequest(8, 4, 2)], Placement((0,), 8, 0))


@given(requests(most=8, sizes=4, times=8), st.data())
def test_the_sweep_agrees_with_every_pair(
    problem: list[PlacementRequest], data: st.DataObject
) -> None:
    """Addresses drawn at random: either both let them pass or both refuse."""
    low = st.integers(0, 12)
    addresses = data.draw(st.lists(low, min_size=len(problem), max_size=len(problem)))
    found = placed_at(problem, addresses, live_peak(problem))
    verdicts = []
    for check in (check_placement, sweep_placement):
        verdicts.append("refused")
        with suppress(PlacementError):
            check(problem, found)
            verdicts[-1] = "passed"
    event(verdicts[0])
    assert verdicts[0] == verdicts[1]
