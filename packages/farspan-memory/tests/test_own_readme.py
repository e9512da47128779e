"""What README.md says can be typed."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import farspan_memory
from farspan_memory import cli

README = Path(__file__).parents[1] / "README.md"
TEXT = README.read_text(encoding="utf-8")


def test_its_commands_are_there() -> None:
    named = set(re.findall(r"`farspan-memory (\w+)", TEXT))
    assert named == {command.name for command in cli.app.registered_commands}
    for name in named:
        assert CliRunner().invoke(cli.app, [name, "--help"]).exit_code == 0


@pytest.mark.parametrize("snippet", re.findall(r"```python\n(.*?)```", TEXT, re.S))
def test_its_snippets_run(snippet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That which installs is run with its calls written down: here is no GPU."""
    calls = list[str]()
    for name in ("install", "begin_iteration"):
        monkeypatch.setattr(farspan_memory, name, lambda *_, name=name: calls.append(name))
    exec(snippet, {"data": [0, 1], "train_step": lambda _: calls.append("step")})
    assert calls in ([], ["install", *["begin_iteration", "step"] * 2])
