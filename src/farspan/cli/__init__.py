"""The command line. A command's module is imported when that command is called, so that help and
planning need no torch."""

import os
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from farspan.lazy import load
from farspan.spec import Refused
from farspan.version import VERSION

RUN_FILES = (".yaml", ".yml")
USAGE, FAILED = 2, 1  # exit codes: what was asked cannot be done; it was done and is not good


def typer_app(**options: Any) -> typer.Typer:
    """An application without the trimmings that would hide a traceback or edit a user's shell."""
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, **options)


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """A command by the module that declares it, and the first line of its own help."""

    module: str
    help: str
    app: str = "app"  # its name there


def lazy_group(commands: dict[str, LazyCommand], **options: Any) -> typer.Typer:
    """An application that knows its commands by name and help only, until one is called."""

    class LazyGroup(TyperGroup):
        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            """The called command as its module declares it, and the remaining arguments."""
            name, _, rest = super().resolve_command(ctx, args)
            called = commands[str(name)]
            return name, typer.main.get_command(load(called.module, called.app)), rest

    app = typer_app(cls=LazyGroup, **options)
    for name, command in commands.items():
        app.command(name, help=command.help)(lambda: None)
    return app


COMMANDS = {
    "train": LazyCommand(
        "farspan.cli.train",
        "Train a model; the same command again resumes from the latest checkpoint.",
    ),
    "plan": LazyCommand(
        "farspan.cli.plan",
        "Will it fit, how long is a step, what is the best schedule; exit 1 if it does not fit.",
    ),
    "verify": LazyCommand(
        "farspan.cli.verify",
        "Compare loss and every gradient with plain full-sequence autograd; exit 1 if they differ.",
    ),
    "data": LazyCommand(
        "farspan.cli.train",
        "Show a run file's sequences: which documents, and which of their tokens are trained.",
        app="data_app",
    ),
    "calibrate": LazyCommand(
        "farspan.cli.calibrate",
        "Measure this machine and write the file that `farspan plan` reads.",
    ),
    "memory": LazyCommand(
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
