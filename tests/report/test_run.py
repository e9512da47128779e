"""The page of a run says what its folder says, whatever is missing or damaged there."""

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from farspan.cli import app
from farspan.cli.with_torch import metrics_sum, report_after
from farspan.planner.prices import Prices
from farspan.report.plan import step_spans
from farspan.report.run import (
    MOST_RUNS,
    OLDER,
    POINTS,
    REST,
    read_run,
    run_json,
    run_page,
    runs_json,
)
from farspan.spec import UnsupportedError
from farspan.train.config import RunConfig
from farspan.train.record import planned_json
from farspan.train.trainer import train
from tests.grids import crossed, part_of
from tests.report.browser import SCHEMES, WIDTHS, Browser
from tests.report.test_page import data_of
from tests.report.test_timeline import planned
from tests.train.test_engine import SCHEDULE
from tests.train.tiny import Quiet, fit, metrics, tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    made = tiny_run(tmp_path_factory.mktemp("first"), schedule=SCHEDULE)
    train(made, reporter=Quiet())
    return made


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Of which no step was looked at, as one of an earlier version; the end of an element is a part
    of its path."""
    root = tmp_path_factory.mktemp("other") / "</script>"
    root.mkdir(parents=True)
    made = tiny_run(root, steps=3, seed=7)
    fit(made)
    (Path(made.folder) / "history.json").unlink()
    return made


@pytest.fixture(scope="module")
def pages(
    run: RunConfig, other: RunConfig, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """One run, and two runs."""
    folder, runs = tmp_path_factory.mktemp("pages"), [Path(of.folder) for of in (run, other)]
    for count in (1, 2):
        (folder / f"{count}.html").write_text(run_page([read_run(of) for of in runs[:count]]))
    return {name: folder / f"{count}.html" for name, count in (("one", 1), ("two", 2))}


def told(*arguments: str) -> None:
    app(["report", *arguments], standalone_mode=False)


# -- numbers ---------------------------------------------------------------------------------------


def test_numbers_are_those_of_the_folder(run: RunConfig, pages: dict[str, Path]) -> None:
    (shown,) = data_of(pages["one"].read_text())["runs"]
    lines = metrics(run)
    for name in ("loss", "heldout_loss", "tokens_per_second", "lr", "grad_norm"):
        known = [(line["step"], line[name]) for line in lines if name in line]
        curve = shown["curves"][name]
        assert list(zip(curve["x"], curve["y"], strict=True)) == known
        assert curve["of"] == len(known)
    first = next(line for line in lines if "memory_measured_bytes" in line)
    step = json.loads((Path(run.folder) / "step.json").read_text())
    assert shown["step"] == step
    summary, held = shown["summary"], step["memory"]["measured"]["parts"]
    held = held["weights"] + held["optimizer"]
    assert summary["measured_bytes"] == held + first["memory_measured_bytes"]
    assert summary["planned_bytes"] == held + first["memory_predicted_bytes"]
    assert summary["loss"] == lines[-2]["loss"]
    assert shown["status"] == "5 of 5 steps done"
    assert any("chunks of 16 tokens" in line for line in shown["schedule"])
    assert [line.split(":")[0] for line in shown["notes"]] == [
        "Seconds by kind of work are not planned"
    ]


def test_measured_seconds_add_up_to_the_step(run: RunConfig) -> None:
    found = run_json(read_run(Path(run.folder)), "run")["seconds"]
    total = metrics(run)[2]["seconds"]
    assert found["step"] == 2
    assert abs(sum(size for _, size in found["measured"]) / total - 1) < 1e-9
    assert found["measured"][-1][0] == REST
    assert found["planned"] == []


@pytest.mark.parametrize("name", ["grouped", "fpdt", "swap"])
def test_planned_seconds_are_those_of_the_lanes(name: str) -> None:
    plan = planned(name)
    program, _ = step_spans(plan)
    found = planned_json(plan, program, batches=3)
    prices = Prices(plan.question, program, together=plan.question.overlap)
    costs = [prices.of(instruction) for instruction in program.instructions]
    update = plan.seconds.optimizer
    busy = sum(cost.in_line() for cost in costs)
    assert abs(sum(found["parts"].values()) / (3 * busy + update) - 1) < 1e-9
    assert 0 < found["attention"] < sum(found["parts"].values())
    assert found["total"] == 3 * (plan.seconds.total - update) + update


def test_a_long_curve_is_thinned_and_keeps_its_ends(run: RunConfig, tmp_path: Path) -> None:
    folder = copied(run, tmp_path)
    lines = (json.dumps({"step": n, "lr": 1.0, "loss": n / 7}) for n in range(1, 9000))
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    curve = run_json(read_run(folder), "run")["curves"]["loss"]
    assert (len(curve["x"]), curve["of"]) == (POINTS, 8999)
    assert (curve["x"][0], curve["x"][-1]) == (1, 8999)
    assert all(y == x / 7 for x, y in zip(curve["x"], curve["y"], strict=True))


# -- what is missing or damaged --------------------------------------------------------------------


def copied(run: RunConfig, to: Path) -> Path:
    return Path(shutil.copytree(run.folder, to / "run"))


def test_a_folder_of_an_earlier_version_has_a_page(run: RunConfig, tmp_path: Path) -> None:
    folder = copied(run, tmp_path)
    for name in ("step.json", "history.json", "about.json"):
        (folder / name).unlink()
    (shown,) = data_of(run_page([read_run(folder)]))["runs"]
    assert len([line for line in shown["notes"] if OLDER in line]) == 2
    assert shown["curves"]["loss"]["y"]
    assert shown["schedule"] == shown["machine"] == shown["commands"] == []


def test_a_run_under_way_has_a_page(run: RunConfig, tmp_path: Path) -> None:
    folder = copied(run, tmp_path)
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:20])
    history = json.loads((folder / "history.json").read_text())
    history["parts"][0]["ended"] = None
    (folder / "history.json").write_text(json.dumps(history))
    found = run_json(read_run(folder), "run")
    assert found["status"] == "1 of 5 steps done; still running, or killed"
    assert found["commands"][0]["ended"] == "not yet"


@pytest.mark.parametrize(
    ("name", "text"),
    crossed(["about", "plan", "comparison", "step", "history"], ['{"a": ', "[1]", "[" * 9999]),
)
def test_a_damaged_file_is_named(run: RunConfig, tmp_path: Path, name: str, text: str) -> None:
    folder = copied(run, tmp_path)
    (folder / f"{name}.json").write_text(text)
    with pytest.raises(UnsupportedError, match=rf"{name}\.json is damaged: .*move it away"):
        read_run(folder)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("about", {"machine": 3}),
        ("step", {"memory": None}),
        ("step", {"seconds": {"parts": {"forward": 1.0}}}),
        ("history", {"parts": 3}),
        ("history", {"parts": [{"machine": {"host_bytes": "many"}}]}),
        ("config", {"steps": "many"}),
    ],
)
def test_what_is_of_another_kind_is_named(
    run: RunConfig, name: str, changes: dict[str, Any]
) -> None:
    """As a version to come may write it."""
    of = read_run(Path(run.folder))
    value: Any = {name: {**getattr(of, name), **changes}}
    wrong = replace(of, **value)
    suffix = "yaml is damaged.*restore it$" if name == "config" else "json is damaged.*move it away"
    with pytest.raises(UnsupportedError, match=rf"{name}\.{suffix}"):
        run_json(wrong, "run")


def test_what_is_no_run_is_refused(run: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"none: no such folder; give one"):
        read_run(tmp_path / "none")
    with pytest.raises(UnsupportedError, match=r"is not a run folder: it has no config\.yaml"):
        read_run(tmp_path)
    folder = copied(run, tmp_path)
    (folder / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(UnsupportedError, match=r"metrics\.jsonl is damaged: line 2"):
        read_run(folder)
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(UnsupportedError, match=r"no metrics: .* try again later"):
        read_run(folder)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    for text in ("a: [", "[" * 2000, "a: \0", "[1]"):
        (folder / "config.yaml").write_text(text)
        with pytest.raises(UnsupportedError, match=r"config\.yaml is damaged"):
            read_run(folder)
    many = [read_run(Path(run.folder))] * (MOST_RUNS + 1)
    with pytest.raises(UnsupportedError, match=f"shows {MOST_RUNS} runs side by side, got 9"):
        run_page(many)


def test_names_tell_runs_apart(run: RunConfig, other: RunConfig) -> None:
    """Both folders are called run; one is given twice."""
    read = [read_run(Path(of.folder)) for of in (run, other, run)]
    first, second, third = (found["name"] for found in runs_json(read)["runs"])
    assert first.endswith("/run")
    assert second == "script>/run"
    assert third == f"{first} (2)"
    differences = {key: texts for key, *texts in runs_json(read[:2])["settings"]}
    assert differences["seed"] == ["0", "7"]
    assert "folder" not in differences


# -- the command -----------------------------------------------------------------------------------


def test_the_command_writes_a_page(run: RunConfig, other: RunConfig, tmp_path: Path) -> None:
    told(run.folder)
    text = (Path(run.folder) / "report.html").read_text()
    assert [of["name"] for of in data_of(text)["runs"]] == ["run"]
    told(run.folder, other.folder, "-o", str(tmp_path / "both.html"))
    assert len(data_of((tmp_path / "both.html").read_text())["runs"]) == 2


def test_a_page_that_cannot_be_written_fails_no_run(
    run: RunConfig, tmp_path: Path, capsys: Any
) -> None:
    """Nor does a run that took no step have a new one."""
    folder = copied(run, tmp_path)
    report_after(folder, None)
    assert capsys.readouterr().err == f"report: {folder / 'report.html'}\n"
    (folder / "report.html").unlink()
    (folder / "report.html").mkdir()
    report_after(folder, None)
    assert "farspan: cannot write the report of this run: report.html: " in capsys.readouterr().err
    report_after(folder, metrics_sum(folder))
    report_after(tmp_path / "none", None)
    assert capsys.readouterr() == ("", "")


# -- in a browser ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "scheme"), part_of(product(["one", "two"], SCHEMES), ("two", SCHEMES[-1]))
)
def test_the_page_is_whole_at_any_width(
    browser: Browser, pages: dict[str, Path], name: str, scheme: str
) -> None:
    with browser.opened(pages[name], WIDTHS[0], scheme) as opened:
        assert opened.violations() == []
        opened.page.evaluate("document.querySelectorAll('details').forEach(of => of.open = true)")
        for width in WIDTHS:
            opened.resize(width)
            opened.check()
        assert opened.violations() == []


def test_the_scrubber_moves_charts_and_grid(browser: Browser, pages: dict[str, Path]) -> None:
    with browser.opened(pages["one"]) as opened:
        page = opened.page
        slider = page.locator("input[type=range]")
        slider.focus()
        slider.press("Home")
        first = page.locator(".runs").inner_text()
        charts = page.locator(".plot[aria-label*='time in the step']")
        assert [of.get_attribute("aria-valuenow") for of in charts.all()] == ["0", "0"]
        slider.press("ArrowRight")
        assert page.locator(".runs").inner_text() != first
        charts.first.focus()
        charts.first.press("End")
        last = slider.get_attribute("max")
        assert slider.input_value() == charts.nth(1).get_attribute("aria-valuenow") == last
        opened.check()
