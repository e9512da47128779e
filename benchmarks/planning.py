"""What an answer of the planner costs: seconds of the process, gap and memory, for every preset.

    python -m benchmarks.planning --out FILE

`--missing` asks only what the record in FILE lacks. `--before OTHER` keeps beside each row what an
earlier record says of its case: `before`, the seconds and the gap.

The hardest questions known, the longest contexts of one model, and every preset at two contexts.
Each is asked in a process of its own, whose caches are empty, and takes what that process computed
after its imports.
"""

import argparse
import json
import multiprocessing
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.tables import save
from farspan.ask import Request
from farspan.formatting import read_sparse
from farspan.lazy import load
from farspan.planner.plans import best_plan, longest_contexts
from farspan.planner.request import Plan
from farspan.profile.catalog import presets

LIMIT = 10.0  # seconds that an answer may take
SWEEP = ("128K", "1M")


@dataclass(frozen=True, slots=True)
class Case:
    """One question of the command line; no context stands for --max-context."""

    model: str
    context: str | None
    machine: str
    gpus: int = 1
    host_memory: str | None = None
    sparse: str | None = None


HARD = (
    Case("Qwen2.5-7B", "1M", "h200", host_memory="512GiB"),
    Case("Qwen2.5-0.5B", "128K", "rtx4090"),
    Case("Llama-3-70B", "16M", "h100", 64),
    Case("Llama-3-70B", "16M", "h200", 8),
    Case("Qwen2.5-32B", "256K", "a100-80g"),
    Case("GPT-OSS-20B", "1M", "h200"),
    Case("GPT-65B-MEMO", "1M", "a800", 8),
    Case("Qwen2.5-7B", None, "h200"),
    Case("Llama-3-70B", "128K", "h200", 64),  # half of the step is network
    # Each beside the dense question, which it may take twice as long as.
    *(
        Case("Qwen2.5-7B", context, "h100", sparse=sparse)
        for context in ("128K", "256K", "512K")
        for sparse in (None, "on")
    ),
)


def cases() -> list[Case]:
    """The hard ones, then every preset."""
    sweep = [Case(preset.name, context, "h200") for preset in presets() for context in SWEEP]
    return [*HARD, *sweep]


def measure(case: Case) -> dict[str, Any]:
    """The answer of one case and what it cost this process."""
    before = time.process_time()
    request = Request(
        case.model,
        case.context or 1,
        case.machine,
        gpus=case.gpus,
        host_memory=case.host_memory,
        sparse=None if case.sparse is None else read_sparse(case.sparse),
    )
    question = request.question()
    if case.context is None:
        plans = longest_contexts(question)
        best = max(plans.values(), key=lambda plan: plan.question.run.tokens)
    else:
        best = best_plan(question)
    return {
        "case": asdict(case),
        "process_seconds": time.process_time() - before,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        **answer(best),
    }


def answer(plan: Plan) -> dict[str, Any]:
    """What the planner said, in short."""
    return {
        "fits": plan.fits,
        "gap": plan.gap,
        "strategy": plan.strategy,
        "tokens": plan.question.run.tokens,
        "step_seconds": plan.seconds.total,
        "mfu": plan.mfu,
        "remedy": plan.remedy,
        "schedule": asdict(plan.schedule),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the record to this file")
    parser.add_argument("--hard", action="store_true", help="only the hardest questions")
    parser.add_argument("--missing", action="store_true", help="only what the record lacks")
    parser.add_argument("--before", type=Path, help="an earlier record")
    given = parser.parse_args()
    asked = HARD if given.hard else cases()
    rows = known_rows(given.out) if given.missing else []
    known = [Case(**row["case"]) for row in rows]
    asked = [case for case in asked if case not in known]
    print(f"{'question':44}{'process s':>10}{'MiB':>6}{'gap':>8}  answer")
    # Forked, before anything large is imported: a child's peak begins at its parent's.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for row in pool.imap(measure, asked):
            rows.append(row)
            print(line(row), flush=True)
    for row in known_rows(given.before):
        for own in rows:
            if Case(**own["case"]) == Case(**row["case"]):
                own["before"] = {name: row[name] for name in ("process_seconds", "gap")}
    record = {
        "benchmark": "planning",
        "machine": load("farspan.engine.microbench", "describe_machine")(),
        "clock": "seconds that one process computed, imports left out",
        "limit": LIMIT,
        "slowest": max(row["process_seconds"] for row in rows),
        "rows": rows,
    }
    save(given.out, record)


def known_rows(record: Path | None) -> list[dict[str, Any]]:
    """Rows of a record; none without one."""
    if record is None or not record.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(record.read_text(encoding="utf-8"))["rows"]
    return rows


def line(row: dict[str, Any]) -> str:
    """A row for a person."""
    case = Case(**row["case"])
    asked = f"{case.model} {case.context or 'longest'}, {case.gpus} x {case.machine}"
    asked += f", sparse {case.sparse}" if case.sparse else ""
    found = f"{row['strategy']}, {row['step_seconds']:.4g} s, MFU {row['mfu']:.1%}"
    found = found if row["fits"] else f"does not fit; {row['remedy']}"
    found += f", {row['tokens']} tokens" if case.context is None else ""
    took = f"{row['process_seconds']:10.2f}{row['peak_mib']:6.0f}"
    return f"{asked:44}{took}{row['gap']:8.3f}  {found}"


if __name__ == "__main__":
    main()
