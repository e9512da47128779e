"""Choice of a run's schedule, by the run file or the planner, and of a lighter schedule after an
out-of-memory error."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from farspan.data.config import DataConfig
from farspan.distributed.fsdp import local
from farspan.distributed.run_context import DistributedContext, launch_env
from farspan.durable import WRONG, read_json
from farspan.engine.microbench import describe_machine
from farspan.engine.parallelize import ShardedModel
from farspan.formatting import sparse_words
from farspan.hf.quantized import held_bytes
from farspan.host import available_host_bytes
from farspan.planner.evaluate import momentary, size
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
    of_whole,
)
from farspan.planner.states import input_bytes
from farspan.program.layout import Layout, group_ranges, refuse_together
from farspan.program.program import Program
from farspan.program.strategies import AUTO
from farspan.spec import (
    Kernels,
    MachineSpec,
    Objective,
    RunSpec,
    Schedule,
    Tier,
    UnsupportedError,
)
from farspan.train.config import DType, ModelConfig, RunConfig, StatesPlace
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
from farspan.train.observer import Observer
from farspan.train.oom import (
    RETRY_SHARE,
    Shortage,
    explain_moved,
    explain_none_fits,
    fixed_bytes,
    lighter_schedule,
)
from farspan.train.run_folder import RunFolder, RunState
from farspan.train.sparse import marks
from farspan.train.yaml_config import convert, to_mapping

LOG = logging.getLogger(__name__)
PLANNED = {
    StatesPlace.DEVICE: Optimizer.ADAMW,
    StatesPlace.HOST: Optimizer.HOST,
    StatesPlace.DISK: Optimizer.DISK,
    StatesPlace.EIGHT_BIT: Optimizer.ADAMW8BIT,
}

PLAN = "plan.json"  # in the run folder
PLANNING = "choosing a schedule"
OWN = "the run's own"  # name of a schedule without a strategy


@dataclass(frozen=True, slots=True)
class Choice:
    """A schedule, and the reason to choose it."""

    strategy: str
    schedule: Schedule
    reason: str = ""
    plan: Plan | None = None  # if the planner chose


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Bytes that this process can use now, including those it already holds. Ranks on the same
    machine share the host's bytes."""

    device: int  # 0 on a CPU, where both tiers are main memory
    host: int

    def limit(self, machine: MachineSpec) -> MachineSpec:
        """Return the machine with its memory limited to the free bytes."""
        host = min(machine.host_bytes, self.host)
        if machine.unified:
            return replace(machine, host_bytes=host)
        # The CUDA context and the libraries' workspaces, counted as `reserve`, are not free.
        mine = min(machine.device_bytes, self.device + machine.reserve)
        return replace(machine, device_bytes=mine, host_bytes=host)


def free_now(device: torch.device, used: int, on_host: int = 0, ranks: int = 1) -> FreeMemory:
    """Return the memory that this process can use: free memory, and what the run already holds. On
    a CPU the run holds `used` bytes; on a GPU, torch's reserved memory and `on_host` bytes of main
    memory. Each of the `ranks` processes on this machine holds as much main memory."""
    host = available_host_bytes()
    if device.type == "cpu":
        return FreeMemory(0, host + ranks * used)
    free, _ = torch.cuda.mem_get_info(device)
    return FreeMemory(free + torch.cuda.memory_reserved(device), host + ranks * on_host)


def least_free(world: DistributedContext, used: int, on_host: int) -> FreeMemory:
    """Return the free memory of the rank that has the least, for steps that all ranks share. All
    ranks call this; `used` and `on_host` are as for `free_now`."""
    mine = free_now(world.device, used, on_host, world.local_size)
    return FreeMemory(world.minimum(mine.device), world.minimum(mine.host))


