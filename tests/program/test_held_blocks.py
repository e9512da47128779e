"""Every visible pair of a query and a held key is in exactly one block, and no other pair is."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farspan.program.attention_blocks import (
    Block,
    Held,
    document_runs,
    held_blocks,
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
    seen = torch.ones(block.queries, block.keys, dtype=torch.bool)
    for i in range(block.queries):
        for j in range(block.keys):
            ahead = block.k_start + j > block.q_start + i
            far = block.k_start + j <= block.q_start + i - (block.window or 10**9)
            seen[i, j] = not (block.causal and ahead) and not far
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


def test_keys_that_no_query_sees_are_in_no_block() -> None:
    assert plan_held_blocks(8, 16, 4, 3, None, Held(((0, 4), (16, 16)))) == ()
    assert held_blocks(plan_blocks(0, 8, 4, None), Held(((8, 8),)), 4) == ()


def test_ranges_that_do_not_ascend_are_a_mistake() -> None:
    with pytest.raises(AssertionError):
        Held(((4, 8), (0, 3)))
