"""PyTorch's two allocators once more, without blocks: what is in use is a set of intervals, what is
free is computed from it for every request. Slow, and little of it can be wrong. Default settings;
a block that is recorded on another stream is not modelled."""

from dataclasses import dataclass, field

from farspan_memory.compare.allocators import SimulatedOutOfMemory

MIB = 2**20
SMALL, PAGE = 2 * MIB, 20 * MIB
Interval = tuple[int, int]  # [start, end)
Pool = tuple[int, bool]  # stream, small


def rounded(size: int) -> int:
    return -(-size // 512) * 512


def gaps(start: int, end: int, used: list[Interval]) -> list[Interval]:
    """What of [start, end) no interval uses."""
    found, low = [], start
    for first, last in [*sorted(u for u in used if start <= u[0] < end), (end, end)]:
        if first > low:
            found.append((low, first))
        low = last
    return found


class NoAddresses(Exception):
    """The address range of a pool is too full for a request."""


@dataclass
class Segments:
    """The caching allocator: memory is segments, each used by one pool."""

    capacity: int
    segments: dict[Interval, Pool] = field(default_factory=dict)
    held: dict[int, Interval] = field(default_factory=dict)

    def reserved(self) -> int:
        return sum(end - start for start, end in self.segments)

    def malloc(self, tensor: int, size: int, stream: int) -> None:
        size = rounded(size)
        pool = (stream, size <= MIB)
        fits = [
            (end - start, start)
            for segment, owner in self.segments.items()
            if owner == pool
            for start, end in gaps(*segment, list(self.held.values()))
            if end - start >= size
        ]
        room, start = min(fits, default=(0, 0))
        if not fits:
            room = SMALL if pool[1] else PAGE if size < 10 * MIB else -(-size // SMALL) * SMALL
            start = self.grow(pool, room)
        keep = room - size < 512 if pool[1] else room - size <= MIB
        self.held[tensor] = (start, start + (room if keep else size))

    def grow(self, pool: Pool, size: int) -> int:
        if self.reserved() + size > self.capacity:
            used = list(self.held.values())
            self.segments = {
                s: owner for s, owner in self.segments.items() if gaps(*s, used) != [s]
            }
        if self.reserved() + size > self.capacity:
            raise SimulatedOutOfMemory
        self.top = getattr(self, "top", 0) + 1
        start = self.top << 50  # addresses grow with every segment
        self.segments[start, start + size] = pool
        return start

    def free(self, tensor: int) -> None:
        del self.held[tensor]


@dataclass
class Pages:
    """Expandable segments: memory is pages of one address range a pool. Raises NoAddresses where
    PyTorch would begin a second one."""

    capacity: int
    pages: dict[Pool, set[int]] = field(default_factory=dict)
    held: dict[int, tuple[Pool, Interval]] = field(default_factory=dict)

    def reserved(self) -> int:
        return sum(len(pages) * self.page(pool) for pool, pages in self.pages.items())

    def page(self, pool: Pool) -> int:
        return SMALL if pool[1] else PAGE

    def free_intervals(self, pool: Pool) -> list[Interval]:
        """Free and mapped, each as long as it can be."""
        page, mapped = self.page(pool), self.pages[pool]
        ends = sorted(page * p for p in mapped if p - 1 not in mapped)
        runs = [(start, self.run_end(pool, start)) for start in ends]
        used = [interval for owner, interval in self.held.values() if owner == pool]
        return [gap for start, end in runs for gap in gaps(start, end, used)]

    def run_end(self, pool: Pool, start: int) -> int:
        """Where memory that begins at a page's border ends."""
        number = start // self.page(pool)
        while number in self.pages[pool]:
            number += 1
        return number * self.page(pool)

    def room(self, pool: Pool, interval: Interval) -> int:
        """Of a free interval, with the addresses without memory behind it."""
        start, end = interval
        page = self.page(pool)
        if end % page or end // page in self.pages[pool]:
            return end - start
        later = [p * page for p in self.pages[pool] if p * page > end]
        return min([*later, self.end(pool)]) - start

    def end(self, pool: Pool) -> int:
        """Of the addresses: 9/8 of the device, in whole pages."""
        page = self.page(pool)
        return -(-(self.capacity + self.capacity // 8) // page) * page

    def malloc(self, tensor: int, size: int, stream: int) -> None:
        size = rounded(size)
        pool = (stream, size <= MIB)
        self.pages.setdefault(pool, set())
        fits = sorted((i for i in self.free_intervals(pool)), key=lambda i: (i[1] - i[0], i[0]))
        fits = [i for i in fits if i[1] - i[0] >= size]
        while len(fits) > 1 and self.room(pool, fits[1]) < self.room(pool, fits[0]):
            fits = fits[1:]
        start = fits[0][0] if fits else self.grow(pool, size)
        self.held[tensor] = (pool, (start, start + size))

    def grow(self, pool: Pool, size: int) -> int:
        start = self.lowest(pool, size)
        if not self.map(pool, start, start + size):
            self.unmap()
            start = self.lowest(pool, size)
            if not self.map(pool, start, start + size):
                raise SimulatedOutOfMemory
        return start

    def map(self, pool: Pool, start: int, end: int) -> bool:
        """Each row of unmapped pages at once; rows before the one that does not fit stay."""
        page, mapped = self.page(pool), self.pages[pool]
        row: set[int] = set()
        for number in range(start // page, -(-end // page) + 1):
            if number not in mapped and number * page < end:
                row.add(number)
            elif self.reserved() + len(row) * page > self.capacity:
                return False
            else:
                mapped |= row
                row = set()
        return True

    def lowest(self, pool: Pool, size: int) -> int:
        """The first address behind which nothing is in use for `size` bytes, of those where
        unmapped addresses begin, or the free memory before them."""
        page, mapped = self.page(pool), self.pages[pool]
        free = {end: start for start, end in self.free_intervals(pool)}
        used = [interval for owner, interval in self.held.values() if owner == pool]
        for number in range(len(mapped) + max(mapped, default=0) + 2):
            if number in mapped or (number and number - 1 not in mapped):
                continue
            start = free.get(number * page, number * page)
            if any(low < start + size and start < high for low, high in used):
                continue
            if start + size <= self.end(pool):
                return start
        raise NoAddresses

    def unmap(self) -> None:
        for pool, mapped in self.pages.items():
            page = self.page(pool)
            for start, end in self.free_intervals(pool):
                mapped -= set(range(-(-start // page), end // page))

    def free(self, tensor: int) -> None:
        del self.held[tensor]
