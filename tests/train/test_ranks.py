"""A run on several ranks: the losses and weights of one process."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from farspan.parallel.places import everything
from farspan.parallel.states import load, read_shapes
from farspan.spec import Refused, Schedule
from farspan.train.checkpoint_ranks import is_of_ranks
from farspan.train.config import (
    AUTO,
    CheckpointConfig,
    DType,
    EvaluationConfig,
    ModelConfig,
    OnNonfinite,
    RunConfig,
    ScheduleConfig,
)
from farspan.train.diagnosis import Diverged
from farspan.train.layout import Auto, Parallel
from farspan.train.loop import train
from tests.numerics import EXACT, relative_error
from tests.ranks import run_ranks
from tests.train.fused import Moment, parts_with
from tests.train.planner import planned_parts
from tests.train.tiny import MODEL, Quiet, tiny_run, write_documents

STEPS = 4
WIDE = MODEL | {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def a_run(root: Path, name: str, **changes: Any) -> RunConfig:
    run = tiny_run(
        root,
        folder=str(root / name),
        model=ModelConfig(config=WIDE, dtype=DType.FLOAT64),
        schedule=ScheduleConfig(strategy="grouped", chunk=16, groups=2),
        steps=STEPS,
        evaluation=EvaluationConfig(every=2, sequences=3),
        checkpoints=CheckpointConfig(every=2, keep=9),
    )
    return replace(run, **changes)


def metrics(run: RunConfig) -> list[dict[str, Any]]:
    lines = (Path(run.folder) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def model_of(run: RunConfig) -> dict[str, torch.Tensor]:
    return load_file(Path(run.folder) / "model" / "model.safetensors")


def states_of(run: RunConfig, step: int = STEPS) -> dict[str, torch.Tensor]:
    """Whole, by whichever kind of run they were written."""
    path = Path(run.folder) / f"checkpoints/step-{step:08d}"
    if not is_of_ranks(path):
        return load_file(path / "optimizer.safetensors")
    forms = {name: form for name, form in read_shapes(path).items() if "optimizer/" in name}
    found = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in forms.items()}
    entries = {name: (tensor, everything(tensor.shape)) for name, tensor in found.items()}
    load(path, entries, unread=("model/", "rng/"))
    return {name.removeprefix("optimizer/"): tensor for name, tensor in found.items()}


def same_run(run: RunConfig, other: RunConfig, limit: float) -> None:
    for ours, theirs in zip(metrics(run), metrics(other), strict=True):
        for key in ("tokens", "trained_tokens", "heldout_tokens", "step"):
            assert ours.get(key) == theirs.get(key), key
        named = {"loss", "grad_norm", "heldout_loss"}
        assert named & ours.keys() == named & theirs.keys()
        for key in named & ours.keys():
            found, wanted = (torch.tensor(one[key], dtype=torch.float64) for one in (ours, theirs))
            assert relative_error(found, wanted) <= limit, (run.folder, ours["step"], key)
    expected = model_of(other)
    for name, tensor in model_of(run).items():
        assert relative_error(tensor, expected[name]) <= limit, name


def fit_all(runs: list[RunConfig]) -> list[list[str]]:
    """On every rank: what it said, run by run."""
    said = []
    for run in runs:
        quiet = Quiet()
        result = train(run, reporter=quiet)
        assert result.step == run.steps
        said.append(quiet.notes)
    return said


def test_two_ranks_are_one_process(tmp_path: Path) -> None:
    """Ulysses, shards, stages; two replicas with half the batch; and what auto makes of it."""
    alone = a_run(tmp_path, "alone", batch=2)
    fit_all([alone])
    runs = [
        a_run(tmp_path, "auto", batch=2, parallel=Auto.AUTO),
        a_run(tmp_path, "shards", batch=2, parallel=Parallel(shards=2)),
        a_run(tmp_path, "stages", batch=2, parallel=Parallel(pipeline=2)),
        a_run(tmp_path, "replicas", batch=1, parallel=Parallel()),
    ]
    said = run_ranks(2, fit_all, runs)
    for run in runs:
        same_run(run, alone, EXACT)
        ours, theirs = states_of(run), states_of(alone)
        assert ours.keys() == theirs.keys()
        assert all(t.any() == theirs[name].any() for name, t in ours.items())
    assert "2 ranks: ulysses 2" in said[0][0][0]
    assert not any(said[1])  # the others are silent


def test_one_rank_runs_the_same_code(tmp_path: Path) -> None:
    alone = a_run(tmp_path, "alone")
    fit_all([alone])
    run = a_run(tmp_path, "launched", parallel=Auto.AUTO)
    run_ranks(1, fit_all, [run])
    same_run(run, alone, EXACT)
    about = json.loads((tmp_path / "launched" / "about.json").read_text())
    assert about["layout"]["ulysses"] == 1


def test_four_ranks_are_one_process(tmp_path: Path) -> None:
    alone = a_run(tmp_path, "alone", batch=2)
    fit_all([alone])
    runs = [
        a_run(tmp_path, "both", batch=1, parallel=Parallel(ulysses=2)),
        a_run(tmp_path, "three", batch=1, parallel=Parallel(pipeline=2, data=2)),
    ]
    run_ranks(4, fit_all, runs)
    for run in runs:
        same_run(run, alone, EXACT)


def test_an_update_of_replicas_is_one_of_micro_batches(tmp_path: Path) -> None:
    """Three held-out sequences on two replicas: one evaluates a sequence without targets."""
    alone = a_run(tmp_path, "alone", batch=1, accumulate=4)
    fit_all([alone])
    run = a_run(tmp_path, "replicas", batch=1, accumulate=2, parallel=Parallel(data=2))
    run_ranks(2, fit_all, [run])
    same_run(run, alone, EXACT)


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    """Two replicas, then one process, then stages. A signal to either of the replicas ends both
    behind the step; one process abandons it."""
    whole = a_run(tmp_path, "whole", batch=2)
    fit_all([whole])
    run = a_run(tmp_path, "moved", batch=1, parallel=Parallel(data=2))
    assert run_ranks(2, interrupted, run, 1, 0) == [1, 1]
    assert run_ranks(2, interrupted, run, 1, 1) == [2, 2]
    with pytest.raises(Refused, match="batch of all replicas was 2, is now 1"):
        train(replace(run, parallel=None), reporter=Quiet())
    alone = replace(run, batch=2, parallel=None)
    assert interrupted(alone, 2, 0) == 3
    run_ranks(2, fit_all, [replace(alone, parallel=Parallel(pipeline=2))])
    same_run(alone, whole, EXACT)


def interrupted(run: RunConfig, step: int, culprit: int) -> int:
    """Where this rank ends when a signal comes to `culprit` within a step, the `step`-th from where
    it goes on; and once more to ranks, as launchers send it."""

    def signalled(moment: Moment) -> None:
        here = (moment.rank, moment.step) == (culprit, step)
        if here and moment.cell in (1, 1 + dist.is_initialized()):
            os.kill(os.getpid(), signal.SIGTERM)

    result = train(run, parts=parts_with(run.accumulate, signalled), reporter=Quiet())
    assert result.exit_code == 128 + signal.SIGTERM
    return result.step


def refused(run: RunConfig, changes: dict[int, dict[str, Any]]) -> str:
    """What a rank hears that was started with changes of its own."""
    number = dist.get_rank()
    try:
        train(replace(run, **changes.get(number, {})), reporter=Quiet())
    except Refused as error:
        return str(error)
    return "was not refused"


def test_ranks_that_want_different_things_are_refused(tmp_path: Path) -> None:
    run = a_run(tmp_path, "run", parallel=Auto.AUTO)
    (tmp_path / "other").mkdir()
    write_documents(tmp_path / "other", 9)
    for changes, text in (
        ({1: {"seed": 3}}, "seed: 0 on rank 0, but 3 on rank 1; every rank"),
        ({1: {"data": replace(run.data, held_out=0.5)}}, "data.held_out: 0.2 on rank 0"),
    ):
        assert all(said.startswith(text) for said in run_ranks(2, refused, run, changes)), text
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_ranks_that_read_different_data_are_refused(tmp_path: Path) -> None:
    run = a_run(tmp_path, "run", parallel=Auto.AUTO)
    said = run_ranks(2, other_data, run)
    assert said[0] == said[1]
    assert said[0].startswith("data: not the same on ranks [0] and ranks [1]")


def other_data(run: RunConfig) -> str:
    """Files with the same names on two machines: here by where relative paths start."""
    number = dist.get_rank()
    where = Path(run.folder).parent / f"machine-{number}"
    write_documents(where / "text", 12 - number)
    os.chdir(where)
    cache = str(where / "cache")
    return refused(replace(run, data=replace(run.data, path="text", cache=cache)), {})


def test_a_bad_loss_is_met_by_all(tmp_path: Path) -> None:
    """Every rank skips the step, and every rank stops at it. The batches of both are named."""
    run = a_run(tmp_path, "run", batch=1, parallel=Parallel(data=2), nonfinite=OnNonfinite.SKIP)
    assert run_ranks(2, diverging, run) == ["skipped 1"] * 2
    stopping = replace(run, folder=str(tmp_path / "stop"), nonfinite=OnNonfinite.STOP)
    said = run_ranks(2, diverging, stopping)
    assert said[0] == said[1]
    assert said[0].startswith("step 2: loss is not finite")
    diagnosis = json.loads((tmp_path / "stop" / "diagnosis.json").read_text())
    assert [line["sequence"] for line in diagnosis["batches"]] == [4, 6, 5, 7]


def diverging(run: RunConfig) -> str:
    """The loss of rank 1's part of step 2 is NaN."""

    def spoil(loss: torch.Tensor, step: int) -> torch.Tensor:
        return loss * float("nan") if step == 2 else loss

    try:
        result = train(run, parts=parts_with(run.accumulate, spoil=spoil), reporter=Quiet())
    except Diverged as error:
        return str(error)
    return f"skipped {result.skipped}"


def test_every_rank_has_the_schedule_of_the_first(tmp_path: Path) -> None:
    """Strategy auto on machines that differ: a schedule of its own would be refused."""
    run = a_run(tmp_path, "run", parallel=Auto.AUTO, schedule=ScheduleConfig(strategy=AUTO))
    run_ranks(2, fit_planned, run)
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["fields"]["chunk"] == 16


def fit_planned(run: RunConfig) -> None:
    parts = planned_parts([Schedule(chunk=16 + dist.get_rank())])
    assert train(run, parts=parts, reporter=Quiet()).step == STEPS
