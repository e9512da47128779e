"""The Triton kernels compiled for Hopper and Ampere, without a GPU: they compile for real, their
matrix products are on tensor cores, loads of tiles run beside the products of earlier ones, tiles
fit shared memory, and registers hold what they need.

Launches are made as on a GPU, by the launchers, and given to Triton's compiler instead of a stream.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
import torch

from farspan.attention.backends import BackwardQueries
from farspan.kernels.launch import Launch, launched
from farspan.lazy import load
from farspan.sparse.attend import FarCall
from farspan.sparse.kernel_calls import (
    PagedCall,
    PageGradients,
    PageTable,
    backward_launches,
    forward_launch,
    fused_votes,
)
from farspan.sparse.tiles import (
    PARTED_VOTE_TILE,
    SMALL_VOTE_TILE,
    TILES,
    VOTE_TILE,
    PageTiles,
    choose_tiles,
    shared_bytes,
    vote_tile,
)
from farspan.spec import UnsupportedError
from tests.compiling import Compiler, assembled, compiling, products, spilled, waits
from tests.grids import exhaustive, part_of
from tests.sparse.triton_cases import PagedCase, PagedInputs, make_paged
from tests.versions import older

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton"),
    # Triton's own, on its first use in a process; what it is about is given with each launch.
    pytest.mark.filterwarnings("default:TRITON_DEFAULT_FP_FUSION"),
]

KERNELS = ("forward_kernel", "rows_kernel", "dq_kernel", "dkv_kernel")
KIB = 1024
# Bytes of shared memory that a program may have.
SHARED = {(8, 0): 163 * KIB, (8, 6): 99 * KIB, (9, 0): 227 * KIB, (10, 0): 227 * KIB}
SHARED[12, 0] = SHARED[8, 6]
PRODUCTS = {(8, 0): "mma.sync", (9, 0): "wgmma.mma_async", (10, 0): "tcgen05.mma"}
PRODUCTS |= dict.fromkeys(((8, 6), (12, 0)), "mma.sync")
BF16 = replace(PagedCase(), page=128, tokens=1024, queries=256, head_dim=128, dtype=torch.bfloat16)
QWEN_7B = replace(BF16, group=7, kv_heads=4)
LLAMA_8B = replace(BF16, group=4, kv_heads=8)
# Of a thread, on 9.0. ptxas of Triton 3.9 has three addresses too many behind dK, dV's loop.
SPILLS = 0 if older("triton", "3.7") else 24
DOCUMENT_SPILLS = 140  # of dK, dV: of heads of 256; Qwen2.5-7B's have 84, by query pages of 16 104


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the compiler made, for all tests of this file."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def driver(kept: Path) -> Iterator[Any]:
    kernel = load("farspan.sparse.kernels", "forward_kernel")
    with compiling(kernel, kept) as driver:
        yield driver


def launches(case: PagedCase, inputs: PagedInputs, tiles: PageTiles) -> Iterator[Launch]:
    sizes = case.page, case.tokens, case.tokens
    slots = inputs.choice.clone() if case.slots else None
    table = PageTable(inputs.choice, *sizes, slots, case.query_page)
    call = PagedCall(table, case.scale, inputs.first_key, tiles)
    q, keys, values, out = inputs.q, inputs.k, inputs.v, inputs.dout
    lse = torch.empty(q.shape[:3])
    yield forward_launch(call, q, keys, values, out, lse)
    totals = PageGradients(keys.float(), values.float())
    queries, rows = BackwardQueries(out, q, out, lse), torch.empty(*lse.shape, 4)
    yield from backward_launches(call, queries, rows, keys, values, q.float(), totals)


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


SMALL_PAGES = replace(QWEN_7B, query_page=16)


# Each architecture has its own tiles, and less shared memory for the widest heads.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "capability"),
    [
        # Heads of 96 are computed in two parts; the test of longer sequences compiles 128.
        (replace(QWEN_7B, head_dim=96), (9, 0)),
        *(exhaustive(case, (9, 0)) for case in (LLAMA_8B, SMALL_PAGES, *map(of_width, (64, 256)))),
        *(
            exhaustive(replace(QWEN_7B, head_dim=head_dim), (9, 0))
            for head_dim in (80, 128, 160, 192)
        ),
        exhaustive(replace(LLAMA_8B, query_page=16), (9, 0)),
        exhaustive(replace(SMALL_PAGES, slots=True), (9, 0)),
        *(exhaustive(replace(case, first_keys=True), (9, 0)) for case in (QWEN_7B, SMALL_PAGES)),
        exhaustive(replace(of_width(64), group=1, query_page=16), (9, 0)),
        *(exhaustive(of_width(head_dim), (8, 0)) for head_dim in (64, 96)),
        exhaustive(of_width(256), (8, 0)),
        *(exhaustive(of_width(head_dim), (12, 0)) for head_dim in (64, 128, 256)),
        *(exhaustive(of_width(head_dim), (10, 0)) for head_dim in (64, 128, 256)),
        *(exhaustive(of_width(head_dim), (8, 6)) for head_dim in (128, 256)),
    ],
    ids=str,
)
def test_kernels_compile(
    case: PagedCase, capability: tuple[int, int], driver: Any, kept: Path
) -> None:
    driver.set_active(Compiler(capability))
    made = compiled(case, capability)
    assert tuple(made) == KERNELS
    tiles = choose_tiles(capability, case.head_dim, 2)
    assert shared_bytes(tiles, case.head_dim, 2) <= SHARED[capability]
    for name, kernel in made.items():
        ptx = kernel.asm["ptx"]
        assert f".target sm_{10 * capability[0] + capability[1]}" in ptx
        assert len(kernel.asm["cubin"]) > 0
        assert kernel.metadata.shared <= shared_bytes(tiles, case.head_dim, 2), name
        if name != "rows_kernel":
            # A tile of one small query page has too few rows for more.
            few = case.group * (case.query_page or case.page) < 64 and name != "dkv_kernel"
            assert PRODUCTS[(8, 0) if few else capability] in ptx, name
            # 16 bytes a load, and a tile in flight while another is computed with.
            assert "cp.async.cg.shared.global" in ptx, name
            assert max(waits(kernel)) > 0, name
        if capability == (9, 0):
            most = DOCUMENT_SPILLS * (name == "dkv_kernel") if case.first_keys else SPILLS
            assert spilled(kernel, capability, kept) <= most, name
        # No sum goes through an atomic, so the order of programs does not matter.
        assert not re.search(r"\b(atom|red)\.", ptx), name


def votes(case: PagedCase) -> dict[str, Any]:
    """As `compiled`, of both walks over representatives."""
    heads = case.group * case.kv_heads
    q, means = (
        torch.empty(1, *shape, case.head_dim, dtype=case.dtype, device="meta")
        for shape in ((heads, case.queries), (case.kv_heads, 2 * case.tokens))
    )
    made: list[Launch] = []
    with launched(made.append):
        call = FarCall(case.scale, case.page, None)
        fused_votes(q, means, range(case.tokens), call, case.query_tokens)
    return {
        launch.name: launch.kernel.warmup(
            grid=launch.programs, **launch.arguments, enable_fp_fusion=True
        )
        for launch in made
    }


# Of a model without groups, a page of queries has too few rows for Hopper's own instructions.
FEW_ROWS = replace(BF16, query_page=16, group=1, kv_heads=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "padded", "share"),
    [
        # Its 16 are dealt as 32 in a third of products.
        exhaustive(replace(FEW_ROWS, head_dim=80), 128, 0.69),
        *(exhaustive(replace(FEW_ROWS, head_dim=96, group=group), 128, 0.75) for group in (1, 2)),
        exhaustive(replace(QWEN_7B, head_dim=80), 128, 0.625),
        exhaustive(replace(QWEN_7B, head_dim=96), 128, 0.75),
        exhaustive(replace(QWEN_7B, head_dim=160), 256, 0.625),
        exhaustive(replace(QWEN_7B, head_dim=192), 256, 0.75),
    ],
    ids=str,
)
def test_two_parts_do_less_than_one_that_is_padded(
    case: PagedCase, padded: int, share: float, driver: Any, kept: Path
) -> None:
    """Beside a width of the same tiles: products, spills, and loads under way behind a wait."""
    driver.set_active(Compiler((9, 0)))
    parted, whole = (compiled(one, (9, 0)) for one in (case, replace(case, head_dim=padded)))
    for name in KERNELS:
        ours, theirs = parted[name], whole[name]
        assert products(ours) <= share * products(theirs), name
        assert spilled(ours, (9, 0), kept) <= spilled(theirs, (9, 0), kept), name
        assert "instructions are serialized" not in assembled(ours, (9, 0), kept), name
        assert max(waits(ours), default=0) >= max(waits(theirs), default=0), name
    area = vote_tile(case.head_dim, 2).keys / vote_tile(padded, 2).keys
    parted, whole = (votes(one) for one in (case, replace(case, head_dim=padded)))
    for name, theirs in whole.items():
        ours = parted[name]
        assert products(ours) <= share * area * products(theirs), name
        assert spilled(ours, (9, 0), kept) == 0, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "capability"),
    part_of(product([32, 64, 128, 192, 256], [(8, 6), (9, 0)]), (256, (8, 6)), (192, (9, 0))),
    ids=str,
)
def test_representatives_are_loaded_while_others_vote(
    head_dim: int, capability: tuple[int, int], driver: Any, kept: Path
) -> None:
    driver.set_active(Compiler(capability))
    for name, kernel in votes(replace(SMALL_PAGES, head_dim=head_dim)).items():
        assert max(waits(kernel)) > 0, name
        assert spilled(kernel, capability, kept) == 0, name
        assert kernel.metadata.shared <= SHARED[capability], name


@pytest.mark.exhaustive
def test_a_longer_sequence_compiles_nothing_new(driver: Any) -> None:
    """Lengths, counts of pages and the choice change from chunk to chunk."""
    driver.set_active(Compiler((9, 0)))
    device = 90
    compiled(QWEN_7B, (9, 0))
    kernels = [load("farspan.sparse.kernels", name) for name in KERNELS]
    before = [len(kernel.device_caches[device][0]) for kernel in kernels]
    for tokens, queries, chosen in ((1025, 255, 1), (129, 1, 2), (1040, 16, 5)):
        compiled(replace(QWEN_7B, tokens=tokens, queries=queries, chosen=chosen), (9, 0))
    assert [len(kernel.device_caches[device][0]) for kernel in kernels] == before


def test_repeated_and_unknown_pages_are_refused() -> None:
    choice = torch.tensor([[[[0, 2, -1, -1]]]], dtype=torch.int32)
    PageTable(choice, 4, 12, 12)
    for wrong, message in (
        ([0, 2, 0, -1], "choice: expected each page at most once"),
        ([0, 3, -1, -1], "choice: expected pages below 3"),
        ([0, -2, -1, -1], "choice: expected pages below 3"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            PageTable(torch.tensor([[[wrong]]], dtype=torch.int32), 4, 12, 12)
    with pytest.raises(UnsupportedError, match="slots: expected places below 2"):
        PageTable(choice, 4, 12, 8, choice)
    with pytest.raises(UnsupportedError, match="choice: expected a contiguous int32"):
        PageTable(choice.long(), 4, 12, 12)
    with pytest.raises(UnsupportedError, match="page, tokens"):
        PageTable(choice, 0, 12, 12)


def test_the_inverse_holds_each_visit_once_in_order() -> None:
    """Against a walk over the choice, with rows, heads and slots of their own."""
    torch.manual_seed(0)
    shape = 2, 3, 5, 4
    choice = torch.rand(*shape[:3], 9).argsort(-1)[..., :4].int().contiguous()
    choice[torch.rand(shape) < 0.3] = -1
    slots = (choice + 2).masked_fill(choice < 0, -7)
    inverse = PageTable(choice, 8, 72, 90, slots).inverse
    visits = {row: [] for row in range(2 * 3 * 12)}  # type: dict[int, list[tuple[int, int]]]
    for b, h, m, entry in torch.cartesian_prod(*map(torch.arange, shape)).tolist():
        page = int(choice[b, h, m, entry])
        if page >= 0:
            visits[(b * 3 + h) * 12 + page + 2].append((m, page))
    for row, expected in visits.items():
        span = slice(int(inverse.starts[row]), int(inverse.starts[row + 1]))
        pages = inverse.query_pages[span].tolist(), inverse.pages[span].tolist()
        assert list(zip(*pages, strict=True)) == expected
    lengths = [len(visits[row]) for row in inverse.rows.tolist()]
    assert lengths == sorted(lengths, reverse=True)
    assert sorted(inverse.rows.tolist()) == list(visits)


def test_tiles_by_gpu_and_head_size() -> None:
    """A chip that is not in the table takes the last before it."""
    assert choose_tiles((9, 0), 96, 2) is TILES[9, 0][128]
    assert choose_tiles((8, 0), 32, 2) is TILES[8, 0][64]
    assert choose_tiles((8, 9), 256, 2) is TILES[8, 6][256]
    assert choose_tiles((10, 3), 128, 2) is TILES[10, 0][128]
    assert choose_tiles((12, 1), 256, 2) is TILES[12, 0][256]
    assert choose_tiles((9, 0), 128, 4).forward.stages == 1
    assert vote_tile(96, 2) is VOTE_TILE
    assert vote_tile(192, 2) is PARTED_VOTE_TILE
    assert vote_tile(256, 2) is vote_tile(192, 4) is SMALL_VOTE_TILE


def test_tables_hold_powers_of_two_that_fit_shared_memory() -> None:
    room = {(8, 0): 163, (8, 6): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}  # KiB a program
    for capability, table in TILES.items():
        for head_dim, tiles in table.items():
            assert shared_bytes(tiles, head_dim, 2) <= 1024 * room[capability]
            for tile in (tiles.forward, tiles.dq, tiles.dkv):
                assert all(x & (x - 1) == 0 for x in (tile.queries, tile.keys, tile.warps))
                assert min(tile.queries, tile.keys) >= 16
                assert tile.stages >= 3  # with two none is in flight behind a wait
    assert shared_bytes(TILES[9, 0][256], 256, 2) > 1024 * room[12, 0]


def test_the_launchers_are_imported_without_triton() -> None:
    """What chooses kernels must work where Triton is not installed."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from farspan.sparse.kernel_calls import TritonFar\n"
        "from farspan.sparse.kernel_calls import supports\n"
        "print(type(TritonFar()).__name__, callable(supports))"
    )
    done = run(
        [sys.executable, "-c", code], check=True, timeout=1200, capture_output=True, text=True
    )
    assert done.stdout.split() == ["TritonFar", "True"]
