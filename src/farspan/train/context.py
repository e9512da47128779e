"""Objects that a run computes with: replaceable functions, the run's context (model, data,
optimizer), and the model as the planner sees it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from farspan.ask import measuring
from farspan.checkpoint.saver import Saver, buffers_of, entries_of, gather_model, model_tensors
from farspan.data.corpus import Corpus
from farspan.data.tokenizers import Tokenizer
from farspan.distributed.fsdp import Stage, local
from farspan.distributed.run_context import DistributedContext
from farspan.engine.calibrate import here
from farspan.engine.gradients import adds_products
from farspan.engine.loss import trained_token_count
from farspan.engine.parallelize import ShardedModel, ShardedUpdate
from farspan.engine.profile import profiles_of_model
from farspan.engine.step import Step
from farspan.engine.streamed_weights import StreamedWeights
from farspan.hf import load
from farspan.hf.describe import describe, with_work
from farspan.hf.fused_layers import fuse
from farspan.hf.quantized import elements, held_bytes, is_packed
from farspan.hf.stages import CausalLMStages
from farspan.hf.unsupported import drawing_dropouts
from farspan.kernels.launch import fused_for
from farspan.planner import evaluate as evaluation
from farspan.planner import plans
from farspan.profile.model import ModelProfile, Variant
from farspan.profile.store import Profiles, profiles_of
from farspan.program import strategies
from farspan.program.strategies import AUTO
from farspan.spec import Kernels, MachineSpec, ModelSpec, Schedule, Tier, UnsupportedError
from farspan.train import memory
from farspan.train.config import RunConfig
from farspan.train.memory import DeviceMemory, Placed
from farspan.train.optimizer import TrainingOptimizer
from farspan.train.sparse import Index, selector_for
from farspan.train.staged_states import StateBytes


def torch_dtype(run: RunConfig) -> torch.dtype:
    """Return the torch dtype of the run's parameters and activations."""
    dtype: torch.dtype = getattr(torch, run.model.dtype.value)
    return dtype


def machine_of(
    device: torch.device, dtype: torch.dtype, progress: Callable[[str], None]
) -> MachineSpec:
    """Measure the speeds of this machine and its device, for matrix products in this dtype."""
    return here(progress, device, [dtype])


class Components:
    """The functions that training is built from, each of which a subclass may replace."""

    load_model = staticmethod(load.load_model)
    make_step: Callable[..., Step] = Step  # is given only arguments that differ from its defaults
    strategy = staticmethod(strategies.strategy)
    count_trained = staticmethod(trained_token_count)
    expect_memory = staticmethod(memory.expect_memory)
    choose_allocator = staticmethod(memory.choose_allocator)
    machine = staticmethod(machine_of)
    best_plan = staticmethod(plans.best_plan)
    evaluate = staticmethod(evaluation.evaluate)

    def __init__(self) -> None:
        self._machines: dict[tuple[torch.device, torch.dtype], MachineSpec] = {}

    def machine_once(
        self, device: torch.device, dtype: torch.dtype, progress: Callable[[str], None]
    ) -> MachineSpec:
        """Return `machine(...)`, measuring each device and dtype only once."""
        if (device, dtype) not in self._machines:
            self._machines[device, dtype] = self.machine(device, dtype, progress)
        return self._machines[device, dtype]

    def schedule_of(self, run: RunConfig, model: Any) -> Schedule:
        """Return the run's schedule for this model, or the default if the planner chooses."""
        return self.schedule_for(run, model.config.get_text_config().num_hidden_layers)

    def schedule_for(self, run: RunConfig, layers: int) -> Schedule:
        """Return the run's schedule for a model of `layers` layers."""
        base, named = Schedule(), run.schedule.strategy
        if named is not None and named != AUTO:
            base = self.strategy(named, layers, run.context)
        return run.schedule.apply(base).with_sparse(run.pages())


@dataclass(frozen=True, slots=True)
class InspectedModel:
    """A model's specification, and its profile if the model was profiled."""

    model: ModelSpec
    profiles: Profiles | None = None
    profile: ModelProfile | None = None  # the one that matches the device


def inspect_model(
    model: nn.Module,
    dtype: str,
    device: torch.device,
    rank: int = 0,
    kernels: Kernels | None = None,
) -> InspectedModel:
    """Describe a model for the planner, and profile its layers on `device`. `rank` is the LoRA rank
    if every linear module of the layers has an adapter, else 0. `kernels` are those that the run
    uses."""
    stages, kernels = CausalLMStages(model), kernels or Kernels()
    fuse(stages, kernels, device)
    spec = with_work(stages, describe(stages, device))
    return _merge_work(inspect_blank(stages, dtype, device, rank, kernels, _sizes(spec)), spec)


