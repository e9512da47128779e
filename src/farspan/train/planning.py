"""Which schedule a run has, its own or the planner's, and the next one after memory ran out."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from farspan.data.config import DataConfig
from farspan.distributed.fsdp import local
from farspan.distributed.run_context import DistributedContext, launch_env
from farspan.durable import read_json
from farspan.engine.microbench import describe_machine
from farspan.engine.parallelize import ShardedModel
from farspan.formatting import sparse_words
from farspan.hf.quantized import held_bytes
from farspan.memory.host import available_host_bytes
from farspan.planner.evaluate import RankWalk, size
from farspan.planner.machines import with_kernels
from farspan.planner.plans import best_placed
from farspan.planner.remedies import WEIGHTS
from farspan.planner.request import (
    PINNED,
    Budget,
    Open,
    Optimizer,
    Plan,
    Question,
    Seconds,
    margin_of,
)
from farspan.planner.states import input_bytes
from farspan.planner.walk import workspace_bytes
from farspan.program.layout import ALONE, Layout, group_ranges, refuse_together
from farspan.program.program import Program
from farspan.program.strategies import AUTO
from farspan.sparse.train import marks
from farspan.spec import (
    Kernels,
    MachineSpec,
    ModelSpec,
    Objective,
    RunSpec,
    Schedule,
    Tier,
    UnsupportedError,
)
from farspan.train.config import DType, ModelConfig, RunConfig, StatesPlace
from farspan.train.console import Observer
from farspan.train.context import (
    Components,
    InspectedModel,
    RunContext,
    inspect_model,
    inspect_sharded,
    torch_dtype,
)
from farspan.train.memory import (
    STATES_KEY,
    Expected,
    Placed,
    bare_machine,
    is_unified,
    open_of,
    with_weights_there,
)
from farspan.train.oom import Shortage, explain_moved, explain_none_fits, lighter_schedule
from farspan.train.run_folder import RunFolder, RunState
from farspan.train.yaml_config import convert, to_mapping

LOG = logging.getLogger(__name__)
# Of what a failed schedule decides of a tier its successor may take so much: 41% after four tries.
RETRY_SHARE = 0.8
# What no schedule decides. Taken off before the share: weights may be nearly all there is.
FIXED = (
    *("weights", "reference", "index", "gathered", "gradients"),
    *("accumulators", "optimizer", "inputs", "reserve"),
)
PLANNED = {
    StatesPlace.DEVICE: Optimizer.ADAMW,
    StatesPlace.HOST: Optimizer.HOST,
    StatesPlace.DISK: Optimizer.DISK,
    StatesPlace.EIGHT_BIT: Optimizer.ADAMW8BIT,
}

PLAN = "plan.json"  # in the run folder
PLANNING = "choosing a schedule"
OWN = "the run's own"  # what a schedule without a strategy's name is called


@dataclass(frozen=True, slots=True)
class Choice:
    """A schedule and how it came about."""

    strategy: str
    schedule: Schedule
    reason: str = ""
    plan: Plan | None = None  # where the planner chose


class SchedulePolicy(Protocol):
    """Chooses for one model on one machine."""

    def first(self) -> Choice:
        """What to begin with. Raises UnsupportedError."""

    def again(self, before: Choice, shortage: Shortage) -> Choice:
        """What needs less than `before` of what ran out. Raises UnsupportedError when nothing
        does."""


@dataclass(slots=True)
class NamedPolicy:
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
        except UnsupportedError as error:
            raise UnsupportedError(
                f"{error}; {said}; to retry the run file's schedule, delete "
                "shortage.json in the run folder"
            ) from error

    def again(self, before: Choice, shortage: Shortage) -> Choice:
        tiers = tuple(Tier) if self.unified else (shortage.tier,)
        found = lighter_schedule(
            self.model(), self.run, before.schedule, tiers, RETRY_SHARE, self.layout
        )
        if found is None:
            raise UnsupportedError(
                f"schedule: nothing in {describe_schedule(before)} can be made smaller; shorten "
                "the context, use a smaller batch, or let strategy: auto choose"
            )
        return Choice(self.strategy, found, f"less on the {shortage.tier} than before")


@dataclass(slots=True)
class PlannedPolicy:
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
            raise UnsupportedError(explain_none_fits(plan))
        return Choice(plan.strategy, plan.schedule, plan.reason, plan)


@dataclass(frozen=True, slots=True)
class EarlierPart:
    """What the run folder says of an earlier part of the run."""

    ctx: RunContext
    folder: RunFolder
    state: RunState

    def plan(self, question: Question) -> Choice | None:
        """A run that goes on keeps its plan; one that begins has none."""
        if self.state.at.step == 0:
            return None
        return recall_plan(self.folder.path / PLAN, question, self.ctx.components.evaluate)

    def planned_shortage(self, question: Question) -> tuple[Choice, Shortage] | None:
        """As `recall_shortage`."""
        return recall_shortage(self.folder.shortage, question, self.ctx.components.evaluate)

    def named_shortage(self, asked: Schedule) -> tuple[Choice, Shortage] | None:
        """As `recall_named_shortage`."""
        return recall_named_shortage(self.folder.shortage, asked, self.ctx.world.layout)


def make_policy(
    ctx: RunContext, earlier: EarlierPart, progress: Callable[[str], None]
) -> SchedulePolicy:
    """Chooses the run's schedules. Nothing is inspected or measured before the first choice;
    `progress` is then told what is measured, and may raise to abandon it."""
    run, named = ctx.run, ctx.run.schedule.strategy
    policy: SchedulePolicy = NamedPolicy(
        strategy=named or OWN,
        schedule=ctx.components.schedule_of(run, ctx.model),
        run=RunSpec(run.batch, run.context),
        model=ctx.describe,
        unified=ctx.device.type == "cpu",
        layout=ctx.world.layout,
        short=earlier.named_shortage,
    )
    least = LeastFreeMemory(ctx)
    if named == AUTO:
        policy = PlannedPolicy(
            ask=partial(ask, ctx, progress),
            best_plan=ctx.components.best_plan,
            free=least.limit,
            recall=earlier.plan,
            short=earlier.planned_shortage,
        )
    return policy if ctx.world.size == 1 else Rank0Policy(policy, ctx.world, least)


@dataclass(frozen=True, slots=True)
class FreeMemory:
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


def free_now(device: torch.device, held: int, on_host: int = 0, ranks: int = 1) -> FreeMemory:
    """`held` bytes are what each of the `ranks` on this machine has of the tier where its weights
    live already, and may keep; `on_host` what a GPU's run has in main memory."""
    host = available_host_bytes()
    if device.type == "cpu":
        return FreeMemory(0, host + ranks * held)
    free, _ = torch.cuda.mem_get_info(device)
    return FreeMemory(free + torch.cuda.memory_reserved(device), host + ranks * on_host)


