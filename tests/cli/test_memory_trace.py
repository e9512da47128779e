"""`farspan memory trace`: a file and a summary, or one clear line."""

import json
from pathlib import Path
from typing import Any

import pytest

from farspan.cli.with_torch import read_contexts, read_temporaries, trace_app
from farspan.engine.trace import ALL_TEMPORARIES, NO_TEMPORARIES, Temporaries, Temporary
from farspan.spec import UnsupportedError
from farspan_memory.trace import Mark, read_trace

SMALL = ("--model", "Qwen2.5-0.5B", "--layers", "2")


def run(*arguments: str) -> None:
    trace_app(list(arguments), standalone_mode=False)


def test_a_trace_is_written_and_summed_up(tmp_path: Path, capsys: Any) -> None:
    place = tmp_path / "step.trace"
    run(*SMALL, "--contexts", "1K,512", "--steps", "3", "-o", str(place), "--json")
    found = json.loads(capsys.readouterr().out)
    trace = read_trace(place)
    assert found["name"] == trace.name == "Qwen2.5-0.5B plain 1024+512+1024, 2 layers"
    assert found["events"] == len(trace.events)
    assert found["live_peak"] == trace.live_peak()
    assert [e.name for e in trace.events if isinstance(e, Mark)].count("optimizer") == 3


def test_strategies_adapters_and_weights_are_options(tmp_path: Path, capsys: Any) -> None:
    place = tmp_path / "step.trace"
    options = ("--strategy", "grouped", "--lora", "8", "--no-weights", "--temporaries", "none")
    run(*SMALL, "--context", "1K", "-o", str(place), *options)
    assert "Qwen2.5-0.5B grouped 1024, 2 layers, lora 8" in capsys.readouterr().out
    assert read_trace(place).live_peak() < 2**30


def test_lengths_begin_anew_where_steps_are_more() -> None:
    assert read_contexts("64K", None, None) == (65536,)
    assert read_contexts("8", None, 3) == (8, 8, 8)
    assert read_contexts(None, "8, 4", None) == (8, 4)
    assert read_contexts(None, "8,4", 3) == (8, 4, 8)
    for wrong in ((None, None, 1), ("8", "8", 1)):
        with pytest.raises(UnsupportedError, match="context: give either"):
            read_contexts(*wrong)
    with pytest.raises(UnsupportedError, match="context"):
        read_contexts(None, "8,,4", None)


def test_temporaries_are_named() -> None:
    assert read_temporaries("none") == NO_TEMPORARIES
    assert read_temporaries("cublas,flash,embedding") == ALL_TEMPORARIES
    assert read_temporaries("flash") == Temporaries(frozenset({Temporary.FLASH}))
    with pytest.raises(UnsupportedError, match="temporaries: 'cub' is not known"):
        read_temporaries("flash,cub")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--context", "1K"), "model: give --model"),
        (("--model", "no such", "--context", "1K"), "model: 'no such' is no preset"),
        ((*SMALL, "--context", "1K", "--strategy", "x"), "strategy: 'x' is not known"),
        ((*SMALL, "--record", "x.py"), "record: records a program, not a model"),
        (("--record", "/no/such.py"), r"record: /no/such\.py is not a file"),
    ],
)
def test_what_makes_no_sense_is_one_clear_line(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    with pytest.raises(UnsupportedError, match=words):
        run(*arguments, "-o", str(tmp_path / "t"))


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="cannot be written"):
        run(*SMALL, "--context", "64", "-o", str(tmp_path / "none" / "t"))
