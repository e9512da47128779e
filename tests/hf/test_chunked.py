"""Chunked attention (Llama 4): exact in chunks of any size, and predicted."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farspan.engine.reference import reference_loss
from farspan.engine.step import Step
from farspan.hf.probe import Float64Mode
from farspan.program.attention_blocks import (
    document_runs,
    first_key,
    layer_blocks,
    layer_pairs,
)
from farspan.program.layout import Layout
from farspan.spec import LayerSpec
from tests.engine.checks import assert_close, draw, run_oracle, run_step
from tests.engine.test_ranks import Case, outcomes_of
from tests.grids import part_of
from tests.hf.test_families import KEPT, SCHEDULES, STREAMED
from tests.numerics import EXACT, relative_error
from tests.planner.test_walk import CLOSE, agree, in_chunks, make
from tests.program.test_blocks import covered
from tests.ranks import run_ranks
from tests.zoo import make_model

FAMILY = "llama4_text"
LAYOUTS = {"ring": Layout(ring=2), "shards": Layout(shards=2), "ulysses": Layout(ulysses=2)}


@given(
    start=st.integers(0, 40),
    queries=st.integers(1, 24),
    kv_block=st.integers(1, 50),
    window=st.integers(1, 30),
    documents=st.none() | st.sets(st.integers(1, 60), max_size=6),
)
def test_queries_see_their_piece_of_their_document(
    start: int, queries: int, kv_block: int, window: int, documents: set[int] | None
) -> None:
    layer, chunk = LayerSpec(1, 1, 1, 1, window, chunked=True), range(start, start + queries)
    starts = sorted({0, *(documents or ())})
    runs = None if documents is None else [document_runs(starts, start, chunk.stop)] * 2
    blocks = layer_blocks(layer, (start, chunk.stop), kv_block, 2, runs)
    seen = covered(blocks, 2, chunk, ((0, chunk.stop),))
    for q in chunk:
        begins = max(x for x in starts if x <= q)
        piece = begins + (q - begins) // window * window
        assert seen[:, q - start].nonzero()[:, 1].tolist() == [*range(piece, q + 1)] * 2
    if documents is None:
        assert int(seen[0].sum()) == layer_pairs(chunk.stop, layer) - layer_pairs(start, layer)
        assert first_key(start, layer) == int(seen[0, 0].nonzero()[0])


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_is_exact(name: str) -> None:
    """Documents are cut into pieces, and queries scaled by positions, as if each were alone."""
    model = make_model(FAMILY)
    step = Step(model, SCHEDULES[name], poison=True)
    for tokens, documents in ((37, 0), (19, 3)):
        data = draw(tokens, batch=2, documents=documents, seed=documents)
        assert_close(run_step(model, step, data), run_oracle(model, data))


@pytest.mark.usefixtures("float64_throughout")
def test_the_reference_is_the_model_of_transformers() -> None:
    model, data = make_model(FAMILY), draw(53, batch=2, seed=0)
    ours = reference_loss(model, data.input_ids, data.labels)
    model.set_attn_implementation("eager")
    theirs = model(input_ids=data.input_ids, labels=data.labels).loss
    assert relative_error(ours, theirs) <= EXACT


def over_two(name: str) -> list[str]:
    inputs = draw(37, batch=2, seed=0), draw(41, batch=2, documents=3, seed=1)
    # A ring has no K, V on the host.
    schedules = (KEPT,) if name == "ring" else (KEPT, STREAMED)
    with Float64Mode():
        return outcomes_of(
            LAYOUTS[name], [Case(name, schedule, inputs, FAMILY) for schedule in schedules]
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", part_of(LAYOUTS, "ring"))
def test_two_ranks_give_what_one_does(name: str) -> None:
    assert run_ranks(2, over_two, name) == [[], []]


def test_memory_is_predicted() -> None:
    fields = {
        "attention_chunk_size": 90,
        "floor_scale": 64,
        "intermediate_size_mlp": 112,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "no_rope_layer_interval": 2,
        "interleave_moe_layer_step": 2,
        "layer_types": ["chunked_attention", "full_attention"],
    }
    model = make(FAMILY, torch.float32, **fields)
    agree(Step(model, in_chunks("grouped", 230)), 1, 230, CLOSE)
