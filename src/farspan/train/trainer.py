"""The training loop, `TrainingLoop.fit`, and `train`, which sets it up and returns its result.

Everything that decides a step follows from its number.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console

from farspan.attention.far import Seen
from farspan.checkpoint.saver import (
    FROZEN,
    INDEX_OF_KEYS,
    Restored,
    TrainState,
    export,
    folder_name,
    is_exported,
    list_checkpoints,
)
from farspan.distributed.run_context import (
    DistributedContext,
    StopPoint,
    join_run,
    launch_env,
)
from farspan.durable import read_json, shown
from farspan.engine.runner import Progress
from farspan.engine.step import Step
from farspan.hf.merge import SOURCE
from farspan.lazy import load
from farspan.report.run import ABOUT
from farspan.spec import LossKind, UnsupportedError
from farspan.train.config import OnNonfinite, RunConfig, load_run
from farspan.train.console import make_reporter
from farspan.train.context import Components, RunContext
from farspan.train.hub import card_of, pushed, refuse_login
from farspan.train.loggers import (
    Answer,
    Callback,
    Callbacks,
    LoggerThread,
    LoggingReporter,
    make_loggers,
)
from farspan.train.memory import STATES_KEY, TRIM_EVERY, grow_stack, return_freed, trimming
from farspan.train.observer import Interrupt, Interrupted, Observer, Reporter
from farspan.train.oom import NoScheduleFits, OneRankOutOfMemory
from farspan.train.optimizer import learning_rate
from farspan.train.origin import as_begun, checkpoints_of, latest
from farspan.train.planning import SchedulePolicy
from farspan.train.run_folder import (
    WINDOWS,
    OthersFolder,
    RunFolder,
    RunState,
    as_json,
    capture_rng,
    diagnosis_json,
    find_nonfinite,
    identity,
    restore_rng,
)
from farspan.train.setup import choose_device, introduce, make_context, resolve
from farspan.train.sparse import MassWatch, hides, marks, mass_json, what_changes
from farspan.train.step_runner import (
    Batches,
    Micro,
    PlanComparison,
    StepRunner,
    TrainingResult,
)
from farspan.train.yaml_config import flatten, to_mapping


class Diverged(RuntimeError):
    """A loss or gradient is not finite, and the run file sets `nonfinite: stop`."""


class TrainingLoop:
    """Loop over the steps of a run, with evaluations and checkpoints between them.

    Invariant: between steps, `state` equals that of an uninterrupted run after `at.step` steps. So
    do weights and optimizer states, after the optimizer's `settle`.
    """

    def __init__(
        self,
        ctx: RunContext,
        folder: RunFolder,
        observer: Observer,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self._ctx = ctx
        self._callbacks = Callbacks(callbacks, ctx.world)
        self._run = ctx.run
        self._has_routers = ctx.run.objective.routers  # with losses
        self._world = ctx.world
        self._batches = Batches(ctx)
        self._folder = folder
        self._observer = observer
        self._trim = trimming() if ctx.device.type == "cpu" else None
        self._reporter = observer.reporter
        self._interrupt = observer.interrupt
        self._identity = {"run": identity(ctx.run), "data": ctx.corpus.identity}
        if ctx.frozen is not None:
            self._identity[FROZEN] = ctx.frozen
        if ctx.index is not None:
            self._identity[INDEX_OF_KEYS] = ctx.index.digest()
        self._objective: Any = None  # a loss that needs several passes
        if ctx.run.objective.kind is not LossKind.SFT:
            made = load("farspan.train.objectives", "make_objective")
            self._objective = made(self._batches, observer, folder, self._identity)
        self._saved: int | None = None  # step of the latest checkpoint
        self.loss: float | None = None
        self.held_out: dict[int, float] = {}  # loss by step
        self.best: int | None = None  # step of the best checkpoint, if it is kept
        self._marks = marks(ctx.run)
        self._watch = None if ctx.run.sparse is None else MassWatch(ctx.run.sparse.warn_below)
        self._state = RunState()
        policy = SchedulePolicy(ctx, folder, self._state, observer.measuring)
        self._runner = StepRunner(ctx, policy, self._state, folder, observer)
        self._saver = ctx.saver()
        self._rate = learning_rate(ctx.run.optimizer, ctx.run.steps)

    @property
    def at(self) -> TrainState:
        return self._state.at

    def fit(self) -> None:
        """Train until the last step. Raises Interrupted, Diverged, NoScheduleFits, WriteFailed."""
        run, ctx, runner = self._run, self._ctx, self._runner
        if self.at.step < run.steps:
            if self.why_stop() is not None:
                return  # an earlier part of the run has ended here
            self._interrupt.meet()
            runner.make_ready()
            if self._objective is not None:
                runner.attempt(self._objective.prepare, self.at.step)
        how = f" ({', '.join(self._marks.values())})" if self._marks else ""
        self._reporter.start(run.steps, run.tokens_per_step(), self.at.step, how)
        while True:
            step = self.at.step
            self._interrupt.meet()
            self._evaluate_if_due()
            if self.is_over() or step == self.best or _due(step, run.checkpoints.every):
                self.save()
            if self.is_over():
                self._reporter.over()
                return

            began = time.perf_counter()
            self._reporter.begin(step + 1)
            if ctx.memory.begin_step is not None:
                ctx.memory.begin_step()
            batches = self._batches.of_step(step)
            found, seen = runner.attempt(self._gradients, batches)
            loss = found.pop("loss")
            gradient_norm = ctx.optimizer.gradient_norm()
            norm, rate = float(gradient_norm), self._rate(step)
            values: dict[str, Any] = {"step": step + 1, "lr": rate}
            finite = math.isfinite(loss) and math.isfinite(norm)
            if finite:
                with runner.updating():
                    ctx.optimizer.step(rate, gradient_norm)
                self.loss = loss
                values |= {"loss": loss, **found, "grad_norm": norm}
            else:
                values["nonfinite"] = self._nonfinite(batches, loss, norm)
            tokens = self.at.tokens + self._batches.read(batches)
            self._state.at = TrainState(step + 1, tokens, self.at.skipped + (not finite))
            self._state.rng = capture_rng()
            self._record(values, batches, seen, time.perf_counter() - began)

    def is_over(self) -> bool:
        return self.at.step == self._run.steps or self.why_stop() is not None

    def why_stop(self) -> str | None:
        """Return the reason to end the run before its last step, or None."""
        if self._callbacks.stop is None and self.at.step in self.held_out:
            return self._run.evaluation.why_stop(self.held_out)
        return self._callbacks.stop

    def _tell(self, call: Callable[[Callback], Answer]) -> None:
        """Call a method of each callback; if one raises, save a checkpoint before raising."""
        if not self._callbacks.any:
            return
        try:
            self._callbacks.tell(call)
        except Exception:
            self._save()
            raise

    def _gradients(self, step: Step, batches: list[Micro]) -> tuple[dict[str, float], list[Seen]]:
        """Add the gradient of the mean loss over `batches` to `.grad`. Returns the loss and its
        metrics by name, and the statistics of sparse attention, one per batch."""
        step.drawn, objective = self.at.step * len(batches), self._objective
        total = self._total(step, batches, "train")
        share = 1 / (len(batches) * self._batches.replicas)
        sums, seen, balance = [], [], 0.0
        with self._runner.metering():
            for place, micro in enumerate(batches):
                self._interrupt.passed(StopPoint.BATCH)
                told = partial(self._observer.training, self.at.step + 1, place, len(batches))
                step.progress = returning_freed(told, self._trim)
                step.drawn = self.at.step * len(batches) + place
                if objective is not None:
                    sums.append(objective.train(step, micro, total, share))
                    continue
                ids, labels, documents = micro.input_ids, micro.labels, micro.document_ids
                how = self._routing(micro, share)
                sums.append(step(ids, labels, documents, trained_tokens=total, **how))
                if how:
                    balance += share * float(step.aux_loss)
                if self._watch is not None and step.seen is not None:
                    seen.append(step.seen)
            step.progress = None
            if objective is not None:
                return objective.gather_sums(sums), seen
            found = {"loss": float(torch.stack([loss.detach() for loss in sums]).sum())}
            if self._has_routers:  # a step's loss is that of all replicas already
                found["aux_loss"] = sum(self._world.gather_replicas([balance]))
            return found, seen

    def _routing(self, micro: Micro, share: float) -> dict[str, Any]:
        """Return arguments by which a step adds `share` times its routers' losses; {}: none."""
        if not self._has_routers:
            return {}
        return {"attention_mask": micro.attention_mask, "router_share": share}

    def _total(self, step: Step, batches: list[Micro], part: str) -> int:
        """Return the number that divides the summed loss of these batches, over all replicas."""
        if self._objective is not None:
            return int(self._objective.begin(step, batches, part))
        return max(1, self._batches.trained(batches))

    def _record(
        self, values: dict[str, Any], batches: list[Micro], seen: list[Seen], seconds: float
    ) -> None:
        """Write the step that has just ended to metrics.jsonl, and report it."""
        values |= {
            **self._runner.took(seconds),
            **(mass_json(seen) if seen else {}),
            "tokens": self.at.tokens,
            "trained_tokens": self._batches.trained(batches),
            "tokens_per_second": self._batches.read(batches) / seconds,
            "seconds": seconds,
            "peak_process_bytes": self._runner.peak_process_bytes(),
            **self._marks,
        }
        self._folder.record(values)
        self._reporter.end(values)
        self._tell(lambda one: one.on_step(dict(values)))
        warning = self._watch.warning(self.at.step, seen) if self._watch else None
        if warning is not None:
            self._observer.note(warning)

    def _evaluate_if_due(self) -> None:
        step, packing = self.at.step, self._ctx.corpus.held_out
        asked = self._run.evaluation
        due = self.is_over() or _due(step, asked.every) or (step == 0 and asked.on_start)
        if packing is None or not due or step in self.held_out:
            return
        batches = self._batches.held_out()
        found = self._runner.attempt(self._heldout, batches)
        loss = found.pop("loss")
        if not math.isfinite(loss):
            self._nonfinite(batches, loss)
        self.held_out[step] = loss
        if self._run.checkpoints.best:
            self.best = _lowest(self.held_out, {self.best, step})
        total = self._batches.trained(batches)
        values = {"step": step, "heldout_loss": loss, "heldout_tokens": total, **self._marks}
        values |= {f"heldout_{name}": value for name, value in found.items()}
        written = {n: as_json(v) if isinstance(v, float) else v for n, v in values.items()}
        self._folder.record(written)
        self._reporter.evaluated(values)
        self._tell(lambda one: one.on_evaluation(dict(values)))

    def _heldout(self, step: Step, batches: list[Micro]) -> dict[str, float]:
        total, sums = self._total(step, batches, "held_out"), []
        for place, micro in enumerate(batches):
            self._interrupt.passed(StopPoint.BATCH)
            step.progress = partial(self._observer.evaluating, place, len(batches))
            if self._objective is not None:
                sums.append(self._objective.evaluate(step, micro, total))
                continue
            ids, labels, documents = micro.input_ids, micro.labels, micro.document_ids
            how = self._routing(micro, 0.0)  # held-out losses compare across coefficients
            sums.append(float(step.evaluate(ids, labels, documents, trained_tokens=total, **how)))
        step.progress = None
        return {"loss": sum(sums)} if self._objective is None else self._objective.gather_sums(sums)

    def resume(self) -> None:
        """Restore the latest checkpoint of this run. If it has none, and `start.states` is set,
        restore that of the run that `start` names."""
        note = self._observer.note
        restored = self._saver.resume(self._folder.checkpoints, self._identity, note)
        start = self._run.start
        if restored is not None:
            self._go_to(restored)
            if streams := self._ctx.corpus.streams():
                path = self._folder.path / WINDOWS
                read = self._world.run_on_rank0(lambda: read_json(path)) or {}
                for number, stream in enumerate(streams):
                    stream.expect(read.get(str(number), ()))
            self._saved = self.at.step
            note(f"resuming after step {self.at.step} of {self._run.steps}")
        elif start is not None and start.states:
            same = {key: value for key, value in self._identity.items() if key == FROZEN}
            paths = self._world.run_on_rank0(lambda: checkpoints_of(Path(start.path).expanduser()))
            begun = latest(paths, lambda path: self._saver.begin(path, same), note)
            self._go_to(begun)
            note(
                f"start: resumes from {begun.path}, after step {self.at.step} of {self._run.steps}"
            )
        elif (self._folder.model / SOURCE).exists():
            note(
                f"{self._folder.model} was exported by an earlier run without checkpoints; "
                "this run will overwrite it at its end"
            )
        for line in self._world.run_on_rank0(lambda: self._folder.rewind(self.at.step)):
            self.loss = line.get("loss", self.loss)
            if "heldout_loss" in line:
                self.held_out[line["step"]] = float(line["heldout_loss"])
        if self._run.checkpoints.best:
            saved = self._world.run_on_rank0(lambda: list_checkpoints(self._folder.checkpoints))
            names = {path.name for path in saved}
            there = {step for step in self.held_out if folder_name(step) in names}
            self.best = _lowest(self.held_out, there)
        if restored is not None:  # a process may have been killed before pruning
            self._prune(saved=False)

    def _go_to(self, restored: Restored) -> None:
        """Continue at a checkpoint's step and random states; its tensors are already copied."""
        self._state.at = restored.at
        if self.at.step > self._run.steps:
            raise UnsupportedError(
                f"steps: {restored.path} has already done {self.at.step}, more than the "
                f"{self._run.steps} of the run; set steps to at least {self.at.step}, or give "
                "another folder"
            )
        self._state.rng = restored.rng
        restore_rng(restored.rng, self._ctx.device)

    def save(self) -> None:
        """Save a checkpoint of the last finished step, unless it exists, and tell callbacks."""
        new = self._saved != self.at.step
        self._save()  # also prunes: an existing checkpoint may have become the best
        if new:
            path = Path(shown(self._folder.checkpoints / folder_name(self.at.step)))
            self._tell(lambda one: one.on_checkpoint(path))

    def _save(self) -> None:
        if self._saved != self.at.step:
            read = {str(n): own.digests() for n, own in enumerate(self._ctx.corpus.streams())}
            if read:
                self._folder.write_json(WINDOWS, read)
            self._ctx.optimizer.settle()
            state = {**self._identity, "position": asdict(self.at)}
            self._saver.save(self._folder.checkpoints, self._state.rng, state, self.at.step)
            self._saved = self.at.step
        self._prune()

    def _prune(self, saved: bool = True) -> None:
        keep, best = self._run.checkpoints.keep, self.best
        self._saver.prune(self._folder.checkpoints, self.at.step, keep, best, saved)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is KeyboardInterrupt:  # on a second signal, do not wait for updates
            self._ctx.optimizer.abandon()

    def told(self, result: TrainingResult) -> TrainingResult:
        """Tell callbacks that the run has ended with this result, and return the result."""
        return self._callbacks.end(result)

    def compare(self) -> PlanComparison | None:
        """Write comparison.json, and return the plan's comparison with measurements, if any."""
        found = self._runner.compare()
        if found is not None:
            self._observer.note(found.describe())
            self._folder.write_json("comparison.json", self._marks | found.to_json())
        return found

    def export(self) -> None:
        """Export model and tokenizer as a folder for `from_pretrained`. The weights are those of
        the checkpoint with the lowest held-out loss if it is kept, else those of the last step."""
        step = self.at.step if self.best is None else self.best
        path = self._folder.checkpoints / folder_name(step)
        folder, ctx = self._folder.model, self._ctx
        told, note = self._marks | base_of(self._run), self._observer.note
        if self._world.run_on_rank0(lambda: is_exported(path, folder, told, note)):
            return
        if step != self.at.step:
            self._go_back(path)
        weights = self._saver.weights()

        def write() -> None:
            card = card_of(self._folder.path, step)
            save = None if ctx.index is None else ctx.index.save
            export(ctx.model, ctx.tokenizer, path, folder, note, told, weights, card, save)

        self._world.run_on_rank0(write)

    def _go_back(self, path: Path) -> None:
        """Restore the weights of an earlier checkpoint. Raises UnsupportedError."""
        try:
            self._saver.begin(path, self._identity)
        except UnsupportedError as error:
            raise UnsupportedError(
                f"{error}; this one has the lowest held-out loss: move it away, and the same "
                "command exports the best of the others as model/, or set checkpoints.best to false"
            ) from error

    def _nonfinite(self, batches: list[Micro], loss: float, norm: float | None = None) -> str:
        """Handle a loss or gradient that is not finite, in the present step or, if `norm` is None,
        on held-out data. If the run skips such steps, return "loss" or "gradient"; else save a
        checkpoint and raise Diverged."""
        self._ctx.optimizer.settle()
        heldout, parameters = norm is None, self._ctx.optimizer.parameters
        # The first rank's with a bad weight, else with a bad gradient; the same on all ranks.
        found = self._world.all_gather(find_nonfinite(loss, parameters))
        finding = max(found, key=lambda f: (f.weight is not None, f.gradient is not None))
        if not heldout:
            self._ctx.optimizer.clear()
        step = self.at.step + (not heldout)
        if self._run.nonfinite is OnNonfinite.SKIP and finding.weight is None:
            words = f"step {step} skipped: {finding.kind} is not finite"
            self._observer.note(
                f"step {step}: the held-out loss is not finite" if heldout else words
            )
            return finding.kind
        values = diagnosis_json(finding, step=step, loss=loss, norm=norm)
        path = self._diagnose(values, batches)
        self.save()
        what, saved = f"{finding.kind} is not finite (loss {loss})", "The step before it"
        if heldout:
            what, saved = f"the held-out loss is not finite ({loss})", "This step"
        on = "anyway" if heldout else "without this batch"
        raise Diverged(
            f"step {step}: {what}; {finding.describe()}; see {path}. {saved} is saved. Lower "
            "optimizer.lr and start in another folder, or set nonfinite to skip and run the same "
            f"command to continue {on}"
        )

    def _diagnose(self, values: dict[str, Any], batches: list[Micro]) -> Path:
        lines = [line for micro in batches for line in micro.describe()]
        described = self._world.gather_replicas(lines)
        values = self._marks | values | {"batches": described}
        return self._folder.write_json("diagnosis.json", values)


