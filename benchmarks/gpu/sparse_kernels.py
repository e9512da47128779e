"""The kernels of page-sparse attention on one GPU, tile by tile, in about a minute.

    python -m benchmarks.gpu.sparse_kernels --out FILE [--only forward dkv] [--tiny]

A chunk of 8,192 queries attends to 64 pages of 128 tokens for each page of queries, drawn from a
prefix of 128K tokens; heads as Qwen2.5-7B and Qwen2.5-0.5B have them, pages of 128 and 16 queries.
For each kernel and tile a row: seconds, useful flop a second (4 of a query, key and dimension of
the head forward, 10 backward: 4 of them count for dQ and 6 for dK, dV), registers, spills, and the
error of a small case beside that of plain PyTorch in the same dtype. Then dense attention of
PyTorch with as many pairs of query and key, and the votes by which pages are chosen (2 flop of a
query, representative and dimension; they are computed twice). FILE is written after each row, and
what fails is a row that says so. `--tiny` runs it on a CPU in Triton's interpreter: nothing is to
be learned about speed.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from farspan.attention.backends import BackwardQueries
from farspan.kernels.launch import Launch
from farspan.lazy import load
from farspan.sparse.attend import FarCall
from farspan.sparse.kernel_calls import (
    PagedCall,
    PageGradients,
    PageTable,
    attend_pages,
    attend_pages_backward,
    backward_launches,
    forward_launch,
    fused_votes,
)
from farspan.sparse.pages import vote
from farspan.sparse.tiles import VOTE_TILE, PageTile, PageTiles, choose_tiles
from farspan.spec import MEAN, Sparse

Row = dict[str, Any]
KERNELS = ("forward", "dq", "dkv")
USEFUL = {"forward": 4, "dq": 4, "dkv": 6}  # flop of a query, key and dimension
REPEATS, WARM, IN_A_ROW = 5, 2, 4
WORKERS, COMPILE_SECONDS = 14, 40.0
# Rows of queries, keys, warps, tiles in flight. Those of the table come first by themselves.
OTHERS = {
    "forward": (
        (128, 64, 8, 2),
        (128, 64, 8, 4),
        (128, 128, 8, 2),
        (64, 64, 4, 3),
        (64, 128, 4, 2),
    ),
    "dq": ((128, 64, 8, 2), (128, 32, 8, 4), (64, 64, 4, 3), (64, 64, 4, 2)),
    "dkv": ((64, 128, 8, 2), (32, 128, 8, 4), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2)),
}
TINY_OTHERS = {"forward": ((16, 16, 4, 2),), "dq": (), "dkv": ((32, 16, 4, 2),)}


@dataclass(frozen=True, slots=True)
class Shape:
    """Attention of a chunk to chosen pages."""

    name: str
    group: int
    kv_heads: int
    head_dim: int
    queries: int
    tokens: int
    page: int
    query_page: int
    chosen: int

    @property
    def heads(self) -> int:
        return self.group * self.kv_heads

    @property
    def pairs(self) -> int:
        """Of a query of a head and a key that it sees."""
        return self.heads * self.queries * self.chosen * self.page

    def small(self) -> "Shape":
        """A case of the same compiled kernels whose reference is quick."""
        queries = max(2 * self.query_page, self.page) + 8
        return replace(self, queries=queries, tokens=4 * self.page - 4, chosen=2)


def shapes(tiny: bool) -> Iterator[Shape]:
    if tiny:
        yield Shape("tiny", 3, 1, 16, 16, 48, 16, 16, 2)
        yield Shape("tiny", 3, 1, 16, 16, 48, 16, 4, 2)
        return
    for query_page in (128, 16):
        yield Shape("Qwen2.5-7B", 7, 4, 128, 8192, 131072, 128, query_page, 64)
    for query_page in (128, 16):
        yield Shape("Qwen2.5-0.5B", 7, 2, 64, 8192, 131072, 128, query_page, 64)


@dataclass(frozen=True, slots=True)
class Data:
    """Tensors of a shape."""

    shape: Shape
    call: PagedCall
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    def with_tiles(self, tiles: PageTiles) -> "Data":
        return replace(self, call=replace(self.call, tiles=tiles))


def make(shape: Shape, device: str, dtype: torch.dtype, tiles: PageTiles) -> Data:
    torch.manual_seed(0)
    of_queries = 1, shape.queries, shape.heads, shape.head_dim
    of_keys = shape.tokens, 1, shape.kv_heads, shape.head_dim
    q, dout = (torch.randn(of_queries, device=device).to(dtype).transpose(1, 2) for _ in range(2))
    k, v = (torch.randn(of_keys, device=device).to(dtype) for _ in range(2))
    pages = -(-shape.tokens // shape.page)
    rows = 1, shape.kv_heads, -(-shape.queries // shape.query_page)
    choice = torch.rand(*rows, pages, device=device).argsort(-1)[..., : shape.chosen]
    choice = choice.sort(-1).values.int().contiguous()
    table = PageTable(choice, shape.page, shape.tokens, shape.tokens, None, shape.query_page)
    return Data(shape, PagedCall(table, shape.head_dim**-0.5, None, tiles), q, k, v, dout)


def launch_of(data: Data, kernel: str, ready: bool) -> Launch:
    """One kernel's launch; `ready`: what it reads is there."""
    out = torch.empty_like(data.q.transpose(1, 2)).transpose(1, 2)
    lse = torch.empty(data.q.shape[:3], dtype=torch.float32, device=data.q.device)
    forward = forward_launch(data.call, data.q, data.k, data.v, out, lse)
    if kernel == "forward":
        return forward
    if ready:
        forward.run(data.q)
    rows = torch.empty(*lse.shape, 4, device=data.q.device)
    totals = PageGradients(*(torch.zeros_like(x, dtype=torch.float32) for x in (data.k, data.v)))
    queries = BackwardQueries(data.dout, data.q, out, lse)
    dq = torch.empty_like(data.q.transpose(1, 2), dtype=torch.float32).transpose(1, 2)
    first, of_dq, of_dkv = backward_launches(data.call, queries, rows, data.k, data.v, dq, totals)
    if ready:
        first.run(data.q)
    return {"rows": first, "dq": of_dq, "dkv": of_dkv}[kernel]


