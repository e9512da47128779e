"""Random attention over page tables, by the kernels and by the formula.

The kernels run in Triton's interpreter, in a process of its own: it is chosen when Triton is first
imported. What runs there is in this file, which imports no test and no Triton.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import product
from multiprocessing import get_context

import pytest
import torch
from torch import Tensor

from farspan.attention.backends import BackwardQueries
from farspan.sparse.attend import sparse_reference
from farspan.sparse.kernel_calls import (
    PagedCall,
    PageGradients,
    PageTable,
    attend_pages,
    attend_pages_backward,
)
from farspan.sparse.tiles import PageTile, PageTiles
from tests.attention.cases import Results
from tests.versions import CANNOT_INTERPRET

# Several tiles to a page and to the rows of a group, of unequal sizes; loads in flight.
SMALL = PageTiles(PageTile(32, 16, 4, 2), PageTile(16, 32, 4, 2), PageTile(32, 16, 4, 2))


@cache
def _interpreting() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_interpret)


def stop_interpreting() -> None:
    """End that process: it would outlive one that ends without Python's own exit."""
    if _interpreting.cache_info().currsize:
        _interpreting().shutdown()
        _interpreting.cache_clear()


@contextmanager
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """One process whose kernels are interpreted, the same for all tests of this process, since its
    imports take 5 s; a test that asks for it is skipped where that cannot be."""
    if CANNOT_INTERPRET:
        pytest.skip("Triton before 3.7 does not interpret with NumPy 2.4 or newer")
    yield _interpreting()


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    # Fills what `torch.empty` gives with NaN, and raises where an op has no order of its own.
    torch.use_deterministic_algorithms(True)


@dataclass(frozen=True)
class PagedCase:
    """Queries of a chunk over pages of `tokens` tokens that lie in a buffer."""

    queries: int = 32
    tokens: int = 96
    page: int = 16
    query_page: int | None = None  # None: as `page`
    chosen: int = 3
    batch: int = 1
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    first_keys: bool = False  # a bound for each query, some beyond all of its keys
    missing: bool = False  # some entries are -1, in one row all
    slots: bool = False  # the chosen pages are copied, each head's to places of its own
    tiles: PageTiles | None = SMALL

    @property
    def scale(self) -> float:
        return 0.7 * self.head_dim**-0.5

    @property
    def query_tokens(self) -> int:
        """Of a query page."""
        return self.query_page or self.page


@dataclass(frozen=True)
class PagedInputs:
    q: Tensor  # [B, H, C, D]
    k: Tensor  # [T, B, Hk, D]
    v: Tensor
    dout: Tensor
    choice: Tensor
    first_key: Tensor | None

    def to(self, place: torch.dtype | str) -> "PagedInputs":
        """The same inputs in another dtype or on another device."""
        q, k, v, dout = (x.to(place) for x in (self.q, self.k, self.v, self.dout))
        if isinstance(place, torch.dtype):
            return PagedInputs(q, k, v, dout, self.choice, self.first_key)
        first = None if self.first_key is None else self.first_key.to(place)
        return PagedInputs(q, k, v, dout, self.choice.to(place), first)


