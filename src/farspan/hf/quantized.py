"""Weights in fewer bits than they compute in, which stay frozen while adapters are trained: how a
model is loaded with such, which formats train, and what a packed weight stands for.

bitsandbytes packs a weight [outer, inner] into uint8 [n, 1], two elements a byte; what unpacks it
hangs on the parameter as `quant_state`. So neither shape nor dtype of the parameter are the
weight's, and its bytes are not all: this module alone knows.
"""

import copy
import hashlib
from collections.abc import Callable, Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PretrainedConfig
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AutoHfQuantizer

from farspan.durable import read_json
from farspan.lazy import load
from farspan.spec import UnsupportedError

MISSING = (
    "model.quantize: needs bitsandbytes and accelerate, which cannot be imported here ({error}); "
    'pip install "farspan[quantize]", or leave model.quantize out'
)
WHOLE = (
    "model.lora: missing, and weights that are quantised cannot be trained themselves; give "
    "model.lora, such as rank: 16, for adapters beside them, or {instead}"
)
# Formats without gradients, as their checkpoints name them; beside what transformers says itself.
UNTRAINED = ("mxfp4", "nvfp4")


BITSANDBYTES = "bitsandbytes"  # the format whose weights are unpacked, copied and moved here


def format_of(config: PretrainedConfig) -> dict[str, Any] | None:
    """What a model's configuration says of the quantisation of its weights; None: there is none."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    return dict(found) if isinstance(found, dict) else dict(found.to_dict())


def refuse_untrainable(config: PretrainedConfig, path: str) -> None:
    """Raises UnsupportedError for weights in a format through which transformers has no
    gradients."""
    given = format_of(config)
    if given is None:
        return
    method = str(given.get("quant_method"))
    named = next((name for name in UNTRAINED if name in str(given).lower()), None)
    try:
        if named is None and AutoHfQuantizer.from_config(copy.deepcopy(given)).is_trainable:
            return
    except ImportError as error:
        raise UnsupportedError(
            f"model.path: the weights of {path} are quantised ({method}), and what reads them "
            f"cannot be imported here: {error}; install it"
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise UnsupportedError(
            f"model.path: transformers does not know the quantised weights of {path} ({method}): "
            f"{error}; give a plain checkpoint of the model"
        ) from error
    raise UnsupportedError(
        f"model.path: the weights of {path} are quantised as {(named or method).upper()}, which "
        "transformers cannot train through: it has no backward for such weights; give a plain "
        "(bfloat16) checkpoint of the model, with model.quantize: nf4 for as few bytes"
    )


def refuse_whole(config: PretrainedConfig) -> None:
    """Raises UnsupportedError for quantised weights that are to be trained themselves."""
    if format_of(config) is not None:
        raise UnsupportedError(WHOLE.format(instead="a plain checkpoint as model.path"))


def arguments(config: PretrainedConfig, nf4: bool, dtype: torch.dtype, device: Any) -> Any:
    """What `from_pretrained` is given for weights that are, or are to be, quantised. A folder that
    is quantised is taken as it is. Raises UnsupportedError."""
    already = format_of(config)
    if already is None and not nf4:
        return {}
    if already is None or already.get("quant_method") == BITSANDBYTES:
        try:
            load("bitsandbytes.nn", "Linear4bit"), load("accelerate", "init_empty_weights")
        except ImportError as error:
            raise UnsupportedError(MISSING.format(error=error)) from error
    # Without a device transformers takes the GPU that is there.
    found: dict[str, Any] = {"device_map": {"": torch.device(device)}}
    if already is None:
        found["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    return found


def settle(model: nn.Module, dtype: torch.dtype) -> None:
    """Has products with packed weights run in this dtype, and the weights stay as they are packed:
    bitsandbytes 0.50 packs them anew on some CPUs for a module that evaluates, and its gradients
    are gone from then on."""
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if is_packed(module):
            module.compute_dtype, module.compute_type_is_set = dtype, True
            module.support_avx512bf16_for_cpu = False


def is_packed(module: nn.Module) -> bool:
    """Whether it is a linear module of four bits an element; peft's around one has its weight, too,
    but as a property."""
    return _state(module._parameters.get("weight")) is not None


def linear_widths(layer: nn.Module) -> list[tuple[int, int]]:
    """Inner and outer width of each linear module of a layer that is, or could be, packed: of all
    but adapters."""
    found: list[tuple[int, int]] = []
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and ".lora_" not in name:
            outer, inner = shape_of(module.weight)
            found.append((inner, outer))
    return found


def shape_of(weight: Tensor) -> torch.Size:
    """Of what a weight stands for: [outer, inner]."""
    state = _state(weight)
    return weight.shape if state is None else torch.Size(state.shape)


def elements(weight: Tensor) -> int:
    """That a weight stands for."""
    return prod(shape_of(weight))


def parts_of(weight: Tensor) -> list[Tensor]:
    """What is held for a weight: itself, and of a packed one the scales of its blocks, their own
    scales and the tables of both."""
    state = _state(weight)
    if state is None:
        return [weight]
    inner = [] if state.state2 is None else [state.offset, state.state2.absmax, state.state2.code]
    return [weight, state.absmax, state.code, *inner]


def put_parts(weight: nn.Parameter, parts: Sequence[Tensor]) -> None:
    """Have a weight be held in these tensors, which are what `parts_of` gives in other places."""
    weight.data, *rest = parts
    state = _state(weight)
    if state is not None:
        state.absmax, state.code = rest[:2]
        if state.state2 is not None:
            state.offset, state.state2.absmax, state.state2.code = rest[2:]


def empty_parts(weight: nn.Parameter, device: torch.device) -> list[Tensor]:
    """In the places of its parts, tensors without numbers."""
    return [torch.empty(0, dtype=part.dtype, device=device) for part in parts_of(weight)]


def empty_like(weight: nn.Parameter, device: torch.device) -> nn.Parameter:
    """A parameter of the same kind on a device, whose parts are yet to be put."""
    empty = empty_parts(weight, device)
    state = copy.copy(_state(weight))
    if state is None:
        return nn.Parameter(empty[0], weight.requires_grad)
    state.state2 = copy.copy(state.state2)
    kind: Any = type(weight)
    made: nn.Parameter = kind(empty[0], **{**vars(weight), "quant_state": state})
    put_parts(made, empty)
    return made


def copied(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a module on a device. bitsandbytes 0.50 copies all of the memory in which packed
    weights lie, which is that of every layer where they are streamed."""
    memo: dict[int, Any] = {}
    for weight in module.parameters():
        if _state(weight) is not None:
            made: Any = empty_like(weight, device)
            parts = parts_of(weight)
            there = [torch.empty(x.shape, dtype=x.dtype, device=device).copy_(x) for x in parts]
            put_parts(made, there)
            memo |= {id(weight): made, id(_state(weight)): made.quant_state}
    return copy.deepcopy(module, memo).to(device)