def seconds_of(work: Callable[[], object], device: str, repeats: int = REPEATS) -> list[float]:
    """Of each repetition, sorted."""
    for _ in range(WARM if repeats > 1 else 0):
        work()
    found = []
    for _ in range(repeats):
        if device == "cpu":
            begun = time.perf_counter()
            work()
            found.append(time.perf_counter() - begun)
            continue
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        # Several, so that the GPU waits for one launch in so many.
        for _ in range(IN_A_ROW):
            work()
        stop.record()
        stop.synchronize()
        found.append(start.elapsed_time(stop) / 1000 / IN_A_ROW)
    return sorted(found)


# -- tiles ----------------------------------------------------------------------------------------


def tables(kernel: str, shape: Shape, device: str, dtype: torch.dtype) -> Iterator[PageTiles]:
    """The one that ships, then others of which only this kernel's differs."""
    tiny = device == "cpu"
    capability = (9, 0) if tiny else torch.cuda.get_device_capability()
    shipped = choose_tiles(capability, shape.head_dim, dtype.itemsize)
    if tiny:
        shipped = PageTiles(*(PageTile(16, 16, 4, 3) for _ in range(3)))
    yield shipped
    if shape.query_page < shape.page and shape.head_dim < 128:
        return
    for other in (TINY_OTHERS if tiny else OTHERS)[kernel]:
        if PageTile(*other) != getattr(shipped, kernel):
            yield replace(shipped, **{kernel: PageTile(*other)})


def measure(kernel: str, data: Data, device: str) -> Row:
    """Seconds and what the compiler made of one kernel."""
    launch, x = launch_of(data, kernel, ready=True), data.q
    with torch.cuda.device_of(x):
        made = launch.kernel[launch.programs](**launch.arguments, enable_fp_fusion=True)
    repeats = 1 if device == "cpu" else REPEATS
    seconds = seconds_of(lambda: launch.run(x), device, repeats)
    flop = USEFUL[kernel] * data.shape.pairs * data.shape.head_dim
    found = {
        "seconds": median(seconds),
        "fastest": seconds[0],
        "slowest": seconds[-1],
        "useful_tflops": flop / median(seconds) / 1e12,
        "compiled_for": launch.arguments["shape"]._asdict(),
        "warps": launch.arguments["num_warps"],
    }
    if made is not None:
        found |= {"registers": made.n_regs, "spills": made.n_spills}
        found["shared_bytes"] = made.metadata.shared
    return found


# -- right ----------------------------------------------------------------------------------------


