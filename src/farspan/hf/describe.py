"""Describe a model as the planner sees it: attention, saved bytes and work, layer by layer; also
from its configuration alone, by running its layers on stand-ins for the weights.
"""

import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from farspan.activations import SavedActivations
from farspan.hf.attention_interface import answering, routed
from farspan.hf.dropout import still
from farspan.hf.load import add_adapters, blank_model, config_from_fields
from farspan.hf.probe import TOKENS, ask_layers, probe_layers
from farspan.hf.quantized import copied, elements, held_bytes, shape_of
from farspan.hf.recurrent import RecurrentStates, with_states, zero_states
from farspan.hf.stages import CausalLMStages, is_compiled, run_layer, uncompiled
from farspan.hf.unsupported import refuse_dropout, refuse_model
from farspan.program.layout import ALIGNMENT
from farspan.spec import LayerSpec, LayerWork, ModelSpec, UnsupportedError

SIZES = 4 * TOKENS, 8 * TOKENS  # of cells whose saved tensors are counted
# Scans round their tokens up to 64, or 256 at the most: a token more than a multiple of these is
# the most that a size can take.
SCANNED = 257, 513
BATCHES = 1, 2  # sequences that a scan is measured with


@torch.no_grad()
def describe(stages: CausalLMStages, device: torch.device | None = None) -> ModelSpec:
    """The ModelSpec of a model. Raises UnsupportedError when chunks of it cannot be exact. `device`
    is where its cells will run, if that is not where its weights are: what autograd saves
    differs."""
    return _described(stages, probe_layers, device)


NO_MAIN_MEMORY = "DefaultCPUAllocator"  # how torch's allocator says that it got none


@torch.no_grad()
def describe_unproven(stages: CausalLMStages) -> ModelSpec:
    """The same of a model whose weights have the right shapes and no meaning: that chunks of it are
    exact takes numbers, and is not looked at."""
    return _described(stages, ask_layers, None)


def _described(
    stages: CausalLMStages,
    attention: Callable[[CausalLMStages], list[LayerSpec]],
    device: torch.device | None,
) -> ModelSpec:
    model = stages.model
    # With its number, as parameters have it.
    device = stages.device if device is None else torch.empty(0, device=device).device
    refuse_model(model)
    try:
        with still(model):
            layers = attention(stages)
        with routed(model), still(model):
            layers = _with_activations(stages, layers, device)
    except UnsupportedError:
        raise
    except Exception as error:
        if isinstance(error, MemoryError) or NO_MAIN_MEMORY in str(error):
            raise UnsupportedError(
                f"model: there is not enough main memory to run a layer of {type(model).__name__}; "
                "end other programs, or raise the limit of memory of this process (ulimit -v)"
            ) from error
        raise UnsupportedError(
            f"model: {type(model).__name__} cannot be run stage by stage through the attention "
            f"interface: {_place(model, error)}{type(error).__name__}: {error}"
        ) from error
    parameters = list(model.parameters())
    return ModelSpec(
        name=getattr(model.config, "name_or_path", "") or type(model).__name__,
        hidden=stages.width,
        vocab=stages.vocab,
        layers=tuple(layers),
        element_bytes=stages.dtype.itemsize,
        parameters=sum(map(elements, parameters)),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
    )


def _place(model: nn.Module, error: Exception) -> str:
    """Where in the family's own code, if it came so far."""
    own = getattr(sys.modules[type(model).__module__], "__file__", None)
    frames = traceback.walk_tb(error.__traceback__)
    inside = [f.f_code.co_qualname for f, _ in frames if f.f_code.co_filename == own]
    return f"in its {inside[-1]}, " if inside else ""


def _with_activations(
    stages: CausalLMStages, layers: list[LayerSpec], device: torch.device
) -> list[LayerSpec]:
    """What autograd saves in a cell grows linearly with its tokens: two sizes tell the line."""
    measured: dict[tuple[Any, ...], LayerSpec] = {}
    result = []
    for index, kind in enumerate(zip(stages.kinds(), layers, strict=True)):
        if kind not in measured:
            measured[kind] = _with_line(_Measured(stages, index, layers[index], device))
        result.append(measured[kind])
    return result


