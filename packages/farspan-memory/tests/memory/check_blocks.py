"""The dumb checker of the models of PyTorch's allocators: it sorts every block of every segment and
adds up. It shares nothing with them but the rows it reads."""

from itertools import groupby, pairwise
from operator import attrgetter

from farspan_memory.compare.allocators import CachingAllocator

CLOSED = ("free", "unmapped")  # states in which neighbours must have become one


class BrokenModel(AssertionError):
    """A model of an allocator that has lost track of memory; the message names the block."""


def check_blocks(allocator: CachingAllocator) -> None:
    """Raise BrokenModel unless blocks tile their segments, free neighbours are one, the lists name
    exactly the free blocks, and the bytes counted are the bytes there."""
    rows = sorted(allocator.rows(), key=attrgetter("segment", "address"))
    for segment, members in groupby(rows, key=attrgetter("segment")):
        blocks = list(members)
        ends = [segment, *(row.address + row.size for row in blocks)]
        if any(row.address != end for row, end in zip(blocks, ends, strict=False)):
            raise BrokenModel(f"blocks of segment {segment} leave a gap or overlap: {blocks}")
        if ends[-1] != segment + blocks[0].segment_size:
            raise BrokenModel(f"blocks of segment {segment} end at {ends[-1]}: {blocks}")
        for left, right in pairwise(blocks):
            if left.state == right.state and left.state in CLOSED:
                raise BrokenModel(f"{left} and {right} are {left.state} and apart")
    borders = sorted((start, start + size) for start, size in allocator.segments.items())
    if any(end > start for (_, end), (start, _) in pairwise(borders)):
        raise BrokenModel(f"segments overlap: {borders}")
    if {row.segment for row in rows} != set(allocator.segments):
        raise BrokenModel("a segment without blocks, or blocks without a segment")
    listed = [row for row in rows if row.listed]
    if listed != [row for row in rows if row.state in CLOSED] or len(listed) != allocator.listed():
        raise BrokenModel("the lists do not name the free blocks, each once")
    mapped = sum(row.size for row in rows if row.state != "unmapped")
    if not mapped == allocator.reserved <= min(allocator.capacity, allocator.reserved_peak):
        raise BrokenModel(f"{mapped} bytes mapped, {allocator.reserved} counted")
    held = sum(row.size for row in rows if row.state == "held")
    if allocator.live > held:
        raise BrokenModel(f"{allocator.live} bytes asked for, {held} given")