def attended(data: Data, dtype: torch.dtype) -> dict[str, Tensor]:
    """Dense attention with the choice as a mask, and its gradients, in that dtype."""
    shape, choice = data.shape, data.call.table.choice
    page_of = torch.arange(shape.tokens, device=choice.device) // shape.page
    seen = (choice[0, :, :, :, None] == page_of).any(2)  # [Hk, M, T]
    seen = seen.repeat_interleave(shape.query_page, 1)[:, : shape.queries]
    seen = seen.repeat_interleave(shape.group, 0)
    leaves = [
        x.detach().to(dtype).requires_grad_()
        for x in (data.q, data.k.permute(1, 2, 0, 3), data.v.permute(1, 2, 0, 3))
    ]
    q, k, v = leaves
    k, v = (x.repeat_interleave(shape.group, 1) for x in (k, v))
    scores = (data.call.scale * q @ k.mT).masked_fill(~seen, -torch.inf)
    out = scores.softmax(-1) @ v
    dq, dk, dv = torch.autograd.grad(out, leaves, data.dout.to(dtype))
    keys = {"dk": dk.permute(2, 0, 1, 3), "dv": dv.permute(2, 0, 1, 3)}
    return {"out": out.detach(), "dq": dq, **keys}


def errors_of(data: Data, wanted: tuple[dict[str, Tensor], dict[str, Tensor]]) -> Row:
    """Relative errors of the kernels and of plain PyTorch, given what is exact and what that
    found."""
    out, lse = attend_pages(data.call, data.q, data.k, data.v)
    totals = PageGradients(*(torch.zeros_like(x, dtype=torch.float32) for x in (data.k, data.v)))
    queries = BackwardQueries(data.dout, data.q, out, lse)
    dq = attend_pages_backward(data.call, queries, data.k, data.v, totals)
    found = {"out": out, "dq": dq, "dk": totals.dk, "dv": totals.dv}
    exact, plain = wanted
    row = {}
    for name, x in exact.items():
        own, of_plain = (float((y[name].double() - x).norm() / x.norm()) for y in (found, plain))
        row[name] = {"error": own, "plain": of_plain, "right": own <= 2 * of_plain}
    return {"errors": row, "right": all(one["right"] for one in row.values())}


# -- dense ----------------------------------------------------------------------------------------


def dense(shape: Shape, device: str, dtype: torch.dtype) -> Iterator[Row]:
    """PyTorch's dense attention with the same pairs: each query sees as many keys."""
    keys = shape.chosen * shape.page
    q, dout = (
        torch.randn(1, shape.heads, shape.queries, shape.head_dim, device=device, dtype=dtype)
        for _ in range(2)
    )
    k, v = (
        torch.randn(1, shape.heads, keys, shape.head_dim, device=device, dtype=dtype)
        for _ in range(2)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    if device == "cpu":
        backends = {"flash": SDPBackend.FLASH_ATTENTION}
    for name, backend in backends.items():
        row: Row = {"kernel": f"dense {name}", "shape": asdict(shape)}
        try:
            # Each query head has keys and values of its own: not every backend shares them.
            with sdpa_kernel(backend):
                row |= _dense(leaves, dout, device, shape)
        except Exception as error:
            row |= {"failed": f"{type(error).__name__}: {error}"[:600]}
        yield row


def _dense(leaves: list[Tensor], dout: Tensor, device: str, shape: Shape) -> Row:
    q, k, v = leaves

    def forward() -> Tensor:
        return scaled_dot_product_attention(q, k, v)

    repeats = 1 if device == "cpu" else REPEATS
    with torch.no_grad():
        ahead = median(seconds_of(forward, device, repeats))
    out = forward()
    back = median(
        seconds_of(
            lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), device, repeats
        )
    )
    flop = shape.pairs * shape.head_dim / 1e12
    return {
        "right": bool(out.isfinite().all()),
        "seconds": ahead,
        "useful_tflops": 4 * flop / ahead,
        "backward_seconds": back,
        "backward_useful_tflops": 10 * flop / back,
    }


# -- votes ----------------------------------------------------------------------------------------

VOTE_TILES = ((128, 64, 8, 3), (128, 128, 8, 3), (64, 64, 4, 3), (128, 64, 4, 3))
EACH = (1, 8)  # representatives of a page


