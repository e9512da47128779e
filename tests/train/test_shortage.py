"""A step that runs out of memory is taken again with less, as if nothing had happened."""

import json
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from farspan.engine.tiers import DeviceTooSmall
from farspan.hf.describe import describe
from farspan.hf.stages import CausalLMStages
from farspan.host import TooLarge
from farspan.planner.request import Question
from farspan.spec import RunSpec, Schedule, Tier, UnsupportedError
from farspan.train.config import RunConfig
from farspan.train.oom import NoScheduleFits, find_shortage, needed
from farspan.train.step_runner import RETRIES, TrainingResult
from farspan.train.trainer import train
from farspan.train.yaml_config import to_mapping
from tests.grids import part_of
from tests.train.planner import one_memory
from tests.train.test_interrupt import same_metrics, same_weights
from tests.train.tiny import (
    MODEL,
    STEPS,
    Quiet,
    TinyStep,
    fit,
    load_tiny,
    metrics,
    replaced,
    tiny_components,
    tiny_run,
)


def main_memory_error() -> RuntimeError:
    """As torch words it."""
    try:
        torch.empty(2**60)
    except RuntimeError as error:
        return error
    raise AssertionError("a machine with an exbibyte")


def chained() -> UnsupportedError:
    try:
        raise UnsupportedError("model: cannot be run") from torch.OutOfMemoryError(
            "CUDA out of memory."
        )
    except UnsupportedError as error:
        return error


SHORTAGES = [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"), Tier.DEVICE),
    (main_memory_error(), Tier.HOST),
    (RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: 9"), Tier.HOST),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), "device"),
    (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), Tier.DEVICE),
    (TooLarge("host memory: a step needs 2 GiB"), Tier.HOST),
    (DeviceTooSmall("device memory: a step needs 2 GiB"), Tier.DEVICE),
    (MemoryError(), Tier.HOST),
    (chained(), Tier.DEVICE),
]


@pytest.mark.parametrize(("error", "tier"), SHORTAGES)
def test_a_shortage_is_known_by_its_error(error: BaseException, tier: Tier) -> None:
    found = find_shortage(error)
    assert found is not None
    assert found.tier == tier
    assert found.message
    assert "\n" not in found.message


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        UnsupportedError("chunk: 0"),
        ValueError(),
    ],
)
def test_other_errors_are_none(error: BaseException) -> None:
    assert find_shortage(error) is None


class Watched:
    """Makes tiny steps that run out of memory at a chosen cell, and keeps what was made."""

    def __init__(self, fails: Callable[[int, int], bool], kind: type[TinyStep] = TinyStep) -> None:
        self.fails = fails  # of the number of the step made and of its cell
        self.kind = kind
        self.schedules: list[Schedule] = []
        self.steps: list[weakref.ref[TinyStep]] = []
        self.cells = 0

    def make(self, model: Any, schedule: Schedule) -> TinyStep:
        assert all(step() is None for step in self.steps), "the step before is still there"
        self.schedules.append(schedule)
        number, self.cells = len(self.schedules), 0

        def hook(_: TinyStep, __: int) -> None:
            self.cells += 1
            if self.fails(number, self.cells):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

        step = self.kind(model, hook)
        self.steps.append(weakref.ref(step))
        return step


def fit_watched(run: RunConfig, watched: Watched, quiet: Quiet) -> TrainingResult:
    return train(
        run, components=replaced(tiny_components(), make_step=watched.make), reporter=quiet
    )


def shortages(run: RunConfig) -> list[dict[str, Any]]:
    return [line for line in metrics(run) if "out_of_memory" in line]


