"""Pages of keys and values: votes of queries for pages, selectors that turn votes into a choice,
and the interface by which sparse attention reads chosen pages.

Legend: T tokens, B batch, H query heads, Hk key-value heads, r = H / Hk, C tokens of the chunk, P
tokens a page, Q a page of queries (`Sparse.query_tokens`), M = ceil(C / Q) pages of queries (the
last may be ragged), n candidate pages, R mean keys of a page, k chosen ones, D head dim, Dv value
dim, N superpages of 16 candidates (the last may be ragged), S superpages whose pages are compared.

A choice is int32 [B, Hk, M, k]: numbers of pages of the sequence, ascending, then -1 if there are
fewer than k. It is made once, in a chunk's first forward; rebuild and backward reuse it.

A unit is one page of one batch row and one key-value head, K [P, D] and V [P, Dv]: the smallest
part that is chosen alone. Each unit is requested once, however many pages of queries chose it, so
that a storage on host moves all in one batched gather and back in one write without collisions. If
there are more than memory should hold, they are taken in slabs, consecutive runs of units: all
pages of queries that chose any of a slab attend to it, and the results for the slabs are joined.

Attention announces a choice before it needs the pages (`Pages.begin`), so that they can be fetched
while near keys are attended to.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction as Ratio
from math import ceil
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from farspan.attention.backends import accumulate_dtype
from farspan.attention.chunk import KeyValues
from farspan.profile.far_sizes import LEAST, UNDIVIDED
from farspan.spec import MEAN, SUPERPAGE, Sparse, UnsupportedError

MOST_PAGES = 2**31  # above any int32: avoids asking the device for the largest page of a choice


@dataclass(frozen=True, slots=True)
class Units:
    """Distinct chosen units (pages of one batch row and KV head), by row, head and page."""

    rows: Tensor  # [U] int64
    heads: Tensor  # [U]
    pages: Tensor  # [U]
    index: Tensor  # [B, Hk, M, k]: the unit of each entry of the choice, -1 for entries of -1

    def __len__(self) -> int:
        return len(self.pages)

    def places(self, page: int, batch: int, heads: int) -> Tensor:
        """Return the row numbers of the units' tokens in a buffer [T, B, KV heads, D] viewed as
        [rows, D]. By these one `index_select` is 2.5 times as fast as indexing three dimensions."""
        token = self.pages[:, None] * page + torch.arange(page, device=self.pages.device)
        token.mul_(batch).add_(self.rows[:, None]).mul_(heads).add_(self.heads[:, None])
        return token.flatten()

    def slabs(self, most_units: int) -> Iterator["Units"]:
        """Yield the units in blocks (slabs) of at most `most_units`, in order."""
        if 0 < len(self) <= most_units:
            yield self
            return
        for start in range(0, len(self), most_units):
            part = slice(start, start + most_units)
            index = self.index - start
            index.masked_fill_((index < 0) | (index >= most_units), -1)
            yield Units(self.rows[part], self.heads[part], self.pages[part], index)


def units_of(choice: Tensor, count: int | None = None) -> Units:
    """Return the distinct units of a choice of pages [B, Hk, M, k]. `count` is their number; if it
    is None, the CPU waits to read the number from the device."""
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
    """Return how many distinct units are chosen, as a tensor [1]: the CPU need not wait."""
    if choice.numel() == 0:
        return torch.zeros(1, dtype=torch.int64, device=choice.device)
    return _ranked(choice)[2][-1:].clone()


def _ranked(choice: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the entries of a choice by unit. Return the sorted entries, the index that each had
    before, and the rank of each entry's unit, from 1; 0 for entries without a page."""
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
    """Gathered keys and values of consecutive units (pages of one batch row and key-value head)."""

    units: Units  # `index` is -1 for entries whose unit is in another slab
    keys: Tensor  # [U, P, D]
    values: Tensor  # [U, P, Dv]


class Resident(NamedTuple):
    """All pages before a chunk, read in place from buffers [T, B, Hk, D] on the queries' device."""

    k: Tensor
    v: Tensor
    dk: Tensor | None  # the sums, in the accumulate dtype; None: no backward follows
    dv: Tensor | None


