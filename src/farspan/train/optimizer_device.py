"""AdamW's states on the device: fp32 masters and moments beside the weights."""

import torch
from torch import Tensor, nn

from farspan.train.optimizer_parts import Held, Parameters, Rule, is_low, widen_gradient


class DeviceStates:
    """Invariant: a bfloat16 or float16 parameter equals its fp32 master rounded."""

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

    def held(self) -> Held:
        everything = self.tensors()
        began = any(float(value) > 0 for name, value in everything.items() if name[:5] == "step/")
        zeros = sum(t.nbytes for name, t in everything.items() if name[:7] != "master/")
        return Held(
            device=sum(tensor.nbytes for tensor in everything.values()),
            host=0,
            untouched=0 if began else zeros,
        )

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