@pytest.mark.parametrize("cell", part_of([1, 3, 12, 20, 28], 1, 20))
def test_a_step_is_taken_again_on_the_same_data(tmp_path: Path, cell: int) -> None:
    """At cells of the first evaluation, of the middle of a step and of a later evaluation: weights
    and metrics are those of a run that never failed."""
    whole = tiny_run(tmp_path, folder=str(tmp_path / "whole"))
    fit(whole)
    run, quiet = tiny_run(tmp_path), Quiet()
    watched = Watched(lambda number, cells: number == 1 and cells == cell)
    assert fit_watched(run, watched, quiet).step == STEPS
    same_weights(tmp_path / "whole", tmp_path / "run")
    (line,) = shortages(run)
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    kept = [x for x in text.splitlines() if "out_of_memory" not in x]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(kept) + "\n")
    same_metrics(tmp_path / "whole", tmp_path / "run")
    first, second = watched.schedules
    assert first != second
    assert line["schedule"] == to_mapping(second)
    assert line["out_of_memory"] == "device"
    assert any(
        re.search(r"out of memory .*2 GiB\nretry 1 of 4 with .*; logits of 24 tokens", note)
        for note in quiet.notes
    )
    about = json.loads((tmp_path / "run" / "about.json").read_text())
    assert about["schedule"] == to_mapping(second)


def test_random_numbers_of_a_failed_step_are_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Noisy(TinyStep):
        def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            noise = torch.randn(())
            loss = super().__call__(*args, **kwargs)
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.grad += 0.01 * noise
            return loss

    monkeypatch.setattr("tests.train.tiny.TinyStep", Noisy)
    fit(tiny_run(tmp_path, folder=str(tmp_path / "whole")))
    watched = Watched(lambda number, cells: number == 1 and cells == 20, Noisy)
    fit_watched(tiny_run(tmp_path), watched, Quiet())
    assert len(watched.schedules) == 2
    same_weights(tmp_path / "whole", tmp_path / "run")


def test_tries_are_bounded_and_the_last_step_is_saved(tmp_path: Path) -> None:
    fit(tiny_run(tmp_path, folder=str(tmp_path / "whole")))
    run, quiet = tiny_run(tmp_path), Quiet()
    # Every engine fails; the first one only after some steps.
    watched = Watched(lambda number, cells: cells >= (20 if number == 1 else 2))
    with pytest.raises(NoScheduleFits) as caught:
        fit_watched(run, watched, quiet)
    message = str(caught.value)
    saved = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())[-1]
    done = int(saved.removeprefix("step-"))
    assert done >= 1
    first, *attempts, advice = message.splitlines()
    assert first == f"step {done + 1}: memory: ran out with"
    assert [line.split()[0] for line in attempts] == ["(1)", "(2)", "(3)", "(4)", "(5)"]
    assert advice.startswith("shorten the context")
    assert f"Step {done} is saved: the same command resumes" in message
    assert len(watched.schedules) == RETRIES + 1 == len(shortages(run)) + 1
    assert message.count("CUDA out of memory") == RETRIES + 1
    model = describe(CausalLMStages(load_tiny(config=MODEL, dtype=torch.float32, seed=0)))
    question = Question(model, RunSpec(1, 48), one_memory(), dtype="float32")
    sizes = [needed(question, schedule, tuple(Tier)) for schedule in watched.schedules]
    assert sizes == sorted(set(sizes), reverse=True)
    assert sizes[-1] < sizes[0] / 2
    assert len({text.partition(" ")[2].partition(": CUDA")[0] for text in attempts}) == 5
    assert fit(run).step == STEPS
    same_weights(tmp_path / "whole", tmp_path / "run")


@pytest.mark.exhaustive
def test_a_later_step_may_run_out_again(tmp_path: Path) -> None:
    """The bound is for one step: every engine lasts for about one."""
    run = tiny_run(tmp_path, evaluation=replace(tiny_run(tmp_path).evaluation, every=0))
    watched = Watched(lambda number, cells: cells == 8 and number < 6)
    result = fit_watched(run, watched, Quiet())
    assert result.step == STEPS
    assert len(shortages(run)) >= 3


def test_other_errors_of_a_step_pass(tmp_path: Path) -> None:
    class Broken(TinyStep):
        def __call__(self, *_: object, **__: object) -> torch.Tensor:
            raise RuntimeError("shapes cannot be multiplied")

    def make(model: nn.Module, _: Schedule) -> TinyStep:
        return Broken(model)

    parts = replaced(tiny_components(), make_step=make)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        train(tiny_run(tmp_path), components=parts, reporter=Quiet())


def test_before_the_first_step_nothing_is_saved(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    with pytest.raises(
        NoScheduleFits, match=r"^memory: ran out with\n  \(1\) grouped: chunk 16,384"
    ):
        fit_watched(run, Watched(lambda *_: True), Quiet())
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
