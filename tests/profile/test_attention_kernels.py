"""What a kernel of attention is said to hold for a moment is what it is measured to hold."""

import pytest
import torch
from torch import Tensor

from farspan.attention import backends
from farspan.attention.backends import BackwardQueries, Tiled
from farspan.attention.chunk import AttentionCall, attend
from farspan.engine.memory import PeakMemory
from farspan.profile import attention_kernels as kernels
from farspan.profile.attention import attend as attend_sizes
from farspan.profile.attention import chunk_call
from farspan.profile.attention_kernels import Kernel, Memory, Outline, token_first
from farspan.program import attention_blocks as blocks_module
from farspan.program.attention_blocks import Block, cut_wide, most_tokens, plan_blocks
from farspan.spec import LayerSpec

HEADS, KV_HEADS, TOKENS = 4, 2, 64
SIZES = [(24, 16), (16, 24), (16, 16)]
SQUARE = Block(0, None, 0, TOKENS, 0, TOKENS, True)


def given(memory: Memory, heads: int, width: int) -> Outline:
    """A tensor that somebody else counts, token-first, in float32."""
    x = token_first(memory, (1, heads, TOKENS, width), 4)
    memory.live -= x.storage.size
    x.storage.size = 0
    memory.peak = memory.live
    return x


def real(heads: int, width: int) -> Tensor:
    return torch.randn(1, TOKENS, heads, width).transpose(1, 2)


def forward_and_backward(
    dims: tuple[int, int], sizes: Kernel, kernel: backends.BlockKernel
) -> tuple[list[int], list[int]]:
    """Peak bytes, said and measured."""
    memory = Memory()
    q, k, v = (given(memory, h, w) for h, w in _sizes(dims))
    out, lse = sizes.forward(q, k, v, SQUARE)
    said = [memory.peak]
    del out, lse
    dout, out = (given(memory, HEADS, dims[1]) for _ in range(2))
    gradients = sizes.backward(dout, q, k, v, out, SQUARE)
    said.append(memory.peak)
    del gradients
    q_, k_, v_ = (real(h, w) for h, w in _sizes(dims))
    with PeakMemory(torch.device("cpu")) as meter:
        found = kernel.forward(q_, k_, v_, SQUARE, 0.2)
    measured = [meter.peak]
    dout_, out_, lse_ = real(HEADS, dims[1]), real(HEADS, dims[1]), found[1].clone()
    with PeakMemory(torch.device("cpu")) as meter:
        kernel.backward(BackwardQueries(dout_, q_, out_, lse_), k_, v_, SQUARE, 0.2)
    return said, [*measured, meter.peak]


def _sizes(dims: tuple[int, int]) -> list[tuple[int, int]]:
    """Heads of q, k and v, and their widths."""
    return [(HEADS, dims[0]), (KV_HEADS, dims[0]), (KV_HEADS, dims[1])]


@pytest.mark.parametrize("dims", SIZES)
def test_heads_padded_with_zeros(dims: tuple[int, int]) -> None:
    width = max(dims)
    said, measured = forward_and_backward(
        dims,
        kernels.PaddedSizes(kernels.FlashSizes(), width),
        backends.Padded(backends.CpuFlash(), width),
    )
    assert said == measured


class Nowhere:
    """No earlier keys."""

    def keys(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        raise AssertionError(start, stop)

    def add_gradient(self, *_: object) -> None:
        raise AssertionError


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_square_that_is_cut(softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum over the pieces of a square, which begins with those on the diagonal, is wider than
    the output of one call, and planned so."""
    attention = LayerSpec(HEADS, KV_HEADS, 16, 16, softcap=softcap)
    row = HEADS * 16
    monkeypatch.setattr(blocks_module, "INDEXED", 25 * row)
    memory = Memory()
    q, k, v = (given(memory, heads, 16) for heads in (HEADS, KV_HEADS, KV_HEADS))
    call = chunk_call(attention, 1, 0, TOKENS, 1024)
    assert len(call.blocks) > 3
    found = attend_sizes(call, q, k, v, None)
    said = memory.peak
    del found
    whole = plan_blocks(0, TOKENS, 1024, None)
    pieces = tuple(piece for block in whole for piece in cut_wide(block, most_tokens(row)))
    kernel = backends.CpuFlash() if softcap is None else Tiled(softcap)
    real_call = AttentionCall(0.2, softcap, pieces, 0, kernel)
    tensors = [real(heads, 16) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    with PeakMemory(torch.device("cpu")) as meter:
        attend(real_call, tensors[0], tensors[1], tensors[2], Nowhere())
    assert said == meter.peak
