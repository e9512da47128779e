"""The exported model is that of the last checkpoint, or it is written again."""

import json
import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from farspan.durable import digest
from farspan.spec import Refused
from tests.train.test_interrupt import same_weights
from tests.train.tiny import STEPS, Quiet, fit, tiny_run


def spoil(folder: Path) -> None:
    """Weights of something else."""
    weights = load_file(folder / "model.safetensors")
    save_file(
        {k: v + 1 for k, v in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def test_the_model_names_the_checkpoint_it_was_made_of(tmp_path: Path) -> None:
    fit(tiny_run(tmp_path))
    source = json.loads((tmp_path / "run" / "model" / "farspan.json").read_text())
    name = f"step-{STEPS:08d}"
    manifest = (tmp_path / "run" / "checkpoints" / name / "manifest.json").read_bytes()
    assert source == {"checkpoint": name, "manifest_sha256": sha256(manifest).hexdigest()}


def test_a_model_whose_checkpoints_are_gone_is_not_the_result(tmp_path: Path) -> None:
    fit(tiny_run(tmp_path, folder=str(tmp_path / "whole")))
    other = tiny_run(tmp_path, seed=1)
    fit(other)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    quiet = Quiet()
    fit(replace(other, seed=0), reporter=quiet)
    assert any("by an earlier run whose checkpoints are gone" in note for note in quiet.notes)
    same_weights(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize("content", [None, "[]", "{", '{"checkpoint": "step-00000005"}'])
def test_a_model_that_names_no_checkpoint_is_replaced(tmp_path: Path, content: str | None) -> None:
    run = tiny_run(tmp_path)
    fit(run)
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    source = tmp_path / "run" / "model" / "farspan.json"
    source.unlink()
    if content is not None:
        source.write_text(content)
    spoil(tmp_path / "run" / "model")
    fit(run)
    same_weights(tmp_path / "whole", tmp_path / "run")


def test_the_model_of_the_last_checkpoint_is_left_alone(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    fit(run)
    spoil(tmp_path / "run" / "model")  # somebody works on it
    before = digest(tmp_path / "run" / "model" / "model.safetensors")
    fit(run)
    assert digest(tmp_path / "run" / "model" / "model.safetensors") == before


@pytest.mark.parametrize(
    "position", [None, 5, {"step": 4}, {"step": "4", "tokens": 1, "skipped": 0}]
)
def test_a_state_that_does_not_say_where_the_run_stands_is_named(
    tmp_path: Path, position: Any
) -> None:
    run = tiny_run(tmp_path)
    fit(run)
    folder = tmp_path / "run" / "checkpoints" / f"step-{STEPS:08d}"
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"position": position}))
    manifest = json.loads((folder / "manifest.json").read_text())
    size = (folder / "state.json").stat().st_size
    manifest["files"]["state.json"] = {"bytes": size, "sha256": digest(folder / "state.json")}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(Refused, match=r"state\.json: position: expected step, tokens and skipped"):
        fit(run)
