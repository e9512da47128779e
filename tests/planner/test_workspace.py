"""What attention's kernels take for themselves: in plans of machines that say it, to the byte."""

from dataclasses import replace

import pytest

from farspan.planner import feasibility as quick
from farspan.planner.evaluate import evaluate
from farspan.planner.feasibility import plan_of
from farspan.planner.machines import machine, with_kernels
from farspan.planner.plans import named_schedule
from farspan.planner.request import Plan, Question
from farspan.planner.walk import workspace_bytes
from farspan.program.layout import Layout
from farspan.spec import AttentionKernel, Kernels, LayerSpec, MachineSpec
from tests.planner.test_plans import question

TOKENS = 64 * 1024
RATE = 4.0  # bytes of a query or key, head and element


def measured(spec: MachineSpec, rate: float) -> MachineSpec:
    rates = {name: replace(r, attention_workspace=rate) for name, r in spec.rates.items()}
    return replace(spec, rates=rates)


def pair(name: str, layout: Layout) -> tuple[Plan, Plan, Question]:
    """The same schedule where nothing was measured and where RATE was."""
    asked = question(TOKENS, layout=layout)
    known = replace(asked, machine=measured(asked.machine, RATE))
    schedule = named_schedule(asked, name)
    return evaluate(asked, name, schedule), evaluate(known, name, schedule), known


@pytest.mark.parametrize("name", ["grouped", "memo", "fpdt"])
@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        (Layout(), (1, 1)),
        (Layout(ulysses=2), (2, 2)),  # half of the heads see all tokens
        (Layout(shards=2), (1, 2)),  # all queries see half of the keys
    ],
    ids=str,
)
def test_a_plan_grows_by_what_was_measured(
    name: str, layout: Layout, parts: tuple[int, int]
) -> None:
    before, after, _ = pair(name, layout)
    schedule = before.schedule
    queries = min(TOKENS, schedule.chunk) // parts[0]
    # A block is of the keys that a rank holds: of all of them for half of the heads, or of half.
    own = min(TOKENS // parts[1], schedule.kv_block // layout.ulysses)
    keys = own if layout.devices() > 1 else min(TOKENS, schedule.kv_block)
    grown = RATE * (queries + keys) * 14 * 64  # heads of Qwen2.5-0.5B
    assert after.device.parts["cells"] - before.device.parts.get("cells", 0) == grown
    assert after.device.total - before.device.total == grown
    assert (after.host, after.seconds) == (before.host, before.seconds)


@pytest.mark.parametrize("name", ["grouped", "memo"])
def test_the_searches_bounds_grow_alike(name: str) -> None:
    before, after, known = pair(name, Layout())
    grown = after.device.total - before.device.total
    left = quick.left(before.question, before.schedule)[0]
    assert left - quick.left(known, after.schedule)[0] == grown
    counted = [plan_of(plan.question, name, plan.schedule).device for plan in (before, after)]
    assert counted[1].total - counted[0].total == grown


HEADS, WIDTH, SUMS = 14, 64, 10  # of Qwen2.5-0.5B; ceil(128 / 14) sums on an RTX 4090


def test_same_bits_take_more_sums_of_dq() -> None:
    """As flash attention 2 has them, ceil(processors / heads) of all queries in fp32; the plan has
    them where nothing was measured too, and one fewer where one sum was."""
    asked = question(TOKENS)
    same = replace(asked, kernels=Kernels(deterministic=True))
    schedule = named_schedule(asked, "grouped")
    of_one = schedule.chunk * HEADS * WIDTH * 4
    grown = workspace_bytes(same, schedule) - workspace_bytes(asked, schedule)
    assert grown == SUMS * of_one
    known, same_known = (replace(q, machine=measured(q.machine, RATE)) for q in (asked, same))
    grown = workspace_bytes(same_known, schedule) - workspace_bytes(known, schedule)
    assert grown == (SUMS - 1) * of_one
    # Of ranks with half of the heads each, twice as many of half the size.
    halves = replace(same, layout=Layout(ulysses=2))
    assert workspace_bytes(halves, replace(schedule, chunk=TOKENS)) == 19 * (TOKENS // 2) * (
        HEADS * WIDTH * 4
    )
    # Who has no such sums.
    for other in (
        replace(same, dtype="float32"),
        replace(same, machine=replace(same.machine, unified=True, processors=0)),
        replace(same, kernels=Kernels(AttentionKernel.FA4, deterministic=True)),
    ):
        assert workspace_bytes(other, schedule) == 0
    unknown = replace(same, machine=replace(same.machine, processors=0))
    assert workspace_bytes(unknown, schedule) > workspace_bytes(same, schedule)


def test_same_bits_take_longer() -> None:
    spec = machine("h200")
    slower = with_kernels(spec, deterministic=True)
    layer = LayerSpec(28, 4, 128, 128)
    for causal, backward in ((False, False), (True, False), (False, True), (True, True)):
        times = (
            m.rates["bfloat16"].attention(2.0**28, layer, causal=causal, backward=backward)
            for m in (spec, slower)
        )
        first, second = times
        assert second == pytest.approx(spec.rates["bfloat16"].deterministic * first)
    assert slower.rates["float32"] == spec.rates["float32"]
    assert with_kernels(spec, deterministic=False) == spec
    asked = question(TOKENS, machine=spec)
    same = replace(asked, machine=slower, kernels=Kernels(deterministic=True))
    schedule = named_schedule(asked, "grouped")
    plans = [evaluate(q, "grouped", schedule) for q in (asked, same)]
    assert plans[0].seconds.total < plans[1].seconds.total