class SchedulePolicy:
    """Choice of a run's schedules: the run file's, given by name or by fields, or the planner's for
    this machine with `strategy: auto`. Rank 0 chooses for all ranks, within the memory of the rank
    that has the least.

    A choice inspects and measures only as much as it needs; `progress` receives the name of each
    measurement, and may raise to stop it. When memory has run out, the planner plans for a machine
    with less of that memory, whose budgets only shrink; the run file's own schedule gets smaller
    chunks and groups, and keeps more in main memory.
    """

    def __init__(
        self, ctx: RunContext, folder: RunFolder, state: RunState, progress: Callable[[str], None]
    ) -> None:
        self._ctx, self._folder, self._state, self._progress = ctx, folder, state, progress
        self._is_planned = ctx.run.schedule.strategy == AUTO
        self._question: Question | None = None  # the planner's latest question
        self._free: FreeMemory | None = None  # agreed among all ranks

    def first(self) -> Choice:
        """Return the schedule of the first attempt. Raises UnsupportedError."""
        return self._on_rank0(self._first)

    def again(self, before: Choice, shortage: Shortage) -> Choice:
        """Return a schedule for the next attempt, which takes less of the tier that ran out than
        the schedule `before`. Raises UnsupportedError if no schedule does."""
        return self._on_rank0(partial(self._again, before, shortage))

    def lighter(self, before: Choice, shortage: Shortage) -> Choice:
        """Return a version of the run file's schedule that takes less memory, without asking other
        ranks. Raises UnsupportedError if there is none."""
        ctx = self._ctx
        inspected = ctx.inspected or InspectedModel(ctx.describe())
        machine = bare_machine(ctx.device)
        question = question_of(ctx.run, inspected, machine, ctx.placed.states, ctx.world)
        tiers = tuple(Tier) if is_unified(ctx.device) else (shortage.tier,)
        schedule = lighter_schedule(question, before.schedule, tiers)
        if schedule is None:
            raise UnsupportedError(
                f"schedule: {describe_schedule(before)} cannot be made smaller; shorten "
                "the context, use a smaller batch, or let strategy: auto choose"
            )
        return Choice(before.strategy, schedule, f"less on the {shortage.tier} than before")

    def _on_rank0(self, choose: Callable[[], Choice]) -> Choice:
        world = self._ctx.world
        self._free = self._look() if world.size > 1 else None
        return world.run_on_rank0(choose, PLANNING)

    def _look(self) -> FreeMemory:
        held = self._ctx.touched_bytes()
        return least_free(self._ctx.world, held.device, held.host)

    def _first(self) -> Choice:
        ctx = self._ctx
        if self._is_planned:
            self._limit(ask(ctx, self._progress))
        ran_out = self._earlier_shortage()
        if ran_out is not None:
            said = f"memory ran out before: {ran_out[1].message}"
            try:
                found = self._again(*ran_out)
            except UnsupportedError as error:
                raise UnsupportedError(
                    f"{error}; {said}; to retry the schedule, delete shortage.json in the run "
                    "folder"
                ) from error
            return replace(found, reason="; ".join(filter(None, (said, found.reason))))
        if self._question is None:
            schedule = ctx.components.schedule_of(ctx.run, ctx.model)
            return Choice(ctx.run.schedule.strategy or OWN, schedule)
        if self._state.at.step:  # a resumed run keeps its plan
            known = read_json(self._folder.path / PLAN)
            before = recall_plan(known, self._question, ctx.components.evaluate)
            if before is not None and before.plan is not None and before.plan.fits:
                return before
        return self._choose(self._question)

    def _earlier_shortage(self) -> tuple[Choice, Shortage] | None:
        """Return the schedule and the shortage of an earlier part of the run that ended because one
        rank alone ran out of memory. Returns None if no part did, or if its machine, layout or
        schedule differ from the present ones."""
        ctx, known = self._ctx, read_json(self._folder.shortage)
        if known is None or known.get("layout") != asdict(ctx.world.layout):
            return None
        try:
            shortage = Shortage(Tier(known["out_of_memory"]), str(known["message"]))
            if self._question is not None:
                choice = recall_plan(known, self._question, ctx.components.evaluate)
            else:
                asked = to_mapping(ctx.components.schedule_of(ctx.run, ctx.model))
                schedule = convert(Schedule, known["fields"], "fields")
                same = known.get("asked") == asked
                choice = Choice(str(known["strategy"]), schedule) if same else None
        except WRONG:
            return None
        return None if choice is None else (choice, shortage)

    def _again(self, before: Choice, shortage: Shortage) -> Choice:
        if before.plan is None:
            return self.lighter(before, shortage)
        assert self._question is not None, "there was a first choice"
        machine, near = self._question.machine, self._question.near()
        device, host = _retry_bytes(before.plan.device), near * _retry_bytes(before.plan.host)
        if machine.unified:
            machine = replace(machine, host_bytes=min(machine.host_bytes, near * device + host))
        elif shortage.tier is Tier.DEVICE:
            machine = replace(machine, device_bytes=min(machine.device_bytes, device))
        else:
            machine = replace(machine, host_bytes=min(machine.host_bytes, host))
        return self._choose(self._limit(replace(self._question, machine=machine)))

    def _limit(self, question: Question) -> Question:
        """Return the planner's input with the machine's memory reduced to the free bytes."""
        free = self._free or self._look()
        machine = allowed(self._ctx.run, free.limit(question.machine))
        self._question = replace(question, machine=machine)
        return self._question

    def _choose(self, question: Question) -> Choice:
        plan = _reused(self._ctx.placed.plan, question) or self._ctx.components.best_plan(question)
        if not plan.fits:
            raise UnsupportedError(explain_none_fits(plan))
        return Choice(plan.strategy, plan.schedule, plan.reason, plan)


