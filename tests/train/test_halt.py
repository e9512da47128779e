"""A signal within a long step of several ranks: all abandon it behind the same cell and save."""

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farspan.distributed import failure as faults
from farspan.distributed import run_context as launch
from farspan.distributed.failure import CooperativeStop
from farspan.program.builder import build_evaluation, build_program
from farspan.program.layout import Layout, Parallel
from farspan.program.program import Backward, Forward, Head
from farspan.spec import RunSpec, Schedule, UnsupportedError
from farspan.train import trainer as loop
from farspan.train.config import RunConfig
from tests.grids import examples
from tests.program.test_share import MODEL, layouts, ranks_of, schedules
from tests.ranks import run_ranks
from tests.train.fused import Moment, components_with
from tests.train.test_ranks import a_run, same_run
from tests.train.tiny import Quiet, assert_same_weights

SLOW = 0.1  # seconds a cell, once a signal is on its way: five pulses of PULSE
PULSE = 0.02

LAYOUTS = {
    "ulysses": Parallel(ulysses=2),
    "whole": Parallel(shards=2, fsdp=False),
    "ring": Parallel(ring=2),
    "tensor": Parallel(tensor=2),
    "data": Parallel(data=2),
    "pipeline": Parallel(pipeline=2),
}


def run_of(root: Path, name: str, parallel: Parallel) -> RunConfig:
    """Two batches of two sequences an update, whoever has them."""
    batch = 2 // (parallel.data or 1)
    return a_run(root, name, parallel=parallel, batch=batch, steps=3, accumulate=2)


def signalled(run: RunConfig, step: int) -> tuple[int, int, int]:
    """Where a run ends to whose rank 1 a signal comes behind the second cell of a step; the cells
    of that step that this rank had done then, and the last of its first batch."""
    faults.HEARTBEAT = PULSE
    done: list[Moment] = []

    def happen(moment: Moment) -> None:
        if moment.step != step:
            return
        done.append(moment)
        if (moment.rank, moment.cell) == (1, 2):
            os.kill(os.getpid(), signal.SIGTERM)
        if moment.cell >= 2:
            time.sleep(SLOW)

    result = loop.train(run, components=components_with(run.accumulate, happen), reporter=Quiet())
    assert result.exit_code == 128 + signal.SIGTERM
    return result.step, done[-1].cell, done[-1].cells


def abandon(runs: list[RunConfig], step: int) -> list[tuple[int, int, int]]:
    return [signalled(run, step) for run in runs]


def fit(runs: list[RunConfig]) -> list[int]:
    """How many places each of the runs passes."""
    passed = []
    for run in runs:
        halts: list[CooperativeStop] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "CooperativeStop", partial(noted, halts))
            assert loop.train(run, reporter=Quiet()).step == run.steps
        passed.append(halts[0]._passed)
    return passed


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ("ulysses",),
        pytest.param(("pipeline",), marks=pytest.mark.exhaustive),
        pytest.param(("ulysses", "whole", "ring", "tensor", "data"), marks=pytest.mark.exhaustive),
    ],
)
def test_all_ranks_abandon_a_step_behind_one_cell(tmp_path: Path, names: tuple[str, ...]) -> None:
    """And go on to the bits of a run that nothing happened to. Stages of a pipeline, whose cells
    differ, abandon it between its batches."""
    whole = run_of(tmp_path, "undisturbed", LAYOUTS["ulysses"])
    runs = {name: run_of(tmp_path, name, LAYOUTS[name]) for name in names}
    ended = run_ranks(2, abandon, list(runs.values()), 2)
    for name, ours, theirs in zip(runs, *ended, strict=True):
        assert (ours[0], theirs[0]) == (1, 1), name
        assert saved(runs[name]) == ["step-00000001"], name
        for _, cell, cells in (ours, theirs):
            assert cell == cells if name == "pipeline" else 2 <= cell < cells, (name, cell)
        if name != "pipeline":
            assert ours == theirs, name
    passed, others = run_ranks(2, fit, [whole, *runs.values()])
    assert passed == others, "ranks number the same places"
    assert min(passed) > 0
    for run in runs.values():
        same_run(run, whole)
    assert_same_weights(runs["ulysses"], whole)


def noted(halts: list[CooperativeStop], *arguments: Any) -> CooperativeStop:
    halts.append(CooperativeStop(*arguments))
    return halts[-1]


def saved(run: RunConfig) -> list[str]:
    return sorted(path.name for path in (Path(run.folder) / "checkpoints").iterdir())


@settings(max_examples=examples(25))
@given(layouts, schedules, st.integers(1, 40))
def test_ranks_of_a_stage_run_the_same_cells(
    layout: Layout, schedule: Schedule, tokens: int
) -> None:
    """In one order: the n-th of one is the n-th of all, so that they may stop behind it."""
    for build in (build_program, build_evaluation):
        cells: dict[int, set[tuple[object, ...]]] = {}
        for rank in ranks_of(layout):
            try:
                program = build(MODEL, RunSpec(1, tokens), schedule, rank)
            except UnsupportedError:
                continue
            found = tuple(
                (type(i), getattr(i, "layer", None), i.chunk)
                for i in program.instructions
                if isinstance(i, Forward | Backward | Head)
            )
            cells.setdefault(rank.along["pipeline"], set()).add(found)
        assert all(len(kinds) == 1 for kinds in cells.values())
