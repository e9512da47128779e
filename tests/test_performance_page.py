"""docs/evidence/performance.md is written from plans, and promises nothing unmeasured."""

import json

import pytest

from benchmarks import performance
from benchmarks.gpu.session import is_headline
from benchmarks.performance import PUBLISHED
from benchmarks.tables import filled, load
from farspan.planner.machines import machine


def test_published_numbers_are_the_papers() -> None:
    text = performance.PAGE.read_text(encoding="utf-8")
    for seconds in PUBLISHED.values():
        assert f"{seconds} s" in text


def test_what_was_measured_is_the_records() -> None:
    """Planned within 4% at the rates under load."""
    record = json.loads(performance.RECORD.read_text(encoding="utf-8"))
    text = performance.PAGE.read_text(encoding="utf-8")
    assert filled(text, performance.records()) == text
    steps = [row for row in record["measurements"] if is_headline(row)]
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
    steps = [row for row in record["measurements"] if is_headline(row) and row["seconds"]]
    assert {32, 128, 256} <= {row["tokens"] // 1024 for row in steps}
    for row in steps:
        assert row["seconds"] / row["planned"]["seconds"] == pytest.approx(1.0, abs=0.01)
        assert row["device_bytes_over_planned"] == pytest.approx(1.0, abs=0.02)


def test_kernels_of_sparse_attention_are_the_records() -> None:
    """The table, presets that price by it, and nothing that failed, was wrong or spilled."""
    record = load("sparse_kernels_h100")
    rows = [row for row in record["rows"] if row["kernel"] != "compiling"]
    assert not any("failed" in row for row in rows)
    assert all(row.get("right", True) for row in rows)
    shipped = {
        (row["shape"]["head_dim"], row["shape"]["query_page"], row["kernel"]): row
        for row in rows
        if row.get("shipped")
    }
    dense = {(row["shape"]["head_dim"], row["kernel"]): row for row in rows}
    page = (performance.PAGE.parent / "sparse.md").read_text(encoding="utf-8")
    for width, name in ((128, "Qwen2.5-7B, 28 and 4"), (64, "Qwen2.5-0.5B, 14 and 2")):
        beside = [
            f"{row['useful_tflops']:.0f}, {row['backward_useful_tflops']:.0f}"
            for row in (dense[width, f"dense {kernel}"] for kernel in ("cudnn", "flash"))
        ]
        for tokens in (128, 16):
            three = [shipped[width, tokens, kernel] for kernel in ("forward", "dq", "dkv")]
            assert all(row["spills"] == 0 for row in three)
            forward, dq, dkv = (row["useful_tflops"] for row in three)
            cells = f"{forward:.0f} | {10 / (4 / dq + 6 / dkv):.0f}"
            assert (
                f"| {name} of {width} | {tokens} tokens | {cells} | {' | '.join(beside)} |" in page
            )
            if (width, tokens) == (128, 16):
                rates = machine("h100").rates["bfloat16"]
                assert rates.chosen_forward is not None
                assert rates.chosen_backward is not None
                assert f"{rates.chosen_forward.at(1e12) / 1e12:.0f}" == f"{forward:.0f}"
                assert f"{rates.chosen_backward.at(1e12) / 1e12:.0f}" in cells
