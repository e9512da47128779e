"""What a step is expected to take and what it took."""

import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from farspan.engine.memory import forecast, refuse_too_large

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Expected:
    """Bytes of a step before it is taken."""

    new: int  # beside weights and optimizer, on the device; on a CPU in both tiers together
    parts: Mapping[str, int]  # by name


def expect_memory(step: Any, batch: int, tokens: int, optimizer: Mapping[str, Tensor]) -> Expected:
    """Sizes a step of `[batch, tokens]`. Raises Refused when main memory cannot hold it and the
    optimizer's states."""
    found = forecast(step, batch, tokens)
    # Counted although they exist: memory of zeros is taken from the machine when first written.
    refuse_too_large(step, found, sum(tensor.nbytes for tensor in optimizer.values()))
    on_cpu = step.boundary.device.type == "cpu"
    return Expected(found.new_device + (found.host_arena if on_cpu else 0), found.to_json())


def peak_process_bytes() -> int:
    """The most main memory this process has held at once, everything included."""
    # The kernel counts kibibytes on Linux and bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def compare(predicted: int, measured: int) -> str:
    """One line for a person."""
    return (
        f"memory of a step beside weights and optimizer: {predicted / MIB:,.1f} MiB predicted, "
        f"{measured / MIB:,.1f} MiB measured"
    )
