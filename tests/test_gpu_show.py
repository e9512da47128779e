"""A record shows what it says and compares like with like; a GPU is planned as what it is."""

import re
from typing import Any

import pytest

from benchmarks.children import Row
from benchmarks.gpu import show
from benchmarks.gpu.planned import CAPABILITIES, Card, preset_for
from farspan.planner.machines import machine
from farspan.planner.machines import names as presets


@pytest.mark.parametrize(
    ("card", "preset", "words"),
    [
        (Card("NVIDIA H100 80GB HBM3", 84_000_000_000, 9.0), "h100", "preset h100"),
        (Card("NVIDIA H20", 102_000_000_000, 9.0), "h100", "the nearest to NVIDIA H20 ("),
        (Card("NVIDIA H20-3e", 150_000_000_000, 9.0), "h200", "140 GiB, capability"),
        (Card("NVIDIA A100-PCIE-40GB", 42_000_000_000, 8.0), "a100-40g", "which none is of"),
        (Card("NVIDIA L2", 24_000_000_000, 8.9), "rtx4090", "capability 8.9"),
    ],
)
def test_a_gpu_is_planned_with_its_own_bytes(card: Card, preset: str, words: str) -> None:
    spec, said = preset_for(card)
    assert spec.device_bytes == card.device_bytes
    assert spec.rates == machine(preset).rates
    assert f"preset {preset}" in said
    assert re.search(words.replace("(", r"\("), said)


def test_capabilities_are_of_presets() -> None:
    assert CAPABILITIES.keys() <= set(presets())
    assert preset_for(None)[1] == "preset h200: there is no GPU"


def step_row(name: str, seconds: float, **fields: Any) -> Row:
    whole: Row = {"tokens": 131072, "layers": 28, "of_layers": 28}
    schedule: Row = {"sparse": None}
    return (
        {"name": name, "work": "step", "planned": {"schedule": schedule}}
        | whole
        | {"seconds": seconds, **fields}
    )


def test_what_approximates_is_no_exact_step() -> None:
    sparse = {"planned": {"schedule": {"sparse": {"budget": 8192}}}}
    rows = [
        step_row("auto at 131072", 30.0),
        step_row("sparse at 131072", 10.0, **sparse),
        step_row("huggingface at 131072, inputs on host", 60.0, work="huggingface"),
        step_row("huggingface at 131072, inputs on the device", 45.0, work="huggingface"),
    ]
    words = show.beside(rows).splitlines()[1].split(maxsplit=5)
    assert words == ["131072", "30.00", "45.00", "0.67", "auto", "inputs on the device"]
    line = show.published(rows, "NVIDIA H200").splitlines()[1]
    assert line.split() == ["131072", "30.00", "260.4", "8.68"]
    assert "best of three" in show.published(rows, "NVIDIA H200")


@pytest.mark.parametrize("gpu", ["NVIDIA H100 80GB HBM3", "NVIDIA H200 NVL", None])
def test_published_seconds_stand_beside_the_same_card_only(gpu: str | None) -> None:
    assert show.published([step_row("auto at 131072", 30.0)], gpu) == ""
