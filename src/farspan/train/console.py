"""Progress of a run for its user, as bars on a terminal or as lines, and signals that end a run."""

import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bars

from farspan.distributed.run_context import DistributedContext, StopPoint
from farspan.durable import shown
from farspan.engine.runner import Progress
from farspan.formatting import write_number

Clock = Callable[[], float]  # seconds, from any origin


class Pace:
    """Speed of a run and its remaining time."""

    def __init__(self, steps: int, tokens_per_step: int, clock: Clock = time.monotonic) -> None:
        self._steps = steps
        self._tokens = tokens_per_step
        self._clock = clock
        self._started = clock()
        self._seconds: float | None = None  # duration of the last finished step

    def begin(self) -> None:
        self._started = self._clock()

    def end(self) -> None:
        self._seconds = self._clock() - self._started

    def seconds_per_step(self, done: float) -> float | None:
        """Return the seconds of the current step, estimated from the fraction `done` that is
        finished, or those of the previous step if nothing is finished yet."""
        if done > 0:
            return max(self._clock() - self._started, 1e-9) / done
        return self._seconds

    def remaining(self, step: int, done: float) -> float | None:
        """Return the seconds until the run ends, once `step` steps and the fraction `done` of the
        next one are finished."""
        seconds = self._guide(done)
        return None if seconds is None else max(0.0, (self._steps - step - done) * seconds)

    def left_of_step(self, done: float) -> float | None:
        """Return the seconds until the current step ends, once the fraction `done` is finished."""
        seconds = self._guide(done)
        return None if seconds is None else max(0.0, (1.0 - done) * seconds)

    def _guide(self, done: float) -> float | None:
        # The finished step predicts better until a good part of this one has passed.
        return self._seconds if self._seconds is not None else self.seconds_per_step(done)

    def tokens_per_second(self, done: float) -> float | None:
        seconds = self.seconds_per_step(done)
        return None if seconds is None else self._tokens / seconds


class Countdown:
    """Remaining time of an evaluation."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._began, self._at, self._done = 0.0, 0.0, 1.0

    def left(self, done: float) -> float | None:
        """Return the seconds until the evaluation ends, once the fraction `done` is finished; None
        at the evaluation's first call."""
        now = self._clock()
        if done < self._done:  # a new evaluation began
            self._began, self._at = now, done
        self._done = done
        if done <= self._at:
            return None
        return (now - self._began) / (done - self._at) * (1.0 - done)


class Reporter:
    """Receiver of a training loop's events, as a context manager. This base class prints nothing;
    ranks other than 0 use it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def note(self, text: str) -> None:
        """Show a message."""

    def preparing(self, documents: int, tokens: int, read: object = "") -> None:
        """Report the documents and tokens prepared so far; `read` says which share of the data they
        are, and how long the rest takes."""

    def measuring(self, what: str) -> None:
        """Report that the planner's measurement of `what` on this machine begins."""

    def start(self, steps: int, tokens_per_step: int, step: int, how: str = "") -> None:
        """Begin training after `step` of `steps`; `how` is shown next to the progress."""

    def begin(self, step: int) -> None:
        """Report that step `step`, counted from 1, begins."""

    def cells(self, step: int, done: float, progress: Progress, part: str = "") -> None:
        """Report that the fraction `done` of step `step` is finished. `progress` counts the cells
        of the current batch; `part` numbers that batch if a step has several."""

    def end(self, values: Mapping[str, Any]) -> None:
        """Report the metrics of a finished step."""

    def over(self) -> None:
        """Report that training has ended, at its last step or before."""

    def evaluating(self, done: float, progress: Progress, part: str = "") -> None:
        """Report that the fraction `done` of the evaluation is finished. `progress` counts the
        cells of the current sequence, whose number is `part`."""

    def evaluated(self, values: Mapping[str, Any]) -> None:
        """Report the metrics of a finished evaluation."""


