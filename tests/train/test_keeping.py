"""What a run keeps and when it ends: early stopping, the best checkpoint, callbacks."""

import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import farspan
from farspan.checkpoint.saver import list_checkpoints
from farspan.distributed.failure import RankFailed
from farspan.distributed.run_context import DistributedContext
from farspan.program.layout import Parallel
from farspan.spec import Tier, UnsupportedError
from farspan.train.config import (
    CheckpointConfig,
    Decay,
    EvaluationConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    StatesPlace,
)
from farspan.train.loggers import Callback, Callbacks
from farspan.train.observer import Interrupted
from farspan.train.step_runner import TrainingResult
from farspan.train.trainer import TrainingLoop, train
from farspan.train.yaml_config import to_mapping, write_mapping
from tests.grids import exhaustive
from tests.ranks import run_ranks
from tests.train.tiny import (
    Quiet,
    Stopped,
    Stopping,
    assert_same_weights,
    fit,
    tiny_components,
    tiny_run,
)

# Held-out losses by step: the lowest at 4, none lower in the three evaluations after it.
LOSSES = {0: 5.0, 2: 4.0, 3: 3.3, 4: 3.0, 6: 3.5, 8: 3.0, 10: 2.99, 12: 2.0}


SMALL = ScheduleConfig(strategy="grouped", chunk=16, groups=1)


def script(losses: Mapping[int, float] = LOSSES) -> None:
    def told(self: TrainingLoop, *_: object) -> dict[str, float]:
        return {"loss": losses[self.at.step]}

    TrainingLoop._heldout = told  # type: ignore[method-assign,assignment]


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingLoop, "_heldout", TrainingLoop._heldout)  # put back in the end
    script()


def a_run(root: Path, **changes: Any) -> RunConfig:
    run = tiny_run(
        root,
        steps=12,
        optimizer=OptimizerConfig(lr=1e-2, warmup=2, decay=Decay.CONSTANT),
        evaluation=EvaluationConfig(every=2, on_start=True, sequences=2, patience=2),
        checkpoints=CheckpointConfig(every=3, keep=1),
    )
    return replace(run, **changes)


def lasting(run: RunConfig, patience: int | None, min_delta: float = 0.0) -> RunConfig:
    return replace(run, evaluation=replace(run.evaluation, patience=patience, min_delta=min_delta))


def saved(run: RunConfig) -> list[str]:
    return [path.name[-2:] for path in list_checkpoints(Path(run.folder) / "checkpoints")]


@pytest.mark.parametrize(
    ("patience", "min_delta", "step"), [(1, 0.0, 6), (2, 0.0, 8), (3, 0.1, 10), (3, 0.0, 12)]
)
def test_a_run_stops_where_the_loss_no_longer_falls(
    tmp_path: Path, patience: int, min_delta: float, step: int
) -> None:
    result = fit(lasting(a_run(tmp_path), patience, min_delta))
    assert (result.step, result.exit_code) == (step, 0)
    assert (result.stopped is None) is (step == 12)
    if step < 12:
        assert result.message.startswith(f"stopped after step {step} of 12: held-out loss did")
        assert "below 3.0000 (step 4) in" in result.message
    assert (result.folder / "model" / "model.safetensors").is_file()


def test_a_killed_run_stops_at_the_same_step_with_the_same_bits(tmp_path: Path) -> None:
    whole = a_run(tmp_path / "whole")
    fit(whole)
    for begun in (5, 8):
        run = a_run(tmp_path / str(begun))
        with pytest.raises(Stopped):
            fit(run, reporter=Stopping(begun))
        assert fit(run).step == 8
        assert_same_weights(run, whole)


