"""What is wrong with a run is told before any text is read or any weight loaded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farspan.spec import UnsupportedError
from farspan.train import setup
from farspan.train.config import ModelConfig, RunConfig, ScheduleConfig
from farspan.train.context import Components
from farspan.train.setup import resolve
from farspan.train.trainer import train
from tests.train.tiny import MODEL, Quiet, tiny_run

COMMIT = "0a1b" * 10


def without_text(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains where no text can be read and no tokenizer loaded."""

    def never(*_: Any, **__: Any) -> Any:
        pytest.fail("text is read")

    monkeypatch.setattr(setup, "open_corpus", never)
    monkeypatch.setattr(setup, "load_tokenizer", never)
    train(run, components=Components(), reporter=Quiet())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"schedule": ScheduleConfig(groups=(2, 1))},
            r"schedule\.groups: \[2, 1\] holds 3 layers, but the model has 2",
        ),
        (
            {"model": ModelConfig(config={**MODEL, "attention_dropout": 0.1})},
            "dropout 0.1 at .*attention_dropout",
        ),
    ],
)
def test_what_needs_no_weights_is_checked_before_text_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        without_text(tiny_run(tmp_path, **changes), monkeypatch)


@pytest.mark.parametrize("path", ["nope", "./nope/deep", "/nope", "~/nope", "a/b/c", "nope/"])
def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub(path: str, tmp_path: Path) -> None:
    run = replace(tiny_run(tmp_path), model=ModelConfig(path=path))
    with pytest.raises(UnsupportedError, match=f"^model.path: no folder {path} here; .* hub name"):
        resolve(run)


def test_a_hub_name_and_a_folder_of_the_user_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    assert resolve(replace(run, model=ModelConfig(path="owner/name"))).model.path == "owner/name"
    found = resolve(replace(run, model=ModelConfig(path="~/mine")))
    assert found.model.path == found.data.tokenizer == str(tmp_path / "mine")


@pytest.mark.parametrize(
    ("tokenizer", "given"),
    [
        (None, ("owner/name", True, COMMIT)),
        ("owner/other", ("owner/other", False, None)),  # whose code nothing pins
        ("bytes", ("bytes", True, None)),
    ],
)
def test_a_revision_is_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str | None, given: tuple[Any, ...]
) -> None:
    asked: list[tuple[Any, ...]] = []

    def load(*arguments: Any) -> Any:
        asked.append(arguments)
        raise UnsupportedError("enough")

    monkeypatch.setattr(setup, "load_tokenizer", load)
    model = ModelConfig(path="owner/name", trust_remote_code=True, revision=COMMIT)
    run = tiny_run(tmp_path)
    run = replace(run, model=model, data=replace(run.data, tokenizer=tokenizer))
    with pytest.raises(UnsupportedError, match="enough"):
        list(setup.show_data(run, 0, held_out=False))
    assert asked == [given]
    with pytest.raises(UnsupportedError, match=r"model\.revision: missing: trust_remote_code runs"):
        setup.resolve(replace(run, model=replace(model, revision=None)))
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": "o/n--t.T"}}')
    run = replace(run, data=replace(run.data, tokenizer=str(tmp_path)))
    with pytest.raises(
        UnsupportedError, match=rf"data\.tokenizer: {tmp_path}: trust_remote_code runs"
    ):
        list(setup.show_data(run, 0, held_out=False))


def test_documents_beyond_the_positions_are_said_first(tmp_path: Path) -> None:
    """By the run before its data are read, and by `farspan data`."""
    run = tiny_run(tmp_path)
    config = {**(run.model.config or {}), "max_position_embeddings": 16}
    run = replace(run, model=replace(run.model, config=config))
    assert run.context > 16
    shown = "\n".join(setup.show_data(run, 0, held_out=False))
    assert "warning: farspan train will refuse this: context: a document of " in shown
    told: list[str] = []

    class Hears(Quiet):
        def note(self, text: str) -> None:
            told.append(text)

    with pytest.raises(UnsupportedError, match="exceeds the model's max_position_embeddings"):
        train(run, reporter=Hears())
    assert f"context: {run.context} exceeds the model's 16 positions" in told[0]
    fine = tiny_run(tmp_path)
    assert "warning: farspan train" not in "\n".join(setup.show_data(fine, 0, held_out=False))
