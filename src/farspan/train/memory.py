"""What a run says about its memory."""

import resource
import sys

import torch

from farspan.train.parts import StepLike


def memory_report(step: StepLike) -> dict[str, int]:  # noqa: ARG001 - the step's own numbers follow
    """Peak bytes so far: of the process, and of the GPU's memory where there is one."""
    # The kernel counts kibibytes on Linux and bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    report = {"peak_process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        report["peak_device_bytes"] = torch.cuda.max_memory_allocated()
    return report
