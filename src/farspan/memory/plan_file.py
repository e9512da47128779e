"""Static plans as files: JSON, for one program only.

    {"format": "farspan memory plan", "version": 1, "program": "sha256...", "alignment": 512,
     "peak": ..., "lower_bound": ..., "optimal": ..., "method": ..., "tensors": [[size, stream,
     address], ...]}

A tensor a malloc, in the order of the program. `program` digests sizes, streams and the order of
births and deaths: a plan is right for a program that asks for the same, whatever its tensors are
called.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from farspan.memory.check import PlacementError, sweep_placement
from farspan.memory.library import Row
from farspan.memory.place import Placement, Request
from farspan.memory.trace import LAST_STREAM, Malloc, Mark, Trace
from farspan.spec import Refused

FORMAT, VERSION = "farspan memory plan", 1
MOST = 2**63 - 1  # bytes that the native allocator can count


@dataclass(frozen=True, slots=True)
class Plan:
    """Where each malloc of a program goes."""

    program: str  # digest of the trace
    alignment: int  # addresses and sizes are multiples of it
    peak: int  # bytes of the arena
    lower_bound: int  # most bytes alive at one time, sizes rounded up
    optimal: bool
    method: str
    tensors: tuple[Row, ...]


def digest(trace: Trace) -> str:
    """What the program asks for, names of tensors and marks left out."""
    found = hashlib.sha256()
    numbers: dict[int, int] = {}
    mallocs = 0
    for event in trace.events:
        if isinstance(event, Mark):
            continue
        if isinstance(event, Malloc):
            numbers[event.tensor] = mallocs
            mallocs += 1
            found.update(b"m%d %d\n" % (event.size, event.stream))
        else:
            found.update(b"f%d\n" % numbers[event.tensor])
    return found.hexdigest()


def rounded(requests: Sequence[Request], alignment: int) -> tuple[Request, ...]:
    """Sizes rounded up: then every address of a placement without gaps is a multiple too."""
    return tuple(replace(r, size=-(-r.size // alignment) * alignment) for r in requests)


def make_plan(
    trace: Trace, placement: Placement, alignment: int, optimal: bool, method: str
) -> Plan:
    """The placement of the trace's rounded requests as a plan."""
    mallocs = [event for event in trace.events if isinstance(event, Malloc)]
    rows = tuple(
        Row(malloc.size, malloc.stream, address)
        for malloc, address in zip(mallocs, placement.addresses, strict=True)
    )
    return Plan(
        *(digest(trace), alignment, placement.height, placement.lower_bound, optimal, method, rows)
    )


def write_plan(plan: Plan, path: Path) -> None:
    """Raises Refused where the file cannot be written."""
    content = {"format": FORMAT, "version": VERSION} | asdict(plan)
    try:
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")
    except OSError as error:
        raise Refused(f"{path}: cannot be written: {error.strerror}") from error


def read_plan(path: Path, trace: Trace) -> Plan:
    """The plan, checked against the trace. That one above the lower bound is optimal took a search
    to prove, and is believed unless nothing lies at address 0. Raises Refused for what is no plan,
    a plan of another version or another program, and for one that does not hold together."""
    plan = _parse(path)
    if plan.program != digest(trace):
        raise Refused(
            f"{path}: a plan of another program: it has {len(plan.tensors)} tensors and digest "
            f"{plan.program[:12]}, the trace {trace.name or 'given'} has {len(trace.requests())} "
            f"and {digest(trace)[:12]}; place the trace again"
        )
    try:
        _check(plan, trace)
    except PlacementError as error:
        raise Refused(f"{path}: the plan is damaged: {error}") from error
    return plan


def _check(plan: Plan, trace: Trace) -> None:
    """Raises PlacementError for rows that are not the trace's or not at the plan's alignment, for
    tensors that overlap, and for a peak or a lower bound that is another."""
    requests = rounded(trace.requests(), plan.alignment)
    addresses = tuple(row.address for row in plan.tensors)
    sweep_placement(requests, Placement(addresses, plan.peak, plan.lower_bound))
    if plan.optimal and min(addresses, default=0) > 0:
        raise PlacementError(f"called optimal, and nothing lies below {min(addresses)}")
    mallocs = (event for event in trace.events if isinstance(event, Malloc))
    for number, (row, malloc) in enumerate(zip(plan.tensors, mallocs, strict=True)):
        if (row.size, row.stream) != (malloc.size, malloc.stream):
            raise PlacementError(
                f"tensor {number} has {row.size} bytes on stream {row.stream}, the trace's "
                f"{malloc.size} on {malloc.stream}"
            )
        if row.address % plan.alignment:
            raise PlacementError(
                f"tensor {number} at {row.address}, no multiple of {plan.alignment}"
            )


def _parse(path: Path) -> Plan:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Refused(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise Refused(f"{path}: no plan: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise Refused(f"{path}: no plan: expected the format {FORMAT!r}")
    if content.get("version") != VERSION:
        raise Refused(f"{path}: a plan of version {content.get('version')!r}, expected {VERSION}")
    try:
        return _plan(content)
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"{path}: the plan is damaged: {error!r}") from error


def _plan(content: dict[str, Any]) -> Plan:
    rows = tuple(
        Row(_count(size), _count(stream, LAST_STREAM), _count(address))
        for size, stream, address in content["tensors"]
    )
    numbers = (_count(content[name]) for name in ("alignment", "peak", "lower_bound"))
    alignment, peak, lower_bound = numbers
    if alignment < 1:
        raise ValueError(f"alignment {alignment}")
    if not isinstance(content["optimal"], bool):
        raise TypeError(f"optimal {content['optimal']!r}")
    program, method = str(content["program"]), str(content["method"])
    return Plan(program, alignment, peak, lower_bound, content["optimal"], method, rows)


def _count(value: Any, most: int = MOST) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"expected a count, got {value!r}")
    if value > most:
        raise ValueError(f"expected at most {most}, got {value}")
    return value
