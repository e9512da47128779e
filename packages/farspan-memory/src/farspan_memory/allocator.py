"""The native allocator as PyTorch's CUDA allocator, in any PyTorch program.

farspan_memory.install("stitch")      before CUDA starts
...
farspan_memory.begin_iteration()      before each step: where a plan starts over
"""

import contextlib
import runpy
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from farspan_memory.errors import UnsupportedError
from farspan_memory.native import (
    LIBRARY,
    AllocatorOptions,
    Backend,
    NativeError,
    Statistics,
    library,
)
from farspan_memory.pytorch import (
    DRIVER,
    MODES,
    NativeMemory,
    Plugged,
    lend_statistics,
    limit_free_memory,
    out_of_memory_raiser,
    plug_in,
    refuse_unready,
    refuse_without_virtual_memory,
)
from farspan_memory.replay import ReplayPlan, iteration, load_plan, plan_iteration
from farspan_memory.trace import Trace

# Counted from 1. The first iteration also makes what stays, such as optimizer states: a plan of
# another iteration must not have them in its arena, where they would be in the way ever after.
FIRST_REPLAYED = 2


@dataclass(slots=True)
class Session:
    """The native allocators of a process, and how far each device's iterations have come.

    Invariant: `begun` counts the iterations of a device since it forgot; `plans` has the plan that
    each follows.
    """

    memory: NativeMemory
    given: ReplayPlan | None = None  # without one a replay learns its own
    begun: dict[int, int] = field(default_factory=dict)
    plans: dict[int, ReplayPlan] = field(default_factory=dict)

    def begin_iteration(self, device: int) -> None:
        """A step begins: a plan starts over, and a recording gets a mark."""
        number = self.begun[device] = self.begun.get(device, 0) + 1
        if self.memory.mode == "replay":
            self._prepare_replay(device, number)
        self.memory.begin_iteration(device)

    def _prepare_replay(self, device: int, number: int) -> None:
        allocator = self.memory.of(device)
        if self.given is not None and number == FIRST_REPLAYED:
            self._follow(device, self.given)
        elif self.given is None and number == FIRST_REPLAYED:
            allocator.record()
        elif self.given is None and number == FIRST_REPLAYED + 1:
            allocator.begin_iteration()  # its mark ends the recorded one
            allocator.record(False)
            self._follow(device, plan_iteration(iteration(self.memory.recorded(device))))

    def _follow(self, device: int, plan: ReplayPlan) -> None:
        """From the iteration on that begins next. Where there is no room for the arena, a stream
        cannot be waited for, or tensors of the plan before are still there, stitching goes on as it
        was, and a warning says so."""
        try:
            self.memory.of(device).release()  # the arena needs the chunks that served without it
            self.memory.follow(device, plan)
        except NativeError as error:
            warnings.warn(f"replay: the plan does not match this run: {error}", stacklevel=4)
            return
        self.plans[device] = plan

    def forget(self, device: int) -> None:
        """The steps that follow are of another kind. A replay begins as at first."""
        if self.memory.mode == "replay":
            allocator = self.memory.of(device)
            allocator.record(False)
            # Tensors of the plan that are still there keep its arena until the next one is made.
            with contextlib.suppress(NativeError):
                allocator.plan((), 0)
        self.begun.pop(device, None)
        self.plans.pop(device, None)

    def recorded(self, device: int, number: int | None = None) -> Trace:
        """All that was recorded, or one whole iteration of it (-1: the last)."""
        trace = self.memory.recorded(device, f"device {device}")
        return trace if number is None else iteration(trace, number)


@dataclass(frozen=True, slots=True)
class Installed:
    """What took effect."""

    mode: str
    options: AllocatorOptions
    library: Path
    out_of_memory: str  # the exception that a program sees, and why when it is not torch's own


@dataclass(frozen=True, slots=True)
class Current:
    """The allocator of this process, and PyTorch with it."""

    installed: Installed
    session: Session
    plugged: Plugged


_CURRENT: list[Current] = []  # at most one: PyTorch has one allocator


