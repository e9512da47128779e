"""Which kernel a layer gets, by its heads, its dtype and the card."""

from functools import partial
from typing import Any

import pytest
import torch

from farspan.attention.backends import BlockKernel, CpuFlash, CudaCudnn, CudaFlash, Padded, Tiled
from farspan.engine.kernels import Flash4, of_card, select_kernel
from farspan.spec import AttentionKernel, UnsupportedError

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("device", "dtype", "dims", "softcap", "kernel"),
    [
        ("cpu", torch.float64, (64, 64), None, CpuFlash()),
        ("cpu", BF16, (5, 5), None, CpuFlash()),
        ("cpu", FP32, (64, 32), None, Padded(CpuFlash(), 64)),
        ("cpu", FP32, (5, 9), None, Padded(CpuFlash(), 9)),
        ("cpu", FP32, (64, 64), 50.0, Tiled(50.0)),
        ("cuda", BF16, (128, 128), None, CudaCudnn(CudaFlash())),
        ("cuda", torch.float16, (64, 64), None, CudaCudnn(CudaFlash())),
        ("cuda", BF16, (256, 256), None, CudaFlash()),
        ("cuda", BF16, (264, 264), None, Tiled()),
        ("cuda", BF16, (100, 100), None, Padded(CudaCudnn(CudaFlash()), 104)),
        ("cuda", BF16, (192, 128), None, Padded(CudaFlash(), 192)),
        ("cuda", FP32, (192, 128), None, Tiled()),
        ("cuda", BF16, (64, 64), 30.0, Tiled(30.0)),
        ("cuda", FP32, (64, 64), None, Tiled()),
        ("mps", FP32, (64, 64), None, Tiled()),
    ],
)
def test_the_fastest_exact_kernel_is_chosen(
    device: str,
    dtype: torch.dtype,
    dims: tuple[int, int],
    softcap: float | None,
    kernel: BlockKernel,
) -> None:
    assert select_kernel(device, dtype, *dims, softcap) == kernel


def test_choices_follow_the_device_and_the_switches_of_torch() -> None:
    ask = "cuda", BF16, 64, 64, None
    assert select_kernel(*ask, capability=(7, 5)) == Tiled()
    torch.use_deterministic_algorithms(True)
    try:
        assert select_kernel(*ask) == CudaFlash()
    finally:
        torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert select_kernel(*ask) == CudaFlash()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.parametrize(
    ("capability", "kernel"),
    [
        ((8, 0), CudaFlash()),  # A100
        ((8, 6), CudaFlash()),
        ((8, 9), CudaFlash()),  # L40S
        ((9, 0), CudaCudnn(CudaFlash())),
        ((10, 0), CudaCudnn(CudaFlash())),
        ((10, 3), CudaCudnn(CudaFlash())),  # B300
        ((12, 0), CudaFlash()),  # RTX PRO 6000
    ],
)
def test_the_card_decides_where_nothing_was_measured(
    capability: tuple[int, int], kernel: BlockKernel
) -> None:
    assert select_kernel("cuda", BF16, 64, 64, None, capability) == kernel
    assert (of_card(capability) is AttentionKernel.CUDNN) == isinstance(kernel, CudaCudnn)


def test_flash_attention_4_has_soft_caps_and_widths_of_its_own() -> None:
    chosen = partial(select_kernel, "cuda", BF16, choice=AttentionKernel.FA4)
    assert chosen(64, 64, 30.0) == Flash4(30.0)
    assert chosen(192, 192, None, (9, 0)) == Flash4()
    assert chosen(192, 128, None, (10, 0)) == Padded(Flash4(), 256)
    assert chosen(256, 256, 50.0, (10, 0)) == Flash4(50.0)


@pytest.mark.parametrize(
    ("choice", "kernel"),
    [
        (AttentionKernel.CUDNN, CudaCudnn(CudaFlash(), queries=(512,))),
        (AttentionKernel.FLASH, CudaFlash()),
        (AttentionKernel.FA3, CudaFlash()),
        (AttentionKernel.FA4, Flash4()),
    ],
)
def test_a_kernel_may_be_named(choice: AttentionKernel, kernel: BlockKernel) -> None:
    found = select_kernel("cuda", BF16, 64, 64, None, choice=choice, queries=(512,))
    assert found == kernel


@pytest.mark.parametrize(
    ("choice", "ask", "why"),
    [
        ("cudnn", ("cpu", BF16, 64, 64, None, (9, 0)), r"cudnn needs a CUDA GPU of compute"),
        ("flash", ("cuda", FP32, 64, 64, None, (9, 0)), r"flash needs .* bfloat16 or float16"),
        (
            "flash",
            ("cuda", BF16, 64, 64, 30.0, (9, 0)),
            r"flash needs attention without a soft cap",
        ),
        ("fa4", ("cuda", BF16, 264, 264, None, (9, 0)), r"fa4 needs .* up to 256 elements"),
        ("fa4", ("cuda", BF16, 64, 64, 30.0, (12, 0)), r"fa4 needs a GPU of .* \(Hopper\) or 10"),
        ("cudnn", ("cuda", BF16, 256, 256, None, (9, 0)), r"cudnn needs heads of up to 128"),
        ("fa3", ("cuda", BF16, 64, 64, None, (8, 0)), r"fa3 needs a GPU of .* \(Hopper\)"),
    ],
)
def test_a_kernel_that_cannot_be_had_is_refused(choice: str, ask: Any, why: str) -> None:
    chosen = partial(select_kernel, choice=AttentionKernel(choice))
    with pytest.raises(UnsupportedError, match=f"attention: {why}.*choose auto"):
        chosen(*ask)


def test_a_dtype_without_exact_attention_is_refused() -> None:
    with pytest.raises(
        UnsupportedError, match=r"dtype: expected float64.*float8_e4m3fn.*load the model"
    ):
        select_kernel("cpu", torch.float8_e4m3fn, 64, 64, None)
