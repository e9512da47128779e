"""Specifications refuse what cannot be meant, and name the field."""

from dataclasses import fields
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.spec import ModelSpec, RunSpec, Schedule, Sparse, Tier, UnsupportedError


class Foreign(StrEnum):
    """Not a tier, whatever it says."""

    DISK = "disk"


def schedule_with(field: str, value: Any) -> Schedule:
    return Schedule(**{field: value})


@pytest.mark.parametrize("field", ["batch", "tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "3", None, True])
def test_a_run_of_nothing_is_refused(field: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match=rf"^{field}: expected .*at least 1, got {value!r}$"):
        RunSpec(**dict[str, Any](batch=1, tokens=1) | {field: value})


@pytest.mark.parametrize("field", ["chunk", "kv_block", "loss_chunk_size"])
@pytest.mark.parametrize("value", [0, -4, 1.5, "16", True, None])
def test_a_count_of_tokens_is_a_whole_number(field: str, value: Any) -> None:
    with pytest.raises(
        UnsupportedError, match=rf"^{field}: expected a whole number of tokens >= 1, got"
    ):
        schedule_with(field, value)


@pytest.mark.parametrize("field", ["attention_save_fraction", "activation_save_fraction"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), float("inf"), "0.5", None, True])
def test_a_fraction_is_between_0_and_1(field: str, value: Any) -> None:
    with pytest.raises(
        UnsupportedError, match=rf"^{field}: expected a fraction between 0 and 1, got"
    ):
        schedule_with(field, value)


@pytest.mark.parametrize("field", ["kv_kept", "attention_open", "layer_checkpoint"])
@pytest.mark.parametrize("value", ["false", "no", 0, 1, None])
def test_a_choice_is_true_or_false(field: str, value: Any) -> None:
    """The word "false" is true to Python."""
    with pytest.raises(UnsupportedError, match=rf"^{field}: expected true or false, got"):
        schedule_with(field, value)


TIERS = ["boundary_inputs", "kv", "kv_home", "attention", "activations", "weights"]


@pytest.mark.parametrize("field", TIERS)
@pytest.mark.parametrize("value", ["disk", "DEVICE", "", None, 0, Foreign.DISK])
def test_a_tier_is_one_of_two(field: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match=rf"^{field}: expected 'device' or 'host', got"):
        schedule_with(field, value)


@pytest.mark.parametrize("field", TIERS)
@pytest.mark.parametrize("tier", Tier)
def test_a_tier_may_be_its_name(field: str, tier: Tier) -> None:
    """As a file of settings gives it."""
    assert getattr(schedule_with(field, str(tier)), field) is tier
    assert schedule_with(field, str(tier)) == schedule_with(field, tier)


def test_every_tier_of_a_schedule_is_tested() -> None:
    assert [f.name for f in fields(Schedule) if f.type is Tier] == TIERS


@pytest.mark.parametrize(
    "value", [0, -1, True, 1.5, "2", None, (), (2, 0), (1, -1), (1, True), (1, 1.5), ("1",)]
)
def test_groups_are_whole_numbers_of_layers(value: object) -> None:
    with pytest.raises(UnsupportedError, match=r"^groups: expected the number of layers per group"):
        Schedule(groups=value)  # type: ignore[arg-type]


def test_groups_may_be_a_list() -> None:
    """As a file of settings gives it; the schedule is still a value that hashes."""
    schedule = Schedule(groups=[2, 1])  # type: ignore[arg-type]
    assert schedule == Schedule(groups=(2, 1))
    assert hash(schedule) == hash(Schedule(groups=(2, 1)))


@given(
    st.builds(
        lambda page, budget, recent, sinks: Sparse(page, budget * page, recent, sinks),
        st.integers(1, 5),
        st.integers(0, 6),
        st.integers(0, 20),
        st.integers(0, 12),
    ),
    st.integers(1, 60),
    st.integers(1, 4),
)
def test_hidden_is_what_no_choice_has_room_for(sparse: Sparse, tokens: int, pages: int) -> None:
    """Counted chunk by chunk, page by page."""
    chunk, left_out = pages * sparse.page, 0
    for start in range(0, tokens, chunk):
        far = [
            page
            for page in range(start // sparse.page)
            if page * sparse.page >= sparse.sinks
            and (page + 1) * sparse.page <= start - sparse.recent
        ]
        left_out += max(0, len(far) * sparse.page - sparse.budget)
    assert sparse.hides(tokens, chunk) == (left_out > 0)
    assert sparse.hides(tokens, sparse.page) >= sparse.hides(tokens, chunk)


@given(st.integers(1, 40), st.integers(1, 50))
def test_groups_of_a_size_add_up(layers: int, size: int) -> None:
    sizes = Schedule(groups=size).group_sizes(layers)
    assert sum(sizes) == layers
    assert all(s == min(size, layers) for s in sizes[1:])
    assert 1 <= sizes[0] <= size


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 60))
def test_groups_given_one_by_one_must_add_up(sizes: list[int], layers: int) -> None:
    schedule = Schedule(groups=tuple(sizes))
    assert schedule.group_sizes(sum(sizes)) == tuple(sizes)
    if layers != sum(sizes):
        message = rf"^groups: .* holds {sum(sizes)} layers, but the model has {layers}; give sizes"
        with pytest.raises(UnsupportedError, match=message):
            schedule.group_sizes(layers)


@pytest.mark.parametrize(("element", "accumulated"), [(2, 4), (4, 4), (8, 8)])
def test_gradients_accumulate_in_single_precision_or_better(element: int, accumulated: int) -> None:
    assert ModelSpec("m", 64, 100, (), element).accumulate_bytes() == accumulated
