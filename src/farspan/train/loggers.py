"""Receivers of a run's metrics in addition to metrics.jsonl: TensorBoard, wandb and Trackio, each
on its own thread, and callbacks of the caller."""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, Full, Queue, SimpleQueue
from textwrap import indent
from threading import Thread
from typing import Any, Protocol

import yaml

from farspan.distributed.failure import RankFailed
from farspan.distributed.run_context import DistributedContext
from farspan.durable import read_json, write_whole
from farspan.engine.runner import Progress
from farspan.lazy import load
from farspan.spec import UnsupportedError
from farspan.train.config import ReportTo, RunConfig
from farspan.train.observer import Reporter
from farspan.train.run_folder import RunFolder, identity
from farspan.train.sparse import marks
from farspan.train.step_runner import TrainingResult
from farspan.train.yaml_config import to_mapping

STEP = "train/global_step"  # the axis that transformers uses for its charts in wandb
PROJECT = __name__.partition(".")[0]
INIT_SECONDS = 60.0  # to reach the server; a process that ends earlier waits for it
FINISH_SECONDS = 20.0  # for pending uploads when a run ends
# By default wandb would also send the terminal's output, the program, its git state and packages,
# and the machine's name, hardware and load.
LEAST: Mapping[str, Any] = {
    "console": "off",
    "disable_code": True,
    "save_code": False,
    "disable_git": True,
    "disable_job_creation": True,
    "label_disable": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}
HOST = "WANDB_HOST"
ERROR_REPORTING = "WANDB_ERROR_REPORTING"  # wandb's reports to its makers
MISSING = (
    "report_to: {name} cannot be imported here ({error}); "
    'pip install "farspan[{name}]", or leave it out of report_to'
)


class MetricsLogger(Protocol):
    """A tracker of metrics, such as wandb. Any of its methods may raise or block."""

    def open(self, step: int) -> str:
        """Resume the tracker's charts after `step`, overwriting later points. Returns a message for
        the user, or ""."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point at `step` to each chart named in `values`."""

    def close(self, *, failed: bool) -> None:
        """End the tracker's run; `failed` marks a run that has steps left."""


class TensorBoardLogger:
    """Writer of `<folder>/tensorboard`. Raises UnsupportedError if tensorboard is not installed."""

    def __init__(self, run: RunConfig, folder: RunFolder) -> None:
        self._make = _loaded(ReportTo.TENSORBOARD, "torch.utils.tensorboard", "SummaryWriter")
        self._folder = folder
        self._config = yaml.safe_dump(config_of(run), sort_keys=False)
        self._writer: Any = None

    def open(self, step: int) -> str:
        self._writer = self._make(str(self._folder.path / "tensorboard"), purge_step=step + 1)
        # Four spaces: the page shows text as Markdown.
        self._writer.add_text("config", indent(self._config, "    "), step)
        self._writer.flush()
        return ""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        # Points that a killed process has not written would be missing before a checkpoint.
        self._writer.flush()

    def close(self, *, failed: bool) -> None:  # noqa: ARG002 - event files have no status
        self._writer.close()