def base_of(run: RunConfig) -> dict[str, Any]:
    """Return the changes to the base model's configuration that a folder of adapters must record.
    peft would silently load the adapters over a model without the changes, such as another RoPE."""
    if run.model.lora is None or not run.model.overrides:
        return {}
    return {"overrides": json.loads(json.dumps(run.model.overrides))}


def returning_freed(callback: Callable[[Progress], None], trim: Any) -> Callable[[Progress], None]:
    """Wrap a progress callback so that every 16 cells glibc's heap returns free pages to the
    system. By itself it would keep those between small live blocks, such as autograd's graphs."""

    # LoRA of a 135M model at 1,024 tokens had 2,398 MiB at the peak of its second step without
    # this, and 2,349 with it, for 0.1 of 19 seconds of CPU.
    def tell(progress: Progress) -> None:
        callback(progress)
        if progress.cells_done % TRIM_EVERY == 0:
            trim(0)

    return callback if trim is None else tell


def _due(step: int, every: int) -> bool:
    return every > 0 and step > 0 and step % every == 0


def _lowest(held_out: Mapping[int, float], steps: Set[int | None]) -> int | None:
    """Return the step with the lowest held-out loss, the earliest if several are equal. Step 0 does
    not count: the model was untrained."""
    trained = [step for step in steps if step and math.isfinite(held_out[step])]
    return min(trained, key=lambda step: (held_out[step], step), default=None)


