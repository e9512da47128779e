"""Chunks of a pipeline: exact ranges, of one cost, and less waiting for it."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from farspan.planner.evaluate import evaluate, size, slowest
from farspan.planner.machines import machine
from farspan.planner.prices import Prices
from farspan.planner.request import Question
from farspan.planner.timeline import run_time
from farspan.program.builder import (
    Costs,
    balanced_ranges,
    build_evaluation,
    build_program,
    chunks_of,
    costs_of,
)
from farspan.program.dependencies import waits
from farspan.program.layout import Layout, Range, Rank, are_equal, chunk_ranges
from farspan.program.program import cell_place
from farspan.program.residency import Kind
from farspan.spec import LayerSpec, ModelSpec, RunSpec, Schedule, Sparse, Tier
from tests.grids import examples
from tests.oracles.check import check_program
from tests.oracles.check_order import check_order
from tests.planner.test_bound import with_work
from tests.profiles import spec_of

Ranges = tuple[Range, ...]

windows = st.none() | st.integers(1, 60)
costs = st.builds(
    Costs,
    st.sampled_from([0, 1, 7, 100, 10_000]),
    st.lists(st.tuples(windows, st.integers(1, 9)), min_size=1, max_size=2).map(tuple),
)


def each(costs: Costs, ranges: Ranges) -> list[int]:
    return [costs.before(stop) - costs.before(start) for start, stop in ranges]


@settings(max_examples=examples(300))
@given(costs, st.integers(1, 400), st.integers(1, 120))
def test_ranges_are_of_one_cost(costs: Costs, tokens: int, chunk: int) -> None:
    ranges = balanced_ranges(costs, tokens, chunk)
    borders = [0, *(stop for _, stop in ranges)]
    assert [start for start, _ in ranges] == borders[:-1]
    assert borders[-1] == tokens
    lengths = [stop - start for start, stop in ranges]
    assert lengths[-1] >= 1
    assert lengths[0] <= chunk
    assert lengths == sorted(lengths, reverse=True)
    # Those that the limit of `chunk` makes too cheap come first. Of the others a border is off by
    # less than the last token, the dearest; what one takes too much the n that follow lack, an n-th
    # each, so the last lacks less than 1 + 1/2 + 1/3 + ... of that token's cost.
    found, token = each(costs, ranges), costs.before(tokens) - costs.before(tokens - 1)
    free = [cost for cost, length in zip(found, lengths, strict=True) if length < chunk]
    if free:
        mean = Fraction(sum(free), len(free))
        assert max(free) < mean + token
        assert min(free) > mean - token * sum(Fraction(1, n + 1) for n in range(len(free)))


def test_by_hand() -> None:
    # Attention alone, 1 a pair: 136 in all, and 36 in the first eight, so four cannot do.
    costs = Costs(0, ((None, 1),))
    found = balanced_ranges(costs, 16, 8)
    assert found == ((0, 7), (7, 10), (10, 13), (13, 15), (15, 16))
    assert each(costs, found) == [28, 27, 36, 29, 16]
    # Twice as long it takes 528 / 63: two tokens are the shortest, and the last two cost 63.
    found = balanced_ranges(costs, 32, 8)
    assert found[0] == (0, 8)
    assert len(found) == 9
    assert min(stop - start for start, stop in found) == 2
    # Tokens alone: as equal as they can be, where equal chunks leave a ragged one.
    assert balanced_ranges(Costs(1, ((1, 0),)), 37, 16) == ((0, 13), (13, 25), (25, 37))


# -- programs ------------------------------------------------------------------------------------

LAYERS = tuple(LayerSpec(4, 4, 2, 2, w, activation_bytes=64) for w in (None, None, 9, None))
MODEL = ModelSpec("m", 8, 16, LAYERS, 2)


def test_ranks_of_a_pipeline_cut_alike_and_others_as_before() -> None:
    schedule = Schedule(chunk=16, kv_block=5)
    for model in (MODEL, with_work(MODEL)):
        wanted = balanced_ranges(costs_of(model), 200, 16)
        assert not are_equal(wanted)
        layout = Layout(tensor=2, shards=2, pipeline=2, data=2)
        programs = [
            build(model, RunSpec(1, 200), schedule, Rank(layout, number))
            for number in range(layout.devices())
            for build in (build_program, build_evaluation)
        ]
        assert {program.chunks for program in programs} == {wanted}
        alone = build_program(model, RunSpec(1, 200), schedule, Rank(replace(layout, pipeline=1)))
        assert alone.chunks == chunk_ranges(200, 16)


def test_sparse_attention_sees_what_one_process_does() -> None:
    schedule = Schedule(chunk=16, sparse=Sparse(page=4, budget=8, recent=8, sinks=4))
    assert chunks_of(MODEL, 200, schedule, Layout(pipeline=2)) == chunk_ranges(200, 16)


@settings(max_examples=examples(20))
@given(
    st.builds(
        Schedule,
        chunk=st.sampled_from([7, 16]),
        boundary_inputs=st.sampled_from(Tier),
        kv=st.sampled_from(Tier),
        kv_block=st.sampled_from([3, 1000]),
        attention_save_fraction=st.sampled_from([0.0, 0.5, 1.0]),
        attention_open=st.booleans(),
        activation_save_fraction=st.sampled_from([0.3, 0.5, 1.0]),
        activations=st.sampled_from(Tier),
        layer_checkpoint=st.booleans(),
    ),
    st.integers(20, 50),
)
def test_programs_are_right_and_cells_as_long_as_their_chunks(
    schedule: Schedule, tokens: int
) -> None:
    layout = Layout(pipeline=2)
    for number in range(2):
        program = build_program(MODEL, RunSpec(2, tokens), schedule, Rank(layout, number))
        check_program(program)
        check_order(program, waits(program))
        for buffer in program.buffers.values():
            if buffer.kind is not Kind.ACTIVATIONS or buffer.layer < 0:
                continue
            held = [c for c, (start, _) in enumerate(program.chunks) if start >= buffer.start]
            places = [cell_place(program, buffer, chunk) for chunk in held]
            assert places[0][0] == 0
            assert all(0 <= low[1] <= high[0] < low[1] + 64 for low, high in pairwise(places))
            assert 0 <= buffer.bytes - places[-1][1] < 64
            if are_equal(program.chunks):
                continue
            lengths = [program.chunks[c][1] - program.chunks[c][0] for c in held]
            sizes = [stop - start for start, stop in places]
            # 64 bytes of what a layer saves, batch 2, a token more.
            for size_, length in zip(sizes, lengths, strict=True):
                assert sizes[0] - size_ == buffer.cell_row * (lengths[0] - length)
            assert buffer.cell_row >= 2 * 64


# -- time ----------------------------------------------------------------------------------------


def test_a_plan_waits_as_the_stages_do() -> None:
    """What its price adds for three stages that wait: three times the dearest of its chunks."""
    model = spec_of("Qwen2.5-7B")
    question = Question(model, RunSpec(1, 2**18), machine("h200"), Layout(pipeline=4))
    schedule = Schedule(chunk=2**14, groups=28)
    sized = size(question, schedule)
    plan = evaluate(question, "grouped", schedule, sized)
    program, _ = slowest(question, sized)
    chunks = program.chunks
    assert chunks == balanced_ranges(costs_of(model), 2**18, 2**14)
    # Of one stage, which waits for nobody.
    prices = Prices(question, program, together=question.overlap)
    alone = run_time(prices, overlap=question.overlap).total
    waits = (plan.seconds.total - alone) / alone
    assert 3 / len(chunks) < waits < 3 * 1.3 / len(chunks)
