"""Pages of keys and values as sparse attention asks for them, and a storage in memory.

Legend: T tokens, B batch, Hk key-value heads, P tokens a page, D head dim, Dv value dim. A unit is
one page of one batch row and one key-value head, K [P, D] and V [P, Dv]: the least that is chosen
alone. Units are asked for once each, however many pages of queries chose them, so that a storage on
host moves them in one batched gather and back in one write without collisions. Where there are more
than memory is to hold, the pages of queries are taken in slabs, consecutive runs of them.

Who attends says what was chosen before it needs the pages (`Pages.begin`), so that they may be on
their way while near keys are attended to."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from farspan.attention.backends import accumulate_dtype
from farspan.attention.chunk import KeyValues

MOST_PAGES = 2**31  # more than an int32 names: no device is asked for the largest of a choice
Ends = tuple[tuple[int, int], ...]  # of slabs: the page of queries behind each, and its units


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a choice: distinct, ordered by row, head, page."""

    rows: Tensor  # [U] int64
    heads: Tensor  # [U]
    pages: Tensor  # [U]
    index: Tensor  # [B, Hk, M, k]: which unit each entry of the choice is, -1 where it is -1

    def __len__(self) -> int:
        return len(self.pages)

    def places(self, page: int, batch: int, heads: int) -> Tensor:
        """The rows [U * P] that hold the units in a buffer [T, B, Hk, D] seen as [T * B * Hk, D]:
        what one `index_select` gathers, 2.5 times as fast as indexing three dimensions."""
        token = self.pages[:, None] * page + torch.arange(page, device=self.pages.device)
        token.mul_(batch).add_(self.rows[:, None]).mul_(heads).add_(self.heads[:, None])
        return token.flatten()


def units_of(choice: Tensor, count: int | None = None) -> Units:
    """choice [B, Hk, M, k] -> its units. `count` says how many those are, where that is known; else
    the CPU waits for the device once, to know it."""
    if choice.numel() == 0:
        nothing = torch.empty(0, dtype=torch.int64, device=choice.device)
        return Units(nothing, nothing, nothing, choice.long())
    ordered, order, place = _ranked(choice)
    count = int(place[-1]) if count is None else count
    # Entries of one unit write the same number to one place.
    heads = choice.shape[1]
    units = ordered.new_empty(count + 1).scatter_(0, place, ordered)[1:]
    index = torch.empty_like(order).scatter_(0, order, place - 1).view(choice.shape)
    owner = units // MOST_PAGES
    return Units(owner // heads, owner % heads, units % MOST_PAGES, index)


def index_of(choice: Tensor) -> Tensor:
    """`Units.index` of a choice alone, for which nobody waits."""
    if choice.numel() == 0:
        return choice.long()
    _, order, place = _ranked(choice)
    return torch.empty_like(order).scatter_(0, order, place - 1).view(choice.shape)


def _ranked(choice: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Entries in the order of their units, where each comes from, and the place of its unit, from
    1; 0 where there is none."""
    batch, heads = choice.shape[:2]
    owner = torch.arange(batch * heads, device=choice.device).view(batch, heads, 1, 1)
    number = torch.where(choice < 0, -1, owner * MOST_PAGES + choice).flatten()
    ordered, order = number.sort()
    del number
    first = ordered >= 0
    first[1:] &= ordered[1:] != ordered[:-1]
    return ordered, order, first.cumsum(0)


def ends_of(index: Tensor, most_units: int) -> Ends:
    """Slabs of a choice with this index [B, Hk, M, k], which is on the CPU: each has at most
    `most_units`, or is one page of queries that chose more, and is as long as it may be."""
    pages = index.shape[2]
    count = int(index.max()) + 1 if index.numel() else 0
    if count <= most_units or pages == 1:
        return ((pages, count),)
    return tuple(_slab_ends(index, most_units))


def slabs_of(choice: Tensor, ends: Ends) -> Iterator[tuple[slice, Units]]:
    """The slabs of a choice [B, Hk, M, k] that end there: slices of M, and their units."""
    start = 0
    for stop, count in ends:
        yield slice(start, stop), units_of(choice[:, :, start:stop], count)
        start = stop


def _slab_ends(index: Tensor, most_units: int) -> list[tuple[int, int]]:
    """As `ends_of`. A page of queries brings a slab those of its units that no page of it before
    chose: those that were last chosen, if at all, before the slab began."""
    last = _last_chosen(index).transpose(0, 1).flatten(1)  # [M, B * Hk * k]
    ends, start, ahead = [], 0, 1
    while start < len(last):
        held = (last[start : start + ahead] < start).sum(1).cumsum(0)
        if held[-1] <= most_units and start + ahead < len(last):
            ahead *= 2  # the border lies beyond: all pages to the end would be read for each slab
            continue
        pages = max(1, int((held <= most_units).sum()))
        start, ahead = start + pages, pages + 1
        ends.append((start, int(held[pages - 1])))
    return ends


def _last_chosen(index: Tensor) -> Tensor:
    """Which page of queries before chose the unit of each entry, [B * Hk, M, k]; -1 if none did,
    M where the entry is no page."""
    pages, chosen = index.shape[2:]
    unit, order = index.flatten().sort(stable=True)  # of equals, pages of queries ascend
    by = order // chosen % pages
    again = unit[1:] == unit[:-1]
    last = torch.full_like(by, -1)
    last[1:][again] = by[:-1][again]
    last[unit < 0] = pages
    return torch.empty_like(last).scatter_(0, order, last).view(-1, pages, chosen)


@dataclass(frozen=True, slots=True)
class Slab:
    """Pages of queries whose units were gathered together."""

    run: slice  # of M
    units: Units
    keys: Tensor  # [U, P, D]
    values: Tensor  # [U, P, Dv]


class Resident(NamedTuple):
    """Pages where they lie, in tensors [T, B, Hk, D] of the device of the queries."""

    k: Tensor
    v: Tensor
    dk: Tensor | None  # the sums, in the accumulate dtype; None: no backward follows
    dv: Tensor | None


class Pages(KeyValues, Protocol):
    """K, V of the tokens before a chunk, block by block and page by page, and their gradients."""

    def representatives(self, pages: range) -> Tensor:
        """The mean key of each of these pages [B, Hk, n, D], in the accumulate dtype."""

    def begin(self, choice: Tensor) -> None:
        """The pages of this choice [B, Hk, M, k] will be asked for next."""

    def resident(self) -> Resident | None:
        """All pages where they lie, for a kernel that can read them there; None: to be gathered."""

    def slabs(self) -> Iterator[Slab]:
        """That choice in slabs, in order; K, V of one are valid until the next is asked for."""

    def sums(self, slab: Slab) -> tuple[Tensor, Tensor]:
        """Zeros for dK [U, P, D] and dV [U, P, Dv] of the slab at hand, in the accumulate dtype."""

    def add(self, slab: Slab, dk: Tensor, dv: Tensor) -> None:
        """Add to the sums of the slab's units what was gathered in those of `sums`."""


def page_means(k: Tensor, page: int) -> Tensor:
    """Mean keys [n, B, Hk, D] of the whole pages of k [T, B, Hk, D], in the accumulate dtype."""
    whole = k.shape[0] // page
    return k[: whole * page].unflatten(0, (whole, page)).mean(1, dtype=accumulate_dtype(k.dtype))
