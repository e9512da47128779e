"""The training loop, and `train`, which prepares it and tells how it ended."""

import math
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from farspan.checkpoint import local as checkpoint
from farspan.checkpoint.distributed import FROZEN
from farspan.checkpoint.export import base_of, export, is_exported
from farspan.checkpoint.local import TrainState, capture_rng, restore_rng, saver_of, train_state_of
from farspan.distributed.launch import launch_env
from farspan.distributed.run_context import (
    DistributedContext,
    Interrupt,
    Interrupted,
    StopPoint,
    join_run,
)
from farspan.durable import WriteFailed, read_json
from farspan.plan.question import Question
from farspan.sparse.engine import Seen
from farspan.sparse.train import (
    HIDING_NOTHING,
    SPARSELY,
    MassWatch,
    hides,
    marks,
    mass_json,
    other_chunk,
    what_changes,
)
from farspan.spec import Refused
from farspan.train.config import OnNonfinite, RunConfig
from farspan.train.console import NoReporter, Reporter, make_reporter
from farspan.train.context import Batches, CellsDone, Micro, Parts, RunContext, StepLike, remembered
from farspan.train.loggers import LoggerThread, LoggingReporter, make_loggers
from farspan.train.memory import Expected, peak_process_bytes
from farspan.train.oom import NoScheduleFits, OneRankOutOfMemory, Shortage
from farspan.train.optimizer import STATES_KEY, learning_rate
from farspan.train.planning import (
    Choice,
    Recalls,
    about_json,
    make_policy,
    named_json,
    place_states,
    plan_json,
    recall_named_shortage,
    recall_plan,
    recall_shortage,
)
from farspan.train.run_folder import (
    Diverged,
    Finding,
    OthersFolder,
    RunFolder,
    as_json,
    diagnosis_json,
    find_nonfinite,
    identity,
)
from farspan.train.setup import choose_device, introduce, make_context, resolve
from farspan.train.step_runner import Callbacks, PlanComparison, StepRunner, shortage_json

PLAN = "plan.json"
ABOUT = "about.json"


