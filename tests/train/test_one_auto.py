"""One auto: `farspan plan`, a run file, `farspan train`, a Step and a Trainer give a question one
answer. A device of so many bytes, made up, beside main memory; what is computed is the CPU's."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import Trainer as HuggingFaceTrainer
from transformers import TrainingArguments

import farspan
from farspan.ask import Request
from farspan.distributed.run_context import DistributedContext
from farspan.engine.step import Step
from farspan.planner import plans
from farspan.planner.request import Plan
from farspan.program.layout import ALONE, Layout, Parallel
from farspan.spec import Kernels, MachineSpec, Tier, UnsupportedError
from farspan.train import planning
from farspan.train.config import (
    DType,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    StatesPlace,
)
from farspan.train.context import Components, inspect_model
from farspan.train.observer import Observer
from farspan.train.planning import StepPlanner, place, question_of
from farspan.train.trainer import train
from tests.grids import exhaustive
from tests.posttrain.arguments import quiet
from tests.posttrain.test_hugging_face import logs, padded, rows
from tests.posttrain.test_trainer_ranks import start
from tests.ranks import run_ranks
from tests.train.planner import GIB
from tests.train.test_weights_place import DEEP, SHORT, Parts, apart, parts, planned, run_of
from tests.train.tiny import Quiet, load_tiny, metrics

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
    monkeypatch.setattr(plans, "_remedies", lambda *_: ())  # a third of the time of what fits not
    short = partial(plans.best_plan, seconds=0.1)
    monkeypatch.setattr("farspan.ask.best_plan", short)
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


def answers(root: Path, parts: Parts, numbers: Iterable[int]) -> Iterator[tuple[str, Any, Any]]:
    """Who was asked these questions, and what it said beside what `farspan.plan` said."""
    for number in numbers:
        device, host, tokens, batch, pins = QUESTIONS[number]
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


# All moves, states alone, nothing, what does not fit, and weights that are pinned.
@pytest.mark.slow
@pytest.mark.parametrize("numbers", [exhaustive(range(20)), (0, 2, 6, 12, 16)], ids=len)
def test_all_of_them_answer_alike(tmp_path: Path, briefly: Parts, numbers: Sequence[int]) -> None:
    found = list(answers(tmp_path, briefly, numbers))
    assert len(QUESTIONS) == 20
    for who, said, expected in found:
        assert said == expected, who
    places = {said[1:3] for who, said, _ in found if "plan" in who}
    assert len(places) == (4 if len(numbers) == 20 else 3), places


# A Step has no pins, and leaves states to its user's optimizer, which has them with the weights.
OPEN = [question[:4] for question in QUESTIONS if not question[4]]


def with_its_weights(
    device: int,
    host: int,
    tokens: int,
    batch: int,
    *,
    places: Any = (("device", "device"), ("host", "host")),
    layout: Layout = ALONE,
) -> Plan:
    """What is expected of a Step: the first pinned placement that fits, the second where none."""
    own: dict[str, Any] = {"machine": apart(device, host), "kernels": PLAIN, "batch": batch}
    for pins in places:
        pinned = Request(LONG, tokens, optimizer=pins[0], weights=pins[1], **own).question()
        here = replace(pinned.machine, devices=layout.devices())
        # Gradients of other batches may be there.
        asked = replace(pinned, accumulates=True, layout=layout, machine=here)
        found = plans.best_plan(asked, seconds=0.1)
        if found.fits:
            break
    return found


def of_step(step: Step, batch: int, tokens: int) -> tuple[Any, ...]:
    """What it chose; of what does not fit that it refuses."""
    try:
        step.prepared(batch, tokens)
    except UnsupportedError as error:
        said = str(error)
        assert "schedule: none fits" in said
        return (False, "parallelize(model, farspan.Schedule(weights=" in said)
    assert step.plan is not None
    return answer(step.plan)[:3]


def trainer_of(root: Path, *bases: Any, schedule: Any = "auto", **given: Any) -> Any:
    kind = type("Trainer", bases, {}) if bases else farspan.Trainer
    own: dict[str, Any] = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2}
    own |= {"save_strategy": "steps", "remove_unused_columns": False}
    model = load_tiny(config=LONG, dtype=torch.bfloat16, seed=0)
    given |= {"model": model, "args": TrainingArguments(**quiet(root, **own))}
    data: dict[str, Any] = {"data_collator": padded, "train_dataset": rows()}
    return kind(schedule=schedule, kernels=PLAIN, **data, **given)


@pytest.mark.exhaustive
@pytest.mark.parametrize("numbers", [exhaustive(range(14)), (0, 6, 12)], ids=len)
def test_steps_and_trainers_answer_as_one_whose_states_are_with_its_weights(
    tmp_path: Path, briefly: Parts, monkeypatch: pytest.MonkeyPatch, numbers: Sequence[int]
) -> None:
    bases: tuple[tuple[Any, ...], ...] = (), (farspan.LongContext, HuggingFaceTrainer)
    places = set()
    assert len(OPEN) == 14
    for number in numbers:
        device, host, tokens, batch = OPEN[number]
        plan = with_its_weights(device, host, tokens, batch)
        expected = answer(plan)[:3] if plan.fits else (False, False)
        planner = StepPlanner(briefly(apart(device, host)))
        monkeypatch.setattr(planning, "StepPlanner", lambda planner=planner: planner)
        model = load_tiny(config=LONG, dtype=torch.bfloat16, seed=0)
        assert of_step(Step(model, "auto", kernels=PLAIN), batch, tokens) == expected, number
        for kinds in bases:
            trainer = trainer_of(tmp_path, *kinds)
            assert of_step(trainer._farspan(), batch, tokens) == expected, number
        places.add(expected[1:])
    assert len(places) == 3, places


def make_up(spec: MachineSpec) -> Components:
    """Have this process, which is for one test alone, be on such a machine."""
    components = Components()
    patches: list[tuple[Any, str, Any]] = [
        (components, "machine", lambda *_: spec),
        (components, "best_plan", partial(plans.best_plan, seconds=0.1)),
        (plans, "CHALLENGE", 0.1),
        (planning, "is_unified", lambda _: False),
        (planning, "bare_machine", lambda _: spec),
        (planning.FreeMemory, "limit", lambda _, machine: machine),
        (planning, "StepPlanner", partial(StepPlanner, components)),
    ]
    for owner, name, value in patches:
        setattr(owner, name, value)
    return components


def on_ranks(root: str, layout: Layout, questions: list[tuple[int, ...]]) -> list[Any]:
    """What Steps and a Trainer of a layout choose for questions, and a loss of each."""
    start(root)
    found: list[Any] = []
    for device, host, tokens, batch in questions:
        make_up(apart(device, host))
        ranks = farspan.ParallelContext(layout, CPU)
        steps = [trainer_of(Path(root), layout=layout)._farspan()]
        for weights in (Tier.DEVICE, Tier.HOST) if layout.cuts_weights() else ():
            model: Any = load_tiny(config=LONG, dtype=torch.bfloat16, seed=0)
            written = farspan.Schedule(weights=weights)
            sharded = farspan.parallelize(model, written, ranks, kernels=PLAIN)
            steps.append(Step(model, "auto", kernels=PLAIN, ranks=sharded))
        if not layout.cuts_weights():
            model = load_tiny(config=LONG, dtype=torch.bfloat16, seed=0)
            steps.append(Step(model, "auto", kernels=PLAIN, ranks=ranks))
        for step in steps:
            said = of_step(step, batch, tokens)
            ids = torch.arange(tokens).repeat(batch, 1)
            loss = None if step.plan is None else step(ids, ids).item()
            sharded = step.sharded_model
            assert sharded is not None
            # Where a plan put whole weights, gradients are summed, too.
            if step.plan is not None and not layout.cuts_weights():
                assert sharded.sharded.offload == (step.weights is not None)
            found.append((said, loss, step.weights is not None))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(data=2, fsdp=False), exhaustive(Layout(shards=2))])
@pytest.mark.usefixtures("briefly")
def test_on_ranks_they_answer_alike(tmp_path: Path, layout: Layout) -> None:
    """Weights that each rank has whole may go to main memory; those that were cut stay."""
    questions = [(SHORT, GIB, 48, 1), (GIB, GIB, 48, 1)]
    said = run_ranks(2, on_ranks, str(tmp_path), layout, questions)
    assert said[0] == said[1]
    answers = iter(said[0])
    alone, there = load_tiny(config=LONG, dtype=torch.bfloat16, seed=0), ("host", "host")
    of_steps: Any = [[("device", "device"), there]] * 2
    if layout.cuts_weights():
        of_steps = [[("device", "device")]] * 2 + [[there]]
    for question in questions:
        ids = torch.arange(question[2])[None]
        expected = Step(alone, farspan.Schedule(), kernels=PLAIN).evaluate(ids, ids).item()
        for places in of_steps:
            plan = with_its_weights(*question, layout=layout, places=places)
            chosen, loss, on_host = next(answers)
            assert chosen == (answer(plan)[:3] if plan.fits else (False, True))
            assert loss == (pytest.approx(expected, rel=1e-2) if plan.fits else None)
            streamed = plan.question.weights is Tier.HOST and not layout.cuts_weights()
            assert on_host == streamed


def fit_on(spec: MachineSpec, runs: list[RunConfig]) -> None:
    components = make_up(spec)
    for run in runs:
        assert train(run, components=components, reporter=Quiet()).step == run.steps


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("size", "parallel", "expected"),
    [
        (SHORT, Parallel(data=2, fsdp=False), ("host", "host")),
        exhaustive(160_000, Parallel(shards=2), ("host", "device")),
    ],
)
def test_a_run_on_ranks_moves_what_its_device_has_no_room_for(
    tmp_path: Path, size: int, parallel: Parallel, expected: tuple[str, str]
) -> None:
    """And takes its steps to finite losses that fall."""
    own = OptimizerConfig(lr=1e-2, warmup=1)
    short: Any = {"steps": 2, "accumulate": 1, "evaluation": EvaluationConfig(), "optimizer": own}
    run = run_of(tmp_path, batch=1, parallel=parallel, folder=str(tmp_path / "moved"), **short)
    run_ranks(2, fit_on, apart(size), [run])
    about = json.loads((tmp_path / "moved" / "about.json").read_text())
    assert (about["states"], about["schedule"]["weights"]) == expected
    first, last = (line["loss"] for line in metrics(run) if "loss" in line)
    assert last < first < 6


@pytest.mark.slow
def test_a_trainer_s_states_follow_its_weights(
    tmp_path: Path, briefly: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it goes on: the device that has no room for them never gets them."""
    planner = StepPlanner(briefly(apart(SHORT)))
    monkeypatch.setattr(planning, "StepPlanner", lambda: planner)
    pinned = farspan.Schedule(chunk=12)
    moved, plain = trainer_of(tmp_path), trainer_of(tmp_path / "plain", schedule=pinned)
    for trainer in (moved, plain):
        trainer.train()
    assert moved._farspan().weights is not None
    assert plain._farspan().weights is None
    assert logs(moved, "loss") == pytest.approx(logs(plain, "loss"), rel=1e-2)
    again, where = trainer_of(tmp_path), []
    load = torch.optim.AdamW.load_state_dict

    def watched(optimizer: Any, state: Any) -> None:
        if state["state"]:  # accelerate loads an empty one
            where.append((again._on_host(), again._one_pass is None))
        load(optimizer, state)

    monkeypatch.setattr(torch.optim.AdamW, "load_state_dict", watched)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert where[0] == (True, True)
    assert torch.equal(logs(again, "loss"), logs(moved, "loss"))
    onwards = trainer_of(tmp_path / "plain", schedule=pinned)
    onwards.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-2"))
    assert where[-1] == (True, False)
    assert not onwards._on_host()


@pytest.mark.slow
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
    (line,) = [r.message for r in caplog.records if r.message.startswith("weights: farspan moves")]
    assert "optimizer.load_state_dict(optimizer.state_dict())" in line
    resident = replace(step.schedule, weights=Tier.DEVICE)
    Step(models[1], resident, kernels=PLAIN)(ids, ids)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
