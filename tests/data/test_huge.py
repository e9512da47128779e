"""Files of any size are read up to a limit, which an error names: with an eighth of the limits, in
ten seconds and 128 MiB above what the process had; a terabyte takes hundreds of seconds."""

import gzip
import json
from functools import partial
from pathlib import Path

import pytest

from farspan.data import sources
from farspan.data.config import DataConfig, SourceKind
from farspan.data.corpus import open_corpus
from farspan.data.sources import DataFiles
from farspan.data.tokenizers import ByteTokenizer
from tests.data.bounded import bounded

SECONDS, MEMORY = 10.0, 1 << 27


@pytest.fixture(autouse=True)
def an_eighth(monkeypatch: pytest.MonkeyPatch) -> None:
    """New pages are the system's time, 2 s of it for those of the limits in use."""
    for name in ("MOST_TEXT", "MOST_VALUES", "MOST_BLANK"):
        monkeypatch.setattr(sources, name, getattr(sources, name) // 8)


def refused(tmp_path: Path, kind: str, path: Path) -> str:
    config = DataConfig(source=SourceKind(kind), path=str(path), cache=str(tmp_path / "cache"))
    opening = partial(open_corpus, context=64, seed=0, watch=lambda *_: None)
    return bounded(lambda: opening(config, ByteTokenizer()), SECONDS, MEMORY)


def sparse(path: Path, size: int) -> Path:
    """Zeros that take no room."""
    with path.open("wb") as file:
        file.truncate(size)
    return path


def bomb(path: Path, block: bytes, count: int) -> Path:
    """A gzip file of members of one block each."""
    member = gzip.compress(block, compresslevel=1)
    path.write_bytes(member * count)
    return path


def test_a_text_file_of_any_size(tmp_path: Path) -> None:
    path = sparse(tmp_path / "a.txt", 1 << 40)
    assert f"{path}: has more than 32 MiB" in refused(tmp_path, "text", path)


def test_a_line_of_any_length(tmp_path: Path) -> None:
    path = sparse(tmp_path / "a.jsonl", 1 << 40)
    assert f"{path}: line 1 has more than 32 MiB" in refused(tmp_path, "jsonl", path)


def test_a_line_that_was_compressed(tmp_path: Path) -> None:
    """4 GiB in 4 MB or so; and as blank lines, which are no document."""
    path = bomb(tmp_path / "a.jsonl.gz", b"x" * (1 << 24), 256)
    assert f"{path}: line 1 has more than 32 MiB" in refused(tmp_path, "jsonl", path)


def test_blank_lines_without_end(tmp_path: Path) -> None:
    path = bomb(tmp_path / "a.jsonl.gz", b"\n" * (1 << 20), 256)
    assert f"{path}: line 131073 follows 131,072 blank lines" in refused(tmp_path, "jsonl", path)


@pytest.mark.parametrize("value", ["{}", '""'])
def test_a_record_of_any_number_of_values(tmp_path: Path, value: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": [' + ",".join([value] * (sources.MOST_VALUES + 1)) + "]}")
    assert path.stat().st_size < sources.MOST_TEXT
    assert "a.jsonl: line 1 has more than 2,097,152 values" in refused(tmp_path, "jsonl", path)


def test_commas_of_a_text_are_no_values(tmp_path: Path) -> None:
    text = '1,2,[\\"' * (sources.MOST_VALUES // 2)
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "{text}"}}')
    (document,) = DataFiles((path,)).documents()
    assert document.fields["text"] == json.loads(f'"{text}"')
