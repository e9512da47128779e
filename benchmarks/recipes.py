"""What the recipes of `examples` take on this machine, with the real model: seconds, and what they
print. `python -m benchmarks.recipes [NAME...] --out FILE` keeps what FILE has of others."""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from farspan.durable import read_json
from farspan.engine.microbench import describe_machine

ROOT = Path(__file__).resolve().parents[1]
HERE = "--set model.path=../smollm2 --set model.dtype=float32 --set schedule.strategy=grouped"
RECIPES: dict[str, list[str]] = {
    "chat": ["python prepare.py", "farspan train run.yaml"],
    "qlora": [
        "python ../chat/prepare.py",
        f"farspan train run.yaml {HERE} --set context=2K --set steps=2 "
        "--set optimizer.warmup=1 --set schedule.chunk=512",
    ],
    "streamed": ["farspan train run.yaml"],
    "own-loop": ["python train.py"],
    "dpo": ["python make_pairs.py", "farspan train run.yaml"],
    "dpo, long": ["python make_pairs.py 2000", "farspan train long.yaml"],
    "longer-context": [
        "python prepare.py",
        "farspan evaluate stretched --text text/inspect.txt --context 10K --needles 0",
    ],
    "longer-context, trained": [
        "python prepare.py",
        "farspan train run.yaml --set model.dtype=float32 --set context=10K "
        "--set steps=1 --set optimizer.warmup=0 --set schedule.chunk=2048",
    ],
    "repositories": ["python prepare.py", "farspan data run.yaml"],
    "ranks": [
        "python ../repositories/prepare.py",
        f"torchrun --nproc-per-node 2 -m farspan train run.yaml {HERE} "
        "--set model.overrides={} --set context=1K --set steps=2 "
        "--set optimizer.warmup=1 --set schedule.chunk=512",
    ],
    "trl": ["python train.py dpo"],
    "distill": ["farspan train teacher.yaml", "farspan train run.yaml"],
    "adapters": ["farspan train run.yaml"],
    "evaluate": [
        "farspan train run.yaml",
        "farspan evaluate run --text ../../docs/explanation/*.md --context 8K --picture loss.svg",
    ],
}

PLANS = {
    "qlora": "farspan plan run.yaml --machine rtx4090 --json",
    "streamed": "farspan plan run.yaml --set model.path=Qwen/Qwen3-8B --set model.dtype=bfloat16 "
    "--set context=32K --set schedule.chunk=4096 --set optimizer.states=host --machine rtx4090 "
    "--host-memory 192GiB --json",
}
CELL = "  cell "  # of a line that is drawn over while a step runs
KEPT = "fits", "context", "device_bytes", "host_bytes", "seconds_per_step", "tokens_per_second"


def said(command: str, folder: Path) -> list[str]:
    """The lines that it prints. Raises CalledProcessError."""
    program, *rest = command.split()
    modules = {"farspan": ["-m", "farspan"], "torchrun": ["-m", "torch.distributed.run"]}
    words = [sys.executable, *modules.get(program, []), *rest]
    done = subprocess.run(words, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
    lines = (line.rstrip() for line in done.stdout.splitlines())
    return [line for line in lines if line and CELL not in line]


def measure(name: str) -> dict[str, Any]:
    """A recipe's commands, the seconds of each (by the clock, of the processor), and what the last
    one printed. Of a name with a comma, the folder is what stands before it."""
    seconds, processor, lines = list[float](), list[float](), list[str]()
    for command in RECIPES[name]:
        before, begun = _processor(), time.monotonic()
        lines = said(command, ROOT / "examples" / name.split(",")[0])
        seconds.append(round(time.monotonic() - begun, 1))
        processor.append(round(_processor() - before, 1))
    return {
        "commands": RECIPES[name],
        "seconds": seconds,
        "cpu_seconds": processor,
        "load": round(os.getloadavg()[0], 1),
        "printed": lines,
    }


def planned(name: str) -> dict[str, Any]:
    """What a recipe is planned to take on a GPU."""
    found = json.loads("".join(said(PLANS[name], ROOT / "examples" / name)))
    return {"command": PLANS[name]} | {key: found[key] for key in KEPT}


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(RECIPES))
    parser.add_argument("--out", type=Path, help="write the record to this file")
    given = parser.parse_args()
    record = (given.out and read_json(given.out)) or {"benchmark": "recipes", "recipes": {}}
    record["machine"] = describe_machine()
    for name in given.names:
        record["recipes"][name] = measure(name)
        if name in PLANS:
            record.setdefault("planned", {})[name] = planned(name)
        print(name, json.dumps(record["recipes"][name], indent=1))
        if given.out is not None:
            given.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
