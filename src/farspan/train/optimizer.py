"""AdamW, its states where the run wants them, with everything that a checkpoint must hold named
and in place."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from farspan.distributed.context import ParallelContext
from farspan.train.config import Decay, OptimizerConfig, StatesPlace
from farspan.train.dealt_weights import Pieces
from farspan.train.optimizer_8bit import EightBitStates
from farspan.train.optimizer_device import DeviceStates
from farspan.train.optimizer_host import HostStates
from farspan.train.optimizer_parts import LOW_PRECISION, Held, Parameters, Rule, States


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Of update `step` (from 0) of `steps`: rises over the warm-up, then cosine or constant."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.decay is Decay.CONSTANT:
        return config.lr
    done = (step + 1 - config.warmup) / (steps - config.warmup)
    floor = config.lr * config.final
    return floor + (config.lr - floor) * 0.5 * (1.0 + math.cos(math.pi * done))


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


class Optimizer:
    """Updates the trainable parameters of a model from their `.grad`.

    `config.states` says where the states are; `auto`, which is decided before, stands for the
    device here. Of a model that is dealt over ranks, each updates its pieces.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        pieces: Pieces | None = None,
        ranks: ParallelContext | None = None,
        room: int | None = None,
    ) -> None:
        """Takes the memory of all states; `room` is of main memory, where nothing else of this
        process's is counted yet. Raises Refused, TooLarge."""
        self._config = config
        self._pieces = pieces
        self.parameters: dict[str, nn.Parameter] = dict(
            trainable(model) if pieces is None else pieces.trained
        )
        kinds: dict[StatesPlace, Callable[[Parameters, Rule], States]] = {
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

    def held(self) -> Held:
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
        them is not. Of a model that is dealt over ranks, all of them ask for it before an update.
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
