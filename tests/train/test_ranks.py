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

from farspan.program.layout import Auto, Parallel
from farspan.spec import UnsupportedError
from farspan.train.config import (
    CheckpointConfig,
    DType,
    EvaluationConfig,
    ModelConfig,
    OnNonfinite,
    OptimizerConfig,
    ReportTo,
    RunConfig,
    ScheduleConfig,
)
from farspan.train.trainer import Diverged, train
from tests.numerics import EXACT, relative_error
from tests.ranks import run_ranks
from tests.train.fused import Moment, components_with
from tests.train.tiny import MODEL, Quiet, metrics, tiny_run, weights, write_documents

pytestmark = pytest.mark.slow

STEPS = 4
WIDE = MODEL | {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def a_run(root: Path, name: str, **changes: Any) -> RunConfig:
    run = tiny_run(
        root,
        folder=str(root / name),
        model=ModelConfig(config=WIDE, dtype=DType.FLOAT64),
        schedule=ScheduleConfig(strategy="grouped", chunk=24, groups=1),
        steps=STEPS,
        optimizer=OptimizerConfig(lr=1e-2, warmup=1),
        evaluation=EvaluationConfig(every=2, sequences=3),
        checkpoints=CheckpointConfig(every=2, keep=9),
    )
    return replace(run, **changes)


def same_run(run: RunConfig, other: RunConfig) -> None:
    for ours, theirs in zip(metrics(run), metrics(other), strict=True):
        for key in ("tokens", "trained_tokens", "heldout_tokens", "step"):
            assert ours.get(key) == theirs.get(key), key
        named = {"loss", "grad_norm", "heldout_loss"}
        assert named & ours.keys() == named & theirs.keys()
        for key in named & ours.keys():
            found, wanted = (torch.tensor(one[key], dtype=torch.float64) for one in (ours, theirs))
            assert relative_error(found, wanted) <= EXACT, (run.folder, ours["step"], key)
    expected = weights(other)
    for name, tensor in weights(run).items():
        assert relative_error(tensor, expected[name]) <= EXACT, name


def fit_all(runs: list[RunConfig]) -> None:
    for run in runs:
        assert train(run, reporter=Quiet()).step == run.steps


def test_one_rank_runs_the_same_code(tmp_path: Path) -> None:
    alone = a_run(tmp_path, "alone", steps=2)
    fit_all([alone])
    run = a_run(tmp_path, "launched", parallel=Auto.AUTO, steps=2)
    run_ranks(1, fit_all, [run])
    same_run(run, alone)
    about = json.loads((tmp_path / "launched" / "about.json").read_text())
    assert about["layout"]["ulysses"] == 1


def test_an_update_of_replicas_is_one_of_micro_batches(tmp_path: Path) -> None:
    """Three held-out sequences on two replicas: one evaluates a sequence without targets."""
    alone = a_run(tmp_path, "alone", steps=2, batch=1, accumulate=4)
    fit_all([alone])
    run = a_run(tmp_path, "replicas", steps=2, batch=1, accumulate=2, parallel=Parallel(data=2))
    run_ranks(2, fit_all, [replace(run, report_to=ReportTo.TENSORBOARD)])
    same_run(run, alone)
    assert len(list((tmp_path / "replicas" / "tensorboard").iterdir())) == 1  # of rank 0


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    """Two replicas, then one process, then stages. A signal to either of the replicas at the end of
    a step ends both behind it; one process abandons it."""
    whole = a_run(tmp_path, "whole", batch=2, accumulate=1)
    fit_all([whole])
    run = a_run(tmp_path, "moved", batch=1, accumulate=1, parallel=Parallel(data=2))
    assert run_ranks(2, interrupted, run, 1, 0, signal.SIGHUP) == [1, 1]
    assert run_ranks(2, interrupted, run, 1, 1) == [2, 2]
    with pytest.raises(UnsupportedError, match="batch of all replicas was 2, is now 1"):
        train(replace(run, parallel=None), reporter=Quiet())
    alone = replace(run, batch=2, parallel=None)
    assert interrupted(alone, 2, 0) == 3
    run_ranks(2, fit_all, [replace(alone, parallel=Parallel(pipeline=2))])
    same_run(alone, whole)


def interrupted(
    run: RunConfig, step: int, culprit: int, signum: signal.Signals = signal.SIGTERM
) -> int:
    """Where this rank ends when a signal comes to `culprit` at the end of a step, the `step`-th
    from where it goes on; and once more to ranks, as launchers send it."""
    if signum == signal.SIGHUP:
        signal.signal(signum, signal.SIG_DFL)  # the tests themselves may run under nohup

    def signalled(moment: Moment) -> None:
        if (moment.rank, moment.step, moment.last) == (culprit, step, True):
            for _ in range(1 + dist.is_initialized()):
                os.kill(os.getpid(), signum)

    result = train(run, components=components_with(run.accumulate, signalled), reporter=Quiet())
    assert result.exit_code == 128 + signum
    return result.step


def refused(run: RunConfig, changes: dict[int, dict[str, Any]]) -> str:
    """What a rank hears that was started with changes of its own."""
    with pytest.raises(UnsupportedError) as error:
        train(replace(run, **changes.get(dist.get_rank(), {})), reporter=Quiet())
    return str(error.value)


def test_ranks_that_want_different_things_are_refused(tmp_path: Path) -> None:
    run = a_run(tmp_path, "run", parallel=Auto.AUTO)
    for changes, text in (
        ({1: {"seed": 3}}, "seed: 0 on rank 0, but 3 on rank 1; give every rank"),
        ({1: {"data": replace(run.data, held_out=0.5)}}, "data.held_out: 0.2 on rank 0"),
    ):
        assert all(said.startswith(text) for said in run_ranks(2, refused, run, changes)), text
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_ranks_that_read_different_data_are_refused(tmp_path: Path) -> None:
    run = a_run(tmp_path, "run", parallel=Auto.AUTO)
    said = run_ranks(2, other_data, run)
    assert said[0] == said[1]
    assert said[0].startswith("data: ")
    assert " on rank 0, " in said[0]


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
    run = a_run(tmp_path, "stop", steps=3, batch=1, parallel=Parallel(data=2))
    skipping = replace(run, folder=str(tmp_path / "skip"), nonfinite=OnNonfinite.SKIP)
    ours, theirs = run_ranks(2, diverging, [run, skipping])
    assert ours == theirs
    assert ours[0].startswith("step 2: loss is not finite")
    assert ours[1] == "skipped 1"
    diagnosis = json.loads((tmp_path / "stop" / "diagnosis.json").read_text())
    assert [line["sequence"] for line in diagnosis["batches"]] == [4, 6, 5, 7]


def diverging(runs: list[RunConfig]) -> list[str]:
    """How each ends. The loss of rank 1's part of step 2 is NaN."""

    def spoil(loss: torch.Tensor, step: int) -> torch.Tensor:
        return loss * float("nan") if step == 2 else loss

    ends = []
    for run in runs:
        parts = components_with(run.accumulate, spoil=spoil)
        try:
            ends.append(f"skipped {train(run, components=parts, reporter=Quiet()).skipped}")
        except Diverged as error:
            ends.append(str(error))
    return ends
