"""kill -9 at any moment, then the same command: the bits of an uninterrupted run."""

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.grids import exhaustive

# Of the eighty moments that only sync a file or compute a cell; of the others a tenth of it.
STRIDES = (exhaustive(1), 33)


@pytest.fixture(scope="module", params=STRIDES)
def report(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("crash")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.train.crash", str(root), str(request.param)],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_every_trial_was_killed_and_then_ended(report: dict[str, Any]) -> None:
    assert len(report["trials"]) > 10
    for trial in report["trials"]:
        name = report["names"][trial["at"]]
        assert (trial["first"], trial["second"]) == (signal.SIGKILL, 0), (trial["at"], name)


def test_moments_of_every_kind_were_met(report: dict[str, Any]) -> None:
    kinds = {report["names"][trial["at"]].split()[0] for trial in report["trials"]}
    assert kinds == {"sync", "rename", "remove", "tensors", "cell", "evaluation"}


def test_everything_ends_as_if_nothing_had_happened(report: dict[str, Any]) -> None:
    whole = report["whole"]
    assert whole["leftovers"] == []
    for trial in report["trials"]:
        moment = f"{trial['at']}: {report['names'][trial['at']]}"
        for part in ("digests", "metrics", "leftovers"):
            assert trial[part] == whole[part], moment
        assert trial["checkpoints"][-1] == whole["checkpoints"][-1], moment
