"""Runs every way on every case."""

import argparse
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from benchmarks.children import Nursery
from benchmarks.peers import page
from benchmarks.peers.bed import BATCHES, COMMON, MODELS, Case
from benchmarks.peers.processes import PRELOADED, rows_of
from benchmarks.peers.ways import WAYS
from benchmarks.tables import Record, save
from farspan.engine.microbench import describe_machine


def record(names: list[str]) -> Iterator[Record]:
    """What is known after each way, for the packages that are there."""
    skipped = {name: WAYS[name].missing() for name in names if WAYS[name].missing()}
    for name, missing in skipped.items():
        print(f"{name}: skipped, for {', '.join(missing)} is not installed", flush=True)
    here = [name for name in names if name not in skipped]
    packages = sorted({package for name in here for package in WAYS[name].packages})
    nursery, rows = Nursery(PRELOADED), []
    for name in here:
        for case in cases(name):
            rows.append(rows_of(nursery, name, case))
            print(page.words(rows[-1]), flush=True)
        yield about() | {
            "packages": {package: version(package) for package in packages},
            "ways": {
                each: {"calls": WAYS[each].calls, "ranks": WAYS[each].ranks}
                for each in here[: here.index(name) + 1]
            },
            "skipped": skipped,
            "rows": rows,
        }


def about() -> Record:
    """The machine, the models and the batches."""
    return {
        "benchmark": "peers",
        "machine": describe_machine(),
        "common": COMMON,
        "models": {name: {"model_type": kind, **more} for name, (kind, more) in MODELS.items()},
        "batches": {name: list(lengths) for name, lengths in BATCHES.items()},
    }


def cases(name: str) -> list[Case]:
    """In float32 every model with one document and with five. Ranks have an odd length to share,
    farspan both at once. In float64, where there is a way, five documents."""
    batches = {model: ["one document", "five documents"] for model in WAYS[name].models}
    if WAYS[name].ranks > 1:
        batches["dense"].append("odd length")
    if name.startswith("farspan"):
        batches = {model: list(BATCHES) for model in batches}
    first, *others = WAYS[name].dtypes
    return [Case(model, batch, first) for model in batches for batch in batches[model]] + [
        Case(model, "five documents", dtype) for dtype in others for model in batches
    ]


def together(found: Record, before: Record) -> Record:
    """A record, with the ways of another that it has not."""
    kept = [row for row in before["rows"] if row["way"] not in found["ways"]]
    ways = before["ways"] | found["ways"]
    return found | {
        "packages": before["packages"] | found["packages"],
        "ways": {name: ways[name] for name in WAYS if name in ways},
        "rows": kept + found["rows"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument(
        "--out", type=Path, help="write the record to this file; it keeps its other ways"
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    given = parser.parse_args()
    before = None
    if given.out is not None and given.out.exists():
        before = json.loads(given.out.read_text(encoding="utf-8"))
    for found in record(given.ways):
        save(given.out, found if before is None else together(found, before))


if __name__ == "__main__":
    main()
