"""What a step is expected to take and what it took."""

import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from farspan.engine.memory import dry_run_apart as apart
from farspan.engine.memory import estimate_memory, refuse_known, refuse_too_large
from farspan.train.optimizer_parts import Held

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, slots=True)
class Expected:
    """Bytes of a step before it is taken. On a CPU both tiers lie in main memory."""

    new: int  # beside weights and optimizer, on the device; on a CPU in both tiers together
    device: int  # in all, weights and optimizer included
    host: int  # in all
    parts: Mapping[str, int]  # by name


def expect_memory(
    step: Any,
    batch: int,
    tokens: int,
    optimizer: Held,
    watch: Callable[[Any], None],
    accumulate: bool,
) -> Expected:
    """Sizes a step of `[batch, tokens]`, one of several of an update with `accumulate`; `watch` is
    called after each cell of the rehearsal that this takes. Raises TooLarge when main memory cannot
    hold it and the optimizer's states."""
    found = estimate_memory(step, batch, tokens, watch, accumulate=accumulate)
    # Counted although they exist: memory of zeros is taken from the machine when first written.
    refuse_too_large(step, found, optimizer.untouched)
    on_cpu = step.boundary.device.type == "cpu"
    return Expected(
        new=found.new_device + (found.host_arena if on_cpu else 0),
        device=found.device + optimizer.device,
        host=found.host_arena + optimizer.host,
        parts=found.to_json()
        | {"optimizer": optimizer.device, "optimizer_on_host": optimizer.host},
    )


def rehearse_apart(
    step: Any, batch: int, tokens: int, watch: Callable[[Any], None], accumulate: bool
) -> None:
    """What `expect_memory` rehearses, by each rank apart from the others. Raises TooLarge and
    DeviceTooSmall on all ranks, and what an allocator raises on one."""
    refuse_known(step, batch, tokens)
    apart(step, batch, tokens, watch, accumulate=accumulate)


def peak_process_bytes() -> int:
    """The most main memory this process has held at once, everything included."""
    # The kernel counts kibibytes on Linux and bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def describe(expected: Expected) -> str:
    """One line for a person, before the first step."""
    names = ("weights", "optimizer", "gradients", "device_arena", "transient")
    parts = [
        f"{name.replace('_', ' ')} {shown(expected.parts[name])}"
        for name in names
        if name in expected.parts
    ]
    inside = f" ({', '.join(parts)})" if parts else ""
    states = expected.parts.get("optimizer_on_host", 0)
    there = f" (optimizer {shown(states)})" if states else ""
    return (
        f"expected memory: device {shown(expected.device)}{inside}; "
        f"host {shown(expected.host)}{there}"
    )


def compare(predicted: int, measured: int) -> str:
    """One line for a person, after the first step."""
    return (
        f"memory of a step beside weights and optimizer: {shown(predicted)} predicted, "
        f"{shown(measured)} measured"
    )


def shown(size: int) -> str:
    """Bytes for a person."""
    return f"{size / GIB:,.2f} GiB" if size >= GIB else f"{size / MIB:,.1f} MiB"
