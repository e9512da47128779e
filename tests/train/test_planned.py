"""`strategy: auto`: the planner chooses, is told of shortages, and is held to what it said."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from farspan.data.tokenizers import BYTES
from farspan.engine.step import Step
from farspan.engine.tiers import Arena
from farspan.hf import load as load_module
from farspan.hf.load import load_model
from farspan.host import TooLarge
from farspan.planner.evaluate import evaluate
from farspan.planner.request import Optimizer, Question
from farspan.spec import MachineSpec, RunSpec, Schedule, UnsupportedError
from farspan.train import planning, setup
from farspan.train.config import DType, ModelConfig, RunConfig, ScheduleConfig
from farspan.train.context import Components
from farspan.train.oom import NoScheduleFits
from farspan.train.planning import FreeMemory
from farspan.train.trainer import train
from tests.numerics import assert_exact
from tests.train.planner import GIB, first_of, one_memory, planned_components
from tests.train.test_interrupt import same_weights
from tests.train.tiny import (
    MODEL,
    STEPS,
    Quiet,
    Stopped,
    Stopping,
    load_tiny,
    metrics,
    replaced,
    tiny_run,
)

pytestmark = pytest.mark.slow

AUTO = ScheduleConfig(strategy="auto")
LARGE = Schedule(chunk=48, groups=2, activation_save_fraction=1.0, attention_save_fraction=1.0)
MIDDLE = Schedule(chunk=16, groups=1, attention_save_fraction=1.0)
SMALL = Schedule(chunk=8, groups=1)
SCHEDULES = (LARGE, MIDDLE, SMALL)
# LayerNorm in the model's own precision, so that nothing is rounded to float32 on the way.
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 264,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}


def read(run: RunConfig, name: str) -> dict[str, Any]:
    return json.loads((Path(run.folder) / name).read_text())


def test_what_was_chosen_is_said_and_written_down(tmp_path: Path) -> None:
    """The model at hand is planned for, with bytes as probed and the work that its family is known
    to do; predicted stands beside measured at the end."""
    run, quiet = tiny_run(tmp_path, schedule=AUTO), Quiet()
    asked: list[Question] = []
    components = planned_components(SCHEDULES, asked=asked)
    found = train(run, components=components, reporter=quiet).comparison
    (line,) = (note for note in quiet.notes if note.startswith("schedule: "))
    assert line == (
        "schedule: grouped: chunk 48; groups of 2 layers each; "
        "boundary inputs on host; K, V on device; "
        "attention 100% on host; activations 100% on host (the first that fits)"
    )
    plan = read(run, "plan.json")
    assert plan["reason"] == "the first that fits"
    assert (plan["machine"], plan["fields"]["chunk"]) == ("stand-in", 48)
    assert read(run, "about.json")["schedule"] == plan["fields"]
    (question,) = asked
    assert (question.run.batch, question.run.tokens, question.dtype) == (1, 48, "float32")
    assert question.machine.devices == 1
    assert question.profile is not None
    assert question.model.parameters == 8976
    assert question.model.outer() == 264 * 16 + 16
    for layer in question.model.layers:
        assert layer.activation_bytes > 0
        assert sorted(layer.work.products) == sorted(
            [(16, 16), (16, 8), (16, 8), (16, 16), (16, 32), (16, 32), (32, 16)]
        )
        assert layer.work.projections == 3
        # 16 + 8 + 8 biases of q, k, v and two norms.
        assert layer.work.parameters == layer.work.trainable == 2304 + 32 + 32
    assert found is not None
    assert read(run, "comparison.json") == found.to_json()
    assert quiet.notes[-1] == found.describe()
    states = 8976 * (4 + 8 + 4)  # weights, moments, gradients; the arenas come on top
    assert states < found.measured_bytes < states + 2**20
    assert found.predicted_bytes > states
    seconds = [line["seconds"] for line in metrics(run) if "loss" in line]
    assert found.measured_seconds == median(seconds[1:])  # the first step is metered
    assert found.predicted_seconds == pytest.approx(plan["seconds_per_step"] * run.accumulate)


class Limited:
    """Arenas that together hold at most so many bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: float) -> None:
        self.limit = limit
        self.held: dict[int, int] = {}
        reserve = Arena.reserve

        def limited(arena: Arena, size: int) -> None:
            others = sum(held for key, held in self.held.items() if key != id(arena))
            if others + size > self.limit:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} B")
            reserve(arena, size)
            self.held[id(arena)] = arena.nbytes

        def release(arena: Arena) -> None:
            self.held.pop(id(arena), None)
            give_back(arena)

        give_back = Arena.release
        monkeypatch.setattr(Arena, "reserve", limited)
        monkeypatch.setattr(Arena, "release", release)


