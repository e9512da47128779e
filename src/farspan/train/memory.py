"""Expected and measured memory of a step; the place of optimizer states; the GPU's allocator."""

import ctypes
import os
import resource
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psutil
import torch

from farspan.allocator import allocator_package
from farspan.engine.memory import estimate_memory, refuse_too_large
from farspan.host import GIB, MIB, available_host_bytes
from farspan.planner.request import Open, Plan
from farspan.program.program import Program
from farspan.program.strategies import AUTO
from farspan.spec import MachineSpec, Tier, UnsupportedError
from farspan.train.config import DeviceAllocator, RunConfig, StatesPlace
from farspan.train.staged_states import StateBytes


@dataclass(frozen=True, slots=True)
class Expected:
    """Bytes that a step is expected to take. On a CPU both tiers are main memory."""

    new: int  # without weights and optimizer, on the device; on a CPU in both tiers
    device: int  # total, with weights and optimizer
    host: int  # total
    parts: Mapping[str, int]  # by name


def expect_memory(
    step: Any,
    batch: int,
    tokens: int,
    optimizer: StateBytes,
    cells: Callable[[Program], int],
    values: int = 0,
) -> Expected:
    """Estimate the memory of a step on a [batch, tokens] batch, with the optimizer states; `values`
    is the number of log-probabilities that the loss keeps per token. Raises TooLarge if main memory
    cannot hold step and states."""
    estimate = estimate_memory(step, batch, tokens, values=values, cells=cells)
    # They exist, but the system hands out zeroed memory only at the first write.
    refuse_too_large(step, estimate, optimizer.untouched)
    on_cpu = step.stages.device.type == "cpu"
    return Expected(
        new=estimate.new_device + (estimate.new_host if on_cpu else 0),
        device=estimate.device + optimizer.device,
        host=estimate.host + optimizer.host,
        parts=estimate.to_json()
        | {"optimizer": optimizer.device, "optimizer_on_host": optimizer.host},
    )


def describe_expected(expected: Expected) -> str:
    """Return one line about the expected memory, shown before the first step."""
    names = ("weights", "optimizer", "gradients", "device_arena", "transient")
    parts = [
        f"{name.replace('_', ' ')} {show_bytes(expected.parts[name])}"
        for name in names
        if name in expected.parts
    ]
    inside = f" ({', '.join(parts)})" if parts else ""
    there = ", ".join(
        f"{words} {show_bytes(expected.parts[name])}"
        for name, words in _ON_HOST.items()
        if expected.parts.get(name)
    )
    there = f" ({there})" if there else ""
    return (
        f"expected memory: device {show_bytes(expected.device)}{inside}; "
        f"host {show_bytes(expected.host)}{there}"
    )


_ON_HOST = {
    "host_weights": "weights",
    "optimizer_on_host": "optimizer",
    "host_gradients": "gradients",
}


def describe_measured(predicted: int, measured: int) -> str:
    return (
        f"memory of a step without weights and optimizer: {show_bytes(predicted)} predicted, "
        f"{show_bytes(measured)} measured"
    )


def describe_resident(predicted: int, resident: int) -> str:
    """Return one line that compares the predicted and the resident memory of the process on a CPU,
    both without the bytes in use before the weights were loaded."""
    return (
        f"memory of the process without libraries and data: {show_bytes(predicted)} predicted, "
        f"{show_bytes(resident)} resident at most"
    )


# -- the process on a CPU --------------------------------------------------------------------------

# malloc maps blocks from this size on one by one, and returns them to the system when they are
# freed. It is glibc's initial value; glibc raises it up to 32 MiB with freed blocks, and a process
# then kept 34% more than planned, against 5% with the fixed value (LoRA of a 135M model at 1,024
# tokens). It costs CPU time: a step of chunks of 64 tokens, which allocates most, takes 18.4
# seconds without it and 21.4 with it; with four-bit weights 20.5 and 26.0.
OWN_MAP = 128 * 2**10
TRIM_EVERY = 16  # cells
MOST_MAPS = 2**15  # half the limit of Linux per process
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # from <malloc.h>
_GIVEN = "MALLOC_MMAP_THRESHOLD_"  # set by the user's environment