class WandbLogger:
    """Logger of a wandb run, which resumes with the run folder. The user's environment and wandb
    settings win over the values set here. Raises UnsupportedError if wandb is not installed, or is
    online and the user is not logged in."""

    def __init__(self, run: RunConfig, folder: RunFolder) -> None:
        os.environ.setdefault(ERROR_REPORTING, "false")  # read when the package is imported
        self._init = _loaded(ReportTo.WANDB, "wandb", "init")
        self._settings = load("wandb", "Settings")
        self._known = load("wandb", "setup")().settings
        if self._known.mode not in ("offline", "disabled", "dryrun"):
            _log_in()
        self._folder = folder
        self._config = config_of(run)
        self._identity = identity(run)
        self._run: Any = None

    def open(self, step: int) -> str:  # noqa: ARG002 - each point carries its step
        ours = {
            **LEAST,
            "project": PROJECT,
            "run_name": self._folder.name.name,
            "run_id": self._known.run_id or run_number(self._folder, WANDB_FILE, self._identity),
            "resume": "allow",
            "reinit": "create_new",  # the calling program may have another run
            "root_dir": str(self._folder.name),  # by name: another process writes there
            "silent": True,  # its lines would break the bars
            "init_timeout": INIT_SECONDS,
            "finish_timeout": FINISH_SECONDS,
        }
        told = self._known.model_fields_set
        given = {name: value for name, value in ours.items() if name not in told}
        if HOST not in os.environ:
            given["host"] = ""  # by default it is the machine's name
        self._run = self._init(config=self._config, settings=self._settings(**given))
        # wandb's own step may not decrease, but a run resumed after a crash repeats steps.
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        if self._run.disabled:
            return ""
        if self._run.offline:
            return f"wandb: offline, in {self._run.settings.sync_dir}; `wandb sync` uploads it"
        return f"wandb: {self._run.url}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, STEP: step})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class TrackioLogger:
    """Logger of a Trackio run, which resumes with the run folder. It writes local files
    (TRACKIO_DIR), unless the user's environment names a Space or a server. Raises UnsupportedError
    if trackio is not installed."""

    def __init__(self, run: RunConfig, folder: RunFolder) -> None:
        self._init = _loaded(ReportTo.TRACKIO, "trackio", "init")
        self._folder = folder
        self._config = config_of(run)
        self._identity = identity(run)
        self._run: Any = None

    def open(self, step: int) -> str:  # noqa: ARG002 - each point carries its step
        project = os.environ.get("TRACKIO_PROJECT") or PROJECT
        # Trackio knows runs only by name, and run folders often share theirs.
        name = f"{self._folder.name.name}-{run_number(self._folder, TRACKIO_FILE, self._identity)}"
        self._run = self._init(
            project=project,
            name=name,
            resume="allow",
            config=self._config,
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        return f'trackio: run {name}; `trackio show --project "{project}"` shows it'

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:  # noqa: ARG002 - Trackio has no status
        self._run.finish()


WANDB_FILE, TRACKIO_FILE = "wandb.json", "trackio.json"


def run_number(folder: RunFolder, file: str, run: str) -> str:
    """Return this run's id in a tracker: the id stored in `file`, or a new one if `file` is missing
    or belongs to an earlier run in the folder."""
    path = folder.path / file
    known = read_json(path) or {}
    if known.get("run") == run and isinstance(known.get("id"), str):
        return str(known["id"])
    made = secrets.token_hex(4)
    write_whole(path, b'{"id": "%s", "run": "%s"}' % (made.encode(), run.encode()))
    return made


KINDS: Mapping[ReportTo, Callable[[RunConfig, RunFolder], MetricsLogger]] = {
    ReportTo.TENSORBOARD: TensorBoardLogger,
    ReportTo.WANDB: WandbLogger,
    ReportTo.TRACKIO: TrackioLogger,
}


def make_loggers(run: RunConfig, folder: RunFolder) -> dict[str, MetricsLogger]:
    """Make a logger for each tracker of the run, not yet opened. Raises UnsupportedError."""
    return {kind.value: KINDS[kind](run, folder) for kind in run.trackers()}


def config_of(run: RunConfig) -> dict[str, Any]:
    """Return the run's configuration for trackers, marked if attention is sparse."""
    return {**marks(run), **to_mapping(run)}


def _log_in() -> None:
    """Ask the user to log in now, because progress bars occupy the terminal later."""
    try:
        load("wandb", "login")(verify=False)
    except Exception as error:
        raise UnsupportedError(
            f"report_to: wandb: {str(error).rstrip('.')}; or set WANDB_API_KEY, or "
            "WANDB_MODE=offline to keep it in the run folder, or leave wandb out of report_to"
        ) from error


def _loaded(kind: ReportTo, module: str, name: str) -> Any:
    try:
        return load(module, name)
    except ImportError as error:
        raise UnsupportedError(MISSING.format(name=kind.value, error=error)) from error


WAITING = 10_000  # points that a tracker may lag behind, a few MiB
PATIENCE = 30.0  # seconds that the end of a run waits for a tracker; wandb's own limit is 20
# Other metrics keep their names, under train/.
NAMES = {
    "lr": "train/learning_rate",
    "heldout_loss": "eval/loss",
    "heldout_tokens": "eval/tokens",
    "memory_predicted_bytes": "memory/predicted_bytes",
    "memory_measured_bytes": "memory/measured_bytes",
    "memory_planned_bytes": "memory/planned_bytes",
    "memory_resident_bytes": "memory/resident_bytes",
    "peak_process_bytes": "memory/peak_process_bytes",
}


def _chart(key: str) -> str:
    name = key.removeprefix("heldout_")
    return NAMES.get(key, f"train/{key}" if name == key else f"eval/{name}")


def charts(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a metrics.jsonl line, by the name of the chart that shows each."""
    numbers = {k: v for k, v in values.items() if isinstance(v, int | float) and k != "step"}
    named = {_chart(key): float(value) for key, value in numbers.items()}
    if "heldout_loss" not in values:
        named["train/skipped"] = float("nonfinite" in values)
    return named


class LoggerThread:
    """Thread that passes metrics to a tracker. Invariant: only `close` waits for the tracker, for
    at most `PATIENCE` seconds; an exception of the tracker becomes a message and ends its
    logging."""

    def __init__(self, name: str, tracker: MetricsLogger) -> None:
        self._name = name
        self._tracker = tracker
        self._points: Queue[tuple[int, Mapping[str, float]] | None] = Queue(WAITING)
        self._notes: SimpleQueue[str] = SimpleQueue()
        self._thread: Thread | None = None  # from the first `open`
        self._over = False  # the tracker failed
        self._failed = False  # the run has steps left

    def open(self, step: int) -> None:
        """Start the tracker for a run that continues after `step`."""
        if self._thread is None:
            # A daemon: a tracker that hangs does not keep the process alive.
            work = Thread(target=self._work, args=(step,), name=self._name, daemon=True)
            self._thread = work
            work.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._over:
            return
        try:
            self._points.put_nowait((step, values))
        except Full:
            self._give_up("does not answer")

    def close(self, *, failed: bool) -> None:
        """Wait until the tracker has logged all points or `PATIENCE` seconds have passed; `failed`
        marks a run that has steps left."""
        if self._thread is None:
            return
        self._failed = failed
        with suppress(Full):
            self._points.put_nowait(None)
        self._thread.join(PATIENCE)
        if self._thread.is_alive() and not self._over:
            self._give_up("does not answer")

    def notes(self) -> list[str]:
        """Return the messages for the user since the last call."""
        texts = []
        with suppress(Empty):
            while True:
                texts.append(self._notes.get_nowait())
        return texts

    def _work(self, step: int) -> None:
        try:
            if text := self._tracker.open(step):
                self._notes.put(text)
            while (point := self._points.get()) is not None:
                self._tracker.log(*point)
            self._tracker.close(failed=self._failed)
        except BaseException as error:  # also sys.exit: this is the thread's last frame
            self._give_up(str(error).strip() or type(error).__name__)
            with suppress(BaseException):  # points in its memory may still be written
                self._tracker.close(failed=True)

    def _give_up(self, why: str) -> None:
        if not self._over:
            self._over = True
            self._notes.put(
                f"{self._name}: {why}; logging to it stops; the run continues, and metrics.jsonl "
                "has everything"
            )


class LoggingReporter(Reporter):
    """Reporter that forwards all events to another reporter, and metrics to the trackers too."""

    def __init__(self, person: Reporter, lanes: Sequence[LoggerThread]) -> None:
        self._person = person
        self._lanes = lanes
        self._left = 0  # steps left

    def __enter__(self) -> "LoggingReporter":
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

    def preparing(self, documents: int, tokens: int, read: object = "") -> None:
        self._person.preparing(documents, tokens, read)

    def measuring(self, what: str) -> None:
        self._person.measuring(what)

    def start(self, steps: int, tokens_per_step: int, step: int, how: str = "") -> None:
        self._left = steps - step
        if self._left:  # a finished run has nothing to log
            for lane in self._lanes:
                lane.open(step)
        self._person.start(steps, tokens_per_step, step, how)

    def begin(self, step: int) -> None:
        self._person.begin(step)

    def cells(self, step: int, done: float, progress: Progress, part: str = "") -> None:
        self._pass_on()
        self._person.cells(step, done, progress, part)

    def end(self, values: Mapping[str, Any]) -> None:
        self._left -= 1
        self._tell(values)
        self._person.end(values)

    def over(self) -> None:
        self._left = 0
        self._person.over()

    def evaluating(self, done: float, progress: Progress, part: str = "") -> None:
        self._pass_on()
        self._person.evaluating(done, progress, part)

    def evaluated(self, values: Mapping[str, Any]) -> None:
        self._tell(values)
        self._person.evaluated(values)

    def _tell(self, values: Mapping[str, Any]) -> None:
        step, points = int(values["step"]), charts(values)
        for lane in self._lanes:
            lane.open(step - 1)  # a finished run may still lack an evaluation
            lane.log(step, points)
        self._pass_on()

    def _pass_on(self) -> None:
        for lane in self._lanes:
            for text in lane.notes():
                self._person.note(text)


# -- callbacks -------------------------------------------------------------------------------------

Answer = str | bool | None


class Callback:
    """Base of a run's callbacks, which are called between two steps and on every rank.

    A method that returns a text, or True, ends the run as the last step would: with an evaluation,
    a checkpoint and the model. The text is the reason. An exception also ends the run, with its own
    traceback, after a checkpoint is saved.
    """

    def on_step(self, metrics: Mapping[str, Any]) -> Answer:
        """Receive the metrics.jsonl line of a finished step: `step` (from 1), `loss`, `lr`,
        `grad_norm`, `tokens`, `tokens_per_second`, `seconds` and others; `nonfinite` instead of
        `loss` for a skipped step."""

    def on_evaluation(self, metrics: Mapping[str, Any]) -> Answer:
        """Receive an evaluation: `step` (0: before training), `heldout_loss`, `heldout_tokens`."""

    def on_checkpoint(self, path: Path) -> Answer:
        """Receive the folder of a saved checkpoint."""

    def on_end(self, result: TrainingResult) -> None:
        """Receive the result when the run ends: after its last step, early, or by a signal."""


class Callbacks:
    """All callbacks of a run, called on every rank. Invariant: `tell` returns on all ranks or
    raises on all ranks, and all ranks learn each callback's answer."""

    def __init__(self, callbacks: Sequence[Callback], world: DistributedContext) -> None:
        self._given, self._world = tuple(callbacks), world
        self.any = world.maximum(len(self._given)) > 0  # callbacks on one rank need all ranks
        self.stop: str | None = None  # reason to end the run, if a callback gave one

    def tell(self, call: Callable[[Callback], Answer]) -> None:
        """Call one method of each callback. Raises the first exception (later callbacks are not
        called), or RankFailed if another rank has raised one."""
        why, error = None, None
        try:
            for callback in self._given:
                answer = call(callback)
                if answer:
                    name = type(callback).__name__
                    why = why or (answer if isinstance(answer, str) else f"{name} asked for it")
        except Exception as raised:
            error = raised
        words = None if error is None else f"a callback raised {type(error).__name__}: {error}"
        answers = self._world.all_gather((why, words))
        self.stop = self.stop or next((why for why, _ in answers if why), None)
        if error is not None:
            raise error
        for rank, (_, words) in enumerate(answers):
            if words is not None:
                raise RankFailed(f"rank {rank}: {words}")

    def end(self, result: TrainingResult) -> TrainingResult:
        """Tell each callback that the run has ended. Raises the same errors as `tell`."""
        if self.any:
            self.tell(lambda one: one.on_end(result))
        return result
