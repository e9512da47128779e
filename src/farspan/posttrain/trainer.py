"""transformers' Trainer with farspan's steps.

    class LongDPOTrainer(farspan.LongContext, DPOTrainer): ...

Everything but the forward and backward stays the Trainer's: data, optimizer, learning rate
schedule, clipping, logging, callbacks and checkpoints. A plain Trainer's loss is computed by the
step, in one pass. TRL's trainers compute their own losses and metrics from their model's outputs:
here a step computes these outputs, and their backward runs the rest of the step.
"""

import copy
import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers import Trainer as HuggingFaceTrainer
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from farspan.attention.far import GivenSelector
from farspan.distributed.context import ParallelContext
from farspan.engine.heads import STATISTICS, HeadFunction, LogProbs
from farspan.engine.loss import IGNORED, document_starts, shift_labels, trained_token_count
from farspan.engine.parallelize import ShardedModel, parallelize
from farspan.engine.step import Step
from farspan.hf.routers import ADDED
from farspan.hf.swap import forwards, put
from farspan.hf.unsupported import refuse_adapters, rope_types
from farspan.posttrain.ranks import (
    complete_gradients,
    context_of,
    cut_what_is_loaded,
    keep_states_whole,
    share,
    trained_as,
    whole_state,
)
from farspan.program.layout import Layout
from farspan.program.strategies import AUTO
from farspan.spec import Kernels, Schedule, Tier, UnsupportedError

LOG = logging.getLogger(__name__)
_READ = frozenset({"input_ids", "labels", "attention_mask", "position_ids"})
# Keys that collators add and that position_ids already imply.
_IMPLIED = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})
# Arguments of a Trainer that change the computation, the value that farspan needs, and the remedy.
_ARGUMENTS = {
    "fp16": (False, "load the model with dtype=torch.bfloat16 instead"),
    "bf16_full_eval": (False, "evaluation computes in the dtype of the weights"),
    "fp16_full_eval": (False, "evaluation computes in the dtype of the weights"),
    "torch_compile": (False, "give kernels=farspan.spec.Kernels(compile=True) instead"),
    "use_liger_kernel": (False, "farspan has its own kernels; choose them with `kernels`"),
    "activation_offloading": (False, "the schedule decides what goes to main memory"),
    "label_smoothing_factor": (0.0, "TRL's trainers would read all logits for it"),
    "loss_type": ("nll", "a step computes only the plain loss; upgrade TRL for other losses"),
    "cast_lm_head_to_fp32": (False, "logits are computed in the dtype of the weights"),
    "deepspeed": (None, "its engine would run the backward itself; leave deepspeed out"),
    "fsdp": (None, "to shard weights over ranks, give layout=farspan.Layout(...) instead"),
    "n_gpu": (1, "set CUDA_VISIBLE_DEVICES to one GPU"),
}
# Values with the same meaning: no GPU equals one, and TRL had the plain loss under two names.
_AS_GOOD = {("n_gpu", 0), ("loss_type", "chunked_nll")}
# Optimizers that update within the Trainer's own backward.
_IN_BACKWARD = ("lomo", "layerwise")
_MOVED = "farspan-weights-on-host"  # in a checkpoint if the planner had moved the weights
# Trainers whose loss is the plain one, unless the arguments ask for another.
_PLAIN = {("transformers.trainer", "Trainer"), ("trl.trainer.sft_trainer", "SFTTrainer")}
# Methods of another Trainer that are not called.
_REPLACED = ("training_step", "prediction_step", "_get_num_items_in_batch")
# TRL trainers that compute their loss from their model's outputs for each token, and the first
# release in which they request nothing else.
_BY_VALUES = tuple(f"{name}Trainer" for name in ("SFT", "DPO", "KTO", "Reward", "GRPO", "RLOO"))
_FUSED, _SINCE = "add_fused_lm_head", "1.16"
# For those with a reference model, the batch keys of its log-probabilities if computed before.
_REFERENCE = {"DPOTrainer": ("ref_chosen_logps", "ref_rejected_logps")}
_REFERENCE |= {"KTOTrainer": ("ref_logps", "ref_KL_logps")}

