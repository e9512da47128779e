"""The first screen shows its data, the data are the planner's, and what it claims is on record."""

import json
import math
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import performance, readme
from benchmarks.gpu.session import is_exact
from benchmarks.performance import PUBLISHED
from benchmarks.tables import ROOT, load
from farspan.cli import FAILED
from farspan.cli.plan import app
from farspan.planner.plans import fits, longest_contexts
from farspan.program.strategies import GROUPED
from farspan.spec import VERSION

LINES = 136


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return load("readme")


def page() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def test_everything_was_asked_and_called_planned(record: dict[str, Any]) -> None:
    assert record["farspan"] == VERSION
    assert record["machines"] == readme.MACHINES
    asked = [(row["model"], row["way"], row["machine"]) for row in record["longest"]]
    names = (readme.MODELS, readme.WAYS, readme.MACHINES)
    assert asked == [(m, w, on) for m in names[0] for w in names[1] for on in names[2]]
    assert "**All planned**" in page()
    for row in record["longest"]:
        found = row["longest"]
        assert found is None or found["seconds"] <= record["max_step"]


ROWS = [("Qwen3-8B", "QLoRA", "RTX 4090, 128 GiB"), ("Qwen3-32B", "LoRA", "H100, 256 GiB")]


def longest_of(record: dict[str, Any], model: str, way: str, machine: str) -> dict[str, Any]:
    rows = ((row["model"], row["way"], row["machine"], row["longest"]) for row in record["longest"])
    (found,) = (row[3] for row in rows if row[:3] == (model, way, machine))
    return found


@pytest.mark.parametrize(("model", "way", "machine"), ROWS)
def test_the_data_are_of_plans_that_fit(
    record: dict[str, Any], model: str, way: str, machine: str
) -> None:
    """And take the time that is said."""
    row = longest_of(record, model, way, machine)
    question = readme.asked(model, row["options"], machine, row["tokens"])
    assert question is not None
    assert fits(question)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("model", "way", "machine"), ROWS)
def test_the_data_are_the_planners(
    record: dict[str, Any], model: str, way: str, machine: str
) -> None:
    """A search by the same options finds the context again."""
    row = longest_of(record, model, way, machine)
    question = readme.asked(model, row["options"], machine, row["tokens"])
    assert question is not None
    again = longest_contexts(question, [GROUPED], max_step=record["max_step"])[GROUPED]
    assert again.question.run.tokens == row["tokens"]


def test_the_claim_is_on_record() -> None:
    """The measured steps, their share of the peak, the plans, and the published speed beside it."""
    h100, h200 = (
        [
            row
            for row in json.loads(path.read_text(encoding="utf-8"))["measurements"]
            if is_exact(row)
        ]
        for path in (performance.H100, performance.RECORD)
    )
    (row,) = (step for step in h100 if step["name"] == "auto at 262144")
    (beside,) = (step for step in h200 if step["name"] == "auto at 262144")
    text = " ".join(page().split())
    assert f"256K tokens, takes {row['seconds']:.0f} s on one H100 of 80 GB" in text
    assert f"at {row['mfu']:.1%} MFU" in text
    assert f"on one H200 {beside['seconds']:.0f} s, " in text
    assert f"{PUBLISHED[row['tokens']] / beside['seconds']:.1f} times as fast" in text
    memory = max(abs(step["device_bytes_over_planned"] - 1) for step in h100)
    time = max(abs(step["seconds"] / step["planned"]["seconds"] - 1) for step in h100)
    rounded = [math.ceil(200 * size) / 2 for size in (time, memory)]
    assert "within {:g}% of the time and {:g}% of the memory".format(*rounded) in text


@pytest.mark.exhaustive
def test_the_plan_on_the_page_is_the_planners() -> None:
    (block,) = (part for part in page().split("```") if part.startswith("\n$ farspan plan "))
    command, *lines = block.strip().splitlines()
    done = CliRunner().invoke(app, command.removeprefix("$ farspan plan ").split())
    assert done.exit_code == FAILED
    said = " ".join(done.output.split())
    for part in "\n".join(lines).split("\n...\n"):
        assert " ".join(part.split()) in said


def test_a_first_screen_is_short() -> None:
    assert len(page().splitlines()) <= LINES
