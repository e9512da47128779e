"""transformers' Trainer, whose steps are farspan's.

    class LongSFTTrainer(farspan.LongContext, SFTTrainer): ...

Everything but the forward and backward stays the Trainer's: data, optimizer, schedule of the rate,
clipping, logging, callbacks and checkpoints."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer as HuggingFaceTrainer

from farspan.engine.loss import IGNORED, document_starts, trained_token_count
from farspan.engine.step import Step
from farspan.spec import Kernels, Refused, Schedule

_READ = frozenset({"input_ids", "labels", "attention_mask", "position_ids"})
# What collators add that says no more than position_ids do.
_IMPLIED = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})
# Arguments of a Trainer that change what is computed, the value that is needed, and what to do.
_ARGUMENTS = {
    "fp16": (False, "load the model with dtype=torch.bfloat16 instead"),
    "bf16": (
        False,
        "that is autocast of float32 weights; load the model with dtype=torch.bfloat16",
    ),
    "torch_compile": (False, "give kernels=Kernels(compile=True) of farspan.spec"),
    "label_smoothing_factor": (0.0, "the loss is the plain one"),
    "world_size": (1, "several GPUs share a sequence in `torchrun -m farspan train`"),
    "n_gpu": (1, "set CUDA_VISIBLE_DEVICES to one"),
}


class LongContext:
    """Goes before a Trainer among the bases of a class: its steps then run by `schedule`.

    The gradients are those of the plain Trainer, on sequences that it has no memory for. Nothing is
    seen or predicted across padding, nor from one packed document to the next (position_ids that
    restart). Raises Refused, when it is made or at the first step, for what would be computed
    otherwise than is asked.
    """

    plain_loss = False  # a `compute_loss` of the other Trainer's own is the plain one

    args: Any
    model: Any
    optimizer: Any
    current_gradient_accumulation_steps: int

    def __init__(
        self, *args: Any, schedule: Schedule, kernels: Kernels | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._schedule = schedule
        self._kernels = kernels
        self._step: Step | None = None
        self._stepped: Any = None  # the model that it is of
        self._refuse_others()

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
        """Loss of one batch. Raises Refused where outputs are wanted: a vocabulary wide row for
        every token is what a long sequence has no room for."""
        if not prediction_loss_only:
            raise Refused(
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
        # `model_init`, and a search for hyperparameters, put another model in the place of one.
        if self._step is None or self._stepped is not self.model:
            self._step = Step(self.model, self._schedule, kernels=self._kernels)
            self._stepped = self.model
        return self._step

    def _refuse_others(self) -> None:
        for name, (needed, instead) in _ARGUMENTS.items():
            given = getattr(self.args, name, needed)
            # No GPU is as good as one.
            if given != needed and not (name == "n_gpu" and given == 0):
                raise Refused(f"{name}: a step of farspan needs {needed}, got {given}: {instead}")
        if getattr(self, "compute_loss_func", None) is not None:
            raise Refused("compute_loss_func: the loss is the plain one; leave it out")
        own = getattr(type(self), "compute_loss", None)
        if own is not HuggingFaceTrainer.compute_loss and not self.plain_loss:
            raise Refused(
                f"compute_loss: {type(self).__name__} overrides it, and a farspan step does not "
                "call it; if it computes the plain loss, set plain_loss = True in the class"
            )


class Trainer(LongContext, HuggingFaceTrainer):
    """`transformers.Trainer`, with `schedule=farspan.Schedule(...)` beside its own arguments."""


def _batch(inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Inputs, labels and documents, [batch, tokens] each, of what a collator made."""
    unknown = {k for k, v in inputs.items() if v is not None} - _READ - _IMPLIED
    if unknown:
        raise Refused(f"inputs: a step does not read {sorted(unknown)[0]}; leave it out")
    if "labels" not in inputs:
        raise Refused(
            "labels: the batch has none; use a collator that makes them, such as "
            "DataCollatorForLanguageModeling(tokenizer, mlm=False)"
        )
    ids, labels = inputs["input_ids"], inputs["labels"]
    positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
    told = sorted(key for key in _IMPLIED if inputs.get(key) is not None)
    if positions is None and told:
        raise Refused(
            f"{told[0]}: documents are told apart by position_ids that restart; have the collator "
            "return them too"
        )
    if positions is not None and positions.shape not in (ids.shape, (1, ids.shape[1])):
        raise Refused(f"position_ids: expected {list(ids.shape)}, got {list(positions.shape)}")
    read = torch.ones_like(ids, dtype=torch.bool)
    begins = torch.zeros_like(ids)
    if mask is not None:
        if mask.shape != ids.shape:
            raise Refused(
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
        raise Refused(
            f"position_ids: row {row} has {int(positions.expand_as(counted)[row, token])} at token "
            f"{token}, expected {int(counted[row, token])}: they count from 0 in every document"
        )
