"""Train on one sequence longer than memory: the public call of a training step."""

from collections.abc import Callable
from math import inf
from operator import attrgetter
from typing import Generic, Literal, TypeVar, overload

import torch
from torch import Tensor, nn

from farspan.attention.far import GivenSelector, Seen
from farspan.distributed.agreement import agreement
from farspan.distributed.context import ParallelContext
from farspan.engine.calls import Calls, written
from farspan.engine.far import FarStep, far_step
from farspan.engine.graphs import StepGraphs
from farspan.engine.heads import FromLogits, HeadFunction, LogitsFunction, LogProbs, TopIds
from farspan.engine.kernels import AttentionKernels
from farspan.engine.parallelize import ShardedModel, refuse_schedule
from farspan.engine.preparation import Preparations, PreparedModel
from farspan.engine.runner import PreparedProgram, Progress, Runner, StepMemory
from farspan.engine.streamed_weights import StreamedWeights
from farspan.engine.tiers import Arena, CopyEngine
from farspan.engine.values import ask, values
from farspan.hf.dropout import refuse_noise
from farspan.hf.stages import CausalLMStages
from farspan.planner.request import Plan
from farspan.program.program import Instruction, Program
from farspan.spec import Kernels, ModelSpec, Products, Schedule, Tier, UnsupportedError

Value = TypeVar("Value")


class _OfPart(Generic[Value]):
    """Descriptor of an attribute that a part of the step has, such as `runner.progress`."""

    def __init__(self, path: str) -> None:
        self._found = attrgetter(path)
        self._part, _, self._name = path.rpartition(".")

    def __get__(self, step: "Step", _: type | None = None) -> Value:
        found: Value = self._found(step)
        return found

    def __set__(self, step: "Step", value: Value) -> None:
        setattr(attrgetter(self._part)(step), self._name, value)