def _reused(plan: Plan | None, question: Question) -> Plan | None:
    """Return `plan`, sized again for `question`. None if `question` differs from the plan's own in
    more than the machine, or if the plan would have less memory to spare than before."""
    if plan is None or replace(plan.question, machine=question.machine) != question:
        return None
    renewed = replace(of_whole(question, plan), unmoved=None)
    return renewed if renewed.fits and renewed.fit >= plan.fit else None


def describe_schedule(choice: Choice, *, hides: bool = True) -> str:
    """Return the schedule as one line; `hides` means that sparse attention may hide tokens."""
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
        _share("activations", schedule.activation_save_fraction, schedule.activations)
        + (
            f" in {schedule.activation_save_layers:.0%} of groups"
            if schedule.activation_save_layers < 1 and schedule.activation_save_fraction
            else ""
        ),
    ]
    if schedule.layer_checkpoint:
        parts.append("backward layer by layer")
    if schedule.loss_chunk_size < Schedule().loss_chunk_size:
        parts.append(f"logits of {schedule.loss_chunk_size:,} tokens at once")
    if schedule.weights is Tier.HOST:
        parts.append("weights and their gradients on host")
    if schedule.sparse is not None:
        parts.append(sparse_words(schedule.sparse, hides=hides))
    return f"{choice.strategy}: {'; '.join(parts)}"


def _share(what: str, fraction: float, tier: Tier) -> str:
    return f"{what} {fraction:.0%} on {tier}" if fraction > 0 else f"{what} not kept"


def _retry_bytes(budget: Budget) -> int:
    """Return the bytes that the next schedule may take of a tier that ran out of memory."""
    fixed = fixed_bytes(budget)
    return fixed + int(RETRY_SHARE * (budget.total - fixed))


def ask(ctx: RunContext, progress: Callable[[str], None]) -> Question:
    """Return the planner's input for one batch of the run on this machine."""
    assert ctx.inspected is not None, "a run that plans has inspected its model"
    machine = ctx.components.machine_once(ctx.device, torch_dtype(ctx.run), progress)
    return question_of(ctx.run, ctx.inspected, machine, ctx.placed.states, ctx.world)


def cells_of(ctx: RunContext, choice: Choice) -> Callable[[Program], int]:
    """Return a function that computes, for a program, the most bytes that a step takes outside its
    buffers: for temporary tensors of cells, and for values that the loss keeps per token.

    The model's profile predicts these bytes, and the first step measures them. For ranks that share
    a step, and modules compiled for a GPU, they are an upper bound: messages and gathered weights
    count at their largest, and savings by fused kernels do not count.
    """
    run = ctx.run
    if choice.plan is not None:
        question = choice.plan.question
    else:
        inspected = ctx.inspected or inspect_for(run, ctx.model, ctx.device)
        machine = bare_machine(ctx.device)
        question = question_of(run, inspected, machine, ctx.placed.states, ctx.world)
    # No program counts the values of tokens, which are held with a batch.
    values = input_bytes(question, run.context)
    values -= input_bytes(replace(question, loss=Objective()), run.context)
    return lambda program: momentary(question, program) + values


