"""Votes are what equation 4 of OOMB says, and selectors read them exactly."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.sparse import evidence
from farspan.sparse import pages as selecting
from farspan.sparse.attend import FarCall, choose, compare
from farspan.sparse.gathered import Gathered, PlainPages
from farspan.sparse.pages import Candidates, Checked, Fraction, RandomPages, Selector, TopK, vote
from farspan.spec import (
    INDEX,
    MEAN,
    REFINED,
    SUBMEANS,
    SUPERMEAN,
    SUPERPAGE,
    Sparse,
    UnsupportedError,
)
from tests.attention.cases import Case, make_inputs
from tests.grids import crossed, part_of
from tests.numerics import assert_exact
from tests.sparse.cases import MIXED, Sequence, SparseCase

CANDIDATES = Candidates(range(2, 9))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


Compared = dict[tuple[int, int, int], list[int]]  # pages, by row, head and page of queries


def dumb_votes(
    q: Tensor,
    keys: Tensor,
    sparse: Sparse,
    scale: float,
    documents: Tensor | None,
    first: int,
    compared: Compared | None = None,  # None: all
) -> Tensor:
    """One query after the other; keys [B, Hk, T, D] from token 0 on."""
    batch, heads, tokens, _ = q.shape
    page, together = sparse.page, sparse.query_tokens
    kv_heads, last = keys.shape[1], keys.shape[2] // page
    votes = torch.zeros(batch, kv_heads, -(-tokens // together), last - first, dtype=q.dtype)
    for b in range(batch):
        for h in range(heads):
            own = h // (heads // kv_heads)
            for i in range(tokens):
                start = 0 if documents is None else int(documents[b, i])
                seen = [p for p in range(first, last) if (p + 1) * page > start]
                if compared is not None:
                    seen = [p for p in seen if p in compared[b, own, i // together]]
                if not seen:
                    continue
                scores = []
                for p in seen:
                    parts = keys[b, own, p * page : (p + 1) * page].split(sparse.mean_tokens)
                    scores.append(max(q[b, h, i] @ part.mean(0) * scale for part in parts))
                share, at = torch.stack(scores).softmax(0), [p - first for p in seen]
                before = votes[b, own, i // together, at]
                summed = sparse.selector == MEAN
                after = before + share if summed else before.maximum(share)
                votes[b, own, i // together, at] = after
    return votes


@pytest.mark.parametrize(
    ("sparse", "documents", "scores", "least"),
    crossed(
        [
            Sparse(4, 0, selector=MEAN),
            Sparse(4, 0, query_page=2, selector=MEAN),
            Sparse(8, 0, query_page=4),
        ],
        [None, MIXED],
        [1, 50, 100, 1000, 2**25],
        [1, 3, 16],
    ),
)
def test_votes_equal_those_counted_one_by_one(
    sparse: Sparse,
    documents: tuple[tuple[int, ...], ...] | None,
    scores: int,
    least: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However few of a chunk's queries and heads vote at a time."""
    monkeypatch.setitem(selecting.SCORES, "cpu", scores)
    monkeypatch.setattr(selecting, "LEAST", least)
    dense = Case(tokens=61, chunk=13, kv_block=100, batch=2, documents=documents)
    inputs = make_inputs(dense)
    q, keys = inputs.q[:, :, 48:], inputs.k[:, :, :48]
    means = keys.unflatten(2, (-1, sparse.mean_tokens)).mean(3)
    means = means[:, :, sparse.page // sparse.mean_tokens :]
    starts = None
    if documents is not None:
        starts = torch.tensor(
            [[max(s for s in row if s <= i) for i in range(48, 61)] for row in documents]
        )
        assert starts.max() < 48 < starts.max() + 9
    wanted = dumb_votes(q, keys, sparse, dense.scale, starts, 1)
    assert_exact(vote(q, means, sparse, dense.scale, starts, 1), wanted)


def dumb_superpages(
    q: Tensor, keys: Tensor, sparse: Sparse, scale: float, documents: Tensor | None, pages: range
) -> Compared:
    """Which pages are compared where there are many; one query after the other."""
    together, page, found = sparse.query_tokens, sparse.page, {}
    runs = [pages[i : i + SUPERPAGE] for i in range(0, len(pages), SUPERPAGE)]
    kept = -(-REFINED * (sparse.budget // page) // SUPERPAGE)
    group = q.shape[1] // keys.shape[1]
    for b, h in product(range(len(q)), range(keys.shape[1])):
        parts = keys[b, h, : pages.stop * page].split(SUPERMEAN)
        means = torch.stack([part.mean(0) for part in parts])[pages.start * page // SUPERMEAN :]
        own = (means - means.mean(0)).unflatten(0, (len(pages), -1))
        best: dict[int, list[float]] = {}
        for t, (i, run) in product(range(q.shape[2]), enumerate(runs)):
            scores = best.setdefault(t // together * len(runs) + i, [-torch.inf])
            if documents is not None and (run[-1] + 1) * page <= int(documents[b, t]):
                continue
            mine = own[i * SUPERPAGE : (i + 1) * SUPERPAGE].flatten(0, 1)
            scores.append(float((q[b, h * group : (h + 1) * group, t] @ mine.mT).max()) * scale)
        for m in range(-(-q.shape[2] // together)):
            ranked = sorted(range(len(runs)), key=lambda i: (-max(best[m * len(runs) + i]), i))
            found[b, h, m] = [p for i in sorted(ranked[:kept]) for p in runs[i]]
    return found


@pytest.mark.parametrize(
    ("documents", "selector", "sizes", "scores"),
    part_of(
        product(
            [None, ((0, 5, 150), (0, 163))],
            [SUBMEANS, INDEX],  # maps aside
            # K,V heads, tokens, page, queries that choose together, budget
            [(4, 176, 4, 2, 8), (2, 171, 4, 4, 8), (1, 601, 8, 4, 32)],
            [1, 10**4, 2**25],
        ),
        (None, INDEX, (4, 176, 4, 2, 8), 2**25),
        # A document begins after the last candidate, within what its superpage lacks.
        (((0, 5, 150), (0, 163)), INDEX, (2, 171, 4, 4, 8), 1),
        (((0, 5, 150), (0, 163)), SUBMEANS, (1, 601, 8, 4, 32), 10**4),
    ),
)
def test_of_many_pages_those_of_the_best_superpages_are_compared(
    documents: tuple[tuple[int, ...], ...] | None,
    selector: str,
    sizes: tuple[int, int, int, int, int],
    scores: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However few at a time. The last superpage has 5 pages, or 8."""
    monkeypatch.setitem(selecting.SCORES, "cpu", scores)
    heads, tokens, page, query_page, budget = sizes
    sparse = Sparse(page, budget, 6, 4, query_page, selector)
    dense = Case(tokens, 16, 50, batch=2, heads=4, kv_heads=heads, documents=documents)
    start = (tokens - 1) // 16 * 16
    pages, inputs = sparse.candidates(start), make_inputs(dense)
    assert sparse.refined(len(pages)) == 1 + (page == 8)
    starts = None
    if documents is not None:
        own = [[max(s for s in row if s <= i) for i in range(start, tokens)] for row in documents]
        starts = torch.tensor(own)
    q, keys = inputs.q[:, :, start:], inputs.k[:, :, : page * pages.stop]
    of = q, keys, sparse, dense.scale, starts
    compared = dumb_superpages(*of, pages)
    assert len({tuple(pages) for pages in compared.values()}) > 1
    wanted = dumb_votes(*of, pages.start, compared)
    means = keys.unflatten(2, (-1, sparse.mean_tokens)).mean(3)
    means = means[:, :, pages.start * page // sparse.mean_tokens :]
    first = None if starts is None else starts[:, ::query_page] // page
    call = FarCall(dense.scale, page, starts, query_page)
    given = call, sparse, q, means, Candidates(pages, first)
    votes, candidates = compare(Gathered(PlainPages()), *given)
    columns = candidates.columns()
    assert columns is not None
    for (b, h, m), run in compared.items():
        assert [p for p in columns[b, h, m].tolist() if p in pages] == run
    assert_exact(candidates.spread(votes), wanted)
    chosen = TopK(budget // page)(votes, candidates)
    for (b, h, m), run in compared.items():
        seen = [p for p in run if first is None or p >= int(first[b, m])]
        ranked = sorted((-float(wanted[b, h, m, p - pages.start]), p) for p in seen)
        best = sorted(p for _, p in ranked[: budget // page])
        assert chosen[b, h, m].tolist() == best + [-1] * (budget // page - len(best))


def test_one_key_among_a_thousand_random_pages_is_found() -> None:
    """Also where superpages are ranked, whether one token needs it or a whole page of queries."""
    assert Sparse().refined(evidence.NEEDLE_PAGES)
    for needed in (1, Sparse().query_tokens):
        assert evidence.needle(Sparse(), needed, torch.Generator().manual_seed(needed))


def test_a_budget_for_half_of_what_there_is_ranks_nothing() -> None:
    """Every choice up to 1,023 pages is by comparing all, and a budget for all is dense."""
    assert [Sparse().refined(n) for n in (1023, 1024, 10**6)] == [0, 32, 32]
    assert Sparse(selector=INDEX).refined(1024) == 32
    assert Sparse(selector=MEAN).refined(10**6) == Sparse(budget=0).refined(10**6) == 0
    assert Sparse(page=2, budget=2, query_page=2).refined(10**6) == 0  # nothing is coarser
    for page, budget in product((4, 16, 128), (1, 3, 64)):
        sparse = Sparse(page, budget * page)
        least = next(n for n in range(10**4) if sparse.refined(n))
        assert least >= 2 * SUPERPAGE * sparse.refined(least) >= 16 * budget


def test_selectors_know_pages_that_were_not_compared() -> None:
    superpages = torch.tensor([0, 2], dtype=torch.int32).view(1, 1, 1, 2)
    candidates = Candidates(range(3, 40), superpages=superpages)
    votes = torch.rand(1, 1, 1, 32)
    spread = candidates.spread(votes)
    assert torch.equal(spread[0, 0, 0, :16], votes[0, 0, 0, :16])
    assert torch.equal(spread[0, 0, 0, 32:], votes[0, 0, 0, 16:21])
    assert spread.shape[3] == 37
    assert not spread[..., 16:32].any()
    asked: list[tuple[Tensor, range]] = []

    def last(votes: Tensor, pages: range) -> Tensor:
        asked.append((votes, pages))
        return torch.full((1, 1, 1, 1), pages[-1])

    assert Checked(last)(votes, candidates).item() == 39
    assert torch.equal(asked[0][0], spread)
    assert asked[0][1] == range(3, 40)
    every = replace(candidates, superpages=None)
    control = RandomPages(9, 0)
    assert torch.equal(control(votes, candidates), control(spread, every))
    assert torch.equal(Fraction(0.8)(votes, candidates), Fraction(0.8)(spread, every))
    assert Fraction(0.8)(votes, candidates).shape[3] == 8


@given(data=st.data())
def test_most_votes_and_of_equals_the_lower_page(data: st.DataObject) -> None:
    """Against a sort in Python, with few distinct votes."""
    count, pages = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    rows = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
    votes = torch.tensor(rows or [[0] * count]).view(1, 1, -1, count) / 2
    first = data.draw(st.integers(0, 5))
    seen = data.draw(st.integers(first, first + count))
    numbers = range(first, first + count)
    hides = torch.full((1, votes.shape[2]), seen)
    found = TopK(pages)(votes, Candidates(numbers, hides))
    for row, choice in zip(votes[0, 0].tolist(), found[0, 0].tolist(), strict=True):
        ranked = sorted((-row[p - first], p) for p in numbers if p >= seen)
        wanted = sorted(page for _, page in ranked[:pages])
        assert choice == wanted + [-1] * (min(pages, count) - len(wanted))
    assert found.dtype == torch.int32


def test_a_fraction_is_of_the_pages_that_a_page_of_queries_sees() -> None:
    candidates = Candidates(range(3, 13), torch.tensor([[3, 8, 12, 13]]))
    votes = torch.rand(1, 2, 4, 10)

    def counts(sparsity: float, candidates: Candidates) -> list[int]:
        return (Fraction(sparsity)(votes, candidates) >= 0).sum(3)[0, 1].tolist()

    assert counts(0.5, candidates) == [5, 3, 1, 0]
    assert counts(0.9, candidates) == [1, 1, 1, 0]
    assert counts(0.0, candidates) == [10, 5, 1, 0]
    assert counts(1.0, candidates) == [0, 0, 0, 0]
    for tenths in range(11):
        assert counts(tenths / 10, replace(candidates, first=None)) == [10 - tenths] * 4


@pytest.mark.parametrize("sparsity", [-0.1, float("nan"), "0.5", True])
def test_a_sparsity_is_a_fraction(sparsity: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"^sparsity: expected a fraction from 0 to 1, got"):
        Fraction(sparsity)


def test_random_pages_depend_on_seed_and_chunk_alone() -> None:
    votes = torch.rand(2, 2, 8, 7)
    once = RandomPages(3, seed=1)(votes, CANDIDATES)
    assert torch.equal(once, RandomPages(3, seed=1)(torch.rand_like(votes), CANDIDATES))
    assert not torch.equal(once, RandomPages(3, seed=2)(votes, CANDIDATES))
    assert not torch.equal(once - 2, RandomPages(3, seed=1)(votes, Candidates(range(3, 10))) - 3)
    assert once.unique().tolist() == [*range(2, 9)]
    assert len(once.flatten(0, 2).unique(dim=0)) > 10


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, r"expected an int32 tensor \[1, 2, 3, any\] of pages, got NoneType"),
        (torch.zeros(1, 2, 3, 1), r"expected an int32 tensor .* got torch.float32"),
        (torch.zeros(1, 1, 3, 1).int(), r"expected pages of shape .*, got \[1, 1, 3, 1\]"),
        (torch.full((1, 2, 3, 1), 1), r"expected pages from 2 to 8, or -1 for none, got 1; column"),
        (torch.full((1, 2, 3, 1), 9), r"expected pages from 2 to 8, or -1 for none, got 9; column"),
        (torch.full((1, 2, 3, 2), 5), r"expected each page once in a row, got page 5 twice"),
    ],
)
def test_what_is_no_choice_is_refused(answer: Any, message: str) -> None:
    selector = Checked(lambda *_: answer)
    with pytest.raises(UnsupportedError, match=rf"^selector: {message}"):
        selector(torch.rand(1, 2, 3, 7), CANDIDATES)


def test_a_function_of_a_user_is_put_in_order() -> None:
    selector = Checked(lambda *_: torch.tensor([8, -1, 2, -1]).expand(1, 2, 3, 4))
    found = selector(torch.rand(1, 2, 3, 7), CANDIDATES)
    assert found.dtype == torch.int32
    assert torch.equal(found, torch.tensor([2, 8, -1, -1]).int().expand(1, 2, 3, 4))


@pytest.mark.parametrize("select", [TopK(3), Fraction(0.5), RandomPages(3, 0)], ids=str)
def test_a_choice_of_a_sequence_keeps_its_promise(select: Selector) -> None:
    """int32, ascending, -1 last, among the candidates, none that hides from the whole page."""
    dense = Case(tokens=93, chunk=16, kv_block=24, batch=2, documents=((0, 5, 40), (0, 33)))
    case = SparseCase(dense, Sparse(page=4, budget=12, recent=6, sinks=4), select)
    sequence = Sequence(case)
    sequence.forward(make_inputs(dense))
    ids = dense.document_ids
    assert ids is not None
    for start, choice in sequence.choices.items():
        assert choice.dtype == torch.int32
        for (row, _, m), pages in ((i, choice[i].tolist()) for i in _rows(choice)):
            some = [page for page in pages if page >= 0]
            assert pages == sorted(set(some)) + [-1] * (len(pages) - len(some))
            assert all(page in case.sparse.candidates(start) for page in some)
            mine = int(ids[row, start + 4 * m])
            assert all(mine in ids[row, 4 * page : 4 * page + 4].tolist() for page in some)
    assert (sequence.choice() >= 0).sum() > 100


def _rows(choice: Tensor) -> list[tuple[int, int, int]]:
    batch, heads, pages, _ = choice.shape
    return [(b, h, m) for b in range(batch) for h in range(heads) for m in range(pages)]


@pytest.mark.parametrize("documents", [None, MIXED], ids=["one", "documents"])
def test_a_chunk_chooses_by_its_votes(documents: tuple[tuple[int, ...], ...] | None) -> None:
    dense = Case(tokens=93, chunk=16, kv_block=24, batch=2, documents=documents)
    case = SparseCase(dense, Sparse(page=4, budget=12, recent=6, sinks=8))
    inputs, sequence = make_inputs(dense), Sequence(case)
    sequence.forward(inputs)
    for start in (48, 64, 80):
        _, span = case.call(start)
        pages = case.sparse.candidates(start)
        starts = None
        if documents is not None:
            own = [[max(s for s in row if s <= i) for i in range(93)[span]] for row in documents]
            starts = torch.tensor(own)
        q, keys = inputs.q[:, :, span], inputs.k[:, :, : 4 * pages.stop]
        votes = dumb_votes(q, keys, case.sparse, dense.scale, starts, pages.start)
        first = None if starts is None else starts[:, ::4] // 4
        wanted = TopK(3)(votes, Candidates(pages, first))
        assert torch.equal(sequence.choices[start], wanted)


def test_the_page_that_answers_a_query_is_chosen() -> None:
    """A key that one head's queries look for, 150 pages back, among noise."""
    dense = Case(tokens=704, chunk=64, kv_block=1000, heads=4, kv_heads=2, head_dim=16)
    case = SparseCase(dense, Sparse(page=4, budget=4, recent=8, sinks=4))
    inputs = make_inputs(dense)
    inputs.k[0, 1, 39] = 100 * inputs.q[0, 2, 650]
    inputs.q[0, 2:, 648:652] = inputs.q[0, 2, 650]
    sequence = Sequence(case)
    sequence.forward(inputs)
    assert sequence.choice()[0, 1, 162].tolist() == [9]
    assert sequence.choice()[0, 0, 162].tolist() != [9]


def test_choosing_reads_only_pages_that_are_written() -> None:
    dense = Case(tokens=32, chunk=16, kv_block=16)
    case = SparseCase(dense, Sparse(page=4, budget=4, recent=0, sinks=0))
    inputs, sequence = make_inputs(dense), Sequence(case)
    first, span = case.call(0)
    assert choose(first, inputs.q[:, :, span], sequence.pages).shape == (1, 2, 4, 0)
    sequence.pages.write(0, inputs.k[:, :, span], inputs.v[:, :, span])
    second, span = case.call(16)
    assert (choose(second, inputs.q[:, :, span], sequence.pages) >= 0).all()
