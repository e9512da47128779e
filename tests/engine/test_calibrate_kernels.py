"""The fastest attention kernel is chosen of those that are here and do not fail."""

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from farspan.engine import calibrate as module
from farspan.engine.calibrate import FastestKernel, fastest_attention
from farspan.engine.microbench import QUICK, Bench
from farspan.spec import AttentionKernel, UnsupportedError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("speeds", "found"),
    [
        ({"cudnn": 1.0, "flash": 2.0, "fa4": 3.0}, FastestKernel(AttentionKernel.CUDNN, 2.4)),
        ({"cudnn": 3.0, "flash": 2.0, "fa4": 2.5}, FastestKernel(AttentionKernel.FLASH, 1.2)),
        ({"cudnn": 3.0, "flash": 2.0, "fa4": 1.0}, FastestKernel(AttentionKernel.FA4, 1.2)),
        ({"fa4": 1.0}, FastestKernel(AttentionKernel.FA4, 1.2)),
        ({}, FastestKernel()),
    ],
)
def test_kernels_that_are_here_are_compared(
    monkeypatch: pytest.MonkeyPatch, speeds: dict[str, float], found: FastestKernel
) -> None:
    """Those whose bits are the same take 1.2 times as long here, and cuDNN has none; what is not
    here, or fails while it runs, has lost."""

    class Kernels:
        def __init__(self, _: object, __: object, kernel: AttentionKernel) -> None:
            self.name = kernel.value

        def refuse(self, _: object) -> None:
            if self.name == "fa3":
                raise UnsupportedError("not here")

        def ready(self) -> AbstractContextManager[None]:
            return nullcontext()

    def seconds(bench: Bench, _: object) -> float:
        deterministic = torch.are_deterministic_algorithms_enabled()
        if bench.kernel not in speeds:
            raise RuntimeError("no kernel image")
        if deterministic and bench.kernel is AttentionKernel.CUDNN:
            raise UnsupportedError("cudnn")
        return speeds[bench.kernel] * (1.2 if deterministic else 1.0)

    monkeypatch.setattr(module, "AttentionKernels", Kernels)
    monkeypatch.setattr(module, "_kernel_seconds", seconds)
    monkeypatch.setattr(Bench, "on_cpu", False)
    looked = Bench(CPU, QUICK)
    assert fastest_attention(looked, torch.bfloat16, lambda _: None) == found
    assert looked.kernel is AttentionKernel.AUTO
    assert fastest_attention(looked, torch.float32, lambda _: None) == FastestKernel()
