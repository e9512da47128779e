"""Tiles of the kernels that read pages in place.

Tile sizes are part of a run's arithmetic (sums are taken tile by tile), so they come from a table
and not from a stopwatch: two runs on one machine give the same bits.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from farspan.spec import SUPERPAGE


@dataclass(frozen=True, slots=True)
class PageTile:
    """Tile sizes of one kernel, queries by keys, and its numbers of warps and stages."""

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
    """Sizes for which a kernel is compiled."""

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
    """Sizes passed to attention kernels as arguments. `veiled` encodes all but heads and scale, so
    that one compiled kernel serves chunks of all lengths."""

    queries: int  # tokens of the chunk
    tokens: int  # tokens of the sequence so far; no key beyond
    query_pages: int  # M
    chosen: int  # k
    slots: int  # pages in the buffer of keys and values
    kv_heads: int
    scale: float


class VoteSizes(NamedTuple):
    """Sizes passed to the kernels for votes as arguments, encoded as in `PageSizes`."""

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
    """Return the tile size for a dimension of `size`: the next power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def parts_of(head_dim: int) -> tuple[int, ...]:
    """Return the tile widths that hold a vector of a head: one power of two, or the sum of two if
    that pads less: 80 = 64 + 16, 96 = 64 + 32, 192 = 128 + 64, but 112 is padded to 128."""
    whole = tile_edge(head_dim)
    two = whole // 2, tile_edge(head_dim - whole // 2)
    return two if sum(two) < whole else (whole,)


def choose_tiles(capability: tuple[int, int], head_dim: int, itemsize: int) -> PageTiles:
    """Return each kernel's tile for a compute capability, a head size and bytes per element."""
    if itemsize > 2:
        return FULL_PRECISION
    return TILES[max(known for known in TILES if known <= capability)][max(64, tile_edge(head_dim))]


def vote_tile(head_dim: int, itemsize: int) -> PageTile:
    if head_dim <= 128 and itemsize <= 2:
        return VOTE_TILE
    return PARTED_VOTE_TILE if len(parts_of(head_dim)) > 1 and itemsize <= 2 else SMALL_VOTE_TILE


def shared_bytes(tiles: PageTiles, head_dim: int, itemsize: int) -> int:
    """Return the most shared memory that a kernel takes, in bytes: tiles held throughout, tiles of
    the inner loop in flight, and softmax weights, which some chips multiply from shared memory. The
    forward holds one tile (queries) and loops over two (keys, values); other kernels hold two and
    loop over two."""
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
    return tile.queries * tile.keys * itemsize