def install(
    mode: str,
    plan: ReplayPlan | Path | str | None = None,
    *,
    trace: Path | str | None = None,
    chunk: int | None = None,
    capacity: int | None = None,
    options: AllocatorOptions | None = None,
) -> Installed:
    """Makes the native allocator PyTorch's CUDA allocator. Call it before CUDA starts.

    `mode`: "record" stitches and records what is asked for; "stitch" is GMLake's stitching;
    "replay" serves each tensor of `plan` at its address, from the second iteration on, and stitches
    the others; without a plan it records its second iteration and plans for itself. A plan is a
    value of plan_iteration(), or a file of `farspan-memory place` with the `trace` it was made of.
    `chunk`: bytes of a physical chunk, a multiple of 2 MiB, which is the default. `capacity`: bytes
    to be reserved on a device at most; by default all it has. `options` has the rest, and may have
    these two in their place. Raises UnsupportedError, and then nothing has changed.
    """
    _refuse_unwanted(mode, plan, trace)
    base = options or AllocatorOptions()
    chunk, capacity = _once("chunk", chunk, base), _once("capacity", capacity, base)
    wanted = replace(base, backend=Backend.CUDA, chunk=chunk, capacity=capacity)
    given = load_plan(Path(plan), Path(trace or "")) if isinstance(plan, Path | str) else plan
    refuse_unready()
    library(LIBRARY)
    refuse_without_virtual_memory(wanted.library or DRIVER)
    memory = NativeMemory(mode, wanted)
    raiser = out_of_memory_raiser()
    if raiser.address is not None:
        memory.raise_out_of_memory_by(raiser.address)
    plugged = plug_in(memory.entries())
    lend_statistics(plugged, memory.torch_statistics, memory.reset_peaks, memory.reset_counts)
    limit_free_memory(plugged, memory.headroom)
    error = f"RuntimeError ({raiser.reason})" if raiser.reason else "torch.OutOfMemoryError"
    installed = Installed(mode, wanted, LIBRARY, error)
    _CURRENT.append(Current(installed, Session(memory, given), plugged))
    return installed


def uninstall() -> None:
    """PyTorch's own allocator again. Raises UnsupportedError once CUDA has started."""
    _current().plugged.restore()
    _CURRENT.clear()


def installed() -> Installed | None:
    """What took effect in this process; None while the allocator is PyTorch's own."""
    return _CURRENT[0].installed if _CURRENT else None


def begin_iteration(device: int | None = None) -> None:
    """A step begins on the device (the current one): a plan starts over, a recording gets a mark.
    Raises UnsupportedError without an installed allocator."""
    _current().session.begin_iteration(_index(device))


def forget(device: int | None = None) -> None:
    """The steps that follow are of another kind: the plan is dropped, its arena is given back and
    a new one is begun with as at first. Raises UnsupportedError without an installed allocator."""
    _current().session.forget(_index(device))


def statistics(device: int | None = None) -> Statistics:
    """What the native allocator of the device counts. Raises UnsupportedError without one."""
    return _current().session.memory.statistics(_index(device))


def recorded(device: int | None = None, iteration: int | None = None) -> Trace:
    """What the device was asked for: all of it, or one whole iteration (-1: the last). Raises
    UnsupportedError without an installed allocator, or when that iteration was not recorded."""
    return _current().session.recorded(_index(device), iteration)


def followed(device: int | None = None) -> ReplayPlan | None:
    """The plan that the device follows; None before its second iteration."""
    return _current().session.plans.get(_index(device))


def record_script(script: Path, arguments: Sequence[str] = ()) -> Trace:
    """Runs a Python program in this process under the recording allocator, as `python SCRIPT`
    would: it imports what lies beside it. Returns what the GPU that is current at its end was asked
    for. Raises UnsupportedError, or what the program raises."""
    if not script.is_file():
        raise UnsupportedError(f"record: {script} is not a file")
    install("record")
    before, path = sys.argv, sys.path[:]
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        if error.code:
            raise
    finally:
        sys.argv, sys.path[:] = before, path
    if not torch.cuda.is_initialized():
        raise UnsupportedError(f"record: {script} did not use the GPU")
    return recorded()


def _once(name: str, given: int | None, options: AllocatorOptions) -> int:
    """A keyword's value, or that in the options. Raises UnsupportedError for what both say."""
    value: int = getattr(options, name)
    if given is None:
        return value
    if value != getattr(AllocatorOptions(), name):
        raise UnsupportedError(f"{name}: {given} is given, and {value} in options; give it once")
    return given


def _refuse_unwanted(mode: str, plan: object, trace: object) -> None:
    if mode not in MODES:
        raise UnsupportedError(f"mode: expected {', '.join(MODES)}, got {mode!r}")
    if plan is not None and mode != "replay":
        raise UnsupportedError(
            f"plan: only mode replay follows a plan, and the mode is {mode}; drop plan"
        )
    if isinstance(plan, Path | str) != (trace is not None):
        raise UnsupportedError("trace: a plan file needs the trace it was made from; give both")
    if _CURRENT:
        raise UnsupportedError(
            f"allocator: {_CURRENT[0].installed.mode} is installed in this process; there can be "
            "one, and uninstall() is possible until CUDA starts"
        )


def _current() -> Current:
    if not _CURRENT:
        raise UnsupportedError(
            "allocator: none is installed; call farspan_memory.install(...) first"
        )
    return _CURRENT[0]


def _index(device: int | None) -> int:
    return torch.cuda.current_device() if device is None else device
