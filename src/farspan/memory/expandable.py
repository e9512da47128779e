"""PyTorch's expandable segments as a model: pages mapped behind each other, best fit above them.

    segment of one stream and one kind of request: addresses for 9/8 of the device
    +------------------+-------------+------------------------------------------+
    | mapped, in use   | mapped free | addresses without memory                 |
    +------------------+-------------+------------------------------------------+
    pages: 2 MiB for requests to 1 MiB, 20 MiB for all others

A request that no free block holds has pages mapped at the lowest address where free and unmapped
blocks make room for it. A max_split_size limits which free block serves a request, as in the
caching allocator, but neither the splitting nor what pages are mapped behind. Memory goes back to
the device only when it is full: then every page that is free as a whole is unmapped, and the
request tried once more. The rules are those of c10/cuda/CUDACachingAllocator.cpp in PyTorch 2.11 to
2.13. The capacity is what the driver has, not a memory fraction, which PyTorch compares in steps of
2 MiB before it maps pages of 20.
"""

from bisect import bisect_left, insort
from dataclasses import replace

from farspan.memory.caching import SMALL_SEGMENT, Block, CachingAllocator, Pool
from farspan.memory.costs import ACCESS, CREATE, MAP, RELEASE, RESERVE, UNMAP
from farspan.memory.settings import MIN_BLOCK, UNLIMITED, Settings


class ExpandableAllocator(CachingAllocator):
    """Invariant: as the caching allocator's; unmapped blocks begin and end at borders of pages,
    and no two of them stay apart."""

    def __init__(self, capacity: int = UNLIMITED, settings: Settings | None = None) -> None:
        # Expandable blocks are never collected for their age.
        given = replace(settings or Settings(), collect_at=0.0)
        super().__init__(capacity, given)

    def page(self, pool: Pool) -> int:
        """Bytes that are mapped at a time."""
        return SMALL_SEGMENT if pool.small else self.settings.large_segment

    def _find(self, pool: Pool, size: int) -> Block | None:
        """Best fit, where a block before unmapped addresses counts as large as it can grow; nothing
        where the one found is refused."""
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
        """Blocks of expandable segments are passed over."""
        del pool, size
        return False

    def _new_block(self, pool: Pool, size: int) -> Block | None:
        """Free and unmapped blocks that are together large enough, mapped and made one; what was
        mapped before the device was full stays, as free blocks."""
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

    def _lowest(self, pool: Pool, size: int) -> Block:
        """Where to map: the first of a row of free and unmapped blocks with room for `size`."""
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

    def _has_room(self, block: Block | None, size: int) -> bool:
        room = 0
        while room < size and block is not None and block.free:
            room += block.size
            block = block.after
        return room >= size

    def _map(self, block: Block, size: int) -> bool:
        """Pages for the first `size` bytes of an unmapped block, or none if the device is full. The
        block becomes the mapped one, free, with its free neighbours in it."""
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
            rest = self._cut_off(block, pages * page)
            rest.free = True
            insort(block.pool.unmapped, rest.address)
        block.mapped = True
        self._reserve(pages * page)
        self._join(block)
        self._list(block)
        return True

    def _release(self, pool: Pool) -> None:
        """Unmap every page that is free as a whole."""
        for _, address in tuple(pool.free):
            self._unmap(self.blocks[address])

    def _unmap(self, block: Block) -> None:
        page = self.page(block.pool)
        low = -(-(block.address - block.segment) // page) * page + block.segment
        high = (block.address + block.size - block.segment) // page * page + block.segment
        if low >= high:
            return
        self._unlist(block)
        if low > block.address:
            front, block = block, self._cut_off(block, low - block.address)
            self._list(front)
        if high < block.address + block.size:
            self._list(self._cut_off(block, high - block.address))
        block.mapped, block.free = False, True
        self._reserve(low - high)
        self.calls[UNMAP, page] += (high - low) // page
        self.calls[RELEASE, page] += (high - low) // page
        self._join(block)
        insort(block.pool.unmapped, block.address)
        if block.before is None and block.after is None:
            block.pool.unmapped.remove(block.address)
            del self.blocks[block.address], self.segments[block.segment]
