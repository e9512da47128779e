"""What a run asks the planner: its own model, looked at, on the machine at hand."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from farspan.durable import read_json
from farspan.engine.parallelize import ShardedModel
from farspan.hf.describe import describe
from farspan.hf.stages import CausalLMStages
from farspan.plan.grid import group_ranges
from farspan.plan.headroom import headroom_bytes
from farspan.plan.layout import Layout, refuse_together
from farspan.plan.price.evaluate import size
from farspan.plan.price.workspace import with_kernels
from farspan.plan.question import Fit, Optimizer, Plan, Question, fit_of
from farspan.plan.strategies import AUTO
from farspan.spec import MachineSpec, Refused, RunSpec, Schedule, Tier
from farspan.train.choice import (
    KEPT,
    Choice,
    Chooser,
    Free,
    NamedChooser,
    PlannedChooser,
    free_now,
)
from farspan.train.config import RunConfig, StatesPlace
from farspan.train.crew import Crew
from farspan.train.inspection import Looked, look
from farspan.train.lighter import lighter
from farspan.train.optimizer_place import DEFAULT, Placed, bare_machine, choose_place
from farspan.train.parts import Parts
from farspan.train.setup import Equipment, Place, torch_dtype
from farspan.train.shortage import Shortage
from farspan.train.strict import convert, to_mapping

PLANNED = {
    StatesPlace.DEVICE: Optimizer.ADAMW,
    StatesPlace.HOST: Optimizer.HOST,
    StatesPlace.EIGHT_BIT: Optimizer.ADAMW8BIT,
}


PLANNING = "choosing a schedule"
OWN = "the run's own"  # what a schedule without a strategy's name is called


@dataclass(frozen=True, slots=True)
class Recalls:
    """What finds in the run folder how an earlier part of the run went."""

    plan: Callable[[Question], Choice | None]
    short: Callable[[Question], tuple[Choice, Shortage] | None]  # of a planned run
    named_short: Callable[[Schedule], tuple[Choice, Shortage] | None]  # of this schedule


def make_chooser(
    run: RunConfig,
    use: Equipment,
    parts: Parts,
    before: Recalls,
    progress: Callable[[str], None],
) -> Chooser:
    """Chooses the run's schedules. Nothing is looked at or measured before the first choice;
    `progress` hears then what is measured, and may raise to abandon it. `before` finds what an
    earlier part of the run had planned, and what it ran out of memory with."""
    named = run.schedule.strategy
    chooser: Chooser = NamedChooser(
        strategy=named or OWN,
        schedule=parts.schedule_of(run, use.model),
        run=RunSpec(run.batch, run.context),
        model=lambda: describe(CausalLMStages(use.model)) if use.dealt is None else use.dealt.spec,
        unified=use.device.type == "cpu",
        layout=use.crew.layout,
        short=before.named_short,
    )
    least = Least(use)
    if named == AUTO:
        chooser = PlannedChooser(
            ask=lambda: ask(run, use, parts, progress),
            best_plan=parts.best_plan,
            free=lambda question: least.limit(run, question),
            recall=before.plan,
            short=before.short,
        )
    return chooser if use.crew.count == 1 else OneForAll(chooser, use.crew, least)


def less_for_ranks(
    run: RunConfig, dealt: ShardedModel, schedule: Schedule, shortage: Shortage
) -> Schedule | None:
    """What needs less than a schedule of several ranks, found without asking any of them; None
    where nothing does."""
    ranks = dealt.ranks
    tiers = tuple(Tier) if ranks.device.type == "cpu" else (shortage.tier,)
    shape = RunSpec(run.batch, run.context)
    return lighter(dealt.spec, shape, schedule, tiers, KEPT, ranks.layout)


@dataclass(slots=True)
class Least:
    """What the rank has that can have the least: on its part of a step all of them must agree."""

    use: Equipment
    free: Free | None = None

    def look(self) -> None:
        """All ranks call it."""
        held, crew = self.use.touched_bytes(), self.use.crew
        mine = free_now(self.use.device, held.device, held.host, crew.near)
        self.free = Free(crew.least(mine.device), crew.least(mine.host))

    def limit(self, run: RunConfig, question: Question) -> MachineSpec:
        """The machine of a question with no more memory than can be had now."""
        if self.use.crew.count == 1:
            self.look()
        assert self.free is not None, "ranks have looked together"
        return allowed(run, self.free.limit(question.machine))


@dataclass(frozen=True, slots=True)
class OneForAll:
    """Every rank has the schedule that rank 0 chooses, for what the shortest of them has."""

    chooser: Chooser
    crew: Crew
    least: Least

    def first(self) -> Choice:
        self.least.look()
        return self.crew.by_first(self.chooser.first, PLANNING)

    def again(self, before: Choice, shortage: Shortage) -> Choice:
        self.least.look()
        return self.crew.by_first(lambda: self.chooser.again(before, shortage), PLANNING)


def ask(run: RunConfig, use: Equipment, parts: Parts, progress: Callable[[str], None]) -> Question:
    """One batch of the run on the machine at hand."""
    assert use.looked is not None, "a run that plans has looked at its model"
    machine = parts.machine(use.device, torch_dtype(run), progress)
    return question_of(run, use.looked, machine, use.placed.states, use.crew)


def question_of(
    run: RunConfig, looked: Looked, machine: MachineSpec, states: StatesPlace, crew: Crew
) -> Question:
    """One batch of the run, with its optimizer's states in a place."""
    return Question(
        model=looked.model,
        run=RunSpec(run.batch, run.context),
        # Links and main memory are shared by the run's devices on this node, and by no others.
        machine=with_kernels(
            replace(machine, devices=crew.near), deterministic=run.kernels.deterministic
        ),
        layout=crew.layout,
        optimizer=PLANNED[states],
        dtype=run.model.dtype.value,
        architecture=looked.architecture,
        overlap=machine.pinned and not machine.unified,  # as the engine's copies run
        sparse=run.pages(),
        accumulates=run.accumulate > 1,
        kernels=run.kernels,
        headroom=headroom_bytes(run.headroom, machine),
    )