class Pages(KeyValues, Protocol):
    """Keys, values and their gradients before a chunk, which attention reads by block or page."""

    def representatives(self, pages: range) -> Tensor:
        """Return keys to represent these pages in votes, [B, KV heads, keys, D], in k's dtype."""

    def begin(self, choice: Tensor) -> None:
        """Announce the chosen pages [B, Hk, M, k] to be read next, so that they are fetched."""

    def resident(self) -> Resident | None:
        """Return buffers with all pages, to read in place; None if `slabs` must copy pages."""

    def slabs(self) -> Iterator[Slab]:
        """Yield the announced pages in blocks (slabs), each valid until the next block."""

    def sums(self, slab: Slab) -> tuple[Tensor, Tensor]:
        """Return zeros to which a slab's dK and dV are added, in the accumulate dtype."""

    def add(self, slab: Slab, dk: Tensor, dv: Tensor) -> None:
        """Add dK and dV of a block of gathered pages to the sums over all queries."""


def mean_keys(k: Tensor, tokens: int) -> Tensor:
    """Return the mean of every `tokens` keys in k [T, B, Hk, D], [T // tokens, B, Hk, D]."""
    whole = k.shape[0] // tokens
    parts = k[: whole * tokens].unflatten(0, (whole, tokens))
    return parts.mean(1, dtype=accumulate_dtype(k.dtype)).to(k.dtype)


# -- which are chosen ------------------------------------------------------------------------------

# The most scores at one time: on a CPU its cache holds them (1 MB in fp32, twice as fast as 32 MB),
# elsewhere 128 MB.
SCORES = {"cpu": 2**18}
SCORES_ELSEWHERE = 2**25


@dataclass(frozen=True, slots=True)
class Candidates:
    """The pages that a chunk may choose from. Column i of votes is for page `pages[i]` or, if
    superpages (16 pages each) were ranked, for page `columns()[..., i]`."""

    pages: range
    first: Tensor | None = None  # [B, M]: earlier pages are hidden from all queries; None: none are
    superpages: Tensor | None = None  # [B, Hk, M, S], ascending: only their pages are compared

    def columns(self) -> Tensor | None:
        """Return the page number of each column of votes, for each page of queries; None if no
        superpages were ranked. An incomplete last superpage gives numbers beyond `pages`."""
        if self.superpages is None:
            return None
        within = torch.arange(SUPERPAGE, device=self.superpages.device)
        pages = self.superpages.long().unsqueeze(4) * SUPERPAGE + within
        return pages.flatten(3).add_(self.pages.start)

    def hidden(self) -> Tensor | None:
        """Return which pages no query sees, bool [B, 1 or Hk, M, columns]; None: all are seen."""
        pages = self.columns()
        if pages is not None:
            outside = pages >= self.pages.stop
            if self.first is None:
                return outside
            return outside.logical_or_(pages < self.first[:, None, :, None])
        if self.first is None:
            return None
        pages = torch.arange(self.pages.start, self.pages.stop, device=self.first.device)
        return (pages < self.first[..., None]).unsqueeze(1)

    def numbers(self, columns: Tensor) -> Tensor:
        """Convert chosen columns of the votes [B, Hk, M, k] to page numbers."""
        pages = self.columns()
        return columns + self.pages.start if pages is None else pages.gather(3, columns)

    def spread(self, votes: Tensor) -> Tensor:
        """Return the votes [B, Hk, M, n] for all n candidates, with 0 for pages not compared."""
        pages = self.columns()
        if pages is None:
            return votes
        count = len(self.pages)
        column = (pages - self.pages.start).clamp_(max=count)
        all_votes = votes.new_zeros(*votes.shape[:3], count + 1)
        return all_votes.scatter_(3, column, votes)[..., :count]


class Selector(Protocol):
    """Function that chooses pages by their votes; equal arguments and fields give equal choices."""

    def __call__(self, votes: Tensor, candidates: Candidates) -> Tensor:
        """Return the numbers of the pages [B, Hk, M, k] chosen by votes [B, Hk, M, columns]."""


