"""What choosing and watching hold for a moment is no more than is said, and not much less."""

from dataclasses import dataclass, replace
from itertools import cycle, product

import pytest
import torch
from torch import Tensor

from farspan.attention.backends import BackwardQueries, accumulate_dtype
from farspan.attention.chunk import AttentionCall
from farspan.engine.kernels import select_kernel
from farspan.engine.memory import LiveStorage, PeakMemory
from farspan.profile.far_sizes import (
    MOST_UNITS,
    SAMPLES,
    WATCHED_KEYS,
    choice_bytes,
    far_bytes,
    lesson_bytes,
    watch_bytes,
)
from farspan.program.attention_blocks import plan_blocks
from farspan.program.far_sizes import Far
from farspan.sparse.attend import FarCall, SparseCall, choose, sampled, seen_mass, sparse_call
from farspan.sparse.gathered import FlashPages, Gathered, PlainPages, select_far
from farspan.sparse.index import Index, LayerIndex, learn, lesson
from farspan.sparse.pages import TopK
from farspan.spec import SUPERMEAN, Sparse
from tests.grids import crossed, part_of
from tests.sparse.memory_pages import MemoryPages

# batch, query heads, K, V heads, head dim, chunk, first token, page, chosen pages
SHAPES = [
    (2, 8, 2, 64, 1024, 8192, 64, 16),
    (1, 28, 4, 128, 256, 16384, 128, 64),
    (1, 8, 8, 32, 512, 32768, 64, 16),
]
RANKED = [  # superpages, as in the last of those
    SHAPES[-1],
    (2, 8, 2, 64, 512, 4096, 16, 4),
    (1, 28, 4, 128, 250, 16384, 128, 4),
]
NEARLY = 2.0  # a bound is at most so much above what is measured
Shape = tuple[int, int, int, int, int, int, int, int]


def case(
    shape: Shape, dtype: torch.dtype
) -> tuple[SparseCall, Far, MemoryPages, tuple[torch.Tensor, torch.Tensor]]:
    batch, heads, kv_heads, dim, tokens, start, page, chosen = shape
    sparse = Sparse(page, chosen * page, recent=page, sinks=page)
    kernel = select_kernel("cpu", dtype, dim, dim, None, (0, 0))
    blocks = plan_blocks(start, start + tokens, 1024, None, None)
    dense = AttentionCall(dim**-0.5, None, blocks, start, kernel)
    call = sparse_call(sparse, dense, TopK(chosen), select_far("cpu", dim, dim, None))
    candidates = len(sparse.candidates(start))
    dims, width = (dim, dim), dtype.itemsize
    each = sparse.page // sparse.mean_tokens
    query_page, chosen = sparse.query_tokens, sparse.width(start)
    far = Far(
        batch, heads, kv_heads, *dims, width, page, query_page, each, chosen, tokens, candidates
    )
    far = replace(far, refined=sparse.refined(candidates), ranking=page // SUPERMEAN)
    assert bool(far.refined) == (shape in RANKED)
    earlier = torch.zeros(start, batch, kv_heads, dim, dtype=dtype)
    pages = MemoryPages(earlier, earlier, page, mean_tokens=sparse.mean_tokens)
    pages.means.normal_()
    q = torch.randn(batch, heads, tokens, dim).to(dtype)
    return call, far, pages, (q, torch.zeros(batch, kv_heads, tokens, dim, dtype=dtype))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    part_of(
        product(SHAPES + RANKED[1:], [torch.float32, torch.bfloat16, torch.float64]),
        (SHAPES[0], torch.float32),
        (SHAPES[2], torch.float64),
        (RANKED[1], torch.bfloat16),
    ),
    ids=str,
)
def test_choosing(shape: Shape, dtype: torch.dtype) -> None:
    call, far, pages, (q, _) = case(shape, dtype)
    with PeakMemory(torch.device("cpu")) as meter:
        choose(call, q, pages)
    assert meter.peak <= choice_bytes(far) <= NEARLY * meter.peak


