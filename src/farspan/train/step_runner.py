"""Runs the engine: chooses a schedule, rehearses it, and retries after out-of-memory."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, TypeVar

from farspan.distributed.failure import activity
from farspan.engine.memory import PeakMemory
from farspan.plan.grid import group_ranges
from farspan.sparse.train import fraction_of, hides, other_chunk
from farspan.spec import Kernels, Refused, Schedule, Tier
from farspan.train.config import RunConfig, as_yaml
from farspan.train.context import CellsDone, Parts, RunContext, StepLike
from farspan.train.memory import Expected, describe_expected, describe_measured, show_bytes
from farspan.train.oom import (
    NoScheduleFits,
    OneRankOutOfMemory,
    RankReportedShortage,
    Shortage,
    clear_up,
    find_shortage,
)
from farspan.train.planning import Choice, SchedulePolicy, describe_schedule, less_for_ranks
from farspan.train.yaml_config import to_mapping

T = TypeVar("T")

REPLANS = 4  # for the same work


class _Enough(Exception):
    """A rehearsal is not needed any more."""


@dataclass(frozen=True, slots=True)
class Callbacks:
    """How the runner speaks to the rest of training."""

    note: Callable[[str], None]  # to a person
    watch: Callable[[CellsDone], None]  # after each cell of a rehearsal; may raise to abandon it
    ready: Callable[[Choice, Expected], None]  # a schedule has been rehearsed
    replanned: Callable[[Shortage, Choice], None]  # and what is tried next
    alone: Callable[[Shortage, Choice], None]  # with what this rank leaves a step of all
    rewind: Callable[[], None]  # back to where the work began: gradients, random numbers


@dataclass(frozen=True, slots=True)
class PlanComparison:
    """A plan beside what happened."""

    predicted_bytes: int  # of tensors: the reserve left out; on a CPU both tiers together
    measured_bytes: int
    predicted_seconds: float  # of an update
    measured_seconds: float | None  # the median; the first step, which is metered, left out

    def describe(self) -> str:
        """One line for a person."""
        measured = self.measured_seconds
        seconds = "not" if measured is None else f"{measured:,.3f} s"
        return (
            f"plan: {show_bytes(self.predicted_bytes)} predicted, {show_bytes(self.measured_bytes)} "
            "measured; "
            f"a step in {self.predicted_seconds:,.3f} s predicted, {seconds} measured"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class StepRunner:
    """Owns the engine, which is made when there is first work for it.

    Invariant: whatever is returned was computed by one schedule from beginning to end.
    """

    def __init__(
        self,
        run: RunConfig,
        use: RunContext,
        parts: Parts,
        chooser: SchedulePolicy,
        callbacks: Callbacks,
    ) -> None:
        self._run = run
        self._use = use
        self._parts = parts
        self._chooser = chooser
        self._tell = callbacks
        self._choice: Choice | None = None
        self._expected: Expected | None = None
        self._step: StepLike | None = None
        self._peak: int | None = None  # bytes of a step beside weights and optimizer
        self._seconds: list[float] = []  # of whole steps after the metered one

    def make_ready(self) -> None:
        """Chooses and rehearses now. Raises Refused, or what `watch` raises."""
        self.attempt(lambda _: None)

    def attempt(self, work: Callable[[StepLike], T]) -> T:
        """What `work` returns, with as many schedules as it takes. Raises OutOfMemory."""
        tried: list[str] = []
        while True:
            try:
                return work(self._ready())
            except (RuntimeError, MemoryError, Refused) as error:
                shortage = find_shortage(error)
                if shortage is None:
                    raise
                if self._use.crew.count > 1 and not shortage.of_all:
                    raise self._alone(shortage) from error
            # Outside the handler: the exception holds the step's frames, and they its tensors.
            self._give_up(shortage, tried)

    def measured(self, work: Callable[[StepLike], T]) -> tuple[T, dict[str, int]]:
        """As `attempt`; the first time with a schedule also the peak bytes, expected and found."""
        if self._peak is not None:
            return self.attempt(work), {}
        peak = 0

        def metered(step: StepLike) -> T:
            nonlocal peak
            with PeakMemory(self._use.device) as meter:
                result = work(step)
            peak = meter.peak
            return result

        result = self.attempt(metered)
        assert self._expected is not None, "work is done with what was rehearsed"
        self._peak = peak
        self._tell.note(describe_measured(self._expected.new, peak))
        return result, {
            "memory_predicted_bytes": self._expected.new,
            "memory_measured_bytes": peak,
        }

    def took(self, seconds: float, *, metered: bool) -> None:
        """A whole step took so long."""
        if not metered and self._peak is not None:
            self._seconds.append(seconds)

    def compare(self) -> PlanComparison | None:
        """The plan beside what was measured; None without a plan or a measured step."""
        plan = self._choice.plan if self._choice else None
        if plan is None or self._peak is None:
            return None
        on_cpu = self._use.device.type == "cpu"
        update = plan.seconds.optimizer
        return PlanComparison(
            predicted_bytes=plan.device.total
            - plan.device.parts.get("reserve", 0)
            + (plan.host.total if on_cpu else 0),
            measured_bytes=self._use.held_bytes() + self._peak,
            predicted_seconds=(plan.seconds.total - update) * self._run.accumulate + update,
            measured_seconds=median(self._seconds) if self._seconds else None,
        )

    def _ready(self) -> StepLike:
        """The engine, rehearsed."""
        if self._choice is None:
            self._choice = self._chooser.first()
            self._tell.note(f"schedule: {self._described(self._choice)}{_because(self._choice)}")
        if self._step is None:
            self._step = self._make_step(self._choice.schedule)
            self._expected = None
        if self._expected is None:
            self._tell.note("rehearsing a short step to see what a cell holds")
            if self._use.crew.ranks is not None and self._use.crew.count > 1:
                self._rehearse_apart(self._step)
            self._expected = self._parts.expect_memory(
                self._step,
                self._run.batch,
                self._run.context,
                self._use.optimizer.held(),
                self._tell.watch,
                self._run.accumulate > 1,
            )
            self._tell.note(describe_expected(self._expected))
            self._tell.ready(self._choice, self._expected)
        return self._step

    def _rehearse_apart(self, step: StepLike) -> None:
        """Each rank by itself, before all rehearse together: within a collective nobody hears of
        one that ran out. Raises Heard on all where one did."""
        crew, run, shortage = self._use.crew, self._run, None

        def watch(_: CellsDone) -> None:
            if crew.is_asked_to_halt():
                raise _Enough

        try:
            with activity("rehearsing a step apart"):
                self._parts.rehearse_apart(step, run.batch, run.context, watch, run.accumulate > 1)
        except _Enough:
            pass  # all halt behind the first cell that they rehearse together
        except (RuntimeError, MemoryError, Refused) as error:
            shortage = find_shortage(error)
            if shortage is None or shortage.of_all:
                raise
        if shortage is not None:
            step.release()
            clear_up(self._use.device)  # what the ranks say to each other takes some
        heard = crew.first_of(shortage)
        if heard is not None:
            number, found = heard
            message = f"rank {number}: {found.message}"
            raise RankReportedShortage(replace(found, message=message, of_all=True))

    def _make_step(self, schedule: Schedule) -> StepLike:
        # Spelt out only where it says something: other engines need not know of these.
        named: dict[str, Any] = {}
        if self._run.kernels != Kernels():
            named["kernels"] = self._run.kernels
        selector = fraction_of(self._run.sparse, schedule, self._run.context)
        if selector is not None:
            named["selector"] = selector
        if self._use.crew.ranks is not None:
            named["ranks"] = self._use.dealt or self._use.crew.ranks
        step = self._parts.make_step(self._use.model, schedule, **named)
        step.host_room = self._use.host_room(self._run)
        return step

    def _described(self, choice: Choice) -> str:
        """On one line. Groups of a pipeline are its stages, whatever size was asked for."""
        dealt, schedule = self._use.dealt, choice.schedule
        if dealt is not None and dealt.ranks.layout.pipeline > 1:
            stages = group_ranges(schedule, len(dealt.spec.layers), dealt.ranks.layout.pipeline)
            sizes = tuple(last - first for first, last in stages)
            choice = replace(choice, schedule=replace(schedule, groups=sizes))
        return describe_schedule(choice, hides=hides(self._run))

    def _alone(self, shortage: Shortage) -> OneRankOutOfMemory:
        """What this rank says when it leaves a step that the others are within. It cannot be taken
        again: a process group in which they wait for this one is good for nothing more."""
        advice = "with a schedule that needs less, if there is one,"
        if self._choice is not None:
            self._tell.alone(shortage, self._choice)
        if self._choice is not None and self._choice.plan is not None:
            advice = "planned with less of it,"
        elif self._choice is not None and self._use.dealt is not None:
            found = less_for_ranks(self._run, self._use.dealt, self._choice.schedule, shortage)
            advice = "no schedule needs less; on more ranks"
            if found is not None:
                advice = f"with {as_yaml(found)},"
        return OneRankOutOfMemory(
            f"memory: out of it ({_tier_words(shortage.tier, self._use)}): {shortage.message}; the "
            f"others are within the step, so nothing lighter is tried: {advice} the same command "
            "goes on from the latest checkpoint, if there is one"
        )

    def _give_up(self, shortage: Shortage, tried: list[str]) -> None:
        """Clears away what failed and chooses what comes next. Raises OutOfMemory."""
        if self._step is not None:
            self._step.release()
        self._step, self._peak, self._seconds = None, None, []
        self._tell.rewind()
        clear_up(self._use.device)
        if self._choice is None:  # before any schedule: nothing can be made smaller
            raise NoScheduleFits(f"memory: {shortage.message}")
        tried.append(f"{self._described(self._choice)}: {shortage.message}")
        if len(tried) > REPLANS:
            raise NoScheduleFits(f"memory: ran out with{_listed(tried)}\nshorten the context")
        try:
            choice = self._chooser.again(self._choice, shortage)
        except Refused as error:
            raise NoScheduleFits(f"memory: ran out with{_listed(tried)}\nthen {error}") from None
        self._tell.note(
            f"out of memory ({_tier_words(shortage.tier, self._use)}): {shortage.message}\n"
            f"trying the same again, {len(tried)} of {REPLANS}: {self._described(choice)}"
            f"{_because(choice)}{_sees_otherwise(self._choice, choice)}"
        )
        self._tell.replanned(shortage, choice)
        self._choice = choice


def shortage_json(shortage: Shortage, choice: Choice) -> dict[str, Any]:
    """A shortage and what followed, for metrics.jsonl."""
    return {
        "out_of_memory": shortage.tier.value,
        "message": shortage.message,
        "schedule": to_mapping(choice.schedule),
    }


def _because(choice: Choice) -> str:
    return f" ({choice.reason})" if choice.reason else ""


def _sees_otherwise(before: Choice, now: Choice) -> str:
    words = other_chunk(before.schedule.chunk, now.schedule)
    return f"; {words}" if words else ""


def _tier_words(tier: Tier, use: RunContext) -> str:
    return "main memory" if use.device.type == "cpu" else tier.value


def _listed(tried: list[str]) -> str:
    """A line each: with five of them on one nobody finds what was different."""
    return "".join(f"\n  ({place}) {text}" for place, text in enumerate(tried, start=1))
