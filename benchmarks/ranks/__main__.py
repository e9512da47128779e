"""Per-rank memory, processor seconds and bytes of each parallel layout, on a CPU over gloo.

    python -m benchmarks.ranks --out FILE [--tiny] [--page] [--counts]

Ranks share the machine's processors, so seconds are a process's own, not the wall's.
"""

import argparse
import json
import os
import time
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

from benchmarks.ranks import page
from benchmarks.ranks.measure import ALONE, FULL, MODEL, TINY, Size, schedule_of
from benchmarks.ranks.processes import counted, measured
from farspan.engine.microbench import describe_machine


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the record to this file")
    parser.add_argument("--tiny", action="store_true", help="short sequences, to see it run")
    parser.add_argument("--page", action="store_true", help="and its tables into their page")
    parser.add_argument("--counts", action="store_true", help="count work only, into that file")
    given = parser.parse_args()
    if given.counts and given.out is None:
        parser.error("--counts needs --out, a record that is there")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    set_forkserver_preload(["torch", "transformers", "benchmarks.ranks.processes"])
    size = TINY if given.tiny else FULL
    record = json.loads(given.out.read_text("utf-8")) if given.counts else measure(size)
    record["counted"] = {
        "date": describe_machine()["date"],
        "chunk": size.counted_chunk,
        "rows": [row for ranks in size.ranks for row in counted(size, ranks)],
    }
    if given.out is not None:
        given.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    if given.page:
        page.write(record)


def measure(size: Size) -> dict[str, Any]:
    """The record, but for what is counted."""
    began = time.monotonic()
    rows = [row for ranks in size.ranks for row in measured(size, ranks)]
    return {
        "benchmark": "ranks",
        "machine": describe_machine() | {"threads": 1, "processors": os.cpu_count()},
        "dtype": "float32",
        "backend": "gloo",
        "model": MODEL,
        "chunk": size.chunk,
        "schedule": repr(schedule_of(ALONE, 1, size.chunk)),
        "runs": {str(tokens): runs for tokens, runs in size.lengths.items()},
        "wall_seconds": round(time.monotonic() - began),
        "rows": rows,
    }


if __name__ == "__main__":
    main()
