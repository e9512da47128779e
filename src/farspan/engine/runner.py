"""Run the programs of a step one at a time: reserve memory, place weights, start copy streams."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Self

import torch
from torch import Tensor, nn

from farspan.attention.backends import BlockKernel, accumulate_dtype
from farspan.attention.far import Seen
from farspan.engine.buffers import ProgramBuffers
from farspan.engine.far import FarStep
from farspan.engine.gradients import GradientAccumulator, call_accumulated, is_hooked, uncast
from farspan.engine.graphs import StepGraphs, refuse_graphs
from farspan.engine.heads import ValueHead
from farspan.engine.interpreter import CutLayers, Interpreter, Layers, SparingLayers, TiledLayers
from farspan.engine.loss import LossHead, StepInputs
from farspan.engine.preparation import PreparedModel
from farspan.engine.tiers import Arena, CopyEngine, refuse_beyond_together, reserve_together
from farspan.hf.attention_interface import routed
from farspan.hf.dropout import Draws, drawing
from farspan.hf.routers import counted
from farspan.program.builder import build_evaluation, build_program
from farspan.program.dependencies import Cell, Order, unread_outputs, waits
from farspan.program.layout import AXES, ONLY
from farspan.program.program import Backward, Forward, Head, Instruction, Program
from farspan.program.work import work_of
from farspan.spec import Cut, LayerSpec, Objective, RunSpec, Tier, UnsupportedError

ADVICE = (
    "shorten the context, use smaller groups, or keep less (attention_save_fraction, "
    "activation_save_fraction, kv_kept); in a run file, strategy: auto chooses what fits"
)
CELLS = (Forward, Backward, Head)
PROGRAMS_KEPT = 8  # of the latest shapes; one has up to 345,000 objects at 1M tokens


@dataclass
class PreparedProgram:
    """A program with tables derived from it, which are computed on first use."""

    program: Program
    storage: ProgramBuffers
    kernel_of: dict[LayerSpec, BlockKernel] = field(default_factory=dict)

    @cached_property
    def orders(self) -> tuple[Order, ...]:
        """Earlier instructions that each instruction has to wait for, if copies run in parallel."""
        return waits(self.program)

    @cached_property
    def unread(self) -> frozenset[Cell]:
        """Cells (layer, chunk) whose output no instruction reads: only their graph is needed."""
        return unread_outputs(self.program)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """FLOP of each cell and each chunk of the head, in the order of instructions."""
        cells = (i for i in self.program.instructions if isinstance(i, CELLS))
        return tuple(work_of(self.program, i) for i in cells)


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a step. Time is proportional to `work`: later chunks attend to more keys."""

    cells_done: int
    cells: int
    work_done: float
    work: float  # in the same unit, proportional to expected time


@dataclass(slots=True)
class StepMemory:
    """Memory of steps, an arena per tier. Steps that share it run their programs in turn."""

    device: torch.device
    arenas: dict[Tier, Arena]
    open_forward: object = None  # the forward whose buffers are still in the arenas
    is_running: bool = False  # a program uses the arenas now

    @classmethod
    def on(cls, device: torch.device, given: Self | None = None) -> Self:
        """Return memory (an arena per tier) for a step on this device: `given`, which steps may
        share, or new, empty memory. Raises UnsupportedError if `given` is on another device."""
        if given is not None and given.device != device:
            raise UnsupportedError(
                f"memory: belongs to a step on {given.device}, but this step computes on {device}; "
                f"leave memory out, or give the memory of a step on {device}"
            )
        return given or cls(device, {tier: Arena(tier, device) for tier in Tier})


