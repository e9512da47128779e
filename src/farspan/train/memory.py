"""What a step is expected to take and what it took; where the optimizer's states lie; the device's
allocator."""

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
    """Bytes of a step before it is taken. On a CPU both tiers lie in main memory."""

    new: int  # beside weights and optimizer, on the device; on a CPU in both tiers together
    device: int  # in all, weights and optimizer included
    host: int  # in all
    parts: Mapping[str, int]  # by name


def expect_memory(
    step: Any,
    batch: int,
    tokens: int,
    optimizer: StateBytes,
    cells: Callable[[Program], int],
    values: int = 0,
) -> Expected:
    """Size a step of `[batch, tokens]`, as `estimate_memory` does. Raises TooLarge when main memory
    cannot hold it and the optimizer's states."""
    found = estimate_memory(step, batch, tokens, values=values, cells=cells)
    # Counted although they exist: memory of zeros is taken from the machine when first written.
    refuse_too_large(step, found, optimizer.untouched)
    on_cpu = step.boundary.device.type == "cpu"
    return Expected(
        new=found.new_device + (found.new_host if on_cpu else 0),
        device=found.device + optimizer.device,
        host=found.host + optimizer.host,
        parts=found.to_json()
        | {"optimizer": optimizer.device, "optimizer_on_host": optimizer.host},
    )


def describe_expected(expected: Expected) -> str:
    """One line for a person, before the first step."""
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
    """One line for a person, after the first step."""
    return (
        f"memory of a step beside weights and optimizer: {show_bytes(predicted)} predicted, "
        f"{show_bytes(measured)} measured"
    )


def describe_resident(predicted: int, resident: int) -> str:
    """The same of the process on a CPU, without what it had before its weights."""
    return (
        f"memory of the process beside libraries and data: {show_bytes(predicted)} predicted, "
        f"{show_bytes(resident)} resident at most"
    )


# -- the process on a CPU --------------------------------------------------------------------------

# Blocks of so many bytes are maps of their own, which go back to the system when they are freed.
# It is where glibc begins; by itself it goes up to 32 MiB with what is freed, and a process then
# kept 34% more than was planned, and with it 5% (LoRA of a 135M model at 1,024 tokens). Of CPU
# seconds a step of chunks of 64 tokens, which allocates the most, takes 18.4 without and 21.4 with
# it, and with four-bit weights 20.5 and 26.0.
OWN_MAP = 128 * 2**10
TRIM_EVERY = 16  # cells
MOST_MAPS = 2**15  # half of what Linux allows a process
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # of <malloc.h>
_GIVEN = "MALLOC_MMAP_THRESHOLD_"  # the environment's own


def return_freed() -> bool:
    """Have freed memory go back to the system from now on; whether it does. With other C libraries
    than glibc, or where the environment has thresholds of its own, nothing changes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or _GIVEN in os.environ:
        return False
    given = (_MMAP_THRESHOLD, OWN_MAP), (_TRIM_THRESHOLD, OWN_MAP), (_MMAP_MAX, MOST_MAPS)
    return all(mallopt(*one) for one in given)


class _OnStack(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * MIB),)


def grow_stack() -> None:
    """Have the main thread's stack take 1 MiB now: where all of a limited address space is in use
    (`ulimit -v`), the system ends a process whose stack grows by SIGSEGV. Other threads have their
    stacks from the start, and a stack that may not take 4 MiB (`ulimit -s`) is left alone."""
    most, _ = resource.getrlimit(resource.RLIMIT_STACK)
    small = most != resource.RLIM_INFINITY and most < 4 * MIB
    if threading.current_thread() is threading.main_thread() and not small:
        ctypes.CDLL(None).getpid(_OnStack())  # an argument, which is copied there


def trimming() -> Any:
    """glibc's malloc_trim; None without it, or where the user's environment sets malloc."""
    return None if _GIVEN in os.environ else getattr(ctypes.CDLL(None), "malloc_trim", None)


def resident_bytes() -> int:
    """Main memory that the process has now, libraries and mapped files included."""
    return int(psutil.Process().memory_info().rss)


def show_bytes(size: int) -> str:
    """Bytes for a person."""
    return f"{size / GIB:,.2f} GiB" if size >= GIB else f"{size / MIB:,.1f} MiB"


# -- where the optimizer's states lie ------------------------------------------------------------

STATES_KEY = "states"  # their place in about.json

WHERE = {
    StatesPlace.DEVICE: "on the device",
    StatesPlace.HOST: "in main memory, updated there",
    StatesPlace.DISK: "in a file on a drive, updated in main memory",
    StatesPlace.EIGHT_BIT: "on the device, moments of 8 bits: other results than AdamW's",
}


@dataclass(frozen=True, slots=True)
class Placed:
    """A place that is not `auto`, and why."""

    states: StatesPlace
    reason: str
    plan: Plan | None = None  # that chose it

    def describe(self) -> str:
        """For the opening lines."""
        return f"{WHERE[self.states]} ({self.reason})"


def is_unified(device: torch.device) -> bool:
    """Whether both tiers lie in main memory."""
    return device.type == "cpu"


def open_of(run: RunConfig) -> Open:
    """What of its placement a run file leaves to the planner: weights where that chooses the
    schedule as well."""
    schedule, optimizer = run.schedule, run.optimizer
    weights = schedule.strategy == AUTO and schedule.weights is schedule.weight_gradients is None
    return Open(optimizer.states is StatesPlace.AUTO, weights, optimizer.disk is not None)


def with_weights_there(run: RunConfig) -> RunConfig:
    """The run with its weights in main memory."""
    return replace(run, schedule=replace(run.schedule, weights=Tier.HOST))


def bare_machine(device: torch.device) -> MachineSpec:
    """A device and its main memory by their bytes alone, for whoever does not ask for time."""
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
    """What an allocator is told in the course of a run; None: it does not follow steps."""

    begin_step: Callable[[], None] | None = None
    forget: Callable[[], None] | None = None  # steps will be of another kind from here on


def choose_allocator(name: DeviceAllocator, device: torch.device) -> DeviceMemory:
    """Installs what the run asks for, before CUDA starts. Raises UnsupportedError."""
    if name is DeviceAllocator.DEFAULT:
        return DeviceMemory()
    if device.type != "cuda":
        raise UnsupportedError(
            f"allocator: {name} is for the memory of a GPU, and this run computes on a "
            f"{device.type}; leave it out, or set device: cuda"
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
    tell = partial(_tell, device.index)
    return DeviceMemory(partial(tell, native.begin_iteration), partial(tell, native.forget))


def _tell(index: int | None, call: Callable[[int | None], None]) -> None:
    """What the allocator refuses in the course of a run is refused as well."""
    with allocator_package():
        call(index)
