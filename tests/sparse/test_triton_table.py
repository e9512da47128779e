"""Page tables, their inverse and tile sizes. Nothing here needs Triton."""

import sys
from subprocess import run

import pytest
import torch

from farspan.sparse.kernel_calls import PageTable
from farspan.sparse.tiles import (
    PARTED_VOTE_TILE,
    SMALL_VOTE_TILE,
    TILES,
    VOTE_TILE,
    choose_tiles,
    parts_of,
    shared_bytes,
    vote_tile,
)
from farspan.spec import UnsupportedError


def test_repeated_and_unknown_pages_are_refused() -> None:
    choice = torch.tensor([[[[0, 2, -1, -1]]]], dtype=torch.int32)
    PageTable(choice, 4, 12, 12)
    for wrong, message in (
        ([0, 2, 0, -1], "choice: expected each page at most once"),
        ([0, 3, -1, -1], "choice: expected pages below 3"),
        ([0, -2, -1, -1], "choice: expected pages below 3"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            PageTable(torch.tensor([[[wrong]]], dtype=torch.int32), 4, 12, 12)
    with pytest.raises(UnsupportedError, match="slots: expected places below 2"):
        PageTable(choice, 4, 12, 8, choice)
    with pytest.raises(UnsupportedError, match="choice: expected a contiguous int32"):
        PageTable(choice.long(), 4, 12, 12)
    with pytest.raises(UnsupportedError, match="page, tokens"):
        PageTable(choice, 0, 12, 12)


def test_the_inverse_of_a_choice_by_hand() -> None:
    """Page 2 of the one head is read by query pages 0 and 2, page 0 by 1, page 1 by nobody."""
    choice = torch.tensor([[[[2, -1], [0, -1], [-1, 2]]]], dtype=torch.int32)
    inverse = PageTable(choice, 4, 12, 12).inverse
    assert inverse.starts.tolist() == [0, 1, 1, 3]
    assert inverse.query_pages[:3].tolist() == [1, 0, 2]
    assert inverse.pages[:3].tolist() == [0, 2, 2]
    assert inverse.rows.tolist() == [2, 0, 1]


def test_the_inverse_holds_each_visit_once_in_order() -> None:
    """Against a walk over the choice, with rows, heads and slots of their own."""
    torch.manual_seed(0)
    shape = 2, 3, 5, 4
    choice = torch.rand(*shape[:3], 9).argsort(-1)[..., :4].int().contiguous()
    choice[torch.rand(shape) < 0.3] = -1
    slots = (choice + 2).masked_fill(choice < 0, -7)
    inverse = PageTable(choice, 8, 72, 90, slots).inverse
    visits = {row: [] for row in range(2 * 3 * 12)}  # type: dict[int, list[tuple[int, int]]]
    for b, h, m, entry in torch.cartesian_prod(*map(torch.arange, shape)).tolist():
        page = int(choice[b, h, m, entry])
        if page >= 0:
            visits[(b * 3 + h) * 12 + page + 2].append((m, page))
    for row, expected in visits.items():
        span = slice(int(inverse.starts[row]), int(inverse.starts[row + 1]))
        pages = inverse.query_pages[span].tolist(), inverse.pages[span].tolist()
        assert list(zip(*pages, strict=True)) == expected
    lengths = [len(visits[row]) for row in inverse.rows.tolist()]
    assert lengths == sorted(lengths, reverse=True)
    assert sorted(inverse.rows.tolist()) == list(visits)


def test_a_width_has_two_parts_where_they_pad_less() -> None:
    two = {40: (32, 16), 72: (64, 16), 80: (64, 16), 96: (64, 32), 160: (128, 32), 192: (128, 64)}
    for head_dim, parts in two.items():
        assert parts_of(head_dim) == parts
    for head_dim, part in {8: 16, 24: 32, 64: 64, 104: 128, 112: 128, 128: 128, 200: 256}.items():
        assert parts_of(head_dim) == (part,)
    tiles = TILES[9, 0][256]
    assert 4 * shared_bytes(tiles, 192, 2) < 3.1 * shared_bytes(tiles, 256, 2)


def test_tiles_by_gpu_and_head_size() -> None:
    """A chip that is not in the table takes the last before it."""
    assert choose_tiles((9, 0), 96, 2) is TILES[9, 0][128]
    assert choose_tiles((8, 0), 32, 2) is TILES[8, 0][64]
    assert choose_tiles((8, 9), 256, 2) is TILES[8, 6][256]
    assert choose_tiles((10, 3), 128, 2) is TILES[10, 0][128]
    assert choose_tiles((12, 1), 256, 2) is TILES[12, 0][256]
    assert choose_tiles((9, 0), 128, 4).forward.stages == 1
    assert vote_tile(96, 2) is VOTE_TILE
    assert vote_tile(192, 2) is PARTED_VOTE_TILE
    assert vote_tile(256, 2) is vote_tile(192, 4) is SMALL_VOTE_TILE


def test_tables_hold_powers_of_two_that_fit_shared_memory() -> None:
    room = {(8, 0): 163, (8, 6): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}  # KiB a program
    for capability, table in TILES.items():
        for head_dim, tiles in table.items():
            assert shared_bytes(tiles, head_dim, 2) <= 1024 * room[capability]
            for tile in (tiles.forward, tiles.dq, tiles.dkv):
                assert all(x & (x - 1) == 0 for x in (tile.queries, tile.keys, tile.warps))
                assert min(tile.queries, tile.keys) >= 16
                assert tile.stages >= 3  # with two none is in flight behind a wait
    assert shared_bytes(TILES[9, 0][256], 256, 2) > 1024 * room[12, 0]


def test_the_launchers_are_imported_without_triton() -> None:
    """What chooses kernels must work where Triton is not installed."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from farspan.sparse.kernel_calls import TritonFar\n"
        "from farspan.sparse.kernel_calls import supports\n"
        "print(type(TritonFar()).__name__, callable(supports))"
    )
    done = run(
        [sys.executable, "-c", code], check=True, timeout=1200, capture_output=True, text=True
    )
    assert done.stdout.split() == ["TritonFar", "True"]