def arenas(run: RunConfig, schedule: Schedule) -> int:
    """Bytes of both arenas of a step of the run."""
    assert run.model.config is not None
    dtype = getattr(torch, run.model.dtype.value)
    step = Step(load_model(config=run.model.config, dtype=dtype), schedule)
    return sum(step.program(run.batch, run.context).arena_bytes.values())


def test_a_run_goes_on_with_what_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arenas may hold less than the planner was told: it has to give way until they do."""
    run = tiny_run(tmp_path, schedule=AUTO, model=ModelConfig(config=GPT2, dtype=DType.FLOAT64))
    whole = replace(run, folder=str(tmp_path / "whole"))
    train(whole, components=planned_components((LARGE,)), reporter=Quiet())
    sizes = [arenas(run, schedule) for schedule in SCHEDULES]
    assert sizes[0] > sizes[1] > sizes[2]
    Limited(monkeypatch, (sizes[1] + sizes[2]) / 2)
    asked: list[Question] = []
    quiet = Quiet()
    result = train(run, components=planned_components(SCHEDULES, asked=asked), reporter=quiet)
    assert result.step == STEPS
    tried = [line for line in metrics(run) if "out_of_memory" in line]
    assert [line["schedule"]["chunk"] for line in tried] == [16, 8]
    assert {line["step"] for line in tried} == {1}
    limits = [question.machine.host_bytes for question in asked]
    assert limits == sorted(set(limits), reverse=True)
    assert read(run, "plan.json")["fields"]["chunk"] == 8
    ours, theirs = (
        torch.tensor([line["loss"] for line in metrics(r) if "loss" in line], dtype=torch.float64)
        for r in (run, whole)
    )
    assert_exact(ours, theirs)


def test_when_nothing_smaller_fits_all_that_was_tried_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(tmp_path, schedule=AUTO)
    Limited(monkeypatch, 100)
    with pytest.raises(NoScheduleFits) as caught:
        train(run, components=planned_components(SCHEDULES), reporter=Quiet())
    message = str(caught.value)
    places = [message.index(text) for text in ("(1) grouped: chunk 48", "(2) grouped: chunk 16")]
    places += [message.index("(3) grouped: chunk 8"), message.index("\nthen schedule: none fits")]
    assert places == sorted(places)


def test_a_forecast_that_main_memory_cannot_hold_is_planned_around(tmp_path: Path) -> None:
    own = Components().expect_memory
    run = tiny_run(tmp_path, schedule=AUTO, steps=3)

    def expect(step: Any, *rest: Any, **named: Any) -> Any:
        if step.schedule == LARGE:
            raise TooLarge("host memory: a step needs 9 GiB, but only 1 GiB are available")
        return own(step, *rest, **named)

    quiet = Quiet()
    parts = replaced(planned_components(SCHEDULES), expect_memory=expect)
    assert train(run, components=parts, reporter=quiet).step == 3
    assert read(run, "plan.json")["fields"]["chunk"] == 16
    assert any("out of memory (main memory): host memory: a step" in note for note in quiet.notes)


def test_a_run_that_goes_on_keeps_its_plan(tmp_path: Path) -> None:
    """So that it goes on to the same bits, whatever the planner says by now."""
    whole = tiny_run(tmp_path, schedule=AUTO, folder=str(tmp_path / "whole"))
    train(whole, components=planned_components((MIDDLE,)), reporter=Quiet())
    run = tiny_run(tmp_path, schedule=AUTO)

    with pytest.raises(Stopped):
        train(run, components=planned_components((MIDDLE,)), reporter=Stopping(4))
    quiet = Quiet()
    train(run, components=planned_components((SMALL,)), reporter=quiet)
    assert any("chunk 16" in note and "(as planned before)" in note for note in quiet.notes)
    same_weights(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize("is_gpu", [False, True])
def test_a_start_plans_once_and_loads_a_model_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_gpu: bool
) -> None:
    """A GPU's plan is where states go, too. The configuration is read once, for the model without
    weights, in which all is checked. On a CPU a run that goes on does not search at all."""
    load_model(config=MODEL, dtype=torch.float32, seed=1).save_pretrained(tmp_path / "base")
    model = ModelConfig(path=str(tmp_path / "base"), resize_embeddings=True)
    run = tiny_run(tmp_path, schedule=AUTO, model=model)
    run = replace(run, data=replace(run.data, tokenizer=BYTES))
    asked: list[Question] = []
    read: list[str] = []
    for module, name in ((load_module, "_config_at"), (setup, "load_tokenizer")):
        monkeypatch.setattr(module, name, noted(read, name, getattr(module, name)))
    loaded = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(
        PreTrainedModel, "from_pretrained", classmethod(noted(read, "weights", loaded))
    )
    components = planned_components(SCHEDULES, asked=asked)
    if is_gpu:
        components = two_memories(monkeypatch, components)
    expected = ["_config_at", "load_tokenizer", "weights"]
    with pytest.raises(Stopped):
        train(run, components=components, reporter=Stopping(3))
    assert (len(asked), sorted(read)) == (1, expected)
    read.clear()
    train(run, components=components, reporter=Quiet())
    assert (len(asked), sorted(read)) == (1 + is_gpu, expected)


def two_memories(
    monkeypatch: pytest.MonkeyPatch, components: Components, *later: FreeMemory
) -> Components:
    """Have a CPU planned for as a GPU, whose two tiers have 1 GiB free at first, and `later` so
    much."""

    def machine(*_: Any) -> MachineSpec:
        return replace(one_memory(), unified=False, device_bytes=GIB, host_bytes=GIB)

    free = [FreeMemory(GIB, GIB), *later]
    monkeypatch.setattr(planning, "is_unified", lambda _: False)
    monkeypatch.setattr(planning, "free_now", lambda *_: free.pop(0) if free[1:] else free[0])
    return replaced(components, machine=machine)


@pytest.mark.parametrize(("lost", "searches"), [(2000, 1), (GIB - 180_000, 2)])
def test_the_plan_of_a_start_is_what_a_search_for_the_memory_of_now_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int, searches: int
) -> None:
    """Memory that is free changes while the weights are read."""
    now, asked = FreeMemory(GIB - lost, GIB), list[Question]()
    components = two_memories(monkeypatch, planned_components(SCHEDULES, asked=asked), now)
    run = tiny_run(tmp_path, schedule=AUTO)
    train(run, components=components, reporter=Quiet())
    assert len(asked) == searches
    searched = first_of(SCHEDULES)(replace(asked[-1], machine=now.limit(asked[0].machine)))
    assert read(run, "plan.json")["device_bytes"] == searched.to_json()["device_bytes"]
    assert read(run, "plan.json")["schedule"] == searched.to_json()["schedule"]
    assert searched.schedule.chunk == (48 if searches == 1 else 16)


def noted(seen: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        seen.append(name)
        return function(*arguments, **named)

    return call


@pytest.mark.parametrize("content", ["{", '{"machine": "other"}', '{"machine": "stand-in"}'])
def test_a_plan_of_somebody_else_is_not_kept(tmp_path: Path, content: str) -> None:
    run = tiny_run(tmp_path, schedule=AUTO, steps=3)
    train(run, components=planned_components((MIDDLE,)), reporter=Quiet())
    (tmp_path / "run" / "plan.json").write_text(content)
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "step-00000003").rename(tmp_path / "aside")
    train(run, components=planned_components((SMALL,)), reporter=Quiet())
    assert read(run, "plan.json")["fields"]["chunk"] == 8


def test_the_planner_itself_plans_a_run(tmp_path: Path) -> None:
    """Its own search, on a machine whose rates are made up: the memory is what it said."""
    run = tiny_run(tmp_path, schedule=AUTO, steps=3)
    parts = replaced(
        planned_components(SCHEDULES), best_plan=Components().best_plan, evaluate=evaluate
    )
    found = train(run, components=parts, reporter=Quiet()).comparison
    assert found is not None
    ratio = found.predicted_bytes / found.measured_bytes
    assert abs(ratio - 1) < 0.02  # what every plan is held to
    plan = read(run, "plan.json")
    assert plan["fits"]
    assert plan["seconds_per_step"] > 0
    assert plan["alternatives"]
    again = replace(run, folder=str(tmp_path / "again"))
    small = replaced(parts, machine=lambda *_: one_memory(200_000))
    with pytest.raises(UnsupportedError, match="schedule: none fits"):
        train(again, components=small, reporter=Quiet())


@pytest.fixture
def step_planner(monkeypatch: pytest.MonkeyPatch) -> list[Question]:
    """What a Step's planner is asked; it answers with one of SCHEDULES."""
    asked: list[Question] = []
    components = planned_components(SCHEDULES, asked=asked)
    monkeypatch.setattr(planning, "StepPlanner", partial(planning.StepPlanner, components))
    return asked


