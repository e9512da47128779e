"""Models that have shapes and no weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from farspan.hf.stages import CausalLMStages
from farspan.spec import Refused

LAYERS = ("num_hidden_layers", "n_layer", "num_layers")  # the field's names, the usual one first
EACH_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")  # fields with an entry a layer


def shortened(config: dict[str, Any], layers: int | None) -> dict[str, Any]:
    """The configuration with its first so many layers; None keeps all. Raises Refused."""
    if layers is None:
        return config
    name = next((name for name in LAYERS if name in config), LAYERS[0])
    known = config.get(name, layers)
    if not 1 <= layers <= known:
        raise Refused(f"layers: expected 1 to {known} of this model, got {layers}")
    cut = {field: config[field][:layers] for field in EACH_LAYER if config.get(field)}
    return {**config, **cut, name: layers}


class _NoValues(TorchDispatchMode):
    """Random numbers for the initial weights are not drawn: on the meta device an operation in
    place changes nothing, and 65B elements of them are 720 calls."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if (
            torch.Tag.nondeterministic_seeded in func.tags
            and func.overloadpacket.__name__[-1] == "_"
        ):
            return args[0]
        return func(*args, **(kwargs or {}))


def meta_model(config: dict[str, Any], dtype: torch.dtype, rank: int = 0) -> PreTrainedModel:
    """The causal LM of a configuration on the meta device, in training mode, with adapters of that
    rank if it is not 0. Raises Refused where transformers cannot make it."""
    fields = {name: value for name, value in config.items() if name != "model_type"}
    try:
        with torch.device("meta"), _NoValues():
            made = AutoConfig.for_model(str(config.get("model_type")), **fields)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(made, dtype=dtype)
    except Exception as error:  # whatever a family's own code stumbles over
        raise Refused(
            f"model: transformers cannot make one of this configuration: {type(error).__name__}: "
            f"{error}"
        ) from error
    if rank:
        add_adapters(model, rank)
    return model.train()


# -- adapters ----------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen linear module and its adapter: W x + scale * B(A(x)) (LoRA).

    The operations are those of PEFT's layer for adapters in the model's dtype and no dropout.
    """

    def __init__(self, base: nn.Module, rank: int, sizes: tuple[int, int]) -> None:
        super().__init__()
        weight: Any = base.weight
        inner, outer = sizes
        self.base, self.scale = base, 1.0
        options: dict[str, Any] = {"bias": False, "device": weight.device, "dtype": weight.dtype}
        self.a = nn.Linear(inner, rank, **options)
        self.b = nn.Linear(rank, outer, **options)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        return out + self.b(self.a(x)) * self.scale


def add_adapters(model: PreTrainedModel, rank: int) -> None:
    """Freeze the model, and give every linear module of its layers an adapter."""
    model.requires_grad_(False)
    found = [
        (parent, name, child)
        for layer in CausalLMStages(model).layers
        for parent in layer.modules()
        for name, child in parent.named_children()
    ]
    for parent, name, child in found:
        sizes = _sizes(child)
        if sizes is not None:
            setattr(parent, name, Adapted(child, rank, sizes))


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """Inner and outer width of a linear module."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D":  # transformers' linear with its weight transposed
        weight: Any = module.weight
        return weight.shape[0], weight.shape[1]
    return None


# -- attention ---------------------------------------------------------------------------------


def flash_attention(
    _: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, **keywords: Any
) -> Tensor:
    """The operation that scaled_dot_product_attention comes to on a GPU; [B, C, H, D].

    Windows and soft caps change no size, so they are not handed on. Raises Refused for what flash
    attention cannot do.
    """
    _refuse(q, v, keywords)
    found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)
    out: Tensor = found[0]
    return out.transpose(1, 2)


def cpu_attention(
    _: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, **keywords: Any
) -> Tensor:
    """The same on a CPU, where it really runs."""
    _refuse(q, v, keywords)
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, True, scale=scale
    )
    out: Tensor = found[0]
    return out.transpose(1, 2)


def _refuse(q: Tensor, v: Tensor, keywords: dict[str, Any]) -> None:
    if keywords.get("s_aux") is not None:
        raise Refused("model: its attention has sinks, which torch's flash attention does not")
    if q.shape[-1] != v.shape[-1]:
        raise Refused(
            f"model: its values are {v.shape[-1]} wide and its keys {q.shape[-1]}; flash attention "
            "needs both alike"
        )


@contextmanager
def numbers_unread() -> Iterator[None]:
    """Say clearly what a model without numbers cannot do."""
    try:
        yield
    except (NotImplementedError, RuntimeError, ValueError) as error:
        if isinstance(error, Refused):
            raise
        raise Refused(
            "model: its step looks at numbers (routed experts, positions that change with the "
            f"length), and a trace has none: {type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error
