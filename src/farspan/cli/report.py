"""`farspan report`: a run, or several side by side, as one HTML page. Needs no torch."""

import json
from pathlib import Path
from typing import Annotated

import typer

from farspan.cli import typer_app
from farspan.report.page import write_page
from farspan.report.run import REPORT, read_run, run_page, runs_json

app = typer_app()


@app.command("report")
def report_command(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; also of runs under way.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help=f"The file to write; default {REPORT} in the run folder, of several runs here.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what the page shows as JSON; write no page.")
    ] = False,
) -> None:
    """Write one HTML page of a run, or of several side by side: curves, memory, time, the walk."""
    read = [read_run(folder) for folder in runs]
    if as_json:
        print(json.dumps(runs_json(read)))
        return
    place = output or (runs[0].expanduser() / REPORT if len(runs) == 1 else Path(REPORT))
    write_page(place.expanduser(), run_page(read), "output")
    print(f"report: {place}")
