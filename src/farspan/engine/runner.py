"""Run programs for `farspan.engine.step`, one at a time, on a step's memory, lanes and weights.

A forward that returns values of tokens stays open until their backward.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from farspan.attention.backends import BlockKernel, accumulate_dtype
from farspan.attention.far import Seen
from farspan.distributed.context import agreement
from farspan.engine.buffers import ProgramBuffers
from farspan.engine.far import FarStep
from farspan.engine.gradients import (
    AccumulatingLinears,
    GradientAccumulator,
    call_accumulated,
    is_hooked,
    uncast,
)
from farspan.engine.interpreter import (
    CutLayers,
    Interpreter,
    Layers,
    SparingLayers,
    TiledLayers,
)
from farspan.engine.kernels import AttentionKernels
from farspan.engine.loss import HeadFunction, LogProbs, LossHead, StepInputs, ValueHead
from farspan.engine.parallelize import ShardedModel
from farspan.engine.streamed_weights import StreamedWeights
from farspan.engine.tiers import Arena, CopyEngine, refuse_beyond_together, reserve_together
from farspan.hf.attention_interface import routed
from farspan.hf.dropout import Draws, drawing
from farspan.hf.stages import CausalLMStages
from farspan.hf.tiled_mlp import Tokenwise
from farspan.program.dependencies import Cell, Order, unread_outputs, waits
from farspan.program.layout import AXES, SEQUENCE
from farspan.program.program import Backward, Forward, Head, Instruction, Program
from farspan.program.work import work_of
from farspan.spec import LayerSpec, Schedule, Tier, UnsupportedError

LOG = logging.getLogger(__name__)

ADVICE = (
    "shorten the context, use smaller groups, or keep less (attention_save_fraction, "
    "activation_save_fraction, kv_kept); in a run file, strategy: auto chooses what fits"
)


CELLS = (Forward, Backward, Head)


@dataclass
class PreparedProgram:
    """A program with cached results that all its steps need."""

    program: Program
    storage: ProgramBuffers
    kernel_of: dict[LayerSpec, BlockKernel] = field(default_factory=dict)

    @cached_property
    def orders(self) -> tuple[Order, ...]:
        """Waits of copies that overlap the computation."""
        return waits(self.program)

    @cached_property
    def unread(self) -> frozenset[Cell]:
        """Cells whose output only autograd needs."""
        return unread_outputs(self.program)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """FLOP of each cell."""
        cells = (i for i in self.program.instructions if isinstance(i, CELLS))
        return tuple(work_of(self.program, i) for i in cells)


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a step. Later chunks see more keys: `work`, not `cells`, tells the time left."""

    cells_done: int
    cells: int
    work_done: float
    work: float  # in the same unit, proportional to expected time


@dataclass(slots=True)
class StepMemory:
    """Memory in which programs run, one at a time; several steps may share it in turn."""

    device: torch.device
    arenas: dict[Tier, Arena]
    open_forward: "OpenForward | None" = None  # whose buffers are still in the arenas

    @classmethod
    def on(cls, device: torch.device, given: Self | None = None) -> Self:
        """Return `given`, or new memory that holds nothing yet, for a step on this device. Raises
        UnsupportedError if `given` is on another device."""
        if given is not None and given.device != device:
            raise UnsupportedError(
                f"memory: belongs to a step on {given.device}, but this step computes on {device}; "
                f"leave memory out, or give the memory of a step on {device}"
            )
        return given or cls(device, {tier: Arena(tier, device) for tier in Tier})