class Interrupted(Exception):
    """A signal asked the run to end. It is raised only between two cells."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Interrupt:
    """Signal handler that lets a run end between two cells. The first signal is kept until `check`,
    `passed` or `meet` raises Interrupted; a second signal acts as it did before the run. The
    processes of one run all end at the same point.

    A closing terminal sends SIGHUP twice, itself and through its shell, so SIGHUP never ends a
    process at once. An ignored SIGHUP, as under nohup, stays ignored.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._world: DistributedContext | None = None  # the processes of the run, if several
        self._signum: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Python lets only its main thread set handlers; other threads keep the caller's.
        if threading.current_thread() is threading.main_thread():
            for signum in self.SIGNALS:
                if signum == signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN:
                    continue
                self._before[signum] = signal.signal(signum, self._remember) or signal.SIG_DFL
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back(*self._before)

    def share(self, world: DistributedContext) -> None:
        """Tell the other processes of `world` of signals from now on, so that all end together."""
        if world.size > 1:
            self._world = world
            world.request_stop(self._signum or 0)

    def check(self) -> None:
        """Raise Interrupted if a signal has come and no other process shares the run."""
        if self._signum is not None and self._world is None:
            raise Interrupted(self._signum)

    def passed(self, place: StopPoint) -> None:
        """Raise Interrupted at this point of the step if a signal has come to any process of the
        run; all processes raise it at the same point."""
        if self._world is None:
            self.check()
        elif number := self._world.must_stop(place):
            # All meet here first: the store in which they agree may end with rank 0.
            raise Interrupted(self._world.maximum(number))

    def meet(self) -> None:
        """Raise Interrupted in all processes if a signal has come to one. Every process calls this
        between the same two steps."""
        if self._world is not None:
            self._signum = self._world.maximum(self._signum or 0) or None
        if self._signum is not None:
            raise Interrupted(self._signum)

    def _remember(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._signum = signum
        if self._world is not None:
            self._world.request_stop(signum)
        # A launcher repeats SIGTERM while its processes leave their step.
        if signum != signal.SIGHUP and (self._world is None or signum != signal.SIGTERM):
            self._give_back(*(s for s in self._before if s != signal.SIGHUP))

    def _give_back(self, *signals: int) -> None:
        for signum in signals:
            signal.signal(signum, self._before.pop(signum))


class Observer:
    """A Reporter and an Interrupt for long work: it reports progress, and raises Interrupted once a
    signal has come."""

    def __init__(self, reporter: Reporter, interrupt: Interrupt, trace: Path | None = None) -> None:
        self.reporter = reporter
        self.interrupt = interrupt
        self.trace = trace  # file for a step's spans; None: no trace

    def note(self, text: str) -> None:
        self.reporter.note(shown(text))

    def preparing(self, documents: int, tokens: int, read: object = "") -> None:
        self.interrupt.check()
        self.reporter.preparing(documents, tokens, read)

    def measuring(self, what: str) -> None:
        self.interrupt.check()
        self.reporter.measuring(what)

    def training(self, step: int, batch: int, batches: int, progress: Progress) -> None:
        """Report progress within batch `batch`, counted from 0, of step `step`, counted from 1."""
        self.interrupt.passed(StopPoint.CELL)
        done = (batch + progress.work_done / progress.work) / batches
        part = f"batch {batch + 1}/{batches}" if batches > 1 else ""
        self.reporter.cells(step, done, progress, part)

    def evaluating(self, batch: int, batches: int, progress: Progress) -> None:
        """Report progress of an evaluation within sequence `batch`, counted from 0."""
        self.interrupt.passed(StopPoint.HELD_OUT_CELL)
        done = (batch + progress.work_done / progress.work) / batches
        self.reporter.evaluating(done, progress, f"sequence {batch + 1}/{batches}")


class LineReporter(Reporter):
    """Reporter that prints a line per step, and more in steps longer than `patience` seconds."""

    def __init__(
        self, console: Console, patience: float = 15.0, clock: Clock = time.monotonic
    ) -> None:
        self._console = console
        self._patience = patience
        self._clock = clock
        self._spoke = clock()
        self._pace = Pace(1, 1, clock)
        self._countdown = Countdown(clock)
        self._steps = 0
        self._how = ""
        self._measures = False

    def note(self, text: str) -> None:
        self._spoke = self._clock()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def preparing(self, documents: int, tokens: int, read: object = "") -> None:
        if self._silent():
            self.note(f"tokenizing: {tokenized(documents, tokens, read)}")

    def measuring(self, what: str) -> None:
        if not self._measures:
            self.note(f"this machine: {what}")
        self._measures = True

    def start(
        self,
        steps: int,
        tokens_per_step: int,
        step: int,  # noqa: ARG002
        how: str = "",
    ) -> None:
        self._steps, self._how = steps, how
        self._pace = Pace(steps, tokens_per_step, self._clock)

    def begin(self, step: int) -> None:  # noqa: ARG002
        self._pace.begin()
        self._spoke = self._clock()

    def cells(self, step: int, done: float, progress: Progress, part: str = "") -> None:
        if self._silent():
            rate = self._pace.tokens_per_second(done)
            self.note(
                f"step {step}/{self._steps}{self._how}  {_cells(progress, part)}"
                f"{'' if rate is None else f'  {rate:,.0f} tokens/s'}"
                f"  {_eta(self._pace.remaining(step - 1, done))}"
            )

    def end(self, values: Mapping[str, Any]) -> None:
        self._pace.end()
        left = _eta(self._pace.remaining(int(values["step"]), 0.0))
        self.note(f"step {values['step']}/{self._steps}  {describe_step(values)}  {left}")

    def evaluating(self, done: float, progress: Progress, part: str = "") -> None:
        left = self._countdown.left(done)
        if self._silent():
            self.note(f"evaluating: {done:.0%}  {_cells(progress, part)}  {_eta(left)}")

    def evaluated(self, values: Mapping[str, Any]) -> None:
        self.note(f"step {values['step']}  {describe_heldout(values)}")

    def _silent(self) -> bool:
        return self._clock() - self._spoke >= self._patience


class BarReporter(Reporter):
    """Reporter that draws two progress bars: the run's steps, and the current step's cells."""

    def __init__(self, console: Console) -> None:
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[text]}"),
            console=console,
        )
        self._run = self._bars.add_task("run", total=1.0, text="", visible=False)
        self._step = self._bars.add_task("step", total=1.0, text="", visible=False)
        self._pace = Pace(1, 1)
        self._countdown = Countdown()
        self._steps = 0
        self._last = ""

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def note(self, text: str) -> None:
        self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def preparing(self, documents: int, tokens: int, read: object = "") -> None:
        text = tokenized(documents, tokens, read)
        self._bars.update(self._step, description="tokenizing", text=text, visible=True)

    def measuring(self, what: str) -> None:
        self._bars.update(self._step, description="measuring", text=what, visible=True)

    def start(self, steps: int, tokens_per_step: int, step: int, how: str = "") -> None:
        self._steps = steps
        self._pace = Pace(steps, tokens_per_step)
        self._bars.update(
            self._run, description=f"run{how}", total=steps, completed=step, visible=True
        )

    def begin(self, step: int) -> None:
        self._pace.begin()
        name = f"step {step}/{self._steps}"
        self._bars.update(self._step, description=name, completed=0.0, text="", visible=True)

    def cells(self, step: int, done: float, progress: Progress, part: str = "") -> None:
        text = f"{_cells(progress, part)}  {_eta(self._pace.left_of_step(done))}"
        self._bars.update(self._step, completed=done, text=text)
        left = _eta(self._pace.remaining(step - 1, done))
        rate = self._pace.tokens_per_second(done)
        speed = "" if self._last or rate is None else f"{rate:,.0f} tokens/s"
        text = f"{step - 1}/{self._steps}  {self._last}{speed}  {left}"
        self._bars.update(self._run, completed=step - 1 + done, text=text)

    def end(self, values: Mapping[str, Any]) -> None:
        self._pace.end()
        if "loss" in values:
            self._last = f"loss {values['loss']:.4f}  {values['tokens_per_second']:,.0f} tokens/s"
        step = int(values["step"])
        text = f"{step}/{self._steps}  {self._last}  {_eta(self._pace.remaining(step, 0.0))}"
        self._bars.update(self._run, completed=step, text=text)

    def evaluating(self, done: float, progress: Progress, part: str = "") -> None:
        text = f"{_cells(progress, part)}  {_eta(self._countdown.left(done))}"
        self._bars.update(
            self._step, description="evaluating", completed=done, text=text, visible=True
        )

    def evaluated(self, values: Mapping[str, Any]) -> None:
        self.note(f"step {values['step']}  {describe_heldout(values)}  {self._last}")
        self._bars.update(self._step, visible=False)