def train(
    run: RunConfig | str | Path,
    *,
    callbacks: Sequence[Callback] = (),
    components: Components | None = None,
    reporter: Reporter | None = None,
    notes: Sequence[str] = (),
    trace: Path | None = None,
) -> TrainingResult:
    """Train until the last step or the first signal, from the latest checkpoint if one exists.

    Processes started by torchrun all call it and get the same result. After an error the last good
    checkpoint stays.

    Args:
        run: Run file's path, or a RunConfig.
        callbacks: Called between steps; they may end the run.
        components: Parts of the run to replace, such as its optimizer.
        reporter: Prints progress; by default a terminal reporter.
        notes: Texts that the reporter prints first.
        trace: Path for a JSON trace of a step's instructions.

    Returns:
        The last step and its losses, the folder, and the signal that ended the run, if any.

    Raises:
        UnsupportedError: The run cannot be done as configured.
        NoScheduleFits: Memory runs out with every schedule.
        WriteFailed: The disk is full.
        Diverged: A loss or gradient is not finite.
        RankFailed: Another rank failed.
    """
    run = run if isinstance(run, RunConfig) else load_run(Path(run))
    with _joined(run) as (run, world):
        with ExitStack() as entered:
            folder, observer = _opened(run, world, reporter, trace, entered)
            for text in (*notes, *_what_changed(run, world, folder)):
                observer.note(text)
            result, loop = _unfinished(run, world), None
            parts = components or Components()
            try:
                loop = _make_loop(run, parts, world, folder, observer, callbacks)
                entered.enter_context(loop)
                loop.fit()
            except Interrupted as stop:
                result = _stopped(folder, result, loop, stop.signum)
            except NoScheduleFits as error:
                _save_beforehand(loop, error)
                raise
            else:
                result = _completed(folder, result, loop)
        # The folder is unlocked, and signals act as before.
        return pushed(result, run.hub, world)


