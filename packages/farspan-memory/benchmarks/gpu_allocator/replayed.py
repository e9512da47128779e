"""A child: every trace through one allocator, without a limit and down to the least memory.

    python -m benchmarks.gpu_allocator.replayed SETTINGS

Requests and frees only; nothing reads or writes the memory. A request is a call of Python's, so
that nanoseconds a request stand beside those of the same loop with calls that do nothing.
"""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.children import Clock, Row, add_row, settings_of, words_of
from benchmarks.gpu_allocator.prepared import Prepared, mallocs
from benchmarks.gpu_allocator.served import (
    Contender,
    OfLibrary,
    Served,
    out_of_memory,
    rows_of,
    serving,
)
from farspan_memory.compare.compare import FREED, LEAST_STEP, STEP
from farspan_memory.formatting import MIB
from farspan_memory.native import AllocatorOptions, Backend

# The least memory is looked for upwards: most allocators complete within 1% of what is alive, and
# a probe that fails ends early.
SHARES = (1.0, 1.0025, 1.01, 1.03, 1.08, 1.2)
PROBES = 12  # at most, of which the last halve what is left
BLOCK = 256  # events between two looks at the clock
KEPT = 0.1  # seconds at the end of a child's time, for its last rows

COMPLETED, OUT_OF_MEMORY, OUT_OF_TIME = "completed", "out of memory", "out of time"


@dataclass(frozen=True, slots=True)
class Pass:
    """One serving of a trace."""

    ended: str  # completed, out of memory or out of time
    events: int  # served
    seconds: float
    counts: dict[str, int]  # of this pass; reserved_peak is in bytes

    @property
    def nanoseconds(self) -> float:
        """A request: a malloc or a free."""
        return 1e9 * self.seconds / max(1, self.events)

    def to_json(self) -> Row:
        return {
            "ended": self.ended,
            "events": self.events,
            "seconds": self.seconds,
            "nanoseconds_a_request": self.nanoseconds,
            **self.counts,
        }


class Replayer:
    """A trace and the allocator that serves it; a plan where the contender follows one."""

    def __init__(self, served: Served, prepared: Prepared, follows: bool, clock: Clock) -> None:
        self.served, self.prepared, self.clock = served, prepared, clock
        self.follows = follows
        self._rows = rows_of(mallocs(prepared), prepared.addresses) if follows else []

    def fresh(self, capacity: int) -> Pass:
        """With nothing reserved before."""
        self.drop()
        self.served.limit(capacity)
        return self.once(plan=True)

    def once(self, plan: bool = False) -> Pass:
        """With what is reserved by now."""
        self.served.reset()
        before = self.served.counts()
        began = time.perf_counter()
        try:
            if self.follows:
                self._follow(plan)
            ended, events = serve(self.served, self.prepared.steps, self.clock)
        except Exception as error:
            if not out_of_memory(error):
                raise
            ended, events = OUT_OF_MEMORY, 0  # no room for the plan's arena
        seconds = time.perf_counter() - began
        after = self.served.counts()
        counts = {k: v - before[k] * (not k.endswith("peak")) for k, v in after.items()}
        return Pass(ended, events, seconds, counts)

    def drop(self) -> None:
        """Everything goes back."""
        if self.follows:
            self._native().plan((), 0)
        self.served.clear()

    def _follow(self, plan: bool) -> None:
        allocator = self._native()
        if plan:
            allocator.plan(self._rows, self.prepared.arena)
        allocator.begin_iteration()

    def _native(self) -> Any:
        assert isinstance(self.served, OfLibrary)
        return self.served.allocator


def serve(served: Served, steps: list[tuple[int, int]], clock: Clock) -> tuple[str, int]:
    """How it ended, and after how many events. What is alive then is freed."""
    alloc, free = served.alloc, served.free
    alive: dict[int, int] = {}
    done = 0
    try:
        for start in range(0, len(steps), BLOCK):
            if clock.left < KEPT:
                return OUT_OF_TIME, done
            for tensor, size in steps[start : start + BLOCK]:
                if size == FREED:
                    free(alive.pop(tensor))
                else:
                    alive[tensor] = alloc(size)
                done += 1
    except Exception as error:
        if not out_of_memory(error):
            raise
        return OUT_OF_MEMORY, done
    finally:
        for pointer in alive.values():
            free(pointer)
    return COMPLETED, done