def is_known(weight: nn.Parameter) -> bool:
    """Whether its parts are all that there is of it."""
    return type(weight) is nn.Parameter or _state(weight) is not None


def state_bytes(weight: Tensor) -> int:
    """That are held for a weight beside its own."""
    return sum(part.nbytes for part in parts_of(weight)[1:])


def held_bytes(weight: Tensor) -> int:
    """Of all that is held for a weight."""
    return weight.nbytes + state_bytes(weight)


def is_quantized(model: nn.Module) -> bool:
    """Whether some weights are no numbers to compute with."""
    return any(not p.is_floating_point() for p in model.parameters())


def plain_linears(model: nn.Module, weight: Callable[[Any], Tensor]) -> dict[int, Any]:
    """By the ids of linear modules with packed weights, plain ones with what `weight` gives for
    such a module: what `deepcopy` puts in their places."""
    found: dict[int, Any] = {}
    for module in model.modules():
        if not is_packed(module):
            continue
        inside: Any = module
        made = nn.Linear(inside.in_features, inside.out_features, bias=False, device="meta")
        made.weight = nn.Parameter(weight(module), requires_grad=False)
        bias = inside.bias
        if bias is not None:
            bias = nn.Parameter(bias.detach().to(made.weight.device, copy=True), bias.requires_grad)
        made.bias = bias
        found[id(module)] = made.train(module.training)
    return found


def unpacked(model: nn.Module, dtype: torch.dtype) -> Any:
    """A copy of a model in another dtype, in which the numbers that packed weights stand for are
    weights of plain linear modules: the same function. Raises UnsupportedError for packed weights
    of another kind."""
    twin: Any = copy.deepcopy(model, plain_linears(model, _dequantized))
    for name, parameter in twin.named_parameters():
        if not parameter.is_floating_point():
            raise UnsupportedError(
                f"model: {name} is packed in {parameter.dtype}, and what it stands for is known of "
                "bitsandbytes' four-bit weights alone; give the model with such, or a plain one"
            )
    return nn.Module.to(twin, dtype)  # transformers' own refuses, as if it were packed still


def _dequantized(module: Any) -> Tensor:
    unpack = load("bitsandbytes.functional", "dequantize_4bit")
    found: Tensor = unpack(module.weight.data, module.weight.quant_state)
    return found


def frozen_digest(model: nn.Module) -> str | None:
    """Of all weights that are not trained, which checkpoints leave out; None where all are."""
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    if not frozen:
        return None
    read = (
        (name, torch.hash_tensor(part.detach()).view(torch.int64).item())
        for name, p in sorted(frozen.items())
        for part in parts_of(p)
    )
    return hashlib.sha256(repr(list(read)).encode()).hexdigest()


def is_quantized_folder(path: str | None) -> bool:
    """Whether a local folder says that its weights are quantised."""
    config = (
        None if path is None else read_json(Path(path).expanduser() / "config.json", finite=False)
    )
    return bool(config and config.get("quantization_config"))


def _state(weight: Any) -> Any:
    return getattr(weight, "quant_state", None)
