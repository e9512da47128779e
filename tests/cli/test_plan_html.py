"""`farspan plan --html` from end to end."""

import json
import re
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from farspan import cli

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
    options = ("--context", "16K", "--device-memory", "2GiB", "--json", "--html", str(file))
    done = CliRunner().invoke(cli.app, (*ASKED, *options))
    assert done.exit_code == cli.FAILED, done.output
    assert json.loads(done.stdout)["fits"] is False
    spare, breaks, helps, *_ = data_of(file)["plans"][0]["verdict"]
    assert "too much on the device" in spare
    assert breaks.startswith("device memory breaks first")
    assert helps.startswith("cheapest change: ")


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "nowhere" / "plan.html"
    done = CliRunner().invoke(cli.app, (*ASKED, "--context", "8K", "--html", str(file)))
    assert done.exit_code != 0
    assert "html: " in str(done.exception)
    assert "cannot be written" in str(done.exception)
