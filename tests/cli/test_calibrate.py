"""`farspan calibrate`: what it writes is what plans read."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from farspan import cli
from farspan.planner.machines import MachineFile, machine, read
from farspan.spec import UnsupportedError
from farspan.train.staged_states import drive_rate


def call(*arguments: str) -> Any:
    """The outcome of `farspan calibrate ARGUMENTS`."""
    return CliRunner().invoke(cli.app, ["calibrate", *arguments])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[torch.device, bool]]:
    """What is to be measured; the answer is a preset, and the user's folder a temporary one."""
    devices: list[tuple[torch.device, bool]] = []

    def measure(
        device: torch.device, progress: Callable[[str], None], *, quick: bool
    ) -> MachineFile:
        progress("copies")
        devices.append((device, quick))
        return read("l40s")

    monkeypatch.setattr("farspan.cli.calibrate.calibrate", measure)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return devices


def test_a_file_is_written_where_plans_look_for_it(
    asked: list[tuple[torch.device, bool]], tmp_path: Path
) -> None:
    outcome = call("--device", "cpu")
    assert outcome.exit_code == 0, outcome.output
    assert asked == [(torch.device("cpu"), False)]
    path = tmp_path / "farspan" / "machine.json"
    assert machine(path) == machine("l40s")
    assert f"written to {path}" in outcome.stdout.replace("\n", "")
    assert "bfloat16 matmul" in outcome.stdout
    assert "busy" not in outcome.output


def test_a_file_of_ones_own_and_json(
    asked: list[tuple[torch.device, bool]], tmp_path: Path
) -> None:
    path = tmp_path / "new" / "mine.json"
    outcome = call("--device", "cpu", "--quick", "-o", str(path), "--json")
    assert asked == [(torch.device("cpu"), True)]
    assert machine(path) == machine("l40s")
    assert json.loads(outcome.stdout) == json.loads(path.read_text())


def test_a_busy_machine_is_warned_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    busy = replace(read("l40s"), spread={"fetch": 1.1, "rates.bfloat16.matmul": 3.14})
    monkeypatch.setattr("farspan.cli.calibrate.calibrate", lambda *_, **__: busy)
    path = tmp_path / "mine.json"
    outcome = call("--device", "cpu", "-o", str(path), "--json")
    assert outcome.exit_code == 0, outcome.output
    said = " ".join(outcome.stderr.split())
    assert "warning: the machine was busy: rates.bfloat16.matmul varied by 3.1x" in said
    assert "run again when it is idle" in said
    assert json.loads(outcome.stdout)["spread"] == busy.spread
    assert read(path) == busy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "device: expected cpu or cuda, got 'tpu'"),
        (["--device", "cpu", "-o", "{folder}"], "output: {folder} is a folder; name a file in it"),
        (
            ["--device", "cpu", "-o", "{file}/below.json"],
            "output: {file}/below.json cannot be written: no such folder",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_measured(
    arguments: list[str],
    message: str,
    asked: list[tuple[torch.device, bool]],
    tmp_path: Path,
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    names = {"folder": str(tmp_path), "file": str(file)}
    outcome = call(*(argument.format(**names) for argument in arguments))
    assert isinstance(outcome.exception, UnsupportedError)
    assert str(outcome.exception).startswith(message.format(**names))
    assert asked == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(asked: list[tuple[torch.device, bool]]) -> None:
    outcome = call("--device", "cuda")
    assert isinstance(outcome.exception, UnsupportedError)
    assert "device: no CUDA device" in str(outcome.exception)
    assert asked == []


def test_a_drive_is_measured_where_a_folder_is_named(
    asked: list[tuple[torch.device, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = partial(drive_rate, elements=2**14, passes=1)
    monkeypatch.setattr("farspan.cli.calibrate.drive_rate", small)
    path = tmp_path / "mine.json"
    assert call("--device", "cpu", "-o", str(path), "--disk", str(tmp_path)).exit_code == 0
    assert 0 < machine(path).disk != machine("l40s").disk
    assert "disk" not in read(path).sources
    refused = call("--disk", str(tmp_path / "no" / "where"))
    assert isinstance(refused.exception, UnsupportedError)
    assert str(refused.exception).startswith("disk: cannot make a file in")
    assert len(asked) == 1
