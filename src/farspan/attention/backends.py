"""Attention kernels for one block of queries and keys, by vendor operations or plain PyTorch, and
merging of blocks.

q [B, H, Sq, D], k [B, Hk, Sk, D], v [B, Hk, Sk, Dv], H a multiple of Hk; any strides. out [B, H,
Sq, Dv]; lse [B, H, Sq], natural logarithm, fp32 (fp64 for fp64); sinks [H]. "Accumulate dtype" is
fp32, or fp64 for fp64.

With lse = log sum exp of the scores, two parts of the same row merge exactly: lse =
logaddexp(lse_a, lse_b), out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b. A sink is one more
logit whose value is zero: it only shrinks the output.

`backward` takes the out and lse of the whole softmax, not those of the block. A kernel computes P =
exp(S - lse) and D = rowsum(dout * out) from its arguments, so the gradients of the blocks add up to
the exact ones.

No aten backward adds into an existing tensor: gradients are new tensors in the input dtype, or in
the accumulate dtype (`Tiled`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from farspan.kernels import operations
from farspan.kernels.launch import fused_for
from farspan.program.attention_blocks import Block, key_tiles, tile_window

aten = torch.ops.aten
LENGTHS = 128  # cuDNN's gradients are right for lengths that are multiples of this
Gradients = tuple[Tensor, Tensor, Tensor]


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums and LSEs: fp32 for a `dtype` of 16 or 32 bits, fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    document_ids: Tensor | None = None,
    chunked: bool = False,
    chosen: Tensor | None = None,
) -> Tensor:
    """Return the output [B, H, S, Dv] of exact causal attention, computed in plain PyTorch from q
    [B, H, S, D], k [B, Hk, S, D], v [B, Hk, S, Dv] and document ids [B, S]. A query sees only the
    tokens `chosen` for it, [B, S, n], if these are given."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = scale * q @ k.mT
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    tokens = q.shape[2]
    reach = tokens if window is None or chunked else window
    visible = q.new_ones(tokens, tokens).tril().triu(1 - reach).bool()
    if chunked and window is not None:
        document_ids = _pieces(document_ids, torch.arange(tokens, device=q.device), window)
    if document_ids is not None:
        visible = visible & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    if chosen is not None:
        seen = visible.new_zeros(len(chosen), tokens, tokens + 1)
        seen.scatter_(2, chosen.long().clamp(max=tokens), True)  # later tokens: one extra column
        visible = visible & seen[:, None, :, :tokens]
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    # Sinks may be wider than keys, as HY-V4's are, and then so are all scores.
    return scores.softmax(-1)[..., :tokens].to(v.dtype) @ v


