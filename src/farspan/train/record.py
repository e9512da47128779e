"""Records of a run: its history (commands, machines and versions of each start), and one step in
detail, with planned and measured memory by cause, and time by kind of work. Two steps per schedule
are recorded: the first for memory; the second, which metering does not slow, for time.

The engine knows the exact bytes of weights, optimizer states and the program's buffers. Weight
gradients are counted as they appear. The rest of the measured memory counts for the running cell.
"""

import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from farspan.engine.memory import PeakMemory
from farspan.engine.tiers import CopyEngine
from farspan.formatting import without_home
from farspan.host import describe_host
from farspan.planner.prices import Prices
from farspan.planner.request import Plan
from farspan.planner.timeline import Span
from farspan.program.dependencies import Lane
from farspan.program.program import (
    Allocate,
    AttentionMode,
    Backward,
    Close,
    EmbedBackward,
    Evict,
    Fetch,
    Forward,
    Free,
    Gather,
    Head,
    Instruction,
    Program,
    Receive,
    Reduce,
    Release,
    Send,
)
from farspan.program.work import WorkKind, work_kinds
from farspan.report.plan import UPDATE as UPDATE_SPAN
from farspan.report.plan import spans_json
from farspan.report.plan_page import StepFrames, drawn_walk
from farspan.spec import VERSION, Tier
from farspan.train.memory import Expected

# Files in the run folder.
HISTORY = "history.json"
STEP = "step.json"

UPDATE = "optimizer's update"
ISSUING = "issuing work"

Bytes = NDArray[np.int64]


PACKAGES = ("torch", "transformers", "peft", "triton", "safetensors")
# Words in an argument's name whose values are hidden.
SECRET = {"token", "secret", "password", "passwd", "key", "apikey", "credential", "credentials"}
# Prefixes of services' tokens, and credentials before the host of an address.
TOKENS = re.compile(r"\b(?:hf_|sk-|gh[a-z]_|glpat-|xox[a-z]-|AKIA)[\w-]{12,}|(?<=://)[^/@\s]+(?=@)")
HIDDEN = "***"


def part_json(ranks: int) -> dict[str, Any]:
    """Return the entry of history.json for the part of a run that begins now: command, machine,
    versions. Environment variables are left out."""
    return {
        "command": command_text(sys.argv),
        "ranks": ranks,
        "started": now(),
        "ended": None,
        "versions": _versions(),
        "machine": _machine(),
    }


def now() -> str:
    """Return the time in UTC, to a second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def command_text(arguments: Sequence[str]) -> str:
    """Return a process's arguments as a typed command, with `~` for home and without secrets."""
    program, *rest = arguments or ("python",)
    path = Path(program)
    words = [path.name]
    if path.name == "__main__.py":
        words = ["farspan"] if path.parent.name == "farspan" else ["python", "-m", path.parent.name]
    elif path.suffix == ".py":
        words = ["python", path.name]
    hides = False  # the next word is a secret value
    for word in rest:
        name, equals, _ = word.partition("=")
        secret = bool(SECRET & set(re.split("[^a-z]+", name.lower())))
        shown = f"{name}={HIDDEN}" if secret and equals else word
        words.append(_quoted(HIDDEN if hides and not word.startswith("-") else shown))
        hides = secret and not equals and word.startswith("-")
    return " ".join(words)


def _quoted(word: str) -> str:
    shown = without_home(TOKENS.sub(HIDDEN, word))
    if shown == HIDDEN or shown.endswith(f"={HIDDEN}"):
        return shown
    return f"~/{shlex.quote(shown[2:])}" if shown.startswith("~/") else shlex.quote(shown)


def _versions() -> dict[str, str]:
    versions = {"farspan": VERSION, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name) if name != "torch" else str(torch.__version__)
        except PackageNotFoundError:
            continue
    if torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    return versions


