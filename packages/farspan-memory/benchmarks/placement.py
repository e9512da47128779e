"""Static placement: whole training steps, long ones, MiniMalloc's hard instances, cut squares.

    python -m benchmarks.placement \
        --out packages/farspan-memory/benchmarks/results/placement.json

`--long` measures only the long steps again, in a record that is there, and keeps what another
record says of them as what was before (`--before`).

Traces are written by `farspan memory trace` in processes of their own; nothing runs on a GPU. Each
placement is checked before its numbers are kept. Seconds are of the processor, one thread. The
solver's orders were chosen with A to K at hand; the squares were drawn after that, and their
optimum is known: the side.
"""

import argparse
import csv
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

from farspan_memory.compare.mip import place_by_mip
from farspan_memory.exact import (
    Solution,
    place_bilevel,
    place_exactly,
    place_flat,
    segments,
    signature,
)
from farspan_memory.placement import PlacementRequest, sweep_placement
from farspan_memory.replay import rounded
from farspan_memory.trace import Trace, read_trace

SECONDS = 60.0
ALIGNMENT = 512
HARD = Path(__file__).parent / "data" / "minimalloc"
HARD_CAPACITY = 1_048_576
MODELS = (
    *(("GPT-7B-MEMO", "64K"), ("GPT-7B-MEMO", "1M"), ("GPT-13B-MEMO", "256K")),
    *(("GPT-30B-MEMO", "512K"), ("GPT-65B-MEMO", "64K"), ("GPT-65B-MEMO", "1M")),
    *(("Llama-3-8B", "128K"), ("Llama-3-70B", "1M")),
)
KEPT = ("plain", "recompute", "offload")
# Requests of the largest program that HiGHS is given.
MIP_REQUESTS = 40
# Pieces and side: on a coarse grid many pieces are of one size, and greedy choices mislead.
SQUARES = ((81, 256), (161, 1024), (161, 256), (257, 1024), (257, 256))
SQUARE_SEEDS = range(301, 305)
SQUARE_SECONDS = 20.0

LONG = (10_000, 50_000, 200_000)  # requests

Solve = Callable[[], Solution]


def measured(requests: Sequence[PlacementRequest], solve: Solve) -> dict[str, Any]:
    """Height, proof and processor seconds of a placement that passes the checker."""
    begin = time.process_time()
    found = solve()
    seconds = time.process_time() - begin
    sweep_placement(requests, found.placement)
    height, bound = found.placement.height, found.placement.lower_bound
    return {
        "height": height,
        "gap": height / bound - 1 if bound else 0.0,
        "optimal": found.optimal,
        "seconds": round(seconds, 4),
        "nodes": found.nodes,
    }


def write_traces(folder: Path) -> Iterator[tuple[str, Trace]]:
    """A step of each model, with activations kept in three ways."""
    call = [sys.executable, "-c", "from farspan.cli import main; main()", "memory", "trace"]
    for model, context in MODELS:
        for kept in KEPT:
            path = folder / f"{model}-{context}-{kept}.txt"
            options = ["--model", model, "--context", context, "--strategy", kept, "-o", str(path)]
            subprocess.run([*call, *options], check=True, capture_output=True)
            yield f"{model}, {context}, {kept}", read_trace(path)


def step_row(name: str, trace: Trace) -> dict[str, Any]:
    """One step placed flat, exactly and over two levels."""
    requests = rounded(trace.requests(), ALIGNMENT)
    layers = segments(trace)
    two = place_bilevel(requests, layers, SECONDS)
    return {
        "trace": name,
        "requests": len(requests),
        "flat": measured(requests, lambda: place_flat(requests)),
        "exact": measured(requests, lambda: place_exactly(requests, SECONDS)),
        "bilevel": measured(requests, lambda: place_bilevel(requests, layers, SECONDS).solution)
        | {"segments": two.segments, "distinct": two.distinct, "second_level": two.second_level},
    }


def transient_rows(name: str, trace: Trace) -> list[dict[str, Any]]:
    """MEMO's program beside the search on what lives within one pass of a layer."""
    requests = rounded(trace.requests(), ALIGNMENT)
    signs = {signature(requests, s.local): s.name for s in reversed(segments(trace)) if s.local}
    rows = []
    for sign, segment in signs.items():
        if len(sign) > MIP_REQUESTS:
            continue
        local = [PlacementRequest(*request) for request in sign]
        program = measured(local, partial(place_by_mip, local, SECONDS))
        search = measured(local, partial(place_exactly, local, SECONDS))
        row = {"trace": name, "segment": segment, "requests": len(local)}
        rows.append(row | {"mip": program, "exact": search})
    return rows