class TrainingLoop:
    """Takes the steps of a run, and saves and measures between them.

    Invariant: between steps, `at`, weights, optimizer states and the random generators are those
    of an uninterrupted run after `at.step` steps.
    """

    def __init__(
        self,
        run: RunConfig,
        equipment: RunContext,
        parts: Parts,
        folder: RunFolder,
        reporter: Reporter,
        interrupt: Interrupt,
    ) -> None:
        self._run = run
        self._use = equipment
        self._crew = equipment.crew
        self._batches = Batches(run, equipment, equipment.crew)
        self._folder = folder
        self._reporter = reporter
        self._interrupt = interrupt
        self._identity = {"run": identity(run), "data": equipment.corpus.identity}
        if equipment.frozen is not None:
            self._identity[FROZEN] = equipment.frozen
        self._rng = capture_rng()
        self._saved: int | None = None  # step of the latest checkpoint
        self.at = TrainState()
        self.loss: float | None = None
        self.held_out: dict[int, float] = {}  # loss by step
        self._marks = marks(run)
        self._watch = None if run.sparse is None else MassWatch(run.sparse.warn_below)
        self._parts = parts
        self._runner = StepRunner(
            run,
            equipment,
            parts,
            make_policy(run, equipment, parts, self._recalls(), self._measuring),
            Callbacks(
                note=reporter.note,
                watch=self._rehearsing,
                ready=self._ready,
                replanned=self._replanned,
                alone=self._alone,
                rewind=self._rewind,
            ),
        )
        self._saver = saver_of(equipment)

    def resume(self) -> None:
        """Goes to where the latest checkpoint stands, if there is one."""
        restored = self._saver.resume(self._folder.checkpoints, self._identity, self._reporter.note)
        if restored is not None:
            self.at = train_state_of(restored)
            self._check_steps()
            self._saved = self.at.step
            self._rng = restored.rng
            restore_rng(restored.rng, self._use.device)
            self._reporter.note(f"resuming after step {self.at.step} of {self._run.steps}")
        elif self._folder.model.exists():
            self._reporter.note(
                f"{self._folder.model} is of an earlier run, whose checkpoints are gone; that of "
                "this run takes its place at the end"
            )
        for line in self._crew.by_first(lambda: self._folder.rewind(self.at.step)):
            self.loss = line.get("loss", self.loss)
            if "heldout_loss" in line:
                self.held_out[line["step"]] = float(line["heldout_loss"])

    def fit(self) -> None:
        """All steps that are left. Raises Interrupted between two cells, Diverged, OutOfMemory,
        WriteFailed."""
        try:
            self._fit()
        except NoScheduleFits as error:
            if self.at.step == 0 or isinstance(error, OneRankOutOfMemory):
                raise
            self.save()
            raise NoScheduleFits(
                f"step {self.at.step + 1}: {error}. Step {self.at.step} is saved: the same command "
                "goes on from there, also with another schedule"
            ) from error

    def compare(self) -> PlanComparison | None:
        """The plan beside what was measured, also in the run folder; None without a plan."""
        found = self._runner.compare()
        if found is not None:
            self._reporter.note(found.describe())
            self._folder.write_json("comparison.json", self._marks | found.to_json())
        return found

    def _fit(self) -> None:
        run = self._run
        if self.at.step < run.steps:
            self._interrupt.meet()
            self._runner.make_ready()
        how = f" ({self._marks['attention']})" if self._marks else ""
        self._reporter.start(run.steps, run.tokens_per_step(), self.at.step, how)
        while True:
            self._interrupt.meet()
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
        self._saver.save(
            self._folder.checkpoints,
            self._rng,
            {**self._identity, "position": asdict(self.at)},
            step=self.at.step,
            keep=self._run.checkpoints.keep,
        )
        self._saved = self.at.step

    def export(self) -> None:
        """The model as a folder that `from_pretrained` reads, with its tokenizer."""
        path = self._folder.checkpoints / checkpoint.folder_name(self.at.step)
        folder, use = self._folder.model, self._use
        told = self._marks | base_of(self._run)
        if self._crew.by_first(lambda: is_exported(path, folder, told)):
            return
        weights = self._saver.weights()
        self._crew.by_first(
            lambda: export(
                use.model, use.tokenizer, path, folder, self._reporter.note, told, weights
            )
        )

    def _check_steps(self) -> None:
        if self.at.step > self._run.steps:
            raise Refused(
                f"steps: expected at least the {self.at.step} that {self._folder.path} has done, "
                f"got {self._run.steps}; ask for more, or give another folder"
            )

    def _advance(self) -> None:
        began = time.perf_counter()
        step, run = self.at.step, self._run
        self._reporter.begin(step + 1)
        self._use.memory.begin_step()
        batches = self._batches.of_step(step)
        (loss, seen), memory = self._runner.measured(partial(self._gradients, batches))
        gradient_norm = self._use.optimizer.gradient_norm()
        norm = float(gradient_norm)
        lr = learning_rate(run.optimizer, step, run.steps)
        values: dict[str, Any] = {"step": step + 1, "lr": lr, **memory, **mass_json(seen)}
        if math.isfinite(loss) and math.isfinite(norm):
            self._use.optimizer.step(lr, gradient_norm)
            self.loss = loss
            values |= {"loss": loss, "grad_norm": norm}
            skipped = 0
        else:
            values["nonfinite"] = self._nonfinite(batches, loss, norm)
            skipped = 1
        tokens = self.at.tokens + self._batches.read(batches)
        self.at = TrainState(step + 1, tokens, self.at.skipped + skipped)
        self._rng = capture_rng()
        seconds = time.perf_counter() - began
        self._runner.took(seconds, metered=bool(memory))
        self._record(values, batches, seconds)
        warning = self._watch.warning(step + 1, seen) if self._watch else None
        if warning is not None:
            self._reporter.note(warning)

    def _record(self, values: dict[str, Any], batches: list[Micro], seconds: float) -> None:
        values |= {
            "tokens": self.at.tokens,
            "trained_tokens": self._batches.trained(batches),
            "tokens_per_second": self._batches.read(batches) / seconds,
            "seconds": seconds,
            "peak_process_bytes": peak_process_bytes(),
            **self._marks,
        }
        self._folder.record(values)
        self._reporter.end(values)

    def _gradients(self, batches: list[Micro], step: StepLike) -> tuple[float, list[Seen]]:
        """Adds the gradient of the mean loss over all trained tokens of the batches; that loss,
        and what sparse attention saw."""
        total = self._batches.trained(batches)
        losses, seen = [], []
        for place, micro in enumerate(batches):
            self._interrupt.passed(StopPoint.BATCH)
            step.progress = partial(self._cells, place)
            losses.append(
                step(
                    micro.input_ids,
                    micro.labels,
                    micro.document_ids,
                    trained_tokens=max(1, total),
                )
            )
            if self._watch is not None and step.seen is not None:
                seen.append(step.seen)
        step.progress = None
        return float(torch.stack([loss.detach() for loss in losses]).sum()), seen

    def _cells(self, place: int, progress: CellsDone) -> None:
        self._interrupt.passed(StopPoint.CELL)
        done = (place + progress.work_done / progress.work) / self._run.accumulate
        self._reporter.cells(self.at.step + 1, done, progress)

    def _nonfinite(self, batches: list[Micro], loss: float, norm: float) -> str:
        """What is not finite. Raises Diverged, after saving, unless such batches are skipped."""
        finding = self._find(loss)
        self._use.optimizer.clear()
        number = self.at.step + 1
        if self._run.nonfinite is OnNonfinite.SKIP and finding.weight is None:
            self._reporter.note(f"step {number} skipped: {finding.kind} is not finite")
            return finding.kind
        path = self._diagnose(diagnosis_json(finding, step=number, loss=loss, norm=norm), batches)
        self.save()
        raise Diverged(
            f"step {number}: {finding.kind} is not finite (loss {loss}); {finding.describe()}; "
            f"see {path}. The step before it is saved. Lower optimizer.lr and start in another "
            "folder, or set nonfinite to skip and run the same command to go on without this batch"
        )

    def _nonfinite_heldout(self, batches: list[Micro], loss: float) -> None:
        """Raises Diverged, after saving, unless the run is to go on."""
        finding = self._find(loss)
        step = self.at.step
        if self._run.nonfinite is OnNonfinite.SKIP and finding.weight is None:
            self._reporter.note(f"step {step}: the held-out loss is not finite")
            return
        path = self._diagnose(diagnosis_json(finding, step=step, loss=loss, heldout=True), batches)
        self.save()
        raise Diverged(
            f"step {step}: the held-out loss is not finite ({loss}); {finding.describe()}; see "
            f"{path}. This step is saved. Lower optimizer.lr and start in another folder, or set "
            "nonfinite to skip and run the same command to go on in spite of it"
        )

    def _find(self, loss: float) -> Finding:
        """What every rank is to think of it: what the first that found a bad weight does."""
        return self._crew.agree_on(find_nonfinite(loss, self._use.optimizer.parameters))

    def _diagnose(self, values: dict[str, Any], batches: list[Micro]) -> Path:
        own = [line for micro in batches for line in micro.describe()]
        described = self._crew.of_replicas(own)
        values = self._marks | values | {"batches": described}
        return self._folder.write_json("diagnosis.json", values)

    def _evaluate_if_due(self) -> None:
        step, packing = self.at.step, self._use.corpus.held_out
        due = step == self._run.steps or _due(step, self._run.evaluation.every, first=True)
        if packing is None or not due or step in self.held_out:
            return
        batches = self._batches.held_out()
        loss = self._runner.attempt(partial(self._heldout_loss, batches))
        if not math.isfinite(loss):
            self._nonfinite_heldout(batches, loss)
        self.held_out[step] = loss
        total = self._batches.trained(batches)
        values = {"step": step, "heldout_loss": loss, "heldout_tokens": total, **self._marks}
        self._folder.record(values | {"heldout_loss": as_json(loss)})
        self._reporter.evaluated(values)

    def _heldout_loss(self, batches: list[Micro], step: StepLike) -> float:
        total, loss = self._batches.trained(batches), 0.0
        for place, micro in enumerate(batches):
            self._interrupt.passed(StopPoint.BATCH)
            step.progress = partial(self._evaluating, place, len(batches))
            loss += float(
                step.evaluate(
                    micro.input_ids,
                    micro.labels,
                    micro.document_ids,
                    trained_tokens=max(1, total),
                )
            )
        step.progress = None
        return loss

    def _evaluating(self, place: int, count: int, progress: CellsDone) -> None:
        self._interrupt.passed(StopPoint.HELD_OUT_CELL)
        self._reporter.evaluating((place + progress.work_done / progress.work) / count, progress)

    def _rehearsing(self, progress: CellsDone) -> None:
        self._interrupt.passed(StopPoint.CELL)
        self._reporter.rehearsing(progress.work_done / progress.work, progress)

    def _measuring(self, what: str) -> None:
        self._interrupt.check()
        self._reporter.measuring(what)

    def _recall(self, question: Question) -> Choice | None:
        """A run that goes on keeps its plan; one that begins has none."""
        if self.at.step == 0:
            return None
        return recall_plan(self._folder.path / PLAN, question, self._parts.evaluate)

    def _recalls(self) -> Recalls:
        path, layout = self._folder.shortage, self._crew.layout
        return Recalls(
            self._recall,
            lambda question: recall_shortage(path, question, self._parts.evaluate),
            lambda asked: recall_named_shortage(path, asked, layout),
        )

    def _alone(self, shortage: Shortage, choice: Choice) -> None:
        if choice.plan is None:
            asked = self._parts.schedule_of(self._run, self._use.model)
            found = named_json(choice, asked, self._crew.layout)
        else:
            found = plan_json(choice)
        # The disk may be full as well: what ran out first is to be heard of.
        with suppress(WriteFailed):
            self._folder.write_shortage(found | shortage_json(shortage, choice))

    def _ready(self, choice: Choice, expected: Expected) -> None:
        known = (read_json(self._folder.path / ABOUT) or {}) if self.at.step else {}
        if words := other_chunk(known.get("schedule", {}).get("chunk"), choice.schedule):
            self._reporter.note(f"schedule: {words}")
        self._folder.write_json(ABOUT, about_json(self._run, self._use, choice, expected))
        if choice.plan is not None:
            self._folder.write_json(PLAN, plan_json(choice))
            self._folder.forget_shortage()

    def _replanned(self, shortage: Shortage, choice: Choice) -> None:
        self._use.memory.forget()
        line = {"step": self.at.step + 1, **self._marks, **shortage_json(shortage, choice)}
        self._folder.record(line)
        known = read_json(self._folder.path / ABOUT) or {}
        self._folder.write_json(ABOUT, known | {"schedule": asdict(choice.schedule)})

    def _rewind(self) -> None:
        self._use.optimizer.clear()
        restore_rng(self._rng, self._use.device)


