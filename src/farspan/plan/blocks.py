"""Which keys a chunk of queries sees, cut into rectangles that a kernel computes in one call.

A query at token i sees the keys j of its own document with i - window < j <= i. For a chunk
[q_start, q_stop) that is, with `e` the keys of earlier chunks and `o` the chunk's own:

    keys      0 ........ kv_block ........ q_start ........ q_stop
    queries   e e e e e e|e e e e e e e e e|o
       of     e e e e e e|e e e e e e e e e|o o
    the chunk e e e e e e|e e e e e e e e e|o o o

Earlier keys are cut on the fixed grid of multiples of `kv_block`, so that every chunk asks for
the same key blocks, and at q_start, because gradients of earlier keys go to accumulators while
those of the chunk's own keys return to autograd. Token positions are absolute; ranges half open.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from farspan.spec import LayerSpec, ModelSpec, Refused, RunSpec, Sparse

# A windowed tile on a kernel without windows computes up to tile / window more than it must.
TILE_LEAST, TILE_MOST = 64, 256
MASK_ELEMENTS = 2**22  # 16 MB in fp32; the most that a mask takes, unless the tile is the least
INDEXED = 2**31  # CUDA's attention kernels count a call's elements with 32 bits
EVEN = 1024  # a cut at multiples of it leaves lengths that cuDNN takes
LEAST_CALL = 128  # queries or keys of a call: with fewer there would be no end of calls


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive query tokens [start, stop) of one document, which begins at `document_start`:
    at `start`, or earlier when the run is the first of its chunk."""

    start: int
    stop: int
    document_start: int


@dataclass(frozen=True, slots=True)
class Block:
    """Queries [q_start, q_stop) against keys [k_start, k_stop) of some batch rows.

    Invariant: every query sees a key and every key is seen. `causal` hides the keys after the
    query, and then q_stop == k_stop; `window` hides the keys before query - window + 1. A causal
    block without window is a square; a block that is neither causal nor windowed needs no mask.

    Queries and keys count in token positions. Of keys that a rank holds in part (`held`) they count
    in coordinates: keys are rows of what is held, and queries are positions less `shift`, so that
    differences of what a mask compares are those of positions.
    """

    row_start: int
    row_stop: int | None  # None: to the last row of the batch
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool
    window: int | None = None
    shift: int = 0

    @property
    def rows(self) -> slice:
        return slice(self.row_start, self.row_stop)

    @property
    def queries(self) -> int:
        return self.q_stop - self.q_start

    @property
    def keys(self) -> int:
        return self.k_stop - self.k_start

    def check(self) -> None:
        """Assert the invariant."""
        last = self.q_stop - 1
        assert self.queries > 0, self
        assert self.keys > 0, self
        if self.causal:
            assert self.q_stop == self.k_stop, self
            assert self.window is not None or self.q_start == self.k_start, self
        else:
            assert self.k_stop <= self.q_start, self
        if self.window is not None:
            assert last - self.window + 1 < self.k_stop, self
            assert self.q_start - self.window + 1 <= self.k_start, self


def document_runs(starts: Sequence[int], q_start: int, q_stop: int) -> tuple[Run, ...]:
    """The runs of one batch row in [q_start, q_stop).

    `starts` holds the first token of every document of the row, ascending, the first one 0.
    """
    assert starts[0] == 0, starts[0]
    if q_start == q_stop:
        return ()
    first = bisect_right(starts, q_start) - 1
    last = bisect_right(starts, q_stop - 1)
    ends = [*starts[first + 1 : last], q_stop]
    return tuple(
        Run(max(start, q_start), stop, start)
        for start, stop in zip(starts[first:last], ends, strict=True)
    )


def plan_blocks(
    q_start: int,
    q_stop: int,
    kv_block: int,
    window: int | None,
    document_starts: Sequence[tuple[Run, ...]] | None = None,
) -> tuple[Block, ...]:
    """The blocks of the chunk [q_start, q_stop): every visible (row, query, key) in exactly one.

    `document_starts` holds, for every batch row, the runs that cover the chunk (`document_runs`);
    None means that each row is one document. Neighbouring rows with the same runs share blocks.
    """
    assert 0 <= q_start < q_stop, (q_start, q_stop)
    assert kv_block >= 1, kv_block
    assert window is None or window >= 1, window
    blocks: list[Block] = []
    for row_start, row_stop, runs in _row_ranges(q_start, q_stop, document_starts):
        for run in runs:
            own = Block(row_start, row_stop, run.start, run.stop, run.start, run.stop, True)
            for k_start, k_stop in _earlier_keys(run, q_start, kv_block, window):
                earlier = replace(own, k_start=k_start, k_stop=k_stop, causal=False)
                blocks.extend([earlier] if window is None else cut_at_window(earlier, window))
            narrow = window is not None and run.stop - run.start > window
            blocks.append(replace(own, window=window) if narrow else own)
    for block in blocks:
        block.check()
    return tuple(blocks)


