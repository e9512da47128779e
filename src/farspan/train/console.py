"""Progress of a run for its user, as bars on a terminal or as lines."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bars

from farspan.engine.runner import Progress
from farspan.formatting import write_number
from farspan.train.observer import Reporter

Clock = Callable[[], float]  # seconds, from any origin


class Pace:
    """Clock that measures the speed of a run and estimates its remaining time."""

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
        """Return the expected seconds of the current step: its time so far, divided by its finished
        fraction `done`. If `done` is 0, return the previous step's seconds."""
        if done > 0:
            return max(self._clock() - self._started, 1e-9) / done
        return self._seconds

    def remaining(self, step: int, done: float) -> float | None:
        """Return the seconds left in the run after `step` finished steps and the fraction `done` of
        the next step."""
        seconds = self._guide(done)
        return None if seconds is None else max(0.0, (self._steps - step - done) * seconds)

    def left_of_step(self, done: float) -> float | None:
        """Return the seconds left in the current step, whose fraction `done` is finished."""
        seconds = self._guide(done)
        return None if seconds is None else max(0.0, (1.0 - done) * seconds)

    def _guide(self, done: float) -> float | None:
        # The finished step predicts better until a good part of this one has passed.
        return self._seconds if self._seconds is not None else self.seconds_per_step(done)

    def tokens_per_second(self, done: float) -> float | None:
        seconds = self.seconds_per_step(done)
        return None if seconds is None else self._tokens / seconds


class Countdown:
    """Clock that estimates the remaining time of an evaluation."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._began, self._at, self._done = 0.0, 0.0, 1.0

    def left(self, done: float) -> float | None:
        """Return the seconds left in the evaluation, whose fraction `done` is finished; None at the
        first call of an evaluation."""
        now = self._clock()
        if done < self._done:  # a new evaluation began
            self._began, self._at = now, done
        self._done = done
        if done <= self._at:
            return None
        return (now - self._began) / (done - self._at) * (1.0 - done)


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
    """Return the margin, and the accuracy or divergence, of a preference loss as text, or "" for
    another loss."""
    ways = ("margin", ".4f"), ("accuracy", ".0%"), ("kl", ".4f")
    return "".join(
        f"  {name} {values[prefix + name]:{how}}" for name, how in ways if prefix + name in values
    )


def _attention(values: Mapping[str, Any]) -> str:
    """Return words for a step's approximations, sparse attention and FP8, or "" without any."""
    products = f" ({values['products']} products)" if "products" in values else ""
    if "attention" not in values:
        return products
    mass = values.get("attention_mass")
    seen = f", mass {mass:.3f}" if isinstance(mass, float) else ""
    return f" ({values['attention']} attention{seen}){products}"


def _cells(progress: Progress, part: str = "") -> str:
    """Return text such as `batch 2/4  cell 7/96`; `part` is the number of the batch, if any."""
    text = f"cell {progress.cells_done}/{progress.cells}"
    return f"{part}  {text}" if part else text


def tokenized(documents: int, tokens: int, read: object) -> str:
    text = f"{write_number(documents, 'document')}, {write_number(tokens, 'token')}"
    return f"{read}: {text}" if str(read) else text


def _eta(seconds: float | None) -> str:
    if seconds is None:
        return "eta unknown"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"eta {hours}:{minutes:02d}:{rest:02d}" if hours else f"eta {minutes}:{rest:02d}"
