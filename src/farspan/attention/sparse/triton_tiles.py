"""Tile sizes of the page kernels: a small table for Hopper and Ampere.

Tile sizes are part of a run's arithmetic (sums are taken tile by tile), so they come from a table
and not from a stopwatch: two runs on one machine give the same bits. Whoever measures gives
others to every call.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """One kernel's tile: rows of queries by keys of a page, and how it runs."""

    queries: int  # rows, a power of two, 16 or more
    keys: int  # a power of two, 16 or more
    warps: int
    stages: int  # loads in flight: tiles of the inner loop that shared memory holds


@dataclass(frozen=True, slots=True)
class Tiles:
    forward: Tile
    dq: Tile
    dkv: Tile


# By padded head size. Shared memory: 227 KiB on Hopper, 163 KiB on Ampere (99 KiB on its smaller
# chips, compute capability 8.6 and 8.9, which take the last column).
HOPPER = {
    64: Tiles(Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3)),
    128: Tiles(Tile(128, 128, 8, 2), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2)),
    256: Tiles(Tile(128, 64, 8, 2), Tile(64, 32, 8, 2), Tile(32, 64, 8, 2)),
}
AMPERE = {
    64: Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2)),
    128: Tiles(Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(32, 128, 8, 2)),
    256: Tiles(Tile(64, 64, 8, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
}
SMALL_AMPERE = {
    64: Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    128: Tiles(Tile(64, 32, 4, 3), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2)),
    256: Tiles(Tile(32, 32, 4, 2), Tile(32, 16, 4, 2), Tile(16, 32, 4, 2)),
}
# fp32 has no tensor cores at full precision and tiles of twice the bytes: for checks, not speed.
FULL_PRECISION = Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1))


def padded(size: int) -> int:
    """The next power of two from 16 on: what a tile of a matrix product can be."""
    return max(16, 1 << (size - 1).bit_length())


def choose_tiles(capability: tuple[int, int], head_dim: int, itemsize: int) -> Tiles:
    """The table's entry for a GPU's compute capability, heads of head_dim, elements of bytes."""
    if itemsize > 2:
        return FULL_PRECISION
    table = HOPPER if capability >= (9, 0) else AMPERE if capability == (8, 0) else SMALL_AMPERE
    return table[max(64, padded(head_dim))]
