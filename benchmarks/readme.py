"""The table of README.md and docs/index.md: the longest context whose step ends in ten minutes,
by model, card and way to train.

    python -m benchmarks.readme --out benchmarks/results/readme.json
    python -m benchmarks.pages readme index

All is planned, by the rates of presets, and leaves the margin that plans leave by default. Weights
and states are where they let the context be longest: on the device, states in main memory, weights
there, too, or states on a drive. A place is not tried where time, and not memory, ends the context
of the place before.
"""

import argparse
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

from benchmarks.fit import cell
from benchmarks.tables import Record, grid, reach, save
from farspan.ask import Request
from farspan.planner.plans import LEAST, longest_contexts
from farspan.planner.request import Question
from farspan.program.strategies import GROUPED
from farspan.spec import VERSION, UnsupportedError

MODELS = ("Qwen3-8B", "GPT-OSS-20B", "Qwen3-32B", "Llama-3.1-70B")
MAX_STEP = 600.0  # seconds
NEAR = 0.9  # of MAX_STEP: time ends such a context, and other places only take more of it
# What a machine is called, and what is asked of it.
MACHINES: dict[str, Record] = {
    "RTX 4090, 128 GiB": {"machine": "rtx4090", "host_memory": "128GiB"},
    "H100, 256 GiB": {"machine": "h100", "host_memory": "256GiB"},
    "H200, 512 GiB": {"machine": "h200", "host_memory": "512GiB"},
    "8 x H100, 2 TB": {"machine": "h100", "gpus": 8},
}
ADAPTERS = {"lora": 16}
FOUR_BITS = {**ADAPTERS, "quantize": "nf4"}
PLACES: tuple[Record, ...] = (
    {},
    {"optimizer": "host"},
    {"optimizer": "host", "weights": "host"},
    {"optimizer": "disk", "weights": "host"},
)
WAYS: dict[str, tuple[Record, ...]] = {
    "full": PLACES,
    "LoRA": (ADAPTERS, {**ADAPTERS, **PLACES[2]}),
    "QLoRA": (FOUR_BITS, {**FOUR_BITS, **PLACES[2]}),
}


def asked(model: str, options: Record, machine: str, context: int = LEAST) -> Question | None:
    """The question; None where farspan has no such way."""
    try:
        places: Record = {"optimizer": "adamw", "weights": "device"} | options
        return Request(model, context, **places, **MACHINES[machine]).question()
    except UnsupportedError:
        return None


def longest() -> list[Record]:
    """A row for each model, way and machine: the longest context, None where none fits."""
    rows = []
    for model, way, machine in product(MODELS, WAYS, MACHINES):
        best: Record | None = None
        for options in WAYS[way]:
            question = asked(model, options, machine)
            found = {} if question is None else _longest(question)
            if found and (best is None or found["tokens"] > best["tokens"]):
                best = {**found, "options": options}
            if best is not None and best["seconds"] >= NEAR * MAX_STEP:
                break
        rows.append({"model": model, "way": way, "machine": machine, "longest": best})
        print(rows[-1], flush=True)
    return rows


def _longest(question: Question) -> Record:
    try:
        found = longest_contexts(question, [GROUPED], max_step=MAX_STEP)
    except UnsupportedError as error:
        print(error, flush=True)
        return {}
    return cell(found[GROUPED]) if GROUPED in found else {}


def tables(record: Record) -> dict[str, str]:
    """Longest contexts, each with the time of its step: the one table of its pages."""
    rows = record["longest"]
    by_place = {(row["model"], row["way"], row["machine"]): row["longest"] for row in rows}
    body = [
        [f"{model}, {way}", *(reach(by_place[model, way, on]) for on in MACHINES)]
        for model, way in product(MODELS, WAYS)
    ]
    return {"": grid(["planned", *MACHINES], body)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__)
    parser.add_argument("--out", type=Path, help="result file to write")
    arguments = parser.parse_args()
    record = {
        "about": "planned on presets' rates; the longest context whose step takes at most max_step",
        "date": datetime.now(UTC).date().isoformat(),
        "farspan": VERSION,
        "max_step": MAX_STEP,
        "machines": MACHINES,
        "longest": longest(),
    }
    save(arguments.out, record)


if __name__ == "__main__":
    main()
