"""A child: the suite's traces, recorded, cut to a device and placed.

    python -m benchmarks.gpu_allocator.traces SETTINGS

It needs no GPU: tensors without memory are what is recorded.
"""

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.allocator import QWEN, SUITE, Case
from benchmarks.children import Row, add_row, settings_of, words_of
from benchmarks.gpu_allocator.prepared import Prepared
from farspan.engine.trace_steps import TraceRequest
from farspan_memory.compare.compare import steps_of
from farspan_memory.exact import place_exactly
from farspan_memory.placement import sweep_placement
from farspan_memory.replay import rounded
from farspan_memory.trace import FreeEvent, Malloc, Trace

ALIGNMENT = 512  # bytes
PLAN_SECONDS = 10.0
TINY = (
    Case("tiny, checkpointed", TraceRequest(QWEN, (256, 192), layers=1, strategy="recompute")),
    Case("tiny, cells", TraceRequest(QWEN, (256,), layers=1, strategy="grouped")),
)


def divided(trace: Trace, limit: int) -> tuple[int, Trace]:
    """The trace with every request divided by the least power of two with which at most `limit`
    bytes are alive, and that number. Requests of no bytes are left out: nobody is asked for them.
    """
    by, peak = 1, trace.live_peak()
    while peak > limit * by:
        by *= 2
    gone: set[int] = set()
    events: list[Malloc | FreeEvent] = []
    for event in trace.events:
        if isinstance(event, Malloc) and event.size == 0:
            gone.add(event.tensor)
        elif isinstance(event, Malloc):
            gone.discard(event.tensor)
            events.append(Malloc(event.tensor, -(-event.size // by), event.stream))
        elif isinstance(event, FreeEvent) and event.tensor not in gone:
            events.append(event)
    return by, Trace(tuple(events), trace.name)


def prepare(case: Case, limit: int) -> Prepared:
    """Records the trace, cuts it to `limit` bytes alive and places it."""
    by, trace = divided(case.trace(), limit)
    streams = {event.stream for event in trace.events if isinstance(event, Malloc)}
    assert streams <= {0}, "a trace of several streams needs streams to be served on"
    requests = rounded(trace.requests(), ALIGNMENT)
    found = place_exactly(requests, PLAN_SECONDS)
    sweep_placement(requests, found.placement)
    steps = [(tensor, size) for tensor, size, _ in steps_of(trace)]
    placement = found.placement
    return Prepared(
        case.name,
        by,
        trace.live_peak(),
        steps,
        list(placement.addresses),
        placement.height,
        found.optimal,
    )


def suite(tiny: bool) -> Sequence[Case]:
    """What is replayed."""
    return TINY if tiny else SUITE


def prepared(cases: Sequence[Case], limit: int, workers: int) -> Iterator[tuple[int, Any]]:
    """The number of each case and what was prepared of it, or the exception, as they come."""
    if workers == 1:
        for number, case in enumerate(cases):
            try:
                yield number, prepare(case, limit)
            except Exception as error:
                yield number, error
        return
    # Not forked: torch has threads.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(prepare, case, limit): n for n, case in enumerate(cases)}
        for future in as_completed(futures):
            yield futures[future], future.exception() or future.result()


def main() -> None:
    settings = settings_of(sys.argv)
    cases = suite(settings["tiny"])
    for number, found in prepared(cases, settings["limit"], settings["workers"]):
        row: Row = {"number": number, "trace": cases[number].name}
        if isinstance(found, Prepared):
            path = Path(settings["folder"]) / f"{number}.json"
            found.write(path)
            row["path"] = str(path)
        else:
            row["words"] = words_of(found)
        add_row(settings, row)


if __name__ == "__main__":
    main()