_Predicted = tuple[Tensor | None, Tensor | None, Tensor | None]  # loss, outputs, labels


class LongContext:
    """Mixin that runs a Trainer's steps by `schedule`; it precedes the Trainer among the bases.

    Gradients equal those of the plain Trainer, also for sequences that are too long for its memory.
    No token sees or predicts across padding, nor from one packed document to the next (position_ids
    that restart). Gradient checkpointing that the arguments turn on is left to the schedule. With
    `bf16` steps run the modules of float32 weights under autocast. If they cannot, as with a
    schedule that is planned, it is refused or, if a configuration turns it on by itself (TRL's),
    left to the dtype of the weights. Log lines say so.

    With TRL's SFT, DPO, KTO, Reward, GRPO and RLOO trainers, losses and metrics come from TRL's own
    code. A reference model, and the model without its adapters, run by the same schedule; the
    reference of DPO and KTO runs before the model's forward, whose activations stay saved until its
    backward. GRPO and RLOO generate with the model's own method.

    Args:
        schedule, kernels, selector: As in a `Step`.
        layout: How several processes (torchrun, accelerate launch) share a step. Ranks that share
            sequences get the same batches; those along `data` have their own, as the processes of a
            plain Trainer. With its `fsdp` weights, gradients and optimizer states are sharded over
            ranks; checkpoints hold whole tensors, and a run may continue in another layout.

    Raises:
        UnsupportedError: A setting would change the results (at construction or the first step).
    """

    # Set it if the overrides of `compute_loss`, `training_step` or `prediction_step` in the other
    # Trainer's class compute the plain loss and nothing else.
    plain_loss = False
    _autocasts: bool | None = None  # whether steps run modules under autocast; None: not known yet

    accelerator: Any
    args: Any
    model: Any
    optimizer: Any
    state: Any
    model_accepts_loss_kwargs: bool
    compute_metrics: Any
    preprocess_logits_for_metrics: Any
    neftune_noise_alpha: Any
    current_gradient_accumulation_steps: int
    ref_model: Any  # in TRL's trainers as well
    precompute_ref_logps: bool
    _prepare_inputs: Callable[..., dict[str, Any]]

    def __init__(
        self,
        *args: Any,
        schedule: Schedule | str = AUTO,
        kernels: Kernels | None = None,
        layout: Layout | None = None,
        selector: GivenSelector | None = None,
        **kwargs: Any,
    ) -> None:
        self._by_values = _asks_for_values(type(self))
        if not self._by_values:
            self._refuse_other_methods()
        self._schedule, self._kernels = schedule, kernels
        self._layout, self._selector = layout, selector
        self._ranks: ParallelContext | None = None
        self._sharded: ShardedModel | None = None
        self._forwards: list[_Forward] = []
        self._calls, self._number = (-1, 0), 0  # updates and calls since the last one; all calls
        self._preprocess: Any = None  # the user's `preprocess_logits_for_metrics`, in evaluations
        self._moved = False  # whether the planner has moved the model's weights to main memory
        super().__init__(*args, **kwargs)
        refuse_adapters(self.model)  # before prompt tuning changes the tokens of a batch
        self._one_pass: Step | None = None
        self._one_pass_of: Any = None  # the model that this step is for
        # The Trainer would add a hook that draws other noise in every pass.
        self.neftune_noise_alpha = None
        self._refuse_other_arguments()
        self._leave_checkpointing()
        self._leave_autocast()
        self._shard()
        if self._by_values:
            self._replace_forwards()
        evaluates = str(getattr(self.args.eval_strategy, "value", self.args.eval_strategy)) != "no"
        rewards = any(forward.classifies for forward in self._forwards)
        metrics = self.compute_metrics is not None and not self.args.prediction_loss_only
        if evaluates and metrics and not rewards:
            self._refuse_outputs()

    def _replace_forwards(self) -> None:
        if self._forwards:
            return
        self._shard()
        if getattr(self, "aux_loss_enabled", False):  # of routers: TRL asks for it in every call
            unwrap = getattr(self.model, "get_base_model", lambda: self.model)
            put([(vars(unwrap()), ADDED, True)])
        for model in (self.model, getattr(self, "ref_model", None)):
            if model is not None:
                self._forwards.append(_Forward(model, self._step_of, self._forwards))
        for forward in self._forwards:  # a reference with equal weights then has equal bits
            forward.head = self._forwards[0].head
            weakref.finalize(self, setattr, forward, "step", None)  # frees the step's memory

    def create_accelerator_and_postprocess(self) -> None:
        """Create the Trainer's accelerator so that it does not wrap forwards, and leaves a model in
        main memory if the schedule says so."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.native_amp = False
        self._ranks = context_of(self.accelerator, self._layout, type(self))
        if self._ranks is not None:
            share(self.accelerator, self._ranks)
        if self._on_host():  # else it would place batches and states as well
            self.accelerator.device_placement = False

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Return the loss of one batch, divided by the trained tokens of all batches of the update.
        Gradients are added to `.grad`."""
        self._count_draws()
        self._refuse_other_arguments()  # the user may have changed them since
        if self._by_values:
            own: Any = super()
            loss: Tensor = own.training_step(model, inputs, num_items_in_batch)
        else:
            loss = self._one_pass_step(model, inputs, num_items_in_batch)
        if self._ranks is not None and self.accelerator.sync_gradients:
            complete_gradients(self.model, self._ranks)
        self._follow_weights()
        return loss

    def _follow_weights(self) -> None:
        """Move the optimizer's states to main memory if the planner moved the weights there."""
        steps = (self._one_pass, *(forward.step for forward in self._forwards[:1]))
        now = any(step is not None and step.plan and step.weights is not None for step in steps)
        if now and not self._moved:
            self._moved = True
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
            optimizer.load_state_dict(optimizer.state_dict())  # to the device of the weights

    def _one_pass_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None
    ) -> Tensor:
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        inputs = self._prepare_inputs(inputs)
        batch, share = _batch(inputs, self.model.config), 1.0
        trained = self._divisor(num_items_in_batch, batch)
        if num_items_in_batch is None:
            share /= 1 if self._ranks is None else self._ranks.layout.data
        scaled = getattr(self, "loss_is_scaled_for_ga", None)  # since transformers 5.19
        if scaled is None:
            scaled = num_items_in_batch is not None
        if not scaled:
            trained *= self.current_gradient_accumulation_steps
            share /= self.current_gradient_accumulation_steps
        step, how = self._farspan(), self._routing(inputs, share)
        return step(*batch, trained_tokens=max(1, trained), **how).detach()

    def _routing(self, inputs: Mapping[str, Any], share: float) -> dict[str, Any]:
        """Return the arguments by which a step adds this share of the model's router losses; 0 if
        the Trainer smooths labels, since it then computes the loss itself, without them."""
        if self._farspan().prepared_model.routers is None:
            return {}
        share = 0.0 if self.args.label_smoothing_factor else share
        return {"attention_mask": inputs.get("attention_mask"), "router_share": share}

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> "_Predicted":
        """Return (loss, outputs, labels) of one batch. The outputs, for metrics, are what the
        user's `preprocess_logits_for_metrics` makes of the logits. Without that function this
        raises UnsupportedError: all logits of a long sequence do not fit in memory."""
        self._refuse_other_arguments()
        rewards = any(forward.classifies for forward in self._forwards)
        if not prediction_loss_only and not rewards:
            self._refuse_outputs()
        if self._by_values:
            own: Any = super()
            found: _Predicted = own.prediction_step(
                model, inputs, prediction_loss_only, ignore_keys
            )
            return found
        model.eval()
        inputs = self._prepare_inputs(inputs)
        batch = ids, _, documents = _batch(inputs, self.model.config)
        trained = self._divisor(self._get_num_items_in_batch([inputs], ids.device), batch)
        how = {"trained_tokens": max(1, trained), **self._routing(inputs, 1.0)}
        loss = self._farspan().evaluate(*batch, **how).detach()
        if trained == 0:  # as the plain Trainer, whose mean leaves it out
            loss = torch.full_like(loss, torch.nan)
        if prediction_loss_only:
            return loss, None, None
        labels = inputs["labels"]
        function = self._preprocess or self.preprocess_logits_for_metrics
        outputs: Any = self._farspan().from_logits(function, ids, labels, documents)
        return loss, outputs, labels

    def _refuse_outputs(self) -> None:
        """Raise UnsupportedError if a user's metrics would need the logits of whole sequences."""
        if self._by_values:
            raise UnsupportedError(
                "outputs: evaluation of TRL's trainers returns only the loss; leave out "
                "compute_metrics and predict, or set prediction_loss_only=True"
            )
        if self._preprocess is None and self.preprocess_logits_for_metrics is None:
            raise UnsupportedError(
                "preprocess_logits_for_metrics: missing, and logits of a whole sequence would not "
                "fit into memory; give the Trainer a function of each token's logits, such as "
                "preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1)"
            )

    def evaluation_loop(self, *args: Any, **keywords: Any) -> Any:
        """Run the Trainer's own loop. Each prediction step calls `preprocess_logits_for_metrics`
        itself, on some tokens at a time: the logits of all tokens may not fit in memory."""
        own: Any = super()
        if self._by_values:
            return own.evaluation_loop(*args, **keywords)
        function = self.preprocess_logits_for_metrics
        if function is None:  # or another loop has taken it
            return own.evaluation_loop(*args, **keywords)
        self._preprocess, self.preprocess_logits_for_metrics = function, None
        try:
            return own.evaluation_loop(*args, **keywords)
        finally:
            self._preprocess, self.preprocess_logits_for_metrics = None, function

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **keywords: Any) -> Any:
        """Return the loss of the Trainer's own method, but first compute a reference model's
        log-probabilities. TRL would do so between the policy's forward and backward, overwrite
        activations in the memory that both models share, and so repeat the forward."""
        compute = super().compute_loss  # type: ignore[misc]
        names = next(
            (_REFERENCE[k.__name__] for k in type(self).__mro__ if k.__name__ in _REFERENCE), ()
        )
        if not self._by_values or not names or self.precompute_ref_logps:
            return compute(model, inputs, *args, **keywords)
        asked = self.model if self.ref_model is None else self.ref_model
        references = zip(names, self.compute_ref_log_probs(asked, inputs), strict=True)
        self.precompute_ref_logps = True
        try:
            return compute(model, {**inputs, **dict(references)}, *args, **keywords)
        finally:
            self.precompute_ref_logps = False

    def compute_ref_log_probs(self, model: nn.Module, inputs: Any) -> Any:
        """Compute the reference model's log-probabilities with TRL's method, which TRL may call for
        a whole dataset in advance."""
        self._replace_forwards()
        return super().compute_ref_log_probs(model, inputs)  # type: ignore[misc]

    def _get_num_items_in_batch(
        self, batch_samples: list[dict[str, Any]], device: torch.device
    ) -> Tensor | None:
        """Return the number of trained tokens in all batches of an update, by which its loss is
        divided, or None if the user asks for the mean of each batch. Like transformers, count first
        labels of rows too for a model whose loss it does not know to shift them, such as GPT-2."""
        counts = batch_samples and "labels" in batch_samples[0]
        if not counts or not self.model_accepts_loss_kwargs:
            return None
        found, shifts = 0, getattr(self, "_loss_shifts_labels", True)  # not in older releases
        for inputs in batch_samples:
            _, labels, documents = _batch(inputs, self.model.config)
            found += trained_token_count(labels, documents)
            found += 0 if shifts else int((labels[:, 0] != IGNORED).sum())
        return torch.tensor(self._of_replicas(found), device=device)

    def _divisor(self, given: Tensor | int | None, batch: tuple[Any, ...]) -> int:
        return self._of_replicas(trained_token_count(*batch[1:])) if given is None else int(given)

    def _of_replicas(self, mine: int) -> int:
        if self._ranks is None:
            return mine
        found = torch.tensor([mine], device=self._ranks.device)
        return int(self._ranks.among("data").sum(found))

    def _farspan(self) -> Step:
        # `model_init`, and a search for hyperparameters, replace the model.
        if self._one_pass is None or self._one_pass_of is not self.model:
            self._one_pass, self._one_pass_of = self._step_of(self.model), self.model
        return self._one_pass

    def _step_of(self, model: nn.Module, **further: Any) -> Step:
        if self._autocasts is None:  # TRL may compute references before its own __init__ ends
            self._leave_autocast()
        asked = torch.bfloat16 if self._autocasts else None
        try:
            step = self._new_step(model, autocast=asked, **further)
        except UnsupportedError as error:
            if asked is None or not str(error).startswith("autocast: "):
                raise
            if not self._is_default("bf16"):
                raise UnsupportedError(f"bf16: {error}") from error
            self._autocasts = False  # of the reference, too
            LOG.warning(
                "bf16: no %s; steps compute in float32, the weights' dtype. To compute in "
                "bfloat16, load the model with dtype=torch.bfloat16",
                str(error).partition(";")[0],
            )
            step = self._new_step(model, **further)
        step.drawn = self._number
        return step

    def _new_step(self, model: nn.Module, **further: Any) -> Step:
        return Step(
            model,
            self._schedule,
            kernels=self._kernels,
            selector=self._selector,
            device=self.args.device if self._on_host() and self._ranks is None else None,
            ranks=self._sharded if model is self.model and self._sharded else self._ranks,
            seed=self.args.seed,
            neftune_alpha=self.args.neftune_noise_alpha,
            label_smoothing=self.args.label_smoothing_factor,
            **further,
        )

    def _count_draws(self) -> None:
        """Seed dropout by this batch's place in training, so that a resumed run draws the same."""
        updates, calls = self._calls
        now = self.state.global_step
        self._calls = now, calls + 1 if updates == now else 0
        self._number = now * self.args.gradient_accumulation_steps + self._calls[1]
        for step in (self._one_pass, *(forward.step for forward in self._forwards)):
            if step is not None:
                step.drawn = self._number

    def _shard(self) -> None:
        ranks = self._ranks
        if ranks is None or not ranks.layout.cuts_weights() or self._sharded:
            return
        # The planner sees a batch only at the first step, and leaves weights in place then.
        written = self._schedule if isinstance(self._schedule, Schedule) else Schedule()
        self._sharded = parallelize(self.model, written, ranks, kernels=self._kernels)
        cut_what_is_loaded(self.model)

    def create_optimizer(self, *args: Any, **keywords: Any) -> Any:
        """Create the Trainer's own optimizer, whose saved states are unsharded."""
        optimizer = super().create_optimizer(*args, **keywords)  # type: ignore[misc]
        if self._sharded is not None:
            keep_states_whole(optimizer)
        return optimizer

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self._sharded is not None and state_dict is None:
            state_dict = whole_state(self.model, self._sharded)
        super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._sharded is not None and not self.args.should_save:
            self.optimizer.state_dict()  # collective: all ranks take part
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        if self._moved and self.args.should_save:
            (Path(output_dir) / _MOVED).touch()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the Trainer's saved states. Weights and states go to main memory if the planner had
        moved them there."""
        of_planner = self._schedule == AUTO and self._ranks is None and checkpoint is not None
        if of_planner and (Path(str(checkpoint)) / _MOVED).exists():
            self._moved = True
            self.model.to("cpu")
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    def _on_host(self) -> bool:
        written = isinstance(self._schedule, Schedule) and self._schedule.weights is Tier.HOST
        return written or self._moved

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not self._on_host():
            super()._move_model_to_device(model, device)  # type: ignore[misc]

    def _refuse_other_methods(self) -> None:
        """Raise UnsupportedError if overridden methods may compute another loss."""
        kinds = type(self).__mro__
        behind = kinds[kinds.index(LongContext) + 1 :]
        others = [kind for kind in kinds if kind is not LongContext]
        for name, asked in ("compute_loss", others), *((name, behind) for name in _REPLACED):
            for kind in asked:
                if name not in vars(kind) or (kind.__module__, kind.__name__) in _PLAIN:
                    continue
                if kind.__module__.partition(".")[0] == "trl":
                    raise UnsupportedError(
                        f"{name}: TRL's {kind.__name__} computes its own loss from model outputs "
                        f"that farspan does not return; use one of {', '.join(_BY_VALUES)} of TRL "
                        f"{_SINCE} or newer, or call Step.logprobs and farspan.losses in a loop of "
                        "your own"
                    )
                if not self.plain_loss:
                    raise UnsupportedError(
                        f"{name}: {type(self).__name__} overrides it, and a farspan step does not "
                        "call it; if it computes the plain loss, set plain_loss = True in the class"
                    )

    def _refuse_other_arguments(self) -> None:
        for name, (needed, instead) in _ARGUMENTS.items():
            if (name, self._by_values) in (("loss_type", True), ("label_smoothing_factor", False)):
                continue
            given = getattr(self.args, name, needed)
            off = given is None or not (given or needed)  # False, 0 and an empty name count as off
            if given != needed and not off and (name, given) not in _AS_GOOD:
                raise UnsupportedError(
                    f"{name}: a step of farspan needs {needed}, got {given}: {instead}"
                )
        optimizer = str(getattr(self.args.optim, "value", self.args.optim))
        if any(part in optimizer for part in _IN_BACKWARD):
            raise UnsupportedError(
                f"optim: {optimizer} updates weights within the Trainer's own backward, which a "
                "step of farspan replaces; use one that updates after it"
            )
        replicas = 1 if self._ranks is None else self._ranks.layout.data
        if replicas > 1 and not self.args.average_tokens_across_devices:
            raise UnsupportedError(
                "average_tokens_across_devices: a step of several replicas needs True, got False: "
                "its loss is the mean over the trained tokens of all replicas"
            )
        if getattr(self, "compute_loss_func", None) is not None:
            raise UnsupportedError("compute_loss_func: steps compute the plain loss; leave it out")

    def _leave_checkpointing(self) -> None:
        """Turn off gradient checkpointing: the schedule decides what to recompute."""
        names = ("gradient_checkpointing", "activation_checkpointing")  # renamed in 5.23
        if not any(getattr(self.args, name, None) for name in names):
            return
        LOG.warning("gradient_checkpointing: turned off; the schedule decides what is recomputed")
        self.args = copy.copy(self.args)  # another Trainer may share the same arguments
        for name in names:
            if hasattr(self.args, name):
                setattr(self.args, name, False)
        if hasattr(self.model, "disable_input_require_grads"):  # TRL enables it for adapters
            self.model.disable_input_require_grads()

    def _is_default(self, name: str) -> bool:
        """Return whether a configuration turns an argument on by itself, as TRL's does bf16."""
        return any(f.name == name and f.default is not False for f in fields(self.args))

    def _leave_autocast(self) -> None:
        """Leave autocast to steps, which run the modules of float32 weights under it; those of
        bfloat16 weights compute in bfloat16 anyway."""
        dtype = self.model.dtype
        self._autocasts = bool(self.args.bf16) and dtype is torch.float32
        if not self.args.bf16:
            return
        if dtype not in (torch.float32, torch.bfloat16):
            raise UnsupportedError(
                f"bf16: autocast is for float32 weights, and these are {dtype}; load the model "
                "with dtype=torch.bfloat16"
            )
        if dtype is torch.bfloat16:
            LOG.warning("bf16: no autocast; steps compute in the weights' dtype, bfloat16")
        self.accelerator.native_amp = False