def _pieces(document_ids: Tensor | None, tokens: Tensor, window: int) -> Tensor:
    """Return an id for each piece of `window` tokens of each document, [B or 1, S]."""
    if document_ids is None:
        return (tokens // window)[None]
    begins = document_ids.diff(dim=1, prepend=document_ids[:, :1] - 1) != 0
    first = (begins * tokens).cummax(1).values  # token of each document
    return first + (tokens - first) // window * window  # first token of each piece


# -- softmaxes joined from their parts ----------------------------------------------------------


def merged(
    out: Tensor, lse: Tensor, parts: Sequence[operations.Part], dtype: torch.dtype
) -> Tensor:
    """Merge one or two partial softmax results into out and lse by one kernel, `lse` in place.
    Return out in `dtype`: changed in place if it has that dtype, else a new tensor."""
    into = out if out.dtype is dtype else torch.empty_like(out, dtype=dtype)
    operations.merge_(out, lse, *parts, into=into)
    return into


def added(total: Tensor, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Add one or two tensors to `total` by one kernel, and return the sum in `dtype`: in place if
    `total` has that dtype, else a new tensor."""
    into = total if total.dtype is dtype else torch.empty_like(total, dtype=dtype)
    operations.add_(total, *parts, into=into)
    return into


def merge_(
    out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, *, fused: bool = False
) -> None:
    """Merge a partial result of a softmax, `part_out` and `part_lse`, into `out` and `lse`
    (accumulate dtype), in place.

    A row of a part that saw no key has lse = -inf and weight 0, for any finite `part_out`; a row
    that saw no key in any part keeps lse = -inf. With `fused`, one kernel does it if the device has
    one.
    """
    if fused and fused_for(out.device, out.dtype):
        operations.merge_(out, lse, (part_out, part_lse))
        return
    weight = torch.sigmoid(part_lse - lse)
    # -inf - -inf is nan; comparing is cheaper than nan_to_num, which would also hide real nans.
    weight = weight.masked_fill(part_lse == -torch.inf, 0.0)
    out.lerp_(part_out.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, part_lse))


def add_(total: Tensor, part: Tensor, *, fused: bool = False) -> None:
    """Add a tensor, whose dtype may be narrower, to `total` (accumulate dtype), in place. With
    `fused`, a kernel reads and writes 16 bytes at a time; PyTorch's does not if dtypes differ."""
    if fused and fused_for(total.device, total.dtype):
        operations.add_(total, part)
    else:
        total.add_(part)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse with each head's sink merged in, both in the accumulate dtype."""
    dtype = accumulate_dtype(out.dtype)
    with_sink = torch.logaddexp(lse, sinks.to(dtype)[:, None])
    return out.to(dtype) * (lse - with_sink).exp().unsqueeze(-1), with_sink


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the loss with respect to the sinks, [H], in the accumulate dtype.

    `out` and `lse` come from `add_sinks`. The sink has weight exp(sink - lse) and value zero, so
    its score gradient is weight * (0 - rowsum(dout * out)).
    """
    dtype = accumulate_dtype(out.dtype)
    weight = (sinks.to(dtype)[:, None] - lse).exp()
    return -(weight * (dout.to(dtype) * out.to(dtype)).sum(-1)).sum((0, 2))


# -- kernels of one block ------------------------------------------------------------------------


class BackwardQueries(NamedTuple):
    """Tensors of a backward with a row per query, [B, H, Sq, ...]; out and lse are those of
    attention to all keys."""

    dout: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor


class BlockKernel(Protocol):
    """A kernel that computes attention of one block of queries and keys. Kernels have no state."""

    @property
    def softcap(self) -> float | None:
        """Soft cap that the kernel applies to scores, or None."""
        return None

    def split(self, block: Block) -> tuple[Block, ...]:
        """Divide a block into blocks, each of which the kernel can compute by one call."""
        return (block,)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return out (in q's dtype) and lse over the keys of this block alone, as new tensors."""

    def backward(
        self, queries: BackwardQueries, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> Gradients:
        """Return dq, dk and dv of a block as new tensors; dk and dv have Hk heads."""


def _rows_dense(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors, copied unless their last dimension has stride 1. Vendor operations assume
    that stride without a check, but a gradient that autograd has expanded has stride 0."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def token_first(x: Tensor) -> Tensor:
    """Return a tensor [B, H, S, D] that is contiguous as [B, S, H, D], copied if necessary."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _packed(x: Tensor) -> Tensor:
    """Return `token_first(x)` with contiguous strides even in dimensions of size 1."""
    x = token_first(x)
    _, heads, tokens, width = x.shape
    strides = tokens * heads * width, width, heads * width, 1
    return x if x.stride() == strides else x.as_strided(x.shape, strides)


@dataclass(frozen=True, slots=True)
class CpuFlash(BlockKernel):
    """aten's flash attention for CPUs: fp64, fp32, bf16, fp16; D == Dv; supports GQA.

    Its causal mask is aligned top left, so causal blocks must be squares. It has no windows: tiles
    get a float mask in q's dtype. Without keys it dies of SIGFPE, and for a row without visible
    keys it returns lse = 0: `Block` excludes both. Its lse is not differentiable.
    """

    def split(self, block: Block) -> tuple[Block, ...]:
        return tile_window(block)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        q, k, v = _rows_dense(q, k, v)
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=self._square(block), attn_mask=self._mask(block, q), scale=scale
        )

    def backward(
        self, queries: BackwardQueries, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> Gradients:
        dout, q, k, v, out = _rows_dense(queries.dout, queries.q, k, v, queries.out)
        square, mask = self._square(block), self._mask(block, q)
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, queries.lse, 0.0, square, attn_mask=mask, scale=scale
        )

    def _square(self, block: Block) -> bool:
        return block.causal and block.window is None

    def _mask(self, block: Block, like: Tensor) -> Tensor | None:
        if block.window is None:
            return None
        hidden = ~visible(block, like.device)
        mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
        return mask.masked_fill_(hidden, -torch.inf)


@dataclass(frozen=True, slots=True)
class CudaFlash(BlockKernel):
    """aten's flash attention for CUDA (FA2, or its registered replacement).

    It takes bf16, fp16; D == Dv, a multiple of 8 up to 256; tensors [B, S, H, D]; and supports GQA
    and windows. Causal masks and windows are aligned bottom right. Without dropout the RNG state is
    not read. It indexes with 32 bits: the elements of a block stay below 2**31. Its backward copies
    dout and out unless they are packed in its own order, so `token_first` ones cost nothing.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        q_BSHD, k_BSHD, v_BSHD = (x.transpose(1, 2) for x in _rows_dense(q, k, v))
        most, options = (block.queries, block.keys), self._options(block, scale)
        out_BSHD, lse, *_ = aten._flash_attention_forward(
            q_BSHD, k_BSHD, v_BSHD, None, None, *most, 0.0, block.causal, False, **options
        )
        return out_BSHD.transpose(1, 2), lse

    def backward(
        self, queries: BackwardQueries, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> Gradients:
        dense = _rows_dense(queries.dout, queries.q, k, v, queries.out)
        tensors_BSHD, lse = [x.transpose(1, 2) for x in dense], queries.lse.contiguous()
        most, options = (block.queries, block.keys), self._options(block, scale)
        rng = torch.empty(2, dtype=torch.uint64, device=k.device)
        unused = torch.empty((), dtype=torch.uint64, device=k.device)
        dq, dk, dv = aten._flash_attention_backward(
            *tensors_BSHD, lse, None, None, *most, 0.0, block.causal, rng, unused, **options
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    def _options(self, block: Block, scale: float) -> dict[str, float]:
        left, right = self.window(block)
        return {"scale": scale, "window_size_left": left, "window_size_right": right}

    def window(self, block: Block) -> tuple[int, int]:
        """Return the window as aten's operation takes it: how many keys left and right of the
        aligned diagonal are seen (-1: all). Row i of Sq sees columns from i + Sk - Sq - left on."""
        if block.window is None:
            return -1, 0 if block.causal else -1
        # Without a causal mask, right = -1 acts as Sk, which hides keys if Sq > Sk + 1.
        assert block.queries <= block.keys + 1, block
        left = block.window - 1 + block.k_stop - block.q_stop
        return left, 0 if block.causal else -1


@cache
def _cudnn_lse_rank() -> int:
    """Return the number of dimensions of cuDNN's LSE: [B, H, Sq, 1] in torch 2.11 to 2.13, [B, H,
    Sq] later.

    The operation's shape function on the meta device answers for the installed torch.
    """
    x = torch.empty(1, 1, 128, 64, dtype=torch.bfloat16, device="meta")
    return aten._scaled_dot_product_cudnn_attention(x, x, x, None, True)[1].ndim


@dataclass(frozen=True, slots=True)
class CudaCudnn(BlockKernel):
    """aten's cuDNN attention, for blocks on which it is correct and faster; the kernel `other`
    computes the rest.

    bf16, fp16; D == Dv, a multiple of 8 up to 128; supports GQA. Its causal mask is aligned top
    left. It is right only without mask and with lengths that are multiples of 128 (elsewhere dQ can
    be NaN). It builds a plan for each pair of lengths (0.1 to 0.4 s, kept for each thread), so it
    gets few pairs: queries of whole chunks, whose lengths are `queries` (None: any on the grid),
    and keys in powers of two times `grid`. Blocks of earlier keys are cut into such pieces; `other`
    takes the rest of a block, and documents, whose lengths are arbitrary.

    Note: [One layout of O for each plan]. torch finds the plan of a backward by shapes and strides
    of q, k and v alone. In 2.11 to 2.13 a plan includes the strides of O and dO of its first call,
    and misreads another layout; later releases take the strides that follow from q's layout and
    refuse others, including strides of dimensions of size 1. O is token-first in a buffer and as
    `attend` returns it, models give such a dO, and q is heads-first in some families (GPT-NeoX,
    Phi, StableLM, GLM4, GPT-OSS). So q, O and dO are all passed packed token-first, which is right
    for every torch. This copies q for those families, for 1 to 2% of the call's time at 16K tokens;
    q's layout for O and dO would need two copies a backward and one more a forward.
    """

    other: BlockKernel
    grid: int = 1024
    queries: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        assert self.grid % LENGTHS == 0, self.grid

    def split(self, block: Block) -> tuple[Block, ...]:
        if not self._takes_queries(block):
            return self.other.split(block)
        # Own blocks must not share a query: squares stay whole, whatever their side.
        if block.causal:
            return (block,)
        pieces, start = [], block.k_start
        while block.k_stop - start >= self.grid:
            units = (block.k_stop - start) // self.grid
            stop = start + self.grid * 2 ** (units.bit_length() - 1)
            pieces.append(replace(block, k_start=start, k_stop=stop))
            start = stop
        if start < block.k_stop:
            pieces.extend(self.other.split(replace(block, k_start=start)))
        return tuple(pieces)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        if not self._fits(block):
            return self.other.forward(q, k, v, block, scale)
        (k, v), q = _rows_dense(k, v), _packed(q)
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, block.causal, False, scale=scale
        )
        return out, lse.view(lse.shape[:3])

    def backward(
        self, queries: BackwardQueries, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> Gradients:
        if not self._fits(block):
            return self.other.backward(queries, k, v, block, scale)
        # See Note: [One layout of O for each plan].
        dout, q, out = (_packed(x) for x in (queries.dout, queries.q, queries.out))
        k, v = _rows_dense(k, v)
        lse = queries.lse.contiguous()
        if _cudnn_lse_rank() == 4:
            lse = lse.unsqueeze(-1)
        seed, offset = torch.empty((2,), dtype=torch.int64, device=q.device).unbind()
        none, most = (None,) * 3, (block.queries, block.keys)  # no bias, no ragged lengths
        return aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse, seed, offset, *none, *most, 0.0, block.causal, scale=scale
        )

    def _fits(self, block: Block) -> bool:
        if not self._takes_queries(block):
            return False
        units, rest = divmod(block.keys, self.grid)
        return block.causal or (rest == 0 and units.bit_count() == 1)

    def _takes_queries(self, block: Block) -> bool:
        if self.queries is None:
            known = block.queries % self.grid == 0
        else:
            known = block.queries in self.queries and block.queries % LENGTHS == 0
        return known and block.window is None


@dataclass(frozen=True, slots=True)
class Padded:
    """Kernel that pads heads with zeros to `width`, and runs the kernel `inner`, which needs D ==
    Dv or certain widths.

    Exact: a zero adds nothing to a score, to rowsum(dout * out) or to a gradient; columns of out
    that come only from zeros of v are cut off, and the scale is the caller's, of the true width.
    """

    inner: BlockKernel
    width: int

    @property
    def softcap(self) -> float | None:
        return self.inner.softcap

    def split(self, block: Block) -> tuple[Block, ...]:
        return self.inner.split(block)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        q, k, wide_v = (self._wide(x) for x in (q, k, v))
        out, lse = self.inner.forward(q, k, wide_v, block, scale)
        return out[..., : v.shape[-1]], lse

    def backward(
        self, queries: BackwardQueries, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> Gradients:
        dout, q, out = (self._wide(x) for x in (queries.dout, queries.q, queries.out))
        wide_k, wide_v = self._wide(k), self._wide(v)
        padded = BackwardQueries(dout, q, out, queries.lse)
        dq, dk, dv = self.inner.backward(padded, wide_k, wide_v, block, scale)
        return dq[..., : queries.q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]

    def _wide(self, x: Tensor) -> Tensor:
        """Pad heads to `width`; the result is contiguous as [B, S, H, D], for vendor kernels."""
        if x.shape[-1] == self.width:
            return x
        return functional.pad(x.transpose(1, 2), (0, self.width - x.shape[-1])).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Directed(BlockKernel):
    """Attention whose forward and backward are computed by two kernels.

    Exact for any two: every kernel's LSE is the natural logarithm of sum exp of the scaled scores,
    and every backward takes the out and LSE of the whole softmax, which several kernels may have
    merged already (`CudaCudnn`). Only FlashAttention-2 and -3 cannot be combined, as PyTorch has
    one of them at a time.
    """

    ahead: BlockKernel
    back: BlockKernel

    @property
    def softcap(self) -> float | None:
        return self.ahead.softcap

    def split(self, block: Block) -> tuple[Block, ...]:
        """Divide a block into blocks, each of which both kernels can compute by one call."""
        return tuple(piece for part in self.ahead.split(block) for piece in self.back.split(part))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        return self.ahead.forward(q, k, v, block, scale)

    def backward(
        self, queries: BackwardQueries, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> Gradients:
        return self.back.backward(queries, k, v, block, scale)


# -- in plain PyTorch, tile by tile --------------------------------------------------------------


def visible(block: Block, device: torch.device) -> Tensor:
    """Return a block's mask, bool [Sq, Sk]: True where the query attends to the key."""
    query = torch.arange(block.q_start, block.q_stop, device=device)
    distance = query[:, None] - torch.arange(block.k_start, block.k_stop, device=device)
    seen = distance >= 0
    return seen if block.window is None else seen & (distance < block.window)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Tokens that each query of a chunk attends to, as an indexer chose them."""

    tokens: Tensor  # [B, C, n] int32
    first: int  # the chunk's first token

    def hidden(self, block: Block) -> Tensor:
        """Return a mask, bool [B, Sq, Sk]: True where the key is not chosen for the query."""
        own = slice(block.q_start - self.first, block.q_stop - self.first)
        place = self.tokens[block.rows, own].long() - block.k_start
        # Tokens of other blocks are written to an extra column, which is dropped.
        place = place.masked_fill_((place < 0) | (place >= block.keys), block.keys)
        hidden = place.new_ones(*place.shape[:2], block.keys + 1, dtype=torch.bool)
        return hidden.scatter_(2, place, False)[..., :-1]


@runtime_checkable
class ChoosingKernel(Protocol):
    """A kernel that can hide the tokens that an indexer has not chosen."""

    def choosing(self, chosen: Chosen) -> BlockKernel:
        """Return a kernel whose queries see the chosen tokens only."""


@dataclass(frozen=True, slots=True)
class Tiled(BlockKernel):
    """A kernel in plain PyTorch for cases that no vendor supports.

    These are soft caps, values wider or narrower than keys, tokens that an indexer chooses, fp32 on
    CUDA, and any other device.
    With a cap, scores become softcap * tanh(scores / softcap). Arithmetic is in the accumulate
    dtype; memory beyond inputs and outputs is a few tiles of B * H * tile**2 elements. The queries
    of the heads that share a key head are stacked, q_BKRD with R = H / Hk * tile rows, so that GQA
    is one matrix product.
    """

    softcap: float | None = None
    tile: int = 512
    chosen: Chosen | None = None

    def choosing(self, chosen: Chosen) -> "Tiled":
        return replace(self, chosen=chosen)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        dtype = accumulate_dtype(q.dtype)
        batch, heads, queries, _ = q.shape
        out = q.new_empty(batch, queries, heads, v.shape[-1]).transpose(1, 2)
        lse = q.new_empty(batch, heads, queries, dtype=dtype)
        for rows, tiles in row_tiles(block, self.tile):
            sum_out = out.new_zeros(*out[:, :, rows].shape, dtype=dtype)
            sum_lse = lse.new_full(lse[:, :, rows].shape, -torch.inf)
            for keys, tile in tiles:
                scores, _ = self._scores(q[:, :, rows], k[:, :, keys], tile, scale)
                part_lse = scores.logsumexp(-1)
                # A row without visible keys in this tile: exp(-inf - 0) = 0 instead of nan.
                safe = part_lse.masked_fill(part_lse == -torch.inf, 0.0)
                part = (scores - safe.unsqueeze(-1)).exp() @ v[:, :, keys].to(dtype)
                shape = sum_lse.shape
                merge_(sum_out, sum_lse, part.view(*shape, -1), part_lse.view(shape))
            out[:, :, rows], lse[:, :, rows] = sum_out, sum_lse
        return out, lse

    def backward(
        self, queries: BackwardQueries, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, out, lse = queries
        dtype, kv_heads = accumulate_dtype(q.dtype), k.shape[1]
        dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
        for rows, tiles in row_tiles(block, self.tile):
            dout_BKRD = _stack(dout[:, :, rows].to(dtype), kv_heads)
            q_BKRD = _stack(q[:, :, rows].to(dtype), kv_heads)
            out_BKRD = _stack(out[:, :, rows].to(dtype), kv_heads)
            lse_BKR1 = _stack(lse[:, :, rows].unsqueeze(-1), kv_heads)
            delta = (dout_BKRD * out_BKRD).sum(-1, keepdim=True)
            for keys, tile in tiles:
                key, value = (x[:, :, keys].to(dtype) for x in (k, v))
                scores, slope = self._scores(q[:, :, rows], key, tile, scale)
                weights = (scores - lse_BKR1).exp()
                dv[:, :, keys] += weights.mT @ dout_BKRD
                dscores = weights * (dout_BKRD @ value.mT - delta) * (slope * scale)
                dk[:, :, keys] += dscores.mT @ q_BKRD
                dq[:, :, rows] += (dscores @ key).view_as(dq[:, :, rows])
        return dq, dk, dv

    def _scores(
        self, q: Tensor, k: Tensor, tile: Block, scale: float
    ) -> tuple[Tensor, Tensor | float]:
        """Return masked scores [B, Hk, rows of `_stack`, Sk] and the soft cap's slope at each."""
        dtype = accumulate_dtype(q.dtype)
        scores = _stack(q.to(dtype), k.shape[1]) @ k.to(dtype).mT * scale
        slope: Tensor | float = 1.0
        if self.softcap is not None:
            bounded = torch.tanh(scores / self.softcap)
            scores, slope = bounded * self.softcap, 1 - bounded.square()
        if tile.causal or tile.window is not None:
            hidden = ~visible(tile, q.device)
            groups = q.shape[1] // k.shape[1]
            scores = scores.masked_fill(hidden.repeat(groups, 1), -torch.inf)
        if self.chosen is not None:
            hidden, groups = self.chosen.hidden(tile), q.shape[1] // k.shape[1]
            scores = scores.masked_fill(hidden.repeat(1, groups, 1)[:, None], -torch.inf)
        return scores, slope


def _stack(x: Tensor, kv_heads: int) -> Tensor:
    """Stack the query heads that share a key head, [B, H, S, D] -> [B, Hk, H / Hk * S, D]."""
    return x.reshape(x.shape[0], kv_heads, -1, x.shape[-1])


def row_tiles(block: Block, size: int) -> Iterator[tuple[slice, list[tuple[slice, Block]]]]:
    """Cut a block's queries into tiles of at most `size`; yield each one's slice of queries, and
    the tiles of keys that it sees: (slice, block). Slices count from the block's first token."""
    for q_start in range(block.q_start, block.q_stop, size):
        rows = slice(q_start - block.q_start, min(q_start + size, block.q_stop) - block.q_start)
        tiles = key_tiles(block, q_start, size)
        yield rows, [(slice(t.k_start - block.k_start, t.k_stop - block.k_start), t) for t in tiles]