def empty_loop(steps: list[tuple[int, int]]) -> float:
    """Nanoseconds a request of the same loop, when nobody is asked."""

    class Nobody:
        def alloc(self, size: int) -> int:
            return size

        def free(self, pointer: int) -> None:
            pass

    def once() -> float:
        began = time.perf_counter()
        serve(Nobody(), steps, Clock.of(math.inf))  # type: ignore[arg-type]
        return time.perf_counter() - began

    return 1e9 * min(once() for _ in range(3)) / max(1, len(steps))


def capacities(peak: int, reserved: int) -> list[int]:
    """Shares of the live peak, and what was reserved without a limit, in whole chunks of 2 MiB."""
    wanted = [share * peak for share in SHARES if share * peak < reserved] + [reserved]
    return [-(-int(bytes) // LEAST_STEP) * LEAST_STEP for bytes in wanted]


def smallest(probe: Callable[[int], Pass], peak: int, reserved: int, most: int) -> Row:
    """The least capacity that completed and the largest below it that did not, in bytes, between
    which nothing was tried: upwards from the live peak to what was `reserved` without a limit,
    then by halves. `most` is known to complete."""
    step = min(STEP, max(LEAST_STEP, peak // 1000))
    upwards = capacities(peak, reserved)
    failed, completed = 0, most
    probes: list[Row] = []
    while len(probes) < PROBES:
        if completed == most and upwards:
            capacity = upwards.pop(0)
        elif failed and completed - failed > step:
            capacity = -(-((failed + completed) // 2) // LEAST_STEP) * LEAST_STEP
        else:
            break
        found = probe(capacity)
        probes.append({"capacity": capacity, **found.to_json()})
        if found.ended == OUT_OF_TIME:
            break
        if found.ended == COMPLETED:
            completed = capacity
        else:
            failed = capacity
    return {
        "completes_with": completed,
        "fails_with": failed or None,
        "over_live": completed / max(1, peak),
        "found_to": completed - failed if failed else None,
        "probes": probes,
    }


def measure(replayer: Replayer) -> Row:
    """One trace: the first pass, one over what that left reserved, and the least capacity."""
    served, prepared = replayer.served, replayer.prepared
    first = replayer.fresh(served.capacity)
    row: Row = {**prepared.to_json(), "modelled": served.modelled, "first": first.to_json()}
    if first.ended != COMPLETED:
        return {**row, "ended": first.ended}
    again = replayer.once()
    row |= {"again": again.to_json(), "empty_loop_nanoseconds": empty_loop(prepared.steps)}
    reserved = first.counts["reserved_peak"]
    row |= smallest(replayer.fresh, prepared.live_peak, reserved, served.capacity)
    replayer.drop()
    return {**row, "ended": COMPLETED}


def main() -> None:
    settings = settings_of(sys.argv)
    clock = Clock.of(settings["seconds"] - settings["start_seconds"])
    contender = Contender(**settings["contender"])
    if settings["device"] == "cpu":
        torch.set_num_threads(1)
    driver = settings.get("driver")
    backend = Backend.CUDA if driver else Backend.POSIX
    options = AllocatorOptions(backend=backend, capacity=settings["capacity"], library=driver)
    served = serving(contender, settings["device"], options, settings["capacity"])
    paths = [Path(path) for path in settings["traces"]]
    for number, path in enumerate(paths):
        prepared = Prepared.read(path)
        share = clock.share(1 / (len(paths) - number))
        replayer = Replayer(served, prepared, contender.mode == "replay", share)
        try:
            row = measure(replayer)
        except Exception as error:
            row = {**prepared.to_json(), "ended": "failed", "words": words_of(error)}
        add_row(settings, row)


assert LEAST_STEP == 2 * MIB


if __name__ == "__main__":
    main()
