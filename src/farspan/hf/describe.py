"""Describe a model for the planner: attention, saved bytes and work of each layer.

A configuration alone is described by running its layers on stand-ins for the weights.
"""

import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from farspan.activations import SavedActivations
from farspan.hf.attention_interface import answering, routed
from farspan.hf.compiled import is_compiled, uncompiled
from farspan.hf.dropout import still
from farspan.hf.fused_layers import fuse
from farspan.hf.indexer import IndexerCall, trained_parameters
from farspan.hf.load import add_adapters, blank_model, config_from_fields
from farspan.hf.probe import TOKENS, ask_layers, probe_layers
from farspan.hf.quantized import copied, elements, held_bytes, shape_of
from farspan.hf.recurrent import RecurrentStates, run_piece, zero_states
from farspan.hf.routers import routers_of
from farspan.hf.stages import CausalLMStages, run_layer
from farspan.hf.swap import put, replacements
from farspan.hf.unsupported import refuse_dropout, refuse_model
from farspan.program.layout import ALIGNMENT
from farspan.spec import Kernels, LayerSpec, LayerWork, ModelSpec, UnsupportedError

SIZES = 4 * TOKENS, 8 * TOKENS  # tokens of cells whose saved tensors are counted
# Scans round their tokens up to a multiple of 64, or at most 256: one token more than a multiple
# has the most padding.
SCANNED = 257, 513
BATCHES = 1, 2  # sequences of measured scans


@torch.no_grad()
def describe(stages: CausalLMStages, device: torch.device | None = None) -> ModelSpec:
    """Describe a model as a ModelSpec. Raises UnsupportedError if it cannot run exactly in chunks.
    Its cells will run on `device`, which decides what autograd saves; weights may lie elsewhere."""
    return _described(stages, probe_layers, device)


NO_MAIN_MEMORY = "DefaultCPUAllocator"  # in torch's error when main memory is exhausted


@torch.no_grad()
def describe_unproven(stages: CausalLMStages) -> ModelSpec:
    """Describe a model whose weights have their shapes but no values, as a ModelSpec. That chunks
    are exact is not checked, since it depends on values."""
    return _described(stages, ask_layers, None)


def _described(
    stages: CausalLMStages,
    attention: Callable[[CausalLMStages], list[LayerSpec]],
    device: torch.device | None,
) -> ModelSpec:
    model = stages.model
    # With its index, as parameters have it.
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
                f"model: main memory is too small to run a layer of {type(model).__name__}; "
                "end other programs, or raise the memory limit of this process (ulimit -v)"
            ) from error
        raise UnsupportedError(
            f"model: {type(model).__name__} cannot be run stage by stage through the attention "
            f"interface: {_place(model, error)}{type(error).__name__}: {error}"
        ) from error
    parameters = list(model.parameters())
    return ModelSpec(
        name=getattr(model.config, "name_or_path", "") or type(model).__name__,
        hidden=stages.hidden,
        vocab=stages.vocab,
        layers=tuple(layers),
        element_bytes=stages.dtype.itemsize,
        parameters=sum(map(elements, parameters)),
        trainable=sum(p.numel() for p in trained_parameters(model)),
        routers=routers_of(model) is not None,
        carried=stages.width - stages.hidden,
        embeds=stages.carries[0].layout.again if stages.carries else 0,
        # Layers may share weights with one another, as Zamba's share an attention block.
        shares=sum(len([*x.parameters()]) for x in stages.layers)
        > len([*stages.layers.parameters()]),
    )


def _place(model: nn.Module, error: Exception) -> str:
    """Return where in the model's own code an error arose, as text; "" if not there."""
    own = getattr(sys.modules[type(model).__module__], "__file__", None)
    frames = traceback.walk_tb(error.__traceback__)
    inside = [f.f_code.co_qualname for f, _ in frames if f.f_code.co_filename == own]
    return f"in its {inside[-1]}, " if inside else ""


def _with_activations(
    stages: CausalLMStages, layers: list[LayerSpec], device: torch.device
) -> list[LayerSpec]:
    """Return the specs of layers with the bytes that autograd saves, measured at two lengths."""
    measured: dict[tuple[Any, ...], LayerSpec] = {}
    result = []
    for index, kind in enumerate(zip(stages.kinds(), layers, strict=True)):
        if kind not in measured:
            measured[kind] = _with_saved_bytes(_Measured(stages, index, layers[index], device))
        result.append(measured[kind])
    return result


