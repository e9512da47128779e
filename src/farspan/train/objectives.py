"""Losses that need several passes: preference losses of answer pairs, and distillation from a
teacher.

A loss is computed from the log-probabilities of a whole sequence (`farspan.losses`), which a step
returns; the loss's backward runs the rest of that step. Log-probabilities of the reference model or
teacher are computed before, without gradients.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from farspan import losses
from farspan.data.formats import UNTRAINED
from farspan.data.packing import Sequences
from farspan.distributed.run_context import StopPoint
from farspan.durable import write_whole
from farspan.engine.step import Step
from farspan.spec import LossKind, Reference, UnsupportedError
from farspan.train.observer import Observer
from farspan.train.run_folder import STORED, RunFolder
from farspan.train.step_runner import Batches, Micro

MARK = "run"  # key in the file of stored log-probabilities: digest of their run
F32 = torch.float32


# A batch's contributions to an update's loss and metrics, by name.
Sums = dict[str, Tensor | float]


class _LogProbLoss:
    """Base of losses computed from the log-probabilities of tokens, averaged over the trained
    tokens of all replicas (a subclass may divide by another number). Each replica computes the
    share of its own batches."""

    def __init__(self, batches: Batches, observer: Observer) -> None:
        self.batches, self.observer = batches, observer
        self.ctx, self.loss = batches.ctx, batches.ctx.run.objective
        self._reference: Any = None  # the engine of the second model
        self._reference_step: Step | None = None  # the step that it shares memory with

    def total(self, micros: list[Micro]) -> int:
        """Return the number that divides the loss: trained tokens on all replicas, at least 1."""
        return max(1, self.batches.trained(micros))

    def prepare(self, step: Step, updates: int) -> None:
        """Compute what the loss needs before a run starts, or resumes after `updates` updates."""

    def train(self, step: Step, micro: Micro, total: int, share: float) -> Sums:
        """Run forward and backward on a batch. Returns the batch's share of the loss and of each
        metric. The routers' losses of a mixture of experts are multiplied by `share`."""
        with torch.enable_grad():
            shares = self._batch_shares(step, micro, total, "train")
            if self.loss.routers:
                shares["loss"] = shares["loss"] + share * step.router_loss
                shares["aux_loss"] = share * step.aux_loss
            shares["loss"].backward()
        return {name: value.detach() for name, value in shares.items()}

    @torch.no_grad()
    def evaluate(self, step: Step, micro: Micro, total: int) -> Sums:
        """Return a batch's share of the loss and metrics, without gradients."""
        return {n: float(v) for n, v in self._batch_shares(step, micro, total, "held_out").items()}

    def gather_sums(self, sums: Sequence[Sums]) -> dict[str, float]:
        """Return the loss and its metrics, summed over all batches and replicas."""
        local = {name: float(sum(one[name] for one in sums)) for name in sums[0]}
        gathered = self.ctx.world.gather_replicas([local])
        return {name: sum(one[name] for one in gathered) for name in local}

    def _batch_shares(self, step: Step, micro: Micro, total: int, part: str) -> dict[str, Tensor]:
        """Return one batch's share of the loss and of each metric, as tensors by name; only `loss`
        is part of the autograd graph. `part` names the data: "train" or "held_out"."""
        raise NotImplementedError

    def reference_engine(self, step: Step) -> Any:
        """Return the engine of the reference model, which shares the memory of `step`."""
        if self._reference_step is not step:
            self._reference, self._reference_step = self.ctx.make_reference(step), step
        return self._reference

    @contextmanager
    def detached(self, step: Any, progress: Callable[[Any], None] | None = None) -> Iterator[None]:
        """Inside the block, let `step` run forwards without gradients, and without reporting them
        as progress of training. A stop signal still ends them between two cells."""
        reported = step.progress
        step.progress = progress or self._check
        try:
            with torch.no_grad():
                yield
        finally:
            step.progress = reported

    def _check(self, _: object) -> None:
        self.observer.interrupt.passed(StopPoint.HELD_OUT_CELL)