def make_paged(case: PagedCase) -> PagedInputs:
    torch.manual_seed(0)
    heads = case.kv_heads * case.group
    of_queries = case.batch, case.queries, heads, case.head_dim
    of_keys = case.tokens, case.batch, case.kv_heads, case.head_dim
    q, dout = (torch.randn(of_queries).to(case.dtype).transpose(1, 2) for _ in range(2))
    k, v = (torch.randn(of_keys).to(case.dtype) for _ in range(2))
    pages, query_pages = -(-case.tokens // case.page), -(-case.queries // case.query_tokens)
    rows = case.batch, case.kv_heads, query_pages
    order = torch.rand(*rows, pages).argsort(-1)
    choice = order[..., : case.chosen].sort(-1).values.int()
    if case.missing:
        choice[torch.rand(choice.shape) < 0.3] = -1
        choice[0, 0, 0] = -1
    first_key = None
    if case.first_keys:
        first_key = torch.randint(0, case.tokens, (case.batch, case.queries)).int()
        first_key[0, 0] = case.tokens
    return PagedInputs(2 * q, 2 * k, v, dout, choice, first_key)


def paged_mask(case: PagedCase, inputs: PagedInputs) -> Tensor:
    """What each query sees, [B, Hk, C, T], entry by entry of the choice."""
    mask = torch.zeros(case.batch, case.kv_heads, case.queries, case.tokens, dtype=torch.bool)
    size, of_queries = case.page, case.query_tokens
    for b, h, m, entry in product(*map(range, inputs.choice.shape)):
        page = int(inputs.choice[b, h, m, entry])
        if page >= 0:
            rows = slice(m * of_queries, (m + 1) * of_queries)
            mask[b, h, rows, page * size : (page + 1) * size] = True
    if inputs.first_key is not None:
        mask &= torch.arange(case.tokens) >= inputs.first_key[:, None, :, None]
    return mask


def expected_paged(case: PagedCase, inputs: PagedInputs) -> Results:
    """The reference and autograd in the dtype of the inputs; rows that see nothing are zeros."""
    mask = paged_mask(case, inputs)
    empty = ~mask.any(-1, keepdim=True)
    leaves = {
        n: x.clone().requires_grad_() for n, x in zip("qkv", _heads_first(inputs), strict=True)
    }
    q, k, v = (leaves[name] for name in "qkv")
    out = sparse_reference(q, k, v, mask | empty, case.scale, torch.inf, None)
    out = out.masked_fill(empty.repeat_interleave(case.group, 1), 0.0)
    gradients = torch.autograd.grad(out, list(leaves.values()), inputs.dout)
    scores = case.scale * q @ k.repeat_interleave(case.group, 1).mT
    scores = scores.masked_fill(~mask.repeat_interleave(case.group, 1), -torch.inf)
    dq, dk, dv = gradients
    lse = scores.logsumexp(-1).detach()
    keys = {"k": dk.permute(2, 0, 1, 3), "v": dv.permute(2, 0, 1, 3)}
    return {"out": out.detach(), "lse": lse, "q": dq} | keys


def _heads_first(inputs: PagedInputs) -> tuple[Tensor, ...]:
    return inputs.q, inputs.k.permute(1, 2, 0, 3), inputs.v.permute(1, 2, 0, 3)


def run_paged(case: PagedCase, inputs: PagedInputs, calls: int = 1) -> Results:
    """The kernels, the backward so many times into the same totals.

    The buffers are longer than the sequence and NaN where none of its tokens lies; totals must
    stay as they are there, and out and dq are made of NaN too.
    """
    places = _places(case).to(inputs.choice.device)
    lies = _scattered(torch.ones_like(inputs.k), places, case.page).isfinite()
    keys, values = (_scattered(x, places, case.page) for x in (inputs.k, inputs.v))
    slots = None
    if case.slots:
        chosen = inputs.choice.flatten(2).clamp(min=0).long()
        slots = (places.gather(2, chosen) // case.page).int().view(inputs.choice.shape)
        slots = slots.masked_fill(inputs.choice < 0, -5)
    sizes = case.page, case.tokens, len(keys)
    table = PageTable(inputs.choice, *sizes, slots, case.query_page)
    call = PagedCall(table, case.scale, inputs.first_key, case.tiles)
    out, lse = attend_pages(call, inputs.q, keys, values)
    totals = PageGradients(*(torch.zeros_like(x, dtype=torch.float32) for x in (keys, values)))
    queries = BackwardQueries(inputs.dout, inputs.q, out, lse)
    for _ in range(calls):
        dq = attend_pages_backward(call, queries, keys, values, totals)
    assert all(not total[~lies].any() for total in totals)
    dk, dv = (_collected(x, places, inputs.k, case.page) for x in totals)
    return {"out": out, "lse": lse, "q": dq, "k": dk, "v": dv}


def run_paged_twice(case: PagedCase, inputs: PagedInputs) -> tuple[Results, Results, Results]:
    """Two runs, and one with two backwards into the same totals."""
    return run_paged(case, inputs), run_paged(case, inputs), run_paged(case, inputs, calls=2)


def _places(case: PagedCase) -> Tensor:
    """First token in the buffer of each page [B, Hk, n]: in order, or each head's elsewhere."""
    shape = case.batch, case.kv_heads, -(-case.tokens // case.page)
    slots = torch.arange(shape[2]).expand(shape)
    if case.slots:
        slots = torch.randperm(shape[0] * shape[1] * shape[2]).view(shape)
    return case.page * slots


def _scattered(x: Tensor, places: Tensor, page: int) -> Tensor:
    """x [T, B, Hk, D] in a buffer whose pages lie at `places`, one page longer than needed."""
    buffer = x.new_full((int(places.max()) + 2 * page, *x.shape[1:]), torch.nan)
    for (b, h), starts in _by_head(places):
        for part, start in zip(x[:, b, h].split(page), starts, strict=True):
            buffer[start : start + len(part), b, h] = part
    return buffer


def _collected(buffer: Tensor, places: Tensor, like: Tensor, page: int) -> Tensor:
    """What `_scattered` made a buffer of."""
    x = torch.full_like(like, torch.nan, dtype=buffer.dtype)
    for (b, h), starts in _by_head(places):
        for part, start in zip(x[:, b, h].split(page), starts, strict=True):
            part.copy_(buffer[start : start + len(part), b, h])
    return x


def _by_head(places: Tensor) -> Iterator[tuple[tuple[int, int], list[int]]]:
    rows, heads, _ = places.shape
    for b, h in product(range(rows), range(heads)):
        yield (b, h), places[b, h].tolist()
