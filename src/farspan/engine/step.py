"""The public call: one training step on a sequence longer than memory."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from farspan.attention.backends import BlockKernel, accumulate_dtype
from farspan.distributed.context import ParallelContext
from farspan.distributed.fsdp import Stage
from farspan.engine.buffers import ProgramBuffers
from farspan.engine.gradients import AccumulatingLinears, GradientAccumulator, adds_products, uncast
from farspan.engine.interpreter import CutLayers, Interpreter, Layers, SparingLayers, TiledLayers
from farspan.engine.kernels import attention_kernels
from farspan.engine.loss import LossHead, StepInputs, make_inputs
from farspan.engine.parallelize import ShardedModel, parallelize, refuse_schedule
from farspan.engine.streamed_weights import StreamedWeights, computing_device
from farspan.engine.tiers import Arena, CopyEngine, refuse_beyond_together, reserve_together
from farspan.hf.attention_interface import routed
from farspan.hf.describe import describe
from farspan.hf.fused_layers import fingerprint, fuse, spared_layers
from farspan.hf.stages import CausalLMStages, compile_layers
from farspan.hf.tiled_mlp import Tokenwise, tokenwise
from farspan.hf.unsupported import (
    context_limit,
    refuse_context,
    refuse_dropout,
    refuse_model,
    refuse_places,
    refuse_untrained,
)
from farspan.kernels.launch import fused_for
from farspan.lazy import load
from farspan.planner.request import Plan
from farspan.program.builder import build_evaluation, build_program
from farspan.program.dependencies import Cell, Order, unread_outputs, waits
from farspan.program.layout import ALONE, AXES, ONLY, SEQUENCE, streams
from farspan.program.program import Backward, Forward, Instruction, Program
from farspan.program.program import Head as HeadInstruction
from farspan.program.strategies import AUTO
from farspan.program.work import work_of
from farspan.sparse.engine import PageFunction, Seen, selector_of, watched_cell
from farspan.sparse.select import Selector
from farspan.spec import Kernels, LayerSpec, ModelSpec, RunSpec, Schedule, Tier, UnsupportedError

ADVICE = (
    "shorten the context, use smaller groups, or keep less (attention_save_fraction, "
    "activation_save_fraction, kv_kept); in a run file, strategy: auto chooses what fits"
)


PROGRAMS_KEPT = 8  # of the latest shapes; one is up to 345,000 objects at 1M tokens
_CELLS = (Forward, Backward, HeadInstruction)
# Of modules, and of a configuration: what a person may set between steps and chunks would not obey.
_FLAGS = ("gradient_checkpointing", "is_causal", "merged_adapters")
_ROUTER_LOSS = "output_router_logits"


@dataclass
class PreparedProgram:
    """A program, and what all steps ask of it; each is found out once."""

    program: Program
    storage: ProgramBuffers
    kernel_of: dict[LayerSpec, BlockKernel] = field(default_factory=dict)

    @cached_property
    def orders(self) -> tuple[Order, ...]:
        """Waits of copies that run beside the computation."""
        return waits(self.program)

    @cached_property
    def unread(self) -> frozenset[Cell]:
        """Cells whose output only autograd asks for."""
        return unread_outputs(self.program)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """FLOP of each cell."""
        cells = (i for i in self.program.instructions if isinstance(i, _CELLS))
        return tuple(work_of(self.program, i) for i in cells)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a step is. Later chunks see more keys: `work`, not `cells`, tells the time left."""

    cells_done: int
    cells: int
    work_done: float
    work: float  # in the same unit, proportional to expected time


