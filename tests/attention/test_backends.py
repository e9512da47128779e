"""The kernels: which is chosen, and that each meets its vendor op's contract."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from farspan.attention.backends import (
    BackwardQueries,
    BlockKernel,
    CpuFlash,
    CudaCudnn,
    CudaFlash,
    Directed,
    Padded,
    Tiled,
    reference,
    row_tiles,
    visible,
)
from farspan.attention.chunk import attend
from farspan.program.attention_blocks import Block, plan_blocks
from farspan.program.layout import chunk_ranges
from tests.attention.cases import (
    Case,
    Inputs,
    Memory,
    Results,
    cases,
    chunk_call,
    expected,
    make_inputs,
    run_chunked,
)
from tests.attention.test_cell import compare
from tests.attention.vendor import (
    BACKWARD_CUDNN,
    BACKWARD_FLASH,
    FORWARD_CUDNN,
    FORWARD_FLASH,
    cuda_ops_on_cpu,
)
from tests.numerics import assert_exact, relative_error

BF16, FP32 = torch.bfloat16, torch.float32
SUPPORTED = [c for c in cases() if c.softcap is None and c.head_dim == c.value_dim]
ALIGNED = Case(tokens=600, chunk=256, kv_block=256, heads=2, kv_heads=1)


@pytest.mark.parametrize("case", SUPPORTED, ids=str)
def test_cuda_flash_equals_dense_attention(case: Case) -> None:
    with cuda_ops_on_cpu() as calls:
        compare(case, CudaFlash())
    assert calls[FORWARD_FLASH] == calls[BACKWARD_FLASH] > 0


@pytest.mark.parametrize("case", [ALIGNED, replace(ALIGNED, window=200)], ids=str)
@pytest.mark.parametrize(
    ("ahead", "back"),
    [
        (CudaCudnn(CudaFlash(), grid=128), CudaFlash()),
        (CudaFlash(), CudaCudnn(CudaFlash(), grid=128)),
        (CudaFlash(), Tiled()),
        (Tiled(), CudaCudnn(CudaFlash(), grid=128)),
    ],
    ids=str,
)
def test_a_backward_by_another_kernel_is_exact(
    case: Case, ahead: BlockKernel, back: BlockKernel
) -> None:
    """Every kernel's LSE is that of every other's backward, whatever blocks each is given."""
    with cuda_ops_on_cpu() as calls:
        compare(case, Directed(ahead, back))
    for kernel, name in ((ahead, FORWARD_CUDNN), (back, BACKWARD_CUDNN)):
        takes = isinstance(kernel, CudaCudnn) and case.window is None
        assert (calls.get(name, 0) > 0) == takes


def test_blocks_of_two_kernels_are_those_of_both() -> None:
    """cuDNN would leave a rectangle of 384 keys to flash attention; it gets 256 and 128."""
    cudnn, block = CudaCudnn(CudaFlash(), grid=128), Block(0, None, 512, 768, 0, 384, False)
    assert [piece.keys for piece in cudnn.split(block)] == [256, 128]
    for ways in ((cudnn, CudaFlash()), (CudaFlash(), cudnn)):
        assert Directed(*ways).split(block) == cudnn.split(block)


@pytest.mark.parametrize(
    "case",
    [
        ALIGNED,
        replace(ALIGNED, kv_block=128, sinks=True),
        replace(ALIGNED, window=300),
        replace(ALIGNED, batch=2, documents=((0, 128, 300), (0, 256))),
    ],
    ids=str,
)
def test_cudnn_equals_dense_attention(case: Case) -> None:
    """Aligned blocks go to cuDNN, ragged ones and windows to flash attention."""
    with cuda_ops_on_cpu() as calls:
        compare(case, CudaCudnn(CudaFlash(), grid=128))
    assert calls[FORWARD_CUDNN] == calls[BACKWARD_CUDNN] > 0
    assert calls[FORWARD_FLASH] == calls[BACKWARD_FLASH] > 0


def test_aligned_blocks_with_a_window_do_not_go_to_cudnn() -> None:
    with cuda_ops_on_cpu() as calls:
        compare(replace(ALIGNED, window=200), CudaCudnn(CudaFlash(), grid=128))
    assert set(calls) == {FORWARD_FLASH, BACKWARD_FLASH}


LENGTHS = [(8192, 8192), (17 * 1024, 131072), (128 * 77, 16384), (5000, 131072), (131072, 5000)]


def cudnn_pairs(tokens: int, chunk: int, kv_block: int, window: int | None) -> set[tuple[int, int]]:
    """Lengths of queries and keys that cuDNN is asked for in a whole program."""
    chunks = chunk_ranges(tokens, chunk)
    lengths = tuple({stop - start for start, stop in (chunks[0], chunks[-1])})
    kernel = CudaCudnn(CudaFlash(), queries=lengths)
    pairs = set()
    for start, stop in chunks:
        for block in plan_blocks(start, stop, kv_block, window):
            pieces = kernel.split(block)
            assert sum(piece.keys for piece in pieces) == block.keys
            for piece in filter(kernel._fits, pieces):
                # Elsewhere its gradients may be NaN.
                assert piece.window is None
                assert (piece.queries % 128, piece.keys % 128) == (0, 0)
                pairs.add((piece.queries, piece.keys))
    return pairs


@pytest.mark.parametrize(("chunk", "kv_block"), LENGTHS)
def test_a_million_tokens_build_few_plans(chunk: int, kv_block: int) -> None:
    """Of each length of a chunk, of which there are two: its square, and powers of two up to the
    block of keys. A plan for every remainder of a block would be up to 1,000."""
    pairs = cudnn_pairs(10**6, chunk, kv_block, None)
    assert len(pairs) <= 2 * (1 + (kv_block // 1024).bit_length())
    assert len({queries for queries, _ in pairs}) <= 2
    assert not cudnn_pairs(2**16, chunk, kv_block, 1000)


def test_most_of_the_work_is_cudnn_s() -> None:
    """Even of unequal chunks and blocks: what is left goes to flash attention."""
    chunks = chunk_ranges(10**6, 24 * 1024)
    kernel = CudaCudnn(CudaFlash(), queries=(24 * 1024, 10**6 % (24 * 1024)))
    area = {True: 0, False: 0}
    for start, stop in chunks:
        for block in plan_blocks(start, stop, 100_000, None):
            for piece in kernel.split(block):
                area[kernel._fits(piece)] += piece.queries * piece.keys
    assert area[True] > 0.95 * sum(area.values())


@pytest.mark.parametrize("kernel", [CpuFlash(), CudaFlash(), CudaCudnn(CudaFlash(), grid=128)])
@pytest.mark.parametrize("chunk", [128, 64])
def test_a_cell_s_output_is_token_first(kernel: BlockKernel, chunk: int) -> None:
    """Also where q is heads-first and the kernel lays its output out as q lies."""
    case = Case(tokens=2 * chunk, chunk=chunk, kv_block=chunk, batch=2, heads=2, kv_heads=1)
    inputs = make_inputs(case)
    memory = Memory(inputs.k, inputs.v)
    with cuda_ops_on_cpu():
        for start in (0, chunk):
            call, span = chunk_call(case, kernel, start)
            memory.begin(start)
            q, k, v = (x[:, :, span].contiguous() for x in (inputs.q, inputs.k, inputs.v))
            assert attend(call, q, k, v, memory)[0].transpose(1, 2).is_contiguous()


UNEVEN = Case(tokens=47, chunk=20, kv_block=16, head_dim=12, value_dim=8)


@pytest.mark.parametrize(
    "case",
    [
        UNEVEN,
        replace(UNEVEN, head_dim=5, value_dim=9, kv_heads=1),
        replace(UNEVEN, head_dim=7, value_dim=7, sinks=True),
        replace(UNEVEN, window=11),
        replace(UNEVEN, batch=2, documents=((0, 3, 30), (0, 21))),
    ],
    ids=str,
)
def test_heads_padded_with_zeros_are_exact(case: Case) -> None:
    """Against dense attention and tile by tile, whose widths are the true ones; what the backward
    is given, O and LSE of all blocks, is that of the true width too."""
    wide = max(case.head_dim, case.value_dim)
    compare(case, Padded(CpuFlash(), wide))
    compare(case, Padded(CpuFlash(), 16))
    inputs = make_inputs(case)
    padded = run_chunked(case, inputs, Padded(CpuFlash(), 16))
    for name, tensor in run_chunked(case, inputs, Tiled()).items():
        assert_exact(padded[name], tensor)
    with cuda_ops_on_cpu() as calls:
        compare(case, Padded(CudaFlash(), 16))
    assert calls[FORWARD_FLASH] == calls[BACKWARD_FLASH] > 0


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("heads", [1, 2])
def test_cudnn_gets_q_and_outputs_in_one_packed_layout(batch: int, heads: int) -> None:
    """What a later torch demands: O and dO with the strides that a dense tensor in q's order has,
    those of a dimension of one place included, whatever the layouts of the caller's."""
    (block,) = plan_blocks(0, 128, 128, None)
    sizes = replace(ALIGNED, tokens=256, batch=batch, heads=heads, kv_heads=1, head_dim=8)
    kernel, inputs = CudaCudnn(CudaFlash(), grid=128), make_inputs(sizes)
    k, v = inputs.k[:, :, :128], inputs.v[:, :, :128]
    shapes: set[tuple[Any, ...]] = set()
    with cuda_ops_on_cpu(shapes):
        for of in (lambda x: x[:, :, :128], lambda x: x[:, :, :128].contiguous()):
            q, dout = of(inputs.q), of(inputs.dout)
            out, lse = kernel.forward(q, k, v, block, 0.3)
            kernel.backward(BackwardQueries(dout, q, of(out), lse), k, v, block, 0.3)
    assert {shape[0] for shape in shapes} == {FORWARD_CUDNN, BACKWARD_CUDNN}
    packed = 128 * heads * 8, 8, heads * 8, 1
    for op, *tensors in shapes:
        of_queries = (tensors[0], tensors[1], tensors[4]) if op == BACKWARD_CUDNN else tensors[:1]
        for size, strides in of_queries:
            assert strides == packed, op
            dense = torch.empty_strided(size, packed, device="meta")
            assert torch.empty_like(dense).stride() == packed


