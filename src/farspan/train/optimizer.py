"""AdamW for a run: the learning rate, the update, and the states, which lie on the device, in 8
bits, in main memory or on a drive.

`ResidentStates` keeps fp32 masters and moments on the device, next to the weights.

`EightBitStates` keeps moments of one byte per element, by torchao (arXiv 2110.02861), and its
results differ from AdamW's: after each update a moment is rounded to one of 256 values, relative to
the largest in its block of 256; a moment of fewer than 4,096 elements, or of a number that 256 does
not divide, keeps the parameter's dtype. Weights have no master: bfloat16 ones are rounded
stochastically, by the device's generator in torch, so that small updates count on average.

States that are updated in main memory are in `farspan.train.staged_states`. If weights live there,
too, a thread may update them while the next step begins, in the order in which the step needs them:

    update   (norm) outside | layer 0 | layer 1 | layer 2
    fetch                     outside  layer 0 | layer 1 | layer 2
    compute                                      layer 0 | layer 1 | layer 2
"""

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from farspan.distributed.context import ParallelContext
from farspan.engine.parallelize import ShardedUpdate
from farspan.engine.streamed_weights import StreamedWeights
from farspan.lazy import load
from farspan.spec import Tier, UnsupportedError
from farspan.train.config import Decay, OptimizerConfig, StatesPlace
from farspan.train.staged_states import (
    LOW_PRECISION,
    DiskStates,
    HostStates,
    Parameters,
    Rule,
    StateBytes,
    is_low,
    widen_gradient,
)


class OptimizerStates(Protocol):
    """Interface of AdamW's states in one format and one place.

    The constructor sets each parameter's `grad_dtype` to the dtype that `update` needs in `.grad`.
    """

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors other than parameters that a checkpoint saves and restores."""

    def held(self) -> StateBytes:
        """Return the bytes of the states, including step counters."""

    def update(self, lr: float) -> None:
        """Update every parameter that has a `.grad`. On CUDA the update is ordered before later
        work on the compute stream."""


class ResidentStates:
    """AdamW states on the device. Invariant: a 16-bit parameter is its rounded fp32 master copy."""

    def __init__(self, parameters: Parameters, rule: Rule) -> None:
        self._parameters = parameters
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
        # AdamW makes its state at the first step; made here, its format never changes.
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
        size = sum(tensor.nbytes for tensor in everything.values())
        return StateBytes(size, 0, 0 if began else zeros)

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
EIGHT_BIT_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # whether values have a sign
# Parts of a moment of one byte per element: uint8, fp32 per block, 256 values.
EIGHT_BIT_PARTS = ("codes", "scale", "qmap")


def load_adamw() -> Any:
    """Return torchao's 8-bit AdamW class. Raises UnsupportedError if torchao is not installed."""
    try:
        return load("torchao.optim", "AdamW8bit")
    except ImportError as error:
        raise UnsupportedError(NO_TORCHAO.format(error=error)) from error


class EightBitStates:
    """AdamW states in 8 bits, by torchao. `.grad` has the parameters' dtype: a bfloat16 gradient is
    rounded once, after the chunks of its layer were summed in fp32."""

    def __init__(self, parameters: Parameters, rule: Rule) -> None:
        """Allocate all states. Raises UnsupportedError if torchao is not installed."""
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
        """Return a parameter's first AdamW state, all zeros, as torchao's own step would make it.
        Uses the private `_new_buffer(parameter, signed)`, for lack of a public function: one byte
        per element, or the parameter's dtype if it is small or no multiple of 256."""
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


# -- the update ----------------------------------------------------------------------------------


