"""Sizes of sparse attention to chosen pages, and of buffers for pages that come from the host.

The pages that a chunk chose come in slabs: blocks of a limited number of units, whatever the prefix
and the chunk. A unit is K, V of one page of one batch row and key-value head.
"""

from dataclasses import dataclass

from farspan.program.program import aligned
from farspan.spec import LayerSpec, Sparse

# K, V gathered at one time; a backward holds their sums of gradients too, two to three times as
# much, and from host one slab comes while another is attended to. 64K tokens of a 7B model fill
# one, so that memory is flat from there on; from host it takes 1.3 ms at 50 GB/s, long compared
# with the start of a copy, and it has the pages of four pages of queries at least: a kernel's
# programs fill a GPU.
SLAB_BYTES = 2**26

INDEX = 8  # bytes per index


@dataclass(frozen=True, slots=True)
class Far:
    """Sizes that decide the memory of one chunk's sparse attention to chosen pages."""

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
    def wide(self) -> int:
        return max(4, self.width)

    @property
    def query_pages(self) -> int:
        return -(-self.tokens // self.query_page)

    @property
    def entries(self) -> int:
        """Number of pages chosen, summed over query pages, sequences and key-value heads."""
        return self.batch * self.kv_heads * self.query_pages * self.chosen

    def units(self, most_units: int) -> int:
        """Return the most units (K, V of a page) in one of the chunk's slabs (blocks of pages)."""
        owners = self.batch * self.kv_heads
        return min(most_units, owners * min(self.candidates, self.query_pages * self.chosen))


def far_of(
    heads: LayerSpec, sparse: Sparse, run: tuple[int, int], start: int, tokens: int
) -> Far | None:
    """Return the sizes of sparse attention for the chunk of `tokens` tokens from `start` on; None
    if it has no page to choose from. `run` is (batch, bytes of an element)."""
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


def slab_units(slab_bytes: int, page: int, dims: int, width: int) -> int:
    """Return how many units (K, V of a page) fit into a slab (gathered block) of `slab_bytes`.
    `dims` are the elements of a key and a value together, `width` the bytes of an element."""
    return max(1, slab_bytes // (page * dims * width))


def most_units_of(far: Far) -> int:
    """Return the most units (K, V of a page) in any slab, a block of pages gathered at once."""
    return slab_units(SLAB_BYTES, far.page, far.head_dim + far.value_dim, far.width)


def slot_parts(far: Far, units: int, entries: int, *, backward: bool) -> dict[str, int]:
    """Return the bytes of each part of a buffer for a slab, a block of gathered pages. The parts:
    the pages' numbers; for each entry of the choice its page in the slab; for each token its row in
    the layer's buffer; K; V; in a backward also sums of dK and dV."""
    tokens = units * far.page
    parts = {
        "numbers": 3 * INDEX * units,
        "index": INDEX * entries,
        "places": INDEX * tokens,
        "k": tokens * far.head_dim * far.width,
        "v": tokens * far.value_dim * far.width,
    }
    if backward:
        wide = far.wide
        parts |= {"dk": tokens * far.head_dim * wide, "dv": tokens * far.value_dim * wide}
    return parts


def slot_bytes(far: Far, *, backward: bool) -> int:
    """Return the bytes of a device buffer for any slab (block of gathered pages) of a chunk."""
    parts = slot_parts(far, far.units(most_units_of(far)), far.entries, backward=backward)
    return sum(map(aligned, parts.values()))