class Step:
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
        router_z: Coefficient of the z-loss of a mixture of experts' routers (ST-MoE). Their
            load-balancing loss is added as the model's own forward adds it, if its configuration
            has `output_router_logits`.
        label_smoothing: Share of each label that all ids get alike, of the step's own loss.
        autocast: Run the modules of a float32 model under torch.autocast of this dtype, such as
            torch.bfloat16, as mixed precision training does.

    Raises:
        UnsupportedError: The model cannot be trained exactly in chunks, the schedule does not fit
            it, or no schedule fits the machine. If a step raises, `.grad` is undefined and must be
            cleared.
    """

    # Bytes of main memory that a step's forecast may use; None: all of it.
    host_room: int | None = None

    progress = _OfPart[Callable[[Progress], None] | None]("runner.progress")
    # Called when a program with a backward begins; returns a callback for each issued instruction.
    watch = _OfPart[Callable[[Program], Callable[[Instruction], None]] | None]("runner.watch")
    poison, watches = _OfPart[bool]("runner.poison"), _OfPart[bool]("runner.watches")
    far = _OfPart[FarStep | None]("runner.far")  # None: dense attention
    copies, memory = _OfPart[CopyEngine]("runner.copies"), _OfPart[StepMemory]("runner.memory")
    arenas = _OfPart[dict[Tier, Arena]]("runner.memory.arenas")  # with the programs' buffers
    # Attention coverage of the latest watched cell; None: nothing was hidden. The CPU waits for it.
    seen = _OfPart[Seen | None]("runner.seen")

    # The model as the latest call found it, with everything that steps derive from it.
    prepared_model = _OfPart[PreparedModel]("_calls.models.now")
    stages = _OfPart[CausalLMStages]("prepared_model.stages")
    model_spec = _OfPart[ModelSpec]("prepared_model.spec")
    kernels = _OfPart[AttentionKernels]("prepared_model.kernels")
    products = _OfPart[Products | None]("_calls.models.wanted.products")
    weights = _OfPart[StreamedWeights | None]("prepared_model.weights")
    sharded_model = _OfPart[ShardedModel | None]("prepared_model.sharded")

    # Number of the next call that may drop or add noise. A resumed training restores it.
    drawn, seed = _OfPart[int]("_calls.drawn"), _OfPart[int]("_calls.seed")
    neftune_alpha = _OfPart[float | None]("_calls.neftune_alpha")
    # Router losses of the latest call, with a graph after `logprobs` or `values`; else 0.
    router_loss = _OfPart[Tensor]("_calls.router_loss")  # all, by their coefficients
    aux_loss = _OfPart[Tensor]("_calls.aux_loss")  # the load-balancing loss, as in a model's output
    # The planner's plan for the present schedule; None if the planner did not choose it.
    plan = _OfPart[Plan | None]("_calls.plan")

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
        router_z: float = 0.0,
        label_smoothing: float = 0.0,
        autocast: torch.dtype | None = None,
    ) -> None:
        context = ranks.ranks if isinstance(ranks, ShardedModel) else ranks
        sharded = ranks if isinstance(ranks, ShardedModel) else None
        with agreement(context, "Step") as same:
            neftune_alpha = refuse_noise(neftune_alpha)
            asked, planner = written(schedule, selector)
            same.add({"schedule": "auto" if asked is None else "written"})
            if sharded is not None and asked is not None:
                refuse_schedule(same, asked, sharded.ranks.layout, sharded.sharded.stage)
                sharded.refuse_elsewhere(asked)
        wanted, whole = kernels or Kernels(), context if sharded is None else None
        on = device or getattr(weights, "device", None)
        models = Preparations(model, asked, wanted, sharded, whole, on, autocast)
        models.keep_whole()
        with agreement(context, "Step: preparing"):
            far = None if asked is None else far_step(asked, selector)
            models.begin(weights)
            memory = StepMemory.on(models.now.stages.device, memory)
        limits = ("label_smoothing", label_smoothing, 1), ("router_z", router_z, inf)
        for name, value, most in limits:
            if not isinstance(value, int | float) or not 0 <= value < most:
                raise UnsupportedError(
                    f"{name}: expected a number of at least 0, below {most}, got {value!r}"
                )
        graphs = StepGraphs() if wanted.graphs else None
        runner = Runner(memory, overlap, far, progress, poison, label_smoothing, graphs=graphs)
        self.head, self.runner = head, runner
        self._calls = Calls(models, self.runner, planner, seed, neftune_alpha, router_z)

    @property
    def schedule(self) -> Schedule:
        """The schedule; if the planner chooses, the one that the latest call ran. Raises
        UnsupportedError before the planner has chosen."""
        if self._calls.models.schedule is None:
            raise UnsupportedError("schedule: auto has not chosen yet; call the step first")
        return self._calls.models.schedule

    def arena_bytes(self) -> dict[Tier, int]:
        return {tier: arena.nbytes for tier, arena in self.arenas.items()}

    def release(self) -> None:
        """Free the memory of the arenas; the next step allocates it again."""
        self._calls.release()

    def program(self, batch: int, tokens: int, *, evaluation: bool = False) -> Program:
        """Return the program that a step runs for a batch of this shape."""
        return self.prepared(batch, tokens, evaluation=evaluation).program

    def prepared(
        self, batch: int, tokens: int, *, evaluation: bool = False, is_cut: bool = False
    ) -> PreparedProgram:
        """Return the program for a batch of this shape, with its cached tables. With `is_cut`,
        forward and backward run separately."""
        return self._calls.prepared(None, batch, tokens, evaluation=evaluation, is_cut=is_cut)

    def __call__(
        self,
        input_ids: Tensor,
        labels: Tensor,
        document_ids: Tensor | None = None,
        *,
        trained_tokens: int | None = None,
        weights: Tensor | None = None,
        attention_mask: Tensor | None = None,
        router_share: float = 1.0,
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
            attention_mask: 0 for padding, [batch, tokens], which router losses leave out; nothing
                else reads it.
            router_share: Share of the router losses to add, such as one over the micro-batches of
                an optimizer step.

        Returns:
            The mean loss over trained tokens, a scalar, with the router losses of each replica.
        """
        given = input_ids, labels, document_ids, weights, attention_mask, router_share
        return self.runner.run(*self._calls.ready("step", given, trained_tokens, trains=True))

    def evaluate(
        self,
        input_ids: Tensor,
        labels: Tensor,
        document_ids: Tensor | None = None,
        *,
        trained_tokens: int | None = None,
        weights: Tensor | None = None,
        attention_mask: Tensor | None = None,
        router_share: float = 1.0,
    ) -> Tensor:
        """Return the loss that a step would return, without gradients; takes the same arguments."""
        given = input_ids, labels, document_ids, weights, attention_mask, router_share
        return self.runner.run(*self._calls.ready("evaluate", given, trained_tokens, trains=False))

    @overload
    def logprobs(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        temperature: float = 1.0,
        entropy: Literal[False] = False,
        attention_mask: Tensor | None = None,
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
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def logprobs(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        attention_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return log-probabilities of labels, in fp32 (fp64 for a float64 model).

        If gradients are enabled, the result is an ordinary tensor with a graph: compute a loss from
        it and call `backward()`, which adds to `.grad` of every trainable parameter. Until then,
        tensors of the forward stay in the step's memory. Another call before the backward takes
        that memory: then the backward runs the forward again, and logs it. All ranks get the whole
        result; gradients are summed over replicas along `data`.

        Args:
            input_ids: Token ids [batch, tokens].
            labels: [batch, tokens], or [batch, tokens, k] for k ids per token; None: `input_ids`.
            document_ids: The document of each token [batch, tokens], as in a step.
            temperature: Divides the logits.
            entropy: Also return the entropy of each token's distribution, [batch, tokens].
            attention_mask: As in a step, for `router_loss` and `aux_loss`.

        Returns:
            In the shape of labels, the log-probability of the next token's label; 0 where the label
            is -100, and for the last token of a document.

        Raises:
            RuntimeError: In the backward, if the weights have changed since the forward.
        """
        with self._calls.agreement("logprobs") as same:
            if not isinstance(temperature, int | float) or not temperature > 0:
                raise UnsupportedError(
                    f"temperature: expected a number above 0, got {temperature!r}"
                )
            labels = input_ids.long() if labels is None else labels
            function = LogProbs(temperature, ("entropy",) * entropy)
            given = input_ids, labels, document_ids, None, attention_mask
            asked = ask(self._calls, same, function, *given)
        found = values(self._calls, same, asked, self.head)
        logprobs = found[..., : found.shape[2] - entropy]
        logprobs = logprobs if labels.ndim == 3 else logprobs[..., 0]
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
        """Return each token's k most likely next ids (int64) and their log-probabilities, both
        [batch, tokens, k], without gradients, for distillation. Only ids below `vocab` count."""
        with self._calls.agreement("top_logprobs") as same:
            function = TopIds(k=k, vocab=vocab)
            asked = ask(self._calls, same, function, input_ids, input_ids.long(), document_ids)
        found = values(self._calls, same, asked, self.head)
        return found[..., :k].long(), found[..., k:]

    @torch.no_grad()
    def from_logits(
        self,
        function: LogitsFunction,
        input_ids: Tensor,
        labels: Tensor,
        document_ids: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Return what a function computes of the logits of every token, without gradients.

        Args:
            function: Called with logits [1, n, vocab] and labels [1, n] of n tokens at a time.
                Returns one or several tensors [1, n, ...], each token's from its own logits alone,
                such as `logits.argmax(-1)`.
            input_ids: Token ids [batch, tokens].
            labels: Labels [batch, tokens], which are passed to the function unshifted.
            document_ids: The document of each token [batch, tokens], as in a step.

        Returns:
            The function's tensors for all tokens, [batch, tokens, ...].
        """
        head = FromLogits(function=function)
        with self._calls.agreement("from_logits") as same:
            if labels.shape != input_ids.shape:
                raise UnsupportedError(
                    f"labels: expected the shape of input_ids {tuple(input_ids.shape)}, got "
                    f"{tuple(labels.shape)}"
                )
            sharded = self.sharded_model
            if sharded is not None and sharded.ranks.layout.pipeline > 1:
                raise UnsupportedError(
                    "from_logits: in a pipeline only the last stage has logits; use a layout "
                    "without pipeline"
                )
            given = input_ids, input_ids.long(), document_ids, labels
            asked = ask(self._calls, same, head, *given)
        return head.unpacked(values(self._calls, same, asked, self.head))

    def values(
        self,
        input_ids: Tensor,
        targets: Tensor | None = None,
        document_ids: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the output of `head` for every token, [batch, tokens, k]. As with `logprobs`,
        `backward()` of a loss computed from it adds to `.grad`.

        The step calls the head on n tokens at a time, with their hidden states after the model's
        final norm [n, hidden] and their `targets` [n, ...]; it returns [n, k]. `targets` are
        [batch, tokens, ...], not shifted; None: the token ids. Parameters of an `nn.Module` are
        trained too. Raises UnsupportedError if the step has no head.
        """
        with self._calls.agreement("values") as same:
            if self.head is None:
                raise UnsupportedError("head: this Step has none; give Step(..., head=function)")
            targets = input_ids if targets is None else targets
            if not isinstance(targets, Tensor) or targets.shape[:2] != input_ids.shape:
                raise UnsupportedError(
                    f"targets: expected a tensor [batch, tokens, ...] as long as input_ids "
                    f"{tuple(input_ids.shape)}, got {tuple(getattr(targets, 'shape', ()))}"
                )
            given = input_ids, input_ids.long(), document_ids, targets, attention_mask
            asked = ask(self._calls, same, self.head, *given)
        return values(self._calls, same, asked, self.head)