@dataclass(slots=True)
class LeastFreeMemory:
    """What the rank has that can have the least: on its part of a step all of them must agree."""

    ctx: RunContext
    free: FreeMemory | None = None

    def look(self) -> None:
        """All ranks call it."""
        held, world = self.ctx.touched_bytes(), self.ctx.world
        mine = free_now(self.ctx.device, held.device, held.host, world.local_size)
        self.free = FreeMemory(world.minimum(mine.device), world.minimum(mine.host))

    def limit(self, question: Question) -> MachineSpec:
        """The machine of a question with no more memory than can be had now."""
        if self.ctx.world.size == 1:
            self.look()
        assert self.free is not None, "ranks have looked together"
        return allowed(self.ctx.run, self.free.limit(question.machine))


@dataclass(frozen=True, slots=True)
class Rank0Policy:
    """Every rank has the schedule that rank 0 chooses, for what the shortest of them has."""

    policy: SchedulePolicy
    world: DistributedContext
    least: LeastFreeMemory

    def first(self) -> Choice:
        self.least.look()
        return self.world.run_on_rank0(self.policy.first, PLANNING)

    def again(self, before: Choice, shortage: Shortage) -> Choice:
        self.least.look()
        return self.world.run_on_rank0(lambda: self.policy.again(before, shortage), PLANNING)


