"""What a person is told by a Reporter, told to trackers too; a run never waits for one of them."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import Empty, Full, Queue, SimpleQueue
from threading import Thread
from typing import Any

from farspan.train.parts import CellsDone
from farspan.train.progress import Reporter
from farspan.train.trackers import Tracker

WAITING = 10_000  # points that a tracker may be behind, a few MiB
PATIENCE = 30.0  # seconds that the end of a run waits for a tracker; wandb's own limit is 20
# All else keeps its name, under train/.
NAMES = {
    "lr": "train/learning_rate",
    "heldout_loss": "eval/loss",
    "heldout_tokens": "eval/tokens",
    "memory_predicted_bytes": "memory/predicted_bytes",
    "memory_measured_bytes": "memory/measured_bytes",
    "peak_process_bytes": "memory/peak_process_bytes",
}


def charts(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics.jsonl by the names of their charts."""
    numbers = {k: v for k, v in values.items() if isinstance(v, int | float) and k != "step"}
    named = {NAMES.get(key, f"train/{key}"): float(value) for key, value in numbers.items()}
    if "heldout_loss" not in values:
        named["train/skipped"] = float("nonfinite" in values)
    return named


class Lane:
    """A tracker on a thread of its own. Invariant: no call here waits for it, but `close`, for
    `PATIENCE` seconds; whatever it raises becomes a note, after which it is told nothing more."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name = name
        self._tracker = tracker
        self._points: Queue[tuple[int, Mapping[str, float]] | None] = Queue(WAITING)
        self._notes: SimpleQueue[str] = SimpleQueue()
        self._thread: Thread | None = None  # once there is something to tell
        self._over = False  # and no reason to go on
        self._failed = False  # the run

    def open(self, step: int) -> None:
        """The run goes on after `step`."""
        if self._thread is None:
            # A daemon: one that hangs does not keep the process.
            work = Thread(target=self._work, args=(step,), name=self._name, daemon=True)
            self._thread = work
            work.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """A point at `step` in each of these charts."""
        if self._over:
            return
        try:
            self._points.put_nowait((step, values))
        except Full:
            self._give_up("does not answer")

    def close(self, *, failed: bool) -> None:
        """All that was told is told, or never will be; `failed`: the run has steps left."""
        if self._thread is None:
            return
        self._failed = failed
        with suppress(Full):
            self._points.put_nowait(None)
        self._thread.join(PATIENCE)
        if self._thread.is_alive() and not self._over:
            self._give_up("does not answer")

    def notes(self) -> list[str]:
        """What a person is to know since this was asked last."""
        found = []
        with suppress(Empty):
            while True:
                found.append(self._notes.get_nowait())
        return found

    def _work(self, step: int) -> None:
        try:
            if text := self._tracker.open(step):
                self._notes.put(text)
            while (point := self._points.get()) is not None:
                self._tracker.log(*point)
            self._tracker.close(failed=self._failed)
        except BaseException as error:  # a library's sys.exit too: nobody is above to catch it
            self._give_up(str(error).strip() or type(error).__name__)
            with suppress(BaseException):  # what it has in memory may still come out
                self._tracker.close(failed=True)

    def _give_up(self, why: str) -> None:
        if not self._over:
            self._over = True
            self._notes.put(
                f"{self._name}: {why}; it is told no more of this run, which goes on as it would, "
                "with everything in metrics.jsonl"
            )


class Tracked:
    """A Reporter that tells another one everything, and trackers the metrics."""

    def __init__(self, person: Reporter, lanes: Sequence[Lane]) -> None:
        self._person = person
        self._lanes = lanes
        self._left = 0  # steps

    def __enter__(self) -> "Tracked":
        self._person.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        try:
            for lane in self._lanes:
                lane.close(failed=self._left > 0 or any(raised))
            self._pass_on()
        finally:
            self._person.__exit__(*raised)

    def note(self, text: str) -> None:
        self._person.note(text)

    def preparing(self, documents: int, tokens: int) -> None:
        self._person.preparing(documents, tokens)

    def measuring(self, what: str) -> None:
        self._person.measuring(what)

    def rehearsing(self, done: float, progress: CellsDone) -> None:
        self._person.rehearsing(done, progress)

    def start(self, steps: int, tokens_per_step: int, step: int, how: str = "") -> None:
        self._left = steps - step
        if self._left:  # a finished run that is asked for again has nothing to tell
            for lane in self._lanes:
                lane.open(step)
        self._person.start(steps, tokens_per_step, step, how)

    def begin(self, step: int) -> None:
        self._person.begin(step)

    def cells(self, step: int, done: float, progress: CellsDone) -> None:
        self._pass_on()
        self._person.cells(step, done, progress)

    def end(self, values: Mapping[str, Any]) -> None:
        self._left -= 1
        self._tell(values)
        self._person.end(values)

    def evaluating(self, done: float, progress: CellsDone) -> None:
        self._pass_on()
        self._person.evaluating(done, progress)

    def evaluated(self, values: Mapping[str, Any]) -> None:
        self._tell(values)
        self._person.evaluated(values)

    def _tell(self, values: Mapping[str, Any]) -> None:
        step, points = int(values["step"]), charts(values)
        for lane in self._lanes:
            lane.open(step - 1)  # of an evaluation that a finished run still lacked
            lane.log(step, points)
        self._pass_on()

    def _pass_on(self) -> None:
        for lane in self._lanes:
            for text in lane.notes():
                self._person.note(text)