class PreferenceLoss(_LogProbLoss):
    """DPO, IPO or ORPO loss, which compares the two answers of a pair, averaged over the pairs."""

    def __init__(
        self, batches: Batches, observer: Observer, folder: RunFolder, identity: Mapping[str, Any]
    ) -> None:
        super().__init__(batches, observer)
        self._path = folder.path / STORED
        self._mark = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self._stored: dict[str, Tensor] | None = None  # [pairs, 2] float64; NaN: not computed

    def total(self, micros: list[Micro]) -> int:
        return max(1, self.batches.over_replicas(sum(len(_pair_numbers(m)) for m in micros)))

    def _batch_shares(self, step: Step, micro: Micro, total: int, part: str) -> dict[str, Tensor]:
        reference = self._references(step, micro, part)
        policy, loss = self._answers(step, micro), self.loss
        both = policy[:, 0], policy[:, 1]
        other = (reference[:, 0], reference[:, 1])
        match loss.kind:
            case LossKind.DPO:
                smoothing = loss.label_smoothing
                values = losses.dpo(both, other, beta=loss.beta, label_smoothing=smoothing)
            case LossKind.IPO:
                values = losses.ipo(both, other, beta=loss.beta)
            case LossKind.ORPO:  # plus the chosen answers' own loss, as in the paper
                values = losses.orpo(both, beta=loss.beta) - both[0]
            case _:
                raise NotImplementedError(loss.kind)
        rewards = loss.beta * (policy - reference).detach()
        margins = rewards[:, 0] - rewards[:, 1]
        shares = {
            "loss": values,
            "rewards/chosen": rewards[:, 0],
            "rewards/rejected": rewards[:, 1],
            "margin": margins,
            "accuracy": (margins > 0).to(margins.dtype),
        }
        return {name: value.sum() / total for name, value in shares.items()}

    def _answers(self, step: Any, micro: Micro) -> Tensor:
        """Return [pairs, 2]: the log-probability of each pair's chosen and rejected answer, summed
        over its tokens, or averaged if the loss uses means."""
        ids, labels, documents = micro.input_ids, micro.labels, micro.document_ids
        mask = micro.attention_mask if self.loss.routers else None
        logprobs = step.logprobs(ids, labels, documents, attention_mask=mask)
        trained = _is_trained(labels, documents).to(logprobs.dtype)
        by_length = self.loss.by_length or self.loss.kind is not LossKind.DPO
        answers = []
        for row, numbers in enumerate(micro.batch.pairs):
            lengths = torch.unique_consecutive(documents[row], return_counts=True)[1].tolist()
            pieces = zip(logprobs[row].split(lengths), trained[row].split(lengths), strict=True)
            for answer, counted in islice(pieces, 2 * len(numbers)):
                answers.append(answer.sum() / counted.sum() if by_length else answer.sum())
        return torch.stack(answers).view(-1, 2) if answers else logprobs.new_zeros(0, 2)

    # -- the reference -----------------------------------------------------------------------------

    def _references(self, step: Step, micro: Micro, part: str) -> Tensor:
        """Return [pairs, 2]: log-probabilities under the reference model, or zeros without one."""
        match self.loss.compared():
            case Reference.STORED:
                return self._look_up(micro, part)
            case Reference.FROZEN:
                other = self.reference_engine(step)
                with self.detached(other):
                    return self._answers(other, micro)
            case Reference.ADAPTERS_OFF:
                with self.detached(step), adapters_off(self.ctx.model):
                    return self._answers(step, micro)
        dtype = torch.float64 if self.ctx.model.dtype == torch.float64 else torch.float32
        return torch.zeros(len(_pair_numbers(micro)), 2, dtype=dtype, device=micro.input_ids.device)

    def _look_up(self, micro: Micro, part: str) -> Tensor:
        if self._stored is None:
            self._stored = self.ctx.world.run_on_rank0(self._read)
        if self._stored is None:
            raise UnsupportedError(
                f"loss.reference: {self._path} is missing or belongs to another run, and the "
                "weights that it was computed with have already been trained; restore it, or begin "
                "again in another folder"
            )
        rows = self._stored[part][list(_pair_numbers(micro))]
        if rows.isnan().any():
            raise UnsupportedError(
                f"loss.reference: {self._path} lacks log-probabilities of some pairs of this step "
                "or evaluation: it was computed for the steps, batches and evaluation.sequences "
                "that the run began with; restore these values, or begin again in another folder"
            )
        return rows.to(micro.input_ids.device, torch.promote_types(self.ctx.model.dtype, F32))

    def prepare(self, step: Step, updates: int) -> None:
        if self.loss.compared() is not Reference.STORED:
            return
        self._stored = self.ctx.world.run_on_rank0(self._read)
        if self._stored is None and updates == 0:
            self._stored = self._compute(step)
            self.ctx.world.run_on_rank0(self._write)

    def _compute(self, step: Step) -> dict[str, Tensor]:
        """Compute the reference's log-probabilities of every pair that is trained or evaluated."""
        corpus, batches = self.ctx.corpus, self.batches
        numbers = range(batches.needed())
        self.observer.note(
            f"reference: computing log-probabilities of {len(numbers):,} batches into {self._path}"
        )
        tables = {"train": self._table(step, corpus.train, map(batches.of, numbers), len(numbers))}
        if corpus.held_out is not None:
            micros = batches.held_out()
            tables["held_out"] = self._table(step, corpus.held_out, micros, len(micros))
        return tables

    def _table(self, step: Step, packing: Sequences, micros: Iterable[Micro], count: int) -> Tensor:
        rows: list[tuple[int, list[float]]] = []
        for place, micro in enumerate(micros):
            self.observer.interrupt.passed(StopPoint.BATCH)
            with self.detached(step, partial(self.observer.evaluating, place, count)):
                rows += zip(_pair_numbers(micro), self._answers(step, micro).tolist(), strict=True)
        table = torch.full((packing.documents(), 2), torch.nan, dtype=torch.float64)
        for number, values in self.ctx.world.gather_replicas(rows):
            table[number] = torch.tensor(values, dtype=torch.float64)
        return table

    def _write(self) -> None:
        assert self._stored is not None, "it has been computed"
        write_whole(self._path, save(self._stored, {MARK: self._mark}))

    def _read(self) -> dict[str, Tensor] | None:
        """Return the stored log-probabilities, or None if the file is missing or another run's."""
        if not self._path.is_file():
            return None
        try:
            with safe_open(self._path, "pt") as file:
                if (file.metadata() or {}).get(MARK) != self._mark:
                    return None
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise UnsupportedError(
                f"loss.reference: {self._path} cannot be read: {error}; restore it, or begin again "
                "in another folder"
            ) from error


