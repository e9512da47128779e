"""Attention to chosen pages by copying them: any device, every feature, trains without Triton.

Legend: B batch, H query heads, Hk key-value heads, r = H / Hk, M pages of queries of Q tokens, k
chosen pages of P tokens, U units (pages.py). A row is a page of queries of one key-value head; the
copies of its pages make it a small dense attention, and some rows x are attended at a time:

    q_xRQD [x, r, Q, D]    k_xSD, v_xSD [x, 1, k * P, D]    out [x, r, Q, Dv], lse [x, r, Q]

`part_bytes` bounds what such a part holds; units come slab by slab (`Pages.slabs`). Masks are
built only for rows that need one: pages of queries that chose fewer pages than others, or where a
document begins within a chosen page or behind it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from farspan.attention.backends import BackwardQueries, accumulate_dtype
from farspan.sparse.attend import FarCall, FarKernel
from farspan.sparse.pages import Pages, Slab, Units, vote
from farspan.sparse.sizes import PART_BYTES, FarRow
from farspan.spec import Sparse

aten = torch.ops.aten


class PageKernel(Protocol):
    """Dense attention of rows x, each with its own keys; `mask` is bool [x, 1, Q, S], true where a
    query sees a key. A query that sees none gives lse -inf, out zero and gradients zero."""

    @property
    def softcap(self) -> float | None:
        """The cap that the kernel puts on scores."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """out and lse of these keys alone."""

    def backward(
        self, queries: BackwardQueries, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv."""


