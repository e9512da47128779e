"""The native allocator installed as PyTorch's CUDA allocator, for any PyTorch program.

farspan_memory.install("stitch")      before CUDA starts
...
farspan_memory.begin_iteration()      before each step: a plan starts over
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

# Counted from 1. The first iteration also creates tensors that stay, such as optimizer states: in
# the arena of another iteration's plan they would stay in the way.
FIRST_REPLAYED = 2


@dataclass(slots=True)
class Session:
    """A process's native allocators, one for each device, and the iterations that they count.

    Invariant: `begun` counts the iterations of a device since `forget`; `plans` has the plan that
    each follows.
    """

    memory: NativeMemory
    given: ReplayPlan | None = None  # None: a replay learns its own plan
    begun: dict[int, int] = field(default_factory=dict)
    plans: dict[int, ReplayPlan] = field(default_factory=dict)

    def begin_iteration(self, device: int) -> None:
        """Begin a step on a device: its plan starts over, and its recording gets a mark."""
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
            allocator.begin_iteration()  # its mark ends the recorded iteration
            allocator.record(False)
            self._follow(device, plan_iteration(iteration(self.memory.recorded(device))))

    def _follow(self, device: int, plan: ReplayPlan) -> None:
        """Let a device follow a plan from its next iteration on; or warn and go on stitching if the
        arena does not fit, if another stream would have to wait, or if tensors of the previous plan
        are alive."""
        try:
            self.memory.of(device).release()  # the arena needs the chunks used without it
            self.memory.follow(device, plan)
        except NativeError as error:
            warnings.warn(f"replay: the plan does not match this run: {error}", stacklevel=4)
            return
        self.plans[device] = plan

    def forget(self, device: int) -> None:
        """Drop a device's plan and count its iterations anew, as the next steps will differ."""
        if self.memory.mode == "replay":
            allocator = self.memory.of(device)
            allocator.record(False)
            # Live tensors of the plan keep its arena until the next one is made.
            with contextlib.suppress(NativeError):
                allocator.plan((), 0)
        self.begun.pop(device, None)
        self.plans.pop(device, None)

    def recorded(self, device: int, number: int | None = None) -> Trace:
        """Return a device's whole recording, or only iteration `number` (-1: the last)."""
        trace = self.memory.recorded(device, f"device {device}")
        return trace if number is None else iteration(trace, number)


@dataclass(frozen=True, slots=True)
class Installed:
    """Settings of the installed allocator."""

    mode: str
    options: AllocatorOptions
    library: Path
    out_of_memory: str  # the exception that a program gets, and the reason if it is not torch's own


@dataclass(frozen=True, slots=True)
class Current:
    """The allocator installed in this process, and what it changed in PyTorch."""

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
    """Make the native allocator PyTorch's CUDA allocator. Call it before CUDA starts.

    Args:
        mode: "record" stitches and records all requests; "stitch" is GMLake's stitching; "replay"
            serves each tensor of `plan` at its address, from the second iteration on, and stitches
            the others; without a plan it records its second iteration and plans for itself.
        plan: A value of plan_iteration(), or a file of `farspan-memory place`.
        trace: The trace that the plan file was made from.
        chunk: Bytes of a physical chunk, a multiple of 2 MiB, which is the default.
        capacity: Most bytes to reserve on a device; by default all it has.
        options: All further options; they may set `chunk` and `capacity` instead.

    Raises:
        UnsupportedError: The allocator cannot be installed; nothing has changed then.
    """
    _refuse_unwanted(mode, plan, trace)
    base = options or AllocatorOptions()
    chunk, capacity = _setting("chunk", chunk, base), _setting("capacity", capacity, base)
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
    """Restore PyTorch's own allocator. Raises UnsupportedError once CUDA has started."""
    _current().plugged.restore()
    _CURRENT.clear()


def installed() -> Installed | None:
    """Return the settings of the installed allocator, or None while PyTorch uses its own."""
    return _CURRENT[0].installed if _CURRENT else None


def begin_iteration(device: int | None = None) -> None:
    """Begin a step on a device, by default the current device: its plan starts again, and its
    recording gets a mark. Raises UnsupportedError if no allocator is installed."""
    _current().session.begin_iteration(_index(device))


def forget(device: int | None = None) -> None:
    """Prepare a device for steps unlike the earlier ones: drop its plan, free the plan's arena and
    learn a new plan. Raises UnsupportedError if no allocator is installed."""
    _current().session.forget(_index(device))


def statistics(device: int | None = None) -> Statistics:
    """Return the counters of a device's native allocator. Raises UnsupportedError without one."""
    return _current().session.memory.statistics(_index(device))


def recorded(device: int | None = None, iteration: int | None = None) -> Trace:
    """Return a device's recording, or only iteration `number` (-1: the last), as a trace. Raises
    UnsupportedError if no allocator is installed, or if the iteration was not recorded."""
    return _current().session.recorded(_index(device), iteration)


def followed(device: int | None = None) -> ReplayPlan | None:
    """Return the plan that a device follows; None before its second iteration."""
    return _current().session.plans.get(_index(device))


def record_script(script: Path, arguments: Sequence[str] = ()) -> Trace:
    """Run a Python program in this process with the recording allocator, and return the trace of
    the GPU that is current at the end. As with `python SCRIPT`, the program can import modules of
    its folder. Raises UnsupportedError, or any error of the program."""
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


def _setting(name: str, keyword: int | None, options: AllocatorOptions) -> int:
    """Return a setting, from the keyword or the options. Raises UnsupportedError if both set it."""
    value: int = getattr(options, name)
    if keyword is None:
        return value
    if value != getattr(AllocatorOptions(), name):
        raise UnsupportedError(
            f"{name}: {keyword} is given, but options has {value}; give only one of the two"
        )
    return keyword


def _refuse_unwanted(mode: str, plan: object, trace: object) -> None:
    if mode not in MODES:
        raise UnsupportedError(f"mode: expected {', '.join(MODES)}, got {mode!r}")
    if plan is not None and mode != "replay":
        raise UnsupportedError(
            f"plan: only mode replay follows a plan, but the mode is {mode}; leave plan out"
        )
    if isinstance(plan, Path | str) != (trace is not None):
        raise UnsupportedError(
            "trace: a plan file needs the trace that it was made from; give both"
        )
    if _CURRENT:
        raise UnsupportedError(
            f"allocator: {_CURRENT[0].installed.mode} is installed already; a process can have "
            "only one: call uninstall() before CUDA starts, or start a new process"
        )


def _current() -> Current:
    if not _CURRENT:
        raise UnsupportedError(
            "allocator: none is installed; call farspan_memory.install(...) first"
        )
    return _CURRENT[0]


def _index(device: int | None) -> int:
    return torch.cuda.current_device() if device is None else device
