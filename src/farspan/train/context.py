"""What a run computes with: components, context, batches, the model as the planner sees it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from farspan.data.corpus import Corpus
from farspan.data.formats import UNTRAINED
from farspan.data.packing import PackedBatch
from farspan.data.tokenizers import Tokenizer
from farspan.distributed.run_context import DistributedContext
from farspan.engine.calibrate import calibrate, here
from farspan.engine.gradients import adds_products
from farspan.engine.loss import trained_token_count
from farspan.engine.parallelize import ShardedModel
from farspan.engine.step import Step
from farspan.hf.describe import describe, with_work
from farspan.hf.fused_layers import fuse
from farspan.hf.load import load_model
from farspan.hf.stages import CausalLMStages
from farspan.kernels.launch import fused_for
from farspan.plan.cell.describe import model_spec
from farspan.plan.model.architecture import Architecture
from farspan.plan.model.families import architecture_from
from farspan.plan.price.evaluate import evaluate
from farspan.plan.price.machines import user_file
from farspan.plan.question import Plan, Question
from farspan.plan.search.plans import best_plan
from farspan.plan.strategies import AUTO, strategy
from farspan.sparse.engine import Seen
from farspan.spec import Kernels, MachineSpec, ModelSpec, Refused, Schedule
from farspan.train.config import DeviceAllocator, RunConfig
from farspan.train.memory import (
    DeviceMemory,
    Expected,
    choose_allocator,
    expect_memory,
    rehearse_apart,
)
from farspan.train.optimizer import BESIDE_WEIGHTS, Placed, ShardedParameters, TrainingOptimizer
from farspan.train.optimizer_states import StateBytes


def torch_dtype(run: RunConfig) -> torch.dtype:
    """Of its parameters and activations."""
    found: torch.dtype = getattr(torch, run.model.dtype.value)
    return found


def _host_share(run: RunConfig, crew: DistributedContext) -> int | None:
    """Of what the run file allows the ranks of a node, one rank's."""
    limit = run.host_bytes()
    return None if limit is None else limit // crew.near


@dataclass(frozen=True, slots=True)
class RunContext:
    """What a run computes with."""

    model: Any  # a PreTrainedModel
    optimizer: TrainingOptimizer
    corpus: Corpus
    tokenizer: Tokenizer
    device: torch.device
    count_trained: Callable[[Tensor, Tensor | None], int]
    memory: DeviceMemory = field(default_factory=DeviceMemory)
    placed: Placed = BESIDE_WEIGHTS
    crew: DistributedContext = field(
        default_factory=lambda: DistributedContext(torch.device("cpu"))
    )
    pieces: ShardedParameters | None = None  # of a model that is dealt over ranks
    elements: tuple[int, int] = (0, 0)  # of all parameters, and of the trainable ones
    looked: InspectedModel | None = None  # where the planner is asked
    frozen: str | None = None  # digest of the weights that are not trained, where some are not

    @property
    def dealt(self) -> ShardedModel | None:
        return None if self.pieces is None else self.pieces.dealt

    def held_bytes(self) -> int:
        """Weights and optimizer states on the device; on a CPU both tiers are that."""
        held = self.optimizer.held()
        return self._weights() + held.device + (held.host if self.device.type == "cpu" else 0)

    def touched_bytes(self) -> StateBytes:
        """What is held and has been written: memory of zeros is taken from the machine then."""
        held = self.optimizer.held()
        if self.device.type == "cpu":
            written = held.device + held.host - held.untouched
            return StateBytes(self._weights() + written, 0, 0)
        return StateBytes(self._weights() + held.device, held.host, 0)

    def host_room(self, run: RunConfig) -> int | None:
        """Bytes of main memory that the run file leaves to a step of this process; None: all that
        there are."""
        share, held = _host_share(run, self.crew), self.touched_bytes()
        if share is None:
            return None
        return share - (held.device if self.device.type == "cpu" else held.host)

    def _weights(self) -> int:
        if self.pieces is not None:
            return self.pieces.held_bytes()
        return sum(parameter.nbytes for parameter in self.model.parameters())


class CellsDone(Protocol):
    """How far a step has come. `work` is proportional to expected time."""

    @property
    def cells_done(self) -> int: ...
    @property
    def cells(self) -> int: ...
    @property
    def work_done(self) -> float: ...
    @property
    def work(self) -> float: ...


