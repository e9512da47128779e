"""LoRA adapters on the linear modules of a model's layers: the one place that meets peft."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from farspan.lazy import load
from farspan.models.boundary import Boundary
from farspan.spec import Refused

LINEAR = "linear"  # every linear module of the layers
MISSING = (
    "model.lora: needs peft, which cannot be imported here ({error}); "
    'pip install "farspan[lora]", or leave model.lora out'
)


def add_adapters(
    model: Any,
    *,
    rank: int,
    alpha: float,
    targets: str | Sequence[str] = LINEAR,
    seed: int = 0,
    zero: bool = True,
) -> None:
    """Freezes a PreTrainedModel, in place, and makes W x there W x + alpha / rank * B(A(x)).

    A [rank, inner] and B [outer, rank] have the dtype and device of the weight. A is drawn from
    `seed` alone, and B is zero; without `zero` it is drawn too, so that A has a gradient. `targets`
    are last parts of the names of linear modules in the layers. Raises Refused for a name that is
    none or that peft reads otherwise, a rank above every module's narrower side, and where peft is
    not installed.
    """
    try:
        config_type = load("peft", "LoraConfig")
    except ImportError as error:
        raise Refused(MISSING.format(error=error)) from error
    modules = _targeted(_linears(model), targets)
    widest = max(min(module.weight.shape) for module in modules.values())
    if rank > widest:
        raise Refused(
            f"model.lora.rank: {rank} is above {widest}, the narrower side of the largest linear "
            f"module, where an adapter is a whole matrix; give {widest} or less"
        )
    config = config_type(
        r=rank,
        lora_alpha=alpha,
        target_modules=sorted(modules),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in modules.values()),
        init_lora_weights=zero,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model.add_adapter(config)
        except ValueError as error:  # such as of one of two names that it takes for halves of one
            raise Refused(f"model.lora.targets: peft refuses them: {error}") from error
    _check_adapted(model, modules)


def stacked_experts(model: nn.Module) -> bool:
    """Whether weights of experts lie in one tensor, which is no linear module."""
    return any(p.ndim == 3 and "expert" in name for name, p in model.named_parameters())


def frozen_digest(model: nn.Module) -> str | None:
    """Of all weights that are not trained, which checkpoints leave out; None where all are."""
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    if not frozen:
        return None
    read = (
        (name, torch.hash_tensor(p.detach()).view(torch.int64).item())
        for name, p in sorted(frozen.items())
    )
    return hashlib.sha256(repr(list(read)).encode()).hexdigest()


def _linears(model: Any) -> dict[str, Any]:
    """The linear modules of the layers by their names in the model."""
    inside = {id(module) for layer in Boundary(model).layers for module in layer.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and id(module) in inside
    }


def _targeted(linears: dict[str, Any], targets: str | Sequence[str]) -> dict[str, Any]:
    if not linears:
        raise Refused("model.lora: the layers of this model have no linear modules")
    if targets == LINEAR:
        return linears
    wanted = [targets] if isinstance(targets, str) else list(targets)
    for target in wanted:
        if not any(_ends(name, target) for name in linears):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linears}))
            raise Refused(
                f"model.lora.targets: {target!r} is no linear module of the layers; expected "
                f"{LINEAR}, or a list of {known}"
            )
    return {n: m for n, m in linears.items() if any(_ends(n, target) for target in wanted)}


def _check_adapted(model: Any, wanted: dict[str, Any]) -> None:
    """Peft reads names that were those of experts before they were stacked, such as gate_proj, as
    the stacked ones: in dense layers and shared experts too, and when it loads what was saved."""
    found = {name.partition(".lora_A.")[0] for name, _ in model.named_parameters()}
    lost = {name.rpartition(".")[2] for name in wanted.keys() - found}
    if lost:
        left = {name.rpartition(".")[2] for name in wanted} - lost
        instead = f"give {', '.join(sorted(left))}, or some of them" if left else "give others"
        raise Refused(
            f"model.lora.targets: peft takes {', '.join(sorted(lost))} of {type(model).__name__} "
            f"for its stacked experts, which are no linear modules; {instead}"
        )


def _ends(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")
