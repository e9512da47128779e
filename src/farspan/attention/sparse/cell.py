"""Page-sparse attention of one cell, beside attention/cell.py and with its conventions.

    keys      sinks | candidates: some pages for each page of queries | recent | the chunk's own
    computed  near  | far                                             | near   | near

Near keys are the same for all queries: dense attention (attention/cell.py) over fewer blocks. Far
ones are the chosen pages (far.py). The two join by their LSEs, and the backward of each part takes
out and LSE of the whole, so that gradients are exact for the function that the choice makes.

A cell's first forward calls `choose`, right after its queries are known, and keeps the choice;
rebuild and backward get it back. Layers with a window are exact as they are: not for here.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from farspan.attention.cell import AttentionCall, attend_backward, attend_blocks
from farspan.attention.merge import accumulate_dtype, add_sinks, merge_
from farspan.attention.sparse.far import FarCall, FarKernel
from farspan.attention.sparse.pages import Pages
from farspan.attention.sparse.select import Candidates, Selector, vote
from farspan.plan.blocks import near_blocks
from farspan.spec import Sparse

Attended = tuple[Tensor, Tensor, Tensor]  # out, lse, choice


@dataclass(frozen=True, slots=True)
class SparseCall:
    """What sparse attention of one chunk is, besides its tensors. One serves all dense layers that
    have the same scale and heads."""

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
    """The sparse form of a chunk's dense call. `documents` [B, C] int64, on the queries' device:
    the first token of each query's document; None if each row is one."""
    assert dense.q_start % sparse.page == 0, (dense.q_start, sparse.page)
    blocks = near_blocks(dense.blocks, sparse, dense.q_start)
    pages = sparse.candidates(dense.q_start)
    first = None
    if documents is not None:
        # Documents ascend: the first query of a page sees the most.
        first = documents[:, :: sparse.page] // sparse.page
    return SparseCall(
        replace(dense, blocks=blocks),
        FarCall(dense.scale, sparse.page, documents),
        Candidates(pages, first),
        select,
        kernel,
    )


@torch.no_grad()
def choose(call: SparseCall, q: Tensor, pages: Pages) -> Tensor:
    """The choice [B, Hk, M, k] of a chunk's queries q [B, H, C, D]."""
    candidates = call.candidates
    representatives = pages.representatives(candidates.pages)
    if not candidates.pages:
        page_count = -(-q.shape[2] // call.far.page)
        shape = *representatives.shape[:2], page_count, 0
        return torch.empty(shape, dtype=torch.int32, device=q.device)
    votes = vote(
        *(q, representatives, call.far.page, call.far.scale, call.far.documents),
        candidates.pages.start,
    )
    return call.select(votes, candidates)


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
    """out, in the dtype of q, and lse, in the accumulate dtype, over all that is seen and sinks."""
    choice = _possible(call, choice)
    if choice.shape[3]:
        pages.begin(choice)
    out, lse = attend_blocks(call.near, q, k, v, pages)
    if choice.shape[3]:
        out = out.to(lse.dtype)
        part = call.kernel.forward(call.far, q, choice, pages)
        merge_(out, lse, *part, fused=call.near.fused)
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
    """dq, dk, dv and d sinks of the chunk, all in the accumulate dtype.

    `attended` is what `attend_sparse` returned, and the choice it was given. What the chunk's
    queries give to earlier keys goes to `pages`: `add_gradient` for near ones, `add` for far ones.
    """
    out, lse, choice = attended
    choice = _possible(call, choice)
    if choice.shape[3]:
        pages.begin(choice)
    dq, dk, dv, dsinks = attend_backward(call.near, dout, q, k, v, (out, lse), pages, sinks)
    if choice.shape[3]:
        part = call.kernel.backward(call.far, dout, q, (out, lse), choice, pages)
        dq = dq.to(accumulate_dtype(q.dtype)).add_(part)
    return dq, dk, dv, dsinks


def _possible(call: SparseCall, choice: Tensor) -> Tensor:
    """Without the -1 at the ends of all rows of a choice that is wider than there are candidates:
    rows with -1 need masks."""
    return choice[..., : len(call.candidates.pages)]
