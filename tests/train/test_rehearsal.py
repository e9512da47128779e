"""What a person sees before the first step, and what a signal does there."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from farspan.engine.memory import estimate_memory
from farspan.engine.runner import Progress
from farspan.engine.step import Step
from farspan.spec import Kernels, Schedule, Tier
from farspan.train import step_runner
from farspan.train.config import DType, LoraConfig, ModelConfig, OptimizerConfig, ScheduleConfig
from farspan.train.trainer import train
from tests.train.test_interrupt import same_weights
from tests.train.tiny import MODEL, STEPS, Quiet, memory_of, replaced, tiny_run
from tests.zoo import make_model

SCHEDULE = ScheduleConfig(strategy="grouped", chunk=16, groups=1)


@pytest.fixture
def _unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """No profile knows the model: a dry run tells what its cells hold."""
    monkeypatch.setattr(step_runner, "cells_of", lambda *_: None)


class Heard(Quiet):
    """Also keeps the order in which things are said, and may send a signal at a rehearsed cell."""

    def __init__(self, signal_at: int | None = None) -> None:
        super().__init__()
        self.order: list[str] = []
        self.cells_rehearsed = 0
        self.signal_at = signal_at

    def note(self, text: str) -> None:
        super().note(text)
        self.order += text.splitlines()

    def rehearsing(self, done: float, progress: Progress) -> None:
        assert 0 < done <= 1
        assert progress.cells_done <= progress.cells
        self.order.append("rehearsed")
        self.cells_rehearsed += 1
        if self.cells_rehearsed == self.signal_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def begin(self, step: int) -> None:
        self.order.append(f"step {step}")


def place(order: list[str], start: str) -> int:
    return next(index for index, line in enumerate(order) if line.startswith(start))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of the compiler's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not:UserWarning")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulate": 1},
        {"schedule": ScheduleConfig(weights=Tier.HOST)},
        {"schedule": ScheduleConfig(strategy="auto")},
        {"model": ModelConfig(config=MODEL, lora=LoraConfig(rank=2))},
        {"model": ModelConfig(config=MODEL, dtype=DType.BFLOAT16)},
        {"kernels": Kernels(compile=True), "steps": 1, "optimizer": OptimizerConfig(warmup=0)},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_where_a_profile_knows_the_model_no_step_is_rehearsed(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forecast is the plan's, to the byte what a dry run finds; the first step measures it."""
    run = tiny_run(tmp_path, **{"schedule": SCHEDULE, "steps": 3} | changes)
    heard = Heard()
    train(run, reporter=heard)
    assert heard.cells_rehearsed == 0
    assert not any(line.startswith("dry run") for line in heard.order)
    predicted, measured = memory_of(Path(run.folder))
    assert predicted == pytest.approx(measured, rel=0.01)
    monkeypatch.setattr(step_runner, "cells_of", lambda *_: None)
    train(replace(run, folder=str(tmp_path / "rehearsed")), reporter=heard)
    assert heard.cells_rehearsed
    assert memory_of(tmp_path / "rehearsed")[0] == pytest.approx(predicted, rel=0.01)


@pytest.mark.usefixtures("_unknown")
def test_the_opening_lines_come_before_the_rehearsal_and_the_memory_before_step_one(
    tmp_path: Path,
) -> None:
    heard = Heard()
    train(tiny_run(tmp_path, schedule=SCHEDULE, steps=3), reporter=heard, notes=["first of all"])
    beginnings = [
        "first of all",
        str(tmp_path / "run"),
        "data: ",
        "schedule: grouped: chunk 16; groups of 1 layer each; "
        "boundary inputs on host; K, V on device; "
        "attention 100% on host; activations not kept",
        "dry run",
        "rehearsed",
        "expected memory: device ",
        "step 1",
    ]
    places = [place(heard.order, beginning) for beginning in beginnings]
    assert places == sorted(places)
    (line,) = (line for line in heard.order if line.startswith("expected memory"))
    about = json.loads((tmp_path / "run" / "about.json").read_text())
    memory = about["memory"]
    device = memory["device"] + memory["optimizer"]
    assert line.startswith(f"expected memory: device {device / 2**20:.1f} MiB (weights ")
    assert line.endswith(f"; host {memory['host_arena'] / 2**20:.1f} MiB")


@pytest.mark.usefixtures("_unknown")
@pytest.mark.parametrize("cell", [1, 5])
def test_a_signal_ends_a_rehearsal_and_the_run_goes_on_later(tmp_path: Path, cell: int) -> None:
    whole = tiny_run(tmp_path, schedule=SCHEDULE, folder=str(tmp_path / "whole"))
    train(whole, reporter=Quiet())
    run, heard = tiny_run(tmp_path, schedule=SCHEDULE), Heard(cell)
    result = train(run, reporter=heard)
    assert (result.step, result.signum) == (0, signal.SIGTERM)
    assert heard.cells_rehearsed == cell
    assert train(run, reporter=Quiet()).step == STEPS
    same_weights(tmp_path / "whole", tmp_path / "run")


def test_a_finished_run_is_not_rehearsed(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, schedule=SCHEDULE)
    train(run, reporter=Quiet())
    about = (tmp_path / "run" / "about.json").read_bytes()

    def no_step(*_: object) -> Any:
        pytest.fail("a finished run needs no engine")

    heard = Heard()
    result = train(run, components=replaced(make_step=no_step), reporter=heard)
    assert result.step == STEPS
    assert heard.cells_rehearsed == 0
    assert not any(line.startswith(("schedule", "dry run")) for line in heard.order)
    assert (tmp_path / "run" / "about.json").read_bytes() == about


def test_a_forecast_can_be_watched_and_abandoned() -> None:
    model = make_model("qwen2")
    step = Step(model, Schedule(chunk=64, kv_block=64))
    seen: list[Progress] = []
    watched = estimate_memory(step, 1, 100, seen.append)
    assert watched == estimate_memory(step, 1, 100)
    assert seen[-1].cells_done == seen[-1].cells == len(seen)

    class Enough(Exception):
        pass

    def stop(_: Progress) -> None:
        raise Enough

    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(Enough):
        estimate_memory(step, 1, 100, stop)
    assert step.progress is None
    assert all(bool((p.grad == 1).all()) for p in model.parameters() if p.grad is not None)
    assert sum(step.arena_bytes().values()) == 0
