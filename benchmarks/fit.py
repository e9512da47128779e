"""Which context fits which GPU, by strategy, and what a token costs: data of the longest contexts.

    python -m benchmarks.fit --out benchmarks/results/fit.json

Of each machine one device is used, with its share of the node's main memory, and copies run beside
the computation, as in the engine on CUDA. Rates are those of the presets.

Models are trained in the way that is named with them: in full with AdamW's states on the device, or
by LoRA adapters of rank 16. A longest context is found to within a sixty-fourth of itself, and
leaves the margin that plans leave by default.
"""

import argparse
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.tables import Record, grid, reach, save, short
from farspan.ask import Request, as_run
from farspan.formatting import write_seconds
from farspan.planner.evaluate import evaluate
from farspan.planner.machines import machine
from farspan.planner.plans import LEAST, best_plan, longest_contexts, named_schedule
from farspan.planner.request import Optimizer, Plan, Question, margin_of
from farspan.profile.model import Variant
from farspan.profile.store import find_profiles
from farspan.program.strategies import GROUPED, STRATEGIES
from farspan.spec import MachineSpec, RunSpec, Schedule

MACHINES = ("rtx4090", "l40s", "a100-80g", "h100", "h200", "b200")
SLOPES = ("Qwen2.5-7B", "Llama-3-8B", "GPT-7B-MEMO")
SHORT, LONG = 2**19, 2**20  # tokens between which a token's bytes are counted
SECONDS = 0.5  # for the search at the longest context


@dataclass(frozen=True, slots=True)
class Way:
    """How a model is trained."""

    name: str
    optimizer: Optimizer
    adapter_rank: int


FULL = Way("full", Optimizer.ADAMW, 0)
LORA = Way("LoRA, rank 16", Optimizer.ADAMW, 16)
MODELS = (
    ("Qwen2.5-0.5B", FULL),
    ("Qwen2.5-1.5B", FULL),
    ("Qwen2.5-7B", FULL),
    ("Qwen2.5-7B", LORA),
    ("Llama-3-8B", LORA),
    ("Qwen2.5-32B", LORA),
)


# Models that do not fit one device: its machine with this main memory, in GiB, and the ways.
LARGE = ("Qwen2.5-7B", "Qwen2.5-14B", "Qwen3-32B", "Llama-3-70B")
NODES = (("rtx4090", 256), ("h100", 1024), ("h200", 1536))
BOTH = "QLoRA, weights on host"
ON_HOST: dict[str, dict[str, Any]] = {
    "full": {"optimizer": "host", "weights": "host"},
    "QLoRA": {"lora": 16, "quantize": "nf4"},
    BOTH: {"lora": 16, "quantize": "nf4", "optimizer": "host", "weights": "host"},
}


