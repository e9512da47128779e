"""farspan on one GPU beside the best of Hugging Face, in under nine minutes, with what bounds them.

    python -m benchmarks.gpu --out FILE

In this order, each measurement by a process of its own with a time limit: the machine's ceilings;
Qwen2.5-7B of random weights in bf16 at 32K to 256K tokens, by the planner's own choice (`auto`) at
full depth; the best ways to train with transformers in the same run; the gradients of a small model
against fp64; a step taken apart; AdamW's update; the longest context of transformers; the other
strategies, 512K and 1M tokens, on as many layers as the time allows, which each row says. `--only`
measures what it names at full depth, also what is in no list of above: other models, adapters,
log-probabilities, shorter contexts (`python -m benchmarks.gpu.hour --plan` has them). FILE is
written after each of them. What there is no time for is skipped and named; `--resume` goes on with
it in another run, and then measures deeper what it has of few layers.

`--tiny` runs the same on a CPU with a tiny model: nothing is to be learned about speed.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.children import EXPANDABLE, Clock, Nursery, Row, environment
from benchmarks.gpu import show
from benchmarks.gpu.planned import Card
from benchmarks.gpu.power import PowerLog
from benchmarks.gpu.session import CHILD, Session
from benchmarks.gpu.work import Work, full, tiny
from farspan.formatting import read_bytes
from farspan.report.plan import MFU_CONVENTION
from farspan.spec import UnsupportedError

MINUTES = 8.6
ASK = """import json, torch
torch.empty(1, device="cuda")
of = torch.cuda.get_device_properties(0)
print(json.dumps([of.name, of.total_memory, of.major + of.minor / 10]))"""
CONVENTIONS = {
    "seconds": "forward and backward of one step with all gradients, no update; the last of "
    "`runs`, after one of the same length on `warm_layers` layers; the baseline's with "
    "`locked_bytes` of main memory locked for it as arenas are",
    "variance": "the slowest of `runs` over the fastest",
    "gradients": "of farspan in fp32, as `farspan train` has them; of the baseline in bf16",
    "update": "AdamW where `farspan train` would have its states, after a short step; in no step",
    "room": "of the device's bytes, what was planned with; `ran_out_before`: with more it ran out",
    "main_memory": "as the kernel shows it; `given` with --host-memory stands in its place",
    "mfu": MFU_CONVENTION,
    "layers": "measured on so many of `of_layers`; `scaled_to_full_depth` is not measured",
    "bytes": "allocated, reserved: PyTorch's allocator at the fullest moment of the step; outside: "
    "the context and libraries; host: most resident memory of the process",
    "allocator": "expandable_segments for every contender",
    "huggingface": "gradient checkpointing, SDPA with cuDNN before flash; `place`: what layers "
    "keep and where, copies to host beside the computation but those of transformers' own offload; "
    "`layers_by`, `loss_by`: who computes norms, SwiGLU and rope, and the loss",
    "lines": "of a profiled step on few layers",
    "floor_seconds": "products and attention of one forward and one backward at the ceilings",
}


def card_of(is_tiny: bool) -> Card | None:
    """The GPU. Raises UnsupportedError where there is nothing to measure on."""
    if is_tiny:
        return None
    # Asked in a process of its own: this one takes no part of the device.
    asked = [sys.executable, "-c", ASK]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=120, env=environment(""))
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise UnsupportedError(
            f"gpu: this PyTorch ({torch.__version__}) reaches no CUDA device, and all that is "
            f"measured is measured on one ({''.join(last)}); --tiny runs the script without"
        )
    return Card(*json.loads(done.stdout.splitlines()[-1]))


def begun(work: Work, path: Path | None, resume: bool) -> Row:
    """A record to go on with, or a new one. Raises UnsupportedError for one of something else."""
    new = {
        "benchmark": "gpu",
        "tiny": work.tiny,
        "model": work.config,
        "dtype": work.dtype,
        "conventions": CONVENTIONS,
        "runs": [],
        "measurements": [],
    }
    if not (resume and path is not None and path.exists()):
        return new
    try:
        found: Row = json.loads(path.read_text("utf-8"))
        assert isinstance(found, dict)
        assert isinstance(found.get("measurements", []), list)
    except (OSError, ValueError, AssertionError) as error:
        raise UnsupportedError(f"{path} cannot be read as a record: {error}") from error
    if any(found.get(name) != new[name] for name in ("benchmark", "tiny", "model", "dtype")):
        raise UnsupportedError(
            f"{path} is a record of something else than this benchmark measures; give another file"
        )
    return found


def saving(path: Path | None) -> Callable[[Any], None]:
    """Writes a record at once or not at all."""

    def save(record: Any) -> None:
        if path is not None:
            unfinished = path.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            unfinished.replace(path)

    return save


def say(words: str) -> None:
    print(words, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="result file to write")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, to see the script run")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of all of it, at most")
    parser.add_argument("--until", type=float, help="moment of time.time(), in place of --minutes")
    parser.add_argument("--resume", action="store_true", help="measure what FILE lacks")
    parser.add_argument(
        "--host-memory", help="such as 118GiB, where less of main memory is shown than there is"
    )
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="NAME",
        help="measure these alone, in this order, such as ceilings 'auto at 131072'",
    )  # fmt: skip
    parser.add_argument("--traces", type=Path, help="folder for the profile, which Perfetto draws")
    parser.add_argument("--show", type=Path, help="print a result file and measure nothing")
    given = parser.parse_args()
    if given.show is not None:
        print(show.text(json.loads(given.show.read_text("utf-8"))))
        return
    seconds = 60 * given.minutes if given.until is None else given.until - time.time()
    clock = Clock.of(seconds)
    try:
        host = None if given.host_memory is None else read_bytes(given.host_memory, "host_memory")
        card = card_of(given.tiny)
        device = "cpu" if card is None else "cuda"
        work = tiny() if given.tiny else full()
        record = begun(work, given.out, given.resume)
        if given.traces is not None:
            given.traces.mkdir(parents=True, exist_ok=True)
        save = saving(given.out)
        nursery = Nursery(CHILD, EXPANDABLE if device == "cuda" else "")
        session = Session(work, device, clock, record, save, say, given.traces, nursery=nursery)
        session.card, session.host_memory = card, host
        session.only = tuple(given.only)
        session.power = None if card is None else PowerLog()
        if session.power is not None and not session.power.works:
            say("nvidia-smi is not here: no row has clock and power")
        session.run()
        if session.power is not None:
            session.power.close()
    except UnsupportedError as error:
        sys.exit(f"farspan: {error}")
    print(show.text(record))


if __name__ == "__main__":
    main()
