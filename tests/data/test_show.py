"""What a sequence is shown as is what is trained."""

import io
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farspan.cli import app
from farspan.cli.train import ReadingLine
from farspan.data.corpus import show_sequence
from farspan.data.tokenizers import ByteTokenizer, HowFar
from farspan.train import setup
from tests.data.stores import open_records


def test_what_is_read_and_what_is_trained_are_apart(tmp_path: Path) -> None:
    records = ({"prompt": "2+2?\n", "completion": "vier, ä"}, {"prompt": "", "completion": "hm"})
    found = open_records(tmp_path, *records, context=32, format="prompt")
    lines = list(show_sequence(found.train.batch([0]), ByteTokenizer()))
    path = tmp_path / "data.jsonl"
    assert lines[-1] == "padding: 15 tokens"
    shown = {lines[0]: lines[1:3], lines[3]: lines[4:6]}
    assert shown == {
        f"{path}:1: 14 tokens, 9 trained": [r"  read    2+2?\n", "  trained vier, ä<end>"],
        f"{path}:2: 3 tokens, 2 trained": ["  read    h", "  trained m<end>"],
    }


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
    assert "sequence: expected a number below 1, the number of held-out sequences, got 1" in str(
        beyond.exception
    )


@pytest.mark.parametrize("terminal", [True, False])
def test_the_command_says_how_far_it_is(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal one line, written over; elsewhere one each tenth, if it takes a second."""
    now, out = [0.0], io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    monkeypatch.setattr("farspan.cli.train.time.monotonic", lambda: now[0])
    with ReadingLine(out) as told:
        for done in range(1, 41):
            now[0] += 0.5
            told(done, 100 * done, HowFar(done << 20, 40 << 20, seconds=now[0]))
    said = out.getvalue()
    assert "tokenizing 20.0 MiB of 40.0 MiB, 10 s left: 20 documents, 2,000 tokens" in said
    assert said.count("\r") == (41 if terminal else 0)
    assert said.count("\n") == (0 if terminal else 10)


TINY = (
    "model: {config: {model_type: qwen2, vocab_size: 264, hidden_size: 16, intermediate_size: 16, "
    "num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1}}\ncontext: 8\n"
)


def test_verify_shows_the_data_of_a_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "completion": "b", "extra": 1}\n')
    run = tmp_path / "run.yaml"

    def lines(command: str, ignored: str, *options: str) -> list[str]:
        run.write_text(
            f"{TINY}data: {{source: jsonl, path: {tmp_path}/data.jsonl, tokenizer: bytes, "
            f"cache: {tmp_path}/cache, ignore: [{ignored}]}}\n"
        )
        result = CliRunner().invoke(app, [command, str(run), *options])
        assert result.exit_code == 0, result.output
        return result.output.splitlines()

    verify = ("verify", "extra", "--context", "16")
    with monkeypatch.context() as patch:
        patch.setattr(setup, "GLANCE", (0, 0))
        (line,) = [line for line in lines(*verify) if line.startswith("data:")]
        assert line.startswith("data: not prepared yet; `farspan data`")
    shown = lines("data", "extra")
    assert "ignored, as data.ignore says: extra" in shown
    assert "  trained b<end>" in shown
    found = lines(*verify)
    (positions,) = [line for line in shown if line.startswith("RoPE: ")]
    shown.remove(positions)  # verify says it of the model, first
    assert found[: len(shown) + 1] == [positions, *shown]
    assert "exact" in " ".join(found[len(shown) + 1 :])
    (line,) = [line for line in lines("verify", "", "--context", "16") if "data" in line]
    assert line.startswith("data: data.path: format prompt does not read 'extra'")