def inspect_sharded(
    sharded_model: ShardedModel, model: nn.Module, device: torch.device, kernels: Kernels
) -> InspectedModel:
    """Describe a sharded model for the planner, with the sizes of the unsharded model. Raises
    UnsupportedError for ZeRO stages 1 and 2. With tensor parallelism also for a model, such as one
    with adapters, whose configuration alone does not give its sizes."""
    spec, stage = sharded_model.spec, sharded_model.sharded.stage
    if stage not in (Stage.ZERO_0, Stage.ZERO_3):
        raise UnsupportedError(
            f"schedule: 'auto' plans for stages zero-0 and zero-3, but the model was sharded by "
            f"{stage}; give a schedule, such as that of farspan.plan(..., layout=...)"
        )
    sizes, dtype = [(spec.parameters, spec.trainable)], str(model.dtype).removeprefix("torch.")
    blank = inspect_blank(CausalLMStages(model), dtype, device, 0, kernels, sizes)
    if sharded_model.tensor is not None and blank.profiles and blank.profiles.rank(0) is None:
        raise UnsupportedError(
            "schedule: 'auto' needs a model with whole weights, but tensor parallelism has cut "
            "these; give a schedule, such as that of farspan.plan(..., layout=...), or use ulysses"
        )
    return _merge_work(blank, spec)


def _merge_work(inspected: InspectedModel, spec: ModelSpec) -> InspectedModel:
    """Return `inspected` with model `spec`, but each layer's FLOP and bytes as profiled."""
    assert inspected.profile is not None, "it has been profiled"
    pairs = zip(spec.layers, inspected.profile.spec.layers, strict=True)
    # Only the model knows which weights are packed, and their bytes.
    layers = tuple(
        replace(layer, work=replace(known.work, packed=layer.work.packed)) for layer, known in pairs
    )
    return replace(inspected, model=replace(spec, layers=layers))


def inspect_blank(
    stages: CausalLMStages,
    dtype: str,
    device: torch.device,
    rank: int,
    kernels: Kernels,
    sizes: list[tuple[int, int]] | None = None,
) -> InspectedModel:
    """Describe a model for the planner without its weights, by the profile of its configuration. If
    that does not have these `sizes` (see `_sizes`; None: the model's totals), profile the model
    itself."""
    model = stages.model
    name, parameters = model.config.name_or_path or type(model).__name__, list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    sizes = sizes or [(sum(map(elements, parameters)), trained)]
    fused = kernels.fused and fused_for(device, stages.dtype)
    adds = kernels.accumulate and kernels.products is None and adds_products(device, stages.dtype)
    packed = any(map(is_packed, model.modules()))
    variant = Variant(dtype, rank, fused, adds, nf4=packed, remakes=kernels.remake)
    profiles = profiles_of(model.config.to_dict(), name, measuring=measuring)
    profile = profiles.of(variant)
    if _sizes(profile.spec)[-len(sizes) :] != sizes:  # such as other adapters, or a custom class
        profiles = profiles_of_model(model, name)
        profile = profiles.of(replace(variant, rank=None))
    return InspectedModel(profile.spec, profiles, profile)


def _sizes(spec: ModelSpec) -> list[tuple[int, int]]:
    """Return (elements, trained elements) of each layer and, last, of the whole model."""
    of_layers = [(layer.work.parameters, layer.work.trainable) for layer in spec.layers]
    return [*of_layers, (spec.parameters, spec.trainable)]


def host_share(run: RunConfig, world: DistributedContext) -> int | None:
    """Return one rank's share of the main memory that the run file allows the ranks of a node."""
    limit = run.host_bytes()
    return None if limit is None else limit // world.local_size


@dataclass(frozen=True, slots=True)
class ReferenceModel:
    """A second model, which is not trained, and is sharded like the trained one."""

    model: Any  # a PreTrainedModel
    sharded_model: ShardedModel | None
    weights: StreamedWeights | None
    is_other: bool  # a teacher, another model than the trained one

    def held_bytes(self) -> int:
        """Return the bytes of the reference model's weights on this rank."""
        if self.sharded_model is None:
            return sum(map(held_bytes, self.model.parameters()))
        return sum(local(p).nbytes for p in self.sharded_model.sharded.parameters().values())