def learning_rate(config: OptimizerConfig, steps: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the update (from 0): it rises over the warm-up and
    falls at the end of `steps` to `final` times `lr`, as a half cosine or linearly."""
    falls, floor = config.falls_over(steps), config.lr * config.final

    def rate(step: int) -> float:
        if step < config.warmup:
            return config.lr * (step + 1) / config.warmup
        if step < steps - falls:
            return config.lr
        done = (step + 1 - (steps - falls)) / falls
        if config.decay is Decay.COSINE:
            return floor + (config.lr - floor) * 0.5 * (1.0 + math.cos(math.pi * done))
        return floor + (config.lr - floor) * (1.0 - done)

    return rate


def decays(model: nn.Module) -> dict[str, bool]:
    """Return, for each trainable parameter by name, whether weight decay applies: to matrices, but
    not to norms, biases and embeddings, whether tied to the head or not."""
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
    """Yield the trainable parameters, each once: tied ones under their first name."""
    return ((n, p) for n, p in model.named_parameters() if p.requires_grad)


class TrainingOptimizer:
    """AdamW over a model's trainable parameters, which reads gradients from `.grad`.

    `config.states` is the place of the states; `auto`, which the run replaces earlier, means the
    device here. If the model is sharded, each rank updates its part of each parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        pieces: ShardedUpdate | None = None,
        ranks: ParallelContext | None = None,
        room: int | None = None,
        streamed: StreamedWeights | None = None,
    ) -> None:
        """Allocate all states; those in main memory may take at most `room` bytes in this process
        (None: no limit). `streamed` holds the model's weights if they and their gradients are in
        main memory, else None. Raises UnsupportedError, TooLarge."""
        self._config = config
        self._pieces = pieces
        self._streamed = streamed
        self._thread: ThreadPoolExecutor | None = None
        self._updating: Future[None] | None = None  # the latest update on the thread
        self._is_left = False
        self.parameters: dict[str, nn.Parameter] = dict(
            trainable(model) if pieces is None else pieces.trained
        )
        shards = pieces is not None and pieces.sharded_model.sharded.offload
        weights = Tier.DEVICE if streamed is None and not shards else Tier.HOST
        kinds: dict[StatesPlace, Callable[[Parameters, Rule], OptimizerStates]] = {
            StatesPlace.HOST: partial(HostStates, ranks=ranks, room=room, weights=weights),
            StatesPlace.DISK: partial(DiskStates, ranks=ranks, room=room, weights=weights),
            StatesPlace.EIGHT_BIT: EightBitStates,
        }
        make = kinds.get(config.states, ResidentStates)
        self._states = make(self._in_order(), Rule(config, decays(model)))
        if streamed is not None and isinstance(self._states, HostStates):
            alone = ranks is None or ranks.layout.devices() == 1
            usual = streamed.device.type == "cuda" and alone
            overlap = usual if config.overlap is None else config.overlap
            self._thread = ThreadPoolExecutor(1, "farspan-update") if overlap else None
        if pieces is not None:
            pieces.widen()

    def _in_order(self) -> dict[str, nn.Parameter]:
        """Return the parameters in the order in which a step needs them."""
        if self._streamed is None:
            return self.parameters
        every = (id(p) for unit in self._streamed.trained() for p in unit)
        places = {parameter: place for place, parameter in enumerate(every)}
        return dict(sorted(self.parameters.items(), key=lambda pair: places[id(pair[1])]))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors other than parameters that a checkpoint saves and restores."""
        return self._states.tensors()

    def settle(self) -> None:
        """Wait until the latest update has ended. Raises the exception of an update that failed;
        every later update raises it again."""
        if self._updating is not None:
            self._updating.result()

    def abandon(self) -> None:
        """Stop the running update after its current parameter, so that the process need not wait
        for the whole update at exit. Parameters and states are unusable afterwards."""
        self._is_left = True

    def held(self) -> StateBytes:
        return self._states.held()

    def drive(self) -> str:
        """Return a description of the drive that holds the states, or "" if no drive does."""
        return self._states.describe() if isinstance(self._states, DiskStates) else ""

    def clear(self) -> None:
        self.settle()
        if self._pieces is not None:
            self._pieces.clear()
        for parameter in self.parameters.values():
            parameter.grad = None

    def gradient_norm(self) -> Tensor:
        """Return the L2 norm of all gradients, a scalar in fp32 or fp64; not finite if a gradient
        is not. All ranks of a sharded model call this before an update."""
        if self._pieces is not None:
            self._pieces.take()
            return self._pieces.norm()
        known = {} if self._streamed is None else self._streamed.norms()
        having = [p for p in self.parameters.values() if p.grad is not None]
        if having and all(id(p) in known for p in having):
            return torch.linalg.vector_norm(torch.stack([known[id(p)] for p in having]))
        gradients = [p.grad for p in having if p.grad is not None]
        if all(gradient.dtype not in LOW_PRECISION for gradient in gradients):
            return torch.nn.utils.get_total_norm(gradients)
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
        return torch.linalg.vector_norm(torch.stack(norms))

    def step(self, lr: float, norm: Tensor) -> None:
        """Clip the gradients, whose norm is `norm`, update the parameters, drop the gradients. A
        thread may do so during the next step: call `settle` before reading weights or states."""
        if self._thread is not None:
            self._update_on_thread(self._thread, lr, norm)
            return
        self._clip(self.parameters.values(), norm)
        self._states.update(lr)
        self.clear()

    def _clip(self, parameters: Iterable[nn.Parameter], norm: Tensor) -> None:
        if self._config.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, self._config.clip, norm)

    def _update_on_thread(self, thread: ThreadPoolExecutor, lr: float, norm: Tensor) -> None:
        """Start the update on a thread; the next step waits for the weights of each layer."""
        self.settle()
        norm = norm.cpu()  # now: the thread would wait for all later work of the device
        assert self._streamed is not None
        assert isinstance(self._states, HostStates)
        units = [[id(p) for p in unit if p.grad is not None] for unit in self._streamed.trained()]
        done = [Future[None]() for _ in units]
        last = {unit[-1]: future for unit, future in zip(units, done, strict=True) if unit}
        for unit, future in zip(units, done, strict=True):
            if not unit:
                future.set_result(None)
        states = self._states

        def begins(parameter: nn.Parameter) -> None:
            if self._is_left:
                raise RuntimeError("the run ended while its weights were updated")
            self._clip([parameter], norm)

        def ends(parameter: nn.Parameter) -> None:
            parameter.grad = None
            if id(parameter) in last:
                last[id(parameter)].set_result(None)

        def update() -> None:
            try:
                states.update(lr, begins, ends)
                for future in done:  # no callback comes for parameters without elements
                    if not future.done():
                        future.set_result(None)
            except BaseException as error:
                for future in done:
                    if not future.done():
                        future.set_exception(error)
                raise

        self._updating = thread.submit(update)
        self._streamed.await_update(done)
