"""From a configuration to sequences, held-out documents apart."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farspan.data.config import DataConfig, SourceKind
from farspan.data.corpus import Corpus, open_corpus
from farspan.data.tokenizers import ByteTokenizer
from farspan.spec import UnsupportedError

Build = Callable[..., Corpus]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    def make(**fields: object) -> Corpus:
        config = DataConfig(cache=str(tmp_path / "cache"), **fields)  # type: ignore[arg-type]
        return open_corpus(config, ByteTokenizer(), context=16, seed=0, watch=lambda *_: None)

    return make


def write(folder: Path, count: int) -> str:
    folder.mkdir()
    for number in range(count):
        (folder / f"{number}.txt").write_text(f"text number {number}, {'and so on ' * number}")
    return str(folder)


def names(packing: Any) -> set[str]:
    return {n for i in range(packing.sequences_per_epoch()) for n in packing.once(i).names[0]}


def test_a_fraction_of_the_documents_is_held_out(tmp_path: Path, build: Build) -> None:
    corpus = build(source=SourceKind.TEXT, path=write(tmp_path / "t", 10), held_out=0.3)
    assert corpus.held_out is not None
    train, held = names(corpus.train), names(corpus.held_out)
    assert len(held) == 3
    assert len(train) == 7
    assert not train & held
    assert corpus.longest == len("text number 9, ") + 9 * len("and so on ") + 1
    assert corpus.largest == 256


def test_other_documents_are_held_out(tmp_path: Path, build: Build) -> None:
    paths = {
        "path": write(tmp_path / "t", 4),
        "held_out_path": write(tmp_path / "v", 2).replace("/v", "/v/1.txt"),
    }
    corpus = build(source=SourceKind.TEXT, **paths)
    assert corpus.held_out is not None
    assert names(corpus.held_out) == {paths["held_out_path"]}
    assert len(names(corpus.train)) == 4
    assert corpus.identity != build(source=SourceKind.TEXT, path=paths["path"]).identity


def test_copies_of_the_same_documents_are_refused(tmp_path: Path, build: Build) -> None:
    first, second = write(tmp_path / "t", 3), write(tmp_path / "v", 3)
    with pytest.raises(UnsupportedError, match=r"held_out_path: these documents are also"):
        build(source=SourceKind.TEXT, path=first, held_out_path=second)


def test_one_document_cannot_be_divided(tmp_path: Path, build: Build) -> None:
    with pytest.raises(
        UnsupportedError, match=r"held_out: 0\.1 of 1 document leaves nothing to train"
    ):
        build(source=SourceKind.TEXT, path=write(tmp_path / "t", 1), held_out=0.1)


@pytest.fixture
def datasets() -> Any:
    """The library, which other sources do without."""
    return pytest.importorskip("datasets")


@pytest.fixture
def dataset(tmp_path: Path, datasets: Any) -> str:
    rows = {
        "train": datasets.Dataset.from_dict({"body": ["one", "two", "three"], "id": [1, 2, 3]}),
        "test": datasets.Dataset.from_dict({"body": ["four"], "id": [4]}),
    }
    datasets.DatasetDict(rows).save_to_disk(str(tmp_path / "set"))
    return str(tmp_path / "set")


def test_a_saved_dataset_is_read_by_split(dataset: str, build: Build, tmp_path: Path) -> None:
    fields = {"source": SourceKind.DATASET, "path": dataset, "field": "body"}
    corpus = build(**fields, held_out_split="test")
    assert names(corpus.train) == {f"{dataset}:{row}" for row in (1, 2, 3)}
    assert corpus.held_out is not None
    ids = corpus.held_out.once(0).input_ids[0].tolist()
    assert bytes(ids[:-1]) == b"four"
    before = sorted(tmp_path.glob("cache/*"))
    build(**fields)
    assert sorted(tmp_path.glob("cache/*")) == before


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"field": "text"}, r"data\.field: dataset .* has no column 'text'; it has: body, id"),
        (
            {"field": "id", "ignore": ("body",)},
            r"row 1: field 'id' holds int, expected text",
        ),
        ({"field": "body", "split": "dev"}, r"data\.split: .* no split 'dev'; it has: train, test"),
        ({"field": "body", "name": "en"}, r"data\.name: .* has no configurations; leave name out"),
        ({"field": "body", "held_out_split": "train"}, "also trained on"),
    ],
)
def test_a_dataset_that_cannot_be_read_is_refused(
    dataset: str, build: Build, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        build(source=SourceKind.DATASET, path=dataset, **fields)


def test_one_saved_split_is_not_taken_for_another(
    build: Build, tmp_path: Path, datasets: Any
) -> None:
    fields: dict[str, Any] = {"source": SourceKind.DATASET, "field": "body"}
    one = datasets.Dataset.from_dict({"body": ["one", "two"]}, split="validation")
    one.save_to_disk(str(tmp_path / "one"))
    with pytest.raises(
        UnsupportedError, match=r"data\.split: .*holds only the split 'validation', got 'train'"
    ):
        build(**fields, path=str(tmp_path / "one"))
    corpus = build(**fields, path=str(tmp_path / "one"), split="validation")
    assert corpus.train.kept.tokens == 2 * 4
    datasets.Dataset.from_dict({"body": ["one"]}).save_to_disk(str(tmp_path / "made"))
    assert build(**fields, path=str(tmp_path / "made")).train.kept.tokens == 4
    with pytest.raises(
        UnsupportedError, match=r"data\.split: .*holds only the split 'train', got 'test'"
    ):
        build(**fields, path=str(tmp_path / "made"), held_out_split="test")


def test_a_folder_of_data_files_is_a_dataset(
    tmp_path: Path, build: Build, monkeypatch: pytest.MonkeyPatch, datasets: Any
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "arrow")
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "abc"}\n{"text": "defg"}\n')
    corpus = build(source=SourceKind.DATASET, path=str(folder))
    assert corpus.train.kept.tokens == 4 + 5


def test_without_its_library_a_dataset_is_refused(
    tmp_path: Path, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        UnsupportedError, match=r"data\.source: dataset needs .*pip install datasets"
    ):
        build(source=SourceKind.DATASET, path=str(tmp_path))
    assert build(source=SourceKind.TEXT, path=write(tmp_path / "t", 2)).train.kept.tokens > 0
