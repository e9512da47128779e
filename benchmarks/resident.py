"""What a process holds on a CPU beside what is planned for it, for five runs of a 135M model.

    python -m benchmarks.resident [--model FOLDER] [--only NAME] [--out FILE]

Two steps of each run, in a process of its own: with everything on the device, in groups of layers,
with weights in main memory, with adapters, and with adapters beside weights of four bits. Without a
folder the model has the shapes of SmolLM2-135M and random weights. The peak is the process's own,
less what it had before its weights: its libraries and its data.
"""

import argparse
import json
import os
import pydoc_data.topics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.children import Row, add_row, run_child, settings_of
from benchmarks.tables import save
from farspan.data.config import DataConfig
from farspan.engine.microbench import describe_machine
from farspan.hf.load import load_model
from farspan.host import MIB
from farspan.spec import Quantization, Tier
from farspan.train.config import (
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
)
from farspan.train.trainer import train

SHAPES = {
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "tie_word_embeddings": True,
}
AUTO, GROUPED = ScheduleConfig("auto"), ScheduleConfig("grouped", chunk=512, groups=5)
LORA = LoraConfig(rank=8)
# Tokens, schedule, and what is not as it is without saying so.
RUNS: dict[str, tuple[int, ScheduleConfig, dict[str, Any]]] = {
    "auto": (1024, AUTO, {}),
    "grouped": (2048, GROUPED, {}),
    "weights in main memory": (2048, replace(GROUPED, weights=Tier.HOST), {}),
    "LoRA": (1024, AUTO, {"lora": LORA}),
    "LoRA on NF4": (1024, AUTO, {"lora": LORA, "quantize": Quantization.NF4}),
}
AS_COMMANDS = {"THP_MEM_ALLOC_ENABLE": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # of `farspan`
MOST_SECONDS = 1800.0  # of a run
COLUMNS = "planned_bytes", "live_bytes", "resident_bytes"


def run_of(name: str, model: str, folder: Path) -> RunConfig:
    """One of the five."""
    context, schedule, fields = RUNS[name]
    text = folder / "text.txt"
    topics: dict[str, str] = pydoc_data.topics.topics
    text.write_text("\n".join(topics.values()), "utf-8")
    return RunConfig(
        model=ModelConfig(path=model, **fields),
        data=DataConfig(path=str(text), tokenizer="bytes", cache=str(folder / "cache")),
        folder=str(folder / "run"),
        steps=2,
        context=context,
        schedule=schedule,
        optimizer=OptimizerConfig(lr=1e-5, warmup=0),
    )


def measure(settings: dict[str, Any]) -> None:
    """In a child: trains, and reads what the run wrote down."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run = run_of(settings["name"], settings["model"], Path(folder))
        train(run)
        text = (Path(run.folder) / "metrics.jsonl").read_text("utf-8")
    first, second = (json.loads(line) for line in text.splitlines())
    planned, resident = (second[f"memory_{of}_bytes"] for of in ("planned", "resident"))
    beyond = first["memory_measured_bytes"] - first["memory_predicted_bytes"]
    row = {"name": settings["name"], "planned_bytes": planned, "live_bytes": planned + beyond}
    add_row(settings, row | {"resident_bytes": resident, "off": resident / planned - 1})


def describe(row: Row) -> str:
    """A line of the table."""
    sizes = "".join(f"{row[column] / MIB:12,.0f}" for column in COLUMNS)
    return f"{row['name']:24}{sizes}{row['off']:+10.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder in place of random weights")
    parser.add_argument("--only", choices=list(RUNS), action="append", help="of the runs")
    parser.add_argument("--out", type=Path, help="write the record to this file")
    given = parser.parse_args()
    rows: list[Row] = []
    os.environ |= AS_COMMANDS
    print(f"{'MiB':24}{'planned':>12}{'live':>12}{'resident':>12}{'off':>10}")
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or folder
        if given.model is None:
            load_model(config=SHAPES, dtype=torch.float32).save_pretrained(folder)
        for name in given.only or RUNS:
            settings = {"name": name, "model": str(Path(model).resolve())}
            found = run_child("benchmarks.resident", settings, MOST_SECONDS)
            if found.ended != "completed":
                raise SystemExit(f"{name}: {found.ended}: {found.words}")
            rows += found.rows
            print(describe(found.rows[0]), flush=True)
    machine = describe_machine() | {"threads": 1}
    save(given.out, {"benchmark": "resident", "machine": machine, "rows": rows})


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].endswith("settings.json"):
        measure(settings_of(sys.argv))
    else:
        main()
