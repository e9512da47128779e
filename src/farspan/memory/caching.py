"""PyTorch's caching allocator as a model: where its blocks lie and when it calls the driver.

    segment, from one cudaMalloc          free lists, one a stream and kind of pool
    +-----------+------+-----------+      small: requests to 1 MiB, segments of 2 MiB
    | in use    | free | in use    |      large: segments of 20 MiB for requests below 10 MiB,
    +-----------+------+-----------+             else the request rounded up to 2 MiB

A request takes the smallest free block that holds it, of equals the one at the lowest address, and
a free block joins its free neighbours. A segment goes back only as one whole free block, and only
when cudaMalloc failed. The rules are those of c10/cuda/CUDACachingAllocator.cpp in PyTorch 2.11 to
2.13. Not modelled: graph capture, private pools, peers. Addresses are never given twice, which
the driver may do; they decide between equals alone.
"""

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from farspan.memory.costs import FREE, MALLOC
from farspan.memory.settings import MIB, MIN_BLOCK, UNLIMITED, Settings

SMALL_REQUEST = MIB  # the largest that the small pools serve
SMALL_SEGMENT = 2 * MIB
OWN_SEGMENT = 10 * MIB  # from here a request has a segment of its own size
ROUND = 2 * MIB


class OutOfMemory(Exception):
    """The device is full, also after everything unused was given back."""


class Block:
    """A range of a segment. `before` and `after` are its neighbours there."""

    __slots__ = (
        *("address", "size", "pool", "segment", "before", "after", "free", "mapped"),
        *("asked", "streams", "age"),
    )

    def __init__(self, address: int, size: int, pool: "Pool", segment: int) -> None:
        self.address, self.size, self.pool, self.segment = address, size, pool, segment
        self.before: Block | None = None
        self.after: Block | None = None
        self.free = False
        self.mapped = True  # expandable segments alone have others
        self.asked = 0  # bytes before rounding
        self.streams: set[int] = set()  # that also use it
        self.age = 0  # searches so far when it came into its free list


class Pool:
    """Free blocks of one stream and one kind of request, ordered by size and then address."""

    __slots__ = ("free", "small", "stream", "unmapped")

    def __init__(self, small: bool, stream: int) -> None:
        self.small, self.stream = small, stream
        self.free: list[tuple[int, int]] = []
        self.unmapped: list[int] = []  # addresses


@dataclass(frozen=True, slots=True)
class Row:
    """A block as the checker reads it."""

    segment: int  # its address
    segment_size: int
    address: int
    size: int
    state: str  # free, held, waiting or unmapped
    listed: bool  # in the free list, or in that of unmapped blocks


