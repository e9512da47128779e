"""The loop with farspan's own engine, in place of the plain step of the other tests."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from farspan.cli.train import default_run
from farspan.engine.loss import trained_token_count
from farspan.engine.runner import Progress
from farspan.engine.step import Step
from farspan.spec import AttentionKernel, Kernels, Schedule, UnsupportedError
from farspan.train.config import DType, ModelConfig, RunConfig, ScheduleConfig
from farspan.train.step_runner import TrainingResult
from farspan.train.trainer import train
from farspan.train.yaml_config import to_mapping
from tests.grids import part_of
from tests.numerics import assert_exact
from tests.train.test_interrupt import same_weights
from tests.train.tiny import (
    MODEL,
    STEPS,
    Quiet,
    count_trained,
    fit,
    metrics,
    replaced,
    tiny_run,
)

SCHEDULE = ScheduleConfig(strategy="grouped", chunk=16, groups=1)


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_engine_trains_as_plain_autograd_does(tmp_path: Path) -> None:
    """Qwen2 computes its norms in fp32, in the engine and outside: hence the limit."""
    model = ModelConfig(config=MODEL, dtype=DType.FLOAT64)
    plain = tiny_run(tmp_path, model=model, folder=str(tmp_path / "plain"))
    fit(plain)
    run = tiny_run(tmp_path, model=model, schedule=SCHEDULE)
    quiet = Quiet()
    train(run, reporter=quiet)
    for ours, theirs in zip(metrics(run), metrics(plain), strict=True):
        for key in {"loss", "grad_norm", "heldout_loss"} & ours.keys():
            assert_exact(numbers(ours[key]), numbers(theirs[key]), limit=1e-6)
    assert quiet.done == sorted(quiet.done)
    assert len(quiet.done) > 10 * STEPS


def test_bfloat16_accumulates_in_float32_and_learns(tmp_path: Path) -> None:
    seen: set[torch.dtype] = set()

    class Watched(Step):
        def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().__call__(*args, **kwargs)
            seen.update(p.grad.dtype for p in self.stages.model.parameters() if p.grad is not None)
            return loss

    run = tiny_run(
        tmp_path, schedule=SCHEDULE, model=ModelConfig(config=MODEL, dtype=DType.BFLOAT16)
    )
    result = train(run, components=replaced(make_step=Watched), reporter=Quiet())
    assert seen == {torch.float32}
    assert result.loss is not None
    assert result.loss < metrics(run)[1]["loss"] - 0.3


def test_trained_tokens_are_counted_as_one_would_by_hand() -> None:
    labels = torch.arange(24).reshape(2, 12)
    marks = torch.tensor([[0] * 5 + [1] + [2] * 6, [0] * 12])
    assert trained_token_count(labels, marks) == count_trained(labels, marks) == 20


@pytest.mark.slow
@pytest.mark.parametrize("cells", part_of([1, 30, 77], 30))
def test_a_step_of_the_engine_is_abandoned_and_made_up_for(tmp_path: Path, cells: int) -> None:
    whole = tiny_run(tmp_path, schedule=SCHEDULE, folder=str(tmp_path / "whole"))
    train(whole, reporter=Quiet())
    run = tiny_run(tmp_path, schedule=SCHEDULE)
    assert interrupted(run, cells).exit_code == 128 + signal.SIGTERM
    assert train(run, reporter=Quiet()).step == STEPS
    same_weights(tmp_path / "run", tmp_path / "whole")


def interrupted(run: RunConfig, cells: int) -> TrainingResult:
    """The run with a signal after so many cells."""
    seen = [0]

    class Counting(Quiet):
        def cells(self, step: int, done: float, progress: Progress, part: str = "") -> None:
            super().cells(step, done, progress, part)
            seen[0] += 1
            if seen[0] == cells:
                os.kill(os.getpid(), signal.SIGTERM)

    return train(run, reporter=Counting())


def test_the_schedule_reaches_the_engine(tmp_path: Path) -> None:
    made: list[Schedule] = []

    def make_step(model: torch.nn.Module, schedule: Schedule) -> Step:
        made.append(schedule)
        return Step(model, schedule)

    run = tiny_run(tmp_path, schedule=replace(SCHEDULE, attention_save_fraction=0.5), steps=3)
    train(run, components=replaced(make_step=make_step), reporter=Quiet())
    assert (made[0].chunk, made[0].groups, made[0].attention_save_fraction) == (16, 1, 0.5)
    about = json.loads((tmp_path / "run" / "about.json").read_text())
    assert about["schedule"] == to_mapping(made[0])
    assert about["memory"]["device_arena"] > 0


def test_named_kernels_reach_the_engine(tmp_path: Path) -> None:
    """Here, without a GPU, they are refused by name."""
    run = replace(tiny_run(tmp_path, schedule=SCHEDULE), kernels=Kernels(AttentionKernel.FLASH))
    with pytest.raises(UnsupportedError, match="attention: flash needs a CUDA GPU"):
        train(run, reporter=Quiet())


@pytest.mark.slow
def test_the_default_run_begins_well(tmp_path: Path) -> None:
    run = default_run()
    run = replace(
        run,
        folder=str(tmp_path / "run"),
        data=replace(run.data, cache=str(tmp_path / "cache")),
        context=512,
        steps=10,
        schedule=ScheduleConfig(strategy="grouped"),
    )
    result = train(run, reporter=Quiet())
    losses = [line["loss"] for line in metrics(run) if "loss" in line]
    assert 5.0 < losses[0] < 6.0
    assert result.loss is not None
    assert result.loss < losses[0] - 0.5
    assert result.heldout_loss is not None