def _machine() -> dict[str, Any]:
    """Return this node's hardware, with the bytes of each device and of main memory."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.cuda.get_device_properties(0) if gpus else None
    return {
        "system": f"{platform.system()} {platform.release()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "host_bytes": describe_host()["total"],
        "gpus": gpus,
        "gpu": None if device is None else device.name,
        "device_bytes": None if device is None else device.total_memory,
    }


@dataclass(slots=True)
class WatchedProgram:
    """An executed program, with measurements after each of its instructions."""

    program: Program
    peaks: list[int] = field(default_factory=list)  # peak bytes since the instruction before
    gradients: list[int] = field(default_factory=list)  # bytes of gradients
    marks: list[Any] = field(default_factory=list)  # seconds or events; one before the first too
    copied: list[int] = field(default_factory=list)  # copies issued; one before the first too


@dataclass(slots=True)
class StepRecorder:
    """Recorder of an update's memory and time. Only `finish` waits for the device."""

    device: torch.device
    gradient_bytes: Callable[[], int]
    meter: PeakMemory | None = None  # memory meter; None: time only
    copies: CopyEngine | None = None  # times the copies of other lanes for `spans`
    walks: list[WatchedProgram] = field(default_factory=list)
    update: tuple[Any, Any] | None = None  # marks before and after it

    def follow(self, program: Program) -> Callable[[Instruction], None]:
        """Begin to record a program, and return the callback to run after each instruction."""
        walk = WatchedProgram(program)
        self.walks.append(walk)
        held, known = self.gradient_bytes() if self.meter else 0, set[object]()
        self._pass(walk)

        def seen(instruction: Instruction) -> None:
            nonlocal held
            self._pass(walk)
            if self.meter is None:
                return
            walk.peaks.append(self.meter.lap())
            if _may_change_gradients(instruction, known):
                held = self.gradient_bytes()
            walk.gradients.append(held)

        return seen

    def _pass(self, executed: WatchedProgram) -> None:
        executed.marks.append(self._mark())
        executed.copied.append(len(self._timed()))

    def _timed(self) -> list[tuple[Lane, Any, Any]]:
        return (self.copies and self.copies.timed) or []

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Time the optimizer's update inside the block."""
        began = self._mark()
        yield
        self.update = began, self._mark()

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def finish(self) -> None:
        """Wait until the device has finished, so that all recorded times are known."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self) -> dict[str, float]:
        """Return the seconds by kind of work, summed over the update's programs."""
        by_kind = dict.fromkeys(map(str, WorkKind), 0.0)
        for walk in self.walks:
            kinds = work_kinds(walk.program)
            for kind, began, ended in zip(kinds, walk.marks, walk.marks[1:], strict=False):
                by_kind[kind] += _between(began, ended)
        if self.update is not None:
            by_kind[UPDATE] = _between(*self.update)
        return {kind: size for kind, size in by_kind.items() if size > 0}

    def spans(self) -> Iterator[tuple[Program, Span]]:
        """Yield (program, span). A span is the time in which one instruction, copy or update kept a
        queue (such as `compute` or `fetch`) busy, in seconds since the first program began."""
        first, timed = self.walks[0].marks[0], self._timed()
        for walk in self.walks:
            for index, instruction in enumerate(walk.program.instructions):
                lane, marks = _lane(walk.program, instruction), walk.marks[index : index + 2]
                copies = timed[slice(*walk.copied[index : index + 2])]
                work = [(copied.name.lower(), *around) for copied, *around in copies]
                if lane and not (copies and lane != "compute"):
                    work.append((lane, *marks))
                for name, began, ended in work:
                    span = Span(name, _between(first, began), _between(first, ended), index)
                    yield walk.program, span
        if self.update is not None:
            began, ended = (_between(first, mark) for mark in self.update)
            yield self.walks[-1].program, Span("compute", began, ended, UPDATE_SPAN)

    def highest(self) -> int:
        """Return the index of the program with the highest peak memory; 0 if none was measured."""
        tops = [max(walk.peaks, default=0) for walk in self.walks]
        return tops.index(max(tops))


def _between(began: Any, ended: Any) -> float:
    if isinstance(began, float):
        return float(ended - began)
    return float(began.elapsed_time(ended)) / 1e3


def _lane(program: Program, instruction: Instruction) -> str:
    """Return the queue in which `farspan plan --timeline` shows an instruction, or "" for none."""
    alone = program.share.rank.layout.devices() == 1
    match instruction:
        case Allocate() | Free():
            return ""
        case Fetch():
            return "fetch"
        case Evict():
            return "evict"
        case Gather() | Release() | Reduce() | Receive() | Send():
            return "fetch" if alone else "collective"
        case _:
            return "compute"


def _may_change_gradients(instruction: Instruction, seen: set[object]) -> bool:
    """Return whether an instruction may change the bytes of `.grad`. Closing a group may, and so
    may the first backward of each layer or head; `seen` collects those found so far."""
    if isinstance(instruction, Close):
        return True
    if not isinstance(instruction, Backward | Head | EmbedBackward):
        return False
    key = type(instruction), getattr(instruction, "layer", None)
    seen_before = key in seen
    seen.add(key)
    return not seen_before


# -- as JSON ---------------------------------------------------------------------------------------


def memory_json(
    executed: WatchedProgram,
    frames: StepFrames,
    expected: Expected,
    before: Mapping[str, int],
    peak: int,
    device: torch.device,
) -> dict[str, Any]:
    """Return the planned and the measured bytes of a step by cause: one number each, or one per
    frame (instructions that the report draws together), at the frame's peak. `before` are the
    device's bytes before the step (on a CPU, main memory's), `peak` the measured peak above
    them."""
    tiers = tuple(Tier) if device.type == "cpu" else (Tier.DEVICE,)
    places = _fullest(executed.peaks, frames)
    buffers = _buffers(executed.program, tiers, places)
    arena = sum(executed.program.arena_bytes[tier] for tier in tiers)
    fixed = {**before, **_fixed_parts(expected.parts, tiers)}
    gaps = {"placement": arena - sum(buffers.values(), np.zeros(len(places), np.int64))}
    gradients = np.array(executed.gradients, np.int64)[places]
    rest = np.array(executed.peaks, np.int64)[places] - arena - gradients
    measured = {**before, **gaps, **buffers, "gradients": gradients, "cells": np.maximum(rest, 0)}
    values: dict[str, Any] = {
        "tier": "main memory" if device.type == "cpu" else "device memory",
        "planned": {
            "peak": sum(fixed.values()) + arena,
            "parts": _nonzero({**fixed, **gaps, **buffers}),
        },
        "measured": {"peak": sum(before.values()) + peak, "parts": _nonzero(measured)},
    }
    if device.type != "cpu":
        there = _buffers(executed.program, (Tier.HOST,), places)
        values["host"] = _nonzero({**dict(_on_host(expected.parts)), **there})
    return values