def step_gradients(schedule: Schedule | str, *batches: Tensor) -> tuple[Step, list[Tensor]]:
    step = Step(load_tiny(config=MODEL, dtype=torch.float64, seed=0), schedule)
    losses = [step(ids, ids) for ids in batches]
    return step, [
        *losses,
        *(p.grad for p in step.stages.model.parameters() if p.grad is not None),
    ]


def test_a_step_plans_at_its_first_call(
    step_planner: list[Question], caplog: pytest.LogCaptureFixture
) -> None:
    ids = torch.arange(48)[None]
    step, found = step_gradients("auto", ids, ids)
    assert step.schedule == LARGE
    assert step.plan is not None
    assert step.plan.schedule is step.schedule
    (question,) = step_planner
    assert (question.run, question.dtype) == (RunSpec(1, 48), "float64")
    assert question.optimizer is Optimizer.ADAMW
    assert question.accumulates
    (line,) = [r.message for r in caplog.records if r.name.startswith("farspan")]
    assert line.startswith("schedule: grouped: chunk 48; groups of 2 layers each")
    assert line.endswith("(for 1 x 48 tokens)")
    _, expected = step_gradients(LARGE, ids, ids)
    assert len(found) == len(expected) > 10
    assert all(map(torch.equal, found, expected))


