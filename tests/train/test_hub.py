"""The card of a model and its way to the hub, which a stand-in takes the place of."""

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import huggingface_hub
import pytest
import torch
import typer

from farspan.cli.with_torch import push_and_tell
from farspan.data.config import DataConfig, RecordFormat, SourceKind, WeightedSource
from farspan.program.layout import Parallel
from farspan.spec import UnsupportedError
from farspan.train.config import (
    HubConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    SparseConfig,
    StatesPlace,
)
from farspan.train.hub import PushFailed, Upload, card_of, push
from farspan.train.trainer import train
from farspan.train.yaml_config import to_mapping, write_mapping
from tests.ranks import run_ranks
from tests.train.tiny import Quiet, fit, tiny_run

REPO = "someone/a-model"


class StandIn:
    """Takes what the hub would; `fails` is what it raises instead, `there` what is in the
    repository."""

    uploads: ClassVar[list[dict[str, Any]]] = []
    fails: ClassVar[BaseException | None] = None
    there: ClassVar[SimpleNamespace | None] = None

    def __init__(self, **_: object) -> None:
        pass

    def repo_exists(self, repo: str) -> bool:
        assert repo.startswith("someone/")
        return self.there is not None

    def model_info(self, repo: str) -> Any:
        assert repo.startswith("someone/")
        return self.there

    def create_repo(self, repo: str, *, private: bool, exist_ok: bool) -> None:
        if self.fails is not None:
            raise self.fails
        self.uploads.append({"repo": repo, "private": private, "exist_ok": exist_ok})

    def create_commit(self, repo: str, operations: list[Any], *, commit_message: str) -> Any:
        added = [of for of in operations if isinstance(of, huggingface_hub.CommitOperationAdd)]
        gone = [of.path_in_repo for of in operations if of not in added]
        files = {of.path_in_repo: of.path_or_fileobj for of in added}
        sent = {"repo": repo, "files": files, "gone": gone, "message": commit_message}
        self.uploads.append(sent)
        return SimpleNamespace(commit_url=f"https://huggingface.co/{repo}/commit/1")


def holding(*files: str, private: bool = True) -> SimpleNamespace:
    """What a repository says of itself."""
    return SimpleNamespace(
        private=private, siblings=[SimpleNamespace(rfilename=name) for name in files]
    )


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[StandIn]]:
    monkeypatch.setattr(huggingface_hub, "HfApi", StandIn)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_secret")
    StandIn.uploads.clear()
    StandIn.fails = StandIn.there = None
    yield StandIn
    StandIn.fails = StandIn.there = None


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    run = tiny_run(
        tmp_path_factory.mktemp("hub"), steps=2, optimizer=OptimizerConfig(lr=1e-2, warmup=1)
    )
    fit(run)
    return run


@pytest.fixture
def run(finished: RunConfig, tmp_path: Path) -> RunConfig:
    """A run that has ended, in a folder of its own."""
    shutil.copytree(finished.folder, tmp_path / "run")
    return replace(finished, folder=str(tmp_path / "run"))


def metadata(text: str) -> dict[str, Any]:
    found: dict[str, Any] = huggingface_hub.ModelCard(text).data.to_dict()
    return found


def test_a_model_has_a_card_that_says_how_it_was_trained(run: RunConfig) -> None:
    text = (Path(run.folder) / "model" / "README.md").read_text()
    data = metadata(text)
    assert data["library_name"] == "transformers"
    assert data["tags"] == ["farspan", "long-context"]
    for words in (
        "a qwen2 model of random weights, trained on sequences of 48 tokens",
        "| data | text `text` |",
        "| steps | 2, of 2 sequences each |",
        "| optimizer | AdamW, learning rate 0.01, 1 warm-up steps, then cosine to 0.1 of that,",
        "| attention | dense and exact: loss and gradients are those of plain training",
        "| held-out loss | ",
    ):
        assert words in text, words
    assert str(Path(run.folder).parent) not in text
    assert str(Path(str(run.data.path)).parent) not in text
    assert "|  |" not in text


