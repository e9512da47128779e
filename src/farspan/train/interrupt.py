"""Ctrl-C and SIGTERM: remembered when they come, acted on where it is safe."""

import signal
import threading
from types import FrameType
from typing import Any

from farspan.train.crew import Crew, Place


class Interrupted(Exception):
    """The user or the system asked the run to end; raised only between two cells."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Interrupt:
    """Between `__enter__` and `__exit__` the first signal is kept for `check`; a second one does
    at once what it did before. Processes that share a run cannot leave one by one: all leave where
    they `meet` between two steps, or within a step where all have `passed`."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self._crew: Crew | None = None  # of several processes
        self._signum: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        # Python lets only its main thread set handlers; elsewhere the caller's own stay.
        if threading.current_thread() is threading.main_thread():
            for signum in self.SIGNALS:
                self._before[signum] = signal.signal(signum, self._remember) or signal.SIG_DFL
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()

    def share(self, crew: Crew) -> None:
        """From now on with these others."""
        if crew.count > 1:
            self._crew = crew
            crew.ask_to_halt(self._signum or 0)

    def check(self) -> None:
        """Raises Interrupted when a signal has come and nobody waits for this process."""
        if self._signum is not None and self._crew is None:
            raise Interrupted(self._signum)

    def passed(self, place: Place) -> None:
        """Raises Interrupted when a signal has come; where several processes share the run, in all
        of them at the same place."""
        if self._crew is None:
            self.check()
        elif number := self._crew.halts(place):
            # None leaves before all are here: with rank 0 the store may go in which they agree.
            raise Interrupted(self._crew.agree(number))

    def meet(self) -> None:
        """Raises Interrupted in all processes when a signal has come to one. All of them call it
        between the same two steps."""
        if self._crew is not None:
            self._signum = self._crew.agree(self._signum or 0) or None
        if self._signum is not None:
            raise Interrupted(self._signum)

    def _remember(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._signum = signum
        if self._crew is not None:
            self._crew.ask_to_halt(signum)
        # A launcher repeats SIGTERM while its processes leave their step.
        if self._crew is None or signum != signal.SIGTERM:
            self._give_back()

    def _give_back(self) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before.clear()
