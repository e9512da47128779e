"""`farspan memory place`: a static plan for a trace."""

import ctypes
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from farspan.cli.ending import FAILED, typer_app
from farspan.memory.exact import (
    Solution,
    place_bilevel,
    place_by_mip,
    place_exactly,
    place_flat,
    segments,
)
from farspan.memory.placement import PlacementRequest, available, sweep_placement
from farspan.memory.replay import make_plan, rounded, write_plan
from farspan.memory.trace import Trace, TraceFormat, read_format
from farspan.plan.units import read_bytes
from farspan.spec import Refused

app = typer_app()

# PyTorch's allocators round to it, and kernels may rely on the alignment.
ALIGNMENT = 512
# Of the time, when `auto` has layers to fall back on.
EXACT_SHARE = 0.75
STDOUT, STDERR = 1, 2


class Method(StrEnum):
    AUTO = "auto"
    FLAT = "flat"
    EXACT = "exact"
    BILEVEL = "bilevel"
    MIP = "mip"


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """A trace to place."""

    trace: Trace
    requests: tuple[PlacementRequest, ...]  # sizes rounded up
    seconds: float
    capacity: int | None


@app.command("place")
def place_command(
    trace: Annotated[
        Path, typer.Argument(help="A file of `farspan memory trace`, a snapshot or a CSV.")
    ],
    capacity: Annotated[
        str | None, typer.Option(help="80GB, 80GiB: stop at a plan that fits; exit 1 without one.")
    ] = None,
    method: Annotated[
        Method,
        typer.Option(
            help="flat: greedy orders; exact: then a search, with proof; bilevel: a layer once, "
            "then layers (MEMO); mip: MEMO's program as written, for small cases; auto: exact, and "
            "bilevel where that proves nothing."
        ),
    ] = Method.AUTO,
    time_limit: Annotated[float, typer.Option(min=0.0, help="Seconds of placing.")] = 60.0,
    alignment: Annotated[
        int | None,
        typer.Option(min=1, help=f"Of addresses, bytes; default {ALIGNMENT}, of a CSV 1."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan as JSON.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print plan and proof as JSON.")] = False,
) -> None:
    """Plan an address for each tensor of a trace, as low as can be."""
    if not time_limit > 0:
        raise Refused(f"time-limit: expected more than 0 seconds, got {time_limit:g}")
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
    fits = limit is None or solution.placement.height <= limit
    answer = to_json(question, solution, used, alignment)
    if as_json:
        print(json.dumps(answer))
    else:
        show(answer, solution)
    raise typer.Exit(0 if fits else FAILED)


def flat(question: PlacementOptions) -> tuple[Solution, str]:
    return place_flat(question.requests, question.seconds), Method.FLAT


def exact(question: PlacementOptions) -> tuple[Solution, str]:
    found = place_exactly(question.requests, question.seconds, question.capacity)
    return found, Method.EXACT


def bilevel(question: PlacementOptions) -> tuple[Solution, str]:
    """Raises Refused for a trace that no layer is marked in."""
    layers = segments(question.trace)
    if not layers:
        raise Refused(
            "method: bilevel needs marks of layers in the trace, such as `# mark layer 3 forward`; "
            "there are none; use exact"
        )
    return place_bilevel(question.requests, layers, question.seconds).solution, Method.BILEVEL


def mip(question: PlacementOptions) -> tuple[Solution, str]:
    with _c_output_aside():
        found = place_by_mip(question.requests, question.seconds, question.capacity)
    return found, Method.MIP


@contextmanager
def _c_output_aside() -> Iterator[None]:
    """What C prints goes to stderr: HiGHS prints a line of its own where sizes are far apart, and
    stdout may be the JSON."""
    kept = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, STDOUT)
        os.close(kept)


def auto(question: PlacementOptions) -> tuple[Solution, str]:
    """Exact where the library is there; what it does not prove, bi-level may still lower."""
    if not available():
        return flat(question)
    layers = segments(question.trace)
    seconds = question.seconds * (EXACT_SHARE if layers else 1.0)
    found = place_exactly(question.requests, seconds, question.capacity)
    height = found.placement.height
    enough = found.optimal if question.capacity is None else height <= question.capacity
    if enough or not layers:
        return found, Method.EXACT
    other = place_bilevel(question.requests, layers, question.seconds - seconds).solution
    return min((found, Method.EXACT), (other, Method.BILEVEL), key=lambda p: p[0].placement.height)


METHODS: dict[Method, Callable[[PlacementOptions], tuple[Solution, str]]] = {
    Method.AUTO: auto,
    Method.FLAT: flat,
    Method.EXACT: exact,
    Method.BILEVEL: bilevel,
    Method.MIP: mip,
}


def to_json(
    question: PlacementOptions, found: Solution, method: str, alignment: int
) -> dict[str, Any]:
    """Bytes; an address for each malloc, in order."""
    placement, capacity = found.placement, question.capacity
    return {
        "trace": question.trace.name,
        "requests": len(question.requests),
        "method": str(method),
        "peak": placement.height,
        "lower_bound": placement.lower_bound,
        "proved_bound": found.proved_bound,
        "optimal": found.optimal,
        "seconds": found.seconds,
        "nodes": found.nodes,
        "alignment": alignment,
        "capacity": capacity,
        "fits": None if capacity is None else placement.height <= capacity,
        "addresses": list(placement.addresses),
    }


def show(answer: dict[str, Any], solution: Solution) -> None:
    """Print a plan for a person."""
    console = Console(highlight=False)
    peak, bound = answer["peak"], answer["lower_bound"]
    gap = f" (+{peak / bound - 1:.2%})" if peak > bound > 0 else ""
    proof = "optimal, proved" if solution.optimal else "not proved optimal"
    console.print(
        f"{answer['requests']} tensors in {peak:,} bytes, {proof}\n"
        f"lower bound {bound:,} bytes alive at one time{gap}\n"
        f"method {answer['method']}, {answer['seconds']:.2f} s, alignment {answer['alignment']}"
    )
    if answer["fits"] is not None:
        verdict = "[green]fits[/green]" if answer["fits"] else "[red]no plan found[/red]"
        if not answer["fits"] and solution.proved_bound > answer["capacity"]:
            verdict = "[red]does not fit[/red], proved"
        console.print(f"capacity {answer['capacity']:,} bytes: {verdict}")
