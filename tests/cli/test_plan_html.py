"""`farspan plan --html` from end to end."""

import json
import re
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from farspan import cli
from tests.report.browser import Browser, browser

__all__ = ["browser"]

ASKED = ("plan", "--model", "Qwen2.5-0.5B", "--machine", "rtx4090", "--strategy", "fpdt")


def data_of(file: Path) -> Any:
    found = re.search(r'id="data">(.*?)</script>', file.read_text(encoding="utf-8"))
    assert found is not None
    return json.loads(found[1])


def test_the_answer_is_written_as_a_page(tmp_path: Path) -> None:
    file = tmp_path / "a plan.html"
    asked = (*ASKED, "--context", "16K", "--max-context", "--html", str(file))
    done = CliRunner().invoke(cli.app, asked)
    assert done.exit_code == 0, done.output
    assert f"page: {file}" in done.output
    data = data_of(file)
    assert data["command"] == (
        "farspan plan --model Qwen2.5-0.5B --context 16K --machine rtx4090 --strategy fpdt "
        f"--max-context --html '{file}'"
    )
    asked_for, longest = data["plans"]
    assert (asked_for["tokens"], data["longest"]) == (16384, 1)
    assert longest["tokens"] > asked_for["tokens"]
    assert "1 x rtx4090" in data["machine"]["machine"]


def test_what_does_not_fit_says_what_would_help(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    options = ("--context", "16K", "--device-memory", "2500MiB", "--json", "--html", str(file))
    done = CliRunner().invoke(cli.app, (*ASKED, *options))
    assert done.exit_code == cli.FAILED, done.output
    assert json.loads(done.stdout)["fits"] is False
    [plan] = data_of(file)["plans"]
    terminal = CliRunner().invoke(cli.app, (*ASKED, *options[:-3])).output
    [short] = plan["verdict"]
    assert terminal.startswith(f"does not fit: {short}\n")
    assert 1 <= len(plan["changes"]) <= 3
    assert all(change in " ".join(terminal.split()) for change in plan["changes"])
    assert plan["step"] is None
    assert plan["schedule"] == []


def test_what_does_not_fit_has_no_step(browser: Browser, tmp_path: Path) -> None:
    """The page shows what is short and what helps, as the terminal does, whole at any width."""
    file = tmp_path / "plan.html"
    options = ("--context", "16K", "--device-memory", "2500MiB", "--html", str(file))
    CliRunner().invoke(cli.app, (*ASKED, *options))
    with browser.opened(file, 360) as opened:
        opened.check()
        text = opened.page.locator("main").inner_text()
        assert opened.violations() == []
    assert re.search(r"lacks [\d.]+ [GM]iB of device memory", text)
    assert "Cheapest changes that make it fit:" in text
    for words in ("The schedule", "grid of cells", "tokens a second", "MFU", "Seconds by kind"):
        assert words not in text, words
