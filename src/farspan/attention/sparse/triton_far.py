"""`FarKernel` by the Triton kernels: what `SparseCall` takes on CUDA.

Pages that lie whole in tensors are read, and their gradients summed, where they lie. Those of any
other storage are gathered, slab by slab (`Pages.slabs`), and the kernels find them by their slots:
copies are as large as a slab's distinct pages, not as the choice.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from farspan.attention.sparse.far import FarCall
from farspan.attention.sparse.pages import Pages, Resident, Slab
from farspan.attention.sparse.triton_arguments import LARGEST
from farspan.attention.sparse.triton_pages import (
    Gradients,
    PagedCall,
    attend_pages,
    attend_pages_backward,
)
from farspan.attention.sparse.triton_table import PageTable
from farspan.attention.sparse.triton_tiles import Tiles


@dataclass(frozen=True, slots=True)
class TritonFar:
    """Implements `FarKernel` where `triton_pages.supports` says so."""

    tiles: Tiles | None = None  # None: those of the GPU's table
    softcap: None = None

    def forward(
        self, call: FarCall, q: Tensor, choice: Tensor, pages: Pages
    ) -> tuple[Tensor, Tensor]:
        there = pages.resident()
        if there is not None:
            return attend_pages(self._in_place(call, choice, there), q, there.k, there.v)
        parts = []
        for slab in pages.slabs():
            keys, values = (_as_buffer(x, choice) for x in (slab.keys, slab.values))
            paged = self._gathered(call, choice, slab)
            parts.append(attend_pages(paged, q[:, :, _span(call, slab)], keys, values))
            del slab, keys, values
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
        there = pages.resident()
        if there is not None:
            assert there.dk is not None
            assert there.dv is not None
            paged, totals = self._in_place(call, choice, there), Gradients(there.dk, there.dv)
            return attend_pages_backward(paged, dout, q, there.k, there.v, attended, totals)
        parts = []
        for slab in pages.slabs():
            paged = self._gathered(call, choice, slab)
            span = _span(call, slab)
            of_queries = dout[:, :, span], q[:, :, span], *(x[:, :, span] for x in attended)
            parts.append(self._differentiate(paged, of_queries, slab, pages))
            del slab
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def _differentiate(
        self, paged: PagedCall, of_queries: tuple[Tensor, ...], slab: Slab, pages: Pages
    ) -> Tensor:
        """dq of a slab's queries; `of_queries` is dout, q, out and lse."""
        dout, q, out, lse = of_queries
        sums = pages.sums(slab)
        keys, values, *totals = (
            _as_buffer(x, paged.table.choice) for x in (slab.keys, slab.values, *sums)
        )
        dq = attend_pages_backward(paged, dout, q, keys, values, (out, lse), Gradients(*totals))
        pages.add(slab, *sums)
        return dq

    def _in_place(self, call: FarCall, choice: Tensor, there: Resident) -> PagedCall:
        tokens = there.k.shape[0]
        return self._call(call, PageTable(choice.contiguous(), call.page, tokens, tokens))

    def _gathered(self, call: FarCall, choice: Tensor, slab: Slab) -> PagedCall:
        """The call cut to a slab's queries, on its copies."""
        documents = None if call.documents is None else call.documents[:, _span(call, slab)]
        slots = slab.units.index.int().contiguous()
        of_run = choice[:, :, slab.run].contiguous()
        tokens = len(slab.keys) * call.page
        # Chosen pages are whole and lie before the chunk: the sequence's end cuts off no key.
        table = PageTable(of_run, call.page, LARGEST, tokens, slots)
        return self._call(replace(call, documents=documents), table)

    def _call(self, call: FarCall, table: PageTable) -> PagedCall:
        first = None if call.documents is None else call.documents.int().contiguous()
        return PagedCall(table, call.scale, first, self.tiles)


def _span(call: FarCall, slab: Slab) -> slice:
    """The queries of a slab."""
    return slice(slab.run.start * call.page, slab.run.stop * call.page)


def _as_buffer(of_units: Tensor, choice: Tensor) -> Tensor:
    """[U, P, D] as [U * P, B, Hk, D]: each row and head sees all slots and uses its own."""
    rows, heads = choice.shape[:2]
    return of_units.flatten(0, 1)[:, None, None].expand(-1, rows, heads, -1)
