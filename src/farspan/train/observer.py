"""Progress reports of long work, and the signals that end it."""

import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Self

from farspan.distributed.run_context import DistributedContext, StopPoint
from farspan.durable import shown
from farspan.engine.runner import Progress


class Reporter:
    """Receiver of a training loop's events, as a context manager. This base class prints nothing;
    ranks other than 0 use it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def note(self, text: str) -> None:
        """Show a message."""

    def preparing(self, documents: int, tokens: int, read: object = "") -> None:
        """Report the documents and tokens prepared so far. `read` is a text with the share of the
        data read and the time that the rest takes."""

    def measuring(self, what: str) -> None:
        """Report that the planner's measurement of `what` on this machine begins."""

    def start(self, steps: int, tokens_per_step: int, step: int, how: str = "") -> None:
        """Report that training begins after step `step` of `steps`; `how` is shown with it."""

    def begin(self, step: int) -> None:
        """Report that step `step`, counted from 1, begins."""

    def cells(self, step: int, done: float, progress: Progress, part: str = "") -> None:
        """Report that the fraction `done` of step `step` is finished. `progress` counts the cells
        of the current batch; `part` numbers that batch if a step has several."""

    def end(self, values: Mapping[str, Any]) -> None:
        """Report the metrics of a finished step."""

    def over(self) -> None:
        """Report that training has ended, at its last step or earlier."""

    def evaluating(self, done: float, progress: Progress, part: str = "") -> None:
        """Report that the fraction `done` of the evaluation is finished. `progress` counts the
        cells of the current sequence, whose number is `part`."""

    def evaluated(self, values: Mapping[str, Any]) -> None:
        """Report the metrics of a finished evaluation."""


class Interrupted(Exception):
    """Signal that asks the run to end, raised only between two cells."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Interrupt:
    """Signal handler that lets a run end between two cells. The first signal takes effect when
    `check`, `passed` or `meet` raises Interrupted; a second one acts at once, as signals did before
    the run. All processes of one run end at the same point.

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
        """From now on tell other processes of `world` about signals, so that all end together."""
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
        """Raise Interrupted in all processes if one had a signal. All call this between steps."""
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
