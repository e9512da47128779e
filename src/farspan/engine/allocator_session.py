"""What an installed allocator does between the steps of a program."""

from dataclasses import dataclass, field

from farspan.engine.allocator_native import NativeMemory
from farspan.engine.allocator_plan import ReplayPlan, iteration, plan_iteration
from farspan.memory.trace import Trace

# The iteration that a replay without a plan learns from, counted from 1: the first one also makes
# what stays, such as optimizer states.
LEARNED = 2


@dataclass(slots=True)
class Session:
    """The native allocators of a process, and how far each device's iterations have come.

    Invariant: `begun` counts the iterations of a device; `plans` has those that were learned here.
    """

    memory: NativeMemory
    learning: bool = False  # record one iteration and plan for the next ones
    begun: dict[int, int] = field(default_factory=dict)
    plans: dict[int, ReplayPlan] = field(default_factory=dict)

    def begin_iteration(self, device: int) -> None:
        """A step begins: a plan starts over, and a recording gets a mark."""
        number = self.begun[device] = self.begun.get(device, 0) + 1
        allocator = self.memory.of(device)
        if self.learning and number == LEARNED:
            allocator.record()
        allocator.begin_iteration()
        if self.learning and number == LEARNED + 1:
            allocator.record(False)
            plan = plan_iteration(iteration(self.memory.recorded(device)))
            allocator.release()  # the arena needs the chunks that served without it
            self.memory.follow(device, plan)
            self.plans[device] = plan
            allocator.begin_iteration()

    def forget(self, device: int) -> None:
        """The steps that follow are of another kind: no plan, and one is learned anew."""
        allocator = self.memory.of(device)
        if self.learning:
            allocator.record(False)
            allocator.plan((), 0)
        self.begun.pop(device, None)
        self.plans.pop(device, None)

    def recorded(self, device: int, number: int | None = None) -> Trace:
        """All that was recorded, or one whole iteration of it (-1: the last)."""
        trace = self.memory.recorded(device, f"device {device}")
        return trace if number is None else iteration(trace, number)
