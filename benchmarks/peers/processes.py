"""A way on a case in processes of its own: what it changes in libraries dies with them."""

import os
import pickle
import socket
from typing import Any

from torch.multiprocessing.spawn import start_processes

from benchmarks.children import Nursery, Row, add_row
from benchmarks.peers.bed import Case, errors, expected
from benchmarks.peers.ways import WAYS

SECONDS = 240.0  # of one case
LINE = 300  # characters kept of a message
PRELOADED = "benchmarks.peers.preloaded"


def rows_of(nursery: Nursery, name: str, case: Case) -> Row:
    """A way's errors on a case, or the first line of what it raised."""
    about = {"way": name, "model": case.model, "batch": case.batch, "dtype": case.dtype}
    right = pickle.dumps(expected(case))  # by value: tensors would be shared with the child
    outcome = nursery.run(_work, {"way": name, "case": case, "right": right}, SECONDS)
    for row in sorted(outcome.rows, key=lambda row: "raised" not in row):
        return about | row
    return about | {"raised": f"{outcome.ended}: {outcome.words}"[:LINE]}


def _work(settings: dict[str, Any]) -> None:
    """In a child: the way here, or on ranks that are forked from here."""
    way = WAYS[settings["way"]]
    if way.ranks == 1 and not way.processes:
        add_row(settings, _row(settings))
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_processes(_rank, (settings, port), nprocs=way.ranks, start_method="fork")


def _rank(rank: int, settings: dict[str, Any], port: int) -> None:
    """One of the ranks. The first tells what it found; one that fails tells why, and ends with a
    status for which the others, which may wait for it, are ended."""
    size = WAYS[settings["way"]].ranks
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {name: str(value) for name, value in numbers.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    found = _row(settings)
    if rank == 0 or "raised" in found:
        add_row(settings, found)
    os._exit("raised" in found)  # libraries would wait for each other at the end


def _row(settings: dict[str, Any]) -> Row:
    try:
        found = WAYS[settings["way"]].run(settings["case"])
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        said = f"{type(error).__name__}: {lines[0].strip() if lines else ''}"
        return {"raised": said[:LINE]}
    return errors(found, pickle.loads(settings["right"]))