def place_states(
    run: RunConfig, parts: Parts, before: str | None, progress: Callable[[str], None], crew: Crew
) -> Place:
    """Where the optimizer's states go, for a model on a device, once the crew has a layout.
    `before` is where they were in an earlier part of the run."""

    def place(model: Any, device: torch.device) -> Placed:
        if run.optimizer.states is not StatesPlace.AUTO:
            return Placed(run.optimizer.states, "as the run file says")
        if device.type == "cpu":
            return DEFAULT
        machine = bare_machine(device)
        if run.schedule.strategy == AUTO:
            machine = parts.machine(device, torch_dtype(run), progress)
        # Of several ranks this one has the weights, in main memory, until they are dealt.
        there = sum(parameter.nbytes for parameter in model.parameters()) * (crew.count > 1)
        machine = allowed(run, free_now(device, 0, there).limit(machine))
        adapters = run.model.lora.everywhere() if run.model.lora else 0
        looked = look(model, run.model.dtype.value, device, adapters, run.kernels)

        def fit(states: StatesPlace) -> Fit:
            question = question_of(run, looked, machine, states, crew)
            if run.schedule.strategy == AUTO:
                return parts.best_plan(question).fit
            sized = size(question, parts.schedule_of(run, model))
            return fit_of(question, sized.device, sized.host)

        return choose_place(fit, before)

    # What is free differs from rank to rank.
    return lambda model, device: crew.by_first(lambda: place(model, device))


def allowed(run: RunConfig, machine: MachineSpec) -> MachineSpec:
    """The machine with no more main memory than the run file allows."""
    limit = run.host_bytes()
    if limit is None:
        return machine
    return replace(machine, host_bytes=min(machine.host_bytes, limit))


def named_json(choice: Choice, asked: Schedule, layout: Layout) -> dict[str, Any]:
    """What finds again which schedule a named one had become when memory ran out."""
    return {
        "strategy": choice.strategy,
        "asked": to_mapping(asked),
        "fields": to_mapping(choice.schedule),
        "layout": asdict(layout),
    }


def plan_json(choice: Choice) -> dict[str, Any]:
    """The content of plan.json: the plan, and what finds it again."""
    assert choice.plan is not None, "a planned run has a plan"
    return {
        "machine": choice.plan.question.machine.name,
        "fields": to_mapping(choice.schedule),
        **choice.plan.to_json(),
    }


def recall_plan(
    path: Path, question: Question, evaluate: Callable[[Question, str, Schedule], Plan]
) -> Choice | None:
    """The schedule of an earlier part of this run, so that it goes on to the same bits; None when
    it was for another machine or does not fit any more. In another layout, where the bits are
    others anyway, only a sparse one is kept that can run there: the chunk is part of what sparse
    attention computes."""
    found = _of_file(read_json(path), question, evaluate)
    return found if found is not None and found.plan is not None and found.plan.fits else None


def recall_named_shortage(
    path: Path, asked: Schedule, layout: Layout
) -> tuple[Choice, Shortage] | None:
    """As `recall_shortage`, of a schedule that the run file gives; None also where it gives
    another now."""
    known = read_json(path)
    same = {"asked": to_mapping(asked), "layout": asdict(layout)}
    if known is None or any(known.get(name) != value for name, value in same.items()):
        return None
    try:
        schedule = convert(Schedule, known["fields"], "fields")
        return Choice(str(known["strategy"]), schedule), _shortage_of(known)
    except (Refused, KeyError, ValueError):
        return None


def recall_shortage(
    path: Path, question: Question, evaluate: Callable[[Question, str, Schedule], Plan]
) -> tuple[Choice, Shortage] | None:
    """The plan with which one of several ranks ran out of memory when the others could not know of
    it, and of what; None where there is no such, or it was for another machine or layout."""
    known = read_json(path)
    found = _of_file(known, question, evaluate)
    if found is None or known is None or known.get("layout") != asdict(question.layout):
        return None
    try:
        return found, _shortage_of(known)
    except (KeyError, ValueError):
        return None


def _shortage_of(known: dict[str, Any]) -> Shortage:
    return Shortage(Tier(known["out_of_memory"]), str(known["message"]))


def _of_file(
    known: dict[str, Any] | None,
    question: Question,
    evaluate: Callable[[Question, str, Schedule], Plan],
) -> Choice | None:
    layout = question.layout
    if known is None or known.get("machine") != question.machine.name:
        return None
    try:
        schedule = convert(Schedule, known["fields"], "fields")
        if schedule.sparse != question.sparse:
            return None
        if question.sparse is None and known.get("layout") != asdict(layout):
            return None
        refuse_together(schedule, layout)
        group_ranges(schedule, len(question.model.layers), layout.pipeline)
        plan = evaluate(question, str(known["strategy"]), schedule)
    except (Refused, KeyError, TypeError):
        return None
    return Choice(plan.strategy, schedule, "as planned before", plan)
