"""AdamW on fp32 master weights, with everything that a checkpoint must hold named and in place."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from farspan.train.config import Decay, OptimizerConfig

# Below 32 bits, adding a small update to a weight may change nothing at all.
LOW_PRECISION = (torch.bfloat16, torch.float16)


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

    A bfloat16 or float16 parameter has an fp32 master here, and its `.grad` is set to accumulate
    in fp32. Invariant: such a parameter equals its master rounded.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        self._config = config
        self.parameters: dict[str, nn.Parameter] = dict(trainable(model))
        self._masters: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            if parameter.dtype in LOW_PRECISION:
                parameter.grad_dtype = torch.float32
                self._masters[name] = parameter.detach().to(torch.float32, copy=True)
        self._adam = self._make_adam(decays(model))

    def _weight(self, name: str) -> Tensor:
        return self._masters.get(name, self.parameters[name])

    def _make_adam(self, decay: dict[str, bool]) -> torch.optim.AdamW:
        config = self._config
        names = {chosen: [n for n in decay if decay[n] is chosen] for chosen in (True, False)}
        groups = [
            {
                "params": [self._weight(n) for n in names[chosen]],
                "weight_decay": config.weight_decay if chosen else 0.0,
            }
            for chosen in (True, False)
        ]
        adam = torch.optim.AdamW(groups, config.lr, config.betas, config.eps, fused=True)
        # AdamW makes its state at the first step; made now, it has one form from the start.
        for name in decay:
            weight = self._weight(name)
            adam.state[weight] = {
                "step": torch.zeros((), dtype=torch.float32, device=weight.device),
                "exp_avg": torch.zeros_like(weight),
                "exp_avg_sq": torch.zeros_like(weight),
            }
        return adam

    def tensors(self) -> dict[str, Tensor]:
        """Everything that changes besides the parameters, live: restored by copying into it."""
        live = {f"master/{name}": master for name, master in self._masters.items()}
        for name in self.parameters:
            for key, value in self._adam.state[self._weight(name)].items():
                live[f"{key}/{name}"] = value
        return live

    def clear(self) -> None:
        """Drops all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def gradient_norm(self) -> Tensor:
        """L2 norm of all gradients together, a scalar in fp32 or better; not finite if one of
        them is not."""
        return torch.nn.utils.get_total_norm(
            [p.grad for p in self.parameters.values() if p.grad is not None]
        )

    def step(self, lr: float, norm: Tensor) -> None:
        """One update from the gradients, whose norm is `norm`, and drops them."""
        if self._config.clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), self._config.clip, norm)
        for name, master in self._masters.items():
            master.grad = self.parameters[name].grad
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        with torch.no_grad():
            for name, master in self._masters.items():
                self.parameters[name].copy_(master)
                master.grad = None
        self.clear()
