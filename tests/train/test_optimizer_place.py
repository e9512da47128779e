"""Where the states of a run go that leaves it open: a GPU of so many bytes, made up."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from farspan.distributed.run_context import DistributedContext
from farspan.planner import plans
from farspan.planner.evaluate import size
from farspan.planner.machines import machine as find_machine
from farspan.planner.request import (
    Budget,
    Fit,
    Margin,
    Open,
    Optimizer,
    Plan,
    Question,
    Seconds,
)
from farspan.spec import MachineSpec, RunSpec, Schedule, Tier
from farspan.train import planning
from farspan.train.config import DType, ModelConfig, RunConfig, ScheduleConfig, StatesPlace
from farspan.train.context import Components, InspectedModel, inspect_model
from farspan.train.memory import Placed, bare_machine
from farspan.train.planning import question_of
from tests.program.cases import model_of
from tests.train.planner import GIB, one_memory
from tests.train.tiny import MODEL, Quiet, fit, load_tiny, replaced, tiny_run

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
MODEL_BYTES = 2 * 8976
RESERVE = 500_000


def gpu(monkeypatch: pytest.MonkeyPatch, total: int, host: int) -> None:
    """Its context takes RESERVE; the weights are on it."""
    free = total - RESERVE - MODEL_BYTES
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (free, total))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _: MODEL_BYTES)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "made up")
    monkeypatch.setattr("farspan.train.planning.available_host_bytes", lambda: host)
    monkeypatch.setattr("farspan.train.memory.available_host_bytes", lambda: host)


def run_of(tmp_path: Path, **changes: Any) -> RunConfig:
    model = ModelConfig(config=MODEL, dtype=DType.BFLOAT16)
    schedule = ScheduleConfig(strategy="grouped", chunk=16)
    return tiny_run(tmp_path, model=model, accumulate=1, **({"schedule": schedule} | changes))


def place(run: RunConfig, parts: Components | None = None, before: str | None = None) -> Placed:
    model = load_tiny(config=MODEL, dtype=torch.bfloat16, seed=0)
    chosen = replaced(machine=never) if parts is None else parts
    about = {} if before is None else {"states": before}
    told: Any = Quiet()

    def look() -> InspectedModel:
        return inspect_model(model, "bfloat16", CPU)

    return planning.place(run, chosen, DistributedContext(CUDA), look, about, told)[1]


def never(*_: Any) -> Any:
    pytest.fail("a named schedule needs no rates")


def needed(run: RunConfig, states: StatesPlace) -> tuple[int, int]:
    """Bytes of the step on both tiers, states included."""
    model = load_tiny(config=MODEL, dtype=torch.bfloat16, seed=0)
    found = inspect_model(model, "bfloat16", CPU)
    machine = replace(bare_machine(CUDA), reserve=RESERVE)
    question = question_of(run, found, machine, states, DistributedContext(CUDA))
    sized = size(question, run.schedule.apply(Components().strategy("grouped", 2, run.context)))
    return sized.device.total, sized.host.total


@pytest.mark.parametrize("short", [0, 1])
def test_the_device_is_taken_when_the_step_fits_beside_to_the_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: int
) -> None:
    run = run_of(tmp_path)
    gpu(monkeypatch, GIB, GIB)
    device, _ = needed(run, StatesPlace.DEVICE)
    gpu(monkeypatch, device - short, GIB)
    expected = StatesPlace.HOST if short else StatesPlace.DEVICE
    assert place(run).states is expected


def test_main_memory_is_taken_when_neither_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of it can be bought. The step is then planned around, or refused by name."""
    run = run_of(tmp_path)
    gpu(monkeypatch, GIB, GIB)
    device, _ = needed(run, StatesPlace.DEVICE)
    _, host = needed(run, StatesPlace.HOST)
    for room in (host, host - 1):
        gpu(monkeypatch, device - 1, room)
        assert place(run).states is StatesPlace.HOST


def plan_of(question: Question, *, left: int, seconds: float = 1.0) -> Plan:
    """A plan with so many bytes of the device to spare."""
    device, host = Budget({}, left), Budget({}, 10)
    took = Seconds(seconds, seconds, 0.0, 0.0, 0.0, 0.0, 0.0, bound="compute")
    return Plan("auto", Schedule(), question, device, host, took, 0.5)


FREE = Question(
    model_of(1), RunSpec(1, 64), find_machine("h200"), margin=Margin(5, 5), open=Open(True, True)
)
LEFT = {Fit.NOT: -1, Fit.TIGHT: 1, Fit.ROOMY: 5}
BY_PLACE = {"adamw device": 0, "host device": 1, "host host": 2}


def chosen(fits: tuple[Fit, ...], times: tuple[float, ...], question: Question = FREE) -> Plan:
    """Of plans that fit so, and take so long."""

    def plan_at(placed: Question) -> Plan:
        at = BY_PLACE[f"{placed.optimizer} {placed.weights}"]
        return plan_of(placed, left=LEFT[fits[at]], seconds=times[at])

    return plans.best_placed(question, plan_at, lambda *_: True)


