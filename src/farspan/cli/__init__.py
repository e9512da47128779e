"""The command line. A command's module is imported when that command is called, so that help and
planning need no torch."""

import os
import sys
from typing import Annotated

import typer

from farspan.cli.ending import USAGE
from farspan.cli.group import lazy_group
from farspan.spec import Refused
from farspan.version import VERSION

# Module, and what `farspan --help` says of the command: the first line of its own help.
COMMANDS = {
    "train": (
        "farspan.cli.train",
        "Train; the same command again goes on from the latest checkpoint.",
    ),
    "plan": (
        "farspan.cli.plan",
        "Will it fit, how long is a step, what is the best schedule; exit 1 if it does not fit.",
    ),
    "verify": (
        "farspan.cli.verify",
        "Compare loss and every gradient with plain full-sequence autograd; exit 1 if they differ.",
    ),
    "data": (
        "farspan.cli.data",
        "Show a run file's sequences: which documents, and which of their tokens are trained.",
    ),
    "calibrate": (
        "farspan.cli.calibrate",
        "Measure this machine and write the file that plans for it read.",
    ),
    "memory": (
        "farspan.cli.memory",
        "Trace a step's memory, plan addresses for it, compare allocators on it.",
    ),
}

app = lazy_group(
    COMMANDS,
    help="Train Hugging Face language models on sequences far longer than memory, exactly.",
    no_args_is_help=True,
)


def print_version(wanted: bool) -> None:
    if wanted:
        print(f"farspan {VERSION}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """What stands before the command."""


def main() -> None:
    """Entry point: what is refused is one clear line, never a traceback."""
    # Before torch loads OpenMP: threads that wait without spinning. Beside another process on two
    # cores a step took 3.5 to 4.4 s with this and 5 to 30 s without.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app()
    except Refused as error:
        print(f"farspan: {error}", file=sys.stderr)
        sys.exit(USAGE)
