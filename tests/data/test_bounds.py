"""Whatever a file holds, what is read of it is bounded: an error names the field and the limit,
within seconds and a little memory."""

import time
from pathlib import Path

import pytest

from farspan.formatting import MOST_TOKENS, read_tokens
from farspan.planner.api import MOST_DEVICES, Request
from farspan.spec import Refused
from farspan.train.config import MOST_BATCHES, MOST_PIECES, load_run
from farspan.train.yaml_config import LONGEST_FILE, MOST_VALUES, read_mapping

SECONDS = 2.0  # of CPU, that an error may take
LEAST = "model: {config: {model_type: qwen2}}\ndata: {source: stdlib}\n"


def refused(path: Path, match: str) -> None:
    """Loading the run file is refused with these words, in time."""
    begin = time.process_time()
    with pytest.raises(Refused, match=match):
        load_run(path)
    assert time.process_time() - begin < SECONDS


def laughs(levels: int, form: str) -> str:
    """A value that holds 9**levels others behind aliases; `form` has one place for a level's."""
    lines = [f"a0: &a0 {form.format('1')}"]
    for level in range(1, levels):
        aliases = ", ".join([f"*a{level - 1}"] * 9)
        lines.append(f"a{level}: &a{level} {form.format(aliases)}")
    return "\n".join(lines)


@pytest.mark.parametrize("levels", [6, 9, 60])
def test_aliases_of_aliases(tmp_path: Path, levels: int) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(LEAST + laughs(levels, "[{}]"))
    refused(run, rf"run.yaml: line \d+: more than {MOST_VALUES:,} values, .* alias .*; give fewer")


def test_merge_keys_of_merge_keys() -> None:
    begin = time.process_time()
    text = laughs(9, "{{<<: [{}]}}").replace("[1]", "{z: 1}")
    with pytest.raises(Refused, match=f"more than {MOST_VALUES:,} values"):
        read_mapping(text, "run.yaml")
    assert time.process_time() - begin < SECONDS


def test_a_long_text_behind_aliases_counts_by_its_length() -> None:
    text = f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 1000)}]"
    with pytest.raises(Refused, match=f"more than {MOST_VALUES:,} values"):
        read_mapping(text, "run.yaml")


def test_aliases_of_a_run_are_read() -> None:
    text = f"a: &a [{', '.join(['1'] * 100)}]\nb: [{', '.join(['*a'] * 100)}]\nc: {{<<: {{d: *a}}}}"
    found = read_mapping(text, "run.yaml")
    assert found["b"] == [[1] * 100] * 100
    assert found["c"] == {"d": [1] * 100}


@pytest.mark.parametrize("line", ["#", "k{}: 1\n", "[1, 2, ", "- &a{} [] \n"])
def test_a_file_of_any_size(tmp_path: Path, line: str) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("".join(line.format(n) for n in range(2_000_000 // len(line))))
    refused(run, f"run.yaml: more than {LONGEST_FILE:,} characters.*; shorten it")


@pytest.mark.parametrize("line", ["k{}: 1\n", "? [{}]\n", "{{k{}: 1}},"])
def test_as_many_keys_as_a_file_may_have(tmp_path: Path, line: str) -> None:
    """Also those that come twice are found without comparing each with all."""
    run = tmp_path / "run.yaml"
    lines = "".join(line.format(n) for n in range((LONGEST_FILE - 10) // (len(line) + 3)))
    run.write_text(f"x: [{lines}]" if line.endswith(",") else lines)
    refused(run, f"more than {MOST_VALUES:,} values")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("context: 2305843009213693952", f"context: 2305843009213693952 tokens .*{MOST_TOKENS:,}"),
        ("context: 2G", f"context: 2G tokens are more than the {MOST_TOKENS:,} .*; give fewer"),
        (f"context: {MOST_TOKENS}\nbatch: 2", f"batch: {MOST_TOKENS:,} x 2 tokens"),
        ("batch: 1000000000000", "batch: 8,192 x 1,000,000,000,000 tokens are more than"),
        ("accumulate: 1000000000000", f"accumulate: expected at most {MOST_BATCHES:,}"),
        ("schedule: {chunk: 1000000000000}", "schedule.chunk: 1000000000000 tokens are more"),
        ("schedule: {kv_block: 1T}", "schedule.kv_block: 1T tokens are more"),
        ("schedule: {loss_chunk_size: 1T}", "schedule.loss_chunk_size: 1T tokens are more"),
        ("sparse: {budget: 1000000000000}", "sparse.budget: 1000000000000 tokens are more"),
        ("context: 1M\nschedule: {chunk: 1}", rf"schedule.chunk: 1 .* {MOST_PIECES:,} .* least 16"),
        ("context: 1M\nschedule: {kv_block: 2}", "schedule.kv_block: 2 would cut 1,048,576"),
    ],
)
def test_counts_that_no_run_has(tmp_path: Path, line: str, words: str) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(LEAST + line)
    refused(run, words)


def test_the_longest_context() -> None:
    assert read_tokens("1G", "context") == MOST_TOKENS
    with pytest.raises(Refused, match="context: 1073741825 tokens are more than the 1,073,741,824"):
        read_tokens(MOST_TOKENS + 1, "context")


def test_devices_that_no_machine_has() -> None:
    request = Request("Qwen2.5-0.5B", 8192, "h100", gpus=10**9)
    with pytest.raises(Refused, match=f"gpus: expected at most {MOST_DEVICES:,} devices"):
        request.question()
