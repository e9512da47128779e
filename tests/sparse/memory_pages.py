"""Pages that lie in tensors and in slabs of them: what the sparse side is tested over."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from farspan.attention.backends import accumulate_dtype
from farspan.profile.far_sizes import MOST_UNITS
from farspan.sparse.pages import Resident, Slab, Units, mean_keys, units_of


@dataclass(slots=True)
class MemoryPages:
    """Pages over contiguous k [T, B, Hk, D] and v [T, B, Hk, Dv], which may be uninitialised.

    Invariant: `means` are those of the whole pages written last; dk, dv are sums since `clear`.
    """

    k: Tensor
    v: Tensor
    page: int
    most_units: int = MOST_UNITS  # of a slab
    mean_tokens: int | None = None  # None: those of a page
    choice: Tensor | None = None  # at hand
    means: Tensor = field(init=False)
    dk: Tensor = field(init=False)
    dv: Tensor = field(init=False)

    def __post_init__(self) -> None:
        dtype = accumulate_dtype(self.k.dtype)
        self.mean_tokens = self.mean_tokens or self.page
        self.means = self.k.new_empty(len(self.k) // self.mean_tokens, *self.k.shape[1:])
        self.dk, self.dv = (torch.zeros_like(x, dtype=dtype) for x in (self.k, self.v))
        assert self.k.is_contiguous()
        assert self.v.is_contiguous()

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        """Keep a chunk's k [B, Hk, C, D] and v [B, Hk, C, Dv]; it begins on a page."""
        assert start % self.page == 0, (start, self.page)
        stop = start + k.shape[2]
        self.k[start:stop], self.v[start:stop] = k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)
        tokens = self.mean_tokens
        assert tokens is not None
        whole = slice(start // tokens, stop // tokens)
        self.means[whole] = mean_keys(self.k[start:stop], tokens)

    def clear(self) -> None:
        """Forget the sums of gradients: a new step begins."""
        self.dk.zero_()
        self.dv.zero_()

    def keys(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self.k[start:stop].permute(1, 2, 0, 3), self.v[start:stop].permute(1, 2, 0, 3)

    def add_gradient(self, start: int, stop: int, rows: slice, dk: Tensor, dv: Tensor) -> None:
        self.dk[start:stop, rows] += dk.permute(2, 0, 1, 3)
        self.dv[start:stop, rows] += dv.permute(2, 0, 1, 3)

    def representatives(self, pages: range) -> Tensor:
        assert self.mean_tokens is not None
        each = self.page // self.mean_tokens
        return self.means[pages.start * each : pages.stop * each].permute(1, 2, 0, 3)

    def begin(self, choice: Tensor) -> None:
        self.choice = choice

    def resident(self) -> Resident:
        return Resident(self.k, self.v, self.dk, self.dv)

    def slabs(self) -> Iterator[Slab]:
        assert self.choice is not None
        choice, self.choice = self.choice, None
        for units in units_of(choice).slabs(self.most_units):
            yield Slab(units, *self.gather(units))

    def gather(self, units: Units) -> tuple[Tensor, Tensor]:
        """K [U, P, D] and V [U, P, Dv] of the units."""
        places = units.places(self.page, *self.k.shape[1:3])
        k, v = (x.view(-1, x.shape[3]).index_select(0, places) for x in (self.k, self.v))
        size = len(units), self.page
        return k.unflatten(0, size), v.unflatten(0, size)

    def sums(self, slab: Slab) -> tuple[Tensor, Tensor]:
        dtype = accumulate_dtype(slab.keys.dtype)
        dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (slab.keys, slab.values))
        return dk, dv

    def add(self, slab: Slab, dk: Tensor, dv: Tensor) -> None:
        places = slab.units.places(self.page, *self.k.shape[1:3])
        for total, gradient in ((self.dk, dk), (self.dv, dv)):
            # Units are distinct: nothing is added twice to one place, so no order matters.
            total.view(-1, total.shape[3]).index_add_(0, places, gradient.flatten(0, 1))
