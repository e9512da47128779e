"""`farspan memory`: a group whose commands are imported when they are called."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from farspan import cli
from farspan.cli import memory
from farspan.spec import UnsupportedError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", memory.COMMANDS)
def test_help_of_the_group_says_what_each_command_says(name: str) -> None:
    lazy = memory.COMMANDS[name]
    command = typer.main.get_command(getattr(import_module(lazy.module), lazy.app))
    assert command.name == name
    assert (command.help or "").splitlines()[0] == lazy.help


def test_help_imports_no_command() -> None:
    script = f"""
import sys
sys.path.insert(0, {str(ROOT / "src")!r})
from typer.testing import CliRunner
from farspan import cli
assert CliRunner().invoke(cli.app, ["memory", "--help"]).exit_code == 0
print([name for name in sys.modules if name.startswith(("farspan_memory.cli", "torch"))])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize("arguments", [(), ("--help",), ("place", "step.trace"), ("trise",)])
def test_without_the_package_it_says_how_to_install_it(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "farspan_memory", None)
    result = CliRunner().invoke(cli.app, ["memory", *arguments])
    assert isinstance(result.exception, UnsupportedError)
    assert str(result.exception) == (
        "memory: farspan-memory is not installed; pip install 'farspan[allocator]'"
    )
