"""AdamW for a run: the learning rate, the gradient's norm, and where its states go."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from farspan.distributed.context import ParallelContext
from farspan.distributed.fsdp import (
    ShardPlacement,
    Stage,
    gradient_dtype,
    local,
    placement_along,
    square_norm,
)
from farspan.distributed.tensor_plan import ParameterCut
from farspan.engine.parallelize import WHOLE, ShardedModel
from farspan.memory.host import available_host_bytes
from farspan.planner.request import Fit
from farspan.program.layout import AXES, part
from farspan.spec import MachineSpec
from farspan.train.config import Decay, OptimizerConfig, StatesPlace
from farspan.train.optimizer_states import (
    LOW_PRECISION,
    DeviceStates,
    EightBitStates,
    HostStates,
    OptimizerStates,
    Parameters,
    Rule,
    StateBytes,
)

STATES_KEY = "states"  # their place in about.json

WHERE = {
    StatesPlace.DEVICE: "on the device",
    StatesPlace.HOST: "in main memory, updated there",
    StatesPlace.EIGHT_BIT: "on the device, moments of 8 bits: other results than AdamW's",
}


def learning_rate(config: OptimizerConfig, steps: int) -> Callable[[int], float]:
    """Of each update (from 0) of `steps`: rises over the warm-up, and falls at the end to `final`
    of `lr`, as a half cosine or in a line."""
    falls, floor = config.falls_over(steps), config.lr * config.final

    def of(step: int) -> float:
        if step < config.warmup:
            return config.lr * (step + 1) / config.warmup
        if step < steps - falls:
            return config.lr
        done = (step + 1 - (steps - falls)) / falls
        if config.decay is Decay.COSINE:
            return floor + (config.lr - floor) * 0.5 * (1.0 + math.cos(math.pi * done))
        return floor + (config.lr - floor) * (1.0 - done)

    return of


def decays(model: nn.Module) -> dict[str, bool]:
    """Whether weight decay applies to each trainable parameter: to matrices, and neither to
    norms and biases nor to embeddings, tied to the head or not."""
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    return {
        name: parameter.ndim >= 2
        and id(parameter) not in embeddings
        and not name.rsplit(".", 1)[-1].endswith("bias")
        for name, parameter in trainable(model)
    }


def trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that are updated, each once, under the first of its names."""
    return ((n, p) for n, p in model.named_parameters() if p.requires_grad)


@dataclass(frozen=True, slots=True)
class ShardedUpdate:
    """AdamW is elementwise: what all ranks make of their pieces is what one makes of the whole.

    Invariant: a piece's `.grad`, where it has one, is the piece of the weight's.
    """

    sharded_model: ShardedModel
    trained: Parameters  # by the names of the model; no weights of other pipeline stages
    pieces: Parameters  # the frozen ones too
    places: dict[str, ShardPlacement]  # of the pieces, in the whole
    counted: frozenset[str]  # those whose gradient this rank counts: of several that hold it, one

    def take(self) -> None:
        """Gradients of the weights become those of the pieces."""
        for name, own in self.sharded_model.sharded.parameters().items():
            piece = self.pieces[name]
            if piece is not own:
                piece.grad = None if own.grad is None else local(own.grad)

    def clear(self) -> None:
        """Drops all gradients."""
        for name, own in self.sharded_model.sharded.parameters().items():
            own.grad = self.pieces[name].grad = None

    def widen(self) -> None:
        """Weights take gradients in the dtype in which their pieces do."""
        for name, own in self.sharded_model.sharded.parameters().items():
            wanted = gradient_dtype(self.pieces[name])
            if wanted != gradient_dtype(own):
                own.grad_dtype = wanted

    def norm(self) -> Tensor:
        """L2 norm of the gradient of the whole model, the same bits on every rank; fp32, or float64
        of a float64 model."""
        ranks = self.sharded_model.ranks
        gradients = [p.grad for n, p in self.trained.items() if n in self.counted]
        square = square_norm((g for g in gradients if g is not None), ranks.device)
        peers = ranks.among(*AXES)
        total = peers.gather(square[None], [1] * peers.size).sum()  # in the order of ranks
        wide = torch.float64 if self.sharded_model.dtype == torch.float64 else torch.float32
        return total.sqrt().to(wide)

    def held_bytes(self) -> int:
        """Of this rank's weights between steps."""
        return sum(piece.nbytes for piece in self.pieces.values())


def sharded_parameters(sharded_model: ShardedModel) -> ShardedUpdate:
    sharded = sharded_model.sharded
    pieces = {name: _piece(own) for name, own in sharded.parameters().items()}
    trained = {name: piece for name, piece in pieces.items() if piece.requires_grad}
    outer = sharded.whole(sharded.outer).keys()
    counted = frozenset(
        name for name in trained if _counts(sharded_model, name, outer=name in outer)
    )
    return ShardedUpdate(
        sharded_model, trained, pieces, sharded.places(_slices(sharded_model)), counted
    )


