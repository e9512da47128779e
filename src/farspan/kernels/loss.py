"""Cross-entropy by the Triton kernel, whose gradient takes the place of the logits.

Shapes: logits [N, V] with inner stride 1 and rows any distance apart, targets [N] int64, losses
[N] fp32.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from farspan.kernels.launch import Launch, check, check_inner, padded
from farspan.lazy import load
from farspan.spec import Refused

BLOCK = 8192  # logits a program has at one time: 16 a thread of 16 warps
STAGES = 3


class Shape(NamedTuple):
    """What the code is compiled for."""

    block: int
    ignored: int
    write: bool
    capped: bool
    stages: int


def cross_entropy(
    logits: Tensor, targets: Tensor, *, ignored: int = -100, softcap: float | None = None
) -> Tensor:
    """-log softmax(logits)[target] of each row, 0 where the target is `ignored`; reads only.

    With `softcap`, logits are softcap * tanh(logits / softcap) first. A target that is neither
    ignored nor in [0, V) has a loss of nan. Raises Refused for fp64 and tensors that do not fit.
    """
    return _run(logits, targets, None, ignored, softcap)


def cross_entropy_(
    logits: Tensor,
    targets: Tensor,
    scale: float,
    *,
    ignored: int = -100,
    softcap: float | None = None,
) -> Tensor:
    """The same; d(scale * sum of the losses) / d logits is written over `logits`, in its dtype."""
    return _run(logits, targets, scale, ignored, softcap)


def _run(
    logits: Tensor, targets: Tensor, scale: float | None, ignored: int, softcap: float | None
) -> Tensor:
    check("logits", logits, logits)
    check_inner("logits", logits)
    if logits.ndim != 2 or targets.shape != logits.shape[:1] or targets.dtype != torch.int64:
        raise Refused(
            f"targets: expected [N], int64 for logits [N, V], got {tuple(targets.shape)}, "
            f"{targets.dtype} for {tuple(logits.shape)}; flatten both"
        )
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    loss_launch(logits, targets.contiguous(), losses, scale, ignored, softcap).run(logits)
    return losses


def loss_launch(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    scale: float | None,
    ignored: int = -100,
    softcap: float | None = None,
) -> Launch:
    """`scale` is None where nothing is to be written."""
    size = logits.shape[1]
    block = min(BLOCK, max(padded(size), 16))
    arguments = {
        "logits": logits,
        "stride": logits.stride(0),
        "targets": targets,
        "losses": losses,
        "size": size,
        "scale": 0.0 if scale is None else scale,
        "cap": 1.0 if softcap is None else softcap,
        "shape": Shape(block, ignored, scale is not None, softcap is not None, STAGES),
        "num_warps": max(block // 512, 1),
    }
    return Launch(load("farspan.kernels.triton_loss", "loss_kernel"), (len(logits),), arguments)
