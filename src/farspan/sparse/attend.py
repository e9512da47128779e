"""Page-sparse attention of one cell, next to attention/chunk.py and with its conventions.

    keys      sinks | candidates: some pages for each page of queries | recent | the chunk's own
    computed  near  | far                                             | near   | near

Near keys are the same for all queries: dense attention (attention/chunk.py) over fewer blocks. Far
keys are the chosen pages, which a `FarKernel` reads: `gathered.Gathered` copies them and runs
everywhere, `kernel_calls.TritonFar` reads them in place. The two join by their LSEs, and the
backward of each part takes out and LSE of the whole, so that gradients are exact for the function
that the choice defines. `sparse_reference` is that function, dense and differentiable.

A cell's first forward calls `choose`, right after its queries are known, and keeps the choice;
rebuild and backward reuse it. Layers with a window have dense attention.

The share of dense attention that the sparse one sees is measured on a few queries: the visible keys
hold exp(lse_seen - lse_all) of a query's softmax. lse_seen is known already, so only the LSE over
all keys is computed.

Shapes: q [B, H, C, D], out [B, H, C, Dv], lse [B, H, C], choice [B, Hk, M, k].
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from farspan.attention.backends import BackwardQueries, accumulate_dtype, add_sinks
from farspan.attention.chunk import AttentionCall, KeyValues, attend_backward, attend_blocks
from farspan.program.attention_blocks import near_blocks
from farspan.sparse.pages import Candidates, Pages, Selector, best_superpages, super_keys
from farspan.spec import SUPERPAGE, Sparse


@dataclass(frozen=True, slots=True)
class FarCall:
    """Settings of one chunk's attention to its chosen pages."""

    scale: float
    page: int  # tokens
    documents: Tensor | None = None  # [B, C]: first token of each query's document
    query_page: int | None = None  # tokens of a page of queries; None: as `page`
    fused: bool = False  # let kernels join the parts, on devices with kernels

    @property
    def query_tokens(self) -> int:
        return self.page if self.query_page is None else self.query_page


class FarKernel(Protocol):
    """Stateless kernel for attention to the chosen pages that `Pages.begin` announced."""

    @property
    def softcap(self) -> float | None:
        """Soft cap that the kernel applies to scores; None for no cap."""

    def votes(
        self, call: FarCall, sparse: Sparse, q: Tensor, means: Tensor, candidates: Candidates
    ) -> Tensor:
        """Return the votes of queries for candidate pages, in fp32 or wider, as `sparse.pages.vote`
        does, or as `vote_refined` does if superpages (16 pages each) were ranked."""

    def largest_scores(self, call: FarCall, q: Tensor, keys: Tensor, each: int) -> Tensor:
        """Return the largest score of each query page for each superpage (16 pages), as
        `sparse.pages.largest_scores` does. A superpage has `each` keys and `call.page` tokens."""

    def forward(
        self,
        call: FarCall,
        q: Tensor,
        choice: Tensor,
        pages: Pages,
        attended: tuple[Tensor, Tensor],
    ) -> None:
        """Merge attention to the chosen pages into `attended`, out and lse in the accumulate dtype,
        in place. A query that sees no key of these pages keeps its out and lse."""

    def backward(
        self, call: FarCall, queries: BackwardQueries, choice: Tensor, pages: Pages, dq: Tensor
    ) -> None:
        """Add the gradient of q to `dq` (accumulate dtype), and those of the chosen pages' keys and
        values to these pages' totals, in place or by `pages.sums` and `pages.add`."""


Attended = tuple[Tensor, Tensor, Tensor]  # out, lse, choice


@dataclass(frozen=True, slots=True)
class SparseCall:
    """Settings of one chunk's sparse attention, for all layers of equal scale and heads."""

    sparse: Sparse
    near: AttentionCall
    far: FarCall
    candidates: Candidates
    select: Selector
    kernel: FarKernel  # from select_far, with the soft cap of the near part

    def __post_init__(self) -> None:
        assert self.kernel.softcap == self.near.softcap, (self.kernel, self.near.softcap)
        assert all(block.window is None for block in self.near.blocks)


