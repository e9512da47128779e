"""Attention to chosen pages by copying them: any device, every feature, trains without Triton.

Legend: B batch, H query heads, Hk key-value heads, r = H / Hk, M pages of queries of Q tokens, k
chosen pages of P tokens, U units (pages.py). A row is a page of queries of one key-value head; the
copies of its pages make it a small dense attention, and some rows x are attended at a time:

    q_xRQD [x, r, Q, D]    k_xSD, v_xSD [x, 1, k * P, D]    out [x, r, Q, Dv], lse [x, r, Q]

`part_bytes` bounds the bytes of such a part; units come slab by slab (`Pages.slabs`), and a row is
attended to those of its pages that a slab has. The rows of a part have equally many pages, so k is
one number. Masks are built only if a document begins within a chosen page or after it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from farspan.attention.backends import BackwardQueries, accumulate_dtype, merge_
from farspan.profile.far_sizes import PART_BYTES, FarRow
from farspan.sparse.attend import FarCall, FarKernel
from farspan.sparse.pages import (
    Candidates,
    Pages,
    Slab,
    Units,
    largest_scores,
    vote,
    vote_refined,
)
from farspan.spec import Sparse

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class FlashPages:
    """Attention of rows (queries of a page) to copies of their pages, by aten's flash kernel."""

    softcap: None = None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, attn_mask=self._float(mask, q.dtype), scale=scale
        )
        if mask is not None:
            # The op returns out 0, but also lse 0, for a query without keys.
            lse = lse.masked_fill(~mask.any(3), -torch.inf)
        return out, lse

    def backward(
        self, queries: BackwardQueries, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, out, lse = queries
        mask = self._float(mask, q.dtype)
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, False, attn_mask=mask, scale=scale
        )

    def _float(self, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if mask is None:
            return None
        return torch.where(mask, mask.new_zeros((), dtype=dtype), -torch.inf)


@dataclass(frozen=True, slots=True)
class PlainPages:
    """Attention of rows (queries of a page) to copies of their pages in plain PyTorch, in the
    accumulate dtype: for soft caps, values of another size than keys, and any device."""

    softcap: float | None = None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        scores, _ = self._scores(q, k, mask, scale)
        lse = scores.logsumexp(3)
        # A query without keys: exp(-inf - 0) = 0 instead of nan.
        weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(3)).exp()
        return (weights @ v.to(scores.dtype)).to(q.dtype), lse

    def backward(
        self, queries: BackwardQueries, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, out, lse = queries
        scores, slope = self._scores(q, k, mask, scale)
        dout, out, wide_q, k, v = (x.to(scores.dtype) for x in (dout, out, q, k, v))
        weights = (scores - lse.unsqueeze(3)).exp()
        dv = (weights.mT @ dout).sum(1, keepdim=True)
        delta = (dout * out).sum(3, keepdim=True)
        dscores = weights * (dout @ v.mT - delta) * (slope * scale)
        return dscores @ k, (dscores.mT @ wide_q).sum(1, keepdim=True), dv

    def _scores(
        self, q: Tensor, k: Tensor, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor | float]:
        """Return masked scores after the soft cap, and its slope at each score (1.0: no cap)."""
        dtype = accumulate_dtype(q.dtype)
        scores = q.to(dtype) @ k.to(dtype).mT * scale
        slope: Tensor | float = 1.0
        if self.softcap is not None:
            bounded = torch.tanh(scores / self.softcap)
            scores, slope = bounded * self.softcap, 1 - bounded.square()
        return scores if mask is None else scores.masked_fill(~mask, -torch.inf), slope


# Dense attention of rows x, each with its own keys: returns out and lse over these keys alone, or
# dq, dk, dv. `mask` is bool [x, 1, Q, S], true if a query sees a key. A query that sees none gets
# lse -inf, out zero and gradients zero.
PageKernel = FlashPages | PlainPages


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows (queries of a page) of a slab that attend in one call, with equally many pages each."""

    places: tuple[Tensor, Tensor, Tensor]  # their indices in [B, Hk, M, ...], each [x]
    index: Tensor  # [x, k]: their units
    mask: Tensor | None  # [x, 1, Q, k * P]

    def queries(self, x: Tensor) -> Tensor:
        rows = x[self.places]
        return rows if rows.stride(-1) == 1 else rows.contiguous()

    def copies(self, of_units: Tensor) -> Tensor:
        """Copy each row's chosen pages, joined along their tokens, from a slab's keys or values."""
        copies = of_units.index_select(0, self.index.flatten())
        return copies.view(len(self.index), 1, -1, of_units.shape[2])

    def put(self, totals: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        """Write the results for this part's rows into tensors with the results for all rows."""
        for total, x in zip(totals, rows, strict=True):
            total[self.places] = x

    def add(self, total: Tensor, part: Tensor) -> None:
        """Add gradients of the rows' copied pages to the slab's sums [pages, tokens, D], always in
        the same order, so that the same inputs give the same bits."""
        gradients = part.to(total.dtype).reshape(-1, *total.shape[1:])
        # Both are deterministic: index_put_ sorts; index_add_ is so on CPUs, and 15 times faster.
        if total.device.type == "cpu":
            total.index_add_(0, self.index.flatten(), gradients)
        else:
            total.index_put_((self.index.flatten(),), gradients, accumulate=True)


@dataclass(frozen=True, slots=True)
class _SlabRows:
    """The rows (queries of one page and KV head) that attend to a slab's pages, and their masks."""

    page: int
    query_page: int
    units: Units
    starts: Tensor | None  # [B, M, Q]: first token of each query's document

    def alike(self) -> Iterator[tuple[Tensor, bool]]:
        """Yield the indices of query rows with equally many pages, and whether to mask them."""
        index = self.units.index
        kinds = 2 * (index >= 0).sum(3)
        if self.starts is not None:
            none = torch.iinfo(torch.int64).max
            pages = torch.where(index < 0, none, self.units.pages[index])
            kinds += pages.amin(3) * self.page < self.starts.amax(2)[:, None]
        kinds = kinds.flatten()
        for kind in kinds.unique().tolist():
            if kind > 1:
                yield (kinds == kind).nonzero().squeeze(1), kind % 2 > 0

    def part(self, rows: Tensor, masked: bool) -> _Part:
        _, heads, pages, _ = self.units.index.shape
        owner, page = rows // pages, rows % pages
        places = owner // heads, owner % heads, page
        index = self.units.index.flatten(0, 2)[rows]
        index = index[index >= 0].view(len(rows), -1)
        return _Part(places, index, self._mask(places, index) if masked else None)

    def _mask(self, places: tuple[Tensor, Tensor, Tensor], index: Tensor) -> Tensor:
        assert self.starts is not None
        within = torch.arange(self.page, device=index.device)
        token = (self.units.pages[index].unsqueeze(2) * self.page + within).flatten(1)
        starts = self.starts[places[0], places[2]]
        return (token[:, None] >= starts.unsqueeze(2)).unsqueeze(1)


@dataclass(frozen=True, slots=True)
class Gathered:
    """The `FarKernel` that copies pages, for as many queries at a time as `part_bytes` allow."""

    kernel: PageKernel
    part_bytes: int = PART_BYTES["cpu"]

    @property
    def softcap(self) -> float | None:
        return self.kernel.softcap

    def votes(
        self, call: FarCall, sparse: Sparse, q: Tensor, means: Tensor, candidates: Candidates
    ) -> Tensor:
        arguments = q, means, sparse, call.scale, call.documents
        if candidates.superpages is not None:
            return vote_refined(*arguments, candidates)
        return vote(*arguments, candidates.pages.start)

    def largest_scores(self, call: FarCall, q: Tensor, keys: Tensor, each: int) -> Tensor:
        sizes = each, call.page, call.query_tokens
        return largest_scores(q, keys, sizes, call.scale, call.documents)

    def forward(
        self,
        call: FarCall,
        q: Tensor,
        choice: Tensor,
        pages: Pages,
        attended: tuple[Tensor, Tensor],
    ) -> None:
        queries = _by_page(_whole(q, choice, call), choice)
        wholes = [_whole(x, choice, call) for x in attended]
        totals = [_by_page(x, choice) for x in wholes]
        for slab in pages.slabs():
            of_slab = _slab_rows(call, slab, choice)
            for rows, masked in self._parts(of_slab, slab, queries, backward=False):
                part = of_slab.part(rows, masked)
                result = self._attend(slab, part, queries, call.scale)
                joined = [part.queries(total) for total in totals]
                merge_(joined[0], joined[1], *result)
                part.put(totals, joined)
                del part, result, joined
            del slab, of_slab
        _put_back(attended, wholes)

    def backward(
        self, call: FarCall, queries: BackwardQueries, choice: Tensor, pages: Pages, dq: Tensor
    ) -> None:
        by_page = BackwardQueries(*(_by_page(_whole(x, choice, call), choice) for x in queries))
        whole = _whole(dq, choice, call)
        total = _by_page(whole, choice)
        for slab in pages.slabs():
            dk, dv = pages.sums(slab)
            of_slab = _slab_rows(call, slab, choice)
            for rows, masked in self._parts(of_slab, slab, by_page.q, backward=True):
                part = of_slab.part(rows, masked)
                gradients = self._differentiate(slab, part, by_page, call.scale)
                part.put([total], [part.queries(total).add_(gradients[0])])
                part.add(dk, gradients[1])
                part.add(dv, gradients[2])
                del part, gradients
            pages.add(slab, dk, dv)
            del slab, of_slab, dk, dv
        _put_back([dq], [whole])

    def _attend(self, slab: Slab, part: _Part, q: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        k, v = (part.copies(x) for x in (slab.keys, slab.values))
        return self.kernel.forward(part.queries(q), k, v, part.mask, scale)

    def _differentiate(
        self, slab: Slab, part: _Part, by_page: BackwardQueries, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        queries = BackwardQueries(*(part.queries(x) for x in by_page))
        k, v = (part.copies(x) for x in (slab.keys, slab.values))
        return self.kernel.backward(queries, k, v, part.mask, scale)

    def _parts(
        self, of_slab: _SlabRows, slab: Slab, queries: Tensor, *, backward: bool
    ) -> Iterator[tuple[Tensor, bool]]:
        """Yield the indices of query rows that attend in one call, and whether to mask them."""
        dims = slab.keys.shape[2], slab.values.shape[2]
        row = FarRow(
            queries.shape[3],
            of_slab.query_page,
            of_slab.page,
            slab.units.index.shape[3],
            *dims,
            queries.element_size(),
            isinstance(self.kernel, PlainPages),
        )
        for rows, masked in of_slab.alike():
            # As many as fit if all pages of a row are in one slab: a plan assumes no less.
            count = max(1, self.part_bytes // row.bytes(masked=masked, backward=backward))
            for start in range(0, len(rows), count):
                yield rows[start : start + count], masked


def select_far(device_type: str, head_dim: int, value_dim: int, softcap: float | None) -> FarKernel:
    """Return the kernel for attention to chosen pages without Triton, for heads of these sizes."""
    most = PART_BYTES.get(device_type, PART_BYTES["cuda"])
    if device_type == "cpu" and head_dim == value_dim and softcap is None:
        return Gathered(FlashPages(), most)
    return Gathered(PlainPages(softcap), most)


def _slab_rows(call: FarCall, slab: Slab, choice: Tensor) -> _SlabRows:
    starts = call.documents
    if starts is not None:
        count = choice.shape[2]
        ragged = count * call.query_tokens - starts.shape[1]
        starts = pad(starts, (0, ragged)) if ragged else starts
        starts = starts.unflatten(1, (count, call.query_tokens))
    return _SlabRows(call.page, call.query_tokens, slab.units, starts)


def _whole(x: Tensor, choice: Tensor, call: FarCall) -> Tensor:
    """Return x [B, H, C, ...] padded by zeros, so that all its pages of queries are whole."""
    ragged = choice.shape[2] * call.query_tokens - x.shape[2]
    return pad(x, (0, 0) * (x.ndim - 3) + (0, ragged)) if ragged else x


def _put_back(into: Sequence[Tensor], wholes: Sequence[Tensor]) -> None:
    """Copy results from padded tensors, which `_whole` made, into the unpadded originals."""
    for x, whole in zip(into, wholes, strict=True):
        if whole is not x:
            x.copy_(whole[:, :, : x.shape[2]])


def _by_page(whole: Tensor, choice: Tensor) -> Tensor:
    """View queries [B, H, C, ...] as [B, KV heads, query pages, heads per KV head, tokens, ...]."""
    kv_heads, pages = choice.shape[1:3]
    return whole.unflatten(2, (pages, -1)).unflatten(1, (kv_heads, -1)).transpose(2, 3)
