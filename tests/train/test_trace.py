"""`train --trace`: the spans of a step as it was measured, which change nothing else."""

import json
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from typer.testing import CliRunner

from farspan import cli
from farspan.engine.tiers import CopyEngine
from farspan.planner.timeline import Span
from farspan.program.dependencies import Lane
from farspan.program.layout import Parallel
from farspan.program.program import Fetch
from farspan.report.plan import ROWS, step_spans
from farspan.spec import UnsupportedError
from farspan.train.config import OptimizerConfig, RunConfig
from farspan.train.record import StepRecorder
from farspan.train.trainer import train
from tests.ranks import run_ranks
from tests.report.test_timeline import planned
from tests.train.test_engine import SCHEDULE
from tests.train.tiny import Quiet, assert_same_weights, metrics, tiny_run


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run of three steps, each of two batches, that nobody draws."""
    run = tiny_run(tmp_path_factory.mktemp("plain"), schedule=SCHEDULE, steps=3)
    train(run, reporter=Quiet())
    return run


def events_of(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def losses(run: RunConfig) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in metrics(run) if "loss" in line]


def test_the_second_step_is_drawn_and_nothing_else_changes(
    tmp_path: Path, plain: RunConfig
) -> None:
    file, quiet = tmp_path / "step.json", Quiet()
    run = replace(plain, folder=str(tmp_path / "run"))
    train(run, reporter=quiet, trace=file)
    assert losses(run) == losses(plain)
    assert_same_weights(run, plain)

    trace = json.loads(file.read_text())
    about, events = trace["otherData"], events_of(trace)
    assert about["about"] == "measured by farspan train"
    assert (about["step"], about["metered"], about["rank"]) == (2, False, 0)
    assert any(note.startswith("trace: step 2 is in ") for note in quiet.notes)
    # One process does one thing after the other: no two spans meet, and all are within the step.
    events.sort(key=lambda event: event["ts"])
    assert all(a["ts"] + a["dur"] <= b["ts"] + 2e-3 for a, b in pairwise(events))
    busy = sum(event["dur"] for event in events) / 1e6
    assert 0.2 * about["seconds"] < busy <= about["seconds"]
    # Names and rows are those of the planned step.
    rows = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"]
    assert rows == list(ROWS.values())
    assert all(tuple(ROWS)[event["tid"]] == event["cat"] for event in events)
    names = [event["name"] for event in events]
    assert {"F 0.0", "B 1.0", "Head 0"} <= set(names)
    assert names.count("B 1.0") == run.accumulate == 2
    assert names[-1] == "optimizer's update"
    assert {"fetch", "evict"} <= {event["cat"] for event in events}


def test_a_trace_that_cannot_be_written_ends_no_run(tmp_path: Path, plain: RunConfig) -> None:
    quiet, run = Quiet(), replace(plain, folder=str(tmp_path / "run"))
    result = train(run, reporter=quiet, trace=tmp_path / "none" / "step.json")
    assert (result.step, result.exit_code) == (3, 0)
    assert any(
        note.startswith("the trace of step 2 was not written: cannot write ")
        for note in quiet.notes
    )


def test_only_a_file_is_replaced(tmp_path: Path) -> None:
    """Who is root would replace a device."""
    for place, why in ((tmp_path, "is a folder"), (Path("/dev/null"), "is not a file")):
        done = CliRunner().invoke(cli.app, ["train", "--trace", str(place)])
        assert isinstance(done.exception, UnsupportedError)
        assert str(done.exception).startswith(f"trace: {place} {why}")


def test_of_a_single_step_it_is_that_one(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, schedule=SCHEDULE, steps=1, optimizer=OptimizerConfig(warmup=0))
    train(run, reporter=Quiet(), trace=tmp_path / "step.json")
    about = json.loads((tmp_path / "step.json").read_text())["otherData"]
    assert (about["step"], about["metered"]) == (1, True)


def test_a_place_that_is_not_there_is_refused_before_the_run(tmp_path: Path) -> None:
    run, nowhere = tmp_path / "run.yaml", tmp_path / "nowhere" / "step.json"
    run.write_text(f"model: {{path: a}}\ndata: {{}}\nfolder: {tmp_path / 'run'}\n")
    done = CliRunner().invoke(cli.app, ("train", str(run), "--trace", str(nowhere)))
    assert done.exit_code != 0
    assert f"trace: {nowhere} cannot be written: no such folder" in str(done.exception)
    assert not (tmp_path / "run").exists()


class FakeEvent:
    """An event of a GPU, which happens a second after the one recorded before it."""

    seconds = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self, _: object) -> None:
        FakeEvent.seconds += 1.0
        self.at = FakeEvent.seconds

    def elapsed_time(self, end: "FakeEvent") -> float:
        return (end.at - self.at) * 1e3


def test_copies_on_streams_have_their_own_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch that is issued beside the computation is drawn when it happens there, and only
    there; one in line when the computation gets to it."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    program = step_spans(planned("fpdt"))[0]
    first, second, *_ = (n for n, i in enumerate(program.instructions) if isinstance(i, Fetch))
    copies = CopyEngine(torch.device("cpu"))
    copies._streams = {Lane.FETCH: cast(torch.cuda.Stream, "a stream")}
    copies.timed = []
    recorder = StepRecorder(torch.device("cuda"), lambda: 0, copies=copies)
    seen = recorder.follow(program)
    began = FakeEvent.seconds
    for index, instruction in enumerate(program.instructions):
        if index == first:
            copies.fetch(torch.zeros(1), torch.ones(1))
        seen(instruction)
    found = {span.index: span for _, span in recorder.spans()}
    # Each instruction takes a second, and so does the copy, which has two events before one mark.
    assert found[first] == Span("fetch", first + 1, first + 2, first)
    assert found[second] == Span("fetch", second + 2, second + 3, second)
    assert began == 1
    assert sum(span.index == first for _, span in recorder.spans()) == 1


def draw(run: RunConfig, file: Path) -> None:
    train(run, reporter=Quiet(), trace=file)


@pytest.mark.exhaustive
def test_several_ranks_have_a_file_each(tmp_path: Path) -> None:
    once = OptimizerConfig(warmup=0)
    run = tiny_run(
        tmp_path, schedule=SCHEDULE, steps=2, parallel=Parallel(shards=2), optimizer=once
    )
    run_ranks(2, draw, run, tmp_path / "step.json")
    for rank, name in enumerate(("step.json", "step.rank1.json")):
        trace = json.loads((tmp_path / name).read_text())
        assert (trace["otherData"]["rank"], trace["otherData"]["step"]) == (rank, 2)
        assert {event["pid"] for event in trace["traceEvents"]} == {rank + 1}
        assert "collective" in {event["cat"] for event in events_of(trace)}