def sparse_call(
    sparse: Sparse,
    dense: AttentionCall,
    select: Selector,
    kernel: FarKernel,
    documents: Tensor | None = None,
) -> SparseCall:
    """Turn the settings of a chunk's dense attention into those of sparse attention. `documents`
    [B, C] int64, on the queries' device, is the first token of each query's document; None if each
    row is one document."""
    assert dense.q_start % sparse.page == 0, (dense.q_start, sparse.page)
    blocks = near_blocks(dense.blocks, sparse, dense.q_start)
    pages = sparse.candidates(dense.q_start)
    first = None
    if documents is not None:
        # Document starts ascend: the first query of a page sees the most.
        first = documents[:, :: sparse.query_tokens] // sparse.page
    return SparseCall(
        sparse,
        replace(dense, blocks=blocks),
        FarCall(dense.scale, sparse.page, documents, sparse.query_tokens, dense.fused),
        Candidates(pages, first),
        select,
        kernel,
    )


@torch.no_grad()
def choose(call: SparseCall, q: Tensor, pages: Pages) -> Tensor:
    """Return page numbers chosen by the votes of queries q, int32 [B, KV heads, query pages, k]."""
    candidates = call.candidates
    representatives = pages.representatives(candidates.pages)
    if not candidates.pages:
        page_count = -(-q.shape[2] // call.far.query_tokens)
        shape = *representatives.shape[:2], page_count, 0
        return torch.empty(shape, dtype=torch.int32, device=q.device)
    votes, candidates = compare(call.kernel, call.far, call.sparse, q, representatives, candidates)
    return call.select(votes, candidates)


def compare(
    kernel: FarKernel,
    call: FarCall,
    sparse: Sparse,
    q: Tensor,
    representatives: Tensor,
    candidates: Candidates,
) -> tuple[Tensor, Candidates]:
    """Return the votes of queries for candidate pages, and Candidates that tell the page of each
    column of the votes. If there are many pages, ranks superpages (16 pages each) first, and
    compares only pages of the best superpages."""
    count = sparse.refined(len(candidates.pages))
    if count:
        documents, each = call.documents, SUPERPAGE * sparse.page // sparse.super_tokens
        if documents is not None:
            documents = (documents - candidates.pages.start * sparse.page).clamp_(min=0)
            # The last superpage may lack pages: it hides from a document that begins after them.
            tokens = len(candidates.pages) * sparse.page
            documents.add_(SUPERPAGE * sparse.page * (documents >= tokens))
        whole = FarCall(call.scale, SUPERPAGE * sparse.page, documents, call.query_tokens)
        scores = kernel.largest_scores(whole, q, super_keys(representatives, sparse), each)
        candidates = replace(candidates, superpages=best_superpages(scores, count))
    return kernel.votes(call, sparse, q, representatives, candidates), candidates


@torch.no_grad()
def attend_sparse(
    call: SparseCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    choice: Tensor,
    pages: Pages,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out (dtype of q) and lse (accumulate dtype) of a chunk's sparse attention: to the
    visible near keys, the chosen pages and the attention sinks."""
    choice = _within_candidates(call, choice)
    if choice.shape[3]:
        pages.begin(choice)
    out, lse = attend_blocks(call.near, q, k, v, pages)
    if choice.shape[3]:
        out = out.to(lse.dtype)
        call.kernel.forward(call.far, q, choice, pages, (out, lse))
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks)
    return out.to(q.dtype), lse


@torch.no_grad()
def attend_sparse_backward(
    call: SparseCall,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attended: Attended,
    pages: Pages,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of a chunk's q, k, v and attention sinks, in the accumulate dtype.
    `attended` has the out and lse of `attend_sparse`, and the choice of pages that it used.
    Gradients of earlier keys go to `pages`: of near keys by `add_gradient`, of chosen pages by
    `add`."""
    out, lse, choice = attended
    choice = _within_candidates(call, choice)
    if choice.shape[3]:
        pages.begin(choice)
    dq, dk, dv, dsinks = attend_backward(call.near, dout, q, k, v, (out, lse), pages, sinks)
    if choice.shape[3]:
        queries = BackwardQueries(dout, q, out, lse)
        dq = dq.to(accumulate_dtype(q.dtype))
        call.kernel.backward(call.far, queries, choice, pages, dq)
    return dq, dk, dv, dsinks


def _within_candidates(call: SparseCall, choice: Tensor) -> Tensor:
    """Drop columns of a choice beyond the number of candidates: these columns hold only -1, and
    kernels would need masks for them."""
    return choice[..., : len(call.candidates.pages)]


# -- how much of dense attention is seen --------------------------------------------------------


def sampled(tokens: int, samples: int) -> range:
    """Return about `samples` evenly spaced tokens of a chunk, and the last, which sees most."""
    step = max(1, tokens // max(1, samples))
    return range((tokens - 1) % step, tokens, step)


@torch.no_grad()
def seen_mass(
    call: SparseCall,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    key_values: KeyValues,
    tokens: range,
    spans: Iterable[tuple[int, int]],
    sinks: Tensor | None = None,
) -> Tensor:
    """Measure which share of dense attention's softmax weights sampled queries see with sparse
    attention. Returns mean and minimum, [2] in the accumulate dtype; the CPU does not wait.
    `tokens` are the samples' places in a chunk with queries q [B, H, C, D], keys `k` and sparse
    attention's `lse`. `spans` are ascending ranges that cover all keys before the chunk."""
    dtype = accumulate_dtype(q.dtype)
    sample = torch.arange(tokens.start, tokens.stop, tokens.step, device=q.device)
    few, position = q[:, :, sample].to(dtype), sample + call.near.q_start
    first = torch.zeros_like(sample)[None]
    if call.far.documents is not None:
        first = call.far.documents[:, sample]
    everything = few.new_full(few.shape[:3], -torch.inf)
    if sinks is not None:
        everything = everything.logaddexp(sinks.to(dtype)[:, None])
    own = call.near.q_start, call.near.q_start + k.shape[2]
    for start, stop in (*spans, own):
        # With K on host, this costs as much transfer as dense attention: measure rarely.
        keys = k if start == own[0] else key_values.keys(start, stop)[0]
        # The heads of a group stacked: their keys are read once, not copied for each.
        stacked = few.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
        scores = (stacked @ keys.to(dtype).mT).mul_(call.near.scale).view(*few.shape[:3], -1)
        if call.near.softcap is not None:
            scores = call.near.softcap * torch.tanh(scores / call.near.softcap)
        key = torch.arange(start, stop, device=q.device)
        hidden = (key > position[:, None]) | (key < first[..., None])
        everything = everything.logaddexp(
            scores.masked_fill_(hidden.unsqueeze(1), -torch.inf).logsumexp(3)
        )
    mass = (lse[:, :, sample] - everything).exp()
    return torch.stack([mass.mean(), mass.min()])


# -- the function that sparse attention is ------------------------------------------------------


def seen_mask(choice: Tensor, sparse: Sparse, chunk: int, ids: Tensor) -> Tensor:
    """Return which keys each query of a sequence sees, bool [B, KV heads, queries, keys], given the
    choice of pages and the document ids [B, tokens]."""
    tokens, page, together = ids.shape[1], sparse.page, sparse.query_tokens
    pages = -(-tokens // page)
    marks = torch.zeros(*choice.shape[:3], pages + 1, dtype=torch.bool, device=choice.device)
    marks = marks.scatter(3, choice.long().masked_fill(choice < 0, pages), True)[..., :pages]
    chosen = marks.repeat_interleave(together, 2).repeat_interleave(page, 3)[:, :, :tokens, :tokens]
    key = torch.arange(tokens, device=ids.device)
    near = (key // chunk * chunk - sparse.recent).clamp(min=0) // page * page
    always = (key >= near[:, None]) | (key < sparse.sink_pages * page)
    visible = (ids[:, None, :, None] == ids[:, None, None, :]) & (key <= key[:, None])
    return (chosen | always) & visible


def sparse_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float, sinks: Tensor | None
) -> Tensor:
    """Compute sparse attention as dense attention with a mask from `seen_mask`, from q, k and v,
    [B, heads, tokens, dim]. `cap` is inf without soft-capping."""
    k, v, mask = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v, mask))
    scores = scale * q @ k.mT
    scores = scores if cap == torch.inf else cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[2]] @ v
