"""Plan of a run file for `farspan plan`: without weights or data, for any machine."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import PretrainedConfig

from farspan.ask import HERE, Request, as_run
from farspan.engine.profile import profiles_of_model
from farspan.formatting import write_seconds
from farspan.hf.load import blank_model, config_for_planning, load_config
from farspan.hf.quantized import format_of, refuse_untrainable, refuse_whole
from farspan.hf.routers import add_router_loss
from farspan.hf.unsupported import refuse_dropout, refuse_model, stretched
from farspan.planner.machines import with_kernels
from farspan.planner.plans import best_plan, longest_contexts, plan_as_written
from farspan.planner.request import Plan, Question
from farspan.profile.catalog import find_config, hub_name
from farspan.profile.store import Profiles
from farspan.program.layout import (
    ALONE,
    Given,
    Layout,
    Parallel,
    group_ranges,
    packed_layout,
    sequence_layout,
)
from farspan.program.strategies import AUTO
from farspan.spec import (
    MachineSpec,
    ModelSpec,
    Quantization,
    Schedule,
    Tier,
    UnsupportedError,
)
from farspan.train.config import RunConfig, StatesPlace
from farspan.train.context import Components, machine_of, torch_dtype
from farspan.train.memory import open_of, with_weights_there
from farspan.train.oom import explain_moved
from farspan.train.origin import with_base
from farspan.train.planning import OWN, PLANNED, allowed
from farspan.train.setup import (
    adapt,
    choose_device,
    embedded_rows,
    is_sharded,
    refuse_groups,
    refuse_weights,
    resolve,
)
from farspan.train.yaml_config import as_yaml, to_mapping


@dataclass(frozen=True, slots=True)
class PlanOfRun:
    """A run file's plan for one update, with the tokens and the time of the whole run."""

    run: RunConfig
    plan: Plan
    weights: str = ""  # why weights are in main memory; empty: they are not

    def words(self) -> Iterator[str]:
        """Yield the lines to print below the plan."""
        run, plan = self.run, self.plan
        if self.weights:
            yield self.weights
        if not plan.fits:
            return
        each = plan.update_seconds()
        batches = f" of {run.accumulate} batches" if run.accumulate > 1 else ""
        yield (
            f"the run: {run.steps:,} updates{batches}, {self.tokens():,} tokens each: "
            f"{write_seconds(each)} an update, {write_seconds(each * run.steps)} in all, without "
            "evaluations and checkpoints"
        )
        if run.schedule.strategy == AUTO:
            yield "to keep this schedule, write in the run file:"
            yield as_yaml(plan.schedule, len(plan.question.model.layers), run.context)

    def tokens(self) -> int:
        """Return the number of tokens per update, over all replicas."""
        run, layout = self.run, self.plan.question.layout
        return run.context * run.batch * run.accumulate * layout.data

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON, with the numbers of the whole run under the key `run`."""
        each = self.plan.update_seconds()
        run = {
            "steps": self.run.steps,
            "tokens_per_update": self.tokens(),
            "seconds_per_update": each,
            "seconds": each * self.run.steps,
        }
        return {**self.plan.to_json(), "run": run}


@dataclass(frozen=True, slots=True)
class QuestionOfRun:
    """A run file as input of the planner, with the choices that the file leaves open."""

    run: RunConfig
    question: Question

    def plan(self) -> PlanOfRun:
        """Return the plan that `farspan train` would use, with its placement of weights and states.
        Raises UnsupportedError."""
        plan, run = self._plan(), self.run
        if plan.fits and plan.question.weights is Tier.HOST and plan.unmoved is not None:
            return PlanOfRun(with_weights_there(run), plan, explain_moved(plan))
        return PlanOfRun(run, plan)

    def longest(self, max_step: float) -> dict[str, Plan]:
        """Return each strategy's plan with the longest context at `max_step` seconds per step."""
        return longest_contexts(self.question, self.strategies(), max_step=max_step)

    def strategies(self) -> list[str] | None:
        """Return the strategies that the planner may choose from, or None for all."""
        named = self.run.schedule.strategy
        return None if named in (None, AUTO) else [str(named)]

    def _plan(self) -> Plan:
        question, named = self.question, self.run.schedule.strategy
        if named == AUTO:
            return best_plan(question)
        layers = len(question.model.layers)
        schedule = Components().schedule_for(self.run, layers)
        stages = question.layout.pipeline
        refuse_groups(schedule, layers, stages)
        equal = group_ranges(Schedule(), layers, stages)
        if stages > 1 and group_ranges(schedule, layers, stages) != equal:
            raise UnsupportedError(
                f"schedule.groups: a pipeline is planned in stages of {layers // stages} or one "
                f"more layers, the larger ones last, got {to_mapping(schedule.groups)}; leave "
                "schedule.groups out to plan such stages"
            )
        return plan_as_written(question, named or OWN, schedule)


