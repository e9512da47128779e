"""Time a checkpoint's saving and resuming beside safetensors' own, of the same tensors in one run.

    python -m benchmarks.checkpoints [--gib 1.5] [--turns 7] [--folder .] [--out FILE]

The tensors are weights and AdamW's moments in float32. farspan saves and resumes as a run does:
hashed, synced, published under its name, verified. Beside it `save_file` and fsync, and `load_file`
and a copy into live tensors. The two take turns within a second of each other, each first as often
as the other, with nothing left to write when a clock starts; files are read from the page cache.
The ratio is the median of the turns' ratios. Whatever is written is removed.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.tables import DOCS, RESULTS, save
from farspan.checkpoint.saver import Saver, entries_of, folder_name
from farspan.distributed.run_context import DistributedContext
from farspan.durable import sync
from farspan.engine.microbench import describe_machine
from farspan.train.run_folder import capture_rng

PAGE = DOCS / "evidence" / "cpu.md"
SHAPE = (2048, 1024)  # 8 MiB, as a projection of a small model has
STATE = {"run": "measured", "position": {"step": 1, "tokens": 1, "skipped": 0}}
KINDS = ("save", "resume")


def tensors(gib: float) -> dict[str, Tensor]:
    """Weights and both moments of so many projections, under a checkpoint's names."""
    count = max(1, round(gib * 2**30 / (3 * 4 * SHAPE[0] * SHAPE[1])))
    kinds = ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")
    return {f"{kind}/layer.{i}": torch.randn(SHAPE) for kind in kinds for i in range(count)}


def seconds(work: Callable[[], Any]) -> float:
    """What it takes, when all that was written before is on the disk."""
    os.sync()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Turns:
    """Both ways to save and to resume the same tensors, under a folder."""

    def __init__(self, live: dict[str, Tensor], folder: Path) -> None:
        self.live, self.folder, self.file = live, folder, folder / "plain.safetensors"
        self.read = {name: torch.ones_like(tensor) for name, tensor in live.items()}

    def saver(self, of: dict[str, Tensor]) -> Saver:
        model = {n.removeprefix("model/"): t for n, t in of.items() if n.startswith("model/")}
        states = {n.removeprefix("optimizer/"): t for n, t in of.items() if n.startswith("opt")}
        return Saver(entries_of(model, states), DistributedContext(torch.device("cpu")))

    def ways(self, kind: str) -> dict[str, Callable[[], Any]]:
        if kind == "save":
            return {"farspan": self.save, "safetensors": self.write}
        return {"farspan": self.resume, "safetensors": self.copy}

    def save(self) -> None:
        self.saver(self.live).save(self.folder / "checkpoints", capture_rng(), STATE, 1)

    def write(self) -> None:
        save_file(self.live, self.file)
        sync(self.file)

    def resume(self) -> None:
        self.saver(self.read).begin(self.folder / "checkpoints" / folder_name(1), STATE)

    def copy(self) -> None:
        loaded = load_file(self.file)
        for name, tensor in self.read.items():
            tensor.copy_(loaded[name])

    def remove(self, way: str) -> None:
        """Each way finds the place empty that it writes to."""
        if way == "farspan":
            shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)
        else:
            self.file.unlink(missing_ok=True)

    def turn(self, number: int) -> dict[str, dict[str, float]]:
        """Seconds by kind and way; what was read is what was saved."""
        found: dict[str, dict[str, float]] = {}
        for kind in KINDS:
            ways = [*self.ways(kind).items()]
            found[kind] = {}
            for way, work in ways if number % 2 else ways[::-1]:
                if kind == "save":
                    self.remove(way)
                found[kind][way] = seconds(work)
                if kind == "resume":
                    assert all(torch.equal(self.read[n], t) for n, t in self.live.items()), way
                    for tensor in self.read.values():
                        tensor.fill_(1)
        return found


def measure(gib: float, turns: int, folder: Path) -> dict[str, Any]:
    """The record: every turn, and medians. A turn before them is not counted."""
    torch.manual_seed(0)
    live = tensors(gib)
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        both = Turns(live, Path(inside))
        rows = [both.turn(number) for number in range(turns + 1)][1:]
    record: dict[str, Any] = {"benchmark": "checkpoints", "machine": describe_machine()}
    record["bytes"] = sum(tensor.nbytes for tensor in live.values())
    for kind in KINDS:
        ways = {way: median(row[kind][way] for row in rows) for way in rows[0][kind]}
        ratio = median(row[kind]["farspan"] / row[kind]["safetensors"] for row in rows)
        record[kind] = {"seconds": ways, "ratio": ratio}
    return record | {"turns": rows}


def row(record: dict[str, Any]) -> str:
    """The line of docs/evidence/cpu.md."""
    save, resume = (record[kind] for kind in KINDS)
    return (
        f"| checkpoint of {record['bytes'] / 2**30:.1f} GiB: seconds to save / safetensors' "
        "`save_file` and fsync; to resume / `load_file` and a copy, from the page cache of a busy "
        f"machine, medians of {len(record['turns'])} turns | "
        f"{save['ratio']:.2f}; {resume['ratio']:.2f} | `checkpoints.json` |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Time checkpoints beside safetensors' own files.")
    parser.add_argument("--gib", type=float, default=1.5)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
    parser.add_argument("--out", type=Path, default=RESULTS / "checkpoints.json")
    options = parser.parse_args()
    record = measure(options.gib, options.turns, options.folder)
    save(options.out, record)
    for kind in KINDS:
        print(kind, json.dumps(record[kind]))


if __name__ == "__main__":
    main()
