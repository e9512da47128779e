"""Seconds of the tests: where they are written, what is shown of them, and how many may be.

make test                             # writes build/durations.json
make durations                        # its dearest files and tests
python -m tests.durations --most 80 tests/engine
"""

import argparse
import json
import multiprocessing.forkserver
import os
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from time import monotonic, process_time  # by name: a test may move the clock
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = ROOT / "build" / "durations.json"
PHASES = ("setup", "call", "teardown")  # setup has the fixtures

# Seconds of CPU that the default run may take on two quiet cores, by folder of tests: twice
# what was measured, and ten seconds for what the first tests of a worker import. They only go down.
BUDGETS: dict[str, float] = {
    "packages/farspan-memory/tests": 16,
    "packages/farspan-memory/tests/memory": 20,
    "packages/farspan-memory/tests/memory/compare": 12,
    "packages/farspan-memory/tests/native": 11,
    "packages/farspan-memory/tests/pytorch": 14,
    "tests": 219,
    "tests/attention": 24,
    "tests/checkpoint": 34,
    "tests/cli": 120,
    "tests/data": 46,
    "tests/distributed": 44,
    "tests/engine": 353,
    "tests/field": 148,
    "tests/hf": 340,
    "tests/kernels": 22,
    "tests/planner": 175,
    "tests/posttrain": 86,
    "tests/profile": 38,
    "tests/program": 29,
    "tests/report": 26,
    "tests/sparse": 178,
    "tests/train": 550,
}

LOOP, LOOP_SECONDS = 5_000_000, 0.25  # numbers that are added up, and what it takes on an idle core
SAMPLED = 20.0  # seconds of the clock between two looks at how slow the machine is

# Sums stay in a core's cache. The same tests took 1.7 times the CPU seconds of another day on a
# machine whose memory was slower, and sums as many.
MOST_SLOW = 2.5

# CPU and wall seconds of a test, by phase.
Seconds = dict[str, tuple[float, float]]
SPENT = pytest.StashKey[float]()


def cpu_seconds() -> float:
    """CPU seconds of this process, of its children that have ended, and of the fork server's."""
    spent = os.times()
    total = spent.user + spent.system + spent.children_user + spent.children_system
    server = getattr(multiprocessing.forkserver, "_forkserver", None)
    number = getattr(server, "_forkserver_pid", None)
    return total + (sum(psutil.Process(number).cpu_times()[:4]) if number else 0.0)


def slowness(loop: int = LOOP) -> float:
    """How many times as many seconds of CPU as on an idle core anything takes now: cores that share
    what they compute with count the seconds of both."""
    began, total = process_time(), 0
    for number in range(loop):
        total += number
    return max(1.0, (process_time() - began) / LOOP_SECONDS * LOOP / loop)


