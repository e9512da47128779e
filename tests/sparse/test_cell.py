"""Page-sparse attention is, given its choice, what the reference says: output and gradients."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farspan.attention.far import Mass
from farspan.sparse.attend import FarCall, sampled, seen_mask, seen_mass
from farspan.sparse.gathered import FlashPages, Gathered, PlainPages
from farspan.sparse.pages import Checked, Fraction, Pages, RandomPages, Selector, TopK
from farspan.spec import Sparse
from tests.attention import cases as dense_cases
from tests.attention.cases import Case, Inputs, make_inputs
from tests.grids import crossed, examples
from tests.numerics import EXACT, assert_exact, relative_error
from tests.sparse.cases import MIXED, SPARSE, Sequence, SparseCase, cases, document_ids, expected
from tests.unread import Unread


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Gradients of sinks may be zero in exact arithmetic; then they are as small as rounding."""
    assert found.keys() == wanted.keys()
    for name in wanted:
        error = relative_error(found[name], wanted[name], least=1e-2)
        assert error <= EXACT, f"{name}: relative L2 error {error:.3g}"


def compare(case: SparseCase) -> Sequence:
    sequence, inputs = Sequence(case), make_inputs(case.dense)
    found = sequence.step(inputs)
    assert_same(found, expected(case, inputs, sequence.choice()))
    return sequence


@pytest.mark.parametrize("case", cases(), ids=str)
def test_equals_the_reference_in_float64(case: SparseCase) -> None:
    compare(case)


@pytest.mark.parametrize("case", [cases()[0], cases()[16]], ids=str)
def test_in_parts_and_without_vendor_kernel_equals_the_reference(case: SparseCase) -> None:
    compare(replace(case, kernel=Gathered(PlainPages())))
    for part_bytes in (1, 3_000):
        compare(replace(case, kernel=Gathered(FlashPages(), part_bytes)))
        compare(replace(case, kernel=Gathered(PlainPages(), part_bytes)))


def every_third(votes: Tensor, pages: range) -> Tensor:
    """A user's selector: pages by position, in any order, fewer for some queries."""
    choice = torch.tensor([*pages[::3]][::-1]).expand(*votes.shape[:3], -1).clone()
    choice[:, :, ::2, 0] = -1
    choice[:, :, 1::4] = -1
    return choice


SELECTORS: list[Selector] = [
    TopK(2),
    TopK(1000),
    Fraction(0.6),
    Fraction(0.0),
    Fraction(1.0),
    RandomPages(3, seed=5),
    Checked(every_third),
]


def label(value: object) -> str:
    """The same in every process: without addresses."""
    return str(value).split(" at 0x")[0]


@pytest.mark.parametrize(("select", "documents"), crossed(SELECTORS, [None, MIXED]), ids=label)
def test_equals_the_reference_with_every_selector(
    select: Selector, documents: tuple[tuple[int, ...], ...] | None
) -> None:
    dense = Case(tokens=93, chunk=16, kv_block=24, batch=2, sinks=True, documents=documents)
    sequence = compare(SparseCase(dense, select=select))
    some = sequence.choice() >= 0
    assert bool(some.any()) == (select != Fraction(1.0)), "the case shows nothing"


@given(data=st.data())
@settings(max_examples=examples(40))
def test_equals_the_reference_for_any_geometry(data: st.DataObject) -> None:
    page = data.draw(st.integers(1, 6))
    tokens, batch = data.draw(st.integers(1, 48)), data.draw(st.integers(1, 2))
    starts = st.sets(st.integers(0, tokens - 1)).map(lambda s: tuple(sorted(s | {0})))
    dense = Case(
        tokens=tokens,
        batch=batch,
        chunk=page * data.draw(st.integers(1, 6)),
        kv_block=data.draw(st.integers(1, tokens + 2)),
        sinks=data.draw(st.booleans()),
        softcap=data.draw(st.sampled_from([None, 2.0])),
        documents=data.draw(st.none() | st.tuples(*[starts] * batch)),
        head_dim=4,
        value_dim=4,
    )
    budget, recent = data.draw(st.integers(0, 5)), data.draw(st.integers(0, tokens))
    sparse = Sparse(page, budget * page, recent, data.draw(st.integers(0, 3)))
    compare(SparseCase(dense, sparse))


