"""The three parts of the record, each made by children."""

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.children import Clock, Outcome, Row, run_child
from benchmarks.gpu_allocator.served import CONTENDERS, MARGIN, Contender
from benchmarks.gpu_allocator.work import FULL, TINY, WARM
from farspan_memory.formatting import MIB

PACKAGE = "benchmarks.gpu_allocator"
PREPARE_SECONDS, MAPPING_SECONDS, RUN_SECONDS = 120.0, 60.0, 75.0
TRAIN_SHARE = 0.5  # of what is left when the training begins
# Of a child's time: those that importing torch and starting CUDA take on a slow day.
START_SECONDS = 12.0
# Of a device's free memory that a trace may have alive; the caching allocator needs up to 1.22
# times what is alive.
SHARE = 0.7
MAPPED = 8 << 30  # bytes mapped in each round
TIGHT = (1.02, 1.10)  # limits, as multiples of the most that was allocated without one
DIGITS = 4


@dataclass(frozen=True, slots=True)
class Place:
    """What everything is run on."""

    tiny: bool
    device: str  # cuda or cpu
    free: int  # bytes of the device; on a CPU, of the one that is pretended
    driver: str | None = None  # a driver that is a fake

    def settings(self) -> Row:
        return {
            "tiny": self.tiny,
            "device": self.device,
            "driver": self.driver,
            "capacity": self.free,
            "start_seconds": 0.0 if self.tiny else START_SECONDS,
        }


Say = Callable[[str], None]


def replay(place: Place, clock: Clock, say: Say) -> Row:
    """The suite's traces through every contender."""
    limit = int(SHARE * (place.free - (0 if place.tiny else MARGIN)))
    workers = 1 if place.tiny else os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        settings = {**place.settings(), "limit": limit, "workers": workers, "folder": folder}
        seconds = min(clock.left, PREPARE_SECONDS)
        made = run_child(f"{PACKAGE}.traces", settings, seconds)
        ready = sorted(made.rows, key=lambda row: row["number"])
        paths = [row.pop("path") for row in ready if "path" in row]
        say(f"{len(paths)} traces are ready: {made.ended}, {made.seconds:.0f} s")
        found = list(_through_all(place, paths, clock, say))
    return {"prepared": {**made.to_json(), "traces": ready}, "contenders": found}


def _through_all(place: Place, paths: list[str], clock: Clock, say: Say) -> Iterator[Row]:
    weights = sum(contender.weight for contender in CONTENDERS)
    for contender in CONTENDERS:
        seconds = clock.left * contender.weight / weights
        weights -= contender.weight
        settings = {**place.settings(), "contender": asdict(contender), "traces": paths}
        made = run_child(f"{PACKAGE}.replayed", settings, seconds, contender.configuration)
        found = [f"{row['over_live']:.3f}" for row in made.rows if "over_live" in row]
        words = made.words.splitlines()[-1:] or [f"{made.seconds:.0f} s"]
        say(f"{contender.name}: {made.ended}, over live {' '.join(found)} ({words[0]})")
        yield {**contender.to_json(), **made.to_json(), "traces": made.rows}


def mapping(place: Place, clock: Clock, say: Say) -> Row:
    """Calls of the driver by the size of a chunk."""
    total = 1 << 30 if place.tiny else MAPPED
    settings = {**place.settings(), "total": total}
    made = run_child(f"{PACKAGE}.mapping", settings, min(clock.left, MAPPING_SECONDS))
    for row in made.rows:
        speeds = [f"{k} {v['gib_a_second']:.0f}" for k, v in row.get("allocator", {}).items()]
        say(f"chunks of {row['chunk'] // MIB} MiB, GiB/s: {', '.join(speeds) or row['words']}")
    return {**made.to_json(), "rows": made.rows}


def finetune(place: Place, clock: Clock, say: Say) -> Row:
    """A run without a limit, and then every contender with as little as that one had allocated."""
    clock = clock.share(TRAIN_SHARE)
    trainers = [c for c in CONTENDERS if c.mode != "replay"]
    if place.tiny:  # one that a CPU has, and one that it has not
        trainers = trainers[:3:2]
    free = _run(place, trainers[0], 0, 0.0, clock, say)
    strict = "deterministic" not in free["words"]
    if not strict:
        free = _run(place, trainers[0], 0, 0.0, clock, say, strict=False)
    runs = [free]
    # A CPU counts nothing and cannot be limited: there the others run without a limit as well.
    peak = free.get("peak_allocated", 0)
    for share in TIGHT if peak else (0.0,):
        completed = {run["contender"] for run in runs[1:] if run["ended"] == "completed"}
        for contender in trainers[0 if peak else 1 :]:
            if contender.name not in completed:
                limit = int(share * peak)
                runs.append(_run(place, contender, limit, share, clock, say, strict=strict))
    work = asdict(TINY if place.tiny else FULL)
    return {"work": work, "runs": runs, **agreement(runs)}


def _run(
    place: Place,
    contender: Contender,
    limit: int,
    share: float,
    clock: Clock,
    say: Say,
    *,
    strict: bool = True,
) -> Row:
    settings = {
        **place.settings(),
        "contender": asdict(contender),
        "limit": limit,
        "strict": strict,
    }
    seconds = min(clock.left, RUN_SECONDS)
    made = run_child(f"{PACKAGE}.finetune", settings, seconds, contender.configuration)
    row = summary(made)
    row |= {"limit": limit or None, "limit_over_allocated": share if limit else None}
    speed = row["tokens_a_second"]
    under = f"with {limit / 2**30:.2f} GiB" if limit else "without a limit"
    fast = f", {speed:.0f} tokens/s" if speed else ""
    say(f"{contender.name} {under}: {row['ended']}, {len(row['losses'])} steps{fast}")
    return {**contender.to_json(), "contender": contender.name, "strict": strict, **row}


def summary(made: Outcome) -> Row:
    """A run of the training out of its rows."""
    steps = [row for row in made.rows if "step" in row]
    timed = [row for row in steps if row["step"] >= WARM]
    row: Row = {**made.to_json(), "steps": len(steps), "losses": [step["loss"] for step in steps]}
    for other in made.rows:
        row |= {} if "step" in other else other
    seconds = sum(step["seconds"] for step in timed)
    tokens = sum(step["tokens"] for step in timed)
    row["tokens_a_second"] = tokens / seconds if seconds else None
    row["step_seconds"] = [round(step["seconds"], DIGITS) for step in steps]
    return row


def agreement(runs: list[Row]) -> dict[str, Any]:
    """Whether the runs that completed have the same losses, and where not by how much at most."""
    completed = [run["losses"] for run in runs if run["ended"] == "completed"]
    first = completed[:1] or [[]]
    apart = [abs(a - b) for other in completed for a, b in zip(first[0], other, strict=True)]
    return {
        "completed": len(completed),
        "losses_equal": all(other == first[0] for other in completed) if completed else None,
        "losses_apart_at_most": max(apart, default=None),
    }
