"""Waits against the dumb checker, and none of them in vain."""

from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings

from farspan.program.builder import build_evaluation, build_program
from farspan.program.dependencies import Order, Wait, waits
from farspan.program.program import Evict, Fetch, Program
from farspan.program.strategies import STRATEGIES, strategy
from farspan.spec import Cut, ModelSpec, RunSpec, Schedule, Tier
from tests.grids import examples
from tests.oracles.check_order import check_order
from tests.oracles.contents import ProgramError
from tests.program.cases import model_of, steps

Step = tuple[ModelSpec, RunSpec, Schedule]


@settings(max_examples=examples(80))
@given(steps())
@example((model_of(2), RunSpec(1, 1), Schedule(chunk=1, boundary_inputs=Tier.DEVICE, kv_kept=True)))
def test_nothing_races(step: Step) -> None:
    for program in (*(build_program(*step, cut=cut) for cut in Cut), build_evaluation(*step)):
        check_order(program, waits(program))


def without_one(orders: tuple[Order, ...]) -> Iterator[tuple[Wait, tuple[Order, ...]]]:
    """The orders without each of their waits in turn."""
    for index, order in enumerate(orders):
        for lane, after in order.items():
            for wait in after:
                fewer = {**order, lane: tuple(w for w in after if w != wait)}
                yield wait, (*orders[:index], fewer, *orders[index + 1 :])


@pytest.mark.parametrize("name", ["offload", "swap", "memo", "grouped"])
def test_no_wait_is_spare(name: str) -> None:
    program = build_program(model_of(4), RunSpec(1, 46), strategy(name, 4, 46))
    orders = waits(program)
    every = list(without_one(orders))
    mutants = every[:: max(3, len(every) // 15)]
    assert len(mutants) > 3
    spare = [wait for wait, fewer in mutants if not races(program, fewer)]
    assert spare == []


def races(program: Program, orders: tuple[Order, ...]) -> bool:
    try:
        check_order(program, orders)
    except ProgramError:
        return True
    return False


@pytest.mark.parametrize("name", STRATEGIES)
def test_without_any_wait_copies_race(name: str) -> None:
    program = build_program(model_of(4), RunSpec(1, 46), strategy(name, 4, 46))
    copies = any(isinstance(i, Fetch | Evict) for i in program.instructions)
    assert races(program, waits(program, ())) == copies