def hard_row(path: Path) -> dict[str, Any]:
    with path.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    requests = [PlacementRequest(int(r["size"]), int(r["lower"]), int(r["upper"])) for r in rows]
    found = measured(requests, lambda: place_exactly(requests, SECONDS, HARD_CAPACITY))
    flat = measured(requests, lambda: place_flat(requests))
    return {
        "instance": path.name[0],
        "requests": len(requests),
        "solved": found["height"] <= HARD_CAPACITY,
        "greedy_over_capacity": flat["height"] / HARD_CAPACITY,
        **found,
    }


def cut_square(pieces: int, side: int, seed: int) -> list[PlacementRequest]:
    """Four pieces around a fifth, again and again: no straight cut undoes a pinwheel. Fewer pieces
    where none is left to cut."""
    random, found = Random(seed), [(0, side, 0, side)]
    while len(found) < pieces:
        large = [i for i, (b, d, lo, hi) in enumerate(found) if min(d - b, hi - lo) >= 8]
        if not large:
            break
        at = random.choice(large)
        born, dies, low, high = found[at]
        width, height = dies - born, high - low
        b, d = born + random.randint(1, width // 3), dies - random.randint(1, width // 3)
        lo, hi = low + random.randint(1, height // 3), high - random.randint(1, height // 3)
        found[at] = (born, d, low, lo)
        found += [(d, dies, low, hi), (b, dies, hi, high), (born, b, lo, high), (b, d, lo, hi)]
    random.shuffle(found)
    return [PlacementRequest(high - low, born, dies) for born, dies, low, high in found]


def square_row(pieces: int, side: int, seed: int) -> dict[str, Any]:
    requests = cut_square(pieces, side, seed)
    found = measured(requests, partial(place_exactly, requests, SQUARE_SECONDS, side))
    solved = found["height"] == side
    return {"pieces": len(requests), "side": side, "seed": seed, "solved": solved, **found}


def long_step(count: int, seed: int = 7) -> list[PlacementRequest]:
    """One birth a moment: a quarter live to the end, the others for twenty moments on average."""
    random, found = Random(seed), []
    for born in range(count):
        drawn = random.randint(1, 4096) if random.random() < 0.5 else 2 ** random.randint(0, 12)
        lasts = random.random() < 0.25
        dies = count if lasts else born + 1 + int(random.expovariate(0.05))
        found.append(PlacementRequest(ALIGNMENT * drawn, born, min(count, dies)))
    return found


def long_row(count: int) -> dict[str, Any]:
    requests = long_step(count)
    return {"requests": count, **measured(requests, partial(place_flat, requests))}


def where() -> dict[str, Any]:
    """Hardware, versions and date."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "scipy": version("scipy"),
        "date": datetime.now(UTC).date().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--long", action="store_true", help="only the long steps")
    parser.add_argument("--before", type=Path, help="an earlier record of the long steps")
    given = parser.parse_args()
    out = given.out
    if given.long:
        known = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
        known["long"] = {"where": where(), "rows": [long_row(count) for count in LONG]}
        if given.before:
            known["long"]["before"] = json.loads(given.before.read_text())["long"]["rows"]
        out.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        return
    allowed = {"squares": SQUARE_SECONDS, "others": SECONDS}
    found: dict[str, Any] = {"where": where(), "seconds_allowed": allowed}
    found["long"] = {"where": where(), "rows": [long_row(count) for count in LONG]}
    found["hard"] = [hard_row(path) for path in sorted(HARD.glob("*.csv"))]
    found["squares"] = [square_row(*square, seed) for square in SQUARES for seed in SQUARE_SEEDS]
    found["steps"], found["transients"] = [], []
    with tempfile.TemporaryDirectory() as folder:
        for name, trace in write_traces(Path(folder)):
            found["steps"].append(step_row(name, trace))
            if "64K" in name:
                found["transients"] += transient_rows(name, trace)
            print(json.dumps(found["steps"][-1]), flush=True)
    found["peak_process_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
