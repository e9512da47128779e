"""Time the cells of tiny models, where a step's time is the CPU's own: Python, torch, transformers.

    python benchmarks/cells.py --before CHECKOUT [--out FILE]    # both trees take turns

A cell is a layer on a chunk: forward, forward again, backward. Its layers are 16 wide and its
chunks have 4 tokens, so that arithmetic takes next to nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from farspan import Step, strategy
from farspan.engine.microbench import describe_machine

ROOT = Path(__file__).resolve().parents[1]
SHAPES = (2, 64), (4, 64), (8, 64)  # layers, chunks
CHUNK, WIDTH, TURNS = 4, 16, 12


def tiny_step(layers: int, chunks: int) -> Callable[[], object]:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = Qwen2ForCausalLM(config).train()
    ids = torch.randint(0, 64, (1, CHUNK * chunks))
    run = Step(model, replace(strategy("grouped", layers, CHUNK * chunks), chunk=CHUNK))

    def step() -> object:
        model.zero_grad(set_to_none=True)
        return run(ids, ids)

    step()
    step()
    return step


def serve() -> None:
    """Answer each line read, the index of a shape, with the CPU seconds of a step."""
    steps = [tiny_step(*shape) for shape in SHAPES]
    for line in sys.stdin:
        began = time.process_time()
        steps[int(line)]()
        print(time.process_time() - began, flush=True)


def started(tree: Path) -> subprocess.Popen[str]:
    sources = tree / "src", tree / "packages" / "farspan-memory" / "src"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, sources)),
        "OMP_NUM_THREADS": "1",
    }
    pipe = subprocess.PIPE
    command = [sys.executable, __file__, "--serve"]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


def ask(process: subprocess.Popen[str], shape: int) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{shape}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def measure(before: Path, turns: int) -> dict[str, Any]:
    """CPU microseconds a cell, the least of all turns, by shape and tree."""
    trees = {"before": before, "now": ROOT}
    processes = {name: started(tree) for name, tree in trees.items()}
    seconds: dict[str, dict[str, float]] = {}
    try:
        for index, (layers, chunks) in enumerate(SHAPES):
            found: dict[str, list[float]] = {name: [] for name in trees}
            for _ in range(turns):
                for name, process in processes.items():
                    found[name].append(ask(process, index))
            cells = layers * chunks
            best = {name: 1e6 * min(times) / cells for name, times in found.items()}
            best["ratio"] = best["now"] / best["before"]
            seconds[f"{layers} layers, {chunks} chunks"] = best
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    return {
        "benchmark": "cells",
        "machine": describe_machine(),
        "hidden": WIDTH,
        "chunk": CHUNK,
        "turns": turns,
        "commits": {name: commit(tree) for name, tree in trees.items()},
        "cpu_microseconds_a_cell": seconds,
    }


def commit(tree: Path) -> str:
    command = ["git", "-C", str(tree), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, help="checkout of an earlier commit")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--out", type=Path, help="write the record to this file")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve()
        return
    record = measure(given.before or ROOT, given.turns)
    if given.out is not None:
        given.out.write_text(json.dumps(record, indent=1) + "\n")
    for shape, times in record["cpu_microseconds_a_cell"].items():
        words = f"{times['before']:6.0f} before, {times['now']:6.0f} now, {times['ratio']:.3f}"
        print(f"{shape:22} {words}")


if __name__ == "__main__":
    main()
