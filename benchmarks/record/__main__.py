"""Lay what the planner says beside what three papers published.

python -m benchmarks.record --out benchmarks/results/record.json
python -m benchmarks.pages record
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.record import page
from benchmarks.record.cells import Cell, misses
from benchmarks.tables import save


def record(cells: list[Cell]) -> dict[str, Any]:
    """The result file: constants, cells, and why some miss."""
    return {
        "about": "predicted beside published; nothing here was measured",
        "calibration": page.constants(),
        "cells": [{**asdict(cell), "ratio": cell.ratio, "agrees": cell.agrees} for cell in cells],
        "misses": [asdict(miss) for miss in misses()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record", description=__doc__)
    parser.add_argument("--out", type=Path, help="result file to write")
    arguments = parser.parse_args()
    cells = page.all_cells()
    tables = page.tables(cells)
    save(arguments.out, record(cells))
    for name in ("summary", "calibration"):
        print(tables[name], end="\n\n")


if __name__ == "__main__":
    main()
