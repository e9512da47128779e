"""The page on post-training shows its data, and the data are those of the planner."""

from typing import Any

import pytest

from benchmarks import post_training as of
from benchmarks.tables import DOCS, load
from farspan.planner.feasibility import loss_seconds
from farspan.planner.plans import LEAST, best_plan, fits
from farspan.program.strategies import GROUPED
from farspan.spec import VERSION, LossKind


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return load("post_training")


def page() -> str:
    return (DOCS / "how-to/post-training.md").read_text(encoding="utf-8")


def test_everything_was_asked_and_says_of_what(record: dict[str, Any]) -> None:
    assert record["farspan"] == VERSION
    assert record["date"].startswith("20")
    named = [
        (way, loss, machine)
        for way in of.WAYS
        for loss in of.LOSSES
        for machine in of.MACHINES
        if of.asked(way, loss, machine, LEAST) is not None
    ]
    for rows in (record["longest"], record["steps"]):
        assert [(row["way"], row["loss"], row["machine"]) for row in rows] == named
    assert "are planned by the rates of presets; none was measured" in page()


def test_a_loss_takes_what_it_is_said_to(record: dict[str, Any]) -> None:
    """Log-probabilities a few percent of one pass, and a reference's forward up to a third."""
    for row in record["steps"]:
        one, cut, whole = row["parts"]
        kind, reference = of.LOSSES[row["loss"]]
        assert (cut > one) is (kind is not LossKind.SFT)
        assert cut <= 1.06 * one
        evaluates = reference in ("frozen", "adapters-off")
        assert whole == cut or evaluates
        assert whole - cut <= 0.36 * one


@pytest.mark.parametrize("loss", ["DPO, IPO, KTO, frozen", "ORPO, GRPO"])
def test_the_data_are_the_planners(record: dict[str, Any], loss: str) -> None:
    """Planned anew: a step's seconds, and that nothing longer by a fortieth fits."""
    machine = "RTX 4090, 256 GiB"
    (row,) = (
        r
        for r in record["longest"]
        if (r["way"], r["loss"], r["machine"]) == ("full", loss, machine)
    )
    tokens = row["longest"]["tokens"]
    for context, does in ((tokens, True), (tokens + tokens // 40 + 1024, False)):
        question = of.asked("full", loss, machine, context)
        assert question is not None
        assert fits(question) is does


@pytest.mark.exhaustive
def test_steps_are_the_planners(record: dict[str, Any]) -> None:
    way, loss, machine = "LoRA", "DPO, IPO, KTO, adapters off", "H100, 1 TiB"
    (row,) = (
        r for r in record["steps"] if (r["way"], r["loss"], r["machine"]) == (way, loss, machine)
    )
    question = of.asked(way, loss, machine, record["context"])
    assert question is not None
    plan = best_plan(question, [GROUPED])
    assert plan.seconds.total == pytest.approx(row["seconds"])
    assert list(loss_seconds(plan)) == pytest.approx(row["parts"])