@dataclass(slots=True)
class Runner:
    """Runner of the programs of one step object: has their memory, copy streams and callbacks."""

    memory: StepMemory
    overlap: bool | None  # copies run in parallel with the computation; None: on CUDA
    far: FarStep | None  # None: dense attention
    progress: Callable[[Progress], None] | None
    poison: bool
    smoothing: float = 0.0  # of labels
    watches: bool = True  # one cell of a step with `far` measures its coverage
    graphs: StepGraphs | None = None  # None: steps run without CUDA graphs
    # Called when a program with a backward begins; returns a callback for each issued instruction.
    watch: Callable[[Program], Callable[[Instruction], None]] | None = None
    copies: CopyEngine = field(init=False)
    _seen: Callable[[], Seen] | None = None  # of the latest watched cell

    def __post_init__(self) -> None:
        self._compute_on(self.memory)

    def _compute_on(self, memory: StepMemory) -> None:
        on_cuda = memory.device.type == "cuda"
        overlap = on_cuda if self.overlap is None else self.overlap
        self.memory, self.copies = memory, CopyEngine(memory.device, overlap=overlap)

    @property
    def seen(self) -> Seen | None:
        """Share of the attention weight that falls on keys in the chosen pages, for the latest cell
        that measured it; None if all keys were used. The CPU waits for the result."""
        return None if self._seen is None else self._seen()

    def follow(self, model: PreparedModel) -> None:
        """Use new memory if the prepared model now computes on another device."""
        if model.stages.device != self.memory.device:
            self._compute_on(StepMemory.on(model.stages.device))
            model.programs.clear()  # of an earlier time on this device, in memory that is gone

    def program(
        self, model: PreparedModel, batch: int, tokens: int, *, evaluation: bool, is_cut: bool
    ) -> PreparedProgram:
        """Return the program for batches of this shape, building it on first use. With `is_cut`,
        forward and backward run separately."""
        if self.graphs is not None and (evaluation or is_cut or self.watch is not None):
            self.graphs.drop()  # a program that runs without graphs needs their memory
        deterministic = torch.are_deterministic_algorithms_enabled()
        by_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        # The last two affect the choice of kernels.
        key = batch, tokens, evaluation, is_cut, deterministic, by_cudnn
        known = model.programs
        if key not in known:
            assert model.schedule is not None, "a schedule was chosen"
            cut = Cut.AFTER_HEAD if is_cut else model.spec.cut(Objective())
            build = build_evaluation if evaluation else partial(build_program, cut=cut)
            while len(known) >= PROGRAMS_KEPT:
                del known[next(iter(known))]
            rank = ONLY if model.sharded is None else model.sharded.rank
            program = build(model.spec, RunSpec(batch, tokens), model.schedule, rank)
            dtype, arenas = model.stages.dtype, self.memory.arenas
            storage = ProgramBuffers(program, arenas, dtype, self.copies)
            known[key] = PreparedProgram(program, storage)
        found: PreparedProgram = known[key]
        return found

    def release(self, model: PreparedModel) -> None:
        """Free the arenas' memory; the next step allocates it again."""
        self.memory.open_forward = None
        if self.graphs is not None:
            self.graphs.drop()
        for arena in self.memory.arenas.values():
            arena.release()
        if model.weights is not None:
            model.weights.release()

    def run(
        self, model: PreparedModel, prepared: PreparedProgram, inputs: StepInputs, count: int
    ) -> Tensor:
        """Run a whole program and return the mean loss: the sum over tokens, divided by `count`."""
        gradients, program = accumulator(model), prepared.program
        routers = inputs.routers
        graphs = self.graphs if self.watch is None else None
        if graphs is not None and program.trains():
            refuse_graphs(model, program, inputs)
        with self.issuing(model, program, gradients, inputs):
            tokens = program.schedule.loss_chunk_size
            how = model.outer, model.fused, self.smoothing
            head = LossHead(model.stages, count, tokens, *how)
            interpreter = self.interpreter(model, prepared, inputs, head, gradients)
            loss = graphs.run(interpreter) if graphs is not None and program.trains() else None
            if loss is None:
                loss = interpreter.run(prepared.orders if self.copies.overlap else None)
            if model.sharded is not None:
                model.sharded.ranks.among(*AXES).sum(loss)
            if routers is not None:
                further = (routers.scale * routers.losses()).sum()
                if model.sharded is not None:
                    model.sharded.ranks.among("data").sum(further)
                loss = loss + further
        if interpreter.attention.far is not None:
            self._seen = interpreter.attention.far.seen or self._seen
        return loss.to(accumulate_dtype(model.stages.dtype))

    @contextmanager
    def issuing(
        self,
        model: PreparedModel,
        program: Program,
        gradients: GradientAccumulator,
        inputs: StepInputs,
        *,
        resumes: bool = False,
    ) -> Iterator[None]:
        """Run the body with memory reserved and weights in place for a program. With `resumes` the
        program continues after its forward, and finds its memory unchanged."""
        memory = self.memory
        if memory.is_running:
            raise RuntimeError("step: a Step with this memory is running; use one with its own")
        weights, sharded, arenas = model.weights, model.sharded, memory.arenas
        memory.is_running = True
        try:
            self.memory.open_forward = None
            if not resumes:
                self._reserve(model, program)
            model.linears.gradients = gradients
            self.copies.begin()
            try:
                user, slots = model.stages.model, arenas[Tier.DEVICE]
                streamed = nullcontext() if weights is None else weights.in_slots(program, slots)
                draws = inputs.draws
                dropping = drawing(user, draws) if draws or model.drops else nullcontext()
                plain, counting = uncast(user.parameters()), counted(inputs.routers)
                around = model.stages.kept_shells()
                with streamed, routed(user), counting, plain, dropping, model.settings(), around:
                    yield
                if sharded is not None:
                    sharded.sharded.end()
            except BaseException:
                if sharded is not None:
                    sharded.sharded.abandon()
                raise
            finally:
                self.copies.end()
            if weights is not None:
                weights.end(self.copies)
            gradients.finish()
        finally:
            model.linears.gradients = None
            memory.is_running = False
        call_accumulated(_received(model, gradients))

    def interpreter(
        self,
        model: PreparedModel,
        prepared: PreparedProgram,
        inputs: StepInputs,
        head: LossHead | ValueHead,
        gradients: GradientAccumulator,
    ) -> Interpreter:
        prepared.storage.copies = self.copies  # others while recording or replaying
        return Interpreter(
            stages=model.stages,
            program=prepared.program,
            storage=prepared.storage,
            inputs=inputs,
            head=head,
            gradients=gradients,
            after=self._after(prepared),
            layers=_layers(model, prepared, gradients, inputs.place),
            kernels=model.kernels,
            kernel_of=prepared.kernel_of,
            far=self.far,
            watches=self.far is not None and self.watches and prepared.program.trains(),
            sharded_model=model.sharded,
            weights=model.weights,
        )

    def _reserve(self, model: PreparedModel, program: Program) -> None:
        """Reserve the arenas. Raises UnsupportedError on all ranks if one rank lacks memory."""
        arenas, sizes = self.memory.arenas, program.arena_bytes
        grows = {tier: sizes[tier] - arena.nbytes for tier, arena in arenas.items()}
        on_cpu = self.memory.device.type == "cpu"
        needed = max(0, grows[Tier.HOST]) + (max(0, grows[Tier.DEVICE]) if on_cpu else 0)
        if model.weights is not None and program.trains():
            needed += model.weights.missing_bytes()
        # All ranks take part, also those whose arenas are large enough: the others wait for them.
        ranks = None if model.sharded is None else model.sharded.ranks
        refuse_beyond_together(ranks, needed, f"a step of {program.run.tokens:,} tokens", ADVICE)
        reserve_together(ranks, arenas, sizes, ADVICE)
        for arena in arenas.values() if self.poison else ():
            self.copies.synchronize()
            arena.poison()

    def _after(self, prepared: PreparedProgram) -> Callable[[Instruction], None]:
        counter = Counter(prepared, self.progress)
        if self.watch is None or not prepared.program.trains():
            return counter
        seen = self.watch(prepared.program)

        def both(instruction: Instruction) -> None:
            seen(instruction)
            counter(instruction)

        return both