DENSE = [
    Sparse(page=4, budget=92, recent=0, sinks=0),
    Sparse(page=4, budget=92, recent=8, sinks=8),
    Sparse(page=4, budget=0, recent=93, sinks=0),
    Sparse(page=4, budget=0, recent=0, sinks=96),
]


@pytest.mark.parametrize(
    ("sparse", "dense"), crossed(DENSE, [case.dense for case in cases()[:19]]), ids=str
)
def test_a_budget_for_the_whole_prefix_gives_dense_attention(sparse: Sparse, dense: Case) -> None:
    inputs = make_inputs(dense)
    found = Sequence(SparseCase(dense, sparse)).step(inputs)
    chunked = dense_cases.run_chunked(dense, inputs)
    assert_same(found, chunked)
    assert_same(found, dense_cases.expected(dense, inputs))
    if sparse.budget == 0:
        assert all(torch.equal(found[name], chunked[name]) for name in chunked)


def test_a_second_step_knows_nothing_of_the_first() -> None:
    case = cases()[16]
    first, second = make_inputs(case.dense), make_inputs(case.dense)
    sequence = Sequence(case)
    sequence.step(first)
    found = sequence.step(second)
    fresh = Sequence(case)
    wanted = fresh.step(second)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert torch.equal(sequence.choice(), fresh.choice())