def return_freed() -> bool:
    """Make malloc return freed memory to the operating system from now on. Returns False, and
    changes nothing, without glibc or if the environment sets malloc's thresholds."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or _GIVEN in os.environ:
        return False
    options = (_MMAP_THRESHOLD, OWN_MAP), (_TRIM_THRESHOLD, OWN_MAP), (_MMAP_MAX, MOST_MAPS)
    return all(mallopt(*one) for one in options)


class _StackBlock(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * MIB),)


def grow_stack() -> None:
    """Grow the main thread's stack by 1 MiB now. Later growth may fail under a limit of the address
    space (`ulimit -v`), and the system would end the process by SIGSEGV. Does nothing on other
    threads, whose stacks have their full size, or if the stack may not take 4 MiB (`ulimit -s`)."""
    most, _ = resource.getrlimit(resource.RLIMIT_STACK)
    small = most != resource.RLIM_INFINITY and most < 4 * MIB
    if threading.current_thread() is threading.main_thread() and not small:
        ctypes.CDLL(None).getpid(_StackBlock())  # the argument is copied to the stack


def trimming() -> Any:
    """Return glibc's malloc_trim; None without glibc or if the environment configures malloc."""
    return None if _GIVEN in os.environ else getattr(ctypes.CDLL(None), "malloc_trim", None)


def resident_bytes() -> int:
    """Return the main memory that the process uses now, with libraries and mapped files."""
    return int(psutil.Process().memory_info().rss)


def show_bytes(size: int) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB else f"{size / MIB:,.1f} MiB"


# -- where the optimizer's states lie ------------------------------------------------------------

STATES_KEY = "states"  # key in about.json

WHERE = {
    StatesPlace.DEVICE: "on the device",
    StatesPlace.HOST: "in main memory, updated there",
    StatesPlace.DISK: "in a file on a drive, updated in main memory",
    StatesPlace.EIGHT_BIT: "on the device, 8-bit moments: results differ from AdamW's",
}


@dataclass(frozen=True, slots=True)
class Placed:
    """The place chosen for a run's optimizer states (never `auto`), and the reason for it."""

    states: StatesPlace
    reason: str
    plan: Plan | None = None  # plan that chose the place

    def describe(self) -> str:
        """Return the place and the reason as text for the messages at the start of a run."""
        return f"{WHERE[self.states]} ({self.reason})"


def is_unified(device: torch.device) -> bool:
    """Return whether the device and the host tier are the same main memory, as on a CPU."""
    return device.type == "cpu"


def open_of(run: RunConfig) -> Open:
    """Return which choices the run file leaves to the planner: the tier of optimizer states, the
    tier of weights (only together with the schedule), and whether to use a drive."""
    schedule, optimizer = run.schedule, run.optimizer
    weights = schedule.strategy == AUTO and schedule.weights is schedule.weight_gradients is None
    return Open(optimizer.states is StatesPlace.AUTO, weights, optimizer.disk is not None)


def with_weights_there(run: RunConfig) -> RunConfig:
    """Return the run with its weights placed in main memory."""
    return replace(run, schedule=replace(run.schedule, weights=Tier.HOST))


def bare_machine(device: torch.device) -> MachineSpec:
    """Return the memory sizes of this machine without speeds, for plans that need no time."""
    rate, name, total, taken = float("inf"), "cpu", 0, 0
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
        taken = total - free - torch.cuda.memory_reserved(device)
    return MachineSpec(
        name=name,
        devices=1,
        device_bytes=total,
        host_bytes=available_host_bytes(),
        rates={},
        memory=rate,
        fetch=rate,
        evict=rate,
        fetch_together=rate,
        evict_together=rate,
        host_memory=rate,
        peer=rate,
        network=rate,
        latency=0.0,
        overhead=0.0,
        reserve=taken,
        unified=is_unified(device),
    )


# -- the allocator -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Functions that tell the GPU's allocator that a step begins, or that later steps will differ;
    None for an allocator that need not know."""

    begin_step: Callable[[], None] | None = None
    forget: Callable[[], None] | None = None  # the following steps differ from the earlier ones


def choose_allocator(name: DeviceAllocator, device: torch.device) -> DeviceMemory:
    """Install the allocator that the run names, before CUDA starts. Raises UnsupportedError."""
    if name is DeviceAllocator.DEFAULT:
        return DeviceMemory()
    if device.type != "cuda":
        raise UnsupportedError(
            f"allocator: {name} is for the memory of a GPU, and this run computes on a "
            f"{device.type}; leave allocator out, or set device: cuda"
        )
    with allocator_package(f"allocator: {name}") as native:
        before = native.installed()
        if before is None:
            native.install(name.value)
        elif before.mode != name.value:
            raise UnsupportedError(
                f"allocator: this process already uses {before.mode}, which PyTorch cannot change; "
                f"train with {name} in a new process"
            )
    tell = partial(_call_allocator, device.index)
    return DeviceMemory(partial(tell, native.begin_iteration), partial(tell, native.forget))


def _call_allocator(index: int | None, call: Callable[[int | None], None]) -> None:
    with allocator_package():
        call(index)