def accumulator(model: PreparedModel) -> GradientAccumulator:
    """Return an accumulator for one call's gradients of weights, summed over ranks if sharded."""
    sharded = model.sharded
    hooked = () if sharded else (p for p in model.stages.model.parameters() if is_hooked(p))
    return GradientAccumulator(None if sharded is None else sharded.reduce, hooked)


def _received(model: PreparedModel, gradients: GradientAccumulator) -> list[nn.Parameter]:
    """Return the user's parameters to whose `.grad` the latest call added a gradient."""
    if model.weights is not None:
        return model.weights.received()
    if model.sharded is None:
        return list(gradients.received)
    return [p for p in model.sharded.sharded.parameters().values() if p.grad is not None]


def _layers(
    model: PreparedModel,
    prepared: PreparedProgram,
    gradients: GradientAccumulator,
    draws: Draws | None,
) -> Layers:
    program, stages = prepared.program, model.stages
    tokens = program.schedule.mlp_chunk_size
    if model.sharded is not None and model.sharded.tensor is not None:
        return CutLayers(stages, model.sharded.tensor, program)
    if tokens is not None:
        add = gradients.add
        return TiledLayers(stages, model.tiles, tokens, prepared.unread, add, draws)
    if not model.spared:
        return Layers(stages)
    return SparingLayers(stages, model.linears, prepared.unread, model.spared)


class Counter:
    """Callback that reports progress after each cell of a program."""

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
