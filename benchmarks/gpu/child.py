"""What every child of this benchmark runs.

python -m benchmarks.gpu.child SETTINGS
"""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from benchmarks.children import add_row, settings_of, words_of
from benchmarks.gpu import huggingface, steps
from benchmarks.gpu.device import draw, dtype_of, give_back, make_model, synchronize
from farspan import Schedule, Step, strategy
from farspan.engine.calibrate import Calibration
from farspan.engine.microbench import GLANCE, QUICK, Bench, describe_machine
from farspan.engine.verify import VerificationRun, verify
from farspan.planner.machines import contradictions, to_json
from farspan.program.strategies import STRATEGIES
from farspan.spec import Tier
from farspan.train.config import OptimizerConfig, StatesPlace
from farspan.train.oom import find_shortage
from farspan.train.optimizer import TrainingOptimizer

LOOKS = 2  # of the calibration
CHUNKS = 4  # of a sequence whose gradients are checked
# Heads of 512 / 4 = 128, as the model's: what cuDNN and flash attention are fastest with.
SMALL = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SMALL_TINY = SMALL | {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
UPDATES = 2
RATE = 1e-5
TOLD = ("states", "reason", "layers", "planned_seconds")
# Only of the device it is a finding: another process may have had the rest of main memory.
RAN_OUT = {Tier.DEVICE: "out_of_memory", Tier.HOST: "out_of_main_memory"}


def ceilings(settings: Mapping[str, Any]) -> None:
    """How fast this machine is at what a step is made of, kernels of sparse attention included, as
    `farspan calibrate` measures it."""
    bench = Bench(torch.device(settings["device"]), GLANCE if settings["tiny"] else QUICK)
    calibration = Calibration(bench, (dtype_of(settings),))
    for _ in range(LOOKS):
        calibration.look()
    file = calibration.file()
    wrong = next(contradictions(file.spec), None)
    add_row(settings, {"machine_file": to_json(file), "contradiction": wrong})


def update(settings: Mapping[str, Any]) -> None:
    """The seconds of two updates by AdamW from a short step's gradients, their norm and its limit
    included, the states where `farspan train` has them. They belong to no step's seconds."""
    device, began = settings["device"], time.perf_counter()
    model = make_model(settings, settings["layers"])
    optimizer = TrainingOptimizer(model, OptimizerConfig(states=StatesPlace(settings["states"])))
    step = Step(model, Schedule())
    ids = draw(settings, settings["tokens"])
    synchronize(device)
    add_row(settings, {"ready_seconds": time.perf_counter() - began})
    seconds = []
    for _ in range(UPDATES):
        step(ids, ids)
        synchronize(device)
        began = time.perf_counter()
        optimizer.step(RATE, optimizer.gradient_norm())
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    held = optimizer.held()
    row = {
        "parameters": sum(p.numel() for p in optimizer.parameters.values()),
        "held": {"device": held.device, "host": held.host},
        "seconds": seconds,
    }
    add_row(settings, {name: settings[name] for name in TOLD} | row)


def exact(settings: Mapping[str, Any]) -> None:
    """A row for each strategy and length: are gradients of a small model in bf16 as good as plain
    PyTorch's, as `farspan verify` judges them?"""
    shape = SMALL_TINY if settings["tiny"] else SMALL
    config = {k: v for k, v in settings["config"].items() if k != "layer_types"}
    model = make_model({**settings, "config": config | shape, "dtype": "bfloat16"})
    for tokens in settings["lengths"]:
        for name in STRATEGIES:
            row: dict[str, Any] = {"strategy": name, "tokens": tokens}
            made = strategy(name, shape["num_hidden_layers"], tokens)
            piece = -(-tokens // CHUNKS)  # so that a short sequence has several
            chunk = min(made.chunk, piece) if made.chunk < tokens else made.chunk
            try:
                schedule = replace(made, chunk=chunk, kv_block=piece)
                found = verify(model, schedule, VerificationRun(tokens=tokens))
                row |= {"within": found.passed, "error": found.max_relative_error}
                row |= {"ratio": found.rounding_ratio, "rule": found.rule}
            except Exception as error:
                row |= {"within": False, "words": words_of(error)}
            add_row(settings, row)
            give_back(settings["device"])


WORKS: dict[str, Callable[[Mapping[str, Any]], None]] = {
    "ceilings": ceilings,
    "step": steps.run,
    "huggingface": huggingface.run,
    "exact": exact,
    "update": update,
}


def run(settings: dict[str, Any]) -> None:
    """In a process of its own. What it is measured on is its first row."""
    if settings["device"] == "cpu":
        torch.set_num_threads(1)  # tiny tensors: a second thread waits for the first
    add_row(settings, {"machine": describe_machine(), "cuda": torch.version.cuda})
    try:
        WORKS[settings["work"]](settings)
    except Exception as error:
        shortage = find_shortage(error)  # CUDA's libraries have words of their own for it
        if shortage is None:
            raise
        add_row(settings, {RAN_OUT[shortage.tier]: words_of(error)})
        sys.exit(f"out of memory: {error}")


if __name__ == "__main__":
    run(settings_of(sys.argv))
