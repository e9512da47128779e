"""What tests of the command line share: a command's end, a tiny model, and runs that only begin."""

import json
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest
from transformers import Qwen2Config

from farspan import cli
from farspan.train.config import RunConfig
from farspan.train.step_runner import TrainingResult

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
RESULT = TrainingResult(Path("out"), 3, 3, 1.0, float("nan"), 0, None)
Begun = list[tuple[RunConfig, list[str]]]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of `farspan ARGUMENTS`."""
    monkeypatch.setattr("sys.argv", ["farspan", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


class Said(NamedTuple):
    """What a command wrote."""

    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


class Command(Protocol):
    """What `farspan ARGUMENTS` writes; it has to end with the code."""

    def __call__(self, *arguments: str, code: int = 0) -> Said: ...


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def call(*arguments: str, code: int = 0) -> Said:
        capsys.readouterr()  # of what came before
        ended = run(monkeypatch, *arguments)
        said = Said(*capsys.readouterr())
        assert ended == code, said
        return said

    return call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder without weights."""
    Qwen2Config(**{k: v for k, v in CONFIG.items() if k != "model_type"}).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Begun:
    """Runs that were to be trained, with what is said first; each ends at once, as RESULT."""
    runs: Begun = []

    def end(asked: RunConfig, *, notes: list[str], **_: Any) -> TrainingResult:
        runs.append((asked, notes))
        return RESULT

    monkeypatch.setattr("farspan.cli.with_torch.train", end)
    return runs
