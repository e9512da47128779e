"""Run a step as one CUDA graph: its kernels are recorded once, and one call launches them again.

Small models wait for the CPU, which issues about 100 kernels a layer and pass. A program's buffers
have planned addresses, so a whole step can be recorded. The first call of a kind runs as without
graphs, the second is captured, and from then on the graph is replayed on copies of the inputs. One
graph begins without gradients, another adds to the gradients that the first leaves.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from farspan.engine.interpreter import Interpreter, Registers
from farspan.engine.loss import LossHead, StepInputs
from farspan.engine.preparation import PreparedModel
from farspan.hf.edits import Same
from farspan.program.program import Program
from farspan.spec import Tier, UnsupportedError

DEVICE = "cuda"
HOOKS = "_forward_hooks", "_forward_pre_hooks"
Places = list[tuple[int, int, tuple[int, ...]]]  # number, address and strides of gradients
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
        or any(vars(module).get(name) for module in modules for name in HOOKS),
    }
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedError(f"graphs: {reason}; set kernels.graphs to false")


@dataclass(slots=True)
class Captured:
    """A captured step, which reads `inputs` and writes `loss` and `gradients`."""

    graph: Any
    places: Places  # of gradients before it
    inputs: StepInputs
    loss: Tensor
    received: list[nn.Parameter]  # parameters with a gradient
    gradients: dict[nn.Parameter, Tensor]  # of parameters that had none before
    uses: list[int] = field(default_factory=list)  # of their memory, while each is in `.grad`
    leaves: Places = field(default_factory=list)  # of gradients after it

    def is_held(self) -> bool:
        """Return whether anyone still holds gradients of the latest replay: the next overwrites
        them."""
        pairs = zip(self._uses(), self.uses, strict=False)
        return any(now >= was for now, was in pairs)

    def _uses(self) -> list[int]:
        storages = (gradient.untyped_storage() for gradient in self.gradients.values())
        return [torch._C._storage_Use_Count(storage._cdata) for storage in storages]

    def replay(self, interpreter: Interpreter) -> Tensor:
        """Run the graph as a call of the interpreter, and return the loss."""
        for name in INPUTS:
            place = getattr(self.inputs, name)
            if place is not None:
                place.copy_(getattr(interpreter.inputs, name))
        self.graph.replay()
        for parameter, gradient in self.gradients.items():
            parameter.grad = gradient.detach()
        self.uses = self._uses()
        interpreter.gradients.received.update(dict.fromkeys(self.received))
        for instruction in interpreter.program.instructions:
            interpreter.after(instruction)
        return self.loss.clone()


class StepGraphs:
    """CUDA graphs of the latest kind of calls to one step. A call that runs without graphs first
    frees their memory, so that a step's tensors are never in memory twice."""

    def __init__(self) -> None:
        self._kind: Any = None  # all that a graph fixes, but addresses of gradients
        self._places: dict[bool, Places] = {}  # these, by whether there are any
        self._captured: dict[bool, Captured] = {}

    def drop(self) -> None:
        """Free the graphs' memory, except gradients that are held."""
        self._captured.clear()

    def run(self, interpreter: Interpreter) -> Tensor | None:
        """Run a step as a graph and return its loss; None if this call has to run without one."""
        kind, places = _kind(interpreter), _places(interpreter)
        adds = bool(places)
        if kind != self._kind:
            self._kind, self._places = kind, {}
            self.drop()
        before, self._places[adds] = self._places.get(adds), places
        first, found = (self._captured.get(one) for one in (False, adds))
        if found is not None and found.places == places:
            if not found.is_held():
                return found.replay(interpreter)
            before = None
        follows = first is not None and places == first.leaves
        if before != places and not (before and follows):
            self.drop()
            return None
        if not (adds and follows):
            self.drop()
        # The one that adds computes in the memory of the first, whose gradients stay there.
        pool = first.graph.pool() if adds and follows and first is not None else None
        found = self._captured[adds] = capture(interpreter, places, pool)
        loss, found.leaves = found.replay(interpreter), _places(interpreter)
        return loss


def _kind(interpreter: Interpreter) -> tuple[Any, ...]:
    """Return all that a graph of this call fixes, except where its gradients are."""
    given, head, model = interpreter.inputs, interpreter.head, interpreter.stages.model
    assert isinstance(head, LossHead)
    tensors = [x for name in INPUTS if (x := getattr(given, name)) is not None]
    arena = interpreter.storage.arenas[Tier.DEVICE]
    fixed = [*model.parameters(), *model.buffers(), arena.view(0, (1,), torch.uint8)]
    return (
        Same(interpreter.storage),  # another one after any edit of the model
        [(x.shape, x.dtype, x.device) for x in tensors],
        (given.weights is None, given.documents, head.count),
        [x.data_ptr() for x in fixed],
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    )


def _places(interpreter: Interpreter) -> Places:
    """Return the addresses of all gradients that there are."""
    gradients = {i: p.grad for i, p in enumerate(interpreter.stages.model.parameters())}
    return [(i, x.data_ptr(), x.stride()) for i, x in gradients.items() if x is not None]


@cache
def stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return the stream to capture on: PyTorch's own belongs to the device that asked first."""
    return torch.cuda.Stream(device)


def capture(interpreter: Interpreter, places: Places, pool: Any) -> Captured:
    """Record a step in the memory `pool`, or in new memory. It computes nothing, and leaves all
    gradients as they are."""
    given, graph = interpreter.inputs, torch.cuda.CUDAGraph()
    copies = {n: x.clone() for n in INPUTS if (x := getattr(given, n)) is not None}
    own = replace(
        interpreter,
        inputs=replace(given, **copies),
        registers=Registers(),
        after=lambda _: None,
    )
    before = {p: p.grad for p in own.stages.model.parameters()}
    try:
        # Other threads, such as those that load data, may use CUDA meanwhile.
        stream = stream_of(own.stages.device)
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            loss = own.run()
        received = list(own.gradients.received)
        fresh = {p: p.grad for p in received if before[p] is None and p.grad is not None}
    except RuntimeError as error:
        raise UnsupportedError(
            f"graphs: PyTorch cannot capture this step ({error}); set kernels.graphs to false"
        ) from error
    finally:
        for parameter, gradient in before.items():
            parameter.grad = gradient
    return Captured(graph, places, own.inputs, loss, received, fresh)
