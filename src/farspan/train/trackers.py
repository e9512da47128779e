"""Where metrics go beside metrics.jsonl: TensorBoard's event files, a wandb run. This alone meets
either library, and imports it only for a run that names it."""

import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import indent
from typing import Any, Protocol

import yaml

from farspan.durable import read_json, write_whole
from farspan.lazy import load
from farspan.sparse.train import marks
from farspan.spec import Refused
from farspan.train.config import ReportTo, RunConfig
from farspan.train.folder import identity
from farspan.train.strict import to_mapping

STEP = "train/global_step"  # as transformers calls the axis of its charts in wandb
PROJECT = __name__.partition(".")[0]
INIT_SECONDS = 60.0  # to reach the server; a process that ends meanwhile waits for it
FINISH_SECONDS = 20.0  # for what is not yet uploaded when a run ends
# wandb would otherwise send the terminal's output, the program, its git state and packages, what
# the machine is, what it does, and its name.
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
ERROR_REPORTING = "WANDB_ERROR_REPORTING"  # of wandb to its makers
MISSING = (
    "report_to: {name} cannot be imported here ({error}); "
    'pip install "farspan[{name}]", or leave it out of report_to'
)


class Tracker(Protocol):
    """One place for charts. Each method may raise, or take long."""

    def open(self, step: int) -> str:
        """Charts go on after `step`, and nothing that was told of later steps is to stay in their
        way. What a person is to know of it; empty: nothing."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """A point at `step` in each of these charts."""

    def close(self, *, failed: bool) -> None:
        """No more will come; `failed`: the run has steps left."""


class TensorBoard:
    """Event files in `<folder>/tensorboard`. Raises Refused where tensorboard is missing."""

    def __init__(self, run: RunConfig) -> None:
        self._make = _loaded(ReportTo.TENSORBOARD, "torch.utils.tensorboard", "SummaryWriter")
        self._folder = Path(run.folder).expanduser() / "tensorboard"
        self._config = yaml.safe_dump(config_of(run), sort_keys=False)
        self._writer: Any = None

    def open(self, step: int) -> str:
        self._writer = self._make(str(self._folder), purge_step=step + 1)
        # Four spaces: the page shows text as Markdown.
        self._writer.add_text("config", indent(self._config, "    "), step)
        self._writer.flush()
        return ""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        # A killed process writes no more: after a checkpoint of this step it would be a gap.
        self._writer.flush()

    def close(self, *, failed: bool) -> None:  # noqa: ARG002 - files have no such state
        self._writer.close()


class Wandb:
    """A wandb run, which goes on where the folder does. What the user's environment and settings
    of wandb say goes before what is set here. Raises Refused where wandb is missing or is to send
    and nobody is logged in."""

    def __init__(self, run: RunConfig) -> None:
        os.environ.setdefault(ERROR_REPORTING, "false")  # read when the package is imported
        self._init = _loaded(ReportTo.WANDB, "wandb", "init")
        self._settings = load("wandb", "Settings")
        self._known = load("wandb", "setup")().settings
        if self._known.mode not in ("offline", "disabled", "dryrun"):
            _log_in()
        self._folder = Path(run.folder).expanduser()
        self._config = config_of(run)
        self._identity = identity(run)
        self._run: Any = None

    def open(self, step: int) -> str:  # noqa: ARG002 - points have their step with them
        ours = {
            **LEAST,
            "project": PROJECT,
            "run_name": self._folder.name,
            "run_id": self._known.run_id or self._run_id(),
            "resume": "allow",
            "reinit": "create_new",  # beside one that the calling program may have
            "root_dir": str(self._folder),
            "silent": True,  # its lines would go through the bars
            "init_timeout": INIT_SECONDS,
            "finish_timeout": FINISH_SECONDS,
        }
        told = self._known.model_fields_set
        given = {name: value for name, value in ours.items() if name not in told}
        if HOST not in os.environ:
            given["host"] = ""  # what is known by itself is the machine's
        self._run = self._init(config=self._config, settings=self._settings(**given))
        # The library's own step may not go back, which a run does that is resumed after a crash.
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        if self._run.disabled:
            return ""
        if self._run.offline:
            return f"wandb: offline, in {self._run.settings.sync_dir}; `wandb sync` sends it"
        return f"wandb: {self._run.url}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, STEP: step})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))

    def _run_id(self) -> str:
        """The folder's, unless it is of another run that was in it."""
        path = self._folder / "wandb.json"
        known = read_json(path) or {}
        if known.get("run") == self._identity and isinstance(known.get("id"), str):
            return known["id"]
        made = secrets.token_hex(4)
        write_whole(path, b'{"id": "%s", "run": "%s"}' % (made.encode(), self._identity.encode()))
        return made


KINDS: Mapping[ReportTo, Callable[[RunConfig], Tracker]] = {
    ReportTo.TENSORBOARD: TensorBoard,
    ReportTo.WANDB: Wandb,
}


def make_trackers(run: RunConfig) -> dict[str, Tracker]:
    """Those that the run names, none of them open. Raises Refused."""
    return {kind.value: KINDS[kind](run) for kind in run.trackers()}


def config_of(run: RunConfig) -> dict[str, Any]:
    """The run as charts have it beside them, and that it is sparse where it is."""
    return {**marks(run), **to_mapping(run)}


def _log_in() -> None:
    """Asks a person at a terminal now, rather than when bars are on it."""
    try:
        load("wandb", "login")(verify=False)
    except Exception as error:
        raise Refused(
            f"report_to: wandb: {str(error).rstrip('.')}; or set WANDB_API_KEY, or "
            "WANDB_MODE=offline to keep it in the run folder, or leave wandb out of report_to"
        ) from error


def _loaded(kind: ReportTo, module: str, name: str) -> Any:
    try:
        return load(module, name)
    except ImportError as error:
        raise Refused(MISSING.format(name=kind.value, error=error)) from error
