"""The keys that a chunk of queries sees, cut into rectangles that a kernel computes in one call.

A query at token i sees the keys j of its own document with i - window < j <= i. For a chunk
[q_start, q_stop), with `e` the keys of earlier chunks and `o` the chunk's own:

    keys      0 ........ kv_block ........ q_start ........ q_stop
    queries   e e e e e e|e e e e e e e e e|o
       of     e e e e e e|e e e e e e e e e|o o
    the chunk e e e e e e|e e e e e e e e e|o o o

Earlier keys are cut on the fixed grid of multiples of `kv_block`, so every chunk asks for the same
key blocks, and at q_start, because gradients of earlier keys go to accumulators while those of the
chunk's own keys return to autograd. Token positions are absolute; ranges half open.

Where keys are spread over ranks, a rank holds a part of each chunk's keys. Its rows are the
positions that it holds, in order. Here it holds `h` of three chunks of 8, for the queries of the
last chunk:

    positions 0 . . . . . . . 8 . . . . . . . 16. . . . . . .
    held          h h h           h h h           h h h
    rows          0 1 2           3 4 5           6 7 8

Keys that every query of a block sees need no mask: a rectangle over rows, whatever lies between
their positions. A mask compares positions, so a block with one lies within one held range, where
positions and rows differ by a constant, the block's `shift`. The chunk's own held keys [a, b) make
a causal square with the queries [a, b) and a rectangle below it with the queries from b on; queries
before a see none. The window cuts the rectangle as it cuts earlier keys.

Counts assume one document a row. Dense layers see all keys before a query, layers with a window the
latest, and sparse layers those that their choice leaves. The number of different pages that a
chunk's queries choose is known only after the choice: counts take the maximum.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

from farspan.program.layout import Range, chunk_ranges
from farspan.program.program import Program
from farspan.spec import LayerSpec, ModelSpec, RunSpec, Schedule, Sparse, UnsupportedError

# A windowed tile on a kernel without windows computes at most tile / window more than necessary.
TILE_LEAST, TILE_MOST = 64, 256
MASK_ELEMENTS = 2**22  # 16 MB in fp32; the largest mask, unless the tile is the smallest
INDEXED = 2**31  # CUDA's attention kernels count a call's elements in 32 bits
EVEN = 1024  # cuts at multiples leave lengths that cuDNN supports
LEAST_CALL = 128  # queries or keys of a call; smaller calls would be too many


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive query tokens [start, stop) of one document. The document begins at
    `document_start`, which is earlier than `start` only for the first run of a chunk."""

    start: int
    stop: int
    document_start: int


@dataclass(frozen=True, slots=True)
class Block:
    """Queries [q_start, q_stop) and keys [k_start, k_stop) of some batch rows, computed in one
    attention call.

    Invariant: every query sees a key and every key is seen. `causal` hides the keys after the
    query, and then q_stop == k_stop; `window` hides the keys before query - window + 1. A causal
    block without window is a square; a block that is neither causal nor windowed needs no mask.

    Coordinates: queries and keys are numbered by token positions. If a rank holds only a part of
    the keys (`Held`), keys are numbered by held rows and queries by position minus `shift`, so that
    the differences that a mask compares stay those of positions.
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
    """Cut tokens [q_start, q_stop) of one batch row into runs, at the starts of documents.

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


def _cut_runs(runs: Sequence[Run], window: int) -> tuple[Run, ...]:
    """Cut runs at each multiple of `window` tokens from their documents' beginnings."""
    return tuple(
        Run(max(start, run.start), min(start + window, run.stop), start)
        for run in runs
        for start in range(run.start - (run.start - run.document_start) % window, run.stop, window)
    )


