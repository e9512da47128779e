"""Attention of a chunk over its chosen pages by the Triton kernels, as the engine calls it on CUDA.

Only the chosen pages: the chunk's own tokens, the recent ones and the sink pages are dense, and
join by `merge_`; attention sinks join by `add_sinks`; the backward takes the out and lse of the
whole attention.

    call = PagedCall(PageTable(choice, page, tokens, keys.shape[0]), scale)
    out, lse = attend_pages(call, q, keys, values)
    dq = attend_pages_backward(call, BackwardQueries(dout, q, out, lse), keys, values, totals)

    choice[b, h, m]      = pages that query page m of the chunk reads, -1 for none
    its inverse, by page = query pages that read it, ascending

The inverse lets one program own all of a page's dK, dV: it walks its visitors in a fixed order and
adds to the totals once, so there are no atomics and the result does not depend on timing.

Letters: B batch rows, H query heads, Hk heads of keys and values, C tokens of the chunk, D head
size, M query pages, k chosen pages, S slots. Shapes: q, out, dout, dq [B, H, C, D], keys, values
and totals [T, B, Hk, D] (page p at tokens [p * page, (p + 1) * page), or at its entry in `slots`),
lse [B, H, C] natural; inner stride 1, other strides as they are, in elements. Heads of 8 to 256,
keys as wide as values, no soft-capping, bf16 or fp16 (fp32 for checks). Compute capability 8.0 or
more. Importing this module does not import Triton.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from farspan.attention.backends import BackwardQueries, merge_
from farspan.kernels.launch import DTYPES, Heads, Launch, heads_of, veiled
from farspan.sparse.attend import FarCall
from farspan.sparse.pages import Candidates, Pages, Resident, Slab
from farspan.sparse.tiles import (
    PageShape,
    PageSizes,
    PageTile,
    PageTiles,
    VoteSizes,
    choose_tiles,
    parts_of,
    shared_bytes,
    tile_edge,
    vote_tile,
)
from farspan.spec import MEAN, SUPERPAGE, Sparse, UnsupportedError


class PageReads(NamedTuple):
    """Kernel arguments: which pages each query page reads, and each query's first visible key."""

    choice: Any  # [B, Hk, M, k]
    slots: Any  # [B, Hk, M, k], or None: page p lies in slot p
    runs: Any  # [B, Hk, M, 2], or None: all entries are read
    first_key: Any  # [B, C] int32, or None


class Visits(NamedTuple):
    """Kernel arguments: which query pages read each page, and each query's first visible key."""

    query_pages: Any
    pages: Any
    starts: Any
    rows: Any
    first_key: Any


class Totals(NamedTuple):
    """Kernel arguments: dK and dV of all pages, fp32, to which the kernel adds."""

    dk: Heads
    dv: Heads


LARGEST = 2**27 - 1  # of integers passed through `veiled`, which gives an int32


# -- pages that each page of queries reads ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Inverse:
    """Visits: for each page the query pages that chose it, in order. Row r = (b * Hk + h) * S +
    slot is for batch row b, KV head h and the page at place `slot` of S in the buffer; its visits
    are the entries [starts[r], starts[r + 1]). int32, on the device of the choice."""

    query_pages: Tensor  # [B * Hk * M * k]; entries without a page come last
    pages: Tensor  # [B * Hk * M * k], the visited page of the sequence
    starts: Tensor  # [B * Hk * S + 1]
    rows: Tensor  # [B * Hk * S], the most visited first: the longest program does not start last


