"""What tiles cost: a recomputed feed-forward, less the one that is left out."""

from dataclasses import replace
from itertools import pairwise

import pytest

from farspan.planner.prices import Prices
from farspan.planner.request import Optimizer, Question
from farspan.program.builder import build_program
from farspan.program.dependencies import TiledCells
from farspan.program.program import Backward, Forward, Program
from farspan.spec import Curve, MachineSpec, ModelSpec, RunSpec, Schedule
from tests.oracles.simulate import feed_forward_passes
from tests.planner.machines import slow_machine
from tests.profiles import spec_of

RUN = RunSpec(batch=2, tokens=2000)
RATE = 1e12
WHOLE = Schedule(chunk=512, groups=4)
TILED = replace(WHOLE, mlp_chunk_size=100)


def products_alone() -> MachineSpec:
    """A machine on which nothing but products takes time, and their size does not matter."""
    machine = slow_machine(overhead=0.0, memory=1e30)
    rates = {
        name: replace(
            r,
            matmul=Curve(((1.0, RATE),)),
            weights=None,
            attention_forward=Curve(((1.0, 1e30),)),
            attention_backward=Curve(((1.0, 1e30),)),
            causal_forward=None,
        )
        for name, r in machine.rates.items()
    }
    return replace(machine, rates=rates)


def prices(model: ModelSpec, schedule: Schedule, machine: MachineSpec) -> tuple[Program, Prices]:
    program = build_program(model, RUN, schedule)
    asked = Question(model, RUN, machine, optimizer=Optimizer.NONE, dtype="float32")
    return program, Prices(asked, program)


def cells(model: ModelSpec, schedule: Schedule, machine: MachineSpec) -> float:
    program, priced = prices(model, schedule, machine)
    found = (i for i in program.instructions if isinstance(i, Forward | Backward))
    return sum(priced.of(i).compute for i in found)


@pytest.mark.parametrize("layer_checkpoint", [False, True])
@pytest.mark.parametrize("skippable", [False, True])
@pytest.mark.parametrize(("name", "feed_forward"), [("qwen2.5-0.5b", 3), ("gpt-oss-20b", 9)])
def test_tiles_add_the_passes_that_they_add(
    name: str, feed_forward: int, skippable: bool, layer_checkpoint: bool
) -> None:
    model = spec_of(name, dtype="float32")
    assert {layer.work.feed_forward for layer in model.layers} == {feed_forward}
    assert all(layer.work.skippable for layer in model.layers)
    works = (replace(layer.work, skippable=skippable) for layer in model.layers)
    layers = (replace(layer, work=w) for layer, w in zip(model.layers, works, strict=True))
    model = replace(model, layers=tuple(layers))
    whole, tiled = (replace(s, layer_checkpoint=layer_checkpoint) for s in (WHOLE, TILED))
    more = cells(model, tiled, products_alone()) - cells(model, whole, products_alone())
    once = sum(
        2.0 * RUN.batch * RUN.tokens * inner * outer / RATE
        for layer in model.layers
        for inner, outer in layer.work.products[-feed_forward:]
    )
    passes = [feed_forward_passes(build_program(model, RUN, s)) for s in (whole, tiled)]
    assert more == pytest.approx(float(passes[1] - passes[0]) * once, rel=1e-9)
    assert passes[1] > passes[0]


def test_a_pass_is_saved_and_spent() -> None:
    """Of a cell rebuilt for its backward alone."""
    model = spec_of("qwen2.5-0.5b", dtype="float32")
    program, priced = prices(model, TILED, products_alone())
    _, plain = prices(model, WHOLE, products_alone())
    tiled = TiledCells(program)
    skipped = [i for i in program.instructions if isinstance(i, Forward) and tiled.skips(i)]
    assert skipped
    for forward in skipped:
        backward = next(
            i
            for i in program.instructions
            if isinstance(i, Backward) and (i.layer, i.chunk) == (forward.layer, forward.chunk)
        )
        saved = plain.of(forward).compute - priced.of(forward).compute
        spent = priced.of(backward).compute - plain.of(backward).compute
        assert saved > 0
        assert spent == pytest.approx(saved, rel=1e-9)


def test_small_tiles_pass_weight_gradients_more_often() -> None:
    model = spec_of("qwen2.5-0.5b", dtype="float32")
    machine = replace(products_alone(), memory=1e9)
    seconds = [cells(model, replace(TILED, mlp_chunk_size=t), machine) for t in (400, 200, 100, 50)]
    assert seconds == sorted(seconds)
    steps = [b - a for a, b in pairwise(seconds)]
    assert steps[2] > 1.5 * steps[1] > 2 * steps[0]
