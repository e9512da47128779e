"""The dumb checker of placements: every pair of buffers at every moment. It shares nothing with
what places or sweeps but the values it reads."""

from collections.abc import Sequence
from typing import Any

from farspan_memory.placement import PlacementError


def check_placement(requests: Sequence[Any], placement: Any) -> None:
    """Raise PlacementError unless no two buffers that live at one time share an address, the
    height is what the addresses reach and the lower bound is the most bytes alive."""
    if len(placement.addresses) != len(requests):
        raise PlacementError(f"{len(placement.addresses)} addresses for {len(requests)} requests")
    for index, request in enumerate(requests):
        if request.size < 0 or request.dies < request.born or placement.addresses[index] < 0:
            raise PlacementError(
                f"{index}: {request} at {placement.addresses[index]} is not a range"
            )
    for second in range(len(requests)):
        for first in range(second):
            if _overlap(requests, placement, first, second):
                raise PlacementError(f"{first} and {second} live together and share addresses")
    reached = max(
        (address + r.size for address, r in zip(placement.addresses, requests, strict=True)),
        default=0,
    )
    if placement.height != reached:
        raise PlacementError(f"height {placement.height}, but addresses reach {reached}")
    bound = most_alive(requests)
    if placement.lower_bound != bound:
        raise PlacementError(f"lower bound {placement.lower_bound}, but {bound} bytes are alive")


def most_alive(requests: Sequence[Any]) -> int:
    """The most bytes alive at one time: it is reached when some buffer is born."""
    return max(
        (sum(r.size for r in requests if r.born <= now.born < r.dies) for now in requests),
        default=0,
    )


def _overlap(requests: Sequence[Any], placement: Any, first: int, second: int) -> bool:
    a, b = requests[first], requests[second]
    low_a, low_b = placement.addresses[first], placement.addresses[second]
    in_time = max(a.born, b.born) < min(a.dies, b.dies)
    in_space = max(low_a, low_b) < min(low_a + a.size, low_b + b.size)
    return in_time and in_space
