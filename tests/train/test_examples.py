"""The folders of `examples` do what their READMEs say."""

import json
import runpy
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farspan.cli import app

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def an_example(name: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to work in."""
    folder = shutil.copytree(EXAMPLES / name, root / name)
    monkeypatch.chdir(folder)
    return folder


def pages(root: Path) -> list[str]:
    """Settings of a short run on the first lines of some pages, which are copied."""
    for name in ("how-to/trainers", "how-to/sparse", "explanation/design"):
        copy = root / "docs" / f"{name}.md"
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((EXAMPLES.parent / "docs" / f"{name}.md").read_text()[:3000])
    short = {"steps": 2, "context": 512, "schedule.chunk": 128, "optimizer.warmup": 0}
    settings = [f"{key}={value}" for key, value in short.items()] + [f"data.cache={root}/c"]
    return [part for setting in settings for part in ("--set", setting)]


def test_pairs_are_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = an_example("dpo", tmp_path, monkeypatch)
    runpy.run_path(str(folder / "make_pairs.py"))["main"](folder)
    short = ["--set", "steps=8", "--set", "evaluation.every=8", "--set", "evaluation.on_start=true"]
    short += ["--set", f"data.cache={tmp_path}/c"]
    result = CliRunner().invoke(app, ["train", "run.yaml", *short])
    assert result.exit_code == 0, result.output
    assert "pairs: 300, of 68 to 96 tokens" in result.output
    assert "loss: dpo, reference stored" in result.output
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    first, last = (line for line in lines if "heldout_loss" in line)
    assert (first["heldout_accuracy"], first["heldout_margin"]) == (0.0, 0.0)
    assert last["heldout_accuracy"] > 0.9
    shown = CliRunner().invoke(app, ["data", "run.yaml", *short[-2:]])
    assert " chosen: 4" in shown.output
    assert "  read    Bring me " in shown.output


def test_pages_are_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = an_example("evaluate", tmp_path / "examples", monkeypatch)
    flags = pages(tmp_path)
    result = CliRunner().invoke(app, ["train", "run.yaml", *flags])
    assert result.exit_code == 0, result.output
    given = ["--text", "../../docs/*/*.md", "--context", "512", "--picture", "loss.svg"]
    result = CliRunner().invoke(app, ["evaluate", "run", *given])
    assert result.exit_code == 0, result.output
    for words in ("loss by position", "../../docs/how-to/trainers.md", "hidden sentences: "):
        assert words in result.stdout
    assert (folder / "loss.svg").read_text().startswith("<svg ")


def test_a_student_learns_from_a_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = an_example("distill", tmp_path / "examples", monkeypatch)
    flags = pages(tmp_path)
    for name in "teacher.yaml", "run.yaml":
        result = CliRunner().invoke(app, ["train", name, *flags])
        assert result.exit_code == 0, result.output
    assert "loss: distill" in result.output
    lines = (folder / "student/metrics.jsonl").read_text().splitlines()
    assert sum('"loss"' in line for line in lines) == 2


def test_adapters_drop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = an_example("adapters", tmp_path / "examples", monkeypatch)
    result = CliRunner().invoke(app, ["train", "run.yaml", *pages(tmp_path)])
    assert result.exit_code == 0, result.output
    assert (
        json.loads((folder / "run/model/adapter_config.json").read_text())["lora_dropout"] == 0.05
    )
