"""AdamW for a run: the learning rate, the update, and its states, on the device, in 8 bits or in
main memory.

`ResidentStates` keeps fp32 masters and moments beside the weights, on the device, or in main memory
where these live there.

`EightBitStates` keeps moments of one byte an element, by torchao (arXiv 2110.02861), and follows
another rule than AdamW's: after each update a moment is rounded to one of 256 values, relative to
the largest of its 256 neighbours; a moment of fewer than 4,096 elements, or of a number that 256
does not divide, keeps the parameter's dtype. Weights have no master: bfloat16 ones are rounded
stochastically, by torch's generator of the device, so that small updates count on average.

`HostStates` keeps states in main memory, where the update happens. It cuts parameters into pieces
that pass through slots of pinned memory:

    evict   g0   g1   g2   g3           gradients to the host, a slot each
    CPU          u0   u1   u2   u3      fused AdamW on master and moments; the weight rounded
    fetch             w0   w1   w2      new weights back to the device

AdamW is elementwise, so pieces change nothing; on a CPU the bits are those of `ResidentStates`.

Note: [A gradient that has not arrived]. The CPU waits for the event behind a piece's copies before
it reads their slot.
Note: [A weight that has not left]. A slot's weight is written again (by the CPU, or by an evict
where a parameter has no master) only behind the event of the fetch that read it last."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from farspan.attention.backends import accumulate_dtype
from farspan.distributed.context import ParallelContext
from farspan.engine.parallelize import ShardedUpdate
from farspan.engine.tiers import Arena, CopyEngine, refuse_beyond_together
from farspan.lazy import load
from farspan.planner.states import MOMENTS, SLOTS, staged_elements
from farspan.program.dependencies import Lane
from farspan.spec import Tier, UnsupportedError
from farspan.train.config import Decay, OptimizerConfig, StatesPlace

# Below 32 bits, adding a small update to a weight may change nothing at all.
LOW_PRECISION = (torch.bfloat16, torch.float16)

Parameters = Mapping[str, nn.Parameter]


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of an optimizer. On a CPU both tiers lie in main memory."""

    device: int
    host: int
    untouched: int  # of these, zeros that the machine hands out only when they are first written


@dataclass(frozen=True, slots=True)
class Rule:
    """What AdamW does to the parameters, the learning rate aside."""

    config: OptimizerConfig
    decays: Mapping[str, bool]

    def weight_decay(self, name: str) -> float:
        return self.config.weight_decay if self.decays[name] else 0.0

    def groups(self, weights: Mapping[str, Tensor]) -> list[dict[str, object]]:
        """Parameter groups for an optimizer of torch's making."""
        return [
            {
                "params": [weights[name] for name in weights if self.decays[name] is chosen],
                "weight_decay": self.config.weight_decay if chosen else 0.0,
            }
            for chosen in (True, False)
        ]


class OptimizerStates(Protocol):
    """The states of one kind, in one place.

    `.grad` of a parameter has the dtype in which these states take it: whoever makes them has set
    `grad_dtype` accordingly.
    """

    def tensors(self) -> dict[str, Tensor]:
        """Everything that changes besides the parameters, live: restored by copying into it."""

    def held(self) -> StateBytes:
        """What they take, counters included."""

    def update(self, lr: float) -> None:
        """One update of every parameter that has a `.grad`, from it. On CUDA it is ordered before
        whatever the computing stream does next."""


def is_low(parameter: nn.Parameter) -> bool:
    """Whether it has an fp32 master."""
    return parameter.dtype in LOW_PRECISION


def widen_gradient(parameter: nn.Parameter) -> None:
    """Lets `.grad` of a narrow parameter add up in fp32."""
    if is_low(parameter):
        parameter.grad_dtype = torch.float32


def lasting_bytes(parameter: nn.Parameter) -> int:
    """Of its moments, and of a master where it has one."""
    wide = accumulate_dtype(parameter.dtype).itemsize
    return parameter.numel() * wide * (MOMENTS + is_low(parameter))


STATES_THERE = "the optimizer's states in main memory"
ADVICE = (
    "set optimizer.states to device, or to 8bit (other results than AdamW's), or train fewer "
    "parameters"
)