def vote(
    q: Tensor,
    representatives: Tensor,
    sparse: Sparse,
    scale: float,
    documents: Tensor | None,
    first: int,
) -> Tensor:
    """Return the votes [B, KV heads, query pages, pages] that pages of queries give candidate
    pages, the first of which has the number `first`, in the accumulate dtype.

    q [B, H, C, D], representatives [B, Hk, n * R, D], documents [B, C] the first token of each
    query's document. The score of a page for a query is the largest of scale q . representative
    over its R mean keys (the scale is that of attention), and the query weighs the pages that it
    sees by a softmax over their scores; a query that sees none does not vote. With `mean` (R = 1)
    the vote of a page of queries is the sum of those weights over its Q tokens and the r heads
    (OOMB equation 4), with `submeans` the largest: a page that one token of one head needs is
    found, even if the others give it little weight.
    """
    batch, _, tokens, _ = q.shape
    kv_heads, each = representatives.shape[1], sparse.page // sparse.mean_tokens
    pages, together = representatives.shape[2] // each, sparse.query_tokens
    keys = representatives.to(accumulate_dtype(q.dtype)).mT
    votes = keys.new_zeros(batch, kv_heads, -(-tokens // together), pages)
    for span, heads, of_pages in _voters(q, keys, together):
        hidden = _hidden(documents, span, sparse.page, range(first, first + pages))
        part = q[:, :, span].unflatten(1, (kv_heads, -1))[:, heads]
        weights = _weights(part, keys[:, heads], scale, each, hidden)
        _pool(votes[:, heads, of_pages], weights, together, largest=sparse.selector != MEAN)
    return votes


def _voters(q: Tensor, keys: Tensor, together: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield slices (tokens, KV heads, pages of queries) that cut q [B, H, C, D] into parts, so
    small that memory holds the scores of a part for all `keys` at one time."""
    (batch, heads, tokens, _), kv_heads = q.shape, keys.shape[1]
    most = SCORES.get(q.device.type, SCORES_ELSEWHERE)
    row = batch * (heads // kv_heads) * max(1, keys.shape[3])
    at_once = min(kv_heads, max(1, UNDIVIDED * most // (row * together)))
    for start, stop in _spans(tokens, together, most // (row * at_once)):
        of_pages = slice(start // together, -(-stop // together))
        for head in range(0, kv_heads, at_once):
            yield slice(start, stop), slice(head, head + at_once), of_pages


def _hidden(documents: Tensor | None, span: slice, page: int, pages: range) -> Tensor | None:
    """Return a mask [B, 1, 1, t, n] of the n pages that end before query t's document begins."""
    if documents is None:
        return None
    number = torch.arange(pages.start, pages.stop, device=documents.device)
    return (documents[:, span, None] // page > number)[:, None, None]


def _spans(tokens: int, page: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield spans of about `most` tokens: whole pages of queries, or parts of a large page."""
    whole = max(1, most // page) * page
    step = whole if UNDIVIDED * most >= page else max(LEAST, most)
    for first in range(0, tokens, whole):
        last = min(first + whole, tokens)
        for start in range(first, last, step):
            yield start, min(start + step, last)


def _weights(q: Tensor, keys: Tensor, scale: float, each: int, hidden: Tensor | None) -> Tensor:
    """Return the weights [B, h, r, t, n] that t queries (h KV heads, r query heads of each) give n
    pages of `each` keys: a softmax over pages; 0 where `hidden`, bool [B, 1, 1, t, n]."""
    scores = _scores(q, keys, scale, each)
    if hidden is None:
        return scores.softmax(-1)
    # The softmax gives nan for a row that is hidden entirely.
    return scores.masked_fill_(hidden, -torch.inf).softmax(-1).masked_fill_(hidden, 0.0)


def _scores(q: Tensor, keys: Tensor, scale: float, each: int) -> Tensor:
    """Return queries' scores for pages, the largest of a page's keys; dims as in `_weights`."""
    # The heads of a group stacked: their keys are read once, not copied for each.
    scores = ((q.to(keys.dtype) * scale).flatten(2, 3) @ keys).unflatten(2, q.shape[2:4])
    return scores.unflatten(4, (-1, each)).amax(5) if each > 1 else scores


def _pool(votes: Tensor, weights: Tensor, page: int, *, largest: bool) -> None:
    """Pool the weights [B, h, r, t, n] that single queries give pages into `votes` [B, h, m, n] of
    their m pages of queries, in place: the largest weight or, unless `largest`, the sum."""
    ragged = -weights.shape[3] % page
    if weights.shape[3] > page and ragged:
        weights = pad(weights, (0, 0, 0, ragged), value=-torch.inf if largest else 0.0)
    weights = weights.unflatten(3, (votes.shape[2], -1))
    if largest:
        torch.maximum(votes, weights.amax((2, 4)), out=votes)
    else:
        votes += weights.sum((2, 4))


# Among many candidates, superpages are ranked, and only pages of the best are compared.


def super_keys(representatives: Tensor, sparse: Sparse) -> Tensor:
    """Return keys for ranking superpages (16 pages each), [B, KV heads, keys, D], from the pages'
    mean keys. Each is a mean of 4 tokens, less the mean of all tokens, which favours no page. If
    the last superpage lacks pages, its last key is repeated."""
    each = sparse.super_tokens // sparse.mean_tokens
    parts = representatives.unflatten(2, (-1, each))
    count = parts.shape[2]
    whole = SUPERPAGE * sparse.page // sparse.super_tokens
    keys = parts.new_empty(*parts.shape[:2], -(-count // whole) * whole, parts.shape[4])
    torch.mean(parts, 3, out=keys[:, :, :count])
    # The mean favours no page, but dominates some heads' scores.
    keys[:, :, :count] -= keys[:, :, :count].mean(2, keepdim=True)
    keys[:, :, count:] = keys[:, :, count - 1 : count]
    return keys


def largest_scores(
    q: Tensor, keys: Tensor, sizes: tuple[int, int, int], scale: float, documents: Tensor | None
) -> Tensor:
    """Return the largest score that any query of a page has for any key of a superpage, [B, KV
    heads, query pages, superpages]; -inf if no query sees the superpage. `sizes` are keys per
    superpage, tokens per superpage and queries per page; `documents` [B, C] are the first tokens of
    the queries' documents, counted from the first superpage."""
    each, page, together = sizes
    kv_heads, keys = keys.shape[1], keys.to(accumulate_dtype(q.dtype)).mT
    pages = range(keys.shape[3] // each)
    shape = q.shape[0], kv_heads, -(-q.shape[2] // together), len(pages)
    best = keys.new_full(shape, -torch.inf)
    for span, heads, of_pages in _voters(q, keys, together):
        part = q[:, :, span].unflatten(1, (kv_heads, -1))[:, heads]
        scores = _scores(part, keys[:, heads], scale, each)
        hidden = _hidden(documents, span, page, pages)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        _pool(best[:, heads, of_pages], scores, together, largest=True)
    return best


def best_superpages(scores: Tensor, count: int) -> Tensor:
    """Return, for each page of queries, the `count` superpages with the largest scores, int32."""
    superpages = Candidates(range(scores.shape[3]))
    return take_most(scores, superpages, _scalar(count, scores), count)


def vote_refined(
    q: Tensor,
    representatives: Tensor,
    sparse: Sparse,
    scale: float,
    documents: Tensor | None,
    candidates: Candidates,
) -> Tensor:
    """Return votes as `vote` does, but only for pages in the best superpages (16 pages each), [B,
    KV heads, query pages, pages]."""
    assert candidates.superpages is not None
    columns = candidates.columns()
    assert columns is not None
    (batch, heads, tokens, dim), kv_heads = q.shape, representatives.shape[1]
    together, dtype = sparse.query_tokens, accumulate_dtype(q.dtype)
    votes = q.new_zeros(columns.shape, dtype=dtype)
    means = SUPERPAGE * sparse.page // sparse.mean_tokens
    row = batch * kv_heads * means * (dim + heads // kv_heads * together)
    at_once = max(1, SCORES.get(q.device.type, SCORES_ELSEWHERE) // row)
    whole = tokens // together
    parts = [(m, min(m + at_once, whole), together) for m in range(0, whole, at_once)]
    if tokens % together:
        parts.append((whole, whole + 1, tokens % together))
    for start, stop, each in parts:
        run, span = slice(start, stop), slice(start * together, (stop - 1) * together + each)
        part = q[:, :, span].to(dtype).mul_(scale) if dtype != q.dtype else q[:, :, span] * scale
        part = part.unflatten(1, (kv_heads, -1)).unflatten(3, (-1, each)).transpose(2, 3)
        scores = _refined_scores(part.flatten(3, 4), representatives, candidates, run)
        hidden = (columns[:, :, run] >= candidates.pages.stop).unsqueeze(3)
        if documents is not None:
            first_page = (documents[:, None, span] // sparse.page).unflatten(2, (-1, each))
            first_page = first_page.repeat(1, 1, 1, heads // kv_heads).unsqueeze(4)
            hidden = hidden | (columns[:, :, run].unsqueeze(3) < first_page)
        weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1).masked_fill_(hidden, 0.0)
        votes[:, :, run] = weights.amax(3)
    return votes


def _refined_scores(
    q: Tensor, representatives: Tensor, candidates: Candidates, run: slice
) -> Tensor:
    """Return the scores of queries for all pages of the superpages chosen for their query page, [B,
    KV heads, query pages, queries, pages]. `run` is the range of query pages in q."""
    assert candidates.superpages is not None
    superpages = candidates.superpages[:, :, run].long()
    last, each = representatives.shape[2] - 1, representatives.shape[2] // len(candidates.pages)
    within = torch.arange(SUPERPAGE * each, device=q.device)
    batch, head = (torch.arange(n, device=q.device) for n in q.shape[:2])
    batch, head = batch.view(-1, 1, 1, 1), head.view(1, -1, 1, 1)
    scores = q.new_empty(*q.shape[:4], superpages.shape[3] * SUPERPAGE)
    for which, part in enumerate(scores.split(SUPERPAGE, 4)):
        at = superpages[..., which, None] * len(within) + within
        keys = representatives[batch, head, at.clamp_(max=last)].to(q.dtype)
        torch.amax((q @ keys.mT).unflatten(4, (SUPERPAGE, each)), 5, out=part)
    return scores


def _scalar(count: int, votes: Tensor) -> Tensor:
    """Return a scalar tensor, filled on the device: torch.tensor would wait for a copy."""
    return torch.full((), count, device=votes.device)


@dataclass(frozen=True, slots=True)
class TopK:
    """Selector of the `pages` pages with the most votes; of equal pages the lower number."""

    pages: int

    def __call__(self, votes: Tensor, candidates: Candidates) -> Tensor:
        most = min(self.pages, votes.shape[3])
        return take_most(votes, candidates, _scalar(most, votes), most)


@dataclass(frozen=True, slots=True)
class Fraction:
    """Selector of a fixed share of the pages that a page of queries could see, by most votes:
    block-sparse attention of a given sparsity (FPDT 5.6 and table 4, which do not state how blocks
    are chosen). The time of a step grows with the square of the tokens, as with dense attention."""

    sparsity: float  # 0: dense attention

    def __post_init__(self) -> None:
        number = isinstance(self.sparsity, int | float) and not isinstance(self.sparsity, bool)
        if not number or not 0.0 <= self.sparsity <= 1.0:
            raise UnsupportedError(
                f"sparsity: expected a fraction from 0 to 1, got {self.sparsity!r}"
            )

    def __call__(self, votes: Tensor, candidates: Candidates) -> Tensor:
        # A decimal is taken exactly: 1 - 0.9 is a tenth, so of 10 pages one and not two.
        share = 1 - Ratio(str(self.sparsity))
        pages = len(candidates.pages)
        most = min(ceil(share * pages), votes.shape[3])
        if candidates.first is None:
            return take_most(votes, candidates, _scalar(most, votes), most)
        seen = (candidates.pages.stop - candidates.first).clamp(0, pages)
        counts = (-(-seen * share.numerator // share.denominator)).clamp(max=most)
        return take_most(votes, candidates, counts[:, None, :, None], most)


@dataclass(frozen=True, slots=True)
class RandomPages:
    """Selector of as many pages as `TopK`, at random: a baseline for the other selectors."""

    pages: int
    seed: int

    def __call__(self, votes: Tensor, candidates: Candidates) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, candidates.pages.stop)))
        shape = *votes.shape[:3], len(candidates.pages)
        drawn = torch.rand(shape, generator=generator, dtype=torch.float64)
        everything = replace(candidates, superpages=None)
        return TopK(self.pages)(drawn.to(votes.device), everything)


@dataclass(frozen=True, slots=True)
class Checked:
    """Selector that calls a user's function, and checks its result: page numbers, -1 for none."""

    function: Callable[[Tensor, range], Tensor]  # votes [B, Hk, M, n], their pages

    def __call__(self, votes: Tensor, candidates: Candidates) -> Tensor:
        choice = self.function(candidates.spread(votes), candidates.pages)
        check_choice(choice, (*votes.shape[:3], None), candidates.pages)
        last = candidates.pages.stop
        ascending = torch.where(choice < 0, last, choice).sort(-1).values
        return torch.where(ascending == last, -1, ascending).int()


def check_choice(choice: Tensor, shape: tuple[int | None, ...], pages: range) -> None:
    """Raise UnsupportedError unless a user's choice has this shape (None: any size) and each row
    contains numbers in `pages`, none of them twice, or -1."""
    expected = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
    got = str(choice.dtype) if isinstance(choice, Tensor) else type(choice).__name__
    if not isinstance(choice, Tensor) or choice.dtype not in (torch.int32, torch.int64):
        raise UnsupportedError(f"selector: expected an int32 tensor {expected} of pages, got {got}")
    if choice.ndim != 4 or choice.shape[:3] != shape[:3]:
        raise UnsupportedError(
            f"selector: expected pages of shape {expected}, got {list(choice.shape)}"
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
    """Return the pages with the most votes for each page of queries, `counts` <= `most` of them; of
    equal pages the lower number, on every device: topk alone leaves open which of two equals it
    takes."""
    columns, hidden = votes.shape[3], candidates.hidden()
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
    column = torch.arange(columns, device=votes.device)
    chosen = torch.where(taken, column, columns).topk(most, largest=False).values.sort(3).values
    numbers = candidates.numbers(chosen.clamp(max=columns - 1))
    return torch.where(chosen < columns, numbers, -1).int()
