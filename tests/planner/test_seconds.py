"""Prices of instructions, by what they must scale with."""

from dataclasses import replace

import pytest
from hypothesis import example, given

from farspan.planner.evaluate import evaluate, useful_flop
from farspan.planner.plans import best_plan
from farspan.planner.prices import Prices
from farspan.planner.request import Optimizer, Question
from farspan.program.builder import build_program
from farspan.program.layout import Layout
from farspan.program.program import Backward, Embed, EmbedBackward, Forward, Head
from farspan.spec import LayerWork, ModelSpec, RunSpec, Schedule, Tier
from tests.planner.machines import slow_machine
from tests.planner.test_bound import with_work
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


def test_stages_are_searched_by_their_own_layers() -> None:
    asked = question(layout=Layout(pipeline=2))
    plan = best_plan(asked, ["grouped", "memo"])
    assert plan.fits
    assert plan.schedule.groups == (2, 2)


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