@pytest.mark.parametrize("case", [cases()[1], cases()[11], cases()[16]], ids=str)
def test_is_deterministic_and_reads_no_memory_it_did_not_write(case: SparseCase) -> None:
    """Under this switch PyTorch fills what `empty` returns with NaN."""
    inputs = make_inputs(case.dense)
    before = [x.clone() for x in (inputs.q, inputs.k, inputs.v, inputs.dout)]
    wanted = Sequence(case).step(inputs)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        found = Sequence(case).step(inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    after = (inputs.q, inputs.k, inputs.v, inputs.dout)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_less_accurate_than_the_reference(dtype: torch.dtype) -> None:
    """The limit and its floor are those of dense attention (tests/attention/test_cell.py)."""
    shape = Case(tokens=700, chunk=256, kv_block=200, batch=2, documents=((0, 3, 500), (0,)))
    case = SparseCase(replace(shape, dtype=dtype), Sparse(32, 96, 32, 1))
    inputs, sequence = make_inputs(case.dense), Sequence(case)
    ours = sequence.step(inputs)
    wide = replace(case, dense=replace(case.dense, dtype=torch.float64))
    exact = expected(wide, inputs.to(torch.float64), sequence.choice())
    plain = expected(case, inputs, sequence.choice())
    keys = inputs.k.repeat_interleave(2, 1)
    largest = float((inputs.q.double() @ keys.double().mT).abs().max()) * case.dense.scale
    floor = torch.finfo(torch.float32).eps / 2 * largest
    for name, tensor in exact.items():
        limit = 2 * relative_error(plain[name], tensor) + floor
        error = relative_error(ours[name], tensor)
        assert error <= limit, f"{name}: {error:.3g} > {limit:.3g}"


def test_expanded_gradients_and_transposed_heads_are_accepted() -> None:
    """Autograd hands over stride 0 for `out.sum()`; a model may hand over any strides."""
    case = cases()[0]
    inputs = make_inputs(case.dense)
    ones = torch.ones((), dtype=torch.float64).expand_as(inputs.dout)
    q, k, v = (x.mT.contiguous().mT for x in (inputs.q, inputs.k, inputs.v))
    sequence, strange = Sequence(case), Inputs(q, k, v, ones)
    assert_same(sequence.step(strange), expected(case, strange, sequence.choice()))


@dataclass(frozen=True)
class Watched(Gathered):
    """Notes how many pages a page of queries is said to choose."""

    widths: list[int] = field(default_factory=list)

    def forward(
        self,
        call: FarCall,
        q: Tensor,
        choice: Tensor,
        pages: Pages,
        attended: tuple[Tensor, Tensor],
    ) -> None:
        self.widths.append(choice.shape[3])
        Gathered.forward(self, call, q, choice, pages, attended)


def test_a_choice_wider_than_there_are_candidates_needs_no_masks_for_it() -> None:
    """As the engine keeps it: as wide in every chunk as in the last."""
    kernel = Watched(FlashPages())
    case = replace(cases()[0], kernel=kernel)
    inputs, sequence = make_inputs(case.dense), Sequence(case)
    wanted = sequence.step(inputs)
    widths, whole = kernel.widths.copy(), sequence.choice()
    assert 0 < widths[0] < widths[-1] == whole.shape[3]
    found = sequence.step(inputs, whole)
    assert kernel.widths == widths * 2
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


PLAIN = Case(tokens=93, chunk=16, kv_block=24, batch=2)
WATCHED = [
    PLAIN,
    replace(PLAIN, softcap=1.5, documents=MIXED, sinks=True),
]


def masses(case: SparseCase, samples: int) -> list[Mass]:
    sequence, inputs = Sequence(case), make_inputs(case.dense)
    _, attended = sequence.forward(inputs)
    found = []
    for start in case.starts:
        call, span = case.call(start)
        q, k = inputs.q[:, :, span], inputs.k[:, :, span]
        spans = [(low, min(low + 24, start)) for low in range(0, start, 24)]
        tokens = sampled(q.shape[2], samples)
        lse = attended[start][1]
        with Unread():
            mass = seen_mass(call, q, k, lse, sequence.pages, tokens, spans, inputs.sinks)
        found.append(Mass(*mass.tolist()))
    return found


@pytest.mark.parametrize("dense", WATCHED, ids=str)
def test_it_is_the_dense_weight_of_what_is_seen(dense: Case) -> None:
    case = SparseCase(dense)
    torch.manual_seed(1)
    found = masses(case, 4)
    torch.manual_seed(1)
    inputs, sequence = make_inputs(dense), Sequence(case)
    sequence.forward(inputs)
    ids = document_ids(dense)
    every = replace(SPARSE, recent=dense.tokens)
    scores = dense.scale * inputs.q @ inputs.k.repeat_interleave(2, 1).mT
    if dense.softcap is not None:
        scores = dense.softcap * torch.tanh(scores / dense.softcap)
    visible = seen_mask(sequence.choice(), every, 16, ids).repeat_interleave(2, 1)
    mine = seen_mask(sequence.choice(), SPARSE, 16, ids).repeat_interleave(2, 1)
    weights = scores.masked_fill(~visible, -torch.inf).exp()
    sink = 0.0 if inputs.sinks is None else inputs.sinks.exp()[:, None]
    mass = ((weights * mine).sum(3) + sink) / (weights.sum(3) + sink)
    assert mass.min() < 0.9
    for start, got in zip(case.starts, found, strict=True):
        chunk = mass[:, :, start : start + 16]
        few = chunk[:, :, torch.tensor(sampled(chunk.shape[2], 4))]
        wanted = torch.stack([few.mean(), few.min()])
        assert_exact(torch.tensor([got.mean, got.minimum], dtype=torch.float64), wanted)


@pytest.mark.parametrize(("tokens", "samples"), [(16, 4), (13, 4), (3, 8), (1, 1), (9, 0)])
def test_samples_are_tokens_of_the_chunk_and_its_last(tokens: int, samples: int) -> None:
    places = sampled(tokens, samples)
    assert places[-1] == tokens - 1
    assert min(places) >= 0
    assert min(samples, tokens) <= len(places) <= max(1, 2 * samples)