class Step:
    """Forward and backward of a causal LM on [batch, tokens], by a schedule.

    Behaves like `loss.backward()`: gradients are added to `.grad` of every trainable parameter, in
    its `grad_dtype` where one is set, so any optimizer and any training loop work. The gradients
    are those of plain full-sequence autograd. The model is not changed; it may be called as ever
    between steps. Modules run once a chunk and in some passes again, so forward hooks fire many
    times, and hooks on gradient accumulation do not: gradients are complete when the call returns.

    With `schedule="auto"` the planner chooses at the first call, as `strategy: auto` of a run file
    does: for the model as it is, on this machine, with the memory that is free, as `farspan
    calibrate` has measured it or as is measured then (some seconds). Planning takes some seconds
    and is logged in a line; `schedule` and `plan` then hold the choice. Room is left for AdamW's
    states in float32: for another optimizer, give `farspan.plan(..., optimizer=...).schedule`. A
    batch of no more rows and no more tokens a row than a planned one runs by the same schedule,
    so the longest batch is best the first; one that is larger, or that trains more parameters, is
    planned for anew.

    Raises UnsupportedError when the model cannot be trained exactly in chunks, the schedule does
    not fit it, or no schedule fits the machine. If a step raises, `.grad` is undefined and must be
    cleared.
    """

    # Bytes of main memory that a step may take by its forecast; None: as many as there are.
    host_room: int | None = None
    _spared: frozenset[int] = frozenset()  # layers whose last product may be left out
    _shells_of: tuple[Any, ...] | None = None  # the model of which shells were made
    _running = False
    _steps = 0

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule | str,
        *,
        progress: Callable[[Progress], None] | None = None,
        poison: bool = False,
        overlap: bool | None = None,
        kernels: Kernels | None = None,
        selector: Selector | PageFunction | None = None,
        ranks: ParallelContext | ShardedModel | None = None,
        device: torch.device | str | None = None,
        weights: StreamedWeights | None = None,
    ) -> None:
        """`progress` is called after every cell and may raise to abandon the step. `poison` fills
        the arenas with NaN before every step: nothing may depend on what they held. With `overlap`
        copies run beside the computation, which is what they do on CUDA unless it is False; the
        results are the same bits (on CUDA with `kernels.deterministic`, else up to rounding).
        `kernels` says who computes. With `schedule.sparse`, `selector` chooses pages in place of
        the votes: one of `farspan.sparse.select`, or a function from votes [B, Hk, M, n]
        and the range of their n pages to a choice, int32 [B, Hk, M, k] of pages or -1, k at most
        `budget // page`, which depends on nothing but its arguments. With `ranks` all of them make
        the same call with the same sequences (but for replicas along `data`, which bring their own)
        and have the same loss after it; weights and gradients stay whole on each rank, unless
        `parallelize` has sharded the model. With `schedule.weights` HOST the model is moved to main
        memory; `device` is where to compute then, `weights` those of another step of it."""
        self._schedule, self._planner = _written(schedule, selector, ranks)
        self._plans: list[Plan] = []  # where the planner chooses
        kernels = kernels or Kernels()
        if ranks is not None:
            ranks = self._shared(model, self.schedule, ranks, kernels)
        self.sharded_model = ranks
        self.boundary = CausalLMStages(model, None if ranks is None else ranks.sharded.device)
        if self._on_host or device is not None:
            device = device or getattr(weights, "device", None)
            here = computing_device(self.boundary.device, device, self._on_host, ranks)
            self.boundary = CausalLMStages(model, here)
        self.progress = progress
        self.poison = poison
        sparse = None if self._schedule is None else self._schedule.sparse
        self.selector = None if sparse is None else selector_of(selector, sparse)
        self.watches = sparse is not None  # what one cell a step sees is measured
        self._seen: Callable[[], Seen] | None = None  # the latest that was
        device, self._wanted = self.boundary.device, kernels
        if kernels.compile:
            compile_layers(self.boundary)
        self._adding = AccumulatingLinears()
        on_cuda = device.type == "cuda"
        self.copies = CopyEngine(device, overlap=on_cuda if overlap is None else overlap)
        self.arenas = {tier: Arena(tier, device) for tier in Tier}
        self.weights = weights
        self._programs: dict[tuple[int | bool, ...], PreparedProgram] = {}
        self._tokenwise: tuple[tuple[Tokenwise, ...], ...] = ()
        self._described = self._state()
        self._limit = context_limit(self.boundary.model.config)
        self._accepted: dict[bool, tuple[object, ...]] = {}
        self.model_spec: ModelSpec = self._describe()

    @property
    def schedule(self) -> Schedule:
        """The schedule, of the latest call where the planner chooses. Raises UnsupportedError
        before it has chosen."""
        if self._schedule is None:
            raise UnsupportedError("schedule: auto has chosen none yet; it does at the first call")
        return self._schedule

    @property
    def plan(self) -> Plan | None:
        """What the planner says of the schedule that it chose; None where it did not."""
        return next((p for p in self._plans if p.schedule is self._schedule), None)

    def _choose(self, run: RunSpec) -> None:
        """Has `schedule` be one that was planned for batches as large as this one."""
        assert self._planner is not None, "the planner chooses"

        def covers(plan: Plan) -> bool:
            of, model = plan.question.run, plan.question.model
            wide = of.batch >= run.batch and of.tokens >= run.tokens
            same = model.element_bytes == self.model_spec.element_bytes
            return wide and same and model.trainable >= self.model_spec.trainable

        found = next(filter(covers, self._plans), None)
        if found is None:
            self.release()  # what is free now is planned with
            found = self._planner(self.boundary.model, run, self._wanted)
            self._plans.append(found)
        if found.schedule is not self._schedule:
            self._programs.clear()
            self._schedule = found.schedule
            if self._on_host != (self.weights is not None):
                self.model_spec = self._describe()

    @property
    def _on_host(self) -> bool:
        """Do whole weights come from main memory?"""
        layout = ALONE if self.sharded_model is None else self.sharded_model.rank.layout
        return self._schedule is not None and streams(self._schedule, layout)

    @staticmethod
    def _shared(
        model: nn.Module,
        schedule: Schedule,
        ranks: ParallelContext | ShardedModel,
        kernels: Kernels,
    ) -> ShardedModel:
        """The model among ranks."""
        if isinstance(ranks, ParallelContext):
            return parallelize(
                model, schedule, ranks, stage=Stage.ZERO_0, keep=True, kernels=kernels
            )
        refuse_schedule(schedule, ranks.ranks, ranks.sharded.stage)
        ranks.refuse_elsewhere(schedule)
        return ranks

    def _fuse(self) -> None:
        """Have modules run on the device's own kernels, and products add to sums, if that is
        wanted. Slices of weights over ranks are in shells of their own. Shells are of the model in
        its present mode."""
        if self.sharded_model is not None and self.sharded_model.tensor is not None:
            return
        device, dtype = self.boundary.device, self.boundary.dtype
        adding = self._adding
        adding.adds = self._wanted.accumulate and adds_products(device, dtype)
        first = (adding.forward_of,) * adding.adds
        fuse(self.boundary, self._wanted, device, *first, linears=adding)
        if self._fused and self.sharded_model is None:
            self._spared = spared_layers(self.boundary)
        self._shells_of = fingerprint(self.boundary) if self._fused or adding.adds else None

    def __call__(
        self,
        input_ids: Tensor,
        labels: Tensor,
        document_ids: Tensor | None = None,
        *,
        trained_tokens: int | None = None,
    ) -> Tensor:
        """The mean loss over trained tokens, a scalar; gradients are added to `.grad`.

        `input_ids`, `labels` and `document_ids` are [batch, tokens]. Labels are not shifted: a
        token is trained on the label of the token after it, if that is of the same document and
        not -100. `document_ids` must not decrease along a row; positions restart and attention
        stays within a document. `trained_tokens` overrides the count the loss is divided by: give
        the total over all micro-batches or ranks that share an optimizer step.
        """
        if torch.is_inference_mode_enabled():
            raise UnsupportedError(
                "inference_mode: a step computes gradients; inside it call evaluate"
            )
        self._refuse_changed(trains=True)
        inputs = self._inputs(input_ids, labels, document_ids)
        count = self._count(inputs, trained_tokens)
        return self._run(self.prepared(*input_ids.shape), inputs, count)

    def evaluate(
        self,
        input_ids: Tensor,
        labels: Tensor,
        document_ids: Tensor | None = None,
        *,
        trained_tokens: int | None = None,
    ) -> Tensor:
        """The same loss without gradients."""
        self._refuse_changed(trains=False)
        inputs = self._inputs(input_ids, labels, document_ids)
        count = self._count(inputs, trained_tokens)
        return self._run(self.prepared(*input_ids.shape, evaluation=True), inputs, count)

    def program(self, batch: int, tokens: int, *, evaluation: bool = False) -> Program:
        """The program that a step of this shape runs."""
        return self.prepared(batch, tokens, evaluation=evaluation).program

    def prepared(self, batch: int, tokens: int, *, evaluation: bool = False) -> PreparedProgram:
        """The same, with what is known of it."""
        if self._planner is not None:
            self._choose(RunSpec(batch, tokens))
        deterministic = torch.are_deterministic_algorithms_enabled()
        by_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        # By the last two kernels are chosen.
        key = batch, tokens, evaluation, deterministic, by_cudnn
        if key not in self._programs:
            build = build_evaluation if evaluation else build_program
            while len(self._programs) >= PROGRAMS_KEPT:
                del self._programs[next(iter(self._programs))]
            rank = ONLY if self.sharded_model is None else self.sharded_model.rank
            program = build(self.model_spec, RunSpec(batch, tokens), self.schedule, rank)
            storage = ProgramBuffers(program, self.arenas, self.boundary.dtype, self.copies)
            self._programs[key] = PreparedProgram(program, storage)
        return self._programs[key]

    def _reserve(self, program: Program) -> None:
        """Hold the program's arenas. Raises UnsupportedError where main memory could not, on all
        ranks."""
        grows = {
            tier: program.arena_bytes[tier] - arena.nbytes for tier, arena in self.arenas.items()
        }
        on_cpu = self.boundary.device.type == "cpu"
        needed = max(0, grows[Tier.HOST]) + (max(0, grows[Tier.DEVICE]) if on_cpu else 0)
        if self.weights is not None and program.trains():
            needed += self.weights.missing_bytes()
        # All ranks ask, also those whose arenas are large enough: the others must hear of them.
        ranks = None if self.sharded_model is None else self.sharded_model.ranks
        refuse_beyond_together(ranks, needed, f"a step of {program.run.tokens:,} tokens", ADVICE)
        reserve_together(ranks, self.arenas, program.arena_bytes, ADVICE)
        for arena in self.arenas.values() if self.poison else ():
            self.copies.synchronize()
            arena.poison()

    @property
    def seen(self) -> Seen | None:
        """The attention mass that the latest watched cell sees, for which the CPU waits; None:
        nothing was hidden."""
        return None if self._seen is None else self._seen()

    def arena_bytes(self) -> dict[Tier, int]:
        """What the arenas hold at present."""
        return {tier: arena.nbytes for tier, arena in self.arenas.items()}

    def release(self) -> None:
        """Give the arenas' memory back; the next step takes it again."""
        for arena in self.arenas.values():
            arena.release()
        if self.weights is not None:
            self.weights.release()

    def _state(self) -> tuple[Any, ...]:
        """What may change between steps and decides what a cell saves and draws."""
        model = self.boundary.model
        return model.dtype, model.training, *(p.requires_grad for p in model.parameters())

    def _refuse_changed(self, *, trains: bool) -> None:
        """Raises UnsupportedError where the model as it is now cannot be trained, or evaluated. One
        that has not changed since it was accepted is not looked at again."""
        model = self.boundary.model
        flags = (tuple(getattr(module, f, None) for f in _FLAGS) for module in model.modules())
        now = self._state(), repr(tuple(flags)), getattr(model.config, _ROUTER_LOSS, None)
        if self._accepted.get(trains) == now:
            return
        if trains and self.sharded_model is None:  # of a rank's part, nothing may be trained
            refuse_untrained(model)
        refuse_model(model)
        self._accepted[trains] = now

    def _describe(self) -> ModelSpec:
        model = self.boundary.model
        if self.boundary.dtype is torch.float16:
            raise UnsupportedError(
                "model: float16 gradients of a long sequence's mean loss vanish without loss "
                "scaling; load the model in bfloat16 or float32"
            )
        refuse_dropout(model)
        if self.sharded_model is None:
            refuse_places(model)
        device, dtype = self.boundary.device, self.boundary.dtype
        self._fused = self._wanted.fused and fused_for(device, dtype)
        self.kernels = attention_kernels(self._wanted, device, dtype, fused=self._fused)
        self._settings = nullcontext if self.kernels.is_ready() else self.kernels.ready
        self._fuse()
        spec = None if self.sharded_model is None else self.sharded_model.spec
        if spec is None:
            spec = describe(self.boundary.in_place(), self.boundary.device)
        if not self._on_host:
            self.weights = None
        else:
            if self.weights is None or not self.weights.is_of(self.boundary):
                self.weights = StreamedWeights(self.boundary)
            spec = self.weights.counted(spec)
        self.kernels.refuse(spec)
        if self._schedule is not None:
            self._schedule.group_sizes(len(spec.layers))
            self._tokenwise = () if self._schedule.mlp_chunk_size is None else self._tiles()
        self._programs.clear()
        return spec

    def _tiles(self) -> tuple[tuple[Tokenwise, ...], ...]:
        if self.sharded_model is None:
            return tokenwise(self.boundary.in_place())
        if not self.sharded_model.tiles:
            raise UnsupportedError(
                "mlp_chunk_size: the model was sharded for a schedule without; call parallelize "
                "with this schedule"
            )
        return self.sharded_model.tiles

    def _inputs(self, input_ids: Tensor, labels: Tensor, document_ids: Tensor | None) -> StepInputs:
        if self._state() != self._described and self.sharded_model is not None:
            raise UnsupportedError(
                "model: dtype, requires_grad or train/eval mode changed after sharding; set them "
                "before parallelize"
            )
        moved = self.weights is not None and not self.weights.is_of(self.boundary)
        if self._state() != self._described or moved:
            with torch.inference_mode(False):  # of an evaluation: cells are run with a graph
                self.model_spec = self._describe()
            self._described = self._state()
        elif self._shells_of is not None and self._shells_of != fingerprint(self.boundary):
            self._fuse()
        if torch.is_autocast_enabled(self.boundary.device.type):
            raise UnsupportedError(
                "autocast: the program is planned for one dtype; call the step outside autocast, "
                "and load the model in the dtype to compute in"
            )
        if self.sharded_model is not None:  # before anything that only some ranks may refuse
            for name, given in zip(_INPUTS, (input_ids, labels, document_ids), strict=True):
                value = given if isinstance(given, Tensor) else repr(given)
                self.sharded_model.ranks.refuse_unlike(name, value, *SEQUENCE, "pipeline")
        inputs = make_inputs(input_ids, labels, document_ids, self.model_spec.vocab)
        longest = int(inputs.position_ids.max()) + 1
        if self._limit is not None and longest > self._limit:
            refuse_context(self.boundary.model.config, longest)
        self.boundary.settle(self._longest(longest))
        return inputs

    def _longest(self, mine: int) -> int:
        """Of all replicas, whose sequences are one batch to the model."""
        if self.sharded_model is None or self.sharded_model.ranks.layout.data == 1:
            return mine
        return max(number for (number,) in self.sharded_model.ranks.figures([mine]))

    def _count(self, inputs: StepInputs, given: int | None) -> int:
        """What the sum of losses is divided by. Without a trained token the loss is 0."""
        if self.sharded_model is not None:
            self.sharded_model.ranks.refuse_unlike("trained_tokens", repr(given), *AXES)
        if given is not None:
            if given < 1:
                raise UnsupportedError(f"trained_tokens: expected at least 1, got {given}")
            return given
        trained = inputs.trained
        if self.sharded_model is not None:
            trained = int(
                self.sharded_model.ranks.among("data").sum(
                    torch.tensor([trained], device=self.boundary.device)
                )
            )
        return max(1, trained)

    def _run(self, prepared: PreparedProgram, inputs: StepInputs, count: int) -> Tensor:
        if self._running:
            raise RuntimeError("step: this Step is already running; use another Step")
        self._running = True
        gradients = GradientAccumulator(
            None if self.sharded_model is None else self.sharded_model.reduce
        )
        try:
            self._reserve(prepared.program)
            self._adding.gradients = gradients
            orders = prepared.orders if self.copies.overlap else None
            self.copies.begin()
            try:
                if self.weights is not None:
                    self.weights.begin(prepared.program, self.arenas[Tier.DEVICE])
                interpreter = self._interpreter(prepared, inputs, count, gradients)
                model = self.boundary.model
                with routed(model), uncast(model.parameters()), self._settings():
                    loss = interpreter.run(orders)
                if self.sharded_model is not None:
                    self.sharded_model.sharded.end()
                    self.sharded_model.ranks.among(*AXES).sum(loss)
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
        finally:
            self._adding.gradients = None
            self._running = False
        if interpreter.sparse is not None:
            self._seen = interpreter.sparse.seen or self._seen
        return loss.to(accumulate_dtype(self.boundary.dtype))

    def _interpreter(
        self,
        prepared: PreparedProgram,
        inputs: StepInputs,
        count: int,
        gradients: GradientAccumulator,
    ) -> Interpreter:
        boundary, tokens = self.boundary, self.schedule.loss_chunk_size
        prepared.storage.copies = self.copies  # others, where they are recorded or replayed
        return Interpreter(
            boundary=boundary,
            program=prepared.program,
            storage=prepared.storage,
            inputs=inputs,
            head=LossHead(boundary, count, tokens, self._outer_parameters(), self._fused),
            gradients=gradients,
            after=_Counter(prepared, self.progress),
            layers=self._layers(prepared, gradients),
            kernels=self.kernels,
            kernel_of=prepared.kernel_of,
            select=self.selector,
            watched=self._watched(prepared.program),
            sharded_model=self.sharded_model,
            weights=self.weights,
        )

    def _outer_parameters(self) -> tuple[nn.Parameter, ...]:
        if self.weights is not None:
            return self.weights.trained_outside()
        if self.sharded_model is not None:
            return self.sharded_model.outer_parameters()
        return tuple(self.boundary.outer_parameters())

    def _watched(self, program: Program) -> tuple[int, int] | None:
        """The cell whose seen mass this step measures; an evaluation measures none."""
        apart = self.sharded_model is not None and self.sharded_model.ranks.is_apart
        if not self.watches or not program.trains() or apart:
            return None
        self._steps += 1
        return watched_cell(program, self._steps - 1)

    def _layers(self, prepared: PreparedProgram, gradients: GradientAccumulator) -> Layers:
        tokens = self.schedule.mlp_chunk_size
        if self.sharded_model is not None and self.sharded_model.tensor is not None:
            return CutLayers(self.boundary, self.sharded_model.tensor, prepared.program)
        if tokens is None and not self._spared:
            return Layers(self.boundary)
        unread = prepared.unread
        if tokens is None:
            return SparingLayers(self.boundary, self._adding, unread, self._spared)
        return TiledLayers(self.boundary, self._tokenwise, tokens, unread, gradients.add)


