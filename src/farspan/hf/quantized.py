"""Load, copy and unpack frozen quantized weights, next to which adapters are trained.

bitsandbytes packs a weight [outer, inner] into uint8 [n, 1], two elements a byte; the scales that
unpack it are in the parameter's `quant_state`. So the parameter has neither the weight's shape nor
its dtype, and not all of its bytes: only this module knows that.
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
    "model.lora: missing, but quantised weights cannot be trained; give model.lora, such as rank: "
    "16, to train adapters, or {instead}"
)
# Formats without gradients, by the names in checkpoints; transformers itself refuses others.
UNTRAINED = ("mxfp4", "nvfp4")


BITSANDBYTES = "bitsandbytes"  # the format whose weights are unpacked, copied and moved here


def format_of(config: PretrainedConfig) -> dict[str, Any] | None:
    """Return the quantization section of a model's configuration, None without one."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    return dict(found) if isinstance(found, dict) else dict(found.to_dict())


def refuse_untrainable(config: PretrainedConfig, path: str) -> None:
    """Raise UnsupportedError for a format of weights through which transformers has no backward."""
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
            f"model.path: the weights of {path} are quantised ({method}), and the package that "
            f"reads them cannot be imported here: {error}; install it"
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise UnsupportedError(
            f"model.path: transformers does not know the quantised weights of {path} ({method}): "
            f"{error}; give a plain checkpoint of the model"
        ) from error
    raise UnsupportedError(
        f"model.path: the weights of {path} are quantised as {(named or method).upper()}, which "
        "transformers cannot train through: it has no backward for such weights; give a plain "
        "(bfloat16) checkpoint of the model, with model.quantize: nf4 to take as few bytes"
    )


def refuse_whole(config: PretrainedConfig) -> None:
    """Raise UnsupportedError if quantized weights are to be trained without adapters."""
    if format_of(config) is not None:
        raise UnsupportedError(WHOLE.format(instead="a plain checkpoint as model.path"))


def arguments(config: PretrainedConfig, nf4: bool, dtype: torch.dtype, device: Any) -> Any:
    """Return the arguments of `from_pretrained` for quantized weights. A quantized folder keeps its
    format; with `nf4` plain weights are packed. Raises UnsupportedError without bitsandbytes."""
    already = format_of(config)
    if already is None and not nf4:
        return {}
    if already is None or already.get("quant_method") == BITSANDBYTES:
        try:
            load("bitsandbytes.nn", "Linear4bit"), load("accelerate", "init_empty_weights")
        except ImportError as error:
            raise UnsupportedError(MISSING.format(error=error)) from error
    # Without a device transformers takes the present GPU.
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
    """Set the dtype in which packed weights are multiplied, and keep bitsandbytes 0.50 from
    repacking them, as it does on some CPUs in eval mode: repacked weights pass no gradients."""
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if is_packed(module):
            module.compute_dtype, module.compute_type_is_set = dtype, True
            module.support_avx512bf16_for_cpu = False


def is_packed(module: nn.Module) -> bool:
    """Return whether a module is linear with 4-bit weights. (peft's wrapper of such a module is
    not: its weight is a property.)"""
    return _state(module._parameters.get("weight")) is not None


def linear_widths(layer: nn.Module) -> list[tuple[int, int]]:
    """Return (input width, output width) of each linear module in a layer that is packed or could
    be: all but adapters."""
    found: list[tuple[int, int]] = []
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and ".lora_" not in name:
            outer, inner = shape_of(module.weight)
            found.append((inner, outer))
    return found


def shape_of(weight: Tensor) -> torch.Size:
    """Return the shape of a weight when unpacked, [outer, inner]."""
    state = _state(weight)
    return weight.shape if state is None else torch.Size(state.shape)


def elements(weight: Tensor) -> int:
    """Return the number of elements of a weight when unpacked."""
    return prod(shape_of(weight))


def parts_of(weight: Tensor) -> list[Tensor]:
    """Return the tensors that make up a weight: the weight itself and, if it is packed, the scales
    of its blocks, the scales' own scales and both code tables."""
    state = _state(weight)
    if state is None:
        return [weight]
    inner = [] if state.state2 is None else [state.offset, state.state2.absmax, state.state2.code]
    return [weight, state.absmax, state.code, *inner]


def put_parts(weight: nn.Parameter, parts: Sequence[Tensor]) -> None:
    """Replace the tensors of a weight by `parts`, in the order of `parts_of`."""
    weight.data, *rest = parts
    state = _state(weight)
    if state is not None:
        state.absmax, state.code = rest[:2]
        if state.state2 is not None:
            state.offset, state.state2.absmax, state.state2.code = rest[2:]


def empty_parts(weight: nn.Parameter, device: torch.device) -> list[Tensor]:
    """Return a tensor without elements for each tensor of a weight (`parts_of`)."""
    return [torch.empty(0, dtype=part.dtype, device=device) for part in parts_of(weight)]


def empty_like(weight: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return a parameter of a weight's class on a device, whose tensors have no elements."""
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
    """Return a copy of a module on a device, without packed weights of other modules: bitsandbytes
    0.50 would copy all memory around a packed weight, that of every layer if they are streamed."""
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
    """Return whether `parts_of` gives all tensors of this weight."""
    return type(weight) is nn.Parameter or _state(weight) is not None


def state_bytes(weight: Tensor) -> int:
    """Return the bytes of a packed weight's other tensors, such as scales; 0 for plain weights."""
    return sum(part.nbytes for part in parts_of(weight)[1:])


def held_bytes(weight: Tensor) -> int:
    """Return the bytes of all tensors that make up a weight."""
    return weight.nbytes + state_bytes(weight)


def is_quantized(model: nn.Module) -> bool:
    """Return whether some of the model's weights are packed, that is, stored as integers."""
    return any(not p.is_floating_point() for p in model.parameters())


def plain_linears(model: nn.Module, weight: Callable[[Any], Tensor]) -> dict[int, Any]:
    """Return a memo by which `deepcopy` replaces packed (4-bit) linear modules by plain ones in the
    copy. `weight` returns the plain weight of a packed module."""
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
    """Return a copy of a model, in another dtype, with plain linear modules for packed (4-bit)
    ones. Raises UnsupportedError for weights packed in another format."""
    twin: Any = copy.deepcopy(model, plain_linears(model, _dequantized))
    for name, parameter in twin.named_parameters():
        if not parameter.is_floating_point():
            raise UnsupportedError(
                f"model: {name} is packed in {parameter.dtype}, and farspan unpacks only "
                "bitsandbytes' four-bit weights; give a model with such weights, or with plain ones"
            )
    return nn.Module.to(twin, dtype)  # transformers' own `to` refuses, as if it were still packed


def _dequantized(module: Any) -> Tensor:
    unpack = load("bitsandbytes.functional", "dequantize_4bit")
    found: Tensor = unpack(module.weight.data, module.weight.quant_state)
    return found


def frozen_digest(model: nn.Module) -> str | None:
    """Return a hash of all frozen weights, which checkpoints leave out; None without any."""
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
    """Return whether a local folder's config.json has a quantization_config."""
    config = (
        None if path is None else read_json(Path(path).expanduser() / "config.json", finite=False)
    )
    return bool(config and config.get("quantization_config"))


def _state(weight: Any) -> Any:
    return getattr(weight, "quant_state", None)