@dataclass(frozen=True, slots=True)
class _Measured:
    """A layer whose saved bytes are measured, and the device on which its cells will run."""

    stages: CausalLMStages
    index: int
    spec: LayerSpec
    device: torch.device


def _with_saved_bytes(layer: _Measured) -> LayerSpec:
    """Return a layer's spec with the bytes that autograd saves. Recurrent layers are measured with
    one and with several sequences, since with several their scans copy transposed tensors."""
    batches = BATCHES if layer.spec.state else (1,)
    found = [_saved_per_token(layer, batch) for batch in batches]
    return replace(
        layer.spec,
        activation_bytes=max(slope for slope, _, _ in found),
        activation_constant=max(constant for _, constant, _ in found),
        saves_input=any(saves_input for _, _, saves_input in found),
    )


def _saved_per_token(layer: _Measured, batch: int) -> tuple[int, int, bool]:
    """Measure what a layer saves at two lengths: return bytes per token, constant bytes per
    sequence, and whether it saves its input."""
    low, high = SCANNED if layer.spec.state else SIZES
    few, many = (_saved(layer, batch, tokens) for tokens in (low, high))
    slope = -(-(many.bytes - few.bytes) // (batch * (high - low)))
    # Each saved tensor is padded to the alignment, whatever its size.
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
    # Repeat few positions: the model may accept no more than the probe's.
    positions = torch.arange(tokens, device=stages.device)[None] % TOKENS
    # Tokens must differ in every direction, or a router would send them to few experts.
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(batch, tokens, stages.width, generator=generator)
    hidden = hidden.to(stages.device, stages.dtype)
    call = stages.calls(batch, positions)[measured.index]
    layer = stages.running[measured.index]
    if device != stages.device:
        hidden, call = hidden.to(device), call.map_tensors(lambda x: x.to(device))
        layer = copied(layer, device)
    named = {"x": hidden}

    def attention(
        _: nn.Module, q: Tensor, k: Tensor, v: Tensor, __: float, **keywords: Any
    ) -> Tensor:
        named["out"] = _QueryOnly.apply(q, k, v, keywords.get("indices"))
        return named["out"].transpose(1, 2)

    def choose(call: IndexerCall) -> Tensor:
        return call.blank(call.sizes.tokens)

    before = zero_states(measured.spec.state, batch, stages.dtype, device)
    for state in before.values():
        state.requires_grad_()

    def count() -> _SavedByTokens:
        saved = SavedActivations((*layer.parameters(), *layer.buffers()), named)
        with torch.enable_grad(), answering(attention, choose), saved.hooks():
            hidden.requires_grad_()
            if before:
                states = RecurrentStates(before, attends=measured.spec.attends())
                out = run_piece(layer, hidden, call, states)
            else:
                out = run_layer(layer, hidden, call)
        # The graph of `out` kept the saved tensors alive while they were counted.
        del out
        found = _SavedByTokens(saved.size(), saved.count(), "x" in saved.references)
        saved.forget()
        return found

    found = count()
    if is_compiled(layer):
        # A measured step runs its modules uncompiled, which may save more.
        with uncompiled():
            found = max(found, count(), key=lambda saved: saved.bytes)
    return found


class _QueryOnly(torch.autograd.Function):
    """Stand-in for attention that saves only q and the chosen tokens, as in a cell, whose buffers
    hold the output."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor | None) -> Tensor:
        ctx.save_for_backward(q, chosen)
        batch, heads, tokens, _ = q.shape
        # In the memory layout of a cell's output, which some families view.
        return (q.new_ones(batch, tokens, heads, v.shape[3]) + 0 * k.sum()).transpose(1, 2)

    @staticmethod
    def backward(_: Any, __: Tensor) -> tuple[None, None, None, None]:
        raise AssertionError("the probe is never differentiated")


# -- work ---------------------------------------------------------------------------------------


PROJECTIONS = 3  # q, k and v, if unknown


def with_work(stages: CausalLMStages, spec: ModelSpec) -> ModelSpec:
    """Return a model's description with an estimate of each layer's work."""
    config = stages.model.config.get_text_config()
    active = getattr(config, "num_experts_per_tok", None) or 1
    pairs = zip(stages.layers, spec.layers, strict=True)
    met: set[nn.Parameter] = set()
    layers = []
    for module, layer in pairs:
        saved = layer.activation_bytes
        layers.append(
            replace(layer, work=_estimate(module, active, saved, spec.element_bytes, met))
        )
        met.update(module.parameters())
    return replace(spec, layers=tuple(layers))


def _estimate(
    layer: nn.Module, active: int, saved: int, width: int, met: Collection[nn.Parameter]
) -> LayerWork:
    """Estimate a layer's work from its weights and saved bytes. Each matrix is multiplied once per
    token, or `active` of the experts that are stacked in one tensor. Convolutions over a few tokens
    are left out. Saved tensors are written and read once, a lower bound of element-wise traffic.
    Weights shared with an earlier layer (`met`) count there."""
    weights = list(layer.parameters())
    products = [(w[1], w[0]) for w in map(shape_of, weights) if len(w) == 2]
    narrow = {id(m.weight) for m in layer.modules() if isinstance(m, nn.Conv1d)}
    stacked = [w for w in weights if w.ndim == 3 and id(w) not in narrow]
    products += [(w.shape[1], w.shape[2]) for w in stacked for _ in range(active)]
    own = [w for w in weights if w not in met]
    return LayerWork(
        parameters=sum(map(elements, own)),
        trainable=sum(w.numel() for w in trained_parameters(layer) if w not in met),
        products=tuple(products),
        projections=min(PROJECTIONS, len(products)),
        forward_traffic=saved,
        backward_traffic=saved,
        packed=sum(elements(w) * width - held_bytes(w) for w in own if not w.is_floating_point()),
    )


# -- from a configuration alone -----------------------------------------------------------------


def describe_config(
    fields: Mapping[str, Any], dtype: str, rank: int = 0, *, remakes: bool = True
) -> ModelSpec:
    """Describe the model of a configuration, the content of a config.json.

    Args:
        dtype: Name of a torch dtype.
        rank: Rank of LoRA on every linear module of the layers; 0: none.
        remakes: Kept cells compute norms' outputs and act(gate) * up again.

    Raises:
        UnsupportedError: farspan cannot train the model.
    """
    model = blank_model(config_from_fields(fields), getattr(torch, dtype))
    if rank:
        add_adapters(model, rank=rank, alpha=rank)
    return describe_shapes(model, remakes=remakes)


@torch.no_grad()
def describe_shapes(model: PreTrainedModel, *, remakes: bool = True) -> ModelSpec:
    """Describe a model with parameters on the meta device, with each layer's work. Zeros replace
    its parameters in place. Exactness in chunks depends on the weights' values and is not checked.
    Raises UnsupportedError if no weights could make the model exact."""
    refuse_dropout(model)
    _stand_in(model)
    stages = CausalLMStages(model)
    fuse(stages, Kernels(fused=False, remake=remakes), stages.device)
    return with_work(stages, describe_unproven(stages))


@torch.no_grad()
def attention_of(model: PreTrainedModel) -> tuple[LayerSpec, ...]:
    """Return the attention of each layer of a model on the meta device, by running one token."""
    _stand_in(model)
    return tuple(ask_layers(CausalLMStages(model)))


def _stand_in(model: PreTrainedModel) -> None:
    """Replace every parameter by zeros. Parameters of one dtype share memory of the size of a
    layer's largest matrix; embeddings and the head, which no layer reads, share one element."""
    tables = {id(p) for p in _tables(model)}
    largest = max(_matrix(p) for p in model.parameters() if id(p) not in tables)
    zeros: dict[torch.dtype, Tensor] = {}

    def stand_in(parameter: nn.Parameter) -> Tensor:
        shape, dtype = parameter.shape, parameter.dtype
        if id(parameter) in tables:
            return torch.zeros((), dtype=dtype).expand(shape)
        if dtype not in zeros:
            zeros[dtype] = torch.zeros(largest, dtype=dtype)
        return zeros[dtype][: _matrix(parameter)].view(shape[-2:]).expand(shape)

    made = {p: nn.Parameter(stand_in(p), p.requires_grad) for p in model.parameters()}
    put(replacements(model, made))


def _tables(model: PreTrainedModel) -> list[Any]:
    found = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    head = model.get_output_embeddings()
    return found if head is None else [*found, head.weight]


def _matrix(parameter: Tensor) -> int:
    """Return the number of elements of a matrix, or of one matrix in a stack of experts."""
    return prod(parameter.shape[-2:])
