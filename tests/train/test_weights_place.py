"""Where the weights of a run go that leaves it open: a device of so many bytes, made up, beside
main memory; what is computed is the CPU's."""

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from farspan.hf.load import Weights, load_model
from farspan.planner.evaluate import evaluate
from farspan.planner.machines import machine
from farspan.planner.plans import best_plan, placements
from farspan.planner.request import Plan, Question
from farspan.program.layout import Parallel
from farspan.spec import Kernels, MachineSpec, RunSpec, Schedule, Tier, UnsupportedError
from farspan.train.config import (
    DType,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    StatesPlace,
)
from farspan.train.context import Components
from farspan.train.plan_run import PlanOfRun, question_of_run
from farspan.train.planning import FreeMemory
from farspan.train.trainer import train
from farspan.train.yaml_config import convert
from tests.grids import exhaustive
from tests.train.planner import GIB
from tests.train.test_streamed_weights import assert_same, outcome
from tests.train.tiny import MODEL, Quiet, Stopped, Stopping, replaced, tiny_run

DEEP = {**MODEL, "num_hidden_layers": 8}
AUTO = ScheduleConfig(strategy="auto")
DEVICE = replace(AUTO, weights=Tier.DEVICE)
BESIDE = OptimizerConfig(lr=1e-2, warmup=2, states=StatesPlace.DEVICE)
RESERVE = 4096
SHORT = 125_000  # bytes of a device, less than weights and gradients take
Parts = Callable[[MachineSpec], Components]


def apart(device: int, host: int = GIB) -> MachineSpec:
    """A device of so many bytes beside main memory."""
    found = replace(machine("h200"), name="made up", devices=1, reserve=RESERVE)
    return replace(found, device_bytes=device, host_bytes=host, host_reserve=0)


def run_of(root: Path, **changes: Any) -> RunConfig:
    model = ModelConfig(config=DEEP, dtype=DType.BFLOAT16)
    # As a CPU runs the model, whatever stands beside it.
    plain = Kernels(fused=False, accumulate=False)
    own = {"model": model, "schedule": AUTO, "margin": 0, "device": "cpu", "kernels": plain}
    own |= {"steps": 3, "accumulate": 1, "evaluation": EvaluationConfig(every=2, sequences=1)}
    return tiny_run(root, **(own | changes))


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    """farspan's own components on such a machine, which search for a moment; so do plans of run
    files."""
    briefly = partial(best_plan, seconds=0.1)
    monkeypatch.setattr("farspan.train.plan_run.best_plan", briefly)
    monkeypatch.setattr("farspan.train.planning.is_unified", lambda _: False)
    monkeypatch.setattr("farspan.train.planning.bare_machine", lambda _: apart(GIB))
    monkeypatch.setattr(FreeMemory, "limit", lambda _, machine: machine)
    return lambda spec: replaced(machine=lambda *_: spec, best_plan=briefly)


def planned(run: RunConfig, spec: MachineSpec) -> PlanOfRun:
    return question_of_run(run, {"machine": spec}, lambda _: None).plan()


def weights_notes(quiet: Quiet) -> list[str]:
    return [note for note in quiet.notes if note.startswith("weights: ")]


@pytest.mark.slow
def test_a_run_that_is_too_large_for_the_device_is_the_resident_one(
    tmp_path: Path, parts: Parts
) -> None:
    """By the plan that `farspan plan` shows, and in one line of the log: what does not fit, where
    weights go, and how long a step is."""
    run, quiet = run_of(tmp_path), Quiet()
    train(run, components=parts(apart(SHORT)), reporter=quiet)
    (note,) = weights_notes(quiet)
    expected = planned(run, apart(SHORT))
    assert note == expected.weights
    assert re.fullmatch(
        r"weights: farspan moves them to main memory, with gradients and optimizer states; with "
        r"all on the device, \w+ comes closest: it needs 15\d\.\d KiB of device memory, but has "
        r"122.1 KiB; the largest parts are 90\.6 KiB of gradients and 45\.3 KiB of weights; a step "
        r"now takes [\d.]+ ms by the plan, [\d.]+ ms of it computation",
        note,
    )
    assert any("optimizer states: in main memory, updated there" in text for text in quiet.notes)
    written = json.loads((Path(run.folder) / "plan.json").read_text())
    assert written["fields"]["weights"] == written["weights"] == "host"
    found = json.loads(json.dumps(expected.to_json()))
    assert found["schedule"] == written["schedule"]
    assert found["device_bytes"]["total"] == written["device_bytes"]["total"]
    fields = {k: v for k, v in written["fields"].items() if k not in ("sparse", "weights")}
    resident = convert(ScheduleConfig, {"strategy": None, **fields}, "schedule")
    plain = replace(run, folder=str(tmp_path / "resident"), schedule=resident, optimizer=BESIDE)
    train(plain, reporter=Quiet())
    assert_same(outcome(Path(run.folder)), outcome(Path(plain.folder)))


