"""Time a training step beside Hugging Face's own path, in one run.

    python benchmarks/step.py [--json] [--out FILE] [--tokens N] [--repeats R]

Both train the same Qwen2-shaped model with the same weights on the same tokens. The baseline is
what a Hugging Face user has: SDPA attention, gradient checkpointing, the model's own loss. The two
take turns, so that a machine that slows down slows both; the ratio is of the fastest of each.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from farspan import Schedule, Step, strategy
from farspan.engine.microbench import describe_machine

MODEL: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1 << 20,
}


def make_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**MODEL)).train()


def baseline(ids: Tensor) -> Callable[[], float]:
    """A step of the Hugging Face path."""
    model = make_model()
    model.set_attn_implementation("sdpa")
    # transformers is renaming this; both names take the same settings.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})

    def step() -> float:
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return float(loss.detach())

    return step


def farspan_step(ids: Tensor, schedule: Schedule) -> Callable[[], float]:
    model = make_model()
    run = Step(model, schedule)

    def step() -> float:
        model.zero_grad(set_to_none=True)
        return float(run(ids, ids))

    return step


def schedules(tokens: int) -> dict[str, Schedule]:
    """farspan with attention kept and not."""
    chunk = min(4096, tokens)
    grouped = replace(strategy("grouped", MODEL["num_hidden_layers"], tokens), chunk=chunk)
    return {
        "attention_save_fraction": grouped,
        "attention_recomputed": replace(grouped, attention_save_fraction=0.0),
    }


def measure(tokens: int, repeats: int) -> dict[str, Any]:
    ids = torch.randint(0, MODEL["vocab_size"], (1, tokens), generator=torch.manual_seed(1))
    plans = schedules(tokens)
    steps = {"huggingface": baseline(ids)}
    steps |= {name: farspan_step(ids, plan) for name, plan in plans.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses = {}
    for _ in range(repeats):
        for name, step in steps.items():
            start = time.perf_counter()
            losses[name] = step()
            seconds[name].append(time.perf_counter() - start)
    best = {name: min(times) for name, times in seconds.items()}
    return {
        "benchmark": "step",
        "machine": describe_machine(),
        "model": MODEL,
        "dtype": "float32",
        "tokens": tokens,
        "baseline": "transformers, SDPA, gradient checkpointing",
        "schedules": {name: asdict(plan) for name, plan in plans.items()},
        "seconds": seconds,
        "loss": losses,
        "ratio": {name: best[name] / best["huggingface"] for name in plans},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print the whole record")
    parser.add_argument("--out", type=Path, help="write the record to this file")
    given = parser.parse_args()
    record = measure(given.tokens, given.repeats)
    text = json.dumps(record, indent=1)
    if given.out is not None:
        given.out.write_text(text + "\n")
    if given.json:
        print(text)
        return
    for name, times in record["seconds"].items():
        ratio = record["ratio"].get(name, 1.0)
        print(f"{name:22} {min(times):8.2f} s   {ratio:5.2f} of huggingface")


if __name__ == "__main__":
    main()
