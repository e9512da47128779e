"""How long a sequence may be whose loss is of log-probabilities, and what that loss costs: the data
of docs/how-to/post-training.md, and its tables.

    python -m benchmarks.post_training --out benchmarks/results/post_training.json
    python -m benchmarks.pages post_training

All is planned, by the rates of presets. A longest context is found to within a sixty-fourth of
itself and leaves the margin that plans leave by default.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

from benchmarks.fit import SECONDS, cell
from benchmarks.tables import Record, grid, reach, save
from farspan.ask import Request
from farspan.formatting import read_tokens, write_seconds
from farspan.planner.feasibility import loss_seconds
from farspan.planner.plans import LEAST, best_plan, longest_contexts
from farspan.planner.request import Question
from farspan.program.strategies import GROUPED
from farspan.spec import VERSION, LossKind, Reference

MODEL, CONTEXT = "Qwen3-8B", "128K"

HOST = {"optimizer": "host", "weights": "host"}
# What a machine is called, and what is asked of it.
MACHINES: dict[str, Record] = {
    "RTX 4090, 256 GiB": {"machine": "rtx4090", "host_memory": "256GiB"},
    "H100, 1 TiB": {"machine": "h100", "host_memory": "1024GiB"},
    "8 x H100": {"machine": "h100", "gpus": 8},
}
SEVERAL = "8 x H100"
LORA = {"lora": 16}
WAYS: dict[str, Record] = {"full": {}, "LoRA": LORA, "QLoRA": {**LORA, "quantize": "nf4"}}
IDS = 32  # of a token, of which distillation has log-probabilities
# Losses that are planned alike, and their references.
LOSSES: dict[str, tuple[LossKind, Reference]] = {
    "SFT": (LossKind.SFT, Reference.NONE),
    "ORPO, GRPO": (LossKind.ORPO, Reference.NONE),
    "DPO, IPO, KTO, stored": (LossKind.DPO, Reference.STORED),
    "DPO, IPO, KTO, frozen": (LossKind.DPO, Reference.FROZEN),
    "DPO, IPO, KTO, adapters off": (LossKind.DPO, Reference.ADAPTERS_OFF),
    f"distillation, {IDS} ids": (LossKind.DISTILL, Reference.STORED),
}


def asked(way: str, loss: str, machine: str, context: int | str) -> Question | None:
    """The question; None where there is none: quantised weights are for one device, and adapters
    have no frozen copy beside the weights that they leave alone."""
    kind, reference = LOSSES[loss]
    adapts = "lora" in WAYS[way]
    apart = {Reference.FROZEN: adapts, Reference.ADAPTERS_OFF: not adapts}
    if apart.get(reference, False) or ("quantize" in WAYS[way] and machine == SEVERAL):
        return None
    places = {"optimizer": "adamw", "weights": "device"}
    options = {**places, **WAYS[way], **MACHINES[machine]}
    if way == "full" and machine != SEVERAL:
        options |= HOST
    found = Request(MODEL, context, loss=kind, reference=reference, **options).question()
    many = kind is LossKind.DISTILL
    return replace(found, loss=replace(found.loss, ids=IDS)) if many else found


def longest() -> Iterator[Record]:
    """A row for each way, loss and machine: the longest context, None where none fits."""
    for way, loss, machine in product(WAYS, LOSSES, MACHINES):
        question = asked(way, loss, machine, LEAST)
        if question is None:
            continue
        found = longest_contexts(question, [GROUPED], SECONDS)
        best = cell(found[GROUPED]) if GROUPED in found else None
        yield {"way": way, "loss": loss, "machine": machine, "longest": best}


def steps() -> Iterator[Record]:
    """What a step of CONTEXT takes, and by the same schedule one pass, and one without its
    reference."""
    for way, loss, machine in product(WAYS, LOSSES, MACHINES):
        question = asked(way, loss, machine, CONTEXT)
        if question is None:
            continue
        plan = best_plan(question, [GROUPED])
        one, cut, whole = loss_seconds(plan)
        row = {"way": way, "loss": loss, "machine": machine, "fits": plan.fits}
        yield row | {"seconds": plan.seconds.total, "parts": [one, cut, whole]}


# -- the page ------------------------------------------------------------------------------------


def tables(record: Record) -> dict[str, str]:
    """Longest contexts, each with the time of its step; and what a step of one context takes, with
    how much longer that is than one pass of the same schedule."""
    named = dict.fromkeys((row["way"], row["loss"]) for row in record["steps"])
    longest = {_place(row): row["longest"] for row in record["longest"]}
    steps = {_place(row): row for row in record["steps"]}

    def table(head: str, shown: Callable[[str, str, str], str]) -> str:
        body = [
            [f"{way}: {loss}", *(shown(way, loss, on) for on in MACHINES)] for way, loss in named
        ]
        return grid([head, *MACHINES], body)

    asked = f"{record['model']}, {record['context']} tokens, planned"
    return {
        "longest": table(f"{record['model']}, planned", lambda *at: reach(longest.get(at))),
        "steps": table(asked, lambda *at: _cost(steps.get(at))),
    }


def _place(row: Record) -> tuple[str, str, str]:
    return row["way"], row["loss"], row["machine"]


def _cost(row: Record | None) -> str:
    if row is None or not row["fits"]:
        return "-"
    one, _, whole = row["parts"]
    more = f", +{whole / one - 1:.1%}" if whole > one else ""
    return f"{write_seconds(row['seconds'])}{more}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.post_training", description=__doc__)
    parser.add_argument("--out", type=Path, help="result file to write")
    arguments = parser.parse_args()
    record = {
        "about": "planned on presets' rates; a pair is one sequence, priced as one document",
        "date": datetime.now(UTC).date().isoformat(),
        "farspan": VERSION,
        "model": MODEL,
        "context": CONTEXT,
        "tokens": read_tokens(CONTEXT, "context"),
        "machines": MACHINES,
        "steps": list(steps()),
        "longest": list(longest()),
    }
    save(arguments.out, record)


if __name__ == "__main__":
    main()
