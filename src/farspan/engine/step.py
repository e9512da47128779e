"""Train on one sequence longer than memory: the public call of a training step."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from farspan.attention.far import GivenSelector
from farspan.distributed.context import OF_BATCH, Agreement, Described, ParallelContext, agreement
from farspan.distributed.fsdp import Stage
from farspan.engine.buffers import ProgramBuffers
from farspan.engine.far import far_step
from farspan.engine.gradients import AccumulatingLinears, adds_products
from farspan.engine.kernels import attention_kernels
from farspan.engine.loss import HeadFunction, LogProbs, StepInputs, TopIds, make_inputs
from farspan.engine.parallelize import (
    UNREAD,
    ShardedModel,
    described,
    facts_of,
    inside,
    parallelize,
    refuse_schedule,
)
from farspan.engine.runner import (
    OpenForward,
    PreparedProgram,
    ProgramRunner,
    Progress,
    StepMemory,
)
from farspan.engine.streamed_weights import StreamedWeights, computing_device
from farspan.engine.tiers import CopyEngine
from farspan.hf.describe import describe
from farspan.hf.dropout import refuse_noise
from farspan.hf.edits import Look, first_edit, has_same_parts, look
from farspan.hf.fused_layers import fuse, spared_layers
from farspan.hf.stages import CausalLMStages, compile_layers
from farspan.hf.tiled_mlp import Tokenwise, tokenwise
from farspan.hf.unsupported import (
    context_limit,
    refuse_backward_hooks,
    refuse_context,
    refuse_dropout,
    refuse_dropout_of_head,
    refuse_model,
    refuse_places,
    refuse_untrained,
)
from farspan.kernels.launch import fused_for
from farspan.lazy import load
from farspan.planner.request import Plan
from farspan.program.builder import build_evaluation, build_program
from farspan.program.layout import ALONE, ONLY, streams
from farspan.program.program import Program
from farspan.program.strategies import AUTO
from farspan.spec import (
    Kernels,
    LossKind,
    ModelSpec,
    Objective,
    RunSpec,
    Schedule,
    UnsupportedError,
)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request for values of each token."""

    function: LogProbs | HeadFunction
    inputs: StepInputs
    own: list[nn.Parameter]  # parameters of the function
    trains: bool
    trains_model: bool


PROGRAMS_KEPT = 8  # of the latest shapes; one has up to 345,000 objects at 1M tokens
# Preparations kept for recent states of the same modules, as adapters or modes are switched: one
# takes 0.3 s for 30 layers on a CPU, and the memory of its programs' objects.
PREPARATIONS_KEPT = 4
_FOUND = (  # attributes set by a preparation
    *("boundary", "kernels", "model_spec", "weights", "_accepted", "_adding", "_drops", "_fused"),
    *("_limit", "_look", "_programs", "_settings", "_spared", "_tokenwise"),
)
# Attributes that may change in a sharded model, which cannot be probed again: modes, the numbers of
# buffers, adapters that are switched off, and fields that do not affect a step. Sharded parameters
# are checked separately.
_WHILE_SHARDED = (
    *("training", "_buffers", "_parameters", "_disable_adapters", "_adapters_disabled"),
    *UNREAD,
)
_Planner = Callable[..., Plan]  # `train.planning.StepPlanner`
_VALUES = Objective(LossKind.GRPO)  # plans for a backward after values


