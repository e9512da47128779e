"""The folders of `examples` do what their READMEs say."""

import json
import runpy
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farspan.cli import app

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def an_example(name: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to work in."""
    folder = shutil.copytree(EXAMPLES / name, root / name)
    monkeypatch.chdir(folder)
    return folder


def test_pairs_are_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = an_example("dpo", tmp_path, monkeypatch)
    runpy.run_path(str(folder / "make_pairs.py"))["main"](folder)
    short = ["--set", "steps=8", "--set", "evaluation.every=8", "--set", f"data.cache={tmp_path}/c"]
    result = CliRunner().invoke(app, ["train", "run.yaml", *short])
    assert result.exit_code == 0, result.output
    assert "pairs: 300 of 68 to 96 tokens" in result.output
    assert "loss: dpo, reference stored" in result.output
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    first, last = (line for line in lines if "heldout_loss" in line)
    assert (first["heldout_accuracy"], first["heldout_margin"]) == (0.0, 0.0)
    assert last["heldout_accuracy"] > 0.9
    shown = CliRunner().invoke(app, ["data", "run.yaml", *short[-2:]])
    assert " chosen: 4" in shown.output
    assert "  read    Bring me " in shown.output