def _fullest(peaks: Sequence[int], frames: StepFrames) -> Bytes:
    """Return, for each frame in the report, the index of its instruction where memory peaks."""
    values, tops, start = np.array(peaks, np.int64), list[int](), 0
    for end in frames.ends:
        stop = min(end, len(values))
        tops.append(start + int(values[start:stop].argmax()) if stop > start else len(values) - 1)
        start = stop
    return np.array(tops, np.int64)


def _buffers(program: Program, tiers: tuple[Tier, ...], indices: Bytes) -> dict[str, Bytes]:
    """Return the bytes of live buffers, by kind, at each of the instruction numbers `indices`."""
    changes: dict[str, Bytes] = {}
    for buffer in program.buffers.values():
        if buffer.tier in tiers:
            change = changes.setdefault(
                buffer.kind.value, np.zeros(len(program.instructions) + 1, np.int64)
            )
            change[buffer.born] += buffer.bytes
            change[buffer.dies] -= buffer.bytes
    return {kind: np.cumsum(change)[indices] for kind, change in changes.items()}


def _fixed_parts(parts: Mapping[str, int], tiers: tuple[Tier, ...]) -> dict[str, int]:
    """Return planned bytes, by cause, that exist throughout a step but not before the step."""
    on_host = parts.get("host_gradients", 0) if Tier.HOST in tiers else 0
    return {
        "gradients": parts.get("gradients", 0) + on_host,
        "accumulators": parts.get("accumulators", 0),
        "inputs": parts.get("inputs", 0),
        "cells": parts.get("transient", 0),
    }


def _on_host(parts: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    names = {
        "weights": "host_weights",
        "gradients": "host_gradients",
        "optimizer": "optimizer_on_host",
    }
    return ((part, parts[name]) for part, name in names.items() if parts.get(name))


def _nonzero(parts: Mapping[str, int | Bytes]) -> dict[str, int | list[int]]:
    """Return bytes by cause as plain numbers for JSON, without causes of zero bytes."""
    plain: dict[str, int | list[int]] = {}
    for part, sizes in parts.items():
        if isinstance(sizes, int):
            plain |= {part: sizes} if sizes else {}
        elif sizes.any():
            plain[part] = sizes.tolist()
    return plain


def trace_json(recorder: StepRecorder, rank: int, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the measured step in the format of `farspan plan --timeline`, one process per rank."""
    words = {
        "about": "measured by farspan train",
        "rank": rank,
        "metered": recorder.meter is not None,  # metering takes time itself
        **about,
    }
    return spans_json(recorder.spans(), words, rank + 1)


def drawn_json(executed: WatchedProgram) -> tuple[StepFrames, dict[str, Any]]:
    """Return an executed program's frames (instructions that the report draws together), and their
    measured times, as `farspan.report.plan_page` expects them."""
    first, *_ = executed.marks
    begins = {index: _between(first, mark) for index, mark in enumerate(executed.marks[:-1])}
    return drawn_walk(executed.program, begins, _between(first, executed.marks[-1]))


def planned_json(plan: Plan, program: Program, batches: int) -> dict[str, Any]:
    """Return the seconds that the planner expects of an update of `batches` batches. The seconds of
    each kind of work, and of attention, ignore overlap; `total` includes it."""
    prices = Prices(plan.question, program, together=plan.question.overlap)
    seconds, attended = dict.fromkeys((*map(str, WorkKind), ISSUING), 0.0), 0.0
    for i, kind in zip(program.instructions, work_kinds(program), strict=True):
        cost = prices.of(i)
        attention = 0.0
        if isinstance(i, Backward):
            attention = prices.attention(i.layer, i.chunk, backward=True)
        elif isinstance(i, Forward) and i.mode is AttentionMode.COMPUTE:
            attention = prices.attention(i.layer, i.chunk, backward=False)
        if kind in (WorkKind.FORWARD, WorkKind.AGAIN, WorkKind.BACKWARD):
            attended += min(attention, cost.compute)
        seconds[kind] += cost.compute
        seconds[WorkKind.COPIES] += cost.fetch + cost.evict
        seconds[WorkKind.RANKS] += cost.collective
        seconds[ISSUING] += cost.host
    parts = {kind: size * batches for kind, size in seconds.items() if size > 0}
    update = plan.seconds.optimizer
    if update:
        parts[UPDATE] = update
    total = (plan.seconds.total - update) * batches + update
    return {"parts": parts, "attention": attended * batches, "total": total}
