"""How a command begins and ends: its application, the names of run files, the exit codes."""

from typing import Any

import typer

RUN_FILES = (".yaml", ".yml")
USAGE, FAILED = 2, 1  # what was asked cannot be done; it was done and is not good


def typer_app(**options: Any) -> typer.Typer:
    """An application without the trimmings that would hide a traceback or edit a user's shell."""
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, **options)
