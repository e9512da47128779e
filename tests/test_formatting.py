"""Numbers as people write them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.formatting import (
    MOST_TOKENS,
    fold,
    read_bytes,
    read_memory,
    read_seconds,
    read_tokens,
    write_bytes,
    write_seconds,
    write_tokens,
)
from farspan.spec import UnsupportedError


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("131072", 131072),
        ("131,072", 131072),
        ("128K", 131072),
        ("1M", 1048576),
        ("1.5M", 1572864),
        (" 2 m ", 2097152),
        ("1e6", 1_000_000),
        ("1G", 2**30),
    ],
)
def test_tokens_are_read(text: str | int, tokens: int) -> None:
    assert read_tokens(text, "context") == tokens


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (5, 5),
        ("5", 5),
        ("7B", 7),
        ("128GiB", 128 * 2**30),
        ("80GB", 80 * 10**9),
        ("1.5 TiB", 3 * 2**39),
        ("64G", 64 * 2**30),
        ("8e10", 80 * 10**9),
    ],
)
def test_bytes_are_read(text: str | int, size: int) -> None:
    assert read_bytes(text, "host_memory") == size


@pytest.mark.parametrize(
    "text", ["", "M", "-1M", "0", "1.3", "1e-6", "1e999", "e6", "12 apples", "1MB", True, -4]
)
def test_what_is_no_number_of_tokens_is_refused(text: str | int) -> None:
    with pytest.raises(
        UnsupportedError, match=r"^context: expected tokens such as 131072, 128K or 1M"
    ):
        read_tokens(text, "context")


@pytest.mark.parametrize("text", ["128Q", "12 apples", "GiB", "0GiB", "-3GiB", False, 0])
def test_what_is_no_number_of_bytes_is_refused(text: str | int) -> None:
    with pytest.raises(UnsupportedError, match=r"^host_memory: expected bytes such as 128GiB"):
        read_bytes(text, "host_memory")


@given(st.integers(1, MOST_TOKENS))
def test_tokens_written_are_read_back(tokens: int) -> None:
    assert read_tokens(write_tokens(tokens), "context") == tokens


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1536, "1.5 KiB"),
        (-(2**40), "-1.0 TiB"),
        (2**52, "4,096.0 TiB"),
    ],
)
def test_bytes_are_written(size: int, text: str) -> None:
    assert write_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12.3 ms"), (1.0, "1 s"), (119.0, "119 s"), (150.0, "2.5 min"), (9000.0, "2.5 h")],
)
def test_seconds_are_written(seconds: float, text: str) -> None:
    assert write_seconds(seconds) == text


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (90, 90),
        ("90s", 90),
        ("30m", 1800),
        (" 30 Min", 1800),
        ("1.5h", 5400),
    ],
)
def test_times_are_read(given: str | float, seconds: float) -> None:
    assert read_seconds(given, "max_step") == seconds


@pytest.mark.parametrize("given", ["", "m", "0", 0, -1, "-5m", "1d", "1e3s", "nan", True])
def test_what_is_no_time_is_refused(given: str | float) -> None:
    with pytest.raises(
        UnsupportedError, match=r"^max_step: expected a time above 0 such as 90s, 30m"
    ):
        read_seconds(given, "max_step")


@pytest.mark.parametrize("given", [24, "24", " 1048575"])
def test_a_memory_of_a_few_bytes_lacks_its_unit(given: str | int) -> None:
    bare = str(given).strip()
    with pytest.raises(
        UnsupportedError, match=f"^device_memory: {bare} has no unit .*; write {bare}GiB$"
    ):
        read_memory(given, "device_memory")
    assert read_memory("24KiB", "device_memory") == 24 * 2**10
    assert read_memory(2**20, "device_memory") == 2**20


def test_lines_are_folded_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "measuring " * 20
    for columns, widest in (("40", 80), ("80", 80), ("120", 120)):
        monkeypatch.setenv("COLUMNS", columns)
        lines = fold(text)
        assert max(map(len, lines)) <= widest
        assert len(lines[0]) > widest - len("measuring ")
        assert all(line.startswith("  ") for line in lines[1:])
        assert " ".join(" ".join(lines).split()) == text.strip()


COMMAND = "farspan plan --model Some-7B --context 128K --optimizer host"
START = (
    "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --nproc-per-node 2 -m "
    "farspan train run.yaml"
)


@pytest.mark.parametrize("before", range(0, 60, 7))
def test_what_is_pasted_is_not_broken(before: int) -> None:
    path = "/a-folder/" + "of-many-words-" * 8 + "run.yaml"
    text = f"{'x ' * before}{COMMAND}, kept in {path}, {START}, with --gpus 2 as they are"
    folded = "\n".join(fold(text, 80))
    assert COMMAND in folded
    assert path in folded
    assert "--gpus 2" in folded
    # A shell goes on after a backslash at the end of a line.
    assert START in re.sub(r" \\\n +", " ", folded)
    assert all(len(line) <= 80 or path in line for line in folded.splitlines())
