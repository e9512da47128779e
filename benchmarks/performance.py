"""The tables of docs/evidence/performance.md: measured on an H200 and an H100, and planned for one.

    python -m benchmarks.performance [FOLDER/gpu.json]

Measured tables are read from the records of `benchmarks.gpu.hour`; one that is given takes the
place of its card's. What is planned is computed from the machine's preset, by the planner that
`benchmarks.gpu.hour` uses.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.children import Clock, Row
from benchmarks.gpu.hour import saving
from benchmarks.gpu.planned import Ceilings, Planner, floor
from benchmarks.gpu.session import Session, is_done, is_headline
from benchmarks.gpu.work import AUTO, STREAMED, Item, Place, full, quarter
from benchmarks.tables import DOCS, RESULTS, grid, write
from farspan.formatting import write_tokens
from farspan.planner.evaluate import evaluate
from farspan.planner.machines import from_json, machine, preset_of_gpu
from farspan.planner.request import Plan
from farspan.spec import Curve, MachineSpec, Schedule, Tier

PAGE = DOCS / "evidence" / "performance.md"
RECORD, H100 = RESULTS / "gpu_h200.json", RESULTS / "gpu_h100.json"
# What the calls of the record's `sustained` limit.
LIMITED = {
    "matmul": "product input",
    "weights": "product weight",
    "attention_forward": "attention 16384 x 16384 whole forward",
    "attention_backward": "attention 16384 x 16384 whole backward",
    "causal_forward": "attention 32768 x 32768 causal forward",
    "causal_backward": "attention 32768 x 32768 causal backward",
}
# OOMB, Table 2: 4K chunks, checkpoints and offload, one H200, batch 1, the best of three runs.
PUBLISHED = {131072: 260.4, 262144: 985.8}
GIB = 2**30
HOST_BYTES = 118 * GIB  # what a machine of 128 GiB has free
# Large products in bf16 measured with PyTorch on an H200; cuDNN 9.19 there, heads of 128, 32K
# tokens, causal (NVIDIA/cudnn-frontend, benchmark/sdpa_benchmark_training/results).
CEILINGS = Ceilings(linear=790e12, forward=690e12, backward=575e12)


def planner() -> Planner:
    """One H200 of the preset in a machine of 128 GiB."""
    return Planner(full(), replace(machine("h200"), host_bytes=HOST_BYTES))


def tables() -> dict[str, str]:
    """Every generated table by its name in the page."""
    made, work = planner(), full()
    lengths = (*work.lengths, *work.longer)
    plans = {
        (name, tokens): made.plan(Item("step", tokens, name))
        for tokens in lengths
        for name in (AUTO, *work.strategies)
    }
    return records() | {
        "quarter": _quarter(),
        "planned": _planned(made, plans, lengths),
        "strategies": _strategies(plans, lengths, work.strategies),
    }


def records() -> dict[str, str]:
    """The tables of what was measured."""
    h200, h100 = (json.loads(path.read_text(encoding="utf-8")) for path in (RECORD, H100))
    of_h100 = {f"{name} h100": table for name, table in measured(h100).items()}
    return measured(h200) | of_h100


def measured(record: Row) -> dict[str, str]:
    """Tables of a record: steps beside their plans, and beside Hugging Face's."""
    timed = (row for row in record["measurements"] if is_headline(row) and row["seconds"])
    steps = sorted(timed, key=lambda row: int(row["tokens"]))
    rows = []
    for row in steps:
        planned, last = row["planned"], row["runs"][-1]
        published = (
            PUBLISHED.get(row["tokens"]) if record["machine"]["gpu"] == "NVIDIA H200" else None
        )
        kind = ", weights on host" if row["strategy"] == STREAMED else ""
        rows.append(
            [
                write_tokens(row["tokens"]) + kind,
                f"{row['seconds']:.2f}",
                f"{row['tokens_a_second']:,.0f}",
                f"{row['mfu']:.1%}",
                f"{planned_seconds(record, row):.2f}",
                f"{last['allocated'] / GIB:.1f}",
                f"{planned['device_bytes'] / GIB:.1f}",
                f"{published / row['seconds']:.1f}" if published and not kind else "",
            ]
        )
    head = ["tokens", "step, s", "tokens/s", "MFU", "planned, s", "device, GiB", "planned, GiB"]
    head.append("times OOMB's speed")
    if not any(row[-1] for row in rows):
        head, rows = head[:-1], [row[:-1] for row in rows]
    return {"measured": grid(head, rows, "--:"), "beside": _beside(record["measurements"])}


