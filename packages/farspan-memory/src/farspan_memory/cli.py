"""`farspan-memory`: record allocations, plan static addresses for them, and compare allocators."""

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from farspan_memory.compare.allocators import NAMES, read_settings
from farspan_memory.compare.compare import (
    ALIGNMENT,
    PUBLISHED,
    AllocatorComparison,
    compare,
    contenders,
)
from farspan_memory.compare.mip import place_by_mip
from farspan_memory.errors import UnsupportedError
from farspan_memory.exact import (
    Solution,
    place_bilevel,
    place_exactly,
    place_flat,
    segments,
)
from farspan_memory.files import write_output
from farspan_memory.formatting import GIB, read_bytes, show
from farspan_memory.placement import PlacementRequest, sweep_placement
from farspan_memory.replay import make_plan, rounded, write_plan
from farspan_memory.report import compare_view, page, picture, remark
from farspan_memory.snapshot import trace_snapshot, write_snapshot
from farspan_memory.trace import Malloc, Trace, TraceFormat, read_format, read_trace, write_trace

USAGE, FAILED = 2, 1  # exit codes: the request cannot be met; the result is not good
# Share of the time for the exact method if `auto` can fall back on layers.
EXACT_SHARE = 0.75
STDOUT, STDERR = 1, 2


def typer_app(**options: Any) -> typer.Typer:
    """Return a typer application that shows plain Python tracebacks."""
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, **options)


# farspan-memory place

place_app = typer_app()


class Method(StrEnum):
    AUTO = "auto"
    FLAT = "flat"
    EXACT = "exact"
    BILEVEL = "bilevel"
    MIP = "mip"


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """What a command places: a trace whose tensors need addresses, and the limits of the search."""

    trace: Trace
    requests: tuple[PlacementRequest, ...]  # sizes rounded up
    seconds: float
    capacity: int | None


@place_app.command("place")
def place_command(
    trace: Annotated[
        Path, typer.Argument(help="A file of `farspan-memory record`, a snapshot or a CSV.")
    ],
    capacity: Annotated[
        str | None, typer.Option(help="80GB, 80GiB: stop at a plan that fits; exit 1 if none does.")
    ] = None,
    method: Annotated[
        Method,
        typer.Option(
            help="flat: greedy orders; exact: also a search, with proof; bilevel: one plan per "
            "kind of layer, then the layers (MEMO); mip: MEMO's program as published, for small "
            "cases; auto: exact, and bilevel if that proves nothing."
        ),
    ] = Method.AUTO,
    time_limit: Annotated[float, typer.Option(min=0.0, help="Time limit, in seconds.")] = 60.0,
    alignment: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Alignment of addresses in bytes; default {ALIGNMENT}, or 1 for a CSV."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan as JSON.")
    ] = None,
    snapshot: Annotated[
        Path | None,
        typer.Option(
            help="Write the traced tensors at these addresses as a snapshot that "
            "pytorch.org/memory_viz draws."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print plan and proof as JSON.")] = False,
) -> None:
    """Plan an address for each tensor of a trace, as low as possible."""
    if not time_limit > 0:
        raise UnsupportedError(f"time-limit: expected more than 0 seconds, got {time_limit:g}")
    read, found = read_format(trace)
    if alignment is None:
        alignment = 1 if found is TraceFormat.CSV else ALIGNMENT
    limit = None if capacity is None else read_bytes(capacity, "capacity")
    question = PlacementOptions(read, rounded(read.requests(), alignment), time_limit, limit)
    solution, used = METHODS[method](question)
    sweep_placement(question.requests, solution.placement)
    if output is not None:
        made = make_plan(read, solution.placement, alignment, solution.optimal, used)
        write_plan(made, output)
    if snapshot is not None:
        write_snapshot(trace_snapshot(read, solution.placement), snapshot)
    fits = limit is None or solution.placement.height <= limit
    answer = placement_json(question, solution, used, alignment)
    if as_json:
        print(json.dumps(answer))
    else:
        show_placement(answer, solution)
    raise typer.Exit(0 if fits else FAILED)


def flat(question: PlacementOptions) -> tuple[Solution, str]:
    return place_flat(question.requests, question.seconds), Method.FLAT


def exact(question: PlacementOptions) -> tuple[Solution, str]:
    found = place_exactly(question.requests, question.seconds, question.capacity)
    return found, Method.EXACT


def bilevel(question: PlacementOptions) -> tuple[Solution, str]:
    """Place in two levels, layers first. Raises UnsupportedError if no mark names a layer."""
    layers = segments(question.trace)
    if not layers:
        raise UnsupportedError(
            "method: bilevel needs marks of layers in the trace, such as `# mark layer 3 forward`, "
            "but the trace has none; use exact"
        )
    return place_bilevel(question.requests, layers, question.seconds).solution, Method.BILEVEL


def mip(question: PlacementOptions) -> tuple[Solution, str]:
    with _c_output_aside():
        found = place_by_mip(question.requests, question.seconds, question.capacity)
    return found, Method.MIP


@contextmanager
def _c_output_aside() -> Iterator[None]:
    """Redirect what C libraries print in the block to stderr, since stdout may carry JSON: HiGHS
    prints a line of its own if sizes differ by orders of magnitude."""
    kept = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, STDOUT)
        os.close(kept)


