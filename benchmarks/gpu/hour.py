"""Everything that only a GPU can tell, in an hour or less on a bare machine.

    python -m benchmarks.gpu.hour --out FOLDER [--minutes 9.5]

Part after part, each with a time limit and a log: probes, the tests that need a GPU, `verify`,
training with each allocator, calibration, the benchmark of steps and that of allocators. FOLDER has
their records. The same command again goes on with what is left, so an hour may be cut into pieces.
`--tiny` runs the same on a CPU.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.children import ROOT, environment

MINUTES = 60.0
LEAST_SECONDS = 10.0  # a part that has less is left to the next call
END_SECONDS = 8.0  # of the time left, that no part has
SHOWN = 6  # last lines of a log
ALLOCATORS = ("default", "stitch", "replay")
TINY_TESTS = ("tests/attention/test_backends.py",)
MARK = "mark.gpu"
RUN_FILE = """\
model:
  dtype: bfloat16
  config:
    {{model_type: qwen2, vocab_size: 264, hidden_size: 512, intermediate_size: 1024,
     num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2,
     max_position_embeddings: 8192, tie_word_embeddings: true, eos_token_id: 256}}
data: {{source: stdlib, held_out: 0.05, tokenizer: bytes}}
folder: {folder}
context: {context}
steps: {steps}
device: {device}
{allocator}
schedule: {{strategy: grouped, chunk: {chunk}, kv: host}}
optimizer: {{lr: 1.0e-3, warmup: 1}}
kernels: {{deterministic: true}}
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A command, and the seconds that it may take."""

    name: str
    seconds: float
    command: tuple[str, ...]  # after the interpreter
    again: bool = False  # begun anew by each call: it resumes by itself


def parts(out: Path, tiny: bool, host_memory: str | None) -> list[Part]:
    """In the order in which they tell most. Writes the run files of those that train."""
    small, device = ("--tiny",) * tiny, "cpu" if tiny else "cuda"
    allocators = ALLOCATORS[:1] if tiny else ALLOCATORS
    files = {name: str(write_run(out, name, tiny, device)) for name in allocators}
    cut = ("--context", "64", "--chunk", "16") if tiny else ("--context", "2048", "--chunk", "512")
    verify = ("-m", "farspan", "verify", files["default"], *cut, "--groups", "2", "--dtype")
    quick = ("--quick",) if tiny else ()
    calibrated = ("--device", device, "--output", str(out / "machine.json"), *quick)
    memory = () if host_memory is None else ("--host-memory", host_memory)
    # By name: to collect all tests takes longer than these take.
    tests = TINY_TESTS if tiny else tuple(tests_of_a_gpu())
    many = () if tiny else ("-n", "8")
    return [
        Part(
            "probe", 150, ("-m", "benchmarks.gpu.probe", "--out", str(out / "probe.json"), *small)
        ),
        Part("tests", 180, ("-m", "pytest", "-q", "-m", "gpu", "-W", "default", *many, *tests)),
        Part("verify-float64", 60, (*verify, "float64")),
        Part("verify-bfloat16", 60, (*verify, "bfloat16")),
        *(
            Part(f"train-{name}", 60, ("-m", "farspan", "train", file))
            for name, file in files.items()
        ),
        Part("calibrate", 120, ("-m", "farspan", "calibrate", *calibrated)),
        Part(
            "steps",
            520,
            ("-m", "benchmarks.gpu", "--out", str(out / "gpu.json"), "--resume", *memory, *small),
            again=True,
        ),
        Part(
            "allocators",
            500,
            ("-m", "benchmarks.gpu_allocator", "--out", str(out / "allocator.json"), *small),
        ),
    ]


def tests_of_a_gpu() -> list[str]:
    """Files with tests that need one."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(f.relative_to(ROOT)) for f in files if MARK in f.read_text(encoding="utf-8")]


def write_run(out: Path, name: str, tiny: bool, device: str) -> Path:
    """A run file that trains a small model for a few steps with this allocator, by kernels that
    give the same bits each time: runs are compared."""
    path = out / f"{name}.yaml"
    sizes = {"context": 128, "chunk": 32, "steps": 2} if tiny else {}
    fields: dict[str, Any] = {"context": 8192, "chunk": 2048, "steps": 6} | sizes
    allocator = "" if tiny else f"allocator: {name}"
    folder = (out / "runs" / name).resolve()
    words = RUN_FILE.format(folder=folder, device=device, allocator=allocator, **fields)
    path.write_text(words, encoding="utf-8")
    return path


def run_part(part: Part, seconds: float, log: Path) -> dict[str, Any]:
    """How a part ended, and the last lines that it said."""
    limit = min(part.seconds, seconds)
    command = [sys.executable, *part.command]
    if part.name == "steps":
        command += ["--minutes", f"{(limit - END_SECONDS) / 60:.2f}"]
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment("") | {"PYTHONUNBUFFERED": "1"},
                stdout=output, stderr=subprocess.STDOUT, timeout=limit, check=False,
            )  # fmt: skip
            ended = "completed" if done.returncode == 0 else f"exit status {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = "timed out"
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN:]
    return {"ended": ended, "seconds": round(time.monotonic() - began, 1), "said": said}


def left_over(made: dict[str, Any], part: Part) -> bool:
    """Whether a part is still to be run: what failed is not, as it would fail again."""
    return part.again or made.get(part.name, {}).get("ended") in (None, "timed out")


def same_losses(out: Path) -> str:
    """Of runs with different allocators, whose losses have the same bits; "" where none ran."""
    losses: dict[str, list[float]] = {}
    for name in ALLOCATORS:
        path = out / "runs" / name / "metrics.jsonl"
        if path.exists():
            rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
            losses[name] = [row["loss"] for row in rows if "loss" in row]
    if len(losses) < 2:
        return ""
    first = losses.pop("default", None)
    said = (f"{name}: {'yes' if losses[name] == first else 'NO'}" for name in losses)
    return f"the losses of PyTorch's allocator? {', '.join(said)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.hour",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of this call, at most")
    parser.add_argument("--host-memory", help="such as 104GiB, for the benchmark of steps")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, to see the script run")
    given = parser.parse_args()
    if not given.tiny and not torch.cuda.is_available():
        sys.exit(
            "farspan: gpu: this PyTorch reaches no CUDA device; --tiny runs the script without"
        )
    end = time.monotonic() + 60 * given.minutes
    logs = given.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    record = given.out / "hour.json"
    made = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    for part in parts(given.out, given.tiny, given.host_memory):
        if not left_over(made, part):
            continue
        left = end - time.monotonic() - END_SECONDS
        if left < LEAST_SECONDS:
            print(f"{part.name}: left to the next call", flush=True)
            continue
        found = run_part(part, left, logs / f"{part.name}.log")
        made[part.name] = found
        record.write_text(json.dumps(made, indent=1) + os.linesep, encoding="utf-8")
        print(f"{part.name}: {found['ended']} in {found['seconds']} s", flush=True)
        print(*(f"    {line[:200]}" for line in found["said"]), sep="\n", flush=True)
    if words := same_losses(given.out):
        print(words)


if __name__ == "__main__":
    main()
