"""`farspan-memory compare` from end to end: what it prints, how it ends, and that it needs no
torch."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from farspan_memory import cli
from farspan_memory.errors import UnsupportedError
from farspan_memory.trace import Event, FreeEvent, Malloc, Trace, write_trace

MIB = 2**20


def call(*arguments: str) -> Any:
    """The outcome of `farspan-memory compare ARGUMENTS`."""
    return CliRunner().invoke(cli.app, ["compare", *arguments])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A tensor that grows: 190 MiB alive."""
    events: list[Event] = [Malloc(0, 30 * MIB)]
    for number in range(1, 7):
        events += [Malloc(number, (100 + 10 * number) * MIB), FreeEvent(number)]
    path = tmp_path / "growing.txt"
    write_trace(Trace((*events, FreeEvent(0)), "growing"), path)
    return path


def test_a_trace_in_five_rows(trace: Path) -> None:
    result = call(str(trace))
    assert result.exit_code == 0
    for words in ("caching allocator", "expandable segments", "stitching, 32 MiB", "static plan"):
        assert words in result.output
    assert "modelled" in result.output
    assert "real code" in result.output
    assert "Stitching needs less memory than expandable segments" in " ".join(result.output.split())


def test_json_has_every_number(trace: Path) -> None:
    result = call(str(trace), str(trace), "--json", "--capacity", "500MiB", "--chunk", "2MiB")
    found = json.loads(result.output)
    assert len(found["comparisons"]) == 2
    first = found["comparisons"][0]
    assert (first["trace"], first["events"], first["live_peak"]) == ("growing", 14, 190 * MIB)
    rows = {row["name"]: row for row in first["allocators"]}
    assert list(rows) == [
        "caching allocator",
        "expandable segments",
        "stitching, 2 MiB",
        "static plan",
    ]
    caching = rows["caching allocator"]
    assert caching["modelled"] is True
    assert caching["reserved_peak"] == 840 * MIB
    assert caching["smallest_capacity"] == 190 * MIB
    assert caching["smallest"]["retries"] == 5
    assert caching["given"]["completed"] is True
    assert caching["unlimited"]["calls"] == {"cudaMalloc": 7}
    assert rows["stitching, 2 MiB"]["modelled"] is False
    assert rows["static plan"]["smallest_capacity"] == 190 * MIB
    assert first["expandable_as_good"] is False
    assert "GMLake" in found["costs"]["cuMemMap"]


def test_settings_of_pytorch_reach_its_models(trace: Path) -> None:
    """Above a fifth of 500 MiB whole segments go back early: no retry, with more calls."""
    conf = ("--alloc-conf", "garbage_collection_threshold:0.2")
    result = call(str(trace), "--json", "--capacity", "500MiB", *conf)
    caching = json.loads(result.output)["comparisons"][0]["allocators"][0]
    assert caching["given"]["retries"] == 0
    assert caching["given"]["calls"]["cudaFree"] > 0


@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_a_picture_is_written(suffix: str, trace: Path, tmp_path: Path) -> None:
    output = tmp_path / f"memory.{suffix}"
    assert call(str(trace), "-o", str(output)).exit_code == 0
    text = output.read_text(encoding="utf-8")
    start, end = text.index("<svg"), text.index("</svg>") + len("</svg>")
    ElementTree.fromstring(text[start:end])
    assert text.startswith("<svg" if suffix == "svg" else "<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.txt",), "nowhere.txt cannot be read"),
        (("TRACE", "-o", "memory.png"), "output: expected a name that ends in .html or .svg"),
        (("TRACE", "--capacity", "80 apples"), "capacity: expected bytes"),
        (("TRACE", "--chunk", "2MiB,big"), "chunk: expected bytes"),
        (("TRACE", "--alloc-conf", "split:5"), "alloc-conf: expected max_split_size_mb"),
        (("TRACE", "-o", "/nowhere/at/all.svg"), "output: /nowhere/at/all.svg cannot be written"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[str, ...], message: str, trace: Path) -> None:
    result = call(*(str(trace) if word == "TRACE" else word for word in arguments))
    assert isinstance(result.exception, UnsupportedError)
    assert message in str(result.exception)