def votes_in(q: Tensor, representatives: Tensor, pages: int, scale: float, page: int) -> Tensor:
    """Written out, in the dtype of q [B, H, C, D]."""
    kv_heads = representatives.shape[1]
    grouped = q.unflatten(1, (kv_heads, -1))
    scores = scale * grouped @ representatives.to(q.dtype).unsqueeze(2).mT
    weights = scores.unflatten(-1, (pages, -1)).amax(-1).softmax(-1).sum(2)
    return pad(weights, (0, 0, 0, -q.shape[2] % page)).unflatten(2, (-1, page)).sum(3)


def vote_tiles(shape: Shape, device: str) -> list[PageTile]:
    if device == "cpu":
        return [PageTile(32, 16, 4, 2)]
    return [PageTile(*edges) for edges in VOTE_TILES[: None if shape.head_dim == 128 else 1]]


def voting(shape: Shape, device: str, dtype: torch.dtype) -> Iterator[Row]:
    """The fused kernel by tile, and the step's own votes where a page has one representative."""
    pages, scale = shape.tokens // shape.page, shape.head_dim**-0.5
    of_queries = 1, shape.queries, shape.heads, shape.head_dim
    q = torch.randn(of_queries, device=device).to(dtype).transpose(1, 2)
    call = FarCall(scale, shape.page)
    repeats = 1 if device == "cpu" else REPEATS
    for each in EACH:
        named: Row = {"kernel": "votes", "shape": asdict(shape), "representatives": each}
        many = torch.randn(1, shape.kv_heads, pages * each, shape.head_dim, device=device)
        flop = 2 * shape.heads * shape.queries * pages * each * shape.head_dim

        def timed(work: Callable[[], object], flop: int = flop) -> Row:
            seconds = median(seconds_of(work, device, repeats))
            return {"seconds": seconds, "useful_tflops": flop / seconds / 1e12}

        for tile in vote_tiles(shape, device):
            row = named | {"tile": asdict(tile), "shipped": tile == VOTE_TILE}
            try:
                few = q[:, :, : shape.query_page + 3]
                of = few, many, range(1, 1 + pages), call, shape.query_page, tile
                found = fused_votes(*of).double()
                exact = votes_in(few.double(), many.to(dtype), pages, scale, shape.query_page)
                row["error"] = float((found - exact).norm() / exact.norm())
                row["right"] = row["error"] < 1e-3
                row |= timed(partial(fused_votes, q, *of[1:]))
            except Exception as error:
                row |= {"failed": f"{type(error).__name__}: {error}"[:600]}
            yield row
        if each == 1 and shape.query_page == shape.page:
            sparse = Sparse(shape.page, 0, query_page=shape.page, selector=MEAN)
            work = partial(vote, q, many, sparse, scale, None, 1)
            yield named | {"kernel": "votes plain"} | timed(work)


# -- the whole ------------------------------------------------------------------------------------


class _Target:
    """Stands where Triton asks the driver which GPU there is: compiling takes none."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = 10 * capability[0] + capability[1]

    def get_current_target(self) -> Any:
        return load("triton.backends.compiler", "GPUTarget")("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, _: int) -> int:
        return 0


def _compile(launch: Launch, _: object = None) -> None:
    launch.kernel.warmup(grid=launch.programs, **launch.arguments, enable_fp_fusion=True)


def compile_one(
    kernel: str, shape: Shape, tiles: PageTiles | PageTile, capability: tuple[int, int]
) -> float:
    """In a process of its own, into Triton's cache; seconds."""
    begun = time.perf_counter()
    torch.set_num_threads(1)
    load("triton.runtime.driver", "driver").set_active(_Target(capability))
    if isinstance(tiles, PageTiles):
        data = make(shape.small(), "cpu", torch.bfloat16, tiles)
        _compile(launch_of(data, kernel, ready=False))
        return time.perf_counter() - begun
    Launch.run = _compile  # type: ignore[method-assign, assignment]  # of this process
    of_queries = 1, shape.query_page, shape.heads, shape.head_dim
    q = torch.empty(of_queries, dtype=torch.bfloat16).transpose(1, 2)
    for each in EACH:
        many = torch.empty(1, shape.kv_heads, 3 * each, shape.head_dim)
        call = FarCall(shape.head_dim**-0.5, shape.page)
        fused_votes(q, many, range(1, 4), call, shape.query_page, tiles)
    return time.perf_counter() - begun


