"""Ranks as processes of one machine, and what they found, put together."""

import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from benchmarks.ranks.measure import Row, Size, counts_of_rank, rows_of_rank
from benchmarks.ranks.replay import replay


def measured(size: Size, ranks: int) -> list[Row]:
    """Rows of all layouts and lengths on so many processes."""
    rows = [together(found) for found in run(rows_of_rank, size, ranks)]
    for row in rows:
        busiest = max(sum(seconds.values()) for seconds in row["seconds"])
        print(
            f"{row['layout']:<12} {row['ranks']} ranks {row['tokens']:>6} tokens: "
            f"{busiest:.2f} s, replayed {row['replayed_seconds']:.2f} s",
            flush=True,
        )
    return rows


def counted(size: Size, ranks: int) -> list[Row]:
    """The same of the work that is counted."""
    rows = run(counts_of_rank, size, ranks)
    return [{**found[0], "work": [each["work"] for each in found]} for found in rows]


def together(found: list[tuple[Row, Any]]) -> Row:
    """One layout and length on all ranks: what is the same once, of what is not a list."""
    rows = [row for row, _ in found]
    row = {name: rows[0][name] for name in ("layout", "ranks", "tokens")}
    row["replayed_seconds"] = round(replay([(events, each["tail"]) for each, events in found]), 4)
    row["build_seconds"] = [round(each["build_seconds"], 4) for each in rows]
    row["seconds"] = [{k: round(v, 4) for k, v in each["seconds"].items()} for each in rows]
    for name in ("memory", "planned", "sent"):
        row[name] = [each[name] for each in rows]
    return row


def run(work: Callable[[Size, int], list[Any]], size: Size, ranks: int) -> list[list[Any]]:
    """What work(size, ranks) returns on each rank: for each of its items, those of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        given = work, size, ranks, folder
        start_processes(_rank, given, nprocs=ranks, start_method="forkserver")
        found = pickle.loads(Path(folder, "found").read_bytes())
    return [list(items) for items in zip(*found, strict=True)]


def _rank(
    number: int, work: Callable[[Size, int], list[Any]], size: Size, ranks: int, folder: str
) -> None:
    """One of the processes. The first writes what all of them found."""
    where, waits = f"file://{folder}/store", timedelta(seconds=600)
    dist.init_process_group("gloo", init_method=where, rank=number, world_size=ranks, timeout=waits)
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, work(size, ranks))
    if number == 0:
        Path(folder, "found").write_bytes(pickle.dumps(everyone))
    dist.destroy_process_group()
