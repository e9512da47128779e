"""Placement problems for tests: random ones, and MiniMalloc's hard ones."""

import csv
from itertools import permutations
from pathlib import Path

from hypothesis import strategies as st

from farspan_memory.placement import PlacementRequest

HARD = Path(__file__).resolve().parents[2] / "benchmarks" / "data" / "minimalloc"
HARD_CAPACITY = 1_048_576


@st.composite
def requests(
    draw: st.DrawFn, most: int = 25, sizes: int = 12, times: int = 20
) -> list[PlacementRequest]:
    """Small and large sizes; empty ones and empty lifetimes among them."""
    size = st.integers(0, sizes) | st.sampled_from([sizes, 10**12])
    born, length = st.integers(0, times), st.integers(0, times // 2)
    drawn = draw(st.lists(st.tuples(size, born, length), max_size=most))
    return [PlacementRequest(size, born, born + length) for size, born, length in drawn]


@st.composite
def tight(draw: st.DrawFn, cuts: int = 12, side: int = 24) -> tuple[list[PlacementRequest], int]:
    """A rectangle of time and memory cut into requests, and its height: they fit exactly."""
    pieces = [(0, side, 0, side)]  # born, dies, low, high
    for _ in range(draw(st.integers(0, cuts))):
        born, dies, low, high = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        if draw(st.booleans()) and dies - born > 1:
            at = draw(st.integers(born + 1, dies - 1))
            pieces += [(born, at, low, high), (at, dies, low, high)]
        elif high - low > 1:
            at = draw(st.integers(low + 1, high - 1))
            pieces += [(born, dies, low, at), (born, dies, at, high)]
        else:
            pieces.append((born, dies, low, high))
    found = [PlacementRequest(high - low, born, dies) for born, dies, low, high in pieces]
    return draw(st.permutations(found)), side


def least_height(problem: list[PlacementRequest]) -> int:
    """The optimum by brute force: some order of first fit reaches it, so all are tried."""
    best = sum(r.size for r in problem)
    for order in permutations(problem):
        placed: list[tuple[int, PlacementRequest]] = []
        for request in order:
            tops = [0] + [a + r.size for a, r in placed]
            placed.append((min(t for t in tops if _free(t, request, placed)), request))
        best = min(best, max((a + r.size for a, r in placed), default=0))
    return best


def _free(low: int, request: PlacementRequest, placed: list[tuple[int, PlacementRequest]]) -> bool:
    return not any(
        max(r.born, request.born) < min(r.dies, request.dies)
        and max(a, low) < min(a + r.size, low + request.size)
        for a, r in placed
    )


def hard(letter: str) -> list[PlacementRequest]:
    """MiniMalloc's instance A to K."""
    path = HARD / f"{letter}.{HARD_CAPACITY}.csv"
    with path.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    return [PlacementRequest(int(r["size"]), int(r["lower"]), int(r["upper"])) for r in rows]


def above_bound() -> list[PlacementRequest]:
    """At most 8 bytes are alive, and no placement is lower than 9; so rare among few requests that
    none of 200,000 random ones of up to 7 was one."""
    lives = [
        *((2, 8, 10), (1, 11, 13), (4, 10, 11), (2, 7, 10), (4, 0, 4), (3, 3, 8)),
        *((3, 11, 12), (2, 11, 13), (1, 6, 10), (3, 9, 11), (2, 6, 9)),
    ]
    return [PlacementRequest(*life) for life in lives]
