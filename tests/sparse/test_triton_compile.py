"""The Triton kernels compiled for Hopper and Ampere, without a GPU: they compile for real, their
matrix products are on tensor cores, loads run ahead, and tiles fit shared memory.

Launches are made as on a GPU, by the launchers, and given to Triton's compiler instead of a stream.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from farspan.attention.backends import BackwardQueries
from farspan.kernels.launch import Launch
from farspan.lazy import load
from farspan.sparse.kernel_calls import (
    PagedCall,
    PageGradients,
    PageTable,
    PageTiles,
    backward_launches,
    choose_tiles,
    forward_launch,
)
from tests.compiling import Compiler, compiling
from tests.grids import exhaustive
from tests.sparse.triton_cases import PagedCase, PagedInputs, make_paged

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton"),
    # Triton's own, on its first use in a process; what it is about is given with each launch.
    pytest.mark.filterwarnings("default:TRITON_DEFAULT_FP_FUSION"),
]

KERNELS = ("forward_kernel", "delta_kernel", "dq_kernel", "dkv_kernel")
SHARED = {(9, 0): 227 * 1024, (8, 0): 163 * 1024}  # bytes a program may have
PRODUCTS = {(9, 0): "wgmma.mma_async", (8, 0): "mma.sync"}
BF16 = replace(PagedCase(), page=128, tokens=1024, queries=256, head_dim=128, dtype=torch.bfloat16)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Any]:
    kernel = load("farspan.sparse.kernels", "forward_kernel")
    with compiling(kernel, tmp_path) as driver:
        yield driver


def launches(case: PagedCase, inputs: PagedInputs, tiles: PageTiles) -> Iterator[Launch]:
    table = PageTable(inputs.choice, case.page, case.tokens, case.tokens)
    call = PagedCall(table, case.scale, inputs.first_key, tiles)
    q, keys, values, out = inputs.q, inputs.k, inputs.v, inputs.dout
    lse = torch.empty(q.shape[:3])
    yield forward_launch(call, q, keys, values, out, lse)
    totals = PageGradients(keys.float(), values.float())
    queries, delta = BackwardQueries(out, q, out, lse), torch.empty_like(lse)
    yield from backward_launches(call, queries, delta, keys, values, q.float(), totals)


def compiled(case: PagedCase, capability: tuple[int, int]) -> dict[str, Any]:
    """Each kernel's name and what the compiler made of its launch."""
    tiles = choose_tiles(capability, case.head_dim, case.dtype.itemsize)
    made = {}
    for launch in launches(case, make_paged(case), tiles):
        made[launch.kernel.fn.__name__] = launch.kernel.warmup(
            grid=launch.programs, **launch.arguments, enable_fp_fusion=True
        )
    return made


def of_width(head_dim: int) -> PagedCase:
    return replace(BF16, head_dim=head_dim, first_keys=head_dim != 64)


# Ampere has its own tiles, and less shared memory for the widest heads.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "capability"),
    [
        (BF16, (9, 0)),
        *(exhaustive(of_width(head_dim), (9, 0)) for head_dim in (64, 96, 256)),
        exhaustive(of_width(96), (8, 0)),
        (of_width(256), (8, 0)),
    ],
    ids=str,
)
def test_kernels_compile(case: PagedCase, capability: tuple[int, int], driver: Any) -> None:
    driver.set_active(Compiler(capability))
    made = compiled(case, capability)
    assert tuple(made) == KERNELS
    for name, kernel in made.items():
        ptx = kernel.asm["ptx"]
        assert f".target sm_{10 * capability[0] + capability[1]}" in ptx
        assert len(kernel.asm["cubin"]) > 0
        assert kernel.metadata.shared <= SHARED[capability], name
        if name != "delta_kernel":
            assert PRODUCTS[capability] in ptx, name
            # 16 bytes a load, and more than one tile in flight.
            assert "cp.async.cg.shared.global" in ptx, name
        # No sum goes through an atomic, so the order of programs does not matter.
        assert not re.search(r"\b(atom|red)\.", ptx), name


def test_a_longer_sequence_compiles_nothing_new(driver: Any) -> None:
    """Lengths, counts of pages and the choice change from chunk to chunk."""
    driver.set_active(Compiler((9, 0)))
    device = 90
    compiled(BF16, (9, 0))
    kernels = [load("farspan.sparse.kernels", name) for name in KERNELS]
    before = [len(kernel.device_caches[device][0]) for kernel in kernels]
    for tokens, queries, chosen in ((1025, 255, 1), (3000, 128, 4), (129, 1, 2), (1040, 16, 5)):
        compiled(replace(BF16, tokens=tokens, queries=queries, chosen=chosen), (9, 0))
    assert [len(kernel.device_caches[device][0]) for kernel in kernels] == before