class ProgramRunner:
    """A model in stages, with the memory, lanes and kernels of its programs; `Step` sets its
    fields."""

    boundary: CausalLMStages
    sharded_model: ShardedModel | None
    weights: StreamedWeights | None
    memory: StepMemory
    copies: CopyEngine
    kernels: AttentionKernels
    far: FarStep | None  # None: dense attention
    progress: Callable[[Progress], None] | None
    # Called when a program with a backward begins; returns a callback for each issued instruction.
    watch: Callable[[Program], Callable[[Instruction], None]] | None = None
    poison: bool
    watches = True  # one cell of a step with `far` measures its coverage
    _schedule: Schedule | None  # None: not planned yet
    _adding: AccumulatingLinears
    _settings: Callable[[], AbstractContextManager[Any]]
    _tokenwise: tuple[tuple[Tokenwise, ...], ...]
    _fused: bool
    _seen: Callable[[], Seen] | None = None  # of the latest watched cell
    _spared: frozenset[int] = frozenset()  # layers that can skip their last product
    # Number of the next call that may drop or add noise. A resumed training restores it.
    drawn = 0
    seed: int
    neftune_alpha: float | None
    _drops = False  # the model has a dropout that is active
    _running = False

    @property
    def arenas(self) -> dict[Tier, Arena]:
        """Arenas that hold the buffers of its programs."""
        return self.memory.arenas

    @property
    def schedule(self) -> Schedule:
        """The schedule; if the planner chooses, that of the latest call. Raises UnsupportedError
        before the planner has chosen."""
        if self._schedule is None:
            raise UnsupportedError("schedule: auto has not chosen yet; call the step first")
        return self._schedule

    def _reserve(self, program: Program) -> None:
        """Reserve the program's arenas. Raises UnsupportedError on all ranks if main memory is too
        small."""
        grows = {
            tier: program.arena_bytes[tier] - arena.nbytes for tier, arena in self.arenas.items()
        }
        on_cpu = self.boundary.device.type == "cpu"
        needed = max(0, grows[Tier.HOST]) + (max(0, grows[Tier.DEVICE]) if on_cpu else 0)
        if self.weights is not None and program.trains():
            needed += self.weights.missing_bytes()
        # All ranks take part, also those whose arenas are large enough: the others wait for them.
        ranks = None if self.sharded_model is None else self.sharded_model.ranks
        refuse_beyond_together(ranks, needed, f"a step of {program.run.tokens:,} tokens", ADVICE)
        reserve_together(ranks, self.arenas, program.arena_bytes, ADVICE)
        for arena in self.arenas.values() if self.poison else ():
            self.copies.synchronize()
            arena.poison()

    @property
    def seen(self) -> Seen | None:
        """Attention coverage of the latest watched cell; None: nothing was hidden. The CPU waits
        for it."""
        return None if self._seen is None else self._seen()

    def arena_bytes(self) -> dict[Tier, int]:
        return {tier: arena.nbytes for tier, arena in self.arenas.items()}

    def release(self) -> None:
        """Free the arenas' memory; the next step allocates it again."""
        self.memory.open_forward = None
        for arena in self.arenas.values():
            arena.release()
        if self.weights is not None:
            self.weights.release()

    def _run(self, prepared: PreparedProgram, inputs: StepInputs, count: int) -> Tensor:
        gradients = self._accumulator()
        with self._issuing(prepared.program, gradients, inputs.draws):
            boundary, tokens = self.boundary, self.schedule.loss_chunk_size
            outer = self._outer_parameters()
            head = LossHead(boundary, count, tokens, outer, self._fused)
            interpreter = self._interpreter(prepared, inputs, head, gradients)
            loss = interpreter.run(prepared.orders if self.copies.overlap else None)
            if self.sharded_model is not None:
                self.sharded_model.ranks.among(*AXES).sum(loss)
        if interpreter.attention.far is not None:
            self._seen = interpreter.attention.far.seen or self._seen
        return loss.to(accumulate_dtype(self.boundary.dtype))

    def _drawing(self, inputs: StepInputs) -> StepInputs:
        """Add this call's dropout draws to the inputs, the same on all ranks of a sequence."""
        (batch, tokens), row = inputs.input_ids.shape, 0
        if self.sharded_model is not None:
            row = batch * self.sharded_model.ranks.rank.along["data"]
        number, self.drawn = self.drawn, self.drawn + 1
        alpha = self.neftune_alpha
        if not (alpha or self._drops):
            return inputs
        return replace(
            inputs, draws=Draws(self.seed, number, row, tokens, self._fused, alpha or None)
        )

    def _accumulator(self) -> GradientAccumulator:
        sharded = self.sharded_model
        hooked = () if sharded else (p for p in self.boundary.model.parameters() if is_hooked(p))
        return GradientAccumulator(None if sharded is None else sharded.reduce, hooked)

    @contextmanager
    def _issuing(
        self,
        program: Program,
        gradients: GradientAccumulator,
        draws: Draws | None,
        *,
        resumes: bool = False,
    ) -> Iterator[None]:
        """Prepare memory, weights and lanes for the body; a program that `resumes` finds its memory
        as it left it."""
        if self._running:
            raise RuntimeError("step: this Step is already running; use another Step")
        self._running = True
        try:
            self.memory.open_forward = None
            if not resumes:
                self._reserve(program)
            self._adding.gradients = gradients
            self.copies.begin()
            try:
                if self.weights is not None:
                    self.weights.begin(program, self.arenas[Tier.DEVICE])
                model = self.boundary.model
                dropping = drawing(model, draws) if draws or self._drops else nullcontext()
                plain = uncast(model.parameters())
                with routed(model), plain, dropping, self._settings():
                    yield
                if self.sharded_model is not None:
                    self.sharded_model.sharded.end()
            except BaseException:
                if self.weights is not None:
                    self.weights.abandon()
                if self.sharded_model is not None:
                    self.sharded_model.sharded.abandon()
                raise
            finally:
                self.copies.end()
            if self.weights is not None:
                self.weights.end(self.copies)
            gradients.finish()
        finally:
            self._adding.gradients = None
            self._running = False
        call_accumulated(self._received(gradients))

    def _received(self, gradients: GradientAccumulator) -> list[nn.Parameter]:
        """Return the user's parameters to which a call has added a gradient."""
        if self.weights is not None:
            return self.weights.received()
        if self.sharded_model is None:
            return list(gradients.received)
        return [p for p in self.sharded_model.sharded.parameters().values() if p.grad is not None]

    def _interpreter(
        self,
        prepared: PreparedProgram,
        inputs: StepInputs,
        head: LossHead | ValueHead,
        gradients: GradientAccumulator,
    ) -> Interpreter:
        prepared.storage.copies = self.copies  # others while recording or replaying
        return Interpreter(
            boundary=self.boundary,
            program=prepared.program,
            storage=prepared.storage,
            inputs=inputs,
            head=head,
            gradients=gradients,
            after=self._after(prepared),
            layers=self._layers(prepared, gradients, inputs.draws),
            kernels=self.kernels,
            kernel_of=prepared.kernel_of,
            far=self.far,
            watches=self.watches and prepared.program.trains(),
            sharded_model=self.sharded_model,
            weights=self.weights,
        )

    def _after(self, prepared: PreparedProgram) -> Callable[[Instruction], None]:
        counter = Counter(prepared, self.progress)
        if self.watch is None or not prepared.program.trains():
            return counter
        seen = self.watch(prepared.program)

        def both(instruction: Instruction) -> None:
            seen(instruction)
            counter(instruction)

        return both

    def _value_head(self, function: LogProbs | HeadFunction, targets: Tensor) -> ValueHead:
        """Return the head for a function's values. Raises UnsupportedError if it uses a decoder
        layer whose weights are elsewhere."""
        outer, piece = self._outer_parameters(), self.schedule.loss_chunk_size
        found: tuple[nn.Parameter, ...] = ()
        if isinstance(function, nn.Module):
            found = tuple(p for p in function.parameters() if p.requires_grad)
        own = tuple(p for p in found if not any(p is other for other in outer))
        inside = {id(p) for p in self.boundary.layers.parameters()}
        if any(id(p) in inside for p in own) and (self.weights or self.sharded_model):
            raise UnsupportedError(
                "head: uses a decoder layer, whose weights are not on the device while the head "
                "runs; use modules outside the layers, such as model.lm_head, or your own"
            )
        plain = None
        is_plain = isinstance(function, LogProbs) and function.temperature == 1
        if is_plain and targets.ndim == 2:
            plain = LossHead(self.boundary, 1, piece, outer, self._fused)
        return ValueHead(self.boundary, function, piece, outer, own, plain)

    def _outer_parameters(self) -> tuple[nn.Parameter, ...]:
        if self.weights is not None:
            return self.weights.trained_outside()
        if self.sharded_model is not None:
            return self.sharded_model.outer_parameters()
        return tuple(self.boundary.outer_parameters())

    def _layers(
        self, prepared: PreparedProgram, gradients: GradientAccumulator, draws: Draws | None
    ) -> Layers:
        tokens = self.schedule.mlp_chunk_size
        if self.sharded_model is not None and self.sharded_model.tensor is not None:
            return CutLayers(self.boundary, self.sharded_model.tensor, prepared.program)
        if tokens is None and not self._spared:
            return Layers(self.boundary)
        unread = prepared.unread
        if tokens is None:
            return SparingLayers(self.boundary, self._adding, unread, self._spared)
        return TiledLayers(self.boundary, self._tokenwise, tokens, unread, gradients.add, draws)