def test_a_step_plans_anew_for_what_no_plan_covers(step_planner: list[Question]) -> None:
    shapes = (1, 24), (1, 16), (2, 12), (1, 48), (2, 20), (2, 12), (1, 48)
    batches = [torch.arange(rows * tokens).view(rows, tokens) for rows, tokens in shapes]
    step, found = step_gradients("auto", *batches)
    runs = [(q.run.batch, q.run.tokens) for q in step_planner]
    assert runs == [(1, 24), (2, 12), (1, 48), (2, 20)]
    _, expected = step_gradients(SMALL, *batches)
    for one, other in zip(found, expected, strict=True):
        assert_exact(one, other)
    step.stages.model.get_input_embeddings().weight.requires_grad_(False)
    step(batches[0], batches[0])
    assert len(step_planner) == 4  # fewer parameters are trained
    step.stages.model.requires_grad_(True)
    step.evaluate(batches[0], batches[0])
    assert len(step_planner) == 4


def test_a_step_of_values_is_planned_as_one(step_planner: list[Question]) -> None:
    """One that was planned for one pass is not taken for it; an evaluation is no such step."""
    ids = torch.arange(48)[None]
    step = Step(load_tiny(config=MODEL, dtype=torch.float64, seed=0), "auto")
    with torch.no_grad():
        step.logprobs(ids)
    step(ids, ids)
    assert [question.loss.is_cut for question in step_planner] == [False]
    step.logprobs(ids).sum().backward()
    assert [question.loss.is_cut for question in step_planner] == [False, True]
    step(ids, ids)
    step.logprobs(ids[:, :20]).sum().backward()
    assert len(step_planner) == 2


def test_a_step_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    components = planned_components(SCHEDULES, size=1000)
    monkeypatch.setattr(planning, "StepPlanner", partial(planning.StepPlanner, components))
    step = Step(load_tiny(config=MODEL, dtype=torch.float64, seed=0), "auto")
    with pytest.raises(UnsupportedError, match="schedule: auto has not chosen yet"):
        print(step.schedule)
    with pytest.raises(
        UnsupportedError, match=r"schedule: none fits .* give the step farspan\.plan\("
    ):
        step(torch.arange(48)[None], torch.arange(48)[None])


def test_a_step_that_must_be_told_is_refused() -> None:
    model = load_tiny(config=MODEL, dtype=torch.float64, seed=0)
    with pytest.raises(
        UnsupportedError, match="selector: schedule='auto' plans for dense attention"
    ):
        Step(model, "auto", selector=lambda votes, _: votes)
