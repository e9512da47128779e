"""Models of PyTorch's allocators: where they place blocks, and which driver calls they make.

The rules are those of c10/cuda/CUDACachingAllocator.cpp in PyTorch 2.11 to 2.13. Not modelled:
graph capture, private pools, peers. Addresses are never reused, as the driver may do; they only
decide between equal blocks.

    segment, from one cudaMalloc          free lists, one a stream and kind of pool
    +-----------+------+-----------+      small: requests to 1 MiB, segments of 2 MiB
    | in use    | free | in use    |      large: segments of 20 MiB for requests below 10 MiB,
    +-----------+------+-----------+             else the request rounded up to 2 MiB

The caching allocator gives a request the smallest free block that holds it, of equals the one at
the lowest address; a free block joins its free neighbours. A segment is released only as one whole
free block, and only after cudaMalloc failed.

    expandable segment, one a stream and kind of pool: addresses for 9/8 of the device
    +------------------+-------------+------------------------------------------+
    | mapped, in use   | mapped free | addresses without memory                 |
    +------------------+-------------+------------------------------------------+
    pages: 2 MiB for requests to 1 MiB, 20 MiB for all others

With expandable segments, a request that fits into no free block has pages mapped at the lowest
address where free and unmapped blocks make room for it. A max_split_size limits the free blocks
that serve a request, but neither their splitting nor the pages mapped after them. When the device
is full, every page that is free as a whole is unmapped, and the request tried once more. The
capacity is the driver's, not a memory fraction, which PyTorch compares in steps of 2 MiB before it
maps pages.
"""

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace

from farspan_memory.errors import UnsupportedError
from farspan_memory.formatting import MIB, UNLIMITED

MALLOC, FREE = "cudaMalloc", "cudaFree"
RESERVE, CREATE, MAP, ACCESS = "cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"
UNMAP, RELEASE, VACATE = "cuMemUnmap", "cuMemRelease", "cuMemAddressFree"


# -- settings -----------------------------------------------------------------------------------


MIN_BLOCK = 512
LARGE_SEGMENT = 20 * MIB
LEAST_SEGMENT = 10 * MIB  # requests up to this share such a segment
LEAST_LIMIT = 20 * MIB

