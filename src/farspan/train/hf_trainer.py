"""transformers' Trainer, whose steps are farspan's.

    class LongSFTTrainer(farspan.LongContext, SFTTrainer): ...

Everything but the forward and backward stays the Trainer's: data, optimizer, schedule of the rate,
clipping, logging, callbacks and checkpoints."""

import copy
import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer as HuggingFaceTrainer

from farspan.engine.loss import IGNORED, document_starts, trained_token_count
from farspan.engine.step import Step
from farspan.program.strategies import AUTO
from farspan.spec import Kernels, Schedule, Tier, UnsupportedError

LOG = logging.getLogger(__name__)
_READ = frozenset({"input_ids", "labels", "attention_mask", "position_ids"})
# What collators add that says no more than position_ids do.
_IMPLIED = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})
# Arguments of a Trainer that change what is computed, the value that is needed, and what to do.
_ARGUMENTS = {
    "fp16": (False, "load the model with dtype=torch.bfloat16 instead"),
    "bf16_full_eval": (False, "evaluation computes in the dtype of the weights"),
    "fp16_full_eval": (False, "evaluation computes in the dtype of the weights"),
    "torch_compile": (False, "give kernels=Kernels(compile=True) of farspan.spec"),
    "use_liger_kernel": (False, "farspan has kernels of its own, which `kernels` chooses"),
    "activation_offloading": (False, "the schedule says what goes to main memory"),
    "label_smoothing_factor": (0.0, "the loss is the plain one"),
    "loss_type": ("nll", "the loss is the plain one"),
    "neftune_noise_alpha": (None, "a recomputed cell would draw other noise"),
    "deepspeed": (None, "its engine would run the backward itself"),
    "fsdp": (None, "several GPUs share a model in `torchrun -m farspan train`"),
    "world_size": (1, "several GPUs share a sequence in `torchrun -m farspan train`"),
    "n_gpu": (1, "set CUDA_VISIBLE_DEVICES to one"),
}
# Others that mean the same: no GPU is as good as one, and TRL had the plain loss under two names.
_AS_GOOD = {("n_gpu", 0), ("loss_type", "chunked_nll")}
# Optimizers that update within the backward, by hooks that do not fire.
_IN_BACKWARD = ("lomo", "layerwise")
# Trainers whose loss is the plain one, as long as the arguments say nothing else.
_PLAIN = {("transformers.trainer", "Trainer"), ("trl.trainer.sft_trainer", "SFTTrainer")}
# What of another Trainer is not called.
_REPLACED = ("training_step", "prediction_step", "_get_num_items_in_batch")


