"""Which attention kernel is fastest on the GPU at hand, of those that are here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from farspan.engine.bench import HEAD_DIM, Bench, attention
from farspan.engine.kernels import AttentionKernels, same_bits
from farspan.spec import AttentionKernel, LayerSpec, ModelSpec, Refused

RIVALS = [kernel for kernel in AttentionKernel if kernel is not AttentionKernel.AUTO]
TOKENS = (2048, 8192, 16384)  # of the calls that they are compared on
HEADS = ModelSpec("", 0, 0, (LayerSpec(1, 1, HEAD_DIM, HEAD_DIM),), 2)


@dataclass(frozen=True, slots=True)
class Fastest:
    """Of a device's attention kernels in one dtype."""

    kernel: AttentionKernel | None = None  # None: there is nothing to choose from
    deterministic: float = 1.0  # times as long takes the fastest one whose bits are the same


def fastest_attention(bench: Bench, dtype: torch.dtype, progress: Callable[[str], None]) -> Fastest:
    """The kernel that is done first with a forward and a backward of a rectangle and of a square,
    of each length in TOKENS; those that are not here, or fail, have lost."""
    if bench.on_cpu or dtype not in (torch.bfloat16, torch.float16):
        return Fastest()
    seconds: dict[AttentionKernel, float] = {}
    same: dict[AttentionKernel, float] = {}
    for kernel in RIVALS:
        progress(f"attention by {kernel.value}")
        for found, deterministic in ((seconds, False), (same, True)):
            try:
                AttentionKernels(bench.device, dtype, kernel).refuse(HEADS)
                with same_bits(deterministic), looking(bench, dtype, kernel):
                    found[kernel] = _seconds(bench, dtype)
            except (Refused, RuntimeError, AssertionError):  # as kernels say no
                continue
    if not seconds:
        return Fastest()
    best = min(seconds, key=lambda kernel: seconds[kernel])
    # What a run takes there: the fastest, or flash attention where that is cuDNN.
    second = best if best in same else AttentionKernel.FLASH
    slower = same[second] / seconds[best] if second in same else 1.0
    return Fastest(best, max(1.0, slower))


def _seconds(bench: Bench, dtype: torch.dtype) -> float:
    made = (
        attention(bench, dtype, tokens, HEAD_DIM, causal=causal)
        for tokens in TOKENS
        for causal in (False, True)
    )
    return sum(bench.glance(a.call(backward=way)) for a in made for way in (False, True))


@contextmanager
def looking(bench: Bench, dtype: torch.dtype, kernel: AttentionKernel | None) -> Iterator[None]:
    """Inside it the bench's attention is that of a kernel."""
    bench.kernel = kernel or AttentionKernel.AUTO
    try:
        with AttentionKernels(bench.device, dtype, bench.kernel).ready():
            yield
    finally:
        bench.kernel = AttentionKernel.AUTO