@contextmanager
def _joined(run: RunConfig) -> Iterator[tuple[RunConfig, DistributedContext]]:
    """Join this process to a run's ranks, on its device. Yields the run as it began, and the
    context of the ranks."""
    launch = launch_env()
    run = resolve(run, None if launch is None else launch.ranks)
    device, values = choose_device(run.device), flatten(to_mapping(run))
    grow_stack()
    if device.type == "cpu":
        return_freed()
    with join_run(launch, device, values, run.timeout()) as world:
        run = world.run_on_rank0(partial(as_begun, run))
        world.run_on_rank0(partial(refuse_login, run.hub))
        yield run, world


def _opened(
    run: RunConfig,
    world: DistributedContext,
    reporter: Reporter | None,
    trace: Path | None,
    entered: ExitStack,
) -> tuple[RunFolder, Observer]:
    """Open the run's folder, and let signals interrupt the run, until `entered` is left."""
    folder = RunFolder(run) if world.is_rank0 else OthersFolder(run)
    told = _reporter_of(run, world, folder, reporter)
    entered.enter_context(folder)
    interrupt = entered.enter_context(Interrupt())
    entered.enter_context(told)
    interrupt.share(world)
    return folder, Observer(told, interrupt, trace)


def _stopped(
    folder: RunFolder, result: TrainingResult, loop: TrainingLoop | None, signum: int
) -> TrainingResult:
    """Save what an interrupted run has trained, if it has begun."""
    if loop is None:
        return replace(result, signum=signum)
    loop.save()
    return loop.told(_result(folder, result, loop, signum=signum))