def auto(question: PlacementOptions) -> tuple[Solution, str]:
    """Place by exact search; if that proves no optimum, try two levels for a lower placement."""
    layers = segments(question.trace)
    seconds = question.seconds * (EXACT_SHARE if layers else 1.0)
    exact = place_exactly(question.requests, seconds, question.capacity)
    height = exact.placement.height
    enough = exact.optimal if question.capacity is None else height <= question.capacity
    if enough or not layers:
        return exact, Method.EXACT
    other = place_bilevel(question.requests, layers, question.seconds - seconds).solution
    return min((exact, Method.EXACT), (other, Method.BILEVEL), key=lambda p: p[0].placement.height)


METHODS: dict[Method, Callable[[PlacementOptions], tuple[Solution, str]]] = {
    Method.AUTO: auto,
    Method.FLAT: flat,
    Method.EXACT: exact,
    Method.BILEVEL: bilevel,
    Method.MIP: mip,
}


def placement_json(
    question: PlacementOptions, solution: Solution, method: str, alignment: int
) -> dict[str, Any]:
    """Return a placement as JSON: the arena's bytes, and the address of each malloc, in order."""
    placement, capacity = solution.placement, question.capacity
    return {
        "trace": question.trace.name,
        "requests": len(question.requests),
        "method": str(method),
        "peak": placement.height,
        "lower_bound": placement.lower_bound,
        "proved_bound": solution.proved_bound,
        "optimal": solution.optimal,
        "seconds": solution.seconds,
        "nodes": solution.nodes,
        "alignment": alignment,
        "capacity": capacity,
        "fits": None if capacity is None else placement.height <= capacity,
        "addresses": list(placement.addresses),
    }


def show_placement(answer: dict[str, Any], solution: Solution) -> None:
    """Print a placement as text."""
    peak, bound = answer["peak"], answer["lower_bound"]
    gap = f" (+{peak / bound - 1:.2%})" if peak > bound > 0 else ""
    proof = "optimal, proved" if solution.optimal else "not proved optimal"
    print(
        f"{answer['requests']} tensors in {peak:,} bytes, {proof}\n"
        f"lower bound {bound:,} bytes alive at one time{gap}\n"
        f"method {answer['method']}, {answer['seconds']:.2f} s, alignment {answer['alignment']}"
    )
    if answer["fits"] is not None:
        verdict = "[green]fits[/green]" if answer["fits"] else "[red]no plan found[/red]"
        if not answer["fits"] and solution.proved_bound > answer["capacity"]:
            verdict = "[red]does not fit[/red], proved"
        show(f"capacity {answer['capacity']:,} bytes: {verdict}")


