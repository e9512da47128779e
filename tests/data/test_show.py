"""What a sequence is shown as is what is trained."""

import json
from pathlib import Path

from typer.testing import CliRunner

from farspan.cli import app
from farspan.data.config import DataConfig, SourceKind
from farspan.data.corpus import Corpus, open_corpus, show_sequence
from farspan.data.tokenizers import ByteTokenizer


def corpus(folder: Path, *records: dict[str, str], context: int = 32) -> Corpus:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = DataConfig(
        source=SourceKind.JSONL,
        path=str(path),
        format="prompt",  # type: ignore[arg-type]
        cache=str(folder / "cache"),
    )
    return open_corpus(config, ByteTokenizer(), context=context, seed=0, watch=lambda *_: None)


def test_what_is_read_and_what_is_trained_are_apart(tmp_path: Path) -> None:
    records = ({"prompt": "2+2?\n", "completion": "vier, ä"}, {"prompt": "", "completion": "hm"})
    found = corpus(tmp_path, *records)
    lines = list(show_sequence(found.train.batch([0]), ByteTokenizer()))
    path = tmp_path / "data.jsonl"
    assert lines[-1] == "padding: 15 tokens"
    shown = {lines[0]: lines[1:3], lines[3]: lines[4:6]}
    assert shown == {
        f"{path}:1: 14 tokens, 9 trained": [r"  read    2+2?\n", "  trained vier, ä<end>"],
        f"{path}:2: 3 tokens, 2 trained": ["  read    h", "  trained m<end>"],
    }


def test_long_parts_are_shortened(tmp_path: Path) -> None:
    found = corpus(tmp_path, {"prompt": "a" * 99, "completion": "b" * 999}, context=2000)
    prompt, completion = list(show_sequence(found.train.once(0), ByteTokenizer()))[1:]
    assert prompt == "  read    " + "a" * 99
    assert completion == "  trained " + "b" * 80 + " ... " + "b" * 75 + "<end>"


def test_the_command_shows_a_run_file_s_data(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number in range(4):
        (tmp_path / "text" / f"{number}.txt").write_text(f"text {number}")
    run = tmp_path / "run.yaml"
    run.write_text(
        "model: {config: {model_type: qwen2}}\ncontext: 16\n"
        f"data: {{source: text, path: {tmp_path}/text, held_out: 0.25, cache: {tmp_path}/cache}}\n"
    )
    result = CliRunner().invoke(app, ["data", str(run), "--held-out"])
    assert result.exit_code == 0
    assert "data: 21 tokens" in result.output
    assert "sequence 0 held out" in result.output
    assert ": 7 tokens, 6 trained" in result.output
    assert "  trained ext " in result.output
    beyond = CliRunner().invoke(app, ["data", str(run), "--held-out", "--sequence", "1"])
    assert "sequence: expected a number below 1, as many as are held out, got 1" in str(
        beyond.exception
    )