def compile_all(works: list[tuple[str, Shape, Any]]) -> Row:
    """All kernels at once; the first of each is what would take longest one by one."""
    begun = time.perf_counter()
    capability = torch.cuda.get_device_capability()
    pool = ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn"))
    waiting = [pool.submit(compile_one, *work, capability) for work in works]
    failed = 0
    for one in waiting:
        left = COMPILE_SECONDS - (time.perf_counter() - begun)
        try:
            one.result(timeout=max(0.0, left))
        except Exception:
            failed += 1
    pool.shutdown(wait=False, cancel_futures=True)
    return {
        "kernel": "compiling",
        "kernels": len(works),
        "not_compiled": failed,
        "seconds": time.perf_counter() - begun,
    }


def rows(only: tuple[str, ...], tiny: bool) -> Iterator[Row]:
    """Each measurement's."""
    device = "cpu" if tiny else "cuda"
    dtype = torch.float16 if tiny else torch.bfloat16
    works = [
        (kernel, shape, tiles)
        for shape in shapes(tiny)
        for kernel in KERNELS
        if not only or kernel in only
        for tiles in tables(kernel, shape, device, dtype)
    ]
    if not tiny:
        first = {shape: ("rows", shape, tiles) for _, shape, tiles in reversed(works)}
        votes = [
            ("votes", shape, tile)
            for shape in shapes(tiny)
            if not only or "votes" in only
            for tile in vote_tiles(shape, device)
        ]
        yield compile_all([*first.values(), *works, *votes])
    kept: dict[Shape, tuple[Data, Data, Any]] = {}
    for kernel, shape, tiles in works:
        row: Row = {
            "kernel": kernel,
            "shape": asdict(shape),
            "tile": asdict(getattr(tiles, kernel)),
        }
        try:
            if shape not in kept:
                kept.clear()
                small = make(shape.small(), device, dtype, tiles)
                wanted = attended(small, torch.float64), attended(small, dtype)
                kept[shape] = make(shape, device, dtype, tiles), small, wanted
            large, small, wanted = kept[shape]
            row |= {"shipped": tiles == next(tables(kernel, shape, device, dtype))}
            row |= measure(kernel, large.with_tiles(tiles), device)
            row |= errors_of(small.with_tiles(tiles), wanted)
        except Exception as error:
            row |= {"failed": f"{type(error).__name__}: {error}"[:600]}
        yield row
    for shape in shapes(tiny):
        if shape.query_page == shape.page and (not only or "dense" in only):
            kept.clear()
            yield from dense(shape, device, dtype)
    for shape in shapes(tiny):
        if not only or "votes" in only:
            yield from voting(shape, device, dtype)


def words(row: Row) -> str:
    """A row in a line."""
    if "failed" in row:
        return f"{row['kernel']:12} {row.get('tile', '')} failed: {row['failed'][:100]}"
    if row["kernel"] == "compiling":
        return f"{row['kernels']} kernels compiled in {row['seconds']:.1f} s"
    shape = row["shape"]
    where = f"{row['kernel']:12} {shape['name']} query page {shape['query_page']}"
    back = ""
    if "backward_seconds" in row:
        tflops = f"{row['backward_useful_tflops']:.0f} TFLOP/s"
        back = f"; backward {1000 * row['backward_seconds']:.2f} ms {tflops}"
    tile = "x".join(str(x) for x in row["tile"].values()) if "tile" in row else ""
    return (
        f"{where:46} {tile:12} {1000 * row['seconds']:8.2f} ms {row['useful_tflops']:6.0f} TFLOP/s "
        f"{row.get('registers', '')}/{row.get('spills', '')} right {row.get('right', '')}"
        f"{' *' * row.get('shipped', False)}{back}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.sparse_kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="result file to write")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, to see the script run")
    parser.add_argument(
        "--only", nargs="+", default=(), metavar="NAME", help="of forward, dq, dkv, dense, votes"
    )
    given = parser.parse_args()
    if given.tiny:
        os.environ["TRITON_INTERPRET"] = "1"
    record: Row = {
        "benchmark": "sparse kernels",
        "tiny": given.tiny,
        "torch": torch.__version__,
        "triton": load("triton", "__version__"),
        "device": "cpu" if given.tiny else torch.cuda.get_device_name(),
        "rows": [],
    }
    for row in rows(tuple(given.only), given.tiny):
        record["rows"].append(row)
        print(words(row), flush=True)
        if given.out is not None:
            given.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
