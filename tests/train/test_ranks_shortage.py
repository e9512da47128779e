"""A rank that is short of memory before a step: all ranks go on with the same lighter schedule."""

from collections.abc import Container
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from farspan.distributed import failure as faults
from farspan.engine.step import Step
from farspan.engine.tiers import Arena
from farspan.planner.request import Question
from farspan.program.layout import Parallel
from farspan.program.strategies import AUTO
from farspan.spec import Schedule
from farspan.train import trainer as loop
from farspan.train.config import RunConfig, ScheduleConfig
from farspan.train.oom import NoScheduleFits
from tests.numerics import EXACT, relative_error
from tests.ranks import run_ranks
from tests.train.planner import GIB, planned_components
from tests.train.test_sharded_model import SHORT, a_run, lines_of
from tests.train.tiny import Quiet, metrics, replaced

pytestmark = pytest.mark.slow

LARGE = Schedule(chunk=48, groups=3, activation_save_fraction=1.0, attention_save_fraction=1.0)
SMALL = Schedule(chunk=12, groups=1)
PULSE = 0.02


def losses(run: RunConfig) -> list[dict[str, Any]]:
    return [line for line in lines_of(run) if "loss" in line]


def tried(run: RunConfig) -> list[dict[str, Any]]:
    """The schedules that came after those which ran out."""
    return [line["schedule"] for line in metrics(run) if "out_of_memory" in line]


def whole(run: RunConfig) -> RunConfig:
    """The run that has from the start the schedule with which another went on."""
    fields = {
        key: value for key, value in tried(run)[-1].items() if key not in ("sparse", "weights")
    }
    return replace(run, folder=f"{run.folder}-whole", schedule=ScheduleConfig(None, **fields))


class Starving(Step):
    """Rank 1 finds no main memory for steps of the run from its second on: in `times` of them."""

    times = 1
    steps = 0

    def __call__(self, *arguments: Any, **named: Any) -> Tensor:
        Starving.steps += 1
        with pytest.MonkeyPatch.context() as patch:
            if 2 <= Starving.steps < 2 + self.times and dist.get_rank() == 1:
                # Less than none: the arenas are there from the first step.
                patch.setattr("farspan.engine.tiers.available_host_bytes", lambda: -1)
            return super().__call__(*arguments, **named)


class Refusing(Step):
    """Rank 1 is refused the arenas of its second step, whatever was forecast."""

    steps = 0

    def __call__(self, *arguments: Any, **named: Any) -> Tensor:
        if dist.get_rank() == 0:
            return super().__call__(*arguments, **named)
        Refusing.steps += 1
        with pytest.MonkeyPatch.context() as patch:
            if Refusing.steps == 2:
                patch.setattr(Arena, "reserve", refuse)
            return super().__call__(*arguments, **named)


def refuse(*_: object) -> None:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def fit(
    run: RunConfig, short: Container[int], make_step: type[Step] = Step
) -> tuple[list[str], list[Question]]:
    """What a rank says and what the planner is asked, where rank 1 has a byte left on its device
    when it looks for these times, and half a GiB in main memory; rank 0 has no end of either."""
    faults.HEARTBEAT = PULSE
    quiet, asked, looks, last = Quiet(), list[Question](), count(1), dist.get_rank() == 1

    def room(_: object) -> int | None:
        return 1 if last and next(looks) in short else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("farspan.engine.memory.available_device_bytes", room)
        patch.setattr(
            "farspan.train.planning.available_host_bytes", lambda: GIB // 2 if last else 9 * GIB
        )
        parts = replaced(planned_components((LARGE, SMALL), asked=asked), make_step=make_step)
        loop.train(run, components=parts, reporter=quiet)
    return quiet.notes, asked


def go_on(runs: list[tuple[RunConfig, int]]) -> list[tuple[list[str], list[Question]]]:
    """Short once, at a look of this number; and what has the same schedule from the start."""
    found = []
    for run, look in runs:
        found.append(fit(run, {look}))
        fit(whole(run), ())
    return found


