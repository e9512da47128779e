"""The Triton kernels against the formula, on a CPU in Triton's interpreter and on a GPU.

The interpreter knows fp32 and fp16, not bf16. Sizes are small: a step of a tile takes 4 ms.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import MappingProxyType
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from farspan.attention.backends import BackwardQueries
from farspan.engine.step import Step
from farspan.sparse.attend import FarCall
from farspan.sparse.kernel_calls import (
    PagedCall,
    PageGradients,
    PageTable,
    TritonFar,
    attend_pages,
    attend_pages_backward,
    fused_votes,
    supports,
)
from farspan.sparse.pages import vote
from farspan.sparse.tiles import PageTile
from farspan.spec import MEAN, SUPERPAGE, Schedule, Sparse, Tier, UnsupportedError
from tests.attention.cases import Case, Inputs, Results, make_inputs
from tests.engine.checks import Outcome, draw, run_step
from tests.grids import exhaustive, part_of
from tests.numerics import relative_error
from tests.sparse.cases import MIXED, Sequence, SparseCase, expected
from tests.sparse.triton_cases import (
    SMALL,
    PagedCase,
    expected_paged,
    interpreter,
    make_paged,
    run_paged,
    run_paged_twice,
)
from tests.zoo import make_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton"),
]

HALF = torch.float16
PLAIN = PagedCase()
FULL = replace(PLAIN, first_keys=True, missing=True, tokens=90, queries=41)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[ProcessPoolExecutor]:
    with interpreter() as pool:
        yield pool


def assert_no_less_accurate(
    found: Results,
    exact: Results,
    plain: Results,
    roundings: int = 1,
    summed: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Twice the error of PyTorch in the same dtype, and roundings of the result: those of
    `summed` for the results that it names, `roundings` for the others."""
    found = {name: x.cpu() for name, x in found.items()}
    for name, tensor in exact.items():
        if name == "lse":
            assert torch.equal(found[name].isinf(), tensor.isinf())
            found[name], tensor, plain[name] = (
                x.masked_fill(x == -torch.inf, 0.0) for x in (found[name], tensor, plain[name])
            )
        # Results of the kernels that are fp32 are no excuse for more.
        eps = torch.finfo(plain[name].dtype).eps
        limit = 2 * relative_error(plain[name], tensor) + summed.get(name, roundings) * eps
        error = relative_error(found[name], tensor)
        assert error <= limit, f"{name}: {error:.3g} > {limit:.3g}"


CASES = [
    PLAIN,
    replace(PLAIN, group=3, page=12, tokens=60, queries=24, kv_heads=1),
    replace(PLAIN, tokens=90, queries=41, missing=True, kv_heads=1, head_dim=40),
    replace(PLAIN, page=40, tokens=90, queries=50, chosen=2, kv_heads=1, dtype=HALF),
    replace(PLAIN, first_keys=True, queries=20, dtype=HALF),
    replace(FULL, group=3, kv_heads=1, head_dim=80, slots=True),
    replace(FULL, batch=2, group=1, slots=True, queries=20, dtype=HALF),
    # Query pages smaller than, and larger than, key pages; several to a tile of queries, or uneven.
    replace(
        PLAIN,
        query_page=4,
        kv_heads=1,
        group=3,
        head_dim=256,
        queries=41,
        first_keys=True,
        dtype=HALF,
    ),
    replace(PLAIN, query_page=8, group=1, head_dim=64, missing=True, slots=True, queries=42),
    replace(FULL, query_page=64, page=8, chosen=5, kv_heads=1, head_dim=192, dtype=HALF),
    replace(
        PLAIN, query_page=12, group=7, kv_heads=1, head_dim=128, queries=30, dtype=HALF, slots=True
    ),
    replace(FULL, query_page=16, page=32, head_dim=96, group=8, kv_heads=1, dtype=HALF),
    replace(PLAIN, page=32, tiles=None, chosen=1, tokens=64, queries=32, kv_heads=1),
]


@pytest.mark.parametrize("case", part_of(CASES, CASES[2], *CASES[5::4], CASES[10]), ids=str)
def test_kernels_are_no_less_accurate_than_the_formula(
    case: PagedCase, interpreted: ProcessPoolExecutor
) -> None:
    inputs = make_paged(case)
    exact = expected_paged(case, inputs.to(torch.float64))
    found = interpreted.submit(run_paged, case, inputs).result()
    # dK and dV are summed tile after tile of queries, and independent roundings add in squares;
    # the formula is one product, whose error depends on the processor.
    tiles = 1 if case.tiles is None else case.queries * case.group / case.tiles.dkv.queries
    summed = dict.fromkeys(("k", "v"), max(1, round(tiles**0.5)))
    assert_no_less_accurate(found, exact, expected_paged(case, inputs), summed=summed)


