"""Output that cannot be encoded is written in ASCII; that of closed streams is dropped."""

import os
import subprocess
import sys

import pytest

from farspan.cli import in_ascii
from tests.grids import part_of

PLAN = (
    "plan",
    "--model",
    "Qwen2.5-0.5B",
    "--machine",
    "4090",
    "--context",
    "4K",
    "--strategy",
    "oomb",
)


def call(encoding: str, *arguments: str, close: str = "") -> subprocess.CompletedProcess[bytes]:
    """`farspan ARGUMENTS` with streams of an encoding, of which a shell may close some."""
    shell = f'exec "$0" -m farspan "$@" {close}'
    return subprocess.run(
        ["bash", "-c", shell, sys.executable, *arguments],
        env={**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "80"},
        capture_output=True,
    )


@pytest.mark.parametrize("encoding", part_of(["ascii", "latin-1", "cp1252"], "ascii"))
def test_bars_are_ascii_where_there_are_no_others(encoding: str) -> None:
    done = call(encoding, *PLAN, "--all")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"####" in done.stdout
    done.stdout.decode("ascii")


def test_a_help_and_a_refusal_too() -> None:
    done = call("ascii", "plan", "--help")
    assert done.returncode == 0
    assert b"--qlora" in done.stdout
    done = call(
        "ascii", "plan", "--model", "Qwen3-8B", "--context", "4K", "--machine", "ca\u0301rte×2"
    )
    assert done.returncode == 2
    assert b"machine: " in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("close", part_of([">&-", "2>&-", ">&- 2>&-"], ">&- 2>&-"))
def test_closed_streams(close: str) -> None:
    assert call("utf-8", *PLAN, close=close).returncode == 0
    assert call("utf-8", "plan", "--model", "nothing", close=close).returncode == 2


def test_output_that_is_lost_is_no_success() -> None:
    done = call("utf-8", *PLAN, close=">/dev/full")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"farspan: output was lost: the disk it goes to is full\n"


def test_what_stands_for_what() -> None:
    def plain(text: str) -> str:
        return text.encode("ascii", errors="in_ascii").decode()

    assert plain("█▋▏ 2×3 – “é” → …") == '#+- 2x3 - "e" -> ...'
    assert plain("日") == "?"
    with pytest.raises(UnicodeDecodeError):
        in_ascii(UnicodeDecodeError("ascii", b"\xff", 0, 1, "no"))
