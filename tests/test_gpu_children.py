"""Children of the GPU benchmark: forked, told what they need, and none takes the others with it."""

import os
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from benchmarks.children import CONFIGURATION, Nursery, Outcome, Row
from benchmarks.gpu import session
from benchmarks.gpu.session import Session
from benchmarks.gpu.work import Item, tiny
from tests import gpu_benchmark_works as works
from tests.test_gpu_benchmark import MACHINE, Left


@pytest.fixture(scope="module")
def nursery() -> Nursery:
    return Nursery("tests.gpu_benchmark_works")


def test_forked_children_fail_and_stop_alone(nursery: Nursery) -> None:
    failed = nursery.run(works.fails, {}, 60)
    assert failed.ended == "failed"
    assert "ValueError: on purpose" in failed.words
    assert failed.rows == [{"before": 1}]
    stopped = nursery.run(works.sleeps, {}, 3.0)
    assert (stopped.ended, stopped.rows) == ("timed out", [{"before": 1}])
    killed = nursery.run(works.dies, {}, 60)
    assert (killed.ended, killed.rows) == ("failed", [{"before": 1}])
    good = nursery.run(works.succeeds, {"value": 3}, 60)
    assert (good.ended, good.rows) == ("completed", [{"value": 3}])


def test_children_have_the_environment_of_their_parent() -> None:
    """Where libraries are found, the driver's among them."""
    server = forkserver.ForkServer()  # the one of the process has its environment already
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ensure_running", "connect_to_new_process", "set_forkserver_preload"):
            patch.setattr(forkserver, name, getattr(server, name))
        patch.setenv("FARSPAN_TOLD", "to the parent")
        made = Nursery("tests.gpu_benchmark_works", "expandable_segments:True")
        told = made.run(works.tells, {"names": ["FARSPAN_TOLD", "PATH", CONFIGURATION]}, 60)
        vars(forkserver.ForkServer)["_stop"](server)  # or it would outlive its children
    expected = {"FARSPAN_TOLD": "to the parent", "PATH": os.environ["PATH"]}
    assert told.rows == [expected | {CONFIGURATION: "expandable_segments:True"}]


def test_what_a_child_started_ends_with_it(nursery: Nursery, tmp_path: Path) -> None:
    made = nursery.run(works.starts_another, {"folder": str(tmp_path)}, 60)
    assert made.ended == "completed"
    other = Path(f"/proc/{made.rows[0]['pid']}/stat")
    until = time.monotonic() + 20  # it is killed at once, and goes when it is scheduled
    while other.exists() and ") Z" not in other.read_text():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_children_are_told_what_main_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Row] = []

    def fresh(_module: str, settings: Row, *_: Any) -> Outcome:
        told.append(settings)
        return Outcome("completed", "", 1.0, [MACHINE])

    monkeypatch.setattr(session, "run_child", fresh)
    record: Row = {"runs": [], "measurements": []}
    clock: Any = Left(60)
    made = Session(tiny(), "cpu", clock, record, lambda _: None, lambda _: None, host_memory=7)
    made.measured(Item("ceilings"), session.Arranged({}, 1.0))
    assert told[0]["host_memory"] == 7


class Unforkable:
    """A nursery whose children cannot start CUDA."""

    def run(self, *_: Any) -> Outcome:
        words = "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with"
        return Outcome("failed", words, 0.1, [])


def test_where_a_fork_has_no_cuda_children_start_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fresh(_module: str, settings: Row, *_: Any) -> Outcome:
        asked.append(settings["work"])
        return Outcome("completed", "", 1.0, [MACHINE])

    monkeypatch.setattr(session, "run_child", fresh)
    record: Row = {"runs": [], "measurements": []}
    nursery: Any = Unforkable()
    clock: Any = Left(60)
    made = Session(tiny(), "cpu", clock, record, lambda _: None, lambda _: None, nursery=nursery)
    row = made.measured(Item("ceilings"), session.Arranged({}, 1.0))
    assert (row["child"]["ended"], asked, made.nursery) == ("completed", ["ceilings"], None)
