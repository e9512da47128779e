"""Whatever a file holds, what is read of it is bounded: an error names the field and the limit,
within seconds and a little memory."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from farspan.ask import MOST_DEVICES, Request
from farspan.data.tokenizers import load_tokenizer
from farspan.formatting import MOST_TOKENS
from farspan.hf.load import Weights, load_config, load_model
from farspan.profile.catalog import (
    LARGEST_CONFIG,
    find_config,
    presets,
    refuse_huge,
)
from farspan.spec import UnsupportedError
from farspan.train.config import MOST_BATCHES, MOST_PIECES, load_run
from farspan.train.yaml_config import LONGEST_FILE, MOST_VALUES, read_mapping
from tests.data.bounded import bounded

SECONDS = 2.0  # of CPU, that an error may take
MEMORY = 2**30  # bytes beyond those of the start
LEAST = "model: {config: {model_type: qwen2}}\ndata: {source: stdlib}\n"


def assert_refused(call: Callable[[], Any], match: str) -> None:
    """The call is refused with these words, within the limits."""
    found = bounded(call, SECONDS, MEMORY)
    assert re.search(f"^UnsupportedError: .*{match}", found), found


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
    assert_refused(
        lambda: load_run(run),
        rf"run.yaml: line \d+: more than {MOST_VALUES:,} values, .* alias .*; give fewer",
    )


def test_merge_keys_of_merge_keys() -> None:
    text = laughs(9, "{{<<: [{}]}}").replace("[1]", "{z: 1}")
    assert_refused(lambda: read_mapping(text, "run.yaml"), f"more than {MOST_VALUES:,} values")


def test_a_long_text_behind_aliases_counts_by_its_length() -> None:
    text = f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 1000)}]"
    assert_refused(lambda: read_mapping(text, "run.yaml"), f"more than {MOST_VALUES:,} values")


def test_aliases_of_a_run_are_read() -> None:
    text = f"a: &a [{', '.join(['1'] * 100)}]\nb: [{', '.join(['*a'] * 100)}]\nc: {{<<: {{d: *a}}}}"
    found = read_mapping(text, "run.yaml")
    assert found["b"] == [[1] * 100] * 100
    assert found["c"] == {"d": [1] * 100}


@pytest.mark.parametrize("line", ["#", "k{}: 1\n", "[1, 2, ", "- &a{} [] \n"])
def test_a_file_of_any_size(tmp_path: Path, line: str) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("".join(line.format(n) for n in range(2_000_000 // len(line))))
    assert_refused(
        lambda: load_run(run), f"run.yaml: more than {LONGEST_FILE:,} characters.*; shorten it"
    )


@pytest.mark.parametrize("line", ["k{}: 1\n", "? [{}]\n", "{{k{}: 1}},"])
def test_as_many_keys_as_a_file_may_have(tmp_path: Path, line: str) -> None:
    """Also those that come twice are found without comparing each with all."""
    run = tmp_path / "run.yaml"
    lines = "".join(line.format(n) for n in range((LONGEST_FILE - 10) // (len(line) + 3)))
    run.write_text(f"x: [{lines}]" if line.endswith(",") else lines)
    assert_refused(lambda: load_run(run), f"more than {MOST_VALUES:,} values")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("context: 2305843009213693952", f"context: 2305843009213693952 tokens .*{MOST_TOKENS:,}"),
        (
            "context: 2G",
            f"context: 2G tokens are more than the limit of {MOST_TOKENS:,} .*; give fewer",
        ),
        (f"context: {MOST_TOKENS}\nbatch: 2", f"batch: {MOST_TOKENS:,} x 2 tokens"),
        ("batch: 1000000000000", "batch: 8,192 x 1,000,000,000,000 tokens are more than"),
        ("accumulate: 1000000000000", f"accumulate: expected at most {MOST_BATCHES:,}"),
        ("schedule: {chunk: 1000000000000}", "schedule.chunk: 1000000000000 tokens are more"),
        ("sparse: {budget: 1000000000000}", "sparse.budget: 1000000000000 tokens are more"),
        ("context: 1M\nschedule: {chunk: 1}", rf"schedule.chunk: 1 .* {MOST_PIECES:,} .* least 16"),
        ("context: 1M\nschedule: {kv_block: 2}", "schedule.kv_block: 2 would cut 1,048,576"),
    ],
)
def test_counts_that_no_run_has(tmp_path: Path, line: str, words: str) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(LEAST + line)
    assert_refused(lambda: load_run(run), words)


def test_devices_that_no_machine_has() -> None:
    request = Request("Qwen2.5-0.5B", 8192, "h100", gpus=10**9)
    with pytest.raises(UnsupportedError, match=f"gpus: expected at most {MOST_DEVICES:,} devices"):
        request.question()


TINY = {
    "model_type": "qwen2",
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SIZES = [
    ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected at most 10,000, .* 1,000,000,000"),
    ({"vocab_size": 2**40}, "vocab_size: expected at most 16,777,216"),
    ({"head_dim": 2**40}, "head_dim: expected at most 1,048,576"),
]


@pytest.mark.parametrize(("fields", "words"), SIZES)
def test_sizes_that_no_model_has(tmp_path: Path, fields: dict[str, int], words: str) -> None:
    """Before anything is built, wherever they are written."""
    config = {**TINY, **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    name = next(iter(fields))
    load = partial(load_model, dtype=torch.float32, weights=Weights.NONE)
    for call, where in (
        (lambda: load(config=config), "model.config."),
        (lambda: load(config=TINY, overrides=fields), "model.overrides."),
        (lambda: load(path=str(tmp_path)), f"model.path: {tmp_path}/config.json: "),
        (lambda: find_config(str(tmp_path)), f"model: {tmp_path}/config.json: "),
        (lambda: load_tokenizer(str(tmp_path)), f"data.tokenizer: {tmp_path}/config.json: "),
    ):
        if name not in TINY and "overrides" in where:
            continue  # no field of this family
        assert_refused(call, where + words)


def test_sizes_in_parts_of_a_configuration(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**9}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_refused(lambda: find_config(str(tmp_path)), "text_config.num_hidden_layers: expected at")
    moe = {"model_type": "deepseek_v3", "n_routed_experts": 10**9}
    words = "model.config.n_routed_experts: expected at most 16,384"
    assert_refused(lambda: load_config(path=None, config=moe, overrides={}), words)
    gpt = {"model_type": "gpt2", "n_layer": 10**9}
    assert_refused(lambda: load_config(path=None, config=gpt, overrides={}), "n_layer: expected at")


def test_configurations_of_real_models_are_read() -> None:
    for preset in presets():
        refuse_huge(preset.config, "model: ")


def test_a_configuration_that_is_no_configuration(tmp_path: Path) -> None:
    place = tmp_path / "config.json"
    with place.open("wb") as file:
        file.truncate(2**40)  # sparse: 1 TiB of zeros
    load = partial(load_config, path=str(tmp_path), config=None, overrides={})
    words = f"model.path: {place} has more than {LARGEST_CONFIG >> 20} MiB, .*; give a model"
    assert_refused(load, words)
    assert_refused(lambda: find_config(str(tmp_path)), f"model: {place} has more than")
    for text in ("[" * 10**6, '{"a":' * 10**6, '{"model_type": "qwen2", "x": ' + "9" * 10**6 + "}"):
        place.write_text(text)
        assert_refused(load, f"model.path: {place} is not a JSON file that can be read")
        assert_refused(lambda: find_config(str(tmp_path)), f"model: {place} is not a JSON")


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "tokenizer_config.json"])
def test_a_tokenizer_of_any_size(tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(2**40)
    words = f"data.tokenizer: {tmp_path / name} has 1,099,511,627,776 bytes, expected at most"
    assert_refused(lambda: load_tokenizer(str(tmp_path)), words)
    for text in ("[" * 10**6, '{"a":' * 10**6):
        (tmp_path / name).write_text(text)
        assert_refused(lambda: load_tokenizer(str(tmp_path)), "data.tokenizer: ")
