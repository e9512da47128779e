"""The command line from end to end, in this process: what it prints and how it ends."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from transformers import AutoModelForCausalLM, Qwen2Config

from farspan import cli
from farspan.train.durable import WriteFailed
from farspan.version import VERSION

CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 256,
    "bos_token_id": None,
}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of `farspan ARGUMENTS`."""
    monkeypatch.setattr("sys.argv", ["farspan", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder without weights."""
    Qwen2Config(**{k: v for k, v in CONFIG.items() if k != "model_type"}).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_verify_reports_json_and_passes(
    folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ["--context", "50", "--chunk", "16", "--batch", "2", "--documents", "3"]
    flags = ["--dtype", dtype, "--groups", "1,2", "--json"]
    assert run(monkeypatch, "verify", str(folder), *shape, *flags) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is True
    assert found["checked_parameters"] == len(list(_model(folder).parameters()))
    assert {"loss_error", "max_relative_error", "worst"} <= found.keys()
    if dtype == "float64":
        assert found["max_relative_error"] <= 1e-12


def test_verify_fails_with_exit_code_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("farspan.engine.prefix.Prefix.add_gradient", lambda *_: None)
    assert run(monkeypatch, "verify", str(folder), "--context", "50", "--chunk", "16") == 1
    assert "NOT exact" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "--strategy", "nonsense"], "strategy: 'nonsense' is not known"),
        (["verify", "--groups", "two"], "groups: expected a number"),
        (["verify", "--groups", "2,1"], "groups: [2, 1] holds 3 layers, but the model has 4"),
        (["verify", "--dtype", "int8"], "dtype: expected float64, float32 or bfloat16"),
        (["verify", "--documents", "999"], "documents: at most one a token"),
        (["verify", "--context", "9000"], "beyond the model's max_position_embeddings of 8,192"),
        (["verify", "nowhere/at/all.yaml"], "nowhere/at/all.yaml: cannot be read"),
        (["train", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
    ],
)
def test_what_is_refused_is_one_line_and_exit_code_two(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, *arguments) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("farspan: ")
    assert message in lines[0]


def test_train_from_a_run_file_to_a_model_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    values: dict[str, Any] = {
        "model": {"config": CONFIG},
        "data": {"source": "text", "path": str(tmp_path / "text.txt"), "tokenizer": "bytes"},
        "steps": 3,
        "context": 96,
        "schedule": {"strategy": "memo", "chunk": 40},
        "optimizer": {"lr": 0.01},
    }
    run_file = tmp_path / "run.yaml"
    run_file.write_text(yaml.safe_dump(values))
    out = tmp_path / "out"
    arguments = ["train", str(run_file), "--folder", str(out), "--strategy", "oomb", "--json"]
    assert run(monkeypatch, *arguments) == 0
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert result["step"] == 3
    AutoModelForCausalLM.from_pretrained(out / "model")
    assert run(monkeypatch, *arguments, "--steps", "3") == 0  # nothing left to do


def _model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_config(Qwen2Config.from_pretrained(folder))


def test_help_of_the_group_says_what_each_command_says() -> None:
    for name, (module, words) in cli.COMMANDS.items():
        command = typer.main.get_command(import_module(module).app)
        assert command.name == name
        assert (command.help or "").splitlines()[0] == words


def test_version_and_unknown_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.strip() == f"farspan {VERSION}"
    assert run(monkeypatch, "trian") == 2
    assert "Did you mean 'train'" in capsys.readouterr().err


def test_what_training_could_not_write_is_one_line_and_exit_code_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise WriteFailed("disk full")

    monkeypatch.setattr("farspan.cli.train.train", fail)
    assert run(monkeypatch, "train", "--folder", str(tmp_path)) == 1
    assert capsys.readouterr().err.strip() == "farspan: disk full"
