"""The kernels on rows, in Triton's interpreter, and on a GPU with rows of main memory."""

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from farspan.engine.tiers import PROGRAMS, TILE_BYTES, Arena, CopyEngine, launch_rows
from farspan.lazy import load
from farspan.program.dependencies import Lane
from farspan.spec import Tier
from tests.sparse.triton_cases import interpreter

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")

# Rows there are, width, rows that are asked for; in the last programs take several tiles each.
SIZES = [(9, 5, 4), (40, 128, 40), (7, 64, 1), (5, 1, 3), (4, 8, 0)]
SIZES += [(PROGRAMS * TILE_BYTES // 4 // 64 + 77, 64, PROGRAMS * TILE_BYTES // 4 // 64 + 33)]


def added(total: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    launch_rows(load("farspan.kernels.triton_kernels", "add_rows"), total, values, rows)
    return total


def taken(source: Tensor, rows: Tensor, target: Tensor) -> Tensor:
    launch_rows(load("farspan.kernels.triton_kernels", "take_rows"), target, source, rows)
    return target


def drawn(count: int, width: int, added: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    total, values = torch.randn(count, width), torch.randn(added, width)
    return total.to(dtype), torch.randperm(count)[:added], values.to(dtype)


def test_rows_are_taken_and_added_to_and_no_others() -> None:
    with interpreter() as pool:
        for size in SIZES:
            for dtype in (torch.float32, torch.float64)[: 1 if size is SIZES[-1] else 2]:
                total, rows, values = drawn(*size, dtype)
                wanted = total.index_add(0, rows, values)
                assert torch.equal(pool.submit(added, total, rows, values).result(), wanted)
                found = pool.submit(taken, total, rows, torch.empty_like(values)).result()
                assert torch.equal(found, total[rows])


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
def test_rows_of_main_memory(overlap: bool) -> None:
    """Gathered from it and added to it, on lanes of their own."""
    device = torch.device("cuda", 0)
    arena, copies = Arena(Tier.HOST, device), CopyEngine(device, overlap=overlap)
    arena.reserve(2**20)
    total, rows, values = (x.to(device) for x in drawn(300, 128, 200, torch.float32))
    place = arena.view(64, (300, 128), torch.float32, mapped=True)
    place.copy_(total)
    copies.begin()
    found = torch.empty_like(values)
    copies.gather(found, place, rows)
    copies.wait(Lane.EVICT, copies.record(Lane.FETCH))
    copies.add_rows(place, rows, values)
    copies.end()
    copies.synchronize()
    assert torch.equal(found, total[rows])
    at_home = arena.view(64, (300, 128), torch.float32)
    assert torch.equal(at_home, total.index_add(0, rows, values).cpu())