class Counter:
    """Reports progress from the instructions of a program."""

    def __init__(
        self, prepared: PreparedProgram, progress: Callable[[Progress], None] | None
    ) -> None:
        self._progress = progress
        self._cells, self._done = 0, 0.0
        if progress is not None:
            self._work = prepared.work
            self._total = sum(self._work)

    def __call__(self, instruction: Instruction) -> None:
        if self._progress is None or not isinstance(instruction, CELLS):
            return
        self._done += self._work[self._cells]
        self._cells += 1
        self._progress(Progress(self._cells, len(self._work), self._done, self._total))


@dataclass(slots=True)
class OpenForward:
    """A forward that returned values of tokens, waiting for its backward."""

    runner: ProgramRunner
    prepared: PreparedProgram
    inputs: StepInputs
    function: LogProbs | HeadFunction
    marks: Callable[[], object]  # compares unequal after the model has changed
    again: Callable[[], PreparedProgram]  # prepares the program for a second forward
    was: object = None  # marks at the forward
    interpreter: Interpreter = field(init=False)
    gradients: GradientAccumulator = field(init=False)

    def values(self) -> Tensor:
        """Run the forward and return values [B, T, k], the same on all ranks of a sequence. They
        have a graph if the program has a backward."""
        program = self.prepared.program
        with self._begun():
            self.interpreter.run(self._orders(), program.cut or None)
            values = self._of_all_ranks()
        if not program.cut:
            return values
        self.was, self.runner.memory.open_forward = self.marks(), self
        found: Tensor = _Values.apply(values.new_zeros(0, requires_grad=True), values, self)
        return found

    def backward(self, given: Tensor) -> None:
        """Add to `.grad` the gradient of a loss whose gradient by the values is `given`."""
        sharded = self.runner.sharded_model
        with agreement(None if sharded is None else sharded.ranks, "backward of values") as same:
            if self.marks() != self.was:
                raise RuntimeError(
                    "step: the model has changed since the forward of these values (its weights, "
                    "modules, trained parameters, or train and eval mode); call backward before "
                    "changing it, or compute the values again"
                )
            stands = self.runner.memory.open_forward is self
            same.add({"calls since the forward": "none" if stands else "some"})
            if not stands:
                LOG.info("step: another call came before this backward, so the forward runs again")
                self.prepared = self.again()
        with self._resumed() if stands else self._begun():
            head = self.interpreter.head
            assert isinstance(head, ValueHead)
            if head.plain is not None and given.shape[2] > 1 and not bool(given[..., 1:].any()):
                given = given[..., :1]  # statistics have no gradient
            self.interpreter.given = given
            self.interpreter.run(self._orders())
            self._close_own()

    @contextmanager
    def _begun(self) -> Iterator[None]:
        runner, self.gradients = self.runner, self.runner._accumulator()
        with runner._issuing(self.prepared.program, self.gradients, self.inputs.draws):
            head = runner._value_head(self.function, self.inputs.targets)
            self.interpreter = runner._interpreter(self.prepared, self.inputs, head, self.gradients)
            yield

    def _resumed(self) -> AbstractContextManager[None]:
        program, draws = self.prepared.program, self.inputs.draws
        return self.runner._issuing(program, self.gradients, draws, resumes=True)

    def _orders(self) -> tuple[Order, ...] | None:
        return self.prepared.orders if self.runner.copies.overlap else None

    def _of_all_ranks(self) -> Tensor:
        values, sharded = self.interpreter.values, self.runner.sharded_model
        if sharded is None:
            assert values is not None, "the head ran"
            return values
        width = 0 if values is None else values.shape[2]  # another stage has the head
        width = max(number for (number,) in sharded.ranks.figures([width]))
        if values is None:
            shape, boundary = self.inputs.input_ids.shape, self.runner.boundary
            dtype = accumulate_dtype(boundary.dtype)
            values = torch.zeros(*shape, width, dtype=dtype, device=boundary.device)
        sharded.ranks.among(*SEQUENCE, "pipeline").sum(values)
        return values

    def _close_own(self) -> None:
        """Close the gradients of the function's own parameters, summed over ranks."""
        head, sums = self.interpreter.head, self.interpreter.own
        assert isinstance(head, ValueHead)
        for parameter in head.own:
            total, sharded = sums.take(parameter), self.runner.sharded_model
            if sharded is not None:
                if total is None:
                    total = torch.zeros_like(parameter, dtype=accumulate_dtype(parameter.dtype))
                sharded.ranks.among(*AXES).sum(total)
            if total is not None:
                sums.place(parameter, total, fresh=False)
        sums.close(head.own)
        call_accumulated(p for p in head.own if p in sums.received)


class _Values(torch.autograd.Function):
    """Values [B, T, k] of a forward; the backward receives their gradient."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, values: Tensor, of: OpenForward) -> Tensor:
        ctx.of = of
        return values.clone()  # the caller may write in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        ctx.of.backward(given)
        return given.new_zeros(0), None, None
