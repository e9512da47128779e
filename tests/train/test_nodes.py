"""Two nodes: two network namespaces, each with a host name and processes of its own, and a link."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from farspan.program.layout import Parallel
from farspan.train.config import CheckpointConfig, DType, ModelConfig, RunConfig, ScheduleConfig
from farspan.train.trainer import train
from farspan.train.yaml_config import to_mapping
from tests.numerics import EXACT, relative_error
from tests.train.tiny import MODEL, Quiet, metrics, tiny_run

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 5.0
NODES = ("node-a", "node-b")


class Link:
    """Between the nodes; of each, the namespace and the device have the same name."""

    def __init__(self) -> None:
        self.names = [f"fs{os.getpid()}{end}" for end in "ab"]  # at most 15 characters
        self._logs: list[Path] = []

    def make(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
        one, other = self.names
        _ip("link", "add", one, "netns", one, "type", "veth", "peer", other, "netns", other)
        for number, name in enumerate(self.names):
            _ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", name, "up")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def set(self, state: str) -> None:
        _ip("-n", self.names[0], "link", "set", self.names[0], state)

    def torchrun(self, number: int, log: Path, *arguments: str) -> subprocess.Popen[str]:
        """On one node, one rank; in a process group whose end ends all of it."""
        name = self.names[number]
        with log.open("w") as output:
            return subprocess.Popen(
                [
                    *("ip", "netns", "exec", name),
                    *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts"),
                    *("sh", "-c", f'hostname {NODES[number]}; exec "$@"', "sh"),
                    *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run"),
                    *("--nnodes=2", "--nproc-per-node=1", *arguments),
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(sys.path),
                    "OMP_NUM_THREADS": "1",
                    "GLOO_SOCKET_IFNAME": name,
                },
            )


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def link() -> Iterator[Link]:
    made = Link()
    try:
        if not all(map(shutil.which, ("ip", "unshare"))):
            pytest.skip("needs ip and unshare")
        try:
            made.make()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr}")
        yield made
    finally:
        made.remove()


@contextmanager
def running(link: Link, run: RunConfig, *arguments: tuple[str, ...]) -> Iterator[list[Any]]:
    """The launchers of both nodes, killed at the end if they are still there."""
    root = Path(run.folder).parent
    (root / "run.yaml").write_text(yaml.safe_dump(to_mapping(run)))
    started = [
        link.torchrun(
            number,
            root / f"{NODES[number]}.log",
            *own,
            *("-m", "farspan", "train", str(root / "run.yaml")),
        )
        for number, own in enumerate(arguments)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


STATIC: list[tuple[str, ...]] = [
    ("--master-addr=10.77.0.1", "--master-port=29500", f"--node-rank={number}")
    for number in range(2)
]


def logs(root: Path) -> list[str]:
    return [(root / f"{node}.log").read_text() for node in NODES]


def a_run(root: Path, **changes: Any) -> RunConfig:
    run = tiny_run(
        root,
        folder=str(root / "run"),
        model=ModelConfig(config=MODEL | {"num_key_value_heads": 2}, dtype=DType.FLOAT64),
        schedule=ScheduleConfig(strategy="grouped", chunk=24, groups=1),
        steps=3,
        checkpoints=CheckpointConfig(every=2),
    )
    return replace(run, **changes)


def losses(run: RunConfig) -> torch.Tensor:
    found = [line["loss"] for line in metrics(run) if "loss" in line]
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.exhaustive  # four processes that import everything
def test_two_nodes_have_the_losses_of_one_process(tmp_path: Path, link: Link) -> None:
    run = a_run(tmp_path, parallel=Parallel(ulysses=2, timeout=60.0))
    with running(link, run, *STATIC) as started:
        assert [process.wait(120) for process in started] == [0, 0], logs(tmp_path)
    alone = replace(run, parallel=None, folder=str(tmp_path / "alone"))
    train(alone, reporter=Quiet())
    assert len(losses(run)) == run.steps
    assert relative_error(losses(run), losses(alone)) <= EXACT


def wait_for(path: Path, process: Any) -> None:
    deadline = time.monotonic() + 90.0
    while not path.exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)


WORDS = {
    "node-a": r"farspan: rank 1: does not answer: .* node-b or the link to it is down",
    "node-b": r"farspan: rank 1: the launcher's store at 10\.77\.0\.1:\d+ has not answered for "
    r"\d+ s \(node-a has rank 0\)",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("restarts", [0, 3])
def test_a_link_that_goes_down_ends_both_nodes(tmp_path: Path, link: Link, restarts: int) -> None:
    """Each names the other. With restarts, and a launcher that lets nodes meet again, the run goes
    on from its checkpoint when the link is back."""
    # Launchers that meet again start their ranks up to ten seconds apart.
    timeout = 20.0 if restarts else TIMEOUT
    run = a_run(tmp_path, steps=60, parallel=Parallel(ulysses=2, timeout=timeout))
    arguments: list[tuple[str, ...]] = STATIC
    if restarts:
        meet = ("--rdzv-backend=c10d", "--rdzv-endpoint=10.77.0.1:29500", "--rdzv-id=run")
        arguments = [
            (
                *meet,
                f"--local-addr=10.77.0.{number + 1}",  # what a name would resolve to
                f"--rdzv-conf=is_host={1 - number}",
                f"--max-restarts={restarts}",
            )
            for number in range(2)
        ]
    with running(link, run, *arguments) as started:
        wait_for(tmp_path / "run" / "checkpoints" / "step-00000004", started[0])
        link.set("down")
        down = time.monotonic()
        while not all(map(re.search, WORDS.values(), logs(tmp_path))):
            assert time.monotonic() < down + timeout + 5.0 + 3.0, logs(tmp_path)
            time.sleep(0.05)
        link.set("up")
        codes = [process.wait(120) for process in started]
    assert codes == ([0, 0] if restarts else [1, 1]), logs(tmp_path)
    assert "exited without reporting" not in "".join(logs(tmp_path))
    if restarts:
        assert re.search(r"resuming after step \d+ of 60", logs(tmp_path)[0])
        alone = replace(run, parallel=None, folder=str(tmp_path / "alone"))
        train(alone, reporter=Quiet())
        assert relative_error(losses(run), losses(alone)) <= EXACT
