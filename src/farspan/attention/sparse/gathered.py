"""Attention to chosen pages by copying them: any device, every feature, trains without Triton.

Legend: B batch, H query heads, Hk key-value heads, r = H / Hk, M pages of queries of P tokens, k
chosen pages, U units (pages.py), X = B * Hk * M. Every page of queries of a key-value head becomes
one row of a batch, which the copies of its pages make a small dense attention:

    q_XRPD [X, r, P, D]    k_XSD, v_XSD [X, 1, k * P, D]    out [X, r, P, Dv], lse [X, r, P]

A row's copies have k * P * (D + Dv) elements, its scores, where a kernel or a mask writes them out,
r * P * k * P; `elements` bounds either, by taking fewer rows at a time. Masks are built only for
rows that need one: pages of queries that chose fewer pages than others, or where a
document begins within a chosen page or behind it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from farspan.attention.merge import accumulate_dtype
from farspan.attention.sparse.far import FarCall, FarKernel
from farspan.attention.sparse.pages import Pages, Units, units_of

aten = torch.ops.aten
Rows = slice | Tensor  # of X


class PageKernel(Protocol):
    """Dense attention of rows X, each with its own keys; `mask` is bool [X, 1, P, S], true where a
    query sees a key. A query that sees none gives lse -inf, out zero and gradients zero."""

    @property
    def softcap(self) -> float | None:
        """The cap that the kernel puts on scores."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """out and lse of these keys alone."""

    def backward(
        self,
        dout: Tensor,
        of_queries: tuple[Tensor, Tensor, Tensor],
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv; `of_queries` is q, and out and lse of the whole softmax."""


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
        self,
        dout: Tensor,
        of_queries: tuple[Tensor, Tensor, Tensor],
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, out, lse = of_queries
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(dout, q, k, v, out, lse, 0.0, False),
            attn_mask=self._float(mask, q.dtype),
            scale=scale,
        )

    def _float(self, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if mask is None:
            return None
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


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
        self,
        dout: Tensor,
        of_queries: tuple[Tensor, Tensor, Tensor],
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, out, lse = of_queries
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
class Gathered:
    """Implements `FarKernel`. Runs rows in as few calls as `elements` allows."""

    kernel: PageKernel
    elements: int = 2**26  # of copied keys and values, or of scores, at one time

    @property
    def softcap(self) -> float | None:
        return self.kernel.softcap

    def forward(
        self, call: FarCall, q: Tensor, choice: Tensor, pages: Pages
    ) -> tuple[Tensor, Tensor]:
        units = units_of(choice)
        keys, values = pages.gather(units)
        q_XRPD = _by_page(q, choice, call.page)
        out = q_XRPD.new_zeros(*q_XRPD.shape[:3], values.shape[2])
        dtype = accumulate_dtype(q.dtype)
        lse = q_XRPD.new_full(q_XRPD.shape[:3], -torch.inf, dtype=dtype)
        for rows, index, mask in self._parts(call, units, q_XRPD, keys, values):
            k, v = (_copies(x, index) for x in (keys, values))
            out[rows], lse[rows] = self.kernel.forward(q_XRPD[rows], k, v, mask, call.scale)
        return _by_head(out, q), _by_head(lse.unsqueeze(3), q).squeeze(3)

    def backward(
        self,
        call: FarCall,
        dout: Tensor,
        q: Tensor,
        attended: tuple[Tensor, Tensor],
        choice: Tensor,
        pages: Pages,
    ) -> Tensor:
        units, dtype = units_of(choice), accumulate_dtype(q.dtype)
        keys, values = pages.gather(units)
        out, lse = attended
        of_queries = dout, q, out, lse.unsqueeze(3)
        dout, q_XRPD, out, lse = (_by_page(x, choice, call.page) for x in of_queries)
        lse = lse.squeeze(3)
        dq = torch.zeros_like(q_XRPD, dtype=dtype)
        dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (keys, values))
        for rows, index, mask in self._parts(call, units, q_XRPD, keys, values):
            k, v = (_copies(x, index) for x in (keys, values))
            given = q_XRPD[rows], out[rows], lse[rows]
            parts = self.kernel.backward(dout[rows], given, k, v, mask, call.scale)
            dq[rows] = parts[0].to(dtype)
            _add_by_unit(dk, index, parts[1])
            _add_by_unit(dv, index, parts[2])
        pages.add(units, dk, dv)
        return _by_head(dq, q)

    def _parts(
        self, call: FarCall, units: Units, q_XRPD: Tensor, keys: Tensor, values: Tensor
    ) -> Iterator[tuple[Rows, Tensor, Tensor | None]]:
        """Rows of X that have pages, with their units [x, k] and the mask that they need."""
        index = units.index.flatten(0, 2)
        if len(units) == 0:
            return
        # No page lies before the sequence, where no query looks.
        first_token = torch.where(index < 0, -call.page, units.pages[index] * call.page)
        starts = _document_starts(call, units.index)
        masked = (first_token < starts.amax(1, keepdim=True)).any(1)
        _, heads, page, _ = q_XRPD.shape
        copied = index.shape[1] * page * (keys.shape[2] + values.shape[2])
        scores = heads * page * index.shape[1] * page
        plain = isinstance(self.kernel, PlainPages)
        with_mask = max(1, self.elements // max(copied, scores))
        without = with_mask if plain else max(1, self.elements // copied)
        if not masked.any():
            for start in range(0, len(index), without):
                rows = slice(start, start + without)
                yield rows, index[rows], None
            return
        some = (index >= 0).any(1)
        for rows in (~masked & some).nonzero().squeeze(1).split(without):
            yield rows, index[rows], None
        within = torch.arange(page, device=index.device)
        for rows in (masked & some).nonzero().squeeze(1).split(with_mask):
            token = (first_token[rows].unsqueeze(2) + within).flatten(1)
            seen = token[:, None] >= starts[rows].unsqueeze(2)
            yield rows, index[rows], seen.unsqueeze(1)


def select_far(device_type: str, head_dim: int, value_dim: int, softcap: float | None) -> FarKernel:
    """A kernel for these heads that every machine has."""
    if device_type == "cpu" and head_dim == value_dim and softcap is None:
        return Gathered(FlashPages())
    return Gathered(PlainPages(softcap))


def _by_page(x: Tensor, choice: Tensor, page: int) -> Tensor:
    """[B, H, C, D] -> [X, r, P, D]; queries that a ragged last page lacks are zeros."""
    kv_heads, pages = choice.shape[1:3]
    whole = pad(x, (0, 0, 0, pages * page - x.shape[2])).unflatten(2, (pages, page))
    return whole.unflatten(1, (kv_heads, -1)).transpose(2, 3).flatten(0, 2)


def _by_head(x: Tensor, like: Tensor) -> Tensor:
    """[X, r, P, D] -> [B, H, C, D] with B, H and C of `like`."""
    batch, heads, tokens, _ = like.shape
    by_head = x.unflatten(0, (batch, heads // x.shape[1], -1)).transpose(2, 3)
    return by_head.flatten(3, 4).flatten(1, 2)[:, :, :tokens]


def _copies(of_units: Tensor, index: Tensor) -> Tensor:
    """[U, P, D], units [x, k] -> [x, 1, k * P, D]; a copy of some unit where there is none."""
    return of_units[index.clamp(min=0)].flatten(1, 2).unsqueeze(1)


def _add_by_unit(total: Tensor, index: Tensor, part: Tensor) -> None:
    """Add part [x, 1, k * P, D] to total [U, P, D] by its units [x, k], in their order.

    Deterministic on either device: index_add_ is so on CPUs, where it is 15 times as fast as a sort
    and sums of segments, and index_put_, which sorts, on CUDA.
    """
    by_page = part.to(total.dtype).reshape(*index.shape, *total.shape[1:])
    some = index >= 0
    units, gradients = index.flatten(), by_page.flatten(0, 1)
    if not some.all():
        units, gradients = index[some], by_page[some]
    if total.device.type == "cpu":
        total.index_add_(0, units, gradients)
    else:
        total.index_put_((units,), gradients, accumulate=True)


def _document_starts(call: FarCall, choice: Tensor) -> Tensor:
    """First token of each query's document [X, P]; 0 for queries that a ragged page lacks."""
    batch, kv_heads, pages = choice.shape[:3]
    if call.documents is None:
        return choice.new_zeros(batch * kv_heads * pages, call.page)
    ragged = pages * call.page - call.documents.shape[1]
    starts = pad(call.documents, (0, ragged)).view(batch, 1, pages, call.page)
    return starts.expand(batch, kv_heads, pages, call.page).flatten(0, 2)
