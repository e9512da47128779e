"""Tokens that were added to a model's tokenizer, which its embeddings have no rows for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from farspan.cli import app, with_torch
from farspan.data.tokenizers import load_tokenizer
from farspan.hf.load import load_model
from farspan.spec import UnsupportedError
from farspan.train.config import LoraConfig, ModelConfig, RunConfig
from farspan.train.plan_run import question_of_run
from farspan.train.trainer import train
from farspan.train.yaml_config import to_mapping
from tests.data.characters import character_tokenizer
from tests.train.tiny import MODEL, Quiet, Stopped, Stopping, tiny_run

ADDED = ["<tool>", "</tool>"]


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, int]:
    """A model's folder, whose tokenizer has tokens that it does not embed, and what it does."""
    words = character_tokenizer()
    rows = max(words.get_vocab().values()) + 1
    config = {**MODEL, "vocab_size": rows, "tie_word_embeddings": request.param}
    load_model(config=config, dtype=torch.float32, seed=3).save_pretrained(tmp_path / "base")
    words.add_tokens(ADDED)
    words.save_pretrained(tmp_path / "base")
    added = AutoTokenizer.from_pretrained(tmp_path / "base").convert_tokens_to_ids(ADDED)
    assert added == [rows, rows + 1]
    return tmp_path / "base", rows


UNTIED = pytest.mark.parametrize("folder", [False], indirect=True, ids=["untied"])


def run_of(
    root: Path, base: Path, text: str = "ab <tool> ba </tool> ab", **model: Any
) -> RunConfig:
    run = tiny_run(root, model=ModelConfig(path=str(base), **model), steps=3)
    for path in (root / "text").glob("*.txt"):
        path.write_text(text)
    return run


def test_added_tokens_train_export_and_load_again(tmp_path: Path, folder: tuple[Path, int]) -> None:
    base, rows = folder
    run = run_of(tmp_path, base, resize_embeddings=True)
    train(run, reporter=Quiet())
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")
    words = AutoTokenizer.from_pretrained(tmp_path / "run/model")
    embedded = made.get_input_embeddings().num_embeddings
    assert made.config.vocab_size == embedded == max(words.get_vocab().values()) + 1 > rows + 1
    assert words.convert_tokens_to_ids(ADDED) == [rows, rows + 1]
    ids = words("ab <tool> ba", return_tensors="pt").input_ids
    assert rows in ids
    assert bool(made(input_ids=ids).logits.isfinite().all())
    again = replace(run, folder=str(tmp_path / "again"))
    with pytest.raises(Stopped):
        train(again, reporter=Stopping(3))
    train(again, reporter=Quiet())
    theirs = load_file(tmp_path / "run/model/model.safetensors")
    for name, tensor in load_file(tmp_path / "again/model/model.safetensors").items():
        assert torch.equal(tensor, theirs[name]), name


@UNTIED
def test_a_plan_has_the_rows_that_the_run_has(tmp_path: Path, folder: tuple[Path, int]) -> None:
    base, rows = folder
    run = run_of(tmp_path, base, resize_embeddings=True)
    question = question_of_run(run, {"machine": "h100"}, lambda _: None).question
    assert question.model.vocab == load_tokenizer(str(base)).size() > rows + 1


@UNTIED
@pytest.mark.parametrize("text", [(), ("--text", "book.txt")], ids=["exact", "text"])
def test_what_is_verified_has_the_rows_that_the_run_has(
    tmp_path: Path,
    folder: tuple[Path, int],
    text: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base, rows = folder
    monkeypatch.chdir(tmp_path)
    run = run_of(tmp_path, base, resize_embeddings=True)
    Path("run.yaml").write_text(yaml.safe_dump(to_mapping(run)))
    tell, seen = "compare_and_tell" if text else "verify_and_tell", []
    monkeypatch.setattr(with_torch, tell, lambda model, *_, **__: seen.append(model))
    given = ["verify", "run.yaml", "--context", "32", *text]
    result = CliRunner().invoke(app, given, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert seen[0].get_input_embeddings().num_embeddings == load_tokenizer(str(base)).size() > rows


@UNTIED
def test_added_tokens_without_rows_are_refused_by_what_helps(
    tmp_path: Path, folder: tuple[Path, int]
) -> None:
    base, rows = folder
    run = run_of(tmp_path, base)
    message = rf"go up to {rows + 1}, but the model embeds only {rows}; .* model\.resize_embeddings"
    with pytest.raises(UnsupportedError, match=message):
        train(run, reporter=Quiet())
    heard = Quiet()
    train(run_of(tmp_path / "other", base, "ab ba ab"), reporter=heard)
    assert any("model.resize_embeddings: true adds rows" in note for note in heard.notes)


def test_what_has_no_rows_to_add_is_refused() -> None:
    with pytest.raises(
        UnsupportedError, match=r"resize_embeddings: adapters leave .* model/ of that"
    ):
        ModelConfig(path="base", lora=LoraConfig(), resize_embeddings=True)
    with pytest.raises(UnsupportedError, match="resize_embeddings: random weights have"):
        ModelConfig(config=MODEL, resize_embeddings=True)
