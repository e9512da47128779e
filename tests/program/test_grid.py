"""Where the grid is cut."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.program.layout import chunk_ranges, group_ranges, kept_chunks
from farspan.spec import Schedule, UnsupportedError
from tests.oracles.formulas import latest_start


@given(st.integers(1, 500), st.integers(1, 600))
def test_chunks_cut_the_tokens(tokens: int, chunk: int) -> None:
    found = chunk_ranges(tokens, chunk)
    assert [t for start, stop in found for t in range(start, stop)] == list(range(tokens))
    assert all(stop - start == chunk for start, stop in found[:-1])
    assert 1 <= found[-1][1] - found[-1][0] <= chunk


@pytest.mark.parametrize(
    ("groups", "layers", "expected"),
    [
        (1, 3, ((0, 1), (1, 2), (2, 3))),
        (3, 3, ((0, 3),)),
        (9, 3, ((0, 3),)),
        # The group that is smaller comes first: the last is open longest.
        (2, 5, ((0, 1), (1, 3), (3, 5))),
        ((3, 1, 1), 5, ((0, 3), (3, 4), (4, 5))),
    ],
)
def test_groups_cut_the_layers(
    groups: int | tuple[int, ...], layers: int, expected: tuple[tuple[int, int], ...]
) -> None:
    assert group_ranges(Schedule(groups=groups), layers) == expected


def test_groups_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"groups: .* 5 layers, but the model has 6"):
        group_ranges(Schedule(groups=(2, 3)), 6)


@given(st.integers(1, 300), st.integers(1, 320), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_kept_chunks_are_the_latest(tokens: int, chunk: int, less: float, more: float) -> None:
    chunks = chunk_ranges(tokens, chunk)
    less, more = sorted((less, more))
    kept = kept_chunks(less, chunks)
    assert kept.stop == len(chunks)
    assert kept_chunks(more, chunks).start <= kept.start
    start = chunks[kept.start][0] if kept else tokens
    assert start == latest_start(less, tokens, chunk)
    # To the nearest chunk: no more than half of one is missing or too many.
    borders = [0, *(stop for _, stop in chunks)]
    wanted = (1 - Fraction(less)) * tokens
    assert abs(start - wanted) <= min(abs(border - wanted) for border in borders) + Fraction(
        1, 10**9
    )
