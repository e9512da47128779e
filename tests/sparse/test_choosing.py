"""What choosing and watching hold for a moment is no more than is said, and not much less."""

from dataclasses import replace

import pytest
import torch

from farspan.attention.chunk import AttentionCall
from farspan.engine.kernels import select_kernel
from farspan.engine.memory import PeakMemory
from farspan.profile.far_sizes import SAMPLES, WATCHED_KEYS, choice_bytes, lesson_bytes, watch_bytes
from farspan.program.attention_blocks import plan_blocks
from farspan.program.far_sizes import Far
from farspan.sparse.attend import SparseCall, choose, sampled, seen_mass, sparse_call
from farspan.sparse.gathered import select_far
from farspan.sparse.index import Index, LayerIndex, learn, lesson
from farspan.sparse.pages import TopK
from farspan.spec import SUPERMEAN, Sparse
from tests.grids import crossed
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
    crossed(SHAPES + RANKED[1:], [torch.float32, torch.bfloat16, torch.float64]),
    ids=str,
)
def test_choosing(shape: Shape, dtype: torch.dtype) -> None:
    call, far, pages, (q, _) = case(shape, dtype)
    with PeakMemory(torch.device("cpu")) as meter:
        choose(call, q, pages)
    assert meter.peak <= choice_bytes(far) <= NEARLY * meter.peak


@pytest.mark.parametrize(
    ("shape", "dtype"), crossed(SHAPES, [torch.float32, torch.bfloat16]), ids=str
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
    ("shape", "dtype"), crossed(SHAPES, [torch.float32, torch.bfloat16, torch.float64]), ids=str
)
def test_watching(shape: Shape, dtype: torch.dtype) -> None:
    call, far, pages, (q, k) = case(shape, dtype)
    start = call.near.q_start
    spans = [(s, min(s + WATCHED_KEYS, start)) for s in range(0, start, WATCHED_KEYS)]
    lse = torch.zeros(q.shape[:3], dtype=pages.means.dtype)
    with PeakMemory(torch.device("cpu")) as meter:
        seen_mass(call, q, k, lse, pages, sampled(q.shape[2], SAMPLES), spans)
    assert meter.peak <= watch_bytes(far, start) <= NEARLY * meter.peak
