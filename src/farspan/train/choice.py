"""Which schedule a run has: its own, a strategy's or the planner's; and which one comes next when
memory ran out."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from farspan.memory.host import available_host_bytes
from farspan.plan.layout import ALONE, Layout
from farspan.plan.pages import sparse_words
from farspan.plan.question import Budget, Plan, Question
from farspan.spec import MachineSpec, ModelSpec, Refused, RunSpec, Schedule, Tier
from farspan.train.lighter import lighter
from farspan.train.none_fits import none_fits
from farspan.train.shortage import Shortage

# Of what a schedule that failed decides of a tier, its successor may take so much: after the four
# tries that one step has, 0.8**4 = 41% are left.
KEPT = 0.8
# What no schedule decides. Taken off before the share: weights may be nearly all there is.
FIXED = ("weights", "gathered", "gradients", "accumulators", "optimizer", "inputs", "reserve")


@dataclass(frozen=True, slots=True)
class Choice:
    """A schedule and how it came about."""

    strategy: str
    schedule: Schedule
    reason: str = ""
    plan: Plan | None = None  # where the planner chose


class Chooser(Protocol):
    """Chooses for one model on one machine."""

    def first(self) -> Choice:
        """What to begin with. Raises Refused."""

    def again(self, before: Choice, shortage: Shortage) -> Choice:
        """What needs less than `before` of what ran out. Raises Refused when nothing does."""


@dataclass(slots=True)
class NamedChooser:
    """A schedule that the run gives, by name or in full. The model is only looked at when memory
    runs out: the same strategy then goes on with smaller pieces and more of it on the host."""

    strategy: str
    schedule: Schedule
    run: RunSpec
    model: Callable[[], ModelSpec]
    unified: bool  # both tiers lie in main memory
    layout: Layout = ALONE
    # What was, and ran out of memory where no other could be chosen.
    short: Callable[[Schedule], tuple[Choice, Shortage] | None] = lambda _: None

    def first(self) -> Choice:
        before = self.short(self.schedule)
        if before is None:
            return Choice(self.strategy, self.schedule)
        said = f"memory ran out before: {before[1].message}"
        try:
            return replace(self.again(*before), reason=said)
        except Refused as error:
            raise Refused(
                f"{error}; {said}; to begin once more with the run file's schedule, delete "
                "shortage.json in the run folder"
            ) from error

    def again(self, before: Choice, shortage: Shortage) -> Choice:
        tiers = tuple(Tier) if self.unified else (shortage.tier,)
        found = lighter(self.model(), self.run, before.schedule, tiers, KEPT, self.layout)
        if found is None:
            raise Refused(
                f"schedule: nothing in {describe_schedule(before)} can be made smaller; shorten "
                "the context, use a smaller batch, or let strategy: auto choose"
            )
        return Choice(self.strategy, found, f"less on the {shortage.tier} than before")


@dataclass(slots=True)
class PlannedChooser:
    """The planner's schedule for the machine at hand.

    Budgets only ever shrink: after a shortage to less than the plan wanted of that tier, or to
    what is free now, if that is less still.
    """

    ask: Callable[[], Question]
    best_plan: Callable[[Question], Plan]
    free: Callable[[Question], MachineSpec]  # as much of its machine as can be had now
    recall: Callable[[Question], Choice | None]  # what was chosen before
    # What was, and ran out of memory where no other could be chosen.
    short: Callable[[Question], tuple[Choice, Shortage] | None] = lambda _: None
    question: Question | None = None

    def first(self) -> Choice:
        question = self._limited(self.ask())
        before = self.short(question)
        if before is not None:
            found = self.again(*before)
            why = f"with the plan before memory ran out: {before[1].message}"
            return replace(found, reason="; ".join(filter(None, (why, found.reason))))
        return self.recall(question) or self._choose(question)

    def again(self, before: Choice, shortage: Shortage) -> Choice:
        assert before.plan is not None, "a planned run has a plan"
        assert self.question is not None, "there was a first choice"
        machine = self.question.machine
        near = self.question.near()
        device, host = _less(before.plan.device), near * _less(before.plan.host)
        if machine.unified:
            machine = replace(machine, host_bytes=min(machine.host_bytes, near * device + host))
        elif shortage.tier is Tier.DEVICE:
            machine = replace(machine, device_bytes=min(machine.device_bytes, device))
        else:
            machine = replace(machine, host_bytes=min(machine.host_bytes, host))
        return self._choose(self._limited(replace(self.question, machine=machine)))

    def _limited(self, question: Question) -> Question:
        self.question = replace(question, machine=self.free(question))
        return self.question

    def _choose(self, question: Question) -> Choice:
        plan = self.best_plan(question)
        if not plan.fits:
            raise Refused(none_fits(plan))
        return Choice(plan.strategy, plan.schedule, plan.reason, plan)


@dataclass(frozen=True, slots=True)
class Free:
    """Bytes that this process can have now, what it has already included; on the host together with
    the other ranks of its machine."""

    device: int  # of a CPU 0: both tiers are main memory there
    host: int

    def limit(self, machine: MachineSpec) -> MachineSpec:
        """A machine with no more than that."""
        host = min(machine.host_bytes, self.host)
        if machine.unified:
            return replace(machine, host_bytes=host)
        # The context and the libraries' workspaces, which `reserve` stands for, are not free.
        mine = min(machine.device_bytes, self.device + machine.reserve)
        return replace(machine, device_bytes=mine, host_bytes=host)


def free_now(device: torch.device, held: int, on_host: int = 0, ranks: int = 1) -> Free:
    """`held` bytes are what each of the `ranks` on this machine has of the tier where its weights
    live already, and may keep; `on_host` what a GPU's run has in main memory."""
    host = available_host_bytes()
    if device.type == "cpu":
        return Free(0, host + ranks * held)
    free, _ = torch.cuda.mem_get_info(device)
    return Free(free + torch.cuda.memory_reserved(device), host + ranks * on_host)


def describe_schedule(choice: Choice, *, hides: bool = True) -> str:
    """The schedule on one line; `hides`: sparse attention may hide tokens."""
    schedule = choice.schedule
    sizes = schedule.groups if isinstance(schedule.groups, tuple) else (schedule.groups,)
    groups = " + ".join(str(size) for size in sizes)
    many = "" if isinstance(schedule.groups, tuple) else " each"
    parts = [
        f"chunk {schedule.chunk:,}",
        f"groups of {groups} layer{'s' if sum(sizes) > 1 else ''}{many}",
        f"x on {schedule.x}",
        f"K, V on {schedule.kv}" + (f", kept on {schedule.kv_home}" * schedule.kv_kept),
        _share("attention", schedule.attention_kept, schedule.attention),
        _share("activations", schedule.activations_kept, schedule.activations),
    ]
    if schedule.layer_checkpoint:
        parts.append("backward layer by layer")
    if schedule.sparse is not None:
        parts.append(sparse_words(schedule.sparse, hides=hides))
    return f"{choice.strategy}: {'; '.join(parts)}"


def _share(what: str, fraction: float, tier: Tier) -> str:
    return f"{what} {fraction:.0%} on {tier}" if fraction > 0 else f"{what} not kept"


def _less(budget: Budget) -> int:
    """What the next plan may take of a tier that ran out."""
    fixed = sum(size for part, size in budget.parts.items() if part in FIXED)
    return fixed + int(KEPT * (budget.total - fixed))
