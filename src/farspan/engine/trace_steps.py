"""Trace a training step: plain Hugging Face training, or farspan's program.

Both run on the meta device. farspan's interpreter is the one that trains; choices that depend on
the machine are those of a GPU: kernels are CUDA's flash attention, whose allocations plans count,
and the host's arena is not recorded.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from farspan.attention.backends import BlockKernel, CudaFlash, accumulate_dtype
from farspan.engine.buffers import ProgramBuffers
from farspan.engine.gradients import GradientAccumulator, uncast
from farspan.engine.interpreter import Interpreter, Layers
from farspan.engine.kernels import AttentionKernels
from farspan.engine.loss import LossHead, StepInputs
from farspan.engine.tiers import Arena, CopyEngine
from farspan.engine.trace import (
    ALL_TEMPORARIES,
    Recorder,
    Temporaries,
    Trace,
    flash_attention,
    meta_model,
    refuse_value_dependence,
    shortened,
)
from farspan.hf.attention_interface import Attention, answering, routed
from farspan.hf.fused_layers import fuse
from farspan.hf.stages import CausalLMStages
from farspan.lazy import without_garbage_collection
from farspan.profile.catalog import find_config
from farspan.profile.model import Variant
from farspan.profile.store import Measure, profiles_of
from farspan.program.builder import build_program
from farspan.program.program import Backward, EmbedBackward, Forward, Instruction, Program
from farspan.program.program import Head as HeadInstruction
from farspan.program.strategies import STRATEGIES, strategy
from farspan.spec import Kernels, LayerSpec, RunSpec, Tier, UnsupportedError, dtype_name

Marker = Callable[[str], None]


class Checkpointing(StrEnum):
    """Choice of what a layer's forward saves for its backward, in plain training."""

    PLAIN = "plain"  # everything that autograd saves
    RECOMPUTE = "recompute"  # its input: activation checkpointing
    OFFLOAD = "offload"  # its input, on the host until its backward


@dataclass(frozen=True, slots=True)
class Recording:
    """Parts of a traced run to include in the trace."""

    temporaries: Temporaries = ALL_TEMPORARIES
    lasting: bool = True  # weights and optimizer states
    in_place: bool = True  # see `recorder`'s Note: [Autograd adds in place]


ALL_OF_IT = Recording()


def trace_training(
    model: PreTrainedModel,
    contexts: Sequence[int],
    saving: Checkpointing = Checkpointing.PLAIN,
    *,
    batch: int = 1,
    attention: Attention = flash_attention,
    recording: Recording = ALL_OF_IT,
) -> Trace:
    """Trace plain training of a meta model, with one step for each context length in tokens. Raises
    UnsupportedError for a model whose step depends on values."""
    device = CausalLMStages(model).device
    recorder = Recorder(device, recording.temporaries, in_place=recording.in_place)
    recorder.hold((*model.parameters(), *model.buffers()))
    optimizer = adamw(model)
    with without_garbage_collection(), refuse_value_dependence(), recorder:
        run_training(model, optimizer, contexts, saving, recorder.mark, batch, attention)
        recorder.keep(moments(optimizer))
    return recorder.trace(f"{saving} {'+'.join(map(str, contexts))}", lasting=recording.lasting)


def run_training(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    contexts: Sequence[int],
    saving: Checkpointing,
    mark: Marker,
    batch: int,
    attention: Attention,
) -> None:
    """Run a training step for each context length; `attention` replaces the model's attention."""
    device = CausalLMStages(model).device
    with marked(model, mark), checkpointed(model, saving), routed(model), answering(attention):
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
    """Return torch's AdamW with its default on GPUs: one operation on many parameters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-5, foreach=True)


def moments(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                yield value


# -- marks -------------------------------------------------------------------------------------


@contextmanager
def marked(model: PreTrainedModel, mark: Marker) -> Iterator[None]:
    """Mark where forward and backward of each layer, the head and the embedding begin."""
    layers = CausalLMStages(model).layers
    last = len(layers) - 1

    def before(index: int) -> Callable[..., None]:
        def hook(_: Any, arguments: tuple[Tensor, ...]) -> None:
            if _backward_runs():
                return
            mark(f"layer {index} forward")
            if index == 0 and arguments and arguments[0].requires_grad:
                arguments[0].register_hook(lambda _: mark("embedding backward"))

        return hook

    def after(index: int) -> Callable[..., None]:
        def hook(_: Any, __: Any, out: Any) -> None:
            if _backward_runs():
                return
            first = out[0] if isinstance(out, tuple) else out
            first.register_hook(lambda _: mark(f"layer {index} backward"))
            if index == last:
                mark("head")

        return hook

    with ExitStack() as stack:
        for index, layer in enumerate(layers):
            stack.callback(layer.register_forward_pre_hook(before(index)).remove)
            stack.callback(layer.register_forward_hook(after(index)).remove)
        yield


def _backward_runs() -> bool:
    """Return whether a backward is running: before transformers 5.23, a checkpoint calls a layer's
    forward hooks in its backward again."""
    return torch._C._current_graph_task_id() != -1


# -- checkpointing -----------------------------------------------------------------------------


@contextmanager
def checkpointed(model: PreTrainedModel, saving: Checkpointing) -> Iterator[None]:
    """Run the body with each layer under torch's activation checkpointing, as in transformers."""
    if saving is Checkpointing.PLAIN:
        yield
        return
    recomputed = partial(checkpoint, use_reentrant=False)
    run = recomputed if saving is Checkpointing.RECOMPUTE else _checkpoint_offloaded
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=run)
    try:
        yield
    finally:
        model._set_gradient_checkpointing(enable=False)


