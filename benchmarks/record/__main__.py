"""Lay what the planner says beside what three papers published.

python -m benchmarks.record --out benchmarks/results/record.json [--page docs/evidence/record.md]
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.record import fpdt, fpdt_cells, memo, memo_cells, oomb, page
from benchmarks.record.cells import Cell, misses


def all_cells() -> list[Cell]:
    """Every cell of every table."""
    return [*oomb.cells(), *fpdt_cells.cells(), *memo_cells.cells()]


def record(cells: list[Cell]) -> dict[str, Any]:
    """The result file: constants, cells, and why some miss."""
    kernel, (machine, link) = oomb.calibrated(), memo.calibrated()
    return {
        "about": "predicted beside published; nothing here was measured",
        "calibration": {
            "h200_attention": kernel.rates["bfloat16"].attention_forward.points[0][1],
            "h200_attention_backward": kernel.rates["bfloat16"].attention_backward.points[0][1],
            "a800_attention": machine.rates["bfloat16"].attention_forward.points[0][1],
            "a800_attention_backward": machine.rates["bfloat16"].attention_backward.points[0][1],
            "a800_link": link,
            "a800_host_bytes": memo.host_limit(),
            "a800_unplanned_share": memo.unplanned_share(),
            "a800_port": machine.network,
            "a800_stop_seconds": memo.stop_seconds(),
            "a100_whole_tensors": fpdt.whole_tensors(),
            "a100_tensor_whole": fpdt.tensor_whole(),
            "a100_copy_seconds_a_byte": fpdt.copy_pace(),
        },
        "cells": [{**asdict(cell), "ratio": cell.ratio, "agrees": cell.agrees} for cell in cells],
        "misses": [asdict(miss) for miss in misses()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.record", description=__doc__)
    parser.add_argument("--out", type=Path, help="result file to write")
    parser.add_argument("--page", type=Path, help="page whose tables are to be written anew")
    arguments = parser.parse_args()
    cells = all_cells()
    if arguments.out:
        text = json.dumps(record(cells), indent=1)
        arguments.out.write_text(text + "\n", encoding="utf-8")
    if arguments.page:
        page.write(arguments.page, cells)
    for name in ("summary", "calibration"):
        print(page.tables(cells)[name], end="\n\n")


if __name__ == "__main__":
    main()
