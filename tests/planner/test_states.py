"""Weights, gradients and optimizer states, by hand."""

from dataclasses import replace
from typing import Any

import pytest

from farspan.planner.request import Optimizer, Question, Seconds
from farspan.planner.states import drive_bytes, states, update_seconds
from farspan.program.layout import Layout, sequence_layout
from farspan.spec import LayerWork, ModelSpec, RunSpec, Tier, UnsupportedError
from tests.planner.machines import slow_machine
from tests.program.cases import model_of

LAYER, OUTER, LAYERS = 100, 50, 4
ALL = LAYERS * LAYER + OUTER
CUT = ((0, 2), (2, 4))


def question(optimizer: Optimizer, width: int = 2, **fields: object) -> Question:
    work = LayerWork(parameters=LAYER, trainable=LAYER)
    layers = tuple(replace(layer, work=work) for layer in model_of(LAYERS).layers)
    model = ModelSpec("m", 64, 50, layers, width, ALL, ALL)
    asked = Question(model, RunSpec(1, 64), slow_machine(), optimizer=optimizer)
    return replace(asked, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("optimizer", "width", "gradients", "accumulators", "device", "host"),
    [
        # `.grad` is fp32 and the sum itself; master and two moments.
        (Optimizer.ADAMW, 2, 4 * ALL, 0, 12 * ALL, 0),
        (Optimizer.ADAMW, 4, 4 * ALL, 0, 8 * ALL, 0),
        (Optimizer.ADAMW, 8, 8 * ALL, 0, 16 * ALL, 0),
        # `.grad` is bf16; fp32 sums of two layers and what lies outside.
        (Optimizer.NONE, 2, 2 * ALL, 4 * (2 * LAYER + OUTER), 0, 0),
        (Optimizer.NONE, 4, 4 * ALL, 0, 0, 0),
        # A scale of four bytes for 256 elements of each moment; no master.
        (Optimizer.ADAMW8BIT, 2, 2 * ALL, 4 * (2 * LAYER + OUTER), 2 * ALL + ALL // 32, 0),
        # As on the device, and two slots for fp32 gradients and bf16 weights on their way.
        (Optimizer.HOST, 2, 4 * ALL, 0, 0, 12 * ALL + 2 * 6 * ALL),
        (Optimizer.HOST, 4, 4 * ALL, 0, 0, 8 * ALL + 2 * 8 * ALL),
        # Those slots, and four for master and moments, whose arrays are padded to 4,096 bytes.
        (Optimizer.DISK, 2, 4 * ALL, 0, 0, 2 * 6 * ALL + 4 * 3 * 4096),
        (Optimizer.DISK, 4, 4 * ALL, 0, 0, 2 * 8 * ALL + 4 * 2 * 4096),
    ],
)
def test_bytes(
    optimizer: Optimizer, width: int, gradients: int, accumulators: int, device: int, host: int
) -> None:
    held = states(question(optimizer, width), CUT)
    assert held.weights == width * ALL
    assert held.gathered == 0
    found = held.gradients, held.accumulators, held.optimizer, held.optimizer_on_host
    assert found == (gradients, accumulators, device, host)


def test_gradients_are_wide_where_that_is_asked_for() -> None:
    """As the step's own sum, with nothing of an optimizer beside it."""
    held = states(question(Optimizer.NONE, wide_gradients=True), CUT)
    assert (held.gradients, held.accumulators) == (4 * ALL, 0)
    assert (held.optimizer, held.optimizer_on_host) == (0, 0)


def test_fsdp_cuts_states_and_gathers_a_group() -> None:
    held = states(question(Optimizer.ADAMW, layout=Layout(data=10)), CUT)
    assert held.weights == 2 * ALL // 10
    assert held.gradients == 4 * ALL // 10
    assert held.optimizer == 12 * ALL // 10
    assert held.gathered == 2 * (2 * LAYER + OUTER)
    # Gradients of the open group are whole before they are scattered.
    assert held.accumulators == 4 * (2 * LAYER + OUTER)


def test_without_fsdp_everything_is_there_in_full() -> None:
    """And sums, which are added over devices before they go into `.grad`."""
    layout = Layout(data=10, fsdp=False)
    alone = states(question(Optimizer.ADAMW), CUT)
    assert alone.accumulators == 0
    assert states(question(Optimizer.ADAMW, layout=layout), CUT) == replace(
        alone, accumulators=4 * (2 * LAYER + OUTER)
    )


def test_seconds_of_an_update() -> None:
    machine = slow_machine()
    adamw = update_seconds(question(Optimizer.ADAMW))
    # Gradient twice, 12 bytes of states there and back, the weight written.
    assert adamw == pytest.approx(ALL * (8 + 24 + 2) / machine.memory)
    assert update_seconds(question(Optimizer.NONE)) == 0.0


def test_slots_do_not_grow_with_the_model() -> None:
    small, large = (question(Optimizer.HOST) for _ in range(2))
    large = replace(large, model=replace(large.model, trainable=2**30))
    held = states(large, CUT)
    assert held.optimizer_on_host == 12 * 2**30 + 2 * 6 * 2**24
    cut = states(replace(large, layout=Layout(data=8)), CUT)  # each rank has slots of its own
    assert cut.optimizer_on_host == 12 * 2**27 + 2 * 6 * 2**24
    assert states(small, CUT).optimizer_on_host == 24 * ALL


def test_copies_and_the_update_on_the_host_run_side_by_side() -> None:
    machine = slow_machine()
    gradient, states_, weight = 4, 12, 2
    device = 3 * gradient / machine.memory
    shared = machine.host_memory
    touched = 2 * states_ + 2 * gradient + 2 * weight
    lanes = [
        gradient / min(machine.evict, shared),
        touched / shared,
        weight / min(machine.fetch, shared),
    ]
    found = update_seconds(question(Optimizer.HOST))
    assert found == pytest.approx(ALL * (device + max(lanes)))
    one = replace(machine, unified=True, processors=0)
    found = update_seconds(question(Optimizer.HOST, machine=one))
    assert found == pytest.approx(ALL * (device + sum(lanes)))
    # A drive moves the states once in and once out; what is slower counts.
    disk = question(Optimizer.DISK, machine=replace(machine, disk=1e3))
    assert update_seconds(disk) == pytest.approx(ALL * (device + 24 / 1e3))
    fast = question(Optimizer.DISK, machine=replace(machine, disk=1e30))
    assert update_seconds(fast) == update_seconds(question(Optimizer.HOST))
    beside = replace(disk, weights=Tier.HOST)
    assert update_seconds(beside) == pytest.approx(ALL * 24 / 1e3)
    assert drive_bytes(disk) == 12 * ALL
    assert drive_bytes(question(Optimizer.HOST)) == 0
    # Without a master the weight goes there, too.
    wide = update_seconds(question(Optimizer.HOST, width=4))
    assert wide >= ALL * 8 / machine.evict


@pytest.mark.parametrize("name", ["ulysses", "shards", "ring", "tensor", "pipeline", "data"])
@pytest.mark.parametrize("bad", [0, True])
def test_a_layout_is_of_whole_devices(name: str, bad: Any) -> None:
    with pytest.raises(UnsupportedError) as refused:
        Layout(**{name: bad})
    assert str(refused.value) == f"{name}: expected a whole number of devices >= 1, got {bad!r}"


@pytest.mark.parametrize("bad", [1])
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
    ("beside", "exposed"),
    [(-1e-12, 0.0), (2e-8, 0.0), (1e-6, 1e-6)],
)
def test_what_rounding_leaves_is_no_waiting(beside: float, exposed: float) -> None:
    """A step of 231 s, of whose times the sum is off by parts in 10 billion at most."""
    seconds = Seconds(231.0 + beside, 228.0, 198.0, 43.0, 0.0, 0.5, 2.5, "compute")
    assert seconds.exposed(overlap=False) == pytest.approx(exposed, rel=1e-6)
    # Where lanes overlap, what is issued is issued meanwhile.
    assert seconds.exposed(overlap=True) == pytest.approx(2.5 + beside, rel=1e-6)