def describe_schedule(choice: Choice, *, hides: bool = True) -> str:
    """The schedule on one line; `hides`: sparse attention may hide tokens."""
    schedule = choice.schedule
    sizes = schedule.groups if isinstance(schedule.groups, tuple) else (schedule.groups,)
    groups = " + ".join(str(size) for size in sizes)
    many = "" if isinstance(schedule.groups, tuple) else " each"
    parts = [
        f"chunk {schedule.chunk:,}",
        f"groups of {groups} layer{'s' if sum(sizes) > 1 else ''}{many}",
        f"boundary inputs on {schedule.boundary_inputs}",
        f"K, V on {schedule.kv}" + (f", kept on {schedule.kv_home}" * schedule.kv_kept),
        _share("attention", schedule.attention_save_fraction, schedule.attention),
        _share("activations", schedule.activation_save_fraction, schedule.activations),
    ]
    if schedule.layer_checkpoint:
        parts.append("backward layer by layer")
    if schedule.weights is Tier.HOST:
        parts.append("weights and their gradients on host")
    if schedule.sparse is not None:
        parts.append(sparse_words(schedule.sparse, hides=hides))
    return f"{choice.strategy}: {'; '.join(parts)}"


def _share(what: str, fraction: float, tier: Tier) -> str:
    return f"{what} {fraction:.0%} on {tier}" if fraction > 0 else f"{what} not kept"


def _less(budget: Budget) -> int:
    """What the next plan may take of a tier that ran out."""
    fixed = sum(size for part, size in budget.parts.items() if part in FIXED)
    return fixed + int(RETRY_SHARE * (budget.total - fixed))


def less_for_ranks(
    run: RunConfig, sharded_model: ShardedModel, schedule: Schedule, shortage: Shortage
) -> Schedule | None:
    """What needs less than a schedule of several ranks, found without asking any of them; None
    where nothing does."""
    ranks = sharded_model.ranks
    tiers = tuple(Tier) if ranks.device.type == "cpu" else (shortage.tier,)
    shape = RunSpec(run.batch, run.context)
    return lighter_schedule(sharded_model.spec, shape, schedule, tiers, RETRY_SHARE, ranks.layout)


def ask(ctx: RunContext, progress: Callable[[str], None]) -> Question:
    """One batch of the run on the machine at hand."""
    assert ctx.inspected is not None, "a run that plans has inspected its model"
    machine = ctx.components.machine_once(ctx.device, torch_dtype(ctx.run), progress)
    return question_of(ctx.run, ctx.inspected, machine, ctx.placed.states, ctx.world)


def cells_of(ctx: RunContext, choice: Choice) -> Callable[[Program], int] | None:
    """What tells the bytes that cells of a step hold for a moment beside its program's buffers.

    None where nothing but a dry run does: the model cannot be profiled, its modules are compiled
    for a GPU (on a CPU a metered step runs them as they are), or ranks share a step. There one that
    runs out leaves the others waiting, and what a plan says of messages and gathered weights is the
    most that they take, not what is measured.
    """
    run = ctx.run
    if ctx.world.size > 1 or (run.kernels.compile and ctx.device.type != "cpu"):
        return None
    if choice.plan is not None:
        question = choice.plan.question
    else:
        try:
            found = ctx.inspected or inspect_for(run, ctx.model, ctx.device)
        except UnsupportedError:
            return None
        machine = bare_machine(ctx.device)
        question = question_of(run, found, machine, ctx.placed.states, ctx.world)
    if question.profile is None:
        return None

    def cells(program: Program) -> int:
        # What values of tokens take beside a batch is in no program.
        values = input_bytes(question, run.context)
        values -= input_bytes(replace(question, loss=Objective()), run.context)
        workspace = workspace_bytes(question, choice.schedule)
        return RankWalk(question, program).run().transient + workspace + values

    return cells