class ResidentStates:
    """Invariant: a bfloat16 or float16 parameter equals its fp32 master rounded."""

    def __init__(
        self, parameters: Parameters, rule: Rule, host: bool = False, room: int | None = None
    ) -> None:
        """`host`: weights, gradients and states are in main memory. Raises TooLarge when it cannot
        hold the states, or they are more than `room` bytes of it."""
        self._parameters, self._host = parameters, host
        if host:
            size = sum(lasting_bytes(p) for p in parameters.values())
            advice = "train fewer parameters (model.lora), or a smaller model"
            refuse_beyond_together(None, size, STATES_THERE, advice, room)
        self._masters: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            widen_gradient(parameter)
            if is_low(parameter):
                self._masters[name] = parameter.detach().to(torch.float32, copy=True)
        self._adam = self._make_adam(rule)

    def _weight(self, name: str) -> Tensor | nn.Parameter:
        return self._masters.get(name, self._parameters[name])

    def _make_adam(self, rule: Rule) -> torch.optim.AdamW:
        config = rule.config
        weights = {name: self._weight(name) for name in self._parameters}
        adam = torch.optim.AdamW(
            rule.groups(weights), config.lr, config.betas, config.eps, fused=True
        )
        # AdamW makes its state at the first step; made now, it has one form from the start.
        for weight in weights.values():
            adam.state[weight] = {
                "step": torch.zeros((), dtype=torch.float32, device=weight.device),
                "exp_avg": torch.zeros_like(weight),
                "exp_avg_sq": torch.zeros_like(weight),
            }
        return adam

    def tensors(self) -> dict[str, Tensor]:
        live = {f"master/{name}": master for name, master in self._masters.items()}
        for name in self._parameters:
            for key, value in self._adam.state[self._weight(name)].items():
                live[f"{key}/{name}"] = value
        return live

    def held(self) -> StateBytes:
        everything = self.tensors()
        began = any(float(value) > 0 for name, value in everything.items() if name[:5] == "step/")
        zeros = sum(t.nbytes for name, t in everything.items() if name[:7] != "master/")
        size, untouched = sum(t.nbytes for t in everything.values()), 0 if began else zeros
        return StateBytes(0, size, untouched) if self._host else StateBytes(size, 0, untouched)

    def update(self, lr: float) -> None:
        for name, master in self._masters.items():
            master.grad = self._parameters[name].grad
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        with torch.no_grad():
            for name, master in self._masters.items():
                self._parameters[name].copy_(master)
                master.grad = None


NO_TORCHAO = (
    "optimizer.states: 8bit needs torchao, which cannot be imported here ({error}); pip install "
    "'farspan[8bit]', or set states to auto, device or host"
)
EIGHT_BIT_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # and whether its values have a sign
EIGHT_BIT_PARTS = (
    "codes",
    "scale",
    "qmap",
)  # of a moment of one byte: uint8, fp32 a block, 256 values


def load_adamw() -> Any:
    """torchao's class. Raises UnsupportedError where it is not installed."""
    try:
        return load("torchao.optim", "AdamW8bit")
    except ImportError as error:
        raise UnsupportedError(NO_TORCHAO.format(error=error)) from error