# Name in PYTORCH_CUDA_ALLOC_CONF: field, and bytes of its unit.
NAMES = {
    "max_split_size_mb": ("max_split", MIB),
    "max_non_split_rounding_mb": ("max_rounding", MIB),
    "large_segment_size_mb": ("large_segment", MIB),
    "roundup_power2_divisions": ("divisions", 1),
    "garbage_collection_threshold": ("collect_at", 1),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """PyTorch's allocator settings with PyTorch's defaults, in bytes unless a name says
    otherwise."""

    max_split: int = UNLIMITED  # larger blocks are neither split nor given to smaller requests
    max_rounding: int = LARGE_SEGMENT  # unused bytes that a large request may leave in its block
    large_segment: int = LARGE_SEGMENT
    divisions: int = 0  # sizes between two powers of two; 0 to round up to 512 bytes instead
    collect_at: float = 0.0  # share of the capacity at which old segments are released; 0: never
    event_delay: int = 16  # mallocs until the work of a recorded stream counts as finished

    def __post_init__(self) -> None:
        split, rounding = self.max_split, self.max_rounding
        _expect("max_split_size_mb", split >= LEAST_LIMIT, "at least 20", split // MIB)
        _expect(
            "max_non_split_rounding_mb", rounding >= LEAST_LIMIT, "at least 20", rounding // MIB
        )
        segment, divisions, share = self.large_segment, self.divisions, self.collect_at
        _expect("large_segment_size_mb", segment > LEAST_SEGMENT, "more than 10", segment // MIB)
        power = divisions >= 0 and not divisions & (divisions - 1)
        _expect("roundup_power2_divisions", power, "a power of two", divisions)
        _expect("garbage_collection_threshold", 0 <= share < 1, "0 up to 1", share)

    def rounded(self, size: int) -> int:
        """Return the size of the block for a request of `size` > 0 bytes."""
        if self.divisions > 1 and size > MIN_BLOCK * self.divisions:
            power = 1 << (size.bit_length() - 1)
            part = power // self.divisions
            return -(-size // part) * part
        return -(-size // MIN_BLOCK) * MIN_BLOCK


def _expect(name: str, valid: bool, expected: str, value: float) -> None:
    if not valid:
        raise UnsupportedError(f"{name}: expected {expected}, got {value}")


def read_settings(text: str) -> Settings:
    """Parse settings such as `max_split_size_mb:512,garbage_collection_threshold:0.8`. Raises
    UnsupportedError naming the invalid part."""
    given: dict[str, int | float] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, value = part.partition(":")
        if name not in NAMES:
            raise UnsupportedError(f"alloc-conf: expected {', '.join(NAMES)}, got {name!r}")
        field, unit = NAMES[name]
        try:
            given[field] = float(value) if field == "collect_at" else int(value) * unit
        except ValueError:
            raise UnsupportedError(
                f"alloc-conf: {name}: expected a number, got {value!r}"
            ) from None
    assert given.keys() <= {field.name for field in fields(Settings)}
    return Settings(**given)  # type: ignore[arg-type]


# -- the caching allocator ----------------------------------------------------------------------


SMALL_REQUEST = MIB  # largest request of the small pools
SMALL_SEGMENT = 2 * MIB
OWN_SEGMENT = 10 * MIB  # a request of at least this size has a segment of its own
ROUND = 2 * MIB


class SimulatedOutOfMemory(Exception):
    """The simulated device is full, even after all unused memory was released."""


@dataclass(slots=True, eq=False)
class Pool:
    """Free blocks of a stream for small or for large requests, sorted by size, then address."""

    small: bool
    stream: int
    free: list[tuple[int, int]] = field(default_factory=list)
    unmapped: list[int] = field(default_factory=list)  # addresses


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A range of a segment, linked to the ranges before and after it."""

    address: int
    size: int
    pool: Pool
    segment: int
    before: "CachedBlock | None" = None
    after: "CachedBlock | None" = None
    free: bool = False
    mapped: bool = True  # only expandable segments have unmapped blocks
    asked: int = 0  # bytes before rounding
    streams: set[int] = field(default_factory=set)  # further streams that use it
    age: int = 0  # number of searches when it entered its free list


@dataclass(frozen=True, slots=True)
class BlockRow:
    """Place, size and state of one block, for the checker of invariants."""

    segment: int  # address of the segment
    segment_size: int
    address: int
    size: int
    state: str  # free, held, waiting or unmapped
    listed: bool  # in the free list, or in that of unmapped blocks


class CachingAllocator:
    """Model of PyTorch's caching allocator, which allocates and frees tensors by number.

    Invariant: the blocks of a segment tile it, no two free neighbours stay apart, the mapped ones
    add up to `reserved`, and `reserved <= capacity`. `check` asserts it.
    """

    def __init__(self, capacity: int = UNLIMITED, settings: Settings | None = None) -> None:
        self.capacity, self.settings = capacity, settings or Settings()
        self.live = self.reserved = self.reserved_peak = 0  # bytes; live ones before rounding
        self.retries = 0  # times that all unused memory was released to serve a request
        self.calls: Counter[tuple[str, int]] = Counter()  # of the driver, by bytes
        self.segments: dict[int, int] = {}  # address to bytes
        self.blocks: dict[int, CachedBlock] = {}  # by address
        self._held: dict[int, CachedBlock | None] = {}  # by tensor; None for 0 bytes
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._waiting: deque[tuple[int, CachedBlock]] = (
            deque()
        )  # freed, while other streams still work on them
        self._mallocs = self._searches = 0
        self._top = 0  # lowest address never used

    def malloc(self, tensor: int, size: int, stream: int = 0) -> None:
        """Allocate a tensor. Raises SimulatedOutOfMemory if no unused memory is left to release."""
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
            self._split(block, rounded)
        block.asked = size
        self.live += size
        self._held[tensor] = block

    def free(self, tensor: int) -> None:
        """Free a tensor. Its block is reused once other streams that used the tensor are done."""
        block = self._held.pop(tensor)
        if block is None:
            return
        self.live -= block.asked
        if block.streams:
            self._waiting.append((self._mallocs + self.settings.event_delay, block))
        else:
            self._recycle(block)

    def record_stream(self, tensor: int, stream: int) -> None:
        """Note that another stream uses the tensor, for which a later free must wait."""
        block = self._held[tensor]
        if block is not None and stream != block.pool.stream:
            block.streams.add(stream)

    def empty_cache(self) -> None:
        """Wait for the streams, then release all unused memory."""
        while self._waiting:
            self._recycle(self._waiting.popleft()[1])
        for pool in self._pools.values():
            self._release(pool)

    def rows(self) -> Iterator[BlockRow]:
        """Yield every block of every segment for the checker."""
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
            yield BlockRow(block.segment, size, block.address, block.size, state, listed)

    def listed(self) -> int:
        """Return the number of blocks in all free lists."""
        return sum(len(pool.free) + len(pool.unmapped) for pool in self._pools.values())

    def _find(self, pool: Pool, size: int) -> CachedBlock | None:
        """Remove and return the smallest sufficient free block; None without one, or if refused."""
        self._searches += not pool.small
        index = bisect_left(pool.free, (size, 0))
        if index == len(pool.free) or self._refused(size, pool.free[index][0]):
            return None
        return self._take(pool, index)

    def _refused(self, size: int, fits: int) -> bool:
        """Return whether max_split_size denies a free block of `fits` bytes to a request of `size`.
        Blocks at or above the limit serve only requests at or above it that leave little unused."""
        limit = self.settings.max_split
        return size < limit <= fits or limit <= size <= fits - self.settings.max_rounding

    def _grow(self, pool: Pool, size: int) -> CachedBlock:
        """Return a block of a new segment, after releasing unused memory if the device is full."""
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
            raise SimulatedOutOfMemory
        return block

    def _new_block(self, pool: Pool, size: int) -> CachedBlock | None:
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

    def _new_segment(self, pool: Pool, size: int) -> CachedBlock:
        """Return a new segment as one block, in no free list."""
        block = CachedBlock(self._top, size, pool, self._top)
        self.segments[self._top] = size
        self.blocks[self._top] = block
        self._top += -(-size // ROUND) * ROUND
        return block

    def _splits(self, pool: Pool, size: int, rest: int) -> bool:
        if pool.small:
            return rest >= MIN_BLOCK
        return size < self.settings.max_split and rest > SMALL_REQUEST

    def _release(self, pool: Pool) -> None:
        """Call cudaFree for those segments of a pool that consist of one free block."""
        for _, address in tuple(pool.free):
            block = self.blocks[address]
            if block.before is None and block.after is None:
                self._free_segment(block)

    def _free_segment(self, block: CachedBlock) -> None:
        block.pool.free.remove((block.size, block.address))
        del self.blocks[block.address], self.segments[block.segment]
        self.calls[FREE, 0] += 1
        self._reserve(-block.size)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Release free blocks larger than max_split_size: one that suffices for the request, else
        the largest ones until their sum suffices. Return whether enough was released."""
        limit = self.settings.max_split
        if limit == UNLIMITED:
            return False
        wanted = max(size, limit)
        index = bisect_left(pool.free, (wanted, 0))
        if index < len(pool.free):
            self._free_segment(self.blocks[pool.free[index][1]])
            return True
        released = 0
        while released < wanted and pool.free and pool.free[-1][0] >= limit:
            released += pool.free[-1][0]
            self._free_segment(self.blocks[pool.free[-1][1]])
        return released >= wanted

    def _collect(self) -> None:
        """Apply garbage_collection_threshold: while more than this share of memory is reserved,
        free unused segments of at least average age, counted in searches since they became free."""
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

    def _take(self, pool: Pool, index: int) -> CachedBlock:
        block = self.blocks[pool.free.pop(index)[1]]
        block.free = False
        return block

    def _split(self, block: CachedBlock, size: int) -> None:
        """Split a block after `size` bytes, and add the rest to the free list."""
        rest = self._split_off(block, size)
        self._list(rest)

    def _split_off(self, block: CachedBlock, size: int) -> CachedBlock:
        """Split a block after `size` bytes, and return the rest, in no free list."""
        rest = CachedBlock(block.address + size, block.size - size, block.pool, block.segment)
        rest.mapped = block.mapped
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self.blocks[rest.address] = rest
        return rest

    def _recycle(self, block: CachedBlock) -> None:
        """Merge an unused block with its free neighbours, and add it to the free list."""
        if block.streams:
            block.streams.clear()
        self._merge(block)
        self._list(block)

    def _list(self, block: CachedBlock) -> None:
        block.free, block.age = True, self._searches
        insort(block.pool.free, (block.size, block.address))

    def _merge(self, block: CachedBlock) -> None:
        """Merge a block with its free neighbours: mapped ones if it is mapped, else unmapped
        ones."""
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

    def _unlist(self, block: CachedBlock) -> None:
        if block.mapped:
            free = block.pool.free
            del free[bisect_left(free, (block.size, block.address))]
        else:
            unmapped = block.pool.unmapped
            del unmapped[bisect_left(unmapped, block.address)]


# -- expandable segments ------------------------------------------------------------------------


class ExpandableAllocator(CachingAllocator):
    """Model of PyTorch's allocator with expandable segments.

    Invariant: as the caching allocator's; unmapped blocks begin and end at borders of pages, and no
    two unmapped neighbours stay apart.
    """

    def __init__(self, capacity: int = UNLIMITED, settings: Settings | None = None) -> None:
        # The age of expandable blocks never causes their collection.
        given = replace(settings or Settings(), collect_at=0.0)
        super().__init__(capacity, given)

    def page(self, pool: Pool) -> int:
        """Return the bytes of one page of this pool, the unit of mapping."""
        return SMALL_SEGMENT if pool.small else self.settings.large_segment

    def _find(self, pool: Pool, size: int) -> CachedBlock | None:
        """Remove and return the best-fitting free block; None if none fits or the best is refused.
        A block before unmapped addresses counts with the size to which it can grow."""
        free = pool.free
        index = bisect_left(free, (size, 0))
        if index == len(free):
            return None
        while index + 1 < len(free) and self._room(free[index + 1]) < self._room(free[index]):
            index += 1
        return None if self._refused(size, free[index][0]) else self._take(pool, index)

    def _room(self, entry: tuple[int, int]) -> int:
        after = self.blocks[entry[1]].after
        return entry[0] + (after.size if after is not None and not after.mapped else 0)

    def _splits(self, pool: Pool, size: int, rest: int) -> bool:
        del pool, size
        return rest >= MIN_BLOCK

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Release nothing: blocks of expandable segments are exempt from max_split_size."""
        del pool, size
        return False

    def _new_block(self, pool: Pool, size: int) -> CachedBlock | None:
        """Map pages until adjacent free and unmapped blocks form a block of at least `size` bytes.
        If the device is full, return None; pages mapped until then stay as free blocks."""
        block = self._lowest(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            ahead = block.after
            assert ahead is not None
            if not self._map(ahead, min(ahead.size, size - block.size)):
                return None
            block = ahead
        self._unlist(block)
        block.free = False
        return block

    def _lowest(self, pool: Pool, size: int) -> CachedBlock:
        """Return the first block of the lowest row of adjacent free and unmapped blocks that has
        room for `size` bytes."""
        for address in pool.unmapped:
            block = self.blocks[address]
            if block.before is not None and block.before.free:
                block = block.before
            if self._has_room(block, size):
                return block
        page = self.page(pool)
        self.calls[RESERVE, 0] += 1
        block = self._new_segment(pool, -(-(self.capacity + self.capacity // 8) // page) * page)
        block.mapped, block.free = False, True
        insort(pool.unmapped, block.address)
        return block

    def _has_room(self, block: CachedBlock | None, size: int) -> bool:
        room = 0
        while room < size and block is not None and block.free:
            room += block.size
            block = block.after
        return room >= size

    def _map(self, block: CachedBlock, size: int) -> bool:
        """Map pages for the first `size` bytes of an unmapped block and merge it with its free
        neighbours. Returns False, and maps nothing, if the device is full."""
        page = self.page(block.pool)
        pages = -(-size // page)
        fit = min(pages, (self.capacity - self.reserved) // page)
        self.calls[CREATE, page] += fit
        if fit < pages:
            self.calls[RELEASE, page] += fit
            return False
        self.calls[MAP, page] += pages
        self.calls[ACCESS, page] += pages
        self._unlist(block)
        if pages * page < block.size:
            rest = self._split_off(block, pages * page)
            rest.free = True
            insort(block.pool.unmapped, rest.address)
        block.mapped = True
        self._reserve(pages * page)
        self._merge(block)
        self._list(block)
        return True

    def _release(self, pool: Pool) -> None:
        """Unmap those pages of a pool that are wholly free."""
        for _, address in tuple(pool.free):
            self._unmap(self.blocks[address])

    def _unmap(self, block: CachedBlock) -> None:
        page = self.page(block.pool)
        low = -(-(block.address - block.segment) // page) * page + block.segment
        high = (block.address + block.size - block.segment) // page * page + block.segment
        if low >= high:
            return
        self._unlist(block)
        if low > block.address:
            front, block = block, self._split_off(block, low - block.address)
            self._list(front)
        if high < block.address + block.size:
            self._list(self._split_off(block, high - block.address))
        block.mapped, block.free = False, True
        self._reserve(low - high)
        self.calls[UNMAP, page] += (high - low) // page
        self.calls[RELEASE, page] += (high - low) // page
        self._merge(block)
        insort(block.pool.unmapped, block.address)
        if block.before is None and block.after is None:
            block.pool.unmapped.remove(block.address)
            del self.blocks[block.address], self.segments[block.segment]
