"""Any length, any cut of the grid: the gradients of plain full-sequence autograd."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from farspan.engine.reference import gradients_of, reference_loss
from farspan.engine.step import Step
from farspan.program.strategies import STRATEGIES, strategy
from farspan.spec import Schedule, Tier
from tests.engine.checks import (
    Data,
    Outcome,
    assert_close,
    assert_same_bits,
    draw,
    errors,
    run_oracle,
    run_step,
)
from tests.grids import crossed, examples, part_of
from tests.numerics import EXACT, relative_error
from tests.zoo import make_model, shared_model

LAYERS = 4  # of the shared models


def group_sizes(layers: int) -> st.SearchStrategy[int | tuple[int, ...]]:
    """Every way to cut the layers into groups: where each layer begins a new one or does not."""

    def cut(begins: list[bool]) -> tuple[int, ...]:
        borders = [0, *(i for i, begin in enumerate(begins, 1) if begin), layers]
        return tuple(b - a for a, b in pairwise(borders))

    cuts = st.lists(st.booleans(), min_size=layers - 1, max_size=layers - 1)
    return st.integers(1, layers + 1) | cuts.map(cut)


tiers = st.sampled_from(Tier)
fractions = st.sampled_from([0.0, 0.3, 0.6, 1.0])


def any_schedule(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Schedule]:
    """Every order of the grid and every place, with these fields."""
    return st.builds(
        Schedule,
        groups=group_sizes(LAYERS),
        boundary_inputs=tiers,
        kv=tiers,
        kv_kept=st.booleans(),
        kv_home=tiers,
        attention_save_fraction=fractions,
        attention_open=st.booleans(),
        attention=tiers,
        activation_save_fraction=fractions,
        activation_save_layers=st.sampled_from([1.0, 0.5, 1 / 3]),
        activations=tiers,
        layer_checkpoint=st.booleans(),
        **fields,
    )


# Five tokens a chunk is below some lengths and above others; 200 is beyond all of them.
schedules = any_schedule(
    chunk=st.sampled_from([1, 5, 16, 23, 200]),
    kv_block=st.sampled_from([1, 7, 16, 1000]),
    loss_chunk_size=st.sampled_from([1, 6, 1000]),
)
shapes = st.builds(
    draw,
    st.sampled_from([1, 2, 4, 15, 16, 17, 37, 61]),
    batch=st.integers(1, 2),
    documents=st.sampled_from([0, 0, 3, 9]),
    seed=st.integers(0, 3),
)


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(schedules, shapes)
@example(Schedule(chunk=1, kv_block=1, groups=(1, 3)), draw(17, batch=2, documents=5))
@example(Schedule(chunk=16, groups=(3, 1)), draw(1))
def test_any_schedule_is_exact(schedule: Schedule, data: Data) -> None:
    model = shared_model("qwen2")
    assert_close(run_step(model, schedule, data), run_oracle(model, data))


@cache
def drawn(tokens: int, batch: int, seed: int) -> tuple[Data, Outcome]:
    """A batch, and what plain autograd gives."""
    data = draw(tokens, batch=batch, documents=4 * seed, seed=seed)
    return data, run_oracle(shared_model("qwen2"), data)


@pytest.mark.parametrize(
    ("name", "shape"), crossed(STRATEGIES, [(1, 53), (2, 3), (2, 53), (1, 1), (1, 3), (2, 1)])
)
def test_strategies_by_name(name: str, shape: tuple[int, int]) -> None:
    model, (batch, tokens) = shared_model("qwen2"), shape
    step = Step(model, strategy(name, LAYERS, tokens), poison=True)
    for seed in (0, 1):
        data, expected = drawn(tokens, batch, seed)
        assert_close(run_step(model, step, data), expected)
        assert relative_error(step.evaluate(*data), expected.loss) <= EXACT


def test_lengths_change_from_step_to_step() -> None:
    """Arenas grow and shrink; programs of earlier lengths are found again."""
    model = shared_model("qwen2")
    step = Step(model, Schedule(chunk=16, groups=2, attention_save_fraction=0.4), poison=True)
    for tokens, batch in ((53, 1), (1, 2), (16, 1), (61, 2), (53, 1)):
        data = draw(tokens, batch=batch, seed=tokens)
        assert_close(run_step(model, step, data), run_oracle(model, data))
        assert relative_error(step.evaluate(*data), run_oracle(model, data).loss) <= EXACT


def test_the_oracle_agrees_with_hugging_face_s_loss() -> None:
    """The model's own forward with labels, on its own default attention, computes the loss in
    fp32: one rounding of 2**-24 a logit."""
    model, data = shared_model("qwen2"), draw(53, batch=2)
    own = model(input_ids=data.input_ids, labels=data.labels).loss
    loss = reference_loss(model, *data)
    limit = torch.finfo(torch.float32).eps
    assert relative_error(loss, own) <= limit
    names = errors(gradients_of(model, loss), gradients_of(model, own))
    assert max(names.values()) <= 10 * limit


# -- the same bits ---------------------------------------------------------------------------------

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
NARROW = DTYPES[1:]  # that all order matters to; in bfloat16 gradients have accumulators as well
BASES = {
    "layer-major": Schedule(chunk=16, groups=1, kv_block=24),
    "unequal": Schedule(chunk=16, groups=(1, 2, 1), kv_block=7),
    "grouped": Schedule(chunk=13, groups=2, kv_block=1000),
    "chunk-major": Schedule(chunk=20, groups=4, kv_block=16),
    "whole": Schedule(chunk=100, groups=1),
}
CHANGES: list[dict[str, Any]] = [
    {"activation_save_fraction": 0.5},
    {"activation_save_fraction": 0.3, "attention_save_fraction": 0.7},
    {"kv": Tier.HOST, "activation_save_fraction": 0.6, "attention_save_fraction": 0.3},
    {"activation_save_fraction": 1.0, "activation_save_layers": 0.5, "kv_kept": True},
    {"layer_checkpoint": True, "attention_open": True, "kv_kept": True},
]
DATA = draw(53, batch=2, documents=4)


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, torch.dtype], Outcome]:
    """What the bases give, once."""
    return {
        (name, dtype): run_step(shared_model("qwen2", dtype), base, DATA)
        for name, base in BASES.items()
        for dtype in NARROW
    }


@pytest.mark.exhaustive
@settings(max_examples=examples(24))
@given(st.sampled_from(sorted(BASES)), st.sampled_from(NARROW), any_schedule())
def test_all_of_them_together(
    outcomes: dict[tuple[str, torch.dtype], Outcome], base: str, dtype: torch.dtype, drawn: Schedule
) -> None:
    cut = BASES[base]
    schedule = replace(drawn, chunk=cut.chunk, groups=cut.groups, kv_block=cut.kv_block)
    found = run_step(shared_model("qwen2", dtype), schedule, DATA)
    assert_same_bits(found, outcomes[base, dtype])


@pytest.mark.parametrize(
    "name", part_of(["gemma2", "gpt_oss", "mixtral", "gpt2", "deepseek_v3"], "gpt_oss")
)
def test_other_families(name: str) -> None:
    """Kept graphs hold what is theirs: experts' index tensors, caps, sinks, fused projections."""
    model = shared_model(name)
    base = Schedule(chunk=16, groups=2, kv_block=24)
    expected = run_step(model, base, DATA)
    for changes in CHANGES:
        assert_same_bits(run_step(model, replace(base, **changes), DATA), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen3", torch.float32),
        # gate and up are halves of one product: views with gaps, which are stored without.
        ("phi3", torch.float32),
        ("mixtral", torch.float32),
        # K, V are read from their buffer, which is token first, instead of from the graph.
        ("gemma2", torch.float64),
        ("deepseek_v3", torch.float64),
    ],
)
def test_layouts_are_kept(name: str, dtype: torch.dtype) -> None:
    model, data = shared_model(name, dtype), draw(53, batch=2, documents=3)
    base = Schedule(chunk=16, groups=2)
    expected = run_step(model, base, data)
    assert_same_bits(run_step(model, replace(base, activation_save_fraction=1.0), data), expected)


@pytest.mark.parametrize("dtype", part_of(DTYPES, torch.bfloat16))
def test_the_order_of_the_grid(dtype: torch.dtype) -> None:
    """Every order visits the chunks of a layer from the last: no sum changes its order, but for a
    head tied to the embedding, which share one."""
    model = make_model("qwen2", dtype, tie_word_embeddings=False)
    orders = [run_step(model, Schedule(chunk=16, groups=g), DATA) for g in (1, 2, (3, 1), 4)]
    for one, other in pairwise(orders):
        assert_same_bits(one, other)
