"""What devices send each other, against formulas written by hand from the layouts."""

from dataclasses import replace

import pytest

from farspan.planner.collectives import Collectives, exchange_bytes
from farspan.planner.evaluate import evaluate, size, slowest
from farspan.planner.prices import Prices
from farspan.planner.request import Optimizer, Question
from farspan.planner.timeline import run_time
from farspan.program.layout import Layout
from farspan.program.program import AttentionMode
from farspan.spec import LayerSpec, LayerWork, ModelSpec, RunSpec, Schedule, Tier
from tests.planner.machines import slow_machine

PEER, NETWORK = 4e6, 1e6
BF16, FP32 = 2, 4
EXACT = 1e-12  # the same few products in another order

# dq = 8 x 4 = 32, dkv = 4 x 4 = 16 a token for each of K, V.
LAYER = LayerSpec(8, 4, 4, 4, work=LayerWork(3000, 3000, ((32, 32),), 1))
MODEL = ModelSpec("m", 32, 50, (LAYER,) * 4, BF16, 14000, 14000)
DQ, DKV = 32, 16


def ask(layout: Layout, *, devices: int = 8, tokens: int = 4096, batch: int = 1) -> Question:
    """No latency: seconds are bytes over a rate."""
    machine = slow_machine(devices=devices, latency=0.0, device_bytes=2**40, host_bytes=2**40)
    run = RunSpec(batch, tokens)
    return Question(MODEL, run, machine, layout, Optimizer.NONE, overlap=True)


def near(bytes_: float) -> object:
    return pytest.approx(bytes_ / PEER, rel=EXACT)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("batch", [1, 3])
def test_ulysses_moves_the_bytes_of_facts(ranks: int, batch: int) -> None:
    """(C / P)(2 dq + 2 dkv) 2 B (P - 1) / P a forward cell and rank, whatever the prefix."""
    own = 64
    collectives = Collectives(ask(Layout(ulysses=ranks, fsdp=False), batch=batch))
    size = batch * own * (2 * DQ + 2 * DKV) * 2 * (ranks - 1) / ranks
    assert collectives.forward(LAYER, own, AttentionMode.COMPUTE) == near(size)
    assert collectives.backward(LAYER, own) == near(size)
    # O comes back and q goes in; of K, V alone only they go in.
    given = batch * own * 2 * DQ * 2 * (ranks - 1) / ranks
    assert collectives.forward(LAYER, own, AttentionMode.GIVEN) == near(given)
    project = batch * own * 2 * DKV * 2 * (ranks - 1) / ranks
    assert collectives.forward(LAYER, own, AttentionMode.NONE) == near(project)


def test_only_the_ring_grows_with_the_prefix() -> None:
    layout = Layout(ring=4, fsdp=False)
    ring = Collectives(ask(layout))
    for stop in (1024, 2048, 4096):
        own = stop // 4
        # Three of four parts of the prefix pass by; dK, dV in fp32 travel with them.
        forward = 3 * own * 2 * DKV * BF16
        assert ring.ring(LAYER, stop, backward=False) == near(forward)
        assert ring.ring(LAYER, stop, backward=True) == near(3 * own * 2 * DKV * (BF16 + FP32))
    for other in (Layout(ulysses=4), Layout(shards=4), Layout(tensor=4)):
        assert Collectives(ask(other)).ring(LAYER, 4096, backward=True) == 0.0
    assert ring.forward(LAYER, 64, AttentionMode.COMPUTE) == 0.0


def test_shards_gather_queries_and_scatter_partial_sums() -> None:
    own, shards = 64, 4
    collectives = Collectives(ask(Layout(shards=shards, fsdp=False)))
    others = own * (shards - 1)
    forward = others * (DQ * BF16 + DQ * FP32)
    backward = others * (3 * DQ * BF16 + DQ * FP32)
    assert collectives.forward(LAYER, own, AttentionMode.COMPUTE) == near(forward)
    assert collectives.backward(LAYER, own) == near(backward)
    assert collectives.forward(LAYER, own, AttentionMode.GIVEN) == 0.0


def test_tensor_gathers_and_scatters_the_chunk_twice_each() -> None:
    own, ranks = 64, 4
    collectives = Collectives(ask(Layout(tensor=ranks, fsdp=False)))
    once = (ranks - 1) * own * MODEL.hidden * BF16
    for mode, passes in (
        (AttentionMode.COMPUTE, 4),
        (AttentionMode.GIVEN, 4),
        (AttentionMode.NONE, 1),
    ):
        assert collectives.forward(LAYER, own, mode) == near(passes * once)
    assert collectives.backward(LAYER, own) == near(4 * once)


def test_across_nodes_the_slower_of_two_paths_counts() -> None:
    """8 ranks on nodes of 4: 3 / 8 of the bytes stay inside, 4 / 8 cross."""
    collectives = Collectives(ask(Layout(ulysses=8, fsdp=False), devices=4))
    size = 64 * (2 * DQ + 2 * DKV) * BF16
    seconds = collectives.forward(LAYER, 64, AttentionMode.COMPUTE)
    assert seconds == pytest.approx(size * 4 / 8 / NETWORK, rel=EXACT)