def _save_beforehand(loop: TrainingLoop | None, error: NoScheduleFits) -> None:
    """Save what was trained before memory ran out, and raise an error that says so. A run without
    a step, or of ranks of which only one ran out, has nothing to save."""
    if loop is None or loop.at.step == 0 or isinstance(error, OneRankOutOfMemory):
        return
    loop.save()
    raise NoScheduleFits(
        f"step {loop.at.step + 1}: {error}. Step {loop.at.step} is saved: the same "
        "command resumes from there, also with another schedule"
    ) from error


def _completed(folder: RunFolder, result: TrainingResult, loop: TrainingLoop) -> TrainingResult:
    """Compare a whole run with its plan, and export its model."""
    comparison = loop.compare()
    loop.export()
    return loop.told(_result(folder, result, loop, comparison=comparison))


def _reporter_of(
    run: RunConfig, world: DistributedContext, folder: RunFolder, reporter: Reporter | None
) -> Reporter:
    """Return the run's reporter: on rank 0 `reporter` or a terminal reporter, which also passes
    metrics to the run file's trackers; on other ranks one that prints nothing."""
    lanes: list[LoggerThread] = []
    world.run_on_rank0(
        lambda: lanes.extend(LoggerThread(*named) for named in make_loggers(run, folder).items())
    )
    if not world.is_rank0:
        return Reporter()  # prints nothing
    shown = make_reporter(Console()) if reporter is None else reporter
    return LoggingReporter(shown, lanes) if lanes else shown


