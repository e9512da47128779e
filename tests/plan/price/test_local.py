"""The share of one device: shapes, and what the shares of all devices add up to."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.plan.cell.describe import model_spec
from farspan.plan.grid import chunk_ranges
from farspan.plan.layout import Layout, Rank
from farspan.plan.model.catalog import find_architecture
from farspan.plan.price.local import (
    local_chunks,
    local_model,
    local_run,
    local_schedule,
    refuse_layout,
)
from farspan.plan.price.machines import machine
from farspan.plan.price.states import states
from farspan.plan.question import Optimizer, Question
from farspan.plan.share import share_of
from farspan.spec import ModelSpec, Refused, RunSpec, Schedule

MODEL = model_spec(find_architecture("Llama-3-8B"))


def ask(layout: Layout, model: ModelSpec = MODEL, tokens: int = 2**20) -> Question:
    return Question(model, RunSpec(1, tokens), machine("h100"), layout, Optimizer.ADAMW)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(ulysses=8, shards=4),
        Layout(ring=32),
        Layout(tensor=8, ring=4),
        Layout(ulysses=4, shards=2, pipeline=4),
        Layout(ulysses=8, data=4),
    ],
)
def test_tokens_of_all_devices_are_those_of_the_sequences(layout: Layout) -> None:
    question = ask(layout)
    chunks = local_chunks(question, Schedule(chunk=2**16))
    sequences = layout.data * layout.pipeline  # a stage sees every token
    beyond = chunks[-1][1] * layout.devices() - question.run.tokens * sequences
    # Chunks of a pipeline are cut by their cost, and of each a part is rounded up.
    assert 0 <= beyond < layout.devices() * len(chunks) * (layout.pipeline > 1) + 1
    schedule = local_schedule(Schedule(chunk=2**16, kv_block=2**14), layout)
    assert schedule.chunk * layout.sequence() == 2**16
    assert schedule.kv_block * layout.sequence() == 2**14


def test_shares_are_rounded_up() -> None:
    layout = Layout(ulysses=8, shards=2)
    whole = Schedule(chunk=100, kv_block=3)
    # Ten chunks of 7 on the fullest device, and a token of one.
    assert local_run(ask(layout, tokens=1001), whole).tokens == 71
    schedule = local_schedule(whole, layout)
    assert (schedule.chunk, schedule.kv_block) == (7, 1)


@pytest.mark.parametrize("stages", [1, 2, 5, 8, 32])
def test_last_stage_has_its_layers_and_what_lies_outside(stages: int) -> None:
    part = local_model(ask(Layout(pipeline=stages)))
    layer = MODEL.layers[0].work.parameters
    count = -(-len(MODEL.layers) // stages)
    assert len(part.layers) == count
    assert part.parameters == MODEL.outer() + count * layer
    assert part.outer() == MODEL.outer()
    assert part.outer_trainable() == MODEL.outer_trainable()


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(Refused, match="33 stages for 32 layers"):
        local_model(ask(Layout(pipeline=33)))


@pytest.mark.parametrize(
    ("layout", "is_possible"),
    [
        (Layout(ulysses=8), True),
        (Layout(ulysses=4, tensor=2), True),
        (Layout(ulysses=8, tensor=2), False),
        (Layout(ulysses=3), False),
        (Layout(ring=64), True),
        (Layout(ulysses=8, shards=128), True),
    ],
)
def test_heads_are_whole(layout: Layout, is_possible: bool) -> None:
    if is_possible:
        refuse_layout(ask(layout))
        return
    with pytest.raises(Refused, match="8 K, V heads cannot be shared"):
        refuse_layout(ask(layout))


def test_states_of_all_devices_are_those_of_the_model() -> None:
    """18 bytes a parameter: bf16 weight, fp32 gradient, master and two moments. Devices that cut
    layers by heads and features have all of what lies outside."""
    each, groups = 2 + 4 + 12, ((0, 16), (16, 32))
    whole = MODEL.parameters * each
    for layout in (Layout(ulysses=8), Layout(ulysses=8, data=16), Layout(tensor=8, ring=4)):
        held = states(ask(layout), groups)
        own = held.weights + held.gradients + held.optimizer
        again = MODEL.outer() * each * (layout.tensor - 1)
        assert 0 <= own * layout.devices() - whole - again <= each * layout.devices()
    alone = states(ask(Layout(ulysses=8, fsdp=False)), groups)
    assert alone.weights + alone.gradients + alone.optimizer == whole
    assert alone.gathered == 0


def test_open_group_is_gathered_whole_and_cut_by_tensor() -> None:
    layer, outer = MODEL.layers[0].work.parameters, MODEL.outer()
    question = ask(Layout(tensor=8, ring=4))
    held = states(question, ((0, 30), (30, 32)))
    own = -(-30 * layer // 8) + outer
    assert (held.gathered, held.accumulators) == (2 * own, 4 * own)
    frozen = replace(
        MODEL, layers=MODEL.layers[:2], parameters=outer + 2 * layer, trainable=outer + 2 * layer
    )
    assert states(ask(Layout(ulysses=8), frozen), ((0, 2),)).gathered == 2 * (outer + 2 * layer)


@given(
    st.integers(1, 400),
    st.integers(1, 90),
    st.sampled_from([Layout(ulysses=2), Layout(ulysses=2, shards=3), Layout(ring=5)]),
)
def test_a_device_has_as_many_chunks_as_ranks_run(tokens: int, chunk: int, layout: Layout) -> None:
    """And of each as many tokens as the rank that has most of it."""
    own = local_chunks(ask(layout, tokens=tokens), Schedule(chunk=chunk))
    whole = chunk_ranges(tokens, chunk)
    ranks = [share_of(whole, Rank(layout, n)).tokens.rows for n in range(layout.devices())]
    most = [max(stop - start for start, stop in rows) for rows in zip(*ranks, strict=True)]
    assert [stop - start for start, stop in own] == most
