"""Every visible pair of a query and a key that a rank holds is in exactly one block, no other pair
is, and no query sees nothing."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farspan.program.attention_blocks import (
    TILE_LEAST,
    TILE_MOST,
    Block,
    Held,
    Run,
    cut_wide,
    document_runs,
    plan_blocks,
    plan_held_blocks,
    tile_window,
)
from farspan.program.layout import part
from tests.grids import examples

Ranges = tuple[tuple[int, int], ...]


def positions_of(held: Ranges) -> list[int]:
    """The position of each row."""
    return [position for start, stop in held for position in range(start, stop)]


def shown(block: Block) -> Tensor:
    """What a kernel, which knows coordinates only, shows each query of the block: [Sq, Sk]."""
    q = torch.arange(block.q_start, block.q_stop)[:, None]
    k = torch.arange(block.k_start, block.k_stop)
    seen = torch.ones(block.queries, block.keys, dtype=torch.bool)
    if block.causal:
        seen &= k <= q
    if block.window is not None:
        seen &= k > q - block.window
    assert seen.any(1).all(), f"a query sees no key: {block}"
    assert seen.any(0).all(), f"a key is not seen: {block}"
    return seen


def covered(blocks: Sequence[Block], batch: int, chunk: range, held: Ranges) -> Tensor:
    """How many blocks show row k to query q: [batch, queries, rows]."""
    count = torch.zeros(batch, len(chunk), len(positions_of(held)), dtype=torch.long)
    for block in blocks:
        first = block.q_start + block.shift - chunk.start
        assert 0 <= first <= len(chunk) - block.queries, block
        place = count[block.rows, first : first + block.queries, block.k_start : block.k_stop]
        assert place.shape == (place.shape[0], block.queries, block.keys), block
        place += shown(block)
    return count


def allowed(
    chunk: range, window: int | None, starts: Sequence[Sequence[int]], held: Ranges
) -> Tensor:
    where = positions_of(held)
    count = torch.zeros(len(starts), len(chunk), len(where), dtype=torch.long)
    for row, documents in enumerate(starts):
        for q in chunk:
            document = max(start for start in documents if start <= q)
            for index, k in enumerate(where):
                near = window is None or q - k < window
                count[row, q - chunk.start, index] = document <= k <= q and near
    return count


def check(
    size: dict[str, int | None], borders: list[int], held: Ranges, starts: list[list[int]] | None
) -> None:
    """Of the last chunk."""
    window, kv_block = size["window"], size["kv_block"]
    assert kv_block is not None
    chunk = range(borders[-2], borders[-1])
    batch = 2 if starts is None else len(starts)
    runs = None if starts is None else [document_runs(r, chunk.start, chunk.stop) for r in starts]
    own = Held(held)
    blocks = plan_held_blocks(chunk.start, chunk.stop, kv_block, window, runs, own)
    wanted = allowed(chunk, window, starts or [[0]] * batch, held)
    assert torch.equal(covered(blocks, batch, chunk, held), wanted)
    tiles = [tile for block in blocks for tile in tile_window(block)]
    assert torch.equal(covered(tiles, batch, chunk, held), wanted)
    first_own = own.row(chunk.start)
    assert first_own == sum(position < chunk.start for position in positions_of(held))
    for block in blocks:
        if block.k_start < first_own:
            assert block.k_stop <= first_own
            assert block.k_start // kv_block == (block.k_stop - 1) // kv_block
            assert not block.causal
        # What flash attention needs of a window without causal mask.
        if block.window is not None and not block.causal:
            assert block.queries <= block.keys + 1


@st.composite
def chunks(draw: st.DrawFn) -> list[int]:
    """Borders of one to six chunks."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    return [sum(sizes[:i]) for i in range(len(sizes) + 1)]


sizes = st.fixed_dictionaries(
    {"kv_block": st.integers(1, 20), "window": st.none() | st.integers(1, 40)}
)
documents = st.none() | st.lists(
    st.sets(st.integers(0, 50), max_size=8).map(lambda s: sorted(s | {0})), min_size=1, max_size=3
)


@given(st.data(), sizes, chunks(), documents)
@settings(max_examples=examples(150))
def test_any_part_of_each_chunk(
    data: st.DataObject,
    size: dict[str, int | None],
    borders: list[int],
    starts: list[list[int]] | None,
) -> None:
    held = []
    for start, stop in pairwise(borders):
        cut = st.integers(start, stop)
        first, last = sorted((data.draw(cut), data.draw(cut)))
        held.append((first, last))
    check(size, borders, tuple(held), starts)


@given(sizes, chunks(), documents, st.integers(1, 5))
@settings(max_examples=examples(60))
def test_parts_of_ranks_together_hold_everything(
    size: dict[str, int | None], borders: list[int], starts: list[list[int]] | None, ranks: int
) -> None:
    spans = list(pairwise(borders))
    rows = 0
    for rank in range(ranks):
        held = tuple(part(span, rank, ranks) for span in spans)
        check(size, borders, held, starts)
        rows += Held(held).rows()
    assert rows == borders[-1]