class StepLike(Protocol):
    """Forward and backward over a batch; gradients are added to `.grad`."""

    progress: Callable[[Any], None] | None
    host_room: int | None  # bytes of main memory that it may take; None: as many as there are

    @property
    def seen(self) -> Seen | None: ...  # by the latest step's watched cell; None: all is dense

    def __call__(
        self,
        input_ids: Tensor,
        labels: Tensor,
        document_ids: Tensor | None = None,
        *,
        trained_tokens: int | None = None,
    ) -> Tensor: ...

    def evaluate(
        self,
        input_ids: Tensor,
        labels: Tensor,
        document_ids: Tensor | None = None,
        *,
        trained_tokens: int | None = None,
    ) -> Tensor: ...

    def release(self) -> None:
        """Gives back the memory that is kept between steps."""


def machine_of(
    device: torch.device, dtype: torch.dtype, progress: Callable[[str], None]
) -> MachineSpec:
    """The machine at hand with this device: as its file has it, else measured now, quickly, in the
    one dtype that is asked for."""
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    if device.type == usual and user_file().is_file():
        return here(progress)
    return calibrate(device, [dtype], progress, quick=True).spec


def remembered(
    machine: Callable[[torch.device, torch.dtype, Callable[[str], None]], MachineSpec],
) -> Callable[[torch.device, torch.dtype, Callable[[str], None]], MachineSpec]:
    """`machine`, measured once for a device and a dtype, by whoever asks first."""
    known: dict[tuple[torch.device, torch.dtype], MachineSpec] = {}

    def ask(
        device: torch.device, dtype: torch.dtype, progress: Callable[[str], None]
    ) -> MachineSpec:
        if (device, dtype) not in known:
            known[device, dtype] = machine(device, dtype, progress)
        return known[device, dtype]

    return ask


@dataclass(frozen=True, slots=True)
class Parts:
    """The model's loader, the engine, the strategies and the planner; by default farspan's own."""

    # path, config, dtype, overrides, seed, device, trust_remote_code -> a model
    load_model: Callable[..., Any] = load_model
    make_step: Callable[..., StepLike] = (
        Step  # model, schedule, kernels and selector where any is named
    )
    strategy: Callable[[str, int, int], Schedule] = strategy  # name, layers, tokens
    count_trained: Callable[[Tensor, Tensor | None], int] = trained_token_count
    # step, batch, tokens, the optimizer's bytes, called after each cell, whether gradients are
    # there before -> bytes, or Refused
    expect_memory: Callable[[Any, int, int, StateBytes, Callable[[Any], None], bool], Expected] = (
        expect_memory
    )
    # step, batch, tokens, called after each cell, whether gradients are there before; of several
    # ranks, before they expect memory together
    rehearse_apart: Callable[[Any, int, int, Callable[[Any], None], bool], None] = rehearse_apart
    choose_allocator: Callable[[DeviceAllocator, torch.device], DeviceMemory] = choose_allocator
    # For strategy auto.
    machine: Callable[[torch.device, torch.dtype, Callable[[str], None]], MachineSpec] = machine_of
    best_plan: Callable[[Question], Plan] = best_plan
    evaluate: Callable[[Question, str, Schedule], Plan] = evaluate

    def schedule_of(self, run: RunConfig, model: Any) -> Schedule:
        """The schedule of a strategy by name, or of fields alone, as the run wants it; the
        default where the planner chooses."""
        return self.schedule_for(run, model.config.get_text_config().num_hidden_layers)

    def schedule_for(self, run: RunConfig, layers: int) -> Schedule:
        """The same of a model that has so many layers."""
        base, named = Schedule(), run.schedule.strategy
        if named is not None and named != AUTO:
            base = self.strategy(named, layers, run.context)
        return run.schedule.apply(base).with_sparse(run.pages())


