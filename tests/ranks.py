"""Several ranks on one machine, without a launcher: a function runs in n processes over gloo."""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.described import remembered

SECONDS = 1200.0  # after which ranks that hang are stopped: a busy machine takes long for anything
PRELOADED = [
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "transformers",
    "peft",
    "hypothesis",
    "typer",
    "farspan.engine.step",
    "farspan.train.trainer",
    "tests.zoo",
    "tests.frozen",
]

# A process that is forked from one that has computed waits for threads that it does not have. The
# fork server has imported everything and computed nothing, so a rank is there in 0.1 s, not in 5.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(PRELOADED)


class RankError(AssertionError):
    """What a rank raised, or that it died or did not answer in time."""


def run_ranks(
    ranks: int, function: Callable[..., Any], *arguments: Any, seconds: float = SECONDS
) -> list[Any]:
    """What `function(*arguments)` returns on every rank of a gloo group, in order.

    The function is of a module's top level; arguments and results are pickled. Every rank computes
    with one thread. Raises RankError with the traceback of the first rank that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = [
            _start(Path(folder) / "store", rank, ranks, function, arguments)
            for rank in range(ranks)
        ]
        try:
            return _collect(started, seconds)
        finally:
            for process, _ in started:
                process.kill()
                process.join()


Started = tuple[ForkServerProcess, Connection]


def _start(
    store: Path, rank: int, ranks: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Started:
    here, there = PROCESSES.Pipe()
    process = PROCESSES.Process(
        target=_work, args=(there, str(store), rank, ranks, function, arguments), daemon=True
    )
    process.start()
    there.close()
    return process, here


def _collect(started: list[Started], seconds: float) -> list[Any]:
    deadline = time.monotonic() + seconds
    results: dict[int, Any] = {}
    open_ends: dict[Any, int] = {end: rank for rank, (_, end) in enumerate(started)}
    while open_ends:
        ready = wait(list(open_ends), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(open_ends.values())} did not answer in {seconds:g} s")
        for end in ready:
            rank = open_ends.pop(end)
            results[rank] = _answer(end, rank)
    return [results[rank] for rank in range(len(started))]


def _answer(end: Any, rank: int) -> Any:
    try:
        failed, value = pickle.loads(end.recv_bytes())
    except EOFError:
        raise RankError(f"rank {rank} died") from None
    if failed:
        raise RankError(f"rank {rank} failed:\n{value}")
    return value


def _work(
    end: Connection,
    store: str,
    rank: int,
    ranks: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=600),
        )
        # By value: what torch would share is gone when this process ends.
        with remembered():
            found = function(*arguments)
        end.send_bytes(pickle.dumps((False, found)))
    except Exception:
        end.send_bytes(pickle.dumps((True, traceback.format_exc())))
    finally:
        end.close()
    if dist.is_initialized():
        dist.destroy_process_group()
