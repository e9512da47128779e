"""The trace of farspan's own step: its program, interpreted on the meta device.

The interpreter is the one that trains. What a machine would decide is decided as on a GPU: kernels
are CUDA's flash attention, whose allocations are those that plans count, and the host's arena is
memory of no interest here.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from farspan.attention.backends import BlockKernel, CudaFlash
from farspan.attention.softmax import accumulate_dtype
from farspan.engine.batch import Batch
from farspan.engine.gradients import Gradients, uncast
from farspan.engine.head import Head
from farspan.engine.kernels import AttentionKernels
from farspan.engine.layers import Layers
from farspan.engine.run import Interpreter
from farspan.engine.storage import Storage
from farspan.engine.tracing.model import numbers_unread
from farspan.engine.tracing.recorder import Recorder
from farspan.engine.tracing.training import ALL_OF_IT, Recording, collected_before
from farspan.hf.attention_interface import routed
from farspan.hf.stages import CausalLMStages
from farspan.memory.trace import Trace
from farspan.plan.program import Backward, EmbedBackward, Forward, Instruction, Program
from farspan.plan.program import Head as HeadInstruction
from farspan.spec import LayerSpec, Tier
from farspan.transfer.arena import Arena
from farspan.transfer.copies import CopyEngine

META = torch.device("meta")


class MetaKernels(AttentionKernels):
    """Kernels for tensors without memory."""

    def of(self, spec: LayerSpec, program: Program | None = None) -> BlockKernel:
        # The meta device has none and gets the plain one; soft caps have no other anywhere.
        return CudaFlash() if spec.softcap is None else super().of(spec, program)


def trace_cells(
    model: PreTrainedModel,
    programs: Sequence[Program],
    *,
    strategy: str = "",
    optimizer: bool = True,
    recording: Recording = ALL_OF_IT,
) -> Trace:
    """A step of each program, on a model on the meta device.

    Each device arena is one block, as in a run: its buffers have the addresses of the plan. Raises
    Refused for a model whose step looks at numbers.
    """
    recorder = Recorder(META, recording.temporaries, in_place=recording.in_place)
    recorder.hold((*model.parameters(), *model.buffers()))
    with recorder:
        states = States(model) if optimizer else None
    if states is not None:
        recorder.keep(states.tensors)
    boundary = CausalLMStages(model)
    host = Arena(Tier.DEVICE, META)  # on the meta device too: nothing is to be copied for real
    host.reserve(max(program.arena_bytes[Tier.HOST] for program in programs))
    arenas = {Tier.DEVICE: Arena(Tier.DEVICE, META), Tier.HOST: host}
    with collected_before(), numbers_unread(), recorder:
        for step, program in enumerate(programs):
            recorder.mark(f"step {step}")
            arenas[Tier.DEVICE].reserve(program.arena_bytes[Tier.DEVICE])
            _run(boundary, program, arenas, recorder)
            recorder.mark("optimizer")
            if states is not None:
                states.update()
            model.zero_grad()
    tokens = "+".join(str(program.run.tokens) for program in programs)
    return recorder.trace(f"farspan {strategy} {tokens}", lasting=recording.lasting)


def _run(
    boundary: CausalLMStages, program: Program, arenas: dict[Tier, Arena], recorder: Recorder
) -> None:
    shape = program.run.batch, program.run.tokens
    # Tokens, targets and positions. A token less is trained than there are; no size knows.
    ids, targets = (torch.zeros(shape, dtype=torch.long, device=META) for _ in range(2))
    batch = Batch(ids, targets, torch.zeros_like(ids[:1]), None)
    storage = Storage(program, arenas, boundary.dtype, CopyEngine(META))
    outer = tuple(boundary.outer_parameters())
    head = Head(boundary, shape[1], program.schedule.head_tokens, outer)
    names = map(_name, program.instructions)
    last = ""

    def mark(_: object = None) -> None:
        """A mark where the layer or the direction changes."""
        nonlocal last
        name = next(names, None)
        if name is not None and name != last:
            last = name
            recorder.mark(name)

    seams = mark, Layers(boundary), MetaKernels(META, boundary.dtype)
    interpreter = Interpreter(boundary, program, storage, batch, head, Gradients(), *seams)
    mark()
    with routed(boundary.model), uncast(boundary.model.parameters()):
        interpreter.run()


def _name(instruction: Instruction) -> str | None:
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


class States:
    """What farspan's training holds for AdamW: moments, and fp32 masters of narrower parameters,
    whose `.grad` is fp32 too. The update is one fused kernel, which takes nothing."""

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
        """The norm of all gradients, and the update."""
        found = [p.grad for p in self.trained if p.grad is not None]
        torch.nn.utils.get_total_norm(found)
