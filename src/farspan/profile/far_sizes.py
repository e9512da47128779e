"""Peak bytes of page-sparse attention: of choosing pages, attending to them, measuring their mass.

The chosen pages are gathered once in blocks (slabs, `program.far_sizes`). Rows (a row is one page
of queries of one key-value head) are attended in parts: each row's pages are copied next to each
other, and the results joined to earlier ones. Parts do not grow with the prefix or the chunk.
"""

from dataclasses import dataclass, replace
from typing import Self

from farspan.program.far_sizes import INDEX, Far
from farspan.spec import SUPERPAGE

# 256 MiB of pages of 128 tokens with 128 + 128 dims of 2 bytes: for callers that pass nothing.
MOST_UNITS = 2**12
# A part's copies, gradients and masks. On a CPU 2 MiB and 128 MiB are equally fast; it fills a GPU.
PART_BYTES = {"cpu": 2**24, "cuda": 2**28}

# Most numbers per entry of the choice while units and borders of slabs are found: the first held
# while pages are gathered and attended, the second only before.
HELD, FOUND = 10, 16


@dataclass(frozen=True, slots=True)
class FarRow:
    """One page of queries of one key-value head, with its chosen pages of keys."""

    group: int  # query heads of the key-value head
    query_page: int  # tokens
    page: int  # tokens
    chosen: int  # pages
    head_dim: int
    value_dim: int
    width: int  # bytes of an element
    plain: bool = False  # scores are written to memory (PlainPages)

    @classmethod
    def of(cls, far: Far) -> Self:
        group, dims = far.heads // far.kv_heads, (far.head_dim, far.value_dim)
        return cls(group, far.query_page, far.page, far.chosen, *dims, far.width, far.plain)

    @property
    def wide(self) -> int:
        return max(4, self.width)

    @property
    def keys(self) -> int:
        return self.chosen * self.page

    @property
    def queries(self) -> int:
        return self.group * self.query_page

    def bytes(self, *, masked: bool, backward: bool) -> int:
        """Peak bytes of one page of queries, while it attends or its result is added to others."""
        if backward:
            return max(self._backward(masked), self._joined_backward(masked))
        return max(self._forward(masked), self._joined(masked))

    def _forward(self, masked: bool) -> int:
        out = self.queries * (self.value_dim * self.width + self.wide)
        given = self.queries * self.head_dim * self.width + self._copies(masked)
        # aten packs keys and values of 16 bits once more; a mask also takes a copy of the LSEs.
        packed = 0 if self.plain or self.width == self.wide else self._keys_and_values()
        return given + packed + out + self._plain() + masked * self.queries * self.wide

    def _backward(self, masked: bool) -> int:
        of_queries = (self.head_dim + 2 * self.value_dim) * self.width + self.wide
        gradients = self.queries * self.head_dim * self.width
        gradients += self._keys_and_values()
        computed = self.queries * of_queries + self._copies(masked) + gradients + self._plain()
        if not self.plain:
            computed += self.queries * self.value_dim * self.width  # within aten
        return computed

    def _joined(self, masked: bool) -> int:
        """Peak bytes of adding the output to that of keys attended before, in the forward."""
        narrow = self.width < self.wide and not self.plain
        part = self.value_dim * self.width + self.wide
        whole = (self.value_dim + 1) * self.wide
        weights = 2 * self.wide + 1 + narrow * self.value_dim * self.wide
        return self._part(masked) + self.queries * (part + whole + weights)

    def _joined_backward(self, masked: bool) -> int:
        """Peak bytes of adding dK, dV to the sums of queries attended before, in the backward."""
        gradients = self.queries * self.head_dim * self.width + self._keys_and_values()
        widest = self.queries * self.head_dim
        if self.width < self.wide:
            widest = max(widest, self.keys * max(self.head_dim, self.value_dim))
        return self._part(masked) + gradients + widest * self.wide

    def _part(self, masked: bool) -> int:
        return self._index() + masked * self.query_page * self.keys

    def _index(self) -> int:
        return INDEX * (3 + 1 + 2 * self.chosen)

    def _keys_and_values(self) -> int:
        return self.keys * (self.head_dim + self.value_dim) * self.width

    def _copies(self, masked: bool) -> int:
        copies = self._index() + self._keys_and_values()
        if masked:
            # A bool and a float per score, and the start of each query's document.
            copies += self.query_page * (self.keys * (1 + self.width) + INDEX)
        return copies

    def _plain(self) -> int:
        """Return the most bytes that `PlainPages` (attention in plain PyTorch) takes beyond copied
        pages and results; 0 for other kernels. In the accumulate dtype it takes six score matrices,
        the inputs, and per query head two copies of K and V, or of their gradients."""
        if not self.plain:
            return 0
        dims = self.head_dim + self.value_dim
        each = 6 * self.queries * self.keys + 2 * self.group * self.keys * dims
        return self.wide * (each + self.keys * dims + 2 * self.queries * dims)


