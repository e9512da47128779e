"""What every child of this benchmark runs.

python -m benchmarks.gpu.child SETTINGS
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.children import add_row, settings_of, words_of
from benchmarks.gpu import ceilings, exact, huggingface, split, steps, update
from farspan.engine.microbench import describe_machine
from farspan.spec import Tier
from farspan.train.oom import find_shortage

# Only of the device it is a finding: another process may have had the rest of main memory.
RAN_OUT = {Tier.DEVICE: "out_of_memory", Tier.HOST: "out_of_main_memory"}

WORKS: dict[str, Callable[[Mapping[str, Any]], None]] = {
    "ceilings": ceilings.run,
    "step": steps.run,
    "huggingface": huggingface.run,
    "longest": huggingface.run_longest,
    "split": split.run,
    "exact": exact.run,
    "update": update.run,
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
