"""A stand-in for torchao's AdamW8bit: what farspan asks of it, with moments in linear int8."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK = 256
LEAST = 4096  # elements of a moment that has one byte each


@dataclass
class Moment:
    """One byte an element and a scale a block."""

    codes: Tensor
    scale: Tensor
    qmap: Tensor

    def read(self) -> Tensor:
        blocks = self.qmap[self.codes.int()].view(-1, BLOCK) * self.scale[:, None]
        return blocks.view(self.codes.shape)

    def write(self, value: Tensor) -> None:
        blocks = value.reshape(-1, BLOCK)
        self.scale.copy_(blocks.abs().amax(-1).clamp_min(1e-12))
        shares = (blocks / self.scale[:, None]).reshape(self.codes.shape)
        self.codes.copy_(torch.bucketize(shares, self.qmap).clamp_max(len(self.qmap) - 1))


def write(moment: Any, value: Tensor) -> None:
    if isinstance(moment, Moment):
        moment.write(value)
    else:
        moment.copy_(value)


class AdamW8bit(torch.optim.Optimizer):
    """Signature, state and rates as in torchao 0.18."""

    def __init__(
        self, params: Any, lr: float, betas: Any, eps: float, *, bf16_stochastic_round: bool = False
    ) -> None:
        super().__init__(params, {"lr": torch.tensor(lr), "betas": betas, "eps": eps})
        self.stochastic = bf16_stochastic_round

    def _new_buffer(self, p: Tensor, signed: bool) -> Any:
        if p.numel() < LEAST or p.numel() % BLOCK:
            return torch.zeros_like(p)
        values = torch.linspace(-1.0 if signed else 0.0, 1.0, 256)
        codes = torch.zeros(p.shape, dtype=torch.uint8)
        return Moment(codes, torch.zeros(p.numel() // BLOCK), values)

    @torch.no_grad()
    def step(self, _: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert isinstance(group["lr"], Tensor), "a rate that is replaced is refused"
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[p], p.grad
        assert gradient is not None
        state["step"] += 1
        read = [m.read() if isinstance(m, Moment) else m.float() for m in list(state.values())[1:]]
        first = read[0].lerp(gradient.float(), 1 - group["betas"][0])
        second = read[1].lerp(gradient.float() ** 2, 1 - group["betas"][1])
        write(state["exp_avg"], first)
        write(state["exp_avg_sq"], second)
        change = first / (second.sqrt() + group["eps"])
        weight = p.float() * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * change
        if self.stochastic and p.dtype is torch.bfloat16:
            weight = weight + torch.rand(weight.shape) * weight.abs() * 2**-9
        p.copy_(weight)
