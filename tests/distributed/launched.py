"""Processes as a launcher starts them: each joins the others itself, and may die."""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.ranks import PROCESSES


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int  # minus the signal's number, where one killed it
    said: str  # what the function returned, or the error's type and message
    errors: str  # its standard error
    seconds: float  # after the start of all
    at: float  # the same, by time.monotonic, which all processes share


def launch(
    folder: Path,
    ranks: int,
    function: Callable[..., str],
    *arguments: Any,
    seconds: float = 300.0,
    lost: int | None = None,
) -> list[Ended]:
    """`function(*arguments)` in each of so many processes. Those that have not ended after
    `seconds` are killed, and `lost`, for which nobody waits."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    processes = [
        PROCESSES.Process(
            target=_work, args=(folder, port, rank, ranks, function, arguments), daemon=True
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    ended: dict[int, float] = {}
    try:
        while len({lost, *ended}) < ranks + (lost is None) and time.monotonic() - started < seconds:
            now = time.monotonic() - started
            gone = {r for r, p in enumerate(processes) if not p.is_alive()}
            ended |= dict.fromkeys(gone - ended.keys(), now)
            time.sleep(0.01)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [
        Ended(
            process.exitcode or 0,
            _read(folder / f"said-{rank}"),
            _read(folder / f"errors-{rank}"),
            ended.get(rank, seconds),
            started + ended.get(rank, seconds),
        )
        for rank, process in enumerate(processes)
    ]


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _work(
    folder: Path,
    port: int,
    rank: int,
    ranks: int,
    function: Callable[..., str],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
    )
    for name in ("said", "errors"):
        (folder / f"{name}-{rank}").unlink(missing_ok=True)
    with (folder / f"errors-{rank}").open("w") as errors:
        os.dup2(errors.fileno(), 2)
    code = 0
    try:
        said = function(*arguments)
    except Exception as error:
        code, said = 1, f"{type(error).__name__}: {error}"
    (folder / f"said-{rank}").write_text(said)
    os._exit(code)