def test_a_card_names_approximations_and_no_folders(run: RunConfig) -> None:
    config = Path(run.folder) / "config.yaml"
    shutil.rmtree(Path(run.folder) / "model")
    sources = (
        WeightedSource(SourceKind.JSONL, "/home/me/books/*.jsonl", format=RecordFormat.CHAT),
        WeightedSource(SourceKind.DATASET, "someone/texts", weight=3.0),
    )
    other = replace(
        run,
        model=ModelConfig(path="Qwen/Qwen2.5-0.5B", lora=LoraConfig(rank=8)),
        data=DataConfig(sources=sources, tokenizer="bytes"),
        context=131072,
        sparse=SparseConfig(page=64, budget=1024, recent=1024),
        optimizer=OptimizerConfig(states=StatesPlace.EIGHT_BIT),
    )
    config.write_text(write_mapping(to_mapping(other)))
    text = card_of(Path(run.folder), 2)
    data = metadata(text)
    assert (data["base_model"], data["library_name"]) == ("Qwen/Qwen2.5-0.5B", "peft")
    assert data["datasets"] == ["someone/texts"]
    assert data["tags"][2:] == ["lora", "sparse-attention"]
    assert "| data | jsonl `*.jsonl`, format chat, weight 1 |" in text
    assert "| data | dataset `someone/texts`, split train, weight 3 |" in text
    assert "| attention | **approximate**: sparse attention, approximate: of earlier" in text
    assert "| its states | **approximate**: on the device, 8-bit moments" in text
    assert "/home/me" not in text


def test_a_card_that_was_edited_stays_and_another_follows_the_run(run: RunConfig) -> None:
    constant = replace(run, steps=2)
    card = Path(run.folder) / "model" / "README.md"
    first = card.read_text()
    (card.parent / "farspan.json").write_text("{}")
    assert fit(constant).step == 2
    assert card.read_text() == first
    own = first.replace("# a qwen2", "# My qwen2")
    card.write_text(own)
    (card.parent / "farspan.json").write_text("{}")
    fit(constant)
    assert card.read_text() == own
    assert card_of(Path(run.folder), 1) == own
    card.write_text(first)
    assert "| steps | 1, of" in card_of(Path(run.folder), 1)


def test_a_run_uploads_its_model_once(run: RunConfig, hub: type[StandIn]) -> None:
    asked = replace(run, hub=HubConfig(REPO))
    result = fit(asked)
    address = f"https://huggingface.co/{REPO}/commit/1"
    assert (result.uploaded, result.exit_code) == (address, 0)
    assert f"{result.folder / 'model'}, and at {address}" in result.message
    made, sent = hub.uploads
    assert made == {"repo": REPO, "private": True, "exist_ok": True}
    assert {"README.md", "config.json", "farspan.json", "model.safetensors"} <= sent["files"].keys()
    assert sent["message"].startswith("Model of step-00000002, by farspan ")
    assert (fit(asked).uploaded, len(hub.uploads)) == (address, 2)
    fit(replace(asked, hub=HubConfig("someone/another")))
    assert len(hub.uploads) == 4
    for path in Path(run.folder).rglob("*"):
        assert not path.is_file() or b"hf_secret" not in path.read_bytes(), path


def test_an_upload_that_fails_loses_nothing(run: RunConfig, hub: type[StandIn]) -> None:
    hub.fails = OSError("no network.\nmore")
    quiet, asked = Quiet(), replace(run, hub=HubConfig(REPO, private=False))
    result = fit(asked, reporter=quiet)
    assert (result.step, result.exit_code, result.uploaded) == (2, 1, None)
    assert result.message.startswith("2 steps done; the model is in ")
    assert (
        f"was not uploaded to {REPO}: no network; nothing of the run is lost: try again with "
        f"farspan push {run.folder} --to {REPO} --public"
    ) in result.message
    assert (Path(run.folder) / "model" / "model.safetensors").is_file()
    hub.fails = None
    again = fit(asked)
    assert (again.exit_code, again.uploaded is not None) == (0, True)


# -- what is in the repository, and what goes there ------------------------------------------------


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (
            holding("config.json", "model.safetensors"),
            r"files that farspan did not upload \(config",
        ),
        (holding("notes.txt", "README.md", ".gitattributes"), r"did not upload \(notes\.txt\)"),
        (
            holding("farspan.json", private=False),
            r"is already public, but the run asks for a private one",
        ),
    ],
)
def test_what_is_of_others_stays(
    run: RunConfig, hub: type[StandIn], there: SimpleNamespace, words: str
) -> None:
    hub.there = there
    with pytest.raises(PushFailed, match=f"was not uploaded: {REPO} .*{words}.*nothing of the run"):
        push(Path(run.folder), HubConfig(REPO))
    assert hub.uploads == []
    assert fit(replace(run, hub=HubConfig(REPO))).exit_code == 1


def test_a_model_of_farspan_is_replaced_whole(run: RunConfig, hub: type[StandIn]) -> None:
    hub.there = holding(
        *("farspan.json", "README.md", "LICENSE", "model-00001-of-00002.safetensors"),
        *("model.safetensors", "model.safetensors.index.json"),
    )
    push(Path(run.folder), HubConfig(REPO))
    gone = ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    assert hub.uploads[-1]["gone"] == gone
    hub.there = holding("README.md", ".gitattributes", private=False)
    push(Path(run.folder), HubConfig(REPO, private=False))
    assert hub.uploads[-1]["gone"] == []


