"""One auto: `farspan plan`, a run file, `farspan train`, a Step and a Trainer give a question one
answer. A device of so many bytes, made up, beside main memory; what is computed is the CPU's."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import farspan
from farspan.distributed.run_context import DistributedContext
from farspan.engine.step import Step
from farspan.planner import plans
from farspan.planner.api import Request
from farspan.planner.request import Optimizer, Plan
from farspan.spec import Kernels, Objective, RunSpec, Tier, UnsupportedError
from farspan.train import planning
from farspan.train.config import (
    DType,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    StatesPlace,
)
from farspan.train.console import Observer
from farspan.train.context import Components, inspect_model
from farspan.train.planning import StepPlanner, place, question_of
from tests.train.planner import GIB
from tests.train.test_weights_place import DEEP, Parts, apart, parts, planned, run_of
from tests.train.tiny import Quiet, load_tiny

__all__ = ["parts"]  # a fixture
CPU = torch.device("cpu")
LONG: dict[str, Any] = {**DEEP, "max_position_embeddings": 256}
PLAIN = Kernels(fused=False, accumulate=False)

# Bytes of the device and of main memory, tokens, sequences, and what is pinned.
SIZES = (125_000, 170_000, 400_000, GIB)
QUESTIONS: list[tuple[int, int, int, int, dict[str, str]]] = [
    *((device, GIB, tokens, 1, {}) for device in SIZES for tokens in (48, 192)),
    *((device, GIB, 96, 2, {}) for device in SIZES),
    (SIZES[0], 150_000, 48, 1, {}),
    (SIZES[1], 150_000, 48, 1, {}),
    (GIB, GIB, 96, 1, {"optimizer": "host"}),
    (SIZES[1], GIB, 96, 1, {"optimizer": "host"}),
    (GIB, GIB, 96, 1, {"weights": "host"}),
    (GIB, GIB, 96, 1, {"optimizer": "disk"}),
    (SIZES[1], GIB, 96, 1, {"weights": "device"}),
    (GIB, GIB, 96, 1, {"optimizer": "device", "weights": "device"}),
]


@pytest.fixture
def briefly(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> Parts:
    monkeypatch.setattr(plans, "CHALLENGE", 0.1)
    short = partial(plans.best_plan, seconds=0.1)
    monkeypatch.setattr("farspan.planner.api.best_plan", short)
    monkeypatch.setattr("farspan.train.plan_run.best_plan", short)
    return parts


def run_for(root: Path, tokens: int, batch: int, pins: dict[str, str]) -> RunConfig:
    weights = Tier(pins["weights"]) if "weights" in pins else None
    return run_of(
        root,
        model=ModelConfig(config=LONG, dtype=DType.BFLOAT16),
        **{"context": tokens, "batch": batch, "accumulate": 1},
        schedule=ScheduleConfig(strategy="auto", weights=weights),
        optimizer=OptimizerConfig(states=StatesPlace(pins.get("optimizer", "auto"))),
    )


def of_training(run: RunConfig, components: Components) -> Plan:
    """As `farspan train` places a run and then chooses its schedule."""
    model = load_tiny(config=LONG, dtype=torch.bfloat16, seed=0)
    world, found = DistributedContext(CPU), inspect_model(model, "bfloat16", CPU, 0, PLAIN)
    observer = cast(Observer, Quiet())
    settled, placed = place(run, components, world, lambda: found, {}, observer)
    machine = components.machine_once(CPU, torch.bfloat16, print)
    return components.best_plan(question_of(settled, found, machine, placed.states, world))


def answer(plan: Plan) -> tuple[Any, ...]:
    question = plan.question
    return plan.schedule, question.optimizer, question.weights, plan.device.total


def answers(root: Path, parts: Parts) -> Iterator[tuple[str, Any, Any]]:
    """Of every question who was asked, and what it said beside what `farspan.plan` said."""
    for number, (device, host, tokens, batch, pins) in enumerate(QUESTIONS):
        spec = apart(device, host)
        run = run_for(root, tokens, batch, pins)
        file = planned(run, spec).plan
        expected = answer(file)
        asked: dict[str, Any] = {
            "machine": spec,
            "kernels": PLAIN,
            "margin": 0,
            "batch": batch,
            **pins,
        }
        alone = farspan.plan(LONG, context=tokens, **asked)
        assert alone.fits is file.fits, number
        yield f"{number}: farspan.plan", answer(alone)[:3], expected[:3]
        try:
            yield f"{number}: farspan train", answer(of_training(run, parts(spec))), expected
        except UnsupportedError as error:
            yield f"{number}: farspan train", file.fits, "schedule: none fits" not in str(error)


def test_all_of_them_answer_alike(tmp_path: Path, briefly: Parts) -> None:
    found = list(answers(tmp_path, briefly))
    assert len(QUESTIONS) == 20
    for who, said, expected in found:
        assert said == expected, who
    places = {said[1:3] for who, said, _ in found if "plan" in who}
    assert len(places) == 4, places


def test_a_step_answers_as_one_whose_states_are_with_its_weights(briefly: Parts) -> None:
    places = set()
    for device in SIZES:
        spec = apart(device)
        own: dict[str, Any] = {"machine": spec, "kernels": PLAIN}
        for pins in ("device", "device"), ("host", "host"):
            pinned = Request(LONG, 96, optimizer=pins[0], weights=pins[1], **own).question()
            # Gradients of other batches may be there.
            expected = plans.best_plan(replace(pinned, accumulates=True), seconds=0.1)
            if expected.fits:
                break
        planner = StepPlanner(briefly(spec))
        model: Any = load_tiny(config=LONG, dtype=torch.bfloat16, seed=0)
        plan = planner(model, CPU, RunSpec(1, 96), PLAIN, Objective())
        assert answer(plan)[:3] == answer(expected)[:3], device
        places.add((plan.question.optimizer, plan.question.weights))
    assert places == {(Optimizer.ADAMW, Tier.DEVICE), (Optimizer.HOST, Tier.HOST)}


def test_a_step_moves_weights_and_says_so(
    briefly: Parts,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """To the same gradients, and for good."""
    planner = StepPlanner(briefly(apart(125_000)))
    monkeypatch.setattr(planning, "StepPlanner", lambda: planner)
    models = [load_tiny(config=LONG, dtype=torch.bfloat16, seed=0) for _ in range(2)]
    step = Step(models[0], "auto", kernels=PLAIN)
    ids = torch.arange(96)[None]
    step(ids, ids)
    assert step.weights is not None
    assert step.schedule.weights is Tier.HOST
    (line,) = [r.message for r in caplog.records if r.message.startswith("weights: go to main")]
    assert "optimizer.load_state_dict(optimizer.state_dict())" in line
    resident = replace(step.schedule, weights=Tier.DEVICE)
    Step(models[1], resident, kernels=PLAIN)(ids, ids)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
