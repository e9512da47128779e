"""The bytes that plans give to attention are those of `attention/`, run on the meta device."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from farspan.attention.backends import BlockKernel, CpuFlash, Padded, Tiled, accumulate_dtype
from farspan.attention.chunk import AttentionCall, attend, attend_backward
from farspan.engine.memory import LiveStorage
from farspan.profile.attention import attention_bytes, chunk_call
from farspan.program import attention_blocks
from farspan.program.attention_blocks import Block, overlapping
from farspan.spec import LayerSpec

PLAIN = LayerSpec(8, 2, 64, 64)
LAYERS = {
    "grouped": PLAIN,
    "wide keys": LayerSpec(4, 4, 96, 64),
    "wide values": LayerSpec(4, 2, 32, 64),
    "capped": LayerSpec(4, 2, 64, 64, softcap=5.0),
    "one head": LayerSpec(1, 1, 16, 16),
    "sinks": replace(PLAIN, sinks=True),
    "window": replace(PLAIN, window=100),
    "window and sinks": replace(PLAIN, window=300, sinks=True),
    "capped window": LayerSpec(4, 2, 64, 64, softcap=5.0, window=300),
}
WIDTHS = {torch.bfloat16: 2, torch.float32: 4}


class Stored:
    """Keys and values of earlier tokens, which exist before attention begins."""

    def __init__(self, blocks: tuple[Block, ...], start: int, tensor: Any) -> None:
        self.found: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        for visit in overlapping(b for b in blocks if b.k_start < start):
            first, stop = min(b.k_start for b in visit), max(b.k_stop for b in visit)
            self.found[first, stop] = tensor(stop - first)

    def keys(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        return self.found[start, stop]

    def add_gradient(self, *_: object) -> None: ...


def kernel_of(layer: LayerSpec) -> BlockKernel:
    if layer.softcap is not None:
        return Tiled(layer.softcap)
    wide = max(layer.head_dim, layer.value_dim)
    return CpuFlash() if layer.head_dim == layer.value_dim else Padded(CpuFlash(), wide)


def measured(
    layer: LayerSpec,
    blocks: tuple[Block, ...],
    chunk: tuple[int, int],
    like: tuple[int, torch.dtype],
    heads_first: bool,
) -> tuple[int, int]:
    """Return the peak bytes of a chunk's forward and backward."""
    (start, stop), (batch, dtype) = chunk, like
    call = AttentionCall(0.2, layer.softcap, blocks, start, kernel_of(layer))

    def blank(heads: int, dim: int, *, packed: bool = False) -> Tensor:
        tokens = stop - start
        order = (batch, heads, tokens, dim) if packed else (batch, tokens, heads, dim)
        x = torch.empty(order, dtype=dtype, device="meta")
        return x if packed else x.transpose(1, 2)

    def rows(tokens: int) -> tuple[Tensor, Tensor]:
        """Return keys and values as an arena holds them, as rows of tokens."""
        shapes = ((tokens, batch, layer.kv_heads, dim) for dim in dims)
        key, value = (torch.empty(s, dtype=dtype, device="meta") for s in shapes)
        return key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)

    dims = layer.head_dim, layer.value_dim
    q = blank(layer.query_heads, layer.head_dim, packed=heads_first)
    k, v = (blank(layer.kv_heads, dim, packed=True) for dim in dims)
    sinks = q.new_empty(layer.query_heads) if layer.sinks else None
    stored = Stored(blocks, start, rows)
    with LiveStorage() as forward:
        attend(call, q, k, v, stored, sinks)
    out, dout = (blank(layer.query_heads, layer.value_dim) for _ in range(2))
    lse = q.new_empty(q.shape[:3], dtype=accumulate_dtype(dtype))
    with LiveStorage() as backward:
        dq, *dkv, dsinks = attend_backward(call, dout, q, k, v, (out, lse), stored, sinks)
        # As in engine.attention_op: gradients from queries of later chunks are added.
        kept = [(x + x).to(dtype) for x in dkv]
        dkv.clear()
        kept.append(dq if dsinks is None else dsinks.to(dtype))
        _answer = dq.to(dtype), kept
    return forward.peak, backward.peak


def compare(
    layer: LayerSpec,
    chunk: tuple[int, int],
    kv_block: int,
    like: tuple[int, torch.dtype],
    heads_first: bool,
) -> None:
    batch, width = like[0], WIDTHS[like[1]]
    call = chunk_call(layer, batch, *chunk, kv_block)
    planned = attention_bytes(
        layer, call, (batch, width), chunk[1] - chunk[0], heads_first, chooses=False
    )
    assert planned == measured(layer, call.blocks, chunk, like, heads_first)


@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=12, deadline=None)
@given(
    tokens=st.sampled_from((1, 16, 100, 700)),
    start=st.sampled_from((0, 1, 100, 700)),
    kv_block=st.sampled_from((64, 1024)),
    batch=st.integers(1, 2),
    dtype=st.sampled_from(list(WIDTHS)),
    heads_first=st.booleans(),
)
@example(tokens=700, start=0, kv_block=64, batch=1, dtype=torch.bfloat16, heads_first=False)
def test_bytes_of_a_chunk(
    name: str,
    tokens: int,
    start: int,
    kv_block: int,
    batch: int,
    dtype: torch.dtype,
    heads_first: bool,
) -> None:
    compare(LAYERS[name], (start, start + tokens), kv_block, (batch, dtype), heads_first)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("start", [0, 50])
def test_bytes_of_a_chunk_that_is_cut(
    name: str, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A square in pieces has a wider sum than one call's output."""
    layer = LAYERS[name]
    row = layer.query_heads * max(layer.head_dim, layer.value_dim)
    monkeypatch.setattr(attention_blocks, "INDEXED", (25 + (layer.window or 0)) * row)
    compare(layer, (start, start + 64), 32, (1, torch.bfloat16), heads_first=False)