def question_of_run(
    run: RunConfig, options: Mapping[str, Any], progress: Callable[[str], None]
) -> QuestionOfRun:
    """Return a run file as input of the planner. Fields of a `Request` in `options` replace the
    run's; `progress` receives the name of each measurement on this machine.

    Each sequence counts as one document, the case in which attention takes most time. Raises
    UnsupportedError naming the field.
    """
    model = run.model
    if model.path is not None:
        model = replace(model, path=hub_name("model.path", model.path))
    run = replace(run, model=with_base(model)[0])
    gpus = options.get("gpus")
    if gpus is not None and gpus < 1:
        raise UnsupportedError(f"gpus: expected a whole number of devices >= 1, got {gpus}")
    machine = options.get("machine", HERE)
    if machine == HERE:
        machine = machine_of(choose_device(run.device), torch_dtype(run), progress)
    config, packed = _model(run)
    run = _with_optimizer(run, options)
    own = {"optimizer": run.optimizer.states.value, "margin": run.margin}
    own["loss"] = run.objective.kind
    question = Request(
        config=config,
        context=run.context,
        batch=run.batch,
        weights=run.schedule.weights or Tier.DEVICE,
        lora=0 if run.model.lora is None else run.model.lora.everywhere(),
        quantize=Quantization.NF4 if packed else None,
        dtype=run.model.dtype.value,
        sparse=run.pages(),
        kernels=run.kernels,
        **{**own, **options, "machine": machine, "gpus": 1},
    ).question()
    if not {"loss", "reference"} & options.keys():
        question = replace(question, loss=run.objective.planned())
    if run.model.path is not None:
        question = replace(question, model=replace(question.model, name=run.model.path))
    if "host_memory" in options:
        run = replace(run, host_memory=None)
    if "optimizer" not in options or options["optimizer"] == AUTO:
        question = replace(question, open=open_of(run))
    return QuestionOfRun(run, _for_devices(run, question, gpus))


def _model(run: RunConfig) -> tuple[PretrainedConfig | Profiles, bool]:
    """Return the model to plan for, and whether its linear modules have 4-bit weights. The model is
    its configuration or, if adapters skip linear modules or have dropout, profiles of the model
    itself. Raises UnsupportedError for a model that cannot be trained exactly."""
    model, lora = run.model, run.model.lora
    config = config_for_planning(
        path=model.path,
        config=model.config,
        overrides=model.overrides,
        revision=model.revision,
        dtype=torch_dtype(run),
    )
    if model.resize_embeddings:
        text = config.get_text_config()
        text.vocab_size = max(text.vocab_size, embedded_rows(resolve(run)))
    refuse_untrainable(config, str(model.path))
    there = format_of(config)
    packed = bool(model.quantize if there is None else there.get("load_in_4bit"))
    blank = blank_model(config, torch_dtype(run))
    adds = run.objective.routers
    add_router_loss(blank, run.objective.router if adds else None)
    if hasattr(config.get_text_config(), "output_router_logits"):  # which profiles go by
        config.get_text_config().output_router_logits = adds
    refuse_model(blank)
    refuse_dropout(blank)
    if lora is None:
        refuse_whole(config)
    if lora is None or lora.everywhere():
        return config, packed
    adapt(blank, run)
    return profiles_of_model(blank, model.path or config.model_type), packed


def _with_optimizer(run: RunConfig, options: Mapping[str, Any]) -> RunConfig:
    """Return the run with AdamW states of the kind in `options`; `auto` if run files lack it."""
    if "optimizer" not in options:
        return run
    name = options["optimizer"]
    places = {str(optimizer): place for place, optimizer in PLANNED.items()}
    known = name if name in tuple(StatesPlace) else places.get(name, StatesPlace.AUTO)
    return replace(run, optimizer=replace(run.optimizer, states=StatesPlace(known)))


def _for_devices(run: RunConfig, question: Question, gpus: int | None) -> Question:
    """Return the planner's input for all devices of the run, within the run file's memory limit."""
    machine = question.machine
    layout = _layout(run.parallel, gpus, question.model, machine)
    if question.nf4:
        layout = packed_layout(run.parallel, layout)
    refuse_weights(question.weights, layout)
    is_sharded(run, layout)  # refuses combinations with sharded weights
    if machine.unified:  # the ranks of a CPU are processes of one machine
        machine = replace(machine, devices=layout.devices())
    shared = replace(
        question,
        machine=with_kernels(allowed(run, machine), deterministic=run.kernels.deterministic),
        layout=layout,
        accumulates=run.accumulate > 1 or run.kernels.graphs,
        batches=run.accumulate,
        update_beside=run.optimizer.overlap is not False,
    )
    return as_run(shared)


def _layout(parallel: Given, gpus: int | None, model: ModelSpec, machine: MachineSpec) -> Layout:
    if isinstance(parallel, Parallel):
        return parallel.layout(gpus or parallel.asked())
    if parallel is None and gpus is None:
        return ALONE
    return sequence_layout(model, gpus or machine.devices)


def stretched_by(model: str, tokens: int) -> dict[str, Any]:
    """Return configuration overrides by which `model` (name or folder) reads `tokens` tokens."""
    return stretched(load_config(path=None, config=find_config(model), overrides={}), tokens)
