"""A rank that fails in mid-run: the others say which, and the same command makes up for it."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from farspan.program.layout import Parallel
from farspan.program.strategies import AUTO
from farspan.spec import Schedule
from farspan.train import trainer as loop
from farspan.train.config import ModelConfig, RunConfig, ScheduleConfig
from farspan.train.yaml_config import to_mapping
from tests.distributed.launched import launch
from tests.train.crash import outcome
from tests.train.faulty import ACCUMULATE, faulty_components, fit
from tests.train.planner import planned_components
from tests.train.tiny import MODEL, STEPS, Quiet, replaced, tiny_run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def a_run(root: Path, name: str) -> RunConfig:
    return tiny_run(
        root,
        folder=str(root / name),
        model=ModelConfig(config=MODEL | {"num_key_value_heads": 2}),
        schedule=ScheduleConfig(strategy="grouped", chunk=16, groups=1),
        parallel=Parallel(ulysses=2, timeout=20.0),
        accumulate=ACCUMULATE,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Where a run is that nothing happens to, and what it leaves."""
    root = tmp_path_factory.mktemp("whole")
    ended = launch(root / "said", 2, fit, a_run(root, "run"), "nothing")
    assert [end.said for end in ended] == [str(STEPS)] * 2, ended
    return root, outcome(root / "run")


@pytest.mark.parametrize(
    ("fault", "survivor", "words", "saved"),
    [
        pytest.param(
            *(
                "killed",
                0,
                r"RankFailed: rank 1: exited without reporting an error \(killed\?\)",
                2,
            ),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            *("raises", 0, "RankFailed: rank 1: ValueError: no such thing", 2),
            marks=pytest.mark.exhaustive,
        ),
        ("killed while saving", 1, r"RankFailed: rank \d: .*", 2),
    ],
)
def test_a_run_goes_on_after_a_fault(
    whole: tuple[Path, dict[str, Any]], fault: str, survivor: int, words: str, saved: int
) -> None:
    root, expected = whole
    name = fault.replace(" ", "-")
    run = a_run(root, name)
    ended = launch(root / "said", 2, fit, run, fault)
    assert re.match(words, ended[survivor].said), ended
    assert max(end.seconds for end in ended) < 40.0
    there = sorted(p.name for p in (root / name / "checkpoints").glob("step-*"))
    assert there == [f"step-{saved:08d}"]
    again = launch(root / "said", 2, fit, run, "nothing")
    assert [end.said for end in again] == [str(STEPS)] * 2, again
    assert outcome(root / name) == expected


LARGE = Schedule(chunk=48, groups=3, activation_save_fraction=1.0, attention_save_fraction=1.0)
SMALL = Schedule(chunk=16, groups=1)


def plan_and_fit(run: RunConfig, fault: str) -> str:
    planned = planned_components((LARGE, SMALL))
    parts = faulty_components(run.accumulate, fault)
    parts = replaced(
        parts, machine=planned.machine, best_plan=planned.best_plan, evaluate=planned.evaluate
    )
    quiet = Quiet()
    step = loop.train(run, components=parts, reporter=quiet).step
    return f"{step}\n" + "\n".join(quiet.notes)


@pytest.mark.exhaustive
def test_a_plan_that_ran_out_within_a_step_is_not_taken_again(tmp_path: Path) -> None:
    """Nobody could choose another one then: the next start does."""
    run = replace(a_run(tmp_path, "run"), schedule=ScheduleConfig(AUTO))
    first, _ = launch(tmp_path / "said", 2, plan_and_fit, run, "out of memory")
    words = "tried to allocate 3 GiB. Other ranks are still within the step, so this rank cannot"
    assert words in first.said, first
    assert "from the latest checkpoint with a smaller plan" in first.said, first
    folder = Path(run.folder)
    recorded = json.loads((folder / "shortage.json").read_text())
    assert (recorded["fields"]["chunk"], recorded["out_of_memory"]) == (48, "device")
    again, other = launch(tmp_path / "said", 2, plan_and_fit, run, "nothing")
    assert again.said.splitlines()[0] == other.said.splitlines()[0] == str(STEPS), again
    assert "resuming after step 2" in again.said
    assert "memory ran out before: tried to allocate 3 GiB; the first that fits" in again.said
    assert json.loads((folder / "plan.json").read_text())["fields"]["chunk"] == 16
    assert not (folder / "shortage.json").exists()


@pytest.mark.exhaustive
def test_torchrun_starts_it_again(whole: tuple[Path, dict[str, Any]]) -> None:
    """One command: rank 1 is killed in the third step, and all is as if it had not been."""
    root, expected = whole
    run = a_run(root, "torchrun")
    path = root / "run.yaml"
    path.write_text(yaml.safe_dump(to_mapping(run)))
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node=2"),
            *("--max-restarts=1", "-m", "tests.train.faulty", "train", str(path)),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # The launcher may end the survivor before it has said so itself.
    assert re.search(r"exitcode: -9\) local_rank: 1", done.stderr), done.stderr[-3000:]
    assert done.stdout.count("resuming after step 2 of 5") == 1
    assert done.stdout.count(f"{STEPS} steps done") == 1
    assert outcome(root / "torchrun") == expected
