"""Sparse steps: exact for the function that the choice makes, dense where nothing is hidden."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from farspan.engine.reference import gradients_of, reference_loss
from farspan.engine.step import Step
from farspan.program.program import Forward
from farspan.sparse.pages import Candidates, Fraction, RandomPages, Selector, TopK
from farspan.sparse.reference import SparseReference
from farspan.spec import SELECTORS, Schedule, Sparse, Tier, UnsupportedError
from tests.engine.checks import (
    Data,
    Outcome,
    assert_close,
    assert_same_bits,
    draw,
    errors,
    gradients,
    run_oracle,
    run_step,
)
from tests.engine.test_exact import any_schedule
from tests.engine.test_values import expected, loss_of
from tests.grids import examples, part_of
from tests.numerics import EXACT, relative_error
from tests.zoo import FAMILIES, shared_model

pytestmark = pytest.mark.slow

SPARSE = Sparse(page=4, budget=8, recent=6, sinks=4)
SCHEDULES = {
    "device": Schedule(chunk=16, groups=2, kv_block=20, sparse=SPARSE),
    "host": Schedule(chunk=16, groups=(1, 3), kv=Tier.HOST, kv_block=12, sparse=SPARSE),
    "kept": Schedule(chunk=8, groups=3, kv_kept=True, layer_checkpoint=True, sparse=SPARSE),
    "given": Schedule(
        chunk=12, groups=2, attention_save_fraction=0.5, attention_open=True, sparse=SPARSE
    ),
    "graphs": Schedule(chunk=16, groups=2, activation_save_fraction=0.6, sparse=SPARSE),
}
DATA = draw(101, batch=2, documents=3)

# Any sizes that make sense, of which most hide something from most queries.
sparsities = st.builds(
    Sparse,
    page=st.just(4),
    budget=st.sampled_from([0, 4, 8, 1000]),
    recent=st.sampled_from([0, 1, 7, 30]),
    sinks=st.integers(0, 12),
    query_page=st.sampled_from([1, 2, 4, 16]),
    selector=st.sampled_from(SELECTORS),
)
schedules = any_schedule(
    chunk=st.sampled_from([4, 8, 20, 200]),
    kv_block=st.sampled_from([5, 16, 1000]),
    sparse=sparsities,
)
shapes = st.builds(
    draw,
    st.sampled_from([1, 4, 37, 61, 83]),
    batch=st.integers(1, 2),
    documents=st.sampled_from([0, 0, 3]),
    seed=st.integers(0, 3),
)


def run_sparse_oracle(
    model: nn.Module, schedule: Schedule, data: Data, select: Selector | None = None
) -> Outcome:
    """Plain autograd of the whole sequence with everything hidden that was not chosen."""
    sparse = schedule.sparse
    assert sparse is not None
    select = select or TopK(sparse.budget // sparse.page)
    loss = reference_loss(model, *data, attend=SparseReference(sparse, schedule.chunk, select))
    return Outcome(loss.detach(), gradients_of(model, loss))


@settings(max_examples=examples(40))
@given(schedules, shapes)
@example(SCHEDULES["graphs"], draw(83, batch=2))
@example(SCHEDULES["host"], draw(83, batch=2, documents=3))
def test_any_schedule_is_exact_for_its_choice(schedule: Schedule, data: Data) -> None:
    model = shared_model("qwen2")
    assert_close(run_step(model, schedule, data), run_sparse_oracle(model, schedule, data))


@pytest.mark.parametrize("name", part_of(SCHEDULES, "host", "given", "graphs"))
def test_second_steps_and_evaluations(name: str) -> None:
    model, schedule = shared_model("qwen2"), SCHEDULES[name]
    step = Step(model, schedule, poison=True)
    for seed, tokens in enumerate((101, 40)):
        data = draw(tokens, batch=2, documents=3, seed=seed)
        expected = run_sparse_oracle(model, schedule, data)
        assert_close(run_step(model, step, data), expected)
        assert relative_error(step.evaluate(*data), expected.loss) <= EXACT


@pytest.mark.parametrize("name", part_of(SCHEDULES, "kept", "graphs"))
def test_losses_of_log_probabilities(name: str) -> None:
    """What is not linear in them, twice; pages are chosen once a forward."""
    model, schedule = shared_model("qwen2"), SCHEDULES[name]
    attend = SparseReference(SPARSE, schedule.chunk, TopK(SPARSE.budget // SPARSE.page))
    wanted, _ = expected(model, DATA, attend=attend)
    wanted_gradients = gradients_of(model, loss_of(wanted))
    step = Step(model, schedule, poison=True)
    for _ in range(2):
        model.zero_grad()
        found = step.logprobs(*DATA)
        assert relative_error(found, wanted) < EXACT
        loss_of(found).backward()
        assert max(errors(gradients(model), wanted_gradients).values()) < EXACT


@pytest.mark.parametrize("name", part_of(SCHEDULES, "host", "graphs"))
def test_a_budget_for_everything_is_dense(name: str) -> None:
    model = shared_model("qwen2")
    schedule = replace(SCHEDULES[name], sparse=replace(SPARSE, budget=104))
    assert_close(run_step(model, schedule, DATA), run_oracle(model, DATA))


@pytest.mark.parametrize("name", part_of(FAMILIES, *list(FAMILIES)[::8]))
@pytest.mark.usefixtures("float64_throughout")
def test_families(name: str) -> None:
    """Windows stay as they are, sinks and caps hold."""
    model, data = shared_model(name), draw(61)
    schedule = Schedule(chunk=16, groups=2, attention_save_fraction=0.3, sparse=SPARSE)
    expected = run_sparse_oracle(model, schedule, data)
    assert_close(run_step(model, schedule, data), expected)


class TestSelectors:
    """What chooses in place of the votes."""

    @pytest.mark.parametrize(
        ("name", "select"),
        [
            ("host", RandomPages(2, seed=3)),
            ("graphs", Fraction(0.7)),
            ("device", Fraction(1.0)),
        ],
    )
    def test_own(self, name: str, select: Selector) -> None:
        model = shared_model("qwen2")
        schedule = replace(SCHEDULES[name], sparse=replace(SPARSE, budget=80))
        step = Step(model, schedule, selector=select, poison=True)
        assert_close(run_step(model, step, DATA), run_sparse_oracle(model, schedule, DATA, select))

    def test_a_user_s(self) -> None:
        """The first page and the last, in no order."""

        def ends(votes: Tensor, pages: range) -> Tensor:
            chosen = torch.tensor([pages[-1], pages[0] if len(pages) > 1 else -1])
            return chosen.expand(*votes.shape[:3], 2)

        def select(votes: Tensor, candidates: Candidates) -> Tensor:
            return ends(votes, candidates.pages).int()

        model, schedule = shared_model("qwen2"), SCHEDULES["host"]
        step = Step(model, schedule, selector=ends, poison=True)
        assert_close(run_step(model, step, DATA), run_sparse_oracle(model, schedule, DATA, select))

    @pytest.mark.parametrize("name", part_of(SCHEDULES, "given", "graphs"))
    def test_is_asked_once_a_cell(self, name: str) -> None:
        """Rebuild and backward get the same choice: one that changes its mind is not heard."""
        asked: list[range] = []

        def fickle(votes: Tensor, pages: range) -> Tensor:
            asked.append(pages)
            return torch.full((*votes.shape[:3], 1), pages[len(asked) % len(pages)])

        model, schedule = shared_model("qwen2"), SCHEDULES[name]
        step = Step(model, schedule, selector=fickle)
        step(*DATA)
        cells = [
            (i.layer, i.chunk)
            for i in step.program(2, 101).instructions
            if isinstance(i, Forward) and i.choice is not None
        ]
        assert len(asked) == len(set(cells)) > 0
        if name != "graphs":
            assert len(cells) > len(set(cells))

    def test_too_many_pages(self) -> None:
        def greedy(votes: Tensor, pages: range) -> Tensor:
            return torch.tensor(pages).expand(*votes.shape[:3], len(pages))

        step = Step(shared_model("qwen2"), SCHEDULES["device"], selector=greedy)
        with pytest.raises(
            UnsupportedError, match=r"selector: chose 5 pages .* more than the budget of 2"
        ):
            step(*DATA)

    def test_without_sparse_attention(self) -> None:
        with pytest.raises(UnsupportedError, match=r"selector: dense attention selects no pages"):
            Step(shared_model("qwen2"), Schedule(), selector=TopK(2))


class TestSchedule:
    def test_chunk_is_no_multiple_of_the_page(self) -> None:
        with pytest.raises(
            UnsupportedError, match=r"chunk: .*multiple of page \(4 tokens\).*make it 12"
        ):
            Schedule(chunk=10, sparse=SPARSE)


class TestSeen:
    """The quality signal: attention mass of one cell a step."""

    @pytest.mark.parametrize("kv", Tier)
    def test_each_layer_in_turn(self, kv: Tier) -> None:
        model = shared_model("gpt_oss")  # layers 1 and 3 have no window
        step = Step(model, Schedule(chunk=16, kv=kv, kv_block=12, groups=2, sparse=SPARSE))
        seen = []
        for _ in range(3):
            step(*DATA)
            assert step.seen is not None
            seen.append(step.seen)
        assert [s.layer for s in seen] == [1, 3, 1]
        assert {s.chunk for s in seen} == {6}
        assert all(0 < s.mass.minimum <= s.mass.mean < 1 for s in seen)
        assert seen[0] == seen[2]

    @pytest.mark.parametrize("name", part_of(SCHEDULES, "kept"))
    def test_changes_no_bit(self, name: str) -> None:
        """Steps that watch different cells."""
        model, schedule = shared_model("qwen2"), SCHEDULES[name]
        step = Step(model, schedule, poison=True)
        first = run_step(model, step, DATA)
        assert_same_bits(run_step(model, step, DATA), first)

    def test_is_everything_when_nothing_is_hidden(self) -> None:
        schedule = replace(SCHEDULES["host"], sparse=replace(SPARSE, budget=104))
        step = Step(shared_model("qwen2"), schedule)
        step(*DATA)
        assert step.seen is not None
        assert abs(step.seen.mass.minimum - 1) <= EXACT
