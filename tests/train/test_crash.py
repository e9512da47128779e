"""kill -9 at any moment, then the same command: the bits of an uninterrupted run."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.grids import exhaustive
from tests.ranks import PROCESSES
from tests.train.crash import report as write_report

pytestmark = pytest.mark.slow

# Of the eighty moments that only sync a file or compute a cell; of the others a tenth of it.
STRIDES = (exhaustive(1), 99)
# Moments of a run whose states are on disk, drawn at random.
ON_DISK = (exhaustive(30), 2)
# Of the sixty moments that give or take a name in a run that keeps its best checkpoint.
BEST = (exhaustive(1), 9)
# Moments of a run that reads a stream.
STREAM = (exhaustive(60), 4)


@pytest.fixture(scope="module", params=STRIDES)
def report(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    return crash(tmp_path_factory.mktemp("crash"), request.param)


@pytest.fixture(scope="module", params=ON_DISK)
def on_disk(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    report = crash(tmp_path_factory.mktemp("disk"), 1, request.param)
    assert len(report["trials"]) == request.param
    assert report["names"].count("drive") > 300
    return report


@pytest.fixture(scope="module", params=BEST)
def with_best(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    return crash(tmp_path_factory.mktemp("best"), request.param, 0, 1)


@pytest.fixture(scope="module", params=STREAM)
def streaming(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    return crash(tmp_path_factory.mktemp("stream"), 1, 0, 0, request.param)


def crash(root: Path, *numbers: int) -> dict[str, Any]:
    process = PROCESSES.Process(target=write_report, args=(root, *numbers))
    process.start()
    process.join()
    assert process.exitcode == 0  # else its standard error is shown
    found: dict[str, Any] = json.loads((root / "report.json").read_text("utf-8"))
    return found


def test_every_trial_was_killed_and_then_ended(report: dict[str, Any]) -> None:
    assert len(report["trials"]) > 6
    for trial in report["trials"]:
        name = report["names"][trial["at"]]
        assert (trial["first"], trial["second"]) == (signal.SIGKILL, 0), (trial["at"], name)


def test_moments_of_every_kind_were_met(report: dict[str, Any]) -> None:
    kinds = {report["names"][trial["at"]].split()[0] for trial in report["trials"]}
    assert kinds == {"sync", "rename", "remove", "tensors", "cell", "evaluation"}


def test_everything_ends_as_if_nothing_had_happened(report: dict[str, Any]) -> None:
    nothing_happened(report)


def test_states_on_disk_are_those_of_the_checkpoint_again(on_disk: dict[str, Any]) -> None:
    for trial in on_disk["trials"]:
        assert (trial["first"], trial["second"]) == (signal.SIGKILL, 0), trial["at"]
    nothing_happened(on_disk)


def test_the_best_checkpoint_is_never_lost(with_best: dict[str, Any]) -> None:
    best, last = "step-00000002", "step-00000005"
    assert with_best["whole"]["checkpoints"] == [best, last]
    for trial in with_best["trials"]:
        assert (trial["first"], trial["second"]) == (signal.SIGKILL, 0), trial["at"]
        assert {best, last} <= set(trial["checkpoints"]), trial["at"]
    assert {with_best["names"][trial["at"]] for trial in with_best["trials"]} == {
        "rename",
        "remove",
    }
    nothing_happened(with_best)


def test_a_stream_goes_on_where_it_was(streaming: dict[str, Any]) -> None:
    for trial in streaming["trials"]:
        assert (trial["first"], trial["second"]) == (signal.SIGKILL, 0), trial["at"]
    nothing_happened(streaming)


def nothing_happened(report: dict[str, Any]) -> None:
    whole = report["whole"]
    assert whole["leftovers"] == []
    for trial in report["trials"]:
        moment = f"{trial['at']}: {report['names'][trial['at']]}"
        for part in ("digests", "metrics", "leftovers"):
            assert trial[part] == whole[part], moment
        assert trial["checkpoints"][-1] == whole["checkpoints"][-1], moment
