"""The simulation counts what the closed forms say, to the byte and to the pair."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from farspan.program.attention_blocks import seen_pairs
from farspan.program.builder import build_evaluation, build_program
from farspan.program.residency import Kind
from farspan.spec import (
    LayerSpec,
    LayerWork,
    ModelSpec,
    RunSpec,
    Schedule,
    Sparse,
    StateTensor,
    Tier,
)
from tests.oracles import formulas
from tests.oracles.simulate import feed_forward_passes, simulate
from tests.program import cases

DEVICE, HOST = Tier.DEVICE, Tier.HOST
X, KV, DKV = 64 * 4, 2 * 4 * 16 * 4, 2 * 4 * 16 * 4  # bytes a token of `cases.model_of`


@given(cases.steps())
@example(
    (
        cases.model_of(4),
        RunSpec(1, 512),
        Schedule(chunk=64, groups=1, sparse=Sparse(page=8, budget=16, recent=16, sinks=8)),
    )
)
def test_simulation_equals_the_formulas(step: tuple[ModelSpec, RunSpec, Schedule]) -> None:
    program = build_program(*step)
    found = simulate(program)
    live = formulas.live_bytes(*step)
    live[DEVICE] += cases.slot_bytes(program)
    assert found.peak == live
    assert found.attention_passes == formulas.attention_passes(*step)
    assert found.linear_passes == formulas.linear_passes(*step)


@given(cases.steps(), st.integers(1, 40), st.booleans())
def test_feed_forwards_run_as_the_formulas_say(
    step: tuple[ModelSpec, RunSpec, Schedule], tile: int, skippable: bool
) -> None:
    model, run, schedule = step
    layers = tuple(replace(layer, work=LayerWork(skippable=skippable)) for layer in model.layers)
    tiled = replace(model, layers=layers), run, replace(schedule, mlp_chunk_size=tile)
    assert feed_forward_passes(build_program(*tiled)) == formulas.feed_forward_passes(*tiled)
    plain = formulas.linear_passes(*step)
    assert feed_forward_passes(build_program(*step)) == plain


def test_an_evaluation_holds_the_pages_of_one_group() -> None:
    schedule = Schedule(chunk=64, groups=1, sparse=Sparse(page=8, budget=16, recent=16, sinks=8))
    program = build_evaluation(cases.model_of(4), RunSpec(1, 512), schedule)
    for kind in (Kind.MEANS, Kind.CHOICE):
        held = [buffer for buffer in program.buffers.values() if buffer.kind is kind]
        assert len(held) == 4
        assert all(one.dies <= other.born for one, other in pairwise(held))


@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_pairs_are_those_of_the_mask(window: int | None) -> None:
    for stop in (0, 1, 4, 5, 6, 39, 40, 41):
        seen = (min(query + 1, window or stop) for query in range(stop))
        assert seen_pairs(stop, window) == sum(seen)


def test_boundaries_cross_the_link_in_proportion_to_the_groups() -> None:
    """N(4G - 5) rows of x in and 2N(G - 1) out (facts of the grid), but for the last chunk, which
    the last group's first pass and the rebuilds in the middle leave out: (G - 1) chunks of it."""
    tokens, last = 46, 6
    program = build_program(cases.model_of(6), RunSpec(1, tokens), Schedule(chunk=10, groups=2))
    found = simulate(program)
    groups = len(program.groups)
    assert groups == 3
    assert found.fetched[Kind.X] == X * (tokens * (4 * groups - 5) - last * (groups - 1))
    assert found.evicted[Kind.X] == X * 2 * tokens * (groups - 1)
    assert found.fetched_bytes() == found.fetched[Kind.X]
    assert found.evicted_bytes() == found.evicted[Kind.X]


@pytest.mark.parametrize(("window", "most"), [(None, 10**9), (8, 7)])
def test_streamed_prefixes_grow_with_the_square(window: int | None, most: int) -> None:
    """All layers in one group, K, V on host: a prefix crosses once in the forward of all but the
    last chunk and the top layer, and in the backward forward and again with dK, dV both ways."""
    layers, tokens = 3, 46
    model = cases.model_of(layers, window=window)
    found = simulate(build_program(model, RunSpec(1, tokens), Schedule(10, layers, kv=HOST)))
    reached = [min(start, most) for start in (0, 10, 20, 30, 40)]
    prefix = sum(reached)
    first = prefix - reached[-1]
    assert found.fetched[Kind.KV] == KV * ((layers - 1) * first + 2 * layers * prefix)
    # A chunk's own K, V go to host once, as do the zeros of its dK, dV, which come back once, full.
    assert found.evicted[Kind.KV] == KV * layers * tokens
    assert found.fetched[Kind.DKV] == DKV * layers * (prefix + tokens)
    assert found.evicted[Kind.DKV] == DKV * layers * (prefix + tokens)


def test_streamed_states_are_those_of_the_chunk_before() -> None:
    """All layers in one group, states on host: every forward reads the one before, also where
    nothing else of the top layer is wanted; and a backward again, with its gradient both ways."""
    layers, chunk, chunks, tokens = 3, 10, 5, 46
    state = StateTensor("recurrent.0", (4 * chunk,), 4)
    layer = LayerSpec(0, 0, 0, 0, window=1, state=(state,))
    model = ModelSpec("recurrent", 64, 50, (layer,) * layers, 4)
    found = simulate(build_program(model, RunSpec(1, tokens), Schedule(chunk, layers, kv=HOST)))
    row, before = 4 * 4, chunk * layers  # bytes, and rows that each chunk but the first reads
    first = (chunks - 2) * before  # without the last chunk, which the backward begins with
    again = (chunks - 1) * before
    assert found.fetched[Kind.KV] == row * (first + 2 * again)
    assert found.evicted[Kind.KV] == row * layers * tokens
    assert found.fetched[Kind.DKV] == row * (again + layers * tokens)
    assert found.evicted[Kind.DKV] == row * (again + layers * tokens)


def test_kept_tensors_cross_once_each_way() -> None:
    schedule = Schedule(
        chunk=10, groups=2, kv_kept=True, attention_save_fraction=1.0, activation_save_fraction=1.0
    )
    program = build_program(cases.model_of(4), RunSpec(1, 40), schedule)
    found = simulate(program)
    # K, V of the group that is not the last; O of all layers but the very top; every cell.
    assert found.fetched[Kind.KV] == found.evicted[Kind.KV] == 2 * 40 * KV
    row = 16 * 16 * 4 + 16 * 4
    assert found.fetched[Kind.ATTENTION] == found.evicted[Kind.ATTENTION] == 3 * 40 * row
    cells = sum(b.cell_bytes for b in program.buffers.values() if b.layer >= 0) * 4
    assert found.fetched[Kind.ACTIVATIONS] == found.evicted[Kind.ACTIVATIONS] == cells
