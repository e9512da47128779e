"""`Sparse` refuses what cannot be meant, and says which pages a chunk sees."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.formatting import EXAMPLE, FIELDS, read_sparse, sparse_words
from farspan.spec import Sparse, UnsupportedError


def sparse_with(field: str, value: Any) -> Sparse:
    return Sparse(**{field: value})


@pytest.mark.parametrize("value", [0, 1.5, "128", True])
def test_a_page_is_a_whole_number_of_tokens(value: Any) -> None:
    with pytest.raises(
        UnsupportedError, match=rf"^page: expected a whole number of tokens >= 1, got {value!r}"
    ):
        sparse_with("page", value)


@pytest.mark.parametrize("field", ["budget", "recent", "sinks"])
@pytest.mark.parametrize("value", [-1, None])
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


def test_on_off_and_fields() -> None:
    assert read_sparse("on") == Sparse()
    assert read_sparse(" Off ") is None
    found = read_sparse("page=64, budget=2K,recent=0")
    assert found == Sparse(page=64, budget=2048, recent=0)
    assert read_sparse(EXAMPLE) == Sparse(page=64, budget=2048, recent=1024, sinks=64)
    assert read_sparse("budget=1M") == Sparse(budget=2**20)
    assert FIELDS == ("page", "budget", "recent", "sinks", "query_page", "selector", "index_dim")
    assert read_sparse("selector=mean,query_page=64") == Sparse(query_page=64, selector="mean")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"^sparse: expected on, off or fields such as page=64,.*, got ''$"),
        ("yes", r"^sparse: expected on, off or fields .*, got 'yes'$"),
        ("pages=4", r"^sparse: expected on, off or fields .*, got 'pages=4'$"),
        ("page=64,", r"^sparse: expected on, off or fields .*, got ''$"),
        ("page=64,page=32", r"^sparse\.page: given twice"),
        ("page=0", r"^sparse\.page: expected a whole number of tokens >= 1, got 0$"),
        ("budget=many", r"^sparse\.budget: expected tokens such as 131072, 128K or 1M"),
        ("selector=best", r"^sparse\.selector: expected one of submeans, mean, index, got 'best'$"),
        ("recent=-1", r"^sparse\.recent: expected tokens such as"),
        ("page=48,budget=100", r"^sparse\.budget: expected a multiple of page \(48 .* 96 or 144$"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_sparse(text)


def test_in_words() -> None:
    assert sparse_words(Sparse()) == (
        "sparse attention, approximate: of earlier tokens it sees 8K in chosen pages of 128, "
        "4K recent ones and the first 128"
    )
    assert sparse_words(Sparse(), hides=False) == (
        "sparse attention, which hides no token at this context and equals dense attention: of "
        "earlier tokens it sees 8K in chosen pages of 128, 4K recent ones and the first 128"
    )
    assert sparse_words(Sparse(page=48, budget=480, recent=0, sinks=0)) == (
        "sparse attention, approximate: of earlier tokens it sees 480 in chosen pages of 48, "
        "0 recent ones and the first 0"
    )