class CachingAllocator:
    """malloc and free by the number of a tensor.

    Invariant: the blocks of a segment tile it, no two free neighbours stay apart, the mapped ones
    add up to `reserved`, and `reserved <= capacity`. `check` asserts it.
    """

    def __init__(self, capacity: int = UNLIMITED, settings: Settings | None = None) -> None:
        self.capacity, self.settings = capacity, settings or Settings()
        self.live = self.reserved = self.reserved_peak = 0  # bytes; live ones as asked for
        self.retries = 0  # times everything unused was given back to serve a request
        self.calls: Counter[tuple[str, int]] = Counter()  # of the driver, with the bytes of each
        self.segments: dict[int, int] = {}  # address to bytes
        self.blocks: dict[int, Block] = {}  # by address
        self._held: dict[int, Block | None] = {}  # by tensor; nothing for 0 bytes
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._waiting: deque[tuple[int, Block]] = deque()  # freed, other streams still at work
        self._mallocs = self._searches = 0
        self._top = 0  # the lowest address never given

    def malloc(self, tensor: int, size: int, stream: int = 0) -> None:
        """Raises OutOfMemory; everything unused has been given back by then."""
        self._mallocs += 1
        while self._waiting and self._waiting[0][0] <= self._mallocs:
            self._recycle(self._waiting.popleft()[1])
        if size == 0:
            self._held[tensor] = None
            return
        rounded = self.settings.rounded(size)
        small = rounded <= SMALL_REQUEST
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = Pool(small, stream)
        block = self._find(pool, rounded) or self._grow(pool, rounded)
        if self._splits(pool, rounded, block.size - rounded):
            self._cut(block, rounded)
        block.asked = size
        self.live += size
        self._held[tensor] = block

    def free(self, tensor: int) -> None:
        """The tensor's block goes to its free list once the recorded streams are done."""
        block = self._held.pop(tensor)
        if block is None:
            return
        self.live -= block.asked
        if block.streams:
            self._waiting.append((self._mallocs + self.settings.event_delay, block))
        else:
            self._recycle(block)

    def record_stream(self, tensor: int, stream: int) -> None:
        """Another stream uses the tensor: its memory is reused only when that work is over."""
        block = self._held[tensor]
        if block is not None and stream != block.pool.stream:
            block.streams.add(stream)

    def empty_cache(self) -> None:
        """Give back everything unused; waits for the streams."""
        while self._waiting:
            self._recycle(self._waiting.popleft()[1])
        for pool in self._pools.values():
            self._release(pool)

    def rows(self) -> Iterator[Row]:
        """Every block of every segment, for the checker."""
        held = {id(block) for block in self._held.values()}
        for block in self.blocks.values():
            pool = block.pool
            if not block.mapped:
                state, listed = "unmapped", block.address in pool.unmapped
            elif block.free:
                state, listed = "free", (block.size, block.address) in pool.free
            else:
                state, listed = "held" if id(block) in held else "waiting", False
            size = self.segments[block.segment]
            yield Row(block.segment, size, block.address, block.size, state, listed)

    def listed(self) -> int:
        """How many blocks the free lists name."""
        return sum(len(pool.free) + len(pool.unmapped) for pool in self._pools.values())

    def _find(self, pool: Pool, size: int) -> Block | None:
        """Best fit, unless that block is refused."""
        self._searches += not pool.small
        index = bisect_left(pool.free, (size, 0))
        if index == len(pool.free) or self._refused(size, pool.free[index][0]):
            return None
        return self._take(pool, index)

    def _refused(self, size: int, fits: int) -> bool:
        """With a max_split_size, a block from there on serves no smaller request and no larger one
        that would leave too much of it unused."""
        limit = self.settings.max_split
        return size < limit <= fits or limit <= size <= fits - self.settings.max_rounding

    def _grow(self, pool: Pool, size: int) -> Block:
        """A new segment; where the device is full, after giving back what is unused."""
        if self.settings.collect_at > 0 and self.capacity < UNLIMITED:
            self._collect()
        block = self._new_block(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._new_block(pool, size)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._new_block(pool, size)
        if block is None:
            raise OutOfMemory
        return block

    def _new_block(self, pool: Pool, size: int) -> Block | None:
        if pool.small:
            size = SMALL_SEGMENT
        elif size < OWN_SEGMENT:
            size = self.settings.large_segment
        else:
            size = -(-size // ROUND) * ROUND
        if self.reserved + size > self.capacity:
            return None
        self.calls[MALLOC, 0] += 1
        self._reserve(size)
        return self._new_segment(pool, size)

    def _new_segment(self, pool: Pool, size: int) -> Block:
        """A block that is all of a new segment, in no list."""
        block = Block(self._top, size, pool, self._top)
        self.segments[self._top] = size
        self.blocks[self._top] = block
        self._top += -(-size // ROUND) * ROUND
        return block

    def _splits(self, pool: Pool, size: int, rest: int) -> bool:
        if pool.small:
            return rest >= MIN_BLOCK
        return size < self.settings.max_split and rest > SMALL_REQUEST

    def _release(self, pool: Pool) -> None:
        """cudaFree each segment that is one free block."""
        for _, address in tuple(pool.free):
            block = self.blocks[address]
            if block.before is None and block.after is None:
                self._free_segment(block)

    def _free_segment(self, block: Block) -> None:
        block.pool.free.remove((block.size, block.address))
        del self.blocks[block.address], self.segments[block.segment]
        self.calls[FREE, 0] += 1
        self._reserve(-block.size)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """With a max_split_size, first give back blocks beyond it: one that is large enough, else
        the largest ones until they are together; whether that can be enough."""
        limit = self.settings.max_split
        if limit == UNLIMITED:
            return False
        wanted = max(size, limit)
        index = bisect_left(pool.free, (wanted, 0))
        if index < len(pool.free):
            self._free_segment(self.blocks[pool.free[index][1]])
            return True
        found = 0
        while found < wanted and pool.free and pool.free[-1][0] >= limit:
            found += pool.free[-1][0]
            self._free_segment(self.blocks[pool.free[-1][1]])
        return found >= wanted

    def _collect(self) -> None:
        """garbage_collection_threshold: above it, free whole segments of at least average age,
        which is the searches since they became free, until enough or nothing is freed."""
        target = self.reserved - int(self.settings.collect_at * self.capacity)
        whole = [
            block
            for block in self.blocks.values()
            if block.free and not (block.pool.small or block.before or block.after)
        ]
        freed = True
        while target > 0 and freed and whole:
            average = sum(self._searches - block.age for block in whole) / len(whole)
            old = [block for block in whole if self._searches - block.age >= average]
            freed = bool(old)
            for block in old:
                target -= block.size
                self._free_segment(block)
            whole = [block for block in whole if self._searches - block.age < average]

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def _take(self, pool: Pool, index: int) -> Block:
        """Out of the free list."""
        block = self.blocks[pool.free.pop(index)[1]]
        block.free = False
        return block

    def _cut(self, block: Block, size: int) -> None:
        """The rest behind the first `size` bytes becomes a free block."""
        rest = self._cut_off(block, size)
        self._list(rest)

    def _cut_off(self, block: Block, size: int) -> Block:
        """The rest behind the first `size` bytes as a block of its own, in no list."""
        rest = Block(block.address + size, block.size - size, block.pool, block.segment)
        rest.mapped = block.mapped
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self.blocks[rest.address] = rest
        return rest

    def _recycle(self, block: Block) -> None:
        """A block nobody uses joins its free neighbours and the free list."""
        if block.streams:
            block.streams.clear()
        self._join(block)
        self._list(block)

    def _list(self, block: Block) -> None:
        block.free, block.age = True, self._searches
        insort(block.pool.free, (block.size, block.address))

    def _join(self, block: Block) -> None:
        """Swallow the neighbours that are free and mapped, or unmapped, as the block is."""
        before, after = block.before, block.after
        if before is not None and before.free and before.mapped is block.mapped:
            self._unlist(before)
            del self.blocks[block.address]
            block.address, block.before = before.address, before.before
            block.size += before.size
            self.blocks[block.address] = block
            if block.before is not None:
                block.before.after = block
        if after is not None and after.free and after.mapped is block.mapped:
            self._unlist(after)
            del self.blocks[after.address]
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block

    def _unlist(self, block: Block) -> None:
        if block.mapped:
            free = block.pool.free
            del free[bisect_left(free, (block.size, block.address))]
        else:
            unmapped = block.pool.unmapped
            del unmapped[bisect_left(unmapped, block.address)]
