"""Benchmarks run, at sizes that say nothing about speed."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import curves, memory, step
from farspan.plan.strategies import STRATEGIES

ROOT = Path(__file__).parent.parent


def test_step_trains_the_same_on_both_sides() -> None:
    record = step.measure(tokens=96, repeats=1)
    assert record["ratio"].keys() == {"attention_kept", "attention_recomputed"}
    for loss in record["loss"].values():
        assert loss == pytest.approx(record["loss"]["huggingface"], rel=1e-5)


def test_memory_is_what_the_formula_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LENGTHS", (384, 768))
    row = memory.measure(memory.SCHEDULES["g = 2, phi = 1"])
    assert row["device_bytes_a_token"] == pytest.approx(row["device_formula"], rel=0.02)
    assert row["host_bytes_a_token"] == pytest.approx(row["host_formula"], rel=0.02)


@pytest.mark.parametrize("name", ["autograd", *STRATEGIES])
def test_curves_start_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "STEPS", 2)
    make = curves.plain if name == "autograd" else curves.by_strategy(name)
    losses = torch.tensor(curves.curve(make))
    expected = torch.tensor(curves.curve(curves.plain))
    # Second step as well: the first update went the same way.
    assert (losses - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("script", ["step", "memory", "curves"])
def test_scripts_run_by_path(script: str) -> None:
    command = [sys.executable, f"benchmarks/{script}.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--out" in done.stdout