@pytest.mark.parametrize("window", [None, 200])
def test_tiles_skip_what_is_hidden(window: int | None) -> None:
    (block,) = plan_blocks(0, 1000, 1000, window)
    tiles = [tile for _, tiles in row_tiles(block, 50) for _, tile in tiles]
    seen = sum(visible(tile, torch.device("cpu")).sum().item() for tile in tiles)
    assert seen == visible(block, torch.device("cpu")).sum()
    # Half of a tile on the diagonal, and a tile where the window begins.
    assert sum(tile.queries * tile.keys for tile in tiles) <= seen + 1000 * (25 + 50)


def test_tiled_memory_is_bounded() -> None:
    """Neither direction makes a tensor larger than inputs, outputs and tiles."""
    case = Case(tokens=1024, chunk=1024, kv_block=1024, heads=2, kv_heads=1, dtype=FP32)
    inputs = make_inputs(case)
    largest = 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, _: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    with Watch():
        run_chunked(case, inputs, Tiled(tile=64))
    assert largest == case.tokens * case.heads * case.head_dim


def test_the_reference_is_what_torch_computes() -> None:
    case = replace(cases()[0], head_dim=12, value_dim=4)
    inputs = make_inputs(case)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        inputs.q, inputs.k, inputs.v, is_causal=True, scale=case.scale, enable_gqa=True
    )
    assert_exact(expected(case, inputs)["out"], wanted)


