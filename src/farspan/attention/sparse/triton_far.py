"""`FarKernel` by the Triton kernels: what `SparseCall` takes on CUDA.

Pages that lie whole in tensors are read, and their gradients summed, where they lie. Those of any
other storage are gathered, slab by slab (slabs_of), and the kernels find them by their slots: the
copies are as large as a slab's distinct pages, not as the choice.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from farspan.attention.sparse.far import FarCall
from farspan.attention.sparse.pages import Pages, Units, slabs_of
from farspan.attention.sparse.triton_arguments import LARGEST
from farspan.attention.sparse.triton_pages import (
    Gradients,
    PagedCall,
    attend_pages,
    attend_pages_backward,
)
from farspan.attention.sparse.triton_table import PageTable
from farspan.attention.sparse.triton_tiles import Tiles


@runtime_checkable
class Resident(Protocol):
    """Pages in tensors [T, B, Hk, D] on the device of the queries; dk, dv are the sums, fp32."""

    k: Tensor
    v: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True, slots=True)
class TritonFar:
    """Implements `FarKernel` where `triton_pages.supports` says so."""

    tiles: Tiles | None = None  # None: those of the GPU's table
    softcap: None = None

    def forward(
        self, call: FarCall, q: Tensor, choice: Tensor, pages: Pages
    ) -> tuple[Tensor, Tensor]:
        if isinstance(pages, Resident):
            return attend_pages(self._in_place(call, choice, pages), q, pages.k, pages.v)
        parts = []
        for span, slab in _slabs(call, choice):
            keys, values = (_as_buffer(x, choice) for x in pages.gather(slab.units))
            parts.append(attend_pages(self._gathered(slab, keys), q[:, :, span], keys, values))
            del keys, values
        if len(parts) == 1:
            return parts[0]
        return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)

    def backward(
        self,
        call: FarCall,
        dout: Tensor,
        q: Tensor,
        attended: tuple[Tensor, Tensor],
        choice: Tensor,
        pages: Pages,
    ) -> Tensor:
        attended = attended[0].to(q.dtype), attended[1]
        if isinstance(pages, Resident):
            paged, totals = self._in_place(call, choice, pages), Gradients(pages.dk, pages.dv)
            return attend_pages_backward(paged, dout, q, pages.k, pages.v, attended, totals)
        parts = []
        for span, slab in _slabs(call, choice):
            of_queries = dout[:, :, span], q[:, :, span], tuple(x[:, :, span] for x in attended)
            parts.append(self._differentiate(slab, *of_queries, pages))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def _differentiate(
        self,
        slab: "_Slab",
        dout: Tensor,
        q: Tensor,
        attended: tuple[Tensor, ...],
        pages: Pages,
    ) -> Tensor:
        gathered = pages.gather(slab.units)
        keys, values = (_as_buffer(x, slab.choice) for x in gathered)
        sums = [torch.zeros_like(x, dtype=torch.float32) for x in gathered]
        totals = Gradients(*(_as_buffer(x, slab.choice) for x in sums))
        paged, (out, lse) = self._gathered(slab, keys), attended
        dq = attend_pages_backward(paged, dout, q, keys, values, (out, lse), totals)
        del gathered, keys, values
        pages.add(slab.units, *sums)
        return dq

    def _in_place(self, call: FarCall, choice: Tensor, pages: Resident) -> PagedCall:
        tokens = pages.k.shape[0]
        return self._call(call, PageTable(choice.contiguous(), call.page, tokens, tokens))

    def _gathered(self, slab: "_Slab", keys: Tensor) -> PagedCall:
        slots = slab.units.index.int().contiguous()
        # Chosen pages are whole and lie before the chunk: the sequence's end cuts off no key.
        table = PageTable(slab.choice, slab.call.page, LARGEST, keys.shape[0], slots)
        return self._call(slab.call, table)

    def _call(self, call: FarCall, table: PageTable) -> PagedCall:
        first = None if call.documents is None else call.documents.int().contiguous()
        return PagedCall(table, call.scale, first, self.tiles)


@dataclass(frozen=True, slots=True)
class _Slab:
    """A call and a choice cut to some pages of queries, and their units."""

    call: FarCall
    choice: Tensor  # [B, Hk, m, k]
    units: Units


def _slabs(call: FarCall, choice: Tensor) -> Iterator[tuple[slice, _Slab]]:
    """The slabs of a chunk, and the queries of each."""
    for run, units in slabs_of(choice, call.most_units):
        span = slice(run.start * call.page, run.stop * call.page)
        documents = None if call.documents is None else call.documents[:, span]
        of_run = choice[:, :, run].contiguous()
        yield span, _Slab(replace(call, documents=documents), of_run, units)


def _as_buffer(of_units: Tensor, choice: Tensor) -> Tensor:
    """[U, P, D] as [U * P, B, Hk, D]: each row and head sees all slots and uses its own."""
    rows, heads = choice.shape[:2]
    return of_units.flatten(0, 1)[:, None, None].expand(-1, rows, heads, -1)
