"""`farspan memory trace`: what a training step asks its allocator for, without a GPU."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from farspan.cli import typer_app
from farspan.cli.plan import MODELS
from farspan.engine.allocator import record_script
from farspan.engine.trace import Temporaries, Temporary
from farspan.engine.trace_steps import OWN, Checkpointing, Recording, TraceRequest
from farspan.formatting import read_tokens
from farspan.memory.host import GIB
from farspan.memory.trace import Malloc, Trace, write_trace
from farspan.program.strategies import STRATEGIES
from farspan.spec import UnsupportedError

app = typer_app()

NOTHING = "none"

Model = Annotated[
    str | None,
    typer.Option(
        help=f"Folder, config.json, hub name (its configuration only), or a preset: {MODELS}."
    ),
]
Strategy = Annotated[
    str,
    typer.Option(
        help=f"Of plain Hugging Face training: {', '.join(Checkpointing)}. Of farspan's own cells: "
        f"{', '.join(STRATEGIES)}, with {OWN} before it where both have the name."
    ),
]


@app.command("trace")
def trace_command(
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")],
    model: Model = None,
    context: Annotated[str | None, typer.Option(help="Tokens of a sequence: 64K, 1M.")] = None,
    contexts: Annotated[
        str | None, typer.Option(help="Lengths of the steps, one after the other: 64K,48K.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps.")] = None,
    layers: Annotated[int | None, typer.Option(help="Only the first so many.")] = None,
    strategy: Strategy = Checkpointing.PLAIN,
    lora: Annotated[
        int, typer.Option(min=0, max=2**16, help="Rank of adapters; 0 trains all weights.")
    ] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Sequences a step.")] = 1,
    dtype: Annotated[str, typer.Option(help="bf16, fp32 or fp64.")] = "bf16",
    weights: Annotated[
        bool, typer.Option(help="Weights and optimizer states are in the trace too.")
    ] = True,
    temporaries: Annotated[
        str,
        typer.Option(
            help="What CUDA kernels take within themselves: any of "
            f"{','.join(Temporary)}, or {NOTHING}."
        ),
    ] = ",".join(Temporary),
    record: Annotated[
        Path | None,
        typer.Option(help="A Python program to run on this GPU, whose allocations to record."),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Of the program to record, after --.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Write the allocations and releases of a training step; needs no GPU."""
    began = time.monotonic()
    if record is not None:
        if model is not None:
            raise UnsupportedError("record: it records a program, not a model; leave out --model")
        found = record_script(record, arguments or ())
    else:
        if model is None:
            raise UnsupportedError("model: give --model MODEL, or --record PROGRAM")
        if arguments:
            raise UnsupportedError(
                f"arguments: {arguments[0]!r} is for a program; add --record PROGRAM, "
                "or leave it out"
            )
        found = TraceRequest(
            model=model,
            contexts=read_contexts(context, contexts, steps),
            layers=layers,
            strategy=strategy,
            rank=lora,
            batch=batch,
            dtype=dtype,
            recording=Recording(read_temporaries(temporaries), lasting=weights),
        ).trace()
    write_trace(found, output)
    show(summary(found, output, time.monotonic() - began), as_json)


def read_contexts(context: str | None, contexts: str | None, steps: int | None) -> tuple[int, ...]:
    """The length of each step; lengths begin anew where there are more steps than lengths."""
    if (context is None) == (contexts is None):
        raise UnsupportedError(
            "context: give either --context, or --contexts with the length of each step"
        )
    texts = [context or ""] if contexts is None else contexts.split(",")
    lengths = [read_tokens(text.strip(), "context") for text in texts]
    return tuple(lengths[step % len(lengths)] for step in range(steps or len(lengths)))


def read_temporaries(text: str) -> Temporaries:
    """The kinds that are named. Raises UnsupportedError for one that is not known."""
    names = [] if text == NOTHING else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in tuple(Temporary):
            known = ", ".join((*Temporary, NOTHING))
            raise UnsupportedError(f"temporaries: {name!r} is not known; expected any of {known}")
    return Temporaries(frozenset(map(Temporary, names)))


def summary(trace: Trace, output: Path, seconds: float) -> dict[str, Any]:
    """What a person wants to know of a trace."""
    mallocs = [event for event in trace.events if isinstance(event, Malloc)]
    return {
        "trace": str(output),
        "name": trace.name,
        "events": len(trace.events),
        "mallocs": len(mallocs),
        "sizes": len({malloc.size for malloc in mallocs}),
        "live_peak": trace.live_peak(),
        "seconds": round(seconds, 3),
    }


def show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found))
        return
    print(
        f"{found['trace']}: {found['name']}: {found['events']:,} events, {found['mallocs']:,} "
        f"mallocs of {found['sizes']:,} sizes, {found['live_peak'] / GIB:.2f} GiB alive at most "
        f"({found['seconds']:.1f} s)"
    )