def _checkpoint_offloaded(layer: Callable[..., Any], *arguments: Any) -> Any:
    # Only tensors that checkpoint itself saves meet these hooks: inside, its own are on top.
    with saved_tensors_hooks(_evict, _fetch):
        return checkpoint(layer, *arguments, use_reentrant=False)


@dataclass(frozen=True, slots=True)
class _OnHost:
    """Stand-in for a saved tensor that is on the host until its backward."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    copy: Tensor | None


def _evict(tensor: Tensor) -> _OnHost:
    copy = None if tensor.device.type == "meta" else tensor.to("cpu", copy=True)
    return _OnHost(tensor.shape, tensor.dtype, tensor.device, copy)


def _fetch(stored: _OnHost) -> Tensor:
    tensor = torch.empty(stored.shape, dtype=stored.dtype, device=stored.device)
    return tensor if stored.copy is None else tensor.copy_(stored.copy)


META = torch.device("meta")


class MetaKernels(AttentionKernels):
    """Choice of attention kernels for meta tensors, as a GPU would have it."""

    def of(self, spec: LayerSpec, program: Program | None = None) -> BlockKernel:
        # A meta model would get the plain kernel; soft caps have only that one anywhere.
        return CudaFlash() if spec.softcap is None else super().of(spec, program)


def trace_cells(
    model: PreTrainedModel,
    programs: Sequence[Program],
    *,
    strategy: str = "",
    optimizer: bool = True,
    recording: Recording = ALL_OF_IT,
) -> Trace:
    """Trace a farspan step of each program on a meta model. Each device arena is one allocation,
    with the plan's addresses. Raises UnsupportedError for a model whose step depends on values."""
    recorder = Recorder(META, recording.temporaries, in_place=recording.in_place)
    recorder.hold((*model.parameters(), *model.buffers()))
    with recorder:
        states = AdamWStates(model) if optimizer else None
    if states is not None:
        recorder.keep(states.tensors)
    stages = CausalLMStages(model)
    fuse(stages, Kernels(fused=False), META)
    host = Arena(Tier.DEVICE, META)  # also on the meta device: nothing is really copied
    host.reserve(max(program.arena_bytes[Tier.HOST] for program in programs))
    arenas = {Tier.DEVICE: Arena(Tier.DEVICE, META), Tier.HOST: host}
    with without_garbage_collection(), refuse_value_dependence(), recorder:
        for step, program in enumerate(programs):
            recorder.mark(f"step {step}")
            arenas[Tier.DEVICE].reserve(program.arena_bytes[Tier.DEVICE])
            _trace_program(stages, program, arenas, recorder)
            recorder.mark("optimizer")
            if states is not None:
                states.update()
            model.zero_grad()
    tokens = "+".join(str(program.run.tokens) for program in programs)
    return recorder.trace(f"farspan {strategy} {tokens}", lasting=recording.lasting)


