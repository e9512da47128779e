"""Which kernel computes a layer's attention: the fastest exact one there is, or a named one."""

import torch

from farspan.attention.backends import BlockKernel, CpuFlash, CudaCudnn, CudaFlash, Padded
from farspan.attention.packages import Flash4
from farspan.attention.tiled import Tiled
from farspan.spec import AttentionKernel, Refused

WIDEST = 256  # elements of a head in flash attention
CUDNN_WIDEST = 128


def of_card(capability: tuple[int, int]) -> AttentionKernel:
    """The fastest that every PyTorch has, by a CUDA device's compute capability.

    cuDNN trains 1.7 to 2.3 times as fast as flash attention 2 on an H100 (9.0) and takes 1.07 to
    1.2 times as long on Ampere (8.x), Ada (8.9) and consumer Blackwell (12.x): measured by
    transformers' issue 48163. On data-centre Blackwell (10.x) it is the better guess until
    `farspan calibrate` has measured: flash attention 2 is not made for it.
    """
    return AttentionKernel.CUDNN if capability[0] in (9, 10) else AttentionKernel.FLASH


def select_kernel(
    device_type: str,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    softcap: float | None,
    capability: tuple[int, int] = (9, 0),
    choice: AttentionKernel = AttentionKernel.AUTO,
    queries: tuple[int, ...] | None = None,
) -> BlockKernel:
    """The fastest exact kernel for these heads, or the one that is chosen.

    `capability` is the CUDA device's; vendor kernels need (8, 0). Heads that no vendor kernel
    takes as they are get one on wider heads (`Padded`). cuDNN's backward is not deterministic, so
    it is left out under `torch.use_deterministic_algorithms`, and where
    `torch.backends.cuda.enable_cudnn_sdp(False)` switched it off. `queries` are the lengths of
    whole chunks. Raises Refused for a dtype that is not a floating type of 16 bits or more, and
    where a choice cannot be met.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    if not half and dtype not in (torch.float32, torch.float64):
        raise Refused(
            f"dtype: expected float64, float32, bfloat16 or float16 for attention, got {dtype}; "
            "load the model in one of these"
        )
    widest = max(head_dim, value_dim)
    on_cuda = device_type == "cuda" and capability >= (8, 0)
    if not (on_cuda and half and widest <= WIDEST):
        _refuse_choice(
            choice,
            "a CUDA GPU of compute capability 8.0 or more, bfloat16 or "
            f"float16, and heads of up to {WIDEST} elements",
        )
        if softcap is not None or device_type != "cpu":
            return Tiled(softcap)
        return _at_width(CpuFlash(), widest, head_dim, value_dim)
    width = -(-widest // 8) * 8
    if choice is AttentionKernel.FA4:
        return _flash_4(softcap, capability, width, head_dim, value_dim)
    if softcap is not None:
        _refuse_choice(choice, "heads without a soft cap, which fa4 alone has")
        return Tiled(softcap)
    if choice is AttentionKernel.FA3 and capability[0] != 9:
        _refuse_choice(choice, "a GPU of compute capability 9 (Hopper)")
    wanted = of_card(capability) if choice is AttentionKernel.AUTO else choice
    kernel: BlockKernel = CudaFlash()
    if wanted is AttentionKernel.CUDNN:
        switched_off = not torch.backends.cuda.cudnn_sdp_enabled()
        if width > CUDNN_WIDEST or switched_off or torch.are_deterministic_algorithms_enabled():
            _refuse_choice(
                choice,
                f"heads of up to {CUDNN_WIDEST} elements, torch.backends.cuda.enable_cudnn_sdp, "
                "and neither kernels.deterministic nor torch.use_deterministic_algorithms",
            )
        else:
            kernel = CudaCudnn(kernel, queries=queries)
    return _at_width(kernel, width, head_dim, value_dim)


def _at_width(kernel: BlockKernel, width: int, head_dim: int, value_dim: int) -> BlockKernel:
    return kernel if head_dim == value_dim == width else Padded(kernel, width)


def _flash_4(
    softcap: float | None, capability: tuple[int, int], width: int, head_dim: int, value_dim: int
) -> BlockKernel:
    if capability[0] not in (9, 10):
        needs = "a GPU of compute capability 9 (Hopper) or 10 (data-centre Blackwell)"
        _refuse_choice(AttentionKernel.FA4, needs)
    if capability[0] == 10 and width > 128:  # heads of 8 to 128 elements, or of 256
        width = WIDEST
    return _at_width(Flash4(softcap), width, head_dim, value_dim)


def _refuse_choice(choice: AttentionKernel, needs: str) -> None:
    if choice is not AttentionKernel.AUTO:
        raise Refused(f"attention: {choice.value} needs {needs}; choose auto")
