"""Pages of keys and values: which of them a page of queries attends, by votes of its queries and
selectors that read them; how sparse attention asks for them, and a storage in memory.

Legend: T tokens, B batch, H query heads, Hk key-value heads, r = H / Hk, C tokens of the chunk,
P tokens a page, Q a page of queries (`Sparse.query_tokens`), M = ceil(C / Q) of those (the last may
be ragged), n candidate pages, R mean keys of a page, k chosen ones, D head dim, Dv value dim.

A choice is int32 [B, Hk, M, k]: numbers of pages of the sequence, ascending, then -1 where there
are fewer than k. It is made once, in a chunk's first forward; rebuild and backward get the same.

A unit is one page of one batch row and one key-value head, K [P, D] and V [P, Dv]: the least that
is chosen alone. Units are asked for once each, however many pages of queries chose them, so that a
storage on host moves them in one batched gather and back in one write without collisions. Where
there are more than memory is to hold, they are taken in slabs, consecutive runs of them: all pages
of queries that chose any of a slab attend to those, and the slabs' parts are joined.

Who attends says what was chosen before it needs the pages (`Pages.begin`), so that they may be on
their way while near keys are attended to."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction as Ratio
from math import ceil
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from farspan.attention.backends import accumulate_dtype
from farspan.attention.chunk import KeyValues
from farspan.sparse.sizes import LEAST, UNDIVIDED
from farspan.spec import MEAN, Sparse, UnsupportedError

MOST_PAGES = 2**31  # more than an int32 names: no device is asked for the largest of a choice


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

    def slabs(self, most_units: int) -> Iterator["Units"]:
        """In order, as many as are left but `most_units`; none of no unit."""
        if 0 < len(self) <= most_units:
            yield self
            return
        for start in range(0, len(self), most_units):
            some = slice(start, start + most_units)
            index = self.index - start
            index.masked_fill_((index < 0) | (index >= most_units), -1)
            yield Units(self.rows[some], self.heads[some], self.pages[some], index)


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


def count_of(choice: Tensor) -> Tensor:
    """How many units a choice has, [1], for which nobody waits."""
    if choice.numel() == 0:
        return torch.zeros(1, dtype=torch.int64, device=choice.device)
    return _ranked(choice)[2][-1:].clone()


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


@dataclass(frozen=True, slots=True)
class Slab:
    """Units that were gathered together."""

    units: Units  # `index` is -1 where an entry's unit is of another slab
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
        """Mean keys of these pages [B, Hk, n * R, D], R a page, in the dtype of keys."""

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


def mean_keys(k: Tensor, tokens: int) -> Tensor:
    """Means [n, B, Hk, D] of every `tokens` keys of k [T, B, Hk, D], in its dtype; no mean of a
    ragged rest."""
    whole = k.shape[0] // tokens
    parts = k[: whole * tokens].unflatten(0, (whole, tokens))
    return parts.mean(1, dtype=accumulate_dtype(k.dtype)).to(k.dtype)


# -- which are chosen ------------------------------------------------------------------------------

# The most scores at one time: on a CPU what its cache holds (1 MB in fp32, twice as fast as 32 MB),
# elsewhere 128 MB.
SCORES = {"cpu": 2**18}
SCORES_ELSEWHERE = 2**25


@dataclass(frozen=True, slots=True)
class Candidates:
    """The pages a chunk chooses from; column i of votes is page `pages[i]`."""

    pages: range
    first: Tensor | None = None  # [B, M]: no query of the page sees pages before; None: sees all

    def hidden(self) -> Tensor | None:
        """Columns whose page is hidden from every query: bool [B, 1, M, n]."""
        if self.first is None:
            return None
        pages = torch.arange(self.pages.start, self.pages.stop, device=self.first.device)
        return (pages < self.first[..., None]).unsqueeze(1)


class Selector(Protocol):
    """Chooses pages. Its answer depends on nothing but its arguments and its own fields."""

    def __call__(self, votes: Tensor, candidates: Candidates) -> Tensor:
        """votes [B, Hk, M, n], n >= 1 -> a choice among `candidates`."""


def vote(
    q: Tensor,
    representatives: Tensor,
    sparse: Sparse,
    scale: float,
    documents: Tensor | None,
    first: int,
) -> Tensor:
    """Votes [B, Hk, M, n], in the accumulate dtype, of the queries for pages from `first` on.

    q [B, H, C, D], representatives [B, Hk, n * R, D], documents [B, C] the first token of each
    query's document. A page scores with a query as the largest of scale q . representative over
    its R mean keys (the scale is that of attention), and the query gives weights to the pages it
    sees, a softmax over their scores; one that sees none of them does not vote. With `mean` (R = 1)
    the vote of a page of queries is the sum of those weights over its Q tokens and the r heads
    (OOMB equation 4), with `submeans` the largest of them: what one token of one head needs is
    found, however little the others care.
    """
    batch, heads, tokens, _ = q.shape
    kv_heads, each = representatives.shape[1], sparse.page // sparse.mean_tokens
    pages, together = representatives.shape[2] // each, sparse.query_tokens
    keys = representatives.to(accumulate_dtype(q.dtype)).mT
    number = torch.arange(first, first + pages, device=q.device)
    votes = keys.new_zeros(batch, kv_heads, -(-tokens // together), pages)
    most = SCORES.get(q.device.type, SCORES_ELSEWHERE)
    row = batch * (heads // kv_heads) * max(1, keys.shape[3])
    heads_at_once = min(kv_heads, max(1, UNDIVIDED * most // (row * together)))
    for start, stop in _spans(tokens, together, most // (row * heads_at_once)):
        hidden = None
        if documents is not None:
            hidden = (documents[:, start:stop, None] // sparse.page > number)[:, None, None]
        of_pages = slice(start // together, -(-stop // together))
        for head in range(0, kv_heads, heads_at_once):
            some = slice(head, head + heads_at_once)
            part = q[:, :, start:stop].unflatten(1, (kv_heads, -1))[:, some]
            weights = _weights(part, keys[:, some], scale, each, hidden)
            _pool(votes[:, some, of_pages], weights, together, largest=sparse.selector != MEAN)
    return votes


def _spans(tokens: int, page: int, most: int) -> Iterator[tuple[int, int]]:
    """Tokens of a chunk that vote together, about `most`: whole pages of queries, or parts of
    one."""
    whole = max(1, most // page) * page
    step = whole if UNDIVIDED * most >= page else max(LEAST, most)
    for first in range(0, tokens, whole):
        last = min(first + whole, tokens)
        for start in range(first, last, step):
            yield start, min(start + step, last)


def _weights(q: Tensor, keys: Tensor, scale: float, each: int, hidden: Tensor | None) -> Tensor:
    """What queries [B, h, r, t, D] give to pages, [B, h, r, t, n], by keys [B, h, D, n * R], R =
    `each`; `hidden` is bool [B, 1, 1, t, n]."""
    # The heads of a group stacked: their keys are read once, not copied for each.
    scores = ((q.to(keys.dtype) * scale).flatten(2, 3) @ keys).unflatten(2, q.shape[2:4])
    if each > 1:
        scores = scores.unflatten(4, (-1, each)).amax(5)
    if hidden is None:
        return scores.softmax(-1)
    # A row that is hidden as a whole is nan for a moment.
    return scores.masked_fill_(hidden, -torch.inf).softmax(-1).masked_fill_(hidden, 0.0)


def _pool(votes: Tensor, weights: Tensor, page: int, *, largest: bool) -> None:
    """Count weights [B, h, r, t, n] of m pages of queries, or of a part of one, in their votes
    [B, h, m, n]."""
    ragged = -weights.shape[3] % page
    if weights.shape[3] > page and ragged:
        weights = pad(weights, (0, 0, 0, ragged))
    weights = weights.unflatten(3, (votes.shape[2], -1))
    if largest:
        torch.maximum(votes, weights.amax((2, 4)), out=votes)
    else:
        votes += weights.sum((2, 4))


def _everywhere(count: int, votes: Tensor) -> Tensor:
    """A count for all rows; written by the device, where torch.tensor would wait for a copy."""
    return torch.full((), count, device=votes.device)


@dataclass(frozen=True, slots=True)
class TopK:
    """The pages with most votes; of equals the lower."""

    pages: int

    def __call__(self, votes: Tensor, candidates: Candidates) -> Tensor:
        most = min(self.pages, votes.shape[3])
        return take_most(votes, candidates, _everywhere(most, votes), most)


@dataclass(frozen=True, slots=True)
class Fraction:
    """A share of all pages that a page of queries could see, those with most votes: block-sparse
    attention of a given sparsity (FPDT 5.6 and table 4, which do not say by which rule blocks are
    chosen). The time of a step grows with the square of the tokens, as dense attention's does."""

    sparsity: float  # 0: dense attention

    def __post_init__(self) -> None:
        number = isinstance(self.sparsity, int | float) and not isinstance(self.sparsity, bool)
        if not number or not 0.0 <= self.sparsity <= 1.0:
            raise UnsupportedError(
                f"sparsity: expected a fraction from 0 to 1, got {self.sparsity!r}"
            )

    def __call__(self, votes: Tensor, candidates: Candidates) -> Tensor:
        # A decimal means what it says: 1 - 0.9 is a tenth, of 10 pages one and not two.
        kept = 1 - Ratio(str(self.sparsity))
        most = ceil(kept * votes.shape[3])
        if candidates.first is None:
            return take_most(votes, candidates, _everywhere(most, votes), most)
        seen = (candidates.pages.stop - candidates.first).clamp(0, votes.shape[3])
        counts = -(-seen * kept.numerator // kept.denominator)
        return take_most(votes, candidates, counts[:, None, :, None], most)


@dataclass(frozen=True, slots=True)
class RandomPages:
    """As many pages as `TopK`, whatever the votes are: the control that a retrieval must beat."""

    pages: int
    seed: int

    def __call__(self, votes: Tensor, candidates: Candidates) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, candidates.pages.stop)))
        drawn = torch.rand(votes.shape, generator=generator, dtype=torch.float64)
        return TopK(self.pages)(drawn.to(votes.device), candidates)