def _piece(own: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(local(own), own.requires_grad) if isinstance(own, DTensor) else own


def _counts(sharded_model: ShardedModel, name: str, *, outer: bool) -> bool:
    tensor = sharded_model.tensor
    if tensor is not None and not tensor.is_cut(name) and tensor.peers.index > 0:
        return False
    holders = sharded_model.ranks.among(*WHOLE, *("pipeline",) * outer)
    return sharded_model.sharded.stage is not Stage.ZERO_0 or holders.index == 0


def _slices(sharded_model: ShardedModel) -> dict[str, ShardPlacement]:
    """Where this rank's slices of the weights that are cut over `tensor` lie."""
    tensor = sharded_model.tensor
    if tensor is None:
        return {}

    def place(cut: ParameterCut) -> ShardPlacement:
        ranges, start = [], 0
        for size in cut.parts:
            ranges.append(part((start, start + size), tensor.peers.index, tensor.peers.size))
            start += size
        return placement_along(cut.shape, cut.dim, ranges)

    return {name: place(cut) for name, cut in tensor.plan.cuts.items()}


class TrainingOptimizer:
    """Updates the trainable parameters of a model from their `.grad`.

    `config.states` says where the states are; `auto`, which is decided before, stands for the
    device here. Of a model that is sharded over ranks, each updates its pieces.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        pieces: ShardedUpdate | None = None,
        ranks: ParallelContext | None = None,
        room: int | None = None,
    ) -> None:
        """Takes the memory of all states; `room` is of main memory, where nothing else of this
        process's is counted yet. Raises UnsupportedError, TooLarge."""
        self._config = config
        self._pieces = pieces
        self.parameters: dict[str, nn.Parameter] = dict(
            trainable(model) if pieces is None else pieces.trained
        )
        kinds: dict[StatesPlace, Callable[[Parameters, Rule], OptimizerStates]] = {
            StatesPlace.HOST: partial(HostStates, ranks=ranks, room=room),
            StatesPlace.EIGHT_BIT: EightBitStates,
        }
        make = kinds.get(config.states, DeviceStates)
        self._states = make(self.parameters, Rule(config, decays(model)))
        if pieces is not None:
            pieces.widen()

    def tensors(self) -> dict[str, Tensor]:
        """Everything that changes besides the parameters, live: restored by copying into it."""
        return self._states.tensors()

    def held(self) -> StateBytes:
        """Bytes of the states."""
        return self._states.held()

    def clear(self) -> None:
        """Drops all gradients."""
        if self._pieces is not None:
            self._pieces.clear()
        for parameter in self.parameters.values():
            parameter.grad = None

    def gradient_norm(self) -> Tensor:
        """L2 norm of all gradients together, a scalar in fp32 or better; not finite if one of
        them is not. Of a model that is sharded over ranks, all of them ask for it before an update.
        """
        if self._pieces is not None:
            self._pieces.take()
            return self._pieces.norm()
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if all(gradient.dtype not in LOW_PRECISION for gradient in gradients):
            return torch.nn.utils.get_total_norm(gradients)
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
        return torch.linalg.vector_norm(torch.stack(norms))

    def step(self, lr: float, norm: Tensor) -> None:
        """One update from the gradients, whose norm is `norm`, and drops them."""
        if self._config.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), self._config.clip, norm)
        self._states.update(lr)
        self.clear()


@dataclass(frozen=True, slots=True)
class Placed:
    """A place that is not `auto`, and why."""

    states: StatesPlace
    reason: str

    def describe(self) -> str:
        """For the opening lines."""
        return f"{WHERE[self.states]} ({self.reason})"


BESIDE_WEIGHTS = Placed(StatesPlace.DEVICE, "both tiers lie in main memory")


def choose_place(fit: Callable[[StatesPlace], Fit], before: str | None) -> Placed:
    """The device if a step fits beside them and leaves the margin, else the host if it
    fits better there. States that were on the host stay there, so that a run goes on to the same
    bits. Never 8 bits: that is not AdamW."""
    if before == StatesPlace.HOST:
        return Placed(StatesPlace.HOST, "as before")
    beside = fit(StatesPlace.DEVICE)
    if beside is Fit.ROOMY:
        return Placed(StatesPlace.DEVICE, "they fit beside the step")
    if fit(StatesPlace.HOST) > beside:
        tightly = " but tightly" if beside is Fit.TIGHT else ""
        why = f"by the plan they do not fit beside the step on the device{tightly}"
        return Placed(StatesPlace.HOST, why)
    if beside is Fit.TIGHT:
        return Placed(StatesPlace.DEVICE, "they fit beside the step, but tightly")
    return Placed(StatesPlace.DEVICE, "the plan finds room for the step nowhere")


def bare_machine(device: torch.device) -> MachineSpec:
    """A GPU and its main memory by their bytes alone, for whoever does not ask for time."""
    free, total = torch.cuda.mem_get_info(device)
    rate = float("inf")
    return MachineSpec(
        name=torch.cuda.get_device_name(device),
        devices=1,
        device_bytes=total,
        host_bytes=available_host_bytes(),
        rates={},
        memory=rate,
        fetch=rate,
        evict=rate,
        fetch_together=rate,
        evict_together=rate,
        host_memory=rate,
        peer=rate,
        network=rate,
        latency=0.0,
        overhead=0.0,
        reserve=total - free - torch.cuda.memory_reserved(device),
    )