@dataclass(frozen=True, slots=True)
class StepPlanner:
    """Chooses for a `farspan.Step` as `strategy: auto` of a run file does."""

    components: Components = field(default_factory=Components)

    def __call__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        run: RunSpec,
        kernels: Kernels,
        loss: Objective,
        *,
        sharded: ShardedModel | None = None,
        moves: bool = True,
    ) -> Plan:
        """The best plan of a step of this model, computed on a device, that keeps room for AdamW.

        Of a `sharded` model all ranks call it, and rank 0 plans for the least that any of them has
        free. Where it `moves`, the model's weights go to main memory where nothing fits with them
        on the device, and stay there. Raises UnsupportedError if none fits.
        """
        world = _world_of(device, sharded)
        parameters = list(model.parameters())
        on_host = parameters[0].device != device if sharded is None else sharded.sharded.offload
        dtype = DType(str(model.dtype).removeprefix("torch."))
        asked = RunConfig(
            model=ModelConfig(path=model.config.name_or_path or type(model).__name__, dtype=dtype),
            data=DataConfig(),
            context=run.tokens,
            batch=run.batch,
            accumulate=2,  # gradients of other batches may be there
            kernels=kernels,
        )
        asked = with_weights_there(asked) if on_host else asked
        gradients = (p.grad for p in parameters if p.grad is not None)
        size = held_bytes if sharded is None else _bytes_here
        held = sum(size(p) for p in (*parameters, *gradients))
        free = free_now(device, held * (not on_host), held * on_host, world.local_size)
        free = FreeMemory(world.minimum(free.device), world.minimum(free.host))

        def planned() -> Plan:
            machine = self.components.machine_once(device, model.dtype, LOG.info)
            whole = partial(inspect_for, asked, model, device)
            looked = inspect_sharded(sharded, model, device, kernels) if sharded else whole()
            question = question_of(asked, looked, machine, StatesPlace.AUTO, world)
            may = Open(weights=moves, apart=True)
            question = replace(question, machine=free.limit(question.machine), loss=loss, open=may)
            plan = self.components.best_plan(question)
            if plan.fits:
                return plan
            raise UnsupportedError(
                f"{explain_none_fits(plan)} (keys of a run file); {_typed(plan)}"
            )

        plan = world.run_on_rank0(planned, PLANNING)
        if world.is_rank0:
            line = describe_schedule(Choice(plan.strategy, plan.schedule))
            LOG.warning("schedule: %s (for %d x %s tokens)", line, run.batch, f"{run.tokens:,}")
            if plan.unmoved is not None:
                LOG.warning("%s; %s", explain_moved(plan), OWN_OPTIMIZER)
        return plan


def _world_of(device: torch.device, sharded: ShardedModel | None) -> DistributedContext:
    """The ranks that share a model, or this process alone."""
    if sharded is None:
        return DistributedContext(device)
    return DistributedContext(device, launch_env(), 0.0, sharded.ranks, sharded.rank.layout)


def _bytes_here(weight: torch.Tensor) -> int:
    """Of the part that this rank holds."""
    return 0 if weight.is_meta else local(weight).nbytes


def _typed(plan: Plan) -> str:
    """What a program says in place of a run file's keys, where no plan of its model fits."""
    own = (
        "for another optimizer than AdamW in float32, give the step "
        "farspan.plan(..., optimizer=...).schedule"
    )
    stays = plan.question.weights is Tier.DEVICE and not plan.question.open.weights
    if not stays or not any(WEIGHTS in remedy.options for remedy in plan.remedies):
        return own
    return (
        "the model was sharded with its weights on the device: for main memory shard it by "
        "parallelize(model, farspan.Schedule(weights=farspan.Tier.HOST), ranks), or give the "
        f"Trainer that schedule; {own}"
    )