@dataclass(frozen=True, slots=True)
class Micro:
    """One batch on the device and how many of its tokens have a target."""

    batch: PackedBatch
    indices: tuple[int, ...]
    input_ids: Tensor  # [batch, tokens] int64
    labels: Tensor  # the same, or UNTRAINED
    document_ids: Tensor  # [batch, tokens] int64
    trained: int

    def describe(self) -> list[dict[str, Any]]:
        """Its sequences and their documents, for diagnosis.json."""
        return [
            {"sequence": index, "documents": list(names)}
            for index, names in zip(self.indices, self.batch.names, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches of a run. Batch n of D replicas is sequences [n * D * batch, (n + 1) * D * batch)
    of the run's order, dealt in order: the update reads what one replica reads with a batch of
    D * batch."""

    run: RunConfig
    use: RunContext
    crew: DistributedContext

    def of_step(self, step: int) -> list[Micro]:
        """This replica's, of the update after `step` of them."""
        count = self.run.accumulate
        return [self._micro(step * count + place) for place in range(count)]

    def held_out(self) -> list[Micro]:
        """This replica's share of those to evaluate on, spread over all that are held out: one long
        document does not stand for the rest. Every replica has as many; what is missing has no
        trained token."""
        packing, replicas = self.use.corpus.held_out, self.crew.replicas
        assert packing is not None, "there is something to evaluate on"
        there = packing.sequences_per_epoch()
        count = min(self.run.evaluation.sequences, there)
        chosen = [place * there // count for place in range(count)]
        own = chosen[self.crew.replica :: replicas]
        found = [self._place(packing.once(i), (i,)) for i in own]
        for _ in range(-(-count // replicas) - len(own)):
            spare = self._place(packing.once(chosen[-1]), (chosen[-1],))
            labels = torch.full_like(spare.labels, UNTRAINED)
            found.append(replace(spare, labels=labels, trained=0))
        return found

    def trained(self, micros: list[Micro]) -> int:
        """Trained tokens of these and of the other replicas'."""
        return self.crew.total(sum(m.trained for m in micros))

    def read(self, micros: list[Micro]) -> int:
        """Tokens of documents in these and in the other replicas'."""
        return self.crew.total(sum(m.batch.tokens for m in micros))

    def _micro(self, number: int) -> Micro:
        """Batch `number` since the start of the run."""
        size = self.run.batch
        start = (number * self.crew.replicas + self.crew.replica) * size
        indices = tuple(range(start, start + size))
        return self._place(self.use.corpus.train.batch(indices), indices)

    def _place(self, batch: PackedBatch, indices: tuple[int, ...]) -> Micro:
        input_ids = torch.from_numpy(batch.input_ids).to(self.use.device)
        labels = torch.from_numpy(batch.labels).to(self.use.device)
        document_ids = torch.from_numpy(batch.document_ids).to(self.use.device)
        trained = self.use.count_trained(labels, document_ids)
        return Micro(batch, indices, input_ids, labels, document_ids, trained)


@dataclass(frozen=True, slots=True)
class InspectedModel:
    """What was found. A family that is not known has no architecture."""

    model: ModelSpec
    architecture: Architecture | None


def inspect_model(
    model: nn.Module,
    dtype: str,
    device: torch.device,
    rank: int = 0,
    kernels: Kernels | None = None,
) -> InspectedModel:
    """The model as it is, with the work of its layers: as its family is known to do it, otherwise
    estimated from its weights. `device` is where its cells will run, and `rank` that
    of adapters on every linear module of the layers, 0 where there are others or none. `kernels`
    are those of the run."""
    boundary, kernels = CausalLMStages(model), kernels or Kernels()
    fuse(boundary, kernels, device)
    fused = kernels.fused and fused_for(device, boundary.dtype)
    adds = kernels.accumulate and adds_products(device, boundary.dtype)
    spec = with_work(boundary, describe(boundary, device))
    try:
        architecture = architecture_from(boundary.model.config)
        architecture = replace(architecture, adapter_rank=rank, fused=fused, adds=adds)
        known = [layer.work for layer in model_spec(architecture, dtype).layers]
    except Refused:
        architecture, known = None, []
    layers, as_known = [], True
    for index, layer in enumerate(spec.layers):
        guess = layer.work
        work = known[index] if len(known) == len(spec.layers) else guess
        if work.parameters != guess.parameters:  # such as adapters, or a family of its own making
            work = guess
        as_known = as_known and work.trainable == guess.trainable and work is not guess
        layers.append(replace(layer, work=replace(work, trainable=guess.trainable)))
    # What an architecture's cells hold is that of a model that is trained as a whole, or whose
    # adapters are where it has them.
    return InspectedModel(replace(spec, layers=tuple(layers)), architecture if as_known else None)
