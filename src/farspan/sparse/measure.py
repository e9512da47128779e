"""Measure the rates of attention to chosen pages and of the votes for them."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from farspan.attention.backends import BackwardQueries
from farspan.engine.microbench import HEAD_DIM, KV_SHARE, Bench, Call
from farspan.sparse.attend import FarCall
from farspan.sparse.kernel_calls import (
    PagedCall,
    PageGradients,
    PageTable,
    attend_pages,
    attend_pages_backward,
    fused_votes,
    supports,
)
from farspan.sparse.pages import mean_keys
from farspan.spec import BACKWARD_PRODUCTS, MEAN, Curve, Sparse


@dataclass(frozen=True, slots=True)
class PagesProblem:
    """Random inputs for timing sparse attention's kernels: a chunk's queries, the keys before the
    chunk, and pages of `Sparse()`'s size, drawn at random for each page of queries."""

    call: PagedCall
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    def flop(self, *, backward: bool) -> float:
        """Return the FLOP per query head of attention to the chosen pages."""
        table = self.call.table
        seen = table.choice.shape[3] * table.page
        flop = 4.0 * self.q.shape[2] * seen * self.q.shape[3]
        return flop * BACKWARD_PRODUCTS if backward else flop

    def attend(self, *, backward: bool) -> Call:
        forward = partial(attend_pages, self.call, self.q, self.k, self.v)
        if not backward:
            return forward
        out, lse = forward()
        totals = PageGradients(
            *(torch.zeros_like(x, dtype=torch.float32) for x in (self.k, self.v))
        )
        queries = BackwardQueries(self.dout, self.q, out, lse)
        return partial(attend_pages_backward, self.call, queries, self.k, self.v, totals)

    def vote(self) -> tuple[float, Call]:
        """Return the FLOP of the votes per query head, and a function that computes the votes."""
        sparse, page = Sparse(), self.call.table.page
        means = mean_keys(self.k, sparse.mean_tokens).permute(1, 2, 0, 3).contiguous()
        pages, call = range(self.k.shape[0] // page), FarCall(self.call.scale, page)
        flop = 2.0 * self.q.shape[2] * means.shape[2] * self.q.shape[3]
        largest, rows = sparse.selector != MEAN, sparse.query_tokens
        return flop, partial(fused_votes, self.q, means, pages, call, rows, largest=largest)


def chosen_pages(bench: Bench, dtype: torch.dtype) -> PagesProblem | None:
    """Make random inputs for timing; None if farspan has no kernels for this device and dtype."""
    if dtype.itemsize != 2 or not supports(bench.device, dtype, HEAD_DIM, HEAD_DIM, None):
        return None
    sparse, queries, tokens = Sparse(), 2 * bench.effort.held, 8 * bench.effort.held
    kv_heads = 8
    heads = kv_heads * KV_SHARE
    q, dout = (
        bench.random(1, queries, heads, HEAD_DIM, dtype=dtype).transpose(1, 2) for _ in range(2)
    )
    k, v = (bench.random(tokens, 1, kv_heads, HEAD_DIM, dtype=dtype) for _ in range(2))
    pages, chosen = tokens // sparse.page, min(tokens, sparse.budget) // sparse.page
    rows = 1, kv_heads, queries // sparse.query_tokens
    drawn = torch.rand(*rows, pages, device=bench.device).argsort(-1)[..., :chosen]
    choice = drawn.sort(-1).values.int().contiguous()
    table = PageTable(choice, sparse.page, tokens, tokens, None, sparse.query_tokens)
    return PagesProblem(PagedCall(table, HEAD_DIM**-0.5), q, k, v, dout)


def page_curves(bench: Bench, path: str, dtype: torch.dtype) -> dict[str, Curve]:
    """Return FLOP/s, measured at one size each, of attention to chosen pages (forward and backward)
    and of votes, by name; empty if farspan has no kernels for this device."""
    problem = chosen_pages(bench, dtype)
    if problem is None:
        return {}
    curves = {}
    for backward, way in ((False, "forward"), (True, "backward")):
        point = problem.flop(backward=backward), problem.heads, problem.attend(backward=backward)
        curves[f"chosen_{way}"] = bench.curve(f"{path}.chosen_{way}", iter([point]))
    flop, vote = problem.vote()
    curves["votes"] = bench.curve(f"{path}.votes", iter([(flop, problem.heads, vote)]))
    return curves
