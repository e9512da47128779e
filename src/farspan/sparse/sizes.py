"""Peak bytes of page-sparse attention that copies chosen pages, of choosing pages and of measuring
visible mass; and tiles of the kernels that read pages in place. Without torch.

The pages that a chunk chose are taken in slabs of limited numbers of units (a unit is K, V of one
page of one batch row and key-value head). A slab's units are gathered once; then rows (a row is one
page of queries of one key-value head) are attended in parts, for which each row's pages of the slab
are copied next to each other, and the results are joined to earlier ones. Neither slabs nor parts
grow with the prefix or the chunk.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from farspan.program.program import aligned
from farspan.spec import SUPERPAGE, LayerSpec, Sparse

# K, V gathered at one time; a backward holds their sums of gradients too, two to three times as
# much, and from host one slab comes while another is attended to. 64K tokens of a 7B model fill
# one, so that memory is flat from there on; from host it takes 1.3 ms at 50 GB/s, long compared
# with the start of a copy, and it has the pages of four pages of queries at least: a kernel's
# programs fill a GPU.
SLAB_BYTES = 2**26
# 256 MiB of pages of 128 tokens with 128 + 128 dims of 2 bytes: for callers that pass nothing.
MOST_UNITS = 2**12
# A part's copies, gradients and masks. On a CPU 2 MiB and 128 MiB are equally fast; it fills a GPU.
PART_BYTES = {"cpu": 2**24, "cuda": 2**28}

INDEX = 8  # bytes per index
# Most numbers per entry of the choice while units and borders of slabs are found: the first held
# while pages are gathered and attended, the second only before.
HELD, FOUND = 10, 16


def slab_units(slab_bytes: int, page: int, dims: int, width: int) -> int:
    """Return `most_units` for slabs of `slab_bytes` of K, V; `dims` are those of a key and a value
    together, `width` the bytes of an element."""
    return max(1, slab_bytes // (page * dims * width))


@dataclass(frozen=True, slots=True)
class FarRow:
    """One page of queries of a key-value head and the pages that it chose."""

    group: int  # query heads of the key-value head
    query_page: int  # tokens
    page: int  # tokens
    chosen: int  # pages
    head_dim: int
    value_dim: int
    width: int  # bytes of an element
    plain: bool = False  # scores are written to memory (PlainPages)

    @property
    def wide(self) -> int:
        """Bytes of an element of the accumulate dtype."""
        return max(4, self.width)

    @property
    def keys(self) -> int:
        return self.chosen * self.page

    @property
    def queries(self) -> int:
        return self.group * self.query_page

    def bytes(self, *, masked: bool, backward: bool) -> int:
        """Return the peak bytes of a row of a part, while it is attended or joined."""
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
        """Return the peak bytes of joining a part's results to earlier ones in the forward."""
        narrow = self.width < self.wide and not self.plain
        part = self.value_dim * self.width + self.wide
        whole = (self.value_dim + 1) * self.wide
        weights = 2 * self.wide + 1 + narrow * self.value_dim * self.wide
        return self._part(masked) + self.queries * (part + whole + weights)

    def _joined_backward(self, masked: bool) -> int:
        """Return the peak bytes of the backward while a part's gradients are added to the sums of
        earlier parts."""
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
        """Return the bytes of PlainPages: six matrices of scores at most, keys and values or their
        gradients of each head of a group, twice, and the inputs, in the accumulate dtype."""
        if not self.plain:
            return 0
        dims = self.head_dim + self.value_dim
        each = 6 * self.queries * self.keys + 2 * self.group * self.keys * dims
        return self.wide * (each + self.keys * dims + 2 * self.queries * dims)


