"""Every visible pair is in exactly one block, no other pair is, and no query sees nothing."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from farspan.program.attention_blocks import (
    TILE_LEAST,
    TILE_MOST,
    Block,
    Run,
    cut_wide,
    document_runs,
    plan_blocks,
    tile_window,
)


def seen_by(block: Block) -> Tensor:
    """Which keys each query of the block sees: bool [Sq, Sk]."""
    q = torch.arange(block.q_start, block.q_stop)[:, None]
    k = torch.arange(block.k_start, block.k_stop)
    seen = torch.ones(len(q), len(k), dtype=torch.bool)
    if block.causal:
        seen &= k <= q
    if block.window is not None:
        seen &= k > q - block.window
    assert seen.any(1).all(), f"a query sees no key: {block}"
    assert seen.any(0).all(), f"a key is not seen: {block}"
    masked = block.window is not None and not block.causal
    assert not (masked and seen.all()), f"this window hides nothing: {block}"
    return seen


def covered(blocks: Iterable[Block], batch: int, chunk: range) -> Tensor:
    """How many blocks show key k to query q: [batch, queries, keys]."""
    count = torch.zeros(batch, len(chunk), chunk.stop, dtype=torch.long)
    for block in blocks:
        q_start, q_stop = block.q_start - chunk.start, block.q_stop - chunk.start
        part = count[block.rows, q_start:q_stop, block.k_start : block.k_stop]
        assert part.shape[0] > 0, block
        part += seen_by(block)
    return count


def allowed(chunk: range, window: int | None, starts: Sequence[Sequence[int]]) -> Tensor:
    count = torch.zeros(len(starts), len(chunk), chunk.stop, dtype=torch.long)
    for row, documents in enumerate(starts):
        for q in chunk:
            document = max(start for start in documents if start <= q)
            low = document if window is None else max(document, q - window + 1)
            count[row, q - chunk.start, low : q + 1] = 1
    return count


geometry = st.fixed_dictionaries(
    {
        "q_start": st.integers(0, 40),
        "queries": st.integers(1, 24),
        "kv_block": st.integers(1, 50),
        "window": st.none() | st.integers(1, 70),
    }
)
documents = st.none() | st.lists(
    st.sets(st.integers(0, 64), max_size=12).map(lambda s: sorted(s | {0})), min_size=1, max_size=3
)


@given(geometry, documents)
def test_blocks_cover_what_is_visible_exactly_once(
    size: dict[str, int], starts: list[list[int]] | None
) -> None:
    q_start, kv_block, window = size["q_start"], size["kv_block"], size["window"]
    q_stop = q_start + size["queries"]
    batch = 2 if starts is None else len(starts)
    runs = None if starts is None else [document_runs(row, q_start, q_stop) for row in starts]
    blocks = plan_blocks(q_start, q_stop, kv_block, window, runs)
    chunk = range(q_start, q_stop)
    wanted = allowed(chunk, window, starts or [[0]] * batch)
    assert torch.equal(covered(blocks, batch, chunk), wanted)
    own = [block for block in blocks if block.k_start >= q_start]
    earlier = [block for block in blocks if block.k_start < q_start]
    assert all(block.k_stop <= q_start for block in earlier)
    assert all(b.k_start // kv_block == (b.k_stop - 1) // kv_block for b in earlier)
    assert not any(block.causal for block in earlier)
    assert all(block.causal and block.q_start == block.k_start for block in own)
    # What flash attention needs of a window without causal mask.
    assert all(b.queries <= b.keys + 1 for b in earlier if b.window)


@given(
    q_start=st.integers(0, 300),
    queries=st.integers(1, 200),
    kv_block=st.integers(1, 300),
    window=st.integers(1, 300),
)
def test_tiles_cover_what_their_blocks_cover(
    q_start: int, queries: int, kv_block: int, window: int
) -> None:
    chunk = range(q_start, q_start + queries)
    for block in plan_blocks(chunk.start, chunk.stop, kv_block, window):
        tiles = tile_window(block)
        assert torch.equal(covered(tiles, 1, chunk), covered([block], 1, chunk))
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


def test_a_plain_chunk_is_key_blocks_and_one_square() -> None:
    assert plan_blocks(20, 30, 8, None) == (
        Block(0, None, 20, 30, 0, 8, False),
        Block(0, None, 20, 30, 8, 16, False),
        Block(0, None, 20, 30, 16, 20, False),
        Block(0, None, 20, 30, 20, 30, True),
    )


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


@pytest.mark.parametrize(
    "runs",
    [
        (Run(4, 6, 3), Run(7, 9, 7)),
        (Run(4, 6, 3), Run(6, 8, 6)),
        (Run(5, 9, 5),),
        (Run(4, 6, 3), Run(6, 9, 3)),
    ],
)
def test_runs_that_do_not_tile_the_chunk_are_a_mistake(runs: tuple[Run, ...]) -> None:
    with pytest.raises(AssertionError):
        plan_blocks(4, 9, 8, None, [runs])


def test_a_block_with_an_empty_row_is_a_mistake() -> None:
    block = Block(0, None, 10, 14, 4, 8, False, window=6)
    with pytest.raises(AssertionError):
        block.check()
    replace(block, q_stop=13, k_start=5).check()


@given(geometry, documents, st.integers(1, 20))
def test_blocks_that_are_cut_cover_the_same(
    size: dict[str, int], starts: list[list[int]] | None, most: int
) -> None:
    """By blocks of no more queries or keys than asked for, each of which a kernel takes; those that
    are causal share no query and come before the others of their block."""
    q_start, kv_block, window = size["q_start"], size["kv_block"], size["window"]
    q_stop = q_start + size["queries"]
    runs = None if starts is None else [document_runs(row, q_start, q_stop) for row in starts]
    chunk, batch = range(q_start, q_stop), 2 if starts is None else len(starts)
    most += 0 if window is None else window
    pieces = list[Block]()
    for block in plan_blocks(q_start, q_stop, kv_block, window, runs):
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
    everything = allowed(chunk, window, starts or [[0]] * batch)
    assert torch.equal(covered(pieces, batch, chunk), everything)
