"""Seconds of tests: written by phase, summed by folder, and bounded."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from tests import durations
from tests.conftest import pytest_collection_modifyitems, shuffle
from tests.durations import BUDGETS, ROOT, Durations


def test_every_folder_of_tests_has_a_budget() -> None:
    folders = {
        path.parent
        for part in ("tests", "packages/farspan-memory/tests")
        for path in (ROOT / part).rglob("test_*.py")
    }
    assert BUDGETS.keys() == {folder.relative_to(ROOT).as_posix() for folder in folders}


CONFTEST = """
from tests.durations import add_option as pytest_addoption, register as pytest_configure
"""
FILE = """
import pytest

@pytest.fixture(scope="module")
def dear():
    return sum(range(10_000_000))

@pytest.mark.parametrize("number", range(4))
def test_it(dear, number):
    assert dear
"""


def test_a_run_writes_them(tmp_path: Path) -> None:
    """Fixtures apart from calls, of every process."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(FILE)
    written = tmp_path / "build" / "seconds.json"
    command = [sys.executable, "-m", "pytest", "-n", "2"]
    ran = subprocess.run(
        [*command, "--durations-file", str(written)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    tests = json.loads(written.read_text("utf-8"))["tests"]
    assert sorted(tests) == [f"test_it.py::test_it[{n}]" for n in range(4)]
    assert sorted(tests["test_it.py::test_it[0]"]) == ["call", "setup", "teardown"]
    assert sum(test["setup"][0] for test in tests.values()) > 0.05
    assert sum(test["call"][0] for test in tests.values()) < 0.05


def test_a_whole_run_beyond_its_budget_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(durations, "BUDGETS", {"tests": 3.0})
    report: Any = SimpleNamespace(nodeid="tests/test_z.py::test", when="call", duration=9.0)
    for bounded, seconds, fails in ((True, 9.0, True), (True, 2.0, False), (False, 9.0, False)):
        session: Any = SimpleNamespace(exitstatus=0)
        report.cpu_seconds = seconds
        written = Durations(tmp_path / "seconds.json", bounded)
        written.pytest_runtest_logreport(report)
        written._slow = [1.0]
        written.pytest_sessionfinish(session)
        assert bool(session.exitstatus) == fails
    assert capsys.readouterr().out.count("tests took 9 s of CPU") == 1


def test_a_slow_machine_is_told_from_a_dear_folder() -> None:
    def dear(times: Callable[[str], float]) -> list[str]:
        seconds = {name: times(name) * (most - 10) / 2 for name, most in BUDGETS.items()}
        tests = {f"{name}/test_z.py::test": {"call": (cpu, cpu)} for name, cpu in seconds.items()}
        return [line.split(":")[0] for line in durations.too_dear(tests, 1.0)]

    assert not dear(lambda _: 2.4)
    assert sorted(dear(lambda _: 60.0)) == sorted(BUDGETS)
    assert dear(lambda name: 2.4 + 40 * (name == "tests/hf")) == ["tests/hf"]


def test_what_is_exhaustive_is_slow() -> None:
    """`-m "not slow"` stands in place of the default, which leaves out the exhaustive."""
    marked: dict[str, list[str]] = {"exhaustive": [], "fast": []}
    items: Any = [
        SimpleNamespace(
            get_closest_marker=lambda name, own=own: name == own or None,
            add_marker=lambda mark, own=own: marked[own].append(mark.name),
        )
        for own in marked
    ]
    config: Any = SimpleNamespace(option=SimpleNamespace(shuffle=None))
    pytest_collection_modifyitems(config, items)
    assert marked == {"exhaustive": ["slow"], "fast": []}


def test_another_order_keeps_files_together() -> None:
    items: list[Any] = [SimpleNamespace(path=Path(file), name=n) for file in "ab" for n in range(9)]
    orders = []
    for seed in (0, 0, *range(1, 9)):
        shuffled = items[:]
        shuffle(shuffled, Random(seed))
        orders.append([(item.path.name, item.name) for item in shuffled])
        assert len({name for name, _ in orders[-1][:9]}) == 1
    assert orders[0] == orders[1] != orders[2]
    assert {order[0][0] for order in orders} == {"a", "b"}
