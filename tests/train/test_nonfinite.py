"""A loss or gradient that is NaN or infinite stops the run with what is known about it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from farspan.train.config import OnNonfinite
from farspan.train.run_folder import find_nonfinite
from farspan.train.trainer import Diverged
from tests.train.tiny import STEPS, Quiet, TinyStep, fit, metrics, tiny_run

BAD_STEP = 3  # from 1
PARAMETER = "model.layers.1.mlp.up_proj.weight"


class BadLoss(TinyStep):
    """The loss of one batch is infinite, its gradient NaN from one parameter on."""

    def __call__(self, *args: object, **kwargs: object) -> torch.Tensor:
        loss = super().__call__(*args, **kwargs)  # type: ignore[arg-type]
        if self.calls == 2 * BAD_STEP:
            gradient = self.model.get_parameter(PARAMETER).grad
            assert gradient is not None
            gradient[1, 2] = float("nan")
            return loss + float("inf")
        return loss


class BadGradient(BadLoss):
    """As above, but the loss looks fine."""

    def __call__(self, *args: object, **kwargs: object) -> torch.Tensor:
        return super().__call__(*args, **kwargs).clamp(max=5.0)


@pytest.fixture
def bad(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[TinyStep]], None]:
    return lambda kind: monkeypatch.setattr("tests.train.tiny.TinyStep", kind)


@pytest.mark.parametrize(("kind", "what"), [(BadLoss, "loss"), (BadGradient, "gradient")])
def test_the_run_stops_with_a_diagnosis(
    tmp_path: Path, bad: Callable[..., None], kind: type, what: str
) -> None:
    bad(kind)
    run = tiny_run(tmp_path)
    with pytest.raises(Diverged, match=rf"step 3: {what} is not finite .*{PARAMETER}; see .*"):
        fit(run)
    diagnosis = json.loads((tmp_path / "run" / "diagnosis.json").read_text())
    assert diagnosis["step"] == BAD_STEP
    assert diagnosis["not_finite"] == what
    assert diagnosis["loss"] == "inf" or (what == "gradient" and diagnosis["loss"] > 5.0)
    assert diagnosis["grad_norm"] == "nan"
    assert diagnosis["first_bad_gradient"] == PARAMETER
    assert diagnosis["first_bad_parameter"] is None
    assert [b["sequence"] for b in diagnosis["batches"]] == [4, 5]
    assert all(name.endswith(".txt") for b in diagnosis["batches"] for name in b["documents"])
    checkpoints = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert checkpoints[-1] == f"step-{BAD_STEP - 1:08d}"


@pytest.mark.parametrize("kind", [BadLoss, BadGradient])
def test_such_a_batch_can_be_skipped(tmp_path: Path, bad: Callable[..., None], kind: type) -> None:
    bad(kind)
    run = tiny_run(tmp_path, nonfinite=OnNonfinite.SKIP)
    quiet = Quiet()
    result = fit(run, reporter=quiet)
    assert (result.step, result.skipped) == (STEPS, 1)
    assert any("step 3 skipped" in note for note in quiet.notes)
    (line,) = (line for line in metrics(run) if "nonfinite" in line)
    assert line["step"] == BAD_STEP
    assert "loss" not in line
    assert result.loss is not None
    assert result.loss < 5.6


def test_weights_that_are_bad_already_stop_even_a_run_that_skips(
    tmp_path: Path, bad: Callable[..., None]
) -> None:
    class BadWeight(TinyStep):
        def __call__(self, *args: object, **kwargs: object) -> torch.Tensor:
            if self.calls == 2:
                self.model.get_parameter(PARAMETER).data[0, 0] = float("inf")
            return super().__call__(*args, **kwargs)  # type: ignore[arg-type]

    bad(BadWeight)
    with pytest.raises(Diverged, match=f"parameter {PARAMETER} was already not finite"):
        fit(tiny_run(tmp_path, nonfinite=OnNonfinite.SKIP))


class BadHeldout(TinyStep):
    """The held-out loss is NaN from the second evaluation on; training is fine."""

    evaluations = 0

    def evaluate(self, *args: object, **kwargs: object) -> torch.Tensor:
        loss = super().evaluate(*args, **kwargs)  # type: ignore[arg-type]
        self.evaluations += 1
        return loss * float("nan") if self.evaluations > 2 else loss


def test_a_heldout_loss_that_is_not_finite_stops_the_run(
    tmp_path: Path, bad: Callable[..., None]
) -> None:
    bad(BadHeldout)
    run = tiny_run(tmp_path)
    message = r"step 2: the held-out loss is not finite \(nan\); all parameters .*diagnosis\.json"
    with pytest.raises(Diverged, match=message):
        fit(run)
    diagnosis = json.loads((tmp_path / "run" / "diagnosis.json").read_text())
    assert (diagnosis["step"], diagnosis["not_finite"]) == (2, "held-out loss")
    assert (diagnosis["loss"], diagnosis["grad_norm"]) == ("nan", None)
    assert len(diagnosis["batches"]) == 2
    checkpoints = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert checkpoints[-1] == "step-00000002"
    quiet = Quiet()
    bad(TinyStep)  # the same command evaluates again, and goes on if that is finite
    assert fit(run, reporter=quiet).step == STEPS
    assert "resuming after step 2 of 5" in quiet.notes
    assert [line["step"] for line in metrics(run) if "heldout_loss" in line] == [0, 2, 4, 5]


def test_a_heldout_loss_that_is_not_finite_can_be_passed_over(
    tmp_path: Path, bad: Callable[..., None]
) -> None:
    bad(BadHeldout)
    run = tiny_run(tmp_path, nonfinite=OnNonfinite.SKIP)
    quiet = Quiet()
    result = fit(run, reporter=quiet)
    assert (result.step, result.skipped) == (STEPS, 0)
    assert "step 2: the held-out loss is not finite" in quiet.notes
    assert [x["heldout_loss"] for x in metrics(run) if "heldout_loss" in x][1:] == ["nan"] * 3
    again = fit(run)
    assert again.heldout_loss is not None
    assert again.heldout_loss != again.heldout_loss


def test_a_norm_that_overflows_is_a_gradient_without_a_parameter() -> None:
    finding = find_nonfinite(1.0, {"w": torch.zeros(2)})
    assert finding.kind == "gradient"
    assert "but their norm or the loss is not" in finding.describe()