@dataclass(frozen=True, slots=True)
class FlashPages:
    """aten's flash attention for CPUs: D == Dv."""

    softcap: None = None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, attn_mask=self._float(mask, q.dtype), scale=scale
        )
        if mask is not None:
            # The op gives out 0, but lse 0 too, to a query without keys.
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
    """Matrix products and a softmax in the accumulate dtype: soft caps, D != Dv, any device."""

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
        """Capped and masked scores, and d capped / d uncapped before the mask."""
        dtype = accumulate_dtype(q.dtype)
        scores = q.to(dtype) @ k.to(dtype).mT * scale
        slope: Tensor | float = 1.0
        if self.softcap is not None:
            bounded = torch.tanh(scores / self.softcap)
            scores, slope = bounded * self.softcap, 1 - bounded.square()
        return scores if mask is None else scores.masked_fill(~mask, -torch.inf), slope


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows of a slab."""

    places: tuple[Tensor, Tensor, Tensor]  # where they are in [B, Hk, M, ...], each [x]
    index: Tensor  # [x, k]: their units; any unit where there is none
    mask: Tensor | None  # [x, 1, Q, k * P]

    def queries(self, x: Tensor) -> Tensor:
        """[B, Hk, M, r, Q, ...] -> [x, r, Q, ...]. A kernel takes any strides but the innermost."""
        rows = x[self.places]
        return rows if rows.stride(-1) == 1 else rows.contiguous()

    def copies(self, of_units: Tensor) -> Tensor:
        """[U, P, D] -> [x, 1, k * P, D]."""
        copies = of_units.index_select(0, self.index.flatten())
        return copies.view(len(self.index), 1, -1, of_units.shape[2])

    def add(self, total: Tensor, part: Tensor) -> None:
        """Add part [x, 1, k * P, D] to total [U, P, D] by unit, in the order of the entries. It is
        zero where an entry has no unit: no query sees those keys.

        Deterministic on either device: index_add_ is so on CPUs, where it is 15 times as fast as a
        sort and sums of segments, and index_put_, which sorts, on CUDA.
        """
        gradients = part.to(total.dtype).reshape(-1, *total.shape[1:])
        if total.device.type == "cpu":
            total.index_add_(0, self.index.flatten(), gradients)
        else:
            total.index_put_((self.index.flatten(),), gradients, accumulate=True)


@dataclass(frozen=True, slots=True)
class _SlabRows:
    """The rows of a slab, whose pages of queries are m."""

    page: int
    query_page: int
    run: slice  # of M
    units: Units
    starts: Tensor | None  # [B, M, Q]: first token of each query's document

    def with_pages(self) -> tuple[Tensor, Tensor]:
        """Those of [B, Hk, m], flat, that have pages: they need no mask, or they do."""
        index = self.units.index
        latest = 0 if self.starts is None else self.starts[:, None, self.run].amax(3)
        masked = self._first_tokens(index).amin(3) < latest
        some = (index >= 0).any(3)
        without, with_mask = (some & kind for kind in (~masked, masked))
        return without.flatten().nonzero().squeeze(1), with_mask.flatten().nonzero().squeeze(1)

    def part(self, rows: Tensor, masked: bool) -> _Part:
        _, heads, pages, _ = self.units.index.shape
        owner, page = rows // pages, rows % pages
        places = owner // heads, owner % heads, page + self.run.start
        index = self.units.index.flatten(0, 2)[rows]
        mask = self._mask(places, index) if masked else None
        return _Part(places, index.clamp_(min=0), mask)

    def _mask(self, places: tuple[Tensor, Tensor, Tensor], index: Tensor) -> Tensor:
        within = torch.arange(self.page, device=index.device)
        token = (self._first_tokens(index).unsqueeze(2) + within).flatten(1)
        if self.starts is None:
            starts = index.new_zeros(1, 1).expand(len(index), self.query_page)
        else:
            starts = self.starts[places[0], places[2]]
        return (token[:, None] >= starts.unsqueeze(2)).unsqueeze(1)

    def _first_tokens(self, index: Tensor) -> Tensor:
        """Of the units; where there is none, before the sequence, where no query looks."""
        return torch.where(index < 0, -self.page, self.units.pages[index] * self.page)


@dataclass(frozen=True, slots=True)
class Gathered:
    """Implements `FarKernel`. Gathers a slab's units once, and attends as many of its rows at a
    time as `part_bytes` allow."""

    kernel: PageKernel
    part_bytes: int = PART_BYTES["cpu"]

    @property
    def softcap(self) -> float | None:
        return self.kernel.softcap

    def votes(
        self, call: FarCall, sparse: Sparse, q: Tensor, representatives: Tensor, pages: range
    ) -> Tensor:
        return vote(q, representatives, sparse, call.scale, call.documents, pages.start)

    def forward(
        self, call: FarCall, q: Tensor, choice: Tensor, pages: Pages
    ) -> tuple[Tensor, Tensor]:
        (batch, heads, tokens, _), padded = q.shape, choice.shape[2] * call.query_tokens
        queries = _by_page(q, choice, call.query_tokens)
        lse = q.new_full((batch, heads, padded), -torch.inf, dtype=accumulate_dtype(q.dtype))
        out: Tensor | None = None
        for slab in pages.slabs():
            if out is None:
                shape = batch, padded, heads, slab.values.shape[2]
                out = q.new_zeros(shape).transpose(1, 2)
            results = tuple(_by_page(x, choice, call.query_tokens) for x in (out, lse))
            of_slab = _slab_rows(call, slab, choice)
            for rows, masked in self._parts(of_slab, slab, queries, backward=False):
                part = of_slab.part(rows, masked)
                found = self._attend(slab, part, queries, call.scale)
                for result, x in zip(results, found, strict=True):
                    result[part.places] = x
                del part, found, x
            del slab, of_slab
        assert out is not None
        return out[:, :, :tokens], lse[:, :, :tokens]

    def backward(
        self, call: FarCall, queries: BackwardQueries, choice: Tensor, pages: Pages
    ) -> Tensor:
        q = queries.q
        (batch, heads, tokens, dim), padded = q.shape, choice.shape[2] * call.query_tokens
        dtype = accumulate_dtype(q.dtype)
        given = BackwardQueries(*(_by_page(x, choice, call.query_tokens) for x in queries))
        dq = q.new_zeros(batch, padded, heads, dim, dtype=dtype).transpose(1, 2)
        result = _by_page(dq, choice, call.query_tokens)
        for slab in pages.slabs():
            dk, dv = pages.sums(slab)
            of_slab = _slab_rows(call, slab, choice)
            for rows, masked in self._parts(of_slab, slab, given.q, backward=True):
                part = of_slab.part(rows, masked)
                found = self._differentiate(slab, part, given, call.scale)
                result[part.places] = found[0].to(dtype)
                part.add(dk, found[1])
                part.add(dv, found[2])
                del part, found
            pages.add(slab, dk, dv)
            del slab, of_slab, dk, dv
        return dq[:, :, :tokens]

    def _attend(self, slab: Slab, part: _Part, q: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        k, v = (part.copies(x) for x in (slab.keys, slab.values))
        return self.kernel.forward(part.queries(q), k, v, part.mask, scale)

    def _differentiate(
        self, slab: Slab, part: _Part, given: BackwardQueries, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        queries = BackwardQueries(*(part.queries(x) for x in given))
        k, v = (part.copies(x) for x in (slab.keys, slab.values))
        return self.kernel.backward(queries, k, v, part.mask, scale)

    def _parts(
        self, of_slab: _SlabRows, slab: Slab, queries: Tensor, *, backward: bool
    ) -> Iterator[tuple[Tensor, bool]]:
        """Rows that are attended together, and whether they need a mask."""
        if len(slab.units) == 0:
            return
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
        for rows, masked in zip(of_slab.with_pages(), (False, True), strict=True):
            count = max(1, self.part_bytes // row.bytes(masked=masked, backward=backward))
            for start in range(0, len(rows), count):
                yield rows[start : start + count], masked


def select_far(device_type: str, head_dim: int, value_dim: int, softcap: float | None) -> FarKernel:
    """A kernel for these heads that every machine has."""
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
    return _SlabRows(call.page, call.query_tokens, slab.run, slab.units, starts)


def _by_page(x: Tensor, choice: Tensor, page: int) -> Tensor:
    """[B, H, C, ...] -> [B, Hk, M, r, Q, ...], a view; queries that a ragged last page lacks are
    zeros, and then it is none."""
    kv_heads, pages = choice.shape[1:3]
    ragged = pages * page - x.shape[2]
    if ragged:
        x = pad(x, (0, 0) * (x.ndim - 3) + (0, ragged))
    return x.unflatten(2, (pages, page)).unflatten(1, (kv_heads, -1)).transpose(2, 3)
