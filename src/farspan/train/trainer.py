"""One run, step by step. Everything that decides a step follows from its number."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from farspan.data.packing import Batch
from farspan.data.tokenizers import reads_back
from farspan.engine.meter import PeakMeter
from farspan.train import checkpoint
from farspan.train.checkpoint import Live, capture_rng, restore_rng
from farspan.train.config import OnNonfinite, RunConfig
from farspan.train.diagnosis import Diverged, as_json, find_nonfinite, report
from farspan.train.durable import PARTIAL, publish, writing
from farspan.train.folder import RunFolder, identity
from farspan.train.interrupt import Interrupt
from farspan.train.memory import compare, peak_process_bytes
from farspan.train.optimizer import learning_rate
from farspan.train.parts import CellsDone
from farspan.train.progress import Reporter
from farspan.train.setup import Equipment


@dataclass(frozen=True, slots=True)
class Position:
    """How far the run has come; with the seed it decides every batch that follows."""

    step: int = 0  # updates done, skipped ones included
    tokens: int = 0  # read in them
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Micro:
    """One batch on the device and how many of its tokens have a target."""

    batch: Batch
    indices: tuple[int, ...]
    input_ids: Tensor  # [batch, tokens] int64
    document_ids: Tensor  # [batch, tokens] int64
    trained: int


class Trainer:
    """Takes the steps of a run, and saves and measures between them.

    Invariant: between steps, `at`, the tensors of `live` and the random generators are those of
    an uninterrupted run after `at.step` steps.
    """

    def __init__(
        self,
        run: RunConfig,
        equipment: Equipment,
        folder: RunFolder,
        reporter: Reporter,
        interrupt: Interrupt,
    ) -> None:
        self._run = run
        self._use = equipment
        self._folder = folder
        self._reporter = reporter
        self._interrupt = interrupt
        self._live = Live(_model_tensors(equipment.model), equipment.optimizer.tensors())
        self._identity = {"run": identity(run), "data": equipment.corpus.identity}
        self._rng = capture_rng()
        self._is_measured = False
        self._saved: int | None = None  # step of the latest checkpoint
        self.at = Position()
        self.loss: float | None = None
        self.held_out: dict[int, float] = {}  # loss by step

    def resume(self) -> None:
        """Goes to where the latest checkpoint stands, if there is one."""
        restored = checkpoint.resume(
            self._folder.checkpoints, self._live, self._identity, self._reporter.note
        )
        if restored is not None:
            self.at = Position(**restored.state["position"])
            self._saved = self.at.step
            self._rng = restored.rng
            restore_rng(restored.rng)
            self._reporter.note(f"resuming after step {self.at.step} of {self._run.steps}")
        for line in self._folder.rewind(self.at.step):
            self.loss = line.get("loss", self.loss)
            if "heldout_loss" in line:
                self.held_out[line["step"]] = line["heldout_loss"]

    def fit(self) -> None:
        """All steps that are left. Raises Interrupted between two cells, Diverged, WriteFailed."""
        run = self._run
        self._reporter.start(run.steps, run.tokens_per_step(), self.at.step)
        while True:
            self._interrupt.check()
            self._evaluate_if_due()
            if self.at.step == run.steps or _due(self.at.step, run.checkpoints.every):
                self.save()
            if self.at.step == run.steps:
                return
            self._advance()

    def save(self) -> None:
        """A checkpoint of the last finished step, unless there is one."""
        if self._saved == self.at.step:
            return
        checkpoint.save(
            self._folder.checkpoints,
            self._live,
            self._rng,
            {**self._identity, "position": asdict(self.at)},
            step=self.at.step,
            keep=self._run.checkpoints.keep,
        )
        self._saved = self.at.step

    def export(self) -> None:
        """The model as a folder that `from_pretrained` reads, with its tokenizer."""
        if self._folder.model.exists():
            return  # of this run: it is published after the last checkpoint and then left alone
        partial_folder = self._folder.path / f"{PARTIAL}model"
        with writing(partial_folder), _without_bars():
            self._use.model.save_pretrained(partial_folder)
            self._use.tokenizer.save(partial_folder)
        publish(partial_folder, self._folder.model)
        if not reads_back(self._use.tokenizer, self._folder.model):
            self._reporter.note(
                f"warning: for this model type transformers reads the tokenizer in "
                f"{self._folder.model} as another one; load it with PreTrainedTokenizerFast, or "
                f"from {self._run.data.tokenizer}"
            )

    def _advance(self) -> None:
        began = time.perf_counter()
        step, run = self.at.step, self._run
        self._reporter.begin(step + 1)
        batches = [self._micro(step * run.accumulate + i) for i in range(run.accumulate)]
        loss, memory = self._measured(batches)
        gradient_norm = self._use.optimizer.gradient_norm()
        norm = float(gradient_norm)
        lr = learning_rate(run.optimizer, step, run.steps)
        values: dict[str, Any] = {"step": step + 1, "lr": lr, **memory}
        if math.isfinite(loss) and math.isfinite(norm):
            self._use.optimizer.step(lr, gradient_norm)
            self.loss = loss
            values |= {"loss": loss, "grad_norm": norm}
            skipped = 0
        else:
            values["nonfinite"] = self._nonfinite(batches, loss, norm)
            skipped = 1
        tokens = self.at.tokens + sum(m.input_ids.numel() for m in batches)
        self.at = Position(step + 1, tokens, self.at.skipped + skipped)
        self._rng = capture_rng()
        self._record(values, batches, time.perf_counter() - began)

    def _record(self, values: dict[str, Any], batches: list[Micro], seconds: float) -> None:
        read = sum(m.input_ids.numel() for m in batches)
        values |= {
            "tokens": self.at.tokens,
            "trained_tokens": sum(m.trained for m in batches),
            "tokens_per_second": read / seconds,
            "seconds": seconds,
            "peak_process_bytes": peak_process_bytes(),
        }
        self._folder.record(values)
        self._reporter.end(values)

    def _measured(self, batches: list[Micro]) -> tuple[float, dict[str, int]]:
        """As `_gradients`; the first time also the peak bytes, predicted and measured."""
        if self._is_measured:
            return self._gradients(batches), {}
        with PeakMeter(self._use.device) as meter:
            loss = self._gradients(batches)
        self._is_measured = True
        predicted = self._use.expected.new
        self._reporter.note(compare(predicted, meter.peak))
        return loss, {"memory_predicted_bytes": predicted, "memory_measured_bytes": meter.peak}

    def _gradients(self, batches: list[Micro]) -> float:
        """Adds the gradient of the mean loss over all trained tokens of the batches; that loss."""
        step, total = self._use.step, sum(m.trained for m in batches)
        losses = []
        for place, micro in enumerate(batches):
            step.progress = partial(self._cells, place)
            losses.append(
                step(
                    micro.input_ids,
                    micro.input_ids,
                    micro.document_ids,
                    trained_tokens=max(1, total),
                )
            )
        step.progress = None
        return float(torch.stack([loss.detach() for loss in losses]).sum())

    def _cells(self, place: int, progress: CellsDone) -> None:
        self._interrupt.check()
        done = (place + progress.work_done / progress.work) / self._run.accumulate
        self._reporter.cells(self.at.step + 1, done, progress)

    def _micro(self, number: int) -> Micro:
        """Batch `number` since the start of the run."""
        size = self._run.batch
        indices = tuple(range(number * size, (number + 1) * size))
        return self._place(self._use.corpus.train.batch(indices), indices)

    def _place(self, batch: Batch, indices: tuple[int, ...]) -> Micro:
        input_ids = torch.from_numpy(batch.input_ids).to(self._use.device)
        document_ids = torch.from_numpy(batch.document_ids).to(self._use.device)
        trained = self._use.count_trained(input_ids, document_ids)
        return Micro(batch, indices, input_ids, document_ids, trained)

    def _nonfinite(self, batches: list[Micro], loss: float, norm: float) -> str:
        """What is not finite. Raises Diverged, after saving, unless such batches are skipped."""
        finding = find_nonfinite(loss, self._use.optimizer.parameters)
        self._use.optimizer.clear()
        number = self.at.step + 1
        if self._run.nonfinite is OnNonfinite.SKIP and finding.weight is None:
            self._reporter.note(f"step {number} skipped: {finding.kind} is not finite")
            return finding.kind
        described = [
            {"sequence": index, "documents": list(names)}
            for micro in batches
            for index, names in zip(micro.indices, micro.batch.names, strict=True)
        ]
        values = report(finding, step=number, loss=loss, norm=norm, batches=described)
        path = self._folder.write_json("diagnosis.json", values)
        self.save()
        raise Diverged(
            f"step {number}: {finding.kind} is not finite (loss {loss}); {finding.describe()}; "
            f"see {path}. The step before it is saved. Lower optimizer.lr and start in another "
            "folder, or set nonfinite to skip and run the same command to go on without this batch"
        )

    def _evaluate_if_due(self) -> None:
        step, packing = self.at.step, self._use.corpus.held_out
        due = step == self._run.steps or _due(step, self._run.evaluation.every, first=True)
        if packing is None or not due or step in self.held_out:
            return
        there = packing.sequences_per_epoch()
        count = min(self._run.evaluation.sequences, there)
        # Spread over all of them, so that one long document does not stand for the rest.
        chosen = [place * there // count for place in range(count)]
        batches = [self._place(packing.once(i), (i,)) for i in chosen]
        total, loss = sum(m.trained for m in batches), 0.0
        for place, micro in enumerate(batches):
            self._use.step.progress = partial(self._evaluating, place, count)
            loss += float(
                self._use.step.evaluate(
                    micro.input_ids,
                    micro.input_ids,
                    micro.document_ids,
                    trained_tokens=max(1, total),
                )
            )
        self._use.step.progress = None
        self.held_out[step] = loss
        values = {"step": step, "heldout_loss": loss, "heldout_tokens": total}
        self._folder.record(values | {"heldout_loss": as_json(loss)})
        self._reporter.evaluated(values)

    def _evaluating(self, place: int, count: int, progress: CellsDone) -> None:
        self._interrupt.check()
        self._reporter.evaluating((place + progress.work_done / progress.work) / count, progress)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Transformers' own progress bars would tear ours apart."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _due(step: int, every: int, first: bool = False) -> bool:
    return every > 0 and step % every == 0 and (step > 0 or first)


def _model_tensors(model: nn.Module) -> Mapping[str, Tensor]:
    """Parameters, each under its first name, and the buffers that belong to the weights."""
    kept = model.state_dict().keys()
    buffers = {name: b for name, b in model.named_buffers() if name in kept}
    return {**{name: p.detach() for name, p in model.named_parameters()}, **buffers}
