"""Attention of one cell: a chunk of queries against its own keys and all earlier ones.

The engine calls it. Keys and values of earlier chunks stream in block by block from their tier,
each block once a pass, and their gradients leave the same way. All is deterministic as far as the
kernel is: blocks are visited in a fixed order.

Shapes: q [B, H, C, D]; k [B, Hk, C, D], v [B, Hk, C, Dv] the chunk's own; out [B, H, C, Dv]; lse
[B, H, C]; sinks [H]. "Accumulate dtype" is fp32, or fp64 for fp64.

If keys are distributed over ranks (program/attention_blocks.py), keys are those of this rank: k, v
have fewer tokens than q, and tokens of keys stand for rows of this rank's keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from farspan.attention.backends import (
    BackwardQueries,
    BlockKernel,
    accumulate_dtype,
    add_,
    add_sinks,
    added,
    merge_,
    merged,
    sink_gradient,
    token_first,
)
from farspan.kernels.launch import fused_for
from farspan.program.attention_blocks import Block, overlapping


class KeyValues(Protocol):
    """Access to the keys and values of earlier chunks, and to the sums of their gradients."""

    def keys(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return K [B, Hk, S, D] and V [B, Hk, S, Dv] of tokens [start, stop), all batch rows.

        They stay valid until the next call. Ranges come in ascending order and never overlap within
        one pass; none crosses a multiple of kv_block.
        """

    def add_gradient(self, start: int, stop: int, rows: slice, dk: Tensor, dv: Tensor) -> None:
        """Add gradients dk [rows, Hk, S, D] and dv [rows, Hk, S, Dv] to the sums for tokens [start,
        stop) in the batch rows `rows`. Gradients have the model's or the accumulate dtype; sums
        have the accumulate dtype. Called once after each call of `keys`, with its range."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Settings of one chunk's attention: everything but its tensors."""

    scale: float
    softcap: float | None
    blocks: tuple[Block, ...]  # from plan_blocks
    q_start: int  # first token of the chunk
    kernel: BlockKernel  # from select_kernel, with the same softcap
    k_start: int | None = None  # first row of the chunk's own keys; None: q_start, keys are whole
    fused: bool = False  # farspan's kernels join parts, if the device has them
    # Blocks on the chunk's own keys, and reads of earlier keys; made from `blocks`.
    own: tuple[Block, ...] = field(init=False)
    visits: tuple["_Visit", ...] = field(init=False)

    def __post_init__(self) -> None:
        assert self.kernel.softcap == self.softcap, (self.kernel, self.softcap)
        own = (block for block in self.blocks if block.k_start >= self.own_start)
        split = tuple(tile for block in own for tile in self.kernel.split(block))
        object.__setattr__(self, "own", split)
        object.__setattr__(self, "visits", tuple(_visits(self)))

    def joins(self, part: Tensor, whole: Tensor) -> bool:
        """Return whether a fused kernel may merge a block's result `part` into the chunk's `whole`:
        if the device has such kernels, and `part` has all of the chunk's queries."""
        return self.fused and part.shape == whole.shape and fused_for(part.device, part.dtype)

    @property
    def own_start(self) -> int:
        """Number of the chunk's first own key: a token, or a row if a rank holds only some keys."""
        return self.q_start if self.k_start is None else self.k_start


@dataclass(frozen=True, slots=True)
class _Visit:
    """One read of earlier keys [start, stop), with the blocks of attention computed on the keys."""

    start: int
    stop: int
    rows: slice
    blocks: tuple[Block, ...]


