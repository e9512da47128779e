"""Attention of a chunk over its chosen pages, by the Triton kernels: what the engine calls on CUDA.

Only the chosen pages: the chunk's own tokens, the recent ones and the sink pages are dense, and
join by `merge_`; attention sinks join by `add_sinks`; the backward takes the out and lse of it all.

    call = PagedCall(PageTable(choice, page, tokens, keys.shape[0]), scale)
    out, lse = attend_pages(call, q, keys, values)
    dq = attend_pages_backward(call, dout, q, keys, values, (whole_out, whole_lse), totals)

Shapes: q, out, dout, dq [B, H, C, D], keys, values and totals [T, B, Hk, D] (page p at tokens
[p * page, (p + 1) * page), or where `slots` say), lse [B, H, C] natural; inner stride 1, other
strides as they are. Heads of 8 to 256, keys as wide as values, no soft-capping, bf16 or fp16 (fp32
for checks). Compute capability 8.0 or more. Importing this module does not import Triton.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from farspan.attention.sparse.triton_arguments import (
    Pages,
    Rows,
    Shape,
    Sizes,
    Softmax,
    Totals,
    Visits,
    veiled,
)
from farspan.attention.sparse.triton_table import PageTable
from farspan.attention.sparse.triton_tiles import Tile, Tiles, choose_tiles, padded
from farspan.lazy import load
from farspan.spec import Refused

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class PagedCall:
    """What attention over chosen pages is, besides its tensors."""

    table: PageTable
    scale: float
    # [B, C] int32, contiguous: the first token of the sequence that each query may see (the start
    # of its document, or of its window). None: all of the chosen pages.
    first_key: Tensor | None = None
    tiles: Tiles | None = None  # None: those of the GPU's table


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel with all it is given. Making it decides; `run` does."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    def run(self) -> None:
        self.kernel[self.grid](**self.arguments)


class Gradients(NamedTuple):
    """Where dK and dV of all pages are summed: fp32 [T, B, Hk, D], set to zero by their owner."""

    dk: Tensor
    dv: Tensor


def supports(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, softcap: float | None
) -> bool:
    """Whether `attend_pages` takes such heads on this device."""
    if softcap is not None or dtype not in DTYPES or find_spec("triton") is None:
        return False
    if head_dim != value_dim or head_dim % 8 or not 8 <= head_dim <= 256:
        return False
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def attend_pages(call: PagedCall, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """out, in the dtype of q, and lse fp32 over the chosen pages alone. Both are fresh.

    A query that sees nothing has out 0 and lse -inf, which `merge_` gives no weight. out is
    [B, C, H, D] in memory. Raises Refused for tensors that do not fit each other or the kernels.
    """
    _check(call, q, keys, values)
    out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
    out = out.transpose(1, 2)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        forward_launch(call, q, keys, values, (out, lse)).run()
    return out, lse


def attend_pages_backward(
    call: PagedCall,
    dout: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    attended: tuple[Tensor, Tensor],
    totals: Gradients,
) -> Tensor:
    """dq, fp32 and fresh, of the chosen pages; adds their dk and dv to `totals`.

    `attended` is out, in the dtype of q, and lse, fp32, of the whole softmax: dense parts and sinks
    included. Totals of pages that nobody chose are neither read nor written. The same inputs give
    the same bits.
    """
    _check(call, q, keys, values)
    out, lse = attended
    _check_gradients(q, keys, {"dout": dout, "out": out}, lse, totals)
    dout, out = (x if x.stride(-1) == 1 else x.contiguous() for x in (dout, out))
    dq = torch.empty_like(
        q.transpose(1, 2), dtype=torch.float32, memory_format=torch.contiguous_format
    ).transpose(1, 2)
    of_rows = Softmax(
        lse.contiguous(), torch.empty_like(lse, memory_format=torch.contiguous_format)
    )
    with torch.cuda.device_of(q):
        for launch in backward_launches(call, (q, keys, values, dout), out, of_rows, (dq, totals)):
            launch.run()
    return dq


def forward_launch(
    call: PagedCall, q: Tensor, keys: Tensor, values: Tensor, results: tuple[Tensor, Tensor]
) -> Launch:
    tile = _tiles(call, q).forward
    arguments = {
        "q": _heads_first(q),
        "keys": _tokens_first(keys),
        "values": _tokens_first(values),
        "out": _heads_first(results[0]),
        "lse": results[1],
        "table": _pages(call),
    }
    return _launch("forward_kernel", _query_grid(call, q, tile), arguments, call, (q, tile))


def backward_launches(
    call: PagedCall,
    of_queries_and_keys: tuple[Tensor, Tensor, Tensor, Tensor],
    out: Tensor,
    of_rows: Softmax,
    results: tuple[Tensor, Gradients],
) -> Iterator[Launch]:
    """delta, dQ, and dK with dV, in this order: delta is read by the others."""
    q, keys, values, dout = of_queries_and_keys
    dq, totals = results
    tiles = _tiles(call, q)
    arguments: dict[str, Any] = {
        "dout": _heads_first(dout),
        "out": _heads_first(out),
        "delta": of_rows.delta,
    }
    grid = _query_grid(call, q, tiles.forward)
    yield _launch("delta_kernel", grid, arguments, call, (q, tiles.forward))
    arguments = {
        "q": _heads_first(q),
        "keys": _tokens_first(keys),
        "values": _tokens_first(values),
        "dout": _heads_first(dout),
    }
    of_dq = {"dq": _heads_first(dq), "given": (of_rows, _pages(call))}
    grid = _query_grid(call, q, tiles.dq)
    yield _launch("dq_kernel", grid, arguments | of_dq, call, (q, tiles.dq))
    inverse = call.table.inverse
    visits = Visits(
        *(inverse.query_pages, inverse.pages, inverse.starts, inverse.rows), call.first_key
    )
    sums = Totals(_tokens_first(totals.dk), _tokens_first(totals.dv))
    of_dkv = {"totals": sums, "given": (of_rows, visits)}
    # The most visited pages come first, so those that anyone visits are among the first of these.
    visited = min(inverse.rows.numel(), inverse.query_pages.numel())
    grid = visited * -(-call.table.page // _shape(call, q, tiles.dkv).tile_keys), 1
    yield _launch("dkv_kernel", grid, arguments | of_dkv, call, (q, tiles.dkv))


def _launch(
    kernel: str,
    grid: tuple[int, ...],
    arguments: dict[str, Any],
    call: PagedCall,
    compiled_for: tuple[Tensor, Tile],
) -> Launch:
    q, tile = compiled_for
    _, kv_heads, query_pages, chosen = call.table.choice.shape
    table = call.table
    sizes = Sizes(
        queries=veiled(q.shape[2]),
        tokens=veiled(table.tokens),
        query_pages=veiled(query_pages),
        chosen=veiled(chosen),
        slots=veiled(table.slot_count),
        kv_heads=kv_heads,
        scale=call.scale,
    )
    common = {
        "sizes": sizes,
        "shape": _shape(call, q, tile),
        "num_warps": tile.warps,
        # As it has always been; Triton 3.10 changes the default and 3.9 warns.
        "enable_fp_fusion": True,
    }
    function = load("farspan.attention.sparse.triton_kernels", kernel)
    return Launch(function, grid, arguments | common)


def _shape(call: PagedCall, q: Tensor, tile: Tile) -> Shape:
    page, group = call.table.page, q.shape[1] // call.table.choice.shape[1]
    return Shape(
        page=page,
        group=group,
        head_dim=q.shape[3],
        padded_dim=padded(q.shape[3]),
        tile_queries=min(tile.queries, padded(group * page)),
        tile_keys=min(tile.keys, padded(page)),
        stages=tile.stages,
    )


def _query_grid(call: PagedCall, q: Tensor, tile: Tile) -> tuple[int, int]:
    """(tiles of all query pages, B * Hk)."""
    shape = _shape(call, q, tile)
    batch, kv_heads, query_pages, _ = call.table.choice.shape
    tiles = -(-shape.group * shape.page // shape.tile_queries)
    return query_pages * tiles, batch * kv_heads


def _tiles(call: PagedCall, q: Tensor) -> Tiles:
    if call.tiles is not None:
        return call.tiles
    cuda = q.device.type == "cuda"
    capability = torch.cuda.get_device_capability(q.device) if cuda else (9, 0)
    return choose_tiles(capability, q.shape[3], q.element_size())


def _pages(call: PagedCall) -> Pages:
    return Pages(call.table.choice, call.table.places, call.first_key)


def _heads_first(x: Tensor) -> Rows:
    """[B, H, C, D] as the kernels address it."""
    batch, head, token, _ = x.stride()
    return Rows(x, batch, head, token)


def _tokens_first(x: Tensor) -> Rows:
    """[T, B, Hk, D] as the kernels address it."""
    token, batch, head, _ = x.stride()
    return Rows(x, batch, head, token)


def _check_device(device: torch.device) -> None:
    if device.type == "cuda":
        return
    kernel = load("farspan.attention.sparse.triton_kernels", "forward_kernel")
    if not isinstance(kernel, load("triton.runtime.interpreter", "InterpretedFunction")):
        raise Refused(f"device: expected CUDA for Triton, got {device}; use the PyTorch path")


def _check(call: PagedCall, q: Tensor, keys: Tensor, values: Tensor) -> None:
    _check_device(q.device)
    choice, table = call.table.choice, call.table
    batch, kv_heads, query_pages, _ = choice.shape
    fits = q.ndim == 4 and q.shape[0] == batch and q.shape[1] % kv_heads == 0
    if not fits or -(-q.shape[2] // table.page) != query_pages:
        raise Refused(
            f"q: expected [{batch}, a multiple of {kv_heads} heads, tokens of {query_pages} pages "
            f"of {table.page}, head size] for the choice {tuple(choice.shape)}, got "
            f"{tuple(q.shape)}; make the choice for these queries"
        )
    if q.shape[3] % 8 or not 8 <= q.shape[3] <= 256 or q.dtype not in DTYPES:
        raise Refused(
            "q: expected bfloat16, float16 or float32 and a head size that is a multiple of 8 up "
            f"to 256, got {q.dtype} and {q.shape[3]}; use the PyTorch path"
        )
    expected = table.buffer_tokens, batch, kv_heads, q.shape[3]
    for name, x in (("keys", keys), ("values", values)):
        _expect(name, x, expected, q.dtype, q.device)
    _expect("choice", choice, choice.shape, torch.int32, q.device)
    if q.stride(3) != 1:
        raise Refused("q: expected inner stride 1; call .contiguous() on it")
    if call.first_key is not None:
        _expect("first_key", call.first_key, (batch, q.shape[2]), torch.int32, q.device)
        if not call.first_key.is_contiguous():
            raise Refused("first_key: expected a contiguous tensor; call .contiguous() on it")


def _check_gradients(
    q: Tensor, keys: Tensor, like_q: dict[str, Tensor], lse: Tensor, totals: Gradients
) -> None:
    for name, x in like_q.items():
        _expect(name, x, q.shape, q.dtype, q.device, dense=False)
    _expect("lse", lse, q.shape[:3], torch.float32, q.device, dense=False)
    for name, x in totals._asdict().items():
        _expect(name, x, keys.shape, torch.float32, q.device)


def _expect(
    name: str,
    x: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    dense: bool = True,
) -> None:
    if tuple(x.shape) != tuple(shape) or x.dtype != dtype or x.device != device:
        raise Refused(
            f"{name}: expected {tuple(shape)}, {dtype} on {device}, got {tuple(x.shape)}, "
            f"{x.dtype} on {x.device}; convert it before the call"
        )
    if dense and x.stride(-1) != 1:
        raise Refused(f"{name}: expected inner stride 1; call .contiguous() on it")