class EightBitStates:
    """`.grad` has the parameters' dtype: in bfloat16 it is rounded once, when its layers' chunks
    have been added up in fp32."""

    def __init__(self, parameters: Parameters, rule: Rule) -> None:
        """Raises UnsupportedError without torchao."""
        adamw, config = load_adamw(), rule.config
        self._parameters = parameters
        self._adam = adamw(
            rule.groups(parameters),
            config.lr,
            config.betas,
            config.eps,
            bf16_stochastic_round=True,
        )
        for parameter in parameters.values():
            self._adam.state[parameter] = self._zeros(parameter)

    def _zeros(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state as the library makes it at a first step; made now, it has one form from the
        start. The library has no public way to: `_new_buffer(parameter, signed)` answers zeros,
        one byte an element or in the parameter's dtype, by the rule above."""
        made = {
            key: self._adam._new_buffer(parameter, sign) for key, sign in EIGHT_BIT_MOMENTS.items()
        }
        return {"step": torch.tensor(0.0), **made}

    def tensors(self) -> dict[str, Tensor]:
        live: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            for key, value in self._adam.state[parameter].items():
                if hasattr(value, EIGHT_BIT_PARTS[0]):
                    live |= {
                        f"{key}.{part}/{name}": getattr(value, part) for part in EIGHT_BIT_PARTS
                    }
                else:
                    live[f"{key}/{name}"] = value
        return live

    def held(self) -> StateBytes:
        everything = self.tensors()
        began = any(float(value) > 0 for name, value in everything.items() if name[:5] == "step/")
        size = sum(tensor.nbytes for tensor in everything.values())
        return StateBytes(size, 0, 0 if began else size)

    def update(self, lr: float) -> None:
        for group in self._adam.param_groups:
            group["lr"].fill_(lr)
        self._adam.step()


@dataclass(frozen=True, slots=True)
class _ParameterSlice:
    """Elements [start, stop) of a parameter, counted along its memory."""

    name: str
    start: int
    stop: int


@dataclass(slots=True)
class _StagingSlot:
    """Where a piece passes through. Invariant: `sent` is the event of the last copy out of it."""

    gradient: Tensor  # uint8
    weight: Tensor  # uint8
    arrived: Any = None
    sent: Any = None

    def view(self, memory: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        return memory[: count * dtype.itemsize].view(dtype)


class HostStates:
    """Invariant: between updates a bfloat16 or float16 parameter equals its fp32 master rounded,
    and no copy is under way."""

    def __init__(
        self,
        parameters: Parameters,
        rule: Rule,
        copies: CopyEngine | None = None,
        ranks: ParallelContext | None = None,
        room: int | None = None,
    ) -> None:
        """Takes all of its memory now. Raises TooLarge when the host cannot hold it, and what the
        other ranks there take now, or it is more than `room` bytes."""
        for name, parameter in parameters.items():
            if not parameter.is_contiguous():
                raise UnsupportedError(
                    f"optimizer.states: host takes contiguous parameters and {name} has strides "
                    f"{parameter.stride()}; set states to device"
                )
        self._parameters = parameters
        self._rule = rule
        device = next((p.device for p in parameters.values()), torch.device("cpu"))
        self._copies = copies or CopyEngine(device, overlap=device.type == "cuda")
        # In line on CUDA there are no events to wait for before the CPU reads what was evicted.
        assert self._copies.overlap or device.type != "cuda"
        self._arena = Arena(Tier.HOST, device)
        self._states: dict[str, Tensor] = {}
        self._updates = {name: torch.zeros(()) for name in parameters}
        self._staged = staged_elements(sum(p.numel() for p in parameters.values()))
        self._slots = self._lay_out(ranks, room)
        self._began = False
        for name, parameter in parameters.items():
            widen_gradient(parameter)
            if is_low(parameter):
                self._states[f"master/{name}"].copy_(parameter.detach())

    def _lay_out(self, ranks: ParallelContext | None, room: int | None) -> list[_StagingSlot]:
        """Masters and moments, the widest elements first so that each is aligned; then slots."""
        wide = {name: accumulate_dtype(p.dtype) for name, p in self._parameters.items()}
        names = sorted(wide, key=lambda name: -wide[name].itemsize)
        gradient = self._staged * max((dtype.itemsize for dtype in wide.values()), default=0)
        weight = self._staged * max((p.itemsize for p in self._parameters.values()), default=0)
        lasting = sum(lasting_bytes(p) for p in self._parameters.values())
        size = lasting + SLOTS * (gradient + weight)
        refuse_beyond_together(ranks, size, STATES_THERE, ADVICE, room)
        self._arena.reserve(size)
        address = 0
        for name in names:
            parameter = self._parameters[name]
            keys = ("master",) * is_low(parameter) + ("exp_avg", "exp_avg_sq")
            for key in keys:
                view = self._arena.view(address, tuple(parameter.shape), wide[name])
                self._states[f"{key}/{name}"] = view.zero_()
                address += view.nbytes
        gradients = [address + i * gradient for i in range(SLOTS)]
        weights = [address + SLOTS * gradient + i * weight for i in range(SLOTS)]
        return [
            _StagingSlot(
                self._arena.view(of_gradient, (gradient,), torch.uint8),
                self._arena.view(of_weight, (weight,), torch.uint8),
            )
            for of_gradient, of_weight in zip(gradients, weights, strict=True)
        ]

    def tensors(self) -> dict[str, Tensor]:
        return self._states | {f"step/{name}": count for name, count in self._updates.items()}

    def held(self) -> StateBytes:
        counters = sum(count.nbytes for count in self._updates.values())
        slots = sum(slot.gradient.nbytes + slot.weight.nbytes for slot in self._slots)
        pinned = self._copies.device.type == "cuda"
        return StateBytes(0, self._arena.nbytes + counters, 0 if pinned or self._began else slots)

    @torch.no_grad()
    def update(self, lr: float) -> None:
        pieces = list(self._pieces())
        for parameter in self._parameters.values():
            if parameter.grad is not None and not parameter.grad.is_contiguous():
                parameter.grad = parameter.grad.contiguous()
        self._copies.begin()
        try:
            for index in range(len(pieces) + SLOTS - 1):
                if index < len(pieces):
                    self._bring(pieces[index], self._slots[index % SLOTS])
                done = index - SLOTS + 1
                if done >= 0:
                    self._update(pieces[done], self._slots[done % SLOTS], lr)
        finally:
            self._copies.end()
        self._began = True

    def _pieces(self) -> Iterator[_ParameterSlice]:
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._updates[name] += 1
                for start in range(0, parameter.numel(), self._staged):
                    yield _ParameterSlice(name, start, min(start + self._staged, parameter.numel()))

    def _bring(self, piece: _ParameterSlice, slot: _StagingSlot) -> None:
        """Issues the copies to the host. See Note: [A weight that has not left]."""
        parameter = self._parameters[piece.name]
        assert parameter.grad is not None, "a piece is of a parameter with a gradient"
        gradient = _part(parameter.grad, piece)
        self._copies.evict(slot.view(slot.gradient, len(gradient), gradient.dtype), gradient)
        if not is_low(parameter):
            self._copies.wait(Lane.EVICT, slot.sent)
            weight = _part(parameter, piece)
            self._copies.evict(slot.view(slot.weight, len(weight), weight.dtype), weight)
        slot.arrived = self._copies.record(Lane.EVICT)

    def _update(self, piece: _ParameterSlice, slot: _StagingSlot, lr: float) -> None:
        """Updates a piece and issues its way back."""
        config, parameter = self._rule.config, self._parameters[piece.name]
        count = piece.stop - piece.start
        out = slot.view(slot.weight, count, parameter.dtype)
        _await(slot.arrived)  # Note: [A gradient that has not arrived]
        master = self._states.get(f"master/{piece.name}")
        weight = out if master is None else _part(master, piece)
        adamw(
            [weight],
            [slot.view(slot.gradient, count, weight.dtype)],
            [_part(self._states[f"exp_avg/{piece.name}"], piece)],
            [_part(self._states[f"exp_avg_sq/{piece.name}"], piece)],
            [],
            [self._updates[piece.name] - 1],  # a copy: it is counted up for each piece
            fused=True,
            amsgrad=False,
            beta1=config.betas[0],
            beta2=config.betas[1],
            lr=lr,
            weight_decay=self._rule.weight_decay(piece.name),
            eps=config.eps,
            maximize=False,
        )
        if master is not None:
            _await(slot.sent)  # Note: [A weight that has not left]
            out.copy_(weight)
        self._copies.fetch(_part(parameter, piece), out)
        slot.sent = self._copies.record(Lane.FETCH)


def _part(tensor: Tensor | nn.Parameter, piece: _ParameterSlice) -> Tensor:
    return tensor.detach().view(-1)[piece.start : piece.stop]


def _await(event: Any) -> None:
    """The CPU waits; None is of a copy that has happened, or never was."""
    if event is not None:
        event.synchronize()


# -- the update ----------------------------------------------------------------------------------


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
        weights: Tier = Tier.DEVICE,
    ) -> None:
        """Takes the memory of all states; `room` is of main memory, where nothing else of this
        process's is counted yet. `weights` says where the parameters live, with their gradients.
        Raises UnsupportedError, TooLarge."""
        self._config = config
        self._pieces = pieces
        self.parameters: dict[str, nn.Parameter] = dict(
            trainable(model) if pieces is None else pieces.trained
        )
        kinds: dict[StatesPlace, Callable[[Parameters, Rule], OptimizerStates]] = {
            StatesPlace.HOST: partial(HostStates, ranks=ranks, room=room),
            StatesPlace.EIGHT_BIT: EightBitStates,
        }
        if weights is Tier.HOST:  # nothing passes through slots
            kinds[StatesPlace.HOST] = partial(ResidentStates, host=True, room=room)
        make = kinds.get(config.states, ResidentStates)
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