@dataclass(frozen=True, slots=True)
class StepPlanner:
    """Planner of a `farspan.Step`, which has no run file; it chooses as `strategy: auto` does."""

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
        """Return the best plan of a step of this model on a device, with room for AdamW.

        For a `sharded` model all ranks call it, and rank 0 plans for the rank with the least free
        memory. With `moves`, the model's weights go to main memory and stay there, if no plan fits
        with weights on the device. Raises UnsupportedError if no plan fits.
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
            accumulate=2,  # gradients of other batches may exist
            kernels=kernels,
        )
        asked = with_weights_there(asked) if on_host else asked
        gradients = (p.grad for p in parameters if p.grad is not None)
        size = held_bytes if sharded is None else _local_bytes
        held = sum(size(p) for p in (*parameters, *gradients))
        free = least_free(world, held * (not on_host), held * on_host)

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
                f"{explain_none_fits(plan)} (these are keys of a run file); {_api_advice(plan)}"
            )

        plan = world.run_on_rank0(planned, PLANNING)
        if world.is_rank0:
            line = describe_schedule(Choice(plan.strategy, plan.schedule))
            LOG.warning("schedule: %s (for %d x %s tokens)", line, run.batch, f"{run.tokens:,}")
            if plan.unmoved is not None:
                LOG.warning("%s; %s", explain_moved(plan), OWN_OPTIMIZER)
        return plan


def _world_of(device: torch.device, sharded: ShardedModel | None) -> DistributedContext:
    """Return the ranks that share a sharded model, or only this process for an unsharded one."""
    if sharded is None:
        return DistributedContext(device)
    return DistributedContext(device, launch_env(), 0.0, sharded.ranks, sharded.rank.layout)


def _local_bytes(weight: torch.Tensor) -> int:
    return 0 if weight.is_meta else local(weight).nbytes


def _api_advice(plan: Plan) -> str:
    """Return advice for users of the Python API, who have no run file, when no plan fits."""
    advice = (
        "for an optimizer other than float32 AdamW, give the step farspan.plan(..., "
        "optimizer=...).schedule"
    )
    stays = plan.question.weights is Tier.DEVICE and not plan.question.open.weights
    if not stays or not any(WEIGHTS in remedy.options for remedy in plan.remedies):
        return advice
    return (
        "the model was sharded with its weights on the device: for main memory, shard it with "
        "parallelize(model, farspan.Schedule(weights=farspan.Tier.HOST), ranks), or give the "
        f"Trainer that schedule; {advice}"
    )


OWN_OPTIMIZER = (
    "keep optimizer states there too: a Trainer moves them itself; in your own loop, call "
    "optimizer.load_state_dict(optimizer.state_dict())"
)


def question_of(
    run: RunConfig,
    inspected: InspectedModel,
    machine: MachineSpec,
    states: StatesPlace,
    world: DistributedContext,
) -> Question:
    """Return the planner's input for one batch of the run. `states` is the place of optimizer
    states; `auto` means the tier of the weights."""
    default = StatesPlace.HOST if run.schedule.weights is Tier.HOST else StatesPlace.DEVICE
    # Only the run's devices on this node share links and main memory.
    here = replace(machine, devices=world.local_size)
    return Question(
        model=inspected.model,
        run=RunSpec(run.batch, run.context),
        machine=with_kernels(here, deterministic=run.kernels.deterministic),
        layout=world.layout,
        optimizer=PLANNED.get(states, PLANNED[default]),
        weights=run.schedule.weights or Tier.DEVICE,
        dtype=run.model.dtype.value,
        overlap=machine.pinned and not machine.unified,  # like the engine's copies
        sparse=run.pages(),
        accumulates=run.accumulate > 1 or run.kernels.graphs,
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
    """Choose the tiers of optimizer states, weights and gradients for a layout of ranks. Returns
    the run with its weights placed, and the place of the states. A resumed run keeps the placement
    in `about`, its about.json. Raises UnsupportedError if nothing fits a new run."""
    # Free memory differs between ranks.
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
        observer.note("weights: in main memory, as before; set schedule.weights: device to undo")
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
    question = question_of(run, inspect(), machine, placed.states, world)
    room = allowed(run, free_now(device, 0).limit(question.machine))
    plan = _planned(run, components, replace(question, machine=room, open=given), before)
    if not plan.fits and not about and run.schedule.strategy == AUTO:
        raise UnsupportedError(explain_none_fits(plan))
    if given.weights and plan.question.weights is Tier.HOST:
        observer.note(explain_moved(plan))
        run = with_weights_there(run)
    if placed.states is StatesPlace.AUTO:
        places = {optimizer: states for states, optimizer in PLANNED.items()}
        placed = Placed(places[plan.question.optimizer], why_there(plan))
    return run, replace(placed, plan=plan)


def _planned(
    run: RunConfig, components: Components, question: Question, before: str | None
) -> Plan:
    """Return the best plan over all placements that the run leaves open. A resumed run keeps its
    placement if that fits. If the run file sets the schedule, plans are compared by bytes alone."""
    if run.schedule.strategy == AUTO:
        if before is not None:
            same = components.best_plan(replace(question, open=PINNED))
            if same.fits:
                return same
        return components.best_plan(question)
    schedule = components.schedule_for(run, len(question.model.layers))

    def sized(placed: Question) -> Plan:
        budgets = size(placed, schedule)
        unknown = Seconds(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, bound="")
        return Plan(OWN, schedule, placed, budgets.device, budgets.host, unknown, 0.0)

    return best_placed(question, sized)


def why_there(plan: Plan) -> str:
    """Return the reason for the place that a plan gives optimizer states."""
    if not plan.fits:
        return "the plan finds no room for the step"
    first = plan.unmoved
    if first is None:
        return "they fit next to the step" + ", but tightly" * plan.tight
    if plan.question.weights is Tier.HOST:
        return "where weights and gradients are"
    if first.fit is plan.fit:
        times = first.update_seconds() / plan.update_seconds()
        return f"a step would take {times:.2f} times as long with them on the device"
    tightly = " but tightly" * first.fits
    return f"by the plan they do not fit next to the step on the device{tightly}"


def inspect_for(run: RunConfig, model: Any, device: torch.device) -> InspectedModel:
    """Describe the run's model for the planner, before its weights are sharded."""
    adapters = run.model.lora.everywhere() if run.model.lora else 0
    return inspect_model(model, run.model.dtype.value, device, adapters, run.kernels)