def one_device(name: str) -> MachineSpec:
    """The machine with one device and its share of main memory."""
    node = machine(name)
    return replace(node, devices=1, host_bytes=node.host_bytes // node.devices)


def ask(model: str, way: Way, on: MachineSpec, tokens: int) -> Question:
    profiles = find_profiles(model)
    question = Question(
        profiles.of(Variant(rank=way.adapter_rank)).spec,
        RunSpec(1, tokens),
        on,
        optimizer=way.optimizer,
        profiles=profiles,
        overlap=True,
        margin=margin_of(None, on),
    )
    return as_run(question, way.adapter_rank)


def longest() -> Iterator[dict[str, Any]]:
    """A row for each model and machine."""
    for (model, way), name in product(MODELS, MACHINES):
        on = one_device(name)
        found = longest_contexts(ask(model, way, on, LEAST), None, SECONDS)
        yield {
            "model": model,
            "machine": name,
            "way": way.name,
            "host_gib": on.host_bytes / 2**30,
            "strategies": {s: cell(found[s]) if s in found else None for s in STRATEGIES},
        }


def on_host() -> Iterator[dict[str, Any]]:
    """The longest contexts of large models on one device: weights on host, in NF4, or both."""
    for model, (way, options), (name, memory) in product(LARGE, ON_HOST.items(), NODES):
        if way == BOTH and model != LARGE[-1]:
            continue  # its four bits fit every device
        places = {"optimizer": "adamw", "weights": "device"} | options
        asked = Request(model, LEAST, name, host_memory=f"{memory}GiB", **places)
        found = longest_contexts(asked.question(), [GROUPED], SECONDS)
        best = cell(found[GROUPED]) if GROUPED in found else None
        yield {"model": model, "way": way, "machine": name, "host_gib": memory, "longest": best}


# Full fine-tuning, all of it in main memory: docs/explanation/comparison.md.
STEPS = (
    ("Qwen2.5-7B", "4K", "rtx4090", 192),
    ("Qwen2.5-7B", "32K", "rtx4090", 192),
    ("Qwen2.5-7B", "128K", "rtx4090", 192),
    ("Qwen3-32B", "256K", "h100", 768),
    ("Llama-3-70B", "128K", "h200", 1536),
)


def steps_on_host() -> Iterator[dict[str, Any]]:
    """What a step of each takes."""
    for model, context, name, memory in STEPS:
        asked = Request(
            model, context, name, host_memory=f"{memory}GiB", optimizer="host", weights="host"
        )
        plan = best_plan(asked.question())
        yield {
            **{"model": model, "context": context, "machine": name, "host_gib": memory},
            **{"fits": plan.fits, "seconds": plan.seconds.total},
            **{"compute": plan.seconds.compute, "update": plan.seconds.optimizer},
        }


def cell(plan: Plan) -> dict[str, Any]:
    """What the page and the figures show of a plan."""
    return {
        "tokens": plan.question.run.tokens,
        "seconds": plan.seconds.total,
        "mfu": plan.mfu,
        "bound": plan.seconds.bound,
        "device_share": plan.device.total / plan.device.limit,
        "host_share": plan.host.total / plan.host.limit,
        "chunk": plan.schedule.chunk,
        "groups": len(plan.schedule.group_sizes(len(plan.question.model.layers))),
        "attention_save_fraction": plan.schedule.attention_save_fraction,
    }


RECOMPUTED = "grouped, O recomputed"


def slopes() -> Iterator[dict[str, Any]]:
    """Bytes that one token more takes on device and on host, whatever the machine can hold."""
    on = replace(one_device("h200"), device_bytes=2**45, host_bytes=2**45)
    for model in SLOPES:
        for name in (*STRATEGIES, RECOMPUTED):
            short, long = (_sizes(ask(model, FULL, on, n), name) for n in (SHORT, LONG))
            device, host = (
                (more - less) / (LONG - SHORT) for less, more in zip(short, long, strict=True)
            )
            yield {"model": model, "strategy": name, "device": device, "host": host}


def _sizes(question: Question, name: str) -> tuple[int, int]:
    plan = evaluate(question, name, _schedule(question, name))
    return plan.device.total, plan.host.total


def _schedule(question: Question, name: str) -> Schedule:
    if name == RECOMPUTED:
        return replace(named_schedule(question, "grouped"), attention_save_fraction=0.0)
    return named_schedule(question, name)


COMMANDS = (
    "--model Qwen2.5-7B --lora 16 --context 1M --machine h100 --host-memory 200GiB",
    "--model Qwen2.5-7B --context 128K --machine rtx4090",
    "--model Qwen2.5-0.5B --machine rtx4090 --max-context",
)


def commands() -> Iterator[dict[str, str]]:
    """What the command line answers."""
    for options in COMMANDS:
        command = [sys.executable, "-m", "farspan", "plan", *options.split()]
        done = subprocess.run(command, capture_output=True, text=True)
        output = "\n".join(map(_wrapped, done.stdout.splitlines()))
        yield {"command": f"farspan plan {options}", "output": output}


def _wrapped(line: str) -> str:
    """As on a terminal of a hundred columns."""
    indent = " " * (len(line) - len(line.lstrip()))
    return "\n".join(textwrap.wrap(line.rstrip(), 100, subsequent_indent=indent))


# -- pages ---------------------------------------------------------------------------------------


def commands_shown(fit: Record) -> dict[str, str]:
    """Every command and what it printed, by its name in the page."""
    return {
        f"command {index}": f"```\n$ {entry['command']}\n{entry['output'].strip()}\n```"
        for index, entry in enumerate(fit["commands"])
    }


def tables(fit: Record) -> dict[str, str]:
    """Tables of one device by their names in the page."""
    return {
        "longest": longest_table(fit),
        "on host": on_host_table(fit),
        "bytes": bytes_table(fit),
    }


def longest_table(fit: Record) -> str:
    """A table for each model and way to train it."""
    parts = []
    for model, way in dict.fromkeys((row["model"], row["way"]) for row in fit["longest"]):
        own = [row for row in fit["longest"] if (row["model"], row["way"]) == (model, way)]
        names = list(own[0]["strategies"])
        rows = [
            [row["machine"], *(_tokens(row["strategies"][name]) for name in names)] for row in own
        ]
        parts.append(f"{model}, {way}:\n\n{grid(['', *names], rows)}")
    return "\n\n".join(parts)


def on_host_table(fit: Record) -> str:
    """Large models on one device, with its main memory."""
    rows = fit["on_host"]
    nodes = list(dict.fromkeys((row["machine"], row["host_gib"]) for row in rows))
    by_place = {(r["model"], r["way"], r["machine"], r["host_gib"]): r["longest"] for r in rows}
    body = [
        [f"{model}, {way}", *(reach(by_place[model, way, *node]) for node in nodes)]
        for model, way in dict.fromkeys((row["model"], row["way"]) for row in rows)
    ]
    return grid(["", *(f"{machine}, {memory} GiB" for machine, memory in nodes)], body)


def steps_table(fit: Record) -> str:
    """Rows of the table of docs/explanation/comparison.md."""
    rows = []
    for row in fit["steps_on_host"]:
        gib = row["host_gib"]
        memory = f"{gib / 1024:g} TiB" if gib > 1024 else f"{gib} GiB"
        card = row["machine"].upper().replace("RTX", "RTX ")
        name = f"{row['model']}, {row['context']} tokens, {card}"
        times = (write_seconds(row[part]) for part in ("seconds", "compute", "update"))
        rows.append(f"| {name} | {memory} | {' | '.join(times)} |")
    return "\n".join(rows)


def _tokens(cell: Record | None) -> str:
    return short(cell["tokens"]) if cell else "-"


def bytes_table(fit: Record) -> str:
    """KB a token on device and on host."""
    rows = fit["bytes_a_token"]["rows"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    by_place = {(row["strategy"], row["model"]): row for row in rows}
    body = []
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        found = (by_place[strategy, model] for model in models)
        body.append([strategy, *(f"{_kilo(c['device'])} + {_kilo(c['host'])}" for c in found)])
    return grid(["KB a token, device + host", *models], body)


def _kilo(size: float) -> str:
    return f"{size / 1e3:,.0f}" if size >= 10 * 1e3 else f"{size / 1e3:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit", description=__doc__)
    parser.add_argument("--out", type=Path, help="result file to write")
    arguments = parser.parse_args()
    started = time.process_time()
    rows = []
    for row in longest():
        rows.append(row)
        reach = {k: v and v["tokens"] // 1024 for k, v in row["strategies"].items()}
        print(row["model"], row["machine"], row["way"], reach, flush=True)
    record = {
        "about": "planned on presets' rates, one device, copies beside the computation",
        "commands": list(commands()),
        "longest": rows,
        "on_host": list(on_host()),
        "steps_on_host": list(steps_on_host()),
        "bytes_a_token": {"between": [SHORT, LONG], "rows": list(slopes())},
    }
    save(arguments.out, record)
    print(f"{time.process_time() - started:.0f} s")


if __name__ == "__main__":
    main()