class _Forward:
    """Replacement for a forward, which returns the same outputs from a farspan step: a classifier's
    logits per sequence or, if TRL gave the model a fused head, log-probabilities per token."""

    def __init__(
        self,
        model: Any,
        step_of: Callable[..., Step],
        beside: "list[_Forward]",
    ) -> None:
        """Replace the forward of `model`. `beside` lists the replacements for all models of the
        Trainer, whose steps use the same memory in turn."""
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._own = base.forward
        self._function = getattr(self._own, "__func__", None)
        told = inspect.getclosurevars(self._function).nonlocals if self._function else {}
        self._model, self._base, self._beside = model, base, beside
        self._step_of = weakref.WeakMethod(step_of)  # the trainer may be freed first
        self._trained = {p: p.requires_grad for p in model.parameters()}
        self.step: Step | None = None
        self.classifies = "outputs" not in told
        if self.classifies:
            self.head: HeadFunction = self._score
        else:
            further = tuple(name for name in told["outputs"] if name != "log_probs")
            unknown = set(further) - STATISTICS.keys()
            if unknown:
                raise UnsupportedError(
                    f"outputs: TRL asks for {min(unknown)} of each token, which a step does not "
                    f"compute; use TRL {_SINCE}"
                )
            self.head = LogProbs(told["temperature"], further)
        functools.update_wrapper(self, self._own)
        put(forwards({base: self}))

    def __call__(self, *args: Any, fused_lm_head: bool = False, **inputs: Any) -> Any:
        if not fused_lm_head and not (self.classifies and self._step_of()):  # generation
            return self._own(*args, **inputs)
        if args or inputs.get("shift_labels") is not None:
            raise UnsupportedError("forward: pass input_ids and labels as keyword arguments")
        unread = ("use_cache", "shift_labels", "margin", "return_dict", "output_router_logits")
        count = inputs.pop("num_items_in_batch", None)
        inputs = {n: value for n, value in inputs.items() if n not in unread and value is not False}
        return self._rewards(inputs) if self.classifies else self._log_probs(inputs, count)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return type(self._base).forward.__get__(copy.deepcopy(self._base, memo))

    def _log_probs(self, inputs: dict[str, Any], count: Any) -> Any:
        """Return the outputs of TRL's fused head, each of shape [batch, tokens - 1]."""
        ids, labels, documents = _batch(inputs, self._base.config)
        targets = shift_labels(labels, documents)
        mask = targets[:, :-1] != IGNORED
        assert isinstance(self.head, LogProbs)
        padding = inputs.get("attention_mask")
        values = self._values(ids, targets, documents, mask=padding)[:, :-1]
        values = values.where(mask[..., None], 0)
        outputs = dict(zip(("log_probs", *self.head.statistics), values.unbind(-1), strict=True))
        if "is_top1" in outputs:
            outputs["is_top1"] = outputs["is_top1"] != 0
        total = mask.sum().clamp(min=1) if count is None else count
        assert self._function is not None
        output = self._function.__globals__["FusedCausalLMOutput"]
        assert self.step is not None
        loss = -outputs["log_probs"].sum() / total
        if self.step.prepared_model.routers is not None:
            outputs["aux_loss"] = self.step.aux_loss
            loss = loss + self.step.router_loss
        return output(loss=loss, label_mask=mask, **outputs)

    def _rewards(self, inputs: dict[str, Any]) -> SequenceClassifierOutputWithPast:
        """Return logits [batch, labels], each at its sequence's last token before padding."""
        if inputs.pop("labels", None) is not None:
            raise UnsupportedError(
                "labels: the loss of a reward model compares pairs; leave labels out"
            )
        ids, _, documents = _batch({**inputs, "labels": inputs["input_ids"]}, self._base.config)
        values = self._values(ids, None, documents)
        padding = self._base.config.get_text_config().pad_token_id
        if padding is None and len(ids) > 1:
            raise UnsupportedError(
                f"pad_token_id: {type(self._base).__name__} has none, but needs it to find the end "
                "of a sequence; set model.config.pad_token_id"
            )
        places = torch.arange(ids.shape[1], device=ids.device)
        last = places[-1:] if padding is None else (places * (ids != padding)).argmax(1)
        rows = torch.arange(len(ids), device=ids.device)
        return SequenceClassifierOutputWithPast(logits=values[rows, last])

    def _score(self, hidden: Tensor, _: Tensor) -> Tensor:
        found: Tensor = self._base.score(hidden)
        return found

    def _values(self, ids: Tensor, *further: Tensor | None, mask: Tensor | None = None) -> Tensor:
        with nullcontext() if torch.is_grad_enabled() else trained_as(self._trained):
            for forward in self._beside:  # the model's first, whose memory all share
                if forward.step is None:
                    first = self._beside[0].step
                    memory = None if first is None else first.memory
                    step_of = forward._step_of()
                    assert step_of is not None, "its trainer asks"
                    forward.step = step_of(forward._model, head=self.head, memory=memory)
            assert self.step is not None
            mask = mask if self.step.prepared_model.routers is not None else None
            return self.step.values(ids, *further, attention_mask=mask)


