"""The published systems run by name, and their tensors live where the table of the design says."""

import pytest

from farspan.program.builder import build_evaluation, build_program
from farspan.program.program import Program
from farspan.program.residency import Kind
from farspan.program.strategies import STRATEGIES, strategy
from farspan.spec import RunSpec, Tier, UnsupportedError
from tests.oracles.check import check_program
from tests.program import cases

LAYERS = 6
D, H, DH = {Tier.DEVICE}, {Tier.HOST}, {Tier.DEVICE, Tier.HOST}

# Strategy: groups; where x, kv, dkv, attention and activations live.
TABLE = {
    "plain": (6, D, D, D, D, D),
    "recompute": (6, D, D, D, set(), set()),
    "offload": (6, H, D, D, set(), set()),
    "swap": (6, H, DH, D, H, H),
    "memo": (6, H, D, D, H, H),
    "fpdt": (6, H, H, H, set(), set()),
    "oomb": (1, set(), H, H, set(), set()),
    "grouped": (3, H, D, D, H, set()),
}


def program_of(name: str, tokens: int) -> Program:
    return build_program(cases.model_of(LAYERS), RunSpec(1, tokens), strategy(name, LAYERS, tokens))


def tiers(program: Program, kind: Kind) -> set[Tier]:
    """Where buffers of a kind live, slots left out."""
    return {b.tier for b in program.buffers.values() if b.kind is kind and b.layer >= 0}


def test_the_table_has_every_strategy() -> None:
    assert TABLE.keys() == STRATEGIES.keys()


@pytest.mark.parametrize("name", TABLE)
def test_tensors_live_where_the_design_says(name: str) -> None:
    program = program_of(name, 160)
    groups, *expected = TABLE[name]
    assert len(program.groups) == groups
    kinds = (Kind.X, Kind.KV, Kind.DKV, Kind.ATTENTION, Kind.ACTIVATIONS)
    assert [tiers(program, kind) for kind in kinds] == expected


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("tokens", [1, 2, 37, 160])
def test_strategies_pass_the_check(name: str, tokens: int) -> None:
    check_program(program_of(name, tokens))
    schedule = strategy(name, LAYERS, tokens)
    check_program(build_evaluation(cases.model_of(LAYERS), RunSpec(1, tokens), schedule))


def test_a_name_that_is_not_known_is_refused() -> None:
    with pytest.raises(
        UnsupportedError, match=r"'pain' is not known \(did you mean plain\?\); .* one of plain, "
    ):
        strategy("pain", 2, 10)
