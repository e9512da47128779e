"""How a step's time and memory grow with the tokens, sparse beside dense, on a CPU.

    python -m benchmarks.sparse.scaling --out FILE [--quick]

One model, one chunk, one budget; random tokens, so that no two pages of queries agree and as many
different pages are gathered as can be. Seconds are those of the process on one thread, the less of
two steps; bytes are the most that new tensors of the device took in a step, with K, V on host.
"""

import argparse
import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.ranks.measure import MODEL as RANKS
from benchmarks.tables import save
from farspan import Schedule, Sparse, Step, Tier
from farspan.engine.memory import PeakMemory
from farspan.engine.microbench import describe_machine

SPARSE = Schedule(
    chunk=1024,
    kv_block=4096,
    kv=Tier.HOST,
    layer_checkpoint=True,
    sparse=Sparse(64, 1024, 512, query_page=64, selector="mean"),
)
SCHEDULES = {"sparse": SPARSE, "dense": replace(SPARSE, sparse=None)}
LENGTHS = {
    "sparse": (8192, 16384, 32768, 65536, 131072),
    "dense": (8192, 16384, 32768),
}
QUICK = dict.fromkeys(SCHEDULES, (1024, 2048, 4096))
RUNS = 2
MODEL: dict[str, Any] = RANKS | {
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def measure(model: LlamaForCausalLM, name: str, tokens: int) -> dict[str, Any]:
    """One row: the less of `RUNS` steps' seconds, and the bytes of one more."""
    step = Step(model, SCHEDULES[name])
    ids = torch.randint(0, MODEL["vocab_size"], (1, tokens), generator=torch.manual_seed(tokens))
    seconds = []
    for _ in range(RUNS):
        model.zero_grad(set_to_none=True)
        began = time.process_time()
        step(ids, ids)
        seconds.append(time.process_time() - began)
    step.release()
    model.zero_grad(set_to_none=True)
    with PeakMemory(torch.device("cpu")) as meter:
        step(ids, ids)
    on_host = step.program(1, tokens).arena_bytes[Tier.HOST]
    return {
        "attention": name,
        "tokens": tokens,
        "seconds": min(seconds),
        "device_bytes": meter.peak - on_host,
        "host_bytes": on_host,
    }


def exponent(rows: list[dict[str, Any]], name: str) -> float:
    """The slope of log(seconds) over log(tokens), by least squares over all rows."""
    points = [
        (math.log(row["tokens"]), math.log(row["seconds"]))
        for row in rows
        if row["attention"] == name
    ]
    mean_x, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
    covered = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return covered / sum((x - mean_x) ** 2 for x, _ in points)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the record to this file")
    parser.add_argument("--quick", action="store_true", help="short sequences, to see it run")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    rows: list[dict[str, Any]] = []
    for name, lengths in (QUICK if given.quick else LENGTHS).items():
        for tokens in lengths:
            rows.append(measure(model, name, tokens))
            print(json.dumps(rows[-1]), flush=True)
    record = {
        "benchmark": "sparse scaling",
        "machine": describe_machine(),
        "threads": 1,
        "dtype": "float32",
        "model": MODEL,
        "sparse": asdict(SPARSE.sparse or Sparse()),
        "chunk": SPARSE.chunk,
        "rows": rows,
        "exponents": {name: exponent(rows, name) for name in SCHEDULES},
    }
    print(json.dumps(record["exponents"]))
    save(given.out, record)


if __name__ == "__main__":
    main()