def _due(step: int, every: int, first: bool = False) -> bool:
    return every > 0 and step % every == 0 and (step > 0 or first)


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """How a run ended."""

    folder: Path
    step: int  # updates done
    steps: int  # updates asked for
    loss: float | None  # of the last step that was not skipped
    heldout_loss: float | None  # the latest
    skipped: int  # steps without an update, because something was not finite
    signum: int | None  # the signal that ended it early
    comparison: PlanComparison | None = None  # of the planner's plan with what happened
    sparse: bool = False  # by sparse attention, the held-out losses too: an approximation if
    hides: bool = True  # a query may miss what dense attention shows it
    leads: bool = True  # this process is the one that tells of it
    adapters: bool = False  # are what was trained, and is given out

    @property
    def exit_code(self) -> int:
        """For the shell: 0, or 128 and the signal's number."""
        return 0 if self.signum is None else 128 + self.signum

    @property
    def message(self) -> str:
        """One sentence for the user."""
        words = SPARSELY if self.hides else HIDING_NOTHING
        how = f" {words}" if self.sparse else ""
        if self.signum is not None:
            return (
                f"{signal.Signals(self.signum).name}: stopped after step {self.step} of "
                f"{self.steps}{how}; run the same command again to go on from there"
            )
        what = "adapters are" if self.adapters else "model is"
        return f"{self.steps} steps done{how}; the {what} in {self.folder / 'model'}"


