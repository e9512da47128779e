"""The trace of plain Hugging Face training: forward, loss, backward, AdamW."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from farspan.engine.tracing.model import flash_attention, numbers_unread
from farspan.engine.tracing.recorder import Recorder
from farspan.engine.tracing.temporaries import ALL, Temporaries
from farspan.hf.attention_interface import Attention, answering, routed
from farspan.hf.stages import CausalLMStages
from farspan.memory.trace import Trace

Marker = Callable[[str], None]


class Kept(StrEnum):
    """What a layer's forward leaves for its backward."""

    PLAIN = "plain"  # all that autograd saves
    RECOMPUTE = "recompute"  # its input: activation checkpointing
    OFFLOAD = "offload"  # its input, on host until its backward


@dataclass(frozen=True, slots=True)
class Recording:
    """What of a run becomes part of its trace."""

    temporaries: Temporaries = ALL
    lasting: bool = True  # weights and optimizer states
    in_place: bool = True  # see `recorder`'s Note: [Autograd adds in place]


ALL_OF_IT = Recording()


def trace_training(
    model: PreTrainedModel,
    contexts: Sequence[int],
    kept: Kept = Kept.PLAIN,
    *,
    batch: int = 1,
    attention: Attention = flash_attention,
    recording: Recording = ALL_OF_IT,
) -> Trace:
    """One step for each of `contexts`, tokens of a sequence, of a model on the meta device.

    Raises Refused for a model whose step looks at numbers.
    """
    device = CausalLMStages(model).device
    recorder = Recorder(device, recording.temporaries, in_place=recording.in_place)
    recorder.hold((*model.parameters(), *model.buffers()))
    optimizer = adamw(model)
    with collected_before(), numbers_unread(), recorder:
        run_training(model, optimizer, contexts, kept, (batch, attention), recorder.mark)
        recorder.keep(moments(optimizer))
    return recorder.trace(f"{kept} {'+'.join(map(str, contexts))}", lasting=recording.lasting)


def run_training(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    contexts: Sequence[int],
    kept: Kept,
    how: tuple[int, Attention],
    mark: Marker,
) -> None:
    """The steps themselves, on any device; `how` is the batch and what answers for attention."""
    batch, attention = how
    device = CausalLMStages(model).device
    with marked(model, mark), checkpointed(model, kept), routed(model), answering(attention):
        for step, tokens in enumerate(contexts):
            mark(f"step {step}")
            ids = torch.zeros(batch, tokens, dtype=torch.long, device=device)
            labels = torch.zeros_like(ids)
            loss = model(input_ids=ids, labels=labels, use_cache=False).loss
            loss.backward()
            del loss
            mark("optimizer")
            optimizer.step()
            optimizer.zero_grad()
            del ids, labels


def adamw(model: PreTrainedModel) -> torch.optim.AdamW:
    """torch's default on a GPU: many parameters an operation."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-5, foreach=True)


def moments(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The optimizer's states."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                yield value


@contextmanager
def collected_before() -> Iterator[None]:
    """Reference counts alone decide about lifetimes inside the block: when the collector of cycles
    runs is chance, and would make two traces differ."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# -- marks -------------------------------------------------------------------------------------


@contextmanager
def marked(model: PreTrainedModel, mark: Marker) -> Iterator[None]:
    """Marks where each layer's forward and backward begin, and what lies around the layers."""
    layers = CausalLMStages(model).layers
    last = len(layers) - 1

    def before(index: int) -> Callable[..., None]:
        def hook(_: Any, arguments: tuple[Tensor, ...]) -> None:
            if _in_backward():
                return
            mark(f"layer {index} forward")
            if index == 0 and arguments and arguments[0].requires_grad:
                arguments[0].register_hook(lambda _: mark("embedding backward"))

        return hook

    def after(index: int) -> Callable[..., None]:
        def hook(_: Any, __: Any, out: Any) -> None:
            if _in_backward():
                return
            first = out[0] if isinstance(out, tuple) else out
            first.register_hook(lambda _: mark(f"layer {index} backward"))
            if index == last:
                mark("head")

        return hook

    with ExitStack() as stack:
        for index, layer in enumerate(layers):
            stack.enter_context(_removed(layer.register_forward_pre_hook(before(index))))
            stack.enter_context(_removed(layer.register_forward_hook(after(index))))
        yield


def _in_backward() -> bool:
    """Before transformers 5.23 checkpoints called a layer's hooks again when they recompute it."""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def _removed(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


# -- checkpointing -----------------------------------------------------------------------------


@contextmanager
def checkpointed(model: PreTrainedModel, kept: Kept) -> Iterator[None]:
    """Each layer under torch's checkpoint, as transformers puts it there."""
    if kept is Kept.PLAIN:
        yield
        return
    run = _recompute if kept is Kept.RECOMPUTE else _offload
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=run)
    try:
        yield
    finally:
        model._set_gradient_checkpointing(enable=False)


def _recompute(layer: Callable[..., Any], *arguments: Any) -> Any:
    return checkpoint(layer, *arguments, use_reentrant=False)


def _offload(layer: Callable[..., Any], *arguments: Any) -> Any:
    # Only what checkpoint itself saves meets these hooks: inside, its own are on top of them.
    with saved_tensors_hooks(_evict, _fetch):
        return checkpoint(layer, *arguments, use_reentrant=False)


@dataclass(frozen=True, slots=True)
class _OnHost:
    """A tensor that left the device; on the meta device there is nothing to copy."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    copy: Tensor | None


def _evict(tensor: Tensor) -> _OnHost:
    copy = None if tensor.device.type == "meta" else tensor.to("cpu", copy=True)
    return _OnHost(tensor.shape, tensor.dtype, tensor.device, copy)


def _fetch(held: _OnHost) -> Tensor:
    tensor = torch.empty(held.shape, dtype=held.dtype, device=held.device)
    return tensor if held.copy is None else tensor.copy_(held.copy)
