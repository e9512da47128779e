"""Per-rank memory and bytes sent of each parallel layout, on a CPU over gloo.

    python -m benchmarks.ranks --out FILE [--tiny]

`python -m benchmarks.pages ranks` puts the tables into docs/evidence/several-gpus.md.
"""

import argparse
import os
from multiprocessing import set_forkserver_preload
from pathlib import Path

from benchmarks.ranks.measure import ALONE, FULL, MODEL, TINY, measured, schedule_of
from benchmarks.tables import save
from farspan.engine.microbench import describe_machine


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the record to this file")
    parser.add_argument("--tiny", action="store_true", help="short sequences, to see it run")
    given = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    set_forkserver_preload(["torch", "transformers", "benchmarks.ranks.measure"])
    size = TINY if given.tiny else FULL
    record = {
        "benchmark": "ranks",
        "machine": describe_machine() | {"threads": 1, "processors": os.cpu_count()},
        "dtype": "float32",
        "backend": "gloo",
        "model": MODEL,
        "chunk": size.chunk,
        "schedule": repr(schedule_of(ALONE, 1, size.chunk)),
        "rows": [row for ranks in size.ranks for row in measured(size, ranks)],
    }
    save(given.out, record)


if __name__ == "__main__":
    main()