def train(
    run: RunConfig,
    *,
    parts: Parts | None = None,
    reporter: Reporter | None = None,
    notes: Sequence[str] = (),
) -> TrainingResult:
    """Trains until the last step or the first signal, from the latest checkpoint if there is one.

    `notes` are said first. Raises Refused for what cannot be done as asked, OutOfMemory (which is
    one) when no schedule fits, WriteFailed when the disk is full, Diverged when a loss or gradient
    is not finite; all of them leave the last good checkpoint. Where torchrun started several
    processes, or in a process group, all of them call this and have the same result; then also
    RankFailed, which names another rank that failed.
    """
    place = launch_env()
    run = resolve(run, None if place is None else place.ranks)
    with join_run(run, place, choose_device(run.device)) as crew:
        lanes: list[LoggerThread] = []
        crew.by_first(
            lambda: lanes.extend(LoggerThread(*named) for named in make_loggers(run).items())
        )
        if crew.leads:
            shown = make_reporter(Console()) if reporter is None else reporter
            shown = LoggingReporter(shown, lanes) if lanes else shown
            with RunFolder(run) as folder, Interrupt() as interrupt, shown:
                return _train(run, parts or Parts(), folder, (shown, interrupt), crew, notes)
        with OthersFolder(run) as folder, Interrupt() as interrupt:
            told = NoReporter(), interrupt
            return _train(run, parts or Parts(), folder, told, crew, notes)


