"""Between steps: a plan that cannot be followed leaves the program as it was, with a warning."""

from typing import Any

import pytest

from farspan_memory.allocator import FIRST_REPLAYED, Session
from farspan_memory.native import NativeError
from farspan_memory.replay import ReplayPlan


class FailingMemory:
    """The native allocator of a device, of which one call fails."""

    mode = "replay"

    def __init__(self, fails: str) -> None:
        self.fails = fails
        self.begun = 0

    def of(self, device: int) -> Any:  # noqa: ARG002
        return self

    def release(self) -> None:
        self._call("release")

    def follow(self, device: int, plan: ReplayPlan) -> None:  # noqa: ARG002
        self._call("follow")

    def begin_iteration(self, device: int) -> None:  # noqa: ARG002
        self.begun += 1

    def _call(self, name: str) -> None:
        if name == self.fails:
            raise NativeError(f"{name}: the stream cannot be waited for")


@pytest.mark.parametrize("fails", ["release", "follow"])
def test_a_step_goes_on_where_its_plan_cannot_be_followed(fails: str) -> None:
    memory: Any = FailingMemory(fails)
    session = Session(memory, ReplayPlan((), 0, 0))
    session.begin_iteration(0)
    with pytest.warns(UserWarning, match=f"does not match this run: {fails}: the stream"):
        session.begin_iteration(0)
    assert (memory.begun, session.begun, session.plans) == (FIRST_REPLAYED, {0: 2}, {})
