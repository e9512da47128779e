"""PyTorch's real allocators and farspan's on one GPU: traces, calls of the driver, a fine-tune.

    python -m benchmarks.gpu_allocator --out FILE

- replay: the traces of `benchmarks.allocator`, requests and frees only, through the caching
  allocator, expandable segments, stitching with chunks of 2 and of 32 MiB, and the static plan:
  what is reserved, the least capacity that completes, retries, nanoseconds a request. A trace with
  more alive than 70% of the device has every request divided by the same power of two.
- mapping: create, map, access, unmap and release by the size of a chunk.
- finetune: 12 steps of varying lengths, without a limit, then under 1.02 and 1.10 times what that
  had allocated.

Each contender is a process of its own with a time limit; one that fails is recorded as failed.
`--tiny` runs the same on a CPU, with models in the place of PyTorch's allocators, the native code
over main memory or a driver that is a fake, and nothing to be learned about speed.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.children import ROOT, Clock, words_of
from benchmarks.gpu_allocator import parts
from farspan.engine.microbench import describe_machine
from farspan_memory.errors import UnsupportedError
from farspan_memory.formatting import MIB
from farspan_memory.native import library

SECONDS = 500.0
PRETENDED = 512 * MIB  # of the device in a tiny run: one trace fits, the other is divided
# Those with a share of what is left come before the one that takes the rest.
PARTS: dict[str, Callable[[parts.Place, Clock, parts.Say], Any]] = {
    "mapping": parts.mapping,
    "finetune": parts.finetune,
    "replay": parts.replay,
}


def place_of(tiny: bool, folder: Path) -> parts.Place:
    """Raises UnsupportedError where there is nothing to measure on."""
    library()
    if tiny:
        return parts.Place(True, "cpu", PRETENDED, fake_driver(folder))
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"gpu_allocator: this PyTorch ({torch.__version__}) finds no CUDA device, and all that "
            "is measured is measured on one; --tiny runs the script without"
        )
    return parts.Place(False, "cuda", free_memory())


def free_memory() -> int:
    """Bytes, asked in a process of its own: this one has no part of the device."""
    asked = [sys.executable, "-c", "import torch; print(torch.cuda.mem_get_info()[0])"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise UnsupportedError(f"gpu_allocator: CUDA does not start: {done.stderr.strip()[-300:]}")
    return int(done.stdout)


def fake_driver(folder: Path) -> str | None:
    """The driver of the native tests, as a library; None without a compiler."""
    compiler, made = shutil.which("g++"), folder / "libcuda.so.1"
    if compiler is None:
        return None
    options = ["-std=c++17", "-O1", "-fPIC", "-shared", f"-I{ROOT / 'native/include'}"]
    source = ROOT / "native/tests/fake_cuda.cpp"
    subprocess.run([compiler, *options, str(source), "-o", str(made)], check=True, timeout=120)
    return str(made)


def measured(place: parts.Place, seconds: float, save: Callable[[Any], None]) -> dict[str, Any]:
    """The record; saved after each of its parts."""
    clock = Clock.of(seconds)
    record: dict[str, Any] = {
        "machine": describe_machine() if place.device == "cpu" else None,
        "cuda": torch.version.cuda,
        "device": place.device,
        "tiny": place.tiny,
        "driver": "fake" if place.driver else "real" if place.device == "cuda" else None,
        "free": place.free,
    }
    for name, part in PARTS.items():
        try:
            record[name] = part(place, clock, lambda words: print(words, flush=True))
        except Exception as error:
            record[name] = {"ended": "failed", "words": words_of(error)}
            print(f"{name}: {record[name]['words']}", flush=True)
        save(record)
    # Asked last: it starts CUDA in this process, which takes memory of the device.
    record["machine"] = describe_machine()
    save(record)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_allocator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="result file to write")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, to see the script run")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of all of it, at most")
    arguments = parser.parse_args()

    def save(record: Any) -> None:
        if arguments.out:
            text = json.dumps(record, indent=1) + "\n"
            arguments.out.write_text(text, encoding="utf-8")

    with tempfile.TemporaryDirectory() as folder:
        try:
            place = place_of(arguments.tiny, Path(folder))
        except UnsupportedError as error:
            sys.exit(f"farspan: {error}")
        measured(place, arguments.seconds, save)


if __name__ == "__main__":
    main()
