"""`host_memory`: what a run may take of main memory, by the plan and by the guard before a step;
and `margin`: what its plan leaves."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from farspan.distributed.context import ParallelContext
from farspan.distributed.run_context import DistributedContext
from farspan.engine.memory import estimate_memory, least_transient, refuse_too_large
from farspan.engine.step import Step
from farspan.engine.tiers import refuse_beyond_together
from farspan.host import GIB, TooLarge
from farspan.planner.machines import machine
from farspan.planner.request import SHARE, Margin, Question
from farspan.program.layout import Layout
from farspan.spec import Schedule, UnsupportedError
from farspan.train.config import OptimizerConfig, RunConfig, ScheduleConfig, StatesPlace, load_run
from farspan.train.context import inspect_model
from farspan.train.oom import NoScheduleFits
from farspan.train.optimizer import TrainingOptimizer
from farspan.train.planning import allowed, question_of
from farspan.train.trainer import train
from tests.cli.test_cli import run as run_cli
from tests.cli.test_plan_run import RUN, planned, write
from tests.ranks import run_ranks
from tests.train.planner import planned_components
from tests.train.tiny import MODEL, Quiet, load_tiny, tiny_run
from tests.zoo import make_model

CPU = torch.device("cpu")
AUTO = ScheduleConfig(strategy="auto")
LARGE = Schedule(chunk=48, groups=2, activation_save_fraction=1.0, attention_save_fraction=1.0)
SMALL = Schedule(chunk=8, groups=1)


@pytest.mark.parametrize("given", ["64 apples", "128Q", 0, -1, "0GiB"])
def test_what_is_no_size_is_refused_by_its_key(tmp_path: Path, given: str | int) -> None:
    with pytest.raises(UnsupportedError, match=r"^host_memory: expected bytes such as 128GiB"):
        tiny_run(tmp_path, host_memory=given)


def test_no_more_is_planned_for_than_it_allows(tmp_path: Path) -> None:
    known = replace(machine("h200"), host_bytes=100 * GIB)
    for given, expected in ((None, 100), ("7GiB", 7), ("200GiB", 100)):
        assert allowed(tiny_run(tmp_path, host_memory=given), known).host_bytes == expected * GIB


@pytest.mark.slow
def test_the_planner_is_asked_within_it_and_its_choice_fits(tmp_path: Path) -> None:
    def strategy_of(size: int | None) -> tuple[int, int]:
        asked: list[Question] = []
        run = tiny_run(tmp_path / str(size), schedule=AUTO, host_memory=size and f"{size}B")
        train(run, components=planned_components((LARGE, SMALL), asked=asked), reporter=Quiet())
        plan = json.loads((Path(run.folder) / "plan.json").read_text())
        taken = sum(plan[tier]["total"] for tier in ("device_bytes", "host_bytes"))
        assert size is None or asked[0].machine.host_bytes == size
        return plan["fields"]["chunk"], taken

    chunk, most = strategy_of(None)
    assert chunk == LARGE.chunk
    chunk, taken = strategy_of(most - 1)
    assert chunk == SMALL.chunk
    assert taken < most


def test_a_named_schedule_beyond_it_is_not_begun(tmp_path: Path) -> None:
    """A lighter one is looked for, and none fits in the bytes of half the weights."""
    run = tiny_run(tmp_path, schedule=ScheduleConfig(strategy="oomb"), host_memory="18KB")
    with pytest.raises(NoScheduleFits, match=r"host_memory leaves only 0 bytes; raise"):
        train(run, reporter=Quiet())


def test_the_guard_counts_what_is_new_to_the_byte() -> None:
    step = Step(make_model("qwen2"), Schedule(chunk=8, groups=2))
    expected = estimate_memory(step, 1, 40, cells=least_transient)
    step.host_room = expected.new_device + expected.host_arena + 1000
    refuse_too_large(step, expected, optimizer=1000)
    with pytest.raises(TooLarge, match="host_memory leaves"):
        refuse_too_large(step, expected, optimizer=1001)


def test_states_in_main_memory_count() -> None:
    states, model = OptimizerConfig(states=StatesPlace.HOST), make_model("llama")
    with pytest.raises(TooLarge, match=r"states in main memory needs .* host_memory leaves"):
        TrainingOptimizer(model, states, room=1000)
    TrainingOptimizer(model, states, room=GIB)


def asked(rooms: list[int]) -> str:
    ranks = ParallelContext(Layout(ulysses=len(rooms)), CPU)
    try:
        refuse_beyond_together(ranks, 100, "a step", "shorten it", rooms[ranks.rank.number])
    except TooLarge as error:
        return str(error)
    return ""


def test_ranks_of_a_machine_take_it_together() -> None:
    assert run_ranks(2, asked, [90, 110]) == ["", ""]
    for said in run_ranks(2, asked, [90, 109]):
        assert "a step, on 2 ranks of a machine, needs" in said
        assert "host_memory leaves" in said


def test_the_command_line_takes_the_place_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[RunConfig] = []

    def stop(run: RunConfig, **_: Any) -> None:
        seen.append(run)
        raise UnsupportedError("stop: here")

    monkeypatch.setattr("farspan.cli.with_torch.train", stop)
    path = tmp_path / "run.yaml"
    text = "model: {path: m}\ndata: {source: text, path: t}\nhost_memory: 2GiB\n"
    path.write_text(text)
    run_cli(monkeypatch, "train", str(path), "--host-memory", "3GiB")
    run_cli(monkeypatch, "train", str(path))
    assert [run.host_bytes() for run in seen] == [3 * GIB, 2 * GIB]


# -- margin ---------------------------------------------------------------------------------------


def margin_of(run: RunConfig, unified: bool = False) -> Margin:
    """What the run's question says."""
    model = load_tiny(config=MODEL, dtype=torch.float32, seed=0)
    looked = inspect_model(model, "float32", torch.device("cpu"))
    here = replace(machine("h100"), unified=unified)
    world = DistributedContext(torch.device("cpu"))
    return question_of(run, looked, here, StatesPlace.DEVICE, world).margin


def test_the_run_asks_for_its_margin(tmp_path: Path) -> None:
    made = machine("h100")
    assert margin_of(tiny_run(tmp_path)) == Margin(int(SHARE * made.device_bytes) - made.reserve)
    assert margin_of(tiny_run(tmp_path, margin="2GiB")) == Margin(2 * GIB, 2 * GIB)
    assert margin_of(tiny_run(tmp_path, margin=0)) == Margin()
    assert margin_of(tiny_run(tmp_path), unified=True) == Margin()
    assert margin_of(tiny_run(tmp_path, margin="2GiB"), unified=True) == Margin(0, 2 * GIB)


def test_a_margin_on_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "run.yaml", **RUN, margin="1GiB")
    assert planned(file)["margin"]["device"] == GIB
    assert planned(file, "--margin", "10%")["margin"]["device"] > 12 * GIB
    assert planned(file, "--margin", "0")["margin"] == {"device": 0, "host": 0}


def test_the_older_name_of_margin_is_read(tmp_path: Path) -> None:
    file = write(tmp_path / "run.yaml", **RUN, headroom="1GiB")
    assert load_run(file).margin == "1GiB"
    with pytest.raises(UnsupportedError, match=r"headroom: the older name of margin.*keep margin"):
        load_run(write(tmp_path / "both.yaml", **RUN, headroom="1GiB", margin="2GiB"))