@pytest.mark.parametrize(
    ("shape", "dtype"),
    part_of(
        product(SHAPES, [torch.float32, torch.bfloat16]),
        (SHAPES[0], torch.float32),
        (SHAPES[2], torch.bfloat16),
    ),
    ids=str,
)
def test_choosing_by_an_index(shape: Shape, dtype: torch.dtype) -> None:
    """Its queries are made for the choice; its keys were there."""
    (batch, heads, kv_heads, dim, _, start, page, chosen), dims = shape, 16
    call, far, earlier, (q, _) = case(shape, dtype)
    sparse = Sparse(page, chosen * page, recent=page, selector="index", index_dim=dims)
    assert far.refined == sparse.refined(far.candidates)
    call, far = replace(call, sparse=sparse), replace(far, means=page, index_dim=dims)
    keys = torch.randn(start, batch, kv_heads, dims).to(dtype)
    pages = MemoryPages(keys, keys, page, mean_tokens=1)
    pages.means.copy_(keys)
    maps = torch.randn(kv_heads, heads // kv_heads, dim, dims), torch.randn(kv_heads, dim, dims)
    index = LayerIndex(*maps).to(q.device, dtype)
    with PeakMemory(torch.device("cpu")) as meter:
        choice = choose(call, index.of_queries(q), pages)
    assert meter.peak <= choice_bytes(far) <= NEARLY * meter.peak
    lse = torch.zeros(q.shape[:3])
    learner = Index({0: LayerIndex(*maps)}).learning().layers[0]
    with PeakMemory(torch.device("cpu")) as meter:
        learn(learner, lesson(call, q, lse, choice, 0, earlier.k))
    assert meter.peak <= lesson_bytes(far) <= NEARLY * meter.peak


@pytest.mark.parametrize(
    ("shape", "dtype"),
    part_of(
        product(SHAPES, [torch.float32, torch.bfloat16, torch.float64]),
        (SHAPES[0], torch.bfloat16),
        (SHAPES[2], torch.float64),
    ),
    ids=str,
)
def test_watching(shape: Shape, dtype: torch.dtype) -> None:
    call, far, pages, (q, k) = case(shape, dtype)
    start = call.near.q_start
    spans = [(s, min(s + WATCHED_KEYS, start)) for s in range(0, start, WATCHED_KEYS)]
    lse = torch.zeros(q.shape[:3], dtype=pages.means.dtype)
    with PeakMemory(torch.device("cpu")) as meter:
        seen_mass(call, q, k, lse, pages, sampled(q.shape[2], SAMPLES), spans)
    assert meter.peak <= watch_bytes(far, start) <= NEARLY * meter.peak


LARGE = Far(
    1, 8, 2, 64, 64, 4, query_page=64, means=1, page=64, chosen=16, tokens=1024, candidates=600
)
# Of the bound, by the worst choice of real sizes: forward and backward. What aten takes and gives
# back within itself is in the bound, but not measured: packed keys and values of 16 bits.
REACHED = {2: (0.75, 0.95), 4: (0.95, 0.95), 8: (0.95, 0.95)}
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@dataclass(frozen=True)
class Worst:
    """A chunk of which every page of queries chooses other pages, while there are any."""

    far: Far
    most_units: int = MOST_UNITS
    part: int = 2**25
    hidden: bool = False  # every row needs a mask: documents begin behind its pages

    def choice(self) -> Tensor:
        far = self.far
        rows = far.batch, far.kv_heads, far.query_pages
        count = torch.arange(far.query_pages)[:, None] * far.chosen + torch.arange(far.chosen)
        return (count % far.candidates).sort(-1).values.expand(*rows, -1).int().contiguous()

    def measure(self) -> tuple[int, int]:
        """Peak bytes of the forward and of the backward."""
        far, dtype = self.far, DTYPES[self.far.width]
        shape = far.candidates * far.page, far.batch, far.kv_heads
        k, v = (torch.randn(*shape, dim, dtype=dtype) for dim in (far.head_dim, far.value_dim))
        of_queries = far.batch, far.tokens, far.heads
        q, dout = (
            torch.randn(*of_queries, dim, dtype=dtype).transpose(1, 2)
            for dim in (far.head_dim, far.value_dim)
        )
        pages, choice = MemoryPages(k, v, far.page, self.most_units), self.choice()
        documents = torch.full((far.batch, far.tokens), shape[0]) if self.hidden else None
        call = FarCall(0.1, far.page, documents, far.query_page)
        kernel = Gathered(PlainPages(2.0) if far.plain else FlashPages(), self.part)
        pages.begin(choice)
        out = torch.zeros_like(dout, dtype=accumulate_dtype(dtype))
        lse = out.new_zeros(out.shape[:3])
        with LiveStorage() as forward:
            kernel.forward(call, q, choice, pages, (out, lse))
        queries = BackwardQueries(dout, q, out.to(dtype), lse)
        pages.begin(choice)
        dq = torch.zeros_like(q, dtype=out.dtype)
        with LiveStorage() as backward:
            kernel.backward(call, queries, choice, pages, dq)
        return forward.peak, backward.peak

    def bounds(self) -> tuple[int, int]:
        forward, backward = (
            far_bytes(self.far, self.most_units, self.part, backward=kind) for kind in (False, True)
        )
        return forward, backward


@pytest.mark.parametrize(
    ("width", "limits"), crossed(DTYPES, [(256, 2**21), (100, 2**20), (10**6, 2**20)]), ids=str
)
def test_the_worst_choice_reaches_the_bound(width: int, limits: tuple[int, int]) -> None:
    """Of parts larger than a chunk's results, which count where pages are read in place."""
    most_units, elements = limits
    worst = Worst(replace(LARGE, width=width), most_units, elements * width)
    whole = worst.measure()
    masked = replace(worst, hidden=True).measure()
    most = map(max, whole, masked)
    for found, bound, reached in zip(most, worst.bounds(), REACHED[width], strict=True):
        assert reached * bound <= found <= bound


SMALL = [
    Far(2, 4, 4, 8, 8, 4, query_page=2, means=1, page=4, chosen=3, tokens=50, candidates=20),
    Far(1, 6, 1, 4, 4, 4, query_page=1, means=1, page=1, chosen=5, tokens=7, candidates=9),
    Far(2, 6, 2, 32, 32, 4, query_page=16, means=1, page=16, chosen=8, tokens=200, candidates=11),
    Far(1, 2, 2, 64, 64, 4, query_page=32, means=1, page=32, chosen=1, tokens=1, candidates=1),
    Far(
        1,
        4,
        2,
        16,
        24,
        4,
        query_page=8,
        means=1,
        page=8,
        chosen=4,
        tokens=61,
        candidates=30,
        plain=True,
    ),
    Far(
        2,
        4,
        4,
        16,
        8,
        4,
        query_page=8,
        means=1,
        page=8,
        chosen=4,
        tokens=64,
        candidates=30,
        plain=True,
    ),
]


# Every choice in one width, with all limits; only the bytes of an element go by the width.
@pytest.mark.parametrize(
    ("far", "width"),
    part_of(product(SMALL, DTYPES), *zip(SMALL[1::2], cycle(DTYPES), strict=False)),
    ids=str,
)
def test_no_choice_holds_more_than_the_bound(far: Far, width: int) -> None:
    far = replace(far, width=width)
    # Masks by turns, so that each is met with every number of units, part and width.
    for n, (most_units, part) in enumerate(product((1, 7, 1000), (1, 2**14, 2**25))):
        worst = Worst(far, most_units, part, hidden=(n + width // 4) % 2 == 1)
        for found, bound in zip(worst.measure(), worst.bounds(), strict=True):
            assert found <= bound, worst


def test_nothing_is_held_where_nothing_is_chosen() -> None:
    for nothing in (replace(LARGE, chosen=0), replace(LARGE, candidates=0)):
        assert far_bytes(nothing, backward=False) == far_bytes(nothing, backward=True) == 0
