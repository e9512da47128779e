"""Attention of a chunk to chosen pages: what is asked of a kernel, whatever reads the pages.

`Gathered` (gathered.py) copies pages and runs everywhere; a kernel with a page table reads them in
place. Shapes: q [B, H, C, D], out [B, H, C, Dv], lse [B, H, C], choice [B, Hk, M, k].
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from farspan.attention.sparse.pages import Pages


@dataclass(frozen=True, slots=True)
class FarCall:
    """What attention to chosen pages is, besides queries, keys and values."""

    scale: float
    page: int
    documents: Tensor | None = None  # [B, C]: first token of each query's document


class FarKernel(Protocol):
    """Attention to chosen pages, which `pages` was told of (`Pages.begin`). Kernels are stateless
    values."""

    @property
    def softcap(self) -> float | None:
        """The cap that the kernel puts on scores."""

    def forward(
        self, call: FarCall, q: Tensor, choice: Tensor, pages: Pages
    ) -> tuple[Tensor, Tensor]:
        """out in the dtype of q and lse in the accumulate dtype over the chosen pages alone.

        A query that sees no key of them has lse -inf and out zero.
        """

    def backward(
        self,
        call: FarCall,
        dout: Tensor,
        q: Tensor,
        attended: tuple[Tensor, Tensor],
        choice: Tensor,
        pages: Pages,
    ) -> Tensor:
        """dq in the accumulate dtype; dK, dV of the pages go to `pages.sums`, then `pages.add`.

        `attended` is out and lse of the whole softmax, as in backends.py.
        """
