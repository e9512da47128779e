"""How a process learns of the others that were started with it, and `python -m farspan`."""

import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from farspan.distributed.run_context import LaunchEnv, _listen, launch_env, process_group
from farspan.spec import VERSION
from tests.distributed.launched import launch
from tests.ranks import run_ranks

SAID = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("absent", ["", *SAID])
def test_a_process_is_one_of_many_if_all_is_said(
    monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    for name, value in SAID.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.delenv(absent, raising=False)
    assert launch_env() == (None if absent else LaunchEnv(3, 8, 1, 4))


def test_a_group_that_is_there_is_used() -> None:
    assert run_ranks(2, inside) == ["rank 0 of 2", "rank 1 of 2"]


def inside() -> str:
    place = launch_env()
    assert place is not None
    for _ in range(2):  # each time with a board of its own
        with process_group(place, torch.device("cpu"), 5.0):
            dist.all_reduce(torch.ones(1))
    dist.barrier()  # it was not ours to end
    return f"rank {place.rank} of {place.ranks}"


def test_a_group_is_made_and_ended(tmp_path: Path) -> None:
    """One rank runs the same code."""
    for ranks in (1, 2):
        said = [end.said for end in launch(tmp_path, ranks, outside)]
        assert said == [f"{rank} of {ranks}, gloo, 7 s, False" for rank in range(ranks)]


def outside() -> str:
    place = launch_env()
    assert place is not None
    with process_group(place, torch.device("cpu"), 7.0):
        group = dist.distributed_c10d._get_default_group()
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        assert timeout == timedelta(seconds=7.0)
        made = f"{dist.get_rank()} of {dist.get_world_size()}, {dist.get_backend()}"
    return f"{made}, {timeout.seconds} s, {dist.is_initialized()}"


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "farspan", "--version"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert (done.returncode, done.stdout) == (0, f"farspan {VERSION}\n")


@pytest.mark.parametrize(
    ("host", "address", "is_far", "listens"),
    [
        ("localhost", "127.0.0.1", True, True),
        ("node1", "127.0.1.1", True, False),  # as Debian's /etc/hosts has a machine's own name
        ("node1", "127.0.1.1", False, True),
        ("service", "203.0.113.7", True, False),  # no address of this machine
    ],
)
def test_the_store_listens_alone_where_others_reach_it(
    monkeypatch: pytest.MonkeyPatch, host: str, address: str, is_far: bool, listens: bool
) -> None:
    place = (socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [place])
    found = _listen(host, 0, is_far)
    assert (found is not None) is listens
    if found is not None:
        with socket.socket(fileno=found) as own:
            assert own.getsockname()[0] == address
