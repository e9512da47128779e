"""The exported model is that of the last checkpoint, or it is written again."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from farspan.durable import digest
from farspan.train.config import Decay
from tests.train.test_interrupt import same_weights
from tests.train.tiny import STEPS, Quiet, fit, tiny_run


def spoil(folder: Path) -> None:
    """Weights of something else."""
    weights = load_file(folder / "model.safetensors")
    save_file(
        {k: v + 1 for k, v in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def test_the_model_names_the_checkpoint_it_was_made_of(tmp_path: Path) -> None:
    """And who may read other files here may read it and the checkpoints."""
    with umask(0o027):
        fit(tiny_run(tmp_path))
    for path in (tmp_path / "run").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o750 if path.is_dir() else 0o640), path
    source = json.loads((tmp_path / "run" / "model" / "farspan.json").read_text())
    name = f"step-{STEPS:08d}"
    manifest = (tmp_path / "run" / "checkpoints" / name / "checkpoint.json").read_bytes()
    files = source.pop("files")
    assert files.keys() == {"model.safetensors", "config.json"}
    assert source == {"checkpoint": name, "manifest_sha256": sha256(manifest).hexdigest()}


def test_a_model_whose_checkpoints_are_gone_is_not_the_result(tmp_path: Path) -> None:
    fit(tiny_run(tmp_path, folder=str(tmp_path / "whole")))
    other = tiny_run(tmp_path, seed=1)
    fit(other)
    files = [tmp_path / name / "model/model.safetensors" for name in ("whole", "run")]
    assert digest(files[0]) != digest(files[1])  # a seed decides
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    quiet = Quiet()
    fit(replace(other, seed=0), reporter=quiet)
    assert any("by an earlier run without checkpoints" in note for note in quiet.notes)
    same_weights(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize("content", ["[]", "{", '{"checkpoint": "step-00000005"}'])
def test_a_model_that_names_no_checkpoint_is_replaced(tmp_path: Path, content: str) -> None:
    run = tiny_run(tmp_path)
    fit(run)
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    source = tmp_path / "run" / "model" / "farspan.json"
    source.write_text(content)
    spoil(tmp_path / "run" / "model")
    fit(run)
    same_weights(tmp_path / "whole", tmp_path / "run")


def test_a_whole_model_of_the_last_checkpoint_is_left_alone(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    fit(run)
    mine = tmp_path / "run" / "model" / "generation_config.json"
    mine.write_text('{"temperature": 0.5}')  # people may edit what decides no weight
    before = mine.stat()
    fit(run)
    assert mine.stat() == before


@pytest.mark.parametrize("how", ["flipped", "cut", "gone", "config"])
def test_a_damaged_model_is_exported_again(tmp_path: Path, how: str) -> None:
    run = tiny_run(tmp_path)
    fit(run)
    model = tmp_path / "run" / "model"
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    victim = model / ("config.json" if how == "config" else "model.safetensors")
    data = bytearray(victim.read_bytes())
    data[-3] ^= 1
    victim.write_bytes(data[: len(data) // 2] if how == "cut" else data)
    if how == "gone":
        victim.unlink()
    quiet = Quiet()
    fit(run, reporter=quiet)
    said = "is gone" if how == "gone" else "has changed since it was exported"
    assert (
        sum(
            f"{victim.name} {said}; farspan renamed its folder to model.set-aside" in n
            for n in quiet.notes
        )
        == 1
    )
    for name in ("config.json", "model.safetensors", "farspan.json"):
        assert digest(model / name) == digest(tmp_path / "whole" / "model" / name)
    assert (model.parent / "model.set-aside" / victim.name).exists() == (how != "gone")
    fit(run)
    same_weights(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize("when", ["first", "longer"])
def test_what_somebody_put_into_the_models_folder_stays(tmp_path: Path, when: str) -> None:
    """While the run went on, whose model takes the place of the folder in the end."""
    run = tiny_run(tmp_path)
    model = tmp_path / "run" / "model"
    if when == "longer":
        run = replace(run, optimizer=replace(run.optimizer, decay=Decay.CONSTANT))
        fit(run)
        run = replace(run, steps=STEPS + 1)

    def put(*_: object) -> None:
        model.mkdir(exist_ok=True)
        (model / "notes.txt").write_text("mine")

    quiet = Quiet()
    fit(run, put, reporter=quiet)
    assert (tmp_path / "run" / "model.set-aside" / "notes.txt").read_text() == "mine"
    assert load_file(model / "model.safetensors")
    assert not (model / "notes.txt").exists()
    assert any("notes.txt, which farspan did not write: the folder has" in n for n in quiet.notes)
