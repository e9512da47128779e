"""Pieces of the head and blocks of keys: chosen where they save, and not otherwise."""

from dataclasses import replace

import pytest

from farspan.ask import Request
from farspan.planner.evaluate import evaluate
from farspan.planner.feasibility import plan_of
from farspan.planner.plans import best_plan
from farspan.planner.request import Fit, Margin, Plan, Question
from farspan.planner.search import WORTH, with_pieces
from farspan.report.tables import schedule_words
from farspan.spec import Curve, Schedule, Tier
from farspan.train.yaml_config import as_yaml

SECONDS = 1.0
WHOLE = Schedule(chunk=8192, groups=24, kv=Tier.DEVICE, layer_checkpoint=True)


def asked(context: str = "64K", **changes: object) -> Question:
    question = Request("Qwen2.5-0.5B", context, "h100").question()
    return replace(question, **changes)  # type: ignore[arg-type]


def with_blocks_that_pay(question: Question) -> Question:
    """On a machine whose calls are the faster the larger they are."""
    return with_curve(question, Curve(((1e9, 1e13), (1e14, 1e15))))


def with_curve(question: Question, curve: Curve) -> Question:
    """On a machine whose attention has these rates."""
    rates = question.machine.rates["bfloat16"]
    fast = replace(rates, attention_forward=curve, attention_backward=curve)
    return replace(question, machine=replace(question.machine, rates={"bfloat16": fast}))


def test_the_head_gets_pieces_that_save_and_fit() -> None:
    """Every size that was not taken would save too little over the one that was."""
    plan = evaluate(asked(), "grouped", WHOLE)
    (found,) = with_pieces([plan], SECONDS)
    assert found.schedule.loss_chunk_size > 1024
    assert found == plan_of(asked(), "grouped", found.schedule)
    assert found.seconds.total < plan.seconds.total * (1 - WORTH)
    larger = replace(found.schedule, loss_chunk_size=2 * found.schedule.loss_chunk_size)
    saved = found.seconds.total - evaluate(asked(), "grouped", larger).seconds.total
    assert saved < WORTH * plan.seconds.total


def test_a_tight_plan_takes_no_more_of_the_device() -> None:
    plan = evaluate(asked(), "grouped", WHOLE)
    (free,) = with_pieces([plan], SECONDS)
    tight = evaluate(replace(asked(), margin=Margin(plan.device.left + 1)), "grouped", WHOLE)
    assert tight.fit is Fit.TIGHT
    (found,) = with_pieces([tight], SECONDS)
    assert found.device.total <= tight.device.total < free.device.total


@pytest.mark.parametrize(("kv", "larger"), [(Tier.DEVICE, True), (Tier.HOST, False)])
def test_blocks_grow_where_keys_lie_on_the_device(kv: Tier, larger: bool) -> None:
    question = with_blocks_that_pay(asked("128K"))
    (found,) = with_pieces([evaluate(question, "grouped", replace(WHOLE, kv=kv))], SECONDS)
    assert (found.schedule.kv_block > 16384) is larger


def test_larger_blocks_that_are_slower_are_not_taken() -> None:
    """Where attention slows beyond 32K by 16K with heads of 64."""
    falling = Curve(((1.38e11, 7.02e14), (5.47e11, 6e14)))
    question = with_curve(asked("128K"), falling)
    plan = evaluate(question, "grouped", replace(WHOLE, chunk=2**15))
    (found,) = with_pieces([plan], SECONDS)
    assert found.schedule.kv_block == 16384


def test_no_block_has_more_elements_than_kernels_count() -> None:
    """14 heads of 64: 36 sequences of 64K keys are 2.1e9 elements."""
    question = with_blocks_that_pay(asked("256K", optimizer="none"))
    large = replace(question.machine, device_bytes=10**15, host_bytes=10**15)
    for batch, most in ((36, 2**16), (37, 2**15)):
        run = replace(question.run, batch=batch)
        plan = evaluate(replace(question, machine=large, run=run), "grouped", WHOLE)
        (found,) = with_pieces([plan], SECONDS)
        assert found.schedule.kv_block == most


@pytest.fixture(scope="module")
def best() -> Plan:
    return best_plan(asked("32K"), None, SECONDS)


def test_the_planner_chooses_them_and_says_so(best: Plan) -> None:
    tokens = best.schedule.loss_chunk_size
    assert best.strategy == "grouped"
    assert tokens > 1024
    assert best.to_json()["schedule"]["loss_chunk_size"] == tokens
    assert f"loss_chunk_size: {tokens // 1024}K" in as_yaml(best.schedule, 24, 32 * 1024)
    words = schedule_words(best.schedule, len(best.question.model.layers), 1)
    assert f"logits of {tokens:,} tokens at a time" in " ".join(words)
