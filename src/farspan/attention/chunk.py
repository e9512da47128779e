"""Attention of one cell: a chunk of queries against its own keys and all that came before.

What the engine calls. Keys and values of earlier chunks stream in block by block from wherever
they live, each block once a pass; gradients of theirs leave the same way. Everything is
deterministic as far as the kernel is: blocks are visited in one fixed order.

Shapes: q [B, H, C, D]; k [B, Hk, C, D], v [B, Hk, C, Dv] the chunk's own; out [B, H, C, Dv];
lse [B, H, C]; sinks [H]. "Accumulate dtype" is fp32, or fp64 for fp64.

Where keys are spread over ranks (program/attention_blocks.py), keys are those that this rank
holds: k, v have fewer tokens than q, and what is said of tokens of keys holds of rows of held
keys."""

from collections.abc import Iterator
from dataclasses import dataclass
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
    """Keys and values of the tokens before a chunk, and the sums of their gradients."""

    def keys(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """K [B, Hk, S, D] and V [B, Hk, S, Dv] of tokens [start, stop), all batch rows.

        They stay valid until the next call. Ranges come in ascending order and never overlap
        within one pass; none crosses a multiple of kv_block.
        """

    def add_gradient(self, start: int, stop: int, rows: slice, dk: Tensor, dv: Tensor) -> None:
        """Add to dK, dV of tokens [start, stop) of these batch rows.

        dk [rows, Hk, S, D] and dv [rows, Hk, S, Dv] come in the model's or the accumulate dtype;
        the sums must be in the latter. Called once after each call of `keys`, with its range.
        """


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What attention of one chunk is, besides its tensors."""

    scale: float
    softcap: float | None
    blocks: tuple[Block, ...]  # from plan_blocks
    q_start: int  # first token of the chunk
    kernel: BlockKernel  # from select_kernel, with the same softcap
    k_start: int | None = None  # first row of the chunk's own keys; None: all are held, q_start
    fused: bool = False  # parts are joined by farspan's own kernels, where the device has them

    def __post_init__(self) -> None:
        assert self.kernel.softcap == self.softcap, (self.kernel, self.softcap)

    def joins(self, part: Tensor, whole: Tensor) -> bool:
        """Whether a kernel joins this part to what it is a part of, all of whose queries it has."""
        return self.fused and part.shape == whole.shape and fused_for(part.device, part.dtype)

    @property
    def own_start(self) -> int:
        """Where the chunk's own keys begin."""
        return self.q_start if self.k_start is None else self.k_start


@dataclass(frozen=True, slots=True)
class _Visit:
    """Keys [start, stop) of earlier chunks, and the blocks that need them, all in these rows."""

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
    """out, in the dtype of q, and lse, in the accumulate dtype, over all visible keys and sinks.

    out is [B, C, H, Dv] in memory, so that out.transpose(1, 2) is contiguous.
    """
    out, lse = attend_blocks(call, q, k, v, key_values, narrow=sinks is None)
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks)
    return out.to(q.dtype), lse