def test_the_reference_on_three_tokens_by_hand() -> None:
    """Scores 1, 2, 3 by key; a window of 2, a cap and a sink, each as its formula says."""
    q = torch.ones(1, 1, 3, 1, dtype=torch.float64)
    k = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).view(1, 1, 3, 1)
    v = torch.eye(3, dtype=torch.float64).view(1, 1, 3, 3)
    e1, e2, e3 = k.flatten().exp()
    last = reference(q, k, v, scale=1.0, window=2)[0, 0, 2]
    assert_exact(last, torch.stack([0 * e1, e2, e3]) / (e2 + e3))
    sinks = torch.zeros(1, dtype=torch.float64)
    assert_exact(
        reference(q, k, v, scale=1.0, sinks=sinks)[0, 0, 2],
        torch.stack([e1, e2, e3]) / (e1 + e2 + e3 + 1),
    )
    capped = (2 * torch.tanh(k.flatten() / 2)).softmax(0)
    assert_exact(reference(q, k, v, scale=1.0, softcap=2.0)[0, 0, 2], capped)
    ids = torch.tensor([[0, 1, 1]])
    alone = reference(q, k, v, scale=1.0, document_ids=ids)[0, 0]
    assert_exact(alone[1], v[0, 0, 1])
    assert_exact(alone[2], torch.stack([0 * e1, e2, e3]) / (e2 + e3))


@cache
def references(case: Case) -> tuple[Inputs, Results, Results]:
    """Inputs, and dense attention in float64 and in their own dtype: seconds of one CPU thread."""
    inputs = make_inputs(case)
    return inputs, expected(case, inputs.to(torch.float64)), expected(case, inputs)


SMALL = Case(tokens=3072, chunk=1024, kv_block=1024, dtype=BF16, head_dim=64, value_dim=64)
# Heads of the models that are trained (28/4 is Qwen2.5-7B, 32/8 Llama 3 8B), in few tokens: the
# references are dense.
WIDE = replace(SMALL, tokens=768, chunk=256, kv_block=256, head_dim=128, value_dim=128)
SEVEN, EIGHT = (replace(WIDE, heads=q, kv_heads=kv) for q, kv in ((28, 4), (32, 8)))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [CudaFlash(), CudaCudnn(CudaFlash(), grid=128)], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        SMALL,
        replace(SMALL, tokens=3000, kv_block=4096, window=700, sinks=True),
        replace(SMALL, tokens=3000, batch=2, documents=((0, 5, 1500), (0,))),
        SEVEN,
        replace(SEVEN, chunk=384, kv_block=300, tokens=700),
        EIGHT,
        replace(EIGHT, kv_block=512, batch=2, tokens=640),
    ],
    ids=str,
)
def test_cuda_kernels_are_no_less_accurate_than_dense_attention(
    case: Case, kernel: BlockKernel
) -> None:
    inputs, exact, plain = references(case)
    found = run_chunked(case, inputs.to("cuda"), kernel)
    for name, tensor in exact.items():
        limit = 2 * relative_error(plain[name], tensor)
        assert relative_error(found[name].cpu(), tensor) <= limit, name