@torch.no_grad()
def attend(
    call: AttentionCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_values: KeyValues,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out, in the dtype of q, and lse, in the accumulate dtype, of a chunk's attention to
    all visible keys and sinks.

    out is [B, C, H, Dv] in memory, so that out.transpose(1, 2) is contiguous.
    """
    out, lse = attend_blocks(call, q, k, v, key_values, narrow=sinks is None)
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks)
    return out.to(q.dtype), lse


def attend_blocks(
    call: AttentionCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_values: KeyValues,
    *,
    narrow: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of a chunk over all its blocks of keys, without sinks. If blocks are
    several, out has the accumulate dtype, or q's dtype if `narrow` allows it and a fused kernel
    merges the last block. A query that sees no key of this rank has out = 0 and lse = -inf."""
    out, lse = _attend_own(call, q, k, v)
    if not call.fused and call.visits:
        # A chunk of one block needs no sum, hence no wider output. The narrow one is freed here.
        out = out.to(lse.dtype)
    return attend_earlier(call, q, (out, lse), key_values, narrow=narrow)


def attend_earlier(
    call: AttentionCall,
    q: Tensor,
    attended: tuple[Tensor, Tensor],
    key_values: KeyValues,
    *,
    narrow: bool = False,
) -> tuple[Tensor, Tensor]:
    """Merge attention to earlier keys into `attended` (out, lse), and return the result. An out in
    the accumulate dtype is changed in place. With `narrow` the result's out has q's dtype if a
    fused kernel merges the last block."""
    joined, visits = _Joined(call, *attended), call.visits
    for visit in visits:
        keys, values = key_values.keys(visit.start, visit.stop)
        for block in visit.blocks:
            own = _of_block(call, q, keys, values, block, visit.start)
            part = call.kernel.forward(*own, block, call.scale)
            del own
            last = narrow and visit is visits[-1] and block is visit.blocks[-1]
            joined.join(block, part, q.dtype if last else None)
            del part
    joined.finish(joined.lse.dtype)
    return joined.out, joined.lse


@torch.no_grad()
def attend_backward(
    call: AttentionCall,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attended: tuple[Tensor, Tensor],
    key_values: KeyValues,
    sinks: Tensor | None = None,
    *,
    narrow: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of the chunk's q, k, v and sinks, in the accumulate dtype; but dq has
    q's dtype if `narrow` allows this and a fused kernel adds the last block's dq.

    `attended` is the result of `attend`. dk and dv are gradients of the chunk's own keys; gradients
    of earlier keys go to `key_values.add_gradient`.
    """
    dtype = accumulate_dtype(q.dtype)
    of_queries = BackwardQueries(dout, q, *attended)
    dq = _BlockSum(q, dtype, call)
    own = _Visit(call.own_start, call.own_start + k.shape[2], slice(0, None), call.own)
    dk, dv = _gradients(call, of_queries, k, v, own, dq)
    _earlier_gradients(call, of_queries, key_values, dq, narrow=narrow)
    dsinks = None if sinks is None else sink_gradient(dout, *attended, sinks)
    total = dq.total()
    if not (narrow and call.fused):
        total = total.to(dtype)
    return total, dk.to(dtype), dv.to(dtype), dsinks


@torch.no_grad()
def attend_earlier_backward(
    call: AttentionCall,
    dout: Tensor,
    q: Tensor,
    attended: tuple[Tensor, Tensor],
    key_values: KeyValues,
) -> Tensor:
    """Return the part of dq (accumulate dtype) that comes from earlier keys, and add these keys'
    gradients by `key_values.add_gradient`. `attended` is (out, lse) of attention to all keys."""
    dq = _BlockSum(q, accumulate_dtype(q.dtype), call)
    _earlier_gradients(call, BackwardQueries(dout, q, *attended), key_values, dq)
    return dq.total().to(dq.dtype)


class _Joined:
    """Out and lse of a softmax over the blocks merged so far. A result for all of the chunk's
    queries waits for a second one, so that one kernel merges both."""

    def __init__(self, call: AttentionCall, out: Tensor, lse: Tensor) -> None:
        self.call, self.out, self.lse = call, out, lse
        self.waiting: list[tuple[Tensor, Tensor]] = []

    def join(self, block: Block, part: tuple[Tensor, Tensor], last: torch.dtype | None) -> None:
        """Merge a block's out and lse. For the last block, `last` is out's final dtype."""
        if self.call.joins(part[0], self.out):
            self.waiting.append(part)
            if last is not None or len(self.waiting) == 2:
                self.finish(last or self.lse.dtype)
            return
        self.finish(self.lse.dtype)
        self.out = self.out.to(self.lse.dtype)
        out, lse = (_queries(self.call, x, block) for x in (self.out, self.lse))
        merge_(out, lse, *part, fused=self.call.fused)

    def finish(self, dtype: torch.dtype) -> None:
        if self.waiting:
            self.out = merged(self.out, self.lse, self.waiting, dtype)
            self.waiting = []


class _BlockSum:
    """Sum of a gradient over several blocks. The first block's gradient, if it has the sum's shape,
    becomes the sum without a copy, since kernels return new tensors. Later ones of that shape wait
    for a second one, so that one kernel adds both."""

    def __init__(self, like: Tensor, dtype: torch.dtype, call: AttentionCall) -> None:
        self.like, self.dtype, self.call = like, dtype, call
        self.sum: Tensor | None = None
        self.waiting: list[Tensor] = []

    def add(self, part: Tensor, rows: slice, start: int, *, last: bool = False) -> None:
        """Add a block's gradient `part` to batch rows `rows`, from token `start` on. After the
        `last` block's, the sum may have the inputs' dtype."""
        if self.sum is None and part.shape == self.like.shape:
            self.sum = part
            return
        if self.sum is not None and self.call.joins(part, self.sum):
            self.waiting.append(part)
            if last or len(self.waiting) == 2:
                self._finish(self.like.dtype if last else self.dtype)
            return
        self._finish(self.dtype)
        if self.sum is None:
            self.sum = torch.zeros_like(self.like, dtype=self.dtype)
        self.sum = self.sum.to(self.dtype)
        add_(self.sum[rows, :, start : start + part.shape[2]], part, fused=self.call.fused)

    def _finish(self, dtype: torch.dtype) -> None:
        if self.waiting and self.sum is not None:
            self.sum, self.waiting = added(self.sum, self.waiting, dtype), []

    def total(self) -> Tensor:
        """Return the gradient summed over all added blocks, or zeros if none was added."""
        self._finish(self.dtype)
        if self.sum is None:
            return torch.zeros_like(self.like, dtype=self.dtype)
        return self.sum


def _earlier_gradients(
    call: AttentionCall,
    of_queries: BackwardQueries,
    key_values: KeyValues,
    dq: _BlockSum,
    *,
    narrow: bool = False,
) -> None:
    visits = call.visits
    for visit in visits:
        keys, values = key_values.keys(visit.start, visit.stop)
        last = narrow and visit is visits[-1]
        parts = _gradients(call, of_queries, keys, values, visit, dq, last=last)
        del keys, values
        key_values.add_gradient(visit.start, visit.stop, visit.rows, *parts)
        del parts


def _gradients(
    call: AttentionCall,
    of_queries: BackwardQueries,
    keys: Tensor,
    values: Tensor,
    visit: _Visit,
    dq: _BlockSum,
    *,
    last: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return dk and dv summed over the blocks of a visit, and add the blocks' dq to `dq`. If no
    visit follows (`last`), the sum `dq` may get the inputs' dtype."""
    every = visit.rows == slice(0, None)
    dk, dv = (_BlockSum(x if every else x[visit.rows], dq.dtype, call) for x in (keys, values))
    # A visit of several row ranges has all rows, so its rows count from 0.
    first_row = visit.rows.start
    for block in visit.blocks:
        rows = slice(block.row_start - first_row, None)
        if block.row_stop is not None:
            rows = slice(rows.start, block.row_stop - first_row)
        queries = BackwardQueries(*(_queries(call, x, block) for x in of_queries))
        k, v = (_keys(x, block, visit.start) for x in (keys, values))
        parts = call.kernel.backward(queries, k, v, block, call.scale)
        ends = last and block is visit.blocks[-1]
        dq.add(parts[0], block.rows, block.q_start + block.shift - call.q_start, last=ends)
        dk.add(parts[1], rows, block.k_start - visit.start)
        dv.add(parts[2], rows, block.k_start - visit.start)
        del parts
    return dk.total(), dv.total()


def _attend_own(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    blocks = call.own
    if len(blocks) == 1 and _queries(call, q, blocks[0]).shape == q.shape:
        seen = _of_block(call, q, k, v, blocks[0], call.own_start)
        out, lse = call.kernel.forward(*seen, blocks[0], call.scale)
        # Kernels use q's layout, which is heads-first in some families. The model, which joins
        # heads next, would then copy, and so would each block of a backward (`CudaCudnn`,
        # `CudaFlash`).
        return token_first(out), lse
    dtype = accumulate_dtype(q.dtype)
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    lse = q.new_empty(q.shape[:3], dtype=dtype)
    if call.k_start is not None:
        out.zero_()
        lse.fill_(-torch.inf)
    for block in blocks:
        seen = _of_block(call, q, k, v, block, call.own_start)
        part_out, part_lse = call.kernel.forward(*seen, block, call.scale)
        if block.causal:
            # Causal blocks share no query and come before their other blocks: there is nothing to
            # merge.
            _queries(call, out, block).copy_(part_out)
            _queries(call, lse, block).copy_(part_lse)
        else:
            out = out.to(dtype)
            whole = _queries(call, out, block), _queries(call, lse, block)
            merge_(*whole, part_out, part_lse, fused=call.fused)
    return out, lse


def _of_block(
    call: AttentionCall, q: Tensor, keys: Tensor, values: Tensor, block: Block, first_key: int
) -> tuple[Tensor, Tensor, Tensor]:
    k, v = (_keys(x, block, first_key) for x in (keys, values))
    return _queries(call, q, block), k, v


def _queries(call: AttentionCall, x: Tensor, block: Block) -> Tensor:
    first = call.q_start - block.shift
    return _part(x, block, block.q_start - first, block.q_stop - first)


def _keys(x: Tensor, block: Block, first_key: int) -> Tensor:
    return _part(x, block, block.k_start - first_key, block.k_stop - first_key)


def _part(x: Tensor, block: Block, start: int, stop: int) -> Tensor:
    if start == block.row_start == 0 and block.row_stop is None and stop == x.shape[2]:
        return x  # a slice takes 3 microseconds
    return x[block.rows, :, start:stop]


def _visits(call: AttentionCall) -> Iterator[_Visit]:
    """Yield the reads of earlier keys that the chunk needs, in ascending order. Blocks with
    overlapping key ranges share a read, so no key is read twice, even if several documents or tiles
    of a window see it. Blocks and reads end at multiples of kv_block."""
    for blocks in overlapping(b for b in call.blocks if b.k_start < call.own_start):
        start, stop = min(b.k_start for b in blocks), max(b.k_stop for b in blocks)
        ranges = {(b.row_start, b.row_stop) for b in blocks}
        rows = blocks[0].rows if len(ranges) == 1 else slice(0, None)
        yield _Visit(start, stop, rows, tuple(t for b in blocks for t in call.kernel.split(b)))
