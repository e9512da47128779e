"""Prices of instructions, by what they must scale with."""

from dataclasses import replace

import pytest
from hypothesis import example, given

from farspan.planner.evaluate import evaluate, useful_flop
from farspan.planner.prices import Prices
from farspan.planner.request import Optimizer, Question
from farspan.program.builder import build_program
from farspan.program.dependencies import TiledCells
from farspan.program.program import (
    AttentionMode,
    Backward,
    Embed,
    EmbedBackward,
    Forward,
    Head,
    Program,
)
from farspan.spec import Curve, Indexer, LayerWork, MachineSpec, ModelSpec, RunSpec, Schedule, Tier
from tests.oracles.simulate import feed_forward_passes
from tests.planner.machines import slow_machine
from tests.planner.test_bound import with_work
from tests.profiles import spec_of
from tests.program.cases import model_of, steps

SCHEDULE = Schedule(chunk=64, groups=2, kv=Tier.HOST)


def question(batch: int = 1, **fields: object) -> Question:
    model = with_work(model_of(4))
    # Weights are read once whatever the batch: without any, every term is one of rows.
    layers = tuple(
        replace(layer, work=replace(layer.work, parameters=0, trainable=0))
        for layer in model.layers
    )
    bare = replace(model, layers=layers, parameters=0, trainable=0)
    asked = Question(
        bare,
        RunSpec(batch, 256),
        slow_machine(overhead=0.0),
        optimizer=Optimizer.NONE,
        dtype="float32",
    )
    return replace(asked, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Forward, Backward, Head, Embed, EmbedBackward])
def test_a_batch_costs_as_much_as_its_sequences(kind: type) -> None:
    def seconds(batch: int) -> float:
        asked = question(batch)
        program = build_program(asked.model, asked.run, SCHEDULE)
        prices = Prices(asked, program)
        return sum(prices.of(i).in_line() for i in program.instructions if isinstance(i, kind))

    assert seconds(3) == pytest.approx(3 * seconds(1), rel=1e-9)


def test_a_kept_cell_computes_a_little_again() -> None:
    """Its backward moves `remade_traffic` bytes a token more than that of a graph made again."""
    asked = question()
    layers = tuple(
        replace(layer, work=replace(layer.work, remade_traffic=1000), activation_bytes=64)
        for layer in asked.model.layers
    )
    model = replace(asked.model, layers=layers)
    program = build_program(model, asked.run, KEPT)
    prices = Prices(replace(asked, model=model), program)
    last = [i for i in program.instructions if isinstance(i, Backward) and i.chunk == 3]
    kept = next(i for i in last if i.activations is not None)
    more = prices.of(kept).compute - prices.of(replace(kept, activations=None)).compute
    assert more == pytest.approx(64 * 1000 / asked.machine.memory)


Step = tuple[ModelSpec, RunSpec, Schedule]


def worked(step: Step) -> Step:
    return with_work(step[0]), *step[1:]


# Equal layers, whose kept cells are not: O of the topmost is in no other buffer.
ONE = with_work(model_of(1))
KEPT = replace(SCHEDULE, attention_save_fraction=0.5, activation_save_fraction=0.5)


@example((replace(ONE, layers=ONE.layers * 4), RunSpec(1, 256), KEPT))
@given(steps().map(worked))
def test_an_instruction_costs_what_it_costs_alone(step: Step) -> None:
    """Prices are looked up by what decides them: nothing that was priced before may matter."""
    model, run, schedule = step
    asked = Question(model, run, slow_machine(), dtype="float32")
    program = build_program(model, run, schedule)
    prices = Prices(asked, program)
    heads = [Head(chunk, gradient) for chunk in range(2) for gradient in (False, True)]
    for i in (*program.instructions, *heads[: 2 * len(program.chunks)]):
        assert prices.of(i) == Prices(asked, program).of(i), i


def test_an_indexer_scores_the_prefix_of_each_query() -> None:
    """In every forward that needs its choice: one that computes attention, or builds a graph."""
    run, machine = RunSpec(1, 256), slow_machine(overhead=0.0)
    plain = with_work(model_of(1))
    index = Indexer(heads=4, dim=8, tokens=64)
    layers = tuple(replace(layer, indexer=index) for layer in plain.layers)
    scored = replace(plain, layers=layers)

    program = build_program(plain, run, SCHEDULE)
    cells = {i.chunk: i for i in program.instructions if isinstance(i, Forward)}

    def seconds(model: ModelSpec, chunk: int, mode: AttentionMode) -> float:
        asked = Question(model, run, machine, dtype="float32")
        prices = Prices(asked, replace(program, model=model))
        return prices.of(replace(cells[chunk], mode=mode, write_kv=None)).compute

    for mode in (AttentionMode.COMPUTE, AttentionMode.HELD):
        more = [seconds(scored, c, mode) - seconds(plain, c, mode) for c in range(4)]
        flop = [2.0 * 64 * 64 * (c + 1) * 4 * 8 for c in range(4)]
        moved = [6 * 4 * x / 16 / machine.memory for x in flop]
        curve = machine.rates["float32"].matmul
        expected = [x / curve.at(x) + y for x, y in zip(flop, moved, strict=True)]
        expected[0] = 0.0  # the first chunk has as many tokens as a query chooses
        assert more == pytest.approx(expected)
    assert seconds(scored, 3, AttentionMode.NONE) == seconds(plain, 3, AttentionMode.NONE)


def test_frozen_weights_have_no_gradient_to_count() -> None:
    asked = question()
    work = LayerWork(parameters=10, trainable=10, products=((8, 8),), projections=1)
    full, frozen = (
        replace(
            asked,
            model=replace(
                asked.model,
                layers=tuple(
                    replace(layer, work=replace(work, trainable=trainable))
                    for layer in asked.model.layers
                ),
                trainable=4 * trainable,
                parameters=40,
            ),
        )
        for trainable in (10, 0)
    )
    # One of three products a linear; head and attention as before.
    missing = 4 * 2.0 * 256 * 8 * 8
    assert useful_flop(full) - useful_flop(frozen) == pytest.approx(missing)
    assert evaluate(frozen, "grouped", SCHEDULE).seconds.optimizer == 0.0


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


@pytest.mark.parametrize(
    ("name", "feed_forward", "skippable", "layer_checkpoint"),
    [
        ("qwen2.5-0.5b", 3, False, False),
        ("qwen2.5-0.5b", 3, True, True),
        ("gpt-oss-20b", 9, True, False),
        ("gpt-oss-20b", 9, False, True),
    ],
)
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
