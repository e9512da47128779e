"""What is kept, recomputed or moved changes no bit: the mathematics is the same."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farspan.spec import Schedule, Tier
from tests.engine.checks import Outcome, assert_same_bits, draw, run_step
from tests.grids import examples, part_of
from tests.zoo import make_model, shared_model

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


tiers = st.sampled_from(Tier)
fractions = st.floats(0, 1)
placements = st.fixed_dictionaries(
    {
        "boundary_inputs": tiers,
        "kv": tiers,
        "kv_kept": st.booleans(),
        "kv_home": tiers,
        "attention_save_fraction": fractions,
        "attention_open": st.booleans(),
        "attention": tiers,
        "activation_save_fraction": fractions,
        "activations": tiers,
        "layer_checkpoint": st.booleans(),
    }
)


@settings(max_examples=examples(24))
@given(st.sampled_from(sorted(BASES)), st.sampled_from(NARROW), placements)
def test_all_of_them_together(
    outcomes: dict[tuple[str, torch.dtype], Outcome],
    base: str,
    dtype: torch.dtype,
    changes: dict[str, Any],
) -> None:
    found = run_step(shared_model("qwen2", dtype), replace(BASES[base], **changes), DATA)
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