@pytest.mark.exhaustive
def test_a_run_that_goes_on_keeps_them_there(tmp_path: Path, parts: Parts) -> None:
    """On a device that would hold them, too: it goes on to the same bits. Until its file says where
    they live."""
    run, quiet = run_of(tmp_path), Quiet()
    train(run, components=parts(apart(SHORT)), reporter=Quiet())
    stopped = replace(run, folder=str(tmp_path / "stopped"))
    with pytest.raises(Stopped):
        train(stopped, components=parts(apart(SHORT)), reporter=Stopping(3))
    train(stopped, components=parts(apart(GIB)), reporter=quiet)
    assert weights_notes(quiet) == [
        "weights: in main memory, as before; set schedule.weights: device to undo"
    ]
    assert_same(outcome(Path(stopped.folder)), outcome(Path(run.folder)))
    (last,) = sorted((Path(run.folder) / "checkpoints").iterdir())[-1:]
    shutil.rmtree(last)
    quiet = Quiet()
    train(replace(run, schedule=DEVICE), components=parts(apart(GIB)), reporter=quiet)
    assert not weights_notes(quiet)
    about = json.loads((Path(run.folder) / "about.json").read_text())
    assert about["schedule"]["weights"] == "device"


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, exhaustive({"optimizer": OptimizerConfig(warmup=2, states=StatesPlace.HOST)})]
)
def test_they_stay_where_any_plan_fits(
    tmp_path: Path, parts: Parts, changes: dict[str, Any]
) -> None:
    run, quiet = run_of(tmp_path, **changes), Quiet()
    train(run, components=parts(apart(GIB)), reporter=quiet)
    found = planned(run, apart(GIB))
    assert not weights_notes(quiet)
    assert found.weights == ""
    about = json.loads((Path(run.folder) / "about.json").read_text())
    assert about["schedule"]["weights"] == found.plan.question.weights == "device"
    states = {"device": "adamw", "host": "host"}
    assert states[about["states"]] == found.plan.question.optimizer
    assert about["states"] == ("host" if changes else "device")


def test_where_main_memory_is_short_as_well_it_is_named(tmp_path: Path, parts: Parts) -> None:
    """Before any weights are loaded, and by what misses the least."""
    spec, loaded = apart(SHORT, host=150_000), []

    def load(**given: Any) -> Any:
        loaded.append(given["weights"])
        return load_model(**given)

    run = run_of(tmp_path)
    short = (
        r"^schedule: none fits 122.1 KiB on the device and 146.5 KiB on the host: with weights, "
        r"gradients and states in main memory, \w+ comes closest: it needs [\d.]+ KiB of .*, but "
        r"has [\d.]+ KiB; the largest parts are "
    )
    with pytest.raises(UnsupportedError, match=short) as error:
        train(run, components=replaced(parts(spec), load_model=load), reporter=Quiet())
    assert str(error.value).endswith("of main memory (and raise host_memory, if set)")
    assert loaded == [Weights.NONE]
    found = planned(run, spec)
    assert not found.plan.fits
    assert list(found.words()) == []


def test_on_the_device_they_stay_where_the_run_file_says_so(tmp_path: Path, parts: Parts) -> None:
    """It is refused with the line that would help."""
    run = run_of(tmp_path, schedule=DEVICE)
    with pytest.raises(UnsupportedError, match=r"set schedule\.weights: host$"):
        train(run, components=parts(apart(SHORT)), reporter=Quiet())
    assert not planned(run, apart(SHORT)).plan.fits


PLACES = {
    "device": ("adamw", "device"),
    "8bit": ("adamw8bit", "device"),
    "host": ("host", "device"),
    "weights": ("host", "host"),
    "disk": ("disk", "device"),
    "all": ("disk", "host"),
}


def places(run: RunConfig) -> list[str]:
    """What is looked at, in its order."""
    question = question_of_run(run, {"machine": apart(GIB)}, print).question
    names = {place: name for name, place in PLACES.items()}
    every = [placed for group in placements(question) for placed in group]
    return [names[placed.optimizer.value, placed.weights.value] for placed in every]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "device host weights"),
        ({"parallel": Parallel(ulysses=2)}, "device host weights"),
        ({"parallel": Parallel(tensor=2, fsdp=False)}, "device host"),
        ({"schedule": ScheduleConfig(strategy="grouped")}, "device host"),
        ({"schedule": DEVICE}, "device host"),
        ({"schedule": replace(AUTO, weights=Tier.HOST)}, "weights"),
        ({"optimizer": OptimizerConfig(warmup=2, states=StatesPlace.DEVICE)}, "device"),
        ({"optimizer": OptimizerConfig(warmup=2, states=StatesPlace.EIGHT_BIT)}, "8bit"),
        ({"optimizer": OptimizerConfig(warmup=2, states=StatesPlace.HOST)}, "host weights"),
        ({"optimizer": OptimizerConfig(warmup=2, states=StatesPlace.DISK)}, "disk all"),
        ({"optimizer": OptimizerConfig(warmup=2, disk="d")}, "device host weights disk all"),
    ],
)
def test_what_the_run_file_says_is_kept(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    assert places(run_of(tmp_path, **changes)) == expected.split()


def test_the_longest_context_is_that_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever its weights then are."""
    run = run_of(tmp_path)
    tokens = {Tier.DEVICE: {"plain": 2048, "fpdt": 1024}, Tier.HOST: {"fpdt": 2048, "memo": 1024}}

    def longest(question: Question, *_: Any) -> dict[str, Plan]:
        at = {name: RunSpec(1, n) for name, n in tokens[question.weights].items()}
        return {
            n: evaluate(replace(question, run=of), n, Schedule(weights=question.weights))
            for n, of in at.items()
        }

    monkeypatch.setattr("farspan.planner.plans._longest_plans", longest)
    found = question_of_run(run, {"machine": apart(GIB)}, print).longest(math.inf)
    where = {
        name: (plan.question.run.tokens, plan.question.weights) for name, plan in found.items()
    }
    assert where == {"plain": (2048, "device"), "fpdt": (2048, "host"), "memo": (1024, "host")}
    del tokens[Tier.HOST]["memo"]
    written = replace(run, schedule=DEVICE)
    found = question_of_run(written, {"machine": apart(GIB)}, print).longest(math.inf)
    assert {name: plan.question.run.tokens for name, plan in found.items()} == tokens[Tier.DEVICE]
