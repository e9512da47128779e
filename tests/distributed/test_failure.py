"""A rank that fails: the others stop soon, and say which it was and why."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from farspan.distributed import failure as faults
from farspan.distributed import run_context as launched
from farspan.distributed.context import run_on_rank0
from farspan.distributed.failure import activity, is_shared
from farspan.distributed.run_context import launch_env, process_group
from farspan.spec import UnsupportedError
from tests.distributed.launched import Ended, launch
from tests.grids import exhaustive

CPU = torch.device("cpu")
LIMIT = 3.0  # seconds that a collective waits
# A busy machine starts processes late, and pulses come late there.
BUSY = 2.0  # and so much later, then
SOON = LIMIT + faults.HEARTBEAT_TIMEOUT + 12.0
AT_ONCE = 3  # cases; of some seconds each they compute for a tenth of one
# Seconds between two: ranks that one process starts with many others join later than LIMIT.
APART, STARTING = 1.0, threading.Lock()


@dataclass(frozen=True)
class Case:
    """Ranks of one test."""

    ranks: int
    function: Callable[..., str]
    arguments: tuple[Any, ...] = ()
    seconds: float = SOON
    lost: int | None = None

    def ended(self, folder: Path) -> list[Ended]:
        with STARTING:
            time.sleep(APART)
        return launch(
            folder, self.ranks, self.function, *self.arguments, seconds=self.seconds, lost=self.lost
        )


@pytest.fixture(scope="module")
def launched_cases(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Case, Future[list[Ended]]]]:
    """Of all tests here that were asked for, side by side: their ranks mostly wait."""
    asked: list[Any] = [
        item.callspec.params["case"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and "case" in item.fixturenames
    ]
    launch(tmp_path_factory.mktemp("first"), 1, str)  # behind it the fork server has its imports
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {c: pool.submit(c.ended, tmp_path_factory.mktemp("ranks")) for c in asked}
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def ended(case: Case, launched_cases: dict[Case, Future[list[Ended]]]) -> list[Ended]:
    return launched_cases[case].result()


def run(fault: str, culprit: int) -> str:
    """A rank that computes with others until one of them does something else."""
    place = launch_env()
    assert place is not None
    if fault == "waits elsewhere":
        faults.GRACE = 1.0
    with process_group(place, CPU, LIMIT):
        dist.all_reduce(torch.ones(1))
        if place.rank == culprit:
            happen(fault)
        if fault in ("waits elsewhere", "stopped, others compute"):
            time.sleep(60.0)
        if fault == "all refuse":
            refuse()
        for _ in range(3):
            dist.all_reduce(torch.ones(1))
    return "went on"


def happen(fault: str) -> None:
    print(time.monotonic(), file=sys.stderr, flush=True)
    if fault in ("raises", "waits elsewhere"):
        raise ValueError("no such thing\nand a second line")
    if fault == "refused":
        raise UnsupportedError("memory: ran out with\n  (1) this\n  (2) and that")
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.startswith("stopped"):
        time.sleep(2 * faults.HEARTBEAT)  # the others have read where it is
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "leaves":
        os._exit(0)


def moment_of(end: Ended) -> float:
    """When it happened, beside which torch may have warned."""
    found = re.search(r"^(\d+\.\d+)$", end.errors, re.MULTILINE)
    assert found is not None, end
    return float(found[1])


def refuse() -> None:
    """All ranks the same, one after the other."""
    try:
        raise UnsupportedError("chunk: too large")
    except UnsupportedError as error:
        place = launch_env()
        assert place is not None
        error.add_note(str(place.rank))
        raise


def of_run(
    fault: str, culprit: int, ranks: int = 3, seconds: float = SOON, lost: int | None = None
) -> Case:
    return Case(ranks, run, (fault, culprit), seconds, lost)


def others(ended: list[Ended], culprit: int) -> list[Ended]:
    return [end for rank, end in enumerate(ended) if rank != culprit]


@pytest.mark.parametrize(
    ("case", "culprit", "cause"),
    [
        (of_run("raises", 1), 1, "rank 1: ValueError: no such thing"),
        exhaustive(
            of_run("refused", 1), 1, "rank 1: memory: ran out with\n  (1) this\n  (2) and that"
        ),
        (of_run("killed", 2), 2, "rank 2: exited without reporting an error (killed?)"),
        exhaustive(of_run("leaves", 1), 1, "rank 1: exited without reporting an error (killed?)"),
    ],
)
def test_the_others_name_the_rank_and_its_cause(
    ended: list[Ended], culprit: int, cause: str
) -> None:
    for end in others(ended, culprit):
        assert end.code == 1, end
        assert end.said == f"RankFailed: {cause}"
        assert end.seconds < SOON, end


@pytest.mark.parametrize(
    ("case", "culprit"),
    [
        (of_run("stopped", 0, seconds=2 * SOON, lost=0), 0),
        (of_run("stopped", 1, seconds=2 * SOON, lost=1), 1),
        exhaustive(of_run("stopped, others compute", 0, seconds=2 * SOON, lost=0), 0),
    ],
)
def test_a_frozen_rank_is_named_and_not_called_dead(ended: list[Ended], culprit: int) -> None:
    """Rank 0 has the store, which does not answer then. Ranks that wait for none of the others end
    as well if it is frozen: nobody could tell them of anything."""
    frozen = moment_of(ended[culprit])
    for end in others(ended, culprit):
        assert end.code == 1, end
        said = end.errors.splitlines()[-1] if culprit == 0 else end.said
        words = rf"rank {culprit}: does not answer: its process \d+ exists, but stopped"
        assert re.fullmatch(f"(RankFailed|farspan): {words}", said), end
        assert end.at - frozen < LIMIT + 5.0 + BUSY, end


def fail_beside_a_silent_store() -> str:
    """Ranks that wait for nobody, and whose collectives would wait for long."""
    place = launch_env()
    assert place is not None
    with process_group(place, CPU, 3 * SOON):
        dist.all_reduce(torch.ones(1))
        if place.rank == 0:
            happen("stopped")
        time.sleep(4 * faults.HEARTBEAT)
        raise ValueError("no such thing")


@pytest.mark.parametrize("case", [Case(2, fail_beside_a_silent_store, seconds=2 * SOON, lost=0)])
def test_a_silent_store_is_not_waited_for(ended: list[Ended]) -> None:
    frozen, end = moment_of(ended[0]), ended[1]
    assert (end.code, end.said) == (1, "ValueError: no such thing")
    assert end.at - frozen < LIMIT + 5.0 + BUSY


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ["stopped", "killed"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_under_torchrun(tmp_path: Path, fault: str, culprit: int) -> None:
    """Whose agent has the store. It ends the others when one has failed, before they may have said
    why, and gives a frozen one 30 seconds."""
    work = f"from tests.distributed.test_failure import run; run({fault!r}, {culprit})"
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3"),
                *("--no-python", sys.executable, "-W", "ignore", "-c", work),
            ],
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )
    words = rf"RankFailed: rank {culprit}: does not answer: its process (\d+) exists, but stopped"
    if fault == "killed":
        words = rf"exitcode: -9\) local_rank: {culprit}"
    try:
        deadline = time.monotonic() + 60.0
        while not (found := re.search(words, log.read_text())):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        happened = float(re.findall(r"^(\d+\.\d+)$", log.read_text(), re.MULTILINE)[0])
        assert time.monotonic() - happened < LIMIT + 5.0 + BUSY
        if fault == "stopped":
            os.kill(int(found[1]), signal.SIGKILL)
        assert process.wait(40.0) == 1
    finally:
        process.kill()
        process.wait()
    named = set(re.findall(r"rank (\d+): exited without reporting", log.read_text()))
    assert named <= ({str(culprit)} if fault == "killed" else set())


@pytest.mark.parametrize("case", [of_run("waits elsewhere", 1, ranks=2)])
def test_a_rank_that_waits_for_no_collective_ends_too(ended: list[Ended]) -> None:
    assert (ended[0].code, ended[0].said) == (faults.FAILED, "")
    assert ended[0].errors.endswith("farspan: rank 1: ValueError: no such thing\n")
    assert ended[0].seconds < SOON


def wait_for(late: int, seconds: float, within: bool) -> str:
    """For a rank that reads, or for the first, which loads."""
    faults.HEARTBEAT_TIMEOUT = 3.0
    faults.GRACE = 1.0 if seconds > SOON else faults.GRACE
    place = launch_env()
    assert place is not None
    with process_group(place, CPU, LIMIT):
        run_on_rank0(lambda: None)
        if late == place.rank and not within:
            with activity("reading the data"):
                time.sleep(seconds)
        run_on_rank0(lambda: time.sleep(seconds * within), what="loading the model")
        dist.all_reduce(torch.ones(1))
    return "went on"


@pytest.mark.parametrize("case", [Case(2, wait_for, (0, 60.0, True))])
def test_a_rank_that_waited_too_long_names_what_the_first_does(ended: list[Ended]) -> None:
    first, other = ended
    words = "rank 0: loading the model takes longer than the timeout of the ranks; "
    assert other.said.startswith(f"RankFailed: {words}raise parallel.timeout")
    assert f"farspan: {words}" in first.errors
    assert (first.code, first.said) == (faults.FAILED, "")
    assert max(first.seconds, other.seconds) < SOON


def of_late(late: int, within: bool) -> Case:
    return Case(3, wait_for, (late, LIMIT + 1.5, within), seconds=2 * SOON)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        exhaustive(of_late(0, True), "rank 0: loading the model"),
        (of_late(0, False), "rank 0: reading the data"),
    ],
)
def test_all_blame_the_rank_that_is_late(ended: list[Ended], words: str) -> None:
    """Itself too, when it comes after all; and not the one whom they were to hear."""
    for end in ended:
        assert end.said == f"RankFailed: {words} takes {faults._TOO_LONG}", end


@pytest.mark.parametrize("case", [of_run("killed", 0)])
def test_the_rank_that_has_the_store_is_killed(ended: list[Ended]) -> None:
    """Without torchrun, whose agent outlives it."""
    for end in ended[1:]:
        assert end.code == 1, end
        assert end.said == "RankFailed: rank 0: exited without reporting an error (killed?)"
        assert end.at - moment_of(ended[0]) < LIMIT + 5.0 + BUSY


def silent(self: faults.FailureDetector) -> None:
    self._stop.wait()


def killed_at_once() -> str:
    """Before the others had a heartbeat."""
    place = launch_env()
    assert place is not None
    if place.rank:
        faults.FailureDetector._send_heartbeats = silent  # type: ignore[method-assign]
    with process_group(place, CPU, LIMIT):
        if place.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
    return "went on"


@pytest.mark.parametrize("case", [Case(2, killed_at_once)])
def test_the_rank_that_has_the_store_is_killed_at_once(ended: list[Ended]) -> None:
    _, end = ended
    assert (end.code, end.said) == (
        1,
        "RankFailed: rank 0: exited without reporting an error (killed?)",
    )


def join(moment: str, culprit: int) -> str:
    """One rank freezes while all join."""
    place = launch_env()
    assert place is not None
    launched.SILENCE = 2.0  # type: ignore[attr-defined]
    meet, init = faults.FailureDetector._meet, dist.init_process_group

    def freeze(call: Callable[..., Any]) -> Callable[..., Any]:
        def frozen(*given: Any, **named: Any) -> Any:
            time.sleep(0.5)  # the others are waiting
            print(time.monotonic(), file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
            return call(*given, **named)

        return frozen

    if place.rank == culprit and moment == "store":
        freeze(time.sleep)(0.0)
    if place.rank == culprit and moment == "group":
        dist.init_process_group = freeze(init)
    if place.rank == culprit and moment == "detector":
        faults.FailureDetector._meet = freeze(meet)  # type: ignore[method-assign]
    with process_group(place, CPU, LIMIT):
        dist.all_reduce(torch.ones(1))
    return "went on"


def of_join(moment: str, culprit: int) -> Case:
    return Case(2, join, (moment, culprit), seconds=2 * SOON, lost=culprit)


@pytest.mark.parametrize(
    ("case", "culprit", "words"),
    [
        # The store's own timeout or the watchdog, whichever is first.
        (
            of_join("store", 0),
            0,
            "rank 1: rank 0, which .* at localhost:.*, has not (started|answered for 5 s)",
        ),
        (
            of_join("group", 0),
            0,
            "rank 1: rank 0, which .*, has not answered for 5 s while .* its process is",
        ),
        exhaustive(
            of_join("group", 1), 1, "rank 0: .*another rank has not started, has ended or is frozen"
        ),
        (
            of_join("detector", 1),
            1,
            "rank 1: has not joined the others in time: it has ended, or is frozen",
        ),
    ],
)
def test_a_rank_that_freezes_while_all_join_is_named(
    ended: list[Ended], culprit: int, words: str
) -> None:
    end, frozen = ended[1 - culprit], moment_of(ended[culprit])
    assert end.code == 1, end
    assert re.search(rf"(RankFailed|farspan): {words}", end.said or end.errors), end
    assert end.at - frozen < LIMIT + 5.0 + BUSY, end


@pytest.mark.parametrize("case", [of_run("all refuse", -1)])
def test_what_all_refuse_is_no_fault_of_one(ended: list[Ended]) -> None:
    for end in ended:
        assert end.said == "UnsupportedError: chunk: too large"


def shared() -> str:
    place = launch_env()
    assert place is not None
    try:
        with process_group(place, CPU, LIMIT):
            refuse()
    except UnsupportedError as error:
        return str(is_shared(error))
    return "nothing was raised"


@pytest.mark.parametrize("case", [Case(3, shared)])
def test_one_rank_says_it_for_all(ended: list[Ended]) -> None:
    assert [end.said for end in ended] == ["False", "True", "True"]


def linger() -> str:
    place = launch_env()
    assert place is not None
    with process_group(place, CPU, LIMIT):
        dist.all_reduce(torch.ones(1))
        time.sleep(4 * faults.HEARTBEAT * (1 - place.rank))
    return "fine"


@pytest.mark.parametrize("case", [Case(2, linger)])
def test_ranks_that_end_well_are_not_missed(ended: list[Ended]) -> None:
    """One leaves long before the others."""
    assert {end.said for end in ended} == {"fine"}
