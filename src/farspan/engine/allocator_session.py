"""What an installed allocator does between the steps of a program."""

import contextlib
import warnings
from dataclasses import dataclass, field

from farspan.engine.allocator_native import NativeMemory
from farspan.memory.native import NativeError
from farspan.memory.replay import ReplayPlan, iteration, plan_iteration
from farspan.memory.trace import Trace

# Counted from 1. The first iteration also makes what stays, such as optimizer states: a plan of
# another iteration must not have them in its arena, where they would be in the way ever after.
FIRST_REPLAYED = 2


@dataclass(slots=True)
class Session:
    """The native allocators of a process, and how far each device's iterations have come.

    Invariant: `begun` counts the iterations of a device since it forgot; `plans` has the plan that
    each follows.
    """

    memory: NativeMemory
    given: ReplayPlan | None = None  # without one a replay learns its own
    begun: dict[int, int] = field(default_factory=dict)
    plans: dict[int, ReplayPlan] = field(default_factory=dict)

    def begin_iteration(self, device: int) -> None:
        """A step begins: a plan starts over, and a recording gets a mark."""
        number = self.begun[device] = self.begun.get(device, 0) + 1
        if self.memory.mode == "replay":
            self._prepare_replay(device, number)
        self.memory.begin_iteration(device)

    def _prepare_replay(self, device: int, number: int) -> None:
        allocator = self.memory.of(device)
        if self.given is not None and number == FIRST_REPLAYED:
            self._follow(device, self.given)
        elif self.given is None and number == FIRST_REPLAYED:
            allocator.record()
        elif self.given is None and number == FIRST_REPLAYED + 1:
            allocator.begin_iteration()  # its mark ends the recorded one
            allocator.record(False)
            self._follow(device, plan_iteration(iteration(self.memory.recorded(device))))

    def _follow(self, device: int, plan: ReplayPlan) -> None:
        """From the iteration on that begins next. Where there is no room for the arena, a stream
        cannot be waited for, or tensors of the plan before are still there, stitching goes on as it
        was, and a warning says so."""
        try:
            self.memory.of(device).release()  # the arena needs the chunks that served without it
            self.memory.follow(device, plan)
        except NativeError as error:
            warnings.warn(f"replay: the plan cannot be followed: {error}", stacklevel=4)
            return
        self.plans[device] = plan

    def forget(self, device: int) -> None:
        """The steps that follow are of another kind. A replay begins as at first."""
        if self.memory.mode == "replay":
            allocator = self.memory.of(device)
            allocator.record(False)
            # Tensors of the plan that are still there keep its arena until the next one is made.
            with contextlib.suppress(NativeError):
                allocator.plan((), 0)
        self.begun.pop(device, None)
        self.plans.pop(device, None)

    def recorded(self, device: int, number: int | None = None) -> Trace:
        """All that was recorded, or one whole iteration of it (-1: the last)."""
        trace = self.memory.recorded(device, f"device {device}")
        return trace if number is None else iteration(trace, number)