def _what_changed(run: RunConfig, world: DistributedContext, folder: RunFolder) -> list[str]:
    """Prepare the folder, and return a line for each setting changed since the last start."""
    changes = world.run_on_rank0(folder.prepare)
    if not world.is_rank0:
        folder.hold()
    return [f"{change}: {what_changes(run, change)}" for change in changes]


def _make_loop(
    run: RunConfig,
    components: Components,
    world: DistributedContext,
    folder: RunFolder,
    observer: Observer,
    callbacks: Sequence[Callback],
) -> TrainingLoop:
    """Make the training loop, and resume it from the latest checkpoint."""
    about = world.run_on_rank0(lambda: read_json(folder.path / ABOUT, schedule=dict) or {})
    ctx, before = make_context(run, components, world, observer, about), about.get(STATES_KEY)
    observer.note(introduce(ctx))
    loop = TrainingLoop(ctx, folder, observer, callbacks)
    loop.resume()
    if loop.at.step and before not in (None, ctx.placed.states):
        observer.note(f"optimizer states: moved from the {before}; their values are unchanged")
    return loop


def _unfinished(run: RunConfig, world: DistributedContext) -> TrainingResult:
    return TrainingResult(
        folder=Path(run.folder).expanduser(),
        step=0,
        steps=run.steps,
        sparse=run.sparse is not None,
        hides=hides(run),
        products=run.kernels.products,
        leads=world.is_rank0,
        adapters=run.model.lora is not None,
    )


def _result(
    folder: RunFolder,
    begun: TrainingResult,
    loop: TrainingLoop,
    *,
    signum: int | None = None,
    comparison: PlanComparison | None = None,
) -> TrainingResult:
    held_out = loop.held_out
    return replace(
        begun,
        folder=folder.called,
        step=loop.at.step,
        loss=loop.loss,
        heldout_loss=held_out[max(held_out)] if held_out else None,
        skipped=loop.at.skipped,
        signum=signum,
        comparison=comparison,
        stopped=loop.why_stop() if signum is None and loop.at.step < begun.steps else None,
        best=loop.best,
    )
