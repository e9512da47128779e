"""The closed forms say what the theory of the grid says, and schedules buy what they promise."""

from fractions import Fraction
from typing import Any

import pytest

from farspan.program.builder import build_program
from farspan.spec import RunSpec, Schedule, Tier
from tests.oracles import formulas
from tests.program import cases

DEVICE, HOST = Tier.DEVICE, Tier.HOST
LAYERS = 12
# Bytes a token and layer of `cases.model_of`: x; K, V; dK, dV; O, LSE.
A, KAPPA, DELTA, OUT = 64 * 4, 512, 512, 16 * 16 * 4 + 16 * 4


def growth(schedule: Schedule, batch: int = 1) -> tuple[float, float]:
    """Device and host bytes that a further token takes."""
    model, chunk = cases.model_of(LAYERS), schedule.chunk
    short, long = (
        formulas.live_bytes(model, RunSpec(batch, n * chunk), schedule) for n in (10, 20)
    )
    device, host = ((long[t] - short[t]) / (10 * chunk * batch) for t in (DEVICE, HOST))
    return device, host


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("batch", [1, 3])
def test_bytes_a_token_of_groups(size: int, batch: int) -> None:
    groups = LAYERS // size
    open_group = size * (KAPPA + DELTA)
    assert growth(Schedule(16, size), batch) == (open_group, (groups - 1) * A)
    assert growth(Schedule(16, size, boundary_inputs=DEVICE), batch) == (
        open_group + (groups - 1) * A,
        0,
    )
    assert growth(Schedule(16, size, kv=HOST), batch) == (0, (groups - 1) * A + open_group)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
def test_bytes_a_token_of_what_is_kept(size: int) -> None:
    boundaries = (LAYERS // size - 1) * A
    open_group = size * (KAPPA + DELTA)
    # The top layer of the last group keeps no O.
    kept = growth(Schedule(20, size, attention_save_fraction=0.5))
    assert kept == (open_group, boundaries + (LAYERS - 1) * OUT / 2)
    # The top layer of an open group has its O made in the backward.
    kept = growth(Schedule(20, size, attention_open=True))
    assert kept == (open_group, boundaries + (size - 1) * OUT)
    # K, V of the last group are never taken to host: it is open when the others come home.
    kept = growth(Schedule(20, size, kv_kept=True))
    assert kept == (open_group, boundaries + (LAYERS - size) * KAPPA)
    # Kept on the device: the last group's backward finds all of them there.
    kept = growth(Schedule(20, size, kv_kept=True, kv_home=DEVICE))
    assert kept == (LAYERS * KAPPA + size * DELTA, boundaries)


def test_tapered_groups_take_less_than_equal_ones() -> None:
    """Boundaries above are gone when early, larger groups run backward (facts of the grid)."""
    tapered = sum(growth(Schedule(16, (5, 4, 3), boundary_inputs=DEVICE)))
    assert tapered == max(i * A + (i < 2) * A + g * 1024 for i, g in enumerate((5, 4, 3)))
    reversed_groups = sum(growth(Schedule(16, (3, 4, 5), boundary_inputs=DEVICE)))
    assert tapered < reversed_groups


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
def test_attention_passes_of_the_theory(size: int) -> None:
    """Exactly, when the last chunk's share w is taken into account."""
    model, run, groups = cases.model_of(LAYERS), RunSpec(1, 96), LAYERS // size
    w = 1 - Fraction(80 * 81, 96 * 97)

    def passes(**kept: Any) -> Fraction:
        return formulas.attention_passes(model, run, Schedule(16, size, **kept))

    once = 2 - Fraction(1, LAYERS)
    rebuilds = Fraction((groups - 1) * (size - 1), LAYERS)
    assert passes() == once + rebuilds - w * Fraction(LAYERS - groups, LAYERS)
    assert passes(attention_open=True) == 2 - Fraction(size, LAYERS)
    assert passes(kv_kept=True) == once - w * Fraction(size - 1, LAYERS)
    assert passes(attention_save_fraction=1.0) == 1
    # A graph holds its O, but a group that is not the last needs K, V again.
    assert passes(activation_save_fraction=1.0) == 1 + rebuilds
    assert passes(activation_save_fraction=1.0, kv_kept=True) == 1


@pytest.mark.parametrize(
    ("phi", "removed"), [(0.3, Fraction(51, 100)), (0.5, Fraction(3, 4)), (0.8, Fraction(24, 25))]
)
def test_the_latest_tokens_hold_most_of_the_work(phi: float, removed: Fraction) -> None:
    """1 - (1 - phi)^2 of what is computed again, since a token's work grows with its position."""
    model, run = cases.model_of(8), RunSpec(1, 10_000)
    kept, nothing = (
        formulas.attention_passes(model, run, Schedule(100, 1, attention_save_fraction=share))
        for share in (phi, 0.0)
    )
    # A query sees itself too, which the square leaves out: one key in N.
    assert abs((nothing - kept) / (nothing - 1) - removed) < 1 / run.tokens


@pytest.mark.parametrize("size", [1, 2, 4])
def test_linear_passes_of_the_theory(size: int) -> None:
    """A group that is not the last runs its lower layers three times; a pass that is only there
    for K, V ends in the top layer; checkpointed layers below the top run once more."""
    model, run, groups = cases.model_of(4), RunSpec(1, 96), 4 // size
    last = Fraction(1, 6)

    def passes(**kept: Any) -> Fraction:
        return 4 * formulas.linear_passes(model, run, Schedule(16, size, **kept))

    lower = groups * (size - 1)
    rebuilt = lower - (size - 1)
    assert passes() == 2 * 4 - 1 + rebuilt * (1 - last) - (size - 1) * last
    assert passes(kv_kept=True) == 2 * 4 - 1 - (size - 1) * last
    assert passes(layer_checkpoint=True) == passes() + lower


def test_slots_do_not_grow_with_the_sequence() -> None:
    schedule = Schedule(
        16,
        3,
        kv=HOST,
        attention_save_fraction=0.5,
        activation_save_fraction=0.5,
        attention_open=True,
        kv_block=32,
    )
    short, long = (
        build_program(cases.model_of(6), RunSpec(2, tokens), schedule) for tokens in (64, 640)
    )
    assert cases.slot_bytes(short) == cases.slot_bytes(long) > 0


def test_the_latest_start_is_the_middle_of_a_chunk() -> None:
    starts = [formulas.latest_start(share, 100, 40) for share in (0.0, 0.09, 0.1, 0.39, 0.4, 1.0)]
    assert starts == [100, 100, 80, 80, 40, 0]
