"""`farspan data`."""

from pathlib import Path
from typing import Annotated

import typer

from farspan.cli.ending import typer_app
from farspan.lazy import load
from farspan.train.config import load_run

app = typer_app()


@app.command("data")
def data_command(
    run: Annotated[Path, typer.Argument(help="Run file (YAML).")],
    sequence: Annotated[int, typer.Option(min=0, help="Which, counted from 0 as it trains.")] = 0,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Of those that are evaluated on.")
    ] = False,
) -> None:
    """Show a run file's sequences: which documents, and which of their tokens are trained."""
    chosen = load_run(run)
    for line in load("farspan.train.setup", "show_data")(chosen, sequence, held_out):
        print(line)