@dataclass(frozen=True, slots=True)
class RunContext:
    """Everything that a run computes with: run file, ranks, data, models, optimizer, and plan."""

    run: RunConfig
    components: Components
    world: DistributedContext
    model: Any  # a PreTrainedModel
    optimizer: TrainingOptimizer
    corpus: Corpus
    tokenizer: Tokenizer
    memory: DeviceMemory
    placed: Placed
    pieces: ShardedUpdate | None  # if the model is sharded over ranks
    parameters: int  # elements of all parameters before sharding
    trainable: int  # elements of the trained parameters before sharding
    inspected: InspectedModel | None  # if the planner chooses
    frozen: str | None  # digest of the frozen weights; None: all weights are trained
    weights: StreamedWeights | None = None  # of a model that lives whole in main memory
    reference: "ReferenceModel | None" = None  # teacher, or reference of the loss
    index: Index | None = None  # for page selection of sparse attention
    outside: int = 0  # resident bytes of the process before its weights

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def lives(self) -> Tier:
        """Tier that holds the weights between steps."""
        return self.run.schedule.weights or Tier.DEVICE

    @property
    def sharded_model(self) -> ShardedModel | None:
        """The sharded model; None if every rank has the whole model."""
        return None if self.pieces is None else self.pieces.sharded_model

    def make_step(self, schedule: Schedule) -> Step:
        step = self._make_step(self.model, schedule, self.sharded_model, self.weights)
        step.host_room = self.host_room()
        return step

    def make_reference(self, step: Step) -> Any:
        """Return an engine for the reference model, with the schedule and the memory of `step`."""
        second, main = self.reference, cast(Any, step)
        assert second is not None, "the loss has a reference"
        # One layer per group: a teacher has other groups, and a forward needs no larger ones.
        schedule = replace(main.schedule, groups=1) if second.is_other else main.schedule
        engine: Any = self._make_step(second.model, schedule, second.sharded_model, second.weights)
        engine.memory = main.memory
        return engine

    def _make_step(
        self,
        model: Any,
        schedule: Schedule,
        sharded_model: ShardedModel | None,
        weights: StreamedWeights | None,
    ) -> Step:
        # Only values that differ from the defaults: other engines need not know these options.
        how: dict[str, Any] = {}
        if self.run.kernels != Kernels():
            how["kernels"] = self.run.kernels
        alpha = self.run.neftune_alpha
        if alpha or any(True for _ in drawing_dropouts(self.model)):
            how |= {"seed": self.run.seed, "neftune_alpha": alpha}
        if self.run.objective.router_z and model is self.model:
            how["router_z"] = self.run.objective.router_z
        selector = selector_for(self.run.sparse, schedule, self.run.context, self.index)
        if selector is not None:
            how["selector"] = selector
        if weights is not None:
            how["weights"] = weights
        if self.world.ranks is not None:
            how["ranks"] = sharded_model or self.world.ranks
        return self.components.make_step(model, schedule, **how)

    def describe(self) -> ModelSpec:
        sharded = self.sharded_model
        if sharded is None:
            stages = CausalLMStages(self.model)
            fuse(stages, self.run.kernels, self.device)
            spec = describe(stages, self.device)
        else:
            spec = sharded.spec
        return spec if self.weights is None else self.weights.counted(spec)

    def held_bytes(self) -> int:
        """Return the bytes of weights, AdamW states and the index of sparse attention on the
        device; on a CPU, where both tiers are main memory, those in both."""
        held, both = self.optimizer.held(), self.device.type == "cpu"
        weights = self._weights() if both or self.lives is Tier.DEVICE else 0
        return weights + held.device + (held.host if both else 0) + self._index_bytes()

    def held_parts(self) -> dict[str, int]:
        """Return the parts of `held_bytes` by name: weights, optimizer and index."""
        parts = {"optimizer": self._held_states(), "index": self._index_bytes()}
        return {"weights": self.held_bytes() - sum(parts.values()), **parts}

    def _index_bytes(self) -> int:
        return 0 if self.index is None else self.index.nbytes(torch_dtype(self.run))

    def _held_states(self) -> int:
        held = self.optimizer.held()
        return held.device + (held.host if self.device.type == "cpu" else 0)

    def gradient_bytes(self) -> int:
        """Return the bytes of all `.grad` tensors on the device."""
        gradients = (p.grad for p in self.optimizer.parameters.values())
        shards = (local(g) for g in gradients if g is not None)
        return sum(g.nbytes for g in shards if g.device.type == self.device.type)

    def touched_bytes(self) -> StateBytes:
        """Return the bytes of weights and states whose memory is in use: the operating system
        provides zeroed memory only at the first write."""
        held = self.optimizer.held()
        if self.device.type == "cpu":
            written = held.device + held.host - held.untouched
            return StateBytes(self._weights() + written, 0, 0)
        if self.lives is Tier.HOST:
            return StateBytes(held.device, self._weights() + held.host, 0)
        return StateBytes(self._weights() + held.device, held.host, 0)

    def host_room(self) -> int | None:
        """Return the bytes of main memory that this process may take for a step under the run
        file's limit, or None without a limit."""
        share, held = host_share(self.run, self.world), self.touched_bytes()
        if share is None:
            return None
        return share - (held.device if self.device.type == "cpu" else held.host)

    def saver(self) -> Saver:
        tensors = self.optimizer.tensors()
        if self.pieces is None:
            return Saver(entries_of(model_tensors(self.model), tensors), self.world)
        pieces = self.pieces
        own = {name: weight.detach() for name, weight in pieces.trained.items()}
        entries = entries_of({**own, **buffers_of(self.model)}, tensors, pieces.places)
        gather = partial(gather_model, pieces.sharded_model, self.model)
        return Saver(entries, self.world, gather)

    def _weights(self) -> int:
        if self.pieces is None:
            size = sum(map(held_bytes, self.model.parameters()))
        else:
            size = self.pieces.held_bytes()
        # A plan counts a reference as large as the model, even if a teacher is larger.
        return size if self.reference is None else size + min(size, self.reference.held_bytes())
