"""The walk from the training loop to the attention kernel is measured, and does not get longer."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import walk


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return walk.measure()


def test_the_command_is_near_the_step(found: dict[str, Any]) -> None:
    names = [frame.partition(":")[2] for frame in found["stack"]]
    loop = names.index(walk.LOOP)
    assert names[loop:][:4] == [
        walk.LOOP,
        "StepRunner.attempt",
        "TrainingLoop._gradients",
        walk.STEP,
    ]
    assert found["frames_cli_to_step"] == names.index(walk.STEP) + 2 <= 7


def test_the_stack_goes_on_to_a_kernel(found: dict[str, Any]) -> None:
    assert found["stack"][-1].startswith("attention/")
    assert 4 < found["frames_loop_to_kernel"] <= walk.MOST_FRAMES


def test_what_ran_is_counted(found: dict[str, Any]) -> None:
    assert {frame.partition(":")[0] for frame in found["stack"][1:]} <= set(found["names"]) | {
        "train/trainer.py"
    }
    assert len(found["names"]) == found["files"] < found["functions"] < found["lines"]


def test_a_step_runs_few_files(found: dict[str, Any]) -> None:
    assert found["files"] <= walk.MOST_FILES, found["names"]
    assert found["lines"] <= walk.MOST_LINES, found["names"]


def test_the_design_shows_the_walk(found: dict[str, Any]) -> None:
    design = (Path(walk.__file__).parents[1] / "docs/explanation/design.md").read_text("utf-8")
    assert "\n".join(f"  {frame}" for frame in found["stack"]) in design
    assert f"A step runs {found['files']} files." in design