def allowed(run: RunConfig, machine: MachineSpec) -> MachineSpec:
    """Return the machine with its main memory limited to what the run file allows."""
    limit = run.host_bytes()
    if limit is None:
        return machine
    return replace(machine, host_bytes=min(machine.host_bytes, limit))


def about_json(ctx: RunContext, choice: Choice, expected: Expected) -> dict[str, Any]:
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


def choice_json(choice: Choice, written: Schedule, layout: Layout) -> dict[str, Any]:
    """Return a choice and the planner's plan as JSON, from which `recall_plan` restores the choice.
    `written` is the run file's schedule, if the planner did not choose."""
    values: dict[str, Any] = {"asked": to_mapping(written), "layout": asdict(layout)}
    if choice.plan is not None:
        values = choice.plan.to_json()
    return values | {"strategy": choice.strategy, "fields": to_mapping(choice.schedule)}


def recall_plan(
    record: dict[str, Any] | None,
    question: Question,
    evaluate: Callable[[Question, str, Schedule], Plan],
) -> Choice | None:
    """Return the schedule that the planner chose earlier in this run, from its `record`, so that
    results stay bit-identical. Returns None if machine or sparse attention changed. Another layout
    of ranks changes bits anyway: then only a sparse schedule that can run is kept, since its chunk
    is part of the attention's definition."""
    layout = question.layout
    if record is None or record.get("machine") != question.machine.name:
        return None
    try:
        # The place of weights changes no bit, and a resumed run may name another.
        schedule = convert(Schedule, record["fields"], "fields")
        schedule = replace(schedule, weights=question.weights)
        if schedule.sparse != question.sparse:
            return None
        if question.sparse is None and record.get("layout") != asdict(layout):
            return None
        refuse_together(schedule, layout)
        group_ranges(schedule, len(question.model.layers), layout.pipeline)
        plan = evaluate(question, str(record["strategy"]), schedule)
    except WRONG:
        return None
    return Choice(plan.strategy, schedule, "as planned before", plan)
