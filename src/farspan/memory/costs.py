"""What calls of the driver cost: published measurements, by the bytes of a handle.

GMLake's Table 1 gives each call in units of one cuMalloc of 2 GiB, for 2 GiB made of handles of 2,
128 and 1,024 MiB. The unit in seconds comes from a run of its release: a stitch of 256 handles of
2 MiB, mapped and made accessible, took 20.435 ms, where the table has 0.70 + 96.8 units for 1,024.
A table of another machine takes its place as it is.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

MALLOC, FREE = "cudaMalloc", "cudaFree"
RESERVE, CREATE, MAP, ACCESS = "cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"
UNMAP, RELEASE, VACATE = "cuMemUnmap", "cuMemRelease", "cuMemAddressFree"

MIB = 2**20
STITCH_SECONDS, STITCHED = 20.435e-3, 256
UNIT = STITCH_SECONDS / STITCHED * 1024 / (0.70 + 96.8)  # seconds of a cuMalloc of 2 GiB: 0.84 ms

TABLE = "GMLake, Table 1"
RUN = "antgroup/glake issue 22"
ASSUMED = "assumed"

Calls = Mapping[tuple[str, int], int]  # call and bytes of its handle, 0 for any: how often


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a call for handles of some sizes; between two of them a power of the size."""

    points: tuple[tuple[int, float], ...]  # bytes of a handle, ascending, and seconds
    source: str

    def seconds(self, size: int) -> float:
        """Of one call; beyond the ends as at the end."""
        if size <= self.points[0][0]:
            return self.points[0][1]
        for (low, before), (high, after) in pairwise(self.points):
            if size <= high:
                part = math.log(size / low) / math.log(high / low)
                return before * math.pow(after / before, part)
        return self.points[-1][1]


def _of_table(*units: float) -> tuple[tuple[int, float], ...]:
    """Units of all handles of 2 GiB to seconds of one call."""
    sizes = (2 * MIB, 128 * MIB, 1024 * MIB)
    return tuple(
        (size, UNIT * unit * size / (2048 * MIB)) for size, unit in zip(sizes, units, strict=True)
    )


# One cuMemSetAccess may cover many handles; nobody published what that costs, and PyTorch says of
# such changes that they take as long as there are handles. So one is charged for each handle.
PUBLISHED: Mapping[str, Cost] = {
    MALLOC: Cost(((0, UNIT),), f"{TABLE}, for 2 GiB, at any size; its unit from {RUN}"),
    FREE: Cost(((0, UNIT),), f"{ASSUMED} as cudaMalloc; it waits for the device besides"),
    RESERVE: Cost(((0, 0.003 * UNIT),), TABLE),
    CREATE: Cost(_of_table(18.1, 0.89, 0.79), TABLE),
    MAP: Cost(_of_table(0.70, 0.01, 0.002), TABLE),
    ACCESS: Cost(_of_table(96.8, 8.2, 0.7), f"{TABLE}, for each handle"),
    UNMAP: Cost(_of_table(0.70, 0.01, 0.002), f"{ASSUMED} as cuMemMap"),
    RELEASE: Cost(_of_table(18.1, 0.89, 0.79), f"{ASSUMED} as cuMemCreate"),
    VACATE: Cost(((0, 0.003 * UNIT),), f"{ASSUMED} as cuMemAddressReserve"),
}


def seconds(calls: Calls, costs: Mapping[str, Cost] = PUBLISHED) -> float:
    """What the calls take, waiting for the device left out."""
    return sum(count * costs[call].seconds(size) for (call, size), count in calls.items())
