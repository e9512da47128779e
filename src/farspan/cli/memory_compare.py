"""`farspan memory compare`: one trace through four allocators."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from farspan.cli.ending import typer_app
from farspan.memory.compare.allocators import NAMES, read_settings
from farspan.memory.compare.compare import PUBLISHED, AllocatorComparison, compare, contenders
from farspan.memory.trace import read_trace
from farspan.plan.units import read_bytes
from farspan.report.memory import compare_view, page, picture, remark
from farspan.spec import Refused

app = typer_app()

PICTURES = {".html": page, ".svg": picture}

Traces = Annotated[
    list[Path],
    typer.Argument(help="Files of `farspan memory trace`, or memory snapshots of PyTorch."),
]
Capacity = Annotated[
    str | None, typer.Option(help="One more run, on a device with this memory: 80GB, 80GiB.")
]
Chunk = Annotated[str, typer.Option(help="Chunks of stitching, a row for each.")]
Conf = Annotated[
    str,
    typer.Option(
        help=f"Of PyTorch's allocators, as in PYTORCH_CUDA_ALLOC_CONF: {', '.join(NAMES)}."
    ),
]
Report = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Memory over time as a picture: REPORT.html or .svg."),
]


@app.command("compare")
def compare_command(
    traces: Traces,
    capacity: Capacity = None,
    chunk: Chunk = "2MiB,32MiB",
    alloc_conf: Conf = "",
    output: Report = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers as JSON.")] = False,
) -> None:
    """What four allocators make of the same trace: memory they need, and calls."""
    if output is not None and output.suffix not in PICTURES:
        raise Refused(f"output: expected a name that ends in .html or .svg, got {output}")
    limit = None if capacity is None else read_bytes(capacity, "capacity")
    chunks = [read_bytes(part, "chunk") for part in chunk.split(",")]
    rivals = contenders(chunks, read_settings(alloc_conf))
    comparisons = [compare(read_trace(path), rivals, limit) for path in traces]
    if as_json:
        print(json.dumps(answer_json(comparisons)))
    else:
        Console().print(compare_view(comparisons))
    if output is not None:
        write(output, PICTURES[output.suffix](comparisons))


def answer_json(comparisons: list[AllocatorComparison]) -> dict[str, Any]:
    """Every comparison, and where unit costs come from."""
    return {
        "comparisons": [found.to_json() | {"remark": remark(found)} for found in comparisons],
        "costs": {call: cost.source for call, cost in PUBLISHED.items()},
    }


def write(path: Path, text: str) -> None:
    """Raises Refused naming the file."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Refused(f"{path}: cannot be written: {error.strerror}") from error
