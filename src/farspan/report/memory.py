"""Allocators compared on a trace, as tables for a terminal."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from farspan.memory.compare.allocators import CREATE, FREE, MALLOC, MAP, RELEASE, UNMAP
from farspan.memory.compare.compare import (
    AS_GOOD,
    ASSUMED,
    EXPANDABLE,
    PLAN,
    PUBLISHED,
    STITCHING,
    AllocatorComparison,
    AllocatorResult,
    AllocatorRun,
)
from farspan.plan.units import write_bytes, write_seconds
from farspan.report.tables import lines_table

MODELLED, REAL, PLANNED, PROVED = "modelled", "real code", "a plan", "proved"
POLICY = (
    "Stitching is run as it is installed: it takes new memory while there is room, and stitches "
    "when there is none, so that what it reserves without a limit is no measure of what it needs. "
)
# An allocator calls one of a pair: that of segments, or that of chunks.
CALLS = {
    "creates": (MALLOC, CREATE),
    "maps": (MAP,),
    "unmaps": (UNMAP,),
    "releases": (FREE, RELEASE),
}


def compare_view(comparisons: Sequence[AllocatorComparison]) -> RenderableType:
    """Each trace: memory, calls, and what to make of it; how calls are priced, once."""
    parts: list[RenderableType] = []
    for found in comparisons:
        parts += [subject(found), memory_table(found), Text()]
        unlimited = [(result.name, result.unlimited) for result in found.results]
        parts += [calls_table("calls of the driver, without a limit", unlimited), Text()]
        smallest = [(result.name, result.smallest) for result in found.results]
        parts += [calls_table("calls with the least capacity of each", smallest), Text()]
        if given_runs(found):
            parts += [given_table(found), Text(), calls_table("its calls", given_runs(found))]
            parts.append(Text())
        if found.expandable_as_good() is not None:
            parts.append(Text(f"{remark(found)}\n", "bold"))
    return Group(*parts, Text(POLICY + pricing()))


def subject(found: AllocatorComparison) -> Text:
    """What was compared."""
    text = Text(found.trace or "trace", "bold")
    text.append(f": {found.events:,} mallocs and frees, at most ", "not bold")
    text.append(f"{write_bytes(found.live_peak)} alive\n", "not bold")
    return text


def memory_table(found: AllocatorComparison) -> Table:
    """What each reserves without a limit, and the least capacity it completes with."""
    title = f"memory; the least capacity is found to {write_bytes(found.step)}"
    columns = ("allocator", "known by", "reserved", "unused", "least", "x live", "retries")
    table = lines_table(title, *columns)
    table.collapse_padding = True  # a terabyte of it fits 80 columns
    for result in found.results:
        table.add_row(
            result.name,
            known_by(result),
            write_bytes(result.unlimited.reserved_peak),
            f"{result.fragmentation(found.live_peak):.1%}",
            write_bytes(result.smallest.capacity or 0),
            over(result.smallest.capacity or 0, found.live_peak),
            f"{result.smallest.retries:,}",
        )
    return table


def calls_table(title: str, runs: Sequence[tuple[str, AllocatorRun]]) -> Table:
    """Calls of the driver over the whole trace, and what they cost."""
    table = lines_table(title, "allocator", *CALLS, "cost")
    for name, run in runs:
        counts = [sum(run.calls.get(call, 0) for call in calls) for calls in CALLS.values()]
        shown = [f"{count:,}" if count else "" for count in counts]
        table.add_row(name, *shown, write_seconds(run.seconds))
    return table


def given_table(found: AllocatorComparison) -> Table:
    """How each fares with the capacity that was asked about."""
    runs = given_runs(found)
    title = f"with {write_bytes(runs[0][1].capacity or 0)}"
    table = lines_table(title, "allocator", "completes", "retries", "reserved")
    for name, run in runs:
        answer = "yes" if run.completed else "no"
        table.add_row(name, answer, f"{run.retries:,}", write_bytes(run.reserved_peak))
    return table


def given_runs(found: AllocatorComparison) -> list[tuple[str, AllocatorRun]]:
    """Those with the capacity that was asked about, if any was."""
    return [(result.name, result.given) for result in found.results if result.given]


def known_by(result: AllocatorResult) -> str:
    """Whether the numbers are a model's or those of the code that runs on a GPU."""
    if result.name == PLAN:
        return PROVED if result.proved else PLANNED
    return MODELLED if result.modelled else REAL


def over(capacity: int, live: int) -> str:
    """A capacity as a multiple of the live peak."""
    return f"{capacity / live:.3f}x" if live else "1.000x"


def remark(found: AllocatorComparison) -> str:
    """Whether stitching gains anything over expandable segments; nothing where one is missing."""
    expandable, stitching = found.least_of(EXPANDABLE), found.least_of(STITCHING)
    if expandable is None or stitching is None:
        return ""
    needs = [f"{r.name}: {_needs(r)}" for r in (expandable, stitching)]
    if found.expandable_as_good():
        verdict = (
            f"Expandable segments are as good as stitching in the memory they need, within "
            f"{AS_GOOD:.0%} of the live peak"
        )
    else:
        verdict = "Stitching needs less memory than expandable segments"
    return f"{verdict}. {'; '.join(needs)}."


def _needs(result: AllocatorResult) -> str:
    run = result.smallest
    retries = "1 retry" if run.retries == 1 else f"{run.retries:,} retries"
    return f"{write_bytes(run.capacity or 0)}, {retries}, calls for {write_seconds(run.seconds)}"


def pricing() -> str:
    """Where the unit costs come from."""
    assumed = ", ".join(call for call, cost in PUBLISHED.items() if cost.source.startswith(ASSUMED))
    known = "; ".join(
        f"{call}: {cost.source}"
        for call, cost in PUBLISHED.items()
        if not cost.source.startswith(ASSUMED)
    )
    return (
        f"Creates are calls of {MALLOC} or {CREATE}, releases of {FREE} or {RELEASE}. Costs are "
        "modelled: calls counted, times published ones. Waiting for the device is not in them. "
        f"{known}. Assumed as costly as what they undo: {assumed}.\n"
    )
