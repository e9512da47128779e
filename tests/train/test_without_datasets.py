"""`datasets` is needed by runs that read one, and by nothing else."""

import sys
from pathlib import Path

import pytest
import yaml

from farspan import cli
from farspan.cli import USAGE
from tests.distributed.launched import launch
from tests.train.tiny import MODEL as TINY

MODEL = TINY | {"eos_token_id": 256}


def run_file(folder: Path, data: dict[str, str]) -> str:
    """A run of one update on it."""
    found = {
        "model": {"config": MODEL},
        "data": {**data, "tokenizer": "bytes", "cache": str(folder / "cache")},
        "folder": str(folder / data["source"]),
        "steps": 1,
        "context": 32,
        "schedule": {"strategy": "grouped", "chunk": 16},
    }
    file = folder / f"{data['source']}.yaml"
    file.write_text(yaml.safe_dump(found))
    return str(file)


def ends_of(commands: list[list[str]]) -> str:
    """The exit codes of these commands, in a process that has imported everything but datasets."""
    assert "datasets" not in sys.modules
    sys.modules["datasets"] = None  # type: ignore[assignment]
    codes = []
    for arguments in commands:
        sys.argv = ["farspan", *arguments]
        with pytest.raises(SystemExit) as stop:
            cli.main()
        codes.append(stop.value.code)
    return str(codes)


def test_the_command_line_does_without_it(tmp_path: Path) -> None:
    text = tmp_path / "documents"
    text.mkdir()
    (text / "one.txt").write_text("all that is trained on " * 4)
    commands = [
        ["train", "--help"],
        ["train", run_file(tmp_path, {"source": "text", "path": str(text)})],
        ["train", run_file(tmp_path, {"source": "dataset", "path": "a/name"})],
    ]
    (done,) = launch(tmp_path / "said", 1, ends_of, commands)
    assert done.said == str([0, 0, USAGE]), done
    assert "data.source: dataset needs the package datasets" in done.errors
    assert "Traceback" not in done.errors