@dataclass(frozen=True, slots=True)
class Checked:
    """A function of a user: any order, -1 for no page. Raises UnsupportedError for what is no
    choice."""

    function: Callable[[Tensor, range], Tensor]  # votes [B, Hk, M, n], their pages

    def __call__(self, votes: Tensor, candidates: Candidates) -> Tensor:
        choice = self.function(votes, candidates.pages)
        check_choice(choice, (*votes.shape[:3], None), candidates.pages)
        last = candidates.pages.stop
        ascending = torch.where(choice < 0, last, choice).sort(-1).values
        return torch.where(ascending == last, -1, ascending).int()


def check_choice(choice: Tensor, shape: tuple[int | None, ...], pages: range) -> None:
    """Raise UnsupportedError unless these are whole numbers of `pages` or -1, each once in its
    row."""
    wanted = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
    kind = str(choice.dtype) if isinstance(choice, Tensor) else type(choice).__name__
    if not isinstance(choice, Tensor) or choice.dtype not in (torch.int32, torch.int64):
        raise UnsupportedError(f"selector: expected an int32 tensor {wanted} of pages, got {kind}")
    if choice.ndim != 4 or choice.shape[:3] != shape[:3]:
        raise UnsupportedError(
            f"selector: expected pages of shape {wanted}, got {list(choice.shape)}"
        )
    outside = (choice != -1) & ((choice < pages.start) | (choice >= pages.stop))
    if outside.any():
        raise UnsupportedError(
            f"selector: expected pages from {pages.start} to {pages.stop - 1}, or -1 for none, "
            f"got {int(choice[outside][0])}; column i of the votes is page {pages.start} + i"
        )
    ascending = choice.sort(-1).values
    twice = (ascending[..., 1:] == ascending[..., :-1]) & (ascending[..., 1:] >= 0)
    if twice.any():
        page = int(ascending[..., 1:][twice][0])
        raise UnsupportedError(f"selector: expected each page once in a row, got page {page} twice")


def take_most(votes: Tensor, candidates: Candidates, counts: Tensor, most: int) -> Tensor:
    """In each row the `counts` <= `most` pages with most votes, ties to the lower page.

    Exactly so on every device: topk alone leaves open which of two equals it takes.
    """
    pages, hidden = candidates.pages, candidates.hidden()
    if most == 0:
        return votes.new_empty(*votes.shape[:3], 0, dtype=torch.int32)
    if hidden is not None:
        votes = votes.masked_fill(hidden, -1.0)
    counts = counts.expand(*votes.shape[:3], 1)
    best = votes.topk(most).values
    least = best.gather(3, (counts - 1).clamp(min=0))
    above, equal = votes > least, votes == least
    places = counts - above.sum(3, keepdim=True)
    taken = above | equal & (equal.cumsum(3) <= places)
    if hidden is not None:
        taken &= ~hidden
    column = torch.arange(len(pages), device=votes.device)
    chosen = torch.where(taken, column, len(pages)).topk(most, largest=False).values.sort(3).values
    return torch.where(chosen < len(pages), chosen + pages.start, -1).int()