def plan_blocks(
    q_start: int,
    q_stop: int,
    kv_block: int,
    window: int | None,
    document_starts: Sequence[tuple[Run, ...]] | None = None,
) -> tuple[Block, ...]:
    """Return blocks that cover the attention of the chunk [q_start, q_stop): each visible (batch
    row, query, key) is in exactly one block.

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
    """Cut a block with a window into tiles of queries, each with the keys in reach of its window.

    Kernels that know no window and skip no keys run on tiles: a tile needs a mask, but wastes at
    most about a quarter of its work where the window is 256 or longer.
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
    """Return the largest number of queries or keys in one attention call: kernels count elements in
    32 bits. `row` is the number of elements per token, over all sequences and query heads."""
    most = (INDEXED - 1) // row
    return most // EVEN * EVEN or most


def most_of(spec: LayerSpec, run: RunSpec) -> int:
    """Return the largest number of queries or keys in one attention call of a layer."""
    return most_tokens(max(1, run.batch * spec.query_heads * max(spec.head_dim, spec.value_dim)))


def refuse_wide_calls(model: ModelSpec, run: RunSpec) -> None:
    """Raise UnsupportedError if the batch is so wide that even a short attention call would have
    more elements than the kernels can count in 32 bits."""
    for spec in set(model.layers):
        most, seen = most_of(spec, run), 0 if spec.window is None else spec.window
        if spec.attends() and most < seen + LEAST_CALL:
            row = spec.query_heads * max(spec.head_dim, spec.value_dim)
            raise UnsupportedError(
                f"batch: CUDA's attention kernels cannot index {run.batch:,} sequences of {row:,} "
                f"elements per token; use at most {(INDEXED - 1) // row // (seen + 2 * EVEN):,}"
            )


def cut_wide(block: Block, most: int) -> tuple[Block, ...]:
    """Cut a block into blocks of at most `most` queries and `most` keys.

    A square becomes squares on its diagonal and rectangles below them, squares first: no two
    squares share a query, so squares can set the results to which rectangles add.
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
    """Yield a windowed tile as blocks that flash attention supports."""
    if tile.causal or tile.window is None:
        yield tile
    else:
        yield from cut_at_window(replace(tile, window=None), tile.window)


def overlapping(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    """Yield lists of blocks whose key ranges overlap, the lists in ascending order of keys."""
    together: list[Block] = []
    stop = 0
    for block in sorted(blocks, key=lambda b: (b.k_start, b.k_stop, b.row_start, b.q_start)):
        if together and block.k_start >= stop:
            yield together
            together = []
        stop = max(stop, block.k_stop)
        together.append(block)
    if together:
        yield together


def key_tiles(block: Block, q_start: int, size: int) -> list[Block]:
    """Cut the keys that the block's queries [q_start, q_start + size) see into tiles of `size`
    keys. A tile is causal or windowed only where that hides a key."""
    q_stop = min(q_start + size, block.q_stop)
    low = block.k_start
    if block.window is not None:
        low = max(low, q_start - block.window + 1)
    high = q_stop if block.causal else block.k_stop
    tiles = []
    for k_start in range(low, high, size):
        k_stop = min(k_start + size, high)
        hides = block.window is not None and q_stop - block.window > k_start
        tile = replace(
            block,
            q_start=q_start,
            q_stop=q_stop,
            k_start=k_start,
            k_stop=k_stop,
            causal=k_stop - 1 > q_start,
            window=block.window if hides else None,
        )
        tiles.append(tile)
    return tiles


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
    """Yield the ranges of keys before the chunk that the run sees, cut at multiples of kv_block."""
    low = run.document_start
    if window is not None:
        low = max(low, run.start - window + 1)
    for grid in range(low // kv_block * kv_block, q_start, kv_block):
        k_start, k_stop = max(low, grid), min(grid + kv_block, q_start)
        if k_start < k_stop:
            yield k_start, k_stop


def cut_at_window(block: Block, window: int) -> Iterator[Block]:
    """Yield one block of the queries whose window contains all of the block's keys, then one of the
    queries that see only the last keys.

    The second block has at least as many keys as queries, which flash attention needs; a single
    query of the first block does not change that and is not worth a call.
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
    """Return blocks of the keys that sparse attention always sees: sinks, recent and own tokens."""
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