def test_hidden_files_and_folders_of_this_machine_stay_here(
    run: RunConfig, hub: type[StandIn]
) -> None:
    model = Path(run.folder) / "model"
    (model / ".env").write_text("HF_TOKEN=hf_secret")
    (model / ".cache").mkdir()
    (model / ".cache" / "token").write_text("hf_secret")
    (model / "code").mkdir()
    (model / "code" / "model.py").write_text("")
    text = json.dumps({"r": 8, "base_model_name_or_path": str(model.parent / "base")})
    (model / "adapter_config.json").write_text(text)
    push(Path(run.folder), HubConfig(REPO))
    files = hub.uploads[-1]["files"]
    assert "code/model.py" in files
    assert not [name for name in files if name.startswith(".")]
    sent = json.loads(files["adapter_config.json"])
    assert sent == {"r": 8, "base_model_name_or_path": "base"}
    assert (model / "adapter_config.json").read_text() == text
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/base"}')
    push(Path(run.folder), HubConfig(REPO))
    sent = json.loads(hub.uploads[-1]["files"]["adapter_config.json"])
    assert sent["base_model_name_or_path"] == "someone/base"


def test_an_upload_that_is_interrupted_says_how_it_goes_on(
    run: RunConfig, hub: type[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.fails = KeyboardInterrupt()
    with pytest.raises(PushFailed, match=f"to {REPO}: interrupted; .* farspan push"):
        push(Path(run.folder), HubConfig(REPO))

    def interrupted(_: Upload, timeout: float | None = None) -> None:
        assert timeout is not None
        raise KeyboardInterrupt

    hub.fails = None
    monkeypatch.setattr(Upload, "join", interrupted)
    result = fit(replace(run, hub=HubConfig(REPO)))
    assert result.exit_code == 1
    assert f"to {REPO}: interrupted; nothing of the run is lost: try again" in result.message


def on_ranks(run: RunConfig, why: str | None) -> None:
    """Rank 0 alone knows the hub; it takes longer than one look at it."""
    rank = torch.distributed.get_rank()
    Upload.POLL = 0.05
    huggingface_hub.HfApi = StandIn if rank == 0 else None  # type: ignore[misc,assignment]
    huggingface_hub.get_token = lambda: "hf_secret" if rank == 0 else None
    StandIn.create_repo = lambda *_, **__: time.sleep(0.5)  # type: ignore[method-assign]
    StandIn.there = None if why is None else holding("others.txt")
    result = train(run, reporter=Quiet())
    assert result.exit_code == (why is not None)
    assert (result.uploaded is None) is (why is not None)
    assert why is None or why in result.message


@pytest.mark.exhaustive
def test_all_ranks_end_as_the_upload_does(tmp_path: Path) -> None:
    run = replace(
        tiny_run(tmp_path, steps=1, optimizer=OptimizerConfig(lr=1e-2)),
        parallel=Parallel(data=2),
        schedule=ScheduleConfig(strategy="grouped", chunk=16, groups=1),
        hub=HubConfig(REPO),
    )
    for name, why in (("uploads", None), ("refused", "files that farspan did not upload")):
        run_ranks(2, on_ranks, replace(run, folder=str(tmp_path / name)), why)


def test_who_is_not_logged_in_is_told_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    run = replace(tiny_run(tmp_path), hub=HubConfig(REPO))
    with pytest.raises(UnsupportedError, match=r"hub: you are not logged in .*hf auth login"):
        fit(run)
    assert not Path(run.folder).exists()


def test_the_command_uploads_what_a_run_left(
    run: RunConfig, hub: type[StandIn], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(run.folder)
    (folder / "model" / "README.md").unlink()  # as earlier versions left it
    push_and_tell(folder, HubConfig(REPO, private=False))
    assert capsys.readouterr().out == (
        f"uploaded {folder / 'model'} to https://huggingface.co/{REPO}/commit/1\n"
    )
    assert hub.uploads[0]["private"] is False
    assert json.loads((folder / "hub.json").read_text())["repo"] == REPO
    assert "| steps | 2, of" in (folder / "model" / "README.md").read_text()
    hub.fails = ValueError("")
    with pytest.raises(PushFailed, match=f"not uploaded to {REPO}: ValueError; nothing"):
        push(folder, HubConfig(REPO))
    with pytest.raises(typer.Exit):
        push_and_tell(folder, HubConfig(REPO))
    shutil.rmtree(folder / "model")
    with pytest.raises(UnsupportedError, match="has no model/, which a run writes when it ends"):
        push(folder, HubConfig(REPO))


@pytest.mark.parametrize("repo", ["name", "a/b/c", "a b/c"])
def test_what_is_no_repository_is_refused(repo: str) -> None:
    with pytest.raises(UnsupportedError, match="repo: expected USER/NAME"):
        HubConfig(repo)
