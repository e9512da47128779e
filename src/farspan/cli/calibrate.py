"""`farspan calibrate`: measure the machine at hand."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from farspan.cli import typer_app
from farspan.engine.calibrate import calibrate
from farspan.planner.machines import busy_words, to_json, user_file, write
from farspan.report.tables import machine_view, show
from farspan.spec import UnsupportedError

app = typer_app()


@app.command("calibrate")
def calibrate_command(
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Seconds rather than a minute, and less sure.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help=f"File to write; default: {user_file()}.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the file's content.")] = False,
) -> None:
    """Measure this machine and write the file that `farspan plan` reads."""
    chosen, path = device_of(device), output or user_file()
    check_place(path)
    with Console(stderr=True).status("measuring") as status:
        measured = calibrate(chosen, progress=status.update, quick=quick)
    write(measured, path)
    if (words := busy_words(measured.spread)) is not None:
        print(f"warning: {words}", file=sys.stderr)
    if as_json:
        print(json.dumps(to_json(measured)))
    else:
        show(machine_view(measured))
        print(f"written to {path}")


def device_of(name: str | None) -> torch.device:
    """The device of the command line. Raises UnsupportedError when it is not there."""
    has_gpu = torch.cuda.is_available()
    if name is None:
        return torch.device("cuda" if has_gpu else "cpu")
    if name not in ("cpu", "cuda"):
        raise UnsupportedError(f"device: expected cpu or cuda, got {name!r}")
    if name == "cuda" and not has_gpu:
        raise UnsupportedError("device: no CUDA device can be used here; give cpu")
    return torch.device(name)


def check_place(path: Path) -> None:
    """Make the folder of the file to write, before a minute is spent. Raises UnsupportedError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnsupportedError(f"output: cannot make {path.parent}: {error.strerror}") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UnsupportedError(f"output: {path} cannot be written; name another file")
