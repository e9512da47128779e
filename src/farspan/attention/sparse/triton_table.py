"""Which pages each query page visits, and by whom each page is visited: what the kernels read.

    choice[b, h, m]      = pages that query page m of the chunk reads, -1 for none
    its inverse, by page = query pages that read it, ascending

The inverse lets one program own all of a page's dK, dV: it walks its visitors in a fixed order and
adds to the totals once, so there are no atomics and the result does not depend on timing.

Letters: B batch rows, Hk heads of keys and values, M query pages, k chosen pages, S slots.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from farspan.attention.sparse.triton_arguments import LARGEST
from farspan.spec import Refused


@dataclass(frozen=True, slots=True)
class Inverse:
    """Visits ordered by (b, h, slot), then by query page. int32, on the device of the choice.

    Rows r = (b * Hk + h) * S + slot own visits [starts[r], starts[r + 1]).
    """

    query_pages: Tensor  # [B * Hk * M * k]; those of entries without a page come last
    pages: Tensor  # [B * Hk * M * k], the visited page of the sequence
    starts: Tensor  # [B * Hk * S + 1]
    rows: Tensor  # [B * Hk * S], the most visited first: the longest program does not start last


@dataclass(frozen=True)
class PageTable:
    """A choice as one call of the kernels reads it: of a chunk in a layer, or of a slab of it.

    Page p is tokens [p * page, (p + 1) * page) of the sequence; query page m is tokens
    [m * page, (m + 1) * page) of the chunk. All chosen pages lie before the chunk: the kernels
    have no causal mask. Without `slots` page p lies at tokens [p * page, ...) of the buffer of
    keys and values; with it, entry e's page lies at [slots[e] * page, ...).
    """

    choice: Tensor  # [B, Hk, M, k] int32, -1 = none, in any order, none twice in a row
    page: int  # tokens
    tokens: int  # of the sequence so far: the last page may be shorter than the others
    buffer_tokens: int  # of the buffer of keys and values
    slots: Tensor | None = None  # [B, Hk, M, k] int32, or None where page p lies in slot p

    def __post_init__(self) -> None:
        self._check_types()
        choice, slots = self.choice, self.places
        none = choice < 0
        ordered = choice.sort(-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        _refuse(twice.any(), "choice: expected each page at most once in a row; drop repetitions")
        _refuse(
            ((choice < -1) | (choice >= self.pages)).any(),
            f"choice: expected pages below {self.pages}, or -1 for none; choose among those of "
            f"{self.tokens} tokens",
        )
        _refuse(
            (~none & ((slots < 0) | (slots >= self.slot_count))).any(),
            f"slots: expected places below {self.slot_count} pages of {self.page} tokens; give "
            "a larger buffer or other slots",
        )

    @property
    def pages(self) -> int:
        return -(-self.tokens // self.page)

    @property
    def slot_count(self) -> int:
        return -(-self.buffer_tokens // self.page)

    @property
    def places(self) -> Tensor:
        """The slot of each entry."""
        return self.choice if self.slots is None else self.slots

    @cached_property
    def inverse(self) -> Inverse:
        """Built by one stable sort, without waiting for the device."""
        batch, kv_heads, query_pages, chosen = self.choice.shape
        rows, slots = batch * kv_heads, self.slot_count
        device = self.choice.device
        first = slots * torch.arange(rows, device=device).view(batch, kv_heads, 1, 1)
        row = (self.places + first).masked_fill(self.choice < 0, rows * slots).flatten()
        ordered, order = row.sort(stable=True)
        starts = torch.searchsorted(ordered, torch.arange(rows * slots + 1, device=device))
        return Inverse(
            query_pages=(order // chosen % query_pages).int(),
            pages=self.choice.flatten()[order],
            starts=starts.int(),
            rows=starts.diff().argsort(descending=True, stable=True).int(),
        )

    def _check_types(self) -> None:
        counts = self.page >= 1 and self.tokens >= 1 and self.buffer_tokens >= 0
        if not counts or max(self.tokens, self.buffer_tokens) > LARGEST:
            raise Refused(
                f"page, tokens: expected 1 to {LARGEST}, buffer_tokens 0 to {LARGEST}, got "
                f"{(self.page, self.tokens, self.buffer_tokens)}; give the sizes in tokens"
            )
        for name, table in (("choice", self.choice), ("slots", self.places)):
            right = table.dtype == torch.int32 and table.shape == self.choice.shape
            if not right or table.ndim != 4 or not table.is_contiguous() or not table.numel():
                raise Refused(
                    f"{name}: expected a contiguous int32 [B, Hk, M, k] with k of 1 or more, got "
                    f"{table.dtype} {tuple(table.shape)}; convert it, or leave out the call "
                    "where nothing is chosen"
                )


def _refuse(wrong: Tensor, message: str) -> None:
    """Raise Refused on a CPU. A GPU is not waited for: it stops at the check when it gets there."""
    if wrong.device.type == "cpu":
        if wrong:
            raise Refused(message)
        return
    torch._assert_async(~wrong, message)
