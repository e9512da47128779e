"""`farspan-memory place` from end to end: what it prints, writes and refuses, and how it ends."""

import ctypes
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from farspan_memory import cli
from farspan_memory.errors import UnsupportedError
from farspan_memory.exact import Solution, place_flat
from farspan_memory.placement import Placement, PlacementError, PlacementRequest
from farspan_memory.replay import read_plan
from farspan_memory.trace import Malloc, Trace, to_csv, to_text, write_trace
from tests.memory.check_placement import check_placement
from tests.memory.instances import HARD, HARD_CAPACITY
from tests.memory.layers import step


def call(*arguments: object) -> Any:
    """The outcome of `farspan-memory place ARGUMENTS`."""
    return CliRunner().invoke(cli.app, ["place", *map(str, arguments)])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "step.txt"
    write_trace(step(4), path)
    return path


@pytest.mark.parametrize("method", ["auto", "flat", "exact", "bilevel"])
def test_every_method_gives_a_placement(trace: Path, method: str) -> None:
    result = call(trace, "--method", method, "--alignment", 1, "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output)
    requests = step(4).requests()
    placement = Placement(tuple(answer["addresses"]), answer["peak"], answer["lower_bound"])
    check_placement(requests, placement)
    assert answer["optimal"] == (answer["peak"] == answer["proved_bound"])
    assert answer["fits"] is None
    assert answer["seconds"] >= 0


def test_a_plan_is_written_for_its_trace(trace: Path, tmp_path: Path) -> None:
    result = call(trace, "-o", tmp_path / "plan.json")
    assert result.exit_code == 0, result.output
    plan = read_plan(tmp_path / "plan.json", step(4))
    assert plan.alignment == 512
    assert plan.peak == plan.lower_bound
    assert plan.optimal
    assert f"{plan.peak:,} bytes, optimal, proved" in result.output
    with pytest.raises(UnsupportedError, match="another program"):
        read_plan(tmp_path / "plan.json", step(5))


def test_a_hard_instance_fits_into_its_capacity() -> None:
    path = HARD / f"C.{HARD_CAPACITY}.csv"
    result = call(path, "--capacity", HARD_CAPACITY, "--json")
    answer = json.loads(result.output)
    assert result.exit_code == 0
    assert answer["fits"] is True
    assert answer["alignment"] == 1
    assert answer["lower_bound"] < answer["peak"] <= HARD_CAPACITY


@pytest.mark.parametrize("csv", [False, True])
def test_the_content_decides_the_alignment(tmp_path: Path, csv: bool) -> None:
    """A CSV's sizes are placed as they are, also in A.txt, and a trace's aligned, also in A.csv."""
    path = tmp_path / ("step.txt" if csv else "step.csv")
    path.write_text((to_csv if csv else to_text)(step(4)))
    assert json.loads(call(path, "--json").output)["alignment"] == (1 if csv else 512)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--capacity", 100), "does not fit, proved"),
        (("--capacity", HARD_CAPACITY, "--method", "flat"), "no plan found"),
    ],
)
def test_what_does_not_fit_ends_with_1(arguments: tuple[object, ...], words: str) -> None:
    result = call(HARD / f"C.{HARD_CAPACITY}.csv", *arguments)
    assert result.exit_code == 1
    assert words in result.output


def test_the_program_of_the_paper(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    path = tmp_path / "small.txt"
    write_trace(step(1), path)
    result = call(path, "--method", "mip", "--json")
    assert json.loads(result.output)["optimal"] is True


def test_what_the_solver_prints_is_not_among_the_answer(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def loud(problem: Sequence[PlacementRequest], *_: object) -> Solution:
        ctypes.CDLL(None).puts(b"a line of C")
        return place_flat(problem)

    monkeypatch.setattr(cli, "place_by_mip", loud)
    result = call(trace, "--method", "mip", "--json")
    assert json.loads(result.output)["method"] == "mip"
    ctypes.CDLL(None).fflush(None)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "a line of C\n")


def test_bilevel_needs_layers(tmp_path: Path) -> None:
    path = tmp_path / "bare.txt"
    write_trace(Trace((Malloc(1, 8),)), path)
    result = call(path, "--method", "bilevel")
    assert isinstance(result.exception, UnsupportedError)
    assert "bilevel needs marks of layers" in str(result.exception)


def test_no_time_is_refused(trace: Path) -> None:
    assert call(trace, "--time-limit", "nan").exit_code == 2
    assert call(trace, "--time-limit", "-1").exit_code == 2
    result = call(trace, "--time-limit", "0")
    assert isinstance(result.exception, UnsupportedError)
    assert "time-limit: expected more than 0 seconds" in str(result.exception)


def test_no_plan_leaves_unchecked(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A placer that puts everything at 0 is caught before anything is written."""

    def wrong(question: cli.PlacementOptions) -> tuple[Solution, str]:
        found = place_flat(question.requests)
        zeros = Placement((0,) * len(question.requests), 512, found.placement.lower_bound)
        return Solution(zeros, 512, 0.0), "wrong"

    monkeypatch.setitem(cli.METHODS, cli.Method.AUTO, wrong)
    plan = trace.with_suffix(".plan")
    result = call(trace, "-o", plan)
    assert isinstance(result.exception, PlacementError)
    assert not plan.exists()