def tile_window(block: Block) -> tuple[Block, ...]:
    """The block cut into tiles of queries, each with the keys that its window reaches.

    For kernels that know no window and skip nothing: a tile needs a mask, but wastes at most
    about a quarter of its work where the window is 256 or longer.
    """
    window = block.window
    if window is None:
        return (block,)
    size = max(TILE_LEAST, min(TILE_MOST, window // 4, MASK_ELEMENTS // window))
    return tuple(_tiles(block, window, size))


def _tiles(block: Block, window: int, size: int) -> Iterator[Block]:
    for q_start in range(block.q_start, block.q_stop, size):
        q_stop = min(q_start + size, block.q_stop)
        k_start = max(block.k_start, q_start - window + 1)
        k_stop = q_stop if block.causal else block.k_stop
        tile = replace(block, q_start=q_start, q_stop=q_stop, k_start=k_start, k_stop=k_stop)
        all_in_window = q_stop - window <= k_start
        plain = all_in_window and (k_start == q_start or not block.causal)
        yield replace(tile, window=None) if plain else tile


def most_tokens(row: int) -> int:
    """Queries or keys that one call may have, of `row` elements each: of all sequences of the
    batch in every query head, as flash attention holds the gradients of keys."""
    most = (INDEXED - 1) // row
    return most // EVEN * EVEN or most


def most_of(spec: LayerSpec, run: RunSpec) -> int:
    """Queries or keys that one call of a layer's attention may have."""
    return most_tokens(max(1, run.batch * spec.query_heads * max(spec.head_dim, spec.value_dim)))


def refuse_wide_calls(model: ModelSpec, run: RunSpec) -> None:
    """Raises Refused where even a short call of attention has more elements than 32 bits count, so
    that longer ones could not be cut into such."""
    for spec in set(model.layers):
        most, seen = most_of(spec, run), 0 if spec.window is None else spec.window
        if spec.attends() and most < seen + LEAST_CALL:
            row = spec.query_heads * max(spec.head_dim, spec.value_dim)
            raise Refused(
                f"batch: {run.batch:,} sequences of {row:,} elements a token are beyond what "
                "CUDA's attention kernels index; use at most "
                f"{(INDEXED - 1) // row // (seen + 2 * EVEN):,}"
            )


def cut_wide(block: Block, most: int) -> tuple[Block, ...]:
    """The block as blocks of at most `most` queries and as many keys: itself where it is one.

    A square becomes squares on its diagonal and rectangles below them, squares first: they share
    no query, so that each begins the sum of its queries.
    """
    if max(block.queries, block.keys) <= most:
        return (block,)
    if block.window is not None:
        tiles = _tiles(block, block.window, most - block.window + 1)
        return tuple(piece for tile in tiles for piece in _with_window(tile))
    squares, rectangles = list[Block](), list[Block]()
    for q_start in range(block.q_start, block.q_stop, most):
        q_stop = min(q_start + most, block.q_stop)
        rows = replace(block, q_start=q_start, q_stop=q_stop)
        if block.causal:
            squares.append(replace(rows, k_start=q_start, k_stop=q_stop))
        last = q_start if block.causal else block.k_stop
        for k_start in range(block.k_start, last, most):
            k_stop = min(k_start + most, last)
            rectangles.append(replace(rows, k_start=k_start, k_stop=k_stop, causal=False))
    return (*squares, *rectangles)


def _with_window(tile: Block) -> Iterator[Block]:
    """A tile of `_tiles` as blocks that flash attention takes."""
    if tile.causal or tile.window is None:
        yield tile
    else:
        yield from cut_at_window(replace(tile, window=None), tile.window)


def _row_ranges(
    q_start: int, q_stop: int, document_starts: Sequence[tuple[Run, ...]] | None
) -> Iterator[tuple[int, int | None, tuple[Run, ...]]]:
    if document_starts is None:
        yield 0, None, (Run(q_start, q_stop, 0),)
        return
    row = 0
    for runs, same in groupby(document_starts):
        rows = len(list(same))
        borders = [q_start, *(run.stop for run in runs)]
        assert [*(run.start for run in runs), q_stop] == borders, (q_start, q_stop, runs)
        assert all(run.document_start == run.start for run in runs[1:]), runs
        yield row, row + rows, runs
        row += rows


def _earlier_keys(
    run: Run, q_start: int, kv_block: int, window: int | None
) -> Iterator[tuple[int, int]]:
    """Key ranges before q_start that the run's first query sees, cut on the grid of kv_block."""
    low = run.document_start
    if window is not None:
        low = max(low, run.start - window + 1)
    for grid in range(low // kv_block * kv_block, q_start, kv_block):
        k_start, k_stop = max(low, grid), min(grid + kv_block, q_start)
        if k_start < k_stop:
            yield k_start, k_stop


def cut_at_window(block: Block, window: int) -> Iterator[Block]:
    """The queries whose window holds all keys of the block, then those who see the last of them.

    In the second part there are at least as many keys as queries, which flash attention needs;
    a single query of the first part does not change that and is not worth a call.
    """
    if block.q_stop - window <= block.k_start:
        yield block
        return
    whole = block.k_start + window
    if whole <= block.q_start + 1:
        whole = block.q_start
    else:
        yield replace(block, q_stop=whole)
    q_stop = min(block.q_stop, block.k_stop + window - 1)
    if whole < q_stop:
        k_start = max(block.k_start, whole - window + 1)
        hides = q_stop - window > k_start
        yield replace(
            block, q_start=whole, q_stop=q_stop, k_start=k_start, window=window if hides else None
        )


def near_blocks(blocks: tuple[Block, ...], sparse: Sparse, q_start: int) -> tuple[Block, ...]:
    """Those of a chunk's blocks, cut to sinks, recent tokens and the chunk's own."""
    near, pages = sparse.near_start(q_start), sparse.candidates(q_start)
    sinks = pages.start * sparse.page
    ranges = ((0, sinks), (near, q_start)) if pages else ((0, q_start),)
    return tuple(_between(blocks, ranges, q_start))


def _between(
    blocks: tuple[Block, ...], ranges: tuple[tuple[int, int], ...], q_start: int
) -> Iterator[Block]:
    for block in blocks:
        if block.k_start >= q_start:
            yield block
            continue
        for start, stop in ranges:
            start, stop = max(start, block.k_start), min(stop, block.k_stop)
            if start < stop:
                yield replace(block, k_start=start, k_stop=stop)