class DistillationLoss(_LogProbLoss):
    """Distance between student and teacher over the k token ids that the teacher finds likeliest,
    averaged over trained tokens."""

    def _batch_shares(
        self,
        step: Step,
        micro: Micro,
        total: int,
        part: str,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        ids, labels, documents = micro.input_ids, micro.labels, micro.document_ids
        teacher, vocab = self.reference_engine(step), text_config(self.ctx.model).vocab_size
        with self.detached(teacher):
            top, known = teacher.top_logprobs(ids, documents, k=self.loss.top_k, vocab=vocab)
        trained = _is_trained(labels, documents)
        targets = torch.full_like(top, UNTRAINED)  # labels belong to the token before
        targets[:, 1:] = top[:, :-1].where(trained[:, :-1, None], UNTRAINED)
        mask = micro.attention_mask if self.loss.routers else None
        student = step.logprobs(ids, targets, documents, attention_mask=mask)
        return {"loss": losses.distillation(student, known, trained).sum() / total}


def _pair_numbers(micro: Micro) -> tuple[int, ...]:
    """Return each preference pair's index in the whole data, row by row of the micro-batch."""
    return tuple(number for row in micro.batch.pairs for number in row)


def _is_trained(labels: Tensor, documents: Tensor) -> Tensor:
    """Return [batch, tokens] bool: whether the next token is trained and in the same document."""
    trained = torch.zeros_like(labels, dtype=torch.bool)
    trained[:, :-1] = (labels[:, 1:] != UNTRAINED) & (documents[:, 1:] == documents[:, :-1])
    return trained


def text_config(model: Any) -> Any:
    """Return the configuration of a model's language part."""
    return model.config.get_text_config()


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Switch all adapters off inside the block, and leave their parameters trainable. peft's own
    context manager freezes them, after which farspan would have to inspect the model again."""
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "_disable_adapters")]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


# Losses of single documents.
SINGLE: dict[LossKind, type[_LogProbLoss]] = {LossKind.DISTILL: DistillationLoss}


def make_objective(
    batches: Batches, observer: Observer, folder: RunFolder, identity: Mapping[str, Any]
) -> _LogProbLoss:
    """Return the object that computes a run's loss: for answer pairs a PreferenceLoss."""
    if batches.ctx.run.objective.paired:
        return PreferenceLoss(batches, observer, folder, identity)
    return SINGLE[batches.ctx.run.objective.kind](batches, observer)
