"""Losses that need several passes: preference losses of answers, and distillation from a teacher.

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
from farspan.data.packing import Sequences, mismatched
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

    def begin(self, step: Step, micros: list[Micro], part: str) -> int:  # noqa: ARG002
        """Begin an update, or an evaluation of all held-out batches. Returns the number that
        divides the loss: trained tokens on all replicas, at least 1. `part` names the data."""
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


class _AnswerLoss(_LogProbLoss):
    """Base of losses computed from the log-probabilities of answers under the policy and under a
    reference model, averaged over the records of an update."""

    answers = 1  # of a record

    def __init__(
        self, batches: Batches, observer: Observer, folder: RunFolder, identity: Mapping[str, Any]
    ) -> None:
        super().__init__(batches, observer)
        self._path = folder.path / STORED
        self._mark = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        # [records, answers] float64 by name; NaN: not computed
        self._stored: dict[str, Tensor] | None = None

    def begin(self, step: Step, micros: list[Micro], part: str) -> int:  # noqa: ARG002
        count = sum(len(micro.batch.numbers()) for micro in micros)
        return max(1, self.batches.over_replicas(count))

    def _answers(self, step: Any, micro: Micro) -> Tensor:
        """Return [records, answers]: the log-probability of each answer, summed over its tokens, or
        averaged if the loss uses means."""
        ids, labels, documents = micro.input_ids, micro.labels, micro.document_ids
        mask = micro.attention_mask if self.loss.routers else None
        logprobs = step.logprobs(ids, labels, documents, attention_mask=mask)
        trained = _is_trained(labels, documents).to(logprobs.dtype)
        by_length = self.loss.by_length or self.loss.kind in (LossKind.IPO, LossKind.ORPO)
        answers = []
        for row, records in enumerate(micro.batch.pairs or micro.batch.answers):
            lengths = torch.unique_consecutive(documents[row], return_counts=True)[1].tolist()
            pieces = zip(logprobs[row].split(lengths), trained[row].split(lengths), strict=True)
            for answer, counted in islice(pieces, self.answers * len(records)):
                answers.append(answer.sum() / counted.sum() if by_length else answer.sum())
        shape = -1, self.answers
        return torch.stack(answers).view(shape) if answers else logprobs.new_zeros(0, shape[1])

    # -- the reference -----------------------------------------------------------------------------

    def _references(self, step: Step, micro: Micro, part: str) -> Tensor:
        """Return [records, answers]: log-probabilities under the reference model, or zeros without
        one."""
        wide = torch.promote_types(self.ctx.model.dtype, F32)
        match self.loss.compared():
            case Reference.STORED:
                return self._look_up(part, micro.batch.numbers()).to(micro.input_ids.device, wide)
            case Reference.FROZEN:
                other = self.reference_engine(step)
                with self.detached(other):
                    return self._answers(other, micro)
            case Reference.ADAPTERS_OFF:
                with self.detached(step), adapters_off(self.ctx.model):
                    return self._answers(step, micro)
        shape = len(micro.batch.numbers()), self.answers
        return torch.zeros(shape, dtype=wide, device=micro.input_ids.device)

    def _look_up(self, name: str, numbers: Sequence[int]) -> Tensor:
        """Return these rows of a stored table, float64. Raises UnsupportedError if it lacks
        them."""
        if self._stored is None:
            self._stored = self.ctx.world.run_on_rank0(self._read)
        if self._stored is None:
            raise UnsupportedError(
                f"loss.reference: {self._path} is missing or belongs to another run, and the "
                "weights that it was computed with have already been trained; restore it, or begin "
                "again in another folder"
            )
        table = self._stored[name]
        rows = torch.full((len(numbers), table.shape[1]), torch.nan, dtype=torch.float64)
        known = [row for row, number in enumerate(numbers) if number < len(table)]
        rows[known] = table[[numbers[row] for row in known]]
        if rows.isnan().any():
            raise UnsupportedError(
                f"loss.reference: {self._path} lacks log-probabilities of some answers: it was "
                "computed for the steps, batches and evaluation.sequences that the run began with; "
                "restore these values, or begin again in another folder"
            )
        return rows

    def prepare(self, step: Step, updates: int) -> None:
        if self.loss.compared() is not Reference.STORED:
            return
        self._stored = self.ctx.world.run_on_rank0(self._read)
        if self._stored is None and updates == 0:
            self._stored = self._compute(step)
            self.ctx.world.run_on_rank0(self._write)

    def _compute(self, step: Step) -> dict[str, Tensor]:
        """Compute the reference's log-probabilities of every answer that is trained or
        evaluated."""
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
                found = self._answers(step, micro).tolist()
            rows += zip(micro.batch.numbers(), found, strict=True)
        table = torch.full((packing.documents(), self.answers), torch.nan, dtype=torch.float64)
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


class PreferenceLoss(_AnswerLoss):
    """DPO, IPO or ORPO loss, which compares the two answers of a pair, averaged over the pairs."""

    answers = 2

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


class UnpairedLoss(_AnswerLoss):
    """KTO loss of single answers, averaged over the answers of an update.

    All answers of an update, or of an evaluation, are the batch over which KTO estimates the
    divergence of the policy from the reference: the mean log-ratio of mismatched answers
    (`packing.mismatched`), at least 0. TRL's KTOTrainer does so over a device's batch.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._divergence = 0.0
        self._counts = 0, 0  # desirable and undesirable answers, over all replicas

    def prepare(self, step: Step, updates: int) -> None:
        run = self.ctx.run
        if run.batch * run.accumulate * self.batches.replicas == 1:
            raise UnsupportedError(
                "accumulate: kto needs several sequences in an update, whose answers it pairs with "
                "other prompts, and batch x accumulate is 1; raise accumulate to 2 or more"
            )
        super().prepare(step, updates)

    def begin(self, step: Step, micros: list[Micro], part: str) -> int:
        total = super().begin(step, micros, part)
        others = self._mismatched(micros, part)
        name = f"{part} mismatched"
        if self.loss.compared() is Reference.STORED:
            row = len(self.batches.evaluated()) if part == "held_out" else self._update_of(micros)
            reference = float(self._look_up(name, [row]))
        else:
            reference = self._summed([self._references(step, other, name) for other in others])
        with self.detached(step):
            policy = self._summed([self._answers(step, other) for other in others])
        self._divergence = max(0.0, (policy - reference) / total)
        good = sum(one.desirable for m in micros for row in m.batch.answers for one in row)
        good = self.batches.over_replicas(good)
        self._counts = good, total - good
        return total

    def _batch_shares(self, step: Step, micro: Micro, total: int, part: str) -> dict[str, Tensor]:
        reference = self._references(step, micro, part)[:, 0]
        policy, loss = self._answers(step, micro)[:, 0], self.loss
        labels = [one.desirable for row in micro.batch.answers for one in row]
        good = torch.tensor(labels, dtype=torch.bool, device=policy.device)
        weights = loss.desirable_weight, loss.undesirable_weight
        values = losses.kto(
            policy, reference, good, self._divergence, beta=loss.beta, weights=weights
        )
        rewards = loss.beta * (policy - reference).detach()
        chosen, rejected = (
            rewards[which].sum() / max(1, count)
            for which, count in zip((good, ~good), self._counts, strict=True)
        )
        shares = {
            "loss": values.sum() / total,
            "kl": torch.full_like(rewards, self._divergence).sum() / total,
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "margin": chosen - rejected,
        }
        for name, count in zip(("rewards/chosen", "rewards/rejected"), self._counts, strict=True):
            if count == 0:
                del shares[name]
                shares.pop("margin", None)
        return shares

    def _mismatched(self, micros: list[Micro], part: str) -> list[Micro]:
        """Return the batches with each answer after the next prompt of the update or evaluation."""
        before, found = self.batches.before, []
        for micro in micros:  # one without answers keeps replicas in step
            rows = zip(micro.indices, micro.batch.answers, strict=False)
            others = [before(index, row[0].number, part) for index, row in rows]
            batch = mismatched(micro.batch, others) if others else None
            found.append(micro if batch is None else self.batches.place(batch, micro.indices))
        return found

    def _summed(self, answers: list[Tensor]) -> float:
        """Return the sum of these log-probabilities over all replicas."""
        own = float(sum(found.detach().double().sum() for found in answers))
        return sum(self.ctx.world.gather_replicas([own]))

    def _update_of(self, micros: list[Micro]) -> int:
        run = self.ctx.run
        return micros[0].indices[0] // (run.accumulate * run.batch * self.batches.replicas)

    def _compute(self, step: Step) -> dict[str, Tensor]:
        """Compute the reference's log-probabilities of all answers and, summed over mismatched
        answers, for every update, [updates, 1], and for the evaluation, by its sequences."""
        tables = super()._compute(step)
        groups: dict[str, Iterable[list[Micro]]] = {
            "train": map(self.batches.of_step, range(self.ctx.run.steps))
        }
        if self.ctx.corpus.held_out is not None:
            groups["held_out"] = [self.batches.held_out()]
        for part, updates in groups.items():
            found = [torch.nan] * len(self.batches.evaluated()) if part == "held_out" else []
            for micros in updates:
                self.observer.interrupt.passed(StopPoint.BATCH)
                with self.detached(step):
                    others = self._mismatched(micros, part)
                    found.append(self._summed([self._answers(step, other) for other in others]))
            tables[f"{part} mismatched"] = torch.tensor(found, dtype=torch.float64)[:, None]
        return tables


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


# Losses of single documents without answers to compare.
SINGLE: dict[LossKind, type[_LogProbLoss]] = {LossKind.DISTILL: DistillationLoss}


def make_objective(
    batches: Batches, observer: Observer, folder: RunFolder, identity: Mapping[str, Any]
) -> _LogProbLoss:
    """Return the object that computes a run's loss."""
    kind = batches.ctx.run.objective.kind
    if kind.row.format:
        compares = UnpairedLoss if kind is LossKind.KTO else PreferenceLoss
        return compares(batches, observer, folder, identity)
    return SINGLE[kind](batches, observer)