OWN_OPTIMIZER = (
    "update them there: a Trainer moves its optimizer's states, and a loop of your own does by "
    "optimizer.load_state_dict(optimizer.state_dict())"
)


def question_of(
    run: RunConfig,
    inspected: InspectedModel,
    machine: MachineSpec,
    states: StatesPlace,
    world: DistributedContext,
) -> Question:
    """One batch of the run, with its optimizer's states in a place; of `auto` the first of those
    that may be chosen."""
    default = StatesPlace.HOST if run.schedule.weights is Tier.HOST else StatesPlace.DEVICE
    # Links and main memory are shared by the run's devices on this node, and by no others.
    here = replace(machine, devices=world.local_size)
    return Question(
        model=inspected.model,
        run=RunSpec(run.batch, run.context),
        machine=with_kernels(here, deterministic=run.kernels.deterministic),
        layout=world.layout,
        optimizer=PLANNED.get(states, PLANNED[default]),
        weights=run.schedule.weights or Tier.DEVICE,
        dtype=run.model.dtype.value,
        overlap=machine.pinned and not machine.unified,  # as the engine's copies run
        sparse=run.pages(),
        accumulates=run.accumulate > 1,
        batches=run.accumulate,
        update_beside=run.optimizer.overlap is not False,
        kernels=run.kernels,
        margin=margin_of(run.margin, machine),
        nf4=inspected.profile is not None and inspected.profile.variant.nf4,
        loss=run.objective.planned(),
        profiles=inspected.profiles,
        profile=inspected.profile,
    )


def place(
    run: RunConfig,
    components: Components,
    world: DistributedContext,
    inspect: Callable[[], InspectedModel],
    about: Mapping[str, Any],
    observer: Observer,
) -> tuple[RunConfig, Placed]:
    """Where the run's optimizer states, weights and gradients live, once its ranks have a layout:
    the run with its weights there, and its states. `about` is the about.json of an earlier part of
    the run, which goes on as it began; `inspect` looks at the model. Raises UnsupportedError where
    a run that begins fits nowhere."""
    # What is free differs from rank to rank.
    return world.run_on_rank0(partial(_place, run, components, world, inspect, about, observer))


def _place(
    run: RunConfig,
    components: Components,
    world: DistributedContext,
    inspect: Callable[[], InspectedModel],
    about: Mapping[str, Any],
    observer: Observer,
) -> tuple[RunConfig, Placed]:
    device, given, before = world.device, open_of(run), about.get(STATES_KEY)
    if given.weights and about.get("schedule", {}).get("weights") == Tier.HOST:
        observer.note("weights: in main memory, as before; schedule.weights: device ends that")
        run = with_weights_there(run)
    elif before in (StatesPlace.HOST, StatesPlace.DISK):
        given = replace(given, weights=False)
    if not given.states:
        placed = Placed(run.optimizer.states, "as the run file says")
    elif before in (StatesPlace.HOST, StatesPlace.DISK):
        placed = Placed(StatesPlace(before), "as before")
    elif run.schedule.weights is Tier.HOST and (is_unified(device) or not given.drive):
        placed = Placed(StatesPlace.HOST, "where weights and gradients are")
    elif is_unified(device):
        placed = Placed(StatesPlace.DEVICE, "both tiers lie in main memory")
    else:
        placed = Placed(StatesPlace.AUTO, "")
    weights_settled = run.schedule.weights is Tier.HOST or not given.weights or is_unified(device)
    if weights_settled and placed.states is not StatesPlace.AUTO:
        return run, placed
    machine = bare_machine(device)
    if run.schedule.strategy == AUTO:
        machine = components.machine_once(device, torch_dtype(run), observer.measuring)
    machine = allowed(run, free_now(device, 0).limit(machine))
    question = question_of(run, inspect(), machine, placed.states, world)
    plan = _planned(run, components, replace(question, open=given), before)
    if not plan.fits and not about and run.schedule.strategy == AUTO:
        raise UnsupportedError(explain_none_fits(plan))
    if given.weights and plan.question.weights is Tier.HOST:
        observer.note(explain_moved(plan))
        run = with_weights_there(run)
    if placed.states is StatesPlace.AUTO:
        places = {optimizer: states for states, optimizer in PLANNED.items()}
        placed = Placed(places[plan.question.optimizer], why_there(plan))
    return run, placed


