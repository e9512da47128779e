"""Ctrl-C and SIGTERM: remembered when they come, acted on where it is safe."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupted(Exception):
    """The user or the system asked the run to end; raised only between two cells."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Interrupt:
    """Between `__enter__` and `__exit__` the first signal is kept for `check`; a second one does
    at once what it did before. Where several processes share a run, one of them cannot leave in
    the middle of a step: `agree` is given, and all leave where they `meet`."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.agree: Callable[[int], int] | None = None  # the largest of all processes' numbers
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

    def check(self) -> None:
        """Raises Interrupted when a signal has come and nobody waits for this process."""
        if self._signum is not None and self.agree is None:
            raise Interrupted(self._signum)

    def meet(self) -> None:
        """Raises Interrupted in all processes when a signal has come to one. All of them call it
        between the same two steps."""
        if self.agree is not None:
            self._signum = self.agree(self._signum or 0) or None
        if self._signum is not None:
            raise Interrupted(self._signum)

    def _remember(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._signum = signum
        # A launcher repeats SIGTERM while its processes finish their step.
        if self.agree is None or signum != signal.SIGTERM:
            self._give_back()

    def _give_back(self) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before.clear()
