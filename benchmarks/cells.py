"""CPU microseconds a cell of tiny models, of this tree and of an earlier one in turns.

    python -m benchmarks.cells --before CHECKOUT [--out FILE]

A cell is a layer on a chunk: forward, forward again, backward. Layers are 16 wide and chunks have 4
tokens, so that arithmetic takes next to nothing: what is left is Python, torch and transformers.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.children import ROOT, SOURCES
from benchmarks.step import make_model
from benchmarks.tables import Record, save
from farspan import Step, strategy
from farspan.engine.microbench import describe_machine

SHAPES = (2, 64), (4, 64), (8, 64)  # layers, chunks
CHUNK, WIDTH = 4, 16
STEPS, TURNS = 8, 5  # steps of a process, of which the first takes memory from the system


def microseconds(layers: int, chunks: int) -> float:
    """The least of a process's steps."""
    sizes = {"vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = make_model(**sizes, **heads, num_hidden_layers=layers)
    ids = torch.randint(0, sizes["vocab_size"], (1, CHUNK * chunks))
    run = Step(model, replace(strategy("grouped", layers, CHUNK * chunks), chunk=CHUNK))
    times = []
    for _ in range(STEPS):
        model.zero_grad(set_to_none=True)
        began = time.process_time()
        run(ids, ids)
        times.append(time.process_time() - began)
    return 1e6 * min(times) / (layers * chunks)


def turn(tree: Path) -> dict[str, float]:
    """Ask a process whose farspan is that of a tree."""
    sources = (tree / source.relative_to(ROOT) for source in SOURCES)
    paths = {"PYTHONPATH": os.pathsep.join(map(str, sources)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.cells", "--once"]
    said = subprocess.check_output(command, cwd=ROOT, env=os.environ | paths)
    found: dict[str, float] = json.loads(said)
    return found


def measure(before: Path) -> Record:
    """Both trees, the least microseconds of all turns by shape."""
    trees = {"before": before.resolve(), "now": ROOT}
    turns = [{name: turn(tree) for name, tree in trees.items()} for _ in range(TURNS)]
    rows = {}
    for shape in turns[0]["now"]:
        least = {name: min(one[name][shape] for one in turns) for name in trees}
        rows[shape] = least | {"ratio": least["now"] / least["before"]}
    return {
        "benchmark": "cells",
        "machine": describe_machine(),
        "before": subprocess.getoutput(f"git -C {before} rev-parse --short=8 HEAD"),
        "cpu_microseconds_a_cell": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, default=ROOT, help="checkout of an earlier commit")
    parser.add_argument("--out", type=Path, help="write the record to this file")
    parser.add_argument("--once", action="store_true", help="the tree that is imported, alone")
    given = parser.parse_args()
    if given.once:
        print(json.dumps({f"{a} layers, {b} chunks": microseconds(a, b) for a, b in SHAPES}))
        return
    record = measure(given.before)
    save(given.out, record)
    for shape, row in record["cpu_microseconds_a_cell"].items():
        print(f"{shape}: {row['before']:.0f}, now {row['now']:.0f}, ratio {row['ratio']:.3f}")


if __name__ == "__main__":
    main()