def _trace_program(
    stages: CausalLMStages, program: Program, arenas: dict[Tier, Arena], recorder: Recorder
) -> None:
    shape = program.run.batch, program.run.tokens
    # Tokens, targets and positions. One token fewer is trained than counted; no size depends on it.
    ids, targets = (torch.zeros(shape, dtype=torch.long, device=META) for _ in range(2))
    inputs = StepInputs(ids, targets, torch.zeros_like(ids[:1]), None)
    storage = ProgramBuffers(program, arenas, stages.dtype, CopyEngine(META))
    outer = tuple(stages.outer_parameters())
    head = LossHead(stages, shape[1], program.schedule.loss_chunk_size, outer)
    names = map(_mark_name, program.instructions)
    last = ""

    def mark(_: object = None) -> None:
        """Begin a section of the trace when the layer or the direction changes."""
        nonlocal last
        name = next(names, None)
        if name is not None and name != last:
            last = name
            recorder.mark(name)

    interpreter = Interpreter(
        stages=stages,
        program=program,
        storage=storage,
        inputs=inputs,
        head=head,
        gradients=GradientAccumulator(),
        after=mark,
        layers=Layers(stages),
        kernels=MetaKernels(META, stages.dtype),
    )
    mark()
    with routed(stages.model), uncast(stages.model.parameters()):
        interpreter.run()


def _mark_name(instruction: Instruction) -> str | None:
    match instruction:
        case Forward(layer):
            return f"layer {layer} forward"
        case Backward(layer):
            return f"layer {layer} backward"
        case HeadInstruction():
            return "head"
        case EmbedBackward():
            return "embedding backward"
    return None


class AdamWStates:
    """Optimizer states of farspan's AdamW: moments, and fp32 masters of narrower parameters, whose
    `.grad` is fp32 too. The update is one fused kernel, which allocates nothing."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.tensors: list[Tensor] = []
        for parameter in self.trained:
            wide = accumulate_dtype(parameter.dtype)
            parameter.grad_dtype = wide
            masters = parameter.dtype is not wide
            self.tensors += (
                torch.empty_like(parameter, dtype=wide, requires_grad=False)
                for _ in range(2 + masters)
            )

    def update(self) -> None:
        """Compute the norm of all gradients: nothing else in an update allocates memory."""
        found = [p.grad for p in self.trained if p.grad is not None]
        torch.nn.utils.get_total_norm(found)


OWN = (
    "farspan:"  # before a strategy's name: farspan's cells, where plain training has that name too
)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A model to trace and how to train it: by plain training or a farspan strategy."""

    model: str  # as for `farspan plan`
    contexts: tuple[int, ...]  # tokens of a sequence, for each step
    layers: int | None = None  # the first layers to keep; None: all
    strategy: str = Checkpointing.PLAIN
    rank: int = 0  # of adapters on every linear module of the layers; 0 trains all weights
    batch: int = 1
    dtype: str = "bf16"
    recording: Recording = ALL_OF_IT
    measuring: Callable[[], Measure] | None = None  # as for `Profiles`; for farspan's strategies

    def trace(self) -> Trace:
        """Run the steps on the meta device, and return their requests to the memory allocator.
        Raises UnsupportedError, which names the field of this request."""
        if not self.contexts:
            raise UnsupportedError(
                "context: give --context TOKENS, or --contexts with one for each step"
            )
        own = own_strategy(self.strategy)
        config = shortened(find_config(self.model), self.layers)
        dtype: torch.dtype = getattr(torch, dtype_name(self.dtype))
        model = meta_model(config, dtype, self.rank)
        if own is None:
            found = trace_training(
                model,
                self.contexts,
                Checkpointing(self.strategy),
                batch=self.batch,
                recording=self.recording,
            )
        else:
            variant = Variant(dtype_name(self.dtype), self.rank)
            profiles = profiles_of(config, self.model, measuring=self.measuring)
            spec = profiles.of(variant).spec
            programs = {
                tokens: build_program(
                    spec, RunSpec(self.batch, tokens), strategy(own, len(spec.layers), tokens)
                )
                for tokens in set(self.contexts)
            }
            each = [programs[tokens] for tokens in self.contexts]
            found = trace_cells(model, each, recording=self.recording)
        return Trace(found.events, self._name())

    def _name(self) -> str:
        lengths = "+".join(map(str, self.contexts))
        layers = "" if self.layers is None else f", {self.layers} layers"
        adapters = f", lora {self.rank}" if self.rank else ""
        return f"{self.model} {self.strategy} {lengths}{layers}{adapters}"


def own_strategy(name: str) -> str | None:
    """Return farspan's strategy of this name; None: plain training. Raises UnsupportedError."""
    if name in tuple(Checkpointing):
        return None
    own = name.removeprefix(OWN)
    if own not in STRATEGIES:
        known = ", ".join((*Checkpointing, *(OWN + known for known in STRATEGIES)))
        raise UnsupportedError(f"strategy: {name!r} is not known; expected one of {known}")
    return own