@pytest.mark.parametrize(
    "names",
    [("named", "stages"), pytest.param(("planned",), marks=pytest.mark.exhaustive)],
)
def test_all_ranks_go_on_with_a_lighter_schedule(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Short before a step, and by stages, which keep their layers: the losses are those of a run
    that began with that schedule."""
    large = ScheduleConfig("grouped", chunk=48, groups=3)
    staged = ScheduleConfig("grouped", chunk=48, groups=(1, 2))
    shards, stages = Parallel(shards=2), Parallel(pipeline=2)
    cases = {
        "planned": (shards, ScheduleConfig(AUTO), 1),
        "named": (shards, large, 2),
        "stages": (stages, staged, 1),
    }
    runs = [
        (a_run(tmp_path, name, parallel=parallel, schedule=schedule, **SHORT), look)
        for name, (parallel, schedule, look) in cases.items()
        if name in names
    ]
    for (run, _), ours, theirs in zip(runs, *run_ranks(2, go_on, runs), strict=True):
        said, asked = ours
        assert theirs == ([], []), "rank 0 speaks and plans for all"
        assert losses(run) == losses(whole(run)), run.folder
        (lighter,) = tried(run)
        assert run.schedule.groups != (1, 2) or lighter["groups"] == [1, 2]
        (again,) = (note for note in said if note.startswith("out of memory"))
        (first,) = (note for note in said if note.startswith("schedule: "))
        before = first.removeprefix("schedule: ").partition(" (")[0]
        assert f"4: {before} (" not in again, "another one"
        assert "device memory of rank 1: a step" in again
        assert "\nretry 1 of 4 with grouped: chunk" in again
        assert all(q.machine.host_bytes < GIB for q in asked), "what the shortest rank has"


def starve(run: RunConfig, other: RunConfig) -> str:
    """A run that goes on with less in its second step; and what the other says, which has nothing
    left then."""
    fit(run, (), Starving)
    Starving.times, Starving.steps = 99, 0
    with pytest.raises(NoScheduleFits) as error:
        fit(other, (), Starving)
    return str(error.value)


@pytest.mark.exhaustive
def test_a_machine_that_is_too_small_for_a_step_is_found_by_all(tmp_path: Path) -> None:
    """Within a run: the step is taken again by all, or the one before it saved by all."""
    run = a_run(tmp_path, "run", parallel=Parallel(shards=2), accumulate=1)
    whole_run, other = (replace(run, folder=f"{run.folder}-{n}") for n in ("whole", "other"))
    run_ranks(2, fit, whole_run, ())
    ours, theirs = run_ranks(2, starve, run, other)
    assert len(tried(run)) == 1
    for found, wanted in zip(losses(run), losses(whole_run), strict=True):
        assert relative_error(tensor_of(found), tensor_of(wanted)) <= EXACT, found
    assert ours == theirs
    assert ours.startswith("step 2: memory: ran out with\n  (1) grouped")
    assert "Step 1 is saved: the same command resumes from there" in ours
    assert (Path(other.folder) / "checkpoints" / "step-00000001").is_dir()


@pytest.mark.exhaustive
def test_an_arena_that_one_rank_is_refused_is_too_large_for_all(tmp_path: Path) -> None:
    run = a_run(tmp_path, "run", parallel=Parallel(shards=2), **SHORT)
    (said, _), theirs = run_ranks(2, fit, run, (), Refusing)
    assert theirs == ([], [])
    assert len(losses(run)) == 2
    (again,) = (note for note in said if note.startswith("out of memory"))
    assert "host memory of rank 1: an arena of" in again


def tensor_of(line: dict[str, Any]) -> Tensor:
    return torch.tensor([line["loss"], line["grad_norm"]], dtype=torch.float64)