def _planned(
    run: RunConfig, components: Components, question: Question, before: str | None
) -> Plan:
    """The plan of where everything lives: of a run that goes on where it was, if it fits there. Of
    a written schedule bytes alone tell."""
    if run.schedule.strategy == AUTO:
        if before is not None:
            same = components.best_plan(replace(question, open=PINNED))
            if same.fits:
                return same
        return components.best_plan(question)
    schedule = components.schedule_for(run, len(question.model.layers))

    def sized(placed: Question) -> Plan:
        of, unknown = size(placed, schedule), Seconds(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, bound="")
        return Plan(OWN, schedule, placed, of.device, of.host, unknown, 0.0)

    return best_placed(question, sized)


def why_there(plan: Plan) -> str:
    """Why states are where a plan has them."""
    if not plan.fits:
        return "the plan finds room for the step nowhere"
    first = plan.unmoved
    if first is None:
        return "they fit beside the step" + ", but tightly" * plan.tight
    if plan.question.weights is Tier.HOST:
        return "where weights and gradients are"
    if first.fit is plan.fit:
        times = first.update_seconds() / plan.update_seconds()
        return f"a step would take {times:.2f} times as long with them on the device"
    tightly = " but tightly" * first.fits
    return f"by the plan they do not fit beside the step on the device{tightly}"


def inspect_for(run: RunConfig, model: Any, device: torch.device) -> InspectedModel:
    """The run's model as the planner sees it, while its weights are whole."""
    adapters = run.model.lora.everywhere() if run.model.lora else 0
    return inspect_model(model, run.model.dtype.value, device, adapters, run.kernels)


def allowed(run: RunConfig, machine: MachineSpec) -> MachineSpec:
    """The machine with no more main memory than the run file allows."""
    limit = run.host_bytes()
    if limit is None:
        return machine
    return replace(machine, host_bytes=min(machine.host_bytes, limit))


def about_json(ctx: RunContext, choice: Choice, expected: Expected) -> dict[str, Any]:
    """The content of about.json."""
    run, kept = ctx.run, ctx.corpus.train.kept
    epoch = ctx.corpus.sequences_per_epoch()
    return {
        **marks(run),
        **({} if run.sparse is None else {"sparse": asdict(run.sparse)}),
        "model": type(ctx.model).__name__,
        "parameters": ctx.parameters,
        "trainable": ctx.trainable,
        "strategy": choice.strategy,
        "schedule": asdict(choice.schedule),
        STATES_KEY: ctx.placed.states.value,
        "memory": dict(expected.parts),
        "data": ctx.corpus.identity,
        "tokens_per_epoch": None if epoch is None else kept.tokens,
        "sequences_per_epoch": epoch,
        "device": str(ctx.device),
        **({} if ctx.world.launch is None else {"layout": asdict(ctx.world.layout)}),
        "machine": describe_machine(),
    }


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
    except (UnsupportedError, KeyError, ValueError):
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
        # Where weights live changes no bit, and a run may say another place when it resumes.
        schedule = convert(Schedule, known["fields"], "fields")
        schedule = replace(schedule, weights=question.weights)
        if schedule.sparse != question.sparse:
            return None
        if question.sparse is None and known.get("layout") != asdict(layout):
            return None
        refuse_together(schedule, layout)
        group_ranges(schedule, len(question.model.layers), layout.pipeline)
        plan = evaluate(question, str(known["strategy"]), schedule)
    except (UnsupportedError, KeyError, TypeError):
        return None
    return Choice(plan.strategy, schedule, "as planned before", plan)