def _written(
    schedule: Schedule | str, selector: object, ranks: object
) -> tuple[Schedule | None, Callable[[nn.Module, RunSpec, Kernels], Plan] | None]:
    """The schedule, or who chooses one."""
    if isinstance(schedule, Schedule):
        if selector is not None and schedule.sparse is None:
            raise UnsupportedError(
                "selector: dense attention selects no pages; set schedule.sparse"
            )
        return schedule, None
    if schedule != AUTO:
        raise UnsupportedError(
            f"schedule: expected a farspan.Schedule or 'auto', got {schedule!r}; for a named one, "
            "call farspan.strategy(name, layers, tokens)"
        )
    for name, given in ("selector", selector), ("ranks", ranks):
        if given is not None:
            raise UnsupportedError(
                f"{name}: schedule='auto' plans for dense attention in one process; give a "
                "schedule, such as that of farspan.plan, or use `farspan train`"
            )
    return None, load("farspan.train.planning", "StepPlanner")()


class _Counter:
    """Turns instructions into progress."""

    def __init__(
        self, prepared: PreparedProgram, progress: Callable[[Progress], None] | None
    ) -> None:
        self._progress = progress
        self._cells, self._done = 0, 0.0
        if progress is not None:
            self._work = prepared.work
            self._total = sum(self._work)

    def __call__(self, instruction: Instruction) -> None:
        if self._progress is None or not isinstance(instruction, _CELLS):
            return
        self._done += self._work[self._cells]
        self._cells += 1
        self._progress(Progress(self._cells, len(self._work), self._done, self._total))


_INPUTS = ("input_ids", "labels", "document_ids")
