"""A run that trains the text of a model that also reads images."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from farspan.hf.load import load_model
from farspan.program.layout import Parallel
from farspan.train.config import DType, EvaluationConfig, ModelConfig, RunConfig, ScheduleConfig
from farspan.train.trainer import train
from tests.hf.test_text import KINDS, fields
from tests.numerics import EXACT, relative_error
from tests.ranks import run_ranks
from tests.train.test_ranks import fit_all
from tests.train.tiny import Quiet, tiny_run


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model saved, which the runs start from."""
    text = {**KINDS["llava"]["text_config"], "vocab_size": 264, "num_hidden_layers": 2}
    config = {**fields("llava"), "text_config": text}
    model = load_model(config=config, dtype=torch.float64)
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def a_run(base: Path, name: str, **changes: Any) -> RunConfig:
    run = tiny_run(
        base.parent,
        folder=str(base.parent / name),
        model=ModelConfig(path=str(base), dtype=DType.FLOAT64),
        schedule=ScheduleConfig(strategy="grouped", chunk=24, groups=1),
        steps=4,
        evaluation=EvaluationConfig(every=0, sequences=1),
    )
    return replace(run, data=replace(run.data, tokenizer="bytes"), **changes)


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def test_the_text_alone_changes(base: Path) -> None:
    train(a_run(base, "run"), reporter=Quiet())
    before, after = weights_of(base), weights_of(base.parent / "run" / "model")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.startswith("language_model.")}
    model = AutoModelForImageTextToText.from_pretrained(base.parent / "run" / "model")
    found = dict(model.named_parameters())["model.language_model.norm.weight"]
    assert torch.equal(found, after["language_model.model.norm.weight"].to(found.dtype))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "names", [("tensor",), pytest.param(("fsdp", "pipeline"), marks=pytest.mark.exhaustive)]
)
def test_two_ranks_train_the_text_of_one(base: Path, names: tuple[str, ...]) -> None:
    """Frozen weights are handed out, cut and given back with the others."""
    layouts = {
        "fsdp": Parallel(ulysses=2),
        "tensor": Parallel(tensor=2),
        "pipeline": Parallel(pipeline=2),
    }
    fit_all([a_run(base, "alone")])
    run_ranks(2, fit_all, [a_run(base, name, parallel=layouts[name]) for name in names])
    expected = weights_of(base.parent / "alone" / "model")
    for name in names:
        found = weights_of(base.parent / name / "model")
        assert found.keys() == expected.keys()
        errors = {key: relative_error(found[key], expected[key]) for key in expected}
        assert max(errors.values()) <= EXACT, (name, errors)
