"""What `report_to` writes, and that nothing it does reaches the training."""

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml

from farspan.spec import UnsupportedError
from farspan.train import loggers as trackers
from farspan.train import loggers as tracking
from farspan.train.config import ReportTo, RunConfig, load_run
from farspan.train.loggers import charts
from farspan.train.run_folder import RunFolder
from farspan.train.yaml_config import build, to_mapping
from tests.train.tiny import (
    STEPS,
    Quiet,
    Stopped,
    Stopping,
    TinyStep,
    assert_same_weights,
    fit,
    metrics,
    tiny_run,
)

reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
TENSORBOARD = ReportTo.TENSORBOARD


def events_of(run: RunConfig) -> Any:
    """As TensorBoard reads them."""
    events = reading.EventAccumulator(str(Path(run.folder) / "tensorboard"))
    return events.Reload()


def points(run: RunConfig, name: str) -> list[tuple[int, float]]:
    """What TensorBoard shows of a chart."""
    return [(event.step, event.value) for event in events_of(run).Scalars(name)]


def recorded(lines: list[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    """The same of metrics.jsonl, in the float32 of a chart."""
    return [(line["step"], float(np.float32(line[key]))) for line in lines]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run that reports to nobody."""
    run = tiny_run(tmp_path_factory.mktemp("plain"))
    fit(run)
    trackers_files = {"wandb", "tensorboard", "wandb.json", "trackio.json"}
    assert not trackers_files & {p.name for p in Path(run.folder).iterdir()}
    return run


def test_tensorboard_shows_one_run_through_a_crash(tmp_path: Path, plain: RunConfig) -> None:
    run = tiny_run(tmp_path, report_to=TENSORBOARD)
    with pytest.raises(Stopped):
        fit(run, reporter=Stopping(4))  # step 3, behind the checkpoint of step 2, comes twice
    assert points(run, "train/loss")[-1][0] == 3
    (text,) = events_of(run).Tensors("config/text_summary")[0].tensor_proto.string_val
    assert yaml.safe_load(text) == yaml.safe_load((Path(run.folder) / "config.yaml").read_text())
    assert fit(replace(run, report_to=(TENSORBOARD,))).step == STEPS  # no other run for that
    steps = [line for line in metrics(run) if "loss" in line]
    for name, key in [
        ("train/loss", "loss"),
        ("train/learning_rate", "lr"),
        ("train/grad_norm", "grad_norm"),
        ("train/tokens_per_second", "tokens_per_second"),
        ("memory/peak_process_bytes", "peak_process_bytes"),
    ]:
        assert points(run, name) == recorded(steps, key), name
    held_out = [line for line in metrics(run) if "heldout_loss" in line]
    assert points(run, "eval/loss") == recorded(held_out, "heldout_loss")
    assert [line["step"] for line in held_out] == [0, 2, 4, 5]
    assert points(run, "train/skipped") == [(step, 0.0) for step in range(1, STEPS + 1)]
    assert_same_weights(run, plain)
    files = list((Path(run.folder) / "tensorboard").iterdir())
    fit(run)  # finished: nothing to tell
    assert list((Path(run.folder) / "tensorboard").iterdir()) == files


def test_a_killed_process_leaves_no_gap(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    tracker = trackers.TensorBoardLogger(run, RunFolder(run))
    tracker.open(0)
    tracker.log(1, {"train/loss": 2.0})
    assert points(run, "train/loss") == [(1, 2.0)]
    tracker.close(failed=True)


def test_names_are_those_of_the_field() -> None:
    line = {"step": 7, "loss": 2.5, "lr": 1e-3, "tokens": 90, "attention": "sparse"}
    assert charts(line | {"attention_mass": 0.9, "attention_mass_min": "nan"}) == {
        "train/loss": 2.5,
        "train/learning_rate": 1e-3,
        "train/tokens": 90.0,
        "train/attention_mass": 0.9,
        "train/skipped": 0.0,
    }
    assert charts({"step": 8, "lr": 1e-3, "nonfinite": "loss"})["train/skipped"] == 1.0
    assert charts({"step": 8, "heldout_loss": 2.0, "heldout_tokens": 5}) == {
        "eval/loss": 2.0,
        "eval/tokens": 5.0,
    }


class Faulty:
    """A tracker that fails, or hangs, where it is told to."""

    def __init__(self, place: str, fault: Callable[[], None]) -> None:
        self.place, self.fault = place, fault
        self.told: list[int] = []
        self.closed: list[bool] = []

    def _reach(self, place: str) -> None:
        if place == self.place:
            self.fault()

    def open(self, step: int) -> str:
        self._reach("open")
        return f"charts go on after {step}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        assert values
        self.told.append(step)
        self._reach("log")

    def close(self, *, failed: bool) -> None:
        self.closed.append(failed)
        self._reach("close")


def full() -> None:
    raise OSError(28, "No space left on device")


def reported(tmp_path: Path, tracker: Faulty, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setitem(trackers.KINDS, TENSORBOARD, lambda *_: tracker)
    return tiny_run(tmp_path, report_to=TENSORBOARD)


@pytest.mark.parametrize(
    ("place", "fault"), [("open", full), ("log", sys.exit), ("log", full), ("close", full)]
)
def test_a_tracker_that_fails_costs_a_note(
    tmp_path: Path,
    plain: RunConfig,
    place: str,
    fault: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracker, quiet = Faulty(place, fault), Quiet()
    run = reported(tmp_path, tracker, monkeypatch)
    assert fit(run, reporter=quiet).step == STEPS
    notes = [note for note in quiet.notes if note.startswith("tensorboard: ")]
    assert len(notes) == 1
    assert ("No space left" if fault is full else "SystemExit") in notes[0]
    assert len(tracker.told) <= 1 or place == "close"
    assert_same_weights(run, plain)


def test_a_tracker_that_hangs_holds_nobody_up(
    tmp_path: Path, plain: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "PATIENCE", 0.05)
    monkeypatch.setattr(tracking, "WAITING", 3)
    go_on = threading.Event()
    quiet = Quiet()
    run = reported(
        tmp_path, Faulty("open", lambda: None if go_on.wait(60) else full()), monkeypatch
    )
    try:
        assert fit(run, reporter=quiet).step == STEPS
    finally:
        go_on.set()
    assert [note for note in quiet.notes if "tensorboard: does not answer" in note]
    assert sum("tensorboard" in note for note in quiet.notes) == 1
    assert_same_weights(run, plain)


def test_a_tracker_is_closed_however_a_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an error, by a signal, and in its end."""

    def failing(_: TinyStep, calls: int) -> None:
        if calls == 5:
            raise ValueError("the fifth")

    def interrupt(_: TinyStep, calls: int) -> None:
        if calls == 1:
            signal.raise_signal(signal.SIGTERM)

    tracker, quiet = Faulty("nowhere", full), Quiet()
    run = reported(tmp_path, tracker, monkeypatch)
    with pytest.raises(ValueError, match="the fifth"):
        fit(run, failing)
    assert fit(run, interrupt).exit_code == 143
    fit(run, reporter=quiet)
    assert tracker.closed == [True, True, False]
    assert "charts go on after 2" in quiet.notes


@pytest.mark.parametrize(
    ("kind", "module"),
    [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb"), ("trackio", "trackio")],
)
def test_without_the_package_nothing_is_begun(
    tmp_path: Path, kind: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    run = tiny_run(tmp_path, report_to=ReportTo(kind))
    with pytest.raises(
        UnsupportedError, match=rf'report_to: {kind} .*pip install "farspan\[{kind}\]"'
    ):
        fit(run)
    assert not Path(run.folder).exists()


@pytest.mark.parametrize(
    ("written", "kinds"),
    [
        ("", ()),
        ("report_to: none\n", ()),
        ("report_to: []\n", ()),
        ("report_to: tensorboard\n", (TENSORBOARD,)),
        ("report_to: [wandb, tensorboard, wandb]\n", (ReportTo.WANDB, TENSORBOARD)),
    ],
)
def test_what_a_run_file_says(tmp_path: Path, written: str, kinds: tuple[ReportTo, ...]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {{path: a}}\ndata: {{}}\n{written}")
    run = load_run(path)
    assert run.trackers() == kinds
    assert build(RunConfig, to_mapping(run)).trackers() == kinds


@pytest.fixture
def of_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """wandb for one who has never used it: it reads its environment once."""
    wandb = pytest.importorskip("wandb")
    wandb.teardown()
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(socket, "gethostname", lambda: "name-of-the-machine")
    yield wandb
    wandb.teardown()


def test_wandb_needs_someone_logged_in(
    tmp_path: Path, of_wandb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    run = tiny_run(tmp_path, report_to=ReportTo.WANDB)
    with pytest.raises(
        UnsupportedError, match=r"report_to: wandb: .*wandb login.*WANDB_MODE=offline"
    ):
        fit(run)
    assert not Path(run.folder).exists()
    assert of_wandb.run is None


@pytest.mark.slow
def test_a_wandb_run_goes_on_in_its_folder(
    tmp_path: Path, plain: RunConfig, of_wandb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "of-the-user")
    run, quiet = tiny_run(tmp_path, report_to=ReportTo.WANDB), Quiet()
    with pytest.raises(Stopped):
        fit(run, reporter=Stopping(4))
    assert fit(run, reporter=quiet).step == STEPS
    of_wandb.teardown()  # its process writes the last bytes when it ends
    folder = Path(run.folder)
    number = json.loads((folder / "wandb.json").read_text())["id"]
    parts = list((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert [path.name for path in parts] == [f"run-{number}.wandb"] * 2
    for part in parts:
        held = part.read_bytes()
        for words in ("train/loss", "eval/loss", "train/global_step", "of-the-user"):
            assert words.encode() in held, words
        for words in ("name-of-the-machine", sys.executable, "dry run", "requirements"):
            assert words.encode() not in held, words
        assert not list((part.parent / "files").iterdir())
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"
    assert any(note.startswith("wandb: offline, in") for note in quiet.notes)
    assert_same_weights(run, plain)


def test_what_the_user_tells_wandb_goes_before(
    tmp_path: Path, of_wandb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {
        "MODE": "offline",
        "_DISABLE_STATS": "false",
        "NAME": "mine",
        "RUN_ID": "a",
        "HOST": "h",
    }
    for name, value in told.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    made = asked_of(of_wandb, tiny_run(tmp_path), monkeypatch)
    assert not made.keys() & {"x_disable_stats", "run_name", "run_id", "host", "mode"}
    assert not (tmp_path / "run" / "wandb.json").exists()
    assert made.keys() >= trackers.LEAST.keys() - {"x_disable_stats"}
    assert made["project"] == "farspan"


def asked_of(wandb: Any, run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """With which settings a run of wandb would begin."""
    made: dict[str, Any] = {}
    with monkeypatch.context() as patched:
        patched.setattr(wandb, "Settings", lambda **given: made.update(given))
        patched.setattr(wandb, "init", lambda **_: None)
        with pytest.raises(AttributeError):  # None is no run
            trackers.WandbLogger(run, RunFolder(run)).open(0)
    return made


class Trackio(ModuleType):
    """Stands in for the package, with what `TrackioLogger` calls of it: a run is known by project
    and name, and `resume="allow"` goes on with it."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.runs: dict[tuple[str, str], list[tuple[int, dict[str, float]]]] = {}
        self.configs: list[dict[str, Any]] = []
        self.finished = 0

    def init(
        self,
        project: str,
        name: str | None = None,
        space_id: str | None = None,
        config: dict[str, Any] | None = None,
        resume: str = "never",
        embed: bool = True,
        auto_log_gpu: bool | None = None,
        auto_log_cpu: bool | None = None,
    ) -> "Trackio":
        assert (space_id, embed, auto_log_gpu, auto_log_cpu) == (None, False, False, False)
        assert resume == "allow"
        assert name is not None
        assert config is not None
        self.configs.append(config)
        self.points = self.runs.setdefault((project, name), [])
        return self

    def log(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.points.append((step, metrics))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def of_trackio(monkeypatch: pytest.MonkeyPatch) -> Trackio:
    """The stand-in, for one who has said nothing of it."""
    for name in [name for name in os.environ if name.startswith("TRACKIO_")]:
        monkeypatch.delenv(name)
    found = Trackio()
    monkeypatch.setitem(sys.modules, "trackio", found)
    return found


def test_a_trackio_run_goes_on_in_its_folder(
    tmp_path: Path, plain: RunConfig, of_trackio: Trackio
) -> None:
    """Beside TensorBoard, which has the same charts."""
    run, quiet = tiny_run(tmp_path, report_to=(ReportTo.TRACKIO, TENSORBOARD)), Quiet()
    with pytest.raises(Stopped):
        fit(run, reporter=Stopping(4))  # step 3, behind the checkpoint of step 2, comes twice
    assert fit(run, reporter=quiet).step == STEPS
    number = json.loads((Path(run.folder) / "trackio.json").read_text())["id"]
    (((project, name), told),) = of_trackio.runs.items()
    assert (project, name) == ("farspan", f"run-{number}")
    assert of_trackio.finished == 2
    written = yaml.safe_load((Path(run.folder) / "config.yaml").read_text())
    assert of_trackio.configs == [written] * 2
    for chart in ("train/loss", "eval/loss", "train/tokens"):
        kept = {step: np.float32(values[chart]) for step, values in told if chart in values}
        assert kept == {step: np.float32(value) for step, value in points(run, chart)}, chart
    assert any(note.startswith(f"trackio: run {name}") for note in quiet.notes)
    assert_same_weights(run, plain)


def test_another_run_or_project_is_another_for_trackio(
    tmp_path: Path, of_trackio: Trackio, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(tmp_path)
    Path(run.folder).mkdir()
    for one in (run, replace(run, device="cpu"), replace(run, seed=1)):
        trackers.TrackioLogger(one, RunFolder(one)).open(0)
    assert len(of_trackio.runs) == 2
    monkeypatch.setenv("TRACKIO_PROJECT", "of-the-user")
    assert "of-the-user" in trackers.TrackioLogger(run, RunFolder(run)).open(0)
    assert [project for project, _ in of_trackio.runs] == ["farspan", "farspan", "of-the-user"]
