"""A way on a case in processes of its own: what it changes in libraries dies with them."""

import os
import pickle
import socket
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

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
    if outcome.rows:
        return about | outcome.rows[0]
    return about | {"raised": f"{outcome.ended}: {outcome.words}"[:LINE]}


def _work(settings: dict[str, Any]) -> None:
    """In a child: the way here, or on ranks that are forked from here."""
    way = WAYS[settings["way"]]
    if way.ranks == 1 and not way.processes:
        add_row(settings, _row(settings))
        return
    fork = get_context("fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ends: list[Connection] = []
    started = []
    for rank in range(way.ranks):
        here, there = fork.Pipe()
        ends.append(here)
        started.append(fork.Process(target=_rank, args=(settings, rank, port, there)))
        started[-1].start()
        there.close()
    found: dict[int, Row] = {}
    while len(found) < len(ends):
        for end in wait([end for rank, end in enumerate(ends) if rank not in found]):
            assert isinstance(end, Connection)
            rank = ends.index(end)
            try:
                found[rank] = end.recv()
            except EOFError:
                found[rank] = {"raised": f"rank {rank} ended"}
        raised = [row for row in found.values() if "raised" in row]
        if raised:  # the others may wait for it
            found = {0: raised[0]}
            break
    add_row(settings, found[0])
    for process in started:
        process.kill()


def _rank(settings: dict[str, Any], rank: int, port: int, end: Connection) -> None:
    size = WAYS[settings["way"]].ranks
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    end.send(_row(settings))


def _row(settings: dict[str, Any]) -> Row:
    try:
        found = WAYS[settings["way"]].run(settings["case"])
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        said = f"{type(error).__name__}: {lines[0].strip() if lines else ''}"
        return {"raised": said[:LINE]}
    return errors(found, pickle.loads(settings["right"]))
