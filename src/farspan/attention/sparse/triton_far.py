"""`FarKernel` by the Triton kernels: what `SparseCall` takes on CUDA.

Pages that lie whole in tensors are read, and their gradients summed, where they lie. Those of any
other storage are gathered, each once, and the kernels find them by their slots: the copies are as
large as the distinct pages, not as the choice.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from farspan.attention.sparse.far import FarCall
from farspan.attention.sparse.pages import Pages, units_of
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
        units = units_of(choice)
        keys, values = (_as_buffer(x, choice) for x in pages.gather(units))
        return attend_pages(self._gathered(call, choice, units.index, keys), q, keys, values)

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
        units = units_of(choice)
        gathered = pages.gather(units)
        keys, values = (_as_buffer(x, choice) for x in gathered)
        sums = [torch.zeros_like(x, dtype=torch.float32) for x in gathered]
        totals = Gradients(*(_as_buffer(x, choice) for x in sums))
        paged = self._gathered(call, choice, units.index, keys)
        dq = attend_pages_backward(paged, dout, q, keys, values, attended, totals)
        pages.add(units, *sums)
        return dq

    def _in_place(self, call: FarCall, choice: Tensor, pages: Resident) -> PagedCall:
        tokens = pages.k.shape[0]
        return self._call(call, PageTable(choice.contiguous(), call.page, tokens, tokens))

    def _gathered(self, call: FarCall, choice: Tensor, index: Tensor, keys: Tensor) -> PagedCall:
        slots = index.int().contiguous()
        # Chosen pages are whole and lie before the chunk: the sequence's end cuts off no key.
        table = PageTable(choice.contiguous(), call.page, LARGEST, keys.shape[0], slots)
        return self._call(call, table)

    def _call(self, call: FarCall, table: PageTable) -> PagedCall:
        first = None if call.documents is None else call.documents.int().contiguous()
        return PagedCall(table, call.scale, first, self.tiles)


def _as_buffer(of_units: Tensor, choice: Tensor) -> Tensor:
    """[U, P, D] as [U * P, B, Hk, D]: each row and head sees all slots and uses its own."""
    rows, heads = choice.shape[:2]
    return of_units.flatten(0, 1)[:, None, None].expand(-1, rows, heads, -1)