def _asks_for_values(kind: type) -> bool:
    """Return whether this TRL trainer computes its loss from log-probabilities or rewards, not from
    logits. Classes that TRL derives from such trainers, such as GKDTrainer, read logits."""
    own = (base for base in kind.__mro__ if base.__module__.partition(".")[0] == "trl")
    base = next(own, object)
    if base.__name__ not in _BY_VALUES:
        return False
    return base.__name__ == "RewardTrainer" or hasattr(sys.modules[base.__module__], _FUSED)


class Trainer(LongContext, HuggingFaceTrainer):
    """`transformers.Trainer` with farspan's steps; `schedule` is as for `farspan.Step`."""


def _batch(
    inputs: Mapping[str, Any], config: PretrainedConfig
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return input ids, labels and document ids, each [batch, tokens], from a collator's batch for
    a model of this configuration."""
    unknown = {k for k, v in inputs.items() if v is not None} - _READ - _IMPLIED
    if unknown:
        raise UnsupportedError(f"inputs: a step does not read {sorted(unknown)[0]}; leave it out")
    if "labels" not in inputs:
        raise UnsupportedError(
            "labels: the batch has none; use a collator that makes them, such as "
            "DataCollatorForLanguageModeling(tokenizer, mlm=False)"
        )
    ids, labels = inputs["input_ids"], inputs["labels"]
    positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
    told = sorted(key for key in _IMPLIED if inputs.get(key) is not None)
    if positions is None and told:
        raise UnsupportedError(
            f"{told[0]}: farspan tells documents apart by position_ids that restart at 0; make the "
            "collator return position_ids too"
        )
    if positions is not None and positions.shape not in (ids.shape, (1, ids.shape[1])):
        raise UnsupportedError(
            f"position_ids: expected {list(ids.shape)}, got {list(positions.shape)}"
        )
    read, begins = torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids)
    if mask is not None:
        if mask.shape != ids.shape:
            raise UnsupportedError(
                f"attention_mask: expected {list(ids.shape)}, 0 where there is padding, got "
                f"{list(mask.shape)}"
            )
        read = mask != 0
        if positions is None and not rope_types(config) and not bool(read[:, 0].all()):
            raise UnsupportedError(
                f"attention_mask: {config.model_type} has no RoPE, and left padding would move its "
                "tokens' positions; pad right, or make the collator return position_ids"
            )
        labels = labels.masked_fill(~read, IGNORED)
        begins[:, 1:] = read[:, 1:] != read[:, :-1]
    if positions is not None:
        begins |= (positions == 0) & read
    documents = nn.functional.pad(begins[:, 1:].cumsum(1), (1, 0))
    if positions is not None:
        _check_positions(positions, document_starts(documents, ids), read)
    return ids, labels, documents if bool(documents.any()) else None


def _check_positions(positions: Tensor, starts: Tensor, read: Tensor) -> None:
    counted = torch.arange(starts.shape[1], device=starts.device) - starts
    wrong = (positions != counted) & read
    if bool(wrong.any()):
        row, token = wrong.nonzero()[0].tolist()
        raise UnsupportedError(
            f"position_ids: row {row} has {int(positions.expand_as(counted)[row, token])} at token "
            f"{token}, expected {int(counted[row, token])}: they count from 0 in every document"
        )
