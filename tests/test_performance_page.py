"""docs/performance.md is written from plans, and promises nothing that was not measured."""

from pathlib import Path

import pytest

from benchmarks import performance
from benchmarks.gpu.show import PUBLISHED

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def test_tables_stand_between_their_marks() -> None:
    text = performance.PAGE.read_text(encoding="utf-8")
    made = performance.filled(text, {"planned": "| a |", "strategies": "| b |"})
    assert "<!-- table planned -->\n\n| a |\n\n<!-- end -->" in made
    assert "<!-- table strategies -->\n\n| b |\n\n<!-- end -->" in made
    with pytest.raises(ValueError, match="no place for"):
        performance.filled(text, {"another": ""})


def test_published_numbers_are_the_papers() -> None:
    text = performance.PAGE.read_text(encoding="utf-8")
    for seconds in PUBLISHED.values():
        assert f"{seconds} s" in text


def test_nothing_is_claimed_without_a_record() -> None:
    text = performance.PAGE.read_text(encoding="utf-8")
    is_measured = any(RESULTS.glob("gpu*.json"))
    assert is_measured or "No number of farspan has been measured on a GPU yet" in text
