"""What a run trains: the batches of an update, the loss of each, and what it is compared with.

A mean of token losses is a step of one pass. Every other loss is computed from log-probabilities of
the whole sequence (`farspan.losses`), whose backward is the rest of the step; before them, without
gradients, those of the reference or of the teacher.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from farspan import losses
from farspan.data.formats import UNTRAINED
from farspan.data.packing import Mixture, PackedBatch, Packing
from farspan.distributed.run_context import StopPoint
from farspan.durable import write_whole
from farspan.spec import LossKind, Reference, UnsupportedError
from farspan.train.console import Observer
from farspan.train.context import RunContext, StepLike
from farspan.train.run_folder import STORED, RunFolder

MARK = "run"  # in the file of stored log-probabilities: whose they are
F32 = torch.float32


@dataclass(frozen=True, slots=True)
class Micro:
    """One batch on the device and the number of its tokens that have a target."""

    batch: PackedBatch
    indices: tuple[int, ...]
    input_ids: Tensor  # [batch, tokens] int64
    labels: Tensor  # the same, or UNTRAINED
    document_ids: Tensor  # [batch, tokens] int64
    trained: int

    def describe(self) -> list[dict[str, Any]]:
        """Its sequences and their documents, for diagnosis.json."""
        return [
            {"sequence": index, "documents": list(names)}
            for index, names in zip(self.indices, self.batch.names, strict=True)
        ]


class Batches:
    """The batches of a run. Batch n of D replicas is sequences [n * D * batch, (n + 1) * D * batch)
    of the run's order, given out in order: the update reads what one replica reads with a batch of
    D * batch."""

    def __init__(self, ctx: RunContext) -> None:
        self.ctx = ctx
        self.replicas, self.replica = ctx.world.replicas, ctx.world.replica

    def of_step(self, step: int) -> list[Micro]:
        """This replica's, of the update after `step` of them."""
        count = self.ctx.run.accumulate
        return [self.of(step * count + place) for place in range(count)]

    def needed(self) -> int:
        """How many batches of this replica's hold all that the run ever reads: those of its steps,
        or of an epoch."""
        run = self.ctx.run
        epoch = -(-self.ctx.corpus.train.sequences_per_epoch() // (run.batch * self.replicas))
        return min(run.steps * run.accumulate, epoch)

    def held_out(self) -> list[Micro]:
        """This replica's share of those to evaluate on, spread over all that are held out: one long
        document does not stand for the rest. Every replica has as many; what is missing has no
        trained token."""
        packing, replicas = self.ctx.corpus.held_out, self.replicas
        assert packing is not None, "there is something to evaluate on"
        there = packing.sequences_per_epoch()
        count = min(self.ctx.run.evaluation.sequences, there)
        chosen = [place * there // count for place in range(count)]
        own = chosen[self.replica :: replicas]
        found = [self._place(packing.once(i), (i,)) for i in own]
        for _ in range(-(-count // replicas) - len(own)):
            spare = self._place(packing.once(chosen[-1]), (chosen[-1],))
            labels = torch.full_like(spare.labels, UNTRAINED)
            blank = replace(spare.batch, pairs=())
            found.append(replace(spare, batch=blank, labels=labels, trained=0))
        return found

    def trained(self, micros: list[Micro]) -> int:
        """Trained tokens of these and of the other replicas'."""
        return self.over_replicas(sum(m.trained for m in micros))

    def read(self, micros: list[Micro]) -> int:
        """Tokens of documents in these and in the other replicas'."""
        return self.over_replicas(sum(m.batch.tokens for m in micros))

    def over_replicas(self, own: int) -> int:
        """The sum of a number of each."""
        return own if self.replicas == 1 else self.ctx.world.sum_over_replicas(own)

    def of(self, number: int) -> Micro:
        """Batch `number` since the start of the run."""
        size = self.ctx.run.batch
        start = (number * self.replicas + self.replica) * size
        indices = tuple(range(start, start + size))
        return self._place(self.ctx.corpus.train.batch(indices), indices)

    def _place(self, batch: PackedBatch, indices: tuple[int, ...]) -> Micro:
        input_ids = torch.from_numpy(batch.input_ids).to(self.ctx.world.device)
        labels = torch.from_numpy(batch.labels).to(self.ctx.world.device)
        document_ids = torch.from_numpy(batch.document_ids).to(self.ctx.world.device)
        trained = self.ctx.components.count_trained(labels, document_ids)
        return Micro(batch, indices, input_ids, labels, document_ids, trained)


# What a batch adds to an update's loss and to its metrics, by name.
Sums = dict[str, Tensor | float]


class Objective:
    """The mean of the losses of trained tokens, in one pass."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def total(self, micros: list[Micro]) -> int:
        """What the loss of these and of the other replicas' is a mean of, at least 1."""
        return max(1, self.batches.trained(micros))

    def train(self, step: StepLike, micro: Micro, total: int) -> Sums:
        """Adds the gradient of this batch's part of a mean over `total`; that part."""
        ids, labels, documents = micro.input_ids, micro.labels, micro.document_ids
        return {"loss": step(ids, labels, documents, trained_tokens=total).detach()}

    def evaluate(self, step: StepLike, micro: Micro, total: int) -> Sums:
        """The same without gradients."""
        ids, labels, documents = micro.input_ids, micro.labels, micro.document_ids
        return {"loss": float(step.evaluate(ids, labels, documents, trained_tokens=total))}

    def of_all(self, sums: Sequence[Sums]) -> dict[str, float]:
        """Of all batches and replicas: what a step says is of all replicas already."""
        return {name: _total([one[name] for one in sums]) for name in sums[0]}

    def prepare(self, step: StepLike, at: int) -> None:
        """What is computed once, before the first update; `at` updates are done."""


def _total(values: list[Any]) -> float:
    if isinstance(values[0], Tensor):
        return float(torch.stack(values).sum())
    return float(sum(values))


class _OfLogProbs(Objective):
    """A loss of log-probabilities, which each replica computes of its own."""

    def __init__(self, batches: Batches, observer: Observer) -> None:
        super().__init__(batches)
        self.ctx, self.loss = batches.ctx, batches.ctx.run.objective
        self.observer = observer
        self._reference: Any = None  # the engine of the second model
        self._beside: StepLike | None = None  # the one that it shares memory with

    def train(self, step: StepLike, micro: Micro, total: int) -> Sums:
        with torch.enable_grad():
            found = self._parts(step, micro, total, "train")
            found["loss"].backward()
        return {name: value.detach() for name, value in found.items()}

    @torch.no_grad()
    def evaluate(self, step: StepLike, micro: Micro, total: int) -> Sums:
        return {n: float(v) for n, v in self._parts(step, micro, total, "held_out").items()}

    def of_all(self, sums: Sequence[Sums]) -> dict[str, float]:
        own = super().of_all(sums)
        found = self.ctx.world.gather_replicas([own])
        return {name: sum(one[name] for one in found) for name in own}

    def _parts(self, step: StepLike, micro: Micro, total: int, part: str) -> dict[str, Tensor]:
        """Of a batch of the data to train on or of those held out, as tensors; `loss` with a
        graph."""
        raise NotImplementedError

    def reference_beside(self, step: StepLike) -> Any:
        """The engine of the second model."""
        if self._beside is not step:
            self._reference, self._beside = self.ctx.make_reference(step), step
        return self._reference

    @contextmanager
    def watched(self, step: Any, progress: Callable[[Any], None] | None = None) -> Iterator[None]:
        """A forward whose progress is no part of the update's; it is left when a signal comes."""
        own = step.progress
        step.progress = progress or self._check
        try:
            with torch.no_grad():
                yield
        finally:
            step.progress = own

    def _check(self, _: object) -> None:
        self.observer.interrupt.passed(StopPoint.HELD_OUT_CELL)


class OfPairs(_OfLogProbs):
    """The mean over pairs of a loss of their two answers: DPO, IPO, ORPO."""

    def __init__(
        self, batches: Batches, observer: Observer, folder: RunFolder, identity: Mapping[str, Any]
    ) -> None:
        super().__init__(batches, observer)
        self._path = folder.path / STORED
        self._mark = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self._stored: dict[str, Tensor] | None = None  # [pairs, 2] float64; NaN: not computed

    def total(self, micros: list[Micro]) -> int:
        return max(1, self.batches.over_replicas(sum(len(_numbers(m)) for m in micros)))

    def _parts(self, step: StepLike, micro: Micro, total: int, part: str) -> dict[str, Tensor]:
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
            case _:  # with the chosen answers' own loss, as the paper has it
                values = losses.orpo(both, beta=loss.beta) - both[0]
        rewards = loss.beta * (policy - reference).detach()
        margins = rewards[:, 0] - rewards[:, 1]
        found = {
            "loss": values,
            "rewards/chosen": rewards[:, 0],
            "rewards/rejected": rewards[:, 1],
            "margin": margins,
            "accuracy": (margins > 0).to(margins.dtype),
        }
        return {name: value.sum() / total for name, value in found.items()}

    def _answers(self, step: Any, micro: Micro) -> Tensor:
        """[pairs, 2]: log-probabilities of what was chosen and of what was rejected, summed, or
        their means where the loss is of these."""
        ids, labels, documents = micro.input_ids, micro.labels, micro.document_ids
        found = step.logprobs(ids, labels, documents)
        trained = _is_trained(labels, documents).to(found.dtype)
        by_length = self.loss.by_length or self.loss.kind is not LossKind.DPO
        answers = []
        for row, numbers in enumerate(micro.batch.pairs):
            lengths = torch.unique_consecutive(documents[row], return_counts=True)[1].tolist()
            pieces = zip(found[row].split(lengths), trained[row].split(lengths), strict=True)
            for own, counted in islice(pieces, 2 * len(numbers)):
                answers.append(own.sum() / counted.sum() if by_length else own.sum())
        return torch.stack(answers).view(-1, 2) if answers else found.new_zeros(0, 2)

    # -- what the policy is compared with ----------------------------------------------------------

    def _references(self, step: StepLike, micro: Micro, part: str) -> Tensor:
        """The same of the reference; zeros of a loss that has none."""
        match self.loss.compared():
            case Reference.STORED:
                return self._look_up(micro, part)
            case Reference.FROZEN:
                other = self.reference_beside(step)
                with self.watched(other):
                    return self._answers(other, micro)
            case Reference.ADAPTERS_OFF:
                with self.watched(step), adapters_off(self.ctx.model):
                    return self._answers(step, micro)
        dtype = torch.float64 if self.ctx.model.dtype == torch.float64 else torch.float32
        return torch.zeros(len(_numbers(micro)), 2, dtype=dtype, device=micro.input_ids.device)

    def _look_up(self, micro: Micro, part: str) -> Tensor:
        if self._stored is None:
            self._stored = self.ctx.world.run_on_rank0(self._read)
        if self._stored is None:
            raise UnsupportedError(
                f"loss.reference: {self._path} is not there, or of another run, and the weights "
                "that it is computed with are trained already; restore it, or begin again in "
                "another folder"
            )
        found = self._stored[part][list(_numbers(micro))]
        if found.isnan().any():
            raise UnsupportedError(
                f"loss.reference: {self._path} has no log-probabilities of some pairs of this step "
                "or evaluation: it was computed for the steps, batches and evaluation.sequences "
                "that the run began with; set these back, or begin again in another folder"
            )
        return found.to(micro.input_ids.device, torch.promote_types(self.ctx.model.dtype, F32))

    def prepare(self, step: StepLike, at: int) -> None:
        if self.loss.compared() is not Reference.STORED:
            return
        self._stored = self.ctx.world.run_on_rank0(self._read)
        if self._stored is None and at == 0:
            self._stored = self._compute(step)
            self.ctx.world.run_on_rank0(self._write)

    def _compute(self, step: StepLike) -> dict[str, Tensor]:
        """Of every pair that the run reads or is evaluated on."""
        corpus, batches = self.ctx.corpus, self.batches
        numbers = range(batches.needed())
        self.observer.note(
            f"reference: log-probabilities of {len(numbers):,} batches, once; kept in {self._path}"
        )
        found = {"train": self._table(step, corpus.train, map(batches.of, numbers), len(numbers))}
        if corpus.held_out is not None:
            micros = batches.held_out()
            found["held_out"] = self._table(step, corpus.held_out, micros, len(micros))
        return found

    def _table(
        self, step: StepLike, packing: Packing | Mixture, micros: Iterable[Micro], count: int
    ) -> Tensor:
        own: list[tuple[int, list[float]]] = []
        for place, micro in enumerate(micros):
            self.observer.interrupt.passed(StopPoint.BATCH)
            with self.watched(step, partial(self.observer.evaluating, place, count)):
                own += zip(_numbers(micro), self._answers(step, micro).tolist(), strict=True)
        table = torch.full((packing.documents(), 2), torch.nan, dtype=torch.float64)
        for number, values in self.ctx.world.gather_replicas(own):
            table[number] = torch.tensor(values, dtype=torch.float64)
        return table

    def _write(self) -> None:
        assert self._stored is not None, "it has been computed"
        write_whole(self._path, save(self._stored, {MARK: self._mark}))

    def _read(self) -> dict[str, Tensor] | None:
        """None: there is none, or of another run."""
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


class Distilled(_OfLogProbs):
    """The mean over trained tokens of how far the student is from the teacher's k likeliest ids."""

    def _parts(
        self,
        step: StepLike,
        micro: Micro,
        total: int,
        part: str,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        ids, labels, documents = micro.input_ids, micro.labels, micro.document_ids
        teacher, vocab = self.reference_beside(step), text_config(self.ctx.model).vocab_size
        with self.watched(teacher):
            top, known = teacher.top_logprobs(ids, documents, k=self.loss.top_k, vocab=vocab)
        trained = _is_trained(labels, documents)
        asked = torch.full_like(top, UNTRAINED)  # labels are those of the token before
        asked[:, 1:] = top[:, :-1].where(trained[:, :-1, None], UNTRAINED)
        student = step.logprobs(ids, asked, documents)
        return {"loss": losses.distillation(student, known, trained).sum() / total}


def _numbers(micro: Micro) -> tuple[int, ...]:
    """Its pairs, row by row."""
    return tuple(number for row in micro.batch.pairs for number in row)


def _is_trained(labels: Tensor, documents: Tensor) -> Tensor:
    """[batch, tokens] bool: is the token behind it trained, and of the same document?"""
    found = torch.zeros_like(labels, dtype=torch.bool)
    found[:, :-1] = (labels[:, 1:] != UNTRAINED) & (documents[:, 1:] == documents[:, :-1])
    return found


def text_config(model: Any) -> Any:
    """Of a model's language part."""
    return model.config.get_text_config()


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside it adapters add nothing. What is trained stays so: peft's own way would have all that
    is known of the model found out anew."""
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "_disable_adapters")]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def objective_of(
    batches: Batches, observer: Observer, folder: RunFolder, identity: Mapping[str, Any]
) -> Objective:
    """What the run trains."""
    loss = batches.ctx.run.objective
    if loss.paired:
        return OfPairs(batches, observer, folder, identity)
    return Distilled(batches, observer) if loss.kind is LossKind.DISTILL else Objective(batches)