@dataclass(frozen=True, slots=True)
class _Piece:
    """Range of token positions [start, stop) whose keys a rank holds; the key at position p is row
    p - shift of the rank's keys."""

    start: int
    stop: int
    shift: int

    def cut(self, start: int, stop: int) -> "_Piece":
        return _Piece(max(self.start, start), min(self.stop, stop), self.shift)


@dataclass(frozen=True, slots=True)
class Held:
    """Token positions whose keys a rank holds: a range of each chunk, which may be empty, in
    ascending order."""

    ranges: tuple[Range, ...]

    def __post_init__(self) -> None:
        borders = [border for held in self.ranges for border in held]
        assert borders == sorted(borders), self.ranges

    def rows(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def row(self, position: int) -> int:
        """Return the number of held positions before a position: its row, if it is held itself."""
        held = (min(stop, max(start, position)) - start for start, stop in self.ranges)
        return sum(held)

    def pieces(self) -> list[_Piece]:
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
    """Return blocks that cover the attention of queries [q_start, q_stop) to the keys that a rank
    holds, numbered as `Block` describes.

    Every visible (row, query, held key) is in exactly one block; a query that sees no held key is
    in none. Rows before q_start's are cut at multiples of `kv_block`. q_start may equal q_stop. For
    the other arguments, and without `held`, see `plan_blocks`.
    """
    if held is None:
        return plan_blocks(q_start, q_stop, kv_block, window, document_starts)
    if q_start == q_stop:
        return ()
    whole = plan_blocks(q_start, q_stop, q_stop, window, document_starts)
    return held_blocks(whole, held, kv_block)


def layer_blocks(
    layer: LayerSpec,
    q: Range,
    kv_block: int,
    batch: int,
    document_starts: Sequence[tuple[Run, ...]] | None = None,
    held: Held | None = None,
) -> tuple[Block, ...]:
    """Return the blocks of a layer's attention for queries [q[0], q[1]) of `batch` rows. Other
    arguments are as in `plan_held_blocks`."""
    if not layer.chunked or layer.window is None:
        return plan_held_blocks(*q, kv_block, layer.window, document_starts, held)
    rows = [(Run(*q, 0),)] * batch if document_starts is None else document_starts
    runs = [_cut_runs(row, layer.window) for row in rows]
    return plan_held_blocks(*q, kv_block, None, runs, held)


def held_blocks(blocks: Iterable[Block], held: Held, kv_block: int) -> tuple[Block, ...]:
    """Cut blocks of all keys (from `plan_blocks`) to the keys that one rank holds, numbered as
    `Block` describes."""
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
    """Yield blocks of the chunk's own held keys, which are not cut at multiples of kv_block."""
    window = block.window
    for held in _between_held(pieces, block.k_start, block.k_stop):
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
    """Yield blocks of the keys in a windowed block that a rank holds: first of the keys that only
    some of its queries see, by held range, then of the keys that all of them see."""
    assert block.window is not None, block
    by_all = max(block.k_start, min(block.k_stop, block.q_stop - block.window))
    for piece in _between_held(pieces, block.k_start, by_all):
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
    """Renumber a block of one held range by the rank's rows of keys, as `Block` describes."""
    keys = replace(block, k_start=block.k_start - shift, k_stop=block.k_stop - shift)
    if not block.causal and block.window is None:
        return keys
    return replace(keys, q_start=block.q_start - shift, q_stop=block.q_stop - shift, shift=shift)


def _between_held(pieces: Sequence[_Piece], start: int, stop: int) -> Iterator[_Piece]:
    """Yield the parts of held ranges that lie within the positions [start, stop)."""
    first = max(0, bisect_right(pieces, start, key=lambda piece: piece.start) - 1)
    for piece in pieces[first:]:
        if piece.start >= stop:
            return
        if piece.stop > start:
            yield piece.cut(start, stop)


def _on_grid(start: int, stop: int, kv_block: int) -> Iterator[Range]:
    """Yield the parts of [start, stop), cut at multiples of kv_block."""
    while start < stop:
        end = min(stop, (start // kv_block + 1) * kv_block)
        yield start, end
        start = end


def seen_pairs(stop: int, window: int | None, *, chunked: bool = False) -> int:
    """Number of query-key pairs of the queries [0, stop): query i sees min(i + 1, window) keys, or
    i % window + 1 if attention is chunked."""
    if chunked and window is not None:
        whole, rest = divmod(stop, window)
        return whole * (window * (window + 1) // 2) + rest * (rest + 1) // 2
    ramp = stop if window is None else min(stop, window)
    return ramp * (ramp + 1) // 2 + (stop - ramp) * (window or 0)


def layer_pairs(stop: int, layer: LayerSpec) -> int:
    """Return the number of query-key pairs of a layer's queries [0, stop), with dense attention."""
    return seen_pairs(stop, layer.window, chunked=layer.chunked)


def first_key(start: int, layer: LayerSpec) -> int:
    """Return the first token that the query at `start` sees, with dense attention."""
    if layer.window is None:
        return 0
    return start - start % layer.window if layer.chunked else max(0, start - layer.window + 1)


def sparse_of(schedule: Schedule, layer: LayerSpec) -> Sparse | None:
    """Return a layer's sparse attention; None if its attention is exact, as with a window."""
    return schedule.sparse if layer.window is None else None


def chunk_pairs(program: Program, layer: LayerSpec, chunk: int) -> int:
    """Return the number of query-key pairs that one chunk's queries attend to, per head."""
    start, stop = program.chunks[chunk]
    sparse = sparse_of(program.schedule, layer)
    if sparse is None:
        return layer_pairs(stop, layer) - layer_pairs(start, layer)
    return seen_pairs(stop - start, None) + (stop - start) * sparse.reach(start)


def earlier_rows(program: Program, layer: LayerSpec, chunk: int) -> int:
    """Return the number of earlier rows of K, V that a chunk's queries need. Each row counts once,
    although two blocks at a window's edge both read a few. A recurrent layer needs the previous
    chunk's rows, which hold its state; if it also attends, besides the rows of its keys."""
    start, stop = program.chunks[chunk]
    if layer.state:
        previous = start - program.chunks[chunk - 1][0] if chunk else 0
        attends = replace(layer, state=())
        return previous + (earlier_rows(program, attends, chunk) if layer.attends() else 0)
    sparse = sparse_of(program.schedule, layer)
    if sparse is None:
        if layer.window is None:
            return program.share.keys.rows[chunk][0]
        first = first_key(start, layer)
        held = program.share.keys.ranges[:chunk]
        return sum(_within(span, (first, start)) for span in held if span[1] > first)
    return sparse.near(start) + chosen_pages(sparse, start, stop) * sparse.page


def _within(span: Range, other: Range) -> int:
    return max(0, min(span[1], other[1]) - max(span[0], other[0]))


def sequence_pairs(tokens: int, layer: LayerSpec, schedule: Schedule) -> int:
    """Return the number of query-key pairs in the attention of a whole sequence, per head."""
    sparse = sparse_of(schedule, layer)
    if sparse is None:
        return layer_pairs(tokens, layer)
    return sum(
        seen_pairs(stop - start, None) + (stop - start) * sparse.reach(start)
        for start, stop in chunk_ranges(tokens, schedule.chunk)
    )


def chosen_pages(sparse: Sparse, start: int, stop: int) -> int:
    """Return the largest number of different pages that queries [start, stop) choose, per head."""
    page_count = -(-(stop - start) // sparse.query_tokens)
    return min(len(sparse.candidates(start)), page_count * sparse.width(start))
