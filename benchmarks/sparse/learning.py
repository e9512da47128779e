"""Sparse attention learns: far retrieval, and loss on real text, beside dense and random pages.

    python -m benchmarks.sparse.learning --out benchmarks/results/sparse_learning.json

On a CPU, one thread a process; twenty minutes of a processor. Seconds are those that a
process computes. With `--workers` arms train beside one another, with the same results.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2ForCausalLM
from transformers.utils import logging

from benchmarks.sparse import reading, retrieval
from benchmarks.sparse.arms import ARMS, DENSE
from benchmarks.sparse.reading import READING
from benchmarks.sparse.retrieval import LESSON, LONGER_PAGES, Lesson
from farspan.engine.microbench import describe_machine

SEEDS = (0, 1)
DIGITS = 5  # of losses that are kept

Row = dict[str, Any]


def warm(lesson: Lesson, seed: int, folder: str) -> Row:
    """Warms a model up and leaves it in a folder."""
    model, losses = retrieval.warm_up(lesson, seed)
    model.save_pretrained(Path(folder) / str(seed))
    print(f"seed {seed} warm after {len(losses)} steps", flush=True)
    return {"seed": seed, "steps": len(losses), "loss": losses}


def learn(lesson: Lesson, arm: str, seed: int, folder: str) -> Row:
    """One arm from the model that `warm` left."""
    model = Qwen2ForCausalLM.from_pretrained(Path(folder) / str(seed))
    return retrieval.learn(lesson, arm, model, seed)


def record(seeds: Sequence[int], workers: int) -> Row:
    """Everything."""
    longer = replace(LESSON, attention=LONGER_PAGES)
    context = get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(workers, context, initializer=alone) as pool,
    ):
        warmed = rows([pool.submit(warm, LESSON, seed, folder) for seed in seeds])
        learnt = [pool.submit(learn, LESSON, arm, seed, folder) for seed in seeds for arm in ARMS]
        others = [arm for arm in ARMS if arm != DENSE]
        long = [pool.submit(learn, longer, arm, seed, folder) for seed in seeds for arm in others]
        texts = [pool.submit(reading.read, READING, arm, 0) for arm in ARMS]
        arms, longs, readings = rows(learnt), rows(long), rows(texts)
    torch.set_num_threads(1)
    return {
        "benchmark": "sparse_learning",
        "machine": describe_machine(),
        "dtype": "float32",
        "clock": "seconds that one thread computed",
        "retrieval": {
            "lesson": retrieval.describe(LESSON),
            "accuracy": retrieval.gap(arms),
            "warm_up": warmed,
            "arms": arms,
        },
        "longer_pages": {"lesson": retrieval.describe(longer), "arms": longs},
        "text": {"reading": reading.describe(READING), "arms": readings},
    }


def alone() -> None:
    """In a worker, before its work."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def rows(futures: list["Future[Row]"]) -> list[Row]:
    """What the workers found, losses rounded."""
    found = [future.result() for future in futures]
    return [row | {"loss": [round(x, DIGITS) for x in row["loss"]]} for row in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="write the record to this file")
    parser.add_argument("--workers", type=int, default=1, help="processes that train at a time")
    given = parser.parse_args()
    found = record(SEEDS, given.workers)
    given.out.write_text(json.dumps(found) + "\n", encoding="utf-8")
    print({name: round(value, 3) for name, value in found["retrieval"]["accuracy"].items()})


if __name__ == "__main__":
    main()
