"""Run a step as one CUDA graph: its kernels are recorded once, and one call launches them again.

Small models wait for the CPU, which issues about 100 kernels a layer and pass. A program's buffers
have planned addresses, so a whole step can be recorded. The first call of a kind runs as without
graphs, the second is captured, and from then on the graph is replayed on copies of the inputs. It
adds to gradients at fixed addresses. Those that begin are -0.0: adding x gives x, bit for bit.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from farspan.distributed.fsdp import gradient_dtype
from farspan.engine.interpreter import Interpreter, Registers
from farspan.engine.loss import LossHead, StepInputs
from farspan.engine.preparation import PreparedModel
from farspan.hf.edits import Same
from farspan.program.program import Program
from farspan.spec import Tier, UnsupportedError

DEVICE = "cuda"
HOOKS = "_forward_hooks", "_forward_pre_hooks"
INPUTS = "input_ids", "targets", "position_ids", "weights"


def refuse_graphs(model: PreparedModel, program: Program, inputs: StepInputs) -> None:
    """Raise UnsupportedError if a graph would not repeat all of a step: choices of the CPU, calls
    of the user's functions, and copies in parallel with the computation."""
    stages, spec = model.stages, model.spec
    parameters, modules = [*stages.model.parameters()], [*stages.model.modules()]
    inside = [module for layer in stages.layers for module in layer.modules()]
    reasons = {
        f"a step on {stages.device.type} has no CUDA graph": stages.device.type != DEVICE,
        "ranks exchange messages in a step": model.sharded is not None,
        "weights come from main memory": model.weights is not None,
        "the schedule keeps tensors in main memory": program.arena_bytes[Tier.HOST] > 0,
        "sparse attention chooses pages in each step": program.schedule.sparse is not None,
        "the model has recurrent layers": spec.is_recurrent(),
        "layers share keys and values": bool(stages.carries),
        "an indexer chooses tokens": any(layer.indexer is not None for layer in spec.layers),
        "rotary frequencies vary with the length": stages.by_length,
        "dropout or noise is drawn anew in each step": inputs.draws is not None,
        "experts get other tokens in each step": inputs.routers is not None
        or any(isinstance(module, nn.ModuleList) for module in inside)
        or any(p.ndim > 2 for layer in stages.layers for p in layer.parameters()),
        "weights are quantised": not all(p.is_floating_point() for p in parameters),
        "hooks would not be called": any(p._backward_hooks for p in parameters)
        or any(vars(module).get(name) for module in modules for name in HOOKS)
        or any(getattr(torch_module, f"_global{name}") for name in HOOKS),
    }
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedError(f"graphs: {reason}; set kernels.graphs to false")


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured step, which reads `inputs`, writes `loss` and adds to `gradients`."""

    graph: Any
    inputs: StepInputs
    loss: Tensor
    gradients: dict[nn.Parameter, Tensor]  # of parameters that get one

    def fits(self) -> bool:
        """Return whether a replay adds to the gradients that there are, and overwrites none that
        someone still holds after it was cleared."""
        alone = _uses(torch.empty(0))
        return all(
            _uses(place) == alone if p.grad is None else _place(p.grad) == _place(place)
            for p, place in self.gradients.items()
        )

    def replay(self, interpreter: Interpreter) -> Tensor:
        """Run the graph as a call of the interpreter, and return the loss."""
        for name in INPUTS:
            place = getattr(self.inputs, name)
            if place is not None:
                place.copy_(getattr(interpreter.inputs, name))
        first = [p for p in self.gradients if p.grad is None]
        for parameter in first:
            parameter.grad = self.gradients[parameter].detach()
        if first:
            begun = [self.gradients[p] for p in first]
            torch._foreach_zero_(begun)
            torch._foreach_neg_(begun)
        self.graph.replay()
        interpreter.gradients.received.update(dict.fromkeys(self.gradients))
        for instruction in interpreter.program.instructions:
            interpreter.after(instruction)
        return self.loss.clone()


class StepGraphs:
    """The CUDA graph of the latest kind of calls to one step. A call that runs without it first
    frees its memory, so that a step's tensors are never in memory twice."""

    def __init__(self) -> None:
        self._kind: Any = None  # all that a graph fixes, but addresses of gradients
        self._captured: Captured | None = None

    def drop(self) -> None:
        """Free the graph's memory, except gradients that are held."""
        self._captured = None

    def run(self, interpreter: Interpreter) -> Tensor | None:
        """Run a step as a graph and return its loss; None if this call has to run without one."""
        kind, before = _kind(interpreter), self._kind
        self._kind = kind
        found = self._captured
        if kind != before or (found is not None and not found.fits()):
            self.drop()
            return None
        if found is None:
            found = self._captured = capture(interpreter)
        return found.replay(interpreter)


def _kind(interpreter: Interpreter) -> tuple[Any, ...]:
    """Return all that a graph of this call fixes, except where its gradients are."""
    given, head, model = interpreter.inputs, interpreter.head, interpreter.stages.model
    assert isinstance(head, LossHead)
    tensors = [x for name in INPUTS if (x := getattr(given, name)) is not None]
    arena = interpreter.storage.arenas[Tier.DEVICE]
    fixed = [*model.parameters(), *model.buffers(), arena.view(0, (1,), torch.uint8)]
    products = torch.backends.cuda.matmul
    return (
        Same(interpreter.storage),  # another one after any edit of the model
        [(x.shape, x.dtype, x.device) for x in tensors],
        (given.weights is None, given.documents, head.count, head.smoothing),
        [_place(x) for x in fixed],
        [p.grad_dtype for p in model.parameters()],
        products.fp32_precision,
        products.allow_bf16_reduced_precision_reduction,
        products.allow_fp16_reduced_precision_reduction,
    )


def _place(x: Tensor) -> tuple[object, ...]:
    return x.data_ptr(), x.stride(), x.dtype


def _uses(x: Tensor) -> int:
    """Return how many tensors use the memory of this one."""
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata)


@cache
def stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return the stream to capture on: PyTorch's own belongs to the device that asked first."""
    return torch.cuda.Stream(device)


def capture(interpreter: Interpreter) -> Captured:
    """Record a step. It computes nothing, and leaves all gradients as they are."""
    given, graph = interpreter.inputs, torch.cuda.CUDAGraph()
    copies = {n: x.clone() for n in INPUTS if (x := getattr(given, n)) is not None}
    inputs = replace(given, **copies)
    own = replace(interpreter, inputs=inputs, registers=Registers(), after=lambda _: None)
    before = {p: p.grad for p in own.stages.model.parameters() if p.requires_grad}
    places = {
        p: torch.empty_like(p, dtype=gradient_dtype(p)) if old is None else old.detach()
        for p, old in before.items()
    }
    own.gradients.in_place = True
    try:
        for parameter, place in places.items():
            parameter.grad = place
        # Other threads, such as those that load data, may use CUDA meanwhile.
        stream = stream_of(own.stages.device)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            loss = own.run()
    except RuntimeError as error:
        raise UnsupportedError(
            f"graphs: PyTorch cannot capture this step ({error}); set kernels.graphs to false"
        ) from error
    finally:
        for parameter, gradient in before.items():
            parameter.grad = gradient
    return Captured(graph, inputs, loss, {p: places[p] for p in own.gradients.received})