@torch.no_grad()
def attend_blocks(
    call: AttentionCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_values: KeyValues,
    *,
    narrow: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same without sinks, before it is rounded: out of several blocks is in the accumulate
    dtype, or, if it is to be `narrow`, may be rounded with the last. A query that sees no held key
    has out = 0 and lse = -inf."""
    out, lse = _attend_own(call, q, k, v)
    if not call.fused and any(_visits(call)):
        # A chunk of one block needs no sum, hence no wider output; the narrow one dies here.
        out = out.to(lse.dtype)
    return attend_earlier(call, q, (out, lse), key_values, narrow=narrow)


@torch.no_grad()
def attend_earlier(
    call: AttentionCall,
    q: Tensor,
    attended: tuple[Tensor, Tensor],
    key_values: KeyValues,
    *,
    narrow: bool = False,
) -> tuple[Tensor, Tensor]:
    """`attended`, joined by what the queries see of earlier keys; it may be changed in place.

    Given in the accumulate dtype, out needs no wider copy beside it. For `narrow` see above.
    """
    found, visits = _Joined(call, *attended), list(_visits(call))
    for visit in visits:
        keys, values = key_values.keys(visit.start, visit.stop)
        for block in visit.blocks:
            part = _forward(call, q, keys, values, block, visit.start)
            last = narrow and visit is visits[-1] and block is visit.blocks[-1]
            found.join(block, part, q.dtype if last else None)
            del part
    found.finish(found.lse.dtype)
    return found.out, found.lse


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
    """dq, dk, dv and d sinks of the chunk, all in the accumulate dtype; dq, if it is to be
    `narrow`, may be rounded to that of q with its last part.

    `attended` is what `attend` returned. dk and dv are what this chunk's queries give to its own
    keys; what they give to earlier keys goes to `key_values.add_gradient`.
    """
    dtype = accumulate_dtype(q.dtype)
    of_queries = BackwardQueries(dout, q, *attended)
    dq = _BlockSum(q, dtype, call)
    own = _Visit(call.own_start, call.own_start + k.shape[2], slice(0, None), _own_blocks(call))
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
    """What earlier keys alone give to dq, in the accumulate dtype; their own gradients go to
    `key_values.add_gradient`. `attended` is that of all keys."""
    dq = _BlockSum(q, accumulate_dtype(q.dtype), call)
    _earlier_gradients(call, BackwardQueries(dout, q, *attended), key_values, dq)
    return dq.total().to(dq.dtype)


class _Joined:
    """Joins parts of out and lse; by kernels, two parts at a time that are of all queries."""

    def __init__(self, call: AttentionCall, out: Tensor, lse: Tensor) -> None:
        self.call, self.out, self.lse = call, out, lse
        self.waiting: list[tuple[Tensor, Tensor]] = []

    def join(self, block: Block, part: tuple[Tensor, Tensor], last: torch.dtype | None) -> None:
        """Join a block's part; `last` is the dtype that out may be rounded to with it."""
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
        """Join what waits; out is of this dtype then."""
        if self.waiting:
            self.out = merged(self.out, self.lse, self.waiting, dtype)
            self.waiting = []


class _BlockSum:
    """Adds up parts of a tensor; a first part that is the whole is taken as it is, without a copy.

    Parts are fresh tensors of kernels, so that the first may be added into. Kernels add two parts
    at a time that are the whole.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype, call: AttentionCall) -> None:
        self.like, self.dtype, self.call = like, dtype, call
        self.sum: Tensor | None = None
        self.waiting: list[Tensor] = []

    def add(self, part: Tensor, rows: slice, start: int, *, last: bool = False) -> None:
        """Add a part that lies at these batch rows and at tokens from `start`. The last one may
        round the sum to the dtype of `like`."""
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
        """The sum; of no parts, zeros."""
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
    visits = list(_visits(call))
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
    """dk and dv of the visit's rows and keys, summed over its blocks; what these give to `dq` is
    added there, and may be rounded with the `last` visit."""
    dk, dv = (_BlockSum(x[visit.rows], dq.dtype, call) for x in (keys, values))
    # A visit of several row ranges holds all rows, so its rows count from 0.
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
    """out and lse over the chunk's own keys."""
    blocks = _own_blocks(call)
    if len(blocks) == 1 and _queries(call, q, blocks[0]).shape == q.shape:
        out, lse = _forward(call, q, k, v, blocks[0], call.own_start)
        # Kernels lay out as q lies, heads-first in some families. The model, which joins heads
        # next, would copy then, and so would each block of a backward (`CudaCudnn`, `CudaFlash`).
        return token_first(out), lse
    dtype = accumulate_dtype(q.dtype)
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    lse = q.new_empty(q.shape[:3], dtype=dtype)
    if call.k_start is not None:
        out.zero_()
        lse.fill_(-torch.inf)
    for block in blocks:
        part_out, part_lse = _forward(call, q, k, v, block, call.own_start)
        if block.causal:
            # Causal blocks share no query and come before others of theirs: nothing to merge.
            _queries(call, out, block).copy_(part_out)
            _queries(call, lse, block).copy_(part_lse)
        else:
            out = out.to(dtype)
            whole = _queries(call, out, block), _queries(call, lse, block)
            merge_(*whole, part_out, part_lse, fused=call.fused)
    return out, lse


def _forward(
    call: AttentionCall, q: Tensor, keys: Tensor, values: Tensor, block: Block, first_key: int
) -> tuple[Tensor, Tensor]:
    k, v = (_keys(x, block, first_key) for x in (keys, values))
    return call.kernel.forward(_queries(call, q, block), k, v, block, call.scale)


def _queries(call: AttentionCall, x: Tensor, block: Block) -> Tensor:
    """The block's part of a tensor [B, H, C, ...] of the chunk's queries."""
    first = call.q_start - block.shift
    return x[block.rows, :, block.q_start - first : block.q_stop - first]


def _keys(x: Tensor, block: Block, first_key: int) -> Tensor:
    """The block's part of a tensor [B, Hk, S, ...] of keys from token `first_key` on."""
    return x[block.rows, :, block.k_start - first_key : block.k_stop - first_key]


def _own_blocks(call: AttentionCall) -> tuple[Block, ...]:
    own = (block for block in call.blocks if block.k_start >= call.own_start)
    return tuple(tile for block in own for tile in call.kernel.split(block))


def _visits(call: AttentionCall) -> Iterator[_Visit]:
    """Blocks over earlier keys in ascending order, those whose key ranges overlap together.

    Blocks are cut on the grid of kv_block, so no visit crosses it and each range is asked for
    once, however many documents and tiles of windows share it.
    """
    for blocks in overlapping(b for b in call.blocks if b.k_start < call.own_start):
        start, stop = min(b.k_start for b in blocks), max(b.k_stop for b in blocks)
        ranges = {(b.row_start, b.row_stop) for b in blocks}
        rows = blocks[0].rows if len(ranges) == 1 else slice(0, None)
        yield _Visit(start, stop, rows, tuple(t for b in blocks for t in call.kernel.split(b)))
