"""`Sparse` refuses what cannot be meant, and says which pages a chunk sees."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.spec import Sparse, UnsupportedError


def sparse_with(field: str, value: Any) -> Sparse:
    return Sparse(**{field: value})


@pytest.mark.parametrize("value", [0, -128, 1.5, "128", True, None])
def test_a_page_is_a_whole_number_of_tokens(value: Any) -> None:
    with pytest.raises(
        UnsupportedError, match=rf"^page: expected a whole number of tokens >= 1, got {value!r}"
    ):
        sparse_with("page", value)


@pytest.mark.parametrize("field", ["budget", "recent", "sinks"])
@pytest.mark.parametrize("value", [-1, 1.5, "4096", False, None])
def test_the_rest_are_whole_numbers_from_0_on(field: str, value: Any) -> None:
    with pytest.raises(
        UnsupportedError, match=rf"^{field}: expected a whole number of \w+ >= 0, got"
    ):
        sparse_with(field, value)


def test_a_budget_is_whole_pages() -> None:
    message = r"^budget: expected a multiple of page \(128 tokens\), got 1000; make it 896 or 1024$"
    with pytest.raises(UnsupportedError, match=message):
        Sparse(page=128, budget=1000)
    with pytest.raises(UnsupportedError, match=r"got 100; make it 0 or 128$"):
        Sparse(budget=100)


def test_a_chunk_is_whole_pages() -> None:
    Sparse(page=128).check_chunk(256)
    message = r"^chunk: expected a multiple of page \(128 tokens\) .*, got 300; make it 384, or"
    with pytest.raises(UnsupportedError, match=message):
        Sparse(page=128).check_chunk(300)


@given(data=st.data())
def test_sinks_candidates_and_recent_tokens_cover_the_prefix(data: st.DataObject) -> None:
    page = data.draw(st.integers(1, 9))
    q_start = page * data.draw(st.integers(0, 30))
    sparse = Sparse(page, 0, data.draw(st.integers(0, 300)), data.draw(st.integers(0, 40)))
    near, pages = sparse.near_start(q_start), sparse.candidates(q_start)
    assert near % page == 0
    assert near == 0 or 0 <= q_start - sparse.recent - near < page
    assert pages.stop * page == near
    assert pages.start == min(sparse.sink_pages, pages.stop)