def test_the_same_inputs_give_the_same_bits_and_totals_add_up(
    interpreted: ProcessPoolExecutor,
) -> None:
    case = replace(FULL, kv_heads=1)
    first, second, twice = interpreted.submit(run_paged_twice, case, make_paged(case)).result()
    for name, tensor in first.items():
        assert torch.equal(second[name], tensor), name
        # A double is exact in floating point.
        assert torch.equal(twice[name], 2 * tensor if name in "kv" else tensor), name


@dataclass(frozen=True)
class VoteCase:
    batch: int = 1
    group: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    page: int = 8
    query_page: int = 8
    queries: int = 27
    each: int = 1  # representatives of a page
    documents: bool = False
    dtype: torch.dtype = torch.float32
    largest: bool = False
    ranked: bool = False  # superpages; only the pages of some are compared


PAGES = range(3, 22)


def votes_of(case: VoteCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """By the kernel, by the formula in fp64, and by the plain path where it has such votes."""
    torch.manual_seed(0)
    heads, count = case.group * case.kv_heads, len(PAGES)
    q = 2 * torch.randn(case.batch, case.queries, heads, case.head_dim).to(case.dtype)
    q = q.transpose(1, 2)
    many = torch.randn(case.batch, case.kv_heads, count * case.each, case.head_dim)
    documents = None
    if case.documents:
        # The last of them see no page.
        documents = torch.randint(0, (PAGES.stop + 3) * case.page, (case.batch, case.queries))
        documents = documents.sort(1).values
    call = FarCall(0.3, case.page, documents)
    found = fused_votes(
        q, many, PAGES, call, case.query_page, PageTile(32, 16, 4, 2), largest=case.largest
    )
    grouped = q.double().unflatten(1, (case.kv_heads, -1))
    scores = 0.3 * grouped @ many.to(case.dtype).double().unsqueeze(2).mT
    scores = scores.unflatten(-1, (count, case.each)).amax(-1)
    if documents is not None:
        hidden = documents[:, :, None] // case.page > torch.arange(PAGES.start, PAGES.stop)
        scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
    if case.ranked:
        return ranked_votes(case, (q, many, documents), scores)
    weights = scores.softmax(-1).nan_to_num(0.0)
    weights = weights.amax(2) if case.largest else weights.sum(2)
    weights = pad(weights, (0, 0, 0, -case.queries % case.query_page))
    plain = None
    if case.each == 1 and case.query_page == case.page and not case.largest:
        sparse = Sparse(case.page, 0, query_page=case.query_page, selector=MEAN)
        plain = vote(q, many, sparse, 0.3, documents, PAGES.start)
    weights = weights.unflatten(2, (-1, case.query_page))
    return found, weights.amax(3) if case.largest else weights.sum(3), plain


def ranked_votes(
    case: VoteCase,
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    scores: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Of the kernel and of the formula: largest scores of all pages, and votes for those of the
    superpages that each page of queries compares, the last of which is ragged."""
    (q, many, documents), count = given, len(PAGES)
    call, ragged = FarCall(0.3, case.page, documents), -case.queries % case.query_page
    of = q, many, PAGES, call, case.query_page, PageTile(32, 16, 4, 2)
    largest = fused_votes(*of, largest=True, weighted=False)
    best = pad(scores.amax(2), (0, 0, 0, ragged), value=-torch.inf)
    best = best.unflatten(2, (-1, case.query_page)).amax(3)
    superpages = torch.randint(0, 2, (*largest.shape[:3], 1), dtype=torch.int32)
    found = fused_votes(*of, largest=True, superpages=superpages)
    of_query = superpages.repeat_interleave(case.query_page, 2)[:, :, None, : case.queries]
    mine = torch.arange(count) // SUPERPAGE == of_query
    weights = scores.masked_fill(~mine, -torch.inf).softmax(-1).nan_to_num(0.0).amax(2)
    weights = pad(weights, (0, 0, 0, ragged)).unflatten(2, (-1, case.query_page)).amax(3)
    columns = superpages.long() * SUPERPAGE + torch.arange(SUPERPAGE)
    wanted = pad(weights, (0, SUPERPAGE)).gather(3, columns)
    assert torch.equal(largest == -torch.inf, best == -torch.inf)
    largest, best = (x.masked_fill(x == -torch.inf, 0.0) for x in (largest, best))
    return torch.cat([largest, found], 3), torch.cat([best, wanted], 3), None


@pytest.mark.parametrize(
    "case",
    [
        VoteCase(batch=2, documents=True),
        exhaustive(VoteCase(each=2, documents=True, ranked=True)),
        VoteCase(
            query_page=4, group=7, kv_heads=1, each=4, documents=True, dtype=HALF, largest=True
        ),
        exhaustive(VoteCase(head_dim=80, group=1, each=2, documents=True, ranked=True, dtype=HALF)),
        exhaustive(VoteCase(query_page=16, head_dim=192, dtype=HALF)),
        # An index: one query for a group, a key of few dims for each token of a page.
        exhaustive(VoteCase(group=1, head_dim=8, each=8, documents=True, largest=True)),
    ],
    ids=str,
)
def test_fused_votes_are_those_of_the_formula(
    case: VoteCase, interpreted: ProcessPoolExecutor
) -> None:
    found, exact, plain = interpreted.submit(votes_of, case).result()
    # Sums are fp32; of fp16, products of two are exact there.
    assert relative_error(found, exact) <= 8 * torch.finfo(torch.float32).eps
    if plain is not None:
        assert relative_error(plain, exact) <= 8 * torch.finfo(torch.float32).eps


def spread(x: torch.Tensor) -> torch.Tensor:
    """The same vectors so far apart that the last begin beyond 2**31 elements. Memory between them
    is never touched, hence never given."""
    apart = 2**31 // (len(x) - x.shape[3])
    storage = torch.UntypedStorage(len(x) * apart * x.itemsize)
    far = x.new_empty(0).set_(storage, 0, x.shape, (apart, *x.stride()[1:]))
    return far.copy_(x)


def run_spread(case: PagedCase) -> list[tuple[torch.Tensor, ...]]:
    """All results from tensors that are dense and from tensors that are spread."""
    inputs = make_paged(case)
    inputs.choice[0, 0, 0, -1] = case.tokens // case.page - 1
    table = PageTable(inputs.choice, case.page, case.tokens, case.tokens)
    call = PagedCall(table, case.scale, None, SMALL)
    results: list[tuple[torch.Tensor, ...]] = []
    for place in (torch.Tensor.clone, spread):
        k, v = place(inputs.k), place(inputs.v)
        totals = PageGradients(*(place(torch.zeros_like(x, dtype=torch.float32)) for x in (k, v)))
        attended = attend_pages(call, inputs.q, k, v)
        queries = BackwardQueries(inputs.dout, inputs.q, *attended)
        dq = attend_pages_backward(call, queries, k, v, totals)
        results.append((*attended, dq, totals.dk.clone(), totals.dv.clone()))
    return results


def test_tensors_of_more_elements_than_an_int32_counts(interpreted: ProcessPoolExecutor) -> None:
    case = replace(PLAIN, queries=16, tokens=64, kv_heads=1, group=1, dtype=HALF)
    dense, far = interpreted.submit(run_spread, case).result()
    for one, other in zip(dense, far, strict=True):
        assert torch.equal(one, other)


def steps(case: SparseCase, inputs: Inputs, count: int) -> tuple[list[Results], torch.Tensor]:
    sequence = Sequence(case)
    return [sequence.step(inputs) for _ in range(count)], sequence.choice()


@pytest.mark.exhaustive
def test_sparse_attention_of_a_sequence(interpreted: ProcessPoolExecutor) -> None:
    """Through chunks, with documents, sinks and a second step, as the engine runs it."""
    dense = Case(tokens=93, chunk=32, kv_block=24, batch=2, documents=MIXED, sinks=True)
    sparse = Sparse(page=16, budget=16, recent=16, sinks=0)
    dense = replace(dense, dtype=torch.float32)
    case = SparseCase(dense, sparse, kernel=TritonFar(SMALL), most_units=1)
    inputs = make_inputs(case.dense)
    found, choice = interpreted.submit(steps, case, inputs, 2).result()
    assert (choice >= 0).any()
    exact = expected(case, inputs.to(torch.float64), choice)
    plain = expected(case, inputs, choice)
    # dK, dV are closed sums in PyTorch, and a sum of chunks here: a rounding each. One was enough
    # on some CPUs only, by what PyTorch's own error is there (5.2e-7 against a limit of 4.9e-7).
    chunks = -(-dense.tokens // dense.chunk)
    for results in found:
        assert_no_less_accurate(results, exact, plain, roundings=chunks)


def test_tensors_that_do_not_fit_are_refused(interpreted: ProcessPoolExecutor) -> None:
    """Each with what was expected."""
    for changed, message in refusals():
        with pytest.raises(UnsupportedError, match=message):
            interpreted.submit(attend_changed, changed).result()


def refusals() -> list[tuple[dict[str, torch.Tensor], str]]:
    inputs = make_paged(PLAIN)
    return [
        ({"q": inputs.q[:, :, 16:]}, "q: expected .1, a multiple of 2 heads, tokens of 2 pages"),
        ({"q": inputs.q.double()}, "q: expected bfloat16, float16 or float32"),
        ({"q": inputs.q.mT.contiguous().mT}, "q: expected inner stride 1"),
        ({"k": inputs.k[:80]}, r"keys: expected \(96, 1, 2, 16\)"),
        ({"first_key": torch.zeros(1, 31, dtype=torch.int32)}, "first_key: expected"),
        ({"lse": torch.zeros(1, 4, 32).double()}, "lse: expected .* torch.float32"),
        ({"out": torch.zeros(1, 4, 32, 8)}, "out: expected"),
        ({"dk": torch.zeros(96, 1, 2, 16).half()}, "dk: expected .* torch.float32"),
    ]


def attend_changed(changed: dict[str, torch.Tensor]) -> None:
    """Forward and backward, with some tensors in place of right ones."""
    inputs = make_paged(PLAIN)
    given = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": inputs.q}
    given |= {"lse": torch.zeros(inputs.q.shape[:3]), "dk": torch.zeros_like(inputs.k)}
    q, k, v, out, lse, dk = ((given | changed)[name] for name in given)
    table = PageTable(inputs.choice, 16, 96, 96)
    call = PagedCall(table, 1.0, changed.get("first_key"), SMALL)
    if not changed.keys() & {"out", "lse", "dk"}:
        attend_pages(call, q, k, v)
    totals = PageGradients(dk, torch.zeros_like(inputs.v))
    attend_pages_backward(call, BackwardQueries(inputs.dout, q, out, lse), k, v, totals)


def test_without_an_interpreter_a_cpu_is_refused() -> None:
    inputs = make_paged(PLAIN)
    assert not supports(torch.device("cpu"), torch.float32, 64, 64, None)
    with pytest.raises(UnsupportedError, match="device: expected CUDA"):
        attend_pages(
            PagedCall(PageTable(inputs.choice, 16, 96, 96), 1.0), inputs.q, inputs.k, inputs.v
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_kernels_on_a_gpu(head_dim: int, dtype: torch.dtype) -> None:
    # References are of one CPU thread.
    sizes = replace(FULL, queries=300, tokens=1500, page=128, chosen=7, batch=2, group=7)
    case = replace(sizes, head_dim=head_dim, dtype=dtype, slots=True, tiles=None)
    assert supports(torch.device("cuda"), dtype, head_dim, head_dim, None)
    inputs = make_paged(case)
    exact, plain = expected_paged(case, inputs.to(torch.float64)), expected_paged(case, inputs)
    found, again, _ = run_paged_twice(case, inputs.to("cuda"))
    for name, tensor in found.items():
        assert torch.equal(again[name], tensor), name
    assert_no_less_accurate(found, exact, plain)


SCHEDULE = Schedule(
    chunk=12, groups=1, kv_block=20, sparse=Sparse(page=4, budget=8, recent=6, sinks=4)
)
DATA = draw(36)


def model_of(weights: dict[str, Tensor] | None = None) -> PreTrainedModel:
    model = make_model("qwen2", torch.float32, num_hidden_layers=1)
    if weights is not None:
        model.load_state_dict(weights)
    return model


def by_triton(weights: dict[str, Tensor], schedule: Schedule) -> tuple[Outcome, int]:
    """A step, and how often the kernels were asked for."""
    asked = 0

    def far(*_: object) -> TritonFar:
        nonlocal asked
        asked += 1
        return TritonFar(SMALL)

    with (
        patch("farspan.sparse.engine.far_kernel", far),
        # Slabs of three units, or one page of queries: a cell takes several.
        patch("farspan.program.far_sizes.SLAB_BYTES", 3 * 4 * 2 * 8 * 4),
    ):
        model = model_of(weights)
        return run_step(model, Step(model, schedule, poison=True), DATA), asked


@pytest.mark.parametrize("kv", part_of(Tier, Tier.HOST))
def test_steps_are_those_of_gathered_pages(kv: Tier) -> None:
    """Within twice what rounding costs there."""
    model, schedule = model_of(), replace(SCHEDULE, kv=kv)
    with interpreter() as pool:
        found, asked = pool.submit(by_triton, model.state_dict(), schedule).result()
    assert asked
    plain, exact = (run_step(one, schedule, DATA) for one in (model, deepcopy(model).double()))
    assert relative_error(found.loss, exact.loss) <= 2 * torch.finfo(torch.float32).eps
    for name, gradient in exact.gradients.items():
        limit = 2 * relative_error(plain.gradients[name], gradient)
        assert relative_error(found.gradients[name], gradient) <= limit, name