class Durations:
    """Collects the seconds of every test, of all processes that share a run.

    Args:
        path: the file that the process without tests of another writes them to; None to write none.
        bounded: whether the run is one that BUDGETS are of.
    """

    def __init__(self, path: Path | None, bounded: bool) -> None:
        self._path, self._bounded = path, bounded
        self._tests: dict[str, Seconds] = {}
        self._slow: list[float] = []
        self._looked = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Any:
        item.stash[SPENT] = cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        report = yield
        now = cpu_seconds()
        report.cpu_seconds = now - item.stash[SPENT]  # which a worker sends with the report
        item.stash[SPENT] = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._path is None or report.when is None:
            return
        seconds = round(getattr(report, "cpu_seconds", 0.0), 3), round(report.duration, 3)
        self._tests.setdefault(report.nodeid, {})[report.when] = seconds
        if monotonic() > self._looked + SAMPLED:
            self._slow.append(slowness(LOOP // 5))
            self._looked = monotonic()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._path is None or not self._tests:
            return
        slow = sum(self._slow) / len(self._slow)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps({"slowness": slow, "tests": self._tests}), "utf-8")
        dear = too_dear(self._tests, slow) if self._bounded else []
        if dear:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            print("\n" + "\n".join(dear))


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--durations-file", type=Path, help="write each test's seconds to this file")


def register(config: pytest.Config) -> None:
    """Write what tests take, and hold a whole run of the tests by default to its budgets."""
    whole = config.args_source is not pytest.Config.ArgsSource.ARGS
    bounded = whole and config.option.markexpr == "not exhaustive"
    path = None if hasattr(config, "workerinput") else config.option.durations_file
    config.pluginmanager.register(Durations(path, bounded), "seconds")


def package_of(test: str) -> str:
    """The folder of a test; for those of tests itself, that."""
    return test.split("::")[0].rsplit("/", 1)[0]


def file_of(test: str) -> str:
    return test.split("::")[0]


def summed(tests: Mapping[str, Seconds], by: Any) -> dict[str, float]:
    """CPU seconds by what `by` says of a test, the dearest first."""
    sums: dict[str, float] = {}
    for test, phases in tests.items():
        sums[by(test)] = sums.get(by(test), 0.0) + sum(cpu for cpu, _ in phases.values())
    return dict(sorted(sums.items(), key=lambda entry: -entry[1]))


def slow_memory(sums: Mapping[str, float]) -> float:
    """How many times as many CPU seconds as measured the middle folder took: what makes every
    folder slow is the machine."""
    times = [2 * cpu / (BUDGETS[name] - 10) for name, cpu in sums.items() if name in BUDGETS]
    return min(max(1.0, median(times)), MOST_SLOW) if len(times) > len(BUDGETS) // 2 else 1.0


def too_dear(tests: Mapping[str, Seconds], slow: float) -> list[str]:
    """Folders whose tests took more CPU seconds than they may on a machine this slow."""
    sums = summed(tests, package_of)
    slow = max(slow, slow_memory(sums))
    return [
        f"{package}: its tests took {seconds:.0f} s of CPU, and may take {most:.0f} s on an idle "
        f"core, {most * slow:.0f} on this one; `make durations` names the dearest"
        for package, seconds in sums.items()
        if seconds > (most := BUDGETS.get(package, 5.0)) * slow
    ]


def budgets(tests: Mapping[str, Seconds], slow: float) -> str:
    """BUDGETS by what a run on this machine took."""
    found = sorted(summed(tests, package_of).items())
    slow = max(slow, slow_memory(dict(found)))
    return "\n".join(f'    "{name}": {2 * cpu / slow + 10:.0f},' for name, cpu in found)


def table(sums: Mapping[str, float], most: int, title: str) -> str:
    """Rows of seconds, their share and the share of all rows so far."""
    total, so_far = sum(sums.values()) or 1.0, 0.0
    lines = [f"{'CPU s':>8} {'share':>6} {'so far':>6}  {title}, {len(sums)} in all"]
    for name, seconds in list(sums.items())[:most]:
        so_far += seconds
        lines.append(f"{seconds:8.1f} {seconds / total:6.1%} {so_far / total:6.1%}  {name}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Show where the seconds of the tests went.")
    parser.add_argument("folders", nargs="*", help="what the tests' names begin with; without: all")
    parser.add_argument("--most", type=int, default=40, help="rows of a table")
    parser.add_argument("--file", type=Path, default=WRITTEN)
    parser.add_argument("--budgets", action="store_true", help="show them as this file has them")
    given = parser.parse_args()
    read = json.loads(given.file.read_text("utf-8"))
    if given.budgets:
        print(budgets(read["tests"], read["slowness"]))
        return
    tests: dict[str, Seconds] = {
        test: phases
        for test, phases in read["tests"].items()
        if test.startswith(tuple(given.folders) or "")
    }
    phases = {
        when: [sum(test[when][n] for test in tests.values() if when in test) for n in (0, 1)]
        for when in PHASES
    }
    for when, (cpu, wall) in phases.items():
        print(f"{when}: {cpu:.0f} s of CPU, {wall:.0f} s of the clock")
    print(f"the machine was {read['slowness']:.2f} times as slow as an idle core\n")
    print(table(summed(tests, package_of), given.most, "folder") + "\n")
    print(table(summed(tests, file_of), given.most, "file") + "\n")
    print(table(summed(tests, str), given.most, "test"))


if __name__ == "__main__":
    main()