@dataclass(frozen=True, slots=True)
class _Measured:
    """A layer, and where its cells will run."""

    stages: CausalLMStages
    index: int
    spec: LayerSpec
    device: torch.device


def _with_line(layer: _Measured) -> LayerSpec:
    """Scans turn their tensors round, which copies them where there are several sequences."""
    batches = BATCHES if layer.spec.state else (1,)
    found = [_line(layer, batch) for batch in batches]
    return replace(
        layer.spec,
        activation_bytes=max(slope for slope, _, _ in found),
        activation_constant=max(constant for _, constant, _ in found),
        saves_input=any(saves_input for _, _, saves_input in found),
    )


def _line(layer: _Measured, batch: int) -> tuple[int, int, bool]:
    """Bytes a token and beside, of each of so many sequences; and whether the input is saved."""
    low, high = SCANNED if layer.spec.state else SIZES
    few, many = (_saved(layer, batch, tokens) for tokens in (low, high))
    slope = -(-(many.bytes - few.bytes) // (batch * (high - low)))
    # Each saved tensor is padded to an alignment line, whatever its size.
    tensors = max(few.tensors, many.tensors)
    constant = max(0, -(-few.bytes // batch) - slope * low) + ALIGNMENT * tensors
    return slope, constant, few.saves_input


@dataclass(frozen=True, slots=True)
class _SavedByTokens:
    bytes: int
    tensors: int
    saves_input: bool


def _saved(measured: _Measured, batch: int, tokens: int) -> _SavedByTokens:
    stages, device = measured.stages, measured.device
    # Few positions, again and again: the model may know no more than the probe's.
    positions = torch.arange(tokens, device=stages.device)[None] % TOKENS
    # Tokens must differ in every direction, or a router would send them to few of its experts.
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(batch, tokens, stages.width, generator=generator)
    hidden = hidden.to(stages.device, stages.dtype)
    call = stages.calls(batch, positions)[measured.index]
    layer = stages.running[measured.index]
    if device != stages.device:
        hidden, call = hidden.to(device), call.map_tensors(lambda x: x.to(device))
        layer = copied(layer, device)
    named = {"x": hidden}

    def attention(_: nn.Module, q: Tensor, k: Tensor, v: Tensor, __: float, **___: Any) -> Tensor:
        named["out"] = _Shape.apply(q, k, v)
        return named["out"].transpose(1, 2)

    if measured.spec.state:
        states = zero_states(measured.spec.state, batch, stages.dtype, device)
        given = RecurrentStates({name: x.requires_grad_() for name, x in states.items()})
        call = with_states(call, given)

    def count() -> _SavedByTokens:
        saved = SavedActivations((*layer.parameters(), *layer.buffers()), named)
        with torch.enable_grad(), answering(attention), saved.hooks():
            out = run_layer(layer, hidden.requires_grad_(), call)
        # The graph of `out` held the saved tensors while they were counted; nothing outlives this.
        del out
        found = _SavedByTokens(saved.size(), saved.count(), "x" in saved.references)
        saved.forget()
        return found

    found = count()
    if is_compiled(layer):
        # A step that is measured runs its modules as they are written, which may save more.
        with uncompiled():
            found = max(found, count(), key=lambda saved: saved.bytes)
    return found


class _Shape(torch.autograd.Function):
    """Stands for attention where only what is saved matters: q is, O is somebody else's."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q)
        batch, heads, tokens, _ = q.shape
        # In memory as a cell's: some families view what attention gives.
        return (q.new_ones(batch, tokens, heads, v.shape[3]) + 0 * k.sum()).transpose(1, 2)

    @staticmethod
    def backward(_: Any, __: Tensor) -> tuple[None, None, None]:
        raise AssertionError("the probe is never differentiated")


# -- work ---------------------------------------------------------------------------------------


PROJECTIONS = 3  # q, k and v, where nothing better is known


def with_work(stages: CausalLMStages, spec: ModelSpec) -> ModelSpec:
    """The description of a model with the work of each of its layers."""
    config = stages.model.config.get_text_config()
    active = getattr(config, "num_experts_per_tok", None) or 1
    pairs = zip(stages.layers, spec.layers, strict=True)
    layers = (
        replace(layer, work=_estimate(module, active, layer.activation_bytes, spec.element_bytes))
        for module, layer in pairs
    )
    return replace(spec, layers=tuple(layers))


def _estimate(layer: nn.Module, active: int, saved: int, width: int) -> LayerWork:
    """Every matrix is multiplied once a token; of stacked experts, `active` are. Convolutions of a
    few tokens are left out. What autograd saves is written once and read once: elementwise work
    moves at least so much."""
    weights = list(layer.parameters())
    products = [(w[1], w[0]) for w in map(shape_of, weights) if len(w) == 2]
    narrow = {id(m.weight) for m in layer.modules() if isinstance(m, nn.Conv1d)}
    stacked = [w for w in weights if w.ndim == 3 and id(w) not in narrow]
    products += [(w.shape[1], w.shape[2]) for w in stacked for _ in range(active)]
    return LayerWork(
        parameters=sum(map(elements, weights)),
        trainable=sum(w.numel() for w in weights if w.requires_grad),
        products=tuple(products),
        projections=min(PROJECTIONS, len(products)),
        forward_traffic=saved,
        backward_traffic=saved,
        packed=sum(
            elements(w) * width - held_bytes(w) for w in weights if not w.is_floating_point()
        ),
    )


# -- from a configuration alone -----------------------------------------------------------------


def describe_config(fields: Mapping[str, Any], dtype: str, rank: int = 0) -> ModelSpec:
    """The ModelSpec of the model that the content of a config.json stands for, in a dtype of
    torch's name, with LoRA of `rank` on every linear module of its layers; 0: none. Raises
    UnsupportedError.
    """
    model = blank_model(config_from_fields(fields), getattr(torch, dtype))
    if rank:
        add_adapters(model, rank=rank, alpha=rank)
    return describe_shapes(model)


@torch.no_grad()
def describe_shapes(model: PreTrainedModel) -> ModelSpec:
    """The ModelSpec of a model whose parameters are on the meta device, with its layers' work.

    Its parameters become stand-ins, in place. What takes the weights' own numbers, that chunks are
    exact, is not looked at. Raises UnsupportedError for what is refused of any weights.
    """
    refuse_dropout(model)
    _stand_in(model)
    stages = CausalLMStages(model)
    return with_work(stages, describe_unproven(stages))


@torch.no_grad()
def attention_of(model: PreTrainedModel) -> tuple[LayerSpec, ...]:
    """What attention the layers of such a model ask for, and nothing else of them: a token is run
    through a layer of each kind."""
    _stand_in(model)
    return tuple(ask_layers(CausalLMStages(model)))


def _stand_in(model: PreTrainedModel) -> None:
    """Gives every parameter zeros: those of a dtype lie in one run of memory, as large as the
    largest matrix of a layer; embeddings and the head, which no layer reads, are one element."""
    tables = {id(p) for p in _tables(model)}
    largest = max(_matrix(p) for p in model.parameters() if id(p) not in tables)
    zeros: dict[torch.dtype, Tensor] = {}
    made: dict[int, nn.Parameter] = {}

    def stand_in(parameter: nn.Parameter) -> Tensor:
        shape, dtype = parameter.shape, parameter.dtype
        if id(parameter) in tables:
            return torch.zeros((), dtype=dtype).expand(shape)
        if dtype not in zeros:
            zeros[dtype] = torch.zeros(largest, dtype=dtype)
        return zeros[dtype][: _matrix(parameter)].view(shape[-2:]).expand(shape)

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(stand_in(parameter), parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]


def _tables(model: PreTrainedModel) -> list[Any]:
    """Weights of embeddings and of the head."""
    found = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    head = model.get_output_embeddings()
    return found if head is None else [*found, head.weight]


def _matrix(parameter: Tensor) -> int:
    """Elements of a weight, or of one of stacked ones."""
    return prod(parameter.shape[-2:])