def make_reporter(console: Console) -> Reporter:
    """Return a BarReporter if the console is a terminal, else a LineReporter."""
    return BarReporter(console) if console.is_terminal else LineReporter(console)


def describe_step(values: Mapping[str, Any]) -> str:
    if values.get("nonfinite"):
        return f"skipped: {values['nonfinite']} is not finite"
    return (
        f"loss {values['loss']:.4f}{_attention(values)}{_preference(values, '')}  "
        f"lr {values['lr']:.2e}  |grad| {values['grad_norm']:.3f}  "
        f"{values['tokens_per_second']:,.0f} tokens/s"
    )


def describe_heldout(values: Mapping[str, Any]) -> str:
    return (
        f"held-out loss {values['heldout_loss']:.4f}{_attention(values)}"
        f"{_preference(values, 'heldout_')}"
    )


def _preference(values: Mapping[str, Any], prefix: str) -> str:
    """Return the margin and accuracy of chosen over rejected answers as text, or ""."""
    if f"{prefix}margin" not in values:
        return ""
    return f"  margin {values[f'{prefix}margin']:.4f}  accuracy {values[f'{prefix}accuracy']:.0%}"


def _attention(values: Mapping[str, Any]) -> str:
    """Return the kind of attention behind a loss as text, or "" for exact attention."""
    if "attention" not in values:
        return ""
    mass = values.get("attention_mass")
    seen = f", mass {mass:.3f}" if isinstance(mass, float) else ""
    return f" ({values['attention']} attention{seen})"


def _cells(progress: Progress, part: str = "") -> str:
    """Return text such as `batch 2/4  cell 7/96`; `part` is the number of the batch, if any."""
    text = f"cell {progress.cells_done}/{progress.cells}"
    return f"{part}  {text}" if part else text


def tokenized(documents: int, tokens: int, read: object) -> str:
    """Return the progress of tokenizing as text."""
    text = f"{write_number(documents, 'document')}, {write_number(tokens, 'token')}"
    return f"{read}: {text}" if str(read) else text


def _eta(seconds: float | None) -> str:
    if seconds is None:
        return "eta unknown"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"eta {hours}:{minutes:02d}:{rest:02d}" if hours else f"eta {minutes}:{rest:02d}"
