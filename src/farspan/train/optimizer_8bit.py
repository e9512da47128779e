"""AdamW with moments of one byte an element, by torchao (arXiv 2110.02861).

Another rule than AdamW's: after each update a moment is rounded to one of 256 values, relative to
the largest of its 256 neighbours; a moment of fewer than 4,096 elements, or of a number that 256
does not divide, keeps the parameter's dtype. Weights have no master: bfloat16 ones are rounded
stochastically, by torch's generator of the device, so that small updates count on average.
"""

from typing import Any

import torch
from torch import Tensor

from farspan.lazy import load
from farspan.spec import Refused
from farspan.train.optimizer_parts import Held, Parameters, Rule

MISSING = (
    "optimizer.states: 8bit needs torchao, which cannot be imported here ({error}); pip install "
    "'farspan[8bit]', or set states to auto, device or host"
)
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # and whether its values have a sign
PARTS = ("codes", "scale", "qmap")  # of a moment of one byte: uint8, fp32 a block, 256 values


def load_adamw() -> Any:
    """torchao's class. Raises Refused where it is not installed."""
    try:
        return load("torchao.optim", "AdamW8bit")
    except ImportError as error:
        raise Refused(MISSING.format(error=error)) from error


class EightBitStates:
    """`.grad` has the parameters' dtype: in bfloat16 it is rounded once, when its layers' chunks
    have been added up in fp32."""

    def __init__(self, parameters: Parameters, rule: Rule) -> None:
        """Raises Refused without torchao."""
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
        made = {key: self._adam._new_buffer(parameter, sign) for key, sign in MOMENTS.items()}
        return {"step": torch.tensor(0.0), **made}

    def tensors(self) -> dict[str, Tensor]:
        live: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            for key, value in self._adam.state[parameter].items():
                if hasattr(value, PARTS[0]):
                    live |= {f"{key}.{part}/{name}": getattr(value, part) for part in PARTS}
                else:
                    live[f"{key}/{name}"] = value
        return live

    def held(self) -> Held:
        everything = self.tensors()
        began = any(float(value) > 0 for name, value in everything.items() if name[:5] == "step/")
        size = sum(tensor.nbytes for tensor in everything.values())
        return Held(size, 0, 0 if began else size)

    def update(self, lr: float) -> None:
        for group in self._adam.param_groups:
            group["lr"].fill_(lr)
        self._adam.step()
