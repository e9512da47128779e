"""Blocks of attention over the keys that one rank holds: a part of each chunk's.

The rank's rows are the positions that it holds, in order. Here it holds `h` of three chunks of 8,
and the queries of the last one meet them:

    positions 0 . . . . . . . 8 . . . . . . . 16. . . . . . .
    held          h h h           h h h           h h h
    rows          0 1 2           3 4 5           6 7 8

Keys that every query of a block sees need no mask: a rectangle over rows, whatever lies between
their positions. A mask compares positions, so a block with one lies within one held range, where
positions and rows differ by a constant, the block's `shift`. The chunk's own keys [a, b) that are
held make a causal square of the queries [a, b) and a rectangle below it, of the queries from b on;
queries before a see none of them. The window cuts the rectangle as it cuts earlier keys.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from farspan.plan.blocks import Block, Run, cut_at_window, plan_blocks
from farspan.plan.layout import Range


@dataclass(frozen=True, slots=True)
class _Piece:
    """Held positions [start, stop), which are rows from start - shift on."""

    start: int
    stop: int
    shift: int

    def cut(self, start: int, stop: int) -> "_Piece":
        return _Piece(max(self.start, start), min(self.stop, stop), self.shift)


@dataclass(frozen=True, slots=True)
class Held:
    """The positions that a rank holds: ranges, one of each chunk, ascending; some may be empty."""

    ranges: tuple[Range, ...]

    def __post_init__(self) -> None:
        borders = [border for held in self.ranges for border in held]
        assert borders == sorted(borders), self.ranges

    def rows(self) -> int:
        """How many positions it holds."""
        return sum(stop - start for start, stop in self.ranges)

    def row(self, position: int) -> int:
        """How many held positions lie before this one: its row, if it is held."""
        held = (min(stop, max(start, position)) - start for start, stop in self.ranges)
        return sum(held)

    def pieces(self) -> list[_Piece]:
        """The ranges that are not empty."""
        lengths = [stop - start for start, stop in self.ranges]
        first_rows = accumulate(lengths, initial=0)
        return [
            _Piece(start, stop, start - row)
            for (start, stop), row in zip(self.ranges, first_rows, strict=False)
            if start < stop
        ]


def plan_held_blocks(
    q_start: int,
    q_stop: int,
    kv_block: int,
    window: int | None,
    document_starts: Sequence[tuple[Run, ...]] | None = None,
    held: Held | None = None,
) -> tuple[Block, ...]:
    """The blocks of queries [q_start, q_stop) against the held keys, in coordinates (`Block`):
    every visible (row, query, held key) in exactly one, and no query that sees no held key.

    Rows before q_start's are cut on the grid of multiples of `kv_block`. There may be no queries.
    For the other arguments, and without `held`, see `plan_blocks`.
    """
    if held is None:
        return plan_blocks(q_start, q_stop, kv_block, window, document_starts)
    if q_start == q_stop:
        return ()
    whole = plan_blocks(q_start, q_stop, q_stop, window, document_starts)
    return held_blocks(whole, held, kv_block)


def held_blocks(blocks: Iterable[Block], held: Held, kv_block: int) -> tuple[Block, ...]:
    """Blocks in positions, as `plan_blocks` gives them, cut to what is held, in coordinates."""
    pieces, found = held.pieces(), list[Block]()
    for block in blocks:
        if block.causal:
            found.extend(_of_own_keys(block, pieces))
        elif block.window is None:
            found.extend(_seen_by_all(block, held, kv_block))
        else:
            found.extend(_in_window(block, held, pieces, kv_block))
    for block in found:
        block.check()
    return tuple(found)


def _of_own_keys(block: Block, pieces: Sequence[_Piece]) -> Iterator[Block]:
    """Not cut on the grid: the chunk's own keys are at hand."""
    window = block.window
    for held in _between(pieces, block.k_start, block.k_stop):
        a, b = held.start, held.stop
        square = replace(block, q_start=a, q_stop=b, k_start=a, k_stop=b)
        narrow = window is not None and b - a > window
        yield _to_rows(square if narrow else replace(square, window=None), held.shift)
        below = replace(square, q_start=b, q_stop=block.q_stop, causal=False, window=None)
        if below.queries > 0:
            yield from _windowed(below, window, held.shift)


def _in_window(
    block: Block, held: Held, pieces: Sequence[_Piece], kv_block: int
) -> Iterator[Block]:
    """Those keys that only some of the queries see in pieces, the others in one rectangle."""
    assert block.window is not None, block
    by_all = max(block.k_start, min(block.k_stop, block.q_stop - block.window))
    for piece in _between(pieces, block.k_start, by_all):
        shift = piece.shift
        for start, stop in _on_grid(piece.start - shift, piece.stop - shift, kv_block):
            keys = replace(block, k_start=start + shift, k_stop=stop + shift, window=None)
            yield from _windowed(keys, block.window, shift)
    yield from _seen_by_all(replace(block, k_start=by_all, window=None), held, kv_block)


def _seen_by_all(block: Block, held: Held, kv_block: int) -> Iterator[Block]:
    for start, stop in _on_grid(held.row(block.k_start), held.row(block.k_stop), kv_block):
        yield replace(block, k_start=start, k_stop=stop)


def _windowed(block: Block, window: int | None, shift: int) -> Iterator[Block]:
    for part in [block] if window is None else cut_at_window(block, window):
        yield _to_rows(part, shift)


def _to_rows(block: Block, shift: int) -> Block:
    """A block of one piece in coordinates. Without a mask its queries may stay where they are."""
    keys = replace(block, k_start=block.k_start - shift, k_stop=block.k_stop - shift)
    if not block.causal and block.window is None:
        return keys
    return replace(keys, q_start=block.q_start - shift, q_stop=block.q_stop - shift, shift=shift)


def _between(pieces: Sequence[_Piece], start: int, stop: int) -> Iterator[_Piece]:
    """What of the pieces lies in [start, stop)."""
    first = max(0, bisect_right(pieces, start, key=lambda piece: piece.start) - 1)
    for piece in pieces[first:]:
        if piece.start >= stop:
            return
        if piece.stop > start:
            yield piece.cut(start, stop)


def _on_grid(start: int, stop: int, kv_block: int) -> Iterator[Range]:
    """The range, cut at multiples of kv_block."""
    while start < stop:
        end = min(stop, (start // kv_block + 1) * kv_block)
        yield start, end
        start = end
