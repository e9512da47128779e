"""What a person is told of a measured machine."""

from dataclasses import replace

import pytest

from farspan.planner.machines import names, read
from farspan.report.tables import LINKS, machine_view
from farspan.spec import Curve, MachineSpec
from tests.report.cases import text_of


@pytest.mark.parametrize("name", names())
def test_every_preset_can_be_shown(name: str) -> None:
    file = read(name)
    text = text_of(machine_view(file), width=120)
    of = "" if file.spec.unified else f"{file.spec.devices} x"
    assert f"{name}: {of}" in text
    for dtype in file.spec.rates:
        assert f"{dtype} matmul" in text
        assert f"{dtype} attention backward" in text
    for words in LINKS.values():
        assert words in text
    for words in file.sources.values():
        assert words.split(":")[0] in text


def test_curves_are_shown_by_their_ends() -> None:
    file = read("h200")
    rates = replace(
        file.spec.rates["bfloat16"], matmul=Curve(((1e9, 2e12), (5e9, 3e12), (4e10, 5e12)))
    )
    spec = replace(file.spec, rates={"bfloat16": rates})
    text = text_of(machine_view(replace(file, spec=spec)), width=120)
    assert "bfloat16 matmul 1 GFLOP 2 TFLOP/s 40 GFLOP 5 TFLOP/s" in text


@pytest.mark.parametrize("name", names())
def test_nothing_is_cut_in_a_narrow_terminal(name: str) -> None:
    assert "…" not in text_of(machine_view(read(name)), width=80)


def test_one_memory_is_named_once() -> None:
    file = read("h200")
    spec = replace(file.spec, unified=True, processors=0, host_bytes=3 * 2**30)
    text = text_of(machine_view(replace(file, spec=spec)))
    assert "3.0 GiB of memory for both tiers" in text
    assert "in reserve" not in text


def test_the_widest_spread_is_shown() -> None:
    file = replace(read("h200"), spread={"memory": 1.31, "fetch": 1.02})
    assert "measurements of one call differ by up to 1.31x (memory)" in text_of(machine_view(file))


def test_every_bandwidth_is_shown() -> None:
    rated = {
        name for name in MachineSpec.__annotations__ if MachineSpec.__annotations__[name] is float
    }
    assert rated - {"latency", "overhead"} == set(LINKS)