@dataclass(frozen=True)
class PageTable:
    """The pages that each query page reads in one kernel call, and where the pages lie in memory.

    Page p is tokens [p * page, (p + 1) * page) of the sequence; query page m is tokens [m *
    query_page, (m + 1) * query_page) of the chunk. All chosen pages lie before the chunk: the
    kernels have no causal mask. Without `slots` page p lies at tokens [p * page, ...) of the buffer
    of keys and values; with it, entry e's page lies at [slots[e] * page, ...).
    """

    choice: Tensor  # [B, Hk, M, k] int32, -1 = none, in any order, none twice in a row
    page: int  # tokens
    tokens: int  # of the sequence so far: the last page may be shorter than the others
    buffer_tokens: int  # of the buffer of keys and values
    slots: Tensor | None = None  # [B, Hk, M, k] int32; None: page p lies in slot p
    query_page: int | None = None  # tokens of the chunk that choose together; None: as `page`

    def __post_init__(self) -> None:
        self._check_types()
        choice, slots = self.choice, self.places
        none = choice < 0
        ordered = choice.sort(-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        _refuse(twice.any(), "choice: expected each page at most once in a row; drop repetitions")
        _refuse(
            ((choice < -1) | (choice >= self.pages)).any(),
            f"choice: expected pages below {self.pages}, or -1 for none; choose among those of "
            f"{self.tokens} tokens",
        )
        _refuse(
            (~none & ((slots < 0) | (slots >= self.slot_count))).any(),
            f"slots: expected places below {self.slot_count} pages of {self.page} tokens; give "
            "a larger buffer or other slots",
        )

    @property
    def query_tokens(self) -> int:
        return self.page if self.query_page is None else self.query_page

    @property
    def pages(self) -> int:
        return -(-self.tokens // self.page)

    @property
    def slot_count(self) -> int:
        return -(-self.buffer_tokens // self.page)

    @property
    def places(self) -> Tensor:
        """The slot (place in the buffer, in pages) of the page in each entry of the choice."""
        return self.choice if self.slots is None else self.slots

    @cached_property
    def runs(self) -> Tensor | None:
        """Entries of the choice that each query page reads, int32 [B, Hk, M, 2]: the first entry
        with a page, and the number of entries up to the last with a page. None: all are read."""
        if self.slots is None:
            return None
        has_page = (self.choice >= 0).int()
        last = has_page.cumsum(3).argmax(3) + 1
        first = has_page.argmax(3)
        return torch.stack([first, (last - first) * has_page.amax(3)], 3).int()

    @cached_property
    def inverse(self) -> Inverse:
        """For each page the query pages that chose it, from one stable sort on the device."""
        batch, kv_heads, query_pages, chosen = self.choice.shape
        rows, slots = batch * kv_heads, self.slot_count
        device = self.choice.device
        first = slots * torch.arange(rows, device=device).view(batch, kv_heads, 1, 1)
        row = (self.places + first).masked_fill(self.choice < 0, rows * slots).flatten()
        ordered, order = row.sort(stable=True)
        starts = torch.searchsorted(ordered, torch.arange(rows * slots + 1, device=device))
        return Inverse(
            query_pages=(order // chosen % query_pages).int(),
            pages=self.choice.flatten()[order],
            starts=starts.int(),
            rows=starts.diff().argsort(descending=True, stable=True).int(),
        )

    def _check_types(self) -> None:
        counts = self.page >= 1 and self.tokens >= 1 and self.buffer_tokens >= 0
        if not counts or max(self.tokens, self.buffer_tokens) > LARGEST:
            raise UnsupportedError(
                f"page, tokens: expected 1 to {LARGEST}, buffer_tokens 0 to {LARGEST}, got "
                f"{(self.page, self.tokens, self.buffer_tokens)}; give the sizes in tokens"
            )
        for name, table in (("choice", self.choice), ("slots", self.places)):
            right = table.dtype == torch.int32 and table.shape == self.choice.shape
            if not right or table.ndim != 4 or not table.is_contiguous() or not table.numel():
                raise UnsupportedError(
                    f"{name}: expected a contiguous int32 [B, Hk, M, k] with k of 1 or more, got "
                    f"{table.dtype} {tuple(table.shape)}; convert it, or leave out the call if no "
                    "pages are chosen"
                )


def _refuse(wrong: Tensor, message: str) -> None:
    """Raise UnsupportedError if the tensor `wrong` is true; on a GPU fail an assertion later
    instead, so that the CPU need not wait."""
    if wrong.device.type == "cpu":
        if wrong:
            raise UnsupportedError(message)
        return
    torch._assert_async(~wrong, message)


# -- calls --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PagedCall:
    """Settings of one call of the Triton kernels for attention to chosen pages."""

    table: PageTable
    scale: float
    # [B, C] int32, contiguous: the first token of the sequence that each query may see (the start
    # of its document, or of its window). None: all of the chosen pages.
    first_key: Tensor | None = None
    tiles: PageTiles | None = None  # None: those of the GPU's table


class PageGradients(NamedTuple):
    """Sums of dK and dV of all pages, fp32 [T, B, Hk, D], which the caller zeroes once."""

    dk: Tensor
    dv: Tensor


def supports(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, softcap: float | None
) -> bool:
    """Return whether the Triton kernels support heads of these sizes on this device."""
    if softcap is not None or dtype not in DTYPES or find_spec("triton") is None:
        return False
    if head_dim != value_dim or head_dim % 8 or not 8 <= head_dim <= 256:
        return False
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    tiles = choose_tiles(torch.cuda.get_device_capability(device), head_dim, dtype.itemsize)
    # PyTorch has the number, but its type stubs lack it.
    gpu: Any = torch.cuda.get_device_properties(device)
    return shared_bytes(tiles, head_dim, dtype.itemsize) <= gpu.shared_memory_per_block_optin


def attend_pages(call: PagedCall, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of attention to the chosen pages alone, in the dtype of q and in memory [B,
    C, H, D], and its LSE, fp32. A query that sees no key has output 0 and LSE -inf, which `merge_`
    gives no weight. Raises UnsupportedError for tensors that do not fit each other or the
    kernels."""
    _check(call, q, keys, values)
    out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
    out = out.transpose(1, 2)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    forward_launch(call, q, keys, values, out, lse).run(q)
    return out, lse


def attend_pages_backward(
    call: PagedCall,
    queries: BackwardQueries,
    keys: Tensor,
    values: Tensor,
    totals: PageGradients,
) -> Tensor:
    """Return the part of dq that comes from the chosen pages, as a new fp32 tensor, and add the
    pages' dK and dV to `totals`; pages that no query chose are neither read nor written there.
    `queries` has out in the dtype of q and lse in fp32. The same inputs give the same bits."""
    dout, q, out, lse = queries
    _check(call, q, keys, values)
    _check_gradients(queries, keys, totals)
    dout, out = (x if x.stride(-1) == 1 else x.contiguous() for x in (dout, out))
    dq = torch.empty_like(
        q.transpose(1, 2), dtype=torch.float32, memory_format=torch.contiguous_format
    ).transpose(1, 2)
    lse = lse.contiguous()
    queries = BackwardQueries(dout, q, out, lse)
    rows = torch.empty(*lse.shape, 4, dtype=lse.dtype, device=lse.device)
    for launch in backward_launches(call, queries, rows, keys, values, dq, totals):
        launch.run(q)
    return dq


def forward_launch(
    call: PagedCall, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor
) -> Launch:
    tile = _tiles(call, q).forward
    arguments = {
        "q": heads_of(q),
        "keys": _tokens_first(keys),
        "values": _tokens_first(values),
        "out": heads_of(out),
        "lse": lse,
        "table": _pages(call),
    }
    return _launch("forward_kernel", _query_grid(call, q, tile), arguments, call, q, tile)


def backward_launches(
    call: PagedCall,
    queries: BackwardQueries,
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    dq: Tensor,
    totals: PageGradients,
) -> Iterator[Launch]:
    """Yield the kernel launches of a backward, in order. The first writes three values per query to
    `rows` ([B, H, C, 4] fp32), which the other two read; then follow dQ, and dK with dV."""
    dout, q, out, lse = queries
    tiles, inverse = _tiles(call, q), call.table.inverse
    of_rows = {"lse": lse, "first_key": call.first_key, "rows": rows}
    arguments: dict[str, Any] = {"dout": heads_of(dout), "out": heads_of(out), **of_rows}
    grid = _query_grid(call, q, tiles.forward)
    yield _launch("rows_kernel", grid, arguments, call, q, tiles.forward)
    arguments = {"q": heads_of(q), "dout": heads_of(dout)}
    arguments |= {"keys": _tokens_first(keys), "values": _tokens_first(values)}
    of_dq = {"dq": heads_of(dq), "rows": rows, "table": _pages(call)}
    grid = _query_grid(call, q, tiles.dq)
    yield _launch("dq_kernel", grid, arguments | of_dq, call, q, tiles.dq)
    visits = Visits(
        inverse.query_pages, inverse.pages, inverse.starts, inverse.rows, call.first_key
    )
    sums = Totals(_tokens_first(totals.dk), _tokens_first(totals.dv))
    of_dkv = {"totals": sums, "rows": rows, "visits": visits}
    # The most visited pages come first, so all visited pages are among the first of these.
    visited = min(inverse.rows.numel(), inverse.query_pages.numel())
    grid = visited * -(-call.table.page // _shape(call, q, tiles.dkv).tile_keys), 1
    yield _launch("dkv_kernel", grid, arguments | of_dkv, call, q, tiles.dkv, dout)


def _launch(
    kernel: str,
    grid: tuple[int, ...],
    arguments: dict[str, Any],
    call: PagedCall,
    q: Tensor,
    tile: PageTile,
    dout: Tensor | None = None,
) -> Launch:
    _, kv_heads, query_pages, chosen = call.table.choice.shape
    table = call.table
    sizes = PageSizes(
        queries=veiled(q.shape[2]),
        tokens=veiled(table.tokens),
        query_pages=veiled(query_pages),
        chosen=veiled(chosen),
        slots=veiled(table.slot_count),
        kv_heads=kv_heads,
        scale=call.scale,
    )
    shape = _shape(call, q, tile, several=dout is not None)
    if dout is not None:
        shape = shape._replace(alike=dout.stride() == q.stride())
    common = {"sizes": sizes, "shape": shape, "num_warps": _warps(shape, tile)}
    return Launch(kernel, grid, arguments | common, "farspan.sparse.kernels")


def _shape(call: PagedCall, q: Tensor, tile: PageTile, *, several: bool = False) -> PageShape:
    """Return the sizes for which a kernel is compiled. If `several`, a tile may hold rows of
    several query pages; otherwise it has no more rows than one query page needs."""
    table, group = call.table, q.shape[1] // call.table.choice.shape[1]
    rows = group * table.query_tokens
    return PageShape(
        page=table.page,
        query_page=table.query_tokens,
        group=group,
        head_dim=q.shape[3],
        parts=parts_of(q.shape[3]),
        tile_queries=tile.queries if several else min(tile.queries, tile_edge(rows)),
        tile_keys=min(tile.keys, tile_edge(table.page)),
        stages=tile.stages,
    )


def _warps(shape: PageShape, tile: PageTile) -> int:
    """Return the number of warps for a tile: one per 16 rows at most, as more would repeat work."""
    shrunk = shape.tile_queries < tile.queries
    return min(tile.warps, max(4, shape.tile_queries // 16)) if shrunk else tile.warps


def _query_grid(call: PagedCall, q: Tensor, tile: PageTile) -> tuple[int, int]:
    shape = _shape(call, q, tile)
    batch, kv_heads, query_pages, _ = call.table.choice.shape
    tiles = -(-shape.group * shape.query_page // shape.tile_queries)
    return query_pages * tiles, batch * kv_heads


def _tiles(call: PagedCall, q: Tensor) -> PageTiles:
    if call.tiles is not None:
        return call.tiles
    cuda = q.device.type == "cuda"
    capability = torch.cuda.get_device_capability(q.device) if cuda else (9, 0)
    return choose_tiles(capability, q.shape[3], q.element_size())


def _pages(call: PagedCall) -> PageReads:
    return PageReads(call.table.choice, call.table.slots, call.table.runs, call.first_key)


def _tokens_first(x: Tensor) -> Heads:
    """Return keys or values [T, B, Hk, D] as a kernel argument: the tensor with its strides."""
    token, batch, head, _ = x.stride()
    return Heads(x, batch, head, token)


def _check(call: PagedCall, q: Tensor, keys: Tensor, values: Tensor) -> None:
    choice, table = call.table.choice, call.table
    batch, kv_heads, query_pages, _ = choice.shape
    fits = q.ndim == 4 and q.shape[0] == batch and q.shape[1] % kv_heads == 0
    if not fits or -(-q.shape[2] // table.query_tokens) != query_pages:
        raise UnsupportedError(
            f"q: expected [{batch}, a multiple of {kv_heads} heads, tokens of {query_pages} pages "
            f"of {table.query_tokens}, head size] for the choice {tuple(choice.shape)}, got "
            f"{tuple(q.shape)}; make the choice for these queries"
        )
    if q.shape[3] % 8 or not 8 <= q.shape[3] <= 256 or q.dtype not in DTYPES:
        raise UnsupportedError(
            "q: expected bfloat16, float16 or float32 and a head size that is a multiple of 8 up "
            f"to 256, got {q.dtype} and {q.shape[3]}; use the PyTorch path"
        )
    expected = table.buffer_tokens, batch, kv_heads, q.shape[3]
    for name, x in (("keys", keys), ("values", values)):
        _expect(name, x, expected, q.dtype, q.device)
    _expect("choice", choice, choice.shape, torch.int32, q.device)
    apart = max(q.shape[1] // kv_heads * q.stride(1), table.query_tokens * q.stride(2))
    if q.stride(3) != 1 or max(apart, table.page * keys.stride(0)) > 2**31:
        raise UnsupportedError(
            "q: expected inner stride 1, its groups of heads and pages of keys to span less than "
            "2**31 elements; call .contiguous() on it"
        )
    if call.first_key is not None:
        _expect("first_key", call.first_key, (batch, q.shape[2]), torch.int32, q.device)
        if not call.first_key.is_contiguous():
            raise UnsupportedError(
                "first_key: expected a contiguous tensor; call .contiguous() on it"
            )


def _check_gradients(queries: BackwardQueries, keys: Tensor, totals: PageGradients) -> None:
    q = queries.q
    for name, x in (("dout", queries.dout), ("out", queries.out)):
        _expect(name, x, q.shape, q.dtype, q.device, dense=False)
    _expect("lse", queries.lse, q.shape[:3], torch.float32, q.device, dense=False)
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
        raise UnsupportedError(
            f"{name}: expected {tuple(shape)}, {dtype} on {device}, got {tuple(x.shape)}, "
            f"{x.dtype} on {x.device}; convert it before the call"
        )
    if dense and x.stride(-1) != 1:
        raise UnsupportedError(f"{name}: expected inner stride 1; call .contiguous() on it")


# -- votes --------------------------------------------------------------------------------------


def fused_votes(
    q: Tensor,
    representatives: Tensor,
    pages: range,
    call: FarCall,
    query_page: int,
    tile: PageTile | None = None,
    *,
    largest: bool = False,
    superpages: Tensor | None = None,
    weighted: bool = True,
) -> Tensor:
    """Return the votes of queries for pages, fp32, computed as `pages.vote` does.

    They are [B, Hk, M, n] for n `pages`, or [B, Hk, M, S * 16] for the pages of `superpages` [B,
    Hk, M, S]; without `weighted`, each page's largest score instead. q is [B, H, C, D],
    `representatives` [B, Hk, n * s, D], s adjacent ones per page, whose largest score counts; they
    are rounded to the dtype of q. Only votes and one LSE per query are written to memory.
    """
    (batch, heads, tokens, head_dim), kv_heads = q.shape, representatives.shape[1]
    first = None if call.documents is None else call.documents.int().contiguous()
    tile = tile or vote_tile(head_dim, q.element_size())
    query_pages, group = -(-tokens // query_page), heads // kv_heads
    rows, each = tile_edge(group * query_page), representatives.shape[2] // len(pages)
    edges = head_dim, parts_of(head_dim), min(tile.queries, rows), tile.keys, tile.stages
    shape = PageShape(call.page, query_page, group, *edges, each=each, largest=largest)
    columns = len(pages) if superpages is None else superpages.shape[3] * SUPERPAGE
    c, m, n = veiled(tokens), veiled(query_pages), veiled(len(pages))
    sizes = VoteSizes(c, m, n, veiled(columns), veiled(pages.start), kv_heads, call.scale)
    votes = torch.empty(batch, kv_heads, query_pages, columns, device=q.device)
    tensors = {"q": heads_of(q), "representatives": heads_of(representatives.to(q.dtype))}
    arguments: dict[str, Any] = {**tensors, "first_key": first}
    arguments |= {
        "superpages": superpages,
        "lse": None,
        "sizes": sizes,
        "shape": shape,
        "num_warps": _warps(shape, tile),
    }
    if weighted:
        arguments["lse"] = torch.empty(batch, heads, tokens, device=q.device)
        grid = query_pages * -(-group * query_page // shape.tile_queries), batch * kv_heads
        Launch("vote_lse_kernel", grid, arguments, "farspan.sparse.kernels").run(q)
    grid = query_pages * -(-columns // shape.tile_keys), batch * kv_heads
    Launch("vote_kernel", grid, arguments | {"votes": votes}, "farspan.sparse.kernels").run(q)
    return votes


# -- as a FarKernel -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TritonFar:
    """The `FarKernel` that uses Triton kernels, for heads that `supports` accepts."""

    tiles: PageTiles | None = None  # None: those of the GPU's table
    softcap: None = None

    def votes(
        self, call: FarCall, sparse: Sparse, q: Tensor, means: Tensor, candidates: Candidates
    ) -> Tensor:
        arguments = q, means, candidates.pages, call, sparse.query_tokens
        largest = sparse.selector != MEAN
        return fused_votes(*arguments, largest=largest, superpages=candidates.superpages)

    def largest_scores(self, call: FarCall, q: Tensor, keys: Tensor, each: int) -> Tensor:
        arguments = q, keys, range(keys.shape[2] // each), call, call.query_tokens
        return fused_votes(*arguments, largest=True, weighted=False)

    def forward(
        self,
        call: FarCall,
        q: Tensor,
        choice: Tensor,
        pages: Pages,
        attended: tuple[Tensor, Tensor],
    ) -> None:
        resident = pages.resident()
        if resident is not None:
            part = attend_pages(self._in_place(call, choice, resident), q, resident.k, resident.v)
            merge_(*attended, *part, fused=call.fused)
            return
        for slab in pages.slabs():
            keys, values = (_as_buffer(x, choice) for x in (slab.keys, slab.values))
            part = attend_pages(self._gathered(call, choice, slab), q, keys, values)
            merge_(*attended, *part, fused=call.fused)
            del slab, keys, values, part

    def backward(
        self, call: FarCall, queries: BackwardQueries, choice: Tensor, pages: Pages, dq: Tensor
    ) -> None:
        queries = queries._replace(out=queries.out.to(queries.q.dtype))
        resident = pages.resident()
        if resident is not None:
            assert resident.dk is not None
            assert resident.dv is not None
            paged, totals = (
                self._in_place(call, choice, resident),
                PageGradients(resident.dk, resident.dv),
            )
            dq.add_(attend_pages_backward(paged, queries, resident.k, resident.v, totals))
            return
        for slab in pages.slabs():
            sums = pages.sums(slab)
            keys, values = (_as_buffer(x, choice) for x in (slab.keys, slab.values))
            totals = PageGradients(*(_as_buffer(x, choice) for x in sums))
            paged = self._gathered(call, choice, slab)
            dq.add_(attend_pages_backward(paged, queries, keys, values, totals))
            pages.add(slab, *sums)
            del slab, sums, keys, values, totals

    def _in_place(self, call: FarCall, choice: Tensor, resident: Resident) -> PagedCall:
        tokens = resident.k.shape[0]
        table = PageTable(
            choice.contiguous(), call.page, tokens, tokens, query_page=call.query_tokens
        )
        return self._call(call, table)

    def _gathered(self, call: FarCall, choice: Tensor, slab: Slab) -> PagedCall:
        """Return the kernel call for a slab (gathered pages); entries of other slabs become -1."""
        slots = slab.units.index.int().contiguous()
        entries = choice.masked_fill(slots < 0, -1).contiguous()
        tokens = len(slab.keys) * call.page
        # Chosen pages are whole and lie before the chunk: the sequence's end cuts off no key.
        table = PageTable(entries, call.page, LARGEST, tokens, slots, call.query_tokens)
        return self._call(call, table)

    def _call(self, call: FarCall, table: PageTable) -> PagedCall:
        first = None if call.documents is None else call.documents.int().contiguous()
        return PagedCall(table, call.scale, first, self.tiles)


def _as_buffer(of_units: Tensor, choice: Tensor) -> Tensor:
    """View gathered pages [U pages, P tokens, D] as keys or values [U * P, B, Hk, D]. Each page
    serves one batch row and KV head, so the axes B and Hk repeat its memory (stride 0)."""
    rows, heads = choice.shape[:2]
    return of_units.flatten(0, 1)[:, None, None].expand(-1, rows, heads, -1)