def test_a_run_that_has_stopped_does_nothing_more_until_it_may(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    fit(run)
    files = {p: p.stat().st_mtime_ns for p in Path(run.folder).rglob("*.safetensors")}
    calls: list[int] = []
    again = fit(run, lambda _, call: calls.append(call))
    assert (again.step, calls) == (8, [])
    assert "stopped after step 8 of 12" in again.message
    assert files == {p: p.stat().st_mtime_ns for p in Path(run.folder).rglob("*.safetensors")}
    on = fit(lasting(run, 3))
    assert (on.step, on.stopped) == (12, None)
    whole = lasting(a_run(tmp_path / "whole"), None)
    fit(whole)
    assert_same_weights(run, whole)


def test_evaluations_beside_the_regular_ones_do_not_count() -> None:
    config = EvaluationConfig(every=2, patience=2)
    assert config.why_stop({0: 1.0, 1: 2.0, 2: 2.0, 3: 2.0}) is None
    assert config.why_stop({0: 1.0, 2: float("nan"), 4: 2.0}) is not None
    assert EvaluationConfig(every=0).why_stop({0: 1.0, 5: 2.0}) is None


def test_losses_that_are_not_finite_end_a_run_in_words() -> None:
    bad = {0: float("nan"), 2: float("inf"), 4: float("nan")}
    why = EvaluationConfig(every=2, patience=3).why_stop(bad)
    assert why == "no finite held-out loss in 3 evaluations"


@pytest.mark.parametrize(("patience", "told"), [(5, False), (6, True)])
def test_patience_that_outlasts_a_run_is_told(tmp_path: Path, patience: int, told: bool) -> None:
    """Of 12 steps, with an evaluation every two."""
    quiet = Quiet()
    fit(lasting(a_run(tmp_path), patience), reporter=quiet)
    words = "evaluation.patience: has no effect: 6 evaluations, one every 2 steps, do not end"
    assert any(words in note for note in quiet.notes) is told


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"patience": 0}, r"patience: expected a whole number of at least 1"),
        (
            {"patience": 2, "every": 0},
            r"patience: counts evaluations, and every: 0 evaluates only after",
        ),
        ({"patience": 2, "min_delta": -1.0}, r"min_delta: expected 0 or more"),
        ({"min_delta": 0.1}, r"min_delta: needs patience"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        EvaluationConfig(**changes)


@pytest.mark.parametrize(
    ("part", "key"),
    [
        ({"evaluation": EvaluationConfig(patience=2)}, "evaluation.patience"),
        ({"checkpoints": CheckpointConfig(best=True)}, "checkpoints.best"),
    ],
)
def test_nothing_held_out_is_refused(tmp_path: Path, part: dict[str, Any], key: str) -> None:
    run = tiny_run(tmp_path)
    with pytest.raises(UnsupportedError, match=f"{key}: compares held-out losses"):
        replace(run, data=replace(run.data, held_out=0.0), **part)


# -- the best checkpoint -------------------------------------------------------------------------


def best_run(root: Path, **changes: Any) -> RunConfig:
    checkpoints = CheckpointConfig(every=3, keep=1, best=True)
    return a_run(root, **{"checkpoints": checkpoints, **changes})


def only(root: Path, steps: int, **changes: Any) -> RunConfig:
    """The same run, which had so many steps and nothing of this."""
    return lasting(a_run(root, steps=steps, checkpoints=CheckpointConfig(), **changes), None)


@pytest.mark.slow
@pytest.mark.parametrize("states", [StatesPlace.DEVICE, StatesPlace.DISK])
def test_the_best_is_kept_and_is_the_model(tmp_path: Path, states: StatesPlace) -> None:
    optimizer = replace(a_run(tmp_path).optimizer, states=states)
    run = best_run(tmp_path / "best", optimizer=optimizer)
    result = fit(run)
    assert (result.step, result.best, saved(run)) == (8, 4, ["04", "08"])
    assert "the model of step 4, the best on held-out text, is in" in result.message
    plain = only(tmp_path / "plain", 4, optimizer=optimizer)
    fit(plain)
    assert_same_weights(run, plain)
    before = (result.folder / "model" / "model.safetensors").stat().st_mtime_ns
    assert fit(run).best == 4
    assert (result.folder / "model" / "model.safetensors").stat().st_mtime_ns == before


def test_a_better_one_takes_its_place(tmp_path: Path) -> None:
    run = best_run(tmp_path)
    fit(run)
    result = fit(lasting(run, None))  # goes on from the last, not from the best
    assert (result.step, result.best, saved(run)) == (12, 12, ["12"])
    plain = only(tmp_path / "plain", 12)
    fit(plain)
    assert_same_weights(run, plain)


def test_a_best_one_that_is_damaged_is_named(tmp_path: Path) -> None:
    run = best_run(tmp_path)
    fit(run)
    path = Path(run.folder) / "checkpoints" / "step-00000004"
    (path / "rank-00000.safetensors").write_bytes(b"damaged")
    (Path(run.folder) / "model" / "farspan.json").write_text("{}")
    with pytest.raises(UnsupportedError, match=r"step-00000004.* move it away, and the same comm"):
        fit(run)
    path.rename(path.with_name("step-00000004-damaged"))
    assert fit(run).best == 8


@pytest.mark.parametrize("over", [False, True])
def test_a_kill_before_an_old_one_is_removed_leaves_no_more(tmp_path: Path, over: bool) -> None:
    """Also of a run that had come to its end, which takes no step."""
    run = a_run(tmp_path)
    if over:
        fit(run)
    else:
        with pytest.raises(Stopped):
            fit(run, reporter=Stopping(7))
    last = "step-00000008" if over else "step-00000006"
    folder = Path(run.folder) / "checkpoints"
    shutil.copytree(folder / last, folder / "step-00000003")
    seen: list[list[str]] = []
    fit(run, reporter=Watching(lambda: seen.append(saved(run))))
    assert seen == ([] if over else [["06"]])
    assert saved(run) == ["08"]


class Watching(Quiet):
    """Calls something when the steps begin."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self._call = call

    def start(self, *_: Any) -> None:
        self._call()


def test_what_is_the_best_only_after_a_signal_leaves_no_more(tmp_path: Path) -> None:
    """It came in the evaluation, whose step was saved without its loss."""
    run = replace(best_run(tmp_path), steps=4)
    whole = TrainingLoop._heldout

    def told(self: TrainingLoop, *arguments: Any) -> dict[str, float]:
        if self.at.step == 4 and not seen:
            seen.append(1)
            raise Interrupted(signal.SIGTERM)
        return whole(self, *arguments)

    seen: list[int] = []
    TrainingLoop._heldout = told  # type: ignore[method-assign,assignment]
    fit(run)
    assert saved(run) == ["02", "04"]  # that of step 2 is the best so far
    result = fit(run)
    assert (result.best, saved(run)) == (4, ["04"])


def on_ranks(runs: list[RunConfig]) -> None:
    script()
    for run in runs:
        train(run, reporter=Quiet())


@pytest.mark.exhaustive
def test_ranks_keep_the_best_in_parts(tmp_path: Path) -> None:
    shared = {"parallel": Parallel(data=2), "schedule": SMALL}
    run, plain = best_run(tmp_path, **shared), only(tmp_path / "b", 4, **shared)
    run_ranks(2, on_ranks, [run, plain])
    assert saved(run) == ["04", "08"]
    assert_same_weights(run, plain)


@pytest.mark.slow
def test_weights_in_main_memory_go_back_too(tmp_path: Path) -> None:
    schedule = replace(SMALL, weights=Tier.HOST)
    run, plain = best_run(tmp_path, schedule=schedule), only(tmp_path / "b", 4, schedule=schedule)
    for one in (run, plain):
        train(one, reporter=Quiet())
    assert saved(run) == ["04", "08"]
    assert_same_weights(run, plain)


# -- callbacks -----------------------------------------------------------------------------------


class Told(Callback):
    """Writes down what it is told, and answers one of it."""

    def __init__(self, event: str = "", answer: Any = None) -> None:
        self.events: list[str] = []
        self._event, self._answer = event, answer
        self.result: TrainingResult | None = None

    def _hear(self, event: str) -> Any:
        self.events.append(event)
        if event != self._event:
            return None
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def on_step(self, metrics: Mapping[str, Any]) -> Any:
        assert metrics["loss"] > 0
        return self._hear(f"step {metrics['step']}")

    def on_evaluation(self, metrics: Mapping[str, Any]) -> Any:
        assert metrics["heldout_loss"] == LOSSES[metrics["step"]]
        return self._hear(f"evaluation {metrics['step']}")

    def on_checkpoint(self, path: Path) -> Any:
        assert (path / "checkpoint.json").is_file()
        return self._hear(f"checkpoint {int(path.name[5:])}")

    def on_end(self, result: TrainingResult) -> None:
        self.result = result


def short(root: Path) -> RunConfig:
    return lasting(a_run(root, steps=4), None)


def called(run: RunConfig, *callbacks: Callback) -> TrainingResult:
    return train(run, callbacks=callbacks, components=tiny_components(), reporter=Quiet())


def test_callbacks_are_told_in_order(tmp_path: Path) -> None:
    told = Told()
    result = called(short(tmp_path), told)
    steps = ["evaluation 0", "step 1", "step 2", "evaluation 2", "step 3", "checkpoint 3"]
    assert told.events == [*steps, "step 4", "evaluation 4", "checkpoint 4"]
    assert told.result == result
    plain = short(tmp_path / "plain")
    fit(plain)
    assert_same_weights(short(tmp_path), plain)


@pytest.mark.parametrize(
    ("event", "answer", "why"),
    [
        ("step 2", "enough", "enough"),
        ("evaluation 2", True, "Told asked for it"),
        ("checkpoint 3", "enough", "enough"),
    ],
)
def test_a_callback_ends_a_run(tmp_path: Path, event: str, answer: Any, why: str) -> None:
    told, last = Told(event, answer), int(event[-1])
    run = short(tmp_path)
    result = called(run, Callback(), told)
    assert (result.step, result.stopped, result.exit_code) == (last, why, 0)
    assert f"stopped after step {last} of 4: {why}; the model is in" in result.message
    assert saved(run)[-1] == f"{last:02}"
    assert told.result == result
    assert (result.folder / "model" / "config.json").is_file()
    assert called(run).step == 4


@pytest.mark.parametrize("event", ["step 2", "evaluation 2", "checkpoint 3"])
def test_what_a_callback_raises_comes_out_once_the_step_is_saved(
    tmp_path: Path, event: str
) -> None:
    run, told = short(tmp_path), Told(event, KeyError("mine"))
    with pytest.raises(KeyError, match="mine") as caught:
        called(run, told)
    assert any(entry.name == "_hear" for entry in caught.traceback)
    assert saved(run)[-1] == f"{int(event[-1]):02}"
    assert told.result is None
    assert called(run).step == 4


def on_rank_1(run: RunConfig, answer: str | None) -> None:
    script()
    asked = Told("step 3", KeyError("mine") if answer is None else answer)
    there = [asked] if torch.distributed.get_rank() == 1 else []
    if answer is None:
        with pytest.raises((KeyError, RankFailed), match="mine"):
            train(run, callbacks=there, reporter=Quiet())
    else:
        result = train(run, callbacks=there, reporter=Quiet())
        assert (result.step, result.stopped) == (3, "enough")


@pytest.mark.slow
@pytest.mark.parametrize("answer", [exhaustive("enough"), None])
def test_one_rank_asks_for_all(tmp_path: Path, answer: str | None) -> None:
    run = replace(short(tmp_path), parallel=Parallel(data=2), schedule=SMALL)
    run = replace(run, data=replace(run.data, held_out=0.0))
    run_ranks(2, on_rank_1, run, answer)
    assert saved(run) == ["03"]


class TwoRanks(DistributedContext):
    """Of which this is the first, and a callback of the second has raised."""

    def all_gather(self, value: Any) -> list[Any]:
        if isinstance(value, int):
            return [value, 1]
        return [value, (None, "a callback raised KeyError: 'mine'")]


def test_what_one_rank_raises_in_the_end_is_raised_on_all(tmp_path: Path) -> None:
    result = TrainingResult(folder=tmp_path, step=1, steps=1)
    callbacks = Callbacks((), TwoRanks(torch.device("cpu")))
    with pytest.raises(RankFailed, match=r"rank 1: a callback raised KeyError: 'mine'"):
        callbacks.end(result)


def test_a_run_file_is_trained_by_the_packages_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, told = tmp_path / "run.yaml", Told()
    path.write_text(write_mapping(to_mapping(short(tmp_path))))
    result = farspan.train(path, callbacks=[told], components=tiny_components(), reporter=Quiet())
    assert (result.step, told.result) == (4, result)
    assert farspan.Callback is Callback