class LongContext:
    """Goes before a Trainer among the bases of a class: its steps then run by `schedule`.

    The gradients are those of the plain Trainer, on sequences that it has no memory for. Nothing is
    seen or predicted across padding, nor from one packed document to the next (position_ids that
    restart). Gradient checkpointing that the arguments turn on is left to the schedule, and
    autocast that a configuration turns on by itself (TRL's bf16) to the dtype of the weights, each
    with a line of log. Raises UnsupportedError, when it is made or at the first step, for what
    would be computed otherwise than is asked. `schedule` is as in `farspan.Step`.
    """

    # What the other Trainer's class has of its own in place of `compute_loss`, `training_step` or
    # `prediction_step` computes the plain loss and nothing else.
    plain_loss = False

    accelerator: Any
    args: Any
    model: Any
    optimizer: Any
    current_gradient_accumulation_steps: int

    def __init__(
        self,
        *args: Any,
        schedule: Schedule | str = AUTO,
        kernels: Kernels | None = None,
        **kwargs: Any,
    ) -> None:
        self._refuse_other_methods()
        self._schedule = schedule
        self._kernels = kernels
        super().__init__(*args, **kwargs)
        if self._on_host():  # the accelerator places batches and states as well
            self.accelerator.device_placement = False
        self._step: Step | None = None
        self._stepped: Any = None  # the model that it is of
        self._refuse_other_arguments()
        self._leave_checkpointing()
        self._leave_autocast()

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Loss of one batch, over the trained tokens of all batches of the update; gradients are
        in `.grad`."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        batch = _batch(self._prepare_inputs(inputs))  # type: ignore[attr-defined]
        trained = trained_token_count(batch[1], batch[2]) * self.current_gradient_accumulation_steps
        if num_items_in_batch is not None:
            trained = int(num_items_in_batch)
        return self._farspan()(*batch, trained_tokens=max(1, trained)).detach()

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,  # noqa: ARG002 - there are no outputs to choose from
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Loss of one batch. Raises UnsupportedError where outputs are wanted: a vocabulary wide
        row for every token is what a long sequence has no room for."""
        if not prediction_loss_only:
            raise UnsupportedError(
                "outputs: evaluation returns only the loss; leave out compute_metrics and predict, "
                "or set prediction_loss_only=True"
            )
        model.eval()
        batch = _batch(self._prepare_inputs(inputs))  # type: ignore[attr-defined]
        return self._farspan().evaluate(*batch).detach(), None, None

    def _get_num_items_in_batch(
        self, batch_samples: list[dict[str, Any]], device: torch.device
    ) -> Tensor | None:
        """Trained tokens of all batches of an update: what its loss is divided by."""
        if not batch_samples or "labels" not in batch_samples[0]:
            return None
        counts = (trained_token_count(*_batch(inputs)[1:]) for inputs in batch_samples)
        return torch.tensor(sum(counts), device=device)

    def _farspan(self) -> Step:
        self._refuse_other_arguments()  # somebody may have changed them since
        # `model_init`, and a search for hyperparameters, put another model in the place of one.
        if self._step is None or self._stepped is not self.model:
            device = self.args.device if self._on_host() else None
            self._step = Step(self.model, self._schedule, kernels=self._kernels, device=device)
            self._stepped = self.model
        return self._step

    def _on_host(self) -> bool:
        return isinstance(self._schedule, Schedule) and self._schedule.weights is Tier.HOST

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leaves a model in main memory that is to stay there."""
        if not self._on_host():
            super()._move_model_to_device(model, device)  # type: ignore[misc]

    def _refuse_other_methods(self) -> None:
        """Raises UnsupportedError where the class computes another loss, as far as can be seen."""
        kinds = type(self).__mro__
        behind = kinds[kinds.index(LongContext) + 1 :]
        for name, asked in ("compute_loss", kinds), *((name, behind) for name in _REPLACED):
            for kind in asked:
                if name not in vars(kind) or (kind.__module__, kind.__name__) in _PLAIN:
                    continue
                if kind.__module__.partition(".")[0] == "trl":
                    raise UnsupportedError(
                        f"{name}: TRL's {kind.__name__} has a loss of its own, which a step does "
                        "not compute: it knows the mean cross-entropy over labels; of TRL's "
                        "trainers use SFTTrainer"
                    )
                if not self.plain_loss:
                    raise UnsupportedError(
                        f"{name}: {type(self).__name__} overrides it, and a farspan step does not "
                        "call it; if it computes the plain loss, set plain_loss = True in the class"
                    )

    def _refuse_other_arguments(self) -> None:
        for name, (needed, instead) in _ARGUMENTS.items():
            given = getattr(self.args, name, needed)
            off = given is None or not (given or needed)  # False, 0 and no name all say so
            if given != needed and not off and (name, given) not in _AS_GOOD:
                raise UnsupportedError(
                    f"{name}: a step of farspan needs {needed}, got {given}: {instead}"
                )
        optimizer = str(getattr(self.args.optim, "value", self.args.optim))
        if any(part in optimizer for part in _IN_BACKWARD):
            raise UnsupportedError(
                f"optim: {optimizer} updates weights within the backward, by hooks that do not "
                "fire in a step; use one that updates after it"
            )
        if getattr(self, "compute_loss_func", None) is not None:
            raise UnsupportedError("compute_loss_func: the loss is the plain one; leave it out")
        if getattr(self, "aux_loss_enabled", False):
            raise UnsupportedError(
                "router_aux_loss_coef: the router's load-balancing loss needs statistics of the "
                "whole sequence, which chunks do not have; set router_aux_loss_coef=0.0 in the "
                "arguments"
            )

    def _leave_checkpointing(self) -> None:
        """Turns off the gradient checkpointing that the arguments would turn on."""
        names = ("gradient_checkpointing", "activation_checkpointing")  # of before and since 5.23
        if not any(getattr(self.args, name, None) for name in names):
            return
        LOG.warning("gradient_checkpointing: turned off; the schedule says what is recomputed")
        self.args = copy.copy(self.args)  # another Trainer may be given the same
        for name in names:
            if hasattr(self.args, name):
                setattr(self.args, name, False)
        if hasattr(self.model, "disable_input_require_grads"):  # TRL has adapters ask for them
            self.model.disable_input_require_grads()

    def _leave_autocast(self) -> None:
        """Has the weights' own dtype be that of a step. Raises UnsupportedError where the user
        means another and it was not the configuration that turned it on."""
        if not self.args.bf16:
            return
        dtype = self.model.dtype
        by_itself = any(f.name == "bf16" and f.default is not False for f in fields(self.args))
        if dtype is not torch.bfloat16 and not (dtype is torch.float32 and by_itself):
            raise UnsupportedError(
                "bf16: a step of farspan needs False, got True: that is autocast of float32 "
                "weights; load the model with dtype=torch.bfloat16"
            )
        advice = "; to compute in bfloat16, load the model with dtype=torch.bfloat16"
        LOG.warning(
            "bf16: no autocast; steps compute in the weights' dtype, %s%s",
            str(dtype).removeprefix("torch."),
            advice * (dtype is torch.float32),
        )
        self.accelerator.native_amp = False


class Trainer(LongContext, HuggingFaceTrainer):
    """`transformers.Trainer`, with `schedule` beside its own arguments, as in `farspan.Step`."""


def _batch(inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Inputs, labels and documents, [batch, tokens] each, of what a collator made."""
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
            f"{told[0]}: documents are told apart by position_ids that restart; have the collator "
            "return them too"
        )
    if positions is not None and positions.shape not in (ids.shape, (1, ids.shape[1])):
        raise UnsupportedError(
            f"position_ids: expected {list(ids.shape)}, got {list(positions.shape)}"
        )
    read = torch.ones_like(ids, dtype=torch.bool)
    begins = torch.zeros_like(ids)
    if mask is not None:
        if mask.shape != ids.shape:
            raise UnsupportedError(
                f"attention_mask: expected {list(ids.shape)}, 0 where there is padding, got "
                f"{list(mask.shape)}"
            )
        read = mask != 0
        labels = labels.masked_fill(~read, IGNORED)
        begins[:, 1:] = read[:, 1:] != read[:, :-1]
    if positions is not None:
        begins |= (positions == 0) & read
    documents = begins[:, 1:].cumsum(1)
    documents = nn.functional.pad(documents, (1, 0))
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
