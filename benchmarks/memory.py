"""Bytes a token, measured beside the formula, for the settings that move them.

    python benchmarks/memory.py [--out FILE]

A step is run at several lengths under a meter of live storages. The slope of the peak over the
length is what a token costs; the closed form of the design page says what it should cost.
"""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from farspan import Schedule, Step, Tier
from farspan.engine.memory import PeakMemory
from farspan.engine.microbench import describe_machine
from farspan.program.program import made_bytes
from farspan.spec import ModelSpec

LENGTHS = (512, 1024, 1536)
LAYERS = 6
CHUNK = 128

BASE = Schedule(chunk=CHUNK, kv_block=CHUNK)
SCHEDULES = {
    "g = 1": BASE,
    "g = 2": replace(BASE, groups=2),
    "g = L": replace(BASE, groups=LAYERS),
    "unequal groups 3, 2, 1": replace(BASE, groups=(3, 2, 1)),
    "g = 1, phi = 0.5": replace(BASE, attention_save_fraction=0.5),
    "g = 2, phi = 1": replace(BASE, groups=2, attention_save_fraction=1.0),
    "g = 2, K,V kept on host": replace(BASE, groups=2, kv_kept=True),
    "g = 2, K,V kept on device": replace(BASE, groups=2, kv_kept=True, kv_home=Tier.DEVICE),
    "g = 1, alpha = 0.5": replace(BASE, activation_save_fraction=0.5, attention_save_fraction=0.5),
    "g = L, K,V streamed": replace(BASE, groups=LAYERS, kv=Tier.HOST, layer_checkpoint=True),
    "g = 2, x on device": replace(BASE, groups=2, boundary_inputs=Tier.DEVICE),
}


def make_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1 << 20,
    )
    return Qwen2ForCausalLM(config).train()


def formula(spec: ModelSpec, schedule: Schedule) -> dict[Tier, float]:
    """Bytes a token by the design page: what grows with the sequence, on each tier."""
    layer, sizes = spec.layers[0], schedule.group_sizes(len(spec.layers))
    x = spec.hidden * spec.element_bytes
    kv = layer.kv_elements() * spec.element_bytes
    dkv = layer.kv_elements() * spec.accumulate_bytes()
    out = layer.output_elements() * spec.element_bytes + layer.query_heads * 4
    total = {Tier.DEVICE: 0.0, Tier.HOST: 0.0}
    total[schedule.boundary_inputs] += (len(sizes) - 1) * x
    total[schedule.kv] += max(sizes) * (kv + dkv)
    if schedule.kv_kept:
        # A kept layer's K, V wait until its backward. On the device they are the open ones later.
        home = schedule.kv if schedule.kv is Tier.HOST else schedule.kv_home
        total[home] += (len(spec.layers) - sizes[-1]) * kv
    # The top layer of the last group computes its attention when its backward needs it.
    total[schedule.attention] += schedule.attention_save_fraction * (len(spec.layers) - 1) * out
    kept = len(spec.layers) - (sizes[-1] if sizes[-1] == 1 else 0)
    # Of a cell, some numbers do not grow with its tokens.
    saved = layer.activation_bytes + layer.activation_constant / schedule.chunk
    total[schedule.activations] += schedule.activation_save_fraction * kept * saved
    return total


def measure(schedule: Schedule) -> dict[str, Any]:
    model = make_model()
    step = Step(model, schedule)
    points: list[dict[str, Any]] = []
    for tokens in LENGTHS:
        ids = torch.arange(tokens)[None] % step.model_spec.vocab
        model.zero_grad(set_to_none=True)
        step.release()
        with PeakMemory(torch.device("cpu")) as meter:
            step(ids, ids)
        host = step.arenas[Tier.HOST].nbytes
        made = made_bytes(1, tokens, documents=False)  # whatever the schedule
        planned = step.program(1, tokens).arena_bytes
        points.append(
            {
                "tokens": tokens,
                "peak": meter.peak,
                "host": host,
                "device": meter.peak - host - made,
                "planned": {tier.value: size for tier, size in planned.items()},
            }
        )
    few, many = points[0], points[-1]
    span = many["tokens"] - few["tokens"]
    expected = formula(step.model_spec, schedule)
    return {
        "schedule": asdict(schedule),
        "points": points,
        "device_bytes_a_token": (many["device"] - few["device"]) / span,
        "device_formula": expected[Tier.DEVICE],
        "host_bytes_a_token": (many["host"] - few["host"]) / span,
        "host_formula": expected[Tier.HOST],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the record to this file")
    given = parser.parse_args()
    rows = {name: measure(schedule) for name, schedule in SCHEDULES.items()}
    if given.out is not None:
        record = {"benchmark": "memory", "machine": describe_machine(), "rows": rows}
        given.out.write_text(json.dumps(record, indent=1) + "\n")
    heads = ("device B/token", "formula", "host B/token", "formula")
    print(f"{'schedule':28}" + "".join(f"{head:>16}" for head in heads))
    for name, row in rows.items():
        fields = ("device_bytes_a_token", "device_formula", "host_bytes_a_token", "host_formula")
        print(f"{name:28}" + "".join(f"{row[field]:16.1f}" for field in fields))


if __name__ == "__main__":
    main()