def far_bytes(
    far: Far,
    most_units: int = MOST_UNITS,
    part: int = PART_BYTES["cpu"],
    *,
    backward: bool,
    in_slots: bool = False,
) -> int:
    """Return the peak bytes of attention to chosen pages in one chunk's forward or backward, on a
    CPU. Tensors to which results are added do not count; nor do gathered pages if `in_slots`.

    Reached if all gathered pages differ and as many as possible are gathered. In addition, aten's
    flash attention takes up to 0.3 MB a thread.
    """
    if not far.chosen or not far.candidates:
        return 0
    row, units, entries = FarRow.of(far), far.units(most_units), far.entries
    rows = far.batch * far.kv_heads * far.query_pages
    unit = far.page * (far.head_dim + far.value_dim)
    slab = 0 if in_slots else units * unit * (far.width + backward * row.wide)
    most = max(
        min(rows, max(1, part // size)) * size
        for size in (row.bytes(masked=masked, backward=backward) for masked in (False, True))
    )
    # An index for each token of a unit, while pages are gathered and while gradients are added.
    moving = INDEX * units * far.page
    found = INDEX * FOUND * entries
    if in_slots:
        found, moving = found + moving, 0  # of the next slab
    # A kernel that reads pages in place has results for the whole chunk.
    fresh = far.batch * far.tokens * far.heads
    fresh *= far.head_dim * row.wide if backward else far.value_dim * far.width + row.wide
    attended = INDEX * HELD * entries + slab + max(most, moving, fresh)
    return _chunk_bytes(far, backward) + max(attended, found)


def _chunk_bytes(far: Far, backward: bool) -> int:
    """Return the bytes of padded copies of a chunk whose last page is incomplete."""
    if far.tokens % far.query_page == 0:
        return 0
    tokens, wide = far.batch * far.query_pages * far.query_page, far.wide
    if backward:
        given = (far.head_dim + 2 * far.value_dim) * far.width + wide + far.head_dim * wide
    else:
        given = far.head_dim * far.width + (far.value_dim + 1) * wide
    return tokens * (far.heads * given + INDEX)


# -- choosing -------------------------------------------------------------------------------------

# Elements of scores that votes hold at one time on a CPU, or one page of queries' if that is more.
# On a GPU there are more (sparse.pages), which no plan counts.
SCORES = 2**18
# A page of queries may exceed that by this factor before it is divided: that is as fast, and matrix
# products of fewer than 16 queries are not.
UNDIVIDED, LEAST = 4, 16
SAMPLES = 16  # queries of a cell whose visible mass is measured
WATCHED_KEYS = 1024  # keys per comparison with them
MASKS = 3  # bytes of masks per sample and key


def choice_bytes(far: Far) -> int:
    """Return the peak bytes of choosing one chunk's pages: a learned index's queries, and with them
    first mean keys in the accumulate dtype and scores of some heads and queries, then votes, sorted
    votes and masks. Superpages need as much, and copies of their pages' mean keys."""
    wide, keys = far.wide, far.candidates * far.means
    copied, dim = far.width < wide, far.index_dim or far.head_dim
    if far.refined:
        count = -(-far.candidates // SUPERPAGE)
        whole = replace(far, refined=0, candidates=count, means=SUPERPAGE * far.ranking)
        keys = far.batch * far.kv_heads * count * whole.means * dim
        return max(choice_bytes(whole) + far.width * keys, _refining_bytes(far, dim))
    heads, queries = _voting(far, keys)
    means = copied * far.batch * far.kv_heads * dim * keys
    given = 2 * far.batch * heads * queries * dim
    indexed = far.batch * far.heads * far.tokens * far.index_dim * far.width
    votes = far.batch * far.kv_heads * far.query_pages * far.candidates
    # One score per mean key; if a page has several, later tensors have one element per page.
    scores = far.batch * heads * queries * (keys + 2 * far.candidates)
    voting = means + given + scores + 2 * votes
    return indexed + max(wide * voting, votes * (2 * wide + 3 * INDEX))


def fullest_choice_bytes(far: Far) -> int:
    """Return the largest `choice_bytes` of this chunk and all earlier ones. The last chunk that
    compares all pages may take more than a later chunk that ranks superpages first."""
    if not far.refined:
        return choice_bytes(far)
    flat = replace(far, refined=0, candidates=2 * SUPERPAGE * far.refined - 1)
    return max(choice_bytes(far), choice_bytes(flat))


def _refining_bytes(far: Far, dim: int) -> int:
    """Bytes of choosing pages within the superpages ranked first; mean keys have `dim` elements."""
    wide, rows = far.wide, far.batch * far.kv_heads
    columns, means = far.refined * SUPERPAGE, SUPERPAGE * far.means
    row = rows * means * (dim + FarRow.of(far).queries)
    at_once = min(far.query_pages, max(1, SCORES // row))
    copies = dim * (far.width + (far.width < wide) * wide) + INDEX
    part = means * copies + wide * FarRow.of(far).queries * (means + 3 * columns + 2 * dim)
    entries = rows * far.query_pages * columns
    voting = rows * at_once * part + entries * (wide + INDEX)
    indexed = far.batch * far.heads * far.tokens * far.index_dim * far.width
    return indexed + max(voting, entries * (2 * wide + 6 * INDEX))


def _voting(far: Far, keys: int) -> tuple[int, int]:
    """Return how many heads and query tokens are scored at one time against `keys` mean keys."""
    group, together = far.heads // far.kv_heads, far.query_page
    row = far.batch * group * keys
    heads = min(far.kv_heads, max(1, UNDIVIDED * SCORES // (row * together)))
    most = SCORES // (row * heads)
    whole = max(1, most // together) * together
    tokens = whole if UNDIVIDED * most >= together else max(LEAST, most)
    return heads * group, min(tokens, far.tokens)


def watch_bytes(far: Far, q_start: int) -> int:
    """Return the peak bytes of measuring the attention mass on the chosen pages: scores of a few
    sampled queries, and keys in the accumulate dtype."""
    keys = far.batch * min(q_start, WATCHED_KEYS)
    scores = far.heads * SAMPLES
    queries = far.batch * scores * far.head_dim
    compared = keys * (2 * scores + far.kv_heads * far.head_dim) + 2 * queries
    return far.wide * compared + MASKS * SAMPLES * keys


def lesson_bytes(far: Far) -> int:
    """Return the peak bytes of one training example (a page of queries) of a learned index: keys of
    the chosen pages, also in the accumulate dtype if wider; masks and indices; and all heads'
    scores for the attention mass or, later, the index's scores with gradients."""
    keys = far.batch * far.kv_heads * far.chosen * far.page
    copied = (far.width < far.wide) * far.head_dim * far.wide
    queries, group = far.query_page, far.heads // far.kv_heads
    masses = (1 + 2 * far.plain) * group * queries
    index = 4 * group * queries + 2 * far.index_dim
    each = far.head_dim * far.width + copied + far.wide * max(masses, index)
    return keys * (each + 3 * INDEX + 2 * queries)