@pytest.mark.parametrize(
    ("fits", "times", "place"),
    [
        ((Fit.ROOMY, Fit.ROOMY, Fit.ROOMY), (1.0, 1.0, 1.0), "adamw device"),
        ((Fit.ROOMY, Fit.ROOMY, Fit.ROOMY), (1.0, 0.99, 0.988), "host device"),
        ((Fit.ROOMY, Fit.ROOMY, Fit.ROOMY), (1.0, 0.997, 0.9), "host host"),
        ((Fit.ROOMY, Fit.TIGHT, Fit.NOT), (1.0, 0.5, 0.1), "adamw device"),
        ((Fit.TIGHT, Fit.ROOMY, Fit.NOT), (1.0, 2.0, 0.1), "host device"),
        ((Fit.TIGHT, Fit.NOT, Fit.NOT), (1.0, 0.5, 0.1), "adamw device"),
        ((Fit.NOT, Fit.NOT, Fit.TIGHT), (1.0, 0.5, 9.0), "host host"),
        ((Fit.NOT, Fit.NOT, Fit.NOT), (1.0, 0.5, 0.1), "adamw device"),
    ],
)
def test_the_fastest_placement_that_fits_is_chosen(
    fits: tuple[Fit, ...], times: tuple[float, ...], place: str
) -> None:
    """What moves least, of those as fast to 0.5%."""
    found = chosen(fits, times)
    assert f"{found.question.optimizer} {found.question.weights}" == place
    assert (found.unmoved is None) is (place == "adamw device")


def test_whoever_updates_apart_has_weights_moved_where_nothing_else_fits() -> None:
    """Of a Step, whose optimizer is no part of the question."""
    asked = replace(FREE, open=Open(weights=True, apart=True))
    every = Fit.ROOMY, Fit.ROOMY, Fit.ROOMY
    assert chosen(every, (1.0, 0.5, 0.5), asked).question.weights is Tier.DEVICE
    tight = Fit.TIGHT, Fit.ROOMY, Fit.ROOMY
    assert chosen(tight, (1.0, 0.5, 0.5), asked).question.weights is Tier.DEVICE
    none = Fit.NOT, Fit.ROOMY, Fit.TIGHT
    assert chosen(none, (1.0, 0.5, 0.5), asked).question.weights is Tier.HOST


def test_an_update_counts_once_for_all_its_batches() -> None:
    """A slow update is worth a faster step where it follows many."""

    def plan_at(placed: Question) -> Plan:
        on_host = placed.optimizer is Optimizer.HOST
        plan = plan_of(placed, left=5, seconds=2.5 if on_host else 2.0)
        took = replace(plan.seconds, optimizer=1.0 if on_host else 0.0)
        return replace(plan, seconds=took)

    for batches, optimizer in ((1, Optimizer.ADAMW), (8, Optimizer.HOST)):
        asked = replace(FREE, open=Open(states=True), batches=batches)
        found = plans.best_placed(asked, plan_at, lambda *_: True)
        assert found.question.optimizer is optimizer


def test_states_that_were_on_the_host_stay_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, GIB, GIB)
    run = run_of(tmp_path)
    assert place(run, before="host") == Placed(StatesPlace.HOST, "as before")
    assert place(run, before="device").states is StatesPlace.DEVICE
    assert place(run).states is StatesPlace.DEVICE


@pytest.mark.parametrize("states", [StatesPlace.DEVICE, StatesPlace.HOST, StatesPlace.EIGHT_BIT])
def test_what_a_run_file_says_is_not_planned(tmp_path: Path, states: StatesPlace) -> None:
    run = run_of(tmp_path)
    run = replace(run, optimizer=replace(run.optimizer, states=states))
    assert place(run).describe().endswith("(as the run file says)")
    assert place(run).states is states


def test_on_a_cpu_the_choice_is_said_and_costs_nothing(tmp_path: Path) -> None:
    quiet = Quiet()
    run = run_of(tmp_path, steps=1, optimizer=replace(tiny_run(tmp_path).optimizer, warmup=0))
    fit(run, reporter=quiet)
    opening = "\n".join(quiet.notes)
    assert "optimizer states: on the device (both tiers lie in main memory)" in opening
    assert json.loads((Path(run.folder) / "about.json").read_text())["states"] == "device"


def test_a_machine_is_measured_once() -> None:
    measured: list[str] = []

    def machine(device: torch.device, dtype: torch.dtype, _: Any) -> MachineSpec:
        measured.append(f"{device} {dtype}")
        return one_memory()

    ask = replaced(machine=machine).machine_once
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        ask(CUDA, dtype, lambda _: None)
    assert measured == ["cuda torch.float32", "cuda torch.bfloat16"]


@pytest.mark.parametrize("weights", [Tier.DEVICE, Tier.HOST])
def test_states_that_were_on_a_drive_stay_there(tmp_path: Path, weights: Tier) -> None:
    """Wherever the weights are."""
    run = run_of(tmp_path, schedule=ScheduleConfig(strategy="grouped", chunk=16, weights=weights))
    assert place(run, before="disk") == Placed(StatesPlace.DISK, "as before")
