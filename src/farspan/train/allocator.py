"""The allocator of a run's device memory: PyTorch's own, or farspan's."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from farspan.engine import allocator
from farspan.spec import Refused
from farspan.train.config import DeviceAllocator


def nothing() -> None:
    """PyTorch's own allocator does not follow steps."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What an allocator is told in the course of a run."""

    begin_step: Callable[[], None] = nothing
    forget: Callable[[], None] = nothing  # steps will be of another kind from here on


def choose_allocator(name: DeviceAllocator, device: torch.device) -> DeviceMemory:
    """Installs what the run asks for, before CUDA starts. Raises Refused."""
    if name is DeviceAllocator.DEFAULT:
        return DeviceMemory()
    if device.type != "cuda":
        raise Refused(
            f"allocator: {name} is for the memory of a GPU, and this run computes on a "
            f"{device.type}; leave it out, or set device: cuda"
        )
    before = allocator.installed()
    if before is None:
        allocator.install(name.value)
    elif before.mode != name.value:
        raise Refused(
            f"allocator: this process has {before.mode} and PyTorch takes no other one; train "
            f"with {name} in a new process"
        )
    begin = partial(allocator.begin_iteration, device.index)
    return DeviceMemory(begin, partial(allocator.forget, device.index))