@dataclass(frozen=True, slots=True)
class Far:
    """The sizes of attention of a chunk to chosen pages that decide its memory."""

    batch: int
    heads: int  # of queries
    kv_heads: int
    head_dim: int
    value_dim: int
    width: int  # bytes of an element
    page: int  # tokens
    query_page: int  # tokens
    means: int  # keys that represent a page in votes
    chosen: int  # most pages that a page of queries of a key-value head chooses
    tokens: int  # of the chunk
    candidates: int  # pages to choose from
    plain: bool = False  # PlainPages: soft caps, or values narrower or wider than keys
    index_dim: int = 0  # of an index's queries and keys; 0: the model's own vote
    refined: int = 0  # superpages whose pages are compared after a ranking; 0: all pages are
    ranking: int = 0  # keys that represent a page there

    @property
    def row(self) -> FarRow:
        group, dims = self.heads // self.kv_heads, (self.head_dim, self.value_dim)
        return FarRow(group, self.query_page, self.page, self.chosen, *dims, self.width, self.plain)

    @property
    def query_pages(self) -> int:
        return -(-self.tokens // self.query_page)

    @property
    def entries(self) -> int:
        """Entries of a choice."""
        return self.batch * self.kv_heads * self.query_pages * self.chosen

    def units(self, most_units: int) -> int:
        """Return the largest number of units of a slab."""
        owners = self.batch * self.kv_heads
        return min(most_units, owners * min(self.candidates, self.query_pages * self.chosen))


def far_of(
    heads: LayerSpec, sparse: Sparse, run: tuple[int, int], start: int, tokens: int
) -> Far | None:
    """Return the far part of the chunk of `tokens` at `start`, in a layer of these heads; `run` is
    batch and bytes of an element. None without pages to choose from."""
    if heads.window is not None or not sparse.width(start):
        return None
    return Far(
        run[0],
        heads.query_heads,
        heads.kv_heads,
        heads.head_dim,
        heads.value_dim,
        run[1],
        sparse.page,
        sparse.query_tokens,
        sparse.page // sparse.mean_tokens,
        sparse.width(start),
        tokens,
        len(sparse.candidates(start)),
        plain=heads.softcap is not None or heads.head_dim != heads.value_dim,
        index_dim=sparse.indexed * sparse.key_dim(heads),
        refined=sparse.refined(len(sparse.candidates(start))),
        ranking=sparse.page // sparse.super_tokens,
    )


def most_units_of(far: Far) -> int:
    """Return the largest number of units that a step gathers at one time."""
    return slab_units(SLAB_BYTES, far.page, far.head_dim + far.value_dim, far.width)


def slot_parts(far: Far, units: int, entries: int, *, backward: bool) -> dict[str, int]:
    """Return the bytes of each part of a slot for a slab: its units' numbers, the index of its
    entries, the rows that the units are in, K, V, and in a backward the sums of their gradients."""
    tokens = units * far.page
    parts = {
        "numbers": 3 * INDEX * units,
        "index": INDEX * entries,
        "places": INDEX * tokens,
        "k": tokens * far.head_dim * far.width,
        "v": tokens * far.value_dim * far.width,
    }
    if backward:
        wide = far.row.wide
        parts |= {"dk": tokens * far.head_dim * wide, "dv": tokens * far.value_dim * wide}
    return parts


def slot_bytes(far: Far, *, backward: bool) -> int:
    """Return the bytes of a slot for any slab of a chunk."""
    parts = slot_parts(far, far.units(most_units_of(far)), far.entries, backward=backward)
    return sum(map(aligned, parts.values()))


def far_bytes(
    far: Far,
    most_units: int = MOST_UNITS,
    part: int = PART_BYTES["cpu"],
    *,
    backward: bool,
    in_slots: bool = False,
) -> int:
    """Return the peak bytes of the far part of a chunk's forward or backward, on a CPU, without the
    tensors that it joins; slabs excluded if they are `in_slots`.

    Reached if all pages of a slab are distinct and it has its largest size. In addition, aten's
    flash attention takes up to 0.3 MB a thread.
    """
    if not far.chosen or not far.candidates:
        return 0
    row, units, entries = far.row, far.units(most_units), far.entries
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
    """Return the bytes of copies of a whole chunk if its last page is ragged."""
    if far.tokens % far.query_page == 0:
        return 0
    tokens, wide = far.batch * far.query_pages * far.query_page, far.row.wide
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
    """Return the peak bytes of choosing a chunk's pages: an index's queries; during the votes, the
    mean keys in the accumulate dtype and parts of the scores; then votes, sorted, and masks. Ranked
    superpages take the same, then copies of their pages' mean keys."""
    wide, keys = far.row.wide, far.candidates * far.means
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
    """Return the peak bytes of choosing in a chunk or in any earlier one: the last chunk that
    compares all pages may hold more than a later one that ranks superpages."""
    if not far.refined:
        return choice_bytes(far)
    flat = replace(far, refined=0, candidates=2 * SUPERPAGE * far.refined - 1)
    return max(choice_bytes(far), choice_bytes(flat))


def _refining_bytes(far: Far, dim: int) -> int:
    """Return the bytes while pages of superpages vote by keys of `dim` dims, or are chosen."""
    wide, rows = far.row.wide, far.batch * far.kv_heads
    columns, means = far.refined * SUPERPAGE, SUPERPAGE * far.means
    row = rows * means * (dim + far.row.queries)
    at_once = min(far.query_pages, max(1, SCORES // row))
    copies = dim * (far.width + (far.width < wide) * wide) + INDEX
    part = means * copies + wide * far.row.queries * (means + 3 * columns + 2 * dim)
    entries = rows * far.query_pages * columns
    voting = rows * at_once * part + entries * (wide + INDEX)
    indexed = far.batch * far.heads * far.tokens * far.index_dim * far.width
    return indexed + max(voting, entries * (2 * wide + 6 * INDEX))


def _voting(far: Far, keys: int) -> tuple[int, int]:
    """Return the heads and tokens of the queries that vote at one time, by `keys` mean keys."""
    group, together = far.heads // far.kv_heads, far.query_page
    row = far.batch * group * keys
    heads = min(far.kv_heads, max(1, UNDIVIDED * SCORES // (row * together)))
    most = SCORES // (row * heads)
    whole = max(1, most // together) * together
    tokens = whole if UNDIVIDED * most >= together else max(LEAST, most)
    return heads * group, min(tokens, far.tokens)


def watch_bytes(far: Far, q_start: int) -> int:
    """Return the peak bytes of measuring visible mass: the scores of a few sampled queries, and
    keys in the accumulate dtype."""
    keys = far.batch * min(q_start, WATCHED_KEYS)
    scores = far.heads * SAMPLES
    queries = far.batch * scores * far.head_dim
    compared = keys * (2 * scores + far.kv_heads * far.head_dim) + 2 * queries
    return far.row.wide * compared + MASKS * SAMPLES * keys


def lesson_bytes(far: Far) -> int:
    """Return the peak bytes of one training example of an index: keys of the pages that one page of
    queries chose, in the accumulate dtype too if that is wider; their masks and indices; scores of
    all heads for the masses, then those of the index and their gradients."""
    keys = far.batch * far.kv_heads * far.chosen * far.page
    copied = (far.width < far.row.wide) * far.head_dim * far.row.wide
    queries, group = far.query_page, far.heads // far.kv_heads
    masses = (1 + 2 * far.plain) * group * queries
    index = 4 * group * queries + 2 * far.index_dim
    each = far.head_dim * far.width + copied + far.row.wide * max(masses, index)
    return keys * (each + 3 * INDEX + 2 * queries)


# -- tiles --------------------------------------------------------------------------------------
#
# Tile sizes are part of a run's arithmetic (sums are taken tile by tile), so they come from a table
# and not from a stopwatch: two runs on one machine give the same bits.


@dataclass(frozen=True, slots=True)
class PageTile:
    """One kernel's tile: rows of queries by keys of a page, and its warps and stages."""

    queries: int  # rows, a power of two, 16 or more
    keys: int  # a power of two, 16 or more
    warps: int
    stages: int  # loads in flight: tiles of the inner loop that shared memory holds


@dataclass(frozen=True, slots=True)
class PageTiles:
    forward: PageTile
    dq: PageTile
    dkv: PageTile


class PageShape(NamedTuple):
    """Compile-time constants of the kernels."""

    page: int
    query_page: int
    group: int  # query heads per head of keys and values
    head_dim: int
    parts: tuple[int, ...]  # of a vector, `parts_of`
    tile_queries: int
    tile_keys: int
    stages: int
    alike: bool = False  # dO has the layout of q
    each: int = 1  # representatives of a page
    largest: bool = False  # the largest weight of a page of queries, not the sum
    superpage: int = SUPERPAGE  # pages


class PageSizes(NamedTuple):
    """Sizes that change from chunk to chunk, made by `veiled`; heads and scale do not change."""

    queries: int  # tokens of the chunk
    tokens: int  # tokens of the sequence so far; no key beyond
    query_pages: int  # M
    chosen: int  # k
    slots: int  # pages in the buffer of keys and values
    kv_heads: int
    scale: float


class VoteSizes(NamedTuple):
    """Arguments of the kernels of votes."""

    queries: int
    query_pages: int
    pages: int  # n, number of candidate pages
    columns: int  # of votes: one per candidate page, or per page of the superpages
    first: int  # first candidate page in the sequence
    kv_heads: int
    scale: float


# By compute capability and padded head size; a chip without an entry takes that of the previous
# capability. All have three tiles in flight or more, and shared memory holds them. At 128 tokens a
# page only dK, dV spill on 9.0: with documents 140 bytes a thread at most; without, 24 by Triton
# 3.9 and none by 3.6 (tests/sparse/test_triton_compile.py).
_SMALL = {
    64: PageTiles(PageTile(64, 64, 4, 3), PageTile(64, 64, 4, 3), PageTile(64, 64, 4, 3)),
    128: PageTiles(PageTile(64, 32, 4, 3), PageTile(64, 32, 4, 3), PageTile(32, 64, 4, 3)),
    256: PageTiles(PageTile(32, 16, 4, 3), PageTile(32, 16, 4, 3), PageTile(16, 32, 4, 3)),
}
_LARGE = {
    64: PageTiles(PageTile(128, 128, 8, 3), PageTile(128, 64, 8, 3), PageTile(64, 128, 8, 3)),
    128: PageTiles(PageTile(128, 64, 8, 3), PageTile(128, 64, 8, 3), PageTile(64, 128, 8, 3)),
    256: PageTiles(PageTile(128, 32, 8, 4), PageTile(64, 32, 4, 3), PageTile(32, 64, 8, 3)),
}
TILES = {
    (8, 0): {
        64: PageTiles(PageTile(128, 64, 4, 3), PageTile(128, 64, 8, 3), PageTile(64, 128, 8, 3)),
        128: PageTiles(PageTile(128, 64, 8, 3), PageTile(64, 64, 4, 3), PageTile(32, 128, 8, 3)),
        256: PageTiles(PageTile(64, 32, 4, 3), PageTile(32, 32, 4, 3), PageTile(32, 32, 4, 3)),
    },
    (8, 6): _SMALL,
    (9, 0): {  # the fastest of those measured (benchmarks/results/sparse_kernels_h100.json)
        **_LARGE,
        64: PageTiles(PageTile(64, 64, 4, 3), PageTile(64, 64, 4, 3), PageTile(64, 64, 4, 3)),
        128: replace(_LARGE[128], forward=PageTile(64, 64, 4, 3)),
    },
    (10, 0): _LARGE,
    (12, 0): _SMALL,
}
# fp32 has no tensor cores at full precision and tiles of twice the bytes: for checks, not speed.
FULL_PRECISION = PageTiles(PageTile(32, 32, 4, 1), PageTile(32, 32, 4, 1), PageTile(32, 32, 4, 1))


VOTE_TILE = PageTile(128, 64, 8, 3)  # `keys` are pages
SMALL_VOTE_TILE = PageTile(32, 32, 4, 3)  # heads wider than 128, or fp32
# Wide heads in two parts: of two consecutive square products, Triton distributes only rows to
# warps, and two would compute the same 16.
PARTED_VOTE_TILE = PageTile(32, 64, 4, 3)


ROW = 16  # bytes per query that a backward reads, without vectors


def tile_edge(size: int) -> int:
    """Return the edge of a matrix product's tile: a power of two of at least 16 and `size`."""
    return max(16, 1 << (size - 1).bit_length())


def parts_of(head_dim: int) -> tuple[int, ...]:
    """Return the dimensions of the one or two tiles that hold vectors, powers of two. There are two
    if that pads less: 80 = 64 + 16, 96 = 64 + 32, 192 = 128 + 64, but 112 are in 128."""
    whole = tile_edge(head_dim)
    two = whole // 2, tile_edge(head_dim - whole // 2)
    return two if sum(two) < whole else (whole,)


def choose_tiles(capability: tuple[int, int], head_dim: int, itemsize: int) -> PageTiles:
    """Return the tiles for a GPU's compute capability, a head size and bytes of an element."""
    if itemsize > 2:
        return FULL_PRECISION
    return TILES[max(one for one in TILES if one <= capability)][max(64, tile_edge(head_dim))]


def vote_tile(head_dim: int, itemsize: int) -> PageTile:
    if head_dim <= 128 and itemsize <= 2:
        return VOTE_TILE
    return PARTED_VOTE_TILE if len(parts_of(head_dim)) > 1 and itemsize <= 2 else SMALL_VOTE_TILE


def shared_bytes(tiles: PageTiles, head_dim: int, itemsize: int) -> int:
    """Return the most bytes of shared memory that a program of the kernels takes: tensors held
    throughout, as many tiles of the inner loop as are in flight, and weights, which some chips
    multiply from there. A forward holds one tile of queries and walks over two of keys and values;
    the others hold two and walk over two."""
    vector = sum(parts_of(head_dim)) * itemsize
    forward, dq, dkv = tiles.forward, tiles.dq, tiles.dkv
    of_query = 2 * vector + ROW
    return max(
        vector * (forward.queries + 2 * forward.keys * forward.stages)
        + _weights(forward, itemsize),
        2 * vector * (dq.queries + dq.keys * dq.stages) + _weights(dq, itemsize),
        2 * vector * dkv.keys + of_query * dkv.queries * dkv.stages + 2 * _weights(dkv, itemsize),
    )


def _weights(tile: PageTile, itemsize: int) -> int:
    """Return the bytes of a tile's weights in shared memory."""
    return tile.queries * tile.keys * itemsize
