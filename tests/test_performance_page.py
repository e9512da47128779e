"""docs/evidence/performance.md is written from plans, and promises nothing unmeasured."""

import json

import pytest

from benchmarks import performance
from benchmarks.gpu.show import PUBLISHED, is_exact


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


def test_what_was_measured_is_the_records() -> None:
    """Planned within 4% at the rates under load."""
    record = json.loads(performance.RECORD.read_text(encoding="utf-8"))
    text = performance.PAGE.read_text(encoding="utf-8")
    assert performance.filled(text, performance.records()) == text
    steps = [row for row in record["measurements"] if is_exact(row)]
    assert len(steps) == 5
    for row in steps:
        planned = performance.replanned(record, row).seconds.total
        assert row["seconds"] / planned == pytest.approx(1.0, abs=0.04)
        assert row["device_bytes_over_planned"] == pytest.approx(1.0, abs=0.015)
        assert 1.10 <= row["seconds"] / row["planned"]["seconds"] <= 1.15
    seconds = {row["name"]: row["seconds"] for row in steps}
    slower = seconds["streamed at 131072"] / seconds["auto at 131072"]
    assert f"on the host cost {slower - 1:.1%}" in text
    for name in (
        "explanation/comparison",
        "reference/run-file",
        "decisions/034-streamed-weights",
    ):
        page = (performance.PAGE.parents[1] / f"{name}.md").read_text(encoding="utf-8")
        assert f"{slower:.3f} times as long" in " ".join(page.split()), name


def test_plans_by_rates_under_load_were_right() -> None:
    """Of an H100, made before each step: seconds within 1%, bytes within 2%."""
    record = json.loads(performance.H100.read_text(encoding="utf-8"))
    steps = [row for row in record["measurements"] if is_exact(row) and row["seconds"]]
    assert {32, 128, 256} <= {row["tokens"] // 1024 for row in steps}
    for row in steps:
        assert row["seconds"] / row["planned"]["seconds"] == pytest.approx(1.0, abs=0.01)
        assert row["device_bytes_over_planned"] == pytest.approx(1.0, abs=0.02)