def _train(
    run: RunConfig,
    parts: Parts,
    folder: RunFolder,
    person: tuple[Reporter, Interrupt],
    crew: DistributedContext,
    notes: Sequence[str],
) -> TrainingResult:
    shown, interrupt = person
    interrupt.share(crew)
    for text in notes:
        shown.note(text)
    for change in crew.by_first(folder.prepare):
        shown.note(f"{change}: {what_changes(run, change)}")
    try:
        trainer = _prepare(run, parts, folder, shown, interrupt, crew)
    except Interrupted as stop:
        return replace(_nothing(run, folder), signum=stop.signum)
    try:
        trainer.fit()
    except Interrupted as stop:
        trainer.save()
        return _result(run, folder, trainer, stop.signum)
    comparison = trainer.compare()
    trainer.export()
    return replace(_result(run, folder, trainer, None), comparison=comparison)


def _prepare(
    run: RunConfig,
    parts: Parts,
    folder: RunFolder,
    reporter: Reporter,
    interrupt: Interrupt,
    crew: DistributedContext,
) -> TrainingLoop:
    def watch(documents: int, tokens: int) -> None:
        interrupt.check()
        reporter.preparing(documents, tokens)

    def measuring(what: str) -> None:
        interrupt.check()
        reporter.measuring(what)

    before = crew.by_first(lambda: read_json(folder.path / ABOUT) or {}).get(STATES_KEY)
    parts = replace(parts, machine=remembered(parts.machine))
    place = place_states(run, parts, before, measuring, crew)
    equipment = make_context(run, parts, watch, place, crew)
    reporter.note(introduce(run, equipment))
    trainer = TrainingLoop(run, equipment, parts, folder, reporter, interrupt)
    trainer.resume()
    if trainer.at.step and before not in (None, equipment.placed.states):
        reporter.note(f"optimizer states: were on the {before}; the same tensors go on elsewhere")
    return trainer


def _nothing(run: RunConfig, folder: RunFolder) -> TrainingResult:
    """Of a run that ended before it began."""
    return TrainingResult(
        *(folder.path, 0, run.steps, None, None, 0, None),
        sparse=run.sparse is not None,
        hides=hides(run),
        leads=not isinstance(folder, OthersFolder),
        adapters=run.model.lora is not None,
    )


def _result(
    run: RunConfig, folder: RunFolder, trainer: TrainingLoop, signum: int | None
) -> TrainingResult:
    held_out = trainer.held_out
    return replace(
        _nothing(run, folder),
        step=trainer.at.step,
        loss=trainer.loss,
        heldout_loss=held_out[max(held_out)] if held_out else None,
        skipped=trainer.at.skipped,
        signum=signum,
    )
