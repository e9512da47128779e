"""Programs of several ranks: what each has of every chunk, and that they fit together."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farspan.program.builder import build_evaluation, build_program
from farspan.program.dependencies import waits
from farspan.program.layout import (
    Layout,
    Rank,
    chunk_ranges,
    group_ranges,
    share_of,
)
from farspan.program.program import Instruction, Receive, Send
from farspan.spec import LayerSpec, ModelSpec, RunSpec, Schedule, Tier, UnsupportedError
from tests.grids import examples
from tests.oracles.check import check_program
from tests.oracles.check_order import check_order

MODEL = ModelSpec("m", 8, 16, (LayerSpec(4, 4, 2, 2, activation_bytes=64),) * 4, 2)

layouts = st.builds(
    Layout,
    ulysses=st.sampled_from([1, 2, 4]),
    shards=st.integers(1, 3),
    ring=st.integers(1, 2),
    data=st.integers(1, 2),
    pipeline=st.sampled_from([1, 2, 4]),
)
schedules = st.builds(
    Schedule,
    chunk=st.sampled_from([1, 5, 16, 200]),
    groups=st.integers(1, 4),
    boundary_inputs=st.sampled_from(Tier),
    kv=st.sampled_from(Tier),
    kv_kept=st.booleans(),
    kv_block=st.sampled_from([3, 1000]),
    attention_save_fraction=st.sampled_from([0.0, 0.5, 1.0]),
    attention_open=st.booleans(),
    activation_save_fraction=st.sampled_from([0.0, 0.5]),
    layer_checkpoint=st.booleans(),
)


def ranks_of(layout: Layout) -> list[Rank]:
    return [Rank(layout, number) for number in range(layout.devices())]


@given(layouts, st.integers(1, 40), st.integers(1, 17))
def test_tokens_are_dealt_once_and_in_order(layout: Layout, tokens: int, chunk: int) -> None:
    chunks = chunk_ranges(tokens, chunk)
    sequence = [share_of(chunks, Rank(layout, n)) for n in range(layout.sequence())]
    for place, whole in enumerate(chunks):
        ranges = [share.tokens.ranges[place] for share in sequence]
        borders = [whole[0], *(stop for _, stop in ranges)]
        assert [start for start, _ in ranges] == borders[:-1]
        assert borders[-1] == whole[1]
        sizes = [stop - start for start, stop in ranges]
        assert max(sizes) - min(sizes) <= 1
    for share in sequence:
        for spans in (share.tokens, share.keys):
            lengths = [stop - start for start, stop in spans.ranges]
            assert [stop - start for start, stop in spans.rows] == lengths
            assert spans.total == sum(lengths)


@given(layouts, st.integers(1, 40), st.integers(1, 17))
def test_heads_and_keys_cover_a_chunk_once(layout: Layout, tokens: int, chunk: int) -> None:
    """Every (head part, position) of K, V is held by one rank of a sequence."""
    chunks = chunk_ranges(tokens, chunk)
    held: dict[tuple[int, int], int] = {}
    for rank in ranks_of(replace(layout, data=1, pipeline=1)):
        for start, stop in share_of(chunks, rank).keys.ranges:
            for position in range(start, stop):
                key = rank.along["ulysses"], position
                held[key] = held.get(key, 0) + 1
    assert len(held) == layout.ulysses * tokens
    assert set(held.values()) == {1}


few = st.builds(
    Layout,
    ulysses=st.integers(1, 2),
    shards=st.integers(1, 2),
    pipeline=st.integers(1, 3),
)


@settings(max_examples=examples(15))
@given(few, schedules, st.integers(1, 40), st.booleans())
def test_programs_of_all_ranks_are_right(
    layout: Layout, schedule: Schedule, tokens: int, training: bool
) -> None:
    build = build_program if training else build_evaluation
    first: dict[int, tuple[Instruction, ...]] = {}
    for rank in ranks_of(layout):
        program = build(MODEL, RunSpec(1, tokens), schedule, rank)
        check_program(program)
        check_order(program, waits(program))
        stage = rank.along["pipeline"]
        same = first.setdefault(stage, program.instructions)
        assert program.instructions == same, "ranks of a sequence run the same instructions"
    assert passages(list(first.values())) == layout.pipeline - 1


def passages(stages: list[tuple[Instruction, ...]]) -> int:
    """How many pairs of neighbours send each other what the other expects, in its order."""
    pairs = 0
    for low, high in pairwise(stages):
        for sender, receiver, gradient in ((low, high, False), (high, low, True)):
            sent = [(i.layer, i.chunk, i.gradient) for i in sender if isinstance(i, Send)]
            got = [(i.layer, i.chunk, i.gradient) for i in receiver if isinstance(i, Receive)]
            sent, got = ([p for p in found if p[2] is gradient] for found in (sent, got))
            assert sent == got
        pairs += 1
    return pairs


def test_stages_are_groups() -> None:
    assert group_ranges(Schedule(groups=1), 7, 3) == ((0, 2), (2, 4), (4, 7))
    assert group_ranges(Schedule(groups=(1, 5, 1)), 7, 3) == ((0, 1), (1, 6), (6, 7))
    with pytest.raises(UnsupportedError, match="groups: a pipeline of 3 stages has one group each"):
        group_ranges(Schedule(groups=(3, 4)), 7, 3)
    with pytest.raises(UnsupportedError, match="pipeline: 8 stages for 7 layers"):
        group_ranges(Schedule(), 7, 8)
