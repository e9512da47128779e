"""What the places of AdamW's states have in common."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from farspan.train.config import OptimizerConfig

# Below 32 bits, adding a small update to a weight may change nothing at all.
LOW_PRECISION = (torch.bfloat16, torch.float16)

Parameters = Mapping[str, nn.Parameter]


@dataclass(frozen=True, slots=True)
class Held:
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


class States(Protocol):
    """The states of one kind, in one place.

    `.grad` of a parameter has the dtype in which these states take it: whoever makes them has set
    `grad_dtype` accordingly.
    """

    def tensors(self) -> dict[str, Tensor]:
        """Everything that changes besides the parameters, live: restored by copying into it."""

    def held(self) -> Held:
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