# farspan-memory compare

compare_app = typer_app()

PICTURES = {".html": page, ".svg": picture}

Traces = Annotated[
    list[Path],
    typer.Argument(help="Files of `farspan-memory record`, or memory snapshots of PyTorch."),
]
Capacity = Annotated[
    str | None, typer.Option(help="Also run on a device with this memory: 80GB, 80GiB.")
]
Chunk = Annotated[str, typer.Option(help="Chunk sizes for stitching; each size gets a row.")]
Conf = Annotated[
    str,
    typer.Option(
        help=f"Settings of PyTorch's allocators, as in PYTORCH_CUDA_ALLOC_CONF: {', '.join(NAMES)}."
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="Write a picture of memory over time: REPORT.html or .svg."
    ),
]


@compare_app.command("compare")
def compare_command(
    traces: Traces,
    capacity: Capacity = None,
    chunk: Chunk = "2MiB,32MiB",
    alloc_conf: Conf = "",
    output: Report = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers as JSON.")] = False,
) -> None:
    """Compare four allocators on one trace: the memory that they need, and their driver calls."""
    if output is not None and output.suffix not in PICTURES:
        raise UnsupportedError(f"output: expected a name that ends in .html or .svg, got {output}")
    limit = None if capacity is None else read_bytes(capacity, "capacity")
    chunks = [read_bytes(part, "chunk") for part in chunk.split(",")]
    rivals = contenders(chunks, read_settings(alloc_conf))
    comparisons = [compare(read_trace(path), rivals, limit) for path in traces]
    if as_json:
        print(json.dumps(answer_json(comparisons)))
    else:
        show(compare_view(comparisons))
    if output is not None:
        write_output(output, PICTURES[output.suffix](comparisons), "output")


def answer_json(comparisons: list[AllocatorComparison]) -> dict[str, Any]:
    """Return all comparisons as JSON, and where the costs of driver calls come from."""
    return {
        "comparisons": [each.to_json() | {"remark": remark(each)} for each in comparisons],
        "costs": {call: cost.source for call, cost in PUBLISHED.items()},
    }


# farspan-memory record


def record_command(
    program: Annotated[
        Path,
        typer.Argument(help="A Python program to run on this GPU and to record."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the program, after --.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Write the allocations and releases of a program that runs on this GPU."""
    began = time.monotonic()
    record = import_module("farspan_memory.allocator").record_script  # it needs torch
    write_and_tell(record(program, arguments or ()), output, began, as_json)


def write_and_tell(trace: Trace, output: Path, began: float, as_json: bool) -> None:
    """Write a trace and print its summary, with the time since `began`, a value of
    time.monotonic()."""
    write_trace(trace, output)
    mallocs = [event for event in trace.events if isinstance(event, Malloc)]
    found = {
        "trace": str(output),
        "name": trace.name,
        "events": len(trace.events),
        "mallocs": len(mallocs),
        "sizes": len({malloc.size for malloc in mallocs}),
        "live_peak": trace.live_peak(),
        "seconds": round(time.monotonic() - began, 3),
    }
    if as_json:
        print(json.dumps(found))
        return
    print(
        f"{output}: {trace.name}: {len(trace.events):,} events, {len(mallocs):,} mallocs of "
        f"{found['sizes']:,} sizes, {trace.live_peak() / GIB:.2f} GiB alive at most "
        f"({found['seconds']:.1f} s)"
    )


# farspan-memory

app = typer_app(
    help="Record a program's memory, plan addresses for it, compare allocators on it.",
    no_args_is_help=True,
)
app.command("record")(record_command)
app.command("place")(place_command)
app.command("compare")(compare_command)


def main() -> None:
    """Run the command line. A user's error is printed as one clear line, never as a traceback."""
    try:
        app()
    except UnsupportedError as error:
        print(f"farspan-memory: {error}", file=sys.stderr)
        sys.exit(USAGE)