class Step(ProgramRunner):
    """Forward and backward of a causal LM on [batch, tokens], by a schedule.

    Behaves like `loss.backward()`: gradients are added to `.grad` of every trainable parameter, in
    its `grad_dtype` if set, so any optimizer and any training loop work. The gradients are those of
    plain full-sequence autograd. The model is not changed; it may be called and edited between
    steps. Modules run once per chunk and in some passes again, so forward hooks fire many times.
    Hooks on parameters are called once, when the call's gradients are complete.

    With `schedule="auto"` the planner chooses at the first call, as `strategy: auto` of a run file
    does: for the model in its present state, on this machine as `farspan calibrate` measured it (or
    measured then, in some seconds), with the free memory. Planning takes some seconds and logs a
    line; `schedule` and `plan` then hold the choice. If nothing fits with the weights on the device
    they move to main memory, permanently, and a second line says so: an optimizer then updates them
    there. Room is left for AdamW's states in float32: for another optimizer, give
    `farspan.plan(..., optimizer=...).schedule`. A batch with no more rows and no more tokens per
    row than a planned one runs by the same schedule, so call the longest batch first; a larger one,
    or one that trains more parameters, is planned again.

    Args:
        model: A causal LM of transformers, or a wrapper of one such as PEFT's.
        schedule: A `Schedule`, or "auto". With `schedule.weights` HOST the model moves to main
            memory.
        progress: Called after every cell; may raise to abandon the step.
        poison: Fill the arenas with NaN before every step: nothing may depend on their old content.
        overlap: Copy in parallel with the computation, the default on CUDA. The results have the
            same bits (on CUDA with `kernels.deterministic`, else up to rounding).
        kernels: Implementations of attention and other operations.
        selector: With `schedule.sparse`, chooses pages instead of the votes: one of
            `farspan.sparse.pages`, or a function of its arguments alone, from votes [B, Hk, M, n]
            and the range of their n pages to int32 [B, Hk, M, k] of pages or -1, k at most `budget
            // page`.
        ranks: All ranks make the same call with the same sequences (replicas along `data` with
            their own) and get the same loss; weights and gradients stay whole on each rank, unless
            `parallelize` has sharded the model.
        device: The device that computes, if weights are in main memory.
        weights: The streamed weights of another step of this model.
        head: The function that `values` calls.
        memory: Memory to share with another step, such as one of this model's reference.
        seed: Seed of dropout, next to the call's number (`drawn`) and a token's place.
        neftune_alpha: Noise on embeddings in training is at most this over sqrt(tokens * hidden).

    Raises:
        UnsupportedError: The model cannot be trained exactly in chunks, the schedule does not fit
            it, or no schedule fits the machine. If a step raises, `.grad` is undefined and must be
            cleared.
    """

    # Bytes of main memory that a step's forecast may use; None: all of it.
    host_room: int | None = None
    _compared: tuple[Look | None, Described] | None = None  # the model, for ranks to compare

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule | str,
        *,
        progress: Callable[[Progress], None] | None = None,
        poison: bool = False,
        overlap: bool | None = None,
        kernels: Kernels | None = None,
        selector: GivenSelector | None = None,
        ranks: ParallelContext | ShardedModel | None = None,
        device: torch.device | str | None = None,
        weights: StreamedWeights | None = None,
        head: HeadFunction | None = None,
        memory: StepMemory | None = None,
        seed: int = 0,
        neftune_alpha: float | None = None,
    ) -> None:
        context = ranks.ranks if isinstance(ranks, ShardedModel) else ranks
        self._wanted, self._overlap = kernels or Kernels(), overlap
        with agreement(context, "Step") as same:
            self.seed, self.neftune_alpha = seed, refuse_noise(neftune_alpha)
            self._schedule, self._planner = _written(schedule, selector)
            same.add({"schedule": "auto" if self._schedule is None else "written"})
            if isinstance(ranks, ShardedModel) and self._schedule is not None:
                refuse_schedule(same, self._schedule, ranks.ranks.layout, ranks.sharded.stage)
                ranks.refuse_elsewhere(self._schedule)
        self._whole_on = ranks if isinstance(ranks, ParallelContext) else None  # weights may move
        if isinstance(ranks, ParallelContext):
            ranks = self._keep_whole(model, ranks)
        self._plans: list[Plan] = []  # plans of the planner, if it chooses
        self.sharded_model, self._model = ranks, model
        self._device = device or getattr(weights, "device", None)  # device to compute on, if given
        self.progress, self.poison, self.head, self.weights = progress, poison, head, weights
        self._programs: dict[tuple[int | bool, ...], PreparedProgram] = {}
        self._tokenwise: tuple[tuple[Tokenwise, ...], ...] = ()
        self._preparations: list[dict[str, Any]] = []
        with agreement(context, "Step: preparing"):
            self.far = None if self._schedule is None else far_step(self._schedule, selector)
            self.boundary = self._stages()
            self._compute_on(self.boundary.device, memory)
            self._prepare()

    def _keep_whole(self, model: nn.Module, ranks: ParallelContext) -> ShardedModel:
        keep = partial(parallelize, stage=Stage.ZERO_0, keep=True, kernels=self._wanted)
        return keep(model, self._schedule or Schedule(), ranks)

    def _stages(self) -> CausalLMStages:
        ranks, model = self.sharded_model, self._model
        found = CausalLMStages(model, None if ranks is None else ranks.sharded.device)
        if self._on_host or self._device is not None:
            self._device = computing_device(found.device, self._device, self._on_host, ranks)
            found = CausalLMStages(model, self._device)
        return found

    def _compute_on(self, device: torch.device, memory: StepMemory | None = None) -> None:
        on_cuda = device.type == "cuda"
        overlap = on_cuda if self._overlap is None else self._overlap
        self.copies = CopyEngine(device, overlap=overlap)
        self.memory = StepMemory.on(device, memory)

    def _prepare(self) -> None:
        """Derive everything that steps need from the stages. Raises UnsupportedError."""
        self._adding = AccumulatingLinears()
        if self._wanted.compile:
            compile_layers(self.boundary)
        self._limit = context_limit(self.boundary.model)
        self.model_spec: ModelSpec = self._describe()
        self._accepted: set[bool] = set()
        sharded = self.sharded_model
        self._look: Look | None = self._look_now() if sharded is None else sharded.look
        self._preparations.append({name: getattr(self, name) for name in _FOUND})

    def _look_now(self) -> Look:
        """Return the model's present state; for a sharded model, without attributes that trainers
        set."""
        return look(self._model) if self.sharded_model is None else inside(self.boundary.model)

    def _prepare_for(self, now: Look) -> None:
        """Prepare for the model's present state, or reuse an earlier preparation for it. Raises
        UnsupportedError."""
        self._look = self.memory.open_forward = None  # until the new state is known
        known = [one for one in self._preparations if has_same_parts(one["_look"], now)]
        self._preparations = known[-PREPARATIONS_KEPT:]
        for one in known:
            weights = one["weights"]
            if one["_look"] == now and (weights is None or weights.is_of(one["boundary"])):
                self.__dict__.update(one)
                return
        self.boundary = self._stages()
        if self.boundary.device != self.memory.device:
            self._compute_on(self.boundary.device)
        self._prepare()

    def _accept(self, *, trains: bool) -> None:
        """Prepare again if the model has changed, as a new step would. Raises UnsupportedError as a
        new step does, and if the model cannot be trained, or evaluated."""
        now = self._look_now()
        moved = self.weights is not None and not self.weights.is_of(self.boundary)
        with torch.inference_mode(False):  # evaluation may run in it; cells are probed with a graph
            if self.sharded_model is not None:
                self._accept_sharded(now)
                self.model_spec = self._describe() if moved else self.model_spec
            elif moved or now != self._look:
                self._prepare_for(now)
        if trains not in self._accepted:
            if trains and self.sharded_model is None:  # a rank may train nothing
                refuse_untrained(self.boundary.model)
            if trains:
                refuse_backward_hooks(
                    self.boundary.model, over_ranks=self.sharded_model is not None
                )
            refuse_model(self.boundary.model)
            self._accepted.add(trains)

    def _accept_sharded(self, now: Look) -> None:
        """Check a sharded model's state; its layers cannot be probed again."""
        assert self.sharded_model is not None
        assert self._look is not None
        self.sharded_model.sharded.refuse_replaced(self.boundary.model)
        if now == self._look:
            return
        edit = first_edit(self._look, now, _WHILE_SHARDED)
        if edit is not None:
            raise UnsupportedError(
                f"model: {edit} changed after the model was sharded; change the model before "
                "parallelize, or load and shard it again"
            )
        refuse_dropout(self.boundary.model, is_cut=self.sharded_model.tensor is not None)
        self._fuse()
        self._drops = _drops(self.boundary.model)
        self._look, self._accepted = now, set()

    @property
    def plan(self) -> Plan | None:
        """The planner's plan for the present schedule; None if the planner did not choose it."""
        return next((p for p in self._plans if p.schedule is self._schedule), None)

    def _choose(self, run: RunSpec, loss: Objective) -> None:
        """Set `schedule` to one planned for batches at least as large, and for values of tokens if
        the loss uses them."""
        assert self._planner is not None, "the planner chooses"
        sharded = self.sharded_model
        if sharded is not None and sharded.ranks.layout.data > 1:  # replicas' batches may differ
            rows = sharded.ranks.figures([run.batch, run.tokens])
            run = RunSpec(max(batch for batch, _ in rows), max(tokens for _, tokens in rows))

        def covers(plan: Plan) -> bool:
            of, model = plan.question.run, plan.question.model
            wide = of.batch >= run.batch and of.tokens >= run.tokens
            same = model.element_bytes == self.model_spec.element_bytes
            same = same and plan.question.loss.is_cut >= loss.is_cut
            return wide and same and model.trainable >= self.model_spec.trainable

        # A plan for values also covers one pass, so programs are built once.
        covering = filter(covers, self._plans)
        found = max(covering, key=lambda plan: plan.question.loss.is_cut, default=None)
        if found is None:
            self.release()  # plan with the memory that is then free
            with torch.inference_mode(False), torch.enable_grad():  # planning runs backwards
                model, device = self.boundary.model, self.boundary.device
                moves = sharded is None or self._whole_on is not None
                found = self._planner(
                    model, device, run, self._wanted, loss, sharded=sharded, moves=moves
                )
            self._plans.append(found)
        if found.schedule is not self._schedule:
            self._programs.clear()
            self._preparations.clear()
            self._schedule = found.schedule
            if self._on_host and sharded is None:
                self._device = self.boundary.device
            if self._on_host != (self.weights is not None):
                if self._whole_on is not None:
                    self.sharded_model = self._keep_whole(self._model, self._whole_on)
                    self.boundary, self._look = self._stages(), self.sharded_model.look
                self.model_spec = self._describe()

    @property
    def _on_host(self) -> bool:
        """True if whole weights come from main memory."""
        layout = ALONE if self.sharded_model is None else self.sharded_model.rank.layout
        return self._schedule is not None and streams(self._schedule, layout)

    def _fuse(self) -> None:
        """Run modules on the device's own kernels, and add products to sums, if wanted. Slices of
        weights over ranks have their own shells. Shells are made for the model's present mode."""
        if self.sharded_model is not None and self.sharded_model.tensor is not None:
            return
        device, dtype = self.boundary.device, self.boundary.dtype
        adding = self._adding
        adding.adds = self._wanted.accumulate and adds_products(device, dtype)
        first = (adding.forward_of,) * adding.adds
        fuse(self.boundary, self._wanted, device, *first, linears=adding)
        self._spared = frozenset()
        if self._fused and self.sharded_model is None:
            self._spared = spared_layers(self.boundary)

    def __call__(
        self,
        input_ids: Tensor,
        labels: Tensor,
        document_ids: Tensor | None = None,
        *,
        trained_tokens: int | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Run forward and backward, and add the gradients to `.grad`.

        Args:
            input_ids: Token ids [batch, tokens].
            labels: Labels [batch, tokens], not shifted: a token is trained on the label of the next
                token, if that is of the same document and not -100.
            document_ids: The document of each token [batch, tokens], not decreasing along a row;
                positions restart and attention stays within a document.
            trained_tokens: Replaces the count that the loss is divided by: give the total over all
                micro-batches or ranks that share an optimizer step.
            weights: Weights [batch, tokens]: the loss is then -(weights * logprobs).sum() with
                `logprobs` below, divided by `trained_tokens` if given.

        Returns:
            The mean loss over trained tokens, a scalar.
        """
        with self._agreement("step") as same:
            if not torch.is_grad_enabled():
                inside = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
                raise UnsupportedError(
                    f"{inside}: gradients are off, and a step adds gradients to .grad; call "
                    "step.evaluate for the loss alone, or call the step outside of "
                    f"torch.{inside}()"
                )
            self._accept(trains=True)
            self._compare(same, trained_tokens=trained_tokens, draws=True)
            inputs = self._inputs(same, input_ids, labels, document_ids, weights)
        self._settle(same)
        count = self._count(same, inputs, trained_tokens)
        return self._run(self.prepared(*input_ids.shape), self._drawing(inputs), count)

    def evaluate(
        self,
        input_ids: Tensor,
        labels: Tensor,
        document_ids: Tensor | None = None,
        *,
        trained_tokens: int | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of a step without gradients; arguments as for a step."""
        with self._agreement("evaluate") as same:
            self._accept(trains=False)
            self._compare(same, trained_tokens=trained_tokens)
            inputs = self._inputs(same, input_ids, labels, document_ids, weights)
        self._settle(same)
        count = self._count(same, inputs, trained_tokens)
        return self._run(self.prepared(*input_ids.shape, evaluation=True), inputs, count)

    @overload
    def logprobs(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        temperature: float = 1.0,
        entropy: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def logprobs(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        temperature: float = 1.0,
        entropy: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...

    def logprobs(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return log-probabilities of labels, in fp32 (fp64 for a float64 model).

        If gradients are enabled the result is an ordinary tensor: compute any loss from it and call
        `backward()`, which adds to `.grad` of every trainable parameter. The forward's kept tensors
        stay in the step's memory until then; another call before the backward takes that memory,
        and the backward runs the forward again, which is logged. All ranks get the whole result,
        and gradients are summed over replicas along `data`.

        Args:
            labels: [batch, tokens], or [batch, tokens, k] for k ids a token; None: the tokens
                themselves.
            temperature: Divides the logits.
            entropy: Also return the entropy of each token's distribution, [batch, tokens].

        Returns:
            In the shape of labels, the log-probability of the next token's label; 0 without one or
            for -100.

        Raises:
            RuntimeError: In a backward after the weights have changed.
        """
        with self._agreement("logprobs") as same:
            if not isinstance(temperature, int | float) or not temperature > 0:
                raise UnsupportedError(
                    f"temperature: expected a number above 0, got {temperature!r}"
                )
            labels = input_ids.long() if labels is None else labels
            function = LogProbs(temperature, ("entropy",) * entropy)
            asked_for = self._asked(same, function, input_ids, labels, document_ids)
        found = self._values(same, asked_for)
        asked = found[..., : found.shape[2] - entropy]
        logprobs = asked if labels.ndim == 3 else asked[..., 0]
        return (logprobs, found[..., -1]) if entropy else logprobs

    @torch.no_grad()
    def top_logprobs(
        self,
        input_ids: Tensor,
        document_ids: Tensor | None = None,
        *,
        k: int,
        vocab: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the k likeliest next ids of each token and their log-probabilities, without
        gradients. Both are [batch, tokens, k], ids int64, such as a student is distilled from. With
        `vocab` only the first `vocab` ids count."""
        with self._agreement("top_logprobs") as same:
            function = TopIds(k=k, vocab=vocab)
            asked_for = self._asked(same, function, input_ids, input_ids.long(), document_ids)
        found = self._values(same, asked_for)
        return found[..., :k].long(), found[..., k:]

    def values(
        self,
        input_ids: Tensor,
        targets: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the values of `head` for every token, [batch, tokens, k], with gradients as
        `logprobs`. The head is called on some tokens at a time, with their hidden states after the
        model's final norm [n, hidden] and their `targets` [n, ...] (from [batch, tokens, ...], not
        shifted; None: the tokens), and returns [n, k]. If it is an `nn.Module` its parameters are
        trained too. Raises UnsupportedError without a head."""
        with self._agreement("values") as same:
            if self.head is None:
                raise UnsupportedError("head: this Step has none; give Step(..., head=function)")
            targets = input_ids if targets is None else targets
            if not isinstance(targets, Tensor) or targets.shape[:2] != input_ids.shape:
                raise UnsupportedError(
                    f"targets: expected a tensor [batch, tokens, ...] as long as input_ids "
                    f"{tuple(input_ids.shape)}, got {tuple(getattr(targets, 'shape', ()))}"
                )
            labels = input_ids.long()
            asked_for = self._asked(same, self.head, input_ids, labels, document_ids, targets)
        return self._values(same, asked_for)

    def program(self, batch: int, tokens: int, *, evaluation: bool = False) -> Program:
        """Return the program that a step of this shape runs."""
        return self.prepared(batch, tokens, evaluation=evaluation).program

    def prepared(
        self, batch: int, tokens: int, *, evaluation: bool = False, is_cut: bool = False
    ) -> PreparedProgram:
        """Return the prepared program of a step of this shape; with `is_cut` its backward comes
        later."""
        if self._planner is not None:
            self._choose(RunSpec(batch, tokens), _VALUES if is_cut else Objective())
        deterministic = torch.are_deterministic_algorithms_enabled()
        by_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        # The last two affect the choice of kernels.
        key = batch, tokens, evaluation, is_cut, deterministic, by_cudnn
        if key not in self._programs:
            build = build_evaluation if evaluation else partial(build_program, is_cut=is_cut)
            while len(self._programs) >= PROGRAMS_KEPT:
                del self._programs[next(iter(self._programs))]
            rank = ONLY if self.sharded_model is None else self.sharded_model.rank
            program = build(self.model_spec, RunSpec(batch, tokens), self.schedule, rank)
            storage = ProgramBuffers(program, self.arenas, self.boundary.dtype, self.copies)
            self._programs[key] = PreparedProgram(program, storage)
        return self._programs[key]

    def _describe(self) -> ModelSpec:
        model = self.boundary.model
        self._drops = _drops(model)
        if self.boundary.dtype is torch.float16:
            raise UnsupportedError(
                "model: float16 gradients of a long sequence's mean loss vanish without loss "
                "scaling; load the model in bfloat16 or float32"
            )
        sharded = self.sharded_model
        refuse_dropout(model, is_cut=sharded is not None and sharded.tensor is not None)
        if sharded is None:
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
        self._programs = {}
        return spec

    def _tiles(self) -> tuple[tuple[Tokenwise, ...], ...]:
        if self.sharded_model is None:
            return tokenwise(self.boundary.in_place())
        if not self.sharded_model.tiles:
            raise UnsupportedError(
                "mlp_chunk_size: the model was sharded without mlp_chunk_size; call parallelize "
                "again with this schedule"
            )
        return self.sharded_model.tiles

    def _agreement(self, call: str) -> AbstractContextManager[Agreement]:
        """Return a check that all ranks make the same call; a single process checks nothing."""
        return agreement(None if self.sharded_model is None else self.sharded_model.ranks, call)

    def _compare(
        self, same: Agreement, *, trained_tokens: int | None = None, draws: bool = False
    ) -> None:
        """Let ranks compare everything that decides a call, except its inputs."""
        if trained_tokens is not None and trained_tokens < 1:
            raise UnsupportedError(f"trained_tokens: expected at least 1, got {trained_tokens}")
        sharded = self.sharded_model
        if sharded is None:
            return
        same.add({"trained_tokens": repr(trained_tokens), "schedule": repr(self._schedule)})
        select = None if self.far is None else self.far.select
        same.add({"kernels": repr(self._wanted), **facts_of("selector", select)})
        if draws:
            same.add({"neftune_alpha": repr(self.neftune_alpha)})
            if self._drops or self.neftune_alpha:
                same.add({"seed": repr(self.seed), "drawn": repr(self.drawn)})
        if self._compared is None or self._compared[0] is not self._look:
            assert self._look is not None
            self._compared = self._look, described(self._look, self.boundary)
        same.add({"model": self._compared[1]})
        idle = self.weights is None or not self.weights.is_updating()
        sharded.compare(same, self.boundary, weights=idle)

    def _inputs(
        self,
        same: Agreement,
        input_ids: Tensor,
        labels: Tensor,
        document_ids: Tensor | None,
        weights: Tensor | None = None,
        *,
        several: bool = False,
    ) -> StepInputs:
        if torch.is_autocast_enabled(self.boundary.device.type):
            raise UnsupportedError(
                "autocast: the program is planned for one dtype; call the step outside autocast, "
                "and load the model in the dtype to compute in"
            )
        inputs = make_inputs(
            input_ids, labels, document_ids, self.model_spec.vocab, weights, several=several
        )
        if self.sharded_model is not None:
            given = zip(_INPUTS, (input_ids, labels, document_ids, weights), strict=True)
            same.add({n: repr(x) if x is None else x for n, x in given}, OF_BATCH)
        longest = int(inputs.position_ids.max()) + 1
        if self._limit is not None and longest > self._limit:
            refuse_context(self.boundary.model, longest)
        same.figures = [longest, inputs.trained]
        return inputs

    def _settle(self, same: Agreement) -> None:
        """Scale RoPE for the longest sequence of all replicas, which form one batch."""
        self.boundary.settle(max(longest for longest, _ in same.table))

    def _count(self, same: Agreement, inputs: StepInputs, given: int | None) -> int:
        """Return the divisor of the sum of losses; at least 1, so the loss is 0 without trained
        tokens."""
        if given is not None:
            return given
        if inputs.weights is not None:
            return 1
        replicas = [0]
        if self.sharded_model is not None:
            replicas = list(self.sharded_model.ranks.rank.peers("data"))
        return max(1, sum(same.table[number][1] for number in replicas))

    def _asked(
        self,
        same: Agreement,
        function: LogProbs | HeadFunction,
        input_ids: Tensor,
        labels: Tensor,
        document_ids: Tensor | None,
        targets: Tensor | None = None,
    ) -> _Asked:
        own: list[nn.Parameter] = []
        if isinstance(function, nn.Module):
            refuse_dropout_of_head(function)
            refuse_backward_hooks(function, over_ranks=True)
            own = list(function.parameters())
        trained = any(p.requires_grad for p in self.boundary.model.parameters())
        trains = torch.is_grad_enabled() and (trained or any(p.requires_grad for p in own))
        self._accept(trains=trains and trained)
        self._compare(same, draws=trains)
        if self.sharded_model is not None:
            same.add({"gradients": "wanted" if trains else "not wanted"})
            name = "head" if targets is not None else same.call
            same.add(facts_of(name, function, self.boundary.model))
            same.add({"targets": "None" if targets is None else targets}, OF_BATCH)
        several = targets is None
        inputs = self._inputs(same, input_ids, labels, document_ids, several=several)
        # The caller may write into its tensors before the backward reads them.
        inputs = replace(inputs, input_ids=input_ids.clone())
        if targets is not None:
            inputs = replace(inputs, targets=targets.clone())
        return _Asked(function, inputs, own, trains, trains and trained)

    def _values(self, same: Agreement, asked: _Asked) -> Tensor:
        inputs = self._drawing(asked.inputs) if asked.trains else asked.inputs

        def prepared() -> PreparedProgram:
            shape, trains = inputs.input_ids.shape, asked.trains
            return self.prepared(*shape, evaluation=not trains, is_cut=trains)

        def again() -> PreparedProgram:
            self._accept(trains=asked.trains_model)
            self._settle(same)
            return prepared()

        def marks() -> object:
            return self._marks(asked.own)

        self._settle(same)
        return OpenForward(self, prepared(), inputs, asked.function, marks, again).values()

    def _marks(self, own: list[nn.Parameter]) -> object:
        """Return a value that compares unequal after weights, or the set of trained ones, have
        changed."""
        sharded = self.sharded_model
        parameters = (
            self.boundary.model.parameters() if sharded is None else sharded.sharded.parameters()
        )
        found = [*(parameters.values() if isinstance(parameters, dict) else parameters), *own]
        # A DTensor and its shard have separate version counters.
        shards = [getattr(p, "_local_tensor", p) for p in found]
        versions = [x._version for x in (*found, *shards)]
        here = self.weights  # may have moved the weights unchanged
        where = [x.data_ptr() for x in shards]
        head = look(self.head) if isinstance(self.head, nn.Module) else None
        return look(self._model), head, versions, where if here is None else here.has_all()


def _written(schedule: Schedule | str, selector: object) -> tuple[Schedule | None, _Planner | None]:
    """Return the schedule or, for "auto", the planner."""
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
    if selector is not None:
        raise UnsupportedError(
            "selector: schedule='auto' plans for dense attention; give a schedule, such as that of "
            "farspan.plan, or use `farspan train`"
        )
    return None, load("farspan.train.planning", "StepPlanner")()


def _drops(model: nn.Module) -> bool:
    dropouts = (m for m in model.modules() if isinstance(m, nn.Dropout))
    return any(m.p > 0 and m.training for m in dropouts)


_INPUTS = ("input_ids", "labels", "document_ids", "weights")