def test_each_collective_has_its_latency() -> None:
    question = ask(Layout(ulysses=2, shards=2, fsdp=False))
    slow = replace(question, machine=replace(question.machine, latency=100.0))
    for mode, count in ((AttentionMode.COMPUTE, 4), (AttentionMode.GIVEN, 2)):
        seconds = [Collectives(q).forward(LAYER, 64, mode) for q in (question, slow)]
        assert seconds[1] - seconds[0] == pytest.approx(100.0 * count, rel=1e-9)


def test_weights_are_brought_into_a_node_once() -> None:
    one = Collectives(ask(Layout(ulysses=4), devices=4))
    assert one.gather(1000) == near(1000 * BF16 * 3 / 4)
    assert one.reduce(1000, FP32) == near(1000 * FP32 * 3 / 4)
    two = Collectives(ask(Layout(ulysses=4, data=2), devices=4))
    # Half of the bytes are elsewhere, and each of four devices brings in a quarter of that half.
    # Then three quarters of all of it come from the three others of the node.
    away, inside = 1000 * BF16 / 2 / 4 / NETWORK, 1000 * BF16 * 3 / 4 / PEER
    assert two.gather(1000) == pytest.approx(max(away, inside), rel=EXACT)
    assert Collectives(ask(Layout(ulysses=4, fsdp=False))).gather(1000) == 0.0


def test_stages_send_x_over_the_network_unless_two_lie_in_a_node() -> None:
    size = 64 * MODEL.hidden * BF16
    assert Collectives(ask(Layout(ulysses=4, pipeline=2))).boundary(64) == near(size)
    apart = Collectives(ask(Layout(ulysses=4, shards=2, pipeline=2)))
    assert apart.boundary(64) == pytest.approx(size / NETWORK, rel=EXACT)
    assert Collectives(ask(Layout(ulysses=4))).boundary(64) == 0.0


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(ulysses=4, fsdp=False), 2 * 64 * (2 * DQ + 2 * DKV) * BF16),
        (Layout(shards=4, fsdp=False), 4 * 64 * (3 * DQ * BF16 + DQ * FP32)),
        # The two K, V and dK, dV blocks are of a quarter of all 4096 tokens.
        (Layout(ring=4, fsdp=False), 2 * 1024 * 2 * DKV * (BF16 + FP32)),
        (Layout(tensor=4, fsdp=False), 2 * 4 * 64 * 32 * BF16),
        (Layout(ulysses=1, data=4), 3000 * BF16),
        (Layout(tensor=2, data=2), 2 * 2 * 64 * 32 * BF16 + 3000 * BF16 // 2),
    ],
)
def test_messages_by_hand(layout: Layout, expected: int) -> None:
    assert exchange_bytes(ask(layout), 64) == expected


def test_messages_are_part_of_a_plan_and_of_the_sequence_they_belong_to() -> None:
    layout = Layout(ulysses=4, shards=2)
    question = ask(layout)
    plan = evaluate(question, "grouped", Schedule(chunk=1024))
    assert plan.device.parts["exchange"] == exchange_bytes(question, 1024 // 8)
    # A chunk longer than the sequence is the sequence.
    assert exchange_bytes(question, 10**9) == exchange_bytes(question, 4096 // 8)


def test_stages_wait_for_each_other() -> None:
    """One group a stage, no collectives but the boundary's: sum + (stages - 1) longest."""
    question = ask(Layout(pipeline=2, fsdp=False))
    schedule = Schedule(chunk=512, groups=4, kv=Tier.DEVICE, boundary_inputs=Tier.DEVICE)
    staged = evaluate(question, "grouped", schedule)
    program, _ = slowest(question, size(question, schedule))
    chunks = program.chunks
    one = run_time(Prices(question, program), overlap=True)
    sent = 2 * 8 * 512 * MODEL.hidden * BF16 / PEER
    assert staged.seconds.collective == pytest.approx(sent, rel=EXACT)
    waited = staged.seconds.total - sent - one.total
    # The dearest of the chunks, which are balanced, takes little more than the average: products
    # are not as fast as attention here.
    assert len(chunks) > 8
    assert one.total < waited * len(chunks) < 1.1 * one.total
    faster = replace(question, machine=replace(question.machine, peer=2 * PEER))
    saved = staged.seconds.total - evaluate(faster, "grouped", schedule).seconds.total
    assert saved == pytest.approx(sent / 2, rel=1e-6)
    # Stages are groups, whatever a schedule for one device says.
    assert evaluate(question, "grouped", replace(schedule, groups=1)) == staged
    # A stage keeps the x that it was sent.
    assert staged.device.parts["x"] == 4096 * MODEL.hidden * BF16
