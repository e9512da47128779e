"""What may be asked: layouts that are whole numbers of devices, and a device's share of memory."""

from dataclasses import replace
from typing import Any

import pytest

from farspan.planner.machines import machine
from farspan.planner.request import Question, Seconds
from farspan.program.layout import Layout, sequence_layout
from farspan.spec import RunSpec, UnsupportedError
from tests.program.cases import model_of


@pytest.mark.parametrize("name", ["ulysses", "shards", "ring", "tensor", "pipeline", "data"])
@pytest.mark.parametrize("bad", [0, -1, 1.0, True, "2", None])
def test_a_layout_is_of_whole_devices(name: str, bad: Any) -> None:
    with pytest.raises(UnsupportedError) as refused:
        Layout(**{name: bad})
    assert str(refused.value) == f"{name}: expected a whole number of devices >= 1, got {bad!r}"


@pytest.mark.parametrize("bad", [1, "no", None])
def test_weights_are_cut_or_not(bad: Any) -> None:
    with pytest.raises(UnsupportedError, match="fsdp: expected true or false, got "):
        Layout(fsdp=bad)


@pytest.mark.parametrize(
    ("kv_heads", "devices", "layout"),
    [
        (8, 4, Layout(ulysses=4)),
        (2, 8, Layout(ulysses=2, shards=4)),
        (6, 4, Layout(ulysses=2, shards=2)),
        (3, 8, Layout(shards=8)),
    ],
)
def test_heads_are_shared_as_far_as_they_go(kv_heads: int, devices: int, layout: Layout) -> None:
    model = model_of(2)
    layers = (replace(model.layers[0], kv_heads=24), replace(model.layers[1], kv_heads=kv_heads))
    found = sequence_layout(replace(model, layers=layers), devices)
    assert found == layout
    assert found.devices() == devices


@pytest.mark.parametrize(
    ("layout", "sharers"),
    [(Layout(), 1), (Layout(ulysses=4), 4), (Layout(ulysses=4, data=2), 8), (Layout(ring=32), 8)],
)
def test_the_devices_of_a_node_share_its_memory(layout: Layout, sharers: int) -> None:
    """A node of h200 has eight; more devices are in more nodes."""
    question = Question(model_of(2), RunSpec(1, 64), machine("h200"), layout)
    assert question.host_share() == machine("h200").host_bytes // sharers


def test_one_memory_of_both_tiers_is_shared_too() -> None:
    spec = replace(machine("h200"), unified=True, processors=0, devices=2)
    question = Question(model_of(2), RunSpec(1, 64), spec, Layout(ulysses=2))
    assert question.host_share() == spec.host_bytes // 2


@pytest.mark.parametrize(
    ("beside", "exposed"),
    [(0.0, 0.0), (1e-13, 0.0), (-1e-12, 0.0), (2e-8, 0.0), (0.25, 0.25), (1e-6, 1e-6)],
)
def test_what_rounding_leaves_is_no_waiting(beside: float, exposed: float) -> None:
    """A step of 231 s, of whose times the sum is off by parts in 10 billion at most."""
    seconds = Seconds(231.0 + beside, 228.0, 198.0, 43.0, 0.0, 0.5, 2.5, "compute")
    assert seconds.exposed(overlap=False) == pytest.approx(exposed, rel=1e-6)
    # Where lanes overlap, what is issued is issued meanwhile.
    assert seconds.exposed(overlap=True) == pytest.approx(2.5 + beside, rel=1e-6)
