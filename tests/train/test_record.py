"""What a run writes down of itself: commands without secrets, a step by cause and by work."""

import json
from pathlib import Path
from typing import Any

import pytest

from farspan.engine.step import Step
from farspan.formatting import without_home
from farspan.program.work import WorkKind
from farspan.train.config import RunConfig
from farspan.train.record import HIDDEN, UPDATE, command_text
from farspan.train.trainer import train
from tests.train.test_engine import SCHEDULE, interrupted
from tests.train.tiny import Quiet, fit, metrics, replaced, tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run of three steps, each of two batches."""
    made = tiny_run(tmp_path_factory.mktemp("run"), schedule=SCHEDULE, steps=3)
    train(made, reporter=Quiet())
    return made


def written(run: RunConfig, name: str) -> dict[str, Any]:
    found = json.loads((Path(run.folder) / name).read_text())
    assert isinstance(found, dict)
    return found


def tops(parts: dict[str, int | list[int]]) -> list[int]:
    frames = max(len(sizes) for sizes in parts.values() if isinstance(sizes, list))
    wide = ([size] * frames if isinstance(size, int) else size for size in parts.values())
    return [sum(sizes) for sizes in zip(*wide, strict=True)]


def test_the_measured_peak_is_the_runs_own(run: RunConfig) -> None:
    memory, first = written(run, "step.json")["memory"], metrics(run)[1]
    planned, measured = memory["planned"], memory["measured"]
    held = sum(measured["parts"][part] for part in ("weights", "optimizer"))
    assert measured["peak"] - held == first["memory_measured_bytes"]
    assert planned["peak"] - held == first["memory_predicted_bytes"]
    assert max(tops(measured["parts"])) == measured["peak"]
    assert set(tops(planned["parts"])) == {planned["peak"]}  # arenas are held as a whole
    assert (memory["tier"], memory["step"]) == ("main memory", 1)


def test_causes_are_those_of_the_program(run: RunConfig) -> None:
    """What the engine plans is the same on both sides; gradients appear as they are made."""
    memory = written(run, "step.json")["memory"]
    planned, measured = memory["planned"]["parts"], memory["measured"]["parts"]
    for part in ("weights", "optimizer", "x", "kv", "dkv", "attention", "placement"):
        assert planned[part] == measured[part], part
    about = written(run, "about.json")["memory"]
    assert planned["cells"] == about["transient"]
    assert min(measured["gradients"]) >= 0
    assert measured["gradients"][-1] == about["gradients"]
    assert min(measured["cells"]) >= 0


def test_the_walk_has_the_times_of_the_step(run: RunConfig) -> None:
    """The page's tests hold the walk itself to the program."""
    found = written(run, "step.json")
    drawn, memory = found["drawn"], found["memory"]
    assert drawn["time"] == sorted(drawn["time"])
    assert len(drawn["time"]) == len(drawn["walk"]["op"]) == len(memory["measured"]["parts"]["kv"])
    assert 0 < drawn["time"][-1] <= drawn["seconds"] < found["seconds"]["total"]
    assert all(states[-1] >> 8 == 3 for states in drawn["walk"]["cells"])  # backward done
    assert drawn["walk"]["layers"] == [0, 1]


def test_seconds_by_kind_of_work_are_within_the_step(run: RunConfig) -> None:
    seconds = written(run, "step.json")["seconds"]
    assert (seconds["step"], seconds["metered"]) == (2, False)
    assert seconds["total"] == metrics(run)[2]["seconds"]
    assert set(seconds["parts"]) <= {*WorkKind, UPDATE}
    assert {WorkKind.FORWARD, WorkKind.BACKWARD, WorkKind.HEAD, UPDATE} <= set(seconds["parts"])
    assert 0.2 * seconds["total"] < sum(seconds["parts"].values()) <= seconds["total"]


def test_each_part_of_a_run_is_written_down(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, schedule=SCHEDULE)
    interrupted(run, 30)
    (first,) = written(run, "history.json")["parts"]
    assert first["started"] <= first["ended"]
    assert first["versions"]["farspan"]
    assert first["machine"]["host_bytes"] > 0
    train(run, reporter=Quiet())
    again, second = written(run, "history.json")["parts"]
    assert again == first
    assert second["ranks"] == 1
    assert "error" not in second


def test_a_part_that_failed_says_so(tmp_path: Path) -> None:
    """Of a plain step there are no instructions to look at."""

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    run = tiny_run(tmp_path)
    with pytest.raises(RuntimeError, match="broken"):
        fit(run, hook=fail)
    (part,) = written(run, "history.json")["parts"]
    assert part["error"] == "RuntimeError"
    assert not (Path(run.folder) / "step.json").exists()


def test_a_command_is_written_without_secrets_and_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    words = ["/opt/lib/farspan/__main__.py", "train", "/home/someone/a run.yaml"]
    assert command_text(words) == "farspan train ~/'a run.yaml'"
    assert command_text(["/usr/bin/farspan", "plan"]) == "farspan plan"
    assert command_text(["/x/loop.py", "--lr", "1"]) == "python loop.py --lr 1"
    assert command_text(["/x/pytest/__main__.py"]) == "python -m pytest"
    for given in (
        ["--hf-token", "abc123"],
        ["--hf-token=abc123"],
        ["--set", "hub.token=abc123"],
        ["--wandb_api_key", "abc123"],
        ["--set", "name=hf_abc123abc123abc123"],
        ["https://me:abc123@host/x"],
    ):
        shown = command_text(["farspan", *given])
        assert "abc123" not in shown, given
        assert HIDDEN in shown
    plain = ["--set", "data.tokenizer=bytes", "--set", "schedule.kv_block=2", "--key", "--json"]
    assert command_text(["farspan", *plain]) == " ".join(["farspan", *plain])
    assert (
        without_home("in /home/someone/x, not /home/someones/x") == "in ~/x, not /home/someones/x"
    )


def test_being_looked_at_changes_no_bit(tmp_path: Path, run: RunConfig) -> None:
    """With a step that nothing can be told of an instruction, the losses are the same."""

    class Unwatched(Step):
        def __call__(self, *given: Any, **named: Any) -> Any:
            self.watch = None
            return super().__call__(*given, **named)

    bare = tiny_run(tmp_path, schedule=SCHEDULE, steps=3)
    train(bare, components=replaced(make_step=Unwatched), reporter=Quiet())
    assert not (Path(bare.folder) / "step.json").exists()
    for ours, theirs in zip(metrics(run), metrics(bare), strict=True):
        for key in ("loss", "grad_norm", "heldout_loss", "memory_measured_bytes"):
            assert ours.get(key) == theirs.get(key), key
