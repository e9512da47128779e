"""The bounds of the search against programs built and walked."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from farspan.plan.build import build_program
from farspan.plan.grid import chunk_ranges, kept_chunks
from farspan.plan.price.evaluate import size
from farspan.plan.price.seconds import Prices
from farspan.plan.price.timeline import run_time
from farspan.plan.question import Optimizer, Question
from farspan.plan.search.bound import TIERS, Frame
from farspan.plan.search.roles import Kept
from farspan.plan.search.ruler import Ruler
from farspan.spec import LayerWork, ModelSpec, RunSpec, Schedule, Tier
from tests.plan.cases import steps
from tests.plan.machines import slow_machine

CLOSE = 1e-9  # sums of the same numbers in another order


def with_work(model: ModelSpec) -> ModelSpec:
    """Every layer with products and traffic, so that every cell costs something of its own."""
    layers = tuple(
        replace(
            layer,
            work=LayerWork(
                parameters=100 + index,
                trainable=100 + index,
                products=((8, 5 + layer.kv_heads), (7, 9), (3, 11)),
                projections=1,
                forward_traffic=40 + layer.query_heads,
                backward_traffic=90,
            ),
        )
        for index, layer in enumerate(model.layers)
    )
    total = sum(layer.work.parameters for layer in layers) + 900
    return replace(model, layers=layers, parameters=total, trainable=total)


@settings(max_examples=300)
@given(steps(), st.booleans())
def test_bounds_hold(step: tuple[ModelSpec, RunSpec, Schedule], overlap: bool) -> None:
    model, run, schedule = step
    question = Question(
        with_work(model),
        run,
        slow_machine(),
        optimizer=Optimizer.NONE,
        dtype="float32",
        overlap=overlap,
    )
    chunks = chunk_ranges(run.tokens, schedule.chunk)
    counts = [
        len(kept_chunks(fraction, chunks))
        for fraction in (schedule.attention_kept, schedule.activations_kept)
    ]
    schedule = replace(
        schedule,
        attention_kept=latest_fraction(chunks, counts[0]),
        activations_kept=latest_fraction(chunks, counts[1]),
    )
    kept = Kept(np.array([counts[0]]), np.array([counts[1]]), len(chunks))
    bounds = Frame(Ruler(question, schedule), schedule, kept).bounds()
    tiers = TIERS.index((schedule.x, schedule.attention, schedule.activations))
    program = build_program(question.model, run, schedule)
    line = run_time(Prices(question, program, together=overlap), overlap=overlap)
    bound = bounds.seconds[0, tiers]
    if overlap:
        assert bound <= line.total * (1 + CLOSE)
    else:
        assert abs(bound - line.total) <= CLOSE * line.total
    assert bounds.host[0, tiers] <= program.arena_bytes[Tier.HOST]
    fixed = Frame(Ruler(question, schedule), schedule, kept)._fixed()[0][0, tiers]
    slots = Frame(Ruler(question, schedule), schedule, kept)._slots()[0, tiers]
    arena = bounds.device[0, tiers] - fixed + slots
    assert arena <= program.arena_bytes[Tier.DEVICE]


@settings(max_examples=100)
@given(steps(), st.sampled_from(Optimizer))
def test_memory_is_never_overestimated(
    step: tuple[ModelSpec, RunSpec, Schedule], optimizer: Optimizer
) -> None:
    """The whole of it: gradients and the graphs of a chunk need not be there together."""
    model, run, schedule = step
    question = Question(with_work(model), run, slow_machine(), optimizer=optimizer, dtype="float32")
    chunks = chunk_ranges(run.tokens, schedule.chunk)
    counts = [
        len(kept_chunks(fraction, chunks))
        for fraction in (schedule.attention_kept, schedule.activations_kept)
    ]
    schedule = replace(
        schedule,
        attention_kept=latest_fraction(chunks, counts[0]),
        activations_kept=latest_fraction(chunks, counts[1]),
    )
    kept = Kept(np.array([counts[0]]), np.array([counts[1]]), len(chunks))
    bounds = Frame(Ruler(question, schedule), schedule, kept).bounds()
    tiers = TIERS.index((schedule.x, schedule.attention, schedule.activations))
    sized = size(question, schedule)
    assert bounds.device[0, tiers] <= sized.device.total
    assert bounds.host[0, tiers] <= sized.host.total


def latest_fraction(chunks: tuple[tuple[int, int], ...], count: int) -> float:
    """The fraction that keeps the latest `count` chunks."""
    if count == 0:
        return 0.0
    return (chunks[-1][1] - chunks[-count][0]) / chunks[-1][1]