def _beside(rows: Sequence[Row]) -> str:
    """farspan's step beside those of transformers, of the lengths that it was measured at."""
    places = (Place.DEVICE, Place.KEPT)
    found = {row["name"]: row["seconds"] for row in rows if row.get("seconds") is not None}
    lines = []
    for tokens in full().lengths:
        own = found.get(f"{AUTO} at {tokens}")
        theirs = [found.get(f"huggingface at {tokens}, {place}") for place in places]
        if own is None or theirs[0] is None:
            continue
        pairs = ((f"{other:.2f}", f"{own / other:.2f}") if other else ("", "") for other in theirs)
        cells = (cell for pair in pairs for cell in pair)
        lines.append([write_tokens(tokens), f"{own:.2f}", *cells])
    head = ["tokens", "farspan, s", "checkpointing, s", "ratio", "attention's outputs kept, s"]
    return grid([*head, "ratio"], lines, "--:")


def _quarter() -> str:
    """What a quarter of an hour measures, on both cards: measured, and planned before or now."""
    columns = [_column(json.loads(path.read_text("utf-8"))) for path in (H100, RECORD)]
    body = []
    for item in quarter(full()):
        words = re.sub(r"\d{4,}", lambda found: write_tokens(int(found[0])), item.name)
        body.append([words, *(cell for column in columns for cell in column[item.name])])
    heads = (f"{card}: {what}, s" for card in ("H100", "H200") for what in ("measured", "planned"))
    return grid(["", *heads], body, "--:")


def _column(record: Row) -> dict[str, tuple[str, str]]:
    """Measured and planned seconds of each measurement; "" where there are none."""
    rows = {row["name"]: row for row in record["measurements"] if is_done(row)}
    host = record["runs"][-1]["main_memory"]["available"]
    session = Session(
        full(), "cuda", Clock.of(1e6), record, lambda _: None, lambda _: None, host_memory=host
    )
    session.plan_with(items := list(quarter(full())))
    found = {}
    for item in items:
        row = rows.get(item.name, {})
        measured = f"{row['seconds']:.2f}" if row.get("seconds") else ""
        planner = session.planner_of(item)
        if item.work == "update":
            measured = " ".join(f"{one['seconds'][-1]:.2f}" for one in row.get("rows", ()) if
                                "parameters" in one)  # fmt: skip
            seconds: float | None = planner.update().seconds
        elif "planned" in row:
            seconds = row["planned"]["seconds"]
        else:
            seconds = planner.plan(item).seconds.total
        found[item.name] = measured, "" if seconds is None else f"{seconds:.2f}"
    return found


def under_load(record: Row) -> MachineSpec:
    """The machine of a record, no call faster than it is after half a second of work."""
    ceilings = next(row for row in record["measurements"] if row["work"] == "ceilings")
    spec = from_json(ceilings["rows"][0]["machine_file"], "ceilings").spec
    rates = {row["call"]: row["under_load"] for row in record["sustained"]["rows"]}
    now = spec.rates["bfloat16"]
    curves: dict[str, Any] = {}
    for name, call in LIMITED.items():
        points = getattr(now, name).points
        curves[name] = Curve(tuple((size, min(rate, rates[call])) for size, rate in points))
    return replace(spec, rates=spec.rates | {"bfloat16": replace(now, **curves)})


