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


def crash(root: Path, *numbers: int) -> dict[str, Any]:
    """What became of a run killed at each of some moments: it ended as if nothing had happened."""
    process = PROCESSES.Process(target=write_report, args=(root, *numbers))
    process.start()
    process.join()
    assert process.exitcode == 0  # else its standard error is shown
    report: dict[str, Any] = json.loads((root / "report.json").read_text("utf-8"))
    whole = report["whole"]
    assert whole["leftovers"] == []
    for trial in report["trials"]:
        moment = f"{trial['at']}: {report['names'][trial['at']]}"
        assert (trial["first"], trial["second"]) == (signal.SIGKILL, 0), moment
        for part in ("digests", "metrics", "leftovers"):
            assert trial[part] == whole[part], moment
        assert trial["checkpoints"][-1] == whole["checkpoints"][-1], moment
    return report


def kinds(report: dict[str, Any]) -> set[str]:
    """Of the moments that were met."""
    return {report["names"][trial["at"]].split()[0] for trial in report["trials"]}


# Of the eighty moments that only sync a file or compute a cell; of the others a tenth of it.
@pytest.mark.parametrize("stride", [exhaustive(1), 99])
def test_everything_ends_as_if_nothing_had_happened(tmp_path: Path, stride: int) -> None:
    report = crash(tmp_path, stride)
    assert len(report["trials"]) > 6
    assert kinds(report) == {"sync", "rename", "remove", "tensors", "cell", "evaluation"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [exhaustive(30), 2])
def test_states_on_disk_are_those_of_the_checkpoint_again(tmp_path: Path, count: int) -> None:
    """At moments drawn at random."""
    report = crash(tmp_path, 1, count)
    assert len(report["trials"]) == count
    assert report["names"].count("drive") > 300


# Of the sixty moments that give or take a name.
@pytest.mark.parametrize("stride", [exhaustive(1), 9])
def test_the_best_checkpoint_is_never_lost(tmp_path: Path, stride: int) -> None:
    report = crash(tmp_path, stride, 0, 1)
    best, last = "step-00000002", "step-00000005"
    assert report["whole"]["checkpoints"] == [best, last]
    for trial in report["trials"]:
        assert {best, last} <= set(trial["checkpoints"]), trial["at"]
    assert kinds(report) == {"rename", "remove"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [exhaustive(60), 4])
def test_a_stream_goes_on_where_it_was(tmp_path: Path, count: int) -> None:
    crash(tmp_path, 1, 0, 0, count)