def test_a_rank_alone_has_the_blocks_it_had() -> None:
    for window in (None, 7, 50):
        assert plan_held_blocks(20, 30, 8, window) == plan_blocks(20, 30, 8, window)


def test_a_plain_chunk_is_few_blocks() -> None:
    """Three chunks of 8 of which the rank holds the middle: keys of all earlier chunks together."""
    held = Held(((2, 5), (10, 13), (18, 21)))
    assert plan_held_blocks(16, 24, 100, None, None, held) == (
        Block(0, None, 16, 24, 0, 6, False),
        Block(0, None, 6, 9, 6, 9, True, None, 12),
        Block(0, None, 21, 24, 6, 9, False),
    )


def test_keys_that_a_long_window_does_not_cut_are_together() -> None:
    held = Held(tuple((start, start + 4) for start in range(0, 800, 8)))
    blocks = plan_held_blocks(792, 800, 10**6, 600, None, held)
    # The edge of the window, the whole of the rest, and the own square and what is below it.
    assert len(blocks) <= 5
    assert max(block.keys for block in blocks) > 290


@given(st.integers(0, 300), st.integers(1, 200), st.integers(1, 300), st.integers(1, 300))
def test_tiles_cover_what_their_blocks_cover(
    start: int, queries: int, kv_block: int, window: int
) -> None:
    chunk = range(start, start + queries)
    held = ((0, chunk.stop),)
    for block in plan_blocks(chunk.start, chunk.stop, kv_block, window):
        masked = block.window is not None and not block.causal
        assert not (masked and shown(block).all()), f"this window hides nothing: {block}"
        tiles = tile_window(block)
        assert torch.equal(covered(tiles, 1, chunk, held), covered([block], 1, chunk, held))
        for tile in tiles:
            tile.check()


@pytest.mark.parametrize("window", [256, 1000, 4096, 30000])
def test_tiles_of_windows_waste_little(window: int) -> None:
    start = 2**16
    blocks = plan_blocks(start, start + 8192, 16384, window)
    tiles = [tile for block in blocks for tile in tile_window(block)]
    work = sum(tile.queries * tile.keys for tile in tiles if tile.window)
    hidden_by_causality = sum(t.queries * (t.queries - 1) // 2 for t in tiles if t.causal)
    needed = 8192 * window - sum(t.queries * t.keys for t in tiles if not t.window)
    assert work - hidden_by_causality <= 1.15 * needed
    assert all(t.queries <= TILE_MOST for t in tiles if t.window)


def test_tiles_of_huge_windows_keep_their_masks_small() -> None:
    block = plan_blocks(0, 2**20, 2**20, 2**19)[0]
    tiles = tile_window(block)
    assert max(tile.queries for tile in tiles) == TILE_LEAST
    assert max(tile.queries * tile.keys for tile in tiles if tile.window) < 2**26


def test_a_window_longer_than_the_document_is_no_window() -> None:
    assert plan_blocks(20, 30, 8, 30) == plan_blocks(20, 30, 8, None)
    assert plan_blocks(20, 30, 8, 29) != plan_blocks(20, 30, 8, None)


def test_rows_with_the_same_documents_share_blocks() -> None:
    here, there = document_runs([0, 5], 0, 10), document_runs([0, 6], 0, 10)
    blocks = plan_blocks(0, 10, 8, None, [here, here, there])
    assert [(b.row_start, b.row_stop) for b in blocks] == [(0, 2), (0, 2), (2, 3), (2, 3)]


def test_document_runs() -> None:
    assert document_runs([0], 4, 9) == (Run(4, 9, 0),)
    assert document_runs([0, 3, 6, 9, 12], 4, 9) == (Run(4, 6, 3), Run(6, 9, 6))
    assert document_runs([0, 4, 5], 4, 9) == (Run(4, 5, 4), Run(5, 9, 5))


@given(sizes, chunks(), documents, st.integers(1, 20))
def test_blocks_that_are_cut_cover_the_same(
    size: dict[str, int | None], borders: list[int], starts: list[list[int]] | None, most: int
) -> None:
    """By blocks of no more queries or keys than asked for, each of which a kernel takes; those that
    are causal share no query and come before the others of their block."""
    window, kv_block, chunk = size["window"], size["kv_block"], range(borders[-2], borders[-1])
    assert kv_block is not None
    runs = None if starts is None else [document_runs(r, chunk.start, chunk.stop) for r in starts]
    most += 0 if window is None else window
    pieces = list[Block]()
    for block in plan_blocks(chunk.start, chunk.stop, kv_block, window, runs):
        of_block = cut_wide(block, most)
        assert of_block == (block,) or max(block.queries, block.keys) > most
        causal = [piece.causal for piece in of_block]
        assert causal == sorted(causal, reverse=True)
        pieces.extend(of_block)
    for piece in pieces:
        piece.check()
        assert max(piece.queries, piece.keys) <= most
        if piece.window is not None:
            assert piece.queries <= piece.keys + 1  # what flash attention takes
    rows, held = starts or [[0]], ((0, chunk.stop),)
    everything = allowed(chunk, window, rows, held)
    assert torch.equal(covered(pieces, len(rows), chunk, held), everything)