def planned_seconds(record: Row, row: Row) -> float:
    """The plan of before the step, where calls were timed under load; else that of `replanned`."""
    if "sustained" not in record:
        return float(row["planned"]["seconds"])
    return replanned(record, row).seconds.total


def replanned(record: Row, row: Row) -> Plan:
    """What is planned for the schedule that was measured, at the rates under load."""
    fields = dict(row["planned"]["schedule"])
    tiers = fields.pop("tiers")
    weights = Tier.HOST if row["strategy"] == STREAMED else Tier.DEVICE
    schedule = Schedule(**fields | tiers | {"weights": weights})
    host = record["runs"][0]["main_memory"]["available"]
    made = Planner(full(), replace(under_load(record), host_bytes=host))
    question = replace(made.question(row["tokens"], row["layers"]), weights=weights)
    return evaluate(question, row["strategy"], schedule)


def _planned(made: Planner, plans: dict[tuple[str, int], Plan], lengths: Sequence[int]) -> str:
    rows = []
    for tokens in lengths:
        plan = plans[AUTO, tokens]
        question = made.question(tokens, full().layers)
        least = floor(question, CEILINGS)
        published = PUBLISHED.get(tokens)
        rows.append(
            [
                write_tokens(tokens),
                f"{least:.1f}",
                f"{plan.seconds.total:.1f}",
                f"{plan.seconds.total / least:.2f}",
                f"{plan.mfu:.1%}",
                f"{plan.device.total / GIB:.0f}",
                f"{plan.host.total / GIB:.0f}",
                "beside" if plan.question.overlap else "in line",
                f"{published:.1f}" if published else "",
            ]
        )
    head = ["tokens", "floor, s", "planned, s", "planned / floor", "MFU", "device, GiB"]
    return grid([*head, "host, GiB", "copies", "OOMB published, s"], rows, "--:")


def _strategies(
    plans: dict[tuple[str, int], Plan], lengths: Sequence[int], names: Sequence[str]
) -> str:
    def cell(plan: Plan) -> str:
        return f"{plan.seconds.total:.1f}" if plan.fits else "does not fit"

    rows = [
        [write_tokens(tokens), *(cell(plans[name, tokens]) for name in (AUTO, *names))]
        for tokens in lengths
    ]
    return grid(["tokens", AUTO, *names], rows, "--:")


def adopt(path: Path) -> Path:
    """Has a record take the place of its card's, if its tables can be made.

    Raises ValueError for a record of another card or model, of a tiny run, or without a measurement
    that the card's has.
    """
    record = json.loads(path.read_text(encoding="utf-8"))
    names = {"h200": RECORD, "h100": H100}
    card = preset_of_gpu(record.get("machine", {}).get("gpu") or "")
    if card not in names or record.get("tiny"):
        raise ValueError(f"{path} is no record of an H100 or an H200; the page has those two")
    before = json.loads(names[card].read_text(encoding="utf-8"))
    if before["model"] != record["model"]:
        raise ValueError(f"{path} is of another model than {names[card].name}")
    done = {row["name"] for row in record["measurements"] if is_done(row)}
    lost = sorted({row["name"] for row in before["measurements"]} - done)
    if lost:
        raise ValueError(
            f"{path} lacks {', '.join(lost)}, which {names[card].name} has; begin a run with "
            f"--record {names[card].relative_to(RESULTS.parent.parent)}"
        )
    measured(record)
    saving(names[card])(before | record)
    return names[card]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.performance", description=__doc__)
    parser.add_argument("record", type=Path, nargs="?", help="gpu.json of a run to take in")
    given = parser.parse_args()
    if given.record is not None:
        try:
            print(f"wrote {adopt(given.record)}")
        except ValueError as error:
            sys.exit(f"performance: {error}")
    write(PAGE, tables())


if __name__ == "__main__":
    main()
