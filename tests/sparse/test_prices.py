"""What sparse attention costs beside dense calls."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from farspan.ask import Request
from farspan.planner.prices import (
    FUSED_VOTES,
    RANKING_PASSES,
    WIDE_PASSES,
    SparsePrices,
    rates_of,
)
from farspan.program.builder import build_program
from farspan.program.program import Program
from farspan.spec import INDEX, MEAN, Curve, Rates, RunSpec, Schedule, Sparse
from tests.program.cases import model_of

SPARSE = Sparse(page=8, budget=32, recent=16, sinks=8)
FLAT = Curve(((1.0, 1e9),))
RATES = Rates(FLAT, FLAT, FLAT, peak=1e9)


def program(batch: int = 1) -> Program:
    schedule = Schedule(chunk=64, groups=1, sparse=SPARSE)
    return build_program(model_of(2), RunSpec(batch, 512), schedule)


def prices(batch: int = 1, rate: float = 1e30) -> SparsePrices:
    return SparsePrices(program(batch), RATES, lambda size: size / rate)


def test_a_vote_is_a_score_of_every_query_head_and_candidate() -> None:
    spec = model_of(2).layers[0]
    candidates = len(SPARSE.candidates(7 * 64)) * SPARSE.page // SPARSE.mean_tokens
    scores = 64 * spec.query_heads * candidates
    assert prices().votes(spec, 7) == pytest.approx(2 * scores * spec.head_dim / 1e9)
    assert prices(batch=3).votes(spec, 7) == pytest.approx(3 * prices().votes(spec, 7))
    written = prices(rate=1.0).votes(spec, 7) - prices().votes(spec, 7)
    assert written == pytest.approx(WIDE_PASSES * scores * 4)


def test_of_many_pages_superpages_cost_a_walk_and_their_pages_two() -> None:
    few = replace(SPARSE, budget=8)  # one page: 16 are compared
    schedule = Schedule(chunk=64, groups=1, sparse=few)
    spec = model_of(2).layers[0]

    def seconds(rate: float) -> float:
        own = build_program(model_of(2), RunSpec(1, 512), schedule)
        return SparsePrices(own, RATES, lambda size: size / rate).votes(spec, 7)

    pages = len(few.candidates(7 * 64))
    assert pages > 32
    means, ranking = 16 * 8 // 2, pages * 8 // 4
    scores = 64 * spec.query_heads * (means + ranking / 2)
    assert seconds(1e30) == pytest.approx(2 * scores * spec.head_dim / 1e9)
    made = seconds(1.0) - seconds(1e30) - WIDE_PASSES * scores * 4
    assert made == pytest.approx(RANKING_PASSES * ranking * spec.kv_heads * spec.head_dim * 4)


def in_words(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 600 else f"{seconds / 60:.0f} min"


def test_what_choosing_takes_of_long_contexts_is_on_the_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Request("Qwen2.5-7B", 2**17, "h200", sparse=Sparse()).question()
    spec, memory = asked.model.layers[0], asked.machine.memory
    assert len({*asked.model.layers}) == 1

    def seconds(tokens: int, sparse: Sparse) -> float:
        chunks = [(start, start + 8192) for start in range(0, tokens, 8192)]
        stub: Any = SimpleNamespace(
            chunks=chunks,
            schedule=Schedule(chunk=8192, sparse=sparse),
            run=RunSpec(1, tokens),
            model=asked.model,
        )
        own = SparsePrices(stub, rates_of(asked), lambda size: size / memory, fused=True)
        some = [i for i, (start, _) in enumerate(chunks) if sparse.candidates(start)]
        return len(asked.model.layers) * sum(own.votes(spec, i) for i in some)

    def row(name: str, sparse: Sparse) -> str:
        cells = [in_words(seconds(2**bits, sparse)) for bits in (17, 18, 20, 22)]
        return f"| {' | '.join([name, *cells])} |"

    rows = [row("`submeans`, superpages ranked first", Sparse())]
    mean = row("`selector=mean`", Sparse(selector=MEAN))
    index = row("`selector=index`", Sparse(selector=INDEX))
    monkeypatch.setattr(Sparse, "refined", lambda *_: 0)
    rows += [row("`submeans`, were all pages compared", Sparse()), index, mean]
    page = (Path(__file__).parents[2] / "docs" / "evidence" / "sparse.md").read_text("utf-8")
    assert "\n".join(rows) in page


@pytest.mark.parametrize("backward", [False, True])
def test_chosen_pages_are_attended_and_moved(backward: bool) -> None:
    spec = model_of(2).layers[0]
    pairs = 64 * 32
    attended = RATES.attention(pairs, spec, backward=backward)
    assert prices().chosen(spec, 7, backward=backward) == pytest.approx(attended)
    moved = prices(rate=1.0).chosen(spec, 7, backward=backward) - attended
    # Eight pages of queries may choose four others each, of fewer candidates than that.
    rows = min(8 * 4, len(SPARSE.candidates(7 * 64))) * 8
    width = 2 * 4 + backward * 3 * 4
    assert moved == pytest.approx(rows * spec.kv_elements() * width)


def test_a_machine_that_knows_them_prices_pages_by_their_own_rates() -> None:
    known = replace(
        RATES,
        chosen_forward=Curve(((1.0, 2e9),)),
        chosen_backward=Curve(((1.0, 4e9),)),
        votes=Curve(((1.0, 8e9),)),
    )
    own, spec = SparsePrices(program(), known, lambda size: size), model_of(2).layers[0]
    without = SparsePrices(program(), RATES, lambda size: size)
    for backward, times in ((False, 2), (True, 4)):
        pairs = RATES.attention(64 * 32, spec, backward=backward)
        saved = pairs - pairs / times
        assert without.chosen(spec, 7, backward=backward) - own.chosen(
            spec, 7, backward=backward
        ) == pytest.approx(saved)
    # Where nobody measured a GPU's kernel, by products; nothing of the scores is written out.
    kernel = replace(without, fused=True)
    assert kernel.votes(spec, 7) == pytest.approx(FUSED_VOTES * prices().votes(spec, 7))
    assert own.votes(spec, 7) == pytest.approx(prices().votes(spec, 7) / 8)


def test_an_index_votes_in_few_dims() -> None:
    sparse = replace(SPARSE, selector="index", index_dim=4)
    schedule = Schedule(chunk=64, groups=1, sparse=sparse)
    of = build_program(model_of(2), RunSpec(1, 512), schedule)
    spec = of.model.layers[0]
    keys = len(sparse.candidates(7 * 64)) * sparse.page
    flop = 2.0 * 64 * spec.query_heads * keys * 4
    fused = SparsePrices(of, RATES, lambda _: 0.0, fused=True)
    assert fused.votes(spec, 7) == pytest.approx(FUSED_VOTES * flop / 1e9)
    # Eight pages of queries read all keys twice: where reading is slow, that is the price.
    slow = SparsePrices(of, RATES, lambda size: size, fused=True)
    width = of.model.element_bytes
    assert slow.votes(spec, 7) == pytest.approx(2 * 8 * spec.kv_heads * keys * 4 * width)
    known = replace(RATES, votes=Curve(((1.0, 8e9),)))
    assert SparsePrices(of, known, lambda _: 0.0).votes(spec, 7) == pytest.approx(flop / 8e9)
